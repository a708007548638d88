"""Common to all commands: one-line errors, pipes, terminals, and an environment without torch."""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ort_trainer import __version__
from ort_trainer.cli import main

from ..api.test_alone import make_environment, run_alone
from .conftest import Run

ROOT = Path(__file__).resolve().parents[2]


def test_usage(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0 and all(any(line.split()[:1] == [name] for line in out) for name in ("inspect", "verify", "env"))
    assert run()[:2] == (code, out)  # without a command it shows what one can do
    code, _, err = run("inspct")
    assert code == 2 and err[-1].endswith("argument COMMAND: unknown 'inspct': did you mean inspect?")
    code, _, err = run("convert", "a", "b", "--to", "nothing")
    assert code == 2 and err[-1].endswith("argument --to: unknown 'nothing': there are api, trainer, upstream, weights")
    assert run("--version")[:2] == (0, [__version__])


def test_the_entry_point_is_there() -> None:
    (place,) = re.findall(r'^ort-trainer = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert importlib.metadata.EntryPoint("ort-trainer", place, "console_scripts").load() is main


def test_as_a_module_with_a_reader_that_leaves() -> None:
    """A terminal without UTF-8 must not cause a failure, although option names don't need UTF-8."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "ort_trainer", "options", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 0


def test_characters_that_the_terminal_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(["inspect", "gewicht-ü"]) == 1
    screen.seek(0)
    assert screen.read() == "error: file 'gewicht-\\xfc' does not exist\n"


@pytest.mark.parametrize(("error", "line"), [(KeyError("x"), "error: KeyError: 'x'"), (OSError("a\nb"), "error: a b")])
def test_errors_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("ort_trainer.options.schema.listed_options", fail)
    assert run("options") == (1, [], [line])


def test_an_interrupt_ends_it_quietly(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ort_trainer.options.schema.listed_options", interrupt)
    assert run("options") == (130, [], [])


ALONE = """
import sys
environment, folder = sys.argv[1:]
sys.path.append(environment)
from ort_trainer.cli import main

assert "numpy" not in sys.modules, "the parser needs nothing"
for arguments in (
    ["inspect", "artifacts/checkpoint"],
    ["inspect", "artifacts"],
    ["inspect", "upstream"],
    ["inspect", "run.ortckpt"],
    ["verify", "run.ortckpt", "artifacts/checkpoint"],
    ["convert", "artifacts/checkpoint", folder + "/again", "--to", "api", "--force"],
    ["convert", "upstream", folder + "/ours", "--like", "artifacts/checkpoint", "--force"],
    ["convert", "artifacts/checkpoint", folder + "/weights", "--to", "weights", "--force"],
):
    assert main(arguments) == 0, arguments
assert "onnxruntime" not in sys.modules, "files are looked into without it"
assert main(["env"]) == 0
assert "torch" not in sys.modules
assert main(["convert", "artifacts/checkpoint", folder + "/trainer", "--to", "trainer"]) == 1
"""


@pytest.mark.engine
def test_without_torch(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = tmp_path / "environment"
    environment.mkdir()
    make_environment(environment)
    for name in ("run.ortckpt", "artifacts", "upstream"):
        (tmp_path / name).symlink_to(files / name)
    said = run_alone(ALONE, environment, tmp_path)
    assert "torch         not installed" in said and "exported artifacts       yes" in said
    assert "PyTorch and ONNX models  no: ModuleNotFoundError: No module named 'torch'" in said
    assert f"{tmp_path / 'weights'}: weights with PyTorch's names (safetensors)" in said
