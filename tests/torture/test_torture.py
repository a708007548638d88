"""Runs that are too long for everyday use: `make torture`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..state.test_faults import kill_often
from .test_memory import measure

pytestmark = pytest.mark.torture


def test_three_hundred_kills(tmp_path: Path) -> None:
    assert kill_often(tmp_path, 300) >= 50, "too few kills came in the middle of a save"


@pytest.mark.parametrize(
    ("case", "count", "limit"),
    [
        # 10,000 steps grow by 1 MB at most.
        ("steps", 10_000, 200),
        ("steps, ONNX Runtime's kernels", 10_000, 200),
        ("steps in fp16", 10_000, 200),
        ("steps in fp16, ONNX Runtime's kernels", 10_000, 200),
        # ONNX Runtime's memory plan for a shape takes 6 KB in this small graph, and would be kept for every shape.
        # What a trainer keeps for the last 256 shapes exists after the first half.
        ("shapes", 4_000, 1_500),
        ("shapes, ONNX Runtime's kernels", 4_000, 1_500),
        # The largest of these shapes have large tensors, so memory varies by 14 MB; after 4,200 it stays constant.
        ("texts", 4_000, 8_000),
        ("texts, ONNX Runtime's kernels", 4_000, 8_000),
        # A checkpoint takes 340 KB.
        ("saves", 500, 8_000),
        ("saves in a thread", 500, 8_000),
        ("workers by fork", 100, 20_000),
        ("workers by spawn", 10, 100_000),
    ],
)
def test_memory_does_not_grow(case: str, count: int, limit: int, tmp_path: Path) -> None:
    each, sizes = measure(tmp_path, (case, count))[case]
    assert each <= limit, sizes
