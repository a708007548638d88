"""The optimizer model for onnxruntime-training's runtime: one operator on sequences of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from ...core.errors import shown
from ..step_models import IR_VERSION

if TYPE_CHECKING:
    from ...optim.update_writer import ParameterUpdate

__all__ = ["optimizer_model"]

_MICROSOFT = "com.microsoft"
_RATE, _STEP, _WEIGHTS, _GRADIENTS = "learning_rate", "step", "params", "gradients"
_MOMENTS = ("first_order_moments", "second_order_moments")
_WAY_OUT = "use the default flavor, which has all of the trainer's optimizers"


def optimizer_model(
    updates: Mapping[str, ParameterUpdate],
    learning_rates: Sequence[float],
    opset: int,
    fixed_learning_rate: bool = False,
) -> onnx.ModelProto:
    """Returns the optimizer model.

    Args:
        updates: Name of a trained parameter -> its update.
        learning_rates: One for each parameter group, then one for all other parameters.
        opset: Version of the standard operators.
        fixed_learning_rate: Whether to store the learning rate in the model, which then ignores the runtime's.

    Raises:
        ValueError: If onnxruntime-training lacks the optimizer or a feature of it; the message says which.
    """
    update = _common(updates, learning_rates)
    make = onnx.helper
    rate, gradients, nodes, constants = _RATE, _GRADIENTS, [], []
    if fixed_learning_rate:
        rate = "fixed_learning_rate"
        value = np.array([learning_rates[update.group]], np.float32)
        constants.append(onnx.numpy_helper.from_array(value, rate))
    if math.isfinite(update.limit):
        nodes.append(
            make.make_node("InplaceClipGradNorm", [gradients], ["clipped"], domain=_MICROSOFT, max_norm=update.limit)
        )
        gradients = "clipped"
    moments: tuple[str, ...] = _MOMENTS
    if update.rule.name == "AdamOptimizer":
        operands = [rate, _STEP, _WEIGHTS, gradients, *_MOMENTS]
        nodes.append(make.make_node("AdamWOptimizer", operands, ["updated"], domain=_MICROSOFT, **_adam(update.hyper)))
    else:
        moments = _MOMENTS[:1]  # the runtime passes it, though the operator does not take it
        nodes.append(make.make_node("SGDOptimizerV2", [rate, _WEIGHTS, gradients], ["updated"], domain=_MICROSOFT))
    graph = make.make_graph(
        nodes,
        "optimizer",
        [
            make.make_tensor_value_info(_RATE, onnx.TensorProto.FLOAT, [1]),
            make.make_tensor_value_info(_STEP, onnx.TensorProto.INT64, [1]),
            *(
                make.make_tensor_sequence_value_info(name, onnx.TensorProto.FLOAT, None)
                for name in (_WEIGHTS, _GRADIENTS, *moments)
            ),
        ],
        # SGD's operator declares a scalar, so this shape makes the runtime warn once, on loading, as it does for
        # upstream's own models. Without the shape it would warn in every step.
        [make.make_tensor_value_info("updated", onnx.TensorProto.BOOL, [1])],
        constants,
    )
    imports = [make.make_opsetid("", opset), make.make_opsetid(_MICROSOFT, 1)]
    return make.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="ort_trainer")


def _adam(hyper: Mapping[str, Any]) -> dict[str, Any]:
    # The trainer and the operator number the modes alike: PyTorch's is 0, Transformers' is 1. The operator's mode 0
    # always corrects the bias; without decay and correction both modes are the same.
    mode, corrects = int(hyper["weight_decay_mode"]), bool(hyper["do_bias_correction"])
    if not corrects and mode == 0:
        if hyper["lambda_coef"]:
            raise ValueError(
                "AdamWOptimizer of onnxruntime-training can't decay weights before the update without bias "
                f"correction (do_bias_correction=False): {_WAY_OUT}"
            )
        mode = 1
    return {
        "alpha": float(hyper["alpha"]),
        "beta": float(hyper["beta"]),
        "epsilon": float(hyper["epsilon"]),
        "weight_decay": float(hyper["lambda_coef"]),
        "correct_bias": int(corrects),
        "adam_mode": mode,
    }


def _common(updates: Mapping[str, ParameterUpdate], learning_rates: Sequence[float]) -> ParameterUpdate:
    """Returns the update that all parameters share."""
    if not updates:
        raise ValueError("the model has no parameter with a gradient, so there is nothing to train")
    first, *others = updates.values()
    rule, hyper = first.rule.name, first.hyper
    if rule not in ("AdamOptimizer", "SGDOptimizer"):
        raise ValueError(f"onnxruntime-training has only AdamW and SGD, not {rule}: {_WAY_OUT}")
    rates = {learning_rates[update.group] for update in updates.values()}
    if len(rates) > 1:
        raise ValueError(
            f"onnxruntime-training has one learning rate for all parameters, but the groups have {sorted(rates)}: "
            f"{_WAY_OUT}"
        )
    for update in others:
        if (update.rule.name, dict(update.hyper), update.limit) != (rule, dict(hyper), first.limit):
            raise ValueError(
                "onnxruntime-training has one optimizer for all parameters, but the groups differ: "
                f"{shown(dict(hyper))} and {shown(dict(update.hyper))}: {_WAY_OUT}"
            )
    if any(math.isfinite(update.max_value) for update in updates.values()):
        raise ValueError(
            f"onnxruntime-training can't clip gradients by value (utils.max_grad_value), only by norm: {_WAY_OUT}"
        )
    lacking = [key for key in ("momentum", "weight_decay") if rule == "SGDOptimizer" and hyper.get(key)]
    lacking += [key for key in ("amsgrad", "maximize") if hyper.get(key)]
    if lacking:
        raise ValueError(f"{rule} of onnxruntime-training has no {' and no '.join(lacking)}: {_WAY_OUT}")
    return first
