"""All processes detect and name a process that does something different, or hangs, in time."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from .world import run

# What rank 1 does, and the others' errors. A rank that dies comes last, because no case can run after it.
APART = {
    "other_model": r"'net.weight' is float32 \[4, 8\] on ranks \[0, 2\] and float32 \[5, 8\] on rank 1",
    "other_options": r"options: 'batch.gradient_accumulation_steps' is 1 on ranks \[0, 2\] and 2 on rank 1",
    "other_rate": r"learning rates: \[0.1\] on ranks \[0, 2\] and \[0.2\] on rank 1",
    "other_rate_later": r"learning rates: \[0.1\] on ranks \[0, 2\] and \[0.2\] on rank 1",
    "other_dtype": r"first batch: 'x' is torch.float32 on ranks \[0, 2\] and torch.float16 on rank 1",
    "other_weights": r"weights: 'net.bias' is \w+ on ranks \[0, 2\] and \w+ on rank 1",
    "other_method": r"rank 0 is in train_step\(\) or optimizer_step\(\), rank 1 is in state_dict\(\)",
    "other_trainer": r"different trainers at the same time: rank 0 uses number \d+, rank 1 uses number \d+, rank 2",
    "other_order": r"make their 2 trainers in different orders: rank 1 begins with the weights that another",
    "other_weights_later": r"weights: 'net.bias' is \w+ on ranks \[0, 2\] and \w+ on rank 1",
    "joins_not": r"rank 0 is in gather\(\) inside trainer.join\(\), rank 1 is in gather\(\), rank 2",
}
MISSING = {
    "raises": (r"rank 1 raised TypeError: inputs \['label'\] are missing", 5),
    "raises_outside": (r"rank 1 raised ValueError: of the script", 5),
    "has_no_loss": (r"rank 1 raised FloatingPointError: the loss is nan: debug.max_nonfinite_losses is 1", 5),
    "differs": (r"rank 1 raised VerificationError: step 2 differs .* output 'loss'", 5),
    "cannot_follow": (r"rank 1 raised RuntimeError: .* trainer.join\(\) and can't take part when others load a", 5),
    "hangs": (r"rank 1 has ended, or hangs, .* must call the same methods", 5),
    "interrupted_twice": (r"rank 0 raised KeyboardInterrupt", 60),
    "dies": (r"rank 1 has ended", 60),
}


ALIKE = ("other_sizes", "other_reads", "raises_and_goes_on")


@functools.cache
def world() -> dict[str, list[dict[str, Any]]]:
    return run("failure_cases", [*APART, *ALIKE, "other_number", *MISSING], 3, lost=[1])


@pytest.mark.parametrize("case", APART)
def test_a_difference_is_said_by_all(case: str) -> None:
    for found in world()[case]:
        assert str(found["error"]).startswith("DistributedError: ") and re.search(APART[case], str(found["error"]))


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_rank_is_named(case: str) -> None:
    pattern, timeout = MISSING[case]
    found = world()[case]
    for rank in (2,) if case == "interrupted_twice" else (0, 2):
        error, seconds = str(found[rank]["error"]), float(found[rank]["seconds"])
        assert error.startswith(f"DistributedError: rank {rank} of 3 ") and re.search(pattern, error)
        assert seconds < timeout + 20  # on a busy machine


@pytest.mark.parametrize("case", ALIKE)
def test_some_differences_are_none_of_the_others(case: str) -> None:
    assert [str(found["error"]) for found in world()[case]] == [""] * 3


def test_other_operators_are_a_warning() -> None:
    first, *others = (str(found["error"]) for found in world()["other_number"])
    assert re.match(
        r"UserWarning: the processes .* outside tensors: 'rate' is 0.5 on ranks \[0, 2\] and 0.1 on rank 1. In the "
        r"operators .*: 'dropout' is aten.dropout.default\(mul, 0.5, True\) on ranks \[0, 2\].*tensor_0' is 1.5 ",
        first,
    )
    assert others == ["", ""]


def test_the_rank_itself_says_what_has_become_of_it() -> None:
    assert str(world()["raises"][1]["error"]).startswith("TypeError: inputs")
    assert re.search(r"arrived \d+.\d s after the others had given up", str(world()["hangs"][1]["error"]))
    assert str(world()["interrupted_twice"][0]["error"]).startswith("KeyboardInterrupt")
    assert float(world()["interrupted_twice"][0]["seconds"]) < 30
