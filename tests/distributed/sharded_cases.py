"""The cases that the processes of sharded_worlds.py run: ZeRO and checkpoints."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, amp, optim

Result = dict[str, Any]
TWO = {"batch": {"gradient_accumulation_steps": 2}}


class Odd(nn.Module):
    """A scalar weight, an unused one, a frozen one, a tied one, and one in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.again = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.again.weight = self.middle.weight
        self.last = nn.Linear(12, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(5))
        self.first.bias.requires_grad_(False)
        self.kernel = nn.Parameter(torch.randn(4, 2, 2, 2).to(memory_format=torch.channels_last))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.first(x)))
        hidden = self.again(torch.tanh(self.middle(hidden)) * self.scale)
        return self.last(hidden) + F.conv2d(x.view(-1, 2, 2, 2), self.kernel).flatten(1)


def batches(count: int, first: int = 0, size: int = 24) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        yield torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def make(config: optim.OptimizerConfig, stage: int, options: dict[str, Any], dropout: float = 0) -> ORTTrainer:
    """Returns a trainer with buckets of 1000 bytes; the model fills several."""
    distributed = {"bucket_cap_mb": 1e-3, "deepspeed_zero_optimization": {"stage": stage}}
    model = Odd()
    model.dropout.p = dropout
    return ORTTrainer(
        model, "auto", config, nn.CrossEntropyLoss(), ORTTrainerOptions({**options, "distributed": distributed})
    )


def train(trainer: ORTTrainer, rank: int, size: int, steps: int, first: int = 0) -> list[float]:
    """Trains on this rank's part of each batch."""
    return [float(trainer.train_step(x.chunk(size)[rank], y.chunk(size)[rank])[0]) for x, y in batches(steps, first)]


def weights(trainer: ORTTrainer) -> Result:
    return {f"weight.{name}": value.numpy() for name, value in trainer.state_dict(pytorch_format=True).items()}


def moments(trainer: ORTTrainer) -> Result:
    return {
        f"moment.{name}.{slot}": value
        for name, slots in trainer.state_dict()["optimizer"].items()
        for slot, value in slots.items()
    }


def run(config: Callable[[], optim.OptimizerConfig], options: dict[str, Any], rank: int, size: int) -> Result:
    trainer = make(config(), 1, options)
    losses = train(trainer, rank, size, 12)
    assert trainer.session is not None
    norm = trainer.train_step_info.grad_norm
    return {"losses": np.array(losses), "norm": np.array(norm), **weights(trainer), **moments(trainer)}


# Name of a case -> config and options.
RUNS: dict[str, tuple[Callable[[], optim.OptimizerConfig], dict[str, Any]]] = {
    "sgd": (lambda: optim.SGDConfig(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01), {}),
    "adam": (lambda: optim.AdamConfig(lr=0.01, lambda_coef=0.1, max_norm_clip=0.05), TWO),
    "adam_after": (lambda: optim.AdamConfig(lr=0.01, lambda_coef=0.1, weight_decay_mode=1), {}),
    "lamb": (lambda: optim.LambConfig(lr=0.02, lambda_coef=0.01, do_bias_correction=True), TWO),
    "lion": (lambda: optim.LionConfig(lr=0.003, weight_decay=0.1), {"utils": {"max_grad_value": 0.02}}),
    "groups": (
        lambda: optim.AdamWConfig([{"params": ["last.weight", "scale"], "lr": 0.05, "weight_decay": 0.0}], lr=0.01),
        {"utils": {"max_grad_norm": 0.1}, **TWO},
    ),
}
for _name, (_config, _options) in RUNS.items():
    globals()[_name] = functools.partial(run, _config, _options)


def own_loop(rank: int, size: int) -> Result:
    """Passes that fill p.grad; each update uses two."""
    trainer = make(optim.AdamWConfig(lr=0.01), 1, {})
    for number, (x, y) in enumerate(batches(8)):
        trainer.forward_backward(x.chunk(size)[rank], y.chunk(size)[rank])
        if number % 2:
            trainer.optimizer_step()
            trainer.lazy_reset_grad()
    return weights(trainer)


def overflow(rank: int, size: int) -> Result:
    """Trains in fp16, with one batch whose gradients overflow on the last rank."""
    scaler = amp.DynamicLossScaler(loss_scale=1024.0, up_scale_window=4)
    trainer = make(optim.AdamWConfig(lr=0.01), 1, {"mixed_precision": {"enabled": True, "loss_scaler": scaler}})
    finite, scales = [], []
    for number, (x, y) in enumerate(batches(8)):
        x = x * 1e6 if number == 2 else x
        x, y = x.chunk(size)[rank], y.chunk(size)[rank]
        trainer.train_step(x if rank == size - 1 else x.clamp(-5, 5), y)
        finite.append(trainer.train_step_info.all_finite)
        scales.append(scaler.loss_scale)
    return {"finite": np.array(finite), "scales": np.array(scales), **weights(trainer), **moments(trainer)}


def memory(rank: int, size: int) -> Result:
    """Returns how many elements of the moments this rank has, and their total."""
    trainer = make(optim.AdamConfig(), 1, {})
    train(trainer, rank, size, 1)
    slots = trainer.loop.optimizer.slots.values()
    return {
        "kept": sum(value.numel() for kept in slots for value in kept.values()),
        "whole": sum(value.size for value in moments(trainer).values() if value.dtype == np.float32),
    }


def refused_torch(rank: int, size: int) -> Result:
    model = Odd()
    options = ORTTrainerOptions({"distributed": {"deepspeed_zero_optimization": {"stage": 1}}})
    ORTTrainer(model, "auto", torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), options)
    return {}


