"""Creates the training loop of this process, and finds the others by the options, process group and environment."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ..capture.borrow import BORROWED
from ..capture.step_module import LossFunction
from ..core.errors import DistributedError, was_given
from ..engine.devices import resolve_device
from ..engine.ort import check_engine
from ..optim import OptimizerConfig, rules
from ..optim.torch_optimizer import TorchOptimizerConfig
from ..options import OptionsDict, ORTTrainerOptions
from ..sources import model_source
from ..train.loop import TrainingLoop
from ..train.precision import fast_dtype
from ..train.strategy import Strategy
from ..train.transaction import outside_inference_mode

if TYPE_CHECKING:
    from .processes import Processes


class _Variables(NamedTuple):
    """A launcher's environment variables, and how the user sets the address where the processes meet."""

    rank: str
    size: str
    local_rank: str
    address: str


_TORCHRUN = _Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "or use torchrun, which does")
_MPIRUN = _Variables(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "with `mpirun -x MASTER_ADDR=... -x MASTER_PORT=29500`",
)
# srun starts a step. SLURM_NTASKS belongs to the allocation, where a shell may run a single process.
_SRUN = _Variables(
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    'before srun, with `export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) '
    "MASTER_PORT=29500`",
)
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
# Options of the section `distributed` without effect in a single process.
_FOR_SEVERAL = ("deepspeed_zero_optimization.stage", "enable_adasum", "timeout", "bucket_cap_mb", "reduce_dtype")
_GROUP, _ENVIRONMENT = "the process group", "the launcher's environment"
_LAUNCH = (
    "start the script with `torchrun --nproc-per-node {} script.py`, or call torch.distributed.init_process_group "
    "before the trainer is created"
)
# The default groups joined here. All use one store, which keeps the addresses of previous groups.
_joined: list[Any] = []
# (default group, device type, timeout) -> the process groups that trainers share.
_shared: dict[tuple[Any, str, float], Processes] = {}


