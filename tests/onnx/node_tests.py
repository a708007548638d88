"""The node tests of the onnx package, and how a module of the importer is compared with them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator

from ort_trainer.onnx.module import OnnxModule
from ort_trainer.onnx.values import tensor_of

__all__ = [
    "LEFT_OUT",
    "Case",
    "NotCompared",
    "can_be_captured",
    "captured",
    "forward_agrees",
    "gradient_agrees",
    "node_cases",
]

LEFT_OUT = {
    "strings": "tensors or sequences of strings: PyTorch has none",
    "ImageDecoder": "image decoding",
    "other domains": "operators of ai.onnx.ml, ai.onnx.preview and ai.onnx.preview.training",
}
"""What is left out, and why."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class NotCompared(Exception):
    """There is no derivative to compare."""


@dataclass(frozen=True)
class Case:
    """A test of the onnx package.

    Attributes:
        name: Its name.
        model: The model.
        inputs: The inputs of its first data set.
        outputs: The expected outputs.
        rtol: The relative tolerance.
        atol: The absolute tolerance.
        node: The node of the operator that it is for: of a test with the nodes of its function, that of the test with
            the operator itself.
        left_out: The key of ``LEFT_OUT`` for a test that is left out; otherwise empty.
    """

    name: str
    model: onnx.ModelProto
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    rtol: float
    atol: float
    node: onnx.NodeProto
    left_out: str = ""

    @property
    def is_random(self) -> bool:
        """Whether the outputs are drawn by NumPy's generator: only their shapes and dtypes can be compared."""
        return self.node.op_type == "Bernoulli" or (
            self.name.startswith("test_training_dropout") and "zero_ratio" not in self.name
        )

    @property
    def opset(self) -> int:
        """The opset of the model."""
        return next(entry.version for entry in self.model.opset_import if not entry.domain)


def node_cases() -> list[Case]:
    """Returns all tests, those that are left out too."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, in the tests themselves
        found = collect_testcases(None)
    return cases_of([(case.name, case.model, case.rtol, case.atol, case.data_sets[0]) for case in found])


def cases_of(found: Sequence[tuple[str, onnx.ModelProto, float, float, Any]]) -> list[Case]:
    """Returns tests from names, models, tolerances and data."""
    models = {name: model for name, model, *_ in found}
    return [
        Case(name, model, *data, rtol, atol, _node(models.get(name.removesuffix("_expanded"), model)), _left_out(model))  # type: ignore[call-arg]
        for name, model, rtol, atol, data in found
    ]


def _node(model: onnx.ModelProto) -> onnx.NodeProto:
    """Returns the node that a model with one tests."""
    nodes = [node for node in model.graph.node if node.op_type not in ("Constant", "SequenceConstruct")]
    return nodes[-1] if nodes else model.graph.node[-1]


def _left_out(model: onnx.ModelProto) -> str:
    if any(node.op_type == "ImageDecoder" for node in model.graph.node):
        return "ImageDecoder"
    if any(node.domain for node in model.graph.node):
        return "other domains"
    values = [*model.graph.input, *model.graph.output]
    of_strings = any(f"elem_type: {onnx.TensorProto.STRING}\n" in str(value.type) for value in values)
    return "strings" if of_strings or any("String" in node.op_type for node in model.graph.node) else ""


def forward_agrees(case: Case, module: OnnxModule) -> str:
    """Returns how a module's outputs differ from the expected ones; empty if they agree."""
    # Dropout of old opsets drops in training mode only, and their tests expect nothing to be dropped.
    module.train(case.node.op_type != "Dropout" or case.is_random)
    results = module(**dict(zip(module.inputs, map(_value, case.inputs), strict=True)))
    if case.is_random:
        kinds = [(value.dtype, value.shape) for value in results.values()]
        return "" if kinds == [(value.dtype, value.shape) for value in map(_value, case.outputs)] else f"{kinds}"
    for (name, found), expected in zip(results.items(), case.outputs, strict=True):
        difference = _difference(found, _value(expected), case.rtol, case.atol)
        if difference:
            return f"{name}: {difference}"
    return ""


def _value(array: Any) -> Any:
    if array is None:
        return None
    if isinstance(array, onnx.TensorProto):  # of types that NumPy lacks
        return tensor_of(ir.serde.deserialize_tensor(array))
    return [_value(part) for part in array] if isinstance(array, list) else tensor_of(ir.tensor(np.asarray(array)))


