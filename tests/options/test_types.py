"""What a type checker says about the options and about the outputs of a step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# mypy takes half a minute to read all of torch.
TORCH = """
from collections.abc import Iterator
from typing import Any
class Tensor:
    def item(self) -> float: ...
    def __iter__(self) -> Iterator[Tensor]: ...
    def __getitem__(self, index: int) -> Tensor: ...
def zeros(*size: int) -> Tensor: ...
class dtype: ...
class device:
    def __init__(self, name: str) -> None: ...
bfloat16: dtype
def __getattr__(name: str) -> Any: ...
"""
# These are not needed either.
SETTINGS = """
[mypy]
ignore_missing_imports = True
follow_imports = silent
[mypy-torch]
follow_imports = silent
[mypy-torch.*,onnx.*,onnx_ir.*,onnxruntime.*,onnxscript.*,networkx.*,sympy.*]
follow_imports = skip
"""
HEAD = """
import numpy as np
import torch
from ort_trainer.api import Module
from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.artifacts import generate_artifacts
from ort_trainer import CheckpointManager
from ort_trainer.fit import Callback, FitState
from ort_trainer.options import OptionsDict
options = ORTTrainerOptions()
trainer: ORTTrainer
artifacts: Module
module: torch.nn.Module
x = torch.zeros(2)
"""
GOOD = """
settings: OptionsDict = {
    "batch": {"gradient_accumulation_steps": 2},
    "mixed_precision": {"enabled": True, "dtype": torch.bfloat16},
    "utils": {"frozen_weights": ["a", "b"], "kernels": "onnxruntime"},
    "gelu_recompute": True,
}
ORTTrainerOptions(settings)
ORTTrainerOptions({"device": {"id": "cpu"}})
ORTTrainerOptions({"device": {"id": torch.device("cpu")}, "utils": {"moments": torch.bfloat16}})
ORTTrainerOptions(dict(device=dict(id="cpu")))
changed = options.to_dict()
changed["batch"]["gradient_accumulation_steps"] = 2
ORTTrainer(module, "auto", optim.AdamWConfig(), options={"utils": {"max_grad_norm": 1.0}})
ORTTrainer(module, "auto", optim.AdamWConfig(), options=ORTTrainerOptions(changed))
ORTModule(module, {"utils": {"random_numbers": "pytorch"}})
steps: int = options.batch.gradient_accumulation_steps
names: tuple[str, ...] = options.utils.frozen_weights
path: str = options.debug.graph_save_paths.model_with_gradient_graph_path
loss, logits = trainer.train_step(x)
error: float = artifacts(np.zeros(2)).item() + artifacts(np.zeros(2), np.zeros(2))[0]
loss.item() + trainer.eval_step(x).item() + trainer.train_step(x)[0].item()
class Shows(Callback):
    def on_fit_end(self, state: FitState, trainer: ORTTrainer) -> None:
        CheckpointManager("run").save(trainer, state.position)
"""
BAD = {
    "options.batch.typo": '"BatchOptions" has no attribute "typo"',
    "options.bacth": '"ORTTrainerOptions" has no attribute "bacth"',
    "options.debug.graph_save_paths.typo": '"GraphSavePathsOptions" has no attribute "typo"',
    "options.batch.gradient_accumulation_steps = 2": 'defined in "BatchOptions" is read-only',
    "text: str = options.batch.gradient_accumulation_steps": "Incompatible types in assignment",
    "a: OptionsDict = {'batch': {'gradient_acumulation_steps': 2}}": 'Extra key "gradient_acumulation_steps"',
    "b: OptionsDict = {'device': {'id': 3}}": 'TypedDict item "id" has type "str | device"',
    "c: OptionsDict = {'utils': {'kernels': 'torch'}}": 'TypedDict item "kernels" has type',
    "ORTTrainerOptions({'batch': {'gradient_accumulation_step': 2}})": 'Argument 1 to "ORTTrainerOptions" has',
    "ORTTrainerOptions({'distributed': {'pipeline_parallel_size': 2}})": 'Argument 1 to "ORTTrainerOptions" has',
    "ORTTrainer(module, {}, optim.SGDConfig(), None, {'device': {'id': 3}})": 'Argument 5 to "ORTTrainer" has',
    "ORTModule(module, {'util': {}})": 'Argument 2 to "ORTModule" has incompatible type',
    "generate_artifacts(module, options={'batch': {'size': 2}})": 'Argument "options" to "generate_artifacts" has',
    "artifacts(np.zeros(2)).itm()": 'has no attribute "itm"',
    "trainer.train_step(x).itm()": '"Tensor" of "Tensor | Any" has no attribute "itm"',
}


def test_a_type_checker_finds_typos_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.pyi").write_text(TORCH)
    (tmp_path / "good.py").write_text(HEAD + GOOD)
    (tmp_path / "bad.py").write_text(HEAD + "\n".join(BAD))
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-pretty", "good.py", "bad.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = dict(re.findall(r"^(\w+\.py:\d+): error: (.*)$", done.stdout, re.MULTILINE))
    first = HEAD.count("\n") + 1
    expected = {f"bad.py:{first + number}": message for number, message in enumerate(BAD.values())}
    assert found.keys() == expected.keys(), done.stdout + done.stderr
    for place, message in expected.items():
        assert message in found[place]
