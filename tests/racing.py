"""What tests of ``utils.kernels="fastest"`` share."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux", reason="there is no C++ compiler, or no fork"
)


def fix_race(monkeypatch: pytest.MonkeyPatch, cache: Path, loops_win: bool) -> None:
    """Decides which kernels are chosen, soon: which are faster is not what is tested."""
    monkeypatch.setenv("ORT_TRAINER_CACHE", str(cache))
    monkeypatch.delenv("ORT_TRAINER_EXPORT_IN_PROCESS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr("ort_trainer.export.compile_later._NICENESS", 0)
    if not loops_win:  # then the rival may be anything, and what needs no compiler is ready sooner
        monkeypatch.setattr("ort_trainer.kernels.loops.kind.FastestKernels.rival", "pytorch")
    monkeypatch.setattr("ort_trainer.engine.turns._FASTER", 1e9 if loops_win else 0.0)
    monkeypatch.setattr("ort_trainer.engine.turns._MOST_RUNS", 7)
