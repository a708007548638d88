"""``tests/harness``: which tests the commands select, their report, and their measurements."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from . import processes
from .harness import choose, contexts, import_map, record, report
from .harness.choose import Affected, Measured
from .harness.import_map import PACKAGE, ROOT, TESTS
from .harness.step import STOCK, Step, pytest_step

LONG = [f"tests/test_a.py::test_long[{number}]" for number in range(40)]
SHORT = [f"tests/test_a.py::test_short[{number}]" for number in range(40)]
ALL = [*LONG, *SHORT, "tests/test_b.py::test_one", "tests/test_c.py::test_few[x]", "tests/test_c.py::test_few[y]"]
MEASURED = Measured(
    seconds={"tests/test_a.py::test_long": 4.0},
    reach={"ort_trainer/optim/rules/adam.py": [LONG[7], "tests/test_b.py::test_one"]},
)


def test_the_gate_draws_long_tests_by_lot() -> None:
    runs = [choose.gate(ALL, str(seed), MEASURED) for seed in range(60)]
    for chosen in runs:
        assert chosen == [test for test in ALL if test in chosen]
        assert {*SHORT, "tests/test_b.py::test_one"} <= set(chosen)
    assert len(set(map(tuple, runs))) > 40 and choose.gate(ALL, "1", MEASURED) == runs[1]
    assert set().union(*runs) == set(ALL)
    share = sum(len(set(chosen) & set(LONG)) for chosen in runs) / (len(runs) * len(LONG))
    assert share == pytest.approx(choose.LOT / 2, rel=0.15)


def test_the_gate_runs_what_a_change_certainly_affects() -> None:
    affected = Affected.by(["ort_trainer/optim/rules/adam.py"], [], MEASURED)
    for seed in range(9):
        assert LONG[7] in choose.gate(ALL, str(seed), MEASURED, affected.certain)


def test_recent_changes_are_those_of_a_day_before_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choose, "ROOT", tmp_path)
    assert choose.recent_base() == ""
    for command in ("init -q", "config user.name x", "config user.email x"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    commits = []
    for hours, base in ((0, None), (20, None), (30, 0), (50, 1)):
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"@{1_000_000_000 + hours * 3600} +0000")
        subprocess.run(["git", "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
        commits.append(choose.commit())
        assert choose.recent_base() == ("" if base is None else commits[base])
    monkeypatch.setenv("PATH", "")
    assert choose.recent_base() == ""


def test_quick_runs_what_reaches_a_change_first_and_then_one_case_of_each_function() -> None:
    affected = Affected.by(["ort_trainer/optim/rules/adam.py"], [SHORT[3]], MEASURED)
    chosen = affected.chosen(ALL, "1", MEASURED)
    certain = {LONG[7], "tests/test_b.py::test_one", SHORT[3]}
    assert set(chosen[:3]) == certain and {choose.function_of(test) for test in ALL} == set(
        map(choose.function_of, chosen)
    )
    assert len(chosen) <= len(certain) + 4
    assert chosen[0] == SHORT[3]
    assert all((affected.rank(test) < 2) == (test in certain) for test in ALL)
    # The stock engine runs only its own tests, without tests that no longer exist.
    assert Affected(frozenset([LONG[7], "tests/gone.py::test_x"]), fills=False).chosen(ALL, "1", MEASURED) == [LONG[7]]


def test_near_files_come_first() -> None:
    affected = Affected(frozenset(), distance={"tests/test_c.py": 2, "tests/test_b.py": 1})
    files = [test.partition("::")[0] for test in affected.chosen(ALL, "1", MEASURED)]
    assert list(dict.fromkeys(files)) == ["tests/test_b.py", "tests/test_c.py", "tests/test_a.py"]


@pytest.mark.parametrize(
    ("changed", "certain"),
    [
        ("tests/test_a.py", "tests/test_a.py::test_short[1]"),
        ("docs/reference/names.md", "tests/test_docs.py::test_links_resolve[docs/reference/names.md]"),
        ("schemas/trainer_options.json", "tests/options/test_options.py::test_x"),
        ("examples/digits.py", "tests/test_examples.py::test_digits"),
        ("examples/browser/page.js", ""),
    ],
)
def test_changes_beside_the_package(changed: str, certain: str) -> None:
    affected = Affected.by([changed], [], MEASURED)
    assert (affected.rank(certain) == 1) == bool(certain) and affected.rank("tests/test_b.py::test_one") == 2


def test_a_commit_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="git diff --name-only --no-renames nosuch --: fatal: bad revision 'nosuch'"):
        choose.changed_files("nosuch")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="git is needed"):
        choose.changed_files("nosuch")
    assert choose.commit() == ""


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
    # Through lazy names, but without imports for type checkers only.
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
    """A small part may be outdated; if this fails, run ``make reach`` to measure again."""
    measured = Measured.read()
    tests = set(measured.seconds).union(*measured.reach.values(), *measured.reach_on_stock.values())
    functions = {choose.function_of(test) for test in tests}
    known = {f"{p.relative_to(ROOT)}::{node.name}" for p in TESTS.rglob("test_*.py") for node in _functions(p)}
    assert len(functions - known) <= 0.05 * len(functions), sorted(functions - known)
    files = {str(path.relative_to(ROOT)) for path in import_map.FILES}
    assert len(measured.reach.keys() & files) >= 0.7 * len(files), sorted(files - measured.reach.keys())


def _functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(import_map.tree(path)) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("file", ["noxfile.py", "tests/wheel.sh"])
def test_what_runs_on_other_versions_and_on_the_wheel_is_there(file: str) -> None:
    named = re.findall(r"^ +\"?(tests/[\w/.:]+)\"?,?$", (ROOT / file).read_text(), re.MULTILINE)
    assert len(named) > 5
    for path, _, function in (test.partition("::") for test in named):
        assert (ROOT / path).exists() and (
            not function or function in {node.name for node in _functions(ROOT / path)}
        ), f"{path}::{function}"


def test_other_versions_enter_every_room() -> None:
    """A version may lack a name that one room calls: data parallel training once did not start with torch 2.12."""
    entered = set(re.findall(r"^ +\"(tests/\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    rooms = {f"tests/{path.relative_to(TESTS).parts[0]}" for path in TESTS.rglob("*/test_*.py")}
    # Both look for new faults, and take long.
    assert rooms - entered == {"tests/fuzz", "tests/torture"}


@pytest.mark.parametrize("phase", ["", " (setup)", " (call)", " (teardown)"])
def test_a_context_is_the_whole_name_of_a_test(phase: str) -> None:
    test = "tests/a.py::test_convolution[(2, 4), (8, 2)]"
    assert contexts.without_phase(test + phase) == test


def costs(test: str, outcome: str = "passed", **more: Any) -> dict[str, Any]:
    return {"seconds": 1, "test": test, "outcome": outcome, **more}


def test_the_page_says_what_ran_and_how_a_failure_is_repeated(tmp_path: Path) -> None:
    linter = Step("ruff", ("ruff", "check", "."))
    step = pytest_step(tmp_path, "tests on stock", "--gate", isolated=True, environment=STOCK)
    lines = [costs("a.py::t"), costs("a.py::u['x']", "failed"), costs("b.py::v", "skipped", reason="Skipped: no time")]
    step.file("jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = report.page("gate", [replace(linter, seconds=1.0), replace(step, code=1, seconds=2.0)], "abc")
    repeats = page.partition("FAILED a.py::u['x']\n  ")[2].partition("\n")[0]
    assert shlex.split(repeats)[-1] == "a.py::u['x']" and "--isolated" in repeats and "--gate" not in repeats
    assert repeats.startswith(f"PYTHONPATH={ROOT / '.stock'}") and "SEED=abc" in page
    assert "| tests on stock | failed | 2 s | 1 | 1 | 1 |" in page and "| 1 | tests on stock | no time |" in page
    assert "FAILED ruff: exit code 1\n  ruff check ." in report.page("gate", [replace(linter, code=1)], "")
    skipped = report.page("gate", [replace(linter, seconds=1.0, skipped="there is none")], "")
    assert "| ruff | skipped | 1 s |" in skipped and "| all | ruff | there is none |" in skipped


def test_measured_tests_may_all_be_gone(tmp_path: Path) -> None:
    ended = [replace(pytest_step(tmp_path, "tests", may_be_empty=empty), code=5) for empty in (True, False)]
    assert [one.failed for one in ended] == [False, True]
    assert "run `make reach` to measure again" in report.page("quick", ended[:1], "")


def test_a_step_that_ran_no_test_has_failed(tmp_path: Path) -> None:
    step = pytest_step(tmp_path, "tests")
    assert not replace(step).failed
    step.file("jsonl").write_text(json.dumps(costs("a.py::t", "skipped", reason="no time")))
    assert step.failed and "FAILED tests: it ran no test" in report.page("quick", [step], "")


def test_a_test_that_takes_its_worker_along_is_on_the_page(tmp_path: Path) -> None:
    step = pytest_step(tmp_path, "tests")
    recorder = record.Recorder(step.file("jsonl"), True, record.LIMIT)
    recorder.pytest_runtest_logreport(SimpleNamespace(nodeid="a.py::t", when="???", skipped=False, failed=True))
    assert "FAILED a.py::t\n" in report.page("gate", [replace(step, code=1)], "")


@pytest.mark.parametrize(
    ("seconds", "mark", "outcome"), [(119, "", "passed"), (121, "", "failed"), (121, "slow", "passed")]
)
def test_a_long_test_asks_to_be_marked(
    seconds: float, mark: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = record.Recorder(tmp_path / "tests.jsonl", True, record.LIMIT)
    item: Any = SimpleNamespace(nodeid="a.py::t", stash={}, get_closest_marker=lambda name: name == mark or None)
    drive(recorder.pytest_runtest_setup(item), None)
    monkeypatch.setattr(processes, "processor_seconds", processes.processor_seconds + seconds)
    result: Any = SimpleNamespace(nodeid="a.py::t", passed=True, outcome="passed", longrepr=None)
    made = drive(recorder.pytest_runtest_makereport(item, SimpleNamespace(when="teardown")), result)
    assert made.outcome == outcome and made.costs["slow"] == bool(mark)
    assert (
        outcome == "passed"
        or "took 121 s of CPU time, but at most 120 s are allowed: make it smaller, or mark" in made.longrepr
    )


def drive(wrapper: Any, result: Any) -> Any:
    """Runs a hook wrapper around a given result."""
    next(wrapper)
    try:
        wrapper.send(result)
    except StopIteration as end:
        return end.value
    raise AssertionError("the hook did not return")
