"""Optimizers of ``torch.optim``: updates by the optimizer's own ``step``, or by the equivalent rule."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import CheckpointError, shown, warn, was_given
from ..core.signatures import signature_of
from .config import OptimizerConfig, number
from .parts import global_norm
from .rule import RULES, Rule
from .torch_state import check_groups, check_states
from .update import Again, OptimizerUpdate


class _OverTorch(OptimizerConfig):
    """Base class of both configs, which reads the optimizer's current parameter groups.

    Args:
        optimizer: The optimizer.

    Attributes:
        optimizer: The optimizer, without a library's wrapper.
        names: Parameter names of each group.
    """

    is_live = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Without super().__init__(), which copies hyper-parameters: here, the optimizer has them.
        self.optimizer = _unwrapped(optimizer)
        self.names: list[list[str]] = []
        self._parameters: dict[str, nn.Parameter] = {}
        # Whether `learning_rates` are the base rates of a schedule, which groups keep as initial_lr.
        self._from_bases = False

    def bind(self, model: object) -> None:
        """Finds the model's names for the optimizer's parameters.

        Raises:
            TypeError: If the model is not a PyTorch module.
            ValueError: If the optimizer has a parameter that the model lacks.
        """
        name = type(self.optimizer).__name__
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"torch.optim.{name} has the parameters of a PyTorch module, but the model is a "
                f"{type(model).__name__}: use a config of ort_trainer.optim"
            )
        names_by_id = {id(parameter): key for key, parameter in model.named_parameters()}
        self.names = []
        for index, group in enumerate(self.optimizer.param_groups):
            strange = [parameter for parameter in group["params"] if id(parameter) not in names_by_id]
            if strange:
                raise ValueError(
                    f"parameter group {index} of torch.optim.{name} has {len(strange)} tensors that are not parameters "
                    f"of {type(model).__name__}, the first of shape {list(strange[0].shape)}: create the optimizer "
                    "with the model's parameters, after anything that replaces them (a move to another device, "
                    "load_state_dict(assign=True))"
                )
            self.names.append([names_by_id[id(parameter)] for parameter in group["params"]])
        named = dict(model.named_parameters())
        self._parameters = {key: named[key] for names in self.names for key in names}

    def trains(self, name: str) -> bool:
        return name in self._parameters

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The optimizer's parameters by name."""
        return self._parameters

    def scheduled(self) -> None:
        """Stores the current rates as ``initial_lr``: a schedule starts from them and changes ``lr``."""
        self._from_bases = True
        if not all(map(_has_rate, self.optimizer.param_groups)):
            raise ValueError(
                f"option lr_scheduler has no effect on {type(self.optimizer).__name__}, which computes its own rates: "
                "leave it out, or give the optimizer a number as lr"
            )
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))

    @property
    def lr(self) -> float:
        return self.learning_rates[0]

    @lr.setter
    def lr(self, value: float) -> None:
        self.learning_rates = [number("lr", value)] * len(self.learning_rates)

    @property
    def learning_rates(self) -> list[float]:
        """One for each group, 0 if the optimizer computes its own, and one for the default group, which is empty."""
        if self._from_bases:
            self.scheduled()  # groups that load_state_dict() has replaced may lack initial_lr
        key = "initial_lr" if self._from_bases else "lr"
        rates = [float(group[key]) if _has_rate(group) else 0.0 for group in self.optimizer.param_groups]
        return [*rates, rates[0]]

    @learning_rates.setter
    def learning_rates(self, values: Sequence[float]) -> None:
        if isinstance(values, (str, Mapping)) or not isinstance(values, Sequence):
            raise TypeError(f"'learning_rates' must be a list of numbers, but {values!r} was given")
        if len(values) != len(self.learning_rates):
            raise ValueError(f"'learning_rates' must have {len(self.learning_rates)} values, but {values!r} was given")
        self._write("initial_lr" if self._from_bases else "lr", [number("lr", value) for value in values])

    def set_rates(self, rates: Sequence[float]) -> None:
        """Writes the rates of an update into the optimizer's groups.

        Args:
            rates: One for all groups, or one for each group and one for the default group, which is empty here.
        """
        self._write("lr", [rates[0]] * len(self.optimizer.param_groups) if len(rates) == 1 else rates)

    def check(self) -> None:
        """Checks that no parameters were added after the trainer was created."""
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if count != len(self._parameters):
            raise RuntimeError(
                f"{type(self.optimizer).__name__} has {count} parameters, but had {len(self._parameters)} when the "
                "trainer was created: give the optimizer all parameters from the start and freeze the later ones with "
                "requires_grad_(False), or create a new trainer"
            )

    def _write(self, key: str, rates: Sequence[float]) -> None:
        """Writes rates into the groups that have one under a key; a rate in a tensor stays in that tensor."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(rate)
            elif _has_rate(group) and group.get(key) != rate:
                group[key] = rate

    @property
    def has_group_rates(self) -> bool:
        return len(self.optimizer.param_groups) > 1

    @property
    def defaults(self) -> dict[str, Any]:
        return dict(self.optimizer.defaults)

    @property
    def params(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        return [{**group, "params": list(names)} for group, names in zip(groups, self.names, strict=True)]

    def group_of(self, *names: str) -> int:
        return next(index for index, group_names in enumerate(self.names) if set(group_names) & set(names))

    def hyper_parameters(self, group: int) -> dict[str, Any]:
        return {
            key: value
            for key, value in self.optimizer.param_groups[group].items()
            if key not in ("params", "param_names", "lr", "initial_lr")
        }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self.__dict__["optimizer"].defaults:
            return self.optimizer.defaults[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class _TorchRule(Rule, registered=False):
    """A placeholder for an optimizer that keeps its own state and runs its own steps.

    Args:
        name: Name of the optimizer.
    """

    slots = ()

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]

    def keeps_count(self, hyper: Mapping[str, Any]) -> bool:
        return False

    def update(self, batch: Any) -> None:
        raise RuntimeError(f"{self.name} updates all parameters together")

    def nodes(self, nodes: Any, parameter: Any) -> Any:
        raise ValueError(
            f"{self.name} can't be written as ONNX nodes: leave out "
            "debug.graph_save_paths.model_with_training_graph_path, or use a config of ort_trainer.optim"
        )


class TorchOptimizerConfig(_OverTorch):
    """Config for any subclass of ``torch.optim.Optimizer``, whose own ``step`` updates the weights.

    ``ORTTrainer`` wraps a given optimizer in this class. Parameters without a group are not trained.

    Args:
        optimizer: The optimizer, over parameters of the model.

    Raises:
        ValueError: If the optimizer needs sparse gradients, or its state can't be in a checkpoint.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        optimizer = self.optimizer
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ValueError(
                "torch.optim.SparseAdam needs sparse gradients, but graphs compute dense ones: use torch.optim.Adam, "
                "or ort_trainer.optim.AdamWConfig"
            )
        kind = type(optimizer)
        self.name = f"{'torch.optim' if kind.__module__.startswith('torch.optim') else kind.__module__}.{kind.__name__}"
        _check_state_dict(optimizer)
        closure = signature_of(kind.step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is inspect.Parameter.empty

    def check_joint(self, zero_stage: int) -> None:
        """Refuses ZeRO, because the optimizer owns its state."""
        super().check_joint(zero_stage)
        if zero_stage:
            raise ValueError(
                f"distributed.deepspeed_zero_optimization.stage is {zero_stage}, but {self.name} keeps its complete "
                "state in each process: use a config of ort_trainer.optim, such as optim.SGDConfig or the result of "
                "optim.from_torch(optimizer); or set the stage to 0, optionally with "
                "torch.distributed.optim.ZeroRedundancyOptimizer, which shards its own state"
            )

    @property
    def rule(self) -> Rule:
        """A placeholder for the optimizer itself."""
        return _TorchRule(self.name)

    def state_dict(self, copy: bool = True) -> dict[str, Any]:
        """Returns the optimizer's state with parameter names in place of numbers.

        Hyper-parameters of types that a checkpoint can't hold are left out. Some optimizers have more: ``others`` is
        what they keep in ``state`` for all parameters together, and ``attributes`` what is beside ``state``.

        Args:
            copy: Whether to copy the tensors; if False, they are the optimizer's own.

        Raises:
            TypeError: If a dict in the state has other keys than str.
        """
        names, state = self._numbers(), self.optimizer.state_dict()
        others = {key: _plain(values, copy) for key, values in state["state"].items() if key not in names}
        attributes = {key: _plain(value, copy) for key, value in state.items() if key not in ("state", "param_groups")}
        groups = [
            {**group, "params": group_names}
            for group, group_names in zip(state["param_groups"], self.names, strict=True)
        ]
        return {
            "state": {names[key]: _plain(values, copy) for key, values in state["state"].items() if key in names},
            "param_groups": [
                _plain({key: value for key, value in group.items() if key != "param_names" and _is_plain(value)}, copy)
                for group in groups
            ],
            **({"others": others} if others else {}),
            **({"attributes": attributes} if attributes else {}),
        }

    def read_state(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a state as the optimizer's ``load_state_dict`` takes it; changes nothing.

        Args:
            saved: A state from :meth:`state_dict`.

        Raises:
            CheckpointError: If the optimizer can't have such a state.
            RuntimeError: If it belongs to other parameter groups.
        """
        where, kind = "state_dict[torch_optimizer]", type(self.optimizer).__name__
        groups: Any = saved.get("param_groups")
        states, others, attributes = parts = [saved.get("state"), saved.get("others", {}), saved.get("attributes", {})]
        are_dicts = all(isinstance(part, Mapping) for part in parts)
        if not isinstance(groups, list) or not are_dicts or not all(map(_is_group, groups)):
            raise CheckpointError(
                f"{where} must have 'state', a dict, and 'param_groups', a list of dicts with 'params', but it is "
                f"{shown(saved)}"
            )
        if [group["params"] for group in groups] != self.names:
            raise RuntimeError(f"{where} has other parameter groups than the trainer's {kind}")
        numbers = {name: number for number, name in self._numbers().items()}
        unknown = [name for name in states if name not in numbers]
        if unknown:
            raise RuntimeError(f"Unexpected keys: {unknown} in {where}[state]")
        current_groups = self.optimizer.state_dict()["param_groups"]
        groups = [{**current, **group} for current, group in zip(current_groups, groups, strict=True)]
        check_groups(self.optimizer, groups, f"{where}[param_groups]")
        check_states(self.optimizer, groups, states, self.names)
        for group, current in zip(groups, current_groups, strict=True):
            group.update({key: tuple(group[key]) for key, value in current.items() if isinstance(value, tuple)})
            group.update({key: current[key] for key in ("params", "param_names") if key in current})
        return {
            **_plain(attributes, True),
            "state": {**_plain(others, True), **{numbers[key]: _plain(values, True) for key, values in states.items()}},
            "param_groups": groups,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state from :meth:`read_state`.

        Raises:
            CheckpointError: If the optimizer refuses the state; its own is then unchanged.
        """
        before = self.optimizer.state_dict()
        try:
            self.optimizer.load_state_dict(state)
        except Exception as error:
            self.optimizer.load_state_dict(before)
            raise CheckpointError(
                f"state_dict[torch_optimizer] does not fit {type(self.optimizer).__name__}: {error!r}"
            ) from error

    def _numbers(self) -> dict[int, str]:
        """Returns parameter names by their numbers in PyTorch's state dicts."""
        return dict(enumerate(name for names in self.names for name in names))


def _is_group(group: Any) -> bool:
    """Returns whether a value is a parameter group with names in place of parameters."""
    names = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _has_rate(group: Mapping[str, Any]) -> bool:
    """Returns whether a group has a learning rate; some optimizers, such as Adafactor, compute their own."""
    return group.get("lr") is not None


def _check_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """Raises a ValueError if checkpoints can't have the state of an optimizer, as of one around another."""
    try:
        state = optimizer.state_dict()
    except RuntimeError:  # ZeroRedundancyOptimizer's is not there yet
        return
    is_usual = isinstance(state.get("state"), Mapping) and isinstance(state.get("param_groups"), list)
    if not is_usual or not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"state_dict() of {type(optimizer).__name__} has {list(state)} in place of 'state' and 'param_groups', so "
            "it can't be in a checkpoint: give the optimizer inside as optim_config, or write the loop with "
            "forward_backward() and optimizer.step()"
        )


def _is_plain(value: Any) -> bool:
    """Returns whether a checkpoint can hold a value."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


def _plain(value: Any, copy: bool) -> Any:
    """Returns a value as a checkpoint holds it: tensors on the CPU, dicts with str keys, and lists."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.clone() if copy else value
    if isinstance(value, Mapping):
        strange = [key for key in value if not isinstance(key, str)]
        if strange:
            raise TypeError(
                f"a checkpoint can't hold a dict with the keys {strange[:3]}, as the optimizer has in its state: save "
                "optimizer.state_dict() yourself, and model.state_dict()"
            )
        return {key: _plain(entry, copy) for key, entry in value.items()}
    return [_plain(entry, copy) for entry in value] if isinstance(value, (list, tuple)) else value


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer inside a library's wrapper, which only handles devices and gradient scaling."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


# Packages of the wrappers that Accelerator.prepare and Fabric.setup return.
_WRAPPERS = ("accelerate", "lightning", "lightning_fabric")
_Hyper = Callable[[Mapping[str, Any]], dict[str, Any]]


def _adam(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rule's hyper-parameters for a group of torch's Adam or AdamW."""
    alpha, beta = group["betas"]
    return {
        "alpha": float(alpha),
        "beta": float(beta),
        "epsilon": group["eps"],
        "lambda_coef": group["weight_decay"],
        "max_norm_clip": math.inf,
        "do_bias_correction": True,
        "weight_decay_mode": 0,
    }


def _sgd(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rule's hyper-parameters for a group of torch's SGD."""
    numbers = {name: float(group[name]) for name in ("momentum", "dampening", "weight_decay")}
    return {**numbers, "nesterov": group["nesterov"]}


_EQUIVALENT: Mapping[str, tuple[str, _Hyper]] = {
    "SGD": ("SGDOptimizer", _sgd),
    "AdamW": ("AdamOptimizer", _adam),
    "Adam": ("AdamOptimizer", _adam),
}


class FollowedConfig(_OverTorch):
    """Config with this package's rule that is equivalent to a ``torch.optim`` optimizer, and with its learning rates.

    The trainer never calls the optimizer's ``step``. Every update reads its parameter groups, so ``torch.optim``
    schedules over it take effect, and shares its state (``FollowedUpdate``). Checkpoints have the format of the
    config with the same rule, such as ``AdamWConfig``.

    Args:
        optimizer: The optimizer, over parameters of the model.
        name: Name of the rule.
        hyper: Returns the rule's hyper-parameters for a parameter group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, hyper: _Hyper) -> None:
        super().__init__(optimizer)
        self.name, self._hyper = name, hyper

    @property
    def rule(self) -> Rule:
        """The rule that updates the weights."""
        return RULES[self.name]

    def hyper_parameters(self, group: int) -> dict[str, Any]:
        """Returns the rule's current hyper-parameters of a group."""
        return self._hyper(self.optimizer.param_groups[group])

    def bind(self, model: object) -> None:
        """Finds the names and the state tensors of the optimizer's parameters."""
        super().bind(model)
        self._slots = self._current_slots()

    def check(self) -> None:
        """Checks that the rule is still equivalent, with the same parameters and state tensors as before."""
        super().check()
        reasons = _differences(self.optimizer)
        if reasons:
            raise RuntimeError(
                f"a parameter group of {type(self.optimizer).__name__} has changed since from_torch(): "
                f"{'; '.join(reasons)}. Create a trainer with the optimizer itself as optim_config: then its own "
                "step() updates the weights"
            )
        if self._current_slots() != self._slots:
            raise RuntimeError(
                f"a parameter group of {type(self.optimizer).__name__} has gained or lost its momentum since the "
                "trainer was created, so the trainer has no state for it: set a momentum from the start"
            )

    def _current_slots(self) -> list[tuple[str, ...]]:
        groups = range(len(self.optimizer.param_groups))
        return [tuple(self.rule.slots_for(self.hyper_parameters(group))) for group in groups]

    def set_rates(self, rates: Sequence[float]) -> None:
        """Writes the rates of an update into the optimizer's groups."""
        super().set_rates(rates)
        self.optimizer._opt_called = True  # type: ignore[attr-defined] # schedules require it before their own step


def _differences(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the hyper-parameters of an optimizer that its equivalent rule lacks."""
    reasons = []
    for group in optimizer.param_groups:
        reasons += [f"it has {key}=True" for key in ("amsgrad", "maximize", "differentiable") if group.get(key)]
        if type(optimizer).__name__ == "Adam" and group["weight_decay"] and not group.get("decoupled_weight_decay"):
            reasons.append("Adam adds weight_decay to the gradients (L2), and no rule here does that")
    return list(dict.fromkeys(reasons))


def equivalent_rule(optimizer: torch.optim.Optimizer) -> tuple[str, _Hyper]:
    """Returns the name of an optimizer's equivalent rule, and a function from a group to the rule's hyper-parameters.

    Raises:
        ValueError: If no rule is equivalent.
    """
    kind = type(optimizer)
    entry = _EQUIVALENT.get(kind.__name__) if kind.__module__.startswith("torch.optim") else None
    reasons = [f"there is none for {kind.__name__}"] if entry is None else _differences(optimizer)
    if entry is None or reasons:
        raise ValueError(f"no config does what this torch.optim.{kind.__name__} does: {'; '.join(reasons)}")
    return entry


def from_torch(optimizer: torch.optim.Optimizer) -> FollowedConfig:
    """Returns the config that does what a ``torch.optim`` optimizer does, with this package's fused update.

    It supports ``SGD``, ``AdamW``, and ``Adam`` without weight decay.

    Args:
        optimizer: The optimizer, over parameters of the model. Its groups and its state stay in effect: change their
            learning rates yourself or with a ``torch.optim`` schedule, save its ``state_dict()``, and load another.

    Raises:
        TypeError: If the argument is not a PyTorch optimizer.
        ValueError: If no config does the same.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> trainer = ORTTrainer(model, model_desc, optim.from_torch(optimizer), loss_fn=loss_fn)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"from_torch takes an optimizer of torch.optim, but {was_given(optimizer)}")
    optimizer = _unwrapped(optimizer)
    try:
        entry = equivalent_rule(optimizer)
    except ValueError as error:
        raise ValueError(
            f"{error}. Give the optimizer itself as optim_config: then its own step() updates the weights"
        ) from None
    return FollowedConfig(optimizer, *entry)


class TorchUpdate(OptimizerUpdate):
    """Updates the model's own parameters with a PyTorch optimizer.

    After :meth:`step` the gradients remain in ``p.grad`` until the next run of a training graph.
    """

    shows_gradients = True

    def __init__(self, config: TorchOptimizerConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._torch = config
        self._assigned: dict[str, torch.Tensor | None] = {}
        self._is_updating = False
        hook = weakref.WeakMethod(self._notice_step)
        handle = config.optimizer.register_step_pre_hook(lambda *_: (notice := hook()) and notice())
        weakref.finalize(self, handle.remove)
        if any(parameter.device.type != "cpu" for parameter in config.parameters.values()):
            config.optimizer.load_state_dict(config.optimizer.state_dict())  # moves the state to the parameters' device

    def forget(self, used: Mapping[str, torch.Tensor]) -> None:
        """Releases the gradients and their memory; a ``p.grad`` that the user has assigned stays."""
        for name in used:
            parameter = self._torch.parameters[name]
            if parameter.grad is self._assigned.get(name):
                parameter.grad = None
        self._assigned.clear()

    def _update(
        self,
        gradients: Mapping[str, torch.Tensor],
        learning_rates: Sequence[float],
        divisor: float,
        again: Again | None,
    ) -> None:
        optimizer = self._torch.optimizer
        gone = [
            name
            for name, weight in self._parameters.items()  # without frozen and unused ones
            if self._torch.parameters[name].dtype == weight.dtype
            and self._torch.parameters[name].data_ptr() != weight.data_ptr()
        ]
        if gone:
            raise RuntimeError(
                f"the model's parameters {gone[:3]} have been replaced since the trainer was created (as by "
                f"load_state_dict(assign=True)), and {type(optimizer).__name__} still has the old ones: create a new "
                "optimizer and a new trainer"
            )
        self._put(gradients, divisor)
        self._is_updating = True
        try:
            self._step(optimizer, again)
        finally:
            self._is_updating = False

    def _step(self, optimizer: torch.optim.Optimizer, again: Again | None) -> None:
        if again is None:
            optimizer.step()
            return

        def closure() -> torch.Tensor:
            loss, gradients = again()
            self.norm = global_norm(gradients.values()) if self._clips else None
            self._put(gradients, 1.0)
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    def _notice_step(self) -> None:
        """Warns of a step that the user calls with the gradients of an update that was already made."""
        used = (
            value is not None and self._torch.parameters[name].grad is value for name, value in self._assigned.items()
        )
        if not self._is_updating and any(used):
            warn(
                f"{type(self._torch.optimizer).__name__}.step() was called after a step of the trainer, which had "
                "already updated the weights with these gradients: leave it out, as the trainer calls it; for a loop "
                "that steps by itself, call trainer.forward_backward() instead of train_step()",
                others=(str(Path(torch.__file__).parent),),
            )

    def _put(self, gradients: Mapping[str, torch.Tensor], divisor: float) -> None:
        """Divides and clips gradients, and assigns them to ``p.grad`` of the model's parameters."""
        self._divide(gradients, divisor)
        for name, parameter in self._torch.parameters.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
            self._assigned[name] = parameter.grad
