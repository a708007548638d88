"""Forward and backward pass of an ``ORTModule`` against the module's own."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ort_trainer import ORTModule
from ort_trainer.kernels.programs import partition
from ort_trainer.module.passes import PartialRun

from ..zoo import Applies
from .pairs import Heads, assert_same_gradients, close, pair

X, Y = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0])


@pytest.fixture(scope="module")
def heads() -> tuple[nn.Module, ORTModule]:
    return pair(Heads())


def test_outputs_have_their_structure(heads: tuple[nn.Module, ORTModule]) -> None:
    eager, ours = heads
    expected, found = eager(X, label=Y), ours(X, label=Y)
    assert list(found) == list(expected) and found["name"] == "heads" and isinstance(found["heads"], tuple)
    close(found, expected)
    assert not found["class"].requires_grad and found["heads"][1].requires_grad
    assert ours(X)["loss"] is None


@pytest.mark.parametrize(
    "loss",
    [
        lambda found: found["loss"],
        lambda found: found["heads"][1].square().sum(),
        lambda found: found["loss"] + found["turned"].sum() + found["heads"][1].mean(),
    ],
    ids=["the loss", "a head", "several"],
)
def test_gradients_of_some_outputs(heads: tuple[nn.Module, ORTModule], loss: Any) -> None:
    """A parameter that the differentiated outputs don't depend on gets none, so an optimizer leaves it alone."""
    assert_same_gradients(*heads, lambda module: loss(module(X, label=Y)).backward())


def test_twenty_steps_with_other_sizes() -> None:
    eager, ours = pair(Heads())
    losses: list[list[float]] = [[], []]
    for found, module in zip(losses, (eager, ours), strict=True):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(2)
        for step in range(20):
            x = torch.randn(3 + step % 4, 6, generator=generator)
            loss = module(x, label=torch.arange(len(x)) % 3)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    close(ours.state_dict(), eager.state_dict())
    assert sum(map(len, ours._graphs._by_kind.values())) == 1


def test_inputs_get_gradients(heads: tuple[nn.Module, ORTModule]) -> None:
    found = []
    for module in heads:
        leaf = X.clone().requires_grad_()
        module(leaf * 2, label=Y)["loss"].backward()  # the input has a history of its own
        found.append(leaf.grad)
    close(found[1], found[0])


