"""The options ``debug.graph_save_paths``: writes a training graph at each stage of its construction."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.atomic import atomic_path, check_target
from ..engine import Executor
from ..optim import OptimizerConfig
from ..optim.update import OptimizerUpdate
from ..options import ORTTrainerOptions
from ..step import Step
from .opset import in_requested_opset

if TYPE_CHECKING:
    import onnx_ir as ir

_log = logging.getLogger(__name__)


def check_graph_paths(paths: Mapping[str, str]) -> None:
    """Checks that the files can be written, before the work to produce them starts.

    Raises:
        FileNotFoundError: If a folder does not exist.
        IsADirectoryError: If a path is a folder.
    """
    for key, path in paths.items():
        if path:
            try:
                check_target(Path(path))
            except OSError as error:
                raise type(error)(f"debug.graph_save_paths.{key}: {error}") from None


def save_graphs(
    options: ORTTrainerOptions,
    step: Step,
    executor: Executor,
    optimizer: OptimizerUpdate,
    config: OptimizerConfig,
    accumulate: bool,
    check_finite: bool,
) -> None:
    """Writes the graphs requested in the options.

    Args:
        options: All settings.
        step: The first training graph.
        executor: The executor, with ONNX Runtime's settings.
        optimizer: The optimizer, with the trained parameters.
        config: The update rule.
        accumulate: Whether an update uses the gradients of several micro-batches.
        check_finite: Whether an update is skipped when gradients are not finite.
    """
    paths = options.debug.graph_save_paths.to_dict()
    # Imported here because few users need these files, and the import takes half a second.
    from ..optim.update_writer import ParameterUpdate, with_optimizer
    from ..step.onnx_file import to_proto
    from ..step.prune import prune

    def write(model: ir.Model, path: Path) -> None:
        path.write_bytes(to_proto(in_requested_opset(model, options)).SerializeToString())

    writers: dict[str, Any] = {
        # The forward pass with the loss, after all passes over the joint graph.
        "model_after_graph_transforms_path": lambda to: write(
            prune(step.model, [spec.name for spec in step.outputs]), to
        ),
        "model_with_gradient_graph_path": lambda to: write(step.model, to),
        "model_with_training_graph_path": lambda to: write(
            with_optimizer(
                step,
                {
                    name: ParameterUpdate(config.rule, index, hyper, limit, options.utils.max_grad_value or math.inf)
                    for index, hyper, limit, names in optimizer.groups
                    for name in names
                },
                rates=len(config.learning_rates),
                accumulate=accumulate,
                check_finite=check_finite,
            ),
            to,
        ),
        "model_with_training_graph_after_optimization_path": lambda to: _write_optimized(executor, step, to),
    }
    for key, path in paths.items():
        if path:
            with atomic_path(Path(path)) as temporary:
                writers[key](temporary)
            _log.info("wrote %s: %s", key.removesuffix("_path"), path)


def _write_optimized(executor: Executor, step: Step, path: Path) -> None:
    try:
        executor.save_optimized(step, path)
    except Exception as error:  # ONNX Runtime has no exception class for a file that it can't write
        raise OSError(
            f"ONNX Runtime can't write its optimized graph to {str(path.parent)!r}: {error}; free space there, or "
            "choose another folder"
        ) from error
