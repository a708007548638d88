"""The part of ``ORTTrainer`` that exports artifacts for the training API."""

from __future__ import annotations

import os

from .training.inference_mode import outside_inference_mode
from .training.loop import TrainingLoop

__all__ = ["Exporting"]


class Exporting:
    """``export_artifacts`` of :class:`~ort_trainer.ORTTrainer`."""

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
        """Writes models and a checkpoint with which ``ort_trainer.api`` continues training, without PyTorch.

        The files are ``training_model.onnx`` (forward and backward pass; adds to gradient buffers),
        ``eval_model.onnx``, ``optimizer_model.onnx``, ``checkpoint``, and ``nominal_checkpoint``. Training continues
        from them exactly as it would in the trainer: with its weights, moments, counts, schedule, random numbers, and
        the gradients of an incomplete accumulation window (docs/training_api.md). The trainer does not change.

        With several processes, all must call it, and one of them writes; artifacts train in one process, with the
        random numbers of the writing process. A PyTorch model, or ``model_desc="auto"``, needs a call of
        :meth:`prepare` or a step first.

        Args:
            directory: A folder, created if it does not exist. Existing artifacts in it are replaced: all of them, or
                none if anything fails.
            flavor: ``ort_trainer`` for ``ort_trainer.api`` on any ONNX Runtime, or ``onnxruntime-training`` for
                ``onnxruntime.training.api`` 1.19.2 and ``onnxruntime-web``.
            nominal_checkpoint: Whether to write a checkpoint that holds only the shapes of the parameters.
            fixed_learning_rate: For the flavor ``onnxruntime-training``: whether to store the learning rate in the
                optimizer model, for a runtime that can't set it, such as a browser.

        Raises:
            RuntimeError: Before the first step, if the model can be exported only with a batch.
            ValueError: If the artifacts can't do what the trainer does; the message says what, and the way out.
            ExportError: If the model has no graph of ONNX's own operators.
            TypeError, FileNotFoundError, NotADirectoryError: If the folder is invalid.
        """
        from .artifacts.export import check_exportable, export_artifacts  # here, because it imports onnx

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
