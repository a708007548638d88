"""Options as old scripts write and read them: the documentation's spelling of keys, ``_validated_opts``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ort_trainer

__all__ = ["NEVER_WORKED", "SPELLINGS", "ORTTrainerOptions"]

_CASTS = "graph_transformer.propagate_cast_ops_config"
# The documentation spells some keys in another way than the legacy code did; both are taken.
SPELLINGS = {
    f"{_CASTS}.propagate_cast_ops_strategy": f"{_CASTS}.strategy",
    f"{_CASTS}.propagate_cast_ops_level": f"{_CASTS}.level",
    f"{_CASTS}.propagate_cast_ops_allow": f"{_CASTS}.allow",
    **{
        key: f"graph_transformer.{key}"
        for key in (
            "attn_dropout_recompute",
            "gelu_recompute",
            "transformer_layer_recompute",
            "number_recompute_layers",
        )
    },
}
NEVER_WORKED = (f"{_CASTS}.allow_layer_norm_mod_precision", "graph_transformer.allow_layer_norm_mod_precision")


class ORTTrainerOptions(ort_trainer.ORTTrainerOptions):
    """:class:`ort_trainer.ORTTrainerOptions` for old scripts.

    Args:
        options: The settings. Keys that the legacy documentation spells in another way than its code did are taken in
            either spelling.

    Raises:
        TypeError: If ``options`` is not a mapping.
        ValueError: If any setting is unknown, has a wrong value, is not supported, or is there in both spellings.
    """

    __slots__ = ("_original_opts",)
    _original_opts: dict[str, Any]

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(_respelled(options) if isinstance(options, Mapping) else options)
        object.__setattr__(self, "_original_opts", {} if options is None else dict(options))

    @property
    def _validated_opts(self) -> dict[str, Any]:
        """All settings with their defaults, as a new nested dict."""
        return self.to_dict()


def _respelled(options: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = _copied(options)
    for path in NEVER_WORKED:
        if _holder(result, path) is not None:
            raise ValueError(
                f"Invalid options: {path}: is in the legacy documentation only, the legacy code refused it too. Which "
                "operators run in fp16 is PyTorch's autocast policy here, and layer norms are not among them: leave it "
                "out"
            )
    for spelling, path in SPELLINGS.items():
        holder = _holder(result, spelling)
        if holder is None:
            continue
        if _holder(result, path) is not None:
            raise ValueError(f"Invalid options: {spelling} and {path} are two spellings of one option: give one")
        value = holder.pop(spelling.rpartition(".")[2])
        *sections, key = path.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ValueError(f"Invalid options: {section}: must be of dict type (given: {target!r})")
        target[key] = value
    return result


def _copied(value: Any) -> Any:
    """Copies the nested dicts, and nothing in them."""
    return {key: _copied(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value


def _holder(options: Any, path: str) -> dict[str, Any] | None:
    """Returns the dict that holds the last key of a dotted path, or None where it is not given."""
    *sections, key = path.split(".")
    for section in sections:
        options = options.get(section) if isinstance(options, dict) else None
    return options if isinstance(options, dict) and key in options else None
