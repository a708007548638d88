"""The transaction of a step: it takes effect as a whole or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch

from ..core.interrupts import uninterrupted
from ..core.threads import OneThread
from ..engine import Executor
from ..export.model import ModelSource
from ..optim.step_info import TrainStepInfo
from ..optim.update import Again
from ..step import Step
from .strategy import Strategy

Method = TypeVar("Method", bound=Callable[..., Any])


class _Loop(Protocol):
    """What a transaction needs of a training loop."""

    info: TrainStepInfo
    source: ModelSource
    strategy: Strategy
    one_thread: OneThread
    transaction: Transaction | None


class Transaction(uninterrupted):
    """A context that a step enters, begins and commits::

        enter             begin               commit                exit
          | bind the batch  | run, reduce, update | leave values outside |
          | error: nothing  | error: counters,    | error: the step      |
          | has changed     | buffers and random  | stays complete       |
          |                 | state are restored  |                      |
          | signals arrive  | signals wait ............................. | and are delivered

    No other thread may be in a transaction of the loop. The step runs outside ``torch.inference_mode``, because later
    steps could not change inference tensors. An update divides and clips the window's gradients in place, so if it
    fails, all of them are dropped, including those of earlier micro-batches. Several processes commit before they meet,
    because no process can roll back alone.

    Args:
        loop: Runs the step.
        joint: Whether other processes wait for the step, and must hear of its error.

    Attributes:
        again: Runs the step's batch again with the current weights, for an optimizer with a closure; else None.
    """

    def __init__(self, loop: _Loop, joint: bool = True) -> None:
        self._loop, self._joint = loop, joint
        self._before: tuple[Any, ...] | None = None
        self._outside: torch.inference_mode | None = None
        self._handlers = {}
        self.again: Again | None = None

    def __enter__(self) -> Transaction:
        self._is_outermost = self._loop.one_thread.enter()
        self._around, self._loop.transaction = self._loop.transaction, self
        if torch.is_inference_mode_enabled():
            self._outside = torch.inference_mode(False)
            self._outside.__enter__()
        return self

    def begin(self, executor: Executor | None = None, step: Step | None = None) -> None:
        """Holds signals, and copies what a run of a graph changes.

        Args:
            executor: Has the buffers and the random state.
            step: The graph; None if none runs.
        """
        self.hold()
        if executor is not None and step is not None:
            info = self._loop.info
            state = executor.generator.get_state() if step.random or executor.draws_on_device else None
            updates = step.buffer_updates
            buffers = {name: executor.tensor(name).clone() for name in updates} if updates else {}
            self._before = executor, info.step, info.all_finite, state, buffers

    def undo(self) -> None:
        """Restores the state from before :meth:`begin`, for another attempt, and delivers signals."""
        if self._before is not None:
            self._put_back(*self._before)
            self._before = None
        self.release()

    def commit(self) -> None:
        """Records that the step is complete: a later error does not undo it."""
        self._before = None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            # First, so that a handler finds the step either complete or not begun.
            if kind is not None and self._before is not None:
                self._put_back(*self._before)
            self.release()  # may raise the error of a handler
        except BaseException as error:
            value = error  # the other processes hear of a handler's error, too
            raise
        finally:
            if value is not None and self._joint:
                self._loop.strategy.failed(value)
            if self._outside is not None:
                self._outside.__exit__(kind, value, tb)
            self._loop.transaction = self._around
            if self._is_outermost:
                self._loop.one_thread.leave()

    def _put_back(
        self, executor: Executor, step: int, all_finite: bool, state: Any, buffers: dict[str, torch.Tensor]
    ) -> None:
        """Restores what :meth:`begin` has copied."""
        self._loop.info.step, self._loop.info.all_finite = step, all_finite
        if state is not None:
            executor.generator.set_state(state)
        for name, buffer in buffers.items():
            executor.tensor(name).copy_(buffer)
        self._loop.source.memory.publish(buffers)  # to the model, where it has copies of them


def in_transaction(method: Method) -> Method:
    """Decorates a method that is not a step: it runs in a transaction of its loop, which is ``self._loop`` or ``self``.

    Nothing begins, so nothing is restored. What remains: one thread, and no inference mode.
    """

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Transaction(getattr(self, "_loop", self), joint=False):
            return method(self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


def outside_inference_mode(method: Method) -> Method:
    """Decorates a function: it runs outside ``torch.inference_mode``, as steps do in a :class:`Transaction`."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