def refused_state(rank: int, size: int) -> Result:
    """Reads the state of an optimizer of which each process has only a part."""
    model = Odd()
    options = ORTTrainerOptions({"distributed": {"deepspeed_zero_optimization": {"stage": 1}}})
    optimizer = torch.optim.AdamW(model.parameters())
    config = optim.from_torch(optimizer)
    train(ORTTrainer(model, "auto", config, nn.CrossEntropyLoss(), options), rank, size, 1)
    optimizer.state_dict()
    return {}


def refused_shared(rank: int, size: int) -> Result:
    """Two weights that share memory without being views of each other."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[1].weight = nn.Parameter(model[0].weight.data[:4])
    options = ORTTrainerOptions({"distributed": {"deepspeed_zero_optimization": {"stage": 1}}})
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(), nn.CrossEntropyLoss(), options)
    x, y = next(batches(1))
    trainer.train_step(x, y)
    return {}


def _path(name: str) -> Path:
    return Path(os.environ["CHECKPOINTS"], name)


def _chain(stage: int, source: str | None, rank: int, size: int) -> Result:
    """Loads what another world saved, returns the state, continues training, and saves in the middle of a window."""
    trainer = make(optim.AdamConfig(lr=0.01, lambda_coef=0.1), stage, TWO, dropout=0.1)
    found: Result = {}
    if source is not None:
        if size > 2:  # loads before the first batch; otherwise after it
            trainer.load_checkpoint(_path(source))
        trainer.prepare(next(batches(1))[:2])
        train(trainer, rank, size, 2 if size <= 2 else 0, first=90)
        found["user"] = trainer.load_checkpoint(_path(source))["from"]
        loaded = trainer.state_dict()
        found |= {f"loaded.{key}": value for key, value in {**weights(trainer), **moments(trainer)}.items()}
        found |= {f"gradient.{name}": value for name, value in loaded["gradients"].items()}
        found["random"] = loaded["random"]
        found["own_random"] = trainer.loop.executor.generator.get_state().numpy()
        found["window"] = np.array([loaded["window"][key] for key in ("micro_batches", "weight")])
    found["losses"] = np.array(train(trainer, rank, size, 5, first=10))
    trainer.save_checkpoint(_path(f"from{size}_{stage}"), {"from": size}, overwrite=True)
    state = trainer.state_dict()
    found |= {f"saved.{key}": value for key, value in {**weights(trainer), **moments(trainer)}.items()}
    found |= {f"total.{name}": value for name, value in state["gradients"].items()}
    found |= {f"option.{key}": value for key, value in state["trainer_options"].items() if key != "optimizer_name"}
    found["saved_window"] = np.array([state["window"][key] for key in ("micro_batches", "weight")])
    found["saved_random"] = state.get("random_states", state["random"][None])
    return found


# 4 -> 2 -> 1 -> 3 processes, with ZeRO on in every other one; then with ZeRO on in the others.
first_on = functools.partial(_chain, 1, None)
first_off = functools.partial(_chain, 0, None)
second_off = functools.partial(_chain, 0, "from4_1")
second_on = functools.partial(_chain, 1, "from4_0")
third = functools.partial(_chain, 0, "from2_0")
third_again = functools.partial(_chain, 1, "from2_1")
fourth_on = functools.partial(_chain, 1, "from1_0")
fourth_off = functools.partial(_chain, 0, "from1_1")


def resume(rank: int, size: int) -> Result:
    """Continues after a checkpoint, and again from that checkpoint in another trainer."""
    path = _path(f"resume{size}")
    first = make(optim.LambConfig(lr=0.01), 1, TWO, dropout=0.1)
    train(first, rank, size, 4)
    first.save_checkpoint(path)
    losses = train(first, rank, size, 6, first=4)
    second = make(optim.LambConfig(lr=0.01), 1, TWO, dropout=0.1)
    second.load_checkpoint(path)
    again = train(second, rank, size, 6, first=4)
    found = {"losses": np.array(losses), "again": np.array(again)}
    for name, trainer in (("first", first), ("second", second)):
        found |= {f"{name}.{key}": value for key, value in {**weights(trainer), **moments(trainer)}.items()}
    return found


def failures(rank: int, size: int) -> Result:
    """Errors in one process, and what all raise then; training continues after each."""
    trainer = make(optim.AdamConfig(), 1, {})
    train(trainer, rank, size, 1)
    trainer.save_checkpoint(_path("good"), overwrite=True)
    train(trainer, rank, size, 1)
    trainer.save_checkpoint(_path("other"), overwrite=True)
    before = weights(trainer)
    found: Result = {}
    for name, action in {
        "write": lambda: trainer.save_checkpoint(_path("no_such_folder") / "file"),
        "exists": lambda: trainer.save_checkpoint(_path("good")),
        "read": lambda: trainer.load_checkpoint(_path("good" if rank == 0 else "missing")),
        "damaged": lambda: trainer.load_state_dict({} if rank == 0 else {"model": 1}),
        "other": lambda: trainer.load_checkpoint(_path("good" if rank == 0 else "other")),
    }.items():
        try:
            action()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    after = weights(trainer)
    found["unchanged"] = all(np.array_equal(before[key], after[key]) for key in before)
    found["losses"] = np.array(train(trainer, rank, size, 2))
    try:  # on one rank only: last, because nothing works after it
        if rank == 0:
            trainer.load_checkpoint(_path("good"))
        train(trainer, rank, size, 1)
    except Exception as error:
        found["alone"] = f"{type(error).__name__}: {error}"
    return found
