"""Imports go with the data, never against it; heavy libraries are imported in one place each."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ort_trainer"

# Every room, with the rooms that it may import from: the arrows of the data flow, and the leaves.
LEAVES = {"errors", "schema", "engine", "atomic", "interrupts", "memory", "ownership"}
ALLOWED = {
    "errors": set(),
    "schema": set(),
    "engine": set(),
    "atomic": {"interrupts"},
    "interrupts": set(),
    "memory": set(),
    "ownership": set(),
    "window": {"errors"},
    "amp": {"errors", "step_info"},  # for annotations only
    "optim": {"errors", "ownership", "step_info"},  # for annotations only
    "step_info": {"errors", "optim"},
    "model_desc": LEAVES,
    "option_checks": set(),
    "options": LEAVES | {"amp", "optim", "option_checks"},
    "batch": LEAVES | {"model_desc"},
    "graph": LEAVES,
    "frontend": LEAVES | {"graph", "model_desc"},
    "onnx_model": LEAVES | {"frontend", "graph", "model_desc"},
    "model_source": LEAVES | {"frontend", "graph", "model_desc", "onnx_model", "optim", "options"},
    "graphs": LEAVES | {"batch", "graph", "model_desc", "model_source", "session"},
    "session": LEAVES | {"graph", "optim"},
    "graph_files": LEAVES | {"graph", "optim", "session"},
    "state": LEAVES | {"session", "optim", "window"},
    "checkpoint": LEAVES,
    "trainer": LEAVES
    | {
        "amp",
        "batch",
        "checkpoint",
        "frontend",
        "graph",
        "graphs",
        "graph_files",
        "model_desc",
        "model_source",
        "onnx_model",
        "optim",
        "options",
        "session",
        "state",
        "step_info",
        "window",
    },
    # The public names it takes from outside, by ``import ort_trainer``; nothing else may do that, or import it.
    "compat": {"errors", "amp", "checkpoint", "flat_state", "interrupts", "model_desc", "onnx_model", "optim"},
    "flat_state": {"trainer"},
    "io_binding": LEAVES,
    "training_parameters": LEAVES,
    "training_session": LEAVES
    | {
        "batch",
        "flat_state",
        "graph",
        "io_binding",
        "onnx_model",
        "optim",
        "options",
        "trainer",
        "training_parameters",
        "window",
    },
    "__init__": {
        "amp",
        "optim",
        "errors",
        "options",
        "session",
        "step_info",
        "trainer",
        "training_parameters",
        "training_session",
    },
}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> set[str]:
    """The rooms of this package that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            depth = len(path.relative_to(PACKAGE).parts) - node.level
            if depth < 0:
                raise AssertionError(f"{path} imports from outside the package")
            base = path.relative_to(PACKAGE).parts[:depth]
            target = [*base, *(node.module or "").split(".")] if node.module else [*base]
            found |= {target[0]} if target and target[0] else {alias.name for alias in node.names}
    return found


def test_every_room_is_listed() -> None:
    assert {room(path) for path in FILES} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_direction(path: Path) -> None:
    assert imports(path) - {room(path)} <= ALLOWED[room(path)]


def test_only_compat_uses_the_package_from_outside() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name.split(".")[0] == "ort_trainer" for name in names):
                assert room(path) == "compat", path


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("torch.onnx", {"frontend/onnx_registry.py"}),
        ("torch._functorch", {"frontend/capture.py", "frontend/patches.py"}),
        ("torch.export", {"frontend/onnx_registry.py"}),
        ("onnxruntime", {"engine.py"}),
        ("safetensors", {"checkpoint/file.py"}),
        ("cerberus", {"schema.py"}),
        ("h5py", {"checkpoint/legacy.py"}),
        ("pickle", set()),
    ],
)
def test_heavy_libraries_have_one_place(library: str, places: set[str]) -> None:
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name == library or name.startswith(f"{library}.") for name in names):
                found.add(str(path.relative_to(PACKAGE)))
    assert found == places


def test_importing_the_package_does_not_import_the_exporter() -> None:
    program = (
        "import sys, ort_trainer; print([m for m in ('ort_trainer.frontend.export', 'onnxscript') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]"
