"""Writes what a training loop has learnt as an ONNX model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..options import ModelDescription
from .loop import TrainingLoop

__all__ = ["names_without_loss", "save_onnx"]


def save_onnx(loop: TrainingLoop, path: str | os.PathLike[str], names: Sequence[str]) -> None:
    """Writes the evaluation graph with the current weights; see ``ORTTrainer.save_as_onnx``.

    Args:
        loop: Has begun.
        path: Where to write.
        names: The described outputs that the file has.

    Raises:
        TypeError, ValueError: If the path is none.
        FileNotFoundError: If the folder does not exist.
    """
    from ..graph.onnx_file import save_model  # with all that writes ONNX, which training does not need

    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a path, but a {type(path).__name__} was given")
    if not os.fspath(path):
        raise ValueError("path must not be empty")
    session = loop.session
    assert session is not None
    graph = loop.prepare(loop.graphs.blank_batch(), False, loop.graphs.fetches(())).runner.graph
    if list(names) != [spec.name for spec in graph.outputs]:
        graph = graph.pruned(names)
    save_model(graph, session.parameters, session.buffers, loop.source.trainable, Path(path))


def names_without_loss(description: ModelDescription) -> list[str]:
    """Returns the described outputs that inference is for.

    Raises:
        ValueError: If there are none.
    """
    names = [output.name for output in description.outputs if not output.is_loss]
    if not names:
        raise ValueError(
            "model_desc describes no output but the loss, so nothing is left to infer: describe the prediction too"
        )
    return names
