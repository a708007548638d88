"""ort-trainer convert: everything that the target kind can store is preserved, and warnings name the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from ort_trainer import ORTTrainer, read_user_dict
from ort_trainer.api import CheckpointState
from ort_trainer.cli.describe import check, describe
from ort_trainer.state import load_checkpoint_file, read_parts, save_checkpoint_file
from ort_trainer.state.state import State
from ort_trainer.state.training_api import read_checkpoint, write_checkpoint
from ort_trainer.upstream import read_upstream_checkpoint

from ..api.artifacts import as_version_2
from ..helpers import MLP, assert_same_state, mlp_batches, mlp_trainer
from ..state.test_legacy import REAL as LEGACY
from .conftest import USER, Run


def assert_same_checkpoint(ours: State, theirs: State) -> None:
    for group in ("parameters", "buffers", "optimizer", "gradients", "random"):
        assert_same_state(getattr(ours, group), getattr(theirs, group))
    for name in ("export", "trainable", "learning_rates", "optimization_step", "schedule"):
        assert getattr(ours, name) == getattr(theirs, name), name


def loaded(path: Path, strict: bool = True) -> ORTTrainer:
    """Returns a trainer with different initial weights after loading a checkpoint."""
    torch.manual_seed(7)
    trainer = mlp_trainer()
    trainer.load_checkpoint(path, strict=strict)
    return trainer


def test_version_1_gets_checksums(files: Path, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "new"
    code, out, err = run("convert", files / "old.ortckpt", target)
    assert code == 0 and out == [f"{target}: checkpoint of ORTTrainer"] and "without checksums" in err[0]
    assert check(target) == ("ok", [])
    state, user = load_checkpoint_file(target)
    expected, expected_user = load_checkpoint_file(files / "run.ortckpt")
    assert_same_state(state, expected)
    assert user == expected_user == USER


def test_what_a_manager_writes_beside_the_state_is_kept(files: Path, run: Run, tmp_path: Path) -> None:
    state, user = load_checkpoint_file(files / "run.ortckpt")
    parts = {"run": {"metrics": {"loss": 0.25}}, "position": {"places": [{"state": np.arange(4)}]}}
    save_checkpoint_file(tmp_path / "managed", state, user, parts=parts)
    assert describe(tmp_path / "managed")["metrics"] == {"loss": 0.25}
    assert run("convert", tmp_path / "managed", tmp_path / "again")[0] == 0
    run_part, position = read_parts(tmp_path / "again", "run", "position")
    assert run_part == parts["run"]
    assert_same_state(position["places"][0], parts["position"]["places"][0])


def test_legacy(run: Run, tmp_path: Path) -> None:
    code, _, err = run("convert", LEGACY, tmp_path / "new")
    assert code == 0, err
    assert "is a pickle, which could execute anything, so it is left out" in err[0]
    with pytest.warns(UserWarning, match="is a pickle"):
        expected, _ = load_checkpoint_file(LEGACY)
    assert_same_state(load_checkpoint_file(tmp_path / "new")[0], expected)


def test_weights_for_pytorch_and_back(files: Path, run: Run, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    for source in (files / "run.ortckpt", files / "artifacts" / "checkpoint", files / "upstream"):
        assert run("convert", "--force", source, weights)[0] == 0
        model = MLP()
        model.load_state_dict(safetensors.torch.load_file(weights))
        expected = load_checkpoint_file(files / "run.ortckpt")[0]["model"]["full_precision"]
        assert_same_state({name: value.numpy() for name, value in model.state_dict().items()}, expected)
    with safetensors.safe_open(weights, framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"
    assert run("convert", weights, tmp_path / "back")[0] == 0
    with pytest.warns(UserWarning, match="Missing key: optimizer"):
        trainer = loaded(tmp_path / "back")
    trainer.prepare(dict(zip(("x", "label"), mlp_batches(1)[0], strict=True)))
    assert_same_state(
        {name: value.numpy() for name, value in trainer.state_dict(pytorch_format=True).items()}, expected
    )


def test_16_bit_weights_keep_their_bits(run: Run, tmp_path: Path) -> None:
    given = {"a": torch.randn(3, 2).bfloat16(), "b": torch.randn(2).half(), "c": torch.tensor(3.5), "d": torch.zeros(0)}
    safetensors.torch.save_file(given, tmp_path / "given")
    assert run("convert", tmp_path / "given", tmp_path / "ours")[0] == 0
    assert run("convert", tmp_path / "ours", tmp_path / "again", "--to", "weights")[0] == 0
    again = safetensors.torch.load_file(tmp_path / "again")
    assert again.keys() == given.keys()
    for name, value in given.items():
        assert again[name].dtype == value.dtype and torch.equal(again[name], value)


def test_a_trainers_checkpoint_for_a_device(files: Path, run: Run, tmp_path: Path) -> None:
    """Converting the trainer's checkpoint gives the same result as its own export at this step."""
    like = files / "artifacts" / "checkpoint"
    code, _, err = run("convert", files / "run.ortckpt", tmp_path / "api", "--to", "api", "--like", like)
    assert code == 0 and "['seen']" in err[0]
    assert_same_checkpoint(read_checkpoint(tmp_path / "api"), read_checkpoint(like))
    properties = CheckpointState.load_checkpoint(tmp_path / "api").properties
    assert {name: properties[name] for name in ("epoch", "name", "best")} == {"epoch": 3, "name": "first", "best": 0.5}
    code, _, err = run("convert", files / "run.ortckpt", tmp_path / "theirs", "--to", "upstream", "--like", like)
    assert code == 0 and any("can't store the state of the random numbers" in line for line in err)
    ours, theirs = read_upstream_checkpoint(tmp_path / "theirs"), read_upstream_checkpoint(files / "upstream")
    assert ours.groups["group0"].step == theirs.groups["group0"].step == 3
    assert_same_state(ours.groups["group0"].moments, theirs.groups["group0"].moments)
    assert_same_state(
        {n: p.data for n, p in ours.parameters.items()}, {n: p.data for n, p in theirs.parameters.items()}
    )


