"""The base class of optimizer configs: which rule runs, with which hyper-parameters, on which parameters."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import shown
from ..core.unknown import explains_calls
from .rule import RULES, Rule

ParameterGroups = Sequence[Mapping[str, Any]]

# What other libraries call hyper-parameters.
_ELSEWHERE = {
    "learning_rate": "lr",
    "max_grad_norm": "max_norm_clip",
    "clipnorm": "max_norm_clip",
    "parameters": "params",
    "model_parameters": "params",
}


def number(name: str, value: Any, *, minimum: float = 0.0, below: float = math.inf, finite: bool = True) -> float:
    """Returns a hyper-parameter as a float; accepts ints and numpy scalars, but no bools."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name!r} must be a number, but {shown(value)} ({type(value).__name__}) was given")
    as_float = float(value)
    if (
        math.isnan(as_float)
        or as_float < minimum
        or (as_float >= below < math.inf)
        or (finite and math.isinf(as_float))
    ):
        limit = "" if math.isinf(below) else f" and below {below:g}"
        raise ValueError(f"{name!r} must be at least {minimum:g}{limit}, but {shown(value)} was given")
    return as_float


def flag(name: str, value: Any) -> bool:
    """Returns a hyper-parameter that must be a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name!r} must be a bool, but {shown(value)} ({type(value).__name__}) was given")
    return value


class OptimizerConfig:
    """Base class of optimizer configs.

    Args:
        name: Name of the rule: ``AdamOptimizer``, ``LambOptimizer``, ``SGDOptimizer``, ...
        params: Parameter groups: dicts with a list of parameter names under ``params`` and the hyper-parameters
            (including ``lr``) that override the defaults. They are copied, never changed. All other parameters form the
            default group, which is the last.
        defaults: Default hyper-parameters, including ``lr``.
    """

    is_live = False
    """Whether hyper-parameters may change from update to update, as those of a PyTorch optimizer."""
    needs_closure = False
    """Whether an update computes the loss several times."""

    def __init_subclass__(cls) -> None:
        if "__init__" in vars(cls):
            explained: Any = explains_calls(f"{cls.__name__}(lr=1e-3)", _ELSEWHERE)(vars(cls)["__init__"])
            cls.__init__ = explained  # type: ignore[method-assign]

    def __init__(self, name: str, params: ParameterGroups, defaults: Mapping[str, Any]) -> None:
        if name not in RULES:
            raise ValueError(f"name must be one of {sorted(RULES)}, but {shown(name)} was given")
        if not isinstance(defaults, Mapping) or "lr" not in defaults:
            raise ValueError(f"defaults must be a dict with an 'lr', but {defaults!r} was given")
        self.name = name
        self._lr = number("lr", defaults["lr"])
        self._defaults = {key: self._checked(key, value) for key, value in defaults.items() if key != "lr"}
        self._params = self._checked_groups(params)
        self._check_values(self._defaults)
        for group in self._params:
            self._check_values({**self._defaults, **group})

    @property
    def rule(self) -> Rule:
        """The rule that updates the weights."""
        return RULES[self.name]

    @property
    def lr(self) -> float:
        """The learning rate. It is read at every step, so it can be assigned between steps."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = number("lr", value)

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of every parameter group, followed by that of the default group, :attr:`lr`.

        A group without its own ``lr`` uses the config's. Assign a list of the same length to change them all
        between steps; a group follows :attr:`lr` until it is assigned another value.
        """
        return [self._lr] if not self._params else [*(group.get("lr", self._lr) for group in self._params), self._lr]

    @learning_rates.setter
    def learning_rates(self, values: Sequence[float]) -> None:
        if isinstance(values, (str, Mapping)) or not isinstance(values, Sequence):
            raise TypeError(f"'learning_rates' must be a list of numbers, but {values!r} was given")
        if len(values) != len(self._params) + 1:
            raise ValueError(
                f"'learning_rates' must have {len(self._params) + 1} values, one per parameter group and one for the "
                f"other parameters, but {values!r} was given"
            )
        *group_rates, default = [number("lr", value) for value in values]
        self._lr = default
        for group, value in zip(self._params, group_rates, strict=True):
            if "lr" in group or value != default:
                group["lr"] = value

    @property
    def has_group_rates(self) -> bool:
        """Whether any parameter group has its own learning rate."""
        return any("lr" in group for group in self._params)

    @property
    def defaults(self) -> dict[str, Any]:
        """The default hyper-parameters, including ``lr``, as a new dict."""
        return {"lr": self._lr, **self._defaults}

    @property
    def params(self) -> list[dict[str, Any]]:
        """The parameter groups as new dicts, each with the defaults (including ``lr``) filled in."""
        return [{**self.defaults, **group, "params": list(group["params"])} for group in self._params]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_defaults"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}") from None

    def __repr__(self) -> str:
        groups = [self._shown(group) for group in self._params]
        values = ", ".join(f"{key}={value!r}" for key, value in self._shown(self.defaults).items())
        return f"{type(self).__name__}(params={groups!r}, {values})"

    def _shown(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns hyper-parameters under the constructor's names."""
        return dict(values)

    def bind(self, model: object) -> None:
        """Connects the config with a model; a trainer calls it once.

        Raises:
            TypeError, ValueError: If the config does not fit the model.
        """

    def trains(self, name: str) -> bool:
        """Returns whether the optimizer trains a parameter."""
        return True

    def check(self) -> None:
        """Checks for outside changes since :meth:`bind`.

        Raises:
            RuntimeError: If an update is impossible now.
        """

    def check_joint(self, zero_stage: int) -> None:
        """Checks that several processes can use the optimizer together, each with its part of the data.

        Args:
            zero_stage: 1 if each process keeps a part of the state, otherwise 0.

        Raises:
            ValueError: If they can't.
        """
        if self.needs_closure:
            raise ValueError(
                f"{self.name} computes the loss several times in an update and acts on it, but each process has only "
                "the loss of its own batches, so the weights would diverge: train in one process, or with an optimizer "
                "that needs no closure"
            )

    def set_rates(self, rates: Sequence[float]) -> None:
        """Receives the learning rates of an update, before it."""

    def scheduled(self) -> None:
        """Called when a schedule starts from :attr:`learning_rates`."""

    def group_of(self, *names: str) -> int:
        """Returns the index of a parameter's group; the default group is the last.

        Args:
            *names: The parameter's name; a tied parameter has several.
        """
        for index, group in enumerate(self._params):
            if any(name in group["params"] for name in names):
                return index
        return len(self._params)

    def hyper_parameters(self, group: int) -> dict[str, Any]:
        """Returns the hyper-parameters of a group by its index, without ``lr``."""
        overrides = self._params[group] if group < len(self._params) else {}
        return {**self._defaults, **{key: value for key, value in overrides.items() if key not in ("params", "lr")}}

    def _checked_groups(self, groups: Any) -> list[dict[str, Any]]:
        """Returns valid parameter groups, copied."""
        if isinstance(groups, (str, Mapping)) or not isinstance(groups, Sequence):
            raise TypeError(
                f"'params' must be a list of parameter groups (dicts), but {shown(groups)} was given: leave it out "
                f"to train all parameters, as in {type(self).__name__}(lr=1e-3)"
            )
        checked = []
        owner: dict[str, int] = {}
        for index, group in enumerate(groups):
            if not isinstance(group, Mapping) or "params" not in group:
                raise TypeError(
                    f"parameter group {index} must be a dict with a 'params' key, but {shown(group)} was given"
                )
            names = group["params"]
            if isinstance(names, str) or not isinstance(names, (Sequence, set, frozenset)):
                raise TypeError(
                    f"'params' of group {index} must be a list of parameter names, but {shown(names)} was given"
                )
            for name in names:
                if not isinstance(name, str):
                    raise TypeError(
                        f"'params' of group {index} must hold parameter names (str), but it holds {shown(name)}"
                    )
                if owner.setdefault(name, index) != index:
                    raise ValueError(f"parameter {name!r} is in groups {owner[name]} and {index}: leave it in only one")
            checked.append({"params": tuple(names), **self._checked_overrides(index, group)})
        return checked

    def _checked_overrides(self, index: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the valid hyper-parameters that a group sets, by the rule's names."""
        overrides = {}
        allowed = sorted(["lr", *self._defaults])
        for key, value in self._own_names(group).items():
            if key == "params":
                continue
            # The legacy class renamed lambda_coef to lambda in the caller's groups, so scripts use both.
            rule_key = "lambda_coef" if key == "lambda" else key
            if rule_key not in allowed:
                raise ValueError(
                    f"parameter group {index} sets {key!r}, which {type(self).__name__} lacks: it has {allowed}"
                )
            if rule_key in overrides:
                raise ValueError(
                    f"parameter group {index} sets both 'lambda' and 'lambda_coef', which are the same: leave one out"
                )
            overrides[rule_key] = number("lr", value) if rule_key == "lr" else self._checked(rule_key, value)
        if not overrides:
            raise ValueError(f"parameter group {index} must set at least one of {allowed}")
        return overrides

    def _own_names(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a group with the rule's names of the hyper-parameters; configs with other names override it."""
        return group

    def _checked(self, key: str, value: Any) -> Any:
        """Returns a valid hyper-parameter; configs override it for any that is not a number of at least 0."""
        return number(key, value)

    def _check_values(self, values: Mapping[str, Any]) -> None:
        """Checks hyper-parameters that depend on each other."""
