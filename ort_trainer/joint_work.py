"""The part of ``ORTTrainer`` for several processes that train one model."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from .checkpoint import load_checkpoint_file, save_checkpoint_file
from .training.loop import TrainingLoop
from .training.window import Share

__all__ = ["JointWork"]


class JointWork:
    """What :class:`~ort_trainer.ORTTrainer` has for several processes; with one, all of it does what one needs."""

    _loop: TrainingLoop

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._loop.strategy.world_size

    @property
    def world_rank(self) -> int:
        """The number of this process, from 0."""
        return self._loop.strategy.world_rank

    def gather(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the values of all processes, by rank: all call it at the same place.

        Args:
            values: What the user's dict of a checkpoint may hold; for large tensors ``torch.distributed`` is faster.

        Raises:
            DistributedError: If another process does not come in time, or does something else.
            TypeError: If the values hold something else.
        """
        if self.world_size == 1:
            return [dict(values)]
        self._loop.strategy.meet("gather", Share(0.0))
        return self._bring(values)

    def join(self, answer: Callable[[], Mapping[str, Any]] = dict) -> AbstractContextManager[None]:
        """Returns a context for a loop over batches of which the processes may have different numbers.

        Weight updates are joint: without this, processes with more batches would wait in vain for those with fewer. A
        process that comes to the end of the context takes part in what those do that still have batches, until all are
        there: the updates of ``train_step`` and ``optimizer_step``, to the first of which it brings what is left of its
        accumulation window; ``state_dict``, ``save_checkpoint`` and :meth:`gather`. An update uses the micro-batches
        that there are, as ``batch.gradient_reduction`` says. Behind the context all have the same weights and the same
        number of updates; call ``optimizer_step`` there, in all processes, to update with what is left then.

        All processes must enter the context. An exception inside leaves it at once. ``forward_backward`` is refused in
        it, as nobody else can play the part of a loop of the user's own. With one process the context does nothing.

        Args:
            answer: Gives what this process brings to a :meth:`gather` of the others when it is at the end.

        Raises:
            DistributedError: At the end, if another process does not come in time.
            RuntimeError: If this process is in such a context already.

        Example:
            >>> with trainer.join():
            ...     for x, y in batches_of_this_process:
            ...         trainer.train_step(x, y)
            >>> trainer.optimizer_step()
        """

        def follow() -> None:
            if self._loop.follow() == "gather":
                self._bring(answer())

        return self._loop.strategy.join(follow)

    def _bring(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Exchanges values with all other processes, which have agreed to do so."""
        own = io.BytesIO()
        save_checkpoint_file(own, {}, values)
        return [load_checkpoint_file(io.BytesIO(found))[1] for found in self._loop.strategy.gather(own.getvalue())]
