"""Artifacts of a small model, written by hand: the required form of any export."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, TensorProto, helper

from ort_trainer.core.sealed import DTYPES, read_header, read_tensors, write
from ort_trainer.state.state import State
from ort_trainer.state.training_api import to_bytes
from ort_trainer.step.contract import METADATA, OptimizerModel, RandomInput, Slot, Step, TensorSpec, to_metadata

FLOAT, INT64, BOOL, UINT8 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.UINT8
EXPORT = "e" * 64
INPUTS = (TensorSpec("x", "float32", ("batch", 3)), TensorSpec("target", "float32", ("batch", 2)))
OUTPUTS = (
    TensorSpec("loss", "float32", ()),
    TensorSpec("y", "float32", ("dim('batch')", 2)),
    TensorSpec("positive", "int64", None),
)
PARAMETERS = {
    "w": np.array([[0.5, -0.25], [1.0, 0.75], [-0.5, 0.125]], np.float32),
    "b": np.array([0.1, -0.2], np.float32),
    "mean": np.zeros(2, np.float32),  # a running statistic: the mean of the outputs of the last batch
}
TRAINED = ("w", "b")


@dataclass
class Artifacts:
    training: bytes
    evaluation: bytes
    optimizer: bytes
    checkpoint: bytes
    nominal: bytes


def forward() -> list:
    """Computes y = x w + b, loss = mean((y - target)^2), and which outputs are positive."""
    node = helper.make_node
    return [
        node("MatMul", ["x", "w"], ["xw"]),
        node("Add", ["xw", "b"], ["y"]),
        node("Sub", ["y", "target"], ["difference"]),
        node("Mul", ["difference", "difference"], ["square"]),
        node("ReduceMean", ["square"], ["loss"], keepdims=0),
        node("Greater", ["y", "zero"], ["is_positive"]),
        node("NonZero", ["is_positive"], ["positive"]),
    ]


def backward(dropout: bool) -> list:
    """Computes the gradients of w and b and accumulates them; ``dropout`` masks the gradient of b."""
    node = helper.make_node
    nodes = [
        node("Size", ["difference"], ["count"]),
        node("Cast", ["count"], ["count_float"], to=FLOAT),
        node("Div", ["two", "count_float"], ["factor"]),
        node("Mul", ["difference", "factor"], ["d_y"]),
        node("Transpose", ["x"], ["x_t"], perm=[1, 0]),
        node("MatMul", ["x_t", "d_y"], ["w_grad"]),
        node("ReduceSum", ["d_y_b", "axis"], ["b_grad"], keepdims=0),
        node("ReduceMean", ["y", "axis"], ["mean.updated"], keepdims=0),
    ]
    if dropout:
        nodes.insert(4, node("Cast", ["mask"], ["mask_float"], to=FLOAT))
        nodes.insert(5, node("Mul", ["d_y", "mask_float"], ["d_y_b"]))
    else:
        nodes.insert(4, node("Identity", ["d_y"], ["d_y_b"]))
    outs = [f"{name}_grad.accumulation.out" for name in TRAINED]
    shapes = {name: list(PARAMETERS[name].shape) for name in TRAINED}
    branches = {}
    for branch, operator in (("then_branch", "Identity"), ("else_branch", "Add")):
        inner = [
            node(
                operator,
                [f"{name}_grad"] + ([f"{name}_grad.accumulation.buffer"] if operator == "Add" else []),
                [f"{name}.{branch}"],
            )
            for name in TRAINED
        ]
        values = [helper.make_tensor_value_info(f"{name}.{branch}", FLOAT, shapes[name]) for name in TRAINED]
        branches[branch] = helper.make_graph(inner, branch, [], values)
    return [*nodes, node("If", ["lazy_reset_grad"], outs, **branches)]


def finished(nodes: list, inputs: list, outputs: list, model: Step | OptimizerModel) -> bytes:
    info = helper.make_tensor_value_info
    constants = [
        helper.make_tensor("zero", FLOAT, [], [0.0]),
        helper.make_tensor("two", FLOAT, [], [2.0]),
        helper.make_tensor("axis", INT64, [1], [0]),
    ]
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "graph",
        [info(*value) for value in inputs],
        [info(*value) for value in outputs],
        [constant for constant in constants if constant.name in used],
    )
    made: ModelProto = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    entry = made.metadata_props.add()
    entry.key, entry.value = METADATA, to_metadata(model)
    return made.SerializeToString()


def sizes(name: str) -> list[int]:
    return list(PARAMETERS[name].shape)


def make_artifacts(
    export: str = EXPORT,
    *,
    dropout: bool = False,
    guards: tuple[str, ...] = (),
    fixed: dict[str, int] | None = None,
    schedule: dict | None = None,
) -> Artifacts:
    """Returns the artifacts of the model with SGD with momentum 0.5 and learning rate 0.1."""
    data = [("x", FLOAT, ["batch", 3]), ("target", FLOAT, ["batch", 2])]
    results = [("loss", FLOAT, []), ("y", FLOAT, ["batch", 2]), ("positive", INT64, [2, None])]
    state = {name: name for name in (*TRAINED, "mean")}
    weights = [(name, FLOAT, sizes(name)) for name in TRAINED]
    masks = (RandomInput("mask", "mask", "uint8", ("dim('batch')", 2), (0.5, 3)),) if dropout else ()
    training = Step(
        kind="training",
        export=export,
        inputs=INPUTS,
        outputs=OUTPUTS,
        loss="loss",
        state=state,
        gradients={name: f"{name}_grad.accumulation.out" for name in TRAINED},
        sums={name: f"{name}_grad.accumulation.buffer" for name in TRAINED},
        buffer_updates={"mean": "mean.updated"},
        random=masks,
        guards=guards,
        fixed=fixed or {},
    )
    train_inputs = [
        *data,
        *weights,
        ("mean", FLOAT, [2]),
        *((f"{name}_grad.accumulation.buffer", FLOAT, sizes(name)) for name in TRAINED),
        ("lazy_reset_grad", BOOL, [1]),
        *([("mask", UINT8, ["batch", 2])] if dropout else []),
    ]
    train_outputs = [
        *results,
        *((f"{name}_grad.accumulation.out", FLOAT, sizes(name)) for name in TRAINED),
        ("mean.updated", FLOAT, [2]),
    ]
    evaluation = Step(
        kind="evaluation",
        export=export,
        inputs=INPUTS,
        outputs=OUTPUTS,
        loss="loss",
        state={name: name for name in TRAINED},
    )
    return Artifacts(
        finished([*forward(), *backward(dropout)], train_inputs, train_outputs, training),
        finished(forward(), [*data, *weights], results, evaluation),
        momentum_model(export),
        to_bytes(checkpoint(export, schedule)),
        to_bytes(checkpoint(export, schedule, nominal=True)),
    )


def checkpoint(export: str = EXPORT, schedule: dict | None = None, nominal: bool = False) -> State:
    return State(
        dict(PARAMETERS),
        list(TRAINED),
        {"count": np.array(3)},
        learning_rates=[0.1],
        schedule=schedule,
        export=export,
        nominal=nominal,
    )


def as_version_2(data: bytes) -> bytes:
    """Returns a checkpoint file in version 2, without ``micro_batches`` and ``trainer``."""
    key, file, older = "ort_trainer.checkpoint", io.BytesIO(data), io.BytesIO()
    header = read_header(file, "the file")
    said = json.loads(header.metadata[key])
    assert said.pop("version") == 3
    del said["micro_batches"], said["trainer"]
    tensors = {
        name: (DTYPES[header.tensors[name].dtype], header.tensors[name].shape, value)
        for name, value in read_tensors(file, header, "the file", header.tensors).items()
    }
    write(older, tensors, {key: json.dumps({"version": 2, **said})})
    return older.getvalue()


def momentum_model(export: str) -> bytes:
    """Computes m = 0.5 m + gradient, w = w - rate m."""
    node = helper.make_node
    nodes = [node("Constant", [], ["half"], value=helper.make_tensor("half", FLOAT, [], [0.5]))]
    inputs: list = [("learning_rate", FLOAT, [1])]
    outputs: list = []
    for name in TRAINED:
        nodes += [
            node("Mul", [f"{name}.Moment", "half"], [f"{name}.decayed"]),
            node("Add", [f"{name}.decayed", f"{name}_grad"], [f"{name}.Moment.updated"]),
            node("Mul", [f"{name}.Moment.updated", "learning_rate"], [f"{name}.change"]),
            node("Sub", [name, f"{name}.change"], [f"{name}.updated"]),
        ]
        inputs += [(value, FLOAT, sizes(name)) for value in (name, f"{name}_grad", f"{name}.Moment")]
        outputs += [(value, FLOAT, sizes(name)) for value in (f"{name}.updated", f"{name}.Moment.updated")]
    model = OptimizerModel(
        export,
        "SGDOptimizer",
        {name: (name, f"{name}.updated") for name in TRAINED},
        {name: f"{name}_grad" for name in TRAINED},
        {
            f"{name}.Moment": Slot(f"{name}.Moment", f"{name}.Moment.updated", "float32", tuple(sizes(name)))
            for name in TRAINED
        },
    )
    return finished(nodes, inputs, outputs, model)
