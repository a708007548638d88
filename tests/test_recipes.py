"""Recipes for libraries that are no dependencies: each script gives the losses of the same script in PyTorch."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from .test_cookbook import changed_lines

RECIPES = Path(__file__).resolve().parent.parent / "examples" / "recipes"
# What a script needs beside the development environment.
NEEDS = {
    "fabric_loop": ("lightning.fabric",),
    "lightning_module": ("lightning",),
    "peft_methods": ("peft",),
    "seq2seq": ("transformers",),
    "timm_models": ("torchvision", "timm"),
}
MOST_CHANGED_LINES = {"peft_methods": 4, "seq2seq": 8}


def test_every_script_has_both_forms() -> None:
    both = {path.stem for path in RECIPES.glob("*.py")}
    assert both == {f"{name}{form}" for name in NEEDS for form in ("", "_torch")}


@pytest.mark.parametrize("name", NEEDS)
def test_few_lines_differ(name: str) -> None:
    before, after = ((RECIPES / f"{name}{form}.py").read_text().splitlines() for form in ("_torch", ""))
    assert 0 < changed_lines(before, after) <= MOST_CHANGED_LINES.get(name, 12)
    assert "ort_trainer" in "\n".join(after) and "ort_trainer" not in "\n".join(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of these libraries, about each other
@pytest.mark.parametrize("name", NEEDS)
def test_losses_are_those_of_pytorch(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    for library in NEEDS[name]:
        pytest.importorskip(library, reason=f"{library} is not installed: docs/recipes.md", exc_type=ImportError)
    monkeypatch.syspath_prepend(str(RECIPES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = importlib.import_module(f"{name}_torch").main(steps=20)
        said = capsys.readouterr().out.splitlines()
        found = importlib.import_module(name).main(steps=20)
    finally:
        torch.set_num_threads(threads)
    assert len(expected) >= 20 and max(expected) != min(expected)
    assert found == pytest.approx(expected, rel=1e-4)
    assert capsys.readouterr().out.splitlines()[-1] == said[-1]  # what evaluation says of the trained model
