"""Checks on values in ``forward``: branches that only raise are omitted from a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ort_trainer import ExportError, ORTTrainer, optim
from ort_trainer.export.torch.value_checks import value_checks_passed

from ...helpers import MLP, assert_close, assert_same_training, mlp_batches


def one_line(x: Any) -> Any:
    if x.max() > 3:
        raise ValueError(f"{x.max()} is too large")
    return x


def negated(x: Any, strict: bool = True) -> Any:
    if strict and not (x > 0).all():
        message = "not positive"
        for number in range(3):
            message += str(number)
        raise ValueError(message)
    return x


def either(x: Any) -> Any:
    if x.isnan().any() or x.min() < 0:
        raise ValueError
    return x


def with_else(x: Any) -> Any:
    if (x > 0).all():
        x = x + 1
    elif x.sum() > 0:
        raise ValueError
    else:
        raise TypeError
    return x


def asserted(x: Any) -> Any:
    assert (x > 0).all(), "not positive"
    assert x.sum().item() > 0
    return x


def clamped(x: Any) -> Any:
    if not torch.isfinite(x).all():
        largest = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-largest, max=largest)
    return x


def clamped_method(x: Any) -> Any:
    if torch.isinf(x).any() or torch.isnan(x).any():
        x = x.clamp(-9.0, 9.0)
    return x


def chosen(x: Any) -> Any:
    if x.sum() > 0:
        x = x + 1
    return x


def clamped_and_more(x: Any) -> Any:
    if not torch.isfinite(x).all():
        x = torch.clamp(x, max=9.0)
    else:
        x = x + 1
        x = x * 2
    return x


def returned(x: Any) -> Any:
    if x.sum() > 0:
        return x
    return -x


def kept(x: Any) -> Any:
    return x if bool(x.sum() > 0) else -x


def both_raise(x: Any) -> Any:
    if x.sum() > 0:
        raise ValueError
    raise TypeError


def caught(x: Any) -> Any:
    try:
        if x.sum() > 0:
            raise ValueError
    except ValueError:
        x = -x
    return x


def captured(function: Callable[[Any], Any]) -> tuple[torch.Tensor, list[str]]:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = mode.from_tensor(torch.ones(2, 3))
        with value_checks_passed() as lines:
            return function(x), lines


@pytest.mark.parametrize(
    ("function", "checks"),
    [
        (one_line, ["if x.max() > 3:"]),
        (negated, ["if strict and not (x > 0).all():"]),
        (either, ["if x.isnan().any() or x.min() < 0:"]),
        (with_else, ["if (x > 0).all():"]),
        (asserted, ['assert (x > 0).all(), "not positive"', "assert x.sum().item() > 0"]),
        (clamped, ["if not torch.isfinite(x).all():"]),
        (clamped_method, ["if torch.isinf(x).any() or torch.isnan(x).any():"]),
    ],
)
def test_what_only_raises_is_left_out(function: Callable[[Any], Any], checks: list[str]) -> None:
    result, lines = captured(function)
    assert result.shape == (2, 3)
    assert [line.partition(f"in {function.__name__}: ")[2] for line in lines] == checks
    assert all(f'File "{__file__}", line ' in line for line in lines)


@pytest.mark.parametrize("function", [chosen, clamped_and_more, returned, kept, both_raise, caught])
def test_what_could_go_either_way_is_an_error(function: Callable[[Any], Any]) -> None:
    with pytest.raises(Exception, match=r"[Dd]ata.?dependent|_local_scalar_dense"):
        captured(function)


def test_other_tensors_have_their_own_truth() -> None:
    with value_checks_passed() as lines, pytest.raises(ValueError, match="too large"):
        one_line(torch.ones(2) * 4)
    assert not lines and "__bool__" not in vars(torch.Tensor)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Checking(MLP):
    """Checks its input and its loss, and clamps values that are not finite."""

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(clamped(super().forward(one_line(x / 10))), label)
        if label.max() >= 3:
            raise ValueError("unknown label")
        return loss


def test_training_is_pytorchs_and_the_log_says_what_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ort_trainer"):
        assert_same_training(Checking(), "auto", mlp_batches(3), optim.SGDConfig(lr=0.1), sgd, loss_fn=None)
    said = [message for message in caplog.messages if message.startswith("not checked in a graph")]
    assert len(said) == 3 and said[2].endswith("in forward: if label.max() >= 3:")


class Choosing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chosen(x).sum()


def test_a_choice_by_values_is_still_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 3), Choosing())
    with pytest.raises(ExportError, match="depends on the values of tensors"):
        ORTTrainer(model, "auto", optim.SGDConfig()).train_step(torch.randn(2, 8))


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
    model, batches = Spoken(), []
    for length in (4, 4, 3):
        x, labels = torch.randn(2, 9, 4), torch.randint(1, 6, (2, length))
        labels[0, -2:] = -100
        batches.append((x, labels))
    trainer = assert_same_training(model, "auto", batches, optim.SGDConfig(lr=0.1), sgd, loss_fn=None)
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
