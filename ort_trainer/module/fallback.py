"""What a call does if no graph can run it: PyTorch runs it, with one warning that says why, or it raises an error."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..core.errors import ExportError, IdleOptionError, ValueBranchError, shown, warn
from ..engine.torch_memory import divided, freed_storages, sparse
from ..fx.explain import forward_line
from ..outside.output import output_watched

POLICIES = ("warn", "error")
AT_RUN_TIME: tuple[type[Exception], ...] = (ValueBranchError,)
"""Errors that the forward pass raises before it has changed anything, after which PyTorch can run the call."""

_VARIABLE = "ORTMODULE_FALLBACK_POLICY"
# The legacy ORTModule's policies: each names errors after which PyTorch runs the module.
_OF_VARIABLE = {
    "FALLBACK_DISABLE": "error",
    "FALLBACK_FORCE_TORCH_FORWARD": "warn",
    "FALLBACK_FORCE_TORCH_BACKWARD": "warn",
    "FALLBACK_UNSUPPORTED_DEVICE": "warn",
    "FALLBACK_UNSUPPORTED_DATA": "warn",
    "FALLBACK_UNSUPPORTED_TORCH_MODEL": "warn",
    "FALLBACK_UNSUPPORTED_ONNX_MODEL": "warn",
    "FALLBACK_BAD_INITIALIZATION": "warn",
}
# A reason may contain values that differ from call to call.
_MAXIMUM_WARNINGS = 16
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


class NoGraphError(RuntimeError):
    """No graph could be made for a kind of call; the reason is the cause.

    Args:
        kind: What such calls have in common.
    """

    def __init__(self, kind: Any) -> None:
        super().__init__("no graph")
        self.kind = kind


class SettlingError(ExportError):
    """A call changes its module, as the first call of many modules does: PyTorch runs it, and a later one is exported.

    Args:
        what: What it changes or writes.
        line: The line that does it, if it is known.
    """

    def __init__(self, what: str, line: str = "") -> None:
        super().__init__(
            f"forward() {what}, which a graph does not do: if it is only for show, leave it out; a counter or a "
            f"statistic can be a buffer that is changed in place{line and chr(10)}  {line}".rstrip()
        )


class OptionError(ValueError):
    """Options or tensors that don't fit the module or the machine, which is an error with every policy."""


_RUNNING: set[tuple[int, int]] = set()


@contextlib.contextmanager
def running(module: nn.Module) -> Iterator[None]:
    """Marks a module as running in this thread, in PyTorch or for a capture."""
    entry = (threading.get_ident(), id(module))
    if entry in _RUNNING:
        yield
        return
    _RUNNING.add(entry)
    try:
        yield
    finally:
        _RUNNING.remove(entry)


def is_running(module: nn.Module) -> bool:
    """Returns whether a call comes from inside the module, by a function that was assigned to its ``forward``."""
    return bool(_RUNNING) and (threading.get_ident(), id(module)) in _RUNNING


def policy_of(policy: Any) -> str:
    """Returns a policy: the argument, or what the environment variable of the legacy ``ORTModule`` says, or "warn".

    Raises:
        ValueError: If either has an unknown value.
    """
    if policy is not None:
        if policy not in POLICIES:
            raise ValueError(f"fallback must be one of {list(POLICIES)}, but is {shown(policy)}")
        return str(policy)
    chosen = os.environ.get(_VARIABLE, "").replace("|", " ").split()
    unknown = [name for name in chosen if name not in _OF_VARIABLE]
    if unknown:
        raise ValueError(
            f"the environment variable {_VARIABLE} has {unknown}, but may have only {list(_OF_VARIABLE)}, or several "
            "of them with | between"
        )
    return "error" if "FALLBACK_DISABLE" in chosen else "warn"


def foreign_context() -> str:
    """Returns what else runs or records PyTorch's operators now, such as ``torch.compile``; "" if nothing does."""
    if torch.compiler.is_compiling():
        return "torch.compile or torch.export"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func, such as vmap or grad"
    if torch._C._len_torch_dispatch_stack():
        return "a mode that sees every operator, such as FakeTensorMode"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return ""


def in_backward_pass() -> bool:
    """Returns whether autograd runs a backward pass in this thread now."""
    return torch._C._current_graph_task_id() != -1


