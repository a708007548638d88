"""The flavor ``onnxruntime-training``: its own runtime trains what the trainer trains, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

from ..helpers import MLP, MLP_DESC, assert_close, mlp_batches
from .upstream_runs import Upstream, write

pytestmark = pytest.mark.needs_gradient_builder

STANDARD = {"utils": {"kernels": "onnxruntime"}}


def make_trainer(config: Any, model: nn.Module | None = None, desc: Any = None, **options: Any) -> ORTTrainer:
    settings = {**STANDARD, **options, "utils": {**STANDARD["utils"], **options.get("utils", {})}}
    model, desc = model or MLP(), desc or MLP_DESC
    return ORTTrainer(model, desc, config, loss_fn=F.cross_entropy, options=ORTTrainerOptions(settings))


def assert_trains_alike(trainer: ORTTrainer, upstream: Upstream, batches: Any, relative: float = 1e-5) -> None:
    for number, batch in enumerate(batches):
        ours, theirs = trainer.train_step(*batch), upstream.train(batch)
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(mine, torch.from_numpy(other), relative, f"outputs of step {number}")
    for mine, other in zip(trainer.eval_step(*batches[0]), upstream.evaluate(batches[0]), strict=True):
        assert_close(mine, torch.from_numpy(other), relative, "evaluation")
    found = upstream.parameters()
    for name, value in trainer.state_dict(pytorch_format=True).items():
        if value.is_floating_point():
            assert_close(value, torch.from_numpy(found[name]), relative, name)


CONFIGS: dict[str, Any] = {
    "adamw": optim.AdamWConfig(lr=1e-2, weight_decay=0.1),
    "adam after": optim.AdamConfig(lr=1e-2, lambda_coef=0.1, max_norm_clip=0.3, weight_decay_mode=1),  # type: ignore[arg-type]
    "uncorrected": optim.AdamConfig(lr=1e-3, do_bias_correction=False),
    "sgd": optim.SGDConfig(lr=0.1),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_mlp_trains_as_in_the_trainer(kind: str, tmp_path: Path) -> None:
    trainer = make_trainer(CONFIGS[kind])
    batches = mlp_batches(20)
    write(trainer, tmp_path, batches[0])
    upstream = Upstream(tmp_path, lr=CONFIGS[kind].lr)
    assert upstream.module.input_names() == ["x", "label"]
    assert upstream.module.output_names() == ["loss", "logits"]
    assert_trains_alike(trainer, upstream, batches)
