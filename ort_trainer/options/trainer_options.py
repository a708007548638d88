"""``ORTTrainerOptions``: the validated, immutable settings of a trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler as TorchScheduler

from ..amp import LossScaler
from ..core.errors import was_given
from ..engine.ort import is_session_options
from ..optim import LRScheduler
from .checks import conflicts, idle, respelled
from .explain import explained
from .schema import SchemaValidator, beyond_default, flatten_errors, leaves, load_schema
from .section import Section, thawed
from .sections import Options, OptionsDict

_SCHEMA = load_schema("trainer_options")
_DEFAULTS = {path: rules["default"] for path, rules in leaves(_SCHEMA)}
MINIMUM_OPSET = 18
"""The oldest operator set of exported graphs; files are converted to the older ones that options may name."""


class _SessionOptionsKind(type):
    """Looks up ONNX Runtime's class on comparison instead of at the import of this module."""

    def __instancecheck__(cls, instance: object) -> bool:
        return is_session_options(instance)


class _SessionOptions(metaclass=_SessionOptionsKind):
    pass


class _FunctionKind(type):
    """Treats every callable except classes as an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        return callable(instance) and not isinstance(instance, type)


class _Function(metaclass=_FunctionKind):
    pass


class _OptionsValidator(
    SchemaValidator.with_types(  # type: ignore[misc]
        lr_scheduler=(LRScheduler, TorchScheduler, _Function),
        loss_scaler=(LossScaler,),
        session_options=(_SessionOptions,),
    )
):
    def _normalize_coerce_enum_name(self, value: Any) -> Any:
        return getattr(value, "name", value)

    def _normalize_coerce_dtype_name(self, value: Any) -> Any:
        return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value

    def _normalize_coerce_device_name(self, value: Any) -> Any:
        return str(value) if isinstance(value, torch.device) else value

    def _check_with_device(self, field: str, value: Any) -> None:
        try:
            torch.device(value)
        except RuntimeError:
            self._error(field, "must be a device of PyTorch, such as 'cpu', 'cuda' or 'cuda:1'")

    def _check_with_verification(self, field: str, value: Any) -> None:
        if value is not None and value not in ("auto", "off") and not (isinstance(value, int) and value >= 0):
            self._error(field, "must be 'auto', 'off', None or an int of at least 0")

    def _normalize_coerce_path(self, value: Any) -> Any:
        return os.fsdecode(value) if isinstance(value, os.PathLike) else value


class ORTTrainerOptions(Options):
    """Validated settings of an :class:`~ort_trainer.ORTTrainer`.

    The settings are a nested dict. Missing settings get their defaults, and every value becomes an attribute, such as
    ``options.mixed_precision.enabled``. The object is immutable and can serve any number of trainers.
    ``ort-trainer options`` lists all keys.

    Args:
        options: The settings, or None for all defaults. The dict is neither changed nor stored.

    Raises:
        TypeError: If ``options`` is not a mapping.
        ValueError: If any setting is unknown, invalid, or not supported yet. The message starts with
            ``Invalid options:`` and lists every wrong setting by its dotted path.

    Example:
        >>> ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 4}}).batch.gradient_accumulation_steps
        4
    """

    _given: frozenset[str]

    def __init__(self, options: OptionsDict | None = None) -> None:
        if options is None:
            options = {}
        if not isinstance(options, Mapping):
            raise TypeError(
                f"options must be ORTTrainerOptions, a dict such as {{'device': {{'id': 'cpu'}}}}, or None, but "
                f"{was_given(options)}"
            )
        document, errors = respelled(options)
        user_paths = frozenset(_paths(document))
        validator = _OptionsValidator(_SCHEMA)
        valid = validator.validate(document)
        # cerberus may report several errors of one value, in its own words.
        wrong = dict.fromkeys(path for path, _ in flatten_errors(validator.errors))
        errors += [explained(_SCHEMA, path, document) for path in wrong]
        if valid:
            errors += conflicts(validator.document, user_paths)
            for path, message, harmless in beyond_default(_SCHEMA, validator.document):
                message = f"{path}: {message}"
                errors += [] if harmless and self.tolerates(message) else [message]
            errors += [message for message in idle(validator.document) if not self.tolerates(message)]
        if errors:
            raise ValueError("Invalid options: " + "; ".join(errors))
        Section.__init__(self, validator.document)
        vars(self)["_given"] = user_paths

    @classmethod
    def of(cls, options: ORTTrainerOptions | OptionsDict | None) -> ORTTrainerOptions:
        """Returns the options of a user, who may pass ORTTrainerOptions, a dict, or None.

        Raises:
            TypeError, ValueError: As the constructor.
        """
        return options if isinstance(options, ORTTrainerOptions) else cls(options)

    def is_given(self, path: str) -> bool:
        """Returns whether the user gave the setting at this dotted path, even if with its default."""
        return path in self._given

    @property
    def given(self) -> list[str]:
        """The dotted paths of the options that the user gave."""
        return sorted(self._given)

    def is_default(self, path: str) -> bool:
        """Returns whether the setting at this dotted path has its default value."""
        value = reduce(getattr, path.split("."), self)
        return bool(value == _DEFAULTS[path])

    def changed(self, changes: Mapping[str, Mapping[str, Any]]) -> ORTTrainerOptions:
        """Returns options with other values in some sections, validated again."""
        user_options = self._given_values()
        for name, values in changes.items():
            user_options[name] = {**user_options.get(name, {}), **values}
        return type(self)(user_options)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._given_values(),)

    def _given_values(self) -> Any:
        """Returns the options that the user gave, as a new dict."""
        user_options: Any = {}
        for path in sorted(self._given):
            *sections, key = path.split(".")
            section: Any = self
            for name in sections:
                section = getattr(section, name) if isinstance(section, Section) else None
            value = getattr(section, key) if isinstance(section, Section) else None
            if isinstance(section, Section) and not isinstance(value, Section):
                inner = user_options
                for name in sections:
                    inner = inner.setdefault(name, {})
                inner[key] = thawed(value)
        return user_options

    def to_dict(self) -> OptionsDict:  # type: ignore[override] # a more exact type of the same dict
        """Returns all settings, including defaults, as new nested dicts and lists."""
        settings: Any = super().to_dict()
        return settings  # type: ignore[no-any-return]

    def showing(self, values: Mapping[str, Mapping[str, Any]]) -> ORTTrainerOptions:
        """Returns options that show other values in some sections, neither given by the user nor validated."""
        document: Any = self.to_dict()
        for name, section in values.items():
            document[name].update(section)
        result = object.__new__(type(self))
        vars(result).update(vars(self))
        Section.__init__(result, document)
        return result

    def tolerates(self, message: str) -> bool:
        """Returns whether to accept a harmless mistake, such as an option without effect; here it never is.

        The options of legacy scripts override this method: they warn and accept it, because the legacy trainer did.

        Args:
            message: What is wrong, and what to do.
        """
        return False

    def refuse(self, message: str) -> None:
        """Raises a ValueError with the message, unless the options tolerate the mistake."""
        if not self.tolerates(message):
            raise ValueError(message)

    def verification(self) -> int | str:
        """Returns ``debug.verify_every``: ``"auto"``, or a number, which is 0 for no comparison."""
        every = self.debug.verify_every
        return 0 if every in (None, "off") else every

    def cuda_graphs(self, device: torch.device) -> str:
        """Returns ``utils.cuda_graphs`` for a device.

        Raises:
            ValueError: If graphs are required on a device that has none.
        """
        way: str = self.utils.cuda_graphs
        if way == "on" and device.type != "cuda":
            raise ValueError(f"utils.cuda_graphs is 'on', but training runs on {device}: set it to 'auto'")
        return way

    def memory_limit(self, device: torch.device) -> int:
        """Returns ``device.mem_limit`` for a device.

        Raises:
            ValueError: If there is a limit and the device is not a CUDA device.
        """
        limit: int = self.device.mem_limit
        if not limit or device.type == "cuda":
            return limit
        self.refuse(
            f"device.mem_limit {limit} was set, but it limits CUDA memory only, and training runs on {device}: leave "
            "it out"
        )
        return 0


def _paths(options: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yields the dotted paths of all sections and options in a user's dict."""
    for key, value in options.items():
        here = f"{path}.{key}" if path else str(key)
        yield here
        if isinstance(value, Mapping):
            yield from _paths(value, here)
