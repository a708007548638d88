"""N steps are k steps, a save, a new process, a load and N - k steps: bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, amp, optim

TOTAL = 11


class Net(nn.Module):
    """Everything with state: dropout, batch norm, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.fc2 = nn.Linear(8, 8)
        self.fc2.weight = self.fc1.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.dropout(torch.relu(self.norm(self.fc1(x)))))[:, :3]


def make(kind: str, accumulation: int) -> ORTTrainer:
    torch.manual_seed(3)
    options = {
        "batch": {"gradient_accumulation_steps": accumulation},
        "lr_scheduler": optim.CosineWarmupLRScheduler(TOTAL, warmup=0.2),
        "mixed_precision": {
            "enabled": kind == "fp16",
            "loss_scaler": amp.DynamicLossScaler(up_scale_window=2) if kind == "fp16" else None,
        },
    }
    config = optim.LambConfig(lr=0.02) if kind == "lamb" else optim.AdamConfig(lr=0.02, lambda_coef=0.1)
    desc = {
        "inputs": [("x", ["batch", 8]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", 3])],
    }
    return ORTTrainer(Net(), desc, config, loss_fn=F.cross_entropy, options=ORTTrainerOptions(options))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def resume(kind: str, accumulation: int, start: int, source: str, target: str) -> None:
    """What the new process does."""
    trainer = make(kind, accumulation)
    torch.manual_seed(999)  # nothing of the global generator may matter
    assert trainer.load_checkpoint(source) == {"start": start, "tensor": torch.tensor(start)}
    run(trainer, start, TOTAL)
    trainer.save_checkpoint(target)


def run(trainer: ORTTrainer, start: int, stop: int) -> None:
    for step in range(start, stop):
        trainer.train_step(*batch(step))
        if step % 4 == 0:
            trainer.eval_step(*batch(step))  # must not disturb anything


def flatten(value, path: str = "") -> dict:
    if isinstance(value, dict):
        return {k: v for key, entry in value.items() for k, v in flatten(entry, f"{path}/{key}").items()}
    return {path: value}


@pytest.mark.parametrize(
    ("kind", "accumulation", "start"), [("adam", 1, 5), ("adam", 3, 7), ("fp16", 2, 5), ("lamb", 1, 4)]
)
def test_resume_in_a_new_process(kind: str, accumulation: int, start: int, tmp_path: Path) -> None:
    from ort_trainer.checkpoint import load_checkpoint_file

    whole = make(kind, accumulation)
    run(whole, 0, TOTAL)
    whole.save_checkpoint(tmp_path / "whole")
    part = make(kind, accumulation)
    run(part, 0, start)
    part.save_checkpoint(tmp_path / "part", {"start": start, "tensor": torch.tensor(start)})
    arguments = f"{kind!r}, {accumulation}, {start}, {str(tmp_path / 'part')!r}, {str(tmp_path / 'resumed')!r}"
    # The number of threads changes how PyTorch's kernels round.
    program = f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    program += f"from tests.training.test_resume import resume; resume({arguments})"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, timeout=300)
    expected, _ = load_checkpoint_file(tmp_path / "whole")
    found, _ = load_checkpoint_file(tmp_path / "resumed")
    expected, found = flatten(expected), flatten(found)
    assert expected.keys() == found.keys()
    if accumulation > 1:
        assert any(key.startswith("/gradients/") for key in expected), "the run ends in the middle of a window"
    for key, value in expected.items():
        assert np.array_equal(value, found[key]), key


def test_without_optimizer_states(tmp_path: Path) -> None:
    trainer = make("adam", 1)
    run(trainer, 0, 3)
    trainer.save_checkpoint(tmp_path / "a", include_optimizer_states=False)
    other = make("adam", 1)
    with pytest.warns(UserWarning, match="Missing key: optimizer in state_dict"):
        other.load_checkpoint(tmp_path / "a")
    other.prepare(batch(0))
    assert other.train_step_info.step == 3
    assert other.state_dict()["optimizer"]["fc1.weight"]["Update_Count"].tolist() == [1]


def test_number_of_files() -> None:
    with pytest.raises(ValueError, match="Expected number of files to load: 1, got 2"):
        make("adam", 1).load_checkpoint(__file__, __file__)