def test_from_a_device_to_the_trainer(files: Path, run: Run, tmp_path: Path) -> None:
    """The trainer continues bit for bit where the device stopped."""
    expected = loaded(files / "run.ortckpt")
    losses = [expected.train_step(*batch)[0] for batch in mlp_batches(2, seed=5)]
    for source, says in ((files / "artifacts" / "checkpoint", True), (files / "upstream", False)):
        target = tmp_path / source.name
        code, _, err = run("convert", source, target, "--to", "trainer")
        assert code == 0 and (not err if says else "strict=False" in err[0])  # the optimizer is not recorded
        trainer = loaded(target, strict=says)
        assert [trainer.train_step(*batch)[0] for batch in mlp_batches(2, seed=5)] == losses


def test_upstream_and_back(files: Path, run: Run, tmp_path: Path) -> None:
    like = files / "artifacts" / "checkpoint"
    code, _, err = run("convert", like, tmp_path / "theirs")
    assert code == 0 and "can't store the state of the random numbers" in err[0]
    assert run("convert", tmp_path / "theirs", tmp_path / "ours", "--like", like)[0] == 0
    ours, expected = read_checkpoint(tmp_path / "ours"), read_checkpoint(like)
    ours.random = expected.random
    assert_same_checkpoint(ours, expected)
    assert run("convert", tmp_path / "ours", tmp_path / "weights", "--to", "upstream", "--no-optimizer-state")[0] == 0
    assert not read_upstream_checkpoint(tmp_path / "weights").groups


def test_nothing_is_overwritten_unless_asked(files: Path, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    code, _, err = run("convert", files / "run.ortckpt", target)
    assert code == 2 and "already exists: choose another target, or give --force" in err[0]
    assert target.read_bytes() == b"mine"
    assert run("convert", "--force", files / "run.ortckpt", target)[0] == 0
    assert read_user_dict(target) == USER


def test_another_optimizer_is_left_out_and_named(files: Path, run: Run, tmp_path: Path) -> None:
    like = read_checkpoint(files / "artifacts" / "checkpoint")
    like.optimizer = {"fc1.weight.Momentum": like.parameters["fc1.weight"]}
    write_checkpoint(tmp_path / "like", like)
    code, _, err = run("convert", files / "run.ortckpt", tmp_path / "new", "--to", "api", "--like", tmp_path / "like")
    assert code == 0 and any("it has no 'fc1.weight.Momentum'" in line for line in err)
    found = read_checkpoint(tmp_path / "new")
    assert found.optimizer is None and found.optimization_step == 0


def test_what_can_not_be_converted(files: Path, run: Run, tmp_path: Path) -> None:
    model, ours, theirs = files / "artifacts" / "training_model.onnx", files / "run.ortckpt", files / "upstream"
    target = tmp_path / "target"
    for arguments, code, message in (
        ([model, target], 1, "of kind 'ONNX model', which can't be converted"),
        ([ours, target, "--to", "api"], 1, "with --like"),
        ([ours, target, "--like", ours], 1, "--like has no effect"),
        ([ours, theirs, target], 1, "several sources are allowed only"),
        ([theirs, target, "--to", "upstream"], 1, "already"),
        ([files, target], 1, f"is a folder of checkpoints: convert one of them, such as {str(ours)!r}"),
        ([tmp_path / "nothing", target], 1, "does not exist"),
        ([ours, tmp_path / "no" / "target"], 1, "does not exist"),
        ([ours], 2, "required"),
        ([ours, target, "--to", "pickle"], 2, "unknown 'pickle'"),
    ):
        found, out, err = run("convert", *arguments)
        assert found == code and not out and message in err[-1], (arguments, err)
    assert not target.exists()


def test_weights_of_a_device_alone_begin_anew(files: Path, run: Run, tmp_path: Path) -> None:
    """The file has no optimizer state, but everything that a strict load requires."""
    trained = read_checkpoint(files / "artifacts" / "checkpoint")
    trained.gradients, trained.micro_batches = {"fc1.bias": trained.parameters["fc1.bias"]}, 1
    write_checkpoint(tmp_path / "trained", trained)
    (tmp_path / "older").write_bytes(as_version_2((tmp_path / "trained").read_bytes()))
    assert run("convert", tmp_path / "trained", tmp_path / "api", "--to", "api", "--no-optimizer-state")[0] == 0
    assert_same_checkpoint(read_checkpoint(tmp_path / "api"), trained.without_optimizer())
    for source, says in ((tmp_path / "trained", True), (tmp_path / "older", False), (files / "upstream", False)):
        arguments = ("--to", "trainer", "--no-optimizer-state", "--force")
        code, _, err = run("convert", source, tmp_path / "new", *arguments)
        assert code == 0 and any("(persistent=False)" in line for line in err) != says, err
        assert not load_checkpoint_file(tmp_path / "new")[0].keys() - {"model", "trainer_options", "random"}
        with pytest.warns(UserWarning, match="Missing key: optimizer"):
            trainer = loaded(tmp_path / "new")
        trainer.prepare(dict(zip(("x", "label"), mlp_batches(1)[0], strict=True)))
        assert_same_state(trainer.state_dict()["model"]["full_precision"], {**trained.parameters, **trained.buffers})
        assert trainer.train_step_info.optimization_step == 0
