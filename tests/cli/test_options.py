"""ort-trainer options: the table, a section, one option, and near misses."""

from __future__ import annotations

import json
import sys

import pytest

from ort_trainer.options.checks import SPELLINGS

from ..test_bad_input import OPTIONS
from .conftest import Run


def test_the_table_has_every_option(run: Run) -> None:
    code, out, _ = run("options")
    assert code == 0 and out[0].split() == ["option", "default", "state", "type", "allowed"]
    assert [line.split()[0] for line in out[1:]] == [
        option["key"] for option in json.loads("\n".join(run("options", "--json")[1]))
    ]
    assert {line.split()[0] for line in out[1:]} == set(OPTIONS)


def test_lines_fit_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, run("options")[1])) > 80
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = run("options")[1]
    assert max(map(len, lines)) == 80 and any(line.endswith("...") for line in lines)


def test_one_option(run: Run) -> None:
    code, out, _ = run("options", "batch.gradient_reduction")
    assert code == 0 and out[0] == "batch.gradient_reduction"
    assert [line.split(maxsplit=1) for line in out[1:5]] == [
        ["type", "string"],
        ["default", "'mean'"],
        ["allowed", "mean, sum, weighted"],
        ["state", "works"],
    ]
    assert "How the gradients of an accumulation window are combined" in out[6]
    (found,) = json.loads("\n".join(run("options", "--json", "batch.gradient_accumulation_steps")[1]))
    assert (found["default"], found["allowed"]) == (1, ["at least 1"])


def test_a_section_and_another_spelling(run: Run) -> None:
    code, out, _ = run("options", "device")
    assert code == 0 and [line.split()[0] for line in out[1:]] == ["device.id", "device.mem_limit"]
    for spelling, key in SPELLINGS.items():
        assert run("options", spelling)[1][0] == key


def test_near_misses(run: Run) -> None:
    for given, meant in (
        ("utils.kernals", "utils.kernels"),
        ("kernels", "utils.kernels"),
        ("max_grad_norm", "utils.max_grad_norm"),
        ("mixed_precision.enable", "mixed_precision.enabled"),
    ):
        code, out, err = run("options", given)
        assert code == 2 and not out and f"unknown option {given!r} (did you mean " in err[0] and meant in err[0]
    assert "lists all options" in run("options", "xyzzy")[2][0]
