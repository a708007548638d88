"""The position of a loop in its data, and resuming from it."""

from __future__ import annotations

import importlib.util
import io
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

from ort_trainer import CheckpointError, Position
from ort_trainer.runs.checks import check_place
from ort_trainer.runs.position import own_place
from ort_trainer.state import load_checkpoint_file, save_checkpoint_file

from .loaders import Noisy, Stateful, loader, seed

KINDS = ["list", "shuffled", "generator", "sampler", "workers", "workers generator", "stateful"]
TORCHDATA = ["torchdata", "torchdata generator", "torchdata sampler"]
needs_torchdata = pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    save_checkpoint_file(file, {}, state)
    file.seek(0)
    return load_checkpoint_file(file)[1]


def go(position: Position, at: tuple[int, int] | None = None) -> tuple[list[Any], dict[str, Any] | None]:
    """Runs three epochs and draws between batches; returns what follows a place, and the state saved there."""
    seen: list[Any] = []
    kept = None

    def keep_at(place: tuple[int, int]) -> None:
        nonlocal kept
        if place == at:
            kept = through_a_file(position.state_dict())
            seen.clear()

    keep_at((1, 0))
    for epoch in position.epochs(3):
        for batch in position.batches():
            seen.append((epoch, position.batch, *batch, torch.rand(1), random.random(), float(np.random.rand())))
            keep_at((epoch, position.batch))
        seen.append((epoch, torch.rand(1)))
        keep_at((epoch + 1, 0))
    return seen, kept


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("at", [(1, 0), (1, 4), (2, 6), (3, 0)], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=needs_torchdata) for kind in TORCHDATA)])
def test_goes_on_bit_for_bit(kind: str, at: tuple[int, int]) -> None:
    seed(0)
    expected, kept = go(Position(loader(kind)), at)
    assert kept is not None and expected
    seed(99)
    position = Position(loader(kind))
    position.load_state_dict(kept)
    again = through_a_file(position.state_dict())  # saved at once: nothing is lost
    assert (position.epoch, position.batch) == at
    found, _ = go(position)
    assert_equal(found, expected)

    seed(98)
    position = Position(loader(kind))
    position.load_state_dict(again)
    assert_equal(go(position)[0], expected)


@needs_torchdata
def test_a_loader_of_torchdata_with_workers() -> None:
    """The order is the same; the workers' random numbers are not part of its state, as the page says."""
    for at in ((1, 2), (2, 0)):
        seed(0)
        expected, kept = go(Position(loader("torchdata workers")), at)
        seed(99)
        position = Position(loader("torchdata workers"))
        position.load_state_dict(kept or {})
        found, _ = go(position)
        labels = [row[3] if len(row) > 2 else row[1] for row in found]
        theirs = [row[3] if len(row) > 2 else row[1] for row in expected]
        assert len(labels) == len(theirs) and all(map(torch.equal, labels, theirs))


def test_a_loader_with_a_state_loads_nothing_twice() -> None:
    position = Position(Stateful())
    _, kept = go(position, (2, 4))
    resumed = Stateful()
    position = Position(resumed)
    position.load_state_dict(kept or {})
    go(position)
    assert resumed.loaded == 2 + 6


def test_a_loop_may_leave_an_epoch_and_come_back() -> None:
    seed(0)
    expected = [label.tolist() for _, label in DataLoader(Noisy(), batch_size=4, shuffle=True)]
    seed(0)
    position = Position(loader("shuffled"))
    found = []
    for _, label in position.batches():
        found.append(label.tolist())
        if position.batch == 2:
            break
    state = torch.get_rng_state()
    rest = position.batches()
    found.append(next(rest)[1].tolist())
    assert position.batch == 3 and not torch.equal(state, torch.get_rng_state())
    assert [*found, *(label.tolist() for _, label in rest)] == expected
    assert (position.epoch, position.batch) == (2, 0)


@pytest.mark.parametrize("kind", ["shuffled", "stateful"])
def test_a_break_ends_the_epoch(kind: str) -> None:
    position = Position(loader(kind))
    epochs = []
    for epoch in position.epochs(3):
        epochs.append(epoch)
        for _ in position.batches():
            break
    assert epochs == [1, 2, 3] and list(position.epochs(3)) == []


