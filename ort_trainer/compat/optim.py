"""The optimizer configs of old scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import optim
from .legacy_errors import ASSERTED, raising

__all__ = ["AdamConfig", "LambConfig", "SGDConfig", "_OptimizerConfig"]


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
