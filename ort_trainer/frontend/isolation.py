"""Runs a function in a child process and gives its bytes back; all memory that it took is gone afterwards."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable

import torch

from ..errors import ExportError

__all__ = ["can_isolate", "run_in_child"]

_ERRORS: dict[str, type[Exception]] = {"ExportError": ExportError, "TypeError": TypeError, "ValueError": ValueError}


def can_isolate() -> bool:
    """Returns whether an export can run in a child process here.

    The child is a fork, so that it has the user's model without a copy or a serialization. CUDA does not survive a
    fork, and macOS's own libraries don't. ``ORT_TRAINER_EXPORT_IN_PROCESS=1`` in the environment keeps exports in the
    process, so that a debugger can step into the model.
    """
    in_process = os.environ.get("ORT_TRAINER_EXPORT_IN_PROCESS", "") not in ("", "0")
    return (
        sys.platform == "linux"
        and not in_process
        and threading.current_thread() is threading.main_thread()
        and not torch.cuda.is_available()
    )


def run_in_child(function: Callable[[], bytes]) -> bytes:
    """Returns what a function returns when a forked child process runs it.

    Raises:
        ExportError: If the child raised any exception, or died.
        TypeError, ValueError: If the child raised these.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns that threads of the parent are not in the child. PyTorch's data loaders fork likewise, with the
        # same precaution: the child computes on one thread, and so never waits for one that is not there.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        child = os.fork()
    if child == 0:
        os.close(reader)
        _run_and_exit(function, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(child, 0)
    if answer[:1] == b"+":
        return answer[1:]
    if answer[:1] == b"-":
        name, message = json.loads(answer[1:])
        raise _ERRORS.get(name, ExportError)(message)
    raise ExportError(
        f"the process that exported the model died (status {status}); if there was not enough memory, a smaller model may "
        "do, and with ORT_TRAINER_EXPORT_IN_PROCESS=1 in the environment the export runs in this process"
    )


def _run_and_exit(function: Callable[[], bytes], writer: int) -> None:
    """The child's whole life: it ends without running any clean-up of the parent's."""
    status = 1
    try:
        torch.set_num_threads(1)
        try:
            answer = b"+" + function()
        except Exception as error:
            known = type(error).__name__ in _ERRORS
            message = str(error) if known else "".join(traceback.format_exception(error))
            answer = b"-" + json.dumps([type(error).__name__, message]).encode()
        with os.fdopen(writer, "wb") as stream:
            stream.write(answer)
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
