"""Weights and buffers survive every format that they are saved in, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from ort_trainer import ORTTrainer
from ort_trainer.api import CheckpointState
from ort_trainer.artifacts import trainer_state_dict

from .. import processes
from . import child
from .models import CASES, Case, WithLoss, all_tensors

pytest.importorskip("transformers")

LIBRARY = ("gpt2", "bert")
"""Cases that are models of transformers."""
ELSEWHERE = ("everything", "bfloat16", *LIBRARY)
"""Cases that go through another process."""


def assert_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Compares names, their order, shapes, dtypes and bits."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and ours[name].shape == value.shape, name
        left, right = (tensor.detach().contiguous().reshape(-1) for tensor in (ours[name], value))
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name


@dataclass
class Trained:
    """A trainer after two steps, its model, and copies of all the model's tensors at that point.

    Attributes:
        other: A second trainer that has started. Its weights do not matter: each test scrambles and then loads them.
        other_model: Its model.
    """

    case: Case
    trainer: ORTTrainer
    model: nn.Module
    tensors: dict[str, torch.Tensor]
    other: ORTTrainer
    other_model: nn.Module

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """The tensors that a state dict of PyTorch has."""
        return {name: self.tensors[name] for name in self.model.state_dict()}

    def scrambled(self) -> ORTTrainer:
        """Returns the second trainer with other weights and buffers."""
        with torch.no_grad():
            for value in {
                **dict(self.other_model.named_parameters()),
                **dict(self.other_model.named_buffers()),
            }.values():
                value.logical_not_() if value.dtype == torch.bool else value.add_(1)
        ours = self.other.state_dict(pytorch_format=True)
        assert not any(torch.equal(ours[name], value) for name, value in self.saved.items() if value.numel())
        return self.other

    def check_other(self, with_all: bool = False) -> None:
        """Compares the second trainer and its model with the first; ``with_all`` includes what no state dict has."""
        assert_equal(self.other.state_dict(pytorch_format=True), self.saved)
        found = all_tensors(self.other_model)
        assert_equal(
            found if with_all else {name: found[name] for name in self.saved}, self.tensors if with_all else self.saved
        )


@pytest.fixture(scope="module")
def trained() -> dict[str, Trained]:
    found = {}
    for name, make in CASES.items():
        case = make()
        model = case.model(seed=0)
        trainer = case.trainer(model)
        before = all_tensors(model)
        for _ in range(2):
            trainer.train_step(*case.batch.values())
        after = all_tensors(model)
        assert any(not torch.equal(before[key], after[key]) for key in before)
        # The first way: a PyTorch model that a new trainer is made from.
        other_model = case.model(seed=1)
        other_model.load_state_dict(trainer.state_dict(pytorch_format=True))
        other = case.trainer(other_model)
        other.prepare(case.batch)
        found[name] = Trained(case, trainer, model, after, other, other_model)
        found[name].check_other()
    return found


@pytest.fixture(scope="module")
def elsewhere(trained: dict[str, Trained], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints, and what another process found in them."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name, entry in trained.items():
        entry.trainer.save_checkpoint(folder / f"{name}.ortckpt")
    (ended,) = processes.run([processes.Call(child.main, (folder, ELSEWHERE))], timeout=300)
    assert ended.code == 0, ended.output
    return folder


each = pytest.mark.parametrize("name", CASES)


@each
def test_the_model_itself_and_the_state_dict(trained: dict[str, Trained], name: str) -> None:
    entry = trained[name]
    assert_equal(entry.trainer.state_dict(pytorch_format=True), entry.saved)
    assert_equal(all_tensors(entry.model), entry.tensors)


@each
def test_files_of_pytorch_and_safetensors(trained: dict[str, Trained], name: str, tmp_path: Path) -> None:
    entry = trained[name]
    given = entry.trainer.state_dict(pytorch_format=True)
    torch.save(given, tmp_path / "weights.pt")
    safetensors.torch.save_file(given, tmp_path / "weights")
    loaded = safetensors.torch.load_file(tmp_path / "weights")
    for found in (torch.load(tmp_path / "weights.pt", weights_only=True), {key: loaded[key] for key in given}):
        assert_equal(found, entry.saved)
        entry.scrambled().load_state_dict(found)
        entry.check_other()


@each
def test_the_whole_state_through_torch_save(trained: dict[str, Trained], name: str, tmp_path: Path) -> None:
    """PyTorch loads the nested state dict without executing anything, once its arrays are tensors."""
    entry = trained[name]

    def as_tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: as_tensors(part) for key, part in value.items()}
        return torch.as_tensor(value) if hasattr(value, "__array__") else value

    torch.save(as_tensors(entry.trainer.state_dict()), tmp_path / "state.pt")
    entry.scrambled().load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    entry.check_other(with_all=True)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_checkpoint_in_another_process(trained: dict[str, Trained], elsewhere: Path, name: str) -> None:
    entry = trained[name]
    found = torch.load(elsewhere / f"{name}.found", weights_only=True)
    assert_equal(found["trainer"], entry.saved)
    assert_equal(found["model"], entry.tensors)  # with the buffers that PyTorch's state dict leaves out


@pytest.mark.parametrize("name", LIBRARY)
def test_save_pretrained_and_from_pretrained(trained: dict[str, Trained], elsewhere: Path, name: str) -> None:
    entry = trained[name]
    assert isinstance(entry.model, WithLoss)
    kind: Any = type(entry.model.language_model)
    again = WithLoss(kind.from_pretrained(elsewhere / name))
    assert_equal(again.state_dict(), entry.saved)
    trainer = entry.case.trainer(again)
    trainer.prepare(entry.case.batch)
    assert_equal(trainer.state_dict(pytorch_format=True), entry.saved)
    assert_equal(again.state_dict(), entry.saved)
    trainer.train_step(*entry.case.batch.values())
    assert_equal(trainer.state_dict(pytorch_format=True), again.state_dict())
    tied = again.language_model.get_output_embeddings().weight
    assert tied is again.language_model.get_input_embeddings().weight
    assert not torch.equal(tied, entry.model.language_model.get_output_embeddings().weight)


def test_artifacts_and_back(trained: dict[str, Trained], tmp_path: Path) -> None:
    """The way is the checkpoint of an export, read and written again by the API."""
    entry = trained["everything"]
    entry.trainer.export_artifacts(tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert set(dict(entry.model.named_parameters())) <= set(state.parameters)
    for name in state.parameters:
        assert_equal({name: torch.from_numpy(state.parameters[name].data.copy())}, {name: entry.tensors[name]})
    CheckpointState.save_checkpoint(state, tmp_path / "again", include_optimizer_state=True)
    entry.scrambled().load_state_dict(trainer_state_dict(tmp_path / "again"))
    entry.check_other(with_all=True)


@each
def test_training_goes_on_as_it_would_have(trained: dict[str, Trained], elsewhere: Path, name: str) -> None:
    """This is the last test of the module, because it takes a step."""
    entry = trained[name]
    entry.scrambled().load_checkpoint(elsewhere / f"{name}.ortckpt")
    entry.check_other(with_all=True)
    steps = [trainer.train_step(*entry.case.batch.values()) for trainer in (entry.other, entry.trainer)]
    assert torch.equal(steps[0][0], steps[1][0])
    assert_equal(all_tensors(entry.other_model), all_tensors(entry.model))
