"""Trains models that torch.onnx exported, and the originals in PyTorch; writes the table of docs/onnx_models.md.

python benchmarks/onnx_round_trips.py            all, and writes
python benchmarks/onnx_round_trips.py --only GRU prints those whose names match
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import onnx
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.onnx.round_trips import CASES, EXPORTERS, round_trip  # noqa: E402

PAGE = ROOT / "docs" / "onnx_models.md"
MARKS = ("<!-- make onnx-round-trips: generated -->", "<!-- end of onnx-round-trips -->")


def cell(found: object) -> str:
    """Returns what a table shows of a result."""
    if isinstance(found, str):
        return "not exported"
    right = found.loss <= 1 and found.weights <= 1 and not found.lost  # type: ignore[attr-defined]
    return f"{max(found.loss, found.weights):.1g}" if right else f"**wrong**: {found}"  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="a pattern for names")
    arguments = parser.parse_args()
    columns = [f"{exporter}, {opset}" for exporter, opset in EXPORTERS]
    lines = [f"torch {torch.__version__}, onnx {onnx.__version__}.", "", f"| | {' | '.join(columns)} |"]
    lines.append("|---|" + "---|" * len(columns))
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if re.search(arguments.only, name):
                cells = [cell(round_trip(case, *exporter, Path(folder) / "m.onnx")) for exporter in EXPORTERS]
                lines.append(f"| {name} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    if not arguments.only:
        before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        PAGE.write_text("\n".join([before + MARKS[0], *lines, MARKS[1] + after]), encoding="utf-8")


if __name__ == "__main__":
    main()
