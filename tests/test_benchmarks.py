"""What the scripts in benchmarks/ rely on: the names of levers, the protocol of contenders, and the results."""

from __future__ import annotations

import importlib
import logging
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
REWRITES = ROOT / "ort_trainer" / "export" / "torch" / "lower" / "programs" / "rewrites"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def rewrites() -> Iterator[ModuleType]:
    """Yields the script, and restores the package's modules after it has disabled something."""
    kernels = "ort_trainer.kernels.programs"
    names = (f"{kernels}.rewrites", f"{kernels}.encode", "ort_trainer.engine.programs.runner")
    modules = [importlib.import_module(name) for name in names]
    known = [dict(vars(module)) for module in modules]
    yield importlib.import_module("rewrites")
    for module, before in zip(modules, known, strict=True):
        vars(module).update(before)


def test_every_rewrite_is_measured(rewrites: ModuleType) -> None:
    files = {path.name for path in REWRITES.glob("*.py")} - {"__init__.py"}
    titles = " ".join(lever.title for lever in rewrites.LEVERS.values())
    assert files == {name for name in files if f"`{name}`" in titles}


def test_every_lever_can_be_switched_off(rewrites: ModuleType) -> None:
    for lever in rewrites.LEVERS.values():
        assert (lever.switch_off is None) == bool(lever.utils)
        if lever.switch_off is not None:
            lever.switch_off()
    package = importlib.import_module("ort_trainer.kernels.programs.rewrites")
    assert package._REWRITES == ()


def test_a_lever_that_has_gone_is_noticed(rewrites: ModuleType) -> None:
    with pytest.raises(AttributeError, match="fuse_everything"):
        rewrites.leave_out("fuse_everything")


SCRIPT = """
    import sys
    sys.path.insert(0, {folder!r})
    from turns import Training, serve
    left = 20.0
    def step():
        global left
        print("something that a library prints")
        left -= 1
        if left < {end}:
            raise ValueError("no more steps")
        return left
    serve(lambda: Training(step))
"""


def contender(turns: ModuleType, end: int) -> Any:
    script = textwrap.dedent(SCRIPT).format(folder=str(ROOT / "benchmarks"), end=end)
    return turns.Contender((sys.executable, "-c", script))


def test_contenders_take_turns_and_one_may_die() -> None:
    turns = importlib.import_module("turns")
    contenders = {"lives": contender(turns, 0), "dies": contender(turns, 12), "never lives": contender(turns, 30)}
    results, died = turns.measure(contenders, steps=3, rounds=2, profiled=1)
    assert list(results) == ["lives"]
    assert died == {"dies": "ValueError: no more steps", "never lives": "ValueError: no more steps"}
    result = results["lives"]
    assert [len(part) for part in result.rounds] == [3, 3] and len(result.starts) == 2
    assert result.losses == [19.0, 17.0, 14.0, 11.0] and result.peak > 0 and result.profile is None


def test_nothing_is_measured_without_the_one_to_compare_with() -> None:
    turns = importlib.import_module("turns")
    with pytest.raises(SystemExit, match="dies died, which the others are compared with"):
        turns.measure({"lives": contender(turns, 0), "dies": contender(turns, 12)}, 3, 2, needed="dies")


LAUNCHER = """
    import os, sys, time
    sys.path.insert(0, {folder!r})
    from ranks import launch
    from turns import Training, serve
    if "RANK" not in os.environ:
        launch((sys.executable, *sys.orig_argv[1:]), 2)
        sys.exit()
    def step():
        if os.environ["RANK"] == {failing!r}:
            raise ValueError("a rank has enough")
        if {failing!r}:
            time.sleep(600)  # as one does that waits for the other
        return float(os.environ["WORLD_SIZE"])
    serve(lambda: Training(step))
"""


@pytest.mark.parametrize("failing", ["0", "1", ""])
def test_ranks_do_the_same_and_end_together(failing: str) -> None:
    turns = importlib.import_module("turns")
    script = textwrap.dedent(LAUNCHER).format(folder=str(ROOT / "benchmarks"), failing=failing)
    contenders = {"ranks": turns.Contender((sys.executable, "-c", script))}
    results, died = turns.measure(contenders, steps=2, rounds=1)
    if failing:
        assert not results and died == {"ranks": "ValueError: a rank has enough"}
    else:
        assert results["ranks"].losses == [2.0, 2.0, 2.0] and not died


@pytest.mark.slow
def test_what_two_processes_send_and_wait_for(tmp_path: Path) -> None:
    turns, script = importlib.import_module("turns"), importlib.import_module("data_parallel")
    names = (script.OURS, script.DDP)
    contenders = {name: script.contender(name, "mlp", str(tmp_path)) for name in (*names, script.SURVEY)}
    results, died = turns.measure(contenders, steps=2, rounds=1, starts=1, profiled=3)
    survey = results.pop(script.SURVEY).profile
    assert not died and not script.differing("mlp", results)
    for name in names:
        found = results[name].profile
        gradients = 4 * (784 * 512 + 512 + 512 * 10 + 10)
        assert found["gradients"] == gradients and len(found["sent"]) == 2
        # Each of two processes sends the gradients once, and some messages.
        assert all(1 < sent / gradients < 1.05 for sent in found["sent"])
    ours = results[script.OURS].profile
    assert 0 < ours["reduce"] < ours["step"] and ours["messages"] > 0 and ours["wait"] >= 0
    fit, line = script.fitted(2, survey["all_reduces"])
    sent = script.sent_lines(2, survey["sent"])
    assert set(survey["sent"]) == set(script.SENT)
    assert all(0.99 < float(line.split("**")[1]) < 1.05 for line in sent)
    for lines, head in (
        (script.step_lines("mlp", results), script.STEP_HEAD),
        (script.waiting_lines("mlp", results, fit), script.WAITING_HEAD),
        (sent, script.SENT_HEAD),
        ([line], script.FIT_HEAD),
    ):
        assert lines and {line.count("|") for line in (*lines, *head)} == {head[1].count("|")}


