"""The cases that the processes of test_data_parallel.py run."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.distributed.buckets import Buckets
from ort_trainer.distributed.reduction import Sum

LOSS = nn.CrossEntropyLoss()
Batch = tuple[torch.Tensor, torch.Tensor]


class Odd(nn.Module):
    """Two layers that share a weight, a frozen layer, one that only some batches use, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen, self.rare, self.never, self.last = (nn.Linear(8, size) for size in (8, 8, 8, 4))
        self.frozen.requires_grad_(False)
        self.uses_rare = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.frozen(self.first(x)))))
        return self.last(hidden + self.rare(x) if self.uses_rare else hidden)


class Mixed(nn.Module):
    """Tensors of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.across = nn.Parameter(torch.randn(4, 3).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("count", torch.randint(0, 1000, ()))
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("rounded", torch.randn(5).bfloat16())
        self.register_buffer("waves", torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


def batches(count: int, size: int = 24, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator))
        for _ in range(count)
    ]


def part(batch: Batch, rank: int, size: int) -> Batch:
    return batch[0].chunk(size)[rank], batch[1].chunk(size)[rank]


def make(config: Any, options: dict[str, Any] | None = None, model: nn.Module | None = None) -> ORTTrainer:
    return ORTTrainer(mlp() if model is None else model, "auto", config, LOSS, ORTTrainerOptions(options or {}))


def result(trainer: ORTTrainer, losses: Sequence[float] = (), **others: Any) -> dict[str, Any]:
    info, state = trainer.train_step_info, trainer.state_dict(pytorch_format=True)
    found = {"losses": np.array(losses), "optimization_step": info.optimization_step, "grad_norm": info.grad_norm}
    return found | others | {f"weight.{name}": value.float().numpy() for name, value in state.items()}


# Every rank has its part of each batch.


def train(
    rank: int,
    size: int,
    config: Any,
    options: dict[str, Any] | None = None,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    trainer = make(config, options, model)
    losses = [float(trainer.train_step(*part(batch, rank, size))[0]) for batch in batches(12)]
    return result(trainer, losses)


TWICE = {"batch": {"gradient_accumulation_steps": 2}}


def sgd(rank: int, size: int) -> dict[str, Any]:
    return train(rank, size, optim.SGDConfig(lr=0.1), {"utils": {"max_grad_norm": 0.1}})


def adam(rank: int, size: int) -> dict[str, Any]:
    options = {**TWICE, "distributed": {"allreduce_post_accumulation": True}}
    return train(rank, size, optim.AdamConfig(lr=0.01, epsilon=1e-5), options)


def adamw(rank: int, size: int) -> dict[str, Any]:
    config = optim.AdamWConfig(lr=0.01, eps=1e-5)
    return train(rank, size, config, {**TWICE, "utils": {"max_grad_value": 0.01}})


def lamb(rank: int, size: int) -> dict[str, Any]:
    return train(rank, size, optim.LambConfig(lr=0.01, epsilon=1e-5), TWICE)


def torch_optimizer(rank: int, size: int) -> dict[str, Any]:
    model = mlp()
    return train(rank, size, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), TWICE, model)


def own_loop(rank: int, size: int) -> dict[str, Any]:
    """Gradients of two passes in ``p.grad``, used by a PyTorch optimizer and the trainer in turn."""
    trainer, losses = make(optim.AdamConfig(lr=0.01, epsilon=1e-5), {}, model := mlp()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, batch in enumerate(batches(12)):
        losses.append(float(trainer.forward_backward(*part(batch, rank, size))[0]))
        if index % 4 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        if index % 4 == 3:
            assert trainer.optimizer_step()
        if index % 2:
            trainer.lazy_reset_grad()
    assert not trainer.optimizer_step()
    return result(trainer, losses)


# Every rank has some micro-batches of each update: the first rank has most of them, the last of four none.


def dealt(things: Sequence[Any], rank: int, size: int) -> Sequence[Any]:
    bounds = [round(len(things) * (1 - (1 - place / size) ** 2)) for place in range(size + 1)]
    return things[bounds[rank] : bounds[rank + 1]]


def updates(
    rank: int, size: int, trainer: ORTTrainer, step: Callable[[int, Batch], Any], count: int = 5
) -> dict[str, Any]:
    """Trains with 6 micro-batches per update; ``step`` gets the number of each in its update."""
    found = []
    for number in range(count):
        for index, batch in dealt([*enumerate(batches(6, 4, number))], rank, size):
            step(index, (batch[0] * (1e6 if (number, index) == (2, 0) and trainer.loss_scaler else 1.0), batch[1]))
        found.append(trainer.optimizer_step())
    assert trainer.optimizer_step() is False, "no process has gradients left"
    return result(trainer, updated=np.array(found))


def windows(reduction: str = "mean", **others: Any) -> dict[str, Any]:
    return {"batch": {"gradient_accumulation_steps": 100, "gradient_reduction": reduction}, **others}


ADAM = {"lr": 0.01, "epsilon": 1e-5, "max_norm_clip": math.inf}


def mean(rank: int, size: int) -> dict[str, Any]:
    trainer = make(optim.AdamConfig(**ADAM), windows())
    return updates(rank, size, trainer, lambda index, batch: trainer.train_step(*batch))


def summed(rank: int, size: int) -> dict[str, Any]:
    trainer = make(optim.SGDConfig(lr=0.02), windows("sum"))
    return updates(rank, size, trainer, lambda index, batch: trainer.train_step(*batch))


def weighted(rank: int, size: int) -> dict[str, Any]:
    """Trains with the methods of the session."""
    trainer = make(optim.AdamConfig(**ADAM), windows("weighted"))
    trainer.prepare(batches(1, 4)[0])
    session = trainer.session
    assert session is not None
    return updates(rank, size, trainer, lambda i, batch: session.train_step(batch, gradient_weight=1000.0 / (i + 1)))


def fp16(rank: int, size: int) -> dict[str, Any]:
    """One micro-batch of rank 0 overflows."""
    trainer = make(optim.AdamConfig(**ADAM), windows(mixed_precision={"enabled": True, "dtype": "float16"}))
    found = updates(rank, size, trainer, lambda index, batch: trainer.train_step(*batch))
    assert trainer.loss_scaler is not None
    return found | {"loss_scale": trainer.loss_scaler.loss_scale, "scaler": str(trainer.loss_scaler.state_dict())}


def unused(rank: int, size: int) -> dict[str, Any]:
    """Only one micro-batch of rank 0 uses a layer."""
    model = Odd()
    trainer = make(optim.AdamWConfig(lr=0.01, eps=1e-5, weight_decay=0.1), windows(), model)

    def step(index: int, batch: Batch) -> None:
        model.uses_rare = index == 1
        trainer.train_step(*batch)

    return updates(rank, size, trainer, step)


# Every rank has its own batches, and their numbers differ.


def own_batches(epoch: int, rank: int, size: int) -> list[Batch]:
    counts = [max(0, 7 - 3 * rank) for rank in range(size)]
    return batches((counts if epoch == 0 else counts[::-1])[rank], 4, 10 * epoch + rank)


def factor(update: int) -> float:
    return 1.0 / (1 + update)


def uneven(rank: int, size: int) -> dict[str, Any]:
    config, options = optim.AdamConfig(**ADAM), ORTTrainerOptions({**TWICE, "lr_scheduler": factor})
    trainer = ORTTrainer(mlp(), "auto", config, LOSS, options)
    answers, gathered = [], []
    for epoch in range(2):
        with trainer.join():
            own = own_batches(epoch, rank, size)
            for batch in own:
                trainer.train_step(*batch)
            if len(own) == 7:
                trainer.state_dict()
        answers.append(trainer.optimizer_step())
        gathered.append([row["step"] for row in trainer.gather({"step": trainer.train_step_info.step})])
    try:
        with trainer.join():
            raise KeyError("of the user")
    except KeyError:
        pass
    return result(trainer, answers=np.array(answers), steps=np.array(gathered))


def uneven_in_torch(size: int) -> dict[str, np.ndarray]:
    """The same in one PyTorch process: an update combines the windows of all ranks."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for epoch in range(2):
        ranks = [own_batches(epoch, rank, size) for rank in range(size)]
        for start in range(0, 7, 2):
            used = [batch for own in ranks for batch in own[start : start + 2]]
            optimizer.zero_grad()
            (sum(LOSS(model(x), y) for x, y in used) / len(used)).backward()
            optimizer.step()
            schedule.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


