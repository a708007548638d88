"""Steps whose loops are compiled: the same numbers as PyTorch's, also from the cache, where no compiler is needed."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.core.errors import ExportError

from ..fidelity.layer_cases import Apply
from ..helpers import MLP, Reference, assert_close, assert_same_weights, mlp_trainer, train_both

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


class Everything(nn.Module):
    """Has an operator of each kind: fused, left whole, kept apart (LSTM); tied weights, buffers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True)
        self.both, self.norm, self.head = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 20)
        self.convolution, self.groups = nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.batch_norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embedding(tokens))
        query, key, value = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.both(x).split(8, 2))
        x = x + self.dropout(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        y = self.batch_norm(F.silu(self.groups(self.convolution(x.transpose(1, 2)))))
        y = F.max_pool1d(y, 3, 1, 1) * torch.sigmoid(y[:, [1, 0, 3, 2, 5, 4, 7, 6]])
        logits: torch.Tensor = self.head(self.norm(x + self.dropout(F.gelu(y.transpose(1, 2)))))
        return logits.transpose(1, 2)


def batch(size: int) -> torch.Tensor:
    return torch.randint(0, 20, (size, 6), generator=torch.Generator().manual_seed(size))


def trainer(model: nn.Module, desc: Any = None, loss_fn: Any = F.cross_entropy, lr: float = 0.1, **utils: Any) -> Any:
    shape = ["batch", 6]
    tokens = {"inputs": [("tokens", shape), ("label", shape)], "outputs": [("loss", [], True)]}
    options = ORTTrainerOptions({"utils": {"kernels": "compiled", "grad_norm_clip": False, **utils}})
    return ORTTrainer(model, desc or tokens, optim.SGDConfig(lr=lr), loss_fn=loss_fn, options=options)


@needs_compiler
def test_training_equals_pytorchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 20 steps with PyTorch's own masks, for batches that differ; then again from the cache, without compiler."""
    monkeypatch.setenv("CI", "true")  # which has a meaning to Inductor
    monkeypatch.setenv("ORT_TRAINER_CACHE", str(tmp_path))
    torch.manual_seed(1)
    model = Everything()
    expected, batches = Reference(model, lr=0.1), [(batch(size), batch(size)) for size in [4, 3, 7, 2] * 5]
    torch.manual_seed(5)
    losses = [expected.step(*each) for each in batches]
    for attempt in range(2):
        torch.manual_seed(5)
        ours = trainer(copy.deepcopy(model), random_numbers="pytorch_global")
        for each, loss in zip(batches, losses, strict=True):
            assert_close(ours.train_step(*each), loss, 1e-4, f"loss, {attempt}")
        assert_same_weights(ours, expected.model, 1e-4)
        monkeypatch.setenv("CXX", "no-such-compiler")


class Transposed(nn.Module):
    """Normalizes what a loop writes; Inductor would choose a memory order that the kernel does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(20, 4), nn.GroupNorm(2, 4), nn.Linear(4, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        h = (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 0.2)
        logits: torch.Tensor = self.head(self.norm(h.transpose(1, 2)).transpose(1, 2))
        return logits.transpose(1, 2)


@needs_compiler
def test_fast_masks_are_those_of_programs() -> None:
    found = []
    for kernels in ("compiled", "pytorch"):
        torch.manual_seed(2)
        ours = mlp_trainer({"utils": {"kernels": kernels}}, model=MLP(dropout=0.25))
        torch.manual_seed(3)
        x, label = torch.randn(6, 8), torch.tensor([0, 1, 2, 0, 1, 2])
        found.append(torch.stack([ours.train_step(x, label)[0] for _ in range(4)]))
    assert_close(found[0], found[1], 1e-6, "losses")


class Places(nn.Module):
    """Reads elements of what it has computed at places that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        large = (image * self.factor).repeat_interleave(2, 2).repeat_interleave(2, 3).tanh()
        rows, columns = (torch.arange(size) * step for size, step in ((5, 4.25), (9, 3.875)))
        part = large[:, :, rows.long()][:, :, :, columns.long()]
        return (part * part.sin() + part.flip(3)).mean((1, 2, 3))


class Areas(nn.Module):
    """Pools and resizes, for which Inductor has no loops unless it knows the size of the image.

    The last window is larger than any image: a loop would go through all of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        twice = F.interpolate((image * self.factor).sin(), scale_factor=2, mode="area").tanh()
        half_more = F.interpolate(
            F.interpolate(image * self.factor, scale_factor=1.5), twice.shape[2:], mode="bilinear"
        )
        return F.avg_pool2d(twice * half_more.cos(), 20_000, ceil_mode=True).mean((1, 2, 3))


def image(count: int, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 4, height, 16), torch.ones(count)


IMAGES = {"inputs": [("image", ["n", 4, "height", 16]), ("label", ["n"])], "outputs": [("loss", [], True)]}
ONE_SIZE = {"inputs": [("image", [4, 4, 9, 16]), ("label", [4])], "outputs": [("loss", [], True)]}
# Model, description, loss, rate, sizes of the batches, what makes one of its size.
CASES: dict[str, tuple[type[nn.Module], Any, Any, float, list[tuple[int, ...]], Any]] = {
    "a kernel that ignores strides gets those of the graph": (
        *(Transposed, None, F.cross_entropy, 0.1),
        *([(4,), (3,)], lambda size: (batch(size), batch(size))),
    ),
    "elements at computed places": (Places, ONE_SIZE, F.mse_loss, 0.5, [(4, 9)] * 3, image),
    "pooling from sizes that change": (Areas, IMAGES, F.mse_loss, 0.5, [(4, 9), (3, 7), (4, 9)], image),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_pytorchs(name: str) -> None:
    make, desc, loss_fn, rate, sizes, draw = CASES[name]
    torch.manual_seed(1)
    model = make()
    reference = Reference(model, loss_fn=loss_fn, lr=rate)
    ours = trainer(model, desc, loss_fn, rate)
    train_both(ours, reference, [draw(*size) for size in sizes], 1e-4)
    assert "on compiled loops and PyTorch's kernels" in repr(ours)


@needs_compiler
def test_a_module_is_compiled() -> None:
    """Its products are large enough for oneDNN, which the loops call with weights that change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300, bias=False), nn.Tanh())
    check_module(model, [torch.randn(size, 300) for size in (128, 6, 1)], lambda y: y.square().mean())


