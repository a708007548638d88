"""Options as old scripts read them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import ort_trainer

__all__ = ["ORTTrainerOptions", "without_idle_all_reduce"]


def without_idle_all_reduce(options: Any) -> Any:
    """Returns options without ``allreduce_post_accumulation`` where there is one process, and says so.

    Scripts for several processes set it also when they run in one, where today's options refuse it.
    """
    distributed = options.get("distributed") if isinstance(options, Mapping) else None
    if (
        not isinstance(distributed, Mapping)
        or distributed.get("allreduce_post_accumulation") is not True
        or distributed.get("world_size", 1) != 1
    ):
        return options
    warnings.warn(
        "distributed.allreduce_post_accumulation has no effect in one process (distributed.world_size is 1)",
        UserWarning,
        stacklevel=3,
    )
    return {**options, "distributed": {**distributed, "allreduce_post_accumulation": False}}


class ORTTrainerOptions(ort_trainer.ORTTrainerOptions):
    """:class:`ort_trainer.ORTTrainerOptions` for old scripts.

    Args:
        options: The settings.

    Raises:
        TypeError: If ``options`` is not a mapping.
        ValueError: If any setting is unknown, has a wrong value, or is not supported.
    """

    __slots__ = ("_original_opts",)
    _original_opts: dict[str, Any]

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(without_idle_all_reduce(options))
        object.__setattr__(self, "_original_opts", {} if options is None else dict(options))

    @property
    def _validated_opts(self) -> dict[str, Any]:
        """All settings with their defaults, as a new nested dict."""
        return self.to_dict()
