"""Twenty steps of models on a GPU, against PyTorch there: from a size's fourth step on, as CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from ort_trainer import optim

from ..helpers import assert_same_training
from .models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_pytorch(name: str) -> None:
    _train(name, "auto")


@pytest.mark.parametrize("name", ["mlp with norms", "convolutions", "encoder with padding", "dlrm", "gpt2", "llama"])
def test_compiled_loops_train_as_pytorch(name: str) -> None:
    _train(name, "compiled")


def _train(name: str, kernels: str) -> None:
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    steps = [tuple(value.cuda() for value in batches[number // 5 % 2]) for number in range(20)]
    trainer = assert_same_training(
        model.cuda(),
        "auto",
        steps,
        optim.SGDConfig(lr=0.02),
        lambda reference: torch.optim.SGD(reference.parameters(), lr=0.02),
        loss_fn=None,
        options={"utils": {"kernels": kernels}},
        relative=1e-4,
    )
    assert trainer.loop.device.type == "cuda" and trainer.loop.kernels == "PyTorch's"
