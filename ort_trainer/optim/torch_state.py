"""Checks states before PyTorch's optimizers and schedules load them: they accept anything, and fail in a later step.

A value must have the type and the nesting of the current one, and its numbers must be finite. Then a copy of the object
loads the state and takes a step: an optimizer with small parameters, a schedule at each epoch that its state mentions,
and as many steps as the largest of them, up to a thousand.
For classes of other libraries only types are compared, because their steps may have side effects.
"""

from __future__ import annotations

import copy
import inspect
import numbers
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..core.errors import CheckpointError, shown

# The largest number: beyond it, floats skip integers.
_HIGHEST = 1 << 53
# The largest integer among hyper-parameters and counts: PyTorch allocates as many entries, as LBFGS's history_size.
_HIGHEST_SIZE = 1 << 20
# How many steps the copy of a schedule takes from where it is.
_LONGEST_TRIAL = 1000
_OF_ALL_SCHEDULES = ("last_epoch", "_step_count", "base_lrs", "_last_lr")
# Attributes with the user's functions, whose own attributes may be anything.
_FUNCTIONS = ("lr_lambdas", "_scale_fn_custom")

Group = Mapping[str, Any]
Kind = tuple[torch.Size, torch.dtype, torch.device]


def check_like(value: Any, like: Any, where: str, loose: bool = False, optional: bool = False) -> None:
    """Checks that a value has the type and the nesting of another one.

    Args:
        value: The value.
        like: The other one.
        where: The place of the value, for messages.
        loose: Whether numbers may be infinite, None fits everything, and containers may have other parts.
        optional: Whether a number, a bool or a word fits in place of None.

    Raises:
        CheckpointError: If it has another type or nesting.
    """
    difference = _difference(value, like, where, loose, optional)
    if difference is not None:
        raise CheckpointError(difference)


def as_types_of(current: Any, value: Any) -> Any:
    """Returns a checkpoint's state, which has only lists and str keys, with the types of the schedule's current one."""
    if isinstance(current, Counter):
        return Counter({int(key): count for key, count in value.items()})
    if isinstance(current, Mapping) and isinstance(value, Mapping):
        return {key: as_types_of(current.get(key), entry) for key, entry in value.items()}
    if isinstance(current, (list, tuple)) and isinstance(value, (list, tuple)) and len(current) == len(value):
        return type(current)(as_types_of(other, entry) for entry, other in zip(value, current, strict=True))
    return value


def check_schedule(scheduler: LRScheduler, state: Mapping[str, Any], groups: Sequence[Group], where: str) -> None:
    """Checks the state of a schedule.

    Args:
        scheduler: The schedule; it is not changed.
        state: What it would load.
        groups: The groups of its optimizer, with the hyper-parameters that would be loaded.
        where: The place of the state, for messages.

    Raises:
        CheckpointError: If the schedule can't have such a state.
    """
    current, is_known = scheduler.state_dict(), _is_of_torch(scheduler)
    for key, value in state.items():
        here = f"{where}[{key}]"
        if key not in current:
            raise CheckpointError(f"{here} is unknown: {type(scheduler).__name__} has no such attribute")
        if key == "_schedulers":
            _check_nested(scheduler, value, groups, here)
        elif key in _FUNCTIONS:
            check_like(_without_attributes(value), _without_attributes(current[key]), here)
        else:
            check_like(value, current[key], here, loose=not is_known and key not in _OF_ALL_SCHEDULES)
    if not is_known or "_schedulers" in current:
        return
    last = state.get("total_steps", _HIGHEST)  # the last epoch of OneCycleLR, which then raises
    now = int(state.get("last_epoch", 0))
    if now > last:
        raise CheckpointError(f"{where}[last_epoch] is {now}, but the schedule has {last} steps")
    # A schedule changes at epochs that its state mentions, or after as many steps.
    epochs = {epoch for number in _numbers_in(state) for epoch in (int(number) - 1, int(number)) if -1 <= epoch < last}
    longest = int(min(max(epochs, default=0) + 1, last - now, _LONGEST_TRIAL))
    for epoch, steps in (*((epoch, 1) for epoch in sorted(epochs)), (now, longest)):
        error = _error_at(epoch, steps, scheduler, state, groups)
        if error is not None and _error_at(epoch, steps, scheduler, current, groups) is None:
            raise CheckpointError(f"{where} does not fit {type(scheduler).__name__}: {error!r}") from error


