"""The state dict: collects all state of a training loop into nested dicts, and restores it."""

from __future__ import annotations

import copy as copying
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.errors import DistributedError, warn
from ..core.interrupts import uninterrupted
from ..core.optimizer_keys import SHARED, STEP, UPDATE_COUNT
from ..engine import Executor
from ..optim.parts import Named
from .read_state import Contents, TrainerState, apply_to_executor, copied, read
from .strategy import Meeting, Strategy, check_done, together

if TYPE_CHECKING:
    from .loop import TrainingLoop

__all__ = [
    "NOT_INITIALIZED",
    "check_started",
    "collect",
    "follow",
    "load",
    "save",
    "to_pytorch",
    "trainer_options",
    "write_by_one",
]

StateDict = dict[str, Any]
NOT_INITIALIZED = (
    "ONNX Runtime training session is not initialized yet. Please run train_step or eval_step at least once before "
    "calling ORTTrainer.state_dict()."
)


def check_started(loop: TrainingLoop, method: str) -> None:
    """Raises a RuntimeError before the first step, when there is nothing to save."""
    if loop.executor is None:
        loaded = "" if loop.pending is None else " but the loaded state, which has not changed"
        raise RuntimeError(
            f"there is nothing to save yet{loaded}: call prepare(), train_step() or eval_step() before {method}()"
        )


def collect(loop: TrainingLoop, include_optimizer: bool = True, copy: bool = True) -> StateDict:
    """Returns the complete state in the legacy layout, with additional keys for what legacy omitted.

    Args:
        loop: A loop with an executor.
        include_optimizer: Whether to include the optimizer's state and the accumulated gradients.
        copy: Whether arrays are copies; if not, they share the trainer's memory.
    """
    gathered = gather(loop, loop.meet("state" if include_optimizer else "model"))
    return _collect(loop, gathered, include_optimizer, copy)


def save(loop: TrainingLoop, include_optimizer: bool, write: Callable[[StateDict], None], copy: bool = False) -> None:
    """Passes the complete state to a function that writes it, in one process; the others wait until it is done.

    Args:
        loop: A loop with an executor.
        include_optimizer: As for :func:`collect`.
        write: Writes the state.
        copy: As for :func:`collect`; True for a function that writes later.

    Raises:
        DistributedError: If another process failed to write it.
    """
    write_by_one(loop, include_optimizer, lambda gathered: write(_collect(loop, gathered, include_optimizer, copy)))


def write_by_one(loop: TrainingLoop, include_optimizer: bool, write: Callable[[TrainerState], None]) -> None:
    """Gathers the state of all processes, and writes it in one of them; the others wait until it is done.

    Args:
        loop: A loop with an executor.
        include_optimizer: As for :func:`collect`.
        write: Called in the writing process only.

    Raises:
        DistributedError: If another process failed to write it.
    """
    meeting = loop.meet("state" if include_optimizer else "model")
    is_writer = meeting.doing == loop.strategy.world_rank
    gathered = gather(loop, meeting, keep=is_writer)
    together(loop.strategy, "save", lambda: write(gathered) if is_writer else None)


def follow(loop: TrainingLoop) -> str:
    """Joins the other processes' next operation, with the rest of a window or nothing; returns its kind.

    For ``gather``, the caller takes part itself.
    """
    with uninterrupted():
        meeting = loop.meet("follow")
        if meeting.kind == "update":
            loop.follow_update(meeting)
        elif meeting.kind in ("state", "model"):
            gather(loop, meeting, keep=False)
        elif meeting.kind == "save":
            check_done(loop.strategy, meeting)
        elif meeting.kind != "gather":
            does = "load a state" if meeting.kind == "load" else "run forward_backward() or use p.grad"
            raise RuntimeError(
                f"this process is at the end of trainer.join() and can't take part when others {does}: give all "
                "processes the same number of batches, or do that outside trainer.join(), in all of them"
            )
        return meeting.kind


