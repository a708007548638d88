"""Reads a state dict: checks all that comes back against what the trainer has, and changes nothing."""

from __future__ import annotations

import copy as copying
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import shown, warn
from ..ownership import owned_dtype
from ..runtime import StepSession
from .layout import SHARED, STEP, TRAINER_OPTIONS, UPDATE_COUNT, Layout
from .window import AccumulationWindow

__all__ = ["Restored", "apply_to_session", "compare_keys", "read"]

# What legacy wrote, and what came after. Only a state dict of this package has a window, and the others as well.
_LEGACY_KEYS = ("model", "optimizer", "trainer_options", "train_step_info", "partition_info")
_NEW_KEYS = (
    *("window", "random", "random_states", "transient_buffers", "gradients"),
    *("loss_scaler", "lr_scheduler", "torch_optimizer"),
)


@dataclass
class Restored:
    """A state dict that was read and found to fit; None stands for what it does not have."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    slots: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] | None = None
    window: AccumulationWindow | None = None
    random: torch.Tensor | None = None
    random_states: list[torch.Tensor] | None = None
    step: int | None = None
    optimization_step: int | None = None
    loss_scaler: Mapping[str, Any] | None = None
    lr_scheduler: Mapping[str, Any] | None = None
    torch_optimizer: Mapping[str, Any] | None = None

    def over(self, earlier: Restored | None) -> Restored:
        """Returns this state with what it lacks from one that was loaded earlier."""
        if earlier is None:
            return self
        merged = Restored()
        for entry in dataclasses.fields(self):
            new, old = getattr(self, entry.name), getattr(earlier, entry.name)
            if isinstance(new, dict) and isinstance(old, dict) and entry.name != "gradients":
                new = {**old, **new}
            setattr(merged, entry.name, old if new is None else new)
        return merged


def read(state_dict: Mapping[str, Any], layout: Layout, window: AccumulationWindow, strict: bool) -> Restored:
    """Checks a state dict of either format against a layout; changes nothing.

    Args:
        state_dict: What ``ORTTrainer.state_dict`` gave, in either format, or a PyTorch model's state dict.
        layout: What the trainer has.
        window: Its accumulation window; it is not changed.
        strict: Whether names must match exactly; if not, only names that both have are restored.

    Returns:
        Copies of everything that is to be restored.

    Raises:
        RuntimeError: If names do not match and ``strict`` is True; or if it is not, and no name does.
        TypeError: If a value is no tensor or array.
        ValueError: If a shape, dtype or value does not fit.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, but a {type(state_dict).__name__} was given")
    restored = Restored()
    if state_dict and not any(isinstance(value, Mapping) for value in state_dict.values()):
        _read_tensors(state_dict, layout.tensors, layout, strict, "state_dict", restored)
        return restored
    _compare_top(state_dict, layout, strict)
    _refuse_nothing(state_dict, (*_LEGACY_KEYS, *_NEW_KEYS), "state_dict")
    if "model" in state_dict:
        precisions = _mapping(state_dict, "model", "state_dict")
        compare_keys(["full_precision"], list(precisions), strict, "state_dict[model]")
        _refuse_nothing(precisions, ["full_precision"], "state_dict[model]")
        weights = _mapping(precisions, "full_precision", "state_dict[model]") if "full_precision" in precisions else {}
        _read_tensors(weights, layout.tensors, layout, strict, "state_dict[model][full_precision]", restored)
    else:
        _warn_missing("model")
    if "transient_buffers" in state_dict:
        buffers = _mapping(state_dict, "transient_buffers", "state_dict")
        _read_tensors(buffers, layout.non_persistent, layout, strict, "state_dict[transient_buffers]", restored)
    if "optimizer" in state_dict:
        _read_optimizer(state_dict, layout, strict, restored)
    else:
        _warn_missing("optimizer")
    for key in ("loss_scaler", "lr_scheduler", "torch_optimizer"):
        if key in state_dict:
            setattr(restored, key, dict(_mapping(state_dict, key, "state_dict")))
    _read_counters(state_dict, layout, window, strict, restored)
    if "random" in state_dict:
        restored.random = _tensor(state_dict["random"], "state_dict[random]").to(torch.uint8, copy=True)
        _check_random_state(restored.random, layout.device)
        if "random_states" in state_dict:
            states = _tensor(state_dict["random_states"], "state_dict[random_states]").to(torch.uint8)
            restored.random_states = [state.clone() for state in states]
            for state in restored.random_states:
                _check_random_state(state, layout.device, "random_states")
    return restored


def apply_to_session(restored: Restored, session: StepSession) -> None:
    """Puts what :func:`read` returned into a session's tensors."""
    for name, value in restored.tensors.items():
        (session.parameters if name in session.parameters else session.buffers)[name].copy_(value)
    for name, slots in restored.slots.items():
        for slot, value in slots.items():
            session.optimizer.slots[name][slot].copy_(session.optimizer.parts.of({name: value})[name])
    for name, count in restored.counts.items():
        session.optimizer.counts[name].fill_(count)
    if restored.gradients is not None:
        session.restore_gradients(restored.gradients)
    if restored.random is not None:
        session.generator.set_state(restored.random)


