"""Compares the results of a graph with those of PyTorch, and says what differs beyond rounding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from ..core.errors import VerificationError

WHY_DIFFERENT = (
    "The graph has probably fixed a value that forward() or the loss reads from somewhere that is not watched: make it "
    "an input, a buffer or a plain attribute of the module. If there is none, please report the model. "
    'debug.verify_every="off" goes on without this comparison'
)

Named = Mapping[str, torch.Tensor]

# The relative difference of an element that is rounding, by the dtype that rounds most.
_RELATIVE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# The same as a part of the tensor's largest element, and of the largest element of all gradients.
_OF_TENSOR, _OF_GRADIENTS = 0.1, 0.01
# Results that PyTorch gets from slightly different weights, until their spread explains a difference (a value at the
# edge of a relu falls to its other side in some only), and how far beyond their spread a graph's may be.
_SHAKES, _SPREADS = 7, 10.0


def not_run(what: str, error: Exception) -> VerificationError:
    """Returns the error for a step that PyTorch can't run, such as an LSTM in half precision on a CPU."""
    return VerificationError(
        f"debug.verify_every: {what} can't be compared, because it raises in PyTorch itself ({type(error).__name__}: "
        f'{error}). It was not taken. debug.verify_every="off" goes on without this comparison'
    )


def gradient_floor(gradients: Iterable[torch.Tensor], rounding: torch.dtype) -> float:
    """Returns the difference of gradients that is rounding even where a gradient is zero.

    A gradient may be a sum of large values that cancel, as that of a bias in front of a batch norm.
    """
    return _OF_GRADIENTS * _RELATIVE[rounding] * max(map(_magnitude, gradients), default=0.0)


def report(
    ours: Named,
    theirs: Named,
    rounding: torch.dtype,
    shaken: Callable[[int], Named],
    floors: Mapping[str, float] | None = None,
    only_finite: Collection[str] = (),
) -> str:
    """Returns what differs beyond rounding, as a sentence; empty if nothing does.

    A difference counts only if PyTorch's own results differ by much less when weights and inputs change in the last
    bit. Otherwise there is nothing to compare: a gradient is zero but for rounding, or a value at the edge of a relu.

    Args:
        ours: The results of the graph, by what they are called in messages. One that is missing stands for zeros.
        theirs: PyTorch's results.
        rounding: The dtype that rounds most in the step.
        shaken: Returns PyTorch's results after each weight and input has changed by one rounding, for a seed. Called
            only if something differs.
        floors: Differences that are rounding whatever a tensor's values are.
        only_finite: Where to leave out elements that are not finite, in either result.
    """
    relative, floors = _RELATIVE[rounding], floors or {}
    names = list(dict.fromkeys([*ours, *theirs]))
    compared = {name: _Pair(ours.get(name), theirs.get(name), name in only_finite) for name in names}
    limits = {name: floors.get(name, 0.0) for name in names}
    suspects = {name: floor for name, floor in limits.items() if not compared[name].is_close(relative, floor)}
    if not suspects:
        return ""
    spread, differing = dict.fromkeys(suspects, 0.0), list(suspects)
    for seed in range(_SHAKES):
        other = shaken(seed)
        for name in spread:
            distance = _Pair(other.get(name), theirs.get(name), name in only_finite).distance().max().item()
            spread[name] = max(spread[name], distance)
        suspects = {name: limits[name] + _SPREADS * spread[name] for name in spread}
        differing = [name for name, floor in suspects.items() if not compared[name].is_close(relative, floor)]
        if not differing:
            return ""
    first = differing[0]
    more = f" {len(differing)} of {len(names)} tensors differ." if len(differing) > 1 else ""
    return f"{first} {compared[first].difference(relative, suspects[first])}.{more}"


class _Pair:
    """A tensor of a graph and the same of PyTorch, in a dtype in which they can be subtracted; None for zeros."""

    def __init__(self, ours: torch.Tensor | None, theirs: torch.Tensor | None, only_finite: bool) -> None:
        if ours is None:
            ours = torch.zeros(()) if theirs is None else torch.zeros_like(theirs)
        theirs = torch.zeros_like(ours) if theirs is None else theirs.to(ours.device)
        self._exact = not (_is_inexact(ours) and _is_inexact(theirs))
        # float32 can't tell large integers apart.
        least = torch.float64 if self._exact else torch.float32
        dtype = torch.promote_types(torch.promote_types(ours.dtype, theirs.dtype), least)
        self._ours, self._theirs = ours.detach().to(dtype), theirs.detach().to(dtype)
        self._same_shape = ours.shape == theirs.shape
        if only_finite and self._same_shape:
            finite = self._ours.isfinite() & self._theirs.isfinite()
            self._ours, self._theirs = self._ours.where(finite, 0), self._theirs.where(finite, 0)

    def is_close(self, relative: float, floor: float) -> bool:
        """Returns whether the difference is rounding."""
        if not self._same_shape:
            return False
        rtol, atol = self._limits(relative, floor)
        if self._ours.numel() and bool((self._ours - self._theirs).abs().max() <= atol):
            return True  # usually; the next line takes five times as long
        return torch.allclose(self._ours, self._theirs, rtol=rtol, atol=atol, equal_nan=True)

    def distance(self) -> torch.Tensor:
        """Returns the absolute difference of each element: 0 for NaN in both, infinite if only one is not finite."""
        if not self._same_shape or not self._ours.numel():
            return torch.zeros(1)
        same = (self._ours == self._theirs) | (self._ours.isnan() & self._theirs.isnan())
        return (self._ours - self._theirs).abs().nan_to_num(torch.inf, torch.inf).where(~same, 0)

    def difference(self, relative: float, floor: float) -> str:
        """Returns the rest of a sentence that begins with the tensor's name."""
        ours, theirs = self._ours, self._theirs
        if not self._same_shape:
            return f"has the shape {list(ours.shape)}, and in PyTorch {list(theirs.shape)}"
        distance = self.distance()
        rtol, atol = self._limits(relative, floor)
        allowed = atol + rtol * theirs.abs().nan_to_num(0.0, 0.0)
        at = (distance - allowed).argmax().cpu()
        place = [int(index) for index in torch.unravel_index(at, ours.shape)]
        actual, expected, most, limit = (value.flatten()[at].item() for value in (ours, theirs, distance, allowed))
        return (
            f"is {actual:.7g}{f' at {place}' if place else ''}, and {expected:.7g} in PyTorch, a difference of "
            f"{most:.3g}; rounding explains {limit:.3g}"
        )

    def _limits(self, relative: float, floor: float) -> tuple[float, float]:
        """Returns the relative and the absolute difference that are allowed."""
        if self._exact:
            return 0.0, floor
        return relative, floor + _OF_TENSOR * relative * _magnitude(self._theirs)


def _is_inexact(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _magnitude(value: torch.Tensor) -> float:
    """Returns the largest finite absolute value of a tensor."""
    if not value.numel():
        return 0.0
    largest: float = value.detach().abs().nan_to_num(0.0, 0.0).max().item()
    return largest