def _collect(loop: TrainingLoop, gathered: TrainerState, include_optimizer: bool, copy: bool) -> StateDict:
    executor, contents, strategy = loop.executor, loop.contents, loop.strategy
    window, random_states, gradients = gathered.window, gathered.random_states, gathered.gradients
    assert executor is not None and window is not None and random_states is not None and gradients is not None

    def array(value: torch.Tensor) -> Any:
        value = value.detach().cpu()
        return (value.clone() if copy else value).numpy()

    tensors = {**executor.parameters, **executor.buffers}
    arrays = {name: array(value) for name, value in tensors.items()}
    state: StateDict = {
        "model": {"full_precision": {name: arrays[contents.canonical[name]] for name in contents.tensors}},
        "trainer_options": trainer_options(loop),
        "train_step_info": {"optimization_step": loop.info.optimization_step, "step": loop.info.step},
        "window": window.state_dict(),
        "random": array(random_states[0]),
    }
    if strategy.world_size > 1:
        state["random_states"] = torch.stack(random_states).numpy()
    if contents.non_persistent:
        state["transient_buffers"] = {name: arrays[contents.canonical[name]] for name in contents.non_persistent}
    if include_optimizer:
        state["optimizer"] = _collect_optimizer(loop.optimizer.counts, gathered.slots, contents, array)
        if contents.torch_config is not None:
            state["torch_optimizer"] = contents.torch_config.state_dict(copy)
        state["gradients"] = {name: array(value) for name, value in gradients.items()}
    kept = {"loss_scaler": loop.precision.state_dict(), "lr_scheduler": loop.rates.state_dict()}
    return state | {key: copying.deepcopy(value) if copy else value for key, value in kept.items() if value is not None}


def trainer_options(loop: TrainingLoop) -> StateDict:
    """Returns the part of a state dict that describes the trainer."""
    strategy = loop.strategy
    return {
        "mixed_precision": loop.precision.mixed,
        "zero_stage": strategy.zero_stage,
        "world_rank": strategy.world_rank,
        "world_size": strategy.world_size,
        "optimizer_name": loop.contents.rule.name,
        "data_parallel_size": strategy.world_size,
        "horizontal_parallel_size": 1,
        "gradient_accumulation_steps": loop.window.size,
    }


def _collect_optimizer(counted: Named, slots: Mapping[str, Named], contents: Contents, array: Any) -> StateDict:
    """Returns state tensors and update counts; legacy counts start at 1, so 1 is added to the completed updates."""
    state: StateDict = {name: {slot: array(value) for slot, value in own.items()} for name, own in slots.items() if own}
    counts = {name: np.array([int(count) + 1], dtype=np.int64) for name, count in counted.items()}
    if contents.rule.shares_count:
        state[SHARED] = {STEP: max(counts.values(), default=np.array([1], dtype=np.int64))}
    else:
        for name, count in counts.items():
            state.setdefault(name, {})[UPDATE_COUNT] = count
    return state


def to_pytorch(loop: TrainingLoop) -> dict[str, torch.Tensor]:
    """Returns copies of all weights and buffers on the CPU, with names and dtypes as in ``model.state_dict()``."""
    executor, contents = loop.executor, loop.contents
    assert executor is not None
    tensors = {**executor.parameters, **executor.buffers}
    return {
        name: tensors[contents.canonical[name]].detach().to("cpu", like.dtype, copy=True)
        for name, like in contents.tensors.items()
    }


def load(loop: TrainingLoop, given: Callable[[], Mapping[str, Any]], strict: bool, owned: bool = False) -> None:
    """Restores what :func:`collect` or :func:`to_pytorch` returned, or a PyTorch model's state dict.

    Args:
        loop: The loop to restore. Before its first step, the state is kept until training begins.
        given: Returns the state, which must be the same in all processes.
        strict: Whether names must match exactly; if not, only names that both have are restored.
        owned: Whether nothing else uses the state's memory, so that it need not be copied.

    Raises:
        RuntimeError: If names differ and ``strict`` is True; or if ``strict`` is False and no name matches.
        TypeError, ValueError: If a value is invalid. Nothing has changed then, in any process.
        DistributedError: If another process failed to read it, or got a different state.
    """

    def checked() -> tuple[Mapping[str, Any], TrainerState, Executor | None]:
        executor = loop.executor  # raises if the user replaced tensors of the model by unusable ones
        state_dict = given()
        own = state_dict if owned and executor is not None else copied(state_dict)
        return state_dict, read(own, loop.contents, loop.window, strict), executor

    state_dict, restored, executor = together(loop.strategy, "load", checked)
    if loop.strategy.world_size > 1:
        _take_own(restored, loop.strategy, loop.contents.device)
    precision, rates, info = loop.precision, loop.rates, loop.info
    own_scale, own_rates = precision.state_dict(), copying.deepcopy(rates.state_dict())
    if restored.window is not None and "window" in state_dict:
        _warn_of_difference("loss_scaler", own_scale, restored.loss_scaler)
        _warn_of_difference("lr_scheduler", rates.state_dict(), restored.lr_scheduler)
    with uninterrupted():
        precision.load_state_dict(restored.loss_scaler, strict)
        try:
            rates.load_state_dict(restored.lr_scheduler, strict)
            if restored.torch_optimizer is not None and loop.contents.torch_config is not None:
                loop.contents.torch_config.load_state_dict(restored.torch_optimizer)
        except BaseException:
            precision.load_state_dict(own_scale, strict=True)
            rates.load_state_dict(own_rates, strict=True)
            raise
        if executor is not None:
            apply_to_executor(restored, executor, loop.optimizer)
            loop.source.memory.publish({*executor.parameters, *executor.buffers})
        else:
            loop.wait_with(restored, state_dict)
        loop.window = restored.window or loop.window
        info.step = info.step if restored.step is None else restored.step
        if restored.optimization_step is not None:
            info.optimization_step = restored.optimization_step


