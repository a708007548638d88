"""Artifacts with frozen weights in 8 and 4 bits train like PyTorch with these weights rounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ort_trainer import ORTTrainer, optim
from ort_trainer.api import CheckpointState, Module
from ort_trainer.artifacts import trainer_state_dict
from ort_trainer.state.training_api import read_checkpoint

from .twins import Artifacts


class Adapted(nn.Module):
    """Frozen layers of all kinds between two that are trained; rows of 40 and of 45 elements fill no blocks of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 40)
        self.adapter = nn.Linear(40, 40)
        self.convolution, self.linear = nn.Conv1d(5, 4, 9), nn.Linear(32, 40)
        self.head = nn.Linear(160, 3)
        for part in (self.embedding, self.convolution, self.linear):
            part.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.convolution(torch.tanh(self.adapter(self.embedding(x))))
        return self.head(torch.relu(self.linear(hidden)).flatten(1))


DESC = {"inputs": [("x", ["n", 5]), ("label", ["n"])], "outputs": [("loss", [], True), ("scores", ["n", 3])]}
FROZEN = ("embedding.weight", "convolution.weight", "linear.weight")


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randint(0, 9, (n, 5), generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in (6, 4, 6, 6, 4)
    ]


@pytest.fixture(scope="module")
def trainer() -> ORTTrainer:
    torch.manual_seed(0)
    made = ORTTrainer(Adapted(), DESC, optim.AdamWConfig(lr=0.01), loss_fn=F.cross_entropy)
    made.prepare(batches()[0])
    return made


def restored(folder: Path, kind: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a weight from the checkpoint, by the description of the format."""
    buffers = read_checkpoint(folder / "checkpoint").buffers
    numbers, scale = buffers[f"{name}.{kind}"], buffers[f"{name}.scale"]
    if kind == "int8":
        return (numbers.reshape(len(numbers), -1) * scale[:, None]).reshape(shape)
    halves = np.stack([numbers & 15, numbers >> 4], -1).reshape(*scale.shape, 32).astype(np.float32) - 8
    return (halves * scale[..., None]).reshape(len(scale), -1)[:, : int(np.prod(shape[1:]))].reshape(shape)


@pytest.mark.parametrize("kind, error", [("int8", 0.02), ("int4", 0.2)])
def test_training_with_rounded_weights(kind: str, error: float, trainer: ORTTrainer, tmp_path: Path) -> None:
    trainer.export_artifacts(tmp_path, quantize_frozen=kind)
    expected = Adapted()
    expected.load_state_dict(trainer.state_dict(pytorch_format=True))
    for name in FROZEN:
        parameter = expected.get_parameter(name)
        rounded = torch.tensor(restored(tmp_path, kind, name, tuple(parameter.shape)))
        assert 0 < (rounded - parameter).norm() / parameter.norm() < error
        parameter.data = rounded
    artifacts = Artifacts(tmp_path)
    state, module = artifacts.state, artifacts.module
    torch_optimizer = torch.optim.AdamW([p for p in expected.parameters() if p.requires_grad], lr=0.01)
    for x, label in batches() * 4:
        torch_optimizer.zero_grad()
        loss = F.cross_entropy(expected(x), label)
        loss.backward()
        torch_optimizer.step()
        np.testing.assert_allclose(artifacts.train((x, label))[0], loss.item(), rtol=1e-4)
        artifacts.update()
    for name, parameter in expected.named_parameters():
        if parameter.requires_grad:
            np.testing.assert_allclose(state.parameters[name].data, parameter.detach().numpy(), rtol=1e-3, atol=1e-5)
    x, label = batches()[0]
    assert module.eval()(x.numpy(), label.numpy())[0] == pytest.approx(F.cross_entropy(expected(x), label).item(), 1e-4)
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["scores"])
    CheckpointState.save_checkpoint(state, tmp_path / "trained", include_optimizer_state=True)
    again = CheckpointState.load_checkpoint(tmp_path / "trained")
    assert dict(again.parameters).keys() == {"adapter.weight", "adapter.bias", "convolution.bias", "linear.bias"} | {
        "head.weight",
        "head.bias",
    }


def test_the_forward_pass_keeps_no_weight_for_the_backward_pass(trainer: ORTTrainer, tmp_path: Path) -> None:
    """A weight that both passes use is computed twice, and not by equal nodes, which ONNX Runtime would merge."""
    trainer.export_artifacts(tmp_path, quantize_frozen="int8")
    graph = onnx.load(tmp_path / "training_model.onnx").graph
    masked = [node for node in graph.node if node.op_type == "BitwiseAnd" and node.input[0] == "linear.weight.int8"]
    assert len({node.input[1] for node in masked}) == len(masked) == 2


def test_a_trainer_takes_back_what_was_trained(trainer: ORTTrainer, tmp_path: Path) -> None:
    trainer.export_artifacts(tmp_path, quantize_frozen="int4")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    state.parameters["head.bias"] = np.full(3, 7, np.float32)
    CheckpointState.save_checkpoint(state, tmp_path / "trained", include_optimizer_state=True)
    torch.manual_seed(1)
    model = Adapted()
    other, before = (
        ORTTrainer(model, DESC, optim.AdamWConfig(lr=0.01), loss_fn=F.cross_entropy),
        model.linear.weight.clone(),
    )
    with pytest.warns(UserWarning):
        other.load_state_dict(trainer_state_dict(tmp_path / "trained"), strict=False)
    other.prepare(batches()[0])
    after = other.state_dict(pytorch_format=True)
    assert torch.equal(after["linear.weight"], before) and torch.equal(after["head.bias"], torch.full((3,), 7.0))


class Awkward(nn.Module):
    """Has frozen weights and buffers that must stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.squared = nn.Parameter(torch.randn(8, 8) / 8, requires_grad=False)
        self.plain = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("mean", torch.zeros(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.copy_(x.detach().mean(0, keepdim=True))
        attention = (self.mask + 1).softmax(-1)
        return self.head(torch.tanh(x @ self.plain @ attention @ (self.squared @ self.squared.T)))


def test_buffers_and_weights_that_are_multiplied_with_themselves_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Awkward()
    desc = {"inputs": [("x", ["n", 8]), ("label", ["n"])], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    x, label = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    trainer.prepare((x, label))
    trainer.export_artifacts(tmp_path, quantize_frozen="int8")
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert {*state.parameters} == {"head.weight", "head.bias", "squared", "mask", "mean"}
    module = Module(tmp_path / "training_model.onnx", state)
    loss = float(module(x.numpy(), label.numpy()))
    assert loss == pytest.approx(F.cross_entropy(model(x), label).item(), rel=0.05)
    np.testing.assert_allclose(state.parameters["mean"].data, x.mean(0, keepdim=True).numpy(), rtol=1e-5)


def test_what_is_refused(trainer: ORTTrainer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of \['int8', 'int4'\], but 'int2'"):
        trainer.export_artifacts(tmp_path, quantize_frozen="int2")
    with pytest.raises(ValueError, match="for the flavor 'ort_trainer' only"):
        trainer.export_artifacts(tmp_path, flavor="onnxruntime-training", quantize_frozen="int8")
    whole = ORTTrainer(nn.Linear(4, 3), {"inputs": [("input", ["n", 4]), ("y", ["n"])], "outputs": DESC["outputs"]},
                       optim.SGDConfig(), loss_fn=F.cross_entropy)  # fmt: skip
    whole.prepare((torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64)))
    with pytest.raises(ValueError, match="needs a frozen float32 weight"):
        whole.export_artifacts(tmp_path, quantize_frozen="int8")
    assert not list(tmp_path.iterdir())
