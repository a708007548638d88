"""``Adapters``: several sets of trained parameters over one frozen base, of which one is trained at a time."""

from __future__ import annotations

import dataclasses
import os

from ..core.named_adapters import NamedAdapters
from ..state.state import State
from ..state.training_api import read_checkpoint, write_checkpoint
from .checkpoint_state import CheckpointState, state_of


class Adapters(NamedAdapters[State]):
    """Several adapters over one base, of which one is trained at a time; the others wait in memory.

    An adapter is all parameters that are trained, with the optimizer's moments and counts. Frozen parameters, running
    statistics, the learning rate and its schedule are common to all. A fresh adapter begins as the state is when
    ``Adapters`` is made.

    Args:
        state: The state; its :class:`Module` is made before, and its :class:`Optimizer` if there is one.
        name: The name of the adapter that it has.

    Attributes:
        active: The name of the adapter that steps train and that evaluation uses.

    Raises:
        RuntimeError: If there is no module yet, or a parameter has no value.
        TypeError: If ``state`` is no CheckpointState, or the name no str.
        ValueError: If all parameters are trained, so that there is no base.

    Example:
        >>> adapters = Adapters(state, "formal")
        >>> adapters.add("friendly")
        >>> adapters.activate("friendly")
        >>> adapters.save("friendly", "friendly.adapter")
    """

    def __init__(self, state: CheckpointState, name: str = "default") -> None:
        self._state = inner = state_of(state)
        if inner.statistics is None:
            raise RuntimeError(
                "the state has no module yet: make the Module, and its Optimizer, before Adapters(state)"
            )
        if not inner.frozen:
            raise ValueError(
                "all parameters of the state are trained, so there is no base: export a model with an adapter"
            )
        super().__init__(name)
        self._first = self._current()

    def save(self, name: str, path: str | os.PathLike[str], include_optimizer_state: bool = False) -> None:
        """Writes an adapter alone, without its base, atomically.

        Args:
            name: Its name.
            path: The file; an existing one is replaced.
            include_optimizer_state: Whether to include the moments, which resuming needs.

        Raises:
            ValueError: If the name is unknown.
            FileNotFoundError: If the folder does not exist.
        """
        self._check(name)
        adapter = self._current() if name == self.active else self._waiting[name]
        write_checkpoint(path, adapter if include_optimizer_state else dataclasses.replace(adapter, optimizer=None))

    def load(self, name: str, path: str | os.PathLike[str]) -> None:
        """Adds an adapter from a file, which waits until it is activated.

        Args:
            name: Its name.
            path: What :meth:`save` has written.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the name is taken, the file is damaged, or it is of another base.
        """
        self._check_new(name)
        adapter = read_checkpoint(path)
        with self._state.lock:
            self._state.check_adapter(adapter, f"{os.fspath(path)!r}")
        self._waiting[name] = adapter

    def _current(self) -> State:
        with self._state.lock:
            return self._state.adapter()

    def _fresh(self) -> State:
        return self._first  # which is never changed

    def _check_window(self) -> None:
        if self._state.micro_batches and not self._state.reset:
            raise RuntimeError(
                "the gradients are of the active adapter: call lazy_reset_grad() before you activate another"
            )

    def _restore(self, state: State, present: State) -> None:
        with self._state.lock:
            self._state.replace_adapter(state)
