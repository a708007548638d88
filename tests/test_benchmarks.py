"""What the scripts in benchmarks/ build on: the names of levers, the protocol of contenders, and the charts."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
REWRITES = ROOT / "ort_trainer" / "sources" / "torch" / "kernels" / "rewrites"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def rewrites() -> Iterator[ModuleType]:
    """The script, and the package's modules as they were before it switched something off."""
    kernels = "ort_trainer.sources.torch.kernels"
    names = (f"{kernels}.rewrites", f"{kernels}.encode", "ort_trainer.runtime.aten.runner")
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
    package = importlib.import_module("ort_trainer.sources.torch.kernels.rewrites")
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


def test_charts_are_the_same_for_the_same_numbers(tmp_path: Path) -> None:
    charts = importlib.import_module("charts")
    rows = {"MLP": {"ours": charts.Bar(1.2, 1.1, 1.3), "theirs": charts.Bar(0.8)}, "BERT": {"ours": charts.Bar(1.5)}}
    times = {"milliseconds": 9.0, "products": 5.0, "optimizer": 1.0, "overhead": 2.0}
    profile = {**times, "operators": [("aten.mm", 5.0), ("aten.add", 1.0)]}
    written = []
    for number in range(2):
        ratios, operators = tmp_path / f"{number}" / "ratios.svg", tmp_path / f"{number}" / "operators.svg"
        charts.draw_ratios(ratios, "speed", ("ours", "theirs", "others", "more"), rows)
        charts.draw_operators(operators, {"BERT": profile})
        written.append((ratios.read_text(), operators.read_text()))
    assert written[0] == written[1]
    for text in written[0]:
        assert len(text) < 40_000 and "fill: #ffffff" in text


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten.mm", "products, convolutions"),
        ("FusedMatMul", "products, convolutions"),
        ("aten.mul", "activations, other arithmetic"),
        ("ort_trainer.draw_mask", "dropout, random numbers"),
        ("aten.native_layer_norm_backward", "norms"),
        ("aten._safe_softmax", "softmax, losses"),
        ("aten.t", "copies, embeddings"),
        ("aten.tanh", "activations, other arithmetic"),
        ("ReduceSum", "sums"),
    ],
)
def test_kinds_of_operators(operator: str, kind: str) -> None:
    charts = importlib.import_module("charts")
    assert charts.family(operator) == kind
    assert kind in charts._FAMILY_COLOURS
