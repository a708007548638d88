"""The table of parts has all parts that are written, and attacks on some of them end as they should."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ort_trainer import CheckpointManager

from ..helpers import mlp_batches, mlp_trainer
from .draws import attack
from .parts import Part, parts_of, table
from .readers import readers

EACH = 4


def test_the_table_has_all_parts_that_are_written_and_no_others() -> None:
    written = {id(part) for n, r in readers().items() for file in r.sound for part in parts_of(n, file).values()}
    outlines = [(path, part) for kind, outline in table().items() for path, part in outline.all(kind)]
    assert [path for path, part in outlines if id(part) not in written] == []


def test_attacks_of_this_commit(seed: int, tmp_path: Path) -> None:
    """A few on each reader, and one on each kind of part of the checkpoints that a training reads."""
    attacks: list[tuple[str, tuple[Any, ...] | None]] = []
    for name, reader in readers().items():
        attacks += [(name, None)] * (EACH if name != "legacy" else 1)
        if name.startswith("checkpoint of"):
            attacks += [(name, path) for path in one_each(parts_of(name, reader.sound[0]), seed)]
    failures, outcomes = [], []
    for number, (name, path) in enumerate(attacks):
        told, outcome = attack(name, f"{seed}.{number}", tmp_path, path)
        outcomes.append(outcome)
        if outcome not in ("read", "refused"):
            failures.append(f"attack({name!r}, '{seed}.{number}', folder, {path}): {told}: {outcome}")
    assert not failures
    assert len(outcomes) > 200 and outcomes.count("refused") > len(outcomes) // 4


def one_each(parts: Mapping[tuple[Any, ...], Part], seed: int) -> list[tuple[Any, ...]]:
    """Returns a drawn path of each kind of part."""
    paths = random.Random(seed).sample(list(parts), len(parts))
    return list({id(parts[path]): path for path in paths}.values())


def test_every_file_of_a_folder_has_a_reader(tmp_path: Path) -> None:
    """What writers leave in folders; ``latest`` is for people and scripts."""
    trainer, data = mlp_trainer(), mlp_batches(2)
    CheckpointManager(tmp_path / "run").save(trainer)
    trainer.fit(data, data, 1, checkpoints=tmp_path / "fit", progress=False)
    trainer.export_artifacts(tmp_path / "artifacts")
    written = {folder.name: {path.name for path in folder.iterdir()} for folder in tmp_path.iterdir()}
    assert written == {
        "run": {"latest", "step-00000000.ortckpt"},
        "fit": {"last.ortckpt", "best.ortckpt"},
        "artifacts": {
            *("checkpoint", "nominal_checkpoint"),
            *("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"),
        },
    }
