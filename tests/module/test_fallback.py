"""What an ``ORTModule`` does where no graph can run a call: PyTorch runs it, with its own numbers, and one warning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.optim.swa_utils import AveragedModel, update_bn

from ort_trainer import ExportError, ORTModule
from ort_trainer.module import graphs

from ..fidelity.layer_cases import Apply
from ..zoo import Applies
from .pairs import assert_same_gradients, close, pair

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def count(ours: ORTModule) -> int:
    """Returns how many graphs there are."""
    return sum(map(len, ours._graphs._by_kind.values()))


def of_fallback(record: list[warnings.WarningMessage]) -> list[str]:
    """Returns the warnings that PyTorch runs a call."""
    return [str(entry.message) for entry in record if "PyTorch runs this call" in str(entry.message)]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.uses_value = nn.Linear(6, 6), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.uses_value and x.detach().sum().numpy() > 0:
            return self.linear(x)
        return -self.linear(x)


def test_a_branch_runs_in_pytorch_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = pair(Branches())
    tried: list[int] = []
    export = graphs.CallGraphs._export
    monkeypatch.setattr(graphs.CallGraphs, "_export", lambda *a: tried.append(1) or export(*a))
    with pytest.warns(UserWarning, match="PyTorch runs this call of Branches") as record:
        for x in (X, -X, X[:3], X.abs()):
            assert_same_gradients(eager, ours, lambda module: module(x).sum().backward())  # noqa: B023 - called at once
    (message,) = of_fallback(record.list)
    assert "test_fallback.py" in message and "numpy() > 0" in message and record.list[0].filename == __file__
    assert len(tried) == 1  # the other calls are of the same kind
    eager.uses_value = ours.uses_value = False  # another variant of the module has a graph
    close(ours(X), eager(X))
    assert count(ours) == 1


def noisy(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x if x.sum() > 0 else -x
    return layer(x + torch.randn_like(x))


def test_a_branch_that_runs_in_pytorch_draws_once() -> None:
    eager, ours = pair(Applies(noisy, 6), {"utils": {"random_numbers": "pytorch_global"}})
    x = torch.rand(4, 6)
    ours(x)
    results = []
    with pytest.warns(UserWarning, match="takes another branch"):
        for module in (eager, ours):
            torch.manual_seed(2)
            results.append((module(-x), torch.get_rng_state()))
    close(results[1], results[0])


class Scales(nn.Module):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return nn.functional.leaky_relu(x, scale)  # a slope is a constant


def test_calls_beyond_the_limit_run_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MAXIMUM_GRAPHS", 2)
    ours = ORTModule(Scales())
    with pytest.warns(UserWarning, match="exported 2 times") as record:
        for number in range(6):
            close(ours(X, float(number)), nn.functional.leaky_relu(X, number))
    assert len(of_fallback(record.list)) == 1 and "line" in of_fallback(record.list)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(ours(X, 1.0), X)  # has its graph
    assert count(ours) == 2


def test_errors_are_pytorchs() -> None:
    ours = ORTModule(nn.Linear(6, 2))
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        warnings.simplefilter("error")
        ours(X[:, :5])
    assert raised.value.__cause__ is None and raised.value.__context__ is None
    assert not ours._graphs.refused
    ours(X)
    assert count(ours) == 1


@pytest.mark.parametrize("wanted", ["error", "FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DATA|FALLBACK_DISABLE"])
def test_error_as_policy(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argument = wanted if wanted == "error" else None
    if argument is None:
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", wanted)
    ours = ORTModule(Branches(), fallback=argument)
    assert copy.deepcopy(ours)._fallback.policy == "error"
    with pytest.raises(ExportError, match="Branches"):
        ours(X)
    with pytest.raises(RuntimeError, match=r"inside a transform of torch\.func"):
        torch.vmap(ours)(X)


def test_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"one of \['warn', 'error'\], but is 'ignore'"):
        ORTModule(nn.Identity(), fallback="ignore")
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DEVICE|FALLBACK_UNSUPPORTED_TORCH_MODEL")
    assert ORTModule(nn.Identity())._fallback.policy == "warn"
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_NEVER")
    with pytest.raises(ValueError, match=r"\['FALLBACK_NEVER'\].*'FALLBACK_DISABLE'"):
        ORTModule(nn.Identity())


def test_a_sparse_buffer_runs_in_pytorch() -> None:
    model = nn.Linear(6, 2)
    model.register_buffer("eye", torch.eye(3).to_sparse())
    with pytest.warns(UserWarning, match=r"PyTorch runs this call .*\['eye'\] of Linear are sparse.*to_dense"):
        close(ORTModule(model)(X), model(X))


def test_options_are_errors_nevertheless() -> None:
    ours = ORTModule(nn.Linear(6, 2), {"graph_transformer": {"attn_dropout_recompute": True}})
    with pytest.raises(ExportError, match="attn_dropout_recompute"):
        ours(X)


def test_another_device() -> None:
    ours = ORTModule(nn.Linear(6, 2, device="meta"))
    with pytest.warns(UserWarning, match="on the device 'meta', which holds no values"):
        assert ours(X.to("meta")).is_meta


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[nn.Module, ORTModule]]:
    eager, ours = pair(nn.Sequential(nn.Linear(6, 3), nn.Tanh()))
    ours(X)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PyTorch runs this call")
        yield eager, ours


def _directional(module: nn.Module) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(module(forward_ad.make_dual(X, X + 1))))


def _gradients(module: nn.Module) -> Any:
    parameters = {name: value.detach() * 2 for name, value in module.named_parameters()}
    return torch.func.grad(lambda values: torch.func.functional_call(module, values, (X,)).sum())(parameters)


def _called_with_others(module: nn.Module) -> Any:
    parameters = {name: (value.detach() * 2).requires_grad_() for name, value in module.named_parameters()}
    result = torch.func.functional_call(module, parameters, (X,))
    fixed = torch.func.functional_call(module, {name: value.detach() for name, value in parameters.items()}, (X,))
    return result, fixed, torch.autograd.grad(result.sum(), list(parameters.values()))


@pytest.mark.parametrize(
    "run",
    [
        lambda module: torch.vmap(module)(X),
        lambda module: torch.func.jvp(module, (X,), (X + 1,)),
        _directional,
        _gradients,
        _called_with_others,
        lambda module: torch.jit.trace(module, X)(X + 1),
        lambda module: torch.export.export(module, (X,)).module()(X + 1),
        lambda module: torch.compile(module, backend="eager", fullgraph=True)(X + 1),
    ],
    ids=["vmap", "jvp", "forward mode", "grad", "functional_call", "trace", "export", "compile"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:PyTorch runs this call")
def test_inside_other_tools(run: Callable[[nn.Module], Any], small: tuple[nn.Module, ORTModule]) -> None:
    eager, ours = small
    torch.compiler.reset()  # modules of other tests count for its limit of eight
    close(run(ours), run(eager))
    close(ours(X), eager(X))


def test_fake_tensors(small: tuple[nn.Module, ORTModule]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.warns(UserWarning, match="such as FakeTensorMode"):
        assert isinstance(small[1](X), FakeTensor)


def test_statistics_for_averaged_weights() -> None:
    """update_bn sets momentum to None, and batch norm then computes with the value of its counter."""
    eager, ours = pair(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
    averages = [AveragedModel(module) for module in (eager, ours)]
    with pytest.warns(UserWarning, match="num_batches_tracked"):
        for averaged in averages:
            update_bn([X, X + 1, X * 2], averaged)
    close(averages[1].state_dict(), averages[0].state_dict())


class Grows(nn.Module):
    """Makes its layer in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None
        self.started = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer is None:
            torch.manual_seed(3)
            self.layer, self.started = nn.Linear(x.shape[1], 2), 4
        return self.layer(x) * self.started


