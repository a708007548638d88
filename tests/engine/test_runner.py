"""One graph on the engine: tensors that are bound once or in every run, and results."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

from ort_trainer.engine.ort import providers_for, session_options
from ort_trainer.engine.runner import SessionRunner
from ort_trainer.engine.torch_memory import TorchMemory
from ort_trainer.step import RandomInput, Step, TensorSpec, dtype_name

pytestmark = pytest.mark.engine

F32 = torch.float32
N = ("dim('n')", 2)


def runner(
    nodes: list[onnx.NodeProto],
    outputs: dict[str, tuple[tuple[int | str, ...] | None, torch.dtype]],
    random: tuple[RandomInput, ...] = (),
    loss_scale: bool = False,
) -> tuple[SessionRunner, torch.Tensor]:
    """Returns a runner of a graph over ``w`` (state) and ``x`` of [n, 2], with the given nodes."""
    scale = TensorSpec("scale", "float32", ()) if loss_scale else None
    inputs = [
        helper.make_tensor_value_info("w", TensorProto.FLOAT, [2]),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2]),
        *(helper.make_tensor_value_info(r.name, TensorProto.FLOAT, ["n", 2]) for r in random),
        *([helper.make_tensor_value_info("scale", TensorProto.FLOAT, [])] if loss_scale else []),
    ]
    types = {torch.float32: TensorProto.FLOAT, torch.int64: TensorProto.INT64}
    results = [helper.make_tensor_value_info(name, types[dtype], None) for name, (_, dtype) in outputs.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, results), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )
    graph = Step(
        stored=ir.from_proto(model),
        kind="training",
        inputs=(TensorSpec("x", "float32", ("n", 2)),),
        outputs=tuple(TensorSpec(name, dtype_name(dtype), shape) for name, (shape, dtype) in outputs.items()),
        loss=next(iter(outputs)),
        state={"weight": "w"},
        random=random,
        loss_scale=scale,
    )
    weight = torch.tensor([2.0, 3.0])
    cpu = torch.device("cpu")
    return SessionRunner(
        graph, {"weight": weight}, TorchMemory(cpu), session_options(None, False), providers_for(cpu)
    ), weight


def test_state_is_bound_once_and_its_memory_is_the_callers() -> None:
    run, weight = runner([helper.make_node("Mul", ["x", "w"], ["y"])], {"y": (N, F32)})
    x = torch.ones(3, 2)
    plan = run.plan({"x": x.shape}, ["y"])
    first = run.run(plan, {"x": x})[0]["y"]
    assert torch.equal(first, torch.tensor([[2.0, 3.0]] * 3))
    weight.mul_(10)  # in place: the bindings stay valid
    second = run.run(plan, {"x": x})[0]["y"]
    assert torch.equal(second, 10 * torch.tensor([[2.0, 3.0]] * 3))
    assert torch.equal(first, torch.tensor([[2.0, 3.0]] * 3)), "outputs are new tensors"
    assert len(plan.bindings) == 1


def test_outputs_of_unknown_shape_and_in_the_order_that_was_asked_for() -> None:
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"]), helper.make_node("NonZero", ["x"], ["found"])]
    run, _ = runner(nodes, {"y": (N, F32), "found": (None, torch.int64)})
    x = torch.tensor([[0.0, 1.0], [0.0, 0.0], [4.0, 5.0]])
    plan = run.plan({"x": x.shape}, ["found", "y"])
    results, _ = run.run(plan, {"x": x})
    assert list(results) == ["found", "y"]
    assert torch.equal(results["found"], x.nonzero().T)
    fewer, _ = run.run(plan, {"x": torch.zeros(3, 2)})
    assert fewer["found"].shape == (2, 0) and results["found"].shape == (2, 3)


def test_destinations_are_written_in_place_and_known_by_their_key() -> None:
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"]), helper.make_node("Neg", ["w"], ["g"])]
    run, weight = runner(nodes, {"y": (N, F32), "g": ((2,), F32)})
    plan = run.plan({"x": (1, 2)}, ["y"])
    gradient, other = torch.zeros(2), torch.zeros(2)
    run.run(plan, {"x": torch.ones(1, 2)}, destination_key="fresh", destinations={"g": gradient})
    assert torch.equal(gradient, -weight) and torch.equal(other, torch.zeros(2))
    run.run(plan, {"x": torch.ones(1, 2)}, destination_key="add", destinations={"g": other})
    weight.add_(1)
    run.run(plan, {"x": torch.ones(1, 2)}, destination_key="fresh")
    assert torch.equal(gradient, -weight) and torch.equal(other, 1 - weight)


def test_the_loss_scale_is_bound_anew_where_it_is_another_tensor() -> None:
    run, weight = runner([helper.make_node("Mul", ["w", "scale"], ["y"])], {"y": ((2,), F32)}, loss_scale=True)
    plan = run.plan({}, ["y"])
    for scale in (torch.tensor(1.0), torch.tensor(8.0), torch.tensor(1.0)):
        for _ in range(2):
            assert torch.equal(run.run(plan, {}, loss_scale=scale)[0]["y"], weight * scale)


def test_random_inputs_come_from_the_generator() -> None:
    random = (RandomInput("r", "uniform", "float32", N),)
    run, _ = runner([helper.make_node("Add", ["x", "r"], ["y"])], {"y": (N, F32)}, random)
    x = torch.zeros(4, 2)
    plan = run.plan({"x": x.shape}, ["y"])
    generator = torch.Generator().manual_seed(7)
    ours = [run.run(plan, {"x": x}, generator=generator)[0]["y"] for _ in range(2)]
    generator.manual_seed(7)
    for value in ours:
        assert torch.equal(value, torch.empty(4, 2).uniform_(generator=generator))


def test_a_dtype_that_can_not_be_shared_is_named() -> None:
    run, _ = runner([helper.make_node("Mul", ["x", "w"], ["y"])], {"y": (N, F32)})
    plan = run.plan({"x": (1, 2)}, ["y"])
    with pytest.raises(TypeError, match="'x' has dtype torch.complex64, which can't be shared with ONNX Runtime"):
        run.run(plan, {"x": torch.zeros(1, 2, dtype=torch.complex64)})
