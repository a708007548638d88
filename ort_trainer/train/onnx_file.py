"""Writes a training loop's model as ONNX, with the current weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import shown
from ..options import ModelDescription
from ..step import Step
from .loop import TrainingLoop

if TYPE_CHECKING:
    import onnx

__all__ = ["inference_names", "names_without_loss", "onnx_model", "save_onnx"]


def save_onnx(loop: TrainingLoop, path: str | os.PathLike[str], names: Sequence[str]) -> None:
    """Writes the evaluation graph with the current weights; see ``ORTTrainer.save_as_onnx``.

    Args:
        loop: A loop with an executor.
        path: Where to write.
        names: The described outputs to include.

    Raises:
        TypeError, ValueError: If the path is invalid.
        FileNotFoundError: If the folder does not exist.
    """
    from ..step.onnx_file import save_model  # a slow import, which training does not need

    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a path, but a {type(path).__name__} was given")
    if not os.fspath(path):
        raise ValueError("path must not be empty")
    executor = loop.executor
    assert executor is not None
    save_model(_graph(loop, names), executor.parameters, executor.buffers, loop.source.trainable, Path(path))


def onnx_model(loop: TrainingLoop, names: Sequence[str]) -> onnx.ModelProto:
    """Returns the model that :func:`save_onnx` writes.

    Args:
        loop: A loop with an executor.
        names: The described outputs to include.
    """
    import onnx_ir as ir

    from ..step.onnx_file import with_weights

    executor = loop.executor
    assert executor is not None
    return ir.to_proto(with_weights(_graph(loop, names), executor.parameters, executor.buffers, loop.source.trainable))


def _graph(loop: TrainingLoop, names: Sequence[str]) -> Step:
    """Returns the evaluation graph with these outputs only."""
    graph = loop.prepare(loop.graphs.blank_batch(), False, loop.graphs.fetches(())).runner.graph
    return graph if list(names) == [spec.name for spec in graph.outputs] else graph.pruned(names)


def names_without_loss(description: ModelDescription) -> list[str]:
    """Returns the described outputs other than the loss.

    Raises:
        ValueError: If there are none.
    """
    names = [output.name for output in description.outputs if not output.is_loss]
    if not names:
        raise ValueError(
            "model_desc describes only the loss, so there is no output for inference: describe the prediction too"
        )
    return names


def inference_names(description: ModelDescription, chosen: Sequence[str] | None) -> list[str]:
    """Returns the outputs of a file for inference.

    Args:
        description: The model description.
        chosen: The names that the user passed; None for all but the loss.

    Raises:
        TypeError: If it is not a list of names.
        ValueError: If it is empty, or has an unknown name, the loss, or a repeated name; or if the loss is the only
            described output.
    """
    known = names_without_loss(description)
    if chosen is None:
        return known
    if not isinstance(chosen, (list, tuple)) or not all(isinstance(name, str) for name in chosen):
        raise TypeError(f"output_names must be a list of names, but {shown(chosen)} was given: choose from {known}")
    if not chosen:
        raise ValueError(f"output_names is empty: name at least one of {known}, or leave it out")
    if description.loss.name in chosen:
        raise ValueError(
            f"output_names has the loss, {description.loss.name!r}, which needs the label and is not for inference: "
            f"choose from {known}, or write all outputs with save_as_onnx()"
        )
    wrong = [name for name in chosen if name not in known]
    if wrong:
        raise ValueError(f"output_names has unknown names {wrong}: choose from {known}")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"output_names has a repeated name: {list(chosen)}")
    return list(chosen)
