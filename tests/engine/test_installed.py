from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ort_trainer.engine import ort as installed

ROOT = Path(__file__).resolve().parents[2]

# Simulates that PyTorch is alone: neither an import nor a search finds anything of ONNX.
WITHOUT_ENGINE = """if True:
    import copy, sys, torch
    import torch.nn.functional as F
    sys.modules |= dict.fromkeys(("onnxruntime", "onnx", "onnx_ir", "onnxscript"))
    from ort_trainer import ORTModule, ORTTrainer, optim
    from ort_trainer.engine.ort import engine
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    eager, module = copy.deepcopy(model), ORTModule(copy.deepcopy(model))
    x, label = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    for each in (eager, module):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(each(x), label).backward()
            optimizer.step()
    for _ in range(2):
        trainer.train_step(x, label)
    expected = eager.eval()(x)
    for found in (trainer.predict(x), trainer.eval_step(x, label)[1], module.eval()(x)):
        torch.testing.assert_close(found, expected.detach(), check_stride=False)
    asked = {"utils": {"kernels": "onnxruntime"}}
    try:
        ORTTrainer(model, "auto", optim.SGDConfig(), loss_fn=F.cross_entropy, options=asked).train_step(x, label)
    except ValueError as error:
        assert "but ONNX Runtime is not installed" in str(error), error
    calls = (
        lambda: trainer.save_as_onnx("m.onnx"),
        lambda: trainer.export_artifacts("artifacts"),
        lambda: ORTTrainer("m.onnx", "auto", optim.SGDConfig()),
    )
    for call in calls:
        try:
            call()
        except ModuleNotFoundError as error:
            print(error)
    for name in ("onnx", "onnx_ir", "onnxscript"):
        del sys.modules[name]
    for call in (lambda: trainer.save_as_onnx("m.onnx"), lambda: trainer.export_artifacts("artifacts"), engine):
        try:
            call()
        except ModuleNotFoundError as error:
            print(error)
"""


def test_without_an_engine_pytorch_trains_and_errors_have_the_commands_of_the_three_extras(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ENGINE], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.stdout.count("This needs onnx, onnx_ir, onnxscript, not installed: pip install") == 3
    assert done.stdout.count("This needs ONNX Runtime, which is not installed") == 3, done.stderr
    assert not any(tmp_path.iterdir())
    found = re.findall(r"pip install (\S+) +the extra \[(\w+)\]", done.stdout)
    project = (ROOT / "pyproject.toml").read_text()
    extras = dict(re.findall(r'^(cpu|cuda|stock) = \["(.*)", "ort_trainer\[onnx\]"\]$', project, re.MULTILINE))
    assert len(extras) == 3 and {extra: text.strip("'") for text, extra in found} == extras


@pytest.mark.parametrize(
    ("folders", "flavours", "trains"),
    [
        (["onnxruntime_training_cpu-1.19.2.dist-info"], ("onnxruntime-training-cpu",), True),
        (["onnxruntime_training-1.19.2.dist-info"], ("onnxruntime-training",), True),
        (["onnxruntime-1.31.1.dist-info", "onnx-1.23.2.dist-info"], ("onnxruntime",), False),
        (["onnxruntime_gpu-1.31.1.dist-info"], ("onnxruntime-gpu",), False),
        (
            ["onnxruntime_training-1.19.2.dist-info", "onnxruntime_training_cpu-1.19.2.dist-info"],
            ("onnxruntime-training", "onnxruntime-training-cpu"),
            True,
        ),
    ],
)
def test_flavours(
    folders: list[str],
    flavours: tuple[str, ...],
    trains: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    for folder in ("onnxruntime", *folders):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(installed, "_package", lambda: tmp_path / "onnxruntime")
    assert installed.installed_flavours() == flavours
    assert installed.has_training() == trains
    installed.check_engine()
    warned = [str(warning.message) for warning in recwarn if "overwrite" in str(warning.message)]
    assert bool(warned) == (len(flavours) > 1)
    assert all(", ".join(flavours) in text for text in warned)


def test_a_search_is_repeated_only_while_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[str] = []
    present: set[str] = set()

    def find_spec(name: str) -> SimpleNamespace | None:
        searches.append(name)
        return SimpleNamespace(origin=str(ROOT / name / "__init__.py")) if name in present else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    installed._installed_package.cache_clear()
    try:
        assert installed._package() is None
        assert installed.installed_flavours() == () and installed.engine_identity() == "none"
        with pytest.raises(ModuleNotFoundError, match="needs onnx, onnx_ir, onnxscript, not installed"):
            installed.require_onnx()
        present |= {"onnxruntime", "onnx", "onnx_ir"}
        with pytest.raises(ModuleNotFoundError, match="needs onnxscript, not installed"):
            installed.require_onnx()
        present.add("onnxscript")
        searches.clear()
        for _ in range(2):
            installed.require_onnx()
            assert installed._package() == ROOT / "onnxruntime" and installed.engine_identity() != "none"
        assert sorted(searches) == ["onnxruntime", "onnxscript"]
    finally:
        installed._installed_package.cache_clear()
