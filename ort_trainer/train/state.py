"""Collects the state of a training loop from all processes, and restores it in all of them."""

from __future__ import annotations

import contextlib
import copy as copying
import json
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.errors import CheckpointError, DistributedError, shown, warn
from ..core.interrupts import uninterrupted
from ..core.optimizer_keys import STEP, UPDATE_COUNT
from ..core.sealed import digest
from ..optim.parts import Named
from ..optim.torch_optimizer import TorchOptimizerConfig
from ..state.bfloat16 import array_of, tensor_of
from ..state.differences import derived_state
from ..state.file import as_stored
from ..state.state import Array, State
from ..state.state_dict import LOSSES, read, to_state_dict
from .strategy import Meeting, Strategy, check_done, together
from .transaction import in_transaction

if TYPE_CHECKING:
    from .loop import TrainingLoop


def collect(loop: TrainingLoop) -> dict[str, Any]:
    """Returns a copy of the complete state in the layout of ``ORTTrainer.state_dict()``."""
    return to_state_dict(gather(loop, loop.meet("state")), copy=True)


@in_transaction
def save(loop: TrainingLoop, include_optimizer: bool, write: Callable[[State], None]) -> None:
    """Gathers the state of all processes, and writes it in one of them; the others wait until it is done.

    Args:
        loop: The loop.
        include_optimizer: Whether to include the optimizer's state and the accumulated gradients.
        write: Writes the state, whose arrays are the trainer's own memory; called in one process only.

    Raises:
        DistributedError: If the process that writes it failed.
    """
    meeting = loop.meet("state" if include_optimizer else "model")
    is_writer = meeting.doing == loop.strategy.world_rank
    gathered = gather(loop, meeting, keep=is_writer)
    together(loop.strategy, "save", lambda: write(gathered) if is_writer else None)


@in_transaction
def follow(loop: TrainingLoop) -> str:
    """Takes part in the other processes' next operation, with the rest of a window or nothing; returns its kind.

    In a ``gather``, it leaves that to the caller; a ``follow`` means that no process has data left.
    """
    with uninterrupted():
        meeting = loop.meet("follow")
        if meeting.kind == "update":
            loop.follow_update(meeting)
        elif meeting.kind in ("state", "model"):
            gather(loop, meeting, keep=False)
        elif meeting.kind == "save":
            check_done(loop.strategy, meeting)
        elif meeting.kind not in ("gather", "follow"):
            does = "load a state" if meeting.kind == "load" else "run forward_backward() or use p.grad"
            raise RuntimeError(
                f"this process is at the end of trainer.join() and can't take part when others {does}: give all "
                "processes the same number of batches, or do that outside trainer.join(), in all of them"
            )
        return meeting.kind


def to_pytorch(loop: TrainingLoop) -> dict[str, torch.Tensor]:
    """Returns copies of all weights and buffers on the CPU, with names and dtypes as in ``model.state_dict()``."""
    executor, contents = loop.started(), loop.contents
    tensors = {**executor.parameters, **executor.buffers}
    return {
        name: tensors[contents.canonical[name]].detach().to("cpu", like.dtype, copy=True)
        for name, like in contents.tensors.items()
    }


