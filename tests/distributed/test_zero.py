"""N processes that divide the optimizer's state train as one process with batches of size N * b."""

from __future__ import annotations

import numpy as np
import pytest

from .sharded_cases import RUNS
from .sharded_worlds import CASES, worlds

COMPARED = [(case, size) for case in (*RUNS, "own_loop") for size in (2, 3, 4) if case in CASES[size]]


@pytest.mark.parametrize(("case", "size"), COMPARED)
def test_processes_train_as_one(case: str, size: int) -> None:
    (alone,), together = worlds()[1][case], worlds()[size][case]
    if "losses" in alone:
        losses = np.mean([found["losses"] for found in together], axis=0)
        np.testing.assert_allclose(losses, alone["losses"], rtol=1e-6)
    for found in together:
        assert found.keys() == alone.keys()
        for name in alone.keys() - {"losses"}:
            np.testing.assert_allclose(found[name], alone[name], rtol=1e-5, atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(found[name], together[0][name], err_msg=name)


@pytest.mark.parametrize("size", [2, 3])
def test_an_overflow_in_one_process_skips_the_update_in_all(size: int) -> None:
    (alone,), together = worlds()[1]["overflow"], worlds()[size]["overflow"]
    assert alone["finite"].tolist() == [True, True, False, True, True, True, True, True]
    for found in together:
        for name in ("finite", "scales"):
            np.testing.assert_array_equal(found[name], alone[name])
        for name in (key for key in alone if key.startswith("weight.")):
            np.testing.assert_allclose(found[name], alone[name], atol=0.01)
            np.testing.assert_array_equal(found[name], together[0][name])


@pytest.mark.parametrize("size", [3, 4])
def test_each_process_keeps_a_part_of_the_moments(size: int) -> None:
    found = worlds()[size]["memory"]
    kept = [int(one["kept"]) for one in found]
    assert sum(kept) == found[0]["whole"]
    # The margin covers padding, and the few elements by which parts of buckets differ.
    assert max(kept) <= found[0]["whole"] / size * 1.25


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("refused_torch", ["ValueError", "SGD", "ZeroRedundancyOptimizer", "optim.SGDConfig"]),
        ("refused_state", ["RuntimeError", "only a part of AdamW's state", "trainer.state_dict()"]),
        ("refused_shared", ["ValueError", "'0.weight', '1.weight'", "share memory", "stage to 0"]),
    ],
)
def test_what_can_not_be_divided_is_refused(case: str, words: list[str]) -> None:
    for found in worlds()[2][case]:
        assert all(word in str(found["error"]) for word in words), found["error"]
