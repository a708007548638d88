"""Reads a state dict and checks it against the trainer; changes nothing."""

from __future__ import annotations

import copy as copying
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..core.errors import shown, warn
from ..core.optimizer_keys import SHARED, STEP, UPDATE_COUNT
from ..engine import Executor
from ..export import ModelSource
from ..optim import OptimizerConfig
from ..optim.parts import Named
from ..optim.rule import Rule
from ..optim.torch_optimizer import TorchOptimizerConfig
from ..optim.update import OptimizerUpdate
from .differences import Differences, to_tensor
from .window import AccumulationWindow

__all__ = ["Contents", "TrainerState", "apply_to_executor", "copied", "read"]

# The keys that legacy wrote, and those added since. Only this package writes the latter.
_LEGACY_KEYS = ("model", "optimizer", "trainer_options", "train_step_info", "partition_info")
_NEW_KEYS = (
    *("window", "random", "random_states", "transient_buffers", "gradients"),
    *("loss_scaler", "lr_scheduler", "torch_optimizer"),
)
# Limit for the counts of steps and updates.
_HIGHEST_COUNT = 1 << 62
_TRAINER_OPTIONS = (
    "mixed_precision",
    "zero_stage",
    "world_rank",
    "world_size",
    "optimizer_name",
    "data_parallel_size",
    "horizontal_parallel_size",
    "gradient_accumulation_steps",
)


@dataclass(frozen=True)
class Contents:
    """The contents of a trainer's state; known from the model and optimizer, before any export.

    Attributes:
        tensors: Name -> parameter or persistent buffer, tied names included, in the order of ``model.state_dict()``.
        non_persistent: Name -> buffer that ``model.state_dict()`` leaves out.
        canonical: Name -> the first name of the same tensor.
        trainable: Canonical names of the parameters that are trained.
        rule: The optimizer's.
        slots: Canonical name -> the state tensors that the optimizer keeps, such as ``Moment_1``.
        counted: Canonical names of the parameters whose updates are counted.
        device: Where training runs.
        torch_config: The config of the PyTorch optimizer that does the updates; None for our own rules.
    """

    tensors: Mapping[str, torch.Tensor]
    non_persistent: Mapping[str, torch.Tensor]
    canonical: Mapping[str, str]
    trainable: Sequence[str]
    rule: Rule
    slots: Mapping[str, Sequence[str]]
    counted: Collection[str]
    device: torch.device
    torch_config: TorchOptimizerConfig | None = None

    @classmethod
    def of(cls, source: ModelSource, config: OptimizerConfig, device: torch.device) -> Contents:
        """Returns the contents for a model and an optimizer."""
        rule = config.rule
        aliases = source.names_of_trainable()
        hyper = {name: config.hyper_parameters(config.group_of(*names)) for name, names in aliases.items()}
        return cls(
            tensors=source.saved,
            non_persistent=source.non_persistent,
            canonical=source.canonical,
            trainable=source.trainable,
            rule=rule,
            slots={name: rule.slots_for(values) for name, values in hyper.items()},
            counted={name for name, values in hyper.items() if rule.keeps_count(values)},
            device=device,
            torch_config=config if isinstance(config, TorchOptimizerConfig) else None,
        )


