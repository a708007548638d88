"""PyTorch models that torch.onnx exported train as the originals do; ``make onnx-round-trips`` tries more opsets."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...fidelity.case import Case
from .round_trips import CASES, round_trip

pytestmark = pytest.mark.engine


# One that takes more than a minute.
SLOW = ("BART", "newer")


@pytest.mark.parametrize(
    ("case", "exporter", "opset"),
    [
        pytest.param(
            case, *how, id=f"{name}-{how[0]}-{how[1]}", marks=[pytest.mark.slow] if (name, how[0]) == SLOW else []
        )
        for how in (("older", 17), ("newer", 18))
        for name, case in CASES.items()
    ],
)
def test_round_trip(case: Case, exporter: str, opset: int, tmp_path: Path) -> None:
    found = round_trip(case, exporter, opset, tmp_path / "m.onnx")
    if isinstance(found, str):
        pytest.skip(f"torch.onnx can't export it: {found}")
    assert found.loss <= 1 and found.weights <= 1, found
    assert not found.lost
    assert found.exports <= case.exports
