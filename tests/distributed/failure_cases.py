"""The cases that the processes of test_failures.py run: rank 1 does something different from the others.

Each case has its own process group, because a group in which a process was missing can't be used again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.export import export  # noqa: F401 - exports run in children, which would each import it

Batch = tuple[torch.Tensor, torch.Tensor]
DESCRIPTION = {"inputs": [("x", ["batch", 8]), ("label", ["batch"])], "outputs": [("loss", [], True)]}
BATCH: Batch = (torch.ones(4, 8), torch.arange(4))


_UNWATCHED = logging.getLogger("failure_cases")


class Widened(nn.Module):
    """Takes inputs of any dtype."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.float()) * getattr(_UNWATCHED, "gain", 1.0)


def make(
    timeout: float = 60,
    rate: float = 0.1,
    net: nn.Module | None = None,
    limit: int | None = None,
    verify: int | None = None,
    **batch: int,
) -> ORTTrainer:
    debug = {"max_nonfinite_losses": limit, "verify_every": verify}
    options = ORTTrainerOptions({"distributed": {"timeout": timeout}, "batch": batch, "debug": debug})
    net = Widened() if net is None else net
    return ORTTrainer(net, DESCRIPTION, optim.SGDConfig(lr=rate), nn.CrossEntropyLoss(), options)


@functools.cache
def store(rank: int, size: int) -> dist.TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, size, is_master=rank == 0)


def case(act: Callable[[int], ORTTrainer | None]) -> Callable[[int, int], dict[str, Any]]:
    """Runs a case in a new group; returns its error, how long it took, and the weights after it."""

    @functools.wraps(act)
    def run(rank: int, size: int) -> dict[str, Any]:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(act.__name__, store(rank, size)), rank=rank, world_size=size
        )
        begin, error = time.monotonic(), ""
        try:
            act(rank)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        store(rank, size).set(f"{act.__name__} is over for {rank}", "")
        return {"error": error, "seconds": time.monotonic() - begin}

    return run


def wait_for_the_others(name: str) -> None:
    """Waits, in rank 1, until a case is over for the others."""
    store(1, 3).wait([f"{name} is over for {rank}" for rank in (0, 2)], timedelta(seconds=200))


@case
def other_model(rank: int) -> None:
    make(net=Widened(classes=5 if rank == 1 else 4))


@case
def other_options(rank: int) -> None:
    make(gradient_accumulation_steps=2 if rank == 1 else 1)


@case
def other_rate(rank: int) -> None:
    make(rate=0.2 if rank == 1 else 0.1)


@case
def other_rate_later(rank: int) -> None:
    trainer = make()
    trainer.train_step(*BATCH)
    trainer.optim_config.lr = 0.2 if rank == 1 else 0.1
    trainer.train_step(*BATCH)


@case
def other_dtype(rank: int) -> None:
    make().train_step(BATCH[0].to(torch.float16 if rank == 1 else torch.float32), BATCH[1])


@case
def other_weights(rank: int) -> None:
    net = Widened()
    trainer = make(net=net)
    if rank == 1:
        nn.init.zeros_(net.net.bias)
    trainer.train_step(*BATCH)


@case
def other_method(rank: int) -> None:
    trainer = make()
    trainer.train_step(*BATCH)
    trainer.state_dict() if rank == 1 else trainer.train_step(*BATCH)


class Varied(Widened):
    """Its forward pass depends on a number, and on the number of rows."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(super().forward(x if x.shape[0] < 5 else x.relu()), self.rate)
        return y * torch.tensor(self.rate + 1)


@case
def other_number(rank: int) -> None:
    with warnings.catch_warnings(record=True) as messages:
        make(net=Varied(0.1 if rank == 1 else 0.5)).train_step(*BATCH)
    for message in messages:
        assert isinstance(message.message, Warning)
        raise message.message


@case
def other_sizes(rank: int) -> None:
    """Another number of rows takes another branch, so the graphs can't be compared."""
    x, label = (value.repeat(2, *[1] * (value.dim() - 1)) if rank == 1 else value for value in BATCH)
    make(net=Varied(0.5)).train_step(x, label)