@dataclass
class TrainerState:
    """The state of a trainer, as tensors: read from a state dict that matches it, or gathered from all processes.

    An entry is None if the state dict lacks it.

    Attributes:
        tensors: Canonical name -> parameter or buffer.
        slots: Canonical name -> slot -> the optimizer's state tensor, of the complete parameter.
        counts: Canonical name -> number of updates done.
        gradients: The gradients of the window.
        window: One window with the micro-batches of all processes.
        random, random_states: The state of this process's random generator, and of those of all, by rank.
        step, optimization_step: The counters of the trainer.
        loss_scaler, lr_scheduler, torch_optimizer: Their own state dicts.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    slots: dict[str, Named] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    gradients: Named | None = None
    window: AccumulationWindow | None = None
    random: torch.Tensor | None = None
    random_states: list[torch.Tensor] | None = None
    step: int | None = None
    optimization_step: int | None = None
    loss_scaler: Mapping[str, Any] | None = None
    lr_scheduler: Mapping[str, Any] | None = None
    torch_optimizer: Mapping[str, Any] | None = None

    def over(self, earlier: TrainerState | None) -> TrainerState:
        """Returns this state, with missing entries taken from a state loaded earlier."""
        if earlier is None:
            return self
        merged = TrainerState()
        for entry in dataclasses.fields(self):
            new, old = getattr(self, entry.name), getattr(earlier, entry.name)
            if isinstance(new, dict) and isinstance(old, dict) and entry.name != "gradients":
                new = {**old, **new}
            setattr(merged, entry.name, old if new is None else new)
        return merged


def read(state_dict: Mapping[str, Any], contents: Contents, window: AccumulationWindow, strict: bool) -> TrainerState:
    """Checks a state dict of either format against the trainer's contents; changes nothing.

    Args:
        state_dict: The result of ``ORTTrainer.state_dict``, in either format, or a PyTorch model's state dict.
        contents: The contents of the trainer's state.
        window: The trainer's accumulation window; it is not changed.
        strict: Whether names must match exactly; if not, only names that both have are restored.

    Returns:
        The state to restore, mostly in the memory of the state dict.

    Raises:
        RuntimeError: If names differ and ``strict`` is True; or if ``strict`` is False and no name matches.
        TypeError: If a value is neither a tensor nor an array.
        ValueError: If a shape, dtype or value does not match.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, but a {type(state_dict).__name__} was given")
    restored, differences = TrainerState(), Differences(strict)
    if state_dict and not any(isinstance(value, Mapping) for value in state_dict.values()):
        _read_tensors(state_dict, contents.tensors, contents, differences, "state_dict", restored)
        differences.check()
        return restored
    _compare_top(state_dict, contents, differences)
    _refuse_nothing(state_dict, (*_LEGACY_KEYS, *_NEW_KEYS), "state_dict")
    _read_weights(state_dict, contents, differences, restored)
    if "optimizer" in state_dict:
        _read_optimizer(state_dict, contents, differences, restored)
    else:
        _warn_missing("optimizer")
    for key in ("loss_scaler", "lr_scheduler", "torch_optimizer"):
        if key in state_dict:
            setattr(restored, key, dict(_mapping(state_dict, key, "state_dict")))
    if contents.torch_config is not None and "optimizer" in state_dict and "torch_optimizer" not in state_dict:
        kind = type(contents.torch_config.optimizer).__name__
        warn(f"Missing key: torch_optimizer in state_dict: the trainer's {kind} keeps its current moments")
    _read_counters(state_dict, contents, window, differences, restored)
    if "random" in state_dict:
        restored.random = to_tensor(state_dict["random"], "state_dict[random]").to(torch.uint8, copy=True)
        _check_random_state(restored.random, contents.device)
        if "random_states" in state_dict:
            states = to_tensor(state_dict["random_states"], "state_dict[random_states]").to(torch.uint8)
            restored.random_states = [state.clone() for state in states]
            for state in restored.random_states:
                _check_random_state(state, contents.device, "random_states")
    differences.check()
    return restored


