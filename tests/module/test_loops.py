"""``ORTModule`` inside the loops of other libraries, against the same loop with the module itself."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ort_trainer import ORTModule

from .pairs import Heads, close

Y = torch.arange(24) % 3
DATA = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), Y)


@pytest.fixture(autouse=True)
def _new_state() -> Iterator[None]:
    """Accelerate has one state in a process."""
    yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(True)


def compare(loop: Callable[[nn.Module], list[float]], rel: float = 1e-6) -> None:
    """Runs a loop with both; losses and what remains in the module must be equal."""
    eager = Heads()
    ours = copy.deepcopy(eager)
    expected, found = loop(eager), loop(ORTModule(ours))
    assert len(expected) > 4 and found == pytest.approx(expected, rel=rel)
    close(ours.state_dict(), eager.state_dict())


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")

    def loop(module: nn.Module) -> list[float]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(module, optimizer, DataLoader(DATA, batch_size=4))
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model(x, label=y)["loss"]
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        assert accelerator.unwrap_model(model) is module
        return losses

    compare(loop)


def test_accelerate_in_bfloat16() -> None:
    """It replaces ``forward`` by one under autocast."""
    accelerate = pytest.importorskip("accelerate")
    losses = []
    for wrap in (lambda module: module, ORTModule):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(wrap(Heads()))
        loss = model(DATA.tensors[0], label=Y)["loss"]
        assert loss.dtype == torch.float32  # accelerate converts results
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert abs(losses[0] - Heads()(DATA.tensors[0], label=Y)["loss"].item()) > 1e-5


def test_grad_scaler() -> None:
    def loop(module: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        losses = []
        for x, y in DataLoader(DATA, batch_size=4):
            loss = module(x, label=y)["loss"]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses += [loss.item(), scaler.get_scale()]
        return losses

    compare(loop)


def test_lightning_with_automatic_optimization() -> None:
    lightning: Any = pytest.importorskip("lightning", reason="lightning is not installed: docs/huggingface.md")

    def loop(module: nn.Module) -> list[float]:
        losses: list[float] = []

        class Task(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = module

            def training_step(self, batch: Any) -> torch.Tensor:
                loss: torch.Tensor = self.model(batch[0], label=batch[1])["loss"]
                losses.append(loss.item())
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=0.01)

        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, gradient_clip_val=0.5, accumulate_grad_batches=2,
        )  # fmt: skip
        trainer.fit(Task(), DataLoader(DATA, batch_size=4))
        return losses

    compare(loop)
