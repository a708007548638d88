"""The part of ``ORTTrainer`` that writes artifacts for training elsewhere."""

from __future__ import annotations

import os

from .training.inference_mode import outside_inference_mode
from .training.loop import TrainingLoop

__all__ = ["Exporting"]


class Exporting:
    """What :class:`~ort_trainer.ORTTrainer` has for the training API."""

    _loop: TrainingLoop

    @outside_inference_mode
    def export_artifacts(
        self,
        directory: str | os.PathLike[str],
        *,
        flavor: str = "ort_trainer",
        nominal_checkpoint: bool = True,
        fixed_learning_rate: bool = False,
    ) -> None:
        """Writes models and a checkpoint from which ``ort_trainer.api`` trains on, without PyTorch.

        The files are ``training_model.onnx`` (forward and backward pass; adds to gradient buffers),
        ``eval_model.onnx``, ``optimizer_model.onnx``, ``checkpoint``, and ``nominal_checkpoint``. Training goes on from
        them as it would in the trainer: with its weights, moments, counts, schedule, gradients of an accumulation
        window that is under way, and random numbers (docs/training_api.md). The trainer is left as it is.

        All of several processes call it, and one of them writes; artifacts train in one process, with the random
        numbers of that one. The first step exports the model if need be; with ``model_desc`` "auto", and for a PyTorch
        model, call :meth:`prepare` or a step before.

        Args:
            directory: A folder, which is made if it does not exist. Artifacts in it are replaced: all of them, or, if
                anything fails before, none.
            flavor: ``ort_trainer`` for ``ort_trainer.api`` on any ONNX Runtime, or ``onnxruntime-training`` for
                ``onnxruntime.training.api`` 1.19.2 and ``onnxruntime-web``.
            nominal_checkpoint: Whether to write a checkpoint that has the shapes of the parameters only.
            fixed_learning_rate: Of the flavor ``onnxruntime-training``: whether the optimizer model has the learning
                rate in it, for a runtime that can't set one, as in a browser.

        Raises:
            RuntimeError: Before the first step, if only a batch tells what the model takes.
            ValueError: If the artifacts could not do what the trainer does; the message says what, and the way out.
            ExportError: If the model has no graph of ONNX's own operators.
            TypeError, FileNotFoundError, NotADirectoryError: If there can be no such folder.
        """
        from .artifacts.export import check_exportable, export_artifacts  # with all that writes ONNX

        check_exportable(self._loop)
        if not self._loop.graphs.has_started:
            self.prepare()  # type: ignore[attr-defined]
        export_artifacts(
            self._loop,
            directory,
            flavor=flavor,
            nominal_checkpoint=nominal_checkpoint,
            fixed_learning_rate=fixed_learning_rate,
        )