@dataclass(frozen=True)
class Rank:
    """The rank of this process.

    Attributes:
        rank: The rank.
        size: The number of processes.
        local_rank: The rank on its machine; None if unknown.
        source: Where the rank comes from; empty for a process without a launcher or process group.
        variables: The launcher's environment variables.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    source: str = ""
    variables: _Variables = _TORCHRUN

    def shown_in(self, options: ORTTrainerOptions) -> ORTTrainerOptions:
        """Returns options that show the place; for a single process, the options unchanged."""
        if self.size == 1:
            return options
        ranks = {"world_rank": self.rank, "world_size": self.size, "data_parallel_size": self.size}
        return options.showing({"distributed": {**ranks, "local_rank": self.local_rank or 0}})


@outside_inference_mode
def launch(
    model: Any,
    model_desc: Mapping[str, Any] | str,
    optim_config: OptimizerConfig | torch.optim.Optimizer,
    loss_fn: LossFunction | None,
    options: ORTTrainerOptions | OptionsDict | None,
) -> TrainingLoop:
    """Returns the training loop of a model; its ``options`` show the place of this process.

    Args:
        model, model_desc, optim_config, loss_fn, options: As for ``ORTTrainer``, but the loss is never a name.

    Raises:
        ModuleNotFoundError, TypeError, ValueError: As ``ORTTrainer``.
        DistributedError: If the other processes do not join in time, or one of them fails.
    """
    check_engine()
    if isinstance(optim_config, torch.optim.Optimizer):
        optim_config = TorchOptimizerConfig(optim_config)
    if not isinstance(optim_config, OptimizerConfig):
        raise TypeError(
            f"optim_config must be a config of ort_trainer.optim ({', '.join(sorted(rules.__all__))}) or an "
            f"optimizer of torch.optim, but {was_given(optim_config)}"
        )
    options = ORTTrainerOptions.of(options)
    place = find_place(options)
    name = options.device.id if options.is_given("device.id") else None
    device = resolve_device(name, model.parameters() if isinstance(model, torch.nn.Module) else (), place.local_rank)
    dtype = fast_dtype(options.mixed_precision, device)
    options = options.showing({"device": {"id": str(device)}, "mixed_precision": {"dtype": dtype}})
    strategy = _choose_strategy(options, device, place)
    options = place.shown_in(options)
    try:
        optim_config.bind(model)
        with BORROWED:
            source = model_source(model, loss_fn, optim_config, options)
        return TrainingLoop(source, model_desc, optim_config, options, device, strategy)
    except BaseException as error:
        strategy.failed(error)
        raise


def find_place(options: ORTTrainerOptions) -> Rank:
    """Returns the place, from the process group or else from the environment; does not join a group.

    Args:
        options: All settings; ranks and sizes in them must match the place.

    Raises:
        ValueError: If they do not match, or if a launcher's environment variables are incomplete or invalid.
    """
    place, distributed = _actual_place(), options.distributed
    for key, value, actual in (
        ("world_size", distributed.world_size, place.size),
        ("world_rank", distributed.world_rank, place.rank),
        ("local_rank", distributed.local_rank, place.local_rank if place.source else 0),
        ("data_parallel_size", distributed.data_parallel_size, place.size),
    ):
        if options.is_given(f"distributed.{key}") and actual is not None and value != actual:
            _disagree(key, value, actual, place)
    local_rank = place.local_rank
    if local_rank is None and place.source and options.is_given("distributed.local_rank"):
        local_rank = distributed.local_rank
    if distributed.enable_adasum and place.size & (place.size - 1):
        raise ValueError(
            "distributed.enable_adasum: Adasum combines processes in pairs, so their number must be a power of two, "
            f"but it is {place.size}"
        )
    return replace(place, local_rank=local_rank)


def _choose_strategy(options: ORTTrainerOptions, device: torch.device, place: Rank) -> Strategy:
    """Returns the strategy for the processes; joins the launcher's process group, unless the script has joined it.

    Args:
        options: All settings.
        device: Where training runs.
        place: From :func:`find_place`.

    Raises:
        DistributedError: If the other processes do not join in time.
        ValueError: If an option has no effect in one process, or if the processes can't find each other.
    """
    distributed = options.distributed
    if not place.source:
        for key in _FOR_SEVERAL:
            if not options.is_default(f"distributed.{key}"):
                options.refuse(
                    f"distributed.{key}: has no effect in one process; leave it out, or {_LAUNCH.format('N')}"
                )
        return Strategy()
    if place.source == _ENVIRONMENT:
        _join(place, device, distributed.timeout)
    if place.size == 1:
        return Strategy()
    # A PyTorch built without torch.distributed can't import these.
    from .data_parallel import DataParallel
    from .reduction import Adasum, Reduction, Sum
    from .zero import ShardedOptimizer

    processes, dtype = _processes(device, distributed.timeout), distributed.reduce_dtype
    reduction: Reduction = Sum(processes, None if dtype is None else getattr(torch, dtype))
    if distributed.enable_adasum:
        reduction = Adasum(processes)
    strategy = ShardedOptimizer if distributed.deepspeed_zero_optimization.stage else DataParallel
    return strategy(processes, int(distributed.bucket_cap_mb * 2**20), reduction)


def _actual_place() -> Rank:
    """Returns the place, ignoring the options."""
    names = _launcher()
    if dist.is_available() and dist.is_initialized():
        return Rank(dist.get_rank(), dist.get_world_size(), _number(names.local_rank), _GROUP, names)
    rank, size = _number(names.rank), _number(names.size, 1)
    if (rank is None and size is None) or (names is not _TORCHRUN and size == 1):
        return Rank()
    if rank is None or size is None:
        there, missing = (names.size, names.rank) if rank is None else (names.rank, names.size)
        raise ValueError(
            f"the environment variable {there} is set, but {missing} is not: a launcher sets both; set {missing}, or "
            f"unset {there} to train in one process"
        )
    if rank >= size:
        raise ValueError(f"the environment variable {names.rank} is {rank}, but it must be below {names.size}, {size}")
    return Rank(rank, size, _number(names.local_rank), _ENVIRONMENT, names)


def _launcher() -> _Variables:
    """Returns the variables of the launcher: torchrun first, because other launchers may start it, then mpirun."""
    for names in (_TORCHRUN, _MPIRUN, _SRUN):
        if names.size in os.environ or (names is _TORCHRUN and names.rank in os.environ):
            return names
    step = _SRUN._replace(size="SLURM_NTASKS")
    # A single process has rank 0, and no address.
    is_alone = os.environ.get(step.rank, "0") == "0" and not all(name in os.environ for name in (step.rank, *_MASTER))
    return _TORCHRUN if is_alone or step.size not in os.environ else step


def _number(name: str, least: int = 0) -> int | None:
    """Returns the number in an environment variable; None if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"the environment variable {name} must be a whole number from {least}, but it is {text!r}")
    return int(text)


