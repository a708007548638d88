"""Writes models for onnxruntime-training's runtime: the flavor ``onnxruntime-training`` of artifacts.

The training and evaluation models don't need upstream's gradient builder: the runtime trains any model whose inputs and
outputs have the names that it expects. Upstream's optimizer model is one operator on sequences of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx_ir as ir

from ..core.errors import shown
from ..state.state import Array, State
from ..step import Step
from ..step.accumulate import ACCUMULATED, BUFFER, RESET
from ..step.contract import IR_VERSION
from ..step.emitter import Emitter
from ..step.names import Names
from ..step.prune import RemoveUnusedPass
from .random_nodes import RandomNodes

if TYPE_CHECKING:
    from ..optim.update_writer import ParameterUpdate

_MICROSOFT = "com.microsoft"
_RATE, _STEP, _WEIGHTS, _GRADIENTS = "learning_rate", "step", "params", "gradients"
_MOMENTS = ("first_order_moments", "second_order_moments")
_OURS = "use the default flavor, which has all of the trainer's optimizers"
_WAY_OUT = "use the default flavor, which any onnxruntime can train"


def check_storable(checkpoint: State) -> None:
    """Checks that upstream's checkpoints can store the state of an export.

    Raises:
        ValueError: If they can't.
    """
    if checkpoint.schedule is not None:
        raise ValueError(
            "onnxruntime-training's artifacts can't store a learning-rate schedule: use the default flavor, or export "
            "from a trainer without lr_scheduler and set the rate in your program (Optimizer.set_learning_rate)"
        )
    if checkpoint.gradients:
        raise ValueError(
            "onnxruntime-training can't store the gradients of an incomplete accumulation window: use the default "
            "flavor, or export after the window's last micro-batch"
        )


@dataclass(frozen=True)
class StepModels:
    """Both models.

    Attributes:
        training: The training model.
        evaluation: The evaluation model.
        trained: Names of the parameters that have gradients, in the order of the graph.
        opset: Version of the standard operators.
    """

    training: ir.Model
    evaluation: ir.Model
    trained: Sequence[str]
    opset: int


def step_models(
    training: Step,
    evaluation: Step,
    state: Mapping[str, Array],
    buffers: Collection[str],
    gradient_weight: float = 1.0,
) -> StepModels:
    """Returns the models of two graphs.

    The runtime keeps the parameters and the buffers that training changes, all float32. They are inputs of both models,
    in the same order. All other state never changes and becomes constants.

    Args:
        training: The graph of a training step; it is not changed.
        evaluation: The graph of an evaluation step; it is not changed.
        state: Values of the parameters and buffers.
        buffers: Which of them are buffers.
        gradient_weight: Factor for each gradient before it is accumulated.

    Raises:
        ValueError: If onnxruntime-training can't train the model; the message says why.
    """
    changed = [name for name in training.buffer_updates if state[name].dtype == np.float32]
    kept = [name for name in training.state if state[name].dtype == np.float32 and name not in buffers]
    trained = [name for name in kept if name in training.gradients]
    wrong = [name for name in training.gradients if name in training.state and name not in kept]
    if wrong:
        raise ValueError(
            f"onnxruntime-training trains float32 weights only, but {wrong[0]!r} is {state[wrong[0]].dtype}: {_WAY_OUT}"
        )
    _check_names(training, kept, trained)
    dropped = [name for name in training.buffer_updates if name not in changed]
    kept += changed
    first, second = (_Writer(graph, kept, state) for graph in (training, evaluation))
    first.drop(dropped)
    for name in dropped:
        if first.reads(name) or name in evaluation.state:
            raise ValueError(
                f"training changes the buffer {name!r} of dtype {state[name].dtype}, but onnxruntime-training can "
                f"change only float32: {_WAY_OUT}"
            )
    first.accumulate(trained, gradient_weight)
    for name in changed:
        first.overwrite(name)
    inputs = {spec.name: first.inputs[spec.name] for spec in training.inputs}
    return StepModels(first.finish(inputs), second.finish(inputs), trained, training.model.opset_imports[""])


def _check_names(graph: Step, kept: Sequence[str], trained: Sequence[str]) -> None:
    """Raises a ValueError if the model uses a name that the runtime reserves."""
    reserved = {RESET, *(form.format(name) for name in trained for form in (BUFFER, ACCUMULATED))}
    clash = reserved.intersection((*kept, *(spec.name for spec in (*graph.inputs, *graph.outputs))))
    if clash:
        raise ValueError(
            f"an input, output or parameter of the model is named {min(clash)!r}, which onnxruntime-training reserves: "
            "rename it"
        )


class _Writer:
    """Changes a copy of a graph into a model of the runtime.

    Args:
        source: The graph.
        kept: Names of the state that the runtime keeps, in order.
        state: Values of all state.
    """

    def __init__(self, source: Step, kept: Sequence[str], state: Mapping[str, Array]) -> None:
        self._source, self._kept, self._state = source, kept, state
        self._model = source.model.clone()
        self._graph = self._model.graph
        values = ir.convenience.create_value_mapping(self._graph)
        self._names = Names([*values, *kept])
        self._before, self._after = (Emitter(self._model.opset_imports, self._names, "upstream") for _ in range(2))
        self.inputs = {str(value.name): value for value in self._graph.inputs}
        self._outputs = {str(value.name): value for value in self._graph.outputs}
        self._results = [source.loss, *(spec.name for spec in source.outputs if spec.name != source.loss)]
        self._flags: list[ir.Value] = []
        self._accumulators: list[ir.Value] = []
        self._reset: ir.Value | None = None
        self._weights = {name: self._kept_input(name) for name in kept}

    def drop(self, names: Sequence[str]) -> None:
        """Removes the updates of buffers."""
        outputs = {self._source.buffer_updates[name] for name in names}
        remaining = [value for value in self._graph.outputs if value.name not in outputs]
        self._graph.outputs.clear()
        self._graph.outputs.extend(remaining)
        RemoveUnusedPass(self.inputs)(self._model)

    def reads(self, name: str) -> bool:
        """Returns whether the graph reads a parameter or buffer."""
        return name in self._source.state and bool(self.inputs[self._source.state[name]].uses())

    def accumulate(self, trained: Sequence[str], weight: float) -> None:
        """Adds the gradients to buffers in place."""
        self._reset = _value(RESET, ir.DataType.BOOL, [1])
        scale = self._source.loss_scale
        if scale is not None and scale.name in self.inputs:
            value = self.inputs.pop(scale.name)
            assert value.dtype is not None and value.shape is not None
            self._make_constant(value, np.full(value.shape.numpy(), weight, value.dtype.numpy()))
        for name in trained:
            gradient, parameter = self._outputs[self._source.gradients[name]], self._weights[name]
            gradient.type = parameter.type
            buffer = _value(BUFFER.format(name), ir.DataType.FLOAT, parameter.shape)
            self._accumulators.append(buffer)
            self._in_place(name, buffer, gradient, self._reset)

    def overwrite(self, name: str) -> None:
        """Overwrites a buffer with its new value.

        Raises:
            ValueError: If the graph also reads the old value elsewhere, as the order of the two is undefined.
        """
        old, new = self._weights[name], self._outputs[self._source.buffer_updates[name]]
        needed = _ancestors(new)
        if any(node not in needed for node, _ in old.uses()):
            raise ValueError(
                f"a training step both changes the buffer {name!r} and uses its old value, which onnxruntime-training "
                f"does not support: {_WAY_OUT}"
            )
        self._in_place(name, old, new, self._after.constant([True], np.bool_))

    def finish(self, inputs: Mapping[str, ir.Value]) -> ir.Model:
        """Returns the model.

        Args:
            inputs: The user's inputs, in order.
        """
        random = RandomNodes(self._before, self._source, self.inputs)
        for spec in self._source.random:
            ir.convenience.replace_all_uses_with(self.inputs[spec.name], random.draw(spec))
        for name, value_name in self._source.state.items():
            if name not in self._weights:
                self._make_constant(self.inputs[value_name], self._state[name])
        user_inputs = [
            self.inputs.get(name) or _value(name, value.dtype, value.shape) for name, value in inputs.items()
        ]
        self._graph.inputs.clear()
        self._graph.inputs.extend([*user_inputs, *self._weights.values(), *self._accumulators])
        if self._reset is not None:
            self._graph.inputs.append(self._reset)
        self._graph.outputs.clear()
        self._graph.outputs.extend([*(self._outputs[name] for name in self._results), *self._flags])
        if self._before.nodes:
            self._graph.insert_before(self._graph[0], self._before.nodes)
        self._graph.extend(self._after.nodes)
        names = [str(value.name) for value in self._graph.inputs]
        RemoveUnusedPass(names)(self._model)
        self._model.ir_version = min(self._model.ir_version or IR_VERSION, IR_VERSION)
        return self._model

    def _kept_input(self, name: str) -> ir.Value:
        """Returns the input for a parameter or buffer, with the parameter's name, by which the runtime finds it."""
        value = self.inputs.get(self._source.state.get(name, ""))
        if value is None:  # only the other graph has it, but the runtime expects the same inputs in both
            return _value(name, ir.DataType.FLOAT, self._state[name].shape)
        if value.name != name:
            if name in self.inputs or name in self._outputs:
                raise ValueError(
                    f"an input or output of the model has the name of a parameter, {name!r}, which "
                    "onnxruntime-training does not support: rename it in model_desc"
                )
            values = ir.convenience.create_value_mapping(self._graph)
            if name in values:
                values[name].name = self._names.unique(name)
            value.name = name
        return value

    def _in_place(self, name: str, buffer: ir.Value, value: ir.Value, overwrite: ir.Value) -> None:
        """Adds a value to a buffer in place, or overwrites the buffer with it."""
        self._model.opset_imports[_MICROSOFT] = 1
        flag = self._after("InPlaceAccumulatorV2", buffer, value, overwrite, domain=_MICROSOFT)
        flag.name, flag.type, flag.shape = ACCUMULATED.format(name), ir.TensorType(ir.DataType.BOOL), ir.Shape([1])
        self._flags.append(flag)

    def _make_constant(self, value: ir.Value, array: Array) -> None:
        value.const_value = ir.tensor(array, name=value.name)
        self._graph.register_initializer(value)


