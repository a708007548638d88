"""Casts around nodes if the engine has no kernel for their types."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from ort_trainer.engine.fit_to_kernels import (
    CastBeforeTransposePass,
    FitResult,
    FitToKernelsPass,
    WidenInterfacePass,
)
from ort_trainer.engine.ort import make_session, session_options

pytestmark = pytest.mark.engine


def model_of(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {text}'))


def run(model: ir.Model, **inputs: np.ndarray) -> list[np.ndarray]:
    data = ir.to_proto(model).SerializeToString()
    return make_session(data, session_options(None, False), ["CPUExecutionProvider"]).run(None, inputs)


def missing(model: ir.Model, source: Callable[[ir.Node], str] = str) -> list[str]:
    """Fits a model to the kernels; returns the operators that have none."""
    result = FitToKernelsPass("cpu", source)(model)
    assert isinstance(result, FitResult)
    return result.missing


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_whole_numbers_wrap_around_and_outputs_keep_their_names() -> None:
    model = model_of(
        "agraph (uint8[n] x, uint8[n] y) => (uint8[n] s) <int64 axis = {0}> { p = Mul(x, y) s = CumSum(p, axis) }"
    )
    assert missing(model) == []
    assert [value.name for value in model.graph.outputs] == ["s"]
    x, y = np.array([200, 3, 255], np.uint8), np.array([2, 100, 255], np.uint8)
    (found,) = run(model, x=x, y=y)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, np.cumsum(x * y, dtype=np.uint8))


def test_truth_values_are_compared_as_numbers() -> None:
    model = model_of("agraph (bool[n] x, bool[n] y) => (bool[n] z) { z = Less(x, y) }")
    assert missing(model) == []
    (found,) = run(model, x=np.array([False, True]), y=np.array([True, True]))
    assert found.tolist() == [True, False]


def test_what_has_a_kernel_stays() -> None:
    model = model_of(
        "agraph (float[n] x, uint8[n] y, int64[n] i) => (float[n] z, uint8[n] g) { c = Cast <to = 1> (y) z = Add(x, c) "
        "g = Gather(y, i) }"
    )
    assert missing(model) == []
    assert operators(model) == ["Cast", "Add", "Gather"]


def test_a_sequence_of_halves_stays() -> None:
    """The type of SplitToSequence's output is no tensor's."""
    model = model_of(
        "agraph (float16[4] x) => (float16[2] z) <int64 two = {2}, int64 zero = {0}> "
        "{ s = SplitToSequence <axis = 0> (x, two) z = SequenceAt(s, zero) }"
    )
    assert missing(model) == []
    (z,) = run(model, x=np.arange(4, dtype=np.float16))
    assert z.tolist() == [0, 1]


def test_bfloat16_is_computed_in_fp32_and_moved_as_it_is() -> None:
    model = model_of(
        "agraph (bfloat16[2, 3] x) => (bfloat16[3, 2] z) { y = Tanh(x) z = Transpose <perm = [1, 0]> (y) }"
    )
    assert missing(model) == []
    assert operators(model) == ["Cast", "Tanh", "Cast", "Transpose"]


def test_halves_are_not_added_where_they_are_scattered() -> None:
    model = model_of(
        "agraph (float16[n] x, int64[m] i, float16[m] y) => (float16[n] z) "
        '{ z = ScatterElements <axis = 0, reduction = "add"> (x, i, y) }'
    )
    assert missing(model) == []
    x, i = np.ones(3, np.float16), np.array([1, 1])
    assert run(model, x=x, i=i, y=x[:2])[0].tolist() == [1, 3, 1]


def test_doubles_are_not_computed_in_less() -> None:
    model = model_of("agraph (double[n] x) => (double[n] z, double[n] a) { z = Erf(x) a = Add(z, x) }")
    assert missing(model, lambda node: f"line of {node.op_type}") == ["Erf of double: line of Erf"]


def test_kernels_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs)
    )
    for _ in range(2):
        model = model_of(
            "agraph (int16[n] x, int16[n] y, float[n] f) => (int16[n] z, float[n] g) { a = Max(x, y) b = Max(x, a) "
            "z = Max(a, b) g = Add(f, f) }"
        )
        FitToKernelsPass("cpu", str)(model)
    assert len(calls) <= 2  # int16, int32


def test_products_of_transposed_doubles_run() -> None:
    model = model_of(
        "agraph (double[2, 3] x, double[2, 4] y) => (double[3, 4] z) { t = Transpose <perm = [1, 0]> (x) "
        "z = MatMul(t, y) }"
    )
    x, y = np.random.default_rng(0).random((2, 3)), np.random.default_rng(1).random((2, 4))
    np.testing.assert_allclose(run(model, x=x, y=y)[0], x.T @ y)


def test_an_output_that_is_the_cast_of_a_transposed_value_is_computed() -> None:
    """ONNX Runtime drops it, if a product takes the same cast."""
    model = model_of(
        "agraph (float16[2, 3] x, float[2, 4] w) => (float[3, 2] kept, float[3, 4] product) "
        "{ t = Transpose <perm = [1, 0]> (x) kept = Cast <to = 1> (t) product = MatMul(kept, w) }"
    )
    CastBeforeTransposePass()(model)
    assert [value.name for value in model.graph.outputs] == ["kept", "product"]
    x, w = np.arange(6, dtype=np.float16).reshape(2, 3), np.arange(8, dtype=np.float32).reshape(2, 4)
    kept, product = run(model, x=x, w=w)
    assert np.array_equal(kept, x.T) and np.array_equal(product, x.T.astype(np.float32) @ w)


@pytest.mark.parametrize("call", ["Max(x, y)", "Min(x, y)", "Max(y, x)"])
def test_maxima_of_halves_do_not_write_beyond_their_end(call: str) -> None:
    """ONNX Runtime 1.19 does, where one operand is broadcast: here a row for each but the first."""
    model = model_of(f"agraph (float16[7, 1] x, float16[1] y) => (float16[7, 1] z) {{ z = {call} }}")
    assert missing(model) == [] and operators(model) == ["Cast", "Cast", call[:3], "Cast"]
    session = make_session(
        ir.to_proto(model).SerializeToString(), session_options(None, False), ["CPUExecutionProvider"]
    )
    x, y, place = (
        np.linspace(0, 1, 7, dtype=np.float16)[:, None],
        np.full(1, 0.5, np.float16),
        np.full(64, 9, np.float16),
    )
    binding = session.io_binding()
    for name, value in {"x": x, "y": y}.items():
        binding.bind_input(name, "cpu", 0, np.float16, value.shape, value.ctypes.data)
    binding.bind_output("z", "cpu", 0, np.float16, (7, 1), place.ctypes.data)
    session.run_with_iobinding(binding)
    expected = np.maximum(x, y) if call.startswith("Max") else np.minimum(x, y)
    assert np.array_equal(place[:7, None], expected) and (place[7:] == 9).all()


def test_rectifiers_of_halves_are_functions_of_a_maximum() -> None:
    model = model_of("agraph (float16[7, 1] x) => (float16[7, 1] y) { y = Relu(x) }")
    assert missing(model) == [] and operators(model) == ["Cast", "Relu", "Cast"]


def test_names_of_casts_differ_from_those_of_other_values() -> None:
    """A result that is a transposition of what is kept: both are bfloat16, which inputs and outputs are not."""
    model = model_of(
        "agraph (float[2, 3] x) => (bfloat16[3, 2] kept) { n = Cast <to = 16> (x) t = Transpose <perm = [1, 0]> (n) "
        "w = Cast <to = 1> (t) kept = Cast <to = 16> (w) }"
    )
    WidenInterfacePass()(model)
    CastBeforeTransposePass()(model)
    names = [value.name for node in model.graph for value in node.outputs]
    assert len(names) == len(set(names)) and model.graph.outputs[0].name == "kept"
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(run(model, x=x)[0], x.T)
