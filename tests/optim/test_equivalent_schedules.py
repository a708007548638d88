"""The tables of docs/optimizers.md: this package's schedules return the same rates as PyTorch's and transformers'."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ort_trainer import optim
from ort_trainer.optim.step_info import TrainStepInfo

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
TOTAL, WARM = 40, 8
Pair = tuple[optim.LRScheduler, Callable[[torch.optim.Optimizer], Any]]
TORCH: dict[str, Pair] = {
    "PolynomialLR": (
        optim.PolyWarmupLRScheduler(TOTAL, lr_end=0.0, power=2.0, warmup=0.0),
        lambda o: lr_scheduler.PolynomialLR(o, total_iters=TOTAL, power=2.0),
    ),
    "CosineAnnealingLR": (
        optim.CosineWarmupLRScheduler(TOTAL, warmup=0.0),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=TOTAL),
    ),
}


def transformers_pairs() -> dict[str, Pair]:
    from transformers import optimization as theirs

    share = WARM / TOTAL
    return {
        "get_constant_schedule_with_warmup": (
            optim.ConstantWarmupLRScheduler(TOTAL, warmup=share),
            lambda o: theirs.get_constant_schedule_with_warmup(o, WARM),
        ),
        "get_linear_schedule_with_warmup": (
            optim.LinearWarmupLRScheduler(TOTAL, warmup=share),
            lambda o: theirs.get_linear_schedule_with_warmup(o, WARM, TOTAL),
        ),
        "get_cosine_schedule_with_warmup": (
            optim.CosineWarmupLRScheduler(TOTAL, warmup=share, cycles=0.5),
            lambda o: theirs.get_cosine_schedule_with_warmup(o, WARM, TOTAL, num_cycles=0.5),
        ),
        "get_polynomial_decay_schedule_with_warmup": (
            optim.PolyWarmupLRScheduler(TOTAL, warmup=share, lr_end=1e-7, power=2.0),
            lambda o: theirs.get_polynomial_decay_schedule_with_warmup(o, WARM, TOTAL, lr_end=1e-7, power=2.0),
        ),
    }


def assert_same_rates(pair: Pair) -> None:
    ours, make = pair
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.3)
    theirs = make(optimizer)
    for step in range(TOTAL):
        info = TrainStepInfo(optim.SGDConfig(lr=0.3), optimization_step=step)
        assert ours.get_lr(info) == pytest.approx(theirs.get_last_lr(), abs=1e-12), step
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("name", TORCH)
def test_of_torch(name: str) -> None:
    assert_same_rates(TORCH[name])


def test_of_transformers() -> None:
    pytest.importorskip("transformers")
    for pair in transformers_pairs().values():
        assert_same_rates(pair)


def rows(first: str) -> dict[str, str]:
    """Returns the second column of the page's tables by the names in the first."""
    found = {}
    for names, here in re.findall(rf"^\| (`{first}\w*.*?) \| (.*?) \|", PAGE.read_text(), re.MULTILINE):
        found |= dict.fromkeys(re.findall(rf"`({first}\w*)", names), here)
    return found


def test_the_table_of_optimizers_is_complete_and_true() -> None:
    table = {name.rpartition(".")[2]: here for name, here in rows(r"torch\.optim\.[A-Z]").items()}
    assert set(table) == {name for name in torch.optim.__all__ if name[0].isupper()} - {"Optimizer"}
    model = nn.Linear(2, 2, bias=False)
    for name, here in table.items():
        optimizer = getattr(torch.optim, name)(model.parameters())
        if "from_torch" in here:
            assert optim.from_torch(optimizer).optimizer is optimizer
        else:
            with pytest.raises(ValueError, match=f"no config does what this torch.optim.{name} does"):
                optim.from_torch(optimizer)


def test_the_tables_of_schedules_are_complete() -> None:
    table = rows("(?!torch|get_)[A-Z]")
    assert set(table) >= set(lr_scheduler.__all__) - {"LRScheduler"}
    assert {name for name, here in table.items() if "WarmupLRScheduler" in here} == set(TORCH)
    pytest.importorskip("transformers")
    from transformers import optimization

    table = rows("get_")
    known = {name for name in dir(optimization) if re.fullmatch(r"get_\w+_schedule(_with_warmup)?", name)}
    assert known <= set(table)
    assert {name for name, here in table.items() if "WarmupLRScheduler" in here} == set(transformers_pairs())
