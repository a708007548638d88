"""``ORTModule`` in any loop: scripts of the cookbook and the recipes with the lines that docs/module.md adds."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.one_line import extended, script
from ort_trainer.export.builder import GraphBuilder

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "module.md"
# Of the table: script, and lines to add, each after the statement that first sets its variable.
ROW = re.compile(r"^\| `(\w+)/(\w+)` \| (.*) \|$", re.MULTILINE)
ROWS = [(folder, name, re.findall(r"`([^`]+)`", lines)) for folder, name, lines in ROW.findall(PAGE.read_text())]
NEEDS = {"fabric_loop": "lightning", "lightning_module": "lightning", "peft_methods": "peft", "timm_models": "timm"}

# Scripts with an ORTModule already, or of several processes; tests/test_recipes.py runs them.
ELSEWHERE = {("recipes", name) for name in ("deepspeed_zero", "diloco", "fabric_sharded", "ray_train", "trl_trainers")}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_all_scripts_are_listed() -> None:
    files = {path for folder in ("cookbook", "recipes") for path in (ROOT / "examples" / folder).glob("*_torch.py")}
    names = {(path.parent.name, path.stem.removesuffix("_torch")) for path in files}
    assert names - ELSEWHERE == {row[:2] for row in ROWS}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of these libraries, about each other
@pytest.mark.parametrize(("folder", "name", "lines"), ROWS, ids=[row[1] for row in ROWS])
def test_losses_are_those_without_it(
    folder: str, name: str, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    if name in NEEDS:
        pytest.importorskip(
            NEEDS[name], reason=f"{NEEDS[name]} is not installed: docs/huggingface.md", exc_type=ImportError
        )
    monkeypatch.syspath_prepend(str(ROOT / "examples" / folder))
    source = (ROOT / "examples" / folder / f"{name}_torch.py").read_text()
    expected = script(f"{name}_torch", source).main(steps=20)
    said = capsys.readouterr().out.splitlines()[-1]
    module = script(f"{name}_module", extended(source, lines))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exports: list[str] = []
    build = GraphBuilder.build_call

    def counted(builder: GraphBuilder, inputs: Any) -> Any:
        exports.append(builder.step.model.__class__.__name__)
        return build(builder, inputs)

    monkeypatch.setattr(GraphBuilder, "build_call", counted)
    found = module.main(steps=20)
    assert exports
    assert len(expected) >= 20 and found == pytest.approx(expected, rel=1e-6)
    assert said in capsys.readouterr().out.splitlines()
