"""The part of ``ORTTrainer`` with a ready-made training loop."""

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
        """Trains for a number of epochs and evaluates after each (docs/fit.md).

        Ctrl-C ends training after the current step with the status ``interrupted`` and saves the last checkpoint. With
        several processes, each calls it with a loader of its part of the data; the history has the means over all.

        Args:
            train_loader: An iterable that yields the batches of one epoch each time: a DataLoader, a list. A batch is
                anything that :meth:`train_step` accepts: a tuple, list, dict or tensor. Batches are moved to the
                device. A dict may hold ``gradient_weight`` beside the inputs.
            eval_loader: The same for the evaluation.
            epochs: Total number of epochs, including those before a checkpoint. An accumulation window never extends
                beyond its epoch.
            metrics: Metrics of the evaluation: one, a list, or a dict by name. A metric is a function
                (outputs, labels) -> number, which is averaged over the samples; an object with ``update``, ``compute``
                and ``reset``; or an object with ``add_batch`` and ``compute``. A tuple (metric, function) passes the
                metric the function's result instead of the outputs. Outputs exclude the loss.
            labels: Name of the input that metrics compare with. Default: ``labels`` or ``label`` if there is one,
                otherwise the last input.
            callbacks: Instances of ``ort_trainer.fit.Callback``.
            checkpoints: A folder for ``last.ortckpt`` and ``best.ortckpt``, a ``CheckpointManager``, or an instance of
                ``ort_trainer.fit.Checkpoints`` or ``ManagedCheckpoints``, which have more settings.
            resume: Whether to resume from the last checkpoint, if there is one; or the path of a checkpoint. In the
                middle of an epoch, the batches already done are loaded and skipped.
            progress: Whether to show progress; or a callback that shows it.
            stop_signals: Names of signals that end training as Ctrl-C does, such as ``["SIGTERM"]``, which job
                schedulers and containers send before they kill. The current step completes, even if it exports.

        Returns:
            The final state: ``status``, ``history`` with a dict for each epoch, ``plot(path)``.

        Raises:
            TypeError, ValueError: If an argument is invalid, or a monitored number does not exist.
            FileNotFoundError: If the folder for checkpoints, or the checkpoint, does not exist.
            FileExistsError: If existing checkpoints would be replaced.
            CheckpointError: If the checkpoint was not saved by ``fit``.
            RuntimeError: If ``stop_signals`` are given outside the main thread, which alone handles signals.
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
