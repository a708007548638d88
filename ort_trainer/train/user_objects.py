"""The user's loss scalers and schedules, which the trainer uses directly: one trainer per object at a time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import CheckpointError
from ..state.differences import compare_keys
from ..state.state import HasState

# Id of an object -> the trainer's loop that uses it. The loop keeps the object alive, so ids are not reused meanwhile.
_USERS: dict[int, weakref.ref[Any]] = {}


def claim(thing: object, user: object, option: str, refuse: Callable[[str], None]) -> None:
    """Registers the user of an object.

    Args:
        thing: The object; ``user`` must keep it alive.
        user: The trainer's loop that uses it from now on.
        option: The option that it was passed in, for the message.
        refuse: Called with a message if another trainer uses it.
    """
    reference = _USERS.get(id(thing))
    if reference is not None and reference() is not None:
        gc.collect()  # a reference cycle may keep a deleted trainer alive
    other = None if reference is None else reference()
    if other is not None and other is not user:
        refuse(
            f"{option}: another trainer uses this {type(thing).__name__}, and both would change it: give each trainer "
            "its own, or delete the other trainer first (del trainer)"
        )
    key = id(thing)

    def forget(gone: weakref.ref[Any]) -> None:
        if _USERS.get(key) is gone:
            del _USERS[key]

    _USERS[key] = weakref.ref(user, forget)


def load_state(thing: HasState, state: Mapping[str, Any], key: str, strict: bool) -> None:
    """Restores the state of a scaler or schedule; if that fails, the object is unchanged.

    Args:
        thing: The object.
        state: Its state.
        key: The state's key in the state dict, for messages.
        strict: Whether its keys must be exactly those of the object's own state; if not, missing keys keep their
            values.

    Raises:
        RuntimeError: If keys differ and ``strict`` is True.
        CheckpointError: If the object rejects the state.
    """
    previous = thing.state_dict()
    compare_keys(previous, state, strict, f"state_dict[{key}]")
    try:
        thing.load_state_dict(dict(state) if strict else {**previous, **state})
    except Exception as error:
        thing.load_state_dict(previous)
        if not isinstance(error, (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)):
            raise
        raise CheckpointError(f"state_dict[{key}] is invalid for {type(thing).__name__}: {error!r}") from error
