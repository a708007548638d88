"""Optimizers of ``torch.optim`` as configs: one whose own ``step`` updates the weights, and the equivalent of one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import shown
from .config import OptimizerConfig, number
from .rule import RULES, Rule

__all__ = ["FollowedConfig", "TorchOptimizerConfig", "equivalent_rule", "from_torch"]


class _OverTorch(OptimizerConfig):
    """What both have in common: the parameter groups are those of the optimizer, as they are at each moment.

    Args:
        optimizer: The optimizer.

    Attributes:
        optimizer: As given, or what a library has wrapped.
        names: Of the parameters of each group.
    """

    is_live = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Nothing of the base's: it keeps values, and here they are the optimizer's.
        self.optimizer = _unwrapped(optimizer)
        self.names: list[list[str]] = []
        self._parameters: dict[str, nn.Parameter] = {}
        self._from_bases = False

    def bind(self, model: object) -> None:
        """Finds the names that the model has for the optimizer's parameters.

        Raises:
            TypeError: If the model is no PyTorch module.
            ValueError: If a parameter is not the model's.
        """
        name = type(self.optimizer).__name__
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"torch.optim.{name} has the parameters of a PyTorch module, but the model is a "
                f"{type(model).__name__}: use a config of ort_trainer.optim"
            )
        known = {id(parameter): key for key, parameter in model.named_parameters()}
        self.names = []
        for index, group in enumerate(self.optimizer.param_groups):
            strange = [parameter for parameter in group["params"] if id(parameter) not in known]
            if strange:
                raise ValueError(
                    f"parameter group {index} of torch.optim.{name} has {len(strange)} tensors that are no parameters "
                    f"of {type(model).__name__}, the first of shape {list(strange[0].shape)}: make the optimizer over "
                    "parameters of the model, after whatever replaces them (a move to another device, "
                    "load_state_dict(assign=True))"
                )
            self.names.append([known[id(parameter)] for parameter in group["params"]])
        named = dict(model.named_parameters())
        self._parameters = {key: named[key] for names in self.names for key in names}

    def trains(self, name: str) -> bool:
        return name in self._parameters

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The optimizer's parameters by name."""
        return self._parameters

    def scheduled(self) -> None:
        """A schedule starts from the rates of now, which it will change."""
        self._from_bases = True
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
        key = "initial_lr" if self._from_bases else "lr"
        rates = [float(group[key]) for group in self.optimizer.param_groups]
        return [*rates, rates[0]]  # no parameter is in no group

    @learning_rates.setter
    def learning_rates(self, values: Sequence[float]) -> None:
        if isinstance(values, (str, Mapping)) or not isinstance(values, Sequence):
            raise TypeError(f"'learning_rates' must be a list of numbers, but {values!r} was given")
        if len(values) != len(self.learning_rates):
            raise ValueError(f"'learning_rates' must have {len(self.learning_rates)} values, but {values!r} was given")
        self._write("initial_lr" if self._from_bases else "lr", [number("lr", value) for value in values])

    def set_rates(self, rates: Sequence[float]) -> None:
        """Shows the optimizer the rates of an update.

        Args:
            rates: One for all groups, or one for each and one more.
        """
        self._write("lr", [rates[0]] * len(self.optimizer.param_groups) if len(rates) == 1 else rates)

    def check(self) -> None:
        """Checks that no parameters were added after the trainer was made."""
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if count != len(self._parameters):
            raise RuntimeError(
                f"{type(self.optimizer).__name__} has {count} parameters, but had {len(self._parameters)} when the "
                "trainer was made: make the optimizer over all of them and freeze those that wait with "
                "requires_grad_(False), or make a new trainer"
            )

    def _write(self, key: str, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=False):
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(rate)
            elif group.get(key) != rate:
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
        return next(index for index, own in enumerate(self.names) if set(own) & set(names))

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
    """Stands for an optimizer that keeps its own state and does its own steps.

    Args:
        name: Of the optimizer.
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
    """An optimizer of ``torch.optim``, or any other subclass of its base: its own ``step`` updates the weights.

    ``ORTTrainer`` makes one of the optimizer that it is given. Parameters that are in no group are not trained.

    Args:
        optimizer: The optimizer, over parameters of the model.

    Raises:
        ValueError: If it needs sparse gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        optimizer = self.optimizer
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ValueError(
                "torch.optim.SparseAdam needs sparse gradients, and graphs make dense ones: use torch.optim.Adam, or "
                "ort_trainer.optim.AdamWConfig"
            )
        kind = type(optimizer)
        self.name = f"{'torch.optim' if kind.__module__.startswith('torch.optim') else kind.__module__}.{kind.__name__}"
        closure = inspect.signature(kind.step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is inspect.Parameter.empty

    def check_joint(self, zero_stage: int) -> None:
        """Refuses to divide the state, which is the optimizer's own."""
        super().check_joint(zero_stage)
        if zero_stage:
            raise ValueError(
                f"distributed.deepspeed_zero_optimization.stage is {zero_stage}, but {self.name} keeps its state "
                "itself, whole in each process: use a config of ort_trainer.optim, such as optim.SGDConfig or what "
                "optim.from_torch(optimizer) returns; or set the stage to 0, maybe with "
                "torch.distributed.optim.ZeroRedundancyOptimizer, which divides its state itself"
            )

    @property
    def rule(self) -> Rule:
        """Stands for the optimizer itself."""
        return _TorchRule(self.name)


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer inside a wrapper whose ``step`` has to do with devices and gradient scaling alone."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


# What Accelerator.prepare and Fabric.setup return.
_WRAPPERS = ("accelerate", "lightning", "lightning_fabric")
_Hyper = Callable[[Mapping[str, Any]], dict[str, Any]]


def _adam(group: Mapping[str, Any]) -> dict[str, Any]:
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
    numbers = {name: float(group[name]) for name in ("momentum", "dampening", "weight_decay")}
    return {**numbers, "nesterov": group["nesterov"]}


_EQUIVALENT: Mapping[str, tuple[str, _Hyper]] = {
    "SGD": ("SGDOptimizer", _sgd),
    "AdamW": ("AdamOptimizer", _adam),
    "Adam": ("AdamOptimizer", _adam),
}


class FollowedConfig(_OverTorch):
    """The rule of this package that does what a ``torch.optim`` optimizer would do, with the rates that it has.

    The optimizer's ``step`` is never called, and its state stays empty: moments are the trainer's. Its parameter groups
    count at every update, so schedules of ``torch.optim`` over it have their effect. Checkpoints are those of the
    config with the same rule, such as ``AdamWConfig``.

    Args:
        optimizer: The optimizer, over parameters of the model.
        name: Of the rule.
        hyper: Returns the rule's hyper-parameters for a parameter group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, hyper: _Hyper) -> None:
        super().__init__(optimizer)
        self.name, self._hyper = name, hyper

    @property
    def rule(self) -> Rule:
        """How weights are updated."""
        return RULES[self.name]

    def hyper_parameters(self, group: int) -> dict[str, Any]:
        """Returns the rule's hyper-parameters of a group, as they are now."""
        return self._hyper(self.optimizer.param_groups[group])

    def bind(self, model: object) -> None:
        """Finds the names of the optimizer's parameters, and what their rule keeps of them."""
        super().bind(model)
        self._slots = self._slots_of_now()

    def check(self) -> None:
        """Checks that the groups are what they were, and need no other state."""
        super().check()
        if self._slots_of_now() != self._slots:
            raise RuntimeError(
                f"a parameter group of {type(self.optimizer).__name__} has got a momentum, or has lost it, since the "
                "trainer was made, which has made no state for that: give it a momentum from the start"
            )

    def _slots_of_now(self) -> list[tuple[str, ...]]:
        groups = range(len(self.optimizer.param_groups))
        return [tuple(self.rule.slots_for(self.hyper_parameters(group))) for group in groups]

    def set_rates(self, rates: Sequence[float]) -> None:
        """Shows the optimizer the rates of an update."""
        super().set_rates(rates)
        self.optimizer._opt_called = True  # type: ignore[attr-defined] # as schedules want it before their own step


def equivalent_rule(optimizer: torch.optim.Optimizer) -> tuple[str, _Hyper]:
    """Returns the name of the rule that does what an optimizer does, and what makes its hyper-parameters of a group's.

    Raises:
        ValueError: If there is none.
    """
    kind = type(optimizer)
    entry = _EQUIVALENT.get(kind.__name__) if kind.__module__.startswith("torch.optim") else None
    reasons = [f"there is none for {kind.__name__}"] if entry is None else []
    for group in optimizer.param_groups if entry is not None else ():
        reasons += [f"it has {key}=True" for key in ("amsgrad", "maximize", "differentiable") if group.get(key)]
        if kind.__name__ == "Adam" and group["weight_decay"] and not group.get("decoupled_weight_decay"):
            reasons.append("Adam's weight_decay is added to the gradients (L2), which the rules here do not do")
    if entry is None or reasons:
        raise ValueError(
            f"no config does what this torch.optim.{kind.__name__} does: {'; '.join(dict.fromkeys(reasons))}"
        )
    return entry


def from_torch(optimizer: torch.optim.Optimizer) -> FollowedConfig:
    """Returns the config that does what an optimizer of ``torch.optim`` does, on this package's fused path.

    There is one for ``SGD``, ``AdamW``, and ``Adam`` without weight decay.

    Args:
        optimizer: The optimizer, over parameters of the model, without state. Its groups go on counting: change their
            learning rates, or let a schedule of ``torch.optim`` do it.

    Raises:
        TypeError: If it is no optimizer of PyTorch.
        ValueError: If no config does the same, or it has been used already.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> trainer = ORTTrainer(model, model_desc, optim.from_torch(optimizer), loss_fn=loss_fn)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"from_torch takes an optimizer of torch.optim, but {shown(optimizer)} was given")
    optimizer = _unwrapped(optimizer)
    try:
        entry = equivalent_rule(optimizer)
    except ValueError as error:
        raise ValueError(
            f"{error}. Give the optimizer itself as optim_config: its own step() updates the weights then"
        ) from None
    if optimizer.state:
        raise ValueError(
            f"this {type(optimizer).__name__} has state of updates that it has done, which its config would not go "
            "on with: give the optimizer itself as optim_config"
        )
    return FollowedConfig(optimizer, *entry)
