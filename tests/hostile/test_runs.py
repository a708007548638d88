"""What a checkpoint says of a run, damaged in one place: refused before anything is restored, or harmless."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ort_trainer import CheckpointError, CheckpointManager, ORTTrainer, Position, read_user_dict
from ort_trainer.fit import EarlyStopping
from ort_trainer.state import load_checkpoint_file, save_checkpoint_file
from ort_trainer.state.file import read_parts

from ..helpers import mlp_batches, mlp_trainer
from .readers import loader, same, state_of_all

WRONG: tuple[Any, ...] = (
    *(None, True, -1, 625, 10**8, 1 << 70, 10**400, 0.5, math.nan, math.inf, "text", [], {}, [[1]]),
    *(np.zeros(0), np.zeros((1, 1), np.float32), torch.zeros(3, dtype=torch.uint8)),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the ways to all values in nested dicts and short lists."""
    yield path
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys if len(keys) <= 16 else ():
        yield from places(value[key], (*path, key))


def put(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    """Returns a copy with another value at a place."""
    if not path:
        return wrong
    if isinstance(value, dict):
        return {key: put(part, path[1:], wrong) if key == path[0] else part for key, part in value.items()}
    return [put(part, path[1:], wrong) if at == path[0] else part for at, part in enumerate(value)]


def attacks(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield from ((path, wrong) for path in places(value) if path for wrong in WRONG)


def refused(trainer: ORTTrainer, load: Callable[[], object]) -> bool:
    """Returns whether an error says that a file can't be used; then nothing has changed."""
    before = state_of_all(trainer)
    try:
        load()
    except (CheckpointError, ValueError) as error:  # a ValueError: loader or epochs do not fit
        assert isinstance(error, CheckpointError) or "the loader has" in str(error) or "epochs" in str(error), error
        assert same(state_of_all(trainer), before)
        return True
    return False


@pytest.mark.filterwarnings("ignore:skipping the checkpoint")
def test_parts_of_a_manager(tmp_path: Path) -> None:
    manager, trainer, position = CheckpointManager(tmp_path / "run"), mlp_trainer(), Position(loader())
    for _ in position.epochs(1):
        for batch in position.batches():
            trainer.train_step(*batch)
            if position.batch == 2:
                file = manager.save(trainer, position, {"eval": 1.0})
                break
        break
    state, user = load_checkpoint_file(file)
    run, place = read_parts(file, "run", "position")
    counts = {True: 0, False: 0}
    (tmp_path / "bad").mkdir()
    bad = tmp_path / "bad" / file.name
    for name, value in (("run", run), ("position", place)):
        for path, wrong in attacks(value):
            try:
                save_checkpoint_file(
                    bad, state, user, True, {"run": run, "position": place, name: put(value, path, wrong)}
                )
            except (TypeError, ValueError):  # no file can have it
                continue
            other = CheckpointManager(tmp_path / "bad")
            here = Position(loader())
            counts[refused(trainer, lambda other=other, here=here: other.resume(trainer, here))] += 1
            assert other.latest is None or other.latest == bad
    assert counts[True] > 200 and counts[False] > 20


def test_the_part_of_a_fit(tmp_path: Path) -> None:
    trainer = mlp_trainer()
    trainer.fit(loader(), mlp_batches(1), 1, checkpoints=tmp_path, callbacks=[EarlyStopping()], progress=False)
    state, _ = load_checkpoint_file(tmp_path / "last.ortckpt")
    user = read_user_dict(tmp_path / "last.ortckpt")
    (tmp_path / "bad").mkdir()
    bad, count = tmp_path / "bad" / "last.ortckpt", 0
    for path, wrong in attacks(user["fit"]):
        try:
            save_checkpoint_file(bad, state, {"fit": put(user["fit"], path, wrong)}, True)
        except (TypeError, ValueError):
            continue

        data = loader()

        def resume(data: DataLoader[Any] = data) -> object:
            return trainer.fit(
                data,
                mlp_batches(1),
                1,
                checkpoints=tmp_path / "bad",
                resume=True,
                callbacks=[EarlyStopping()],
                progress=False,
            )

        count += refused(trainer, resume)
    assert count > 150


@pytest.mark.parametrize("position", [625, 700, 10**8])
def test_numpys_position_is_no_way_into_memory(position: int, tmp_path: Path) -> None:
    manager, trainer = CheckpointManager(tmp_path), mlp_trainer()
    trainer.train_step(*mlp_batches(1)[0])
    file = manager.save(trainer)
    state, user = load_checkpoint_file(file)
    run, place = read_parts(file, "run", "position")
    place["places"][0]["random"]["numpy"]["state"]["pos"] = position
    save_checkpoint_file(file, state, user, True, {"run": run, "position": place})
    with pytest.raises(CheckpointError, match=f"'pos' must be at most 624, but it is {position}"):
        CheckpointManager(tmp_path).resume(trainer)
