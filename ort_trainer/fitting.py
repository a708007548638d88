"""The part of ``ORTTrainer`` for those who want no loop of their own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .training.loop import TrainingLoop

if TYPE_CHECKING:
    from .fit import Callback, Checkpoints, FitState, ManagedCheckpoints
    from .runs import CheckpointManager

__all__ = ["Fitting"]


class Fitting:
    """``fit`` of :class:`~ort_trainer.ORTTrainer`."""

    _loop: TrainingLoop

    def fit(
        self,
        train_loader: Iterable[Any],
        eval_loader: Iterable[Any] | None = None,
        epochs: int = 1,
        *,
        metrics: Any = None,
        labels: str | None = None,
        callbacks: Iterable[Callback] = (),
        checkpoints: str | os.PathLike[str] | CheckpointManager | Checkpoints | ManagedCheckpoints | None = None,
        resume: bool | str | os.PathLike[str] = False,
        progress: bool | Callback = True,
        stop_signals: Iterable[str] = (),
    ) -> FitState:
        """Trains for some epochs, evaluating after each (docs/fit.md).

        Ctrl-C ends it after the step that runs, with the status ``interrupted``, and the last checkpoint is saved. Of
        several processes each calls it with a loader of its part of the data; the history has the means over all.

        Args:
            train_loader: Gives the batches of an epoch each time it is gone through: a DataLoader, a list. Batches are
                what :meth:`train_step` takes, tuples, lists, dicts or tensors; they are moved to the device. In a dict,
                ``gradient_weight`` may stand beside the inputs.
            eval_loader: The same for the evaluation.
            epochs: How many there are in all, those before a checkpoint included. The last accumulation window of each
                ends with it.
            metrics: Of the evaluation: a metric, a list of them, or a dict of them by name. A metric is a function
                (outputs, labels) -> number, whose mean over the samples is taken; an object with ``update``,
                ``compute`` and ``reset``; or one with ``add_batch`` and ``compute``. Or a tuple of one of these and a
                function of the outputs, whose result it gets instead of them. Outputs are those besides the loss.
            labels: Name of the input that metrics compare with; None for ``labels`` or ``label`` if there is one, or
                else the last input.
            callbacks: Objects of subclasses of ``ort_trainer.fit.Callback``.
            checkpoints: A folder for ``last.ortckpt`` and ``best.ortckpt``, a ``CheckpointManager``, or one of
                ``ort_trainer.fit.Checkpoints`` and ``ManagedCheckpoints``, which have more settings.
            resume: Whether to go on from the last checkpoint, if there is one; or the path of another. In the middle of
                an epoch, the batches done are loaded and skipped.
            progress: Whether to show how it goes on; or a callback that does it.
            stop_signals: Names of signals that end it as Ctrl-C does, such as ``["SIGTERM"]``, which schedulers of jobs
                and containers send before they kill. The step that runs is completed, an export too.

        Returns:
            The state at the end: ``status``, ``history`` with a dict for each epoch, ``plot(path)``.

        Raises:
            TypeError, ValueError: If an argument is none that can be, or a number is monitored that is not there.
            FileNotFoundError: If the folder for checkpoints, or the checkpoint, does not exist.
            FileExistsError: If checkpoints would be replaced.
            CheckpointError: If the checkpoint was not saved by ``fit``.
            RuntimeError: If there are ``stop_signals``, but this is not the main thread, which alone handles signals.
        """
        from .fit import fit

        return fit(
            self,  # type: ignore[arg-type]
            self._loop.layout.device,
            train_loader,
            eval_loader,
            epochs,
            metrics=metrics,
            labels=labels,
            callbacks=callbacks,
            checkpoints=checkpoints,
            resume=resume,
            progress=progress,
            stop_signals=stop_signals,
        )
