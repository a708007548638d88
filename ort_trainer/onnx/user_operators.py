"""Operators of ONNX models that users register. It stands alone, as importing it must not import onnx."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..core.errors import shown


@dataclass(frozen=True)
class Registration:
    """The arguments of :func:`register_onnx_operator`."""

    function: Callable[..., Any]
    since: int
    until: int | None
    numbers: frozenset[int]


_registered: dict[tuple[str, str], list[Registration]] = defaultdict(list)


def register_onnx_operator(
    name: str,
    function: Callable[..., Any],
    *,
    domain: str = "",
    since: int = 1,
    until: int | None = None,
    numbers: Collection[int] = (),
) -> None:
    """Registers a function for an operator of ONNX models, for those that are loaded later in this process.

    It takes precedence over this package's own function, so it can also give an operator another gradient, with a
    ``torch.autograd.Function``.

    Args:
        name: The operator.
        function: Takes the inputs of a node by position, as tensors or None, and its attributes as keyword-only
            parameters; returns a tensor, or a tuple of one for each output. It is run while the model is captured, so
            it consists of PyTorch's operators. An attribute that it does not take is refused if a node sets it.
        domain: The operator's domain; "" is ONNX's own.
        since: The first version of the operator that it computes; in other domains than ONNX's own, of the domain.
        until: The last one; None for all later ones.
        numbers: The positions of inputs that it takes as lists of Python numbers, such as sizes or axes.

    Raises:
        TypeError: If ``name`` or ``domain`` is not a str, or ``function`` can't be called or has no clear signature.

    Example:
        >>> def scaled_tanh(x, *, scale=1.0):
        ...     return scale * torch.tanh(x)
        >>> register_onnx_operator("ScaledTanh", scaled_tanh, domain="my.domain")
    """
    if not isinstance(name, str) or not isinstance(domain, str):
        raise TypeError(f"name and domain must be str, but {shown(name)} and {shown(domain)} were given")
    if not callable(function):
        raise TypeError(f"function must be callable, but {shown(function)} was given")
    try:
        inspect.signature(function)
    except ValueError:
        raise TypeError(f"{shown(function)} has no signature that tells inputs from attributes: wrap it") from None
    key = ("" if domain == "ai.onnx" else domain, name)
    _registered[key].append(Registration(function, since, until, frozenset(numbers)))


def registered(domain: str, name: str) -> list[Registration]:
    """Returns what was registered for an operator, the latest last."""
    return _registered.get((domain, name), [])
