"""Which processes train together: what the options, the process group and the launcher's environment say."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import DistributedError
from ..options import ORTTrainerOptions
from ..training.strategy import SingleProcess, Strategy

if TYPE_CHECKING:
    from .processes import Processes

__all__ = ["Place", "choose_strategy", "find_place"]

# What has no effect where nobody else takes part, with the value that asks for nothing.
_FOR_SEVERAL = {
    "allreduce_post_accumulation": False,
    "deepspeed_zero_optimization.stage": 0,
    "enable_adasum": False,
    "timeout": 600,
    "bucket_cap_mb": 25,
    "reduce_dtype": None,
}
_GROUP, _ENVIRONMENT = "the process group", "the launcher's environment"
_LAUNCH = (
    "start the script with `torchrun --nproc-per-node {} script.py`, or call torch.distributed.init_process_group "
    "before the trainer is made"
)
# The default groups that were joined here. All use one store, which keeps the addresses of those before.
_joined: list[Any] = []
# Groups of the processes by the default group, the type of device and the timeout.
_shared: dict[tuple[Any, str, float], Processes] = {}


@dataclass(frozen=True)
class Place:
    """Which of the processes this one is.

    Attributes:
        rank: Its number.
        size: How many there are.
        local_rank: Its number on its machine; None where nobody says it.
        source: Who says so; empty where nobody does, and there is one process.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    source: str = ""

    def shown_in(self, options: ORTTrainerOptions) -> ORTTrainerOptions:
        """Returns options that show the place; in one process they are what they are."""
        if self.size == 1:
            return options
        found = {"world_rank": self.rank, "world_size": self.size, "data_parallel_size": self.size}
        return options.showing({"distributed": {**found, "local_rank": self.local_rank or 0}})


def find_place(options: ORTTrainerOptions) -> Place:
    """Returns the place that the process group gives, or else the environment; joins nothing yet.

    Args:
        options: All settings; ranks and sizes in them must agree with what is found.

    Raises:
        ValueError: If they do not, or if the environment is not what a launcher leaves.
    """
    place, given = _found(), options.distributed
    for key, value, found in (
        ("world_size", given.world_size, place.size),
        ("world_rank", given.world_rank, place.rank),
        ("local_rank", given.local_rank, place.local_rank if place.source else 0),
        ("data_parallel_size", given.data_parallel_size, place.size),
    ):
        if options.is_given(f"distributed.{key}") and found is not None and value != found:
            _disagree(key, value, found, place)
    local_rank = place.local_rank
    if local_rank is None and place.source and options.is_given("distributed.local_rank"):
        local_rank = given.local_rank
    if given.enable_adasum and place.size & (place.size - 1):
        raise ValueError(
            "distributed.enable_adasum: Adasum combines processes in pairs, so their number must be a power of two, "
            f"but it is {place.size}"
        )
    return Place(place.rank, place.size, local_rank, place.source)


def choose_strategy(options: ORTTrainerOptions, device: torch.device, place: Place) -> Strategy:
    """Returns how the processes work together; joins the group that a launcher began, if that was not done yet.

    Args:
        options: All settings.
        device: Where training runs.
        place: From :func:`find_place`.

    Raises:
        DistributedError: If the other processes do not come in time.
        ValueError: If an option has no effect in one process; if several were launched, but can't find each other.
    """
    distributed = options.distributed
    if not place.source:
        for path, nothing in _FOR_SEVERAL.items():
            section, _, key = path.rpartition(".")
            if getattr(getattr(distributed, section) if section else distributed, key) != nothing:
                options.without_effect(
                    f"distributed.{path}: has no effect in one process: leave it out, or {_LAUNCH.format('N')}"
                )
        return SingleProcess()
    if place.source == _ENVIRONMENT:
        _join(place, device, distributed.timeout)
    if place.size == 1:
        return SingleProcess()
    # Only here: a PyTorch that was built without torch.distributed can't import these.
    from .adasum import Adasum
    from .data_parallel import DataParallel
    from .reduction import Reduction, Sum
    from .zero import ShardedOptimizer

    processes, dtype = _processes(device, distributed.timeout), distributed.reduce_dtype
    reduction: Reduction = Sum(processes, None if dtype is None else getattr(torch, dtype))
    if distributed.enable_adasum:
        reduction = Adasum(processes)
    strategy = ShardedOptimizer if distributed.deepspeed_zero_optimization.stage else DataParallel
    return strategy(processes, int(distributed.bucket_cap_mb * 2**20), reduction)


