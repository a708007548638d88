"""PyTorch models that torch.onnx exported train as the originals do; ``make onnx-round-trips`` tries more opsets."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..fidelity.case import Case
from .round_trips import CASES, round_trip

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("exporter", "opset"), [("older", 17), ("newer", 18)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_round_trip(case: Case, exporter: str, opset: int, tmp_path: Path) -> None:
    found = round_trip(case, exporter, opset, tmp_path / "m.onnx")
    if isinstance(found, str):
        pytest.skip(f"torch.onnx can't export it: {found}")
    assert found.loss <= 1 and found.weights <= 1, found
    assert not found.lost
    assert found.exports <= case.exports
