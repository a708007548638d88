"""The layout of ``ORTTrainer.state_dict()``, which the trainer's own checkpoints hold: nested dicts of plain values."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import MissingStateWarning, shown, warn
from ..core.optimizer_keys import CONFIGS, SHARED, STEP, UPDATE_COUNT
from .state import Array, HasState, State, widened

if TYPE_CHECKING:
    import torch

    from .differences import Differences

# The keys that legacy wrote, and those added since. Only this package writes the latter.
_LEGACY_KEYS = ("model", "optimizer", "trainer_options", "train_step_info", "partition_info")
_NEW_KEYS = (
    *("window", "random", "random_states", "transient_buffers", "gradients", "outside"),
    *("loss_scaler", "lr_scheduler", "torch_optimizer", "losses", "frozen_weights"),
)
FROZEN = "frozen_weights"
LOSSES = "losses"
"""Key of the number of the last losses that were not finite; left out if the last one was finite."""
_OBJECTS = ("loss_scaler", "lr_scheduler", "torch_optimizer")
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


def to_state_dict(state: State, copy: bool = False) -> dict[str, Any]:
    """Returns a trainer's state in the layout of ``ORTTrainer.state_dict()``.

    Args:
        state: The state.
        copy: Whether arrays are copies, in dtypes of NumPy; if not, they share the memory of the state's.
    """

    def arrays(values: Mapping[str, Array]) -> dict[str, Array]:
        """Returns arrays by name, copied if asked."""
        return {name: widened(value, copy=True) for name, value in values.items()} if copy else dict(values)

    kept = {name: value for name, value in state.parameters.items() if name not in state.frozen}
    values = arrays({**kept, **state.buffers})
    names = {name: name for name in values if name not in state.transient} if state.names is None else state.names
    weights = {name: values[key] for name, key in names.items() if key in values}
    state_dict: dict[str, Any] = {"model": {"full_precision": weights}}
    if state.frozen_digest:
        state_dict[FROZEN] = {"digest": state.frozen_digest}
    if state.trainer_options is not None:
        state_dict["trainer_options"] = state.trainer_options
    if state.step is not None:
        state_dict["train_step_info"] = {"optimization_step": state.optimization_step, "step": state.step}
    if state.window is not None:
        state_dict["window"] = {"micro_batches": state.micro_batches, **state.window}
    if state.random is not None:
        state_dict |= arrays({"random": state.random})
    if state.random_states:
        state_dict["random_states"] = np.stack(state.random_states)
    if state.transient:
        state_dict["transient_buffers"] = {name: values[key] for name, key in state.transient.items()}
    if state.outside:
        state_dict["outside"] = {
            name: {
                **entry,
                "tensors": list(arrays({str(at): value for at, value in enumerate(entry["tensors"])}).values()),
            }
            for name, entry in state.outside.items()
        }
    objects = copying.deepcopy(state.objects) if copy else dict(state.objects)
    if state.optimizer is not None:
        state_dict["optimizer"] = {name or SHARED: arrays(slots) for name, slots in state.by_parameter().items()}
        state_dict |= {key: objects.pop(key) for key in ("torch_optimizer",) if key in objects}
        if state.window:
            state_dict["gradients"] = arrays(state.gradients)
    return state_dict | objects


@dataclass(frozen=True)
class Contents:
    """The contents of a trainer's state; known from the model and optimizer, before any export.

    Attributes:
        tensors: Name -> parameter or persistent buffer, tied names included, in the order of ``model.state_dict()``.
        non_persistent: Name -> buffer that ``model.state_dict()`` leaves out.
        canonical: Name -> the first name of the same tensor.
        trainable: Canonical names of the parameters that are trained.
        frozen: Canonical names of the other parameters.
        optimizer: Name of the optimizer.
        shares_count: Whether it counts the updates of all parameters together.
        slots: Canonical name -> the state tensors that the optimizer keeps, such as ``Moment_1``.
        counted: Canonical names of the parameters whose updates are counted.
        device: Where training runs.
        owned_dtype: Dtype of a tensor of the model -> dtype in which the trainer keeps it.
        window_size: Micro-batches per update, as given in the options.
        torch_optimizer: Class of the PyTorch optimizer that does the updates; None for our own rules.
    """

    tensors: Mapping[str, torch.Tensor]
    non_persistent: Mapping[str, torch.Tensor]
    canonical: Mapping[str, str]
    trainable: Sequence[str]
    frozen: Collection[str]
    optimizer: str
    shares_count: bool
    slots: Mapping[str, Sequence[str]]
    counted: Collection[str]
    device: torch.device
    owned_dtype: Callable[[torch.dtype], torch.dtype]
    window_size: int
    torch_optimizer: str | None


def read(state_dict: Mapping[str, Any], contents: Contents, window: HasState, strict: bool) -> State:
    """Checks a state dict of either format against the trainer's contents; changes nothing.

    Args:
        state_dict: The result of ``ORTTrainer.state_dict``, in either format, or a PyTorch model's state dict.
        contents: The contents of the trainer's state.
        window: The trainer's accumulation window; it is not changed.
        strict: Whether names must match exactly; if not, only names that both have are restored.

    Returns:
        The state to restore, mostly in the memory of the state dict. An entry that the state dict lacks is None, or
        for values empty; ``window`` tells whether it has ``gradients``.

    Raises:
        RuntimeError: If names differ and ``strict`` is True; or if ``strict`` is False and no name matches.
        TypeError: If a value is neither a tensor nor an array.
        ValueError: If a shape, dtype or value does not match.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, but a {type(state_dict).__name__} was given")
    from .differences import Differences  # imports torch, which converting the files of an export does not need

    reader = _Reader(state_dict, contents, window, Differences(strict))
    if state_dict and not any(isinstance(value, Mapping) for value in state_dict.values()):
        reader.read_tensors(state_dict, contents.tensors, "state_dict")
    else:
        reader.read_all()
    reader.differences.check()
    return reader.state


