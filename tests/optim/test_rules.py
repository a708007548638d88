"""A new optimizer needs only a new file in the folder of the rules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ort_trainer import optim
from ort_trainer.optim import rules
from ort_trainer.optim.rule import RULES

SIGN_DESCENT = """
import torch

from ..config import OptimizerConfig
from ..rule import Rule

__all__ = ["SignConfig"]


class SignConfig(OptimizerConfig):
    def __init__(self, params=(), lr=0.01):
        super().__init__("SignOptimizer", params, {"lr": lr})


class _Sign(Rule):
    name = "SignOptimizer"
    slots = ()

    def keeps_count(self, hyper):
        return False

    def update(self, batch):
        torch._foreach_sub_(batch.weights, [batch.lr * g.sign() for g in batch.gradients])

    def nodes(self, nodes, parameter):
        change = nodes.op("Mul", parameter.rate, nodes.op("Sign", parameter.gradient))
        return nodes.op("Sub", parameter.weight, change), {}
"""
PROGRAM = """
import torch
from ort_trainer import optim
from ort_trainer.optim.update import OptimizerUpdate

config = optim.SignConfig(lr=0.5)
weights = {"a": torch.zeros(2)}
OptimizerUpdate(config, weights, {"a": 0}).step({"a": torch.tensor([3.0, -2.0])}, [config.lr])
assert weights["a"].tolist() == [-0.5, 0.5], weights
print("found")
"""


def test_every_rule_has_a_config_and_a_name() -> None:
    assert {"AdamOptimizer", "LambOptimizer", "LionOptimizer", "SGDOptimizer"} <= set(RULES)
    assert set(rules.__all__) <= set(optim.__all__)
    for name in rules.__all__:
        config = getattr(optim, name)()
        assert config.rule is RULES[config.name]


def test_one_more_file_is_one_more_optimizer(tmp_path: Path) -> None:
    package = Path(optim.__file__).resolve().parent.parent
    copy = tmp_path / "ort_trainer"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "schemas").exists() or shutil.copytree(package.parent / "schemas", tmp_path / "schemas")
    (copy / "optim" / "rules" / "sign.py").write_text(SIGN_DESCENT)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "found"
