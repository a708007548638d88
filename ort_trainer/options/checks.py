"""Checks of the options that the schema can't express: conflicts between settings, and other spellings of keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_CPU = "CPUExecutionProvider"
_CASTS = "graph_transformer.propagate_cast_ops_config"
# Keys in the legacy documentation whose names or sections differ from the legacy code.
SPELLINGS = {
    f"{_CASTS}.propagate_cast_ops_strategy": f"{_CASTS}.strategy",
    f"{_CASTS}.propagate_cast_ops_level": f"{_CASTS}.level",
    f"{_CASTS}.propagate_cast_ops_allow": f"{_CASTS}.allow",
    f"{_CASTS}.allow_layer_norm_mod_precision": "graph_transformer.allow_layer_norm_mod_precision",
    "attn_dropout_recompute": "graph_transformer.attn_dropout_recompute",
    "gelu_recompute": "graph_transformer.gelu_recompute",
    "transformer_layer_recompute": "graph_transformer.transformer_layer_recompute",
    "number_recompute_layers": "graph_transformer.number_recompute_layers",
    "_internal_use.provider_options": "provider_options",
    "_internal_use.session_options": "session_options",
}


def respelled(options: Mapping[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns a copy of the user's dict with the schema's names and sections for all keys.

    Returns:
        The copy, and errors: options given under both of their names, and keys that are not str.
    """
    result: dict[str, Any] = _copied(options)
    wrong = [f"{path}: keys must be str, but {key!r} was given" for path, key in _strange_keys(options)]
    for spelling, schema_path in SPELLINGS.items():
        source, key = _section(result, spelling, make=False)
        if source is None or key not in source:
            continue
        target, name = _section(result, schema_path, make=True)
        if target is None:
            continue  # the section is not a dict, which the schema will report
        if name in target:
            wrong.append(f"{spelling}: is another name of {schema_path}, which is given too: leave one of them out")
        target[name] = source.pop(key)
    return result, wrong


def _copied(value: Any) -> Any:
    """Returns nested dicts as new ones, without keys that are not str, and NumPy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, Mapping):
        return value
    return {key: _copied(entry) for key, entry in value.items() if isinstance(key, str)}


def _strange_keys(options: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if not isinstance(key, str):
            yield f"{path}{key!r}", key
        elif isinstance(value, Mapping):
            yield from _strange_keys(value, f"{path}{key}.")


def _section(options: dict[Any, Any], path: str, make: bool) -> tuple[dict[Any, Any] | None, str]:
    """Returns the dict with the last key of a path, and that key; None if there is no such dict.

    Args:
        options: The options.
        path: The dotted path.
        make: Whether to add missing sections.
    """
    *sections, key = path.split(".")
    here: Any = options
    for name in sections:
        here = here.setdefault(name, {}) if make else here.get(name)
        if not isinstance(here, dict):
            return None, key
    return here, key


def conflicts(document: Mapping[str, Any], user_paths: Collection[str]) -> Iterator[str]:
    """Yields messages about conflicts between values that are valid by themselves; each starts with a dotted path.

    Args:
        document: The complete options.
        given: Dotted paths of the options that the user gave.
    """
    yield from _clipping(document["utils"])
    yield from _paths(document["debug"]["graph_save_paths"])
    yield from _precision(document["mixed_precision"])
    yield from _processes(document["distributed"], user_paths)
    yield from _reduction(document, user_paths)


def idle(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields messages about options that the others make ineffective; each starts with a dotted path."""
    chosen, distributed = document["graph_transformer"], document["distributed"]
    if chosen["number_recompute_layers"] and not chosen["transformer_layer_recompute"]:
        yield (
            "graph_transformer.number_recompute_layers: has no effect without transformer_layer_recompute; set "
            "graph_transformer.transformer_layer_recompute to True, or leave the number out"
        )
    if distributed["enable_adasum"] and distributed["reduce_dtype"] is not None:
        yield (
            f"distributed.reduce_dtype: {distributed['reduce_dtype']!r} has no effect with distributed.enable_adasum, "
            "which uses gradients in their own dtype: leave one of them out"
        )
    if document["provider_options"].get(_CPU):
        yield (
            f"provider_options.{_CPU}: has no effect, because ONNX Runtime ignores the options of the CPU provider; "
            "leave it out, or set threads and the memory arena in session_options"
        )


def _clipping(utils: Mapping[str, Any]) -> Iterator[str]:
    if utils["max_grad_norm"] is not None and not utils["grad_norm_clip"]:
        yield (
            f"utils.max_grad_norm: {utils['max_grad_norm']} has no effect with utils.grad_norm_clip False; leave one "
            "of them out"
        )


def _paths(paths: Mapping[str, str]) -> Iterator[str]:
    first: dict[Path, str] = {}
    for key, path in paths.items():
        other = first.setdefault(Path(path).absolute(), key) if path else key
        if other != key:
            yield f"debug.graph_save_paths.{key}: {path!r} is also the path of {other}: give each its own"


def _precision(precision: Mapping[str, Any]) -> Iterator[str]:
    if precision["enabled"]:
        return
    if precision["loss_scaler"] is not None:
        yield (
            "mixed_precision.loss_scaler: has no effect without mixed precision; set mixed_precision.enabled to True, "
            "or leave the loss scaler out"
        )
    if precision["dtype"] != "auto":
        yield (
            f"mixed_precision.dtype: {precision['dtype']!r} has no effect without mixed precision; set "
            "mixed_precision.enabled to True, or leave the dtype out"
        )


def _processes(distributed: Mapping[str, Any], user_paths: Collection[str]) -> Iterator[str]:
    world = distributed["world_size"]
    if "distributed.world_size" in user_paths:  # otherwise it is known only when a trainer is created
        for key in ("world_rank", "local_rank"):
            if distributed[key] >= world:
                yield f"distributed.{key}: {distributed[key]} must be below distributed.world_size, {world}"
        data = distributed["data_parallel_size"]
        if "distributed.data_parallel_size" in user_paths and data != world:
            yield (
                f"distributed.data_parallel_size: {data} must equal distributed.world_size, {world}, because all "
                "processes share the data; leave it out"
            )


def _reduction(document: Mapping[str, Any], user_paths: Collection[str]) -> Iterator[str]:
    distributed = document["distributed"]
    if not distributed["enable_adasum"]:
        return
    world = distributed["world_size"]
    if "distributed.world_size" in user_paths and world & (world - 1):
        yield (
            f"distributed.enable_adasum: Adasum combines processes in pairs, so their number must be a power of two, "
            f"but distributed.world_size is {world}"
        )
    if document["batch"]["gradient_reduction"] == "sum":
        yield (
            "distributed.enable_adasum: Adasum combines means of gradients, but batch.gradient_reduction is 'sum': "
            "leave one of them out"
        )
