"""Compares values and gradients of function calls, as a model that is trained here, with PyTorch's.

The tensors of the calls are the model's parameters and buffers, so that one graph serves all values, such as
infinities.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

__all__ = ["Call", "Comparison", "NotComparable", "assert_same", "difference"]

# Tolerances relative to the element, and to the largest finite element of the tensor (or 1).
FORWARD, BACKWARD = (2e-5, 2e-6), (1e-4, 1e-4)


@dataclass(frozen=True)
class Call:
    """A function and its arguments.

    Attributes:
        function: The function.
        args: Its arguments; trees of tensors and other things. Floating-point tensors that require grad get a gradient.
        kwargs: Likewise, by name.
        select: Picks what is compared from the function's result.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    select: Callable[[Any], Any] = lambda result: result


class _Calls(nn.Module):
    """Returns a sum of all results, each with its own weight, and the results."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        # So that there is something to train even if no result has a gradient.
        self.anchor = nn.Parameter(torch.zeros(1))
        self.calls = calls
        self.leaves: list[list[Any]] = []
        self.trees: list[Any] = []
        for number, call in enumerate(calls):
            leaves, tree = pytree.tree_flatten((tuple(call.args), dict(call.kwargs)))
            for place, leaf in enumerate(leaves):
                if not isinstance(leaf, torch.Tensor):
                    continue
                name, value = f"call{number}_{place}", leaf.detach().clone().contiguous()
                if leaf.requires_grad:
                    self.register_parameter(name, nn.Parameter(value))
                else:
                    self.register_buffer(name, value)
                leaves[place] = _Name(name)
            self.leaves.append(leaves)
            self.trees.append(tree)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = [self.run(number) for number in range(len(self.calls))]
        loss = self.anchor.sum() * x.sum()
        for values in results:
            loss = loss + _total(values)
        return loss, *(value for values in results for value in values)

    def run(self, number: int) -> list[torch.Tensor]:
        """Returns the tensors in the result of a call."""
        # Clones, because PyTorch does not allow changing a parameter in place.
        leaves = [getattr(self, leaf.name).clone() if isinstance(leaf, _Name) else leaf for leaf in self.leaves[number]]
        args, kwargs = pytree.tree_unflatten(leaves, self.trees[number])
        call = self.calls[number]
        found = pytree.tree_leaves(call.select(call.function(*args, **kwargs)))
        # A model's outputs can't be empty.
        return [value for value in found if isinstance(value, torch.Tensor) and value.numel()]

    def named(self, number: int) -> dict[str, nn.Parameter]:
        """Returns the parameters of a call."""
        return {name: p for name, p in self.named_parameters() if name.startswith(f"call{number}_")}


@dataclass(frozen=True)
class _Name:
    name: str


def _total(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for value in values:
        if value.is_floating_point():
            weight = torch.cos(torch.arange(value.numel(), dtype=torch.float32)).to(value.dtype).reshape(value.shape)
            total = total + (value * weight).sum().float()
    return total


Results = tuple[list[torch.Tensor], dict[str, torch.Tensor]]
"""The results of a call, and the gradient of each of its parameters."""


class NotComparable(Exception):
    """Raised if PyTorch itself can't run a call."""


class Comparison:
    """Several calls in one graph.

    Args:
        calls: The calls.

    Raises:
        ExportError: If one of them can't be exported.
        NotComparable: If PyTorch itself can't run one of them.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        try:
            self.module = _Calls(calls)
            self.counts = [len(self.theirs(number)[0]) for number in range(len(calls))]
            shapes = [list(value.shape) for value in self.module(torch.ones(2))]
            if not all(self.counts):
                raise ValueError("the result is not a tensor, or has no elements")
        except Exception as error:
            raise NotComparable(f"{type(error).__name__}: {error}") from error
        outputs = [("loss", [], True), *((f"y{i}", shape) for i, shape in enumerate(shapes[1:]))]
        options = ORTTrainerOptions(
            {"batch": {"gradient_accumulation_steps": 2}, "utils": {"grad_norm_clip": False}},
        )
        self.trainer = ORTTrainer(
            copy.deepcopy(self.module),
            {"inputs": [("x", [2])], "outputs": outputs},
            optim.SGDConfig(lr=0.0),
            options=options,
        )
        self.trainer.prepare(torch.ones(2))

    def set(self, values: Mapping[str, torch.Tensor]) -> None:
        """Sets parameters to other values."""
        with torch.no_grad():
            for name, value in values.items():
                self.module.get_parameter(name).copy_(value)
                self.trainer.set_parameter(name, value)

    def theirs(self, number: int) -> Results:
        """Returns PyTorch's results of a call."""
        parameters = self.module.named(number)
        values = self.module.run(number)
        total = _total(values)
        found: Sequence[torch.Tensor | None] = [None] * len(parameters)
        if total.requires_grad and parameters:
            found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(p) if gradient is None else gradient
            for (name, p), gradient in zip(parameters.items(), found, strict=True)
        }
        return [value.detach() for value in values], gradients

    def ours(self) -> list[Results]:
        """Returns the results of every call in a training step."""
        session = self.trainer.session
        session.lazy_reset_grad()
        _, *values = session.train_step([torch.ones(2)])
        found, results = session.present_gradients(), []
        for number, count in enumerate(self.counts):
            gradients = {
                name: found[name].clone() if name in found else torch.zeros_like(p)
                for name, p in self.module.named(number).items()
            }
            results.append((values[:count], gradients))
            values = values[count:]
        return results


def difference(ours: Results, theirs: Results, values_only: bool = False) -> str | None:
    """Returns where two results differ, or None.

    Args:
        ours: The results here.
        theirs: PyTorch's results.
        values_only: Whether to compare only floating-point results: no indices, and no gradients.
    """
    if values_only:
        ours, theirs = (([value for value in r[0] if value.is_floating_point()], {}) for r in (ours, theirs))
    for place, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        what = _differs(a, b, *FORWARD)
        if what is not None:
            return f"result {place}: {what}"
    for name, b in theirs[1].items():
        what = _differs(ours[1][name], b, *BACKWARD)
        if what is not None:
            return f"gradient of {name.partition('_')[2]}: {what}"
    return None


def _differs(a: torch.Tensor, b: torch.Tensor, element: float, largest: float) -> str | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
    if not a.numel():
        return None
    if not b.is_floating_point():
        wrong = a != b
    else:
        wide_a, wide_b = a.double(), b.double()
        finite = wide_b.isfinite()
        scale = wide_b[finite].abs().max().item() if bool(finite.any()) else 0.0
        same = (wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())
        near = finite & ((wide_a - wide_b).abs() <= element * wide_b.abs() + largest * max(scale, 1.0))
        wrong = ~(same | near)
    if not bool(wrong.any()):
        return None
    where = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {wrong.numel()} elements, first {a[where].item()} instead of {b[where].item()}"


def assert_same(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Compares values and gradients of one call; floating-point tensors among the arguments get gradients."""
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), (args, kwargs)
    )
    comparison = Comparison([Call(function, args, kwargs)])
    (ours,), theirs = comparison.ours(), comparison.theirs(0)
    assert difference(ours, theirs) is None, difference(ours, theirs)
