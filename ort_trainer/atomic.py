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
_WAYS_OUT = {
    errno.ENOSPC: _FULL,
    getattr(errno, "EDQUOT", errno.ENOSPC): _FULL,
    errno.EFBIG: "allow larger files (ulimit -f), or write to another disk",
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: "choose a folder on a file system that is not mounted read-only",
    errno.ENOENT: "the folder has vanished: make it again, or choose another one",
}
# A file is made and locked in microseconds; one that is empty and older was left by a killed process.
_EMPTY_SECONDS = 60
# What the names of temporary folders end with, so that no folder of a user's own is taken for one.
_FOLDER = ".ort_trainer"


def check_target(target: Path) -> None:
    """Checks that a file can be put at a path.

    Raises:
        FileNotFoundError: If the folder does not exist.
        IsADirectoryError: If the target is a folder.
    """
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"can't write {str(target)!r}: the folder {str(target.parent)!r} does not exist: make it first"
        )
    if target.is_dir():
        raise IsADirectoryError(f"can't write {str(target)!r}: it is a folder")


@contextlib.contextmanager
def explained(target: Path) -> Iterator[None]:
    """A context for writing: an error of the system becomes one of its kind that says what to do.

    Raises:
        OSError: With the ``errno`` of the first one, so of its subclass, and a message that names the target, not a
            temporary file, the cause and the way out.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or str(error.strerror).startswith("can't write"):  # with a message of its own
            raise
        way_out = _WAYS_OUT.get(error.errno, "try again, or write to another place")
        cause = error.strerror or str(error)
        message = f"can't write {str(target)!r}: {cause}; {way_out}. What was there before is unchanged"
        raise OSError(error.errno, message) from error


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Gives a temporary path beside ``target``; when the block ends well, the file there is synced and takes its place.

    A process that is killed leaves its temporary file; the next one that writes to the same path removes it.

    Raises:
        FileNotFoundError: If the folder does not exist.
        IsADirectoryError: If the target is a folder.
        OSError: If writing fails, as :func:`explained` says; there is the old file then, or none, as before.
    """
    import glob  # which a mere reader need not wait for

    temporary = handle = None
    try:
        with explained(target):
            check_target(target)
            with uninterrupted():  # or nobody would know the name of the file
                name = target.with_name(_temporary_name(target.name))
                handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                temporary = name
            mode = os.fstat(handle).st_mode
            handle = _locked(handle)
            remove_abandoned(target.parent, glob.escape(target.name))
            yield temporary
            temporary.chmod(mode)  # a library that writes may have made another file of this name
            sync(temporary)
            temporary.replace(target)
        sync(target.parent)
    finally:
        with uninterrupted():
            if handle is not None:
                os.close(handle)
            if temporary is not None:
                with contextlib.suppress(OSError):  # the error that led here says more; another save removes the file
                    temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder(folder: Path, name: str) -> Iterator[Path]:
    """Gives an empty folder within another one, for files that are to be moved; it is removed when the block ends.

    A process that is killed leaves it; the next one that writes something of the same name there removes it.

    Args:
        folder: Where it is made.
        name: Of what is written.
    """
    import glob  # neither of which a mere reader need wait for
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
    """Removes the temporary files and folders of processes that were killed while they wrote.

    A process that writes has locked its own, and the system unlocks it when the process ends, however it does.

    Args:
        folder: Where to look.
        pattern: Matches the names of what was to be written, as ``glob`` does.
    """
    names = (f".{pattern}.????????.tmp", f".{pattern}.????????.tmp{_FOLDER}")
    for path in (path for name in names for path in folder.glob(name)) if fcntl else ():
        is_folder = path.name.endswith(_FOLDER)
        if path.is_symlink() or path.is_dir() != is_folder:
            continue  # somebody's own
        with contextlib.suppress(OSError):  # locked, gone, not ours to remove, or on a file system without locks
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
    """Locks a new file, so that nobody takes it for abandoned; returns None where it can't be, and closes it there."""
    if fcntl is None:  # an open file can't be renamed there
        os.close(handle)
        return None
    with contextlib.suppress(OSError):  # a file system without locks, on which nobody removes anything
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def sync(path: Path) -> None:
    """Waits until a file, or what a folder holds, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows can't open a folder to sync it
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
