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
    """Methods of :class:`~ort_trainer.ORTTrainer` for several processes; all of them work with one process, too."""

    _loop: TrainingLoop

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self._loop.strategy.world_size

    @property
    def world_rank(self) -> int:
        """Rank of this process, from 0."""
        return self._loop.strategy.world_rank

    def gather(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the values of all processes, by rank. All processes must call it at the same point.

        Args:
            values: Anything that the ``user_dict`` of a checkpoint may hold; for large tensors ``torch.distributed`` is
                faster.

        Raises:
            DistributedError: If another process does not arrive in time, or calls something else.
            TypeError: If the values hold anything else.
        """
        if self.world_size == 1:
            return [dict(values)]
        self._loop.strategy.meet("gather", Share(0.0))
        return self._bring(values)

    def join(self, answer: Callable[[], Mapping[str, Any]] = dict) -> AbstractContextManager[None]:
        """Returns a context for loops in which processes have unequal numbers of batches.

        Weight updates are joint, so without this context, processes with more batches would wait forever for the
        others. A process that reaches the end of the context takes part in the calls of the others until all have
        reached it: in the updates of ``train_step`` and ``optimizer_step``, to the first of which it contributes the
        rest of its accumulation window, and in ``state_dict``, ``save_checkpoint`` and :meth:`gather`. An update uses
        the available micro-batches, reduced according to ``batch.gradient_reduction``. After the context, all processes
        have the same weights and the same number of updates; to update with the remaining micro-batches, call
        ``optimizer_step`` in all of them.

        All processes must enter the context. An exception leaves it at once. ``forward_backward`` is refused inside it,
        because other processes can't imitate a user's own loop. With one process the context does nothing.

        Args:
            answer: Returns this process's values for a :meth:`gather` of the others after it has reached the end.

        Raises:
            DistributedError: At the end, if another process does not arrive in time.
            RuntimeError: If this process is already in such a context.

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
        """Exchanges values with all other processes after all have agreed to."""
        own = io.BytesIO()
        save_checkpoint_file(own, {}, values)
        return [load_checkpoint_file(io.BytesIO(found))[1] for found in self._loop.strategy.gather(own.getvalue())]
