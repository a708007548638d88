"""Optimizer configs: which update rule runs, with which hyper-parameters, on which parameters."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar

__all__ = ["AdamConfig", "LambConfig", "SGDConfig"]

ParameterGroups = Sequence[Mapping[str, Any]]


def _number(name: str, value: Any, *, minimum: float = 0.0, below: float = math.inf, finite: bool = True) -> float:
    """Returns a hyper-parameter as a float; ints and numpy scalars are welcome, bools are not."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name!r} must be a number, but {value!r} ({type(value).__name__}) was given")
    number = float(value)
    if math.isnan(number) or number < minimum or number >= below or (finite and math.isinf(number)):
        limit = "" if math.isinf(below) else f" and below {below:g}"
        raise ValueError(f"{name!r} must be at least {minimum:g}{limit}, but {value!r} was given")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name!r} must be a bool, but {value!r} ({type(value).__name__}) was given")
    return value


class _OptimizerConfig:
    """Base of the optimizer configs.

    Args:
        name: ``AdamOptimizer``, ``LambOptimizer`` or ``SGDOptimizer``.
        params: Parameter groups: dicts with a list of parameter names under ``params`` and the hyper-parameters in
            which the group differs from the defaults. They are copied, never changed.
        defaults: Hyper-parameters of all parameters that no group overrides, ``lr`` among them.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("AdamOptimizer", "LambOptimizer", "SGDOptimizer")

    def __init__(self, name: str, params: ParameterGroups, defaults: Mapping[str, Any]) -> None:
        if name not in self.NAMES:
            raise ValueError(f"name must be one of {self.NAMES}, but {name!r} was given")
        if not isinstance(defaults, Mapping) or "lr" not in defaults:
            raise ValueError(f"defaults must be a dict with an 'lr', but {defaults!r} was given")
        self.name = name
        self._lr = _number("lr", defaults["lr"])
        self._defaults = {key: self._checked(key, value) for key, value in defaults.items() if key != "lr"}
        self._params = self._checked_groups(params)
        self._check_values(self._defaults)
        for group in self._params:
            self._check_values({**self._defaults, **group})

    @property
    def lr(self) -> float:
        """The learning rate: read at every step, so that it can be assigned between steps."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = _number("lr", value)

    @property
    def defaults(self) -> dict[str, Any]:
        """The default hyper-parameters, ``lr`` among them, as a new dict."""
        return {"lr": self._lr, **self._defaults}

    @property
    def params(self) -> list[dict[str, Any]]:
        """The parameter groups, each completed with the defaults, as new dicts."""
        return [{**self._defaults, **group, "params": list(group["params"])} for group in self._params]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_defaults"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}") from None

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value!r}" for key, value in self.defaults.items())
        return f"{type(self).__name__}(params={self._params!r}, {values})"

    def hyper_parameters_of(self, *names: str) -> dict[str, Any]:
        """Returns the hyper-parameters of one parameter, without ``lr``.

        Args:
            *names: The parameter's name; a tied parameter has several.
        """
        for group in self._params:
            if any(name in group["params"] for name in names):
                return {**self._defaults, **{key: value for key, value in group.items() if key != "params"}}
        return dict(self._defaults)

    def _checked_groups(self, groups: Any) -> list[dict[str, Any]]:
        if isinstance(groups, (str, Mapping)) or not isinstance(groups, Sequence):
            raise TypeError(f"'params' must be a list of parameter groups (dicts), but {groups!r} was given")
        checked = []
        owner: dict[str, int] = {}
        for index, group in enumerate(groups):
            if not isinstance(group, Mapping) or "params" not in group:
                raise TypeError(f"parameter group {index} must be a dict with a 'params' key, but {group!r} was given")
            names = group["params"]
            if isinstance(names, str) or not isinstance(names, (Sequence, set, frozenset)):
                raise TypeError(f"'params' of group {index} must be a list of parameter names, but {names!r} was given")
            for name in names:
                if not isinstance(name, str):
                    raise TypeError(f"'params' of group {index} must hold parameter names (str), but {name!r} is one")
                if owner.setdefault(name, index) != index:
                    raise ValueError(f"parameter {name!r} is in groups {owner[name]} and {index}: it can be in one")
            checked.append({"params": tuple(names), **self._checked_overrides(index, group)})
        return checked

    def _checked_overrides(self, index: int, group: Mapping[str, Any]) -> dict[str, Any]:
        overrides = {}
        for key, value in group.items():
            if key == "params":
                continue
            if key == "lr":
                raise ValueError("'lr' is not supported inside params: all groups share the config's learning rate")
            # The legacy class renamed lambda_coef to lambda in the caller's groups, so both are met in scripts.
            known = "lambda_coef" if key == "lambda" else key
            if known not in self._defaults:
                raise ValueError(
                    f"parameter group {index} sets {key!r}, which {type(self).__name__} does not have: "
                    f"it has {sorted(self._defaults)}"
                )
            overrides[known] = self._checked(known, value)
        if not overrides:
            raise ValueError(f"parameter group {index} must set at least one of {sorted(self._defaults)}")
        return overrides

    def _checked(self, key: str, value: Any) -> Any:
        return _number(key, value)

    def _check_values(self, values: Mapping[str, Any]) -> None:
        """Checks what depends on more than one hyper-parameter."""


