"""One checkpoint for all processes, which any number of processes can load, with or without ZeRO."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .sharded_worlds import worlds

# Sizes and cases of the worlds that saved and loaded a checkpoint.
LOADS = [
    ((4, "first_on"), (2, "second_off")),
    ((4, "first_off"), (2, "second_on")),
    ((2, "second_off"), (1, "third")),
    ((2, "second_on"), (1, "third_again")),
    ((1, "third"), (3, "fourth_on")),
    ((1, "third_again"), (3, "fourth_off")),
]


def found(place: tuple[int, str]) -> list[dict[str, Any]]:
    size, case = place
    result = worlds()[size][case]
    assert not any("error" in one for one in result), [one.get("error") for one in result]
    return result


@pytest.mark.parametrize(("saved", "loaded"), LOADS)
def test_other_numbers_of_processes_load_it_bit_for_bit(saved: tuple[int, str], loaded: tuple[int, str]) -> None:
    (source, *_), results = found(saved), found(loaded)
    names = [name.removeprefix("saved.") for name in source if name.startswith("saved.")]
    assert len(names) > 20
    for result in results:
        assert result["user"] == saved[0]
        for name in names:
            np.testing.assert_array_equal(result[f"loaded.{name}"], source[f"saved.{name}"], err_msg=name)
        # After 5 micro-batches in windows of 2, one is left, which counts as if these processes had done it.
        factor = loaded[0] / saved[0]
        np.testing.assert_array_equal(result["window"], source["saved_window"] * [1, factor])
        for name in (key.removeprefix("total.") for key in source if key.startswith("total.")):
            expected = source[f"total.{name}"] * np.float32(factor)
            np.testing.assert_array_equal(result[f"gradient.{name}"], expected, err_msg=name)
        np.testing.assert_array_equal(result["random"], source["saved_random"][0])


@pytest.mark.parametrize(("saved", "loaded"), LOADS)
def test_it_says_what_it_was_saved_with(saved: tuple[int, str], loaded: tuple[int, str]) -> None:
    for rank, result in enumerate(found(loaded)):
        size, case = loaded
        expected = {"zero_stage": int(case.endswith("_on")), "world_rank": rank, "world_size": size}
        expected |= {"data_parallel_size": size, "horizontal_parallel_size": 1}
        assert {key: int(result[f"option.{key}"]) for key in expected} == expected


@pytest.mark.parametrize(("size", "on", "off"), [(2, "second_on", "second_off"), (3, "fourth_on", "fourth_off")])
def test_each_process_has_random_numbers_of_its_own(size: int, on: str, off: str) -> None:
    states = [one["own_random"].tobytes() for one in found((size, on))]
    assert len(set(states)) == size
    assert states[0] == found((size, on))[0]["random"].tobytes()
    saved = found((size, on))[0]["saved_random"]
    assert saved.shape == (size, len(states[0]))
    assert len({state.tobytes() for state in saved}) == size


def test_a_window_counts_all_micro_batches() -> None:
    np.testing.assert_array_equal(found((4, "first_on"))[0]["saved_window"], [1, 4])
    # Rank 0 has the micro-batch of the loaded window (of 4 processes) and 5 of its own: the third window is full.
    np.testing.assert_array_equal(found((2, "second_on"))[0]["window"], [1, 2])


def test_as_many_processes_go_on_as_if_nothing_had_been() -> None:
    for one in found((2, "resume")):
        np.testing.assert_array_equal(one["losses"], one["again"])
        for name in (key.removeprefix("first.") for key in one if key.startswith("first.")):
            np.testing.assert_array_equal(one[f"first.{name}"], one[f"second.{name}"], err_msg=name)


@pytest.mark.parametrize(
    ("case", "rank", "own", "others"),
    [
        ("write", 0, "FileNotFoundError", "'save' failed in another process: rank 0: FileNotFoundError"),
        ("exists", 0, "FileExistsError", "'save' failed in another process: rank 0: FileExistsError"),
        ("read", None, "FileNotFoundError", "'load' failed in another process: rank 1: FileNotFoundError"),
        ("damaged", None, "RuntimeError", "'load' failed in another process: rank 1: RuntimeError"),
    ],
)
def test_what_fails_in_one_process_raises_in_all(case: str, rank: int | None, own: str, others: str) -> None:
    for number, one in enumerate(found((3, "failures"))):
        failed = number == 0 if rank == 0 else number > 0
        assert str(one[case]).startswith(f"{own}: " if failed else f"DistributedError: {others}: "), one[case]
        assert bool(one["unchanged"])
        assert np.isfinite(one["losses"]).all()


def test_processes_that_load_different_states_are_found_out() -> None:
    for one in found((3, "failures")):
        assert "ranks [1, 2] got a different state to load than rank 0" in str(one["other"])
        assert str(one["alone"]).startswith("DistributedError: "), one["alone"]
