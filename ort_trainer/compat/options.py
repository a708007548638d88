"""Options as old scripts read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ort_trainer

from ..errors import warn
from ..runtime.engine import has_cuda

__all__ = ["ORTTrainerOptions", "set_cuda_mem_limit"]

_memory_limit = 0


def set_cuda_mem_limit(limit: int) -> None:
    """Limits what ONNX Runtime may allocate on a CUDA device; options that are made later have it.

    Args:
        limit: Bytes; 0 is no limit. It is for ``device.mem_limit`` where options do not give one.

    Raises:
        TypeError, ValueError: If it is no int, or negative.
    """
    global _memory_limit
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit must be an int, in bytes, but {limit!r} was given")
    if limit < 0:
        raise ValueError(f"limit must be at least 0, but {limit} was given")
    if limit and not has_cuda():
        warn(f"set_cuda_mem_limit({limit}) has no effect: there is no CUDA device")
        limit = 0
    _memory_limit = limit


def _with_legacy_defaults(options: Any) -> Any:
    """Returns options that are as they were with legacy where nothing is given.

    A trainer trained copies of the weights, so that several could begin with one model; and
    :func:`set_cuda_mem_limit` set the limit of memory.
    """
    options = {} if options is None else options
    defaults: dict[str, dict[str, Any]] = {"utils": {"share_weights": False}, "device": {"mem_limit": _memory_limit}}
    if not isinstance(options, Mapping) or not all(isinstance(options.get(key, {}), Mapping) for key in defaults):
        return options  # which is refused
    return {**options, **{key: {**values, **options.get(key, {})} for key, values in defaults.items()}}


class ORTTrainerOptions(ort_trainer.ORTTrainerOptions):
    """:class:`ort_trainer.ORTTrainerOptions` for old scripts.

    An option without effect is a warning here, and so is a shape in the model description that batches do not have.
    The default of ``utils.share_weights`` is False.

    Args:
        options: The settings.

    Raises:
        TypeError: If ``options`` is not a mapping.
        ValueError: If any setting is unknown, has a wrong value, or is not supported.
    """

    __slots__ = ("_original_opts",)
    _original_opts: dict[str, Any]
    lenient = True

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(_with_legacy_defaults(options))
        object.__setattr__(self, "_original_opts", {} if options is None else dict(options))

    @property
    def _validated_opts(self) -> dict[str, Any]:
        """All settings with their defaults, as a new nested dict."""
        return self.to_dict()