def load(
    loop: TrainingLoop, get_state_dict: Callable[[], Mapping[str, Any]], strict: bool, owned: bool = False
) -> None:
    """Restores what :func:`collect` or :func:`to_pytorch` returned, or a PyTorch model's state dict.

    Args:
        loop: The loop to restore.
        get_state_dict: Returns the state, which must be the same in all processes.
        strict: Whether names must match exactly; if not, only names that both have are restored.
        owned: Whether nothing else uses the state's memory, so that it need not be copied.

    Raises:
        RuntimeError: If names differ and ``strict`` is True; or if ``strict`` is False and no name matches.
        TypeError, ValueError: If a value is invalid (CheckpointError: one of the user's scaler, schedule or optimizer).
            Nothing has changed then, in any process.
        DistributedError: If another process failed to read it, or got a different state.
    """

    precision, rates, config = loop.precision, loop.rates, loop.config

    def checked() -> tuple[Mapping[str, Any], State]:
        loop.started()  # raises if the user replaced tensors of the model by unusable ones
        loop.optimizer.refresh()
        state_dict = get_state_dict()
        restored = read(state_dict if owned else copied(state_dict), loop.contents, loop.window, strict)
        if strict and restored.frozen_digest and restored.frozen_digest != _frozen_digest(loop):
            raise ValueError(
                "the state was saved without its frozen weights (utils.save_frozen_weights=False), and this trainer "
                "has others: load it into a trainer with the same base, in which the same weights are trained; or "
                "pass strict=False to put what it has beside these"
            )
        rates.check_state(restored.objects.get("lr_scheduler"), strict)
        if "torch_optimizer" in restored.objects and isinstance(config, TorchOptimizerConfig):
            restored.objects["torch_optimizer"] = config.read_state(restored.objects["torch_optimizer"])
        return state_dict, restored

    state_dict, restored = together(loop.strategy, "load", checked)
    if loop.strategy.world_size > 1:
        _check_equal(restored, loop.strategy)
    _fit_window(restored, loop.strategy)
    _fit_random(restored, loop.strategy, loop.contents.device)
    objects = restored.objects
    previous_scaler, previous_rates = precision.state_dict(), copying.deepcopy(rates.state_dict())
    if restored.window is not None and "window" in state_dict:
        _warn_of_difference("loss_scaler", previous_scaler, objects)
        _warn_of_difference("lr_scheduler", previous_rates, objects)
    # The user's objects may reject a state that passed the checks. Then those that have loaded theirs get back the
    # previous one; the rest of the state, in restore(), can no longer be rejected.
    with uninterrupted(), contextlib.ExitStack() as undo:
        precision.load_state_dict(objects.get("loss_scaler"), strict)
        undo.callback(precision.load_state_dict, previous_scaler, strict=True)
        rates.load_state_dict(objects.get("lr_scheduler"), strict)
        undo.callback(rates.load_state_dict, previous_rates, strict=True)
        if restored.outside:
            carried = loop.source.guard.carried
            before = carried.collect()
            carried.load({name: _unstored(name, entry) for name, entry in restored.outside.items()})
            undo.callback(carried.load, before)
        if "torch_optimizer" in objects and isinstance(config, TorchOptimizerConfig):
            config.load_state_dict(objects["torch_optimizer"])
        undo.pop_all()
        if loop.losses is not None and restored.step is not None:
            loop.losses.count = objects.get(LOSSES, {}).get("nonfinite", 0)
        _restore(loop, restored)
    loop.verify_next()


def _warn_of_difference(key: str, current: Mapping[str, Any] | None, restored: Mapping[str, Any]) -> None:
    """Warns if only one of the trainer and a complete state dict has the state of a scaler or schedule."""
    if (current is None) != (key not in restored):
        what = f"The trainer has no {key}, so it ignores that of" if current is None else f"Missing key: {key} in"
        warn(f"{what} state_dict")


