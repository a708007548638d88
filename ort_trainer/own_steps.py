"""The part of ``ORTTrainer`` for the user's own training loops."""

from __future__ import annotations

from typing import Any

from .training import own_loop
from .training.inference_mode import outside_inference_mode
from .training.loop import TrainingLoop
from .training.onnx_file import names_without_loss

__all__ = ["OwnSteps", "bare"]


class OwnSteps:
    """Methods of :class:`~ort_trainer.ORTTrainer` that each do a part of ``train_step``."""

    _loop: TrainingLoop

    @outside_inference_mode
    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward and backward pass, and adds the gradients to ``p.grad`` of the model's parameters.

        Like ``loss.backward()``, it counts and updates nothing. Afterwards, inspect, clip or change the gradients, and
        update with an optimizer of ``torch.optim`` or with :meth:`optimizer_step`; call ``model.zero_grad()`` or
        :meth:`lazy_reset_grad` before the next pass, as in any PyTorch loop. Gradients never include the loss scale of
        mixed precision; gradients that overflowed are not finite, and :meth:`optimizer_step` notices that.

        Several processes must call it together; each gets the mean of all gradients, as with PyTorch's
        ``DistributedDataParallel``. Changes of ``p.grad`` afterwards must be the same in all processes.

        Args:
            *args: As for ``train_step``.
            **kwargs: As for ``train_step``.

        Returns:
            As ``train_step``.

        Raises:
            RuntimeError: Inside an accumulation window of ``train_step``; inside ``trainer.join()`` of several
                processes; or if the trainer works on copies of the weights (``utils.share_weights=False``, ONNX
                models).
            TypeError, ValueError: If the batch does not fit the description.
        """
        return bare(own_loop.forward_backward(self._loop, args, kwargs))

    @outside_inference_mode
    def optimizer_step(self) -> bool:
        """Updates the weights now, with the gradients so far.

        These are the gradients of the current accumulation window, which may be incomplete (as at the end of an epoch),
        or otherwise those that :meth:`forward_backward` has put into ``p.grad``, where they remain. Loss scale,
        clipping and schedule work as in ``train_step``. Several processes must call it together; some of them may have
        no micro-batch.

        Returns:
            Whether the weights were updated: False if there were no gradients, or if they were not finite in mixed
            precision.
        """
        return own_loop.optimizer_step(self._loop)

    @outside_inference_mode
    def lazy_reset_grad(self) -> None:
        """Drops all gradients that :meth:`optimizer_step` would use, so that the next pass starts from zero.

        It discards the current accumulation window; the next ``train_step`` starts a new one. It sets ``p.grad`` of the
        trained parameters to None, as ``model.zero_grad()`` does, except with ``utils.share_weights=False``, where the
        trainer does not use it. Weights, moments, running statistics, random state and counters do not change.
        """
        own_loop.lazy_reset_grad(self._loop)

    @outside_inference_mode
    def forward(self, *args: Any, training: bool = True, **kwargs: Any) -> Any:
        """Runs the model and the loss without gradients.

        In training mode, dropout is active, and batch norm uses the batch's statistics and updates its running ones, as
        in PyTorch's training mode under ``torch.no_grad()``.

        Args:
            *args: As for ``train_step``.
            training: Whether to run in training mode; False does what ``eval_step`` does.
            **kwargs: As for ``train_step``.

        Returns:
            As ``train_step``.
        """
        loop = self._loop
        if not training:
            return bare(loop.evaluate(args, kwargs, loop.info.fetches))
        return bare(own_loop.forward(loop, args, kwargs))

    @outside_inference_mode
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns all outputs except the loss, in evaluation mode; unused inputs may be left out.

        Args:
            *args: As for ``train_step``, without the label.
            **kwargs: As for ``train_step``, without the label.

        Returns:
            The outputs as a list of new tensors; a single output as a bare tensor.

        Raises:
            TypeError: Before the first step, because the export needs all inputs: call ``prepare`` first.
            ValueError: If the loss is the only described output.
        """
        loop = self._loop
        return bare(loop.evaluate(args, kwargs, names_without_loss(loop.graphs.description)))


def bare(outputs: list[Any]) -> Any:
    """Returns a step's outputs as a list, or a single output alone."""
    return outputs[0] if len(outputs) == 1 else outputs
