"""What simplification folds, merges and keeps."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from ort_trainer.engine.ort import InferenceSession
from ort_trainer.step.simplify import SimplifyPass

X = np.array([1.0, -2.0, np.nan, np.inf], np.float32)


def model(body: str, outputs: str = "float[4] y", functions: str = "") -> ir.Model:
    text = f'<ir_version: 9, opset_import: ["" : 18, "own" : 1]> g (float[4] x) => ({outputs}) {{ {body} }} {functions}'
    return ir.from_proto(onnx.parser.parse_model(text))


def simplified(found: ir.Model, thoroughly: bool = True) -> Counter[str]:
    """Simplifies in place, checks that the results are equal, and returns the remaining operators."""
    before = run(found)
    result = SimplifyPass(thoroughly)(found)
    assert result.model is found
    for ours, theirs in zip(run(found), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    values = [value.name for node in found.graph for value in node.outputs]
    values += [value.name for value in found.graph.inputs] + list(found.graph.initializers)
    assert len(set(values)) == len(values)
    return Counter(node.op_type for node in found.graph)


def run(found: ir.Model) -> list[np.ndarray]:
    session = InferenceSession(ir.to_proto(found).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X} if found.graph.inputs else {})


def test_constants_are_folded_and_held_as_initializers() -> None:
    found = model("a = Constant<value_float=2.>() b = Mul(a, a) c = Sqrt(b) y = Mul(x, c)")
    assert simplified(found) == {"Mul": 1}
    (constant,) = found.graph.initializers.values()
    assert constant.const_value.numpy() == 2.0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_stays() -> None:
    found = model(
        "z = Constant<value_float=0.>() o = Constant<value_float=1.>() a = Div(o, z) b = Mul(a, z) y = Add(x, b)"
    )
    assert simplified(found) == {"Add": 1}
    assert np.isnan(next(iter(found.graph.initializers.values())).const_value.numpy())
    # x * 0 and x - x are not zero for non-finite x.
    found = model("z = Constant<value_float=0.>() a = Mul(x, z) b = Sub(x, x) y = Add(a, b)")
    assert simplified(found) == {"Mul": 1, "Sub": 1, "Add": 1}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("n = Constant<value_float=0.>() y = Add(x, n)", 0),
        ("n = Constant<value_float=0.>() y = Sub(x, n)", 0),
        ("n = Constant<value_float=1.>() y = Mul(x, n)", 0),
        ("n = Constant<value_float=1.>() y = Div(x, n)", 0),
        # Tiny numbers must stay: the eps of a logarithm can be this small.
        ("n = Constant<value_float=1e-8>() y = Add(x, n)", 1),
        ("n = Constant<value_float=1.00001>() y = Mul(x, n)", 1),
        # A vector with one element broadcasts, and 0 - x is not a neutral operation.
        ("n = Constant<value_float=0.>() y = Sub(n, x)", 1),
    ],
)
def test_only_neutral_elements_are_dropped(body: str, left: int) -> None:
    found = simplified(model(body))
    assert found.total() - found["Identity"] == left


def test_what_is_there_twice_is_computed_once() -> None:
    found = model(
        "a = Constant<value_float=3.>() b = Constant<value_float=3.>() "
        "c = Mul(x, a) d = Mul(x, b) e = Exp(c) f = Exp(d) y = Add(e, f)"
    )
    assert simplified(found) == {"Mul": 1, "Exp": 1, "Add": 1}
    assert len(found.graph.initializers) == 1


def test_two_dropouts_are_not_the_same() -> None:
    found = model(
        "r = Constant<value_float=0.5>() t = Constant<value=bool {1}>() "
        "a = Dropout(x, r, t) b = Dropout(x, r, t) y = Add(a, b)"
    )
    SimplifyPass()(found)
    seeds = [node.attributes.get_int("seed") for node in found.graph if node.op_type == "Dropout"]
    assert len(seeds) == 2 and len(set(seeds)) == 2


def test_outputs_keep_their_names_and_order() -> None:
    found = model(
        "n = Constant<value_float=0.>() b = Add(x, n) a = Exp(x) c = Exp(x)", "float[4] c, float[4] b, float[4] a"
    )
    simplified(found)
    assert [value.name for value in found.graph.outputs] == ["c", "b", "a"]


def test_a_value_that_is_reshaped_twice() -> None:
    """The rule that writes shapes as constants names both constants after the value."""
    found = model(
        "a = Constant<value_ints=[2,-1]>() b = Constant<value_ints=[-1,1]>() c = Reshape(x, a) d = Reshape(x, b) "
        "y = Add(c, c) z = Add(d, d)",
        "float[2,2] y, float[4,1] z",
    )
    assert simplified(found) == {"Reshape": 2, "Add": 2}


@pytest.mark.parametrize("thoroughly", [True, False])
def test_functions_are_inlined_and_unused_nodes_removed(thoroughly: bool) -> None:
    function = '<domain: "own", opset_import: ["" : 18]> twice (v) => (w) { w = Add(v, v) }'
    found = model("u = Exp(x) a = own.twice(x) y = own.twice(a)", functions=function)
    assert simplified(found, thoroughly) == {"Add": 2}
    assert not found.functions and set(found.opset_imports) == {""}


def test_not_thoroughly_leaves_arithmetic_alone() -> None:
    found = model("n = Constant<value_float=0.>() a = Add(x, n) b = Add(x, n) y = Mul(a, b)")
    assert simplified(found, thoroughly=False) == {"Add": 2, "Mul": 1}
    assert len(found.graph.initializers) == 1
