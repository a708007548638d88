"""Optimizer configs: which update rule runs, with which hyper-parameters, on which parameters."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar

from ..errors import shown

__all__ = ["AdamConfig", "AdamWConfig", "LambConfig", "SGDConfig"]

ParameterGroups = Sequence[Mapping[str, Any]]


def _number(name: str, value: Any, *, minimum: float = 0.0, below: float = math.inf, finite: bool = True) -> float:
    """Returns a hyper-parameter as a float; ints and numpy scalars are welcome, bools are not."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name!r} must be a number, but {shown(value)} ({type(value).__name__}) was given")
    number = float(value)
    if math.isnan(number) or number < minimum or (number >= below < math.inf) or (finite and math.isinf(number)):
        limit = "" if math.isinf(below) else f" and below {below:g}"
        raise ValueError(f"{name!r} must be at least {minimum:g}{limit}, but {shown(value)} was given")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name!r} must be a bool, but {shown(value)} ({type(value).__name__}) was given")
    return value


class _OptimizerConfig:
    """Base of the optimizer configs.

    Args:
        name: ``AdamOptimizer``, ``LambOptimizer`` or ``SGDOptimizer``.
        params: Parameter groups: dicts with a list of parameter names under ``params`` and the hyper-parameters in
            which the group differs from the defaults, ``lr`` among them. They are copied, never changed. All
            parameters that no group names make the default group, which is the last.
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
    def learning_rates(self) -> list[float]:
        """The learning rate of every parameter group, and last that of the default group, :attr:`lr`.

        A group without an ``lr`` of its own has the config's. Assign a list of the same length to change them all
        between steps; a group follows :attr:`lr` until it is assigned another value.
        """
        return [*(group.get("lr", self._lr) for group in self._params), self._lr]

    @learning_rates.setter
    def learning_rates(self, values: Sequence[float]) -> None:
        if isinstance(values, (str, Mapping)) or not isinstance(values, Sequence):
            raise TypeError(f"'learning_rates' must be a list of numbers, but {values!r} was given")
        if len(values) != len(self._params) + 1:
            raise ValueError(
                f"'learning_rates' must have {len(self._params) + 1} values, one per parameter group and one for all "
                f"other parameters, but {values!r} was given"
            )
        *own, default = [_number("lr", value) for value in values]
        self._lr = default
        for group, value in zip(self._params, own, strict=True):
            if "lr" in group or value != default:
                group["lr"] = value

    @property
    def has_group_rates(self) -> bool:
        """Whether any parameter group has a learning rate of its own."""
        return any("lr" in group for group in self._params)

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
        groups = [self._shown(group) for group in self._params]
        values = ", ".join(f"{key}={value!r}" for key, value in self._shown(self.defaults).items())
        return f"{type(self).__name__}(params={groups!r}, {values})"

    def _shown(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns hyper-parameters under the names that the constructor has for them."""
        return dict(values)

    def group_of(self, *names: str) -> int:
        """Returns the index of a parameter's group; the default group comes after all others.

        Args:
            *names: The parameter's name; a tied parameter has several.
        """
        for index, group in enumerate(self._params):
            if any(name in group["params"] for name in names):
                return index
        return len(self._params)

    def hyper_parameters(self, group: int) -> dict[str, Any]:
        """Returns the hyper-parameters of a group by its index, without ``lr``."""
        own = self._params[group] if group < len(self._params) else {}
        return {**self._defaults, **{key: value for key, value in own.items() if key not in ("params", "lr")}}

    def _checked_groups(self, groups: Any) -> list[dict[str, Any]]:
        if isinstance(groups, (str, Mapping)) or not isinstance(groups, Sequence):
            raise TypeError(f"'params' must be a list of parameter groups (dicts), but {shown(groups)} was given")
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
                        f"'params' of group {index} must hold parameter names (str), but {shown(name)} is one"
                    )
                if owner.setdefault(name, index) != index:
                    raise ValueError(f"parameter {name!r} is in groups {owner[name]} and {index}: it can be in one")
            checked.append({"params": tuple(names), **self._checked_overrides(index, group)})
        return checked

    def _checked_overrides(self, index: int, group: Mapping[str, Any]) -> dict[str, Any]:
        overrides = {}
        allowed = sorted(["lr", *self._defaults])
        for key, value in self._own_names(group).items():
            if key == "params":
                continue
            # The legacy class renamed lambda_coef to lambda in the caller's groups, so both are met in scripts.
            known = "lambda_coef" if key == "lambda" else key
            if known not in allowed:
                raise ValueError(
                    f"parameter group {index} sets {key!r}, which {type(self).__name__} does not have: it has {allowed}"
                )
            if known in overrides:
                raise ValueError(
                    f"parameter group {index} sets both 'lambda' and 'lambda_coef', which are one: leave one out"
                )
            overrides[known] = _number("lr", value) if known == "lr" else self._checked(known, value)
        if not overrides:
            raise ValueError(f"parameter group {index} must set at least one of {allowed}")
        return overrides

    def _own_names(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a group with this package's names of the hyper-parameters, where a config takes others."""
        return group

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
        params: Parameter groups by name, each with an ``lr``: SGD has no other hyper-parameter.
        lr: Learning rate, at least 0.
    """

    def __init__(self, params: ParameterGroups = (), lr: float = 0.001) -> None:
        super().__init__("SGDOptimizer", params, {"lr": lr})


class AdamConfig(_AdaptiveConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019).

    With the gradient g, weight w, moments m and v, update number t (from 1), and c1 = 1 - alpha^t, c2 = 1 - beta^t
    (both 1 without bias correction): ``m = alpha m + (1 - alpha) g``, ``v = beta v + (1 - beta) g^2``, then

    - ``BEFORE_WEIGHT_UPDATE``: ``w -= lr (m / c1 / (sqrt(v / c2) + epsilon) + lambda w)``, which is
      ``torch.optim.AdamW``;
    - ``AFTER_WEIGHT_UPDATE``: ``z = w - lr sqrt(c2) / c1 m / (sqrt(v) + epsilon)``, ``w = z - lr lambda z``, which is
      the AdamW that Hugging Face Transformers had.

    Args:
        params: Parameter groups by name, each with any of the hyper-parameters below.
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
            raise ValueError(f"'weight_decay_mode' must be an AdamConfig.DecayMode, but {shown(value)} was given")
        return self.DecayMode(value)


class AdamWConfig(AdamConfig):
    """``torch.optim.AdamW``, with its argument names and defaults.

    The same rule as :class:`AdamConfig` in mode ``BEFORE_WEIGHT_UPDATE``, and checkpoints of both are interchangeable.
    Gradients are not clipped unless a limit is given, here or in ``utils.max_grad_norm``: torch's optimizer does not
    clip either.

    Args:
        params: Parameter groups by name, each with any of the hyper-parameters below.
        lr: Learning rate, at least 0.
        betas: Decay of the first and of the second moment, each in [0, 1).
        eps: Added to the denominator, at least 0.
        weight_decay: Weight decay, at least 0.
        max_norm_clip: Limit of the global gradient norm, above 0; used while ``utils.grad_norm_clip`` is on.
    """

    _NAMES: ClassVar[dict[str, str]] = {"eps": "epsilon", "weight_decay": "lambda_coef"}

    def __init__(
        self,
        params: ParameterGroups = (),
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_norm_clip: float = math.inf,
    ) -> None:
        given = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "max_norm_clip": max_norm_clip}
        super().__init__(params, lr, **self._own_names(given))

    @property
    def betas(self) -> tuple[float, float]:
        """Decay of the first and of the second moment."""
        return (self.alpha, self.beta)

    @property
    def eps(self) -> float:
        """What is added to the denominator."""
        return float(self.epsilon)

    @property
    def weight_decay(self) -> float:
        """Weight decay."""
        return float(self.lambda_coef)

    def _shown(self, values: Mapping[str, Any]) -> dict[str, Any]:
        names = {own: name for name, own in self._NAMES.items()}
        shown = {names.get(key, key): value for key, value in values.items()}
        if "alpha" in shown:
            shown["betas"] = (shown.pop("alpha"), shown.pop("beta"))
        allowed = ("params", "lr", "betas", *self._NAMES, "max_norm_clip")
        return {key: shown[key] for key in allowed if key in shown}

    def _own_names(self, group: Mapping[str, Any]) -> dict[str, Any]:
        allowed = ("params", "lr", "betas", *self._NAMES, "max_norm_clip")
        own: dict[str, Any] = {}
        for key, value in group.items():
            if key not in allowed:
                raise ValueError(f"AdamWConfig does not have {key!r}: a parameter group has {list(allowed)}")
            if key == "betas":
                if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
                    raise TypeError(f"'betas' must be two numbers, but {shown(value)} was given")
                own["alpha"], own["beta"] = (_number("betas", beta, below=1.0) for beta in value)
            elif key in self._NAMES:
                own[self._NAMES[key]] = _number(key, value)
            else:
                own[key] = value
        return own


class LambConfig(_AdaptiveConfig):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2).

    With Adam's moments: ``d = m / c1 / (sqrt(v / c2) + epsilon) + lambda w``,
    ``r = clamp(norm(w) / norm(d), ratio_min, ratio_max)`` (1 where either norm is 0), ``w -= lr r d``, per tensor.

    Args:
        params: Parameter groups by name, each with any of the hyper-parameters below.
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
            return _number(key, value, minimum=-math.inf, finite=False)
        return super()._checked(key, value)

    def _check_values(self, values: Mapping[str, Any]) -> None:
        if values["ratio_min"] > values["ratio_max"]:
            raise ValueError(f"'ratio_min' {values['ratio_min']} is above 'ratio_max' {values['ratio_max']}")
