"""The core of the importer: sizes, names, control flow, training, and what is refused."""

from __future__ import annotations

import copy
import inspect
import pickle
import weakref
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from torch import nn

from ort_trainer import ORTTrainer, optim
from ort_trainer.capture.capture import capture
from ort_trainer.capture.step_module import ExportedStep, StepModule
from ort_trainer.core.errors import ExportError
from ort_trainer.onnx.module import OnnxModule, _Run
from ort_trainer.options import ModelDescription


def model(text: str, opset: int = 17, functions: str = "", imports: str = "") -> onnx.ModelProto:
    header = f'<ir_version: 8, opset_import: ["": {opset}{imports}]>'
    return onnx.parser.parse_model(f"{header}\n{text}\n{functions}")


SIZES = """
g (float[N, S, 6] x) => (float[N, M] y, float[N, S] z, float[T, 2] part)
<float[6] w = {1., 2., 3., 4., 5., 6.}, int64[1] minus = {-1}, int64 zero = {0}, int64 one = {1}, int64[1] first = {0},
 int64[1] second = {1}, int64[1] two = {2}, float half = {0.5}>
{
  shape = Shape(x)
  n = Gather(shape, zero)
  s = Gather(shape, one)
  n1 = Unsqueeze(n, first)
  s1 = Unsqueeze(s, first)
  flat = Concat <axis=0> (n1, minus)
  weighted = Mul(x, w)
  y = Reshape(weighted, flat)
  count = Mul(n1, s1)
  rows = Concat <axis=0> (count, two, two)
  rest = Slice(weighted, minus, s1, second)
  table = Concat <axis=0> (n1, s1)
  zeros = ConstantOfShape(table)
  positions = Range(zero, s, one)
  floats = Cast <to=1> (positions)
  z = Add(zeros, floats)
  cut = Slice(weighted, first, two, two)
  fours = Div(count, second)
  pair = Concat <axis=0> (fours, two)
  part = Reshape(cut, pair)
}
"""


def captured(module: OnnxModule, **sample: torch.Tensor) -> Any:
    """Captures all outputs as the trainer does, with a loss of them all; sizes named by letters are symbolic."""
    inputs = [(name, [f"{name}_{axis}" for axis in range(value.dim())]) for name, value in sample.items()]
    outputs = [("loss", [], True), *((name, ["a", "b"]) for name in module.outputs)]
    description = ModelDescription({"inputs": inputs, "outputs": outputs})

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, **given: torch.Tensor) -> dict[str, torch.Tensor]:
            results = self.inner(**given)
            return {"loss": sum(value.float().sum() for value in results.values()), **results}

    step = StepModule(ExportedStep(WithLoss(), description, None, frozenset()))
    batch = list(sample.values())
    return capture(step, description.inputs, batch, torch.autocast("cpu", torch.bfloat16, enabled=False))


def test_one_graph_serves_all_sizes() -> None:
    module = OnnxModule(model(SIZES))
    found = captured(module, x=torch.randn(3, 4, 6))
    assert all(isinstance(size, torch.SymInt) for size in found.inputs[0].shape[:2])
    program = found.exported.module()
    for n, s in ((2, 7), (5, 3), (4, 4)):
        x = torch.randn(n, s, 6)
        expected = module(x)
        _, *results = program(x)
        assert [list(value.shape) for value in results] == [[n, 6 * s], [n, s], [n * s, 2]]
        for result, value in zip(results, expected.values(), strict=True):
            torch.testing.assert_close(result, value)


def test_sizes_as_floats_and_int32() -> None:
    """Exporters compute sizes so for Resize and from TensorFlow."""
    text = """
    g (float[N, S] x) => (float[A, B] y)
    <int32[2] begin = {0, 0}>
    {
      s = Shape(x)
      scale = Constant <value_floats = [1.0, 2.0]> ()
      f = Cast <to=1> (s)
      g = Mul(f, scale)
      h = Floor(g)
      i = Cast <to=6> (h)
      j = Add(i, begin)
      k = Cast <to=7> (j)
      y = ConstantOfShape(k)
    }
    """
    module = OnnxModule(model(text))
    program = captured(module, x=torch.randn(3, 4)).exported.module()
    for n, s in ((2, 7), (5, 3)):
        assert module(torch.randn(n, s))["y"].shape == (n, 2 * s)
        assert program(torch.randn(n, s))[1].shape == (n, 2 * s)