def copied(value: Any) -> Any:
    """Returns a deep copy of a state dict, or of a part of it, with tensors on the CPU."""
    if isinstance(value, Mapping):
        return {key: copied(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [copied(entry) for entry in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def gather(loop: TrainingLoop, meeting: Meeting, keep: bool = True) -> State:
    """Returns the joint state, in the trainer's own memory where possible; all processes call this after a meeting.

    Args:
        loop: The loop.
        meeting: A meeting of kind ``state``, or ``model`` for a state without the optimizer.
        keep: Whether this process needs the result; if not, it takes part without memory for the tensors, and the
            result is empty.
    """
    executor, strategy, contents, info = loop.started(), loop.strategy, loop.contents, loop.info
    window = copying.copy(loop.window)
    random_states = [executor.generator.get_state().numpy()]
    if strategy.world_size > 1:
        random_states = [
            np.frombuffer(bytearray(state), np.uint8) for state in strategy.gather(random_states[0].tobytes())
        ]
        counts = [int(count) for count in strategy.gather(str(loop.window.micro_batches).encode())]
        if meeting.weight:
            leading = meeting.shares[meeting.leader]
            joint = {"weight": meeting.weight, "unit": leading.unit, "scale": leading.scale}
            window.load_state_dict({**window.state_dict(), **joint, "micro_batches": max(counts)})
    optimizer, gradients = None, {}
    if meeting.kind != "model":
        loop.optimizer.refresh()
        slots: dict[str, dict[str, torch.Tensor]] = {name: {} for name in loop.optimizer.slots}
        for slot in loop.optimizer.rule.slots:
            parts = {name: tensors[slot] for name, tensors in loop.optimizer.slots.items() if slot in tensors}
            for name, value in strategy.whole(parts, keep).items():
                slots[name][slot] = value
        optimizer = _arrays(
            {f"{name}.{slot}": value for name, tensors in slots.items() for slot, value in tensors.items()}
        )
        gradients = _arrays(strategy.total(meeting, keep))
    if not keep:
        return State()
    if optimizer is not None:
        # Stored is the number of the next update, as in files of the legacy trainer.
        following = {name: int(count) + 1 for name, count in loop.optimizer.counts.items()}
        if contents.shares_count:
            following = {STEP: max(following.values(), default=1)}
        else:
            following = {f"{name}.{UPDATE_COUNT}": count for name, count in following.items()}
        optimizer |= {key: np.array([count], np.int64) for key, count in following.items()}
    floats = [name for name, value in executor.buffers.items() if value.is_floating_point()]
    objects = {"loss_scaler": loop.precision.state_dict(), "lr_scheduler": loop.rates.state_dict()}
    objects[LOSSES] = {"nonfinite": loop.losses.count} if loop.losses is not None and loop.losses.count else None
    if optimizer is not None and isinstance(loop.config, TorchOptimizerConfig):
        objects["torch_optimizer"] = loop.config.state_dict(copy=False)
    leaves_out = not loop.options.utils.save_frozen_weights
    return State(
        parameters=_arrays({**executor.parameters, **{name: executor.buffers[name] for name in floats}}),
        trainable=list(contents.trainable),
        frozen=contents.frozen if leaves_out else (),
        frozen_digest=_frozen_digest(loop) if leaves_out else "",
        buffers=_arrays({name: value for name, value in executor.buffers.items() if name not in floats}),
        names={name: contents.canonical[name] for name in contents.tensors},
        transient={name: contents.canonical[name] for name in contents.non_persistent},
        outside={name: _stored(entry) for name, entry in loop.source.guard.carried.collect().items()},
        optimizer=optimizer,
        step=info.step,
        optimization_step=info.optimization_step,
        gradients=gradients,
        micro_batches=window.micro_batches,
        window={key: value for key, value in window.state_dict().items() if key != "micro_batches"},
        random=random_states[0],
        random_states=random_states if strategy.world_size > 1 else (),
        learning_rates=list(loop.config.learning_rates),
        objects={key: value for key, value in objects.items() if value is not None},
        trainer_options={
            "mixed_precision": loop.precision.mixed,
            "zero_stage": strategy.zero_stage,
            "world_rank": strategy.world_rank,
            "world_size": strategy.world_size,
            "optimizer_name": contents.optimizer,
            "data_parallel_size": strategy.world_size,
            "horizontal_parallel_size": 1,
            "gradient_accumulation_steps": loop.window.size,
        },
    )


def _frozen_digest(loop: TrainingLoop) -> str:
    """Returns a digest of the names and values of the parameters that are not trained, and of constants."""
    parameters = loop.started().parameters
    frozen = {**{name: parameters[name] for name in loop.contents.frozen}, **loop.source.large_constants()}
    return digest((name, as_stored(frozen[name].detach().cpu().contiguous())) for name in sorted(frozen))


def _arrays(tensors: Named) -> dict[str, Array]:
    """Returns tensors as arrays, which share their memory where possible."""
    return {name: array_of(value) for name, value in tensors.items()}


def _stored(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a value from outside tensors with its tensors as arrays; dtypes are apart, as NumPy has no bfloat16."""
    tensors = entry["tensors"]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    return {"value": entry["value"], "tensors": [array_of(tensor) for tensor in tensors], "dtypes": dtypes}


def _unstored(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what :func:`_stored` got.

    Raises:
        ValueError: If the entry is damaged.
    """
    try:
        tensors = [value if isinstance(value, torch.Tensor) else tensor_of(value) for value in entry["tensors"]]
        pairs = zip(tensors, entry["dtypes"], strict=True)
        return {"value": entry["value"], "tensors": [value.to(getattr(torch, dtype)) for value, dtype in pairs]}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"state_dict[outside][{name}] is damaged: {shown(entry)}") from error


def _check_equal(restored: State, strategy: Strategy) -> None:
    """Raises a DistributedError, in all processes, if their states differ."""
    checksums = [int(text) for text in strategy.gather(str(_checksum(restored)).encode())]
    different = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
    if different:
        raise DistributedError(
            f"ranks {different} got a different state to load than rank 0: load the same state in all processes; "
            "nothing has changed"
        )


def _fit_random(restored: State, strategy: Strategy, device: torch.device) -> None:
    """Reduces the random states, in place, to that of this process.

    If as many processes load the state as saved it, each gets its own; otherwise theirs are derived from rank 0's.
    """
    rank, states = strategy.world_rank, restored.random_states
    if len(states) == strategy.world_size:
        restored.random = states[rank]
    elif restored.random is not None and rank:
        restored.random = derived_state(restored.random.tobytes(), device, rank).numpy()


def _fit_window(restored: State, strategy: Strategy) -> None:
    """Reduces an accumulation window, in place, to what this process continues.

    A micro-batch that is divided among ``m`` processes has the weight ``m`` in a mean, so one that ``n`` processes have
    done before gets the weight ``m`` instead of ``n``. (Sums have no weights, and given weights count examples.) Rank 0
    continues the window, and the others begin with an empty contribution; or all have equal parts of it.
    """
    if not restored.gradients:
        return
    assert restored.window is not None
    size, saved_size = strategy.world_size, max(len(restored.random_states), 1)
    factor = size / saved_size if restored.window["reduction"] == "mean" else 1.0
    if strategy.divides_windows:
        factor /= size
    elif strategy.world_rank:
        restored.gradients, factor = {}, 0.0
    if factor != 1.0:
        restored.window["weight"] *= factor
        restored.gradients = {
            name: np.asarray(value * factor, value.dtype) for name, value in restored.gradients.items()
        }


def _checksum(restored: State) -> int:
    """Returns a checksum of the weights, counters and window, and of the names of everything else."""
    optimizer = restored.optimizer or {}
    counts = {key: int(optimizer[key][0]) for key in optimizer if key.rpartition(".")[2] in (STEP, UPDATE_COUNT)}
    names = [sorted(optimizer), sorted(restored.gradients), restored.random is None]
    numbers = [restored.step, restored.optimization_step, restored.micro_batches, restored.window, names, counts]
    checksum = zlib.crc32(json.dumps(numbers, sort_keys=True, default=str).encode())
    values = {**restored.parameters, **restored.buffers}
    for name in sorted(values):
        value = np.atleast_1d(np.ascontiguousarray(values[name]))
        checksum = zlib.crc32(value.view(np.uint8).data, zlib.crc32(name.encode(), checksum))
    return checksum


def _restore(loop: TrainingLoop, state: State) -> None:
    """Moves a checked state into the tensors of the executor and of the optimizer; frees each value after that."""
    executor, info = loop.started(), loop.info
    optimizer, tensors = loop.optimizer, {**executor.parameters, **executor.buffers}
    if state.window is not None:  # first, as gradients may need memory
        executor.gradients.restore({name: torch.from_numpy(value) for name, value in state.gradients.items()})
    for values in (state.parameters, state.buffers):
        for name in list(values):
            tensors[name].copy_(torch.from_numpy(values.pop(name)))
    slots = state.optimizer or {}
    for key in list(slots):
        (name, _, slot), value = key.rpartition("."), slots.pop(key)
        if slot in (STEP, UPDATE_COUNT):
            for count in [optimizer.counts[name]] if name else optimizer.counts.values():
                count.fill_(int(value[0]) - 1)
        else:
            part = optimizer.parts.of({name: tensor_of(value)})[name]
            optimizer.slots[name][slot].copy_(part)
    optimizer.publish()
    if state.random is not None:
        executor.generator.set_state(torch.from_numpy(state.random))
    loop.source.memory.publish({*executor.parameters, *executor.buffers})
    if state.window is not None:
        loop.window.load_state_dict({"micro_batches": state.micro_batches, **state.window})
    info.step = info.step if state.step is None else state.step
    if state.optimization_step is not None:
        info.optimization_step = state.optimization_step
