"""``ORTModule(layer)`` beside the layer in PyTorch's engines for large models: FSDP2, tensor parallelism, pipelines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ort_trainer import ORTModule, ORTTrainer, optim

WIDTH, CPU = 8, torch.device("cpu")
all_gather: Any = getattr(_functional_collectives, "all_gather_single_autograd", None)
all_gather = all_gather or _functional_collectives.all_gather_tensor_autograd  # before torch 2.13


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up: nn.Module = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank (Hu et al., "LoRA", 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class AdaptedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = Adapted(nn.Linear(WIDTH, 2 * WIDTH))


class Contrasted(Block):
    """Compares its rows with those of all processes, as contrastive losses do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = all_gather(x.mean(1), 0, dist.group.WORLD)
        scale = all_reduce(x.square().mean(), "sum", dist.group.WORLD)
        return super().forward(x + (x.mean(1) @ rows.t() @ rows)[:, None] / scale)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head: nn.Module = nn.Linear(WIDTH, 11)
        self.checkpointed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


def flat_loss(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def sharded(graphs: bool, net: nn.Module | None = None, **settings: Any) -> Any:
    """Returns a model whose layers, and then the rest, are sharded."""
    torch.manual_seed(1)
    model: Any = Net() if net is None else net
    for at, layer in enumerate(model.layers):
        model.layers[at] = ORTModule(layer, fallback="error") if graphs else layer
        fully_shard(model.layers[at], **settings)
    return fully_shard(model, **settings)


def trained(net: Any, begin: Callable[[int], Any] = lambda micro: None, own_data: bool = True) -> dict[str, Any]:
    """Trains with two micro-batches an update; returns losses and whole weights.

    Args:
        net: The model.
        begin: Called before each micro-batch with its number.
        own_data: Whether each process has data of its own.
    """
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank() if own_data else 7)
    losses = []
    for _ in range(4):
        for micro in range(2):
            tokens = torch.randint(0, 11, (3, 5), generator=generator)
            begin(micro)
            loss = flat_loss(net(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_([p for p in net.parameters() if isinstance(p, DTensor) == own_data], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in net.state_dict().values()]
    return {"losses": losses, "weights": torch.cat([value.detach().flatten().double() for value in whole])}


def layer_by_layer(graphs: bool) -> dict[str, Any]:
    return trained(sharded(graphs))


def mixed_precision(graphs: bool) -> dict[str, Any]:
    return trained(sharded(graphs, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))


def offload(graphs: bool) -> dict[str, Any]:
    return trained(sharded(graphs, offload_policy=CPUOffloadPolicy(pin_memory=False)))


def lora(graphs: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    return trained(sharded(graphs, Net(AdaptedBlock)))


def accumulation(graphs: bool) -> dict[str, Any]:
    net = sharded(graphs)
    return trained(net, lambda micro: net.set_requires_gradient_sync(micro == 1))


def no_reshard(graphs: bool) -> dict[str, Any]:
    return trained(sharded(graphs, reshard_after_forward=False))


def hybrid(graphs: bool) -> dict[str, Any]:
    """Copies of the model, each sharded over some processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copies", "shards"))
    return trained(sharded(graphs, mesh=mesh))


def checkpointed(graphs: bool) -> dict[str, Any]:
    net = sharded(graphs)
    net.checkpointed = True
    return trained(net)


def from_meta(graphs: bool) -> dict[str, Any]:
    """The weights are on the meta device, until each process has memory for its part of them."""
    with torch.device("meta"):
        net = Net()
    net = sharded(graphs, net)
    net.to_empty(device="cpu")
    torch.manual_seed(2)
    for part in net.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return trained(net)


def prefetched(graphs: bool) -> dict[str, Any]:
    net = sharded(graphs)
    first, second = net.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    return trained(net, lambda micro: first.unshard(async_op=True))


def tensor_parallel(graphs: bool) -> dict[str, Any]:
    """Tensor parallelism divides the head; all processes have the same data."""
    torch.manual_seed(1)
    net = Net()
    net.head = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 11))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net.head, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for at, layer in enumerate(net.layers):
        net.layers[at] = ORTModule(layer, fallback="error") if graphs else layer
    return trained(net, own_data=False)


def collectives(graphs: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    return trained(sharded(graphs, Net(Contrasted)))


class Gathered(nn.Linear):
    """Returns what collective operations return."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = super().forward(x)
        return all_gather(rows, 0, dist.group.WORLD), all_reduce(rows, "sum", dist.group.WORLD)


def returned_collectives(graphs: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    layer = Gathered(WIDTH, 12)
    module = ORTModule(layer, fallback="error") if graphs else layer
    losses = []
    for scale in (1.0, 2.0):
        x = scale * torch.arange(24.0).view(3, WIDTH)
        gathered, reduced = module(x)
        loss = gathered.square().mean() + reduced.sin().sum()
        loss.backward()
        losses.append(loss.item())
    return {"losses": losses, "weights": layer.weight.grad.flatten()}


def pipelined(graphs: bool) -> dict[str, Any]:
    """Each process has a stage of the layers; micro-batches go forward and backward in turns (1F1B)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    (stage,) = stages(graphs, size)[rank::size]
    return scheduled(Schedule1F1B(PipelineStage(stage, rank, size, CPU), 4, flat_loss), [stage])


def pipelined_without_bubbles(graphs: bool) -> dict[str, Any]:
    """Each process has two stages, and computes gradients of weights when it would wait (Qi et al. 2024)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = stages(graphs, 2 * size)[rank::size]
    parts = [PipelineStage(stage, rank + at * size, 2 * size, CPU) for at, stage in enumerate(own)]
    return scheduled(ScheduleInterleavedZeroBubble(parts, 4, flat_loss), own)


def stages(graphs: bool, count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Embedding(11, WIDTH), Block()), Block(), Block(), nn.Linear(WIDTH, 11)]
    each = len(layers) // count
    parts = [nn.Sequential(*layers[at : at + each]) for at in range(0, len(layers), each)]
    return [ORTModule(part, fallback="error") if graphs else part for part in parts]


def scheduled(schedule: Any, own: Sequence[nn.Module]) -> dict[str, Any]:
    """Trains the stages of this process; the last process returns losses."""
    parameters = [parameter for stage in own for parameter in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    found: list[torch.Tensor] = []
    for tokens in batches(False):
        tokens = torch.cat([tokens] * 4)
        if dist.get_rank() == 0:
            schedule.step(tokens[:, :-1].contiguous())
        else:
            schedule.step(target=tokens[:, 1:].contiguous(), losses=found)
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    return {"losses": [loss.item() for loss in found], "weights": weights}


def trainer_for(net: nn.Module) -> ORTTrainer:
    options = {"utils": {"grad_norm_clip": False, "kernels": "pytorch"}, "distributed": {"timeout": 60}}
    return ORTTrainer(net, "auto", optim.AdamWConfig(lr=1e-2, weight_decay=0.01), loss_fn=flat_loss, options=options)


def batches(own_data: bool, seed: int = 0) -> Iterator[torch.Tensor]:
    """Yields six batches, the same in all processes or not."""
    generator = torch.Generator().manual_seed(seed + (dist.get_rank() if own_data else 0))
    for _ in range(6):
        yield torch.randint(0, 11, (3, 5), generator=generator)


def collectives_in_a_trainer(graphs: bool) -> dict[str, Any]:
    """A trainer beside DistributedDataParallel: each process has the whole model."""
    torch.manual_seed(1)
    net = Net(Contrasted)
    if graphs:
        trainer = trainer_for(net)
        losses = [trainer.train_step(tokens[:, :-1], tokens[:, 1:])[0].item() for tokens in batches(True)]
    else:
        losses = looped(DistributedDataParallel(net), torch.optim.AdamW(net.parameters(), lr=1e-2), batches(True))
    return {"losses": losses, "weights": torch.cat([value.detach().flatten() for value in net.state_dict().values()])}


def looped(net: nn.Module, optimizer: torch.optim.Optimizer, tokens_of: Iterable[torch.Tensor]) -> list[float]:
    """Trains in a loop, and returns the losses."""
    losses = []
    for tokens in tokens_of:
        loss = flat_loss(net(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


ARRANGEMENTS: Sequence[Callable[[bool], dict[str, Any]]] = (
    *(layer_by_layer, mixed_precision, offload, lora, accumulation, no_reshard, hybrid, checkpointed, from_meta),
    *(prefetched, tensor_parallel, collectives, returned_collectives, collectives_in_a_trainer),
    *(pipelined, pipelined_without_bubbles),
)


def compared(rank: int, size: int) -> dict[str, Any]:
    """Returns losses and weights of all arrangements, without and with graphs."""
    dist.init_process_group("gloo")
    return {
        f"{arrangement.__name__} {name} {kind}": value
        for arrangement in ARRANGEMENTS
        for name, graphs in (("eager", False), ("graphs", True))
        for kind, value in arrangement(graphs).items()
    }


def refused(rank: int, size: int) -> dict[str, Any]:
    """Returns the errors of the other orders."""

    def trainer(model: nn.Module) -> ORTTrainer:
        return ORTTrainer(model, "auto", optim.SGDConfig(), loss_fn="cross_entropy")

    def fsdp1() -> nn.Module:
        return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)

    orders: dict[str, Callable[[], Any]] = {
        "module of FSDP2": lambda: ORTModule(fully_shard(Net())),
        "module of FSDP1": lambda: ORTModule(nn.Sequential(fsdp1())),
        "FSDP2 within a module": lambda: sharded(False, ORTModule(Net(), fallback="error"))(torch.ones(1, 2).long()),
        "trainer of FSDP2": lambda: trainer(fully_shard(Net())),
        "trainer of FSDP1": lambda: trainer(fsdp1()),
    }
    found = {}
    for name, make in orders.items():
        try:
            make()
        except TypeError as error:
            found[name] = str(error)
    return found


def saved(rank: int, size: int) -> dict[str, Any]:
    """Trains, and writes checkpoints by torch.distributed.checkpoint; returns the losses after them."""
    net = sharded(True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    looped(net, optimizer, batches(True))
    model_state, optimizer_state = get_state_dict(net, optimizer)
    checkpoints = Path(os.environ["CHECKPOINTS"])
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoints / "sharded")
    trainer = trainer_for(Net())
    for tokens in batches(True):
        trainer.train_step(tokens[:, :-1], tokens[:, 1:])
    dcp.save(trainer.state_dict(), checkpoint_id=checkpoints / "trainer")
    return {"sharded": looped(net, optimizer, batches(False, 7)), "trainer": stepped(trainer)}


def stepped(trainer: ORTTrainer) -> list[float]:
    return [trainer.train_step(tokens[:, :-1], tokens[:, 1:])[0].item() for tokens in batches(False, 7)]


def loaded(rank: int, size: int) -> dict[str, Any]:
    """Loads the checkpoints in another number of processes; returns the losses that follow."""
    dist.init_process_group("gloo")
    net = sharded(True, Net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    checkpoints = Path(os.environ["CHECKPOINTS"])
    dcp.load(state, checkpoint_id=checkpoints / "sharded")
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    trainer = trainer_for(Net())
    trainer.train_step(torch.ones(3, 4, dtype=torch.long), torch.ones(3, 4, dtype=torch.long))
    state = trainer.state_dict()
    dcp.load(state, checkpoint_id=checkpoints / "trainer")
    trainer.load_state_dict(state)
    return {"sharded": looped(net, optimizer, batches(False, 7)), "trainer": stepped(trainer)}
