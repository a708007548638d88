"""Tells users where in their code an operator or an error comes from, and what to do about it."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import PACKAGE, ExportError
from ..core.pages import page

# Not the user's code: PyTorch and the rooms that turn a model into a graph. What computes in the others, such as an
# operator of ONNX, is a part of the model.
_TORCH = Path(torch.__file__).parent
_ROOMS = ("capture", "export", "fx", "graph", "guard", "kernels", "operators", "outside")
EXPORTER = tuple(f"{PACKAGE}{room}{os.sep}" for room in _ROOMS)
LIBRARIES = (f"{_TORCH}{os.sep}", *EXPORTER)
TORCH_MODELS = f"{_TORCH / 'nn'}{os.sep}"
"""PyTorch's own modules, which are parts of a model: batch norm, for example, refuses a single value per channel."""
COMPUTES = tuple(str(_TORCH / part) for part in ("nn", "distributions", "functional.py", "_decomp", "_refs"))
"""The parts of PyTorch that compute in Python; the other parts only capture the model."""
_GRADIENTS = tuple(
    str(_TORCH / part) for part in ("autograd/__init__.py", "autograd/functional.py", "_functorch/eager_transforms.py")
)
_CALLS_FORWARD = str(_TORCH / "nn" / "modules" / "module.py")
_BY_VALUES = "depends on the values of tensors, which a graph does not know"


def with_history(name: str) -> str:
    """Returns what is wrong with a change in place of a buffer or an argument that gives it a history."""
    return (
        f"forward() changes {name!r} in place to a value that requires grad, and a graph does not keep its history: "
        "detach() what you put into it, or change it under torch.no_grad()"
    )


def explain(error: Exception, exporter: str, model: str) -> str:
    """Returns what the exporter could not do, where, and what to do instead."""
    gradients = gradients_within(error, model)
    if gradients:
        return gradients
    what, inner = None, _library_line_of_error(error)
    next_step, result = _errors_of_values()
    if isinstance(error, next_step):
        what = f"what it does next {_BY_VALUES}"
    elif isinstance(error, result):
        what = f"the result of {error.func} {_BY_VALUES}"
    if what is not None and inner:
        hint = (
            "This function of PyTorch reads values: pass it what it would compute from them (such as num_classes of "
            "one_hot), or compute the same without it"
        )
    elif what is not None:
        hint = (
            "For an 'if', compare the tensor or x.item(), not float(x), int(x) or x.tolist(), or compute both branches "
            "and choose with torch.where; for a number taken from a tensor (float(x), x.item()), keep the tensor; or "
            f"compute it {_before_the_step()}"
        )
    elif ".numpy()" in str(error):
        what = "it reads the values of a tensor with .numpy(), which a graph does not know"
        hint = f"Compute what depends on them with tensors, or {_before_the_step()}"
    elif "We found a fake tensor in the exported program constant's list" in str(error):
        what = "it keeps a tensor of the capture, or uses one of another computation, where torch.export can't follow"
        hint = (
            "Change weights in place in a callback or in the loop, between two steps; make what forward() updates a "
            "buffer; and compute gradients (torch.autograd.grad) outside forward()"
        )
    else:
        what = f"{type(error).__name__}: {error}".partition("\n\n")[0]
        hint = (
            "The model must be exportable with torch.export. The usual causes of this error are control flow that "
            "depends on the values of tensors, and calls into other libraries, such as numpy. An ORTModule trains it "
            "all the same: PyTorch runs what no graph can"
        )
    where = place_of_error(error) + (f"\n  which calls {inner}" if inner else "")
    return f"{exporter} could not capture {model}: {what}{where}\n{hint}"


def is_meant(error: Exception) -> bool:
    """Returns whether an error is for the user as it is: this package says it, or the user's code raises it."""
    file, _, _, text = _frames_of_error(error)[-1]
    if file.startswith(PACKAGE):
        return text.startswith("raise ")
    return isinstance(error, (TypeError, ValueError)) and not file.startswith(LIBRARIES)


def unforeseen(error: Exception, model: str) -> str:
    """Returns the message for an error that no station of an export explains, in one line."""
    met = [value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values()]
    nodes = [value for value in met if isinstance(value, torch.fx.Node) and value.op == "call_function"]
    where = f" at {nodes[-1].target}, {source_line(nodes[-1]) or 'whose line is unknown'}" if nodes else ""
    file, line, function, _ = _frames_of_error(error)[-1]
    what = f"{type(error).__name__}: {error}".partition("\n")[0]
    return (
        f"the export of {model} failed{where}: {what} ({Path(file).name}:{line}, in {function}). This should be "
        "reported with the model; until then ORTModule(model) trains it, as PyTorch runs what no graph can"
    )


def may_be_sizes(error: ExportError) -> bool:
    """Returns whether an export may have failed only because sizes are symbolic."""
    cause = error.__cause__
    return cause is not None and not any(isinstance(cause, kinds) for kinds in _errors_of_values())


