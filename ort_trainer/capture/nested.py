"""Nested arguments and results: tuples, lists and dicts of tensors and constants, and objects that hold such.

An argument ``state`` with the value ``(h, c)`` has the inputs ``state.0`` and ``state.1``, and a layout from which the
argument can be rebuilt. Other values in a layout are constants of the graph: None, bools, numbers and strings.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..core.errors import ExportError

Layout = tuple[Any, ...]
"""``("tensor", input name)``, ``("value", type, value)``, or a container's kind with the layouts of its parts; of an
object ``("object", type, parts)``, of a mapping that is more than a dict ``("mapping", type, parts)``. A number that
changes from call to call is ``("number", input name, type)``."""

_PLAIN = (type(None), bool, int, float, str)
# They have no state, though they are compared by identity.
_STATELESS = (type, torch.dtype, torch.layout, torch.memory_format, types.BuiltinFunctionType, types.ModuleType)
_INCOMPARABLE: list[Any] = []  # has no hash, so a layout that contains it can't be a key
_DEEPEST = 8


def argument_of(name: str) -> str:
    """Returns the name of the argument that an input belongs to."""
    return name.partition(".")[0]


def flatten(name: str, value: Any, leaves: dict[str, Any], objects: bool = False) -> Layout:
    """Splits an argument into its leaves and returns its layout.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        leaves: Receives all leaves that are not constants, by input name.
        objects: Whether mappings keep their type, objects are split if they hold tensors, and everything else is a
            constant; otherwise a mapping becomes a dict, and an object is a leaf.

    Raises:
        TypeError: If the value contains a packed sequence.
        ExportError: If the value contains a number that a capture computes.
    """
    if isinstance(value, torch.Tensor):
        leaves[name] = value
        return ("tensor", name)
    if type(value) in _PLAIN:
        if type(value) is float and (value == 0.0 or value != value):
            return _float(value)
        return ("value", type(value), value)
    if isinstance(value, PackedSequence):
        raise TypeError(
            f"input {name!r} is a PackedSequence: give the padded tensor and the lengths instead, and call "
            "torch.nn.utils.rnn.pack_padded_sequence in forward()"
        )
    if isinstance(value, Mapping):
        named = zip(_part_names(name, value), value.items(), strict=True)
        parts = tuple((key, flatten(part, entry, leaves, objects)) for part, (key, entry) in named)
        return ("mapping", type(value), parts) if objects and type(value) is not dict else ("dict", parts)
    if isinstance(value, (tuple, list)):
        kind = type(value) if hasattr(value, "_fields") else "list" if isinstance(value, list) else "tuple"
        parts = tuple(flatten(f"{name}.{index}", entry, leaves, objects) for index, entry in enumerate(value))
        of_torch = objects and hasattr(type(value), "n_sequence_fields")
        return ("sequence", type(value), parts) if of_torch else (kind, parts)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise ExportError(
            f"{name!r} is computed from sizes, and kept in an object that a graph can't make again, such as one of a "
            "class in a function: return it in a tuple or a dict, or define the class at the top of its file"
        )
    if objects:
        return _flatten_object(name, value, leaves)
    leaves[name] = value
    return ("tensor", name)


def _part_names(name: str, keys: Collection[Any]) -> list[str]:
    """Returns the names of the parts of an argument; no two parts, and no parts of these, have the same.

    Args:
        name: Name of the argument.
        keys: The keys of the parts, or the names of attributes.
    """
    if len({*map(type, keys)}) < 2 and not any("." in key for key in keys if type(key) is str):
        return [f"{name}.{key}" for key in keys]
    texts: list[str] = []
    for key in keys:  # of {0: x, "0": y}, or of {"a": {"b": x}, "a.b": y}
        text = str(key)
        while any(f"{other}.".startswith(f"{text}.") or text.startswith(f"{other}.") for other in texts):
            text = f"{text.replace('.', '_')}_"
        texts.append(text)
    return [f"{name}.{text}" for text in texts]


def _flatten_object(name: str, value: Any, leaves: dict[str, Any]) -> Layout:
    """Splits an object, such as a dataclass or a cache of keys and values, if an attribute of it holds a tensor."""
    held: dict[str, Any] = {}
    attributes = getattr(value, "__dict__", None)
    deep = name.count(".") > _DEEPEST  # perhaps a circle
    if isinstance(attributes, dict) and not deep and not isinstance(value, (type, torch.nn.Module)):
        named = zip(_part_names(name, attributes), attributes.items(), strict=True)
        parts = tuple((key, flatten(part, entry, held, True)) for part, (key, entry) in named)
        if held:
            leaves.update(held)
            return ("object", type(value), parts)
    return ("value", type(value), value, *_state_of(name, value))


def _float(value: float) -> Layout:
    """Returns the layout of a zero with its sign, which == ignores, or of a NaN, which does not equal itself."""
    if value != value:
        return ("value", float, math.nan)
    return ("value", float, value, "-") if math.copysign(1.0, value) < 0 else ("value", float, value)


def _state_of(name: str, value: Any) -> tuple[Any, ...]:
    """Returns the state of a constant that is compared by identity; empty if == compares its contents.

    With it, the layout of an object whose state has changed differs from the earlier one. If the state is unknown, the
    layout has no hash.
    """
    kind = type(value)
    if isinstance(value, types.FunctionType):
        held = {str(index): cell for index, cell in enumerate(value.__closure__ or ())}
        try:
            held = {key: cell.cell_contents for key, cell in held.items()}
        except ValueError:  # not assigned yet
            return (_INCOMPARABLE,)
    elif isinstance(value, types.MethodType) or name.count(".") > _DEEPEST:
        return (_INCOMPARABLE,)
    elif _is_compared(kind) or kind is object or isinstance(value, _STATELESS):
        return ()
    elif isinstance(value, torch.nn.Module) or hasattr(value, "__next__") or callable(value):
        return (_INCOMPARABLE,)
    else:
        slots = [key for base in kind.__mro__ for key in _names_of(vars(base).get("__slots__", ()))]
        if not slots and not hasattr(value, "__dict__"):
            return (_INCOMPARABLE,)
        held = {**getattr(value, "__dict__", {}), **{key: getattr(value, key) for key in slots if hasattr(value, key)}}
    leaves: dict[str, Any] = {}
    parts = tuple((key, flatten(f"{name}.{key}", entry, leaves, True)) for key, entry in held.items())
    return (_INCOMPARABLE,) if leaves else (parts,) if parts else ()


def _is_compared(kind: type[Any]) -> bool:
    """Returns whether a class defines a hash: then == compares its objects, and their state does not change."""
    method: Any = kind.__hash__
    return method is not object.__hash__


def _names_of(slots: Any) -> list[str]:
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def mapped(layout: Layout, function: Callable[[Layout], Layout]) -> Layout:
    """Returns a layout whose tensors and values a function has replaced."""
    kind, parts = layout[0], layout[-1]
    if kind in ("tensor", "value", "number"):
        return function(layout)
    if kind in ("dict", "mapping", "object"):
        return (*layout[:-1], tuple((key, mapped(part, function)) for key, part in parts))
    return (*layout[:-1], tuple(mapped(part, function) for part in parts))


def with_numbers_apart(
    layout: Layout, name: str, numbers: dict[str, Any], wanted: Collection[str] | None = None
) -> Layout:
    """Returns a layout with names in place of numbers and strings.

    Args:
        layout: The layout.
        name: The name of its argument.
        numbers: Receives the numbers and strings by name.
        wanted: Names of those to replace; None for all.
    """
    kind, parts = layout[0], layout[-1]
    if kind == "value":
        if layout[1] not in (int, float, str) or (wanted is not None and name not in wanted):
            return layout
        numbers[name] = layout[2]
        return ("number", name, layout[1])
    if kind in ("tensor", "number"):
        return layout
    if kind in ("dict", "mapping", "object"):
        named = zip(_part_names(name, [key for key, _ in parts]), parts, strict=True)
        return (*layout[:-1], tuple((key, with_numbers_apart(part, at, numbers, wanted)) for at, (key, part) in named))
    inner = (with_numbers_apart(part, f"{name}.{at}", numbers, wanted) for at, part in enumerate(parts))
    return (*layout[:-1], tuple(inner))


def rebuild(layout: Layout, tensors: Mapping[str, Any]) -> Any:
    """Returns an argument from its layout and the tensors, and numbers, by input name."""
    kind, *rest = layout
    if kind in ("tensor", "number"):
        return tensors[rest[0]]
    if kind == "value":
        return rest[1]
    if kind == "dict":
        return {key: rebuild(part, tensors) for key, part in rest[0]}
    if kind in ("mapping", "object", "sequence"):
        return _rebuild_object(kind, rest[0], rest[1], tensors)
    parts = [rebuild(part, tensors) for part in rest[0]]
    return parts if kind == "list" else tuple(parts) if kind == "tuple" else kind(*parts)


def _rebuild_object(kind: str, which: Any, parts: Any, tensors: Mapping[str, Any]) -> Any:
    if kind == "sequence":  # what torch.max and others return
        return which([rebuild(part, tensors) for part in parts])
    entries = {key: rebuild(part, tensors) for key, part in parts}
    if kind == "mapping":
        # The outputs of transformers are dataclasses, and take their entries by name.
        named = dataclasses.is_dataclass(which)
        return which(**entries) if named else _filled(which, entries)
    value = which.__new__(which)
    vars(value).update(entries)
    return value


def _filled(which: Any, entries: Mapping[Any, Any]) -> Any:
    """Returns a mapping of some class with entries; what else its constructor takes is lost, as in a pickled copy."""
    value = which()
    value.update(entries)
    return value


def default_layout(argument: str, names: Iterable[str]) -> Layout:
    """Returns the layout of an argument from the names of its inputs alone: a tuple for numbered parts, else a dict."""
    inputs = [name for name in names if name == argument or name.startswith(f"{argument}.")]
    if inputs == [argument]:
        return ("tensor", argument)
    depth = len(argument) + 1
    keys = list(dict.fromkeys(name[depth:].partition(".")[0] for name in inputs))
    parts = [default_layout(f"{argument}.{key}", inputs) for key in keys]
    if keys == [str(index) for index in range(len(keys))]:
        return ("tuple", tuple(parts))
    return ("dict", tuple(zip(keys, parts, strict=True)))


def has_tensors(layout: Layout) -> bool:
    """Returns whether an argument contains a tensor."""
    kind, *rest = layout
    if kind in ("tensor", "value", "number"):
        return bool(kind == "tensor")
    return any(map(has_tensors, (part for _, part in rest[0]) if kind == "dict" else rest[0]))


def constants_of(layout: Layout, name: str) -> dict[str, Any]:
    """Returns the constants in a layout, by the input name that a tensor in their place would have."""
    kind, *rest = layout
    if kind == "value":
        return {name: rest[1]}
    if kind == "tensor":
        return {}
    entries = rest[0] if kind == "dict" else list(enumerate(rest[0]))
    names = _part_names(name, [key for key, _ in entries])
    parts = zip(names, (part for _, part in entries), strict=True)
    return {key: value for at, part in parts for key, value in constants_of(part, at).items()}