def _found() -> Place:
    """Returns the place without regard to the options."""
    if dist.is_available() and dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size(), _number("LOCAL_RANK"), _GROUP)
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if rank is None and size is None:
        return Place()
    if rank is None or size is None:
        there, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise ValueError(
            f"the environment variable {there} is set, but {missing} is not: a launcher sets both; set {missing}, or "
            f"unset {there} to train in one process"
        )
    if rank >= size:
        raise ValueError(f"the environment variable RANK is {rank}, but it must be below WORLD_SIZE, {size}")
    return Place(rank, size, _number("LOCAL_RANK"), _ENVIRONMENT)


def _number(name: str) -> int | None:
    """Returns the number in an environment variable; None where it is not set."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal() or (name == "WORLD_SIZE" and not int(text)):
        least = 1 if name == "WORLD_SIZE" else 0
        raise ValueError(f"the environment variable {name} must be a whole number from {least}, but it is {text!r}")
    return int(text)


def _disagree(key: str, value: int, found: int, place: Place) -> NoReturn:
    """Raises a ValueError that says what the options say, and what is so."""
    if not place.source:
        count = value if key in ("world_size", "data_parallel_size") else "N"
        raise ValueError(
            f"distributed.{key} is {value}, but this process was launched alone: {_LAUNCH.format(count)}; to train in "
            "one process, leave the option out"
        )
    if place.source == _GROUP and key != "local_rank":
        where = "the rank in the process group" if key == "world_rank" else "the size of the process group"
    else:
        variable = {"world_rank": "RANK", "local_rank": "LOCAL_RANK"}.get(key, "WORLD_SIZE")
        where = f"the environment variable {variable}"
    raise ValueError(
        f"distributed.{key} is {value}, but {where} is {found}: leave the option out, or launch the processes so"
    )


def _join(place: Place, device: torch.device, timeout: float) -> None:
    """Joins the default group of the launched processes; it is left when Python ends."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if place.size == 1 and (missing or not dist.is_available()):
        return
    if missing:
        raise ValueError(
            f"WORLD_SIZE is {place.size}, but {' and '.join(missing)} of the environment, where the processes find "
            "each other, are not set: set the address of rank 0 and a free port of it, or use torchrun, which does"
        )
    if not dist.is_available():
        raise ValueError(
            f"WORLD_SIZE is {place.size}, but PyTorch {torch.__version__} was built without torch.distributed: install "
            "another build, or unset RANK and WORLD_SIZE to train in one process"
        )
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        limit = timedelta(seconds=timeout)
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
        # torchrun keeps the store when it starts processes again, with the addresses of those that have died.
        start = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}.{len(_joined)}"
        store = dist.PrefixStore(start, store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise DistributedError(
            f"rank {place.rank} of {place.size} waited in vain for the start of the others at {address}: {error}"
        ) from error
    _joined.append(dist.group.WORLD)
    atexit.register(_leave, dist.group.WORLD)


def _leave(group: Any) -> None:
    """Leaves a group that was joined here, of which PyTorch warns otherwise."""
    if dist.is_initialized() and dist.group.WORLD is group:
        _shared.clear()
        dist.destroy_process_group()


def _processes(device: torch.device, timeout: float) -> Processes:
    """Returns the groups that all trainers share which need the same: each group has threads and connections."""
    from .processes import Processes

    world = dist.group.WORLD
    for key in [key for key in _shared if key[0] is not world]:
        del _shared[key]
    key = (world, device.type, timeout)
    if key not in _shared:
        _shared[key] = Processes(device, timeout)
    return _shared[key]
