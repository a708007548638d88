"""Watches what a run writes for people: printed lines, records of loggers, files, events of TensorBoard.

A graph repeats none of it. Of loggers and files, only what code outside installed libraries writes counts: libraries
such as transformers log once what they have to say.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import linecache
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from ..core.errors import PACKAGE, shown
from ..fx.explain import LIBRARIES, shown_place
from .numbers import Number

_STANDARD = (str(Path(os.__file__).parent) + os.sep, "<frozen")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TENSORBOARD = "torch.utils.tensorboard.writer"


@contextlib.contextmanager
def output_watched(note: Callable[[str, str], object]) -> Iterator[None]:
    """A context in which a function is called before this thread writes something for people.

    Events of TensorBoard are not written, as a capture knows no values.

    Args:
        note: Called with what happens, such as "prints 'loss'", and the line that does it.
    """
    thread = threading.get_ident()
    show, handle, opens = builtins.print, logging.Handler.handle, builtins.open

    def noted(what: str, file: str, line: int, function: str) -> None:
        if threading.get_ident() == thread:
            note(what, shown_place((file, str(line), function, linecache.getline(file, line))))

    def noted_at(what: str, frame: FrameType) -> None:
        noted(what, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def printing(*args: Any, **kwargs: Any) -> None:
        args, frame = tuple(map(_plain, args)), sys._getframe(1)
        if not frame.f_code.co_filename.startswith(LIBRARIES) and not isinstance(kwargs.get("file"), io.StringIO):
            noted_at(f"prints {shown(args[0]) if args else 'a line'}", frame)
        show(*args, **kwargs)

    def handling(handler: logging.Handler, record: logging.LogRecord) -> Any:
        record.msg = _plain(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(map(_plain, record.args))
        if _is_users(record.pathname):
            noted(f"logs {shown(record.msg)}", record.pathname, record.lineno, record.funcName or "")
        return handle(handler, record)

    def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_standard(frame.f_code.co_filename):
            frame = frame.f_back
        if not {*mode}.isdisjoint("wax+") and file != os.devnull and _is_users(frame.f_code.co_filename):
            noted_at(f"writes the file {shown(file)}", frame)
        return opens(file, mode, *args, **kwargs)

    def writing(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: noted_at(f"calls SummaryWriter.{name}()", sys._getframe(1))

    writer = getattr(sys.modules.get(_TENSORBOARD), "SummaryWriter", None)
    with contextlib.ExitStack() as stack:
        for owner, name, function in (
            (builtins, "print", printing),
            (builtins, "open", opening),
            (io, "open", opening),
            (logging.Handler, "handle", handling),
            *((writer, name, writing(name)) for name in vars(writer or object) if name.startswith("add_")),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def position_of(file: io.IOBase) -> int | None:
    """Returns where a file is written next; None for one in memory, without a position, or of the whole process."""
    if isinstance(file, (io.StringIO, io.BytesIO)) or file in (sys.stdin, sys.stdout, sys.stderr):
        return None
    try:
        return file.tell() if file.writable() else None
    except (OSError, ValueError):  # a pipe, or a closed file
        return None


def _plain(value: Any) -> Any:
    """Returns a number that may change as it is: a graph does not depend on what is shown."""
    return value.value if type(value) is Number else value


def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)


def _is_users(file: str) -> bool:
    """Returns whether a file is neither of Python, nor of an installed library, nor of this package."""
    return not (_is_standard(file) or file.startswith(PACKAGE) or any(part in file for part in _INSTALLED))