def check_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Group], where: str) -> None:
    """Checks hyper-parameters of an optimizer's groups.

    Args:
        optimizer: The optimizer; it is not changed.
        groups: The groups; their parameters are ignored.
        where: The place of the groups, for messages.

    Raises:
        CheckpointError: If a value has the wrong type, or PyTorch refuses it.
    """
    is_known, arguments = _is_of_torch(optimizer), _arguments(optimizer)
    for at, (group, current) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        for key in [key for key in group if key in current and key not in ("params", "param_names")]:
            value, here, loose = group[key], f"{where}[{at}][{key}]", not is_known and key != "lr"
            argument = arguments.get(key) if is_known else None
            default = current[key] if argument is None or argument.default is argument.empty else argument.default
            # As the default is, or as the optimizer has it: Adafactor's eps is (None, 1e-3) until it is set.
            if _difference(value, default, here, loose, optional=True) is not None:
                check_like(value, current[key], here, loose, optional=True)
            if is_known and key != "lr" and _is_scalar(default) and _is_number(value) and value < 0 <= default:
                raise CheckpointError(f"{here} must be at least 0, but it is {shown(value)}")
            if isinstance(default, int) and isinstance(value, int) and abs(value) > _HIGHEST_SIZE and is_known:
                raise CheckpointError(f"{here} must be at most {_HIGHEST_SIZE}, but it is {shown(value)}")
        error = _error_of(optimizer, group, _kinds(optimizer, current)) if is_known and current["params"] else None
        if error is not None and _error_of(optimizer, current, _kinds(optimizer, current)) is None:
            raise CheckpointError(f"{where}[{at}] does not fit {type(optimizer).__name__}: {error!r}") from error


