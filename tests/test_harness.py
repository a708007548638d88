"""Which tests the commands choose, what their page says, and what is measured: ``tests/harness``."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .harness import choose, import_map, record, report
from .harness.choose import Affected, Measured
from .harness.import_map import PACKAGE, ROOT, TESTS

LARGE = [f"tests/test_a.py::test_large[{number}]" for number in range(40)]
SMALL = [f"tests/test_a.py::test_small[{number}]" for number in range(40)]
ALL = [*LARGE, *SMALL, "tests/test_b.py::test_one", "tests/test_c.py::test_few[x]", "tests/test_c.py::test_few[y]"]
MEASURED = Measured(
    large={"tests/test_a.py::test_large": 60.0, "tests/test_c.py::test_few": 2.0},
    always=frozenset(LARGE[:1]),
    reach={"ort_trainer/optim/rules/adam.py": [LARGE[7], "tests/test_b.py::test_one"]},
)


def test_the_gate_samples_large_parametrizations_alone() -> None:
    runs = [choose.gate(ALL, str(seed), MEASURED) for seed in range(30)]
    for chosen in runs:
        assert chosen == [test for test in ALL if test in chosen]
        assert {choose.function_of(test) for test in chosen} == {choose.function_of(test) for test in ALL}
        assert {*SMALL, LARGE[0], "tests/test_b.py::test_one"} <= set(chosen)
        assert 1 <= len([test for test in chosen if "large" in test]) < 25
    assert len(set(map(tuple, runs))) > 20 and choose.gate(ALL, "1", MEASURED) == runs[1]
    # A week of commits runs them all.
    assert set().union(*runs) == set(ALL)


def test_quick_runs_what_reaches_a_change_first_and_then_one_case_of_each_function() -> None:
    affected = Affected.by(["ort_trainer/optim/rules/adam.py"], [SMALL[3]], MEASURED)
    chosen = affected.chosen(ALL, "1", MEASURED)
    certain = {LARGE[7], "tests/test_b.py::test_one", SMALL[3]}
    assert set(chosen[:3]) == certain and {choose.function_of(test) for test in ALL} == set(
        map(choose.function_of, chosen)
    )
    assert len(chosen) <= len(certain) + 4
    assert all(affected.is_certain(test) == (test in certain) for test in ALL)
    assert Affected.from_text(affected.to_text()) == affected
    # What the stock engine is asked: nothing beside it, and what is there no more is left out.
    assert Affected(frozenset([LARGE[7], "tests/gone.py::test_x"]), fills=False).chosen(ALL, "1", MEASURED) == [
        LARGE[7]
    ]


def test_near_files_come_first() -> None:
    affected = Affected(frozenset(), distance={"tests/test_c.py": 2, "tests/test_b.py": 1})
    files = [test.partition("::")[0] for test in affected.chosen(ALL, "1", MEASURED)]
    assert list(dict.fromkeys(files)) == ["tests/test_b.py", "tests/test_c.py", "tests/test_a.py"]


@pytest.mark.parametrize(
    ("changed", "certain"),
    [
        ("tests/test_a.py", "tests/test_a.py::test_small[1]"),
        ("docs/names.md", "tests/test_docs.py::test_links_resolve[names.md]"),
        ("schemas/trainer_options.json", "tests/options/test_options.py::test_x"),
        ("examples/digits.py", "tests/test_examples.py::test_digits"),
        ("examples/browser/page.js", ""),
    ],
)
def test_changes_beside_the_package(changed: str, certain: str) -> None:
    affected = Affected.by([changed], [], MEASURED)
    assert affected.is_certain(certain) == bool(certain) and not affected.is_certain("tests/test_b.py::test_one")


def test_everything_at_the_top_is_known_to_affect_something_or_nothing() -> None:
    known = {"ort_trainer", "tests", "LICENSE", ".gitignore", "build", "out", "dist", *choose._BESIDE}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") or path.name == ".ci"}
    assert found <= known | {name for name in found if name.endswith((".log", ".egg-info"))}
    for tests in choose._BESIDE.values():
        assert all((ROOT / name).exists() for name in tests)


def test_imports_lead_to_the_file_that_defines_a_name() -> None:
    here = import_map.imported(Path(__file__))
    assert TESTS / "harness" / "choose.py" in here and TESTS / "harness" / "__init__.py" not in here
    trainer = import_map.imported(PACKAGE / "trainer.py")
    # By way of lazy names, and not what only type checkers import.
    assert PACKAGE / "options" / "trainer_options.py" in trainer
    rules = import_map.imported(PACKAGE / "optim" / "rules" / "__init__.py")
    assert {PACKAGE / "optim" / "rules" / name for name in ("adam.py", "lamb.py", "lion.py", "sgd.py")} <= rules
    assert PACKAGE / "trainer.py" not in import_map.imported(PACKAGE / "runs" / "manager.py")


def test_dependents_have_their_distance() -> None:
    adam, trainer = PACKAGE / "optim" / "rules" / "adam.py", PACKAGE / "trainer.py"
    found = import_map.dependents([adam], import_map.FILES)
    assert found[adam] == 0 and found[PACKAGE / "optim" / "rules" / "__init__.py"] == 1 and found[trainer] > 1
    assert PACKAGE / "errors.py" not in found and adam in import_map.closure([trainer])


def test_what_was_measured_is_of_these_tests() -> None:
    """A little of it may be old; where this fails, ``make reach`` measures anew."""
    measured = Measured.read()
    tests = {*measured.always, *measured.large}.union(*measured.reach.values(), *measured.reach_on_stock.values())
    functions = {choose.function_of(test) for test in tests}
    known = {f"{p.relative_to(ROOT)}::{node.name}" for p in TESTS.rglob("test_*.py") for node in _functions(p)}
    assert len(functions - known) <= 0.05 * len(functions), sorted(functions - known)
    files = {str(path.relative_to(ROOT)) for path in import_map.FILES}
    assert len(measured.reach.keys() & files) >= 0.8 * len(files), sorted(files - measured.reach.keys())


def _functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(import_map.tree(path)) if isinstance(node, ast.FunctionDef)]


def costs(test: str, outcome: str = "passed", **more: Any) -> dict[str, Any]:
    return {**dict.fromkeys(report._COSTS, 1), "test": test, "outcome": outcome, **more}


def test_the_page_says_what_ran_and_how_a_failure_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "tests.jsonl"
    lines = [costs("a.py::t"), costs("a.py::u[x]", "failed"), costs("b.py::v", "skipped", reason="Skipped: no time")]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    ended = [report.Ended("ruff", 0, 1.0, None, False), report.Ended("tests on stock", 1, 2.0, path, True)]
    page = report.page("gate", ended, "abc")
    assert "PYTHONPATH=.stock .venv/bin/python -m pytest 'a.py::u[x]'" in page and "SEED=abc" in page
    assert "| tests on stock | failed | 2 s | 1 | 1 | 1 |" in page and "| 1 | tests on stock | no time |" in page
    assert "FAILED ruff" in report.page("gate", [report.Ended("ruff", 1, 1.0, None, False)], "")


@pytest.mark.parametrize(
    ("seconds", "mark", "outcome"), [(29, "", "passed"), (31, "", "failed"), (31, "slow", "passed")]
)
def test_a_long_test_asks_to_be_marked(
    seconds: float, mark: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = record.Recorder(tmp_path / "tests.jsonl", True, record.LIMIT)
    item: Any = SimpleNamespace(nodeid="a.py::t", stash={}, get_closest_marker=lambda name: name == mark or None)
    monkeypatch.setattr(record, "_children", lambda: 0.0)
    drive(recorder.pytest_runtest_setup(item), None)
    monkeypatch.setattr(record, "_children", lambda: float(seconds))
    result: Any = SimpleNamespace(nodeid="a.py::t", passed=True, outcome="passed", longrepr=None)
    made = drive(recorder.pytest_runtest_makereport(item, SimpleNamespace(when="teardown")), result)  # type: ignore[arg-type]
    assert made.outcome == outcome and made.costs["children"] == seconds
    assert (
        outcome == "passed" or "took 31 s of a processor, and 30 are allowed: make it smaller, or mark" in made.longrepr
    )


def drive(wrapper: Any, result: Any) -> Any:
    """Runs a hook around what gives a result."""
    next(wrapper)
    try:
        wrapper.send(result)
    except StopIteration as end:
        return end.value
    raise AssertionError("the hook goes on")


def test_calls_within_a_measured_call_count_for_the_inner_one(tmp_path: Path) -> None:
    recorder = record.Recorder(tmp_path / "tests.jsonl", False, record.LIMIT)
    owner = SimpleNamespace(outer=lambda: owner.inner(), inner=lambda: 3)
    recorder.measure(owner, "outer", "steps")
    recorder.measure(owner, "inner", "exports")
    assert owner.outer() == 3 and owner.inner() == 3
    now = recorder._now()
    assert (now["steps_count"], now["exports_count"]) == (1, 2) and now["steps"] >= 0
