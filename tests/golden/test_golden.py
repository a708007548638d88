"""Golden files: state in every format and version there ever was is read as it always was; ``make.py`` wrote them."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ort_trainer.api import CheckpointState, Module, Optimizer
from ort_trainer.artifacts import trainer_state_dict
from ort_trainer.cli import main as command
from ort_trainer.compat.training_session.flat_state import flat_state_dict, load_flat_state_dict
from ort_trainer.core.sealed import VERSION
from ort_trainer.state import load_checkpoint_file, read_parts, save_checkpoint_file
from ort_trainer.state.training_api import read_checkpoint, to_bytes
from ort_trainer.step.cache import export_cache
from ort_trainer.upstream import read_upstream_checkpoint, upstream_checkpoint_bytes

from ..helpers import assert_same_state
from .make import DATA, FILES, plain
from .trainers import TRAINERS, batch, losses_of_an_export, train

REAL_LEGACY = Path(__file__).parents[1] / "state" / "data" / "legacy_1_16.h5"
PARTS = ("run", "position")


def read(name: str) -> Any:
    """Returns what the owner of a format reads in a file."""
    path = DATA / name
    if name.startswith("trainer"):
        state, user = load_checkpoint_file(path)
        return {"state": state, "user": user, **dict(zip(PARTS, read_parts(path, *PARTS), strict=True))}
    if name.startswith("legacy"):
        return load_checkpoint_file(path)[0]
    if name.startswith("upstream"):
        return read_upstream_checkpoint(path)
    if name.startswith(("api", "artifacts")):
        checkpoint = CheckpointState.load_checkpoint(path)
        values = {key: None if "nominal" in name else found.data for key, found in checkpoint.parameters.items()}
        contents = {"parameters": values, "properties": dict(checkpoint.properties)}
        return contents | ({} if "nominal" in name else {"trainer": trainer_state_dict(path)})
    raise ValueError(name)


def trained_on_a_device(models: str, checkpoint: str) -> Any:
    """Trains with the models of a folder from a checkpoint, and returns the losses and the new weights."""
    state = CheckpointState.load_checkpoint(DATA / checkpoint)
    module = Module(str(DATA / models / "training_model.onnx"), state, str(DATA / models / "eval_model.onnx"))
    optimizer = Optimizer(str(DATA / models / "optimizer_model.onnx"), module)
    losses = []
    for number in range(4, 8):
        losses.append(float(module(*(value.numpy() for value in batch(number)))[0]))
        if number % 3 == 2:
            optimizer.step()
            module.lazy_reset_grad()
    module.eval()
    losses.append(float(module(*(value.numpy() for value in batch(8)))[0]))
    return {"losses": losses, "weights": {name: found.data for name, found in state.parameters.items()}}


def converted(source: str, to: str, like: str | None, folder: Path) -> Any:
    """Returns what is in a file after its conversion on the command line."""
    target = folder / "converted"
    sources = [str(DATA / name) for name in source.split("+")]
    options = [] if like is None else ["--like", str(DATA / like)]
    assert command(["convert", *sources, str(target), "--to", to, *options]) == 0
    if to == "upstream":
        return read_upstream_checkpoint(target)
    if to == "api":
        return {"state": trainer_state_dict(target), "properties": CheckpointState.load_checkpoint(target).properties}
    from safetensors.torch import load_file

    return load_file(target) if to == "weights" else load_checkpoint_file(target)


OURS, NOMINAL = "artifacts-2/checkpoint", "artifacts-2/nominal_checkpoint"
RUN_ON = {  # a trainer that continues from a file
    **{f"trainer-2-{name}.ortckpt": name for name in TRAINERS},
    "trainer-1-adam.ortckpt": "adam",
    "trainer-2-two-processes.ortckpt": "adam",
    OURS: "adam",
}
CONVERTED = [
    *((OURS, to, None) for to in ("trainer", "upstream", "weights", "api")),
    *(("trainer-2-adam.ortckpt", to, OURS) for to in ("api", "upstream")),
    *(("trainer-2-managed.ortckpt", to, None) for to in ("trainer", "weights")),
    ("upstream-2-adamw", "api", None),
    ("upstream-2-adamw", "trainer", None),
    ("upstream-2-sgd", "trainer", None),
    ("legacy-rank-0.h5+legacy-rank-1.h5", "trainer", None),
    ("legacy-lamb.h5", "weights", None),
    ("weights.safetensors", "trainer", None),
]
READ = [name for name in FILES if name.startswith(("trainer", "api", "upstream"))] + [OURS, NOMINAL, "legacy-lamb.h5"]
CHECKS: dict[str, Callable[[Path], Any]] = {
    **{name.replace("/", "-"): lambda _, name=name: read(name) for name in READ},
    "legacy-ranks": lambda _: load_checkpoint_file(DATA / "legacy-rank-0.h5", DATA / "legacy-rank-1.h5")[0],
    "legacy-1.16": lambda _: load_checkpoint_file(REAL_LEGACY)[0],
    "artifacts-2-steps": lambda _: trained_on_a_device("artifacts-2", OURS),
    "artifacts-1-steps": lambda _: trained_on_a_device("artifacts-1", "artifacts-1/checkpoint"),
    **{
        f"{source.replace('/', '-')}-to-{to}": functools.partial(converted, source, to, like)
        for source, to, like in CONVERTED
    },
}


def numbers(name: str, folder: Path) -> Any:
    """Returns what a check finds, in the types of JSON."""
    return plain(CHECKS[name](folder))


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.filterwarnings("ignore")
def test_the_numbers_in_a_file(name: str, tmp_path: Path) -> None:
    found, expected = numbers(name, tmp_path), json.loads((DATA / f"{name}.json").read_text())
    if not name.endswith("steps"):
        assert found == expected
        return
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for key, value in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][key]["values"], value["values"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in FILES if n.startswith(("trainer-2", "trainer-3")) and "fit" not in n])
def test_a_checkpoint_is_written_as_it_was_read(name: str) -> None:
    # Not that of a fit, which stores a tensor once that its state has in several places.
    found, file = read(name), io.BytesIO()
    parts = {part: found[part] for part in PARTS if found[part]}
    save_checkpoint_file(file, found["state"], found["user"], parts=parts)
    assert file.getvalue() == (DATA / name).read_bytes()


def test_other_checkpoints_are_written_as_they_were_read() -> None:
    for name in (OURS, NOMINAL):
        data = (DATA / name).read_bytes()
        state = CheckpointState.load_checkpoint_from_buffer(data)
        assert CheckpointState.save_checkpoint_to_buffer(state, include_optimizer_state=True) == data
    for name in ("upstream-2-adamw", "upstream-2-sgd", "upstream-2-nominal"):
        found = read_upstream_checkpoint(DATA / name)
        assert plain(read_upstream_checkpoint(upstream_checkpoint_bytes(found))) == plain(found)


@pytest.mark.parametrize("name", RUN_ON)
@pytest.mark.filterwarnings("ignore:.* was written by an earlier ort_trainer, without checksums")
def test_a_trainer_continues(name: str) -> None:
    """All state comes back, and the next losses are those of the trainer that wrote the file."""
    trainer = TRAINERS[RUN_ON[name]]()
    if name.startswith("artifacts"):
        expected = trainer_state_dict(DATA / name)
        trainer.load_state_dict(expected)
    else:
        trainer.load_checkpoint(DATA / name)
        expected = load_checkpoint_file(DATA / name)[0]
    trainer.prepare(batch(4))
    found = trainer.state_dict()
    changes = ("trainer_options", "random_states", "lr_scheduler")
    for key in changes if len(expected.get("random_states", ())) == 2 or name.startswith("artifacts") else ():
        found.pop(key, None), expected.pop(key, None)
    if name.startswith("artifacts"):  # PyTorch keeps more of a generator's state than the numbers that it draws
        del found["random"], expected["random"]
    if "two-processes" in name:  # one process gives a window half the weight
        expected["window"]["weight"] /= 2
        expected["gradients"] = {key: value / 2 for key, value in expected["gradients"].items()}
    assert_same_state(found, expected)
    if name == f"trainer-{VERSION}-{RUN_ON[name]}.ortckpt":
        file = io.BytesIO()
        trainer.save_checkpoint(file, load_checkpoint_file(DATA / name)[1])
        assert file.getvalue() == (DATA / name).read_bytes()
    if "two-processes" not in name:
        losses = json.loads((DATA / f"trainer-2-{RUN_ON[name]}.ortckpt.losses.json").read_text())
        assert train(trainer, 4, 5) == pytest.approx(losses, rel=2e-3 if "float16" in name else 1e-5)


def test_a_trainer_writes_the_checkpoint_of_an_export_as_ever(tmp_path: Path) -> None:
    trainer = TRAINERS["adam"]()
    trainer.load_checkpoint(DATA / "trainer-2-adam.ortckpt")
    trainer.prepare(batch(4))
    trainer.export_artifacts(tmp_path)
    for name in (OURS, NOMINAL):
        old = read_checkpoint(DATA / name)
        # The models, and so the identifier of the export, are those of today.
        new = dataclasses.replace(read_checkpoint(tmp_path / Path(name).name), export=old.export)
        assert to_bytes(new) == (DATA / name).read_bytes()


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_the_flat_dict_of_the_older_functions(name: str) -> None:
    with np.load(DATA / f"flat-{name}.npz") as file:
        expected = {key: torch.from_numpy(file[key]) for key in file}
    trainer = TRAINERS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_flat_state_dict(trainer, expected, strict=True)
    trainer.prepare(batch(4))
    assert_same_state(flat_state_dict(trainer, include_optimizer_state=True), expected)


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("*.export")))
def test_an_export_of_another_version_is_replaced_and_never_misread(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its key has the source of its version, so that no other finds it; it does no harm under another's key, either."""
    monkeypatch.setenv("ORT_TRAINER_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, logger="ort_trainer")
    old, expected = (DATA / name).read_bytes(), [0.7515532970428467, 0.7463310360908508, 0.683682918548584]
    assert losses_of_an_export() == pytest.approx(expected, rel=1e-6)
    (path,) = tmp_path.glob("*.export")

    path.write_bytes(old)
    caplog.clear()
    assert losses_of_an_export() == pytest.approx(expected, rel=1e-6)
    assert f"the cached export {path} is damaged, so the model is exported again" in caplog.text
    assert path.read_bytes() != old

    cache = export_cache()
    assert cache is not None
    cache.store(path.stem, old[old.index(b"\n") + 33 :])  # behind the checksum
    stored = path.read_bytes()
    caplog.clear()
    assert losses_of_an_export() == pytest.approx(expected, rel=1e-6)
    read, refused = "loaded the training graph from the cache", "so the model is exported again: this is not an export"
    assert (read in caplog.text) != (refused in caplog.text and path.read_bytes() != stored)
