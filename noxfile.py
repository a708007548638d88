"""Runs a tenth of the tests on other versions of Python, torch and the libraries beneath: ``make matrix``.

Each session installs one combination in an environment of its own, which is deleted when its tests have run: it takes 6
GB, as the torch of a package index comes with CUDA (the tests run on the CPU). ``nox -l`` lists the sessions, and
``nox -s 'versions(torch 2.12)' table`` runs one, and then writes what was ever run here to docs/limits.md.
"""

from __future__ import annotations

import datetime
import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import nox

ROOT = Path(__file__).resolve().parent
FOUND = ROOT / "build" / "matrix"
nox.options.default_venv_backend = "uv"
nox.options.envdir = str(FOUND / "environments")

# What versions break: captured programs and private functions of torch, kernels, optimizers, files, kept exports; and
# something of every other room, as a version may lack a name that only this room calls.
TESTS = (
    "tests/adapters/test_quantize.py",
    "tests/amp",
    "tests/api/test_module.py",
    "tests/artifacts/test_export.py",
    "tests/cli",
    "tests/compat/test_trainer.py",
    "tests/compat/training_session",
    "tests/core",
    "tests/distributed",
    "tests/engine",
    "tests/step/test_cache.py",
    "tests/onnx/test_operators.py",
    "tests/onnx/test_trainer.py",
    "tests/kernels",
    "tests/capture/test_describe.py",
    "tests/fx",
    "tests/graph/test_equal_layers.py",
    "tests/guard",
    "tests/capture/test_fingerprint.py",
    "tests/capture/test_isolation.py",
    "tests/outside/test_carried.py",
    "tests/export/test_model_checks.py",
    "tests/graph/test_recompute.py::test_what_is_computed_twice",
    "tests/capture/test_branches.py",
    "tests/fit",
    "tests/golden",
    "tests/gpu/test_simulated.py",
    "tests/hostile/test_files.py",
    "tests/hostile/test_state.py",
    "tests/integrations",
    "tests/module",
    "tests/optim",
    "tests/operators/test_register_operator.py",
    "tests/options",
    "tests/profiling",
    "tests/round_trips",
    "tests/runs/test_manager.py",
    "tests/runs/test_position.py",
    "tests/state",
    "tests/step",
    "tests/test_fidelity.py",
    "tests/test_imports.py::test_the_package_imports_nothing_heavy_but_torch",
    "tests/train/test_compiled.py",
    "tests/train/test_dropout.py",
    "tests/train/test_kernels.py",
    "tests/train/test_padding.py",
    "tests/train/test_state.py",
    "tests/train/test_torch_optimizers.py",
    "tests/upstream",
)
TOOLS = ("hypothesis", "mypy", "psutil", "pytest", "pytest-xdist", "safetensors")
# Whose versions the table shows.
SHOWN = ("Python", "torch", "onnxruntime-training-cpu", "onnxruntime", "onnx", "onnxscript", "numpy", "transformers")
# Python, the extra with the engine, torch (all others are pinned by constraints.txt), how other versions are chosen.
COMBINATIONS = {
    "torch 2.11": ("3.11", "cpu", "torch==2.11.0", "pinned"),
    "torch 2.12": ("3.11", "cpu", "torch==2.12.1", "pinned"),
    "torch 2.14": ("3.11", "cpu", "torch==2.14.1", "pinned"),
    "torch 2.15": ("3.11", "cpu", "torch==2.15.0", "pinned"),
    "Python 3.10": ("3.10", "cpu", "torch==2.13.0", "pinned"),
    "Python 3.12": ("3.12", "cpu", "torch==2.13.0", "pinned"),
    "Python 3.13": ("3.13", "stock", "torch==2.13.0", "pinned"),
    "Python 3.14": ("3.14", "stock", "torch==2.15.0", "pinned"),
    "lowest": ("3.11", "cpu", "torch", "lowest-direct"),
    "newest": ("3.12", "stock", "torch", "highest"),
}
MARKS = ("<!-- make matrix: generated -->", "<!-- end of make matrix -->")


@nox.session
@nox.parametrize(
    "python,engine,torch,resolution", [nox.param(*chosen, id=name) for name, chosen in COMBINATIONS.items()]
)
def versions(session: nox.Session, engine: str, torch: str, resolution: str) -> None:
    """Installs a combination, and runs the tests on it."""
    place = FOUND / re.sub(r".*\((.*)\)", r"\1", session.name)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    chosen = ["--resolution", resolution]
    if resolution == "pinned":
        # torch requires other versions of these itself.
        pinned = re.sub(r"^(torch|setuptools|sympy)==.*\n", "", Path("constraints.txt").read_text(), flags=re.MULTILINE)
        (place / "constraints.txt").write_text(pinned)
        chosen = ["--constraint", str(place / "constraints.txt")]
    session.install(*chosen, torch, f"ort_trainer[{engine},transformers,legacy] @ {ROOT.as_uri()}")
    session.install(*TOOLS)
    tests = ("pytest", "-q", "-n", "2", "--gate", "--seed", "matrix", "-m", "not slow and not torture", *TESTS)
    outcomes = ("--junitxml", str(place / "tests.xml"))
    environment = {"ORT_TRAINER_CACHE": str(place / "exports")}
    session.run("python", "-m", *tests, *outcomes, *session.posargs, env=environment, success_codes=[0, 1])
    counts = next(ElementTree.parse(place / "tests.xml").iter("testsuite")).attrib
    failed, skipped = int(counts["failures"]) + int(counts["errors"]), int(counts["skipped"])
    listed = session.run("uv", "pip", "list", "--format", "json", silent=True, external=True, stderr=None)
    installed = {entry["name"]: entry["version"] for entry in json.loads(str(listed))}
    installed["Python"] = str(session.run("python", "-V", silent=True)).split()[1]
    cells = [installed.get(library, "") for library in SHOWN]
    cells += map(str, (int(counts["tests"]) - failed - skipped, skipped, failed, datetime.date.today()))
    (place / "row.md").write_text(" | ".join(cells))
    shutil.rmtree(session.virtualenv.location)
    if failed:
        session.error(f"{failed} tests failed")


@nox.session(python=False, default=False)
def table(session: nox.Session) -> None:
    """Writes what was run here to docs/limits.md, and keeps the other rows."""
    page = ROOT / "docs" / "limits.md"
    before, rest = page.read_text().split(MARKS[0])
    old, after = rest.split(MARKS[1])
    known = dict(re.findall(r"^\| ([^|]+) (\|.*)$", old, re.MULTILINE))
    columns = ("", *SHOWN, "passed", "skipped", "failed", "date")
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for name in COMBINATIONS:
        path = FOUND / name / "row.md"
        if path.exists():
            known[name] = f"| {path.read_text()} |"
        if name in known:
            lines.append(f"| {name} {known[name]}")
    page.write_text("\n".join([before + MARKS[0], *lines, MARKS[1] + after]))