# Compared with PyTorch's own data parallel training.


def beside_ddp(rank: int, size: int, model: nn.Module, unused: bool = False) -> dict[str, Any]:
    trainer = make(optim.AdamConfig(**ADAM), {}, copy.deepcopy(model))
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
    losses, theirs = [], []
    for batch in batches(12):
        x, y = part(batch, rank, size)
        losses.append(float(trainer.train_step(x, y)[0]))
        optimizer.zero_grad()
        loss = LOSS(ddp(x), y)
        loss.backward()
        optimizer.step()
        theirs.append(float(loss))
    others = {f"ddp.{name}": value.float().numpy() for name, value in model.state_dict().items()}
    return result(trainer, losses, ddp_losses=np.array(theirs), **others)


def like_ddp(rank: int, size: int) -> dict[str, Any]:
    """Batch norm: weights and running statistics equal those of DistributedDataParallel with the same batches."""
    return beside_ddp(rank, size, normed())


def branching(rank: int, size: int) -> dict[str, Any]:
    """Only rank 0 uses a layer, from the first step on, and nobody warns of it."""
    model = Odd()
    model.uses_rare = rank == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the processes")
        return beside_ddp(rank, size, model, unused=True)


# The rest.


def start(rank: int, size: int) -> dict[str, Any]:
    """Weights and buffers, of all kinds of tensors, are those of rank 0."""
    torch.manual_seed(rank)
    model = Mixed()
    make(optim.SGDConfig(lr=0.1), {}, model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().to(torch.complex128).numpy() for name, tensor in tensors.items()}


