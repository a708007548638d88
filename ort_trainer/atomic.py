"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .interrupts import uninterrupted

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["atomic_path", "check_target"]


def check_target(target: Path) -> None:
    """Checks that a file can be put at a path.

    Raises:
        FileNotFoundError: If the folder does not exist.
        IsADirectoryError: If the target is a folder.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(f"can't write {str(target)!r}: the folder {str(target.parent)!r} does not exist")
    if target.is_dir():
        raise IsADirectoryError(f"can't write {str(target)!r}: it is a folder")


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Gives a temporary path beside ``target``; when the block ends well, the file there is synced and takes its place.

    Raises:
        FileNotFoundError: If the folder does not exist.
        IsADirectoryError: If the target is a folder.
    """
    import tempfile  # takes as long as a fiftieth of ONNX Runtime, which a mere reader need not wait for

    check_target(target)
    temporary = None
    try:
        with uninterrupted():  # or nobody would know the name of the file
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
            temporary = type(target)(name)
        os.close(handle)
        # mkstemp makes files that only their owner may read; a checkpoint gets the permissions of any new file.
        mask = os.umask(0)
        os.umask(mask)
        yield temporary
        temporary.chmod(0o666 & ~mask)
        _sync(temporary)
        temporary.replace(target)
        _sync(target.parent)
    finally:
        with uninterrupted():
            if temporary is not None:
                temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows can't open a folder to sync it
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