@pytest.mark.parametrize("make", [Grows, lambda: nn.Sequential(nn.LazyLinear(2), nn.Tanh())], ids=["layer", "lazy"])
@pytest.mark.parametrize("policy", ["warn", "error"])
def test_first_calls_make_a_module(make: Callable[[], nn.Module], policy: str) -> None:
    torch.manual_seed(2)
    eager = make()
    torch.manual_seed(2)
    ours = ORTModule(make(), fallback=policy)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "PyTorch runs this call")
        for _ in range(2):
            torch.manual_seed(1)
            expected = eager(X)
            torch.manual_seed(1)
            close(ours(X), expected)
    assert count(ours) == 1
    close(ours.state_dict(), eager.state_dict())


def test_a_tensor_outside_that_requires_grad_later() -> None:
    ours = ORTModule(Applies(lambda layer, x: layer(x) * layer.scale, 6, 2))
    scale = ours.linear.scale = torch.full((2,), 0.5)
    ours(X).sum().backward()
    assert count(ours) == 1
    scale.requires_grad_(True)
    message = r"reads \['linear.scale'\], tensors outside parameters and inputs that require grad"
    with pytest.warns(UserWarning, match=message):
        ours(X).sum().backward()
    close(scale.grad, ours.linear(X).sum(0).detach())


