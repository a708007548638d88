"""Random tensors drawn inside a graph: correct shapes, ranges and frequencies, and new ones in every run."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from ort_trainer.step import RandomInput, Step, TensorSpec, dtype_name
from ort_trainer.step.emitter import Emitter
from ort_trainer.step.names import Names
from ort_trainer.upstream.random_nodes import RandomNodes

pytestmark = pytest.mark.engine

X = TensorSpec("x", "float32", ("batch", 3))


def drawn(spec: RandomInput, rows: int = 5000) -> list[np.ndarray[Any, Any]]:
    """Returns two draws."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 3]))
    dtype = ir.tensor_adapters.from_torch_dtype(getattr(torch, spec.dtype))
    random = ir.Value(name=spec.name, type=ir.TensorType(dtype))
    emitter = Emitter({"": 18}, Names(["x", spec.name]), "random")
    empty = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 18}), ir_version=10)
    graph = Step(kind="training", inputs=(X,), outputs=(), loss="", state={}, random=(spec,), stored=empty)
    result = RandomNodes(emitter, graph, {"x": x, spec.name: random}).draw(spec)
    assert result.dtype == dtype
    result.name = "result"
    model = ir.Model(ir.Graph([x], [result], nodes=emitter.nodes, opset_imports={"": 18}, name="g"), ir_version=10)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": np.zeros((rows, 3), np.float32)}
    return [session.run(None, feeds)[0] for _ in range(2)]


SHAPE = ("dim('batch') // 2", "max(2, dim('batch') - 4998)", 2)


@pytest.mark.parametrize(
    ("kind", "dtype", "parameters", "mean", "deviation"),
    [
        ("mask", torch.uint8, (0.7, 0.0), 0.7, 0.7**0.5 * 0.3**0.5),
        ("bernoulli", torch.bool, (0.2, 1.0), 0.2, 0.4),
        ("bernoulli", torch.float32, (0.8, 1.25), 1.0, 0.5),
        ("uniform", "float32", (), 0.5, 12**-0.5),
        ("uniform", torch.float64, (), 0.5, 12**-0.5),
        ("normal", torch.float32, (), 0.0, 1.0),
        ("exponential", torch.float32, (4.0,), 0.25, 0.25),
        ("integers", torch.int64, (-2.0, 3.0), 0.0, 2**0.5),
    ],
)
def test_kinds(kind: str, dtype: torch.dtype, parameters: Any, mean: float, deviation: float) -> None:
    first, second = drawn(RandomInput("r", kind, dtype_name(dtype), SHAPE, parameters))
    assert first.shape == (2500, 2, 2)
    assert not np.array_equal(first, second)
    for values in (first, second):
        # Six standard deviations of the mean of 10000 numbers.
        assert abs(values.mean(dtype=np.float64) - mean) < 6 * deviation / 100
        assert values.std(dtype=np.float64) == pytest.approx(deviation, rel=0.1)
    if kind == "uniform":
        assert first.min() >= 0.0 and first.max() < 1.0
    if kind == "integers":
        assert set(np.unique(first)) == {-2, -1, 0, 1, 2}


def test_permutation() -> None:
    first, second = drawn(RandomInput("r", "permutation", "int64", ("dim('batch') + 1",)), rows=99)
    assert sorted(first) == sorted(second) == list(range(100))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (RandomInput("r", "key", "int64", ()), "kind 'key'"),
        (RandomInput("r", "uniform", "float32", ("dim('batch') ** 2",)), r"dim\('batch'\) \*\* 2"),
        (RandomInput("r", "uniform", "float32", ("dim('other')",)), "no input of the model has the dimension"),
    ],
)
def test_what_cannot_be_drawn(spec: RandomInput, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        drawn(spec)
