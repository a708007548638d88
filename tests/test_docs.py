"""README and docs/: their code runs, their links work, and their commands exist."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ort_trainer import ORTTrainer, __version__, optim
from ort_trainer.adapters import LoRA, add_adapter

from .adapters import models
from .helpers import MLP, assert_close, mlp_batches

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
WRITTEN = sorted((ROOT / "docs").glob("*.md"))
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
PAGES = [README, *WRITTEN, *REFERENCE]
OTHERS = [ROOT / name for name in ("CHANGELOG.md", "SECURITY.md")]
OTHERS += [ROOT / place / "README.md" for place in ("js", "c", "examples/browser")]
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Returns GitHub's link targets of the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for link in LINK.findall(without_code(page.read_text())):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_lists_every_page_once() -> None:
    rows = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", INDEX.read_text(), re.MULTILINE)
    assert all(text == path for text, path in rows)
    paths = sorted((INDEX.parent / path).resolve() for _, path in rows)
    assert paths == sorted({README, *WRITTEN, *OTHERS, ROOT / "docs" / "reference" / "index.rst"} - {INDEX})


def test_the_reference_lists_every_page() -> None:
    index = (ROOT / "docs" / "reference" / "index.rst").read_text()
    pages = {path.stem for path in (ROOT / "docs" / "reference").iterdir()} - {"index"}
    assert sorted(re.findall(r"^   (\w+)$", index, re.MULTILINE)) == sorted(pages)


def test_the_pages_stay_few_and_short() -> None:
    words = runpy.run_path(str(ROOT / "docs" / "words.py"))["words"]
    assert len(WRITTEN) <= 22
    assert sum(map(words, WRITTEN)) <= 30_000


def test_the_wheel_in_the_pages_has_the_version() -> None:
    found = [wheel for page in PAGES for wheel in re.findall(r"ort_trainer-[\w.]+-py3-none-any", page.read_text())]
    assert found and set(found) == {f"ort_trainer-{__version__}-py3-none-any"}


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(page.read_text() for page in PAGES)
    # Only indented or in backticks: prose may contain "make" as a verb.
    assert {"demo", "test", "bench"} <= set(re.findall(r"(?:^    |`)make ([a-z0-9-]+)", text, re.MULTILINE)) <= targets
    scripts = set(re.findall(r"(?:^    |`)python ((?:examples|benchmarks)/\w+\.py)", text, re.MULTILINE))
    assert scripts and all((ROOT / script).exists() for script in scripts)
    tests = set(re.findall(r"`(tests/[\w/]+(?:\.py)?)`", text))
    assert tests and [test for test in tests if not (ROOT / test).exists()] == []


def test_both_sides_of_the_diff_train_the_same() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)
    states = {}
    for side in "-+":
        lines = [line[1:] for line in diff.splitlines() if line[:1] in ("", " ", side)]
        torch.manual_seed(0)
        scope: dict[str, object] = {"Net": MLP, "loader": mlp_batches(5)}
        code = compile("\n".join(lines), f"README.md ({side})", "exec")
        exec(code, scope)
        torch.manual_seed(0)
        exec(code, scope)
        assert isinstance(scope["model"], nn.Module)
        states[side] = scope["model"].state_dict()
    for name, value in states["-"].items():
        assert_close(states["+"][name], value, 1e-5, name)


def test_the_readmes_module_gets_gradients() -> None:
    block, _ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), scope)
    assert scope["model"].weight.grad.any()


def test_the_readme_trains_on_without_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, block = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    description = {
        "inputs": [("x", ["batch", 8]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", 3])],
    }
    trainer = ORTTrainer(MLP(), description, optim.AdamConfig(lr=1e-3), loss_fn=F.cross_entropy)
    batches = mlp_batches(4)
    trainer.train_step(*batches[0])
    scope: dict[str, Any] = {"trainer": trainer, "batches": [[part.numpy() for part in batch] for batch in batches]}
    exec(compile(block, "README.md", "exec"), scope)
    for batch in batches:
        loss, _ = trainer.train_step(*batch)
    assert_close(torch.from_numpy(scope["loss"]), loss, 1e-5, "the last loss")
    assert (tmp_path / "checkpoint").is_file()


def test_python_of_the_pages_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("usage", "fit", "mixed_precision", "losses", "checkpoints", "distributed", "onnx_models")
    for name in (f"{name}.md" for name in (*names, "kernels", "models")):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
        assert blocks
        for block in blocks:
            for _ in range(2):  # files from the first run must not break the second
                exec(compile(block, name, "exec"), {"__name__": "page"})
    assert (tmp_path / "run.ortckpt").exists() and (tmp_path / "model.onnx").exists()


@pytest.mark.filterwarnings("ignore")
def test_python_of_the_page_on_adapters_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    onnx.save(models.exported(models.classifier()), "base.onnx")
    batches = [models.batch(at) for at in range(2)]
    scope: dict[str, Any] = {"__name__": "page", "batches": batches}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adapters.md").read_text(), re.DOTALL)
    for block in blocks:
        if "LoraAdapter()" in block:  # of ONNX Runtime, from 1.20 on: tests/adapters/test_onnx_models.py runs it
            continue
        if "Adapters(trainer" in block:  # before the first update
            scope["trainer"] = ORTTrainer(
                add_adapter("base.onnx", LoRA(rank=8)), "auto", optim.AdamWConfig(lr=1e-3), loss_fn="cross_entropy"
            )
        exec(compile(block, "adapters.md", "exec"), scope)
    assert (tmp_path / "style.onnx_adapter").is_file() and (tmp_path / "friendly").is_dir()


def test_python_of_the_page_on_optimizers_runs() -> None:
    scope: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "optimizers.md").read_text(), re.DOTALL):
        exec(compile(block, "optimizers.md", "exec"), scope)
    losses = scope["losses"]
    assert isinstance(losses, list) and len(losses) == 3
    assert all(kind == pytest.approx(losses[0], rel=1e-5) for kind in losses)


def test_python_of_the_page_on_limits_runs() -> None:
    scope: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "limits.md").read_text(), re.DOTALL):
        exec(compile(block, "limits.md", "exec"), scope)
    assert isinstance(scope["quantized"], nn.Module)


def test_python_of_the_page_on_devices_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope: dict[str, object] = {"__name__": "page"}
    # What follows needs onnxruntime-training: tests/artifacts/test_upstream_flavor.py runs it.
    text, _ = (ROOT / "docs" / "on_device.md").read_text().split("## Artifacts of onnxruntime-training")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "on_device.md", "exec"), scope)
    assert isinstance(scope["loss"], np.ndarray) and scope["loss"] < 0.1
    assert isinstance(scope["weights"], np.ndarray) and (tmp_path / "model.onnx").exists()


def test_every_public_name_is_in_the_reference() -> None:
    rooms = ("optim", "adapters", "amp", "fit", "api", "artifacts")
    modules = ("ort_trainer", *(f"ort_trainer.{room}" for room in rooms))
    said: dict[str, set[str]] = {module: set() for module in modules}
    for page in (ROOT / "docs" / "reference").glob("*.rst"):
        text = page.read_text()
        module = re.search(r"currentmodule:: (\S+)", text)
        for name in re.findall(r"^\.\. auto\w+:: (\S+)|^``(\w+)`` is legacy's name", text, re.MULTILINE):
            path = "".join(name) if module is None else f"{module[1]}.{''.join(name)}"
            said.setdefault(path.rpartition(".")[0], set()).add(path.rpartition(".")[2])
    for module_name in modules:
        names, public = said[module_name], importlib.import_module(module_name).__all__
        assert names == {name for name in public if f"{module_name}.{name}" not in said}, module_name


def test_option_tables_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