class Measures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.means = nn.Linear(6, 2), 0, [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result = self.linear(x)
        self.means.append(result.mean().item())
        print("call", self.calls)
        return result


def test_metrics_inside_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    eager, ours = pair(Measures())
    for _ in range(4):
        eager(X)
    printed = capsys.readouterr().out
    with pytest.warns(UserWarning, match="prints 'call'") as record:
        for _ in range(4):
            ours(X)
    assert (ours.calls, ours.means) == (eager.calls, eager.means) and capsys.readouterr().out == printed
    assert len(of_fallback(record.list)) == 1


class Prints(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("mean", x.mean())
        return x * 2


def test_prints(capsys: pytest.CaptureFixture[str]) -> None:
    ours = ORTModule(Prints())
    with pytest.warns(UserWarning, match="prints 'mean'"):
        for number in range(4):
            ours(torch.full((2,), float(number)))
    assert capsys.readouterr().out.splitlines() == [f"mean tensor({number}.)" for number in range(4)]


def test_spectral_norm_of_old_is_no_change() -> None:
    """It assigns the weight before each call."""
    eager, ours = pair(nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 3))))
    for _ in range(2):
        close(ours(X), eager(X))
    assert count(ours) == 1


@pytest.mark.parametrize("kind", ["packed", "array"])
def test_arguments_of_other_kinds(kind: str) -> None:
    def forward(lstm: nn.Module, x: Any) -> torch.Tensor:
        return lstm(x)[0].data if kind == "packed" else lstm(torch.as_tensor(x))[0]

    eager, ours = pair(Apply(nn.LSTM(6, 3), forward))
    value = nn.utils.rnn.pack_sequence([X, X[:2]]) if kind == "packed" else X.numpy()
    with pytest.warns(UserWarning, match="is a PackedSequence" if kind == "packed" else "pass arrays as tensors"):
        assert_same_gradients(eager, ours, lambda module: module(value).sum().backward())


def test_an_error_at_run_time_that_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may find only while it runs that it does not fit."""
    from ort_trainer.module import ort_module
    from ort_trainer.module.passes import SizedPasses

    eager, ours = pair(nn.Linear(6, 2))
    ours(X)

    def fails(*_: Any) -> Any:
        raise ArithmeticError("another branch")

    monkeypatch.setattr(SizedPasses, "__call__", fails)
    with pytest.raises(ArithmeticError):
        ours(X)
    monkeypatch.setattr(ort_module, "AT_RUN_TIME", (ArithmeticError,))
    with pytest.warns(UserWarning, match="another branch"):
        close(ours(X), eager(X))
    monkeypatch.undo()
    close(ours(X), eager(X))
    assert count(ours) == 1


@pytest.mark.parametrize("differentiated", [True, False])
def test_complex_numbers_within_the_forward_pass_alone_have_a_graph(differentiated: bool) -> None:
    def spectrum(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = layer(x) if differentiated else x
        return layer(torch.view_as_real(torch.fft.rfft(h)).flatten(-2)[..., :6])

    eager, ours = pair(Applies(spectrum, 6, 6), {"utils": {"kernels": "onnxruntime"}})
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        assert_same_gradients(eager, ours, lambda module: module(X).sum().backward())
    messages = of_fallback(record)
    assert len(messages) == differentiated and all("complex numbers, which ONNX lacks" in text for text in messages)
