"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .interrupts import uninterrupted

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["atomic_path", "check_target", "explained", "remove_abandoned", "sync", "temporary_folder"]

_FULL = "make room there, or write to another disk"
_DENIED = "let this user write there, or choose another folder"
if os.name == "nt":  # which does not replace an open file
    _DENIED += "; if a program has the file open, close it there"
_WAYS_OUT = {
    errno.ENOSPC: _FULL,
    getattr(errno, "EDQUOT", errno.ENOSPC): _FULL,
    errno.EFBIG: "allow larger files (ulimit -f), or write to another disk",
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: "choose a folder on a file system that is not mounted read-only",
    errno.ENOENT: "the folder has vanished: create it again, or choose another one",
}
# A file is created and locked within microseconds; an older empty file was left by a killed process.
_EMPTY_SECONDS = 60
# Suffix of temporary folders, which tells them from the user's own folders.
_FOLDER = ".ort_trainer"


def check_target(target: Path) -> None:
    """Checks that a file can be written to a path.

    Raises:
        FileNotFoundError: If the folder does not exist.
        IsADirectoryError: If the target is a folder.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"can't write {str(target)!r}: the folder {str(target.parent)!r} does not exist: create it first"
        )
    if target.is_dir():
        raise IsADirectoryError(f"can't write {str(target)!r}: it is a folder")


@contextlib.contextmanager
def explained(target: Path) -> Iterator[None]:
    """A context for writing that turns a system error into one that says what to do.

    Raises:
        OSError: The same subclass with the same ``errno``, and a message that names the target (instead of the
            temporary file), the cause and the way out.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or str(error.strerror).startswith("can't write"):  # it has its own message
            raise
        way_out = _WAYS_OUT.get(error.errno, "try again, or write to another place")
        cause = error.strerror or str(error)
        message = f"can't write {str(target)!r}: {cause}; {way_out}. An existing file there is unchanged"
        raise OSError(error.errno, message) from error


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``target``; if the block succeeds, syncs the file and moves it to ``target``.

    A killed process leaves its temporary file; the next write to the same path removes it, except on Windows.

    Raises:
        FileNotFoundError: If the folder does not exist.
        IsADirectoryError: If the target is a folder.
        OSError: If writing fails, as :func:`explained` says; an existing file is unchanged.
    """
    import glob  # here, so that readers don't import it

    temporary = handle = None
    try:
        with explained(target):
            check_target(target)
            with uninterrupted():  # otherwise an interrupt could lose the name of the file
                name = target.with_name(_temporary_name(target.name))
                handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                temporary = name
            mode = os.fstat(handle).st_mode
            handle = _locked(handle)
            remove_abandoned(target.parent, glob.escape(target.name))
            yield temporary
            temporary.chmod(mode)  # the writing library may have replaced the file
            sync(temporary)
            temporary.replace(target)
        sync(target.parent)
    finally:
        with uninterrupted():
            if handle is not None:
                os.close(handle)
            if temporary is not None:
                with contextlib.suppress(OSError):  # the original error says more; another save removes the file
                    temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder(folder: Path, name: str) -> Iterator[Path]:
    """Yields a new folder for files that will be moved, and removes it when the block ends.

    A killed process leaves its folder; the next write of the same name removes it, except on Windows.

    Args:
        folder: The parent folder.
        name: Name of what is written.
    """
    import glob  # here, so that readers import neither
    import shutil

    with uninterrupted():
        path = folder / f"{_temporary_name(name)}{_FOLDER}"
        path.mkdir(0o700)
        handle = None if fcntl is None else _locked(os.open(path, os.O_RDONLY))
    try:
        remove_abandoned(folder, glob.escape(name))
        yield path
    finally:
        with uninterrupted():
            shutil.rmtree(path, ignore_errors=True)
            if handle is not None:
                os.close(handle)


def _temporary_name(name: str) -> str:
    return f".{name}.{os.urandom(4).hex()}.tmp"


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Removes the temporary files and folders of processes that were killed while writing.

    A writing process holds a lock on its own, which the system releases when the process ends. Windows has no such
    locks, so nothing is removed there.

    Args:
        folder: Where to look.
        pattern: A ``glob`` pattern for the names of the targets.
    """
    names = (f".{pattern}.????????.tmp", f".{pattern}.????????.tmp{_FOLDER}")
    for path in (path for name in names for path in folder.glob(name)) if fcntl else ():
        is_folder = path.name.endswith(_FOLDER)
        if path.is_symlink() or path.is_dir() != is_folder:
            continue  # not made by this module
        with contextlib.suppress(OSError):  # locked, gone, not permitted, or a file system without locks
            handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
            try:
                status = os.fstat(handle)
                is_empty = not any(path.iterdir()) if is_folder else not status.st_size
                if not is_empty or time.time() - status.st_mtime > _EMPTY_SECONDS:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path, is_folder)
            finally:
                os.close(handle)


def _remove(path: Path, is_folder: bool) -> None:
    if is_folder:
        import shutil

        shutil.rmtree(path)
    else:
        path.unlink()


def _locked(handle: int) -> int | None:
    """Locks a new file so that it does not look abandoned; without ``fcntl``, closes it and returns None."""
    if fcntl is None:  # Windows can't rename an open file
        os.close(handle)
        return None
    with contextlib.suppress(OSError):  # a file system without locks, where remove_abandoned removes nothing
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk; on macOS, until the disk has received them."""
    if path.is_dir() and os.name == "nt":
        return  # Windows can't open a folder to sync it
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