def _disagree(key: str, value: int, actual: int, place: Rank) -> NoReturn:
    """Raises a ValueError for an option that differs from the actual value."""
    if not place.source:
        count = value if key in ("world_size", "data_parallel_size") else "N"
        raise ValueError(
            f"distributed.{key} is {value}, but this process was launched alone: {_LAUNCH.format(count)}; to train in "
            "one process, leave the option out"
        )
    if place.source == _GROUP and key != "local_rank":
        where = "the rank in the process group" if key == "world_rank" else "the size of the process group"
    else:
        names = place.variables
        variable = {"world_rank": names.rank, "local_rank": names.local_rank}.get(key, names.size)
        where = f"the environment variable {variable}"
    raise ValueError(
        f"distributed.{key} is {value}, but {where} is {actual}: leave the option out, or launch the processes to match"
    )


def _join(place: Rank, device: torch.device, timeout: float) -> None:
    """Joins the default group of the launched processes, and leaves it when Python exits."""
    names, missing = place.variables, [name for name in _MASTER if name not in os.environ]
    if place.size == 1 and (missing or not dist.is_available()):
        return
    if missing:
        raise ValueError(
            f"{names.size} is {place.size}, but {' and '.join(missing)} of the environment, by which the processes "
            f"find each other, are not set: set the address of rank 0 and a free port on it, {names.address}"
        )
    if not dist.is_available():
        raise ValueError(
            f"{names.size} is {place.size}, but PyTorch {torch.__version__} was built without torch.distributed: "
            f"install another build, or unset {names.rank} and {names.size} to train in one process"
        )
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        limit = timedelta(seconds=timeout)
        rendezvous = dist.rendezvous("env://", place.rank, place.size, timeout=limit)  # type: ignore[attr-defined]
        store, rank, size = next(rendezvous)
        # A store of torchrun's agent is kept when processes are restarted, with addresses of those that have exited.
        # Without one, rank 0 makes a store, and processes that join later count other restarts.
        of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0) if of_agent else 0
        store = dist.PrefixStore(f"start {attempt}.{len(_joined)}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise DistributedError(
            f"rank {place.rank} of {place.size} could not join the other processes at {address}: {error}"
        ) from error
    _joined.append(dist.group.WORLD)
    atexit.register(_leave, dist.group.WORLD)


def _leave(group: Any) -> None:
    """Leaves a group that was joined here; otherwise PyTorch warns at exit."""
    if dist.is_initialized() and dist.group.WORLD is group:
        _shared.clear()
        dist.destroy_process_group()


def _processes(device: torch.device, timeout: float) -> Processes:
    """Returns the process groups, shared by trainers with the same device type and timeout.

    Each group has its own threads and connections.
    """
    from .processes import Processes

    world = dist.group.WORLD
    for key in [key for key in _shared if key[0] is not world]:
        del _shared[key]
    key = (world, device.type, timeout)
    if key not in _shared:
        _shared[key] = Processes(device, timeout)
    return _shared[key]
