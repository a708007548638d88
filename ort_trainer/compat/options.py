"""The settings of old scripts, ``ORTTrainerOptions`` and optimizer configs, and the error classes of legacy.

This module alone decides what old scripts may do that others may not: see :meth:`ORTTrainerOptions.tolerates`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from enum import IntEnum
from functools import reduce
from types import TracebackType
from typing import Any

import torch

import ort_trainer

from .. import optim
from ..core.errors import warn
from ..engine.ort import engine
from ..options.checks import SPELLINGS
from ..options.schema import leaves, load_schema

_LEGACY_OPSET = 14
device_defaults: dict[str, Any] = {}
"""What :func:`set_cuda_mem_limit` and :func:`set_cuda_device_id` have set, for later options."""


class PropagateCastOpsStrategy(IntEnum):
    """Strategies of cast propagation, for an ONNX Runtime that has no such enum."""

    NONE = 0
    INSERT_AND_REDUCE = 1
    FLOOD_FILL = 2


class _StrategyName(str):
    """The name of a strategy, which equals a member of that name, too, of this enum or onnxruntime.training's."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, getattr(other, "name", other))

    def __ne__(self, other: object) -> bool:
        return not self == other


def set_cuda_mem_limit(limit: int) -> None:
    """Limits the memory on a CUDA device: sets the default of ``device.mem_limit`` for later options.

    Args:
        limit: Bytes; 0 means no limit.

    Raises:
        TypeError: If it is not an int.
        ValueError: If it is negative.
    """
    _set_device("set_cuda_mem_limit", "mem_limit", limit, limit)


def set_cuda_device_id(device_id: int) -> None:
    """Chooses a CUDA device: sets the default of ``device.id`` for later options.

    Raises:
        TypeError: If it is not an int.
        ValueError: If there are CUDA devices, but not this one, or if it is negative.
    """
    devices = torch.cuda.device_count()
    if devices and isinstance(device_id, int) and device_id >= devices:
        raise ValueError(f"device_id must be less than {devices}, the CUDA devices here, but {device_id} was given")
    _set_device("set_cuda_device_id", "id", device_id, f"cuda:{device_id}")


def _set_device(function: str, option: str, number: int, default: int | str) -> None:
    """Sets the default of an option of ``device``; without a CUDA device, a warning says that it has no effect."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{function}() takes an int, but {number!r} was given")
    if number < 0:
        raise ValueError(f"{function}() takes an int of at least 0, but {number} was given")
    if torch.cuda.is_available():
        device_defaults[option] = default
    elif number:
        warn(f"{function}({number}) has no effect: there is no CUDA device")


def _provider_setting(name: str, *values: object) -> Callable[[Any], None]:
    """Returns a function for a setting of ONNX Runtime's CUDA provider; the first value is the provider's default."""

    def function(value: Any) -> None:
        value = getattr(value, "name", value)
        if value not in values:
            raise ValueError(f"set_{name}() takes one of {list(values)}, but {value!r} was given")
        if value != values[0]:
            warn(
                f"set_{name}({value}) has no effect on PyTorch's kernels, which train by default; for those of ONNX "
                f"Runtime, give the option provider_options={{'CUDAExecutionProvider': {{{name!r}: '{value}'}}}}"
            )

    function.__name__ = function.__qualname__ = f"set_{name}"
    return function


PROVIDER_SETTINGS = {
    function.__name__: function
    for function in (
        _provider_setting("arena_extend_strategy", "kNextPowerOfTwo", "kSameAsRequested"),
        _provider_setting("cudnn_conv_algo_search", "EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        _provider_setting("do_copy_in_default_stream", True, False),
    )
}
"""Legacy's functions for the CUDA provider of all sessions, which builds of ONNX Runtime without CUDA lack."""


def _with_legacy_defaults(options: Any) -> Any:
    """Returns options with the defaults of legacy.

    A legacy trainer trained copies of the weights, so several could start from one model; its mixed precision was
    float16; and :func:`set_cuda_mem_limit` and :func:`set_cuda_device_id` set the memory limit and the device.
    """
    options = {} if options is None else options
    defaults: dict[str, dict[str, Any]] = {"utils": {"share_weights": False}, "device": device_defaults}
    precision = options.get("mixed_precision") if isinstance(options, Mapping) else None
    if isinstance(precision, Mapping) and precision.get("enabled"):
        defaults["mixed_precision"] = {"dtype": "float16"}
    if not isinstance(options, Mapping) or not all(isinstance(options.get(key, {}), Mapping) for key in defaults):
        return options  # the constructor raises the error
    return {**options, **{key: {**values, **options.get(key, {})} for key, values in defaults.items()}}