def _warn_missing(key: str) -> None:
    warn(f"Missing key: {key} in state_dict")


def _mapping(parent: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = parent[key]
    if not isinstance(value, Mapping):
        raise TypeError(f"{where}[{key}] must be a dict, but it is a {type(value).__name__}")
    return value


def compare_keys(expected: Iterable[str], found: Iterable[str], strict: bool, where: str) -> None:
    """Raises RuntimeError if keys differ, and ``strict`` is True; it lists all missing and unexpected ones."""
    if not strict:
        return
    expected, found = list(expected), list(found)
    missing = [name for name in expected if name not in set(found)]
    unexpected = [name for name in found if name not in set(expected)]
    errors = []
    if missing:
        errors.append(f"Missing keys: {missing} in {where}")
    if unexpected:
        errors.append(f"Unexpected keys: {unexpected} in {where}")
    if errors:
        raise RuntimeError("; ".join(errors) + ". To restore only what both have, pass strict=False")


def _refuse_nothing(found: Iterable[str], expected: Iterable[str], where: str) -> None:
    """Raises RuntimeError if there are names, and not one is known, so that nothing would be restored."""
    found, expected = list(found), list(expected)
    if found and expected and not set(found) & set(expected):
        raise RuntimeError(
            f"{where} has no name in common with the trainer, so nothing would be restored: it has {shown(found)}, "
            f"and the trainer {shown(expected)}"
        )


def _tensor(value: Any, where: str) -> torch.Tensor:
    """Returns a copy."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(value))
    raise TypeError(f"{where} must be a tensor or a numpy array, but it is a {type(value).__name__}")


def _fitting(value: Any, like: torch.Tensor, where: str) -> torch.Tensor:
    tensor = _tensor(value, where)
    if tensor.shape != like.shape:
        raise ValueError(f"{where} has shape {list(tensor.shape)}, but the trainer has {list(like.shape)}")
    if tensor.dtype != like.dtype and (tensor.is_floating_point() != like.is_floating_point()):
        raise ValueError(f"{where} has dtype {tensor.dtype}, but the trainer has {like.dtype}")
    return tensor.to(owned_dtype(like.dtype))


def _compare_top(state_dict: Mapping[str, Any], layout: Layout, strict: bool) -> None:
    """Reports keys that are unknown, and missing keys that no other message reports."""
    compare_keys((), [key for key in state_dict if key not in (*_LEGACY_KEYS, *_NEW_KEYS)], strict, "state_dict")
    if isinstance(state_dict.get("trainer_options"), Mapping):
        options = list(state_dict["trainer_options"])
        expected = TRAINER_OPTIONS if "window" in state_dict else [key for key in options if key in TRAINER_OPTIONS]
        compare_keys(expected, options, strict, "state_dict[trainer_options]")
    if any(key in state_dict for key in ("window", "random")):
        for key in ("window", "random", *(["transient_buffers"] if layout.non_persistent else [])):
            if key not in state_dict:
                _warn_missing(key)


def _read_tensors(
    given: Mapping[str, Any],
    expected: Mapping[str, torch.Tensor],
    layout: Layout,
    strict: bool,
    where: str,
    restored: Restored,
) -> None:
    # A tied tensor is there if any of its names is: legacy wrote it under its first name only.
    tied = {layout.canonical[name] for name in given if name in expected}
    compare_keys(
        [name for name in expected if name in given or layout.canonical[name] not in tied], given, strict, where
    )
    if expected is layout.tensors:
        _refuse_nothing(given, expected, where)
    for name, like in expected.items():
        if name not in given:
            continue
        tensor = _fitting(given[name], like, f"{where}[{name}]")
        canonical = layout.canonical[name]
        known = restored.tensors.get(canonical)
        if known is not None and not torch.equal(known, tensor):
            raise ValueError(
                f"{where} has different values for {canonical!r} and {name!r}, which are one tied tensor in the model"
            )
        restored.tensors[canonical] = tensor


def _read_optimizer(state_dict: Mapping[str, Any], layout: Layout, strict: bool, restored: Restored) -> None:
    where = "state_dict[optimizer]"
    state = dict(_mapping(state_dict, "optimizer", "state_dict"))
    options = state_dict.get("trainer_options", {})
    name = options.get("optimizer_name") if isinstance(options, Mapping) else None
    name = name.decode() if isinstance(name, bytes) else name
    if name is None and strict:
        raise RuntimeError(
            "Missing keys: ['optimizer_name'] in state_dict[trainer_options], which says what state_dict[optimizer] is"
        )
    if name is not None and name != layout.rule.name:
        raise ValueError(
            f"the state is that of {name}, but the trainer uses {layout.rule.name}: make the trainer with the same "
            "optimizer config, or leave the key 'optimizer' out of the state dict"
        )
    shares_count = layout.rule.shares_count
    shared = state.pop(SHARED, None) if shares_count else None
    each_counts = () if shares_count else layout.counted
    expected = {name: [*layout.slots[name], *([UPDATE_COUNT] if name in each_counts else [])] for name in layout.slots}
    compare_keys([name for name, keys in expected.items() if keys], state, strict, where)
    for parameter, wanted in expected.items():
        if parameter not in state or not wanted:
            continue
        entries = _mapping(state, parameter, where)
        here = f"{where}[{parameter}]"
        compare_keys(wanted, entries, strict, here)
        like = layout.tensors[parameter]
        restored.slots[parameter] = {
            slot: _fitting(entries[slot], like, f"{here}[{slot}]")
            for slot in layout.slots[parameter]
            if slot in entries
        }
        if UPDATE_COUNT in wanted and UPDATE_COUNT in entries:
            restored.counts[parameter] = _update_count(entries[UPDATE_COUNT], f"{here}[{UPDATE_COUNT}]")
    if shares_count and (strict or shared is not None):
        if not isinstance(shared, Mapping) or STEP not in shared:
            raise RuntimeError(f"Missing keys: ['{STEP}'] in {where}[{SHARED}]")
        compare_keys([STEP], shared, strict, f"{where}[{SHARED}]")
        count = _update_count(shared[STEP], f"{where}[{SHARED}][{STEP}]")
        restored.counts.update(dict.fromkeys(layout.counted, count))


def _update_count(value: Any, where: str) -> int:
    tensor = _tensor(np.asarray(value) if isinstance(value, int) else value, where)
    if tensor.numel() != 1 or int(tensor) < 1:
        raise ValueError(f"{where} must be one number, at least 1, but it is {shown(value)}")
    return int(tensor) - 1


def _read_counters(
    state_dict: Mapping[str, Any], layout: Layout, window: AccumulationWindow, strict: bool, restored: Restored
) -> None:
    if "train_step_info" not in state_dict:
        _warn_missing("train_step_info")
        return
    info = _mapping(state_dict, "train_step_info", "state_dict")
    compare_keys(["optimization_step", "step"], info, strict, "state_dict[train_step_info]")
    for key in ("optimization_step", "step"):
        if key in info:
            setattr(restored, key, _count(info[key], f"state_dict[train_step_info][{key}]"))
    given = dict(_mapping(state_dict, "gradients", "state_dict")) if "gradients" in state_dict else {}
    _read_window(state_dict, window, restored, bool(given), strict)
    unexpected = [name for name in given if name not in layout.trainable]
    compare_keys((), unexpected, strict, "state_dict[gradients]")
    restored.gradients = {
        name: _fitting(given[name], layout.tensors[name], f"state_dict[gradients][{name}]")
        for name in layout.trainable
        if name in given and restored.window is not None and restored.window.micro_batches
    }


def _read_window(
    state_dict: Mapping[str, Any], window: AccumulationWindow, restored: Restored, has_gradients: bool, strict: bool
) -> None:
    """Reads where in a window the state was taken; without its gradients a window starts over."""
    options = state_dict.get("trainer_options", {})
    size = options.get("gradient_accumulation_steps") if isinstance(options, Mapping) else None
    if "window" in state_dict:
        saved = dict(_mapping(state_dict, "window", "state_dict"))
        compare_keys(window.state_dict(), saved, strict, "state_dict[window]")
    else:  # the legacy layout, which knows the mean only
        size = size if has_gradients else window.given_size
        behind = (restored.step or 0) % window.given_size
        scaler = restored.loss_scaler or {}
        saved = {"micro_batches": behind, "reduction": "mean", "weight": behind, "unit": 1, "assigned_size": None}
        saved["scale"] = scaler.get("loss_scale", 1)
    incomplete = not strict and bool(window.state_dict().keys() - saved.keys())
    if incomplete:  # without all of the window its gradients mean nothing
        has_gradients, saved = False, {**window.state_dict(), "micro_batches": 0, **saved}
    behind = _count(saved.get("micro_batches"), "state_dict[window][micro_batches]")
    if not has_gradients:
        if behind and restored.step is not None:
            warn(
                f"the state was taken after {behind} of {size} micro-batches of a window, without their gradients: the "
                "window begins anew"
            )
            restored.step -= behind
        saved |= {"micro_batches": 0, "weight": 0, "unit": 1, "scale": 1}
    elif saved.get("assigned_size") is None and size != window.given_size and (strict or size is not None):
        raise ValueError(
            f"the state was taken in the middle of a window of {size} micro-batches, but the trainer has "
            f"batch.gradient_accumulation_steps = {window.given_size}: use the same, or leave the key 'gradients' out "
            "of the state dict"
        )
    elif not behind:
        raise ValueError("state_dict[gradients] is not empty, but state_dict[window] has no micro-batch")
    restored.window = copying.copy(window)
    try:
        restored.window.load_state_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"state_dict[window] does not fit: {error}") from error


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ValueError(f"{where} must be an int, at least 0, but it is {shown(value)}")
    return int(value)


def _check_random_state(state: torch.Tensor, device: torch.device, key: str = "random") -> None:
    try:
        torch.Generator(device).set_state(state.clone())  # one in a file has any address, which PyTorch crashes on
    except RuntimeError as error:
        raise ValueError(f"state_dict[{key}] is no state of a random generator on {device}: {error}") from error
