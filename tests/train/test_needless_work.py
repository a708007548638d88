"""What a step leaves out: rows with ignored labels, the matrix of logits, and outputs that are not fetched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.engine.programs import losses
from ort_trainer.kernels.programs.rewrites import linear_cross_entropy

from ..helpers import Reference, assert_close, train_both

CLASSES = 50
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Tagger(nn.Module):
    """Returns a class for each token."""

    def __init__(self, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(CLASSES, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.layer(self.embedding(tokens))))
        return logits


def loss_of(reduction: str = "mean") -> Loss:
    def loss(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction=reduction)

    return loss


def trainer(model: nn.Module, loss: Loss, logits: bool = False, **options: Any) -> ORTTrainer:
    shape = ["batch", "length"]
    outputs: list[Any] = [("loss", [], True), ("logits", [*shape, CLASSES])]
    desc = {"inputs": [("tokens", shape), ("label", shape)], "outputs": outputs[: 1 + logits]}
    config = optim.SGDConfig(lr=0.5)
    return ORTTrainer(model, desc, config, loss_fn=loss, options=ORTTrainerOptions(options))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and labels; most labels are ignored, in one batch none is, in one all but one are."""
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, CLASSES, (3 + number % 3, 7), generator=draw)
    label = tokens.masked_fill(torch.rand(tokens.shape, generator=draw) < {1: 0.0, 2: 1.0}.get(number, 0.7), -100)
    label[0, 0] = 3
    return tokens, label


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small blocks for small logits; the sizes of the batches that were computed so."""
    found: list[int] = []
    compute = losses.linear_cross_entropy

    def noted(hidden: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
        found.append(len(hidden))
        return compute(hidden, *rest)

    monkeypatch.setattr(linear_cross_entropy, "_WORTH_IT", 0)
    monkeypatch.setattr(losses, "_BLOCK_BYTES", 0)
    monkeypatch.setattr(losses, "_FEWEST_ROWS", 5)
    monkeypatch.setitem(losses_by_name(), "ort_trainer.linear_cross_entropy.default", noted)
    return found


def losses_by_name() -> dict[str, Any]:
    from ort_trainer.engine.programs import operators, program

    program.find_operator.cache_clear()
    return operators.OWN


def weighted(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (loss_of("none")(logits, label) * (1.0 + torch.arange(label.numel()))).mean()


FUSED: dict[str, tuple[dict[str, bool], Loss, bool]] = {
    "mean": ({}, loss_of(), False),
    "tied, without bias": ({"bias": False, "tied": True}, loss_of(), False),
    "frozen": ({}, loss_of(), True),
    "sum": ({}, lambda logits, label: loss_of("sum")(logits, label) * 0.01 + 1.0, False),
    "rows": ({"tied": True}, weighted, False),
}


@pytest.mark.parametrize("name", FUSED)
def test_losses_and_weights_are_pytorchs(name: str, blocks: list[int]) -> None:
    options, loss, frozen = FUSED[name]
    torch.manual_seed(0)
    model = Tagger(**options)
    model.head.requires_grad_(not frozen)
    reference = Reference(model, loss_fn=loss, lr=0.5)
    train_both(trainer(model, loss), reference, map(batch, range(8)))
    assert len(blocks) == 8


NOT_FUSED: dict[str, Loss] = {
    "the gradient depends on the loss": lambda logits, label: loss_of()(logits, label) ** 2,
    "the logits are read elsewhere": lambda logits, label: loss_of()(logits, label) + logits.square().mean(),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_other_losses_are_left_as_they_are(name: str, blocks: list[int]) -> None:
    model = Tagger()
    expected = NOT_FUSED[name](model(batch(0)[0]), batch(0)[1]).detach()
    assert_close(trainer(model, NOT_FUSED[name]).train_step(*batch(0)), expected, 1e-6, "loss")
    assert not blocks


def test_a_label_out_of_range_is_an_error(blocks: list[int]) -> None:
    ours = trainer(Tagger(), loss_of(), debug={"check_indices": False})
    tokens, label = batch(0)
    ours.train_step(tokens, label)
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        ours.train_step(tokens, label.masked_fill(label == 3, CLASSES))


def test_logits_can_be_fetched_although_they_were_not_at_first(blocks: list[int]) -> None:
    model = Tagger()
    ours = trainer(model, loss_of(), logits=True)
    ours.train_step_info.fetches = ["loss"]
    for number in (0, 3):
        ours.train_step(*batch(number))
    expected = copy.deepcopy(model)(batch(4)[0])
    ours.train_step_info.fetches = ["loss", "logits"]
    loss, logits = ours.train_step(*batch(4))
    assert_close(logits, expected.detach(), 1e-6, "logits")
    assert_close(loss, loss_of()(expected, batch(4)[1]).detach(), 1e-6, "loss")
    assert len(blocks) == 3


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_outputs_that_are_not_fetched_are_not_computed() -> None:
    class Two(Tagger):
        def forward(self, tokens: torch.Tensor) -> Any:
            logits = super().forward(tokens)
            return logits, torch.erf(logits)

    def loss(outputs: Any, label: torch.Tensor) -> torch.Tensor:
        return loss_of()(outputs[0], label)

    shape = ["batch", "length"]
    outputs = [("loss", [], True), ("logits", [*shape, CLASSES]), ("erf", [*shape, CLASSES])]
    desc = {"inputs": [("tokens", shape), ("label", shape)], "outputs": outputs}
    options = ORTTrainerOptions({"debug": {"verify_every": "off"}})
    ours = ORTTrainer(Two(), desc, optim.SGDConfig(lr=0.5), loss_fn=loss, options=options)
    ours.train_step(*batch(0))
    for fetched, times in ((["loss", "erf"], 1), (["loss"], 0), ([], 1), (["loss", "logits"], 0)):
        ours.train_step_info.fetches = fetched
        with Calls() as calls:
            ours.train_step(*batch(0))
        assert calls.names.count("aten.erf.default") == times, fetched
