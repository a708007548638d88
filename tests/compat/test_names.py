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
from ort_trainer.options.schema import load_schema

from ..helpers import resolve

HERE = Path(__file__).parent
PAGE = (HERE.parent.parent / "docs" / "reference" / "names.md").read_text()
DOCUMENTED = (HERE / "documented_names.txt").read_text().split()
ROW = re.compile(r"^\| `([^`]+)` \| (?:`([^`]+)`)? ?\| (.+) \|$", re.MULTILINE)
SESSIONS = "## onnxruntime.TrainingSession and TrainingParameters"
# (old name, new name, state) of every row; rows whose old name does not start with a module are options.
ROWS: list[tuple[str, str, str]] = ROW.findall(PAGE)
OPTIONS = [row for row in ROWS if not row[0].startswith("onnxruntime.")]
SESSION_NAMES = {old for old, _, _ in ROW.findall(PAGE.partition(SESSIONS)[2])}
NAMES = [row for row in ROWS if row[0].startswith("onnxruntime.") and row[0] not in SESSION_NAMES]
SESSION_ROWS = [row for row in ROWS if row[0] in SESSION_NAMES]


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def leaves(schema: dict[str, Any], path: str = "") -> dict[str, Any]:
    found = {}
    for key, rules in schema.items():
        here = f"{path}.{key}" if path else key
        nested = rules["type"] == "dict" and "schema" in rules
        found |= leaves(rules["schema"], here) if nested else {here: rules}
    return found


def test_every_documented_name_has_one_row() -> None:
    names = [old for old, _, _ in ROWS]
    assert sorted(set(DOCUMENTED) - set(names)) == []
    assert len(names) == len(set(names))
    assert len(names) == sum(line.startswith("| `") for line in PAGE.splitlines())  # no row that the pattern misses


def test_states() -> None:
    known = re.compile(r"works|works, differs: .+|refused: .+|refused beyond the default, .+")
    assert [row for row in ROWS if not known.fullmatch(row[2])] == []


@pytest.mark.parametrize("row", [*NAMES, *SESSION_ROWS], ids=lambda row: row[0])
def test_names(row: tuple[str, str, str]) -> None:
    old, new, state = row
    if new:
        assert resolve(new) is not None
    if state.startswith("refused:"):
        assert not new
    else:
        assert resolve(old) is not None
    if state == "works" and new and "(" not in new:
        theirs, ours = resolve(old), resolve(new)
        # An installed onnxruntime-training keeps its own enum. Built-in methods are bound to a class, and old scripts
        # get a subclass of ours.
        same = theirs == ours or (inspect.isbuiltin(theirs) and theirs.__name__ == ours.__name__)
        assert same or old.endswith("PropagateCastOpsStrategy")


@pytest.mark.parametrize("row", OPTIONS, ids=[row[0] for row in OPTIONS])
def test_options(row: tuple[str, str, str]) -> None:
    old, new, state = row
    schema = leaves(load_schema("trainer_options"))
    assert bool(new) == (new in schema)
    value = schema[new]["default"] if new else True
    nested: Any = value
    for key in reversed(old.split(".")):
        nested = {key: nested}
    if new:
        options: Any = OldOptions(nested) if old != new else ORTTrainerOptions(nested)
        for key in new.split("."):
            options = getattr(options, key)
        if not isinstance(value, dict):
            assert options == (tuple(value) if isinstance(value, list) else value)
    else:
        assert state.startswith("refused:")
        with pytest.raises(ValueError, match="Invalid options: "):
            OldOptions(nested)


def test_every_option_has_a_row() -> None:
    assert set(leaves(load_schema("trainer_options"))) <= {old for old, _, _ in OPTIONS}


def test_the_migration_page_has_every_defect() -> None:
    page = (HERE.parent.parent / "docs" / "migration.md").read_text()
    rows = re.findall(r"^\| (\d+b?) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert [number for number, *_ in rows] == ["1", "1b", *map(str, range(2, 41))]
    assert all(len(cell) > 3 for row in rows for cell in row[1:])
