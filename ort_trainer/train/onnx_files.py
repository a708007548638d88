"""Writes the model of a training loop as ONNX, with the current weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.ort import require_onnx
from .opset import in_requested_opset

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from .loop import TrainingLoop


def save_onnx(
    loop: TrainingLoop, path: str | os.PathLike[str], names: Sequence[str], for_inference: bool = False
) -> None:
    """Writes the model with the current weights; see ``ORTTrainer.save_as_onnx``."""
    require_onnx()
    from ..step.onnx_file import save_model  # a slow import, which training does not need

    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a path, but a {type(path).__name__} was given")
    if not os.fspath(path):
        raise ValueError("path must not be empty")
    save_model(current_model(loop, names, for_inference), Path(path))


def onnx_model(loop: TrainingLoop, names: Sequence[str]) -> onnx.ModelProto:
    """Returns the model that :meth:`save_onnx` writes."""
    require_onnx()
    from ..step.onnx_file import to_proto

    return to_proto(current_model(loop, names))


def current_model(loop: TrainingLoop, names: Sequence[str], for_inference: bool = False) -> ir.Model:
    """Returns the user's own ONNX model, or the evaluation graph with these outputs, with the current weights."""
    from ..step.onnx_file import with_weights

    executor = loop.started()
    users_model = loop.source.own_model({**executor.parameters, **executor.buffers}, names if for_inference else None)
    if users_model is not None:
        return in_requested_opset(users_model, loop.options)
    step = loop.graphs.portable(executor, training=False)
    step = (step if list(names) == [spec.name for spec in step.outputs] else step.pruned(names)).unchecked()
    others = {**executor.buffers, **executor.outside}
    step = replace(step, stored=in_requested_opset(step.model, loop.options))
    return with_weights(step, executor.parameters, others, loop.source.trainable)
