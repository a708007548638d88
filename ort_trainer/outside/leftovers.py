"""What a run leaves outside tensors, encoded as JSON values, so that it can be left again after each run."""

from __future__ import annotations

import enum
import functools
import gc
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from .containers import copied
from .numbers import Expression, Number, evaluate
from .places import MISSING, Place, put, read
from .values import VIEWS

Code = list[Any]
"""A kind, and what belongs to it: ``plain`` and a value, ``tensor`` and a number, ``place`` and a place, and so on.
``["list", [["plain", 1], ["tensor", 0]]]`` is a list of the number 1 and the run's first tensor."""

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_DICTS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict}
_ARGUMENTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    complex: lambda value: (value.real, value.imag),
    range: lambda value: (value.start, value.stop, value.step),
    slice: lambda value: (value.start, value.stop, value.step),
    bytes: lambda value: (list(value),),
    bytearray: lambda value: (list(value),),
    torch.device: lambda value: (str(value),),
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    # Views refer to their dict, which may be one from outside.
    **{kind: lambda value: (*gc.get_referents(value),) for kind in (types.MappingProxyType, *VIEWS)},
}
"""What objects are made of again."""
_MAKERS: dict[str, Any] = {kind.__name__: kind for kind in _ARGUMENTS} | {
    "partial": lambda function, args, keywords: functools.partial(function, *args, **keywords),
    **{kind.__name__: getattr(dict, kind.__name__.removeprefix("dict_")) for kind in VIEWS},
}
_NAMED_IN_TORCH = (torch.dtype, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Leftovers:
    """What a run leaves.

    Attributes:
        writes: Places, and what is left there.
        tensors: The number of tensors in it.
    """

    writes: tuple[tuple[Place, Code], ...] = ()
    tensors: int = 0

    @property
    def numbers(self) -> set[int]:
        """Which of the tensors are numbers; see :func:`numbers_in`."""
        return set().union(*(numbers_in(code) for _, code in self.writes))

    def leave(self, root: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Leaves everything in its place.

        Args:
            root: Where places begin.
            tensors: The tensors of the run.
        """
        # A run may have changed an object, and then replaced it.
        values = [(read(root, place[:-1]), place, decode(code, tensors, root)) for place, code in self.writes]
        for owner, place, value in values:
            put(owner, place[-1], value)
            if isinstance(value, torch.Tensor):
                root.left[place] = value


def numbers_in(code: Any) -> set[int]:
    """Returns which of a run's tensors are numbers that it has computed; a run in PyTorch has plain ones instead."""
    if not isinstance(code, (list, tuple)):
        return set()
    if len(code) == 2 and code[0] == "number" and isinstance(code[1], int):  # an attribute may have this name
        return {code[1]}
    return set().union(*map(numbers_in, code))


def encode(value: Any, tensors: list[torch.Tensor], places: Mapping[int, Place]) -> Code:
    """Returns a value as JSON values.

    Args:
        value: The value.
        tensors: Receives the tensors in it, and the numbers that a run computes.
        places: Places of objects that existed before, by ``id``.

    Raises:
        TypeError: If JSON can't express it; the message names the kind of value.
    """
    if value is MISSING:
        return ["missing"]
    if type(value) is Number:
        return ["expression", _with_tensors(value.expression, tensors)]
    if value is None or type(value) in (bool, int, float, str):
        return ["plain", value]
    if id(value) in places:
        return ["place", places[id(value)]]
    if isinstance(value, torch.Tensor):
        if all(value is not other for other in tensors):
            tensors.append(value)
        return ["tensor", next(at for at, other in enumerate(tensors) if other is value)]
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        if isinstance(value, torch.SymInt) and value.node.maybe_as_int() is not None:  # the model has fixed it
            return ["plain", int(value)]
        tensors.append(value)  # type: ignore[arg-type]
        return ["number", len(tensors) - 1]
    if isinstance(value, torch.SymBool):  # other sizes get another graph
        return ["plain", bool(value)]
    name = type(value).__name__
    if type(value) is deque:
        return ["deque", value.maxlen, [encode(part, tensors, places) for part in value]]
    if _SEQUENCES.get(name) is type(value):
        return [name, [encode(part, tensors, places) for part in value]]
    if _DICTS.get(name) is type(value) or type(value) is defaultdict:
        pairs = [[encode(k, tensors, places), encode(v, tensors, places)] for k, v in value.items()]
        return ["dict", name, pairs, encode(getattr(value, "default_factory", None), tensors, places)]
    if isinstance(value, _NAMED_IN_TORCH):
        return ["torch", str(value).removeprefix("torch.")]
    if type(value) in _ARGUMENTS:
        return ["made", name, [encode(part, tensors, places) for part in _ARGUMENTS[type(value)](value)]]
    if isinstance(value, torch.Size):
        return ["size", [encode(part, tensors, places) for part in value]]
    if isinstance(value, numpy.generic) and not value.dtype.hasobject:
        return ["numpy", str(value.dtype), value.item()]
    if isinstance(value, (type, types.FunctionType)):
        return ["global", *_path_of(value)]
    if isinstance(value, enum.Enum):
        is_member = value.name in type(value).__members__  # not so a combination of flags
        return ["enum", *_path_of(type(value)), value.name if is_member else value.value]
    if hasattr(type(value), "n_sequence_fields"):  # what torch.max and others return
        return ["sequence", *_path_of(type(value)), [encode(part, tensors, places) for part in value]]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["named", *_path_of(type(value)), [encode(part, tensors, places) for part in value]]
    attributes = getattr(value, "__dict__", None)
    opaque = isinstance(value, (tuple, list, set, deque, nn.Module, types.ModuleType)) or callable(value)
    if opaque or not isinstance(attributes, dict):
        raise TypeError(f"an object of the class {type(value).__qualname__}")
    parts = [[key, encode(part, tensors, places)] for key, part in attributes.items()]
    items = copied(value).items() if isinstance(value, dict) else ()
    entries = [[encode(key, tensors, places), encode(part, tensors, places)] for key, part in items]
    return ["object", *_path_of(type(value)), parts, entries]


def _with_tensors(expression: Expression, tensors: list[torch.Tensor]) -> Expression:
    """Returns an expression with results of the run in place of numbers that it computes."""
    kind, *rest = expression
    if kind == "symbolic":
        kind, value = encode(rest[0], tensors, {})
        return ["is" if kind == "plain" else kind, value]
    return expression if kind in ("at", "is") else [kind, *(_with_tensors(part, tensors) for part in rest)]


def decode(code: Code, tensors: Sequence[torch.Tensor], root: Any) -> Any:
    """Returns the value that :func:`encode` has encoded.

    Args:
        code: Its result.
        tensors: The tensors.
        root: Where places begin.
    """
    kind, *rest = code
    if kind == "missing":
        return MISSING
    if kind == "plain":
        return rest[0]
    if kind == "expression":
        return evaluate(rest[0], root, tensors)
    if kind == "place":
        return read(root, tuple(map(tuple, rest[0])))  # type: ignore[arg-type]
    if kind == "tensor":
        return tensors[rest[0]]
    if kind == "number":
        return tensors[rest[0]].item()
    if kind == "deque":
        return deque((decode(part, tensors, root) for part in rest[1]), rest[0])
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(part, tensors, root) for part in rest[0])
    if kind == "dict":
        pairs = [(decode(key, tensors, root), decode(value, tensors, root)) for key, value in rest[1]]
        if rest[0] == "defaultdict":
            return defaultdict(decode(rest[2], tensors, root), pairs)
        return _DICTS[rest[0]](pairs)
    if kind == "torch":
        return getattr(torch, rest[0])
    if kind == "made":
        return _MAKERS[rest[0]](*(decode(part, tensors, root) for part in rest[1]))
    if kind == "size":
        return torch.Size(decode(part, tensors, root) for part in rest[0])
    if kind == "numpy":
        return numpy.dtype(rest[0]).type(rest[1])
    which = _at_path(*rest[:2])
    if kind == "global":
        return which
    if kind == "enum":
        return which[rest[2]] if isinstance(rest[2], str) else which(rest[2])
    if kind == "named":
        return which(*(decode(part, tensors, root) for part in rest[2]))
    if kind == "sequence":
        return which([decode(part, tensors, root) for part in rest[2]])
    value = which.__new__(which)
    base: Any = OrderedDict if issubclass(which, OrderedDict) else dict
    for key, part in rest[3]:
        base.__setitem__(value, decode(key, tensors, root), decode(part, tensors, root))
    vars(value).update((key, decode(part, tensors, root)) for key, part in rest[2])
    return value


def _path_of(kind: type | types.FunctionType) -> tuple[str, str]:
    """Returns the module and the qualified name of a class or function.

    Raises:
        TypeError: If they lead to another object.
    """
    path = kind.__module__, kind.__qualname__
    try:
        at_path = _at_path(*path)
    except (AttributeError, KeyError):
        at_path = None
    if at_path is not kind:
        what = "an object of the class" if isinstance(kind, type) else "the function"
        raise TypeError(f"{what} {kind.__qualname__}, which is not at the top of its file,")
    return path


def _at_path(module: str, name: str) -> Any:
    value: Any = sys.modules[module]
    for part in name.split("."):
        value = getattr(value, part)
    return value