class _AdaptiveConfig(_OptimizerConfig):
    """What Adam and LAMB share."""

    def _checked(self, key: str, value: Any) -> Any:
        if key in ("alpha", "beta"):
            return _number(key, value, below=1.0)
        if key == "do_bias_correction":
            return _flag(key, value)
        if key == "max_norm_clip":
            number = _number(key, value, finite=False)
            if number == 0:
                raise ValueError("'max_norm_clip' must not be 0: to switch clipping off, set utils.grad_norm_clip")
            return number
        return _number(key, value)


class SGDConfig(_OptimizerConfig):
    """Plain gradient descent: ``w -= lr * g``.

    Args:
        params: Must be empty: SGD has no hyper-parameter that could differ between groups.
        lr: Learning rate, at least 0.
    """

    def __init__(self, params: ParameterGroups = (), lr: float = 0.001) -> None:
        if len(params):
            raise ValueError("'params' must be an empty list for SGD optimizer")
        super().__init__("SGDOptimizer", [], {"lr": lr})


class AdamConfig(_AdaptiveConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019).

    With the gradient g, weight w, moments m and v, update number t (from 1), and c1 = 1 - alpha^t, c2 = 1 - beta^t
    (both 1 without bias correction): ``m = alpha m + (1 - alpha) g``, ``v = beta v + (1 - beta) g^2``, then

    - ``BEFORE_WEIGHT_UPDATE``: ``w -= lr (m / c1 / (sqrt(v / c2) + epsilon) + lambda w)``, which is
      ``torch.optim.AdamW``;
    - ``AFTER_WEIGHT_UPDATE``: ``z = w - lr sqrt(c2) / c1 m / (sqrt(v) + epsilon)``, ``w = z - lr lambda z``, which is
      the AdamW that Hugging Face Transformers had.

    Args:
        params: Parameter groups by name, each with any of the hyper-parameters below but ``lr``.
        lr: Learning rate, at least 0.
        alpha: Decay of the first moment, in [0, 1).
        beta: Decay of the second moment, in [0, 1).
        lambda_coef: Weight decay, at least 0.
        epsilon: Added to the denominator, at least 0.
        max_norm_clip: Limit of the global gradient norm, above 0; used while ``utils.grad_norm_clip`` is on.
        do_bias_correction: Whether c1 and c2 are used.
        weight_decay_mode: A :class:`DecayMode`.
    """

    class DecayMode(IntEnum):
        """When weight decay is applied."""

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    def __init__(
        self,
        params: ParameterGroups = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
            "weight_decay_mode": weight_decay_mode,
        }
        super().__init__("AdamOptimizer", params, defaults)

    def _checked(self, key: str, value: Any) -> Any:
        if key != "weight_decay_mode":
            return super()._checked(key, value)
        if isinstance(value, bool) or not isinstance(value, int) or value not in tuple(self.DecayMode):
            raise ValueError(f"'weight_decay_mode' must be an AdamConfig.DecayMode, but {value!r} was given")
        return self.DecayMode(value)


class LambConfig(_AdaptiveConfig):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2).

    With Adam's moments: ``d = m / c1 / (sqrt(v / c2) + epsilon) + lambda w``,
    ``r = clamp(norm(w) / norm(d), ratio_min, ratio_max)`` (1 where either norm is 0), ``w -= lr r d``, per tensor.

    Args:
        params: Parameter groups by name, each with any of the hyper-parameters below but ``lr``.
        lr: Learning rate, at least 0.
        alpha: Decay of the first moment, in [0, 1).
        beta: Decay of the second moment, in [0, 1).
        lambda_coef: Weight decay, at least 0.
        ratio_min: Lower limit of the trust ratio.
        ratio_max: Upper limit of the trust ratio.
        epsilon: Added to the denominator, at least 0.
        max_norm_clip: Limit of the global gradient norm, above 0; used while ``utils.grad_norm_clip`` is on.
        do_bias_correction: Whether c1 and c2 are used.
    """

    def __init__(
        self,
        params: ParameterGroups = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
        }
        super().__init__("LambOptimizer", params, defaults)

    def _checked(self, key: str, value: Any) -> Any:
        if key in ("ratio_min", "ratio_max"):
            return _number(key, value, minimum=-math.inf, finite=False, below=math.nan)
        return super()._checked(key, value)

    def _check_values(self, values: Mapping[str, Any]) -> None:
        if values["ratio_min"] > values["ratio_max"]:
            raise ValueError(f"'ratio_min' {values['ratio_min']} is above 'ratio_max' {values['ratio_max']}")