def _value(name: str, dtype: ir.DataType | None, shape: ir.Shape | Sequence[int] | None) -> ir.Value:
    assert dtype is not None
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))


def _ancestors(value: ir.Value) -> set[ir.Node]:
    """Returns the nodes that a value depends on."""
    ancestors: set[ir.Node] = set()
    pending = [value.producer()]
    while pending:
        node = pending.pop()
        if node is not None and node not in ancestors:
            ancestors.add(node)
            pending += [operand.producer() for operand in node.inputs if operand is not None]
    return ancestors


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
        moments = _MOMENTS[:1]  # the runtime passes one, although the operator does not take it
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
    """Returns the attributes of upstream's AdamW for the hyper-parameters of ours."""
    # The trainer and the operator number the modes alike: PyTorch's is 0, Transformers' is 1. The operator's mode 0
    # always corrects the bias. Without decay and correction both modes are the same, so mode 1 serves.
    mode, corrects = int(hyper["weight_decay_mode"]), bool(hyper["do_bias_correction"])
    if not corrects and mode == 0:
        if hyper["lambda_coef"]:
            raise ValueError(
                "AdamWOptimizer of onnxruntime-training can't decay weights before the update without bias "
                f"correction (do_bias_correction=False): {_OURS}"
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
        raise ValueError(f"onnxruntime-training has only AdamW and SGD, not {rule}: {_OURS}")
    rates = {learning_rates[update.group] for update in updates.values()}
    if len(rates) > 1:
        raise ValueError(
            f"onnxruntime-training has one learning rate for all parameters, but the groups have {sorted(rates)}: "
            f"{_OURS}"
        )
    for update in others:
        if (update.rule.name, dict(update.hyper), update.limit) != (rule, dict(hyper), first.limit):
            raise ValueError(
                "onnxruntime-training has one optimizer for all parameters, but the groups differ: "
                f"{shown(dict(hyper))} and {shown(dict(update.hyper))}: {_OURS}"
            )
    if any(math.isfinite(update.max_value) for update in updates.values()):
        raise ValueError(
            f"onnxruntime-training can't clip gradients by value (utils.max_grad_value), only by norm: {_OURS}"
        )
    lacking = [key for key in ("momentum", "weight_decay") if rule == "SGDOptimizer" and hyper.get(key)]
    lacking += [key for key in ("amsgrad", "maximize") if hyper.get(key)]
    if lacking:
        raise ValueError(f"{rule} of onnxruntime-training has no {' and no '.join(lacking)}: {_OURS}")
    return first