def test_samplers_are_told_the_epoch() -> None:
    told = []

    class Told(RandomSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    position = Position(DataLoader(Noisy(), batch_size=11, sampler=Told(Noisy())))
    for _ in position.epochs(2):
        list(position.batches())
    assert told == [0, 1]


def test_another_loader_is_refused() -> None:
    _, kept = go(Position(loader("generator")), (1, 4))
    assert kept is not None
    position = Position(DataLoader(Noisy(), batch_size=2, shuffle=True, generator=torch.Generator()))
    with pytest.raises(
        ValueError, match="of an epoch of 6 batches, but the loader has 11: .*without the position in the data"
    ):
        position.load_state_dict(kept)
    with pytest.raises(ValueError, match="has 0 generators of its own, but the checkpoint was saved with 1"):
        Position(loader("shuffled")).load_state_dict(kept)
    assert (position.epoch, position.batch) == (1, 0)
    _, between = go(Position(loader("generator")), (2, 0))
    position.load_state_dict(between or {})  # another batch size is fine between epochs
    assert position.epoch == 2 and len(list(position.batches())) == 11

    class Shorter(Noisy):
        def __iter__(self) -> Any:
            yield torch.zeros(1)

    position = Position(Shorter())
    position.load_state_dict({**kept, "batches": 22, "random": None, "epoch_random": Position().state_dict()["random"]})
    with pytest.raises(ValueError, match="the loader has 1 batches, but the checkpoint was saved after 4"):
        list(position.batches())
    with pytest.raises(TypeError, match="is an iterator, which can be used for one epoch only, but there are 2"):
        list(Position(iter([1])).epochs(2))
    with pytest.raises(TypeError, match="count must be an int"):
        list(position.epochs(1.0))


def test_another_number_of_processes() -> None:
    middle, between = {"epoch": 2, "batch": 3, "random": 1}, {"epoch": 2, "batch": 0, "random": 1}
    assert own_place([middle, {**middle, "random": 2}], 1, 2)["random"] == 2
    with pytest.raises(ValueError, match="in the middle of an epoch by 2 processes.* there are 3"):
        own_place([middle, between], 0, 3)
    assert own_place([between, {**between, "random": 2}], 1, 3)["random"] == 2
    new = own_place([between, between], 2, 3)
    assert new["epoch"] == 2 and new["random"] is None
    with pytest.raises(CheckpointError, match="was not saved by a CheckpointManager"):
        own_place([], 0, 1)


def sampled(size: int, batch: int, count: int = 48, **settings: Any) -> DataLoader[Any]:
    """Returns rank 0's loader of several processes."""
    data = TensorDataset(torch.arange(float(count)))
    return DataLoader(data, batch, sampler=DistributedSampler(data, size, 0, **settings))


def test_samples_say_where_another_number_of_processes_goes_on() -> None:
    position = Position(sampled(2, 4))
    for _ in itertools.islice(position.batches(), 3):
        pass
    places = [position.state_dict()] * 2
    for size, batch, done in ((1, 4, 6), (1, 8, 3), (3, 4, 2), (4, 2, 3)):
        other = Position(sampled(size, batch))
        place = own_place(places, size - 1, size, other.loader)
        other.check(place)
        assert place["batch"] == done and (place["random"] is None) == (size > 2)
        other.load_state_dict(place)
        assert len(list(other.batches())) == len(other.loader) - done
    ended = [{**place, "batch": 6, "batches": 6} for place in places]
    assert own_place(ended, 0, 1, sampled(1, 5))["batch"] == 10
    for other, why in (
        (sampled(1, 5), "they completed 24 samples, which are no multiple of the 5 of a batch of all here"),
        (sampled(1, 4, seed=1), "their samples had the order .*'seed': 0.* and these have .*'seed': 1"),
        (sampled(1, 4, count=40), "'of': 48"),
        (sampled(1, 4, shuffle=False), "'seed': None"),
        (DataLoader(TensorDataset(torch.zeros(48)), 4, shuffle=True), "only loaders with a DistributedSampler"),
        ([1, 2], "only loaders with a DistributedSampler"),
    ):
        with pytest.raises(ValueError, match=f"by 2 processes.* there are 1, and .*{why}"):
            own_place(places, 0, 1, other)
    with pytest.raises(ValueError, match="and equal batches"):
        own_place([places[0], {**places[1], "batch": 2}], 0, 1, sampled(1, 4))


@pytest.mark.parametrize("kind", ["list", "generator", "stateful"])
def test_a_loop_may_go_back(kind: str) -> None:
    """It leaves its batches with a break; the epoch then continues where it was saved."""
    seed(0)
    expected, _ = go(Position(loader(kind)), (2, 2))
    seed(0)
    position, seen, kept = Position(loader(kind)), [], None
    for epoch in position.epochs(3):
        for batch in position.batches():
            seen.append((epoch, position.batch, *batch, torch.rand(1), random.random(), float(np.random.rand())))
            if kept is None and (epoch, position.batch) == (2, 2):
                kept = through_a_file(position.state_dict())
            elif kept and (epoch, position.batch) == (2, 4):
                position.load_state_dict(kept)
                kept = {}
                seen.clear()
                break
        else:
            seen.append((epoch, torch.rand(1)))
    assert_equal(seen, expected)

    position = Position(loader(kind))
    rest = position.batches()
    next(rest)
    position.load_state_dict(through_a_file(position.state_dict()))
    with pytest.raises(RuntimeError, match=r"restored while these batches were being iterated.*with a break"):
        next(rest)


class SaysLess(list[Any]):
    """Yields more batches than its length says."""

    def __len__(self) -> int:
        return 2


def test_a_loader_that_yields_more_batches_than_its_length_goes_on() -> None:
    position = Position(SaysLess([1, 2, 3, 4, 5]))
    assert list(itertools.islice(position.batches(), 4)) == [1, 2, 3, 4]
    for _ in range(2):  # what a resumed run saves at once is the same
        state = through_a_file(position.state_dict())
        check_place(state, "place", None)  # a reader of the file
        position = Position(SaysLess([1, 2, 3, 4, 5]))
        position.load_state_dict(state)
    assert (list(position.batches()), position.epoch) == ([5], 2)
    with pytest.raises(ValueError, match="in the middle of an epoch of None batches, but the loader has 9"):
        Position(range(9)).check(state)
