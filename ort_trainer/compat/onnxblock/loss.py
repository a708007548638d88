"""Losses as blocks. Each adds an input for its labels, unless the model has a value of that name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from ...core.errors import shown
from .blocks import Abs, Block, InputLike, PassThrough, Pow, ReduceMean, ReduceSum, Sub

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]

_REDUCTIONS: dict[str, Any] = {"mean": ReduceMean, "sum": ReduceSum, "none": PassThrough}


class _Loss(Block):
    def __init__(self, reduction: str = "mean") -> None:
        if reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {list(_REDUCTIONS)}, but {shown(reduction)} was given")
        self._reduction = reduction
        self._reduce = _REDUCTIONS[reduction](keepdims=False)

    def _target(self, like: str, name: str) -> str:
        """Returns the name of the labels; adds an input for them if the model has no value of that name."""
        return name if self._handle.has(name) else str(InputLike(like)(name))


class MSELoss(_Loss):
    """The squared difference of prediction and target."""

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Adds the loss of a prediction."""
        difference = Sub()(loss_input_name, self._target(loss_input_name, target_name))
        return str(self._reduce(Pow(2.0)(difference)))


class L1Loss(_Loss):
    """The absolute difference of prediction and target."""

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Adds the loss of a prediction."""
        return str(self._reduce(Abs()(Sub()(loss_input_name, self._target(loss_input_name, target_name)))))


class CrossEntropyLoss(_Loss):
    """Cross entropy of scores, with the classes as second dimension, and integer labels."""

    def __init__(self, weight: Any = None, reduction: str = "mean", ignore_index: int | None = None) -> None:
        super().__init__(reduction)
        self._weight, self._ignored = weight, ignore_index

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Adds the loss of scores."""
        is_new = not self._handle.has(labels_name)
        names = [scores_input_name, self._target(scores_input_name, labels_name)]
        if is_new:
            kind = self.base.graph.input[-1].type.tensor_type
            kind.elem_type = onnx.TensorProto.INT64
            del kind.shape.dim[1:2]
        if self._weight is not None:
            names.append(self._keep("weight", np.asarray(self._weight, np.float32)))
        return self._add(
            "SoftmaxCrossEntropyLoss", names, outputs=2, reduction=self._reduction, ignore_index=self._ignored
        )


class BCEWithLogitsLoss(_Loss):
    """Binary cross entropy of logits and targets between 0 and 1, each with its weight.

    With s the softplus function, it is (1 - y) x + (1 + (p - 1) y) s(-x), which no logit overflows.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self._weight, self._positive = weight, pos_weight

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Adds the loss of logits."""
        target, one = self._target(loss_input_name, target_name), self._keep("one", np.float32(1))
        factor = one
        if self._positive is not None:
            excess = self._keep("pos_weight", np.asarray(self._positive, np.float32) - 1)
            factor = self._add("Add", [one, self._add("Mul", [excess, target])])
        softplus = self._add("Softplus", [self._add("Neg", [loss_input_name])])
        linear = self._add("Mul", [self._add("Sub", [one, target]), loss_input_name])
        loss = self._add("Add", [linear, self._add("Mul", [factor, softplus])])
        if self._weight is not None:
            loss = self._add("Mul", [loss, self._keep("weight", np.asarray(self._weight, np.float32))])
        return str(self._reduce(loss))