def _difference(found: Any, expected: Any, rtol: float, atol: float) -> str:
    if isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            return f"{found} instead of {len(expected)} values"
        return next(filter(None, (_difference(f, e, rtol, atol) for f, e in zip(found, expected, strict=True))), "")
    if expected is None or found is None:
        return "" if found is expected else f"{found} instead of {expected}"
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if found.numel() == 0:
        return ""
    if expected.dtype in (torch.float16, torch.bfloat16):
        # Rounded in another order, numbers differ by two units in the last place.
        rtol = max(rtol, 2 * torch.finfo(expected.dtype).eps)
    elif expected.dtype == torch.float32:
        # Where terms cancel, there is noise of the size of their last place.
        atol = max(atol, torch.finfo(expected.dtype).eps * float(expected.abs().nan_to_num(0, 0).max()))
    f, e = (x.detach() if x.is_complex() else x.detach().to(torch.float64) for x in (found, expected))
    close = torch.isclose(f, e, rtol, atol, equal_nan=True)
    if close.all():
        return ""
    first = f"{f[~close][0].item()} instead of {e[~close][0].item()}"
    return f"{int((~close).sum())} of {close.numel()} elements differ, such as {first}"


def gradient_agrees(case: Case, module: OnnxModule, seed: int = 0) -> str:
    """Compares a directional derivative of a module with central differences of ONNX's reference implementation.

    Returns:
        How they differ; empty if they agree.

    Raises:
        NotCompared: If there is none; the message says why.
    """
    if case.is_random:
        raise NotCompared("the outputs are random")
    of_inputs, of_outputs = _differentiable(case)
    if not of_inputs or not of_outputs:
        raise NotCompared("no differentiable inputs or outputs")
    if case.node.op_type == "LpNormalization" and any(a.name == "p" and a.i == 1 for a in case.node.attribute):
        raise NotCompared("the reference implementation takes no absolute values")
    reference = _Reference(case, of_inputs, of_outputs, seed)
    expected, precise = reference.derivative()
    values = [_value(array) for array in reference.point]
    leaves = {i: values[i].to(_value(case.inputs[i]).dtype).requires_grad_() for i in of_inputs}
    values = [leaves.get(i, value) for i, value in enumerate(values)]
    outputs = list(module(**dict(zip(module.inputs, values, strict=True))).values())
    total = sum((outputs[i].double() * torch.from_numpy(reference.weights[i])).sum() for i in of_outputs)
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return "" if abs(expected) <= 1e-4 else f"the outputs have no gradient, but the derivative is {expected:.6g}"
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    parts = [
        (gradient.double() * torch.from_numpy(reference.direction[i])).flatten()
        for i, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None
    ]
    along = torch.cat(parts) if parts else torch.zeros(1)
    half = any(leaf.dtype in (torch.float16, torch.bfloat16) for leaf in leaves.values())
    tolerance = 5e-2 if half else 1e-3 if precise else 3e-2
    found = float(along.sum())
    if not abs(found - expected) <= tolerance * (float(along.abs().sum()) + abs(expected)) + 1e-5:
        return f"the derivative is {found:.6g} instead of {expected:.6g}"
    return ""


def _differentiable(case: Case) -> tuple[list[int], list[int]]:
    """Returns the inputs and outputs of floats that ONNX does not call non-differentiable."""
    schema = onnx.defs.get_schema(case.node.op_type, case.opset)
    found = []
    for formal, values in ((schema.inputs, case.inputs), (schema.outputs, case.outputs)):
        chosen = []
        for i, value in enumerate(values):
            category = formal[min(i, len(formal) - 1)].differentiation_category if formal else None
            if _is_float(value) and category != onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable:
                chosen.append(i)
        found.append(chosen)
    return found[0], found[1]


def _is_float(array: Any) -> bool:
    if array is None or isinstance(array, (list, onnx.TensorProto)):
        return False
    return _value(array).dtype in _FLOATS and np.asarray(array).size > 0