def check_module(model: nn.Module, inputs: list[torch.Tensor], loss: Any) -> None:
    """Compares the gradients of an ``ORTModule`` with the module's own, added over the inputs."""
    expected, ours = copy.deepcopy(model), ORTModule(model, ORTTrainerOptions({"utils": {"kernels": "compiled"}}))
    for x in inputs:
        loss(ours(x)).backward()
        loss(expected(x)).backward()
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad, 1e-5, "gradient")


class Layer(nn.Sequential):
    """A layer with a residual connection, and results that are saved for the backward pass."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


@needs_compiler
def test_equal_layers_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In several processes, none of which reads headers that others may have compiled."""
    monkeypatch.setattr("torch._inductor.codecache._HEADER_DIR", str(tmp_path / "anyone's"))
    monkeypatch.setattr("ort_trainer.kernels.loops.divide._WORTH_A_PROGRAM", 13)  # two layers, forward
    model = Apply(nn.ModuleList([Layer(), Layer(), Layer()]), lambda own, x: own[2](own[1](own[0](x))))
    reference, ours = Reference(model, loss_fn=F.mse_loss, lr=0.1), trainer(model, "auto", F.mse_loss)
    train_both(ours, reference, [(torch.randn(size, 8), torch.randn(size, 8)) for size in (4, 3, 7, 2)])
    programs = ours._loop.executor.graphs(True)[0].programs
    assert (len(programs.calls), len(programs.programs)) == (4, 3)  # the first layer reads the batch
    assert not (tmp_path / "anyone's").exists()


@needs_compiler
def test_a_convolution_over_sizes_that_change(caplog: pytest.LogCaptureFixture) -> None:
    layers = nn.ModuleList([nn.Embedding(11, 4), nn.Conv1d(4, 4, 3, groups=2)])
    model = Apply(layers, lambda own, tokens: own[1](own[0](tokens).transpose(1, 2)))
    check_module(model, [torch.randint(11, size) for size in ((2, 8), (3, 6))], lambda y: y.sin().mean())
    assert "exported again" not in caplog.text


def test_without_a_compiler_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_TRAINER_CACHE", "off")
    monkeypatch.setenv("CXX", "no-such-compiler")
    ours = mlp_trainer({"utils": {"kernels": "compiled"}})
    with pytest.raises(ExportError, match="need a C\\+\\+ compiler, but there is no 'no-such-compiler': install it"):
        ours.train_step(torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))


def test_indices_must_be_checked_before() -> None:
    with pytest.raises(ValueError, match="compiled loops end the process"):
        mlp_trainer({"utils": {"kernels": "compiled"}, "debug": {"check_indices": False}})
