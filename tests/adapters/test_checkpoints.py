"""Checkpoints without the frozen weights: of an adapter beside a base, and of a model with frozen layers."""

from __future__ import annotations

import pytest
import torch

from ort_trainer import ORTTrainer, optim
from ort_trainer.adapters import LoRA, add_adapter

from ..helpers import MLP, mlp_batches, mlp_trainer
from .models import batch, classifier, exported

FROZEN = {"utils": {"save_frozen_weights": False, "frozen_weights": ["fc1.weight", "fc1.bias"]}}


def trainer_of(model) -> ORTTrainer:
    options = {"utils": {"save_frozen_weights": False}}
    return ORTTrainer(model, "auto", optim.AdamWConfig(lr=1e-2), loss_fn="cross_entropy", options=options)


def test_a_run_goes_on_from_the_adapter_alone(tmp_path) -> None:
    base = exported(classifier())
    first = trainer_of(add_adapter(base, LoRA(4, targets=["q_proj"])))
    for step in range(3):
        first.train_step(*batch(step))
    first.save_checkpoint(tmp_path / "adapter.ortckpt")
    stored = first.state_dict()["model"]["full_precision"]
    assert sorted(stored) == [f"layers.{at}.q_proj.lora_{part}.weight" for at in range(2) for part in "AB"]
    again = trainer_of(add_adapter(base, LoRA(4, targets=["q_proj"])))
    again.load_checkpoint(tmp_path / "adapter.ortckpt")
    for step in range(3, 6):
        assert again.train_step(*batch(step))[0].item() == first.train_step(*batch(step))[0].item()
    other = classifier()
    other.head.weight.data += 1
    elsewhere = trainer_of(add_adapter(exported(other), LoRA(4, targets=["q_proj"])))
    before = elsewhere.state_dict(pytorch_format=True)
    with pytest.raises(ValueError, match="and this trainer has others: load it into a trainer with the same base"):
        elsewhere.load_checkpoint(tmp_path / "adapter.ortckpt")
    assert all(torch.equal(value, before[name]) for name, value in elsewhere.state_dict(pytorch_format=True).items())
    elsewhere.load_checkpoint(tmp_path / "adapter.ortckpt", strict=False)
    name = "layers.0.q_proj.lora_B.weight"
    assert elsewhere.get_parameter(name).numpy() == pytest.approx(stored[name])


def test_state_dicts_of_either_kind_fit_either_trainer() -> None:
    """A trainer that saves everything loads a state without frozen weights, and the other way round."""
    torch.manual_seed(0)
    without, whole = (mlp_trainer(options, optim.AdamConfig(), MLP()) for options in (FROZEN, {}))
    (x, y), *_ = mlp_batches(1)
    without.train_step(x, y)
    state = without.state_dict()
    assert sorted(state["model"]["full_precision"]) == ["fc2.bias", "fc2.weight"]
    same = mlp_trainer({"utils": {"frozen_weights": FROZEN["utils"]["frozen_weights"]}}, optim.AdamConfig(), MLP())
    same.load_state_dict(without.state_dict(pytorch_format=True))
    same.load_state_dict(state)
    without.load_state_dict(same.state_dict())
    assert without.train_step(x, y)[0].item() == same.train_step(x, y)[0].item()
    with pytest.raises(RuntimeError, match="fc1"):  # which trains all weights
        whole.load_state_dict(state)
