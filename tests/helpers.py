"""Small models, and comparisons of our training with PyTorch's."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class MLP(nn.Module):
    """Two layers: 8 features in, 3 classes out."""

    def __init__(self, dropout: float = 0.0, hidden: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, hidden)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.dropout(torch.tanh(self.fc1(x))))


MLP_DESC = {
    "inputs": [("x", ["batch", 8]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}


def mlp_batches(count: int, size: int = 5, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def mlp_trainer(
    options: dict[str, Any] | None = None, config: Any = None, model: nn.Module | None = None
) -> ORTTrainer:
    return ORTTrainer(
        MLP() if model is None else model,
        MLP_DESC,
        optim.AdamConfig(lr=1e-2) if config is None else config,
        loss_fn=F.cross_entropy,
        options=ORTTrainerOptions(options),
    )


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, relative: float, what: str) -> None:
    """Compares two tensors by the norm of their difference, so that elements near zero do not matter."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, what
    if not theirs.is_floating_point():
        assert torch.equal(ours.to(theirs.device), theirs), what
        return
    difference = (ours.to(theirs.device).double() - theirs.double()).norm().item()
    assert difference <= relative * max(theirs.double().norm().item(), 1e-3), f"{what}: {difference}"


def assert_same_edges(ours: torch.Tensor, theirs: torch.Tensor, relative: float, what: str) -> None:
    """Compares two tensors: NaN and infinities at the same places, zeros of the same sign, other numbers nearly."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, what
    assert torch.equal(ours.isnan(), theirs.isnan()), f"{what}: {ours} has not the NaN of {theirs}"
    infinite = ours.isinf() | theirs.isinf()
    assert torch.equal(ours[infinite], theirs[infinite]), f"{what}: {ours} has not the infinities of {theirs}"
    zeros = (ours == 0) & (theirs == 0)
    assert torch.equal(ours[zeros].signbit(), theirs[zeros].signbit()), f"{what}: {ours} has not the zeros of {theirs}"
    finite = theirs.isfinite()
    assert_close(ours[finite], theirs[finite], relative, what)


def assert_same_weights(trainer: ORTTrainer, model: nn.Module, relative: float) -> None:
    ours = trainer.state_dict(pytorch_format=True)
    theirs = model.state_dict()
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert_close(ours[name], value, relative, name)


def assert_same_parameters(ours: nn.Module, theirs: nn.Module, relative: float = 1e-5) -> None:
    """Compares parameters and buffers of two modules."""
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert_close(ours.state_dict()[name], value, relative, name)


def assert_same_state(first: Any, second: Any, path: str = "state") -> None:
    """Compares two state dicts bit for bit."""
    if isinstance(first, dict):
        assert isinstance(second, dict) and first.keys() == second.keys(), path
        for key, value in first.items():
            assert_same_state(value, second[key], f"{path}[{key!r}]")
    elif hasattr(first, "dtype"):
        assert first.dtype == second.dtype and first.shape == second.shape, path
        assert bytes(np.asarray(first)) == bytes(np.asarray(second)), path  # NaN equals NaN
    else:
        assert first == second, f"{path}: {first!r} != {second!r}"


class Reference:
    """A copy of a model that PyTorch trains, beside a trainer or an ``ORTModule``.

    Args:
        model: The model. It returns the prediction if there is a ``loss_fn``, otherwise the loss or (loss, ...).
        optimizer: A class of ``torch.optim``, for the parameters that are trained; or a function of the copy.
        loss_fn: The loss of a prediction and the last tensor of a batch, or None.
        clip: The limit of the gradients' norm, or None.
        dtype: The dtype of autocast, or None.
        settings: Arguments of the class.

    Attributes:
        model: The copy, in training mode.
        optimizer: Its optimizer.
        count: The number of backward passes since the last update.
        outputs: What the model returned in the last pass.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        loss_fn: Any = F.cross_entropy,
        *,
        clip: float | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        self.model = copy.deepcopy(model).train()
        if isinstance(optimizer, type):
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = optimizer(trained, **settings)
        else:
            self.optimizer = optimizer(self.model)
        self.loss_fn, self.clip, self.dtype = loss_fn, clip, dtype
        self.count = 0
        self.outputs: Any = None

    def loss(self, *batch: Any) -> torch.Tensor:
        """Runs the model, and returns the loss with its graph."""
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            if self.loss_fn is not None:
                self.outputs = self.model(*batch[:-1])
                return self.loss_fn(self.outputs, batch[-1])
            self.outputs = self.model(*batch)
            return self.outputs if isinstance(self.outputs, torch.Tensor) else self.outputs[0]

    def backward(self, *batch: Any, scale: float = 1.0) -> torch.Tensor:
        """Adds the gradients of a batch, scaled, to the parameters'; returns the loss."""
        loss = self.loss(*batch)
        (loss * scale).backward()
        self.count += 1
        return loss.detach()

    def update(self, divisor: float | None = None) -> None:
        """Updates with the gradients divided by a number, or by the number of backward passes, and drops them."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= divisor or self.count
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.reset()

    def reset(self) -> None:
        """Drops the gradients."""
        self.optimizer.zero_grad()
        self.count = 0

    def step(self, *batch: Any) -> torch.Tensor:
        """Updates the weights with a batch; returns the loss."""
        loss = self.backward(*batch)
        self.update()
        return loss


def train_both(
    trainer: ORTTrainer,
    reference: Reference,
    batches: Iterable[tuple[Any, ...]],
    relative: float = 1e-5,
    *,
    accumulation: int = 1,
) -> None:
    """Trains both with the same batches, and compares every loss and all weights."""
    for number, batch in enumerate(batches, start=1):
        outputs = trainer.train_step(*batch)
        loss = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
        assert_close(loss, reference.backward(*batch), relative, f"loss of step {number}")
        if number % accumulation == 0:
            reference.update()
    assert_same_weights(trainer, reference.model, relative)


def assert_same_training(
    model: nn.Module,
    desc: dict[str, Any] | str,
    batches: Sequence[tuple[torch.Tensor, ...]],
    config: Any,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    *,
    loss_fn: Any = F.cross_entropy,
    accumulation: int = 1,
    clip: float | None = None,
    relative: float = 1e-5,
    options: dict[str, Any] | None = None,
    seed: int | None = None,
) -> ORTTrainer:
    """Trains a model with the trainer and with PyTorch, and compares every loss and all weights.

    The optimizer is one of :class:`Reference`. With a ``seed``, both start with the same random state, for models that
    draw random numbers.
    """
    reference = Reference(model, make_optimizer, loss_fn, clip=clip)
    settings = {
        "batch": {"gradient_accumulation_steps": accumulation},
        "utils": {"grad_norm_clip": clip is not None},
        **(options or {}),
    }
    if seed is not None:
        torch.manual_seed(seed)
    trainer = ORTTrainer(model, desc, config, loss_fn=loss_fn, options=ORTTrainerOptions(settings))
    if seed is not None:
        torch.manual_seed(seed)
    train_both(trainer, reference, batches, relative, accumulation=accumulation)
    return trainer


def resolve(name: str) -> Any:
    """Returns the object with a dotted name; ``f(x)`` is the parameter x of f."""
    name, _, parameter = name.rstrip(")").partition("(")
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for count, part in enumerate(parts[1:], start=2):
        # Fields with a default factory, and attributes that __init__ sets, are not attributes of the class.
        if part in getattr(found, "__dataclass_fields__", ()):
            return found.__dataclass_fields__[part]
        if part in getattr(found, "__annotations__", ()) and not hasattr(found, part):
            return found.__annotations__[part]
        found = sys.modules.get(".".join(parts[:count])) or getattr(found, part)
    return inspect.signature(found).parameters[parameter] if parameter else found
