"""Finds the line of the user's code that an operator of a captured graph comes from."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "differentiates_in",
    "drop_source",
    "forward_line",
    "library_line_of_error",
    "line_of_condition",
    "onnx_source_line",
    "operator_of",
    "source_line",
    "source_line_of_error",
    "users_lines_of_conditions",
]

_ONNX_TRACE = "pkg.torch.onnx.stack_trace"
_ONNX_OPERATOR = "pkg.torch.onnx.fx_node"
# Not the user's code: PyTorch and this package.
_TORCH = Path(torch.__file__).parent
_LIBRARIES = (str(_TORCH), str(Path(__file__).parent))
# The parts of PyTorch that compute in Python; the other parts only capture the model.
_COMPUTES = tuple(str(_TORCH / part) for part in ("nn", "distributions", "functional.py", "_decomp", "_refs"))
_PYTHON = str(Path(os.__file__).parent)
_CALLS_MODEL = str(Path(__file__).with_name("step_module.py"))
_GRADIENTS = tuple(
    str(_TORCH / part) for part in ("autograd/__init__.py", "autograd/functional.py", "_functorch/eager_transforms.py")
)
_CALLS_OPERATOR = str(_TORCH / "_ops.py")
_CALLS_FORWARD = str(_TORCH / "nn" / "modules" / "module.py")


def source_line(node: torch.fx.Node) -> str:
    """Returns file, line and text of the user's code that an operator comes from, or its module if no line is known."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = modules[-1] if modules else ("", "")
    name = path.removeprefix("model").removeprefix(".")
    where = f"module {name!r}, a {str(kind).rpartition('.')[2]}" if name else ""
    return _last_of_the_user(_frames(node.meta.get("stack_trace")), where)


def onnx_source_line(node: ir.Node) -> str:
    """Returns file, line and text of the user's code for a node that torch.onnx made from an operator."""
    return _last_of_the_user(_frames(node.metadata_props.get(_ONNX_TRACE)))


def operator_of(node: ir.Node) -> str | None:
    """Returns the name of the operator in the captured graph that a node was translated from; None if there is none."""
    found = re.match(r"%(\w+)", node.metadata_props.get(_ONNX_OPERATOR, ""))
    return None if found is None else found[1]


def drop_source(model: ir.Model, keep_lines: bool = False) -> None:
    """Removes torch.onnx's notes on the origin of nodes, in place.

    Args:
        model: The model.
        keep_lines: Whether to keep what :func:`onnx_source_line` and :func:`operator_of` need.
    """
    kept = (_ONNX_TRACE, _ONNX_OPERATOR) if keep_lines else ()
    for node in model.graph.all_nodes():
        known = {key: node.metadata_props[key] for key in kept if key in node.metadata_props}
        node.metadata_props.clear()
        node.meta.clear()  # torch.onnx keeps the whole captured graph alive here
        node.metadata_props.update(known)
    model.graph.metadata_props.clear()


def forward_line(model: nn.Module) -> str:
    """Returns the file and line where the forward pass of a model begins."""
    forward = inspect.unwrap(type(model).forward)
    try:
        return f'File "{inspect.getsourcefile(forward)}", line {inspect.getsourcelines(forward)[1]}, in forward'
    except (OSError, TypeError):  # typed into an interpreter, or not a Python function
        return f"forward() of {type(model).__name__}, whose source is unknown"


def source_line_of_error(error: BaseException) -> str:
    """Returns file, line and text of the user's code that raised an error."""
    return _last_of_the_user(_frames_of_error(error))


def line_of_condition(place: Any) -> str:
    """Returns the line, the user's or a library's, that caused a condition on sizes; "" if it is unknown.

    Args:
        place: The location that torch records with a condition; its own text truncates the path.
    """
    if place.maybe_user_loc is not None:
        return str(place.maybe_user_loc)
    frame = place.framework_loc
    if not isinstance(frame, traceback.FrameSummary):
        return str(place).strip("()")
    if frame.filename == _CALLS_OPERATOR:
        return ""
    return _shown((frame.filename, str(frame.lineno), frame.name, frame.line or "")).removesuffix(": ")


@contextlib.contextmanager
def users_lines_of_conditions() -> Iterator[None]:
    """Makes torch record the user's line with every condition on sizes; by default it records only its own."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, uninteresting_files  # takes long to import

    original = ShapeEnv._get_sloc
    uninteresting_files().add(__file__)

    def noted(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        place, line = original(self, *args, **kwargs), _current_line_of_the_user()
        return place if line is None else dataclasses.replace(place, maybe_user_loc=line)

    ShapeEnv._get_sloc = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShapeEnv._get_sloc = original  # type: ignore[method-assign]


def _current_line_of_the_user() -> str | None:
    """Returns the innermost running line of model and loss, ignoring PyTorch, this package and Python's library."""
    frame: FrameType | None = sys._getframe(2)
    found = None
    while frame is not None and frame.f_code.co_filename != _CALLS_MODEL:
        file = frame.f_code.co_filename
        of_python = file.startswith(_PYTHON) and "site-packages" not in file
        if found is None and not of_python and not file.startswith((*_LIBRARIES, "<")):
            found = frame
        frame = frame.f_back
    if frame is None or found is None:
        return None
    file, line = found.f_code.co_filename, found.f_lineno
    return _shown((file, str(line), found.f_code.co_name, linecache.getline(file, line)))


def library_line_of_error(error: BaseException) -> str:
    """Returns the line in PyTorch that raised when the user's code called it; "" if the user's own line raised."""
    frames = _frames_of_error(error)
    own = [number for number, frame in enumerate(frames) if not frame[0].startswith(_LIBRARIES)]
    inner = [frame for frame in frames[own[-1] + 1 :] if frame[0].startswith(_COMPUTES)] if own else []
    inner = [frame for frame in inner if frame[0] != _CALLS_FORWARD]
    return _shown(inner[-1]) if inner else ""


def differentiates_in(error: BaseException) -> bool:
    """Returns whether an error comes from a gradient that model or loss compute themselves."""
    # torch.export wraps errors of a function transform in its own error.
    causes = [error, *filter(None, (error.__cause__, error.__context__))]
    frames = [frame for cause in causes for frame in _frames_of_error(cause)]
    return any(frame[0] in _GRADIENTS for frame in frames)


def _frames_of_error(error: BaseException) -> list[tuple[str, str, str, str]]:
    frames = traceback.extract_tb(error.__traceback__)
    return [(f.filename, str(f.lineno), f.name, f.line or "") for f in frames]


def _frames(trace: str | None) -> list[tuple[str, str, str, str]]:
    return re.findall(r'File "(.+?)", line (\d+), in (\S+)\n\s*(.*)', trace or "")


def _last_of_the_user(frames: list[tuple[str, str, str, str]], otherwise: str = "") -> str:
    own = [frame for frame in frames if not frame[0].startswith(_LIBRARIES)]
    if not own:
        return otherwise or "its line in the model's source is unknown"
    return _shown(own[-1])


def _shown(frame: tuple[str, str, str, str]) -> str:
    file, line, function, text = frame
    return f'File "{file}", line {line}, in {function}: {text.strip()}'
