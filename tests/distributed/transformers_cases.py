"""The cases that the processes of test_transformers.py run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer

from ort_trainer import ORTTrainer, optim
from ort_trainer.integrations.transformers import OrtTrainer

from ..integrations.test_transformers import Tiny, accuracy, arguments, bert, gpt2, pad, points, texts

transformers.utils.logging.disable_progress_bar()
KINDS: tuple[type[Trainer], ...] = (OrtTrainer, Trainer)


def folder() -> Path:
    """Returns a folder shared by all ranks."""
    return Path(broadcast_object_list([tempfile.mkdtemp()])[0])


def logged(trainer: Trainer, name: str) -> dict[str, Any]:
    """Returns the logged values and the weights."""
    history = trainer.state.log_history
    found: dict[str, Any] = {
        f"{name}.{key}": np.array([entry[key] for entry in history if key in entry])
        for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    }
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return found | {f"{name}.weight.{key}": value.numpy() for key, value in state.items()}


def classify(rank: int, size: int) -> dict[str, Any]:
    """Windows of two, the last of each epoch with one batch; clipping and evaluations."""
    settings = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "per_device_train_batch_size": 8 // size,
    }
    found: dict[str, Any] = {}
    for kind in KINDS:
        torch.manual_seed(0)
        trainer = kind(
            bert(),
            arguments(folder(), **settings),
            train_dataset=texts(72, True),
            eval_dataset=texts(10, True),
            data_collator=pad,
            compute_metrics=accuracy,
        )
        trainer.train()
        found |= logged(trainer, kind.__name__)
    return found


def language(rank: int, size: int) -> dict[str, Any]:
    """The loss is divided by the number of labels of a window, over all ranks."""
    settings = {"gradient_accumulation_steps": 3, "max_steps": 6, "per_device_train_batch_size": 8 // size}
    found: dict[str, Any] = {}
    for kind in KINDS:
        torch.manual_seed(0)
        trainer = kind(gpt2(), arguments(folder(), **settings), train_dataset=texts(72, False), data_collator=pad)
        trainer.train()
        found |= logged(trainer, kind.__name__)
    return found


def resume(rank: int, size: int) -> dict[str, Any]:
    """Resumes with dropout, from a checkpoint in the middle of the second epoch."""
    place = folder()
    found: dict[str, Any] = {}
    for name, checkpoint in (("whole", None), ("resumed", str(place / "checkpoint-8"))):
        settings = arguments(place, num_train_epochs=2, save_strategy="steps", save_steps=4)
        torch.manual_seed(0)
        trainer = OrtTrainer(Tiny(dropout=0.2), settings, train_dataset=points(48))
        trainer.train(resume_from_checkpoint=checkpoint)
        found |= logged(trainer, name)
    files = sorted(path.name for path in (place / "checkpoint-8").iterdir() if path.name.startswith("rng"))
    return {**found, "files": files}


class Shuffled(Sampler[int]):
    """A different order in each epoch, the same in all processes."""

    epoch = 0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def loader(rank: int, size: int) -> dict[str, Any]:
    """A DataLoader of accelerate, and a loop of train_step; then fit, which tells the loader of each epoch."""
    torch.manual_seed(0)
    trainer = ORTTrainer(Tiny(), "auto", optim.AdamConfig(lr=0.01))
    made: Any = DataLoader(points(40), batch_size=8 // size, sampler=Shuffled())
    prepared = Accelerator(cpu=True).prepare(made)
    losses = []
    for epoch in range(2):
        prepared.set_epoch(epoch)
        losses += [float(trainer.train_step(batch)[0]) for batch in prepared]
    result = trainer.fit(prepared, epochs=2, progress=False)
    state = trainer.state_dict(pytorch_format=True)
    found = {"losses": np.array(losses), "history": np.array([row["loss"] for row in result.history])}
    return found | {f"weight.{name}": value.numpy() for name, value in state.items()}
