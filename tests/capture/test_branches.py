"""Branches on values: a graph has those that its sample takes, and each run checks that its batch takes them, too."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ort_trainer import ExportError, ORTModule, ORTTrainer, ORTTrainerOptions, ValueBranchError, optim
from ort_trainer.capture.branches import Branches, ValuesAsked

from ..helpers import MLP, assert_close, assert_same_training, mlp_batches

DESC = {"inputs": [("x", ["b", 8]), ("y", ["b", 8])], "outputs": [("loss", [], True)]}
KERNELS = ("pytorch", "onnxruntime")


def raises(h: torch.Tensor) -> torch.Tensor:
    if h.abs().max() > 50:
        raise ValueError("too large")
    return h


def raises_by_number(h: torch.Tensor) -> torch.Tensor:
    if h.abs().max().item() > 46 + h.shape[0] or not h.isfinite().all().item():
        raise ValueError("too large")
    return h


def asserts(h: torch.Tensor) -> torch.Tensor:
    assert h.abs().max() <= 50, "too large"
    torch._assert(h.abs().max() <= 60, "too large")
    return h


def checks(h: torch.Tensor) -> torch.Tensor:
    torch._check(h.abs().max().item() < 50, lambda: "too large")
    torch._assert_async(h.abs().max() < 60, "too large")
    return h


def validates(h: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(h, F.softplus(h), validate_args=True).log_prob(h + 1)


def catches(h: torch.Tensor) -> torch.Tensor:
    try:
        return raises(h)
    except ValueError:
        return h * 0.05


def repairs(h: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(h * 1e37).all():
        h = h.nan_to_num() * 0.1
        h = torch.clamp(h, -1, 1)
    return h


def repairs_by_number(h: torch.Tensor) -> torch.Tensor:
    total = ((h * 1e37) - (h * 1e37)).sum().item()
    if total != total:
        h = h.clamp(-1, 1)
    return h if total == total else h + 1


def repairs_by_functions(h: torch.Tensor) -> torch.Tensor:
    largest = (h * 1e37).abs().max().item()
    if not math.isfinite(largest) and math.isinf(largest) and not math.isnan(largest):
        h = h.clamp(-1, 1)
    return h


def chooses(h: torch.Tensor) -> torch.Tensor:
    return h * 2 if h.abs().max() > 50 else h * 3


def wraps_around(h: torch.Tensor) -> torch.Tensor:
    """On the branch of other values, the index is out of range."""
    index = (h.detach().abs().amax(1, keepdim=True) / 20).long()
    if (index >= h.shape[1]).any():
        index = index % h.shape[1]
    return h + h.gather(1, index)


def chooses_one_of_two(h: torch.Tensor) -> torch.Tensor:
    if bool(h.abs().max() > 50 and h.min() < 0):
        return h + 1
    return h * 3 if h.abs().max().item() else h


def repeats(h: torch.Tensor) -> torch.Tensor:
    while h.abs().max() > 20:
        h = h / 2
    return h


def chooses_in_nested_contexts(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        large = h.abs().max()
        factor = 0.5 if large > 50 else 1.5
        large.zero_()  # after the condition
    return checkpoint(lambda h: h.sin() if h.abs().max() > 50 else h.cos(), h * factor, use_reentrant=False)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def with_custom_backward(h: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda h: h * 2 if h.abs().max() > 50 else _Doubled.apply(h), h, use_reentrant=False)


REFUSED = (raises, raises_by_number, asserts, checks, validates)
TAKEN = (
    *(catches, repairs, chooses, wraps_around, chooses_one_of_two, repeats, chooses_in_nested_contexts),
    *(with_custom_backward, repairs_by_number, repairs_by_functions),
)


class Net(nn.Module):
    """Counts its calls, and applies a function with branches."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(8, 8), function
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.function(self.linear(x))


def batches(*factors: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 8, generator=generator) * factor, torch.randn(4, 8, generator=generator)) for factor in factors
    ]


