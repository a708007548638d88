"""Loss scalers and schedules of the user: a trainer works with the very objects, one trainer at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import warn
from .differences import compare_keys

__all__ = ["HasState", "claim", "load_state"]

# id of an object -> the trainer's loop that works with it, which keeps the object alive for as long as it lives itself.
_USERS: dict[int, weakref.ref[Any]] = {}


class HasState(Protocol):
    """What a checkpoint keeps the state of."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores it."""
        ...


def claim(thing: object, user: object, option: str, lenient: bool = False) -> None:
    """Notes that an object is worked with, and by whom.

    Args:
        thing: The object; ``user`` must keep it alive.
        user: Who works with it from now on.
        option: Where it was given, for the message.
        lenient: Whether it is only a warning if another trainer works with it, as it was with legacy.

    Raises:
        ValueError: If another trainer that still exists works with it.
    """
    known = _USERS.get(id(thing))
    if known is not None and known() is not None:
        gc.collect()  # a trainer that nobody has any more may be left in a cycle
    other = None if known is None else known()
    if other is not None and other is not user:
        message = (
            f"{option}: this {type(thing).__name__} is used by another trainer, and would be changed by both: give "
            "each trainer its own, or delete the other trainer first (del trainer)"
        )
        if not lenient:
            raise ValueError(message)
        warn(message)
    key = id(thing)

    def forget(gone: weakref.ref[Any]) -> None:
        if _USERS.get(key) is gone:
            del _USERS[key]

    _USERS[key] = weakref.ref(user, forget)


def load_state(thing: HasState, state: Mapping[str, Any], key: str, strict: bool) -> None:
    """Restores the state of a scaler or schedule, or leaves it as it was.

    Args:
        thing: The object.
        state: Its state.
        key: The state's key in the state dict, for messages.
        strict: Whether it must have exactly the keys that the object's own has; if not, only what both have counts.

    Raises:
        RuntimeError: If keys differ, and ``strict`` is True.
        ValueError: If the object refuses the state.
    """
    own = thing.state_dict()
    compare_keys(own, state, strict, f"state_dict[{key}]")
    try:
        thing.load_state_dict(dict(state) if strict else {**own, **state})
    except Exception as error:
        thing.load_state_dict(own)
        if not isinstance(error, (KeyError, TypeError, ValueError)):
            raise
        raise ValueError(f"state_dict[{key}] does not fit {type(thing).__name__}: {error!r}") from error
