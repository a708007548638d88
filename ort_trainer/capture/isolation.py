"""Runs a function in a child process and returns its bytes; all memory that it used is released afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from ..core.errors import ExportError, IdleOptionError
from ..core.forked import end, forked
from ..outside.recorder import PartsExchanged
from .branches import ValuesAsked

_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ExportError, IdleOptionError, PartsExchanged, TypeError, ValueError, ValuesAsked)
}

# A child that uses no CPU time for this long is stuck.
_STANDSTILL_SECONDS = 10.0
# How often while_waiting is called.
_TICK_SECONDS = 0.1


def can_isolate() -> bool:
    """Returns whether an export can run in a child process here.

    The child is a fork, so it has the user's model without copying or serializing it. CUDA and macOS's own libraries do
    not survive a fork. The environment variable ``ORT_TRAINER_EXPORT_IN_PROCESS=1`` keeps exports in the process, so
    that a debugger can step into the model.
    """
    in_process = os.environ.get("ORT_TRAINER_EXPORT_IN_PROCESS", "") not in ("", "0")
    return (
        sys.platform == "linux"
        and not in_process
        and threading.current_thread() is threading.main_thread()
        and not torch.cuda.is_available()
    )


def run_in_child(
    function: Callable[[], bytes | None],
    while_waiting: Callable[[], None] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> bytes | None:
    """Runs a function in a forked child process and returns its result.

    Args:
        function: The function.
        while_waiting: Called repeatedly in this process while the child works.
        meanwhile: Called once in this process while the child works.

    Returns:
        The bytes; None if the function returned None, or the child died or was killed because it was stuck: the caller
        must do the work itself.

    Raises:
        IdleOptionError, PartsExchanged, TypeError, ValueError, ValuesAsked: If the function raised one of these.
        ExportError: If the function raised any other exception.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child, reader = forked(lambda writer: _answer(function, writer))
    try:
        if meanwhile is not None:
            meanwhile()
        answer = _read_all(reader, child, while_waiting)
    finally:
        os.close(reader)
        end(child)  # it has answered, died, or is stuck
    if answer[:1] == b"-":
        name, *arguments = json.loads(answer[1:])
        raise _ERRORS.get(name, ExportError)(*arguments)
    return answer[1:] if answer[:1] == b"+" else None


def _read_all(reader: int, child: int, while_waiting: Callable[[], None] | None) -> bytes:
    """Reads the child's answer; returns no bytes if the child ends without one or is stuck."""
    parts: list[bytes] = []
    used, looked = -1.0, time.perf_counter()
    tick = _STANDSTILL_SECONDS if while_waiting is None else _TICK_SECONDS
    while True:
        ready, _, _ = select.select([reader], [], [], tick)
        if ready:
            part = os.read(reader, 1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)
            continue
        if while_waiting is not None:
            while_waiting()
        if time.perf_counter() - looked < _STANDSTILL_SECONDS:
            continue
        looked = time.perf_counter()
        before, used = used, _cpu_seconds(child)
        if used == before:
            return b""


def _cpu_seconds(process: int) -> float:
    """Returns the CPU time that a process and its children, such as compilers, have used."""
    folder = Path(f"/proc/{process}")
    try:
        fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    children: list[str] = []
    with contextlib.suppress(OSError):  # not every kernel lists them
        children = (folder / "task" / str(process) / "children").read_text(encoding="utf-8").split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with that of children that have ended
    return own + sum(_cpu_seconds(int(child)) for child in children)


def can_differentiate() -> bool:
    """Returns whether autograd works in this process: not in a fork of a process in which it has begun threads.

    Builds of torch with CUDA begin them even without a GPU, if backward() follows the first use of torch.export.
    """
    value = torch.ones((), requires_grad=True)
    try:
        torch.autograd.grad(value * 1.0, value)
    except RuntimeError:
        return False
    return True


def _answer(function: Callable[[], bytes | None], writer: int) -> None:
    """Runs the function in the child. It uses one thread, because the parent's threads do not exist after a fork."""
    torch.set_num_threads(1)
    try:
        result = function()
        answer = b"" if result is None else b"+" + result
    except Exception as error:
        is_passed_on = type(error).__name__ in _ERRORS
        message = str(error) if is_passed_on else "".join(traceback.format_exception(error))
        arguments = error.args if isinstance(error, IdleOptionError) else (message,)
        answer = b"-" + json.dumps([type(error).__name__, *arguments]).encode()
    with os.fdopen(writer, "wb") as stream:
        stream.write(answer)
    sys.stdout.flush()
    sys.stderr.flush()
