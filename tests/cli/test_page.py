"""docs/command_line.md: its commands print the output shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from .conftest import Run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "command_line.md"


def printed(page: str, run: Run) -> str:
    """Returns the page with the current output of its commands."""

    def again(block: re.Match[str]) -> str:
        commands = re.findall(r"^\$ ort-trainer (.*)$", block[1], re.MULTILINE)
        lines = []
        for command in commands:
            _, out, err = run(*shlex.split(command))
            lines += [f"$ ort-trainer {command}", *out, *err]
        return "```\n" + "\n".join(lines) + "\n```"

    return re.sub(r"^```\n(\$ .*?)\n```$", again, page, flags=re.DOTALL | re.MULTILINE)


def without_sizes(page: str) -> str:
    """Removes what depends on the versions of torch and onnx, including column widths."""
    return re.sub(" +", " ", re.sub(r"\d[\d.]* (kB|bytes)", "SIZE", page))


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    torch.manual_seed(0)
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(program, PAGE.name, "exec"), {"__name__": "page"})
    assert without_sizes(printed(text, run)) == without_sizes(text)