class Ranked(Widened):
    """Its forward pass asks which process it is, but computes the same in all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clone() if self.rank < 0 else x)


@case
def other_reads(rank: int) -> None:
    make(net=Ranked(rank)).train_step(*BATCH)


@case
def other_trainer(rank: int) -> None:
    first, second = make(), make()
    (second if rank == 1 else first).train_step(*BATCH)


@case
def other_order(rank: int) -> None:
    nets = [Widened(), Widened()]
    nn.init.zeros_(nets[1].net.weight)
    for net in reversed(nets) if rank == 1 else nets:
        make(net=net)


@case
def other_weights_later(rank: int) -> None:
    net = Widened()
    trainer = make(net=net)
    trainer.train_step(*BATCH)
    if rank == 1:
        nn.init.zeros_(net.net.bias)
    trainer.train_step(*BATCH)
    trainer.state_dict()


@case
def joins_not(rank: int) -> None:
    trainer = make(timeout=5)
    with contextlib.nullcontext() if rank == 1 else trainer.join():
        trainer.gather({})


@case
def cannot_follow(rank: int) -> None:
    trainer = make(timeout=5, net=(net := Widened()))
    with trainer.join():
        if rank != 1:
            trainer.load_state_dict(net.state_dict())


@case
def raises_and_goes_on(rank: int) -> None:
    trainer = make()
    trainer.train_step(*BATCH)
    if rank == 1:
        with contextlib.suppress(TypeError):
            trainer.train_step(*BATCH[:1])
    trainer.train_step(*BATCH)


@case
def has_no_loss(rank: int) -> None:
    trainer = make(timeout=5, limit=1)
    trainer.train_step(*BATCH)
    trainer.train_step(BATCH[0] * (math.nan if rank == 1 else 1.0), BATCH[1])


@case
def differs(rank: int) -> None:
    net = Widened()
    trainer = make(timeout=5, net=net, verify=1)
    trainer.train_step(*BATCH)
    if rank == 1:
        setattr(_UNWATCHED, "gain", 2.0)  # noqa: B010
    try:
        trainer.train_step(*BATCH)
    finally:
        vars(_UNWATCHED).pop("gain", None)


@case
def raises(rank: int) -> None:
    trainer = make(timeout=5)
    trainer.train_step(*BATCH)
    before = {name: value.clone() for name, value in trainer.state_dict(pytorch_format=True).items()}
    try:
        if rank == 1:
            trainer.train_step(*BATCH[:1])
        trainer.train_step(*BATCH)
    except Exception:
        if rank == 1:
            wait_for_the_others("raises")
        # The weights are those of the last update, and nobody waits again.
        after, begin = trainer.state_dict(pytorch_format=True), time.monotonic()
        assert all(torch.equal(value, before[name]) for name, value in after.items())
        assert trainer.train_step_info.optimization_step == 1
        if rank != 1:
            try:
                trainer.train_step(*BATCH)
            except RuntimeError as error:
                assert "restart all processes" in str(error) and time.monotonic() - begin < 2
        raise


@case
def raises_outside(rank: int) -> None:
    """An error of the script, not of the trainer, which ends the process."""
    trainer = make(timeout=5)
    trainer.train_step(*BATCH)
    if rank != 1:
        trainer.train_step(*BATCH)
        return
    try:
        raise ValueError("of the script")
    except ValueError:
        sys.excepthook(*sys.exc_info())
    wait_for_the_others("raises_outside")


@case
def hangs(rank: int) -> None:
    trainer = make(timeout=5)
    trainer.train_step(*BATCH)
    if rank == 1:
        wait_for_the_others("hangs")
    trainer.train_step(*BATCH)


@case
def interrupted_twice(rank: int) -> None:
    trainer = make()
    trainer.train_step(*BATCH)
    if rank == 1:
        wait_for_the_others("interrupted_twice")
    if rank == 0:
        for delay in (0.5, 1.5):
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
    trainer.train_step(*BATCH)


@case
def dies(rank: int) -> None:
    trainer = make()
    trainer.train_step(*BATCH)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.train_step(*BATCH)