def trained(model: Net, data: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[float | str]:
    """Trains in PyTorch; returns losses, and the names of the errors of batches that are skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    results: list[float | str] = []
    for x, y in data:
        calls = model.calls.clone()
        optimizer.zero_grad()
        try:
            loss = F.mse_loss(model(x), y)
        except Exception as error:
            results.append(type(error).__name__)
            model.calls.copy_(calls)
            continue
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    return results


def trainer_of(model: nn.Module, kernels: str = "pytorch", **options: Any) -> ORTTrainer:
    settings = {"utils": {"kernels": kernels}, **options}
    return ORTTrainer(model, DESC, optim.SGDConfig(lr=1e-7), F.mse_loss, options=ORTTrainerOptions(settings))


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        *((function, "pytorch") for function in (*REFUSED, *TAKEN)),
        *((function, "onnxruntime") for function in (raises_by_number, validates, *TAKEN[2:3], *TAKEN[-3:])),
    ],
)
def test_each_batch_takes_its_own_branch(function: Callable[[torch.Tensor], torch.Tensor], kernels: str) -> None:
    data, eager, model = batches(1, 1, 1000, 1, 1000), Net(function), Net(function)
    expected, trainer, results = trained(eager, data), trainer_of(model, kernels), []
    for x, y in data:
        try:
            results.append(trainer.train_step(x, y).item())
        except Exception as error:
            results.append(type(error).__name__)
    assert results == [loss if isinstance(loss, str) else pytest.approx(loss, rel=1e-5) for loss in expected]
    assert len(trainer.loop.executor.graphs(True)) == (1 if function in REFUSED else 2)
    for name, value in eager.state_dict().items():
        assert_close(model.state_dict()[name], value, 1e-5, name)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("function", [raises, chooses])
def test_a_module_refuses_other_branches_before_anything_changes(
    function: Callable[[torch.Tensor], torch.Tensor], kernels: str
) -> None:
    model = Net(function)
    module = ORTModule(model, {"utils": {"kernels": kernels}}, fallback="error")
    (x, y), (large, _) = batches(1, 1000)
    expected = F.mse_loss(Net(function)(x), y)
    assert_close(F.mse_loss(module(x), y), expected, 1e-5, "loss")
    with pytest.raises(ValueBranchError, match=r"test_branches.py.* in (raises|chooses): .*h.abs\(\).max\(\) > 50"):
        module(large)
    assert model.calls.item() == 1


def test_a_refused_batch_changes_nothing_in_a_window() -> None:
    model = Net(raises)
    trainer = trainer_of(model, batch={"gradient_accumulation_steps": 2})
    (x, y), (large, _) = batches(1, 1000)
    trainer.train_step(x, y)
    weight, gradient = model.linear.weight.clone(), trainer.get_gradient("linear.weight")
    with pytest.raises(ValueError, match="too large"):
        trainer.train_step(large, y)
    assert model.calls.item() == 1
    assert torch.equal(model.linear.weight, weight)
    torch.testing.assert_close(trainer.get_gradient("linear.weight"), gradient, rtol=0, atol=0)
    trainer.train_step(x, y)
    assert trainer.train_step_info.optimization_step == 1


def test_exports_in_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_TRAINER_EXPORT_IN_PROCESS", "0")
    model = Net(asserts)
    trainer = trainer_of(model)
    (large, y), (x, _) = batches(1000, 1)
    with pytest.raises(AssertionError, match="too large"):
        trainer.train_step(large, y)
    assert_close(trainer.train_step(x, y), F.mse_loss(Net(asserts)(x), y).detach(), 1e-5, "loss")
    with pytest.raises(AssertionError, match="too large"):
        trainer.train_step(large, y)
    assert model.calls.item() == 1


def test_evaluation_and_own_loops_take_each_batchs_branch() -> None:
    model = Net(chooses)
    trainer = trainer_of(model)
    (x, y), (large, _) = batches(1, 1000)
    for batch in (x, large, x):
        assert_close(trainer.eval_step(batch, y), F.mse_loss(model(batch), y).detach(), 1e-5, "evaluation")
        assert_close(trainer.forward(batch, y), F.mse_loss(model(batch), y).detach(), 1e-5, "forward")
        model.zero_grad()
        trainer.forward_backward(batch, y)
        ours = model.linear.weight.grad.clone()
        model.zero_grad()
        F.mse_loss(model(batch), y).backward()
        assert_close(ours, model.linear.weight.grad, 1e-5, "gradient")


def test_a_module_whose_kernel_fails_on_the_branch_of_another_batch() -> None:
    model = Net(wraps_around)
    module = ORTModule(model)
    (x, _), (large, _) = batches(1, 1000)
    module(x)
    with pytest.warns(UserWarning, match="where a kernel fails: .*out of bounds"):
        result = module(large)
    assert_close(result, model(large), 1e-5, "result")


def test_random_numbers_are_those_of_one_step() -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        return F.dropout(chooses(h), 0.5)

    results = []
    for factors in ((1, 1000, 1000), (1000, 1000, 1000)):  # the second step runs on one graph, or on two
        trainer = trainer_of(Net(function))
        data = batches(*factors)
        data[0] = data[1]
        if factors[0] == 1:
            trainer.prepare(batches(1)[0])
        results.append([trainer.train_step(x, y).item() for x, y in data])
    assert results[0] == results[1]


class Labelled(nn.Module):
    """Checks its label, and repairs its hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if y.max() > 50:
            raise ValueError("label")
        h = chooses(self.linear(x))
        return F.mse_loss(h, y), h


def test_a_prediction_checks_only_what_it_depends_on() -> None:
    model = Labelled()
    desc = {**DESC, "outputs": [*DESC["outputs"], ("h", ["b", 8])]}
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.1))
    (x, y), (large, _) = batches(1, 1000)
    trainer.eval_step(x, y)
    trainer.train_step_info.fetches = ["h"]
    for batch in (x, large):
        assert_close(trainer.eval_step(batch, **({} if batch is x else {"y": y})), model(batch, y)[1], 1e-5, "h")
    with pytest.raises(ValueError, match="label"):
        trainer.train_step(x, y + 100)