def check_states(
    optimizer: torch.optim.Optimizer, groups: Sequence[Group], states: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> None:
    """Checks an optimizer's state of its parameters.

    Args:
        optimizer: The optimizer; it is not changed.
        groups: The groups, from :func:`check_groups`.
        states: The states by parameter name.
        names: Names of the parameters of each group.

    Raises:
        CheckpointError: If the optimizer can't have such a state.
    """
    where = "state_dict[torch_optimizer][state]"
    for name, state in states.items():
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{where}[{name}] must be a dict, but it is {shown(state)}")
    for group, current, group_names in zip(groups, optimizer.param_groups, names, strict=True):
        if not _is_of_torch(optimizer):
            for name, parameter in zip(group_names, current["params"], strict=True):
                likes = optimizer.state.get(parameter, {})
                for key in [key for key in states.get(name, {}) if key in likes]:
                    check_like(states[name][key], likes[key], f"{where}[{name}][{key}]", loose=True)
            continue
        kinds = _kinds(optimizer, current)
        if not kinds or _error_of(optimizer, group, kinds) is not None:
            continue  # it can't step with the hyper-parameters that it has now, either
        fresh = _stepped(optimizer, group, kinds)
        shrunk: dict[int, Any] = {}
        for at, (name, kind) in enumerate(zip(group_names, kinds, strict=False)):
            likes = fresh.state[fresh.param_groups[0]["params"][at]]
            shrunk[at] = {
                key: _shrunk(value, likes[key], kind, f"{where}[{name}][{key}]")
                for key, value in states.get(name, {}).items()
                if key in likes  # others are of other hyper-parameters, and not read
            }
        error = _error_of(optimizer, group, kinds, shrunk)
        if error is not None:
            raise CheckpointError(f"{where} does not fit {type(optimizer).__name__}: {error!r}") from error


def _is_of_torch(thing: object) -> bool:
    return type(thing).__module__.startswith("torch.optim")


def _difference(value: Any, like: Any, where: str, loose: bool, optional: bool = False) -> str | None:
    """Returns the message of :func:`check_like`; None if the value is valid."""
    expected = ""
    if loose and (value is None or like is None):
        return None
    if isinstance(like, bool):
        expected = "" if isinstance(value, bool) else "True or False"
    elif _is_scalar(like):
        expected = "" if _is_number(value) or (loose and _is_scalar(value)) else "a finite number"
    elif isinstance(like, str):
        expected = "" if isinstance(value, str) else f"a word, such as {like!r}"
    elif like is None:
        plain = optional and (isinstance(value, (bool, str)) or _is_number(value))
        expected = "" if value is None or plain else "None"
    elif isinstance(like, torch.Tensor):
        fits = isinstance(value, torch.Tensor) and (loose or value.shape == like.shape)
        expected = "" if fits else f"a tensor of shape {list(like.shape)}"
    elif isinstance(like, Counter):
        fits = isinstance(value, Mapping) and all(str(key).isdecimal() for key in value)
        fits = fits and all(isinstance(count, int) and 0 < count <= _HIGHEST_SIZE for count in value.values())
        expected = "" if fits else "a dict of counts"
    elif isinstance(like, Mapping):
        keys = {str(key): entry for key, entry in like.items()}
        if not isinstance(value, Mapping) or (not loose and value.keys() != keys.keys()):
            expected = f"a dict of {list(keys)}"
        elif not loose:
            return _first(_difference(value[key], keys[key], f"{where}[{key}]", loose, optional) for key in keys)
    elif isinstance(like, (list, tuple)):
        if not isinstance(value, (list, tuple)) or (not loose and len(value) != len(like)):
            expected = f"a list of {len(like)} entries"
        elif not loose:
            pairs = enumerate(zip(value, like, strict=True))
            return _first(_difference(one, other, f"{where}[{at}]", loose, optional) for at, (one, other) in pairs)
    return f"{where} must be {expected}, but it is {shown(value)}" if expected else None


def _first(differences: Iterator[str | None]) -> str | None:
    return next((difference for difference in differences if difference is not None), None)


def _is_scalar(value: Any) -> bool:
    """Returns whether a value is a number, perhaps in a tensor without dimensions."""
    if isinstance(value, torch.Tensor):
        return not value.dim() and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_scalar(value) and bool(-_HIGHEST <= value <= _HIGHEST)


def _numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, (Mapping, list, tuple)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers_in(entry)
    elif _is_number(value):
        yield float(value)


def _without_attributes(functions: Any) -> Any:
    """Returns the attributes of one or several functions, each replaced by an empty dict."""
    if isinstance(functions, list):
        return [_without_attributes(entry) for entry in functions]
    return {} if isinstance(functions, Mapping) else functions


def _check_nested(scheduler: Any, states: Any, groups: Sequence[Group], where: str) -> None:
    schedulers = scheduler._schedulers
    if not isinstance(states, (list, tuple)) or len(states) != len(schedulers):
        raise CheckpointError(f"{where} must be a list of {len(schedulers)} entries, but it is {shown(states)}")
    for at, (nested, state) in enumerate(zip(schedulers, states, strict=True)):
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{where}[{at}] must be a dict, but it is {shown(state)}")
        check_schedule(nested, state, groups, f"{where}[{at}]")


def _error_at(
    epoch: int, steps: int, scheduler: Any, state: Mapping[str, Any], groups: Sequence[Group]
) -> Exception | None:
    """Returns the error of a copy of a schedule that has loaded a state and takes steps from an epoch."""
    owner = types.SimpleNamespace(param_groups=[dict(group) for group in groups], step=None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twin = _twin(scheduler, owner)
            twin.load_state_dict(as_types_of(scheduler.state_dict(), copy.deepcopy(dict(state))))
            twin.last_epoch = epoch
            twin.step()
            rates = [group["lr"] for group in owner.param_groups]  # later ones may well grow without bounds
            for _ in range(steps - 1):
                twin.step()
        return None if all(map(_is_number, rates)) else ValueError(f"the next learning rates are {shown(rates)}")
    except Exception as error:
        return error


def _twin(scheduler: Any, owner: Any) -> Any:
    """Returns a copy of a schedule over another optimizer, with other functions in place of the user's."""
    twin = object.__new__(type(scheduler))
    for key, value in vars(scheduler).items():
        if key == "optimizer":
            value = owner
        elif key == "_schedulers":
            value = [_twin(nested, owner) for nested in value]
        elif key == "lr_lambdas":
            value = [_Constant() for _ in value]
        elif key == "_scale_fn_custom":
            value = None if value is None else _Constant()
        elif not callable(value):
            value = copy.deepcopy(value)
        setattr(twin, key, value)
    return twin


class _Constant:
    def __call__(self, _: Any) -> float:
        return 1.0


def _arguments(optimizer: torch.optim.Optimizer) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(optimizer).__init__).parameters


def _kinds(optimizer: torch.optim.Optimizer, group: Group) -> list[Kind]:
    """Returns the kind of each parameter of a group that has a state of its own."""
    parameters = group["params"]
    if isinstance(optimizer, torch.optim.LBFGS):  # has one state for all parameters, as one vector
        return [(torch.Size([sum(p.numel() for p in parameters)]), p.dtype, p.device) for p in parameters[:1]]
    return [(p.shape, p.dtype, p.device) for p in parameters]


def _stepped(
    optimizer: torch.optim.Optimizer, group: Group, kinds: Sequence[Kind], states: Mapping[int, Any] | None = None
) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class after a step with small parameters.

    Args:
        optimizer: The optimizer.
        group: The hyper-parameters.
        kinds: The kinds of parameters.
        states: State to load before, by the number of the parameter.
    """
    # All sizes differ, so that each size in the state tells which dimension it belongs to.
    small = [torch.ones(_small(shape), dtype=dtype, device=device) for shape, dtype, device in kinds]
    hyper = {key: value for key, value in group.items() if key in _arguments(optimizer) and key != "params"}
    if "max_iter" in hyper:
        hyper["max_iter"] = min(hyper["max_iter"], 3)
    # A schedule may have made the rate negative, which constructors refuse.
    hyper["lr"] = abs(hyper["lr"])
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        kind: Any = type(optimizer)
        fresh: torch.optim.Optimizer = kind([value.requires_grad_() for value in small], **hyper)
        loaded = {**group, **hyper, "params": list(range(len(small)))}
        loaded.pop("param_names", None)
        if states is None:  # some have a state from the start
            states = fresh.state_dict()["state"]
        fresh.load_state_dict({"state": states, "param_groups": [loaded]})

        def closure() -> torch.Tensor:
            for value in small:
                value.grad = value.detach().clone()
            return torch.stack([value.detach().abs().float().square().sum() for value in small]).sum() / 2

        closure()
        # The unwrapped function runs no global hooks and no profiler, which should only see the user's steps.
        getattr(kind.step, "__wrapped__", kind.step)(fresh, closure)
    return fresh


def _error_of(*arguments: Any) -> Exception | None:
    """Returns the error of :func:`_stepped`; None if it succeeds."""
    try:
        _stepped(*arguments)
    except Exception as error:
        return error
    return None


def _small(shape: torch.Size) -> list[int]:
    """Returns a small shape with as many dimensions: [2, 3, 4, ...]."""
    return list(range(2, 2 + len(shape)))


def _shrunk(value: Any, like: Any, kind: Kind, where: str) -> Any:
    """Checks the state of a parameter, and returns a state of that kind for the small parameter in its place.

    Args:
        value: The state.
        like: That of the small parameter after a step.
        kind: The kind of the parameter.
        where: The place of the state, for messages.
    """
    shape = kind[0]
    if isinstance(like, list) and isinstance(value, list):  # LBFGS's last directions
        vector = torch.ones(_small(shape), dtype=kind[1], device=kind[2])
        likes = [vector if getattr(entry, "ndim", 0) else 0.0 for entry in value]
        parts = enumerate(zip(value, likes, strict=True))
        return [None if part is None else _shrunk(part, its, kind, f"{where}[{at}]") for at, (part, its) in parts]
    if value is None:  # as SGD's buffer is before its first step with momentum
        return None
    if isinstance(like, torch.Tensor) and like.dim():
        sizes = dict(zip(_small(shape), shape, strict=True))
        expected = [sizes.get(size, size) for size in like.shape]
        if not isinstance(value, torch.Tensor) or list(value.shape) != expected:
            raise CheckpointError(f"{where} must be a tensor of shape {expected}, but it is {shown(value)}")
        if value.is_complex() != like.is_complex():
            raise CheckpointError(f"{where} must have dtype {like.dtype}, but it has {value.dtype}")
        return like.detach().clone()
    check_like(value, like, where)
    if where.endswith("[step]") and value < 0:
        raise CheckpointError(f"{where} must be at least 0, but it is {shown(value)}")
    return value.clone() if isinstance(value, torch.Tensor) else value
