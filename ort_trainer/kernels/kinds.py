"""The kinds of kernels, and which an option chooses."""

from __future__ import annotations

from collections.abc import Callable

from ..graph.kernels import Kernels
from .loops.kind import FastestKernels, LoopKernels
from .onnxruntime.kind import OnnxRuntimeKernels
from .programs.kind import ProgramKernels

PROGRAMS, ONNX_RUNTIME = ProgramKernels(), OnnxRuntimeKernels()
_KINDS: dict[str, list[Kernels]] = {
    "auto": [PROGRAMS, ONNX_RUNTIME],
    "fastest": [FastestKernels(), ONNX_RUNTIME],
    **{kind.name: [kind] for kind in (PROGRAMS, LoopKernels(), ONNX_RUNTIME)},
}


def kinds(name: str) -> list[Kernels]:
    """Returns the kinds that a value of ``utils.kernels`` allows, the preferred one first."""
    return _KINDS[name]


def choose(name: str, objection: Callable[[Kernels], str]) -> tuple[str, str]:
    """Returns a value of ``utils.kernels`` without a kind that can't be used, and why.

    Args:
        name: The value that was chosen.
        objection: Returns why a kind can't be used; "" if it can.

    Returns:
        The value, "" if no kind can be used; and the objection to the kind that was preferred.
    """
    preferred, *others = kinds(name)
    reason = objection(preferred)
    return (name if not reason else others[0].name if others else ""), reason


def undetermined(name: str, deterministic: bool) -> str:
    """Returns why a value of ``utils.kernels`` contradicts ``debug.deterministic_compute``; "" if it does not."""
    if not (deterministic and kinds(name)[0].rival):
        return ""
    return (
        f"debug.deterministic_compute is True, but utils.kernels is {name!r}, which chooses kernels by measuring, and "
        "kernels decide rounding: set utils.kernels to 'auto' or 'compiled'"
    )