NAMES = """
g (float[N, 2] x) => (float[N, 2] y)
<float[2] "fc.weight" = {1., 2.}, float[2] "fc.bias" = {3., 4.}, float[2] "/layer/0/w" = {1., 1.},
 float[2] "training" = {1., 1.}, float[2] "fc" = {1., 1.}, float[2] "a..b" = {1., 1.},
 float[2] "fc.weight.half" = {1., 1.}>
{
  a = Mul(x, "fc.weight")
  b = Add(a, "fc.bias")
  c = Mul(b, "/layer/0/w")
  d = Mul(c, "training")
  e = Mul(d, "fc")
  f = Mul(e, "a..b")
  y = Mul(f, "fc.weight.half")
}
"""


def test_parameters_have_the_names_of_the_model() -> None:
    module = OnnxModule(model(NAMES))
    names = dict(module.named_parameters())
    assert {"fc.weight", "fc.bias", "/layer/0/w"} <= set(names)
    assert set(module.names) == set(names)
    assert sorted(module.names.values()) == sorted(
        ["fc.weight", "fc.bias", "/layer/0/w", "training", "fc", "a..b", "fc.weight.half"]
    )
    x = torch.randn(3, 2)
    torch.testing.assert_close(module(x)["y"], x * torch.tensor([1.0, 2.0]) + torch.tensor([3.0, 4.0]))
    again = OnnxModule(model(NAMES))
    with torch.no_grad():
        again.get_parameter("fc.weight").zero_()
    again.load_state_dict(module.state_dict())
    for other in (again, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x=x)["y"], module(x)["y"])
    captured(module, x=x)


def test_a_copy_has_parameters_of_its_own() -> None:
    module = OnnxModule(model(NAMES))
    other = copy.deepcopy(module)
    x = torch.ones(1, 2)
    before = module(x)["y"]
    with torch.no_grad():
        other.get_parameter("fc.bias").add_(1)
    torch.testing.assert_close(module(x)["y"], before)
    torch.testing.assert_close(other(x)["y"], before + 1)


def test_arguments_are_the_inputs() -> None:
    text = "g (float[N] x, float[N] mask) => (float[N] y) { y = Mul(x, mask) }"
    module = OnnxModule(model(text))
    assert list(inspect.signature(module.forward).parameters) == ["x", "mask"]
    one, two = torch.ones(2), torch.full((2,), 2.0)
    for result in (module(one, two), module(one, mask=two), module(mask=two, x=one)):
        assert result["y"].tolist() == [2, 2]
    with pytest.raises(TypeError, match=r"takes the inputs \['x', 'mask'\], but was given 1 and \['other'\]"):
        module(one, other=two)
    with pytest.raises(TypeError, match=r"takes the inputs \['x', 'mask'\], but was given 3"):
        module(one, two, two)
    slashes = OnnxModule(model('g (float[N] "in/put") => (float[N] y) { y = Relu("in/put") }'))
    assert list(inspect.signature(slashes.forward).parameters) == ["inputs"]
    assert slashes(**{"in/put": -one})["y"].tolist() == [0, 0]


