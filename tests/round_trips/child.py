"""The other process: loads checkpoints, writes what it found, and saves models as transformers does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .models import CASES, WithLoss, all_tensors


def main(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        case = CASES[name]()
        model = case.model(seed=5)
        trainer = case.trainer(model)
        trainer.load_checkpoint(folder / f"{name}.ortckpt")
        trainer.prepare(case.batch)
        found = {"model": all_tensors(model), "trainer": trainer.state_dict(pytorch_format=True)}
        if isinstance(model, WithLoss):
            model.language_model.save_pretrained(folder / name)
        torch.save(found, folder / f"{name}.found")
