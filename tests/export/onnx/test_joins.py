"""Joined nodes compute what the nodes compute, and those that would not are left alone."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch

from ort_trainer.export.onnx import OnnxModule

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