def test_it_trains_like_the_same_module_of_pytorch() -> None:
    text = """
    g (float[N, 3] x) => (float[N, 2] y)
    <float[2, 3] "fc.weight" = {0.1, 0.2, 0.3, -0.4, 0.5, 0.6}, float[2] "fc.bias" = {0.1, 0.2}>
    { h = Gemm <transB=1> (x, "fc.weight", "fc.bias")  y = Tanh(h) }
    """
    module = OnnxModule(model(text))
    reference = nn.Linear(3, 2)
    reference.load_state_dict({name.removeprefix("fc."): value for name, value in module.state_dict().items()})
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)

    def loss_fn(prediction: Any, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(prediction["y"] if isinstance(prediction, dict) else prediction, label)

    trainer = ORTTrainer(module, "auto", optim.SGDConfig(lr=0.1), loss_fn=loss_fn)
    for size in (4, 4, 7):
        x, label = torch.randn(size, 3), torch.randn(size, 2)
        loss = loss_fn(reference(x).tanh(), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.train_step(x, label)[0].reshape(()), loss.detach())
    weights = trainer.state_dict()["model"]["full_precision"]
    np.testing.assert_allclose(weights["fc.weight"], reference.weight.detach().numpy(), rtol=1e-5)


def test_values_are_freed_after_their_last_use() -> None:
    text = "g (float[N] x) => (float[N] y) { a = Exp(x)  b = Neg(a)  c = Relu(b)  y = Add(b, c) }"
    module = OnnxModule(model(text))
    alive: list[weakref.ref[torch.Tensor]] = []

    class Watching(dict[int, Any]):
        def __setitem__(self, number: int, value: torch.Tensor) -> None:
            alive.append(weakref.ref(value))
            super().__setitem__(number, value)

        def pop(self, number: int, default: Any = None) -> Any:
            super().pop(number, default)

    run = _Run(module, Watching({module._numbers["x"]: torch.ones(2)}))
    run.graph(module._graph)
    assert [reference() is not None for reference in alive] == [False, False, False, True]


def test_conditions_loops_and_scans_that_are_known() -> None:
    text = """
    g (float[N, 2] x) => (float[N, 2] y, float[3, N, 2] all)
    <int64 trips = {3}, int64 one = {1}, int64 two = {2}>
    {
      shape = Shape(x)
      rank = Size(shape)
      is_matrix = Equal(rank, two)
      y0 = If (is_matrix) <
        then_branch = t () => (float[N, 2] a) { a = Neg(x) },
        else_branch = e () => (float[N, 2] b) { b = Exp(x) }
      >
      yes = Constant <value = bool {1}> ()
      y, all = Loop (trips, yes, y0) <
        body = b (int64 i, bool go, float[N, 2] v) => (bool go_on, float[N, 2] w, float[N, 2] seen) {
          go_on = Identity(go)
          f = Cast <to=1> (i)
          w = Add(v, f)
          seen = Identity(w)
        }
      >
    }
    """
    module = OnnxModule(model(text))
    x = torch.randn(4, 2)
    result = module(x)
    torch.testing.assert_close(result["y"], -x + 3)
    torch.testing.assert_close(result["all"], torch.stack([-x, -x + 1, -x + 3]))


BY_BATCH = """
g (float[N] x) => (float[N] y)
<float zero = {0.}>
{
  sum = ReduceSum <keepdims=0> (x)
  positive = Greater(sum, zero)
  y = If (positive) <
    then_branch = t () => (float[N] a) { a = Sqrt(x) },
    else_branch = e () => (float[N] b) { b = Neg(x) }
  >
}
"""


def test_a_condition_on_a_batch_selects_without_nan_in_the_gradient() -> None:
    module = OnnxModule(model(BY_BATCH))
    program = captured(module, x=torch.ones(3)).exported.module()
    for x in (torch.tensor([1.0, 4.0]), torch.tensor([-1.0, 0.0]), torch.tensor([-1.0, -4.0, 2.0])):
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        result, expected = program(leaf), module(other)["y"]
        torch.testing.assert_close(result[1], expected.detach())
        torch.testing.assert_close(result[0], expected.sum())
        result[0].backward()
        expected.sum().backward()
        torch.testing.assert_close(leaf.grad, other.grad)


def test_branches_of_different_shapes_are_refused() -> None:
    text = BY_BATCH.replace("a = Sqrt(x)", "s = Sqrt(x)  a = Concat <axis=0> (s, s)")
    module = OnnxModule(model(text))
    assert module(torch.ones(2))["y"].shape == (4,)
    with pytest.raises(ExportError, match="operator If of ai.onnx 17: its condition depends on the values of a batch"):
        captured(module, x=torch.ones(3))


def test_running_statistics_in_a_branch_are_refused_in_training() -> None:
    text = """
    g (float[N, 2] x) => (float[N, 2] y)
    <float zero = {0.}, float[2] s = {1., 1.}, float[2] b = {0., 0.}, float[2] mean = {0., 0.}, float[2] var = {1., 1.}>
    {
      sum = ReduceSum <keepdims=0> (x)
      positive = Greater(sum, zero)
      y = If (positive) <
        then_branch = t () => (float[N, 2] a) { a = BatchNormalization(x, s, b, mean, var) },
        else_branch = e () => (float[N, 2] c) { c = Neg(x) }
      >
    }
    """
    module = OnnxModule(model(text))
    captured(module.eval(), x=torch.ones(3, 2))
    with pytest.raises(ExportError, match="operator If .* a branch has a BatchNormalization"):
        captured(module.train(), x=torch.ones(3, 2))


def test_functions_of_another_opset_keep_it() -> None:
    """Softmax until opset 12 takes all axes after the first together."""
    functions = """
    <domain: "local", opset_import: ["": 11]>
    old <axis> (v) => (w) { w = Softmax <axis: int = @axis> (v) }
    """
    text = """
    g (float[N, 2, 3] x) => (float[N, 2, 3] y, float[N, 2, 3] z)
    { y = local.old <axis=1> (x)  z = Softmax <axis=1> (x) }
    """
    module = OnnxModule(model(text, 17, functions, ', "local": 1'))
    x = torch.randn(4, 2, 3)
    result = module(x)
    torch.testing.assert_close(result["y"], x.flatten(1).softmax(1).reshape(x.shape))
    torch.testing.assert_close(result["z"], x.softmax(1))


REFUSED = {
    "an unknown operator": (
        "g (float[N] x) => (float[N] y) { y = custom.Fancy(x) }",
        17,
        ', "custom": 1',
        r"node 'y', operator Fancy of custom 1: it is not supported: compose it of standard operators",
    ),
    "no such operator": ("g (float[N] x) => (float[N] y) { y = Fancy(x) }", 17, "", "Fancy of ai.onnx 17: ONNX has no"),
    "the future": ("g (float[N] x) => (float[N] y) { y = Relu(x) }", 99, "", r"uses opset 99, but the installed onnx"),
    "a domain that is not imported": ("g (float[N] x) => (float[N] y) { y = other.Relu(x) }", 17, "", "not import"),
    "an attribute": (
        'g (float[N] x) => (float[N] y) { y = Relu <slope = 2> (x) }',
        17,
        "",
        r"operator Relu of ai.onnx 17: its attribute 'slope' is 2, which is not supported: leave it out",
    ),
    "a missing attribute": (
        "g (float[N] x) => (float[N] y) { y = Cast(x) }", 17, "", r"operator Cast .* lacks the attributes \['to'\]",
    ),
    "too many inputs": ("g (float[N] x) => (float[N] y) { y = Relu(x, x) }", 17, "", "has 2 inputs, but only 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_runs(case: str) -> None:
    text, opset, imports, message = REFUSED[case]
    with pytest.raises(ExportError, match=message):
        OnnxModule(model(text, opset, imports=imports))


def test_several_refusals_are_counted() -> None:
    text = "g (float[N] x) => (float[N] y) { a = custom.A(x)  b = custom.B(a)  y = custom.C(b) }"
    with pytest.raises(
        ExportError, match=r"node 'a', operator A of custom 1: .*\(2 other nodes can't be used either\)"
    ):
        OnnxModule(model(text, imports=', "custom": 1'))


def test_an_attribute_with_its_default_is_taken() -> None:
    text = "g (float[N, 2] x) => (float[2, N] y) { y = Reshape <allowzero = 0> (x, s) }"
    text = text.replace("{ y", "<int64[2] s = {2, -1}> { y")
    assert OnnxModule(model(text))(torch.ones(4, 2))["y"].shape == (2, 4)


BY_VALUES = {
    "a shape": (
        "g (float[N] x, int64[2] s) => (float[A, B] y) { y = Reshape(x, s) }",
        {"x": torch.ones(6), "s": torch.tensor([2, 3])},
        "node 'y', operator Reshape of ai.onnx 17: shape depends on the values of a batch",
    ),
    "a trip count": (
        """g (float[N] x, int64 n) => (float[N] y) {
          yes = Constant <value = bool {1}> ()
          y = Loop (n, yes, x) <
            body = b (int64 i, bool go, float[N] v) => (bool on, float[N] w) { on = Identity(go) w = Neg(v) }
          >
        }""",
        {"x": torch.ones(6), "n": torch.tensor(2)},
        "operator Loop of ai.onnx 17: its trip count depends on the values of a batch",
    ),
    "a selection": (
        "g (float[N] x, bool[N] c) => (float[M] y) { y = Compress(x, c) }",
        {"x": torch.ones(6), "c": torch.ones(6, dtype=torch.bool)},
        "operator Compress of ai.onnx 17: the shape of its result depends on the condition's values",
    ),
}


@pytest.mark.parametrize("case", BY_VALUES)
def test_what_depends_on_values_runs_but_can_not_be_captured(case: str) -> None:
    text, inputs, message = BY_VALUES[case]
    module = OnnxModule(model(text))
    module(**inputs)
    with pytest.raises(ExportError, match=message):
        captured(module, **inputs)


def test_constants_keep_their_dtype() -> None:
    """Numbers of Python would have another one."""
    text = """
    g (float16[N] x, bool[N] c) => (float16[N] y, float16[N] z, int32[N] w, double[N] v)
    <float zero32 = {0.0}, float low32 = {-100.0}, int32 one = {1}, int32 two = {2}, double three = {3.0}>
    {
      zero = Cast <to=10> (zero32)
      low = Cast <to=10> (low32)
      y = Where(c, zero, low)
      z = Mul(x, low)
      w = Where(c, one, two)
      d = Cast <to=11> (x)
      v = Div(three, d)
    }
    """
    module = OnnxModule(model(text))
    results = module(torch.ones(2, dtype=torch.float16), torch.tensor([True, False]))
    expected = {"y": torch.float16, "z": torch.float16, "w": torch.int32, "v": torch.float64}
    assert {name: value.dtype for name, value in results.items()} == expected
    assert [value.tolist() for value in results.values()] == [[0, -100], [-100, -100], [1, 2], [3, 3]]


def test_shapes_that_do_not_fit_name_the_node() -> None:
    module = OnnxModule(model("g (float[N] x, float[M] z) => (float[K] y) { y = Add(x, z) }"))
    with pytest.raises(ExportError, match=r"node 'y', operator Add .* fails for inputs of the shapes \[\[2\], \[3\]\]"):
        module(torch.ones(2), torch.ones(3))
