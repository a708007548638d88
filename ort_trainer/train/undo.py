"""Rolls back a step whose update failed."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from ..engine import Plan

if TYPE_CHECKING:
    from .loop import TrainingLoop

__all__ = ["undone_without_update"]


class undone_without_update:
    """A context for a step: rolls the step back if an error occurs before the weights are updated.

    Restores the counter, buffers and random state. The update has divided and clipped the window's gradients in place
    by then, so all of them are dropped, including those of earlier micro-batches. (This is a class because a generator
    function takes twice as long, in every step.)

    Args:
        loop: Runs the step. With several processes nothing is restored, because no process can roll back alone.
        plan: The plan of the step.
    """

    def __init__(self, loop: TrainingLoop, plan: Plan) -> None:
        self._loop, self._graph = loop, plan.runner.graph

    def __enter__(self) -> None:
        session, info, graph = self._loop.start_session(), self._loop.info, self._graph
        self._step, self._updates, self._finite = info.step, info.optimization_step, info.all_finite
        self._random_state = session.generator.get_state() if graph.random else None
        self._buffers = {name: session.buffers[name].clone() for name in graph.buffer_updates}

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        loop, info = self._loop, self._loop.info
        # Once the update is counted, the weights have changed: the step is complete, and the error came later.
        if kind is None or info.optimization_step != self._updates or loop.strategy.world_size > 1:
            return
        session = loop.start_session()
        info.step, info.all_finite = self._step, self._finite
        if self._random_state is not None:
            session.generator.set_state(self._random_state)
        for name, buffer in self._buffers.items():
            session.buffers[name].copy_(buffer)
        loop.source.memory.publish(self._buffers)