def test_backward_twice(heads: tuple[nn.Module, ORTModule]) -> None:
    def twice(module: nn.Module) -> None:
        loss = module(X, label=Y)["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()

    assert_same_gradients(*heads, twice)


def test_several_forward_passes_before_one_backward_pass(heads: tuple[nn.Module, ORTModule]) -> None:
    assert_same_gradients(
        *heads, lambda module: (module(X, label=Y)["loss"] * module(X.flip(0), label=Y)["heads"][0].sum()).backward()
    )


def test_a_second_derivative_is_refused(heads: tuple[nn.Module, ORTModule]) -> None:
    ours = heads[1]
    with pytest.raises(NotImplementedError, match=r"can't be differentiated twice.*model\.module"):
        torch.autograd.grad(ours(X, label=Y)["loss"], list(ours.parameters()), create_graph=True, allow_unused=True)


def test_only_some_gradients_are_asked_for(heads: tuple[nn.Module, ORTModule]) -> None:
    found = [torch.autograd.grad(module(X, label=Y)["loss"], module.trunk.weight)[0] for module in heads]
    close(found[1], found[0])
    assert all(parameter.grad is None or not parameter.grad.isnan().any() for parameter in heads[1].parameters())


def test_a_weight_changed_between_the_passes_is_an_error(heads: tuple[nn.Module, ORTModule]) -> None:
    for module in heads:
        loss = module(X, label=Y)["loss"]
        with torch.no_grad():
            module.first.weight.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_memory_exchanged_between_the_passes_is_an_error(heads: tuple[nn.Module, ORTModule]) -> None:
    _, ours = heads
    weight, bias = ours.first.weight, ours.first.bias
    loss = ours(X, label=Y)["loss"]
    bias.data = bias.data + 1  # which no backward pass reads
    loss.backward()
    loss = ours(X, label=Y)["loss"]
    weight.data = weight.data * 1.5
    with pytest.raises(RuntimeError, match=r"of shape \[.*\] got other memory .* between the forward and the backward"):
        loss.backward()
    with torch.autograd.graph.save_on_cpu():  # keeps copies, which the backward pass reads
        loss = ours(X, label=Y)["loss"]
    weight.data = weight.data * 1.5
    loss.backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_without_gradients(context: Any, training: bool) -> None:
    eager, ours = pair(Heads().train(training))
    with context():
        found, expected = ours(X, label=Y), eager(X, label=Y)
    close(found, expected)
    assert not found["loss"].requires_grad and found["loss"].is_inference() == expected["loss"].is_inference()
    close(ours.state_dict(), eager.state_dict())  # running statistics change in training mode only


def test_evaluation_mode_with_gradients() -> None:
    """Fine-tuning with frozen statistics."""
    eager, ours = pair(Heads().eval())
    assert_same_gradients(eager, ours, lambda module: module(X, label=Y)["loss"].backward())
    close(ours.state_dict(), eager.state_dict())


def test_frozen_parameters_and_modes_are_watched() -> None:
    eager, ours = pair(Heads())
    for change in (
        lambda module: module.trunk.requires_grad_(False),
        lambda module: module.norm.eval(),
        lambda module: module.trunk.requires_grad_(True),
    ):
        for module in (eager, ours):
            change(module)
        assert_same_gradients(eager, ours, lambda module: module(X, label=Y)["loss"].backward())


def test_other_parts_are_exported_anew() -> None:
    """A new head, as after loading a pretrained model; other dtypes; parameters as other objects."""
    eager, ours = pair(Heads())
    ours(X)
    for module in (eager, ours):
        torch.manual_seed(3)
        module.second = nn.Linear(8, 4)
        module.double()
    assert_same_gradients(eager, ours, lambda module: module(X.double())["heads"][1].sum().backward())
    eager.load_state_dict(copy.deepcopy(ours.state_dict()), assign=True)
    ours.load_state_dict(copy.deepcopy(eager.state_dict()), assign=True)
    assert_same_gradients(eager, ours, lambda module: module(X.double())["heads"][1].sum().backward())


def test_dropout_of_pytorch() -> None:
    eager, ours = pair(
        nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.3), nn.Linear(32, 2)), {"utils": {"random_numbers": "pytorch"}}
    )

    def run(module: nn.Module) -> None:
        torch.manual_seed(4)
        (module(X) * module(X)).sum().backward()  # two masks

    ours(X)
    assert_same_gradients(eager, ours, run)


def test_dropout_in_a_faster_way() -> None:
    ours = ORTModule(nn.Sequential(nn.Dropout(0.25), nn.Identity()))
    x = torch.ones(400, 50, requires_grad=True)
    torch.manual_seed(5)
    first, second = ours(x), ours(x)
    torch.manual_seed(5)
    close(ours(x), first)
    assert not torch.equal(first, second)
    first.sum().backward()
    close(x.grad, first)  # the same mask in both passes
    assert (first == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    with torch.no_grad():
        assert (ours(x) == 0).any()
    close(ours.eval()(x), x)


def assert_near_gradients(eager: nn.Module, ours: nn.Module, tolerance: float) -> None:
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.dtype == mine.dtype
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance)


