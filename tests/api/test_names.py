"""docs/reference/training_api_names.md lists every documented name of C, C++ and Python, and every row is true."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ort_trainer import api, compat

from ..helpers import resolve

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = (ROOT / "docs" / "reference" / "training_api_names.md").read_text()
# (documented name, our name, description).
ROWS: list[tuple[str, str, str]] = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| (.+) \|$", PAGE, re.MULTILINE)
DOCUMENTED = {
    "c_functions": 31 + 1 + 2,
    "cpp_methods": 16 + 7,
    "python_names": 54,
}

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def test_every_documented_name_has_one_row() -> None:
    names = [old for old, _, _ in ROWS]
    documented = []
    for kind, count in DOCUMENTED.items():
        lines = (HERE / f"documented_{kind}.txt").read_text().splitlines()
        assert len(lines) == count
        documented += lines
    assert names == documented
    assert len(names) == len(set(names)) == sum(line.startswith("| `") for line in PAGE.splitlines())


def test_the_headers_have_every_name() -> None:
    include = ROOT / "c" / "include"
    for kind, header in (("c_functions", "ort_trainer_c_api.h"), ("cpp_methods", "ort_trainer_cxx_api.h")):
        text = (include / header).read_text()
        names = (HERE / f"documented_{kind}.txt").read_text().splitlines()
        assert [name for name in names if not has(text, name.rpartition("::")[2])] == []


def has(text: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("program", ["examples/c/digits.c", "examples/cpp/digits.cc", "c/test/test.cc"])
def test_programs_compile_under_the_documented_headers(program: str) -> None:
    text = (ROOT / program).read_text()
    assert re.search(r'#include "onnxruntime_training_(c|cxx)_api.h"', text)
    command = ["gcc", "-std=c11"] if program.endswith(".c") else ["g++", "-std=c++17"]
    subprocess.run(
        [*command, "-fsyntax-only", "-Werror", "-Wall", "-I", ROOT / "c" / "include", ROOT / program], check=True
    )


def test_the_names_in_each_language() -> None:
    scripts = [path.read_text() for path in (ROOT / "js" / "src").glob("*.ts")]
    headers = [(ROOT / "c" / "include" / f"ort_trainer_{kind}_api.h").read_text() for kind in ("c", "cxx")]
    table = PAGE.partition("## In each language")[2].partition("\n## ")[0]
    _, *rows = re.findall(r"^\| [a-z][^|]+ \|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$", table, re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        python, script, *native = (re.findall(r"`([^`]+)`", cell) for cell in row)
        assert python
        for name in python:
            assert resolve(f"ort_trainer.api.{name}") is not None
        for name in script:
            kind, _, method = name.rpartition(".")
            begin = rf"export class {kind}\b" if kind else rf"export (async )?function {method}\b"
            (code,) = (code for code in scripts if re.search(begin, code))
            assert not kind or re.search(rf"^  (static )?(async )?{method}\(", code, re.MULTILINE), name
        for header, names in zip(headers, native, strict=True):
            assert [name for name in names if not has(header, name)] == []


def test_names() -> None:
    """Each row leads where it says; its objects have tests of their own."""
    for old, new, said in ROWS:
        found = resolve(new)
        assert found is not None, new
        if old.startswith("onnxruntime.training.api."):
            # The classes of a checkpoint yield pairs there, so they are subclasses of ours.
            assert getattr(resolve(old), "__name__", resolve(old)) == getattr(found, "__name__", found), old
        for call in re.findall(r"(?:session|module|state|CheckpointState)\.(\w+)", said):  # calls in the last column
            assert any(hasattr(cls, call) for cls in (api.TrainingSession, api.Module, api.CheckpointState)), call
