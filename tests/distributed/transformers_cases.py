"""The cases that the processes of test_transformers.py run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import broadcast_object_list
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer

from ort_trainer import ORTModule, ORTTrainer, optim
from ort_trainer.integrations.transformers import HuggingFaceTrainer

from ..integrations.test_transformers import Tiny, accuracy, arguments, gpt2, pad, points, texts

transformers.utils.logging.disable_progress_bar()
KINDS: tuple[type[Trainer], ...] = (HuggingFaceTrainer, Trainer)


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
            Tiny(),
            arguments(folder(), **settings),
            train_dataset=points(72),
            eval_dataset=points(10),
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
        trainer = HuggingFaceTrainer(Tiny(dropout=0.2), settings, train_dataset=points(48))
        trainer.train(resume_from_checkpoint=checkpoint)
        found |= logged(trainer, name)
    files = sorted(path.name for path in (place / "checkpoint-8").iterdir() if path.name.startswith("rng"))
    return {**found, "files": files}


def sharded(rank: int, size: int) -> dict[str, Any]:
    """accelerate shards the layers that HuggingFaceTrainer has wrapped; some weights are on the meta device first.

    accelerate's ``Accelerator`` shards on GPUs alone, so its function for FSDP2 is called here.
    """
    os.environ["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"
    batch = pad(texts(4 * size, False)[4 * rank : 4 * rank + 4])
    found: dict[str, Any] = {}
    for name in ("Trainer", "HuggingFaceTrainer"):
        torch.manual_seed(0)
        model = gpt2()
        model.config.use_cache = False  # a layer that is computed again would extend it twice
        if name == "HuggingFaceTrainer":
            training = arguments(folder(), fsdp=True, fsdp_config={"activation_checkpointing": True})
            training.fsdp_plugin_args = None  # what makes accelerate ask for a GPU
            model = HuggingFaceTrainer(model, training, train_dataset=texts(8, False), data_collator=pad).model
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            activation_checkpointing=True,
            cpu_ram_efficient_loading=True,
        )
        plugin.set_auto_wrap_policy(model)
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            mixed_precision="no",
            device=torch.device("cpu"),
            is_main_process=rank == 0,
            parallelism_config=None,
        )
        fsdp2_apply_ac(accelerator, model)
        model = fsdp2_prepare_model(accelerator, model)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(4):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[f"{name}.losses"] = losses
        found[f"{name}.graphs"] = sum(type(part).__mro__.count(ORTModule) for part in model.modules())
    return found


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