def _warn_of_difference(key: str, own: Mapping[str, Any] | None, given: Mapping[str, Any] | None) -> None:
    """Warns if only one of the trainer and a complete state dict has the state of a scaler or schedule."""
    if (own is None) != (given is None):
        what = f"Missing key: {key} in" if given is None else f"The trainer has no {key}, so it ignores that of"
        warn(f"{what} state_dict")


def gather(loop: TrainingLoop, meeting: Meeting, keep: bool = True) -> TrainerState:
    """Gathers the joint state; all processes call this after a meeting.

    Args:
        loop: A loop with an executor.
        meeting: A meeting of kind ``state``, or ``model`` for a state without the optimizer.
        keep: Whether this process needs the result; if not, it takes part without memory for the tensors.
    """
    executor, strategy, window = loop.executor, loop.strategy, copying.copy(loop.window)
    assert executor is not None
    random_states = [executor.generator.get_state()]
    if strategy.world_size > 1:
        own = random_states[0].numpy().tobytes()
        random_states = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in strategy.gather(own)]
        counts = [int(count) for count in strategy.gather(str(loop.window.micro_batches).encode())]
        if meeting.weight:
            leading = meeting.shares[meeting.leader]
            joint = {
                "weight": meeting.weight,
                "unit": leading.unit,
                "scale": leading.scale,
                "micro_batches": max(counts),
            }
            window.load_state_dict({**window.state_dict(), **joint})
    if meeting.kind == "model":
        return TrainerState(random_states=random_states, window=window, gradients={})
    kept = loop.optimizer.slots
    slots: dict[str, dict[str, torch.Tensor]] = {name: {} for name in kept}
    for slot in loop.contents.rule.slots:
        parts = {name: own[slot] for name, own in kept.items() if slot in own}
        for name, value in strategy.whole(parts, keep).items():
            slots[name][slot] = value
    gradients = strategy.total(meeting, executor.present_gradients(), keep)
    return TrainerState(slots={**slots}, gradients=gradients, window=window, random_states=random_states)


def _take_own(restored: TrainerState, strategy: Strategy, device: torch.device) -> None:
    """Reduces a state, in place, to what this process restores.

    Rank 0 continues the window with its gradients; the others start with an empty contribution. If as many processes
    load the state as saved it, each gets its own random state; otherwise theirs are derived from that of rank 0.

    Args:
        restored: The state that was read.
        strategy: How the processes work together.
        device: Where training runs.

    Raises:
        DistributedError: In all processes, if their states differ.
    """
    own = _checksum(restored)
    sums = [int(found) for found in strategy.gather(str(own).encode())]
    different = [rank for rank, found in enumerate(sums) if found != sums[0]]
    if different:
        raise DistributedError(
            f"ranks {different} got a different state to load than rank 0: load the same state in all processes; "
            "nothing has changed"
        )
    rank, states = strategy.world_rank, restored.random_states
    if states is not None and len(states) == strategy.world_size:
        restored.random = states[rank]
    elif restored.random is not None and rank:
        restored.random = _derived(restored.random, rank, device)
    if rank and restored.gradients:
        assert restored.window is not None
        restored.gradients = {}
        restored.window.load_state_dict({**restored.window.state_dict(), "weight": 0.0})


def _checksum(restored: TrainerState) -> int:
    """Returns a checksum of the weights, counters and window, and of the names of everything else."""
    window = None if restored.window is None else restored.window.state_dict()
    others = [sorted(restored.slots), sorted(restored.gradients or ()), restored.random is None, restored.counts]
    numbers = [restored.step, restored.optimization_step, window, *others]
    found = zlib.crc32(json.dumps(numbers, sort_keys=True, default=str).encode())
    for name in sorted(restored.tensors):
        value = np.atleast_1d(restored.tensors[name].contiguous().numpy())
        found = zlib.crc32(value.view(np.uint8).data, zlib.crc32(name.encode(), found))
    return found


def _derived(state: torch.Tensor, rank: int, device: torch.device) -> torch.Tensor:
    """Returns the state of a generator seeded with a hash of a state and a rank."""
    digest = hashlib.sha256(state.numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little")).get_state()