def dropout(rank: int, size: int) -> dict[str, Any]:
    """All ranks have the same batch and keep their weights."""
    found = {}
    for seed in (3, 3, 4):
        torch.manual_seed(seed if rank == 0 else 100 + len(found))
        state = torch.get_rng_state()
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
        torch.set_rng_state(state)
        trainer = make(optim.SGDConfig(lr=0.0), {}, model)
        found[f"losses{len(found)}"] = np.array([float(trainer.train_step(*batches(1)[0])[0]) for _ in range(3)])
    return found


def sums(rank: int, size: int) -> dict[str, Any]:
    """Sums of two buckets, sent in several dtypes: numbers whose sum overflows fp16."""
    trainer = make(optim.SGDConfig(lr=0.1))
    together = trainer.loop.strategy.processes  # type: ignore[attr-defined]
    like = {name: torch.empty(shape) for name, shape in {"a": (5, 3), "b": (7,), "c": ()}.items()}
    found = {}
    for dtype in (None, torch.float16, torch.bfloat16):
        for scatter in (False, True):
            buckets = Buckets(like, size, 64)
            assert len(list(buckets)) == 2
            for number, view in enumerate(buckets.views.values()):
                view.fill_(40000.0 - 100 * rank - 10000 * number)
            Sum(together, dtype).reduce(list(buckets), scatter)
            for bucket in buckets:
                for owner, chunk in enumerate(bucket.flat.chunk(size)):
                    if scatter and owner != rank:  # undefined
                        chunk.zero_()
            views = [view.reshape(-1) for view in buckets.views.values()]
            found[f"{dtype}.{scatter}".removeprefix("torch.")] = torch.cat(views).numpy()
    return found


def refused(rank: int, size: int) -> dict[str, Any]:
    """What several processes can't do; all of them raise."""
    found: dict[str, Any] = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    model = mlp()
    attempt("closure", lambda: make(torch.optim.LBFGS(model.parameters()), {}, model))
    attempt("norm", lambda: make(optim.SGDConfig(), {}, nn.SyncBatchNorm.convert_sync_batchnorm(normed())))
    trainer = make(optim.SGDConfig(lr=0.1), {}, model)
    batch = batches(1)[0]

    def inside(action: Callable[[], Any]) -> None:
        with trainer.join():
            action()

    attempt("pass", lambda: inside(lambda: trainer.forward_backward(*batch)))
    attempt("nested", lambda: inside(lambda: inside(lambda: None)))
    trainer.forward_backward(*batch)
    attempt("step", lambda: inside(trainer.optimizer_step))
    if rank == 0:
        model[0].weight.grad = None
    attempt("missing", trainer.optimizer_step)
    trainer.lazy_reset_grad()
    attempt("kinds", lambda: trainer.state_dict() if rank else trainer.train_step(*batch))
    trainer.lazy_reset_grad()
    trainer.optim_config.lr = 0.1 + rank
    attempt("rates", lambda: trainer.train_step(*batch))
    return found