class Fallback:
    """Decides what a call does if no graph can run it.

    Args:
        module: The module.
        policy: One of :data:`POLICIES`.

    Attributes:
        policy: As given.
        called: Whether ``forward`` of the wrapper was ever called.
        entered: Whether a call from outside the module has arrived since this was last set to False.
        counts: Why PyTorch ran calls -> how many.
    """

    def __init__(self, module: nn.Module, policy: str) -> None:
        self._module, self.policy = module, policy
        self.called = self.entered = False
        self._warned: set[str] = set()
        self.counts = Counter[str]()

    def run(self, reason: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the module in PyTorch.

        Args:
            reason: Why no graph can run it.
            args: The positional arguments of the call.
            kwargs: Its keyword arguments.

        Raises:
            Exception: The reason, if the policy is ``error`` or the options are invalid; or the error of PyTorch's run.
        """
        if isinstance(reason, (IdleOptionError, OptionError)):
            raise reason
        if self.policy == "error" and not isinstance(reason, SettlingError):
            raise reason
        with running(self._module):
            result = self._module(*args, **kwargs)
        self._count(str(reason))
        # Only now: if PyTorch raises, too, the error is the user's, and a warning would distract from it.
        if not isinstance(reason, SettlingError):
            self.warn(str(reason))
        return result

    def run_inside(self, context: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the module in PyTorch inside a foreign context, which must see its operators."""
        if not torch.compiler.is_compiling():  # torch.compile would record the warning, and its user expects PyTorch
            reason = f"it is called inside {context}, which needs PyTorch's own operators"
            if self.policy == "error":
                raise RuntimeError(f"{self._module._get_name()} can't run as a graph: {reason}")
            self.warn(reason)
            self._count(reason)
        if "forward" not in vars(self._module):  # it can't call this wrapper; torch.compile can't record running()
            return self._module(*args, **kwargs)
        with running(self._module):
            return self._module(*args, **kwargs)

    def warn(self, reason: str) -> None:
        """Warns, once for each reason, that PyTorch runs a call."""
        if reason in self._warned or len(self._warned) >= _MAXIMUM_WARNINGS:
            return
        self._warned.add(reason)
        line = "" if re.search(r'File ".*", line \d', reason) else f"\n  {forward_line(self._module)}"
        warn(
            f"PyTorch runs this call of {self._module._get_name()}, and others like it, instead of a graph: "
            f"{reason}{line}",
            others=(_TORCH,),
        )

    def _count(self, reason: str) -> None:
        is_known = reason in self.counts or len(self.counts) < _MAXIMUM_WARNINGS
        self.counts[reason if is_known else "other reasons"] += 1

    def missed(self) -> None:
        """Warns that an optimizer steps, but no call has come to ``forward``.

        Raises:
            RuntimeError: Instead, if the policy is ``error``.
        """
        reason = (
            f"an optimizer updates parameters of {self._module._get_name()}, but its forward() was never called, so "
            "PyTorch runs it. Graphs are made of other methods that are named, as in "
            f"ORTModule(model, methods={own_methods(self._module)[:3]}); of submodules that the loop calls, wrap each"
        )
        if self.policy == "error":
            raise RuntimeError(reason)
        warn(reason, others=(_TORCH,))


def own_methods(module: nn.Module) -> list[str]:
    """Returns the names of public methods of a module that not all modules have."""
    kind = type(module)
    names = [name for name in dir(kind) if not name.startswith("_") and not hasattr(nn.Module, name)]
    return [name for name in names if inspect.isfunction(getattr(kind, name))]


def refuse_uninitialized(module: nn.Module) -> None:
    """Raises if a lazy module has not had its first call, which creates its parameters.

    Raises:
        SettlingError: If so.
    """
    for value in (*module.parameters(), *module.buffers()):
        if isinstance(value, (UninitializedParameter, UninitializedBuffer)):
            raise SettlingError("makes its parameters")


def refuse_sparse(module: nn.Module) -> None:
    """Raises if a parameter or buffer is sparse.

    Raises:
        ExportError: If so.
    """
    found = sparse(module._get_name(), (*module.named_parameters(), *module.named_buffers()))
    if found:
        raise ExportError(f"{found}: register them as to_dense()")


def refuse_divided(module: nn.Module) -> None:
    """Raises if each process has only a part of the parameters.

    Raises:
        TypeError: If so.
    """
    named = [*module.named_parameters()]
    parts = divided(module._get_name(), named)
    computed = [name for name, value in named if not value.is_leaf]
    if not parts and computed:
        parts = f"{computed[:3]} of {module._get_name()} are computed from other tensors, as in FSDP1"
    if parts:
        raise TypeError(
            f"{parts}: shard outside, fully_shard(ORTModule(layer)), and leave what parallelize_module divides out of "
            "an ORTModule"
        )


def refuse_freed(module: nn.Module) -> None:
    """Raises if the memory of a parameter or buffer was freed.

    Raises:
        OptionError: If so.
    """
    freed = freed_storages(module._get_name(), [*module.named_parameters(), *module.named_buffers()])
    if freed:
        raise OptionError(f"{freed}: call the module while it has all its values")


@contextlib.contextmanager
def settled(module: nn.Module) -> Iterator[None]:
    """A context of a trial run, which raises if the forward pass does what a graph would not repeat in each call.

    It must not create or replace parts of the module, as a first call may, and must not write anything for people.

    Args:
        module: The module, whose state the caller restores.

    Raises:
        SettlingError: If so.
    """
    parts = {name: (part, type(part), _parts(part)) for name, part in module.named_modules()}

    def refuse(what: str, line: str) -> None:
        raise SettlingError(what, line)  # before anything is written, because the call will run again

    with output_watched(refuse):
        yield
    changed = [
        name or "the module"
        for name, (part, kind, before) in parts.items()
        if type(part) is not kind or _parts(part) != before
    ]
    if changed:
        raise SettlingError(f"makes or replaces parts of {', '.join(map(repr, changed[:5]))}")


def _parts(part: nn.Module) -> list[Any]:
    """Returns what identifies the parts of a module. Of buffers only names count: graphs handle other tensors there."""
    return [*map(id, part._modules.values()), *map(id, part._parameters.values()), *part._buffers]
