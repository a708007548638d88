"""N processes with batches of size b train as one process with batches of size N * b, or with all micro-batches."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from . import data_parallel_cases as cases
from .world import run

Ranks = list[dict[str, Any]]

PARTS = ("sgd", "adam", "adamw", "lamb", "torch_optimizer", "own_loop")
DEALT = ("mean", "summed", "weighted", "fp16", "unused")
OTHERS = ("uneven", "like_ddp", "branching", "start", "dropout", "sums", "refused")
# Cases where the last process has no micro-batch, and where a sum has more than two parts.
FEW = ("lamb", "weighted", "unused", "uneven", "start", "sums")
CASES = {1: (*PARTS, *DEALT, "start"), 2: (*PARTS, *DEALT, *OTHERS), 3: FEW, 4: FEW}


@functools.cache
def world(size: int) -> dict[str, Ranks]:
    found = run("data_parallel_cases", CASES[size], size)
    failed = {case: ranks for case, ranks in found.items() if any("error" in rank for rank in ranks)}
    assert not failed, "\n".join(str(rank["error"]) for ranks in failed.values() for rank in ranks if "error" in rank)
    return found


def in_sizes(names: tuple[str, ...], sizes: tuple[int, ...] = (2, 3, 4)) -> Callable[[Any], Any]:
    # If the engine's graphs write into bound memory, gradients are computed in the buckets.
    pairs = [
        pytest.param(name, size, marks=[pytest.mark.engine] if size == 2 else [])
        for size in sizes
        for name in names
        if name in CASES[size]
    ]
    return pytest.mark.parametrize(("case", "size"), pairs)


def weights(found: dict[str, Any], prefix: str = "weight.") -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def assert_weights(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=rtol / 10, err_msg=name)


def assert_same(together: Ranks, *keys: str) -> None:
    """Checks that weights and the named values are equal bit for bit in all processes."""
    for found in together:
        for name in (*(name for name in found if name.startswith("weight.")), *keys):
            np.testing.assert_array_equal(found[name], together[0][name], err_msg=name)


@in_sizes(PARTS)
def test_parts_of_batches_make_the_update_of_the_whole(case: str, size: int) -> None:
    (alone,), together = world(1)[case], world(size)[case]
    losses = np.mean([found["losses"] for found in together], axis=0)
    np.testing.assert_allclose(losses, alone["losses"], rtol=1e-6)
    assert_weights(weights(together[0]), weights(alone))
    assert_same(together, "optimization_step", "grad_norm")
    assert alone["optimization_step"] == together[0]["optimization_step"]
    np.testing.assert_allclose(together[0]["grad_norm"], alone["grad_norm"], rtol=1e-5)


@in_sizes(DEALT)
def test_an_update_has_the_micro_batches_of_all(case: str, size: int) -> None:
    (alone,), together = world(1)[case], world(size)[case]
    assert_weights(weights(together[0]), weights(alone))
    assert_same(together, "optimization_step", "grad_norm", "updated")
    for key in ("optimization_step", "updated"):
        np.testing.assert_array_equal(alone[key], together[0][key])


def test_an_overflow_in_one_process_skips_the_update_in_all() -> None:
    (alone,), together = world(1)["fp16"], world(2)["fp16"]
    assert together[0]["updated"].tolist() == [True, True, False, True, True]
    assert together[0]["optimization_step"] == 4
    assert_same(together, "loss_scale", "scaler")
    assert (together[0]["loss_scale"], together[0]["scaler"]) == (alone["loss_scale"], alone["scaler"])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_no_process_has_a_gradient_of_stays_as_it_is(size: int) -> None:
    before = {name: value.numpy() for name, value in cases.Odd().state_dict().items()}
    after = weights(world(size)["unused"][-1])
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {name for name in before if not name.startswith(("never", "frozen"))}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_processes_with_other_numbers_of_batches_end_together(size: int) -> None:
    together = world(size)["uneven"]
    assert_same(together, "optimization_step", "answers", "steps")
    assert together[0]["optimization_step"] == 8
    assert together[0]["answers"].all()  # until the last batch of the process with the most batches
    assert (together[0]["steps"] == [[7] * size, [14] * size]).all()
    assert_weights(weights(together[0]), cases.uneven_in_torch(size), rtol=1e-4)


@pytest.mark.parametrize("case", ["like_ddp", "branching"])
def test_weights_and_buffers_are_those_of_torch_ddp(case: str) -> None:
    first, *others = world(2)[case]
    np.testing.assert_allclose(first["losses"], first["ddp_losses"], rtol=1e-4)
    assert_weights(weights(first), weights(first, "ddp."), rtol=1e-4)
    assert_same([first, *others])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_begin_with_the_tensors_of_rank_0(size: int) -> None:
    (alone,), together = world(1)["start"], world(size)["start"]
    for found in together:
        for name, value in alone.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_dropout_masks_follow_from_rank_and_seed() -> None:
    first, second = world(2)["dropout"]
    for found in (first, second):
        np.testing.assert_array_equal(found["losses0"], found["losses1"])
        assert not np.isin(found["losses0"], found["losses2"]).any()
    assert not np.isin(first["losses0"], second["losses0"]).any()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["None", "float16", "bfloat16"])
@pytest.mark.parametrize("scatter", [False, True])
def test_sums_do_not_overflow(size: int, dtype: str, scatter: bool) -> None:
    parts = [found[f"{dtype}.{scatter}"] for found in world(size)["sums"]]
    together = [sum(parts)] if scatter else parts  # each has its part, and zeros
    wanted = [size * (40000.0 - 10000 * number) - 100 * sum(range(size)) for number in range(3)]
    rtol = {"None": 0.0, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    for found in together:
        np.testing.assert_allclose(found, np.repeat(wanted, [15, 7, 1]), rtol=rtol)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("closure", "ValueError: torch.optim.LBFGS .* optimizer that needs no closure"),
        ("norm", r"ValueError: \['1'\] of Sequential are SyncBatchNorm, .* leave out nn.SyncBatchNorm.convert"),
        ("pass", r"RuntimeError: forward_backward\(\) was called inside trainer.join\(\)"),
        ("step", r"RuntimeError: optimizer_step\(\) was called inside trainer.join\(\)"),
        ("nested", r"RuntimeError: trainer.join\(\) was entered inside another"),
        (
            "missing",
            "DistributedError: .* the parameters that have p.grad: '0.weight' is missing on rank 0 and there on",
        ),
        ("kinds", r"DistributedError: .* rank 0 is in train_step\(\) or optimizer_step\(\), rank 1 is in state_dict"),
        ("rates", r"DistributedError: .* the learning rates: \[0.1\] on rank 0 and \[1.1\] on rank 1"),
    ],
)
def test_what_is_refused(name: str, text: str) -> None:
    for found in world(2)["refused"]:
        assert re.match(text, str(found[name])), found[name]