def test_a_file_warns_of_what_it_does_not_check(tmp_path: Any) -> None:
    import onnx

    trainer = trainer_of(Net(chooses))
    trainer.train_step(*batches(1)[0])
    with pytest.warns(UserWarning, match=r"does not check .* in chooses"):
        trainer.save_as_onnx(tmp_path / "model.onnx")
    outputs = [output.name for output in onnx.load(tmp_path / "model.onnx").graph.output]
    assert outputs == ["loss", "calls.updated"]


def test_a_batch_that_branches_by_chance_is_refused() -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        return h * 2 if torch.rand_like(h).sum() > 16 else h * 3

    trainer = trainer_of(Net(function))
    (batch,) = batches(1)
    with pytest.raises(ExportError, match=r"(?s)by a random number, as layerdrop does.*layerdrop=0.* in function:"):
        trainer.train_step(*batch)


def test_a_branch_that_only_pytorch_takes_is_refused() -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        dropped = F.dropout(h, 0.5)
        return dropped * 2 if (dropped == 0).float().mean() > 0.5 else dropped * 3

    trainer = trainer_of(Net(function))
    (batch,) = batches(1)
    with pytest.raises(ValueBranchError, match=r"(?s)in function.*depends on random numbers"):
        for _ in range(50):  # either way is PyTorch's, or an error
            trainer.train_step(*batch)


def test_too_many_combinations_of_branches() -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        for factor in range(12):
            if h.abs().max() > 10.0**factor:
                h = h + 1
        return h

    trainer = trainer_of(Net(function))
    data = batches(*(10.0**factor for factor in range(12)))
    with pytest.raises(ValueBranchError, match=r"(?s)8 graphs already.*in function: if h.abs.*torch.where.*ORTModule"):
        for batch in data:
            trainer.train_step(*batch)
    assert len(trainer.loop.executor.graphs(True)) == 8


