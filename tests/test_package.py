"""The source distribution, and the wheel that is built from it."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ort_trainer import __version__
from ort_trainer.capture.torch_versions import TESTED

ROOT = Path(__file__).resolve().parent.parent

SMOKE = """
import torch, ort_trainer
from pathlib import Path
assert Path(ort_trainer.__file__).parent.parent == Path({site!r}), ort_trainer.__file__
from ort_trainer import ORTTrainer, optim
desc = {{"inputs": [("input", ["n", 4]), ("label", ["n"])], "outputs": [("loss", [], True)]}}
trainer = ORTTrainer(torch.nn.Linear(4, 2), desc, optim.AdamConfig(), loss_fn=torch.nn.CrossEntropyLoss())
x, y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
losses = [trainer.train_step(x, y).item() for _ in range(50)]
assert losses[-1] < losses[0]
print("trained")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a source distribution, and of the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    package = {path: path.relative_to(ROOT) for path in (ROOT / "ort_trainer").rglob("*.py")}
    package |= {path: "ort_trainer" / path.relative_to(ROOT) for path in (ROOT / "schemas").iterdir()}
    expected = {str(name): path.read_bytes() for path, name in package.items()} | {"ort_trainer/py.typed": b""}
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    about = {name.partition("/")[2] for name in found if ".dist-info/" in name}
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert {name: content for name, content in found.items() if ".dist-info/" not in name} == expected


def test_the_version_is_that_of_the_package_and_of_the_changelog(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == __version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+) - (?:unreleased|\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)[0] == __version__


def test_only_the_extras_of_the_trainer_need_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    required = [Requirement(text) for text in re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)]

    def names(extra: str) -> set[str]:
        asked = [r for r in required if r.marker is None or r.marker.evaluate({"extra": extra})]
        nested = [name for r in asked if canonicalize_name(r.name) == "ort-trainer" for name in r.extras]
        own = {canonicalize_name(r.name) for r in asked} - {"ort-trainer"}
        return own.union(*(names(name) for name in nested))

    assert names("") == {"cerberus", "numpy", "xxhash"} and names("api") == names("") | {"onnxruntime"}
    assert names("trainer") == names("") | {"torch", "networkx"}
    engines = {"cpu": "onnxruntime-training-cpu", "cuda": "onnxruntime-training", "stock": "onnxruntime"}
    for extra, engine in engines.items():
        assert names(extra) == names("") | {engine, "torch", "networkx", "onnx", "onnx-ir", "onnxscript"}


def test_the_source_distribution_has_what_its_tests_need(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("ort_trainer", "schemas", "docs", "tests", "examples", "benchmarks")
    files = {path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()}
    # Files from Python and from the browser example.
    wanted = {str(path) for path in files if {"__pycache__", "build", "node_modules"}.isdisjoint(path.parts)}
    wanted |= {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt", ".ci/run"}
    assert wanted <= names, wanted - names


def test_the_constraints_have_one_version_of_all_that_is_asked_for() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    asked = {Requirement(text).name for text in re.findall(r'"([a-z0-9-]+(?:\[.*?\])?[<>=][^"]*)"', project)}
    assert {"torch", "numpy", "onnxruntime", "onnxruntime-training", "onnxruntime-training-cpu"} <= asked
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = [Requirement(line) for line in lines]
    assert all([pin.operator for pin in requirement.specifier] == ["=="] for requirement in pinned)
    for python in ("3.10", "3.11", "3.12", "3.13"):
        environment = {"python_version": python}
        names = [canonicalize_name(r.name) for r in pinned if r.marker is None or r.marker.evaluate(environment)]
        assert len(names) == len(set(names)), python
        assert asked - {"ort-trainer"} <= set(names), python


def test_the_tested_versions_of_torch_are_those_of_the_documentation() -> None:
    page = (ROOT / "docs" / "limits.md").read_text()
    rows = re.findall(r"^\| torch (\d+\.\d+) \|.*\| 0 \| [\d-]+ \|$", page, re.MULTILINE)  # no test failed
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(TESTED) == {*rows, pinned}
    assert f"{TESTED[0]} to {TESTED[-1]} are tested: {pinned} with all" in page
    assert f'"torch>={TESTED[0]}"' in (ROOT / "pyproject.toml").read_text()
    assert f"torch {TESTED[0]} or newer" in (ROOT / "README.md").read_text()


def test_the_wheel_trains_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "env" / "lib" / version / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    # A path file adds this environment's dependencies after the wheel.
    here = next(p for p in sys.path if p.endswith("site-packages"))
    (site / "dependencies.pth").write_text(here + "\n")
    python = tmp_path / "env" / "bin" / "python"
    done = subprocess.run(
        [python, "-I", "-c", SMOKE.format(site=str(site))], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "trained"