def _errors_of_values() -> tuple[Any, Any]:
    """Returns torch's errors for control flow that depends on values, and for a result whose size does."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException  # slow
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound

    return (
        (GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound),
        (DataDependentOutputException, DynamicOutputShapeException),
    )


def gradients_within(error: Exception, model: str) -> str:
    """Returns the message for a model or loss that computes gradients itself; "" if that did not cause the error."""
    # A formula of PyTorch's for a gradient may read a size that depends on values.
    of_values = any(isinstance(error, kinds) for kinds in _errors_of_values())
    if of_values or (not _differentiates_in(error) and "functorch tensor" not in str(error)):
        return ""
    return (
        f"{model} can't be captured: it differentiates in its own forward pass (torch.autograd.grad, backward, "
        "torch.func), but the graph of a step has only one backward pass. Compute that part of the loss in PyTorch: "
        "call trainer.forward_backward() for the rest, backward() for this part, which adds to the same p.grad, and "
        f"then trainer.optimizer_step() ({page('usage.md#a-penalty-on-gradients')}){place_of_error(error)}"
    )


def _before_the_step() -> str:
    return (
        "before the step, in PyTorch under torch.no_grad(), if it needs no gradient, and pass the result as an input "
        f"({page('models.md#branches-on-values')})"
    )


def way_out(nodes: Iterable[torch.fx.Node]) -> str:
    """Returns what a user can do about operators that can't be translated."""
    nodes = list(nodes)
    # A composite replaces an operator of the model before differentiation decomposes it.
    captured = [sources[-1].target for node in nodes if (sources := node.meta.get("from_node"))]
    names = dict.fromkeys(name for name in captured if name.count(".") == 2)
    operators = " and ".join(names or dict.fromkeys(str(node.target) for node in nodes))
    where = page("contributing.md#an-operator")
    return f"Add it with ort_trainer.register_operator, for example a composite of {operators} ({where})"


def source_line(node: torch.fx.Node) -> str:
    """Returns file, line and text of the user's code that an operator comes from, or its module if no line is known."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = modules[-1] if modules else ("", "")
    name = path.removeprefix("model").removeprefix(".")
    where = f"module {name!r}, a {str(kind).rpartition('.')[2]}" if name else ""
    return line_of_trace(node.meta.get("stack_trace"), where)


def line_of_trace(trace: str | None, otherwise: str = "") -> str:
    """Returns file, line and text of the user's code in a stack trace, or else another description."""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)\n\s*(.*)', trace or "")
    return _last_of_the_user(frames, otherwise or "its line in the model's source is unknown")


def forward_line(model: nn.Module) -> str:
    """Returns the file and line where the forward pass of a model begins."""
    forward = inspect.unwrap(model.forward)
    try:
        return (
            f'File "{inspect.getsourcefile(forward)}", line {inspect.getsourcelines(forward)[1]}, in {forward.__name__}'
        )
    except (OSError, TypeError):  # typed into an interpreter, or not a Python function
        return f"forward() of {model._get_name()}, whose source is unknown"


def place_of_error(error: BaseException) -> str:
    """Returns a line of a message, with file, line and text of the user's code that raised an error, if it did."""
    line = _last_of_the_user(_frames_of_error(error), "")
    return line and f"\n  {line}"


def _library_line_of_error(error: BaseException) -> str:
    """Returns the line in PyTorch that raised when the user's code called it; "" if the user's own line raised."""
    frames = _frames_of_error(error)
    user_frames = [number for number, frame in enumerate(frames) if not frame[0].startswith(LIBRARIES)]
    inner = [frame for frame in frames[user_frames[-1] + 1 :] if frame[0].startswith(COMPUTES)] if user_frames else []
    inner = [frame for frame in inner if frame[0] != _CALLS_FORWARD]
    return shown_place(inner[-1]) if inner else ""


def _differentiates_in(error: BaseException) -> bool:
    """Returns whether an error comes from a gradient that model or loss compute themselves."""
    # torch.export wraps errors of a function transform in its own error.
    causes = [error, *filter(None, (error.__cause__, error.__context__))]
    frames = [frame for cause in causes for frame in _frames_of_error(cause)]
    return any(frame[0] in _GRADIENTS for frame in frames)


def _frames_of_error(error: BaseException) -> list[tuple[str, str, str, str]]:
    frames = traceback.extract_tb(error.__traceback__)
    return [(f.filename, str(f.lineno), f.name, f.line or "") for f in frames]


def _last_of_the_user(frames: list[tuple[str, str, str, str]], otherwise: str) -> str:
    """Returns the innermost frame that is not in PyTorch or this package, as text."""
    user_frames = [frame for frame in frames if not frame[0].startswith(LIBRARIES)]
    if not user_frames:
        return otherwise
    return shown_place(user_frames[-1])


def shown_place(frame: tuple[str, str, str, str]) -> str:
    """Returns file, line, function and text of a frame as a traceback shows them, in one line."""
    file, line, function, text = frame
    return f'File "{file}", line {line}, in {function}: {text.strip()}'
