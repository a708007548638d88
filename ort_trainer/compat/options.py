"""Options as old scripts read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ort_trainer

__all__ = ["ORTTrainerOptions"]


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
        super().__init__(options)
        object.__setattr__(self, "_original_opts", {} if options is None else dict(options))

    @property
    def _validated_opts(self) -> dict[str, Any]:
        """All settings with their defaults, as a new nested dict."""
        return self.to_dict()