def test_all_reduces_give_back_what_they_were_made_of() -> None:
    model = importlib.import_module("scaling_model")
    assert model.ring(4, 1e9, 2e9) == 0.75 and model.ring(4, 0, 2e9, 1e-5, calls=3) == pytest.approx(1.8e-4)
    made = [(nbytes, model.ring(4, nbytes, 2e9, 1e-5)) for nbytes in (1e4, 1e6, 1e8)]
    assert model.fit_ring(4, made) == pytest.approx((2e9, 1e-5))
    # A machine has only one internal network, and a single GPU exchanges nothing.
    inside = model.ring(8, 1e9, model.REACHED * model.INFINIBAND.within, model.INFINIBAND.latency_within)
    assert model.all_reduce(model.INFINIBAND, 8, 1e9) == pytest.approx(inside)
    assert model.all_reduce(model.INFINIBAND, 1, 1e9) == 0


def test_the_planning_page_has_what_the_script_says() -> None:
    model, sections = importlib.import_module("scaling_model"), importlib.import_module("sections")
    for name, table in model.TABLES.items():
        assert sections.read_section(model.PAGE, name).splitlines()[1:-1] == table()


def test_a_release_adds_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, turns, speed = (importlib.import_module(name) for name in ("train_step", "turns", "speed"))
    monkeypatch.setattr(script, "RESULTS", tmp_path)

    def result(seconds: float) -> Any:
        return turns.Result(starts=[3.0, 1.0], rounds=[[seconds] * 3] * 3, losses=[2.0, 1.0], peak=100.0)

    found = {"eager": result(4e-3), "compile": result(2e-3), "ort_trainer": result(1e-3)}
    rows = {name: script.figures(script.ROWS[name], found, {"ORTModule": "why"}) for name in ("mlp", "bert")}
    script.write_results("here", {"bert": rows["bert"]})
    (tmp_path / "0.1.0.json").write_text(next(tmp_path.glob("*.json")).read_text())
    script.write_results("here", {"mlp": rows["mlp"]})
    later = {"eager": result(6e-3), "ort_trainer, onnxruntime": result(3e-3)}
    script.write_results("here", {"mlp": script.figures(script.ROWS["mlp"], later, {})})
    results = speed.read_results(tmp_path)
    assert next(iter(results)) == "0.1.0" and list(results["0.1.0"]["rows"]) == ["bert"]
    *_, newest = results.values()
    assert list(newest["rows"]) == ["mlp", "bert"] and newest["rows"]["bert"] == rows["bert"]
    assert newest["rows"]["mlp"]["contenders"]["eager"] == rows["mlp"]["contenders"]["eager"]
    assert newest["rows"]["mlp"]["contenders"]["ort_trainer"] == {
        "ms": 1.0, "speed": [4.0, 4.0, 4.0], "MB": 100, "starts": [3.0, 1.0]
    }  # fmt: skip
    drawn = speed.pictures(results)
    assert drawn["releases"].count(">0.1.0<") == 1 and drawn["releases"].count(">4.00<") == 2
    blocks = {name: "\n".join(lines) for name, lines in speed.blocks(results).items()}
    assert "| ort_trainer | **4.00** | 4.00 (MLP) | 4.00 (MLP) | 0 |" in blocks["means"]
    assert "| ONNX Runtime, 1 of them | **2.00** | 2.00 (MLP) |" in blocks["means"]
    assert f"| {rows['bert']['title']} | ORTModule | fails |" in blocks["steps"]
    assert "steps of 2 models are 4.00 times as fast" in blocks["speed"]


def test_only_who_waits_for_a_choice_listens_to_the_log() -> None:
    rows, logger = importlib.import_module("step_rows"), logging.getLogger("ort_trainer")
    level, handlers = logger.level, [*logger.handlers]
    try:
        assert rows.ort_training(rows.ROWS["mlp"]).is_settled()
        assert logger.level == level and logger.handlers == handlers
        waiting = rows.ort_training(rows.ROWS["mlp"], {"kernels": "fastest"})
        assert not waiting.is_settled()
        logger.info("training goes on with one of them")
        assert waiting.is_settled()
    finally:
        logger.setLevel(level)
        logger.handlers = handlers


def test_a_steady_step_keeps_its_way_short() -> None:
    """A higher number here needs a reason; a lower one is the new limit."""
    way = importlib.import_module("way").steady_step().counts
    # One call looks whether a run takes the batch's branches, two more whether inputs can be read by address, and two
    # keep other threads out. Two ask for the unit of a window, and one function checks indices before and after a run.
    # Three ask whether the step is compared with PyTorch.
    assert way["calls"] <= 73, way
    assert way["changes of file"] <= 48, way


def test_an_export_keeps_its_way_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above. The notes of what is read, changed, left, written for people and kept outside, the functions that run,
    the names in code, generators of random numbers, conditions on values, masks of attention, sizes that depend on
    values, and kinds of kernels have stations; programs are divided with a walk that others share; where nodes come
    from, convolutions, rows, and the operators of programs, of which one makes values sizes, have files of their own;
    so have what is watched outside tensors, what is met there, and what is left; and where a line can be redrawn.
    """
    monkeypatch.setenv("ORT_TRAINER_CACHE", "off")
    way = importlib.import_module("way").one_export().counts_of_stations
    assert way["hops"] <= 62, way
    assert way["files"] <= 52, way
