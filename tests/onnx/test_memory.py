"""The memory of an ONNX model is bounded by its files, whatever sizes it claims."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from ort_trainer import ExportError
from ort_trainer.onnx.load import load_onnx_model
from ort_trainer.onnx.module import OnnxModule
from ort_trainer.onnx.shapes import known_shapes

FLOAT = TensorProto.FLOAT
ELEMENTS = 1 << 20
COUNT = 150
NAMES = [f"w{number}" for number in range(COUNT)]
LIMIT = 120 << 10
"""In kilobytes, for files of 4 MB; a copy for each tensor takes 600 MB."""


def external(name: str, dtype: int, size: int, offset: int = 0) -> TensorProto:
    tensor = TensorProto(name=name, data_type=dtype, dims=[size], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "data"), ("offset", offset)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def model(
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    size: int = 1,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [size])],
        [helper.make_tensor_value_info(nodes[-1].output[0], FLOAT, None)],
        tensors,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def written(given: onnx.ModelProto, folder: Path) -> Path:
    (folder / "data").write_bytes(bytes(4 * ELEMENTS))
    (folder / "model.onnx").write_bytes(given.SerializeToString())
    return folder / "model.onnx"


def chain(names: Sequence[str], cast: bool = False) -> list[onnx.NodeProto]:
    nodes, last = [], "x"
    for number, name in enumerate(names):
        if cast:
            nodes.append(helper.make_node("Cast", [name], [f"c{number}"], to=FLOAT))
        nodes.append(helper.make_node("Add", [last, f"c{number}" if cast else name], [f"y{number}"]))
        last = f"y{number}"
    return nodes


def in_bodies() -> onnx.ModelProto:
    nodes = [helper.make_node("Constant", [], ["c"], value=helper.make_tensor("t", TensorProto.BOOL, [], [True]))]
    last = "x"
    for name in NAMES:
        bodies = [
            helper.make_graph(
                [
                    helper.make_node("Cast", [f"{name}.{part}"], [f"{name}.{part}.c"], to=FLOAT),
                    helper.make_node("Add", [last, f"{name}.{part}.c"], [f"{name}.{part}.o"]),
                ],
                "body",
                [],
                [helper.make_tensor_value_info(f"{name}.{part}.o", FLOAT, None)],
                [external(f"{name}.{part}", TensorProto.INT32, ELEMENTS)],
            )
            for part in "te"
        ]
        nodes.append(helper.make_node("If", ["c"], [f"{name}.y"], then_branch=bodies[0], else_branch=bodies[1]))
        last = f"{name}.y"
    return model(nodes)


def in_a_function(opset: int) -> onnx.ModelProto:
    constant = helper.make_tensor("t", FLOAT, [ELEMENTS], bytes(4 * ELEMENTS), raw=True)
    nodes = [helper.make_node("Constant", [], ["k"], value=constant), helper.make_node("Add", ["a", "k"], ["b"])]
    function = helper.make_function("own", "F", ["a"], ["b"], nodes, [helper.make_opsetid("", opset)])
    last, calls = "x", []
    for name in NAMES:
        calls.append(helper.make_node("F", [last], [name], domain="own"))
        last = name
    return model(calls, functions=[function])


SHARED: dict[str, Callable[[], onnx.ModelProto]] = {
    "constants": lambda: model(chain(NAMES, True), [external(name, TensorProto.INT32, ELEMENTS) for name in NAMES]),
    "packed": lambda: model(chain(NAMES, True), [external(name, TensorProto.INT4, 8 * ELEMENTS) for name in NAMES]),
    "bodies": in_bodies,
    "inlined functions": lambda: in_a_function(21),
    "other functions": lambda: in_a_function(20),
}


@pytest.mark.parametrize("kind", SHARED)
def test_shared_constants_are_in_memory_once(kind: str, tmp_path: Path) -> None:
    path = written(SHARED[kind](), tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = load_onnx_model(path)
    OnnxModule(loaded)
    known_shapes(loaded.model)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LIMIT


def test_shared_weights_are_read_once_and_trained_apart(tmp_path: Path) -> None:
    path = written(model(chain(NAMES), [external(name, FLOAT, ELEMENTS) for name in NAMES]), tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = load_onnx_model(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LIMIT
    assert len({tensor.data_ptr() for tensor in loaded.parameters.values()}) == 1
    few = model(chain(NAMES[:3]), [external(name, FLOAT, ELEMENTS) for name in NAMES[:3]])
    module = OnnxModule(written(few, tmp_path))
    with torch.no_grad():
        module.get_parameter("w0").fill_(1)
    assert [module.get_parameter(name).sum().item() for name in NAMES[:3]] == [ELEMENTS, 0, 0]


def doubling(count: int) -> onnx.ModelProto:
    """Each function calls the one before twice."""
    functions = []
    for number in range(count):
        callee = ("Neg", "") if not number else (f"F{number - 1}", "own")
        calls = [helper.make_node(callee[0], [x], [y], domain=callee[1]) for x, y in (("a", "m"), ("m", "b"))]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
        functions.append(helper.make_function("own", f"F{number}", ["a"], ["b"], calls, opsets))
    return model([helper.make_node(f"F{count - 1}", ["x"], ["y"], domain="own")], functions=functions)


def circle() -> onnx.ModelProto:
    functions = [
        helper.make_function("own", name, ["a"], ["b"], [helper.make_node(other, ["a"], ["b"], domain="own")], [])
        for name, other in (("A", "B"), ("B", "A"))
    ]
    return model([helper.make_node("A", ["x"], ["y"], domain="own")], functions=functions)


def with_weight(**fields: Any) -> onnx.ModelProto:
    return model(chain(["w"]), [TensorProto(name="w", data_type=FLOAT, **fields)])


def with_external(*places: tuple[int, int]) -> onnx.ModelProto:
    names = NAMES[: len(places)]
    return model(chain(names), [external(n, FLOAT, size, at) for n, (size, at) in zip(names, places, strict=True)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            with_weight(dims=[1 << 40], raw_data=bytes(4)),
            "the data of 'w' can't be read: it has 4 bytes, but needs 4398",
        ),
        (with_weight(dims=[1 << 40], float_data=[1]), "the data of 'w' can't be read: it has 4 bytes, but needs 4398"),
        (with_weight(dims=[-1], raw_data=bytes(4)), r"the data of 'w' can't be read: it has the shape \[-1\]"),
        (with_external((-4, 0)), r"the data of 'w0' can't be read: it has the shape \[-4\]"),
        (with_weight(dims=[0, 1 << 62]), "the data of 'w' can't be read"),
        (with_weight(dims=[1 << 62] * 100_000), "'w' has 100000 dimensions, and at most 64 are possible"),
        (
            with_external((1 << 40, 0)),
            "data of 'w0' can't be read: it ends at byte 4398046511104, but '.*data' has 4194304",
        ),
        (with_external((4, 1 << 50)), "external data of 'w0' can't be read: it ends at byte"),
        (with_external((100, 0), (100, 4)), "the external data of 'w0' and 'w1' overlap in '.*data'"),
        (with_external((100, 0), (99, 0)), "the external data of 'w1' and 'w0' overlap"),
        (doubling(40), r"has \d+ nodes once its functions are inlined, and at most 200000 are possible"),
        (doubling(150), "call each other more than 100 deep, or in a circle"),
        (circle(), "call each other more than 100 deep, or in a circle"),
    ],
)
def test_what_would_take_more_is_refused(given: onnx.ModelProto, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        load_onnx_model(written(given, tmp_path))


def test_data_in_its_own_places_is_read(tmp_path: Path) -> None:
    path = written(with_external((100, 3), (ELEMENTS - 200, 403), (0, 7), (0, 4 * ELEMENTS)), tmp_path)
    values = np.arange(4 * ELEMENTS, dtype=np.uint8)
    (tmp_path / "data").write_bytes(values.tobytes())
    loaded = load_onnx_model(path)
    (tmp_path / "data").unlink()
    for name, (start, stop) in {"w0": (3, 403), "w1": (403, 403 + 4 * (ELEMENTS - 200)), "w2": (0, 0)}.items():
        assert loaded.parameters[name].numpy().tobytes() == values[start:stop].tobytes()
        assert loaded.parameters[name].data_ptr() % 64 == 0


@pytest.mark.parametrize(
    ("operator", "inputs"),
    [("Expand", [[1], [1 << 40]]), ("Range", [0, 1 << 40, 1]), ("ConstantOfShape", [[1 << 40]])],
)
def test_sizes_do_not_take_memory_before_a_step(operator: str, inputs: list[Any]) -> None:
    tensors = [
        helper.make_tensor(f"s{number}", TensorProto.INT64, np.shape(value), np.ravel(value))
        for number, value in enumerate(inputs)
    ]
    nodes = [
        helper.make_node(operator, [tensor.name for tensor in tensors], ["filled"]),
        helper.make_node("Shape", ["filled"], ["shape"]),
        helper.make_node("Cast", ["shape"], ["cast"], to=FLOAT),
        helper.make_node("Add", ["x", "cast"], ["y"]),
    ]

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = OnnxModule(model(nodes, tensors))

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x)

    assert torch.export.export(Wrapped(), (torch.ones(1),), strict=False).graph_signature.user_outputs


def test_vectors_of_any_length_take_no_memory_to_describe() -> None:
    assert known_shapes(load_onnx_model(model(chain(["x", "x"]), size=1 << 40)).model)["x"] == (1 << 40,)
