"""Gradients lie in a few flat tensors, at aligned addresses."""

from __future__ import annotations

import pytest
import torch

from ort_trainer.distributed.buckets import Buckets, grouped

SHAPES = {"a": (3, 5), "b": (7,), "empty": (0, 4), "scalar": (), "half": (9,), "c": (100,)}
PARAMETERS = {
    name: torch.zeros(shape, dtype=torch.float16 if name == "half" else torch.float32) for name, shape in SHAPES.items()
}


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("limit", [1, 100, 2**20])
def test_every_gradient_has_a_place_of_its_own(processes: int, limit: int) -> None:
    buckets = Buckets(PARAMETERS, processes, limit)
    assert buckets.views.keys() == PARAMETERS.keys()
    for bucket in buckets:
        assert bucket.flat.numel() % processes == 0
        assert not bucket.flat.any()
        for name, view in bucket.views.items():
            assert (view.shape, view.dtype) == (PARAMETERS[name].shape, PARAMETERS[name].dtype)
            assert (view.data_ptr() - bucket.flat.data_ptr()) % 64 == 0 or not view.numel()
            view.fill_(1.0)
        assert bucket.flat.sum() == sum(view.numel() for view in bucket.views.values())
    assert [len(bucket.views) for bucket in buckets] == {1: [1] * 6, 100: [4, 1, 1], 2**20: [5, 1]}[limit]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_parts_of_all_processes_are_everything_once(processes: int) -> None:
    for bucket in Buckets(PARAMETERS, processes, 2**20):
        size = bucket.flat.numel() // processes
        for name, view in bucket.views.items():
            parts = [bucket.slice_of(name, rank * size, (rank + 1) * size) for rank in range(processes)]
            assert [index for begin, end in parts for index in range(begin, end)] == list(range(view.numel()))


def test_groups_have_one_dtype_and_keep_the_order() -> None:
    assert list(grouped(PARAMETERS, 92)) == [["a", "b", "empty", "scalar"], ["c"], ["half"]]
    assert list(grouped({}, 92)) == []