def test_autocast() -> None:
    eager, ours = pair(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    for dtype in (torch.bfloat16, None):
        results = []
        for module in (eager, ours):
            module.zero_grad()
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                results.append(module(X))
            assert results[-1].dtype == (dtype or torch.float32)
            results[-1].float().square().sum().backward()
        torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
        assert_near_gradients(eager, ours, 2e-2)


@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
def test_a_module_in_bfloat16(kernels: str) -> None:
    """With PyTorch's dropout."""
    layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 3)).to(torch.bfloat16)
    eager, ours = pair(layers, {"utils": {"random_numbers": "pytorch_global", "kernels": kernels}})
    for module in (eager, ours):
        torch.manual_seed(3)
        module(X.bfloat16()).float().square().sum().backward()
    assert_near_gradients(eager, ours, 5e-2)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.state = torch.ones(6, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.state * self.first(x)
        self.state = h.detach().mean(0)
        return self.last(h)


@pytest.mark.parametrize("options", [{}, {"utils": {"kernels": "onnxruntime"}}, {"debug": {"verify_every": 1}}])
def test_a_state_in_bfloat16(options: dict[str, Any]) -> None:
    eager, ours = pair(Remembers(), options)
    for _ in range(3):
        for module in (eager, ours):
            with torch.autocast("cpu", torch.bfloat16):
                module(X).float().square().sum().backward()
    assert ours.state.dtype == torch.bfloat16
    torch.testing.assert_close(ours.state, eager.state, rtol=5e-2, atol=5e-2)
    assert_near_gradients(eager.last, ours.last, 5e-2)


class Changes(nn.Module):
    def forward(self, x: torch.Tensor, state: dict[str, torch.Tensor], scale: float, *, add: bool = False) -> Any:
        state["sum"].add_(x.detach().sum(0))
        result = x * scale + state["bias"]
        return (result + 1 if add else result), state["bias"]


def test_arguments_of_all_kinds() -> None:
    """Nested ones, numbers, keywords, one that is changed in place, and one that is returned."""
    ours, bias = ORTModule(Changes()), torch.zeros(6, requires_grad=True)
    for scale, add in ((2.0, False), (3.0, False), (2.0, True)):
        state = {"sum": torch.zeros(6), "bias": bias}
        result, same = ours(X, state, scale, add=add)
        close(result, X * scale + add)
        close(state["sum"], X.sum(0))
        (grad,) = torch.autograd.grad(result.sum() + same.sum(), bias)
        close(grad, torch.full((6,), 6.0))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("factor", torch.full((6,), 2.0))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.factor.clone() * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = checkpoint(self.scaled, x, use_reentrant=False)
        self.factor.add_(1)
        return result


def test_the_backward_pass_reads_what_a_buffer_was() -> None:
    """In PyTorch itself, a checkpoint would compute again with the new value; so it does in a comparison."""
    ours = ORTModule(Counts(), {"debug": {"verify_every": "off"}})
    first, second = ours(X), ours(X)
    first.sum().backward()
    close(ours.weight.grad, 2 * X.sum(0))
    second.sum().backward()
    close(ours.weight.grad, 5 * X.sum(0))
    assert ours.factor.tolist() == [4.0] * 6


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
        self.checkpointed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x


def saved_elements(ours: ORTModule) -> int:
    """Returns how many elements the last call keeps for the backward pass, besides parameters and inputs."""
    call, values = ours._graphs.find((X,), {})[1:]
    return sum(value.numel() for value in call.forward(values)[1] if not any(value is other for other in values))


def test_checkpoints_keep_less() -> None:
    eager, ours = pair(Repeats())
    assert_same_gradients(eager, ours, lambda module: module(X).square().sum().backward())
    few = saved_elements(ours)
    ours.checkpointed = eager.checkpointed = False
    assert_same_gradients(eager, ours, lambda module: module(X).square().sum().backward())
    assert few < saved_elements(ours)


class Settling(nn.Sequential):
    """Makes a layer in its first call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self) == 2:
            self.insert(1, nn.GELU())
        return super().forward(x)


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)), {}),
        (lambda: nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)), {"debug": {"verify_every": 3}}),
        (lambda: Settling(nn.Linear(6, 12), nn.Linear(12, 6)), {}),
    ],
    ids=["", "verified", "a first call in PyTorch"],
)
def test_a_checkpoint_around_it(layers: Any, options: dict[str, Any]) -> None:
    """The checkpoint counts what a call saves: also the first, which exports, and one that PyTorch repeats."""
    eager, ours = pair(layers(), options)
    for _ in range(3):
        assert_same_gradients(
            eager, ours, lambda module: checkpoint(module, X, use_reentrant=False).square().sum().backward()
        )


class Imports(torch.autograd.Function):
    """Its backward pass imports what it needs, as those of TRL do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        sys.modules.pop("colorsys", None)
        return gradient * len(importlib.import_module("colorsys").__all__[:2])


def test_a_custom_backward_pass_in_a_model_that_asks_whether_it_is_exported() -> None:
    """It looks at values unless it is exported, as masks of transformers do."""

    def asks(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = Imports.apply(layer(x))
        return y if torch.compiler.is_exporting() or (x < 100).all() else -y

    eager = Applies(asks, 6, 3)
    ours = ORTModule(copy.deepcopy(eager), fallback="error")
    for _ in range(2):
        assert_same_gradients(eager, ours, lambda module: module(X).square().sum().backward())


def test_cheap_values_are_computed_again() -> None:
    eager, ours = pair(
        nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0)),
        {"utils": {"memory_efficient_gradient": True}},
    )
    assert_same_gradients(eager, ours, lambda module: module(X).square().sum().backward())
    usual = ORTModule(eager)
    usual(X)
    assert saved_elements(ours) < saved_elements(usual)


