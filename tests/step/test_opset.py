"""Models in a newer and in an older operator set compute the same, and what can't be older is named."""

from __future__ import annotations

import itertools

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from ort_trainer.engine.ort import InferenceSession
from ort_trainer.step.opset import newer, older

X = np.linspace(-2, 3, 24, dtype=np.float32).reshape(2, 3, 4)


def model(body: str, imports: str = '"" : 18') -> ir.Model:
    text = f"<ir_version: 9, opset_import: [{imports}]> g (float[2, 3, 4] x) => (float y) {{ {body} }}"
    return ir.from_proto(onnx.parser.parse_model(text))


def run(found: ir.Model) -> np.ndarray:
    data = ir.to_proto(found).SerializeToString()
    return InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": X})[0]


BODIES = {
    "types that were added": "a = Relu(x) b = Add(a, x) c = Mul(b, a) y = ReduceSum<keepdims=0>(c)",
    "attributes that were added": (
        "s = Shape(x) r = Reshape(x, s) y = ReduceMean<keepdims=0, noop_with_empty_axes=0>(r)"
    ),
    "elementwise operators": (
        "z = Constant<value_float=0.>() a = Clip(x, z) b = Abs(x) c = Floor(b) d = Max(a, b, c)"
        " e = Concat<axis=1>(d, x) f = Mod<fmod=1>(d, c) y = ReduceSum<keepdims=0>(e)"
    ),
    "slices": (
        "z = Constant<value_ints=[0]>() o = Constant<value_ints=[1]>() a = Slice(x, z, o) b = ArgMax<axis=2>(a)"
        " c = Cast<to=1>(b) d = Dropout(c) y = ReduceSum<keepdims=0>(d)"
    ),
    "axes": "i = Constant<value = int64[2] {1, 2}>() a = ReduceMax(x, i) y = ReduceSum<keepdims=0>(a)",
    "an operator that others define": (
        "w = Constant<value_floats=[1., 2., 3., 4.]>() a = LayerNormalization(x, w, w) y = ReduceSum<keepdims=0>(a)"
    ),
    "normalization": (
        "w = Constant<value_floats=[1., 2., 3.]>() a = BatchNormalization(x, w, w, w, w) y = ReduceSum<keepdims=0>(a)"
    ),
    "exponentials": "a = Softmax<axis=1>(x) b = LogSoftmax<axis=2>(a) y = ReduceSum<keepdims=0>(b)",
    "places": (
        "i = Constant<value_ints=[0, 2]>() a = Gather<axis=2>(x, i) p = Constant<value_ints=[0, 0, 1, 0, 0, 0]>()"
        " b = Pad(a, p) y = ReduceSum<keepdims=0>(b)"
    ),
}


# The other bodies have operators for which ONNX's converter has no way from 13 to 12, or none that is right.
OLDEST = ("types that were added", "elementwise operators", "slices", "normalization", "places")


@pytest.mark.parametrize(
    ("name", "opset"), [*((name, 12) for name in OLDEST), *itertools.product(BODIES, (13, 14, 16, 17))]
)
def test_an_older_operator_set_computes_the_same(name: str, opset: int) -> None:
    found = model(BODIES[name])
    converted = older(found, opset)
    assert converted.opset_imports == {"": opset} and found.opset_imports == {"": 18}
    np.testing.assert_allclose(run(converted), run(found), rtol=1e-5)


@pytest.mark.parametrize(
    "body, named",
    [
        ("a = BitwiseNot(i) b = Cast<to=1>(a) y = ReduceSum<keepdims=0>(b)", "newer are BitwiseNot"),
        ("a, b = Split<axis=2, num_outputs=2>(x) y = ReduceSum<keepdims=0>(b)", "newer are Split .18."),
        (
            'a = ScatterElements<reduction="max">(x, j, x) y = ReduceSum<keepdims=0>(a)',
            "newer are ScatterElements .18.",
        ),
    ],
)
def test_what_can_not_be_older_is_named(body: str, named: str) -> None:
    start = "z = Shape(x) i = Cast<to=6>(x) j = Cast<to=7>(x) "
    with pytest.raises(ValueError, match=f"can't be in operator set 15: {named}"):
        older(model(start + body), 15)


def test_operators_of_others_stay() -> None:
    converted = older(
        model("a = com.microsoft.Gelu(x) y = ReduceSum<keepdims=0>(a)", '"" : 18, "com.microsoft" : 1'), 13
    )
    assert converted.opset_imports == {"": 13, "com.microsoft": 1} and converted.graph[0].domain == "com.microsoft"


def test_each_way_changes_in_one_direction() -> None:
    found = model("y = ReduceSum<keepdims=0>(x)")
    newer(found, 17)
    assert found.opset_imports[""] == 18 and older(found, 19) is found
    newer(found, 20)
    assert found.opset_imports[""] == 20


def test_scales_of_several_channels_are_not_for_an_operator_that_has_one() -> None:
    body = (
        "q = Cast<to=2>(x) s = Constant<value_floats=[1., 2., 3.]>() a = DequantizeLinear(q, s)"
        " y = ReduceSum<keepdims=0>(a)"
    )
    assert older(model(body), 13).opset_imports == {"": 13}
    with pytest.raises(ValueError, match="can't be in operator set 12: newer are .*DequantizeLinear"):
        older(model(body), 12)


@pytest.mark.parametrize(("axis", "allowed"), [(0, False), (1, False), (2, True), (-1, True), (-2, False)])
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_operators_that_flattened_keep_their_axis_or_are_refused(op: str, axis: int, allowed: bool) -> None:
    found = model(f"a = {op}<axis={axis}>(x) b = Mul(a, x) y = ReduceSum<keepdims=0>(b)")
    if allowed:
        np.testing.assert_allclose(run(older(found, 12)), run(found), rtol=1e-5)
        return
    with pytest.raises(ValueError, match=f"operator set 12, where {op} takes the axes from {axis} on as one: use 13"):
        older(found, 12)
