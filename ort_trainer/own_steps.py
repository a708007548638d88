"""The part of ``ORTTrainer`` for training loops of the user's own."""

from __future__ import annotations

from typing import Any

from .training import own_loop
from .training.inference_mode import outside_inference_mode
from .training.loop import TrainingLoop
from .training.onnx_file import names_without_loss

__all__ = ["OwnSteps", "bare"]


class OwnSteps:
    """Passes of :class:`~ort_trainer.ORTTrainer` that do less than ``train_step``."""

    _loop: TrainingLoop

    @outside_inference_mode
    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward pass and adds the gradients to ``p.grad`` of the model's parameters.

        It does what ``loss.backward()`` does, and nothing else: nothing is counted or updated. Then clip, look at the
        gradients or change them, and update with an optimizer of ``torch.optim`` or with :meth:`optimizer_step`; and
        call ``model.zero_grad()`` or :meth:`lazy_reset_grad` before the next pass, as in any PyTorch loop. Gradients
        are those of the loss, whatever the loss scale of mixed precision; where they have overflowed they are not
        finite, which :meth:`optimizer_step` notices.

        Several processes run it together, and all get the mean of their gradients, as with PyTorch's
        ``DistributedDataParallel``; what is done to ``p.grad`` afterwards must be the same in all of them.

        Args:
            *args: As for ``train_step``.
            **kwargs: As for ``train_step``.

        Returns:
            As ``train_step``.

        Raises:
            RuntimeError: In the middle of an accumulation window of ``train_step``; in ``trainer.join()`` of several
                processes; and if the trainer works on copies of the weights (``utils.share_weights=False``, ONNX
                models).
            TypeError, ValueError: If the batch does not fit the description.
        """
        return bare(own_loop.forward_backward(self._loop, args, kwargs))

    @outside_inference_mode
    def optimizer_step(self) -> bool:
        """Updates the weights now, with what there is.

        That is the accumulation window so far, which need not be complete (as at the end of an epoch), or else what
        :meth:`forward_backward` has put into ``p.grad``, which then stays there. Loss scale, clipping and schedule are
        those of ``train_step``. Several processes call it together; some of them may have no micro-batch.

        Returns:
            Whether the weights were updated: not if there were no gradients, or if they were not finite in mixed
            precision.
        """
        return own_loop.optimizer_step(self._loop)

    @outside_inference_mode
    def lazy_reset_grad(self) -> None:
        """Drops all gradients that :meth:`optimizer_step` would use, so that the next pass starts from zero.

        The accumulation window so far is given up, and the next ``train_step`` is the first of a new one. ``p.grad`` of
        the trained parameters becomes None, as with ``model.zero_grad()``, whatever has put it there; not with
        ``utils.share_weights=False``, where the trainer has nothing to do with it. Weights, moments, running
        statistics, random state and counters stay as they are: steps that were counted remain so.
        """
        own_loop.lazy_reset_grad(self._loop)

    @outside_inference_mode
    def forward(self, *args: Any, training: bool = True, **kwargs: Any) -> Any:
        """Runs the model and the loss without gradients.

        In training mode dropout drops, batch norm uses the batch's statistics and updates its running ones, as when
        PyTorch runs a model in training mode under ``torch.no_grad()``.

        Args:
            *args: As for ``train_step``.
            training: Whether in training mode; if not, it does what ``eval_step`` does.
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
        """Returns all outputs but the loss, in evaluation mode; inputs that they do not need may be left out.

        Args:
            *args: As for ``train_step``, without the label.
            **kwargs: As for ``train_step``, without the label.

        Returns:
            The outputs as a list of new tensors; a bare tensor where it is only one.

        Raises:
            TypeError: Before the first step, which exports the model and so needs all inputs: call ``prepare`` first.
            ValueError: If the loss is the only described output.
        """
        loop = self._loop
        return bare(loop.evaluate(args, kwargs, names_without_loss(loop.graphs.description)))


def bare(outputs: list[Any]) -> Any:
    """Returns the outputs of a step, or the one that there is."""
    return outputs[0] if len(outputs) == 1 else outputs
