"""Joined nodes compute what the nodes compute, and those that would not are left alone."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch

from ort_trainer import register_onnx_operator
from ort_trainer.onnx import user_operators
from ort_trainer.onnx.module import OnnxModule

GUARD = "bad = IsNaN(p)  w = Where(bad, zero, p)"
CAUSAL = """length = Shape<start=2, end=3>(q)  sizes = Concat<axis=0>(length, length)
  ones = Expand(one, sizes)  low = Trilu<upper=0>(ones)  seen = Equal(low, one)  m = Where(seen, zero, far)"""


def model(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[B,H,S,4] q, float[B,H,4,S] k, float[B,H,S,3] v, float[B,1,S,S] mask) => (float[B,H,S,3] y)
        <float zero = {{0}}, float one = {{1}}, float far = {{-3e38}}, float[3] bias = {{1, 2, 3}}, float[3,3] weight =
         {{1, 2, 3, -1, -2, -3, 0.1, 0.2, 0.3}}>
        {{ {body} }}"""
    )


CASES = {
    "plain": ("s = MatMul(q, k)  p = Softmax(s)  y = MatMul(p, v)", ["ScaledDotProduct"]),
    "guarded": (f"s = MatMul(q, k)  t = Add(s, mask)  p = Softmax(t)  {GUARD}  y = MatMul(w, v)", ["ScaledDotProduct"]),
    "causal": (f"{CAUSAL}  s = MatMul(q, k)  t = Add(s, m)  p = Softmax(t)  y = MatMul(p, v)", ["ScaledDotProduct"]),
    "linear": ("x = MatMul(v, weight)  y = Add(bias, x)", ["Linear"]),
    "a mask of the batch": ("s = MatMul(q, k)  t = Add(s, mask)  p = Softmax(t)  y = MatMul(p, v)", []),
    "another axis": ("s = MatMul(q, k)  p = Softmax<axis=2>(s)  y = MatMul(p, v)", []),
    "weights that are used": (
        "s = MatMul(q, k)  p = Softmax(s)  n = MatMul(p, v)  l = ReduceSum(p)  y = Add(n, l)",
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_joined_nodes_compute_what_the_nodes_compute(case: str) -> None:
    body, joined = CASES[case]
    proto = model(body)
    module = OnnxModule(proto)
    kinds = [step.node.op_type for step in module._graph.steps]
    assert [kind for kind in kinds if kind in ("Linear", "ScaledDotProduct")] == joined
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    draw = torch.Generator().manual_seed(0)
    for size in (5, 1):
        inputs = {
            name: torch.randn(2, heads, *shape, generator=draw)
            for name, heads, shape in (("q", 3, (size, 4)), ("k", 3, (4, size)), ("v", 3, (size, 3)))
        }
        mask = torch.zeros(2, 1, size, size)
        mask[0, 0, 0] = -torch.inf  # a query that sees no key
        inputs["mask"] = mask
        expected = session.run(None, {name: value.numpy() for name, value in inputs.items()})[0]
        found = module(**inputs)["y"].detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_heads_that_are_broadcast() -> None:
    proto = model(CASES["guarded"][0])
    proto.graph.input[1].type.tensor_type.shape.dim[1].dim_value = 1
    found = OnnxModule(proto)
    q, k, v, mask = torch.randn(2, 3, 5, 4), torch.randn(2, 1, 4, 5), torch.randn(2, 3, 5, 3), torch.zeros(2, 1, 5, 5)
    torch.testing.assert_close(found(q, k, v, mask)["y"], torch.softmax(q @ k + mask, -1) @ v)


ODD: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "a bias that makes the product larger": (
        "<float[4,1] w = {1, 2, 3, 4}, float[5] b = {1, 2, 3, 4, 5}> { p = MatMul(x, w)  y = Add(p, b) }",
        {"x": (3, 4)},
    ),
    "attention of vectors": (
        "{ s = MatMul(x, k)  p = Softmax(s)  y = MatMul(p, v) }",
        {"x": (4,), "k": (4, 5), "v": (5, 3)},
    ),
    "a mask that makes the scores larger": (
        f"<float zero = {{0}}> {{ s = MatMul(x, k)  t = Add(s, m)  p = Softmax(t)  {GUARD}  y = MatMul(w, v) }}",
        {"x": (1, 1, 5, 4), "k": (1, 1, 4, 5), "v": (1, 1, 5, 3), "m": (2, 1, 5, 5)},
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_joined_but_has_another_form(case: str) -> None:
    body, shapes = ODD[case]
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[] y) {body}')
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    given = {name: torch.randn(shape) for name, shape in shapes.items()}
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {name: value.numpy() for name, value in given.items()})[0]
    np.testing.assert_allclose(OnnxModule(proto)(**given)["y"].detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_an_operator_that_the_user_registered_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_operators, "_registered", defaultdict(list))
    register_onnx_operator("MatMul", lambda a, b: 7 * (a @ b))
    q, k, v, mask = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 4, 5), torch.randn(1, 1, 5, 3), torch.zeros(1, 1, 5, 5)
    found = OnnxModule(model(CASES["plain"][0]))(q, k, v, mask)["y"]
    torch.testing.assert_close(found, 7 * (torch.softmax(7 * (q @ k), -1) @ v))
    with pytest.raises(TypeError, match="has no signature that tells inputs from attributes"):
        register_onnx_operator("A", torch.special.expit)
