"""A place is where a program keeps a value: a path of steps from a root, such as an attribute, an entry, a global.

A place is made of strings and numbers, so a child process can name it to its parent, which has the same objects.
"""

from __future__ import annotations

import contextvars
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy

from .containers import copied, kept_by, members, refill, values


class _Missing:
    """The value of a place that does not exist, such as an attribute that has not been assigned yet."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()
GONE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What can go wrong when a place is read that no longer exists."""


class Access(NamedTuple):
    """One step from an owner to a value.

    Attributes:
        kind: ``get`` (what the owner's attribute returns), ``attribute`` (an entry of its ``__dict__``), ``tensor`` (a
            module's parameter or buffer), ``class`` (an attribute of its class), ``global`` (a global variable of a
            function), ``module`` (a Python module, by its name), ``referent`` (of a weak reference or a context
            variable), ``cell`` (a variable of a function's closure), ``item`` (of a sequence or an array), ``entry``
            (of a dict, by the position of its key), ``member`` (of a set, or a key of a dict, by its position), ``key``
            (of a dict, by a key that is a string), ``kept`` (by the cache of a function), ``contents`` (all
            that a container holds); only to be written, ``end`` (what is appended to a list).
        key: A name or a position.
    """

    kind: str
    key: str | int


Place = tuple[Access, ...]
"""``("get", "model"), ("get", "layer"), ("attribute", "cache"), ("entry", 0)`` is the first entry of the dict
``model.layer.cache``."""


def of_class(kind: type, name: str) -> Any:
    """Returns an attribute of a class without binding it, or :data:`MISSING`."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), MISSING)


def in_cell(cell: Any) -> Any:
    """Returns what a cell of a closure holds, or :data:`MISSING` if nothing was assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def referent(reference: Any) -> Any:
    """Returns what a weak reference or a context variable refers to, or :data:`MISSING`."""
    try:
        if type(reference) in weakref.ProxyTypes:
            return reference.__reduce__.__self__  # a proxy looks up methods in the object
        return reference.get() if isinstance(reference, contextvars.ContextVar) else reference()
    except (LookupError, ReferenceError):
        return MISSING


def _in_sequence(owner: Any, index: int) -> Any:
    owner = owner.flat if isinstance(owner, numpy.ndarray) else owner
    return owner[index] if index < len(owner) else MISSING


def _at(parts: Iterator[Any], index: int) -> Any:
    return next(itertools.islice(parts, index, None), MISSING)


def _of_closure(function: Any, index: int) -> Any:
    # A tracer of torch.fx replaces functions meanwhile that its wrap() has marked; those have other closures.
    cells = function.__closure__ or ()
    return in_cell(cells[index]) if index < len(cells) else MISSING


def attributes_of(owner: Any) -> Any:
    """Returns an object's ``__dict__``, without what its class does when it is read."""
    return vars(owner) if isinstance(owner, (type, threading.local)) else object.__getattribute__(owner, "__dict__")


def slots_of(kind: type) -> Iterator[str]:
    """Yields the names of the slots that objects of a class have."""
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            yield f"_{base.__name__.lstrip('_')}{name}" if is_private else name


_READ: dict[str, Callable[[Any, Any], Any]] = {
    "get": lambda owner, name: getattr(owner, name, MISSING),
    "attribute": lambda owner, name: attributes_of(owner).get(name, MISSING),
    "tensor": lambda owner, name: {**owner._parameters, **owner._buffers}.get(name, MISSING),
    "module": lambda _, name: sys.modules.get(name, MISSING),
    "referent": lambda reference, _: referent(reference),
    "class": lambda owner, name: of_class(type(owner), name),
    "global": lambda function, name: function.__globals__.get(name, MISSING),
    "cell": _of_closure,
    "item": _in_sequence,
    "entry": lambda owner, index: _at(values(owner), index),
    "member": lambda owner, index: _at(members(owner), index),
    "key": lambda owner, key: owner.get(key, MISSING),
    "kept": lambda function, index: _in_sequence(kept_by(function), index),
    "contents": lambda owner, _: copied(owner),
}


def read(root: Any, place: Place) -> Any:
    """Returns what is at a place; :data:`MISSING` if there is nothing."""
    for kind, key in place:
        if root is MISSING:
            break
        root = _READ[kind](root, key)
    return root


def reader(root: Any) -> Callable[[Place], Any]:
    """Returns :func:`read` for many places at one moment; what is on the way to several is read once.

    A place has :data:`MISSING` also if its owner is now of a kind that has no such places.
    """
    met: dict[Place, Any] = {(): root}

    def read_once(place: Place) -> Any:
        if place not in met:
            try:
                met[place] = read(read_once(place[:-1]), place[-1:])
            except GONE:
                met[place] = MISSING
        return met[place]

    return read_once


def write(root: Any, place: Place, value: Any) -> None:
    """Puts a value at a place; :data:`MISSING` removes what is there."""
    put(read(root, place[:-1]), place[-1], value)


def put(owner: Any, step: Access, value: Any) -> None:
    """Puts a value one step from an owner, as :func:`write` does."""
    kind, key = step
    if kind == "tensor":
        owner._buffers[key] = value
    elif kind == "cell":
        if value is MISSING:
            del owner.__closure__[key].cell_contents
        else:
            owner.__closure__[key].cell_contents = value
    elif kind == "contents":
        refill(owner, value)
    elif kind == "end":
        owner.extend(value)
    elif kind in ("item", "key"):
        owner[key] = value
    elif kind == "entry":
        owner[list(owner)[int(key)]] = value
    elif kind == "class" or isinstance(owner, type):
        of = owner if isinstance(owner, type) else next(b for b in type(owner).__mro__ if key in vars(b))
        delattr(of, str(key)) if value is MISSING else setattr(of, str(key), value)
    elif kind == "get":
        object.__setattr__(owner, str(key), value)
    else:
        values = owner.__globals__ if kind == "global" else attributes_of(owner)
        values.pop(key, None) if value is MISSING else values.update({key: value})


def described(place: Place) -> str:
    """Returns a place as text for messages, such as ``layer.hidden[0]`` or ``global SCALE``."""
    text = ""
    for kind, key in place:
        if kind in ("item", "entry", "key"):
            text += f"[{key}]"
        elif kind in ("contents", "end"):
            continue
        elif kind == "global":
            text = f"global {key}"
        elif kind == "cell":
            text += f".<variable {key}>"
        elif str(key) not in ("model", "__func__") or text:
            text += f".{key}"
    return text.removeprefix(".") or "the model"
