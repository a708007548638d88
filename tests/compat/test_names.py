"""docs/reference/names.md has every name of the legacy documentation, and every row is true."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ort_trainer import ORTTrainerOptions, compat
from ort_trainer.compat.options import ORTTrainerOptions as OldOptions
from ort_trainer.options.schema import leaves, load_schema

from ..helpers import resolve
from .effects import nested

HERE = Path(__file__).parent
PAGE = (HERE.parent.parent / "docs" / "reference" / "names.md").read_text()
DOCUMENTED = (HERE / "documented_names.txt").read_text().split()
ROW = re.compile(r"^\| `([^`]+)` \| (?:`([^`]+)`)? ?\| (.+) \|$", re.MULTILINE)
BINDINGS = "onnxruntime.capi._pybind_state."
RULES = dict(leaves(load_schema("trainer_options")))
SESSIONS = "## onnxruntime.TrainingSession and TrainingParameters"
# (old name, new name, state) of every row; rows whose old name does not start with a module are options.
ROWS: list[tuple[str, str, str]] = ROW.findall(PAGE)
OPTIONS = [row for row in ROWS if not row[0].startswith("onnxruntime.")]
SESSION_NAMES = {old for old, _, _ in ROW.findall(PAGE.partition(SESSIONS)[2])}
NAMES = [row for row in ROWS if row[0].startswith("onnxruntime.") and row[0] not in SESSION_NAMES]
SESSION_ROWS = [row for row in ROWS if row[0] in SESSION_NAMES]

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def test_every_documented_name_has_one_row() -> None:
    names = [old for old, _, _ in ROWS]
    assert sorted(set(DOCUMENTED) - set(names)) == []
    assert len(names) == len(set(names))
    assert len(names) == sum(line.startswith("| `") for line in PAGE.splitlines())  # no row that the pattern misses


def test_states() -> None:
    known = re.compile(r"works|works, differs: .+|refused: .+|refused beyond the default, .+")
    assert [row for row in ROWS if not known.fullmatch(row[2])] == []


# An installed onnxruntime-training keeps its own.
OF_THE_ENGINE = ("onnxruntime.training.PropagateCastOpsStrategy", f"{BINDINGS}GradientGraphBuilder")


def is_ours(theirs: Any, ours: Any, state: str) -> bool:
    """Returns whether an old name leads to our object; if it differs, to one of ours with this name or base."""
    # Built-in methods are bound to a class, and old scripts get a subclass of ours.
    if theirs == ours or (inspect.isbuiltin(theirs) and theirs.__name__ == ours.__name__):
        return True
    if state == "works" or not theirs.__module__.startswith("ort_trainer."):
        return False
    return theirs.__name__ == ours.__name__ or issubclass(theirs, ours)


def test_names() -> None:
    """Each row leads where it says; its objects have tests of their own."""
    for old, new, state in (*NAMES, *SESSION_ROWS):
        if state.startswith("refused:"):
            assert not new, old
            continue
        theirs = resolve(old)
        assert theirs is not None, old
        if new:
            ours = resolve(new)
            assert ours is not None, new
            # Of an argument, only the name counts.
            assert "(" in new or old.startswith(OF_THE_ENGINE) or is_ours(theirs, ours, state), old


# A method in C tells no signature, and a Parameter is only made by a checkpoint.
UNTOLD = (f"{BINDINGS}GradientGraphBuilder", "onnxruntime.training.api.checkpoint_state.Parameter(")
C_SESSION = f"{BINDINGS}TrainingSession("  # in the documentation it has overloads


def test_signatures() -> None:
    """Arguments have the documented names, order and defaults; others need not be given."""
    for line in (HERE / "documented_signatures.txt").read_text().splitlines():
        if line.startswith((*UNTOLD, C_SESSION)):
            continue
        name, _, arguments = line.partition("(")
        found = inspect.signature(resolve(name)).parameters
        ours = {key: entry for key, entry in found.items() if key != "self"}
        theirs = inspect.signature(eval(f"lambda {arguments[:-1]}: None")).parameters
        needed = {key for key, e in ours.items() if e.default is e.empty and e.kind is not e.VAR_KEYWORD}
        if "arg0" in theirs:  # arguments in C have no names
            assert len(needed) <= len(theirs) <= len(ours), name
            continue
        assert [key for key in ours if key in theirs] == list(theirs) and needed <= set(theirs), name
        for key, entry in theirs.items():
            assert ours[key].kind is entry.kind and (ours[key].default or None) == (entry.default or None), name


@pytest.mark.parametrize("row", OPTIONS, ids=[row[0] for row in OPTIONS])
def test_options(row: tuple[str, str, str]) -> None:
    old, new, state = row
    assert bool(new) == (new in RULES)
    value = RULES[new]["default"] if new else True
    given = nested(old, value)
    if new:
        options: Any = OldOptions(given) if old != new else ORTTrainerOptions(given)
        for key in new.split("."):
            options = getattr(options, key)
        if not isinstance(value, dict):
            assert options == (tuple(value) if isinstance(value, list) else value)
    else:
        assert state.startswith("refused:")
        with pytest.raises(ValueError, match="Invalid options: "):
            OldOptions(given)


def test_every_option_has_a_row() -> None:
    assert set(RULES) <= {old for old, _, _ in OPTIONS}


def test_the_migration_page_has_every_defect() -> None:
    page = (HERE.parent.parent / "docs" / "migration.md").read_text()
    rows = re.findall(r"^\| (\d+b?) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert [number for number, *_ in rows] == ["1", "1b", *map(str, range(2, 41))]
    assert all(len(cell) > 3 for row in rows for cell in row[1:])