def copied(value: Any) -> Any:
    """Returns a deep copy of a state, or of a part of it, with tensors on the CPU."""
    if isinstance(value, Mapping):
        return {key: copied(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [copied(entry) for entry in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def apply_to_executor(restored: TrainerState, executor: Executor, optimizer: OptimizerUpdate) -> None:
    """Copies the result of :func:`read` into the tensors of an executor and an optimizer."""
    for name, value in restored.tensors.items():
        (executor.parameters if name in executor.parameters else executor.buffers)[name].copy_(value)
    for name, slots in restored.slots.items():
        for slot, value in slots.items():
            optimizer.slots[name][slot].copy_(optimizer.parts.of({name: value})[name])
    for name, count in restored.counts.items():
        optimizer.counts[name].fill_(count)
    if restored.gradients is not None:
        executor.restore_gradients(restored.gradients)
    if restored.random is not None:
        executor.generator.set_state(restored.random)


def _warn_missing(key: str) -> None:
    warn(f"Missing key: {key} in state_dict")


def _mapping(parent: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = parent[key]
    if not isinstance(value, Mapping):
        raise TypeError(f"{where}[{key}] must be a dict, but it is a {type(value).__name__}")
    return value


def _refuse_nothing(found: Iterable[str], expected: Iterable[str], where: str) -> None:
    """Raises RuntimeError if no name is known, so that nothing would be restored; an empty part is fine."""
    found, expected = list(found), list(expected)
    if found and expected and not set(found) & set(expected):
        raise RuntimeError(
            f"{where} has no name in common with the trainer, so nothing would be restored: it has {shown(found)}, "
            f"but the trainer has {shown(expected)}"
        )


def _compare_top(state_dict: Mapping[str, Any], contents: Contents, differences: Differences) -> None:
    """Reports unknown keys, and missing keys that no other message reports."""
    unknown = [key for key in state_dict if key not in (*_LEGACY_KEYS, *_NEW_KEYS)]
    differences.compare_keys((), unknown, "state_dict")
    if isinstance(state_dict.get("trainer_options"), Mapping):
        options = list(state_dict["trainer_options"])
        expected = _TRAINER_OPTIONS if "window" in state_dict else [key for key in options if key in _TRAINER_OPTIONS]
        differences.compare_keys(expected, options, "state_dict[trainer_options]")
    if any(key in state_dict for key in ("window", "random")):
        for key in ("window", "random", *(["transient_buffers"] if contents.non_persistent else [])):
            if key not in state_dict:
                _warn_missing(key)


def _read_weights(
    state_dict: Mapping[str, Any], contents: Contents, differences: Differences, restored: TrainerState
) -> None:
    """Reads parameters and buffers."""
    if "model" in state_dict:
        precisions = _mapping(state_dict, "model", "state_dict")
        differences.compare_keys(["full_precision"], list(precisions), "state_dict[model]")
        _refuse_nothing(precisions, ["full_precision"], "state_dict[model]")
        weights = _mapping(precisions, "full_precision", "state_dict[model]") if "full_precision" in precisions else {}
        _read_tensors(weights, contents.tensors, contents, differences, "state_dict[model][full_precision]", restored)
        if not differences.strict:  # an export's state dict has all buffers among the weights
            _read_tensors(
                weights, contents.non_persistent, contents, differences, "state_dict[model][full_precision]", restored
            )
    else:
        _warn_missing("model")
    if "transient_buffers" in state_dict:
        buffers = _mapping(state_dict, "transient_buffers", "state_dict")
        _read_tensors(
            buffers, contents.non_persistent, contents, differences, "state_dict[transient_buffers]", restored
        )


def _read_tensors(
    given: Mapping[str, Any],
    expected: Mapping[str, torch.Tensor],
    contents: Contents,
    differences: Differences,
    where: str,
    restored: TrainerState,
) -> None:
    # One of a tied tensor's names is enough: legacy wrote it under its first name only.
    tied = {contents.canonical[name] for name in given if name in expected}
    needed = [name for name in expected if name in given or contents.canonical[name] not in tied]
    differences.compare_keys(needed, given, where)
    if expected is contents.tensors:
        _refuse_nothing(given, expected, where)
    for name, like in expected.items():
        if name not in given:
            continue
        tensor = differences.fitting(given[name], like, f"{where}[{name}]")
        if tensor is None:
            continue
        canonical = contents.canonical[name]
        known = restored.tensors.get(canonical)
        if known is not None and not torch.equal(known, tensor):
            raise ValueError(
                f"{where} has different values for {canonical!r} and {name!r}, which are tied in the model"
            )
        restored.tensors[canonical] = tensor


def _read_optimizer(
    state_dict: Mapping[str, Any], contents: Contents, differences: Differences, restored: TrainerState
) -> None:
    where = "state_dict[optimizer]"
    state = dict(_mapping(state_dict, "optimizer", "state_dict"))
    options = state_dict.get("trainer_options", {})
    name = options.get("optimizer_name") if isinstance(options, Mapping) else None
    name = name.decode() if isinstance(name, bytes) else name
    if name is None and differences.strict:
        raise RuntimeError(
            "Missing keys: ['optimizer_name'] in state_dict[trainer_options], which names the optimizer of "
            "state_dict[optimizer]"
        )
    if name is not None and name != contents.rule.name:
        raise ValueError(
            f"the state is from {name}, but the trainer uses {contents.rule.name}: create the trainer with the same "
            "optimizer config, or remove the key 'optimizer' from the state dict"
        )
    shares_count = contents.rule.shares_count
    shared = state.pop(SHARED, None) if shares_count else None
    if isinstance(shared, Mapping) and STEP not in shared:  # the legacy documentation has it in lower case
        shared = {STEP if key == STEP.lower() else key: value for key, value in shared.items()}
    each_counts = () if shares_count else contents.counted
    expected = {
        name: [*contents.slots[name], *([UPDATE_COUNT] if name in each_counts else [])] for name in contents.slots
    }
    differences.compare_keys([name for name, keys in expected.items() if keys], state, where)
    for parameter, wanted in expected.items():
        if parameter not in state or not wanted:
            continue
        entries = _mapping(state, parameter, where)
        here = f"{where}[{parameter}]"
        differences.compare_keys(wanted, entries, here)
        like = contents.tensors[parameter]
        found = {
            slot: differences.fitting(entries[slot], like, f"{here}[{slot}]")
            for slot in contents.slots[parameter]
            if slot in entries
        }
        restored.slots[parameter] = {slot: value for slot, value in found.items() if value is not None}
        if UPDATE_COUNT in wanted and UPDATE_COUNT in entries:
            restored.counts[parameter] = _update_count(entries[UPDATE_COUNT], f"{here}[{UPDATE_COUNT}]")
    if shares_count and (differences.strict or shared is not None):
        if not isinstance(shared, Mapping) or STEP not in shared:
            raise RuntimeError(f"Missing keys: ['{STEP}'] in {where}[{SHARED}]")
        differences.compare_keys([STEP], shared, f"{where}[{SHARED}]")
        count = _update_count(shared[STEP], f"{where}[{SHARED}][{STEP}]")
        restored.counts.update(dict.fromkeys(contents.counted, count))


def _update_count(value: Any, where: str) -> int:
    tensor = to_tensor(np.asarray(value) if isinstance(value, int) else value, where)
    if tensor.numel() != 1 or not 1 <= float(tensor) <= _HIGHEST_COUNT:
        raise ValueError(f"{where} must be a single number, at least 1, but it is {shown(value)}")
    return int(tensor) - 1


def _read_counters(
    state_dict: Mapping[str, Any],
    contents: Contents,
    window: AccumulationWindow,
    differences: Differences,
    restored: TrainerState,
) -> None:
    if "train_step_info" not in state_dict:
        _warn_missing("train_step_info")
        return
    info = _mapping(state_dict, "train_step_info", "state_dict")
    differences.compare_keys(["optimization_step", "step"], info, "state_dict[train_step_info]")
    for key in ("optimization_step", "step"):
        if key in info:
            setattr(restored, key, _count(info[key], f"state_dict[train_step_info][{key}]"))
    given = dict(_mapping(state_dict, "gradients", "state_dict")) if "gradients" in state_dict else {}
    _read_window(state_dict, window, restored, bool(given), differences)
    unexpected = [name for name in given if name not in contents.trainable]
    differences.compare_keys((), unexpected, "state_dict[gradients]")
    found = {
        name: differences.fitting(given[name], contents.tensors[name], f"state_dict[gradients][{name}]")
        for name in contents.trainable
        if name in given and restored.window is not None and restored.window.micro_batches
    }
    restored.gradients = {name: value for name, value in found.items() if value is not None}


def _read_window(
    state_dict: Mapping[str, Any],
    window: AccumulationWindow,
    restored: TrainerState,
    has_gradients: bool,
    differences: Differences,
) -> None:
    """Reads the position in the accumulation window; without its gradients the window starts over."""
    options = state_dict.get("trainer_options", {})
    size = options.get("gradient_accumulation_steps") if isinstance(options, Mapping) else None
    if "window" in state_dict:
        saved = dict(_mapping(state_dict, "window", "state_dict"))
        differences.compare_keys(window.state_dict(), saved, "state_dict[window]")
        if differences.strict and window.state_dict().keys() - saved.keys():
            differences.check()  # raises here, because the code below needs all keys
    else:  # the legacy layout, which only supports the mean
        size = window.given_size if size is None or not has_gradients else size
        behind = (restored.step or 0) % max(_count(size, "state_dict[trainer_options][gradient_accumulation_steps]"), 1)
        scaler = restored.loss_scaler or {}
        saved = {"micro_batches": behind, "reduction": "mean", "weight": behind, "unit": 1, "assigned_size": None}
        saved["scale"] = scaler.get("loss_scale", 1)
    incomplete = not differences.strict and bool(window.state_dict().keys() - saved.keys())
    if incomplete:  # gradients are meaningless without the complete state of their window
        has_gradients, saved = False, {**window.state_dict(), "micro_batches": 0, **saved}
    behind = _count(saved.get("micro_batches"), "state_dict[window][micro_batches]")
    if not has_gradients:
        if behind and restored.step is not None:
            warn(
                f"the state was taken after {behind} of {size} micro-batches of a window, without their gradients: the "
                "window starts over"
            )
            restored.step -= behind
        saved |= {"micro_batches": 0, "weight": 0, "unit": 1, "scale": 1}
    elif not behind:
        raise ValueError("state_dict[gradients] is not empty, but state_dict[window] has no micro-batches")
    restored.window = copying.copy(window)
    try:
        restored.window.load_state_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"state_dict[window] is invalid: {error}") from error


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value <= _HIGHEST_COUNT:
        raise ValueError(f"{where} must be an int, at least 0, but it is {shown(value)}")
    return int(value)


def _check_random_state(state: torch.Tensor, device: torch.device, key: str = "random") -> None:
    try:
        torch.Generator(device).set_state(state.clone())  # PyTorch crashes on unaligned memory, as in a mapped file
    except RuntimeError as error:
        raise ValueError(f"state_dict[{key}] is not a state of a random generator on {device}: {error}") from error
