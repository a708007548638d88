"""``Executor`` by itself, as the loop uses it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from ort_trainer import optim
from ort_trainer.capture.step_module import ExportedStep
from ort_trainer.engine import Executor, Request
from ort_trainer.export.builder import GraphBuilder
from ort_trainer.optim.update import OptimizerUpdate
from ort_trainer.options.model_desc import ModelDescription
from ort_trainer.step import Step

from ..helpers import MLP, MLP_DESC, mlp_batches, mlp_trainer

pytestmark = pytest.mark.engine

X, Y = mlp_batches(1)[0]


@pytest.fixture(scope="module")
def graphs() -> dict[bool, Step]:
    model = MLP()
    step = ExportedStep(model, ModelDescription(MLP_DESC), F.cross_entropy, frozenset(dict(model.named_parameters())))
    return {training: GraphBuilder(step).build(Request({"x": X, "label": Y}, training)) for training in (True, False)}


@pytest.fixture
def model() -> MLP:
    return MLP()


@pytest.fixture
def executor(model: MLP, graphs: dict[bool, Step]) -> Executor:
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    executor = Executor(parameters, {})
    for graph in graphs.values():
        executor.add_graph(graph)
    return executor


def train(
    executor: Executor, x: torch.Tensor = X, names: Sequence[str] = ("loss", "logits"), loss_scale: float = 1.0
) -> list[torch.Tensor]:
    batch = {"x": x, "label": Y}
    plan = executor.plan(Request(batch, True, names))
    assert plan is not None
    return executor.train(plan, batch, loss_scale=loss_scale).outputs


def evaluate(executor: Executor, batch: dict[str, torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
    plan = executor.plan(Request(batch, False, names))
    assert plan is not None
    return executor.evaluate(plan, batch)


def gradients(model: MLP) -> dict[str, torch.Tensor]:
    model.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def check(executor: Executor, expected: dict[str, torch.Tensor], factor: float) -> None:
    assert executor.gradients.present().keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(executor.gradients.present()[name], factor * value, rtol=1e-5, atol=1e-6)


def test_gradients_add_up_until_a_lazy_reset(executor: Executor, model: MLP) -> None:
    expected = gradients(model)
    assert executor.gradients.present() == {}
    for count in (1, 2, 3):
        loss, logits = train(executor)
        check(executor, expected, count)
    torch.testing.assert_close(logits, model(X).detach())
    executor.gradients.reset()
    assert executor.gradients.present() == {}
    train(executor, loss_scale=8.0)
    check(executor, expected, 8.0)
    assert train(executor, loss_scale=8.0)[0].item() == pytest.approx(loss.item())


def test_an_update_of_the_executors_parameters(executor: Executor, model: MLP) -> None:
    update = OptimizerUpdate(optim.SGDConfig(), executor.parameters, dict.fromkeys(executor.parameters, 0), clip=False)
    expected = gradients(model)
    pointers = {name: value.data_ptr() for name, value in executor.parameters.items()}
    train(executor)
    assert update.step(executor.gradients.present(), [0.25]) is True
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(executor.parameters[name], parameter.detach() - 0.25 * expected[name])
    assert {name: value.data_ptr() for name, value in executor.parameters.items()} == pointers
    executor.gradients.reset()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(executor.parameters[name])
    torch.testing.assert_close(
        evaluate(executor, {"x": X, "label": Y}, ["loss", "logits"])[1], model(X).detach()
    )  # ONNX Runtime reads the new weights


def test_memory_is_shared_not_copied(executor: Executor) -> None:
    """A weight that changes outside ONNX Runtime affects its next result; gradients never move."""
    train(executor)
    pointers = {name: value.data_ptr() for name, value in executor.gradients.tensors.items()}
    executor.parameters["fc2.weight"].zero_()
    executor.parameters["fc2.bias"].zero_()
    for number in range(3):
        loss, logits = train(executor)
        assert torch.equal(logits, torch.zeros(5, 3)), number
        assert loss.item() == pytest.approx(torch.tensor(3.0).log().item())
    assert {name: value.data_ptr() for name, value in executor.gradients.tensors.items()} == pointers


def test_outputs_are_new_and_can_be_chosen(executor: Executor) -> None:
    first = train(executor)
    second = train(executor, X + 1)
    assert not torch.equal(first[1], second[1])
    assert [o.shape for o in train(executor, names=["logits"])] == [(5, 3)]
    assert [o.shape for o in evaluate(executor, {"x": X}, ["logits"])] == [(5, 3)]
    with pytest.raises(TypeError, match=r"inputs \['label'\] are missing"):
        evaluate(executor, {"x": X}, ["loss", "logits"])


def test_an_executor_without_a_graph(model: MLP) -> None:
    executor = Executor({}, {})
    assert executor.plan(Request({"x": X, "label": Y}, True, ["loss"])) is None
    with pytest.raises(RuntimeError, match="there is no training graph yet"):
        _ = executor.inference_session


def test_programs_have_no_session() -> None:
    trainer = mlp_trainer({"utils": {"kernels": "pytorch"}})
    trainer.prepare((X, Y))
    with pytest.raises(RuntimeError, match=r"has no ONNX Runtime session: set utils\.kernels to 'onnxruntime'"):
        _ = trainer.session.inference_session


def test_a_graph_that_the_runtime_can_not_load(executor: Executor, graphs: dict[bool, Step]) -> None:
    broken = Step.from_bytes(graphs[False].to_bytes())
    next(iter(broken.model.graph)).op_type = "NoSuchOperator"
    with pytest.raises(RuntimeError, match=r"ONNX Runtime can't load the evaluation graph.*NoSuchOperator"):
        executor.add_graph(broken)
    assert len(executor.graphs(False)) == 1


def test_graph_round_trip(graphs: dict[bool, Step]) -> None:
    for graph in graphs.values():
        again = Step.from_bytes(graph.to_bytes())
        for name in (
            "training",
            "inputs",
            "outputs",
            "loss",
            "state",
            "gradients",
            "buffer_updates",
            "loss_scale",
            "random",
            "guards",
            "fixed",
        ):
            assert getattr(again, name) == getattr(graph, name), name
        assert [n.op_type for n in again.model.graph] == [n.op_type for n in graph.model.graph]


def test_gradients_have_memory_before_any_is_restored(model: MLP, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor({name: value.detach() for name, value in model.named_parameters()}, {})  # has no memory yet
    gradients = {name: torch.ones_like(value) for name, value in executor.parameters.items()}
    first, *_, last = gradients
    executor.gradients.restore({first: gradients[first]})

    def no_memory(like: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros_like", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        executor.gradients.restore({first: 2 * gradients[first], last: gradients[last]})
    (found,) = executor.gradients.present().values()
    assert torch.equal(found, gradients[first])
