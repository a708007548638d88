"""Small models, and comparisons of our training with PyTorch's."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

Check = Callable[[Any], None]
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


def assert_same_training(
    model: nn.Module,
    desc: dict[str, Any] | str,
    batches: Sequence[tuple[torch.Tensor, ...]],
    config: Any,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    loss_fn: Any = F.cross_entropy,
    accumulation: int = 1,
    clip: float | None = None,
    relative: float = 1e-5,
    options: dict[str, Any] | None = None,
    seed: int | None = None,
) -> ORTTrainer:
    """Trains a model with the trainer and with PyTorch and compares every loss and all weights.

    The model returns the prediction if there is a ``loss_fn``, otherwise the loss or (loss, ...). With a ``seed``, both
    start with the same random state, for models that draw random numbers.
    """
    reference = copy.deepcopy(model).train()
    optimizer = make_optimizer(reference)
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
    optimizer.zero_grad()
    for number, batch in enumerate(batches, start=1):
        outputs = trainer.train_step(*batch)
        loss = outputs[0] if isinstance(outputs, list) else outputs
        expected = reference(*batch) if loss_fn is None else loss_fn(reference(*batch[:-1]), batch[-1])
        expected = expected if isinstance(expected, torch.Tensor) else expected[0]
        assert_close(loss, expected.detach(), relative, f"loss of step {number}")
        (expected / accumulation).backward()
        if number % accumulation == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(trainer, reference, relative)
    return trainer


class Checks(dict[str, Check]):
    """Documented names, each with the function that checks it."""

    def register(self, *names: str) -> Callable[[Check], Check]:
        """Returns a decorator of a check of these names."""

        def decorator(check: Check) -> Check:
            assert not set(names) & set(self)
            self.update(dict.fromkeys(names, check))
            return check

        return decorator


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
