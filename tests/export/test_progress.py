"""The line on a terminal shows the stages and disappears; elsewhere, only compiling is told."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys

import pytest

from ort_trainer.export.builder import _Progress

SCRIPT = """if True:
    import torch
    from tests.helpers import mlp_batches, mlp_trainer
    mlp_trainer({"utils": {"cache_exports": False}}).prepare(mlp_batches(1)[0])
"""
STAGES = "exporting MLP: capture, differentiate, translate, "


def written(terminal: bool, **environment: str) -> str:
    """Returns what a process writes to its stderr."""
    if not terminal:
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        return done.stderr
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stderr=theirs, env={**os.environ, "ORT_TRAINER_CACHE": "off", **environment}
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return text.decode()


@pytest.mark.parametrize("in_process", ["0", "1"], ids=["child process", "in process"])
def test_on_a_terminal(in_process: str) -> None:
    text = written(True, ORT_TRAINER_EXPORT_IN_PROCESS=in_process)
    lines = text.split("\r")
    assert any(line.startswith("exporting MLP: capture, ") for line in lines)
    assert STAGES in text and re.search(r"(translate|simplify), \d+\.\d s *\r", text)
    assert len(lines[-2]) > len(STAGES) and not lines[-2].strip() and not lines[-1], "the line is erased"
    assert "\n" not in text[text.index("exporting") :]


def test_switched_off() -> None:
    assert "exporting MLP" not in written(True, ORT_TRAINER_PROGRESS="0")


def test_elsewhere_nothing_is_written() -> None:
    assert "exporting" not in written(False)


def test_elsewhere_a_line_says_that_loops_are_compiled(capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(_Progress("MLP")) as progress:
        for stage in ("capture", "differentiate", "compile", "compile"):
            progress.stage(stage)
    assert capfd.readouterr().err == "compiling the loops of MLP: up to half a minute, once per model and machine\n"