class _Reference:
    """ONNX's reference implementation of a test, as a function of one number: the way along a direction.

    Attributes:
        point: The inputs from which the way begins.
        direction: The direction, by input.
        weights: The weights of the outputs' elements in the sum, by output.

    Raises:
        NotCompared: If it does not give what the test expects.
    """

    def __init__(self, case: Case, inputs: list[int], outputs: list[int], seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._case, self._outputs = case, outputs
        self._names = [value.name for value in case.model.graph.input]
        self.point: list[Any] = list(case.inputs)
        self.direction = {i: self._random.uniform(-1, 1, np.shape(case.inputs[i])) for i in inputs}
        self.weights = {i: self._random.uniform(0.5, 1.5, np.shape(case.outputs[i])) for i in outputs}
        # It has no implementation of some operators, and others differ from the tests.
        try:
            self._evaluator = ReferenceEvaluator(case.model)
            results = self._run({})
        except Exception as error:
            raise NotCompared("the reference implementation fails") from error
        for i in outputs:
            if _difference(_value(results[i]), _value(case.outputs[i]), 1e-2, 1e-4):
                raise NotCompared("the reference implementation differs from the test")

    def derivative(self) -> tuple[float, bool]:
        """Returns the derivative and whether it is precise.

        Begins at the inputs of the test, or beside them, where there may be no kink.

        Raises:
            NotCompared: If there is a kink everywhere, or the reference is random.
        """
        for factor, noise in ((1, 0), (1, 0.02), (0.9, 0), (0.8, 0.02)):
            for i in self.direction:
                array = np.asarray(self._case.inputs[i])
                near = array.astype(np.float64) * factor + self._random.uniform(-noise, noise, array.shape)
                self.point[i] = near.astype(array.dtype)
            for dtype, step in ((np.float64, 1e-5), (np.float32, 4e-3)):
                slope = self._slope(dtype, step)
                if slope is not None:
                    return slope, dtype == np.float64
        raise NotCompared("the reference implementation has a kink there, is random, or rounds")

    def _slope(self, dtype: Any, step: float) -> float | None:
        """Returns the slope, if it is the same on both sides and the numbers are of that dtype."""
        try:
            middle = self._at(0, dtype)
            if self._at(0, dtype) != middle:
                return None
            after, before = self._at(step, dtype), self._at(-step, dtype)
            further = (self._at(2 * step, dtype) - self._at(-2 * step, dtype)) / (4 * step)
        except Exception:  # it does not accept such numbers, or its results have other shapes
            return None
        central = (after - before) / (2 * step)
        slopes = [(after - middle) / step, (middle - before) / step, further]
        limit = (1e-3 if dtype == np.float64 else 2e-2) * max(map(abs, slopes))
        limit += 1e-6 if dtype == np.float64 else 1e-6 * abs(middle) / step
        return central if all(abs(slope - central) <= limit for slope in slopes) else None

    def _at(self, way: float, dtype: Any) -> float:
        moved = {
            i: (np.asarray(self.point[i]).astype(np.float64) + way * direction).astype(dtype)
            for i, direction in self.direction.items()
        }
        results = self._run(moved)
        if any(dtype == np.float64 and results[i].dtype != np.float64 for i in self._outputs):
            raise TypeError("it computes in another precision")
        return sum(float((results[i].astype(np.float64) * self.weights[i]).sum()) for i in self._outputs)

    def _run(self, moved: dict[int, Any]) -> list[Any]:
        feeds = {name: moved.get(i, self.point[i]) for i, name in enumerate(self._names)}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return [r if isinstance(r, list) else np.asarray(r) for r in self._evaluator.run(None, feeds)]


def can_be_captured(case: Case) -> bool:
    """Returns whether all inputs are tensors, and some are not constants for :func:`captured`."""
    if case.is_random or any(value is None or isinstance(value, (list, onnx.TensorProto)) for value in case.inputs):
        return False
    return not all(decides(_value(value)) for value in case.inputs)


def decides(tensor: torch.Tensor) -> bool:
    """Returns whether an input probably decides about shapes."""
    return tensor.dtype in (torch.int32, torch.int64, torch.bool) and tensor.dim() <= 1


def captured(case: Case) -> str:
    """Captures a model with symbolic sizes, and returns how the program's outputs differ; empty if they agree.

    Integers and conditions with one dimension at most are constants: shapes, axes, counts.
    """
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    given = {}
    for value, array in zip(case.model.graph.input, case.inputs, strict=True):
        tensor = _value(array)
        if decides(tensor):
            model.graph.input.remove(value)
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), value.name))
        else:
            given[value.name] = tensor
    module = OnnxModule(model)
    shapes = {
        name: {axis: torch.export.Dim.AUTO for axis, size in enumerate(value.shape) if size > 1}
        for name, value in given.items()
    }
    exported = torch.export.export(_Flat(module), (given,), dynamic_shapes=(shapes,), strict=False)
    results = exported.module()(given)
    pairs = zip(results, map(_value, case.outputs), strict=True)
    return next(filter(None, (_difference(*pair, case.rtol, case.atol) for pair in pairs)), "")


class _Flat(torch.nn.Module):
    """Takes the inputs as one dict, whose keys may be any names."""

    def __init__(self, module: OnnxModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return list(self.module(**inputs).values())