def test_kernels_of_onnx_runtime() -> None:
    eager, ours = pair(Heads(), {"utils": {"kernels": "onnxruntime"}})
    for x in (X, X[:3]):
        assert_same_gradients(
            eager,
            ours,
            lambda module: module(x, label=Y[: len(x)])["loss"].backward(),  # noqa: B023 - called at once
        )
    close(ours.state_dict(), eager.state_dict())


def test_inputs_in_any_order_in_memory() -> None:
    for kernels in ("pytorch", "onnxruntime"):
        ours = ORTModule(nn.Linear(6, 2), {"utils": {"kernels": kernels}})
        turned = X.t().contiguous().t()
        assert not turned.is_contiguous()
        close(ours(turned), ours.module(X))
        ours(turned[::2]).sum().backward()
        close(ours.weight.grad, X[::2].sum(0).expand(2, 6))


def test_other_sizes_are_exported_once_more() -> None:
    ours = ORTModule(nn.Tanh())
    for size in (6, 4, 5, 3):
        close(ours(torch.ones(2, size)), torch.ones(2, size).tanh())
    assert sum(map(len, ours._graphs._by_kind.values())) == 2


class Parts(nn.Module):
    def forward(self, parts: dict[str, torch.Tensor], count: int) -> Any:
        return sum(parts.values()).split(count, 1)


@pytest.mark.parametrize("kernels", ["pytorch", "onnxruntime"])
def test_many_sizes_and_outputs(kernels: str) -> None:
    """The product of all sizes is beyond 64 bits."""
    ours = ORTModule(Parts(), {"utils": {"kernels": kernels}})
    for rows, columns in ((32, 128), (16, 256)):
        parts = {str(number): torch.full((rows, columns), 0.5, requires_grad=True) for number in range(12)}
        first, second, *_ = ours(parts, columns // 2)
        close(second, torch.full((rows, columns // 2), 6.0))
        first.sum().backward()
        assert parts["7"].grad is not None
        close(parts["7"].grad.sum(), torch.tensor(rows * columns / 2.0))


def test_too_many_constants() -> None:
    class Scales(nn.Module):
        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return nn.functional.leaky_relu(x, scale)  # a slope is a constant

    ours = ORTModule(Scales(), fallback="error")
    with pytest.raises(RuntimeError, match="exported 16 times.*Pass numbers that change as tensors"):
        for number in range(20):
            ours(X, float(number))


def test_gradients_are_there_while_the_backward_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside DistributedDataParallel, each program is a function of autograd, so that its gradients can be sent."""
    monkeypatch.setattr(partition, "_ENOUGH", 0.0)  # each operator is a program
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", object())
    eager, ours = pair(Heads(), {"utils": {"cache_exports": False}})
    assert_same_gradients(eager, ours, lambda module: module(X, label=Y)["loss"].backward())
    assert_same_gradients(eager, ours, lambda module: module(X, label=Y)["heads"][1].sum().backward())
    seen: list[tuple[str, int]] = []
    run = PartialRun.take

    def counted(progress: PartialRun, names: Any) -> Any:
        found = run(progress, names)
        seen.append(("ran", progress._next))
        return found

    monkeypatch.setattr(PartialRun, "take", counted)
    ours.first.weight.register_hook(lambda gradient: seen.append(("first", 0)))
    ours.trunk.weight.register_hook(lambda gradient: seen.append(("trunk", 0)))
    loss = ours(X, label=Y)["loss"]
    loss.backward(retain_graph=True)
    order = [what for what, _ in seen]
    assert order.index("first") < order.index("trunk") and "ran" in order[order.index("first") : order.index("trunk")]
    assert [number for what, number in seen if what == "ran"] == sorted(n for what, n in seen if what == "ran")
    loss.backward()
    close(torch.autograd.grad(ours(X, label=Y)["loss"], ours.first.weight)[0], ours.first.weight.grad / 2)


def test_a_transposition_is_kept_for_the_backward_pass_and_read_by_a_product() -> None:
    """The assignment is translated to ONNX as a scatter between transpositions."""

    def assigns_a_slice(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        h[..., 1:] = h[..., :-1] * 0.2
        return layer(h)

    eager, ours = pair(Applies(assigns_a_slice, 6, 3), {"utils": {"kernels": "onnxruntime"}})
    assert_same_gradients(eager, ours, lambda module: module(X[:4]).square().sum().backward())
