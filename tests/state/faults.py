"""Real disk faults as contexts, for use in a separate process (``fault_cases.py``)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _RECURSIVE, _PRIVATE = 1, 32, 1 << 14, 1 << 18
_NOBODY = 65534


@dataclass(frozen=True)
class Fault:
    """A disk fault.

    Attributes:
        prepare: Prepares an empty folder for the fault.
        happens: A context in which the fault occurs.
        number: The error's ``errno``.
        way_out: The way out in the error message.
    """

    prepare: Callable[[Path], None]
    happens: Callable[[Path], contextlib.AbstractContextManager[None]]
    number: int | None
    way_out: str


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def own_mounts() -> str:
    """Gives this process its own mounts, which vanish with it; returns the reason if that fails, or nothing."""
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _NEW_MOUNTS | (_NEW_USER if user else 0))
        if user:  # root in its own user namespace
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    except OSError as error:
        return str(error)
    return ""


def _nothing(folder: Path) -> None:
    pass


def _small_disk(folder: Path) -> None:
    _call("mount", b"none", os.fsencode(folder), b"tmpfs", 0, b"size=2m")


@contextlib.contextmanager
def _disk_full(folder: Path) -> Iterator[None]:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    ballast.open("r+b").truncate(ballast.stat().st_size - 4096)  # so that the first writes succeed
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def _files_limited(folder: Path) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def _vanished(folder: Path) -> Iterator[None]:
    away = folder.with_name(f"{folder.name}-away")
    folder.rename(away)
    try:
        yield
    finally:
        away.rename(folder)


@contextlib.contextmanager
def _vanishes(folder: Path) -> Iterator[None]:
    """Removes the folder when a file in it has been written and is about to be renamed."""
    away = folder.with_name(f"{folder.name}-away")
    original = os.fsync

    def sync(handle: int) -> None:
        original(handle)
        if folder.exists():
            folder.rename(away)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        try:
            yield
        finally:
            for left in away.glob(".*.tmp"):  # the writer could not remove it, because its path has changed
                left.unlink()
            away.rename(folder)


@contextlib.contextmanager
def _denied(folder: Path) -> Iterator[None]:
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:  # root may write anywhere
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@contextlib.contextmanager
def _read_only(folder: Path) -> Iterator[None]:
    _call("mount", b"none", os.fsencode(folder), None, _REMOUNT | _READ_ONLY, b"size=2m")
    try:
        yield
    finally:
        _call("mount", b"none", os.fsencode(folder), None, _REMOUNT, b"size=2m")


FAULTS = {
    "full disk": Fault(_small_disk, _disk_full, errno.ENOSPC, "make room there, or write to another disk"),
    "limited files": Fault(_nothing, _files_limited, errno.EFBIG, "allow larger files"),
    "vanished folder": Fault(_nothing, _vanished, None, "does not exist: create it first"),
    "vanishing folder": Fault(_nothing, _vanishes, errno.ENOENT, "the folder has vanished: create it again"),
    "no permission": Fault(_nothing, _denied, errno.EACCES, "let this user write there, or choose another folder"),
    "read-only disk": Fault(_small_disk, _read_only, errno.EROFS, "choose a folder on a file system that is not"),
}
MOUNTED = ("full disk", "read-only disk")


def free(folder: Path) -> None:
    """Removes a folder and its mounts."""
    with contextlib.suppress(OSError):
        _call("umount", os.fsencode(folder))
    shutil.rmtree(folder)