def splits(h: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    parts = h.split(sizes.tolist())
    return sum((part.square().sum() * number for number, part in enumerate(parts)), h.sum())


def cuts(h: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    longest = sizes.max().item()
    return h[:longest].square().sum() + (torch.zeros(longest, 8) + h[0]).sum() * longest


def writes(h: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros(sizes[0].item() + 2, 8)
    rows[:2] = h[:2]
    return (rows.sum(1) * torch.arange(sizes[0].item() + 2)).sum()


def selects_some(h: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    large = (sizes > 1).nonzero()
    return h[large[:, 0]].square().sum() if large.size(0) > 0 else h.sum()


def counts(h: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return h[: int(sizes.max())].square().sum()


def repeats_by_number(h: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    for _ in range(sizes[1].item()):
        h = h * 1.5
    return h.sum()


def stand_for_numbers(h: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    longest: Any = sizes.max()
    mask = torch.arange(longest) < sizes[:, None]  # of padding, as models write it
    return h[longest].sum() + (mask.sum() * torch.ones(2, longest)).sum() * h[:, torch.div(longest, 2).long()].sum()


def cut_by_a_tensor(h: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    longest: Any = sizes.max()
    return h[:longest].square().sum() + h[longest:, :longest].sum()


class Sized(nn.Module):
    """Applies a function to hidden values and to sizes, of which there are as many as rows."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x), sizes)


SIZES = [[2, 0, 3, 1], [0, 4, 1, 1], [1, 1, 1, 3], [0, 1, 1, 4]]


@pytest.mark.parametrize(
    ("function", "kernels", "graphs"),
    [
        *((function, "pytorch", 1) for function in (splits, cuts, writes, selects_some)),
        *((function, "pytorch", 1) for function in (stand_for_numbers, cut_by_a_tensor)),
        *((function, "onnxruntime", 1) for function in (splits, cuts)),
        (counts, "pytorch", 2),  # of 3 and 4
        (repeats_by_number, "pytorch", 3),
    ],
)
def test_sizes_are_those_of_each_run(function: Callable[..., torch.Tensor], kernels: str, graphs: int) -> None:
    data = [(torch.randn(6, 8), torch.tensor(sizes)) for sizes in SIZES]
    if function is splits:
        data = [(x[: int(sizes.sum())], sizes) for x, sizes in data]
    eager, model = Sized(function), Sized(function)
    trainer = ORTTrainer(
        model, "auto", optim.SGDConfig(lr=1e-3), options=ORTTrainerOptions({"utils": {"kernels": kernels}})
    )
    module = ORTModule(Sized(function), {"utils": {"kernels": kernels}}, fallback="error" if graphs == 1 else "warn")
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (eager, module)]
    with warnings.catch_warnings():
        warnings.simplefilter("error" if graphs == 1 else "ignore")
        for x, sizes in data:
            for each, optimizer in zip((eager, module), optimizers, strict=True):
                optimizer.zero_grad()
                each(x, sizes).backward()
                optimizer.step()
            trainer.train_step(x, sizes)
            for trained in (model, module):
                assert_close(trained.linear.weight, eager.linear.weight, 1e-5, "weight")
    assert_close(trainer.eval_step(x, sizes), eager(x, sizes).detach(), 1e-5, "evaluation")
    assert len(trainer.loop.executor.graphs(True)) == graphs


def test_other_sizes_that_a_graph_assumes_are_another_graph() -> None:
    model, x = Sized(selects_some), torch.randn(4, 8)
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.0))
    for sizes in (torch.tensor([2, 0, 3, 1]), torch.zeros(4, dtype=torch.int64), torch.tensor([0, 2, 2, 2])):
        assert_close(trainer.train_step(x, sizes), model(x, sizes).detach(), 1e-5, "loss")
    assert len(trainer.loop.executor.graphs(True)) == 2


def test_sizes_that_do_not_fit_are_pytorchs_error() -> None:
    trainer = ORTTrainer(Sized(splits), "auto", optim.SGDConfig(lr=0.1))
    trainer.train_step(torch.randn(6, 8), torch.tensor([1, 2, 3]))
    with pytest.raises(RuntimeError, match="split_with_sizes expects"):
        trainer.train_step(torch.randn(6, 8), torch.tensor([1, 2, 2]))


def test_decisions_by_converted_numbers_are_refused_with_their_line() -> None:
    model = Net(lambda h: h if float(h.sum()) > 0 else -h)
    with pytest.raises(
        ExportError, match=r"(?s)depends on the values .*test_branches.*compare the tensor or x.item\(\)"
    ):
        trainer_of(model).train_step(*batches(1)[0])


def test_a_capture_without_answers_asks_for_them() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    branches = Branches()
    with FakeTensorMode() as mode, pytest.raises(ValuesAsked), branches.followed():
        x = mode.from_tensor(torch.ones(2, 3))
        with branches.forward_pass((x,)):
            catches(x)
    assert "__bool__" not in vars(torch.Tensor)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Checking(MLP):
    """Checks its label, and repairs values that are not finite."""

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(repairs(super().forward(x / 10) * 1e-2), label)
        if label.max() >= 3:
            raise ValueError("unknown label")
        return loss


def test_the_log_says_what_is_assumed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ort_trainer"):
        assert_same_training(Checking(), "auto", mlp_batches(3), optim.SGDConfig(lr=0.1), sgd, loss_fn=None)
    messages = [message for message in caplog.messages if message.startswith("the graph assumes that")]
    assert messages[0].endswith("in repairs: if not torch.isfinite(h * 1e37).all():") and "is True" in messages[0]
    assert messages[1].endswith("in forward: if label.max() >= 3:") and "is False" in messages[1]


class Spoken(nn.Module):
    """Selects and counts the labels of a batch that are not padding, as speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.max() >= 6:
            raise ValueError("unknown label")
        known = labels >= 0
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        frames = torch.full_like(known.sum(-1), x.shape[1])
        return F.ctc_loss(scores, labels.masked_select(known), frames, known.sum(-1), zero_infinity=True)


def test_ctc_of_labels_that_are_selected_by_value() -> None:
    model, data = Spoken(), []
    for length in (4, 4, 3):
        x, labels = torch.randn(2, 9, 4), torch.randint(1, 6, (2, length))
        labels[0, -2:] = -100
        data.append((x, labels))
    trainer = assert_same_training(model, "auto", data, optim.SGDConfig(lr=0.1), sgd, loss_fn=None)
    assert len(trainer.session.graphs(True)) == 1
    assert_close(trainer.eval_step(x, labels), model(x, labels).detach(), 1e-5, "loss")


class Selected(nn.Module):
    """The mean over rows that a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(x)[mask].square().mean()


def test_the_mean_of_no_rows_is_nan() -> None:
    model, x = Selected(), torch.randn(5, 4)
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.0))
    for mask in (torch.tensor([True, False, True, True, False]), torch.zeros(5, dtype=torch.bool)):
        expected = model(x, mask).detach()
        torch.testing.assert_close(trainer.train_step(x, mask), expected, equal_nan=True)
        torch.testing.assert_close(trainer.eval_step(x, mask), expected, equal_nan=True)
