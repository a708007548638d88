"""The captured graph, run by PyTorch: its placeholders and results are what the capture says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer.core.errors import ExportError
from ort_trainer.graph.flat_graph import FlatGraph

from ..export.captures import captured

SHAPES = {"x": ["batch", 4], "label": ["batch"]}
X, LABEL = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])


class Model(nn.Module):
    """Has a weight with two names, a buffer that changes, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.norm.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.norm(self.second(self.first(x))), label)


def run(
    found: FlatGraph, tensors: dict[str, torch.Tensor], *batch: torch.Tensor, scale: float = 1.0
) -> dict[str, object]:
    """Runs the graph, whose placeholders and results are in no particular order."""
    given = {node: tensors[name] for node, name in found.state.items()} | found.constants
    given |= {node: batch[index] for node, index in found.batch.items()}
    if found.tangent is not None:
        given[found.tangent] = torch.tensor(scale)
    graph = found.module.graph
    (end,) = graph.find_nodes(op="output")
    wanted = [*found.outputs, *found.gradients.values(), *found.buffer_updates.values()]
    end.args = (tuple(wanted),)
    graph.set_codegen(torch.fx.graph.CodeGen())
    found.module.recompile()
    placeholders = graph.find_nodes(op="placeholder")
    assert not [node for node in placeholders if node not in given and node.users]
    with torch.no_grad():
        results = found.module(*(given.get(node) for node in placeholders))
    names = ["loss", *found.gradients, *found.buffer_updates]
    return dict(zip(names, results, strict=True))


def test_training_graph() -> None:
    model = Model()
    tensors = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    found = captured(model, SHAPES, X, LABEL)
    # A tied weight has one placeholder and one gradient; the frozen bias has no gradient.
    assert set(found.state.values()) == set(tensors) - {"second.weight"}
    assert set(found.gradients) == {"first.weight", "first.bias", "second.bias", "norm.weight"}
    updated = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(found.buffer_updates) == updated
    results = run(found, tensors, X, LABEL, scale=8.0)
    loss = model(X, LABEL)
    torch.testing.assert_close(results.pop("loss"), loss.detach())
    loss.backward()
    expected = {name: 8.0 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected |= {name: model.get_buffer(name) for name in updated}
    torch.testing.assert_close(results, expected)


def test_evaluation_graph() -> None:
    model = Model().eval()
    found = captured(model, SHAPES, X, LABEL, training=False)
    assert found.tangent is None and not found.gradients and not found.buffer_updates
    torch.testing.assert_close(run(found, model.state_dict(), X, LABEL), {"loss": model(X, LABEL).detach()})


def test_it_is_right_for_batches_of_other_sizes() -> None:
    model = Model()
    tensors = {name: value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()}
    found = captured(model, SHAPES, X, LABEL)
    larger = torch.randn(9, 4), torch.arange(9) % 4
    torch.testing.assert_close(run(found, tensors, *larger)["loss"], model(*larger).detach())


def test_what_is_neither_parameter_nor_buffer_is_a_constant() -> None:
    model, weight = nn.Linear(4, 3), torch.tensor([1.0, 2.0, 3.0])
    found = captured(
        model, {"input": ["batch", 4], "label": ["batch"]}, X, LABEL, loss_fn=nn.CrossEntropyLoss(weight=weight)
    )
    assert set(found.state.values()) == {"weight", "bias"}
    (constant,) = found.constants.values()
    assert torch.equal(constant, weight)


def test_a_parameter_as_a_python_variable_is_refused() -> None:
    model = nn.Linear(4, 3)
    weight = model.weight
    with pytest.raises(ExportError, match="uses parameter 'weight' as a Python variable"):
        captured(
            model,
            {"input": ["batch", 4], "label": ["batch"]},
            X,
            LABEL,
            loss_fn=lambda y, label: F.cross_entropy(y, label) + weight.square().sum(),
        )


def test_the_model_may_go_on_after_an_error_in_a_submodule() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    class Tries(nn.Module):
        """Gives each layer more than it may take, as SpeechBrain does."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), Layer())

        def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                try:
                    x = layer(x, lengths=label)
                except TypeError:
                    x = layer(x)
            return F.cross_entropy(x, label)

    model = Tries()
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    found = captured(model, SHAPES, X, LABEL, training=False)
    torch.testing.assert_close(run(found, tensors, X, LABEL), {"loss": model(X, LABEL).detach()})


class _Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fc = self.fc.to(x.dtype)  # as Switch Transformers does
        return self.fc.float()(x).sum()


def test_a_module_that_is_cast_to_what_it_is() -> None:
    assert set(captured(_Cast(), {"x": ["batch", 3]}, torch.randn(5, 3)).gradients) == {"fc.weight", "fc.bias"}
