from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ort_trainer.engine import ort as installed

ROOT = Path(__file__).resolve().parents[2]

# Simulates a missing ONNX Runtime: neither an import nor a search finds it.
WITHOUT_ENGINE = """if True:
    import sys
    sys.modules["onnxruntime"] = None
    import torch, ort_trainer
    from ort_trainer.engine.ort import engine
    options = ort_trainer.ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 2}})
    desc = {"inputs": [("input", ["n", 4]), ("label", ["n"])], "outputs": [("loss", [], True)]}
    make = lambda: ort_trainer.ORTTrainer(torch.nn.Linear(4, 2), desc, ort_trainer.optim.AdamConfig(), "mse", options)
    for call in (make, engine):
        try:
            call()
        except ModuleNotFoundError as error:
            print(error)
"""


def test_without_an_engine_the_error_has_the_commands_of_the_three_extras() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_ENGINE], capture_output=True, text=True, timeout=120)
    assert done.stdout.count("ort_trainer runs on ONNX Runtime, which is not installed") == 2, done.stderr
    found = re.findall(r"pip install (\S+) +the extra \[(\w+)\]", done.stdout)
    project = (ROOT / "pyproject.toml").read_text()
    extras = dict(re.findall(r'^(cpu|cuda|stock) = \["(.*)", "ort_trainer\[trainer\]"\]$', project, re.MULTILINE))
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
    installed.installed_flavours.cache_clear()
    try:
        assert installed.installed_flavours() == flavours
        assert installed.has_training() == trains
        installed.check_engine()
    finally:
        installed.installed_flavours.cache_clear()
    warned = [str(warning.message) for warning in recwarn if "overwrite" in str(warning.message)]
    assert bool(warned) == (len(flavours) > 1)
    assert all(", ".join(flavours) in text for text in warned)