@dataclass
class _Reader:
    """Reads the parts of a state dict, and collects its differences from what a trainer expects."""

    state_dict: Mapping[str, Any]
    contents: Contents
    window: HasState
    differences: Differences
    state: State = field(default_factory=lambda: State(optimization_step=None))

    def read_all(self) -> None:
        """Reads all parts."""
        state_dict, state = self.state_dict, self.state
        self._compare_top()
        keys = (*_LEGACY_KEYS, *_NEW_KEYS)
        names = {*keys, *self.contents.tensors}
        inner = next(
            (key for key, value in state_dict.items() if isinstance(value, Mapping) and names & set(value)), ""
        )
        _require_overlap(state_dict, keys, "state_dict", f": pass its entry {inner!r}" if inner else "")
        self._read_weights()
        if "optimizer" in state_dict:
            self._read_optimizer()
        else:
            _warn_missing("optimizer")
        state.objects = {key: dict(_mapping(state_dict, key, "state_dict")) for key in _OBJECTS if key in state_dict}
        if LOSSES in state_dict:
            count = _mapping(state_dict, LOSSES, "state_dict").get("nonfinite")
            state.objects[LOSSES] = {"nonfinite": _count(count, f"state_dict[{LOSSES}][nonfinite]")}
        kind = self.contents.torch_optimizer
        if kind is not None and "optimizer" in state_dict and "torch_optimizer" not in state_dict:
            warn(f"Missing key: torch_optimizer in state_dict: the trainer's {kind} keeps its current moments")
        self._read_counters()
        if "outside" in state_dict:
            outside = _mapping(state_dict, "outside", "state_dict")
            state.outside = {name: dict(_mapping(outside, name, "state_dict[outside]")) for name in outside}
        if "random" in state_dict:
            state.random = self._random_state(state_dict["random"], "random")
            if "random_states" in state_dict:
                states = self.differences.tensor(state_dict["random_states"], "state_dict[random_states]")
                state.random_states = [self._random_state(state, "random_states") for state in states]

    def _compare_top(self) -> None:
        """Reports unknown keys, and missing keys that no other message reports."""
        state_dict, differences = self.state_dict, self.differences
        unknown = [key for key in state_dict if key not in (*_LEGACY_KEYS, *_NEW_KEYS)]
        differences.compare_keys((), unknown, "state_dict")
        if isinstance(state_dict.get("trainer_options"), Mapping):
            options = list(state_dict["trainer_options"])
            expected = (
                _TRAINER_OPTIONS if "window" in state_dict else [key for key in options if key in _TRAINER_OPTIONS]
            )
            differences.compare_keys(expected, options, "state_dict[trainer_options]")
        if any(key in state_dict for key in ("window", "random")):
            for key in ("window", "random", *(["transient_buffers"] if self.contents.non_persistent else [])):
                if key not in state_dict:
                    _warn_missing(key)

    def _read_weights(self) -> None:
        """Reads parameters and buffers."""
        state_dict, contents = self.state_dict, self.contents
        if "model" in state_dict:
            precisions = _mapping(state_dict, "model", "state_dict")
            self.differences.compare_keys(["full_precision"], list(precisions), "state_dict[model]")
            _require_overlap(precisions, ["full_precision"], "state_dict[model]")
            weights = (
                _mapping(precisions, "full_precision", "state_dict[model]") if "full_precision" in precisions else {}
            )
            expected = contents.tensors
            if FROZEN in state_dict:
                entry = _mapping(state_dict, FROZEN, "state_dict")
                self.state.frozen_digest = str(entry.get("digest"))
                expected = {
                    name: value
                    for name, value in expected.items()
                    if name in weights or contents.canonical[name] not in contents.frozen
                }
            self.read_tensors(weights, expected, "state_dict[model][full_precision]")
            if not self.differences.strict:  # an export's state dict has all buffers among the weights
                self.read_tensors(weights, contents.non_persistent, "state_dict[model][full_precision]")
        else:
            _warn_missing("model")
        if "transient_buffers" in state_dict:
            buffers = _mapping(state_dict, "transient_buffers", "state_dict")
            self.read_tensors(buffers, contents.non_persistent, "state_dict[transient_buffers]")

    def read_tensors(self, tensors: Mapping[str, Any], expected: Mapping[str, torch.Tensor], where: str) -> None:
        """Reads parameters and buffers."""
        # One of a tied tensor's names is enough: legacy wrote it under its first name only.
        canonical, state = self.contents.canonical, self.state
        tied = {canonical[name] for name in tensors if name in expected}
        needed = [name for name in expected if name in tensors or canonical[name] not in tied]
        self.differences.compare_keys(needed, tensors, where)
        if expected is not self.contents.non_persistent:
            _require_overlap(tensors, expected, where)
        for name, like in expected.items():
            if name not in tensors:
                continue
            value = self._fitting(tensors[name], like, f"{where}[{name}]")
            if value is None:
                continue
            values, first = state.parameters if value.dtype.kind == "f" else state.buffers, canonical[name]
            if first in values and not np.array_equal(values[first], value):
                raise ValueError(
                    f"{where} has different values for {first!r} and {name!r}, which are tied in the model"
                )
            values[first] = value

    def _read_optimizer(self) -> None:
        """Reads the optimizer's slots and update counts."""
        where, contents, differences = "state_dict[optimizer]", self.contents, self.differences
        state = dict(_mapping(self.state_dict, "optimizer", "state_dict"))
        options = self.state_dict.get("trainer_options", {})
        name = options.get("optimizer_name") if isinstance(options, Mapping) else None
        name = name.decode() if isinstance(name, bytes) else name
        if name is None and differences.strict:
            raise RuntimeError(
                "Missing keys: ['optimizer_name'] in state_dict[trainer_options], which names the optimizer of "
                "state_dict[optimizer]"
            )
        if name is not None and name != contents.optimizer:
            raise ValueError(
                f"the state is from {CONFIGS.get(name, name)}, but the trainer uses "
                f"{CONFIGS.get(contents.optimizer, contents.optimizer)}: create the trainer with the same config, "
                "or remove the key 'optimizer' from the state dict"
            )
        shares_count = contents.shares_count
        shared = state.pop(SHARED, None) if shares_count else None
        if isinstance(shared, Mapping) and STEP not in shared:  # the legacy documentation has it in lower case
            shared = {STEP if key == STEP.lower() else key: value for key, value in shared.items()}
        each_counts = () if shares_count else contents.counted
        expected = {
            name: [*contents.slots[name], *([UPDATE_COUNT] if name in each_counts else [])] for name in contents.slots
        }
        differences.compare_keys([name for name, keys in expected.items() if keys], state, where)
        optimizer = self.state.optimizer = {}
        for parameter, wanted in expected.items():
            if parameter not in state or not wanted:
                continue
            entries = _mapping(state, parameter, where)
            here = f"{where}[{parameter}]"
            differences.compare_keys(wanted, entries, here)
            for slot in wanted:
                if slot not in entries:
                    continue
                place, value = f"{here}[{slot}]", entries[slot]
                if slot == UPDATE_COUNT:
                    optimizer[f"{parameter}.{slot}"] = self._update_count(value, place)
                elif (fitting := self._fitting(value, contents.tensors[parameter], place, narrow=True)) is not None:
                    optimizer[f"{parameter}.{slot}"] = fitting
        if shares_count and (differences.strict or shared is not None):
            if not isinstance(shared, Mapping) or STEP not in shared:
                raise RuntimeError(f"Missing keys: ['{STEP}'] in {where}[{SHARED}]")
            differences.compare_keys([STEP], shared, f"{where}[{SHARED}]")
            optimizer[STEP] = self._update_count(shared[STEP], f"{where}[{SHARED}][{STEP}]")

    def _fitting(self, value: Any, like: torch.Tensor, where: str, narrow: bool = False) -> Array | None:
        """Returns a value in the trainer's dtype, or in bfloat16 if ``narrow`` allows that; None if it does not fit."""
        dtype = self.differences.tensor(value, where).dtype
        if not narrow or str(dtype) != "torch.bfloat16":
            dtype = self.contents.owned_dtype(like.dtype)
        return self.differences.fitting(value, like, dtype, where)

    def _update_count(self, value: Any, where: str) -> Array:
        count = self.differences.tensor(np.asarray(value) if isinstance(value, int) else value, where)
        if count.numel() != 1 or not 1 <= float(count) <= _HIGHEST_COUNT:
            raise ValueError(f"{where} must be a single number, at least 1, but it is {shown(value)}")
        return np.array([int(count)], np.int64)

    def _random_state(self, value: Any, key: str) -> Array:
        return self.differences.random_state(value, self.contents.device, f"state_dict[{key}]")

    def _read_counters(self) -> None:
        """Reads the counts of steps and updates, and the accumulation window with its gradients."""
        state_dict, state, contents = self.state_dict, self.state, self.contents
        if "train_step_info" not in state_dict:
            _warn_missing("train_step_info")
            return
        info = _mapping(state_dict, "train_step_info", "state_dict")
        self.differences.compare_keys(["optimization_step", "step"], info, "state_dict[train_step_info]")
        for key in ("optimization_step", "step"):
            if key in info:
                setattr(state, key, _count(info[key], f"state_dict[train_step_info][{key}]"))
        gradients = dict(_mapping(state_dict, "gradients", "state_dict")) if "gradients" in state_dict else {}
        self._read_window(bool(gradients))
        unexpected = [name for name in gradients if name not in contents.trainable]
        self.differences.compare_keys((), unexpected, "state_dict[gradients]")
        for name in contents.trainable if state.micro_batches else ():
            if name in gradients:
                value = self._fitting(gradients[name], contents.tensors[name], f"state_dict[gradients][{name}]")
                if value is not None:
                    state.gradients[name] = value

    def _read_window(self, has_gradients: bool) -> None:
        """Reads the position in the accumulation window; without its gradients the window starts over."""
        state_dict, state, differences = self.state_dict, self.state, self.differences
        current = self.window.state_dict()
        options = state_dict.get("trainer_options", {})
        size = options.get("gradient_accumulation_steps") if isinstance(options, Mapping) else None
        if "window" in state_dict:
            saved = dict(_mapping(state_dict, "window", "state_dict"))
            differences.compare_keys(current, saved, "state_dict[window]")
            if differences.strict and current.keys() - saved.keys():
                differences.check()  # raises here, because the code below needs all keys
        else:  # the legacy layout, which only supports the mean
            size = self.contents.window_size if size is None or not has_gradients else size
            window_size = max(_count(size, "state_dict[trainer_options][gradient_accumulation_steps]"), 1)
            micro_batches = (state.step or 0) % window_size
            saved = {
                "micro_batches": micro_batches,
                "reduction": "mean",
                "weight": micro_batches,
                "unit": 1,
                "assigned_size": None,
            }
            saved["scale"] = state.objects.get("loss_scaler", {}).get("loss_scale", 1)
        if current.keys() - saved.keys():  # gradients are meaningless without the complete state of their window
            has_gradients, saved = False, {**current, "micro_batches": 0, **saved}
        micro_batches = _count(saved.get("micro_batches"), "state_dict[window][micro_batches]")
        if not has_gradients:
            if micro_batches and state.step is not None:
                warn(
                    f"the state was taken after {micro_batches} of {size} micro-batches of a window, without their "
                    "gradients: the window starts over"
                )
                state.step -= micro_batches
            saved |= {"micro_batches": 0, "weight": 0, "unit": 1, "scale": 1}
        elif not micro_batches:
            raise ValueError("state_dict[gradients] is not empty, but state_dict[window] has no micro-batches")
        window = copying.copy(self.window)
        try:
            window.load_state_dict(saved)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state_dict[window] is invalid: {error}") from error
        state.window = window.state_dict()
        state.micro_batches = state.window.pop("micro_batches")


def _warn_missing(key: str) -> None:
    warn(f"Missing key: {key} in state_dict", MissingStateWarning)


def _mapping(parent: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = parent[key]
    if not isinstance(value, Mapping):
        raise TypeError(f"{where}[{key}] must be a dict, but it is a {type(value).__name__}")
    return value


def _require_overlap(names: Iterable[str], expected: Iterable[str], where: str, advice: str = "") -> None:
    """Raises a RuntimeError if nothing would be restored because all names are unknown; an empty part is fine."""
    names, expected = list(names), list(expected)
    if names and expected and not set(names) & set(expected):
        raise RuntimeError(
            f"{where} has no name in common with the trainer, so nothing would be restored: it has {shown(names)}, "
            f"but the trainer has {shown(expected)}{advice}"
        )


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value <= _HIGHEST_COUNT:
        raise ValueError(f"{where} must be an int, at least 0, but it is {shown(value)}")
    return int(value)