class ORTTrainerOptions(ort_trainer.ORTTrainerOptions):
    """:class:`ort_trainer.ORTTrainerOptions` for old scripts.

    An option without effect is only a warning, and so is a shape in the model description that batches do not match.
    The default of ``utils.share_weights`` is False.

    Args:
        options: The settings.
        _validate: Legacy's own code passed it. The settings are validated in any case.

    Raises:
        TypeError: If ``options`` is not a mapping.
        ValueError: If a setting is unknown, invalid, or unsupported.
    """

    _original_opts: dict[str, Any]

    def __init__(self, options: Mapping[str, Any] | None = None, _validate: bool = True) -> None:
        super().__init__(_with_legacy_defaults(options))
        vars(self)["_original_opts"] = {} if options is None else dict(options)
        self._add_spellings()

    def showing(self, values: Mapping[str, Mapping[str, Any]]) -> ORTTrainerOptions:
        """Returns options that show other values in some sections."""
        result = super().showing(values)
        assert isinstance(result, ORTTrainerOptions)
        result._add_spellings()
        return result

    def _add_spellings(self) -> None:
        """Makes options readable as in legacy's documentation: by its names, with its default opset and its enum."""
        if not self.is_given("_internal_use.onnx_opset_version"):
            vars(self._internal_use)["onnx_opset_version"] = _LEGACY_OPSET
        casts = vars(self.graph_transformer.propagate_cast_ops_config)
        casts["strategy"] = None if casts["strategy"] is None else _StrategyName(casts["strategy"])
        for spelling, path in SPELLINGS.items():
            *sections, key = spelling.split(".")
            vars(reduce(getattr, sections, self))[key] = reduce(getattr, path.split("."), self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._original_opts,)

    def tolerates(self, message: str) -> bool:
        """Warns, and returns True."""
        warn(message)
        return True

    @property
    def _validated_opts(self) -> dict[str, Any]:
        """Legacy's settings with its defaults, and newer ones that were given, as a new nested dict."""
        document: Any = self.to_dict()
        for path, rules in leaves(load_schema("trainer_options")):
            section, _, key = path.partition(".")
            if not rules["meta"].get("legacy", True) and key not in self._original_opts.get(section, {}):
                del document[section][key]
        casts = document["graph_transformer"]["propagate_cast_ops_config"]
        kinds = getattr(engine().capi._pybind_state, "PropagateCastOpsStrategy", PropagateCastOpsStrategy)
        casts["strategy"] = None if casts["strategy"] is None else getattr(kinds, casts["strategy"])
        return document  # type: ignore[no-any-return]


Kinds = tuple[tuple[type[Exception] | tuple[type[Exception], ...], type[Exception]], ...]

ASSERTED: Kinds = (((TypeError, ValueError), AssertionError),)
"""Legacy checked the arguments of its constructors with ``assert``."""


class raising(ContextDecorator):
    """Makes errors instances of a second class as well: ``with raising((RuntimeError, RuntimeWarning)): ...``.

    Args:
        *kinds: Pairs of the class raised and the second class. Only errors of Python's built-in classes change.
    """

    def __init__(self, *kinds: Any) -> None:
        self._kinds: Kinds = kinds

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        for raised, legacy in self._kinds:
            is_builtin = type(error).__module__ == "builtins"  # other classes may take other arguments
            if is_builtin and isinstance(error, raised) and not isinstance(error, legacy):
                both = _both(type(error), legacy)
                raise both(*error.__reduce__()[1]).with_traceback(trace) from error.__cause__  # type: ignore[index]


def _both(kind: type[Exception], legacy: type[Exception]) -> type[Exception]:
    """Returns a class of errors that looks like the first class, and is a subclass of both."""

    def reduce(error: Exception) -> Any:
        return kind, kind.__reduce__(error)[1]  # a pickle has the original class, which other processes know

    return type(kind.__name__, (kind, legacy), {"__module__": kind.__module__, "__reduce__": reduce})


class _OptimizerConfig(optim.OptimizerConfig):
    """Also takes parameter groups as ``param_groups``, their name in the documentation of ``ORTTrainer``.

    Errors for invalid arguments are also ``AssertionError``s.
    """

    def __init__(self, *args: Any, param_groups: Any = None, **kwargs: Any) -> None:
        with raising(*ASSERTED):
            if param_groups is not None:
                if args or "params" in kwargs:
                    raise TypeError("'params' and 'param_groups' mean the same: leave one of them out")
                kwargs["params"] = param_groups
            super().__init__(*args, **kwargs)


class _WithoutGroupRates(_OptimizerConfig):
    """Refuses a learning rate in a group: legacy had one rate for all groups."""

    def _checked_overrides(self, index: int, group: Mapping[str, Any]) -> dict[str, Any]:
        if "lr" in group:
            raise ValueError("'lr' is not supported inside params")
        return super()._checked_overrides(index, group)


class AdamConfig(_WithoutGroupRates, optim.AdamConfig):
    """:class:`ort_trainer.optim.AdamConfig` for old scripts."""


class LambConfig(_WithoutGroupRates, optim.LambConfig):
    """:class:`ort_trainer.optim.LambConfig` for old scripts."""


class SGDConfig(_OptimizerConfig, optim.SGDConfig):
    """:class:`ort_trainer.optim.SGDConfig` for old scripts, without parameter groups."""

    def _checked_groups(self, groups: Any) -> list[dict[str, Any]]:
        if groups:
            raise ValueError("'params' must be an empty list for SGD optimizer")
        return super()._checked_groups(groups)
