"""A refused checkpoint leaves the trainer unchanged, bit for bit; one message lists everything that does not fit."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ort_trainer import CheckpointError, CheckpointManager, ORTTrainer, amp, optim
from ort_trainer.state import load_checkpoint_file, save_checkpoint_file
from ort_trainer.state.file import read_parts

from ..helpers import MLP, mlp_batches, mlp_trainer
from .damage import HEADERS, changed, truncated, with_header
from .readers import same

# What a trainer's load_checkpoint raises for a file: no TypeError, because no argument is wrong.
REFUSALS = (CheckpointError, RuntimeError, ValueError)


@pytest.fixture(scope="module")
def trainer() -> Iterator[ORTTrainer]:
    """A trainer in the middle of a window, with a schedule and a loss scaler."""
    options = {
        "mixed_precision": {"enabled": True, "loss_scaler": amp.DynamicLossScaler()},
        "batch": {"gradient_accumulation_steps": 3},
        "lr_scheduler": optim.LinearWarmupLRScheduler(20, 0.1),
        "utils": {"grad_norm_clip": False},
    }
    made = mlp_trainer(options)
    for batch in mlp_batches(5):
        made.train_step(*batch)
    yield made


def bytes_of(state: dict[str, Any], user: dict[str, Any] | None = None) -> bytes:
    file = io.BytesIO()
    save_checkpoint_file(file, state, user or {})
    return file.getvalue()


def loads(trainer: ORTTrainer, data: bytes) -> bool:
    """Returns whether a trainer accepts a checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.load_checkpoint(io.BytesIO(data))
        except REFUSALS:
            return False
    return True


def test_damaged_files_leave_it_as_it_was(trainer: ORTTrainer) -> None:
    before = trainer.state_dict()
    whole = bytes_of(before, {"epoch": 3})
    headers = [with_header(whole, change) for change in HEADERS.values()]
    cases = [*truncated(whole), *changed(whole, 300), *headers]
    assert len(cases) > 430
    assert not any(loads(trainer, data) for data in cases)
    assert same(trainer.state_dict(), before)
    assert loads(trainer, whole)


@pytest.mark.parametrize("position", [625, 10**8])
def test_numpys_position_is_no_way_into_memory(position: int, tmp_path: Path) -> None:
    manager, run = CheckpointManager(tmp_path), mlp_trainer()
    file = manager.save(run)
    state, user = load_checkpoint_file(file)
    about, place = read_parts(file, "run", "position")
    place["places"][0]["random"]["numpy"]["state"]["pos"] = position
    save_checkpoint_file(file, state, user, True, {"run": about, "position": place})
    with pytest.raises(CheckpointError, match=f"'pos' must be at most 624, but it is {position}"):
        CheckpointManager(tmp_path).resume(run)


class Other(nn.Module):
    """A model with similar names, but another width, an extra layer and a missing one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 4)
        self.fc3 = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(torch.tanh(self.fc1(x)))


def test_a_mismatch_is_listed_whole(trainer: ORTTrainer) -> None:
    """One message lists missing, unexpected and mis-shaped keys, as PyTorch's load_state_dict does."""
    other = mlp_trainer(model=Other())
    other.train_step(*mlp_batches(1)[0])
    before = trainer.state_dict()
    where = r"state_dict\[model\]\[full_precision\]"
    with pytest.raises(RuntimeError) as caught:
        trainer.load_checkpoint(io.BytesIO(bytes_of(other.state_dict())))
    for part in (
        rf"Missing keys: \['fc2.weight', 'fc2.bias'\] in {where}",
        rf"Unexpected keys: \['fc3.weight', 'fc3.bias'\] in {where}",
        r"Unexpected keys: \['fc3.weight', 'fc3.bias'\] in state_dict\[optimizer\]",
        rf"Mis-shaped keys: {where}\[fc1.weight\] has shape \[4, 8\], but the trainer has \[16, 8\]",
        rf"and {where}\[fc1.bias\] has shape \[4\], but the trainer has \[16\]",
        r"\[optimizer\]\[fc1.bias\]\[Moment_2\] has shape \[4\]",
    ):
        assert caught.match(part)
    assert "strict=False" not in str(caught.value), "strict=False would not help"
    assert same(trainer.state_dict(), before)
    # PyTorch names the same keys for the weights alone.
    weights = other.state_dict(pytorch_format=True)
    with pytest.raises(RuntimeError) as theirs:
        MLP().load_state_dict(weights)
    with pytest.raises(RuntimeError) as ours:
        trainer.load_state_dict(weights)
    for key in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "fc3.weight", "fc3.bias"):
        assert key in str(theirs.value) and key in str(ours.value)
    with pytest.raises(ValueError, match=r"Mis-shaped keys: .*fc1.weight.* and .*fc1.bias"):
        trainer.load_state_dict(weights, strict=False)
    of_integers = {**trainer.state_dict(pytorch_format=True), "fc2.bias": torch.ones(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"Keys of another dtype: state_dict\[fc2.bias\] has dtype torch.int64"):
        trainer.load_state_dict(of_integers)
    assert same(trainer.state_dict(), before)


def test_what_is_of_a_wrong_kind_in_a_file_is_an_error_of_the_file(trainer: ORTTrainer) -> None:
    state = trainer.state_dict()
    state["model"] = {"full_precision": 7}
    with pytest.raises(CheckpointError, match="holds a value that is invalid in a checkpoint: .*must be a dict"):
        trainer.load_checkpoint(io.BytesIO(bytes_of(state)))
    with pytest.raises(TypeError, match="path must be a path or a binary file"):
        trainer.load_checkpoint(3)
    with pytest.raises(TypeError, match="must be a dict"):
        trainer.load_state_dict(state)


def test_no_json_of_python_is_lost(trainer: ORTTrainer) -> None:
    """The refusals above are due to the values: the same file with valid ones is read."""
    user = {"deep": json.loads("[" * 50 + "]" * 50), "nan": math.nan, "large": 1 << 70}
    _, found = load_checkpoint_file(io.BytesIO(bytes_of(trainer.state_dict(), user)))
    assert same(found, user)
