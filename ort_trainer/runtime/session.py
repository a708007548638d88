"""``StepSession``: the step, as ONNX Runtime's C++ class of the same name offers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..graph import TrainingGraph
from .planned_session import PlannedSession
from .runner import Plan

if TYPE_CHECKING:
    from .engine import InferenceSession

__all__ = ["StepSession"]


class StepSession(PlannedSession):
    """Adds to the base what takes inputs by position. The C++ names mean what they mean there.

    ``train_step`` adds to the gradients, ``optimizer_step`` applies them, ``lazy_reset_grad`` makes the next
    ``train_step`` start from zero.
    """

    @property
    def inference_session(self) -> InferenceSession:
        """The ONNX Runtime session of the first training graph.

        Raises:
            RuntimeError: If there is none yet.
        """
        self._first(True)
        return self._runners_for(True)[0].inference_session

    def input_names(self, training: bool = True) -> list[str]:
        """Returns the names of the batch inputs, in the order in which steps take them."""
        return [spec.name for spec in self._first(training).inputs]

    def output_names(self, training: bool = True) -> list[str]:
        """Returns the names of the outputs, in the order in which steps return them."""
        return [spec.name for spec in self._first(training).outputs]

    def train_step(
        self, inputs: Sequence[torch.Tensor], *, loss_scale: float = 1.0, names: Sequence[str] | None = None
    ) -> list[torch.Tensor]:
        """Runs forward and backward pass and adds to the gradients.

        If the run fails, gradients, buffers and random state are what they were.

        Args:
            inputs: The batch in the order of :meth:`input_names`, contiguous and on the session's device.
            loss_scale: Factor on the loss in the backward pass; the returned loss is without it.
            names: Outputs to return; None for all.

        Returns:
            The outputs as new tensors, in the order of ``names``.
        """
        batch, plan = self._choose(True, inputs, names)
        return self.train(plan, batch, loss_scale=loss_scale)

    def eval_step(
        self, inputs: Sequence[torch.Tensor | None], *, names: Sequence[str] | None = None
    ) -> list[torch.Tensor]:
        """Runs the forward pass in evaluation mode; changes nothing.

        Args:
            inputs: The batch in the order of :meth:`input_names`. An input that the asked-for outputs do not need may
                be None.
            names: Outputs to return; None for all.

        Returns:
            The outputs as new tensors, in the order of ``names``.

        Raises:
            TypeError: If an input is None that the outputs need.
        """
        batch, plan = self._choose(False, inputs, names)
        return self.evaluate(plan, batch)

    def _first(self, training: bool) -> TrainingGraph:
        if not self._runners_for(training):
            raise RuntimeError(f"the session has no {'training' if training else 'evaluation'} graph yet: add one")
        return self._runners_for(training)[0].graph

    def _choose(
        self, training: bool, inputs: Sequence[torch.Tensor | None], names: Sequence[str] | None
    ) -> tuple[dict[str, torch.Tensor], Plan]:
        own = self.input_names(training)
        if len(inputs) != len(own):
            raise TypeError(f"{len(inputs)} inputs were given, but the graph takes {len(own)}: {own}")
        batch = {name: value for name, value in zip(own, inputs, strict=True) if value is not None}
        plan = self.plan(training, batch, self.output_names(training) if names is None else names)
        if plan is None:
            shapes = {name: tuple(value.shape) for name, value in batch.items()}
            raise ValueError(
                f"no graph of the session accepts the shapes {shapes}: the model fixes a dimension, or asks for other "
                "sizes; add a graph that was exported for them"
            )
        return batch, plan
