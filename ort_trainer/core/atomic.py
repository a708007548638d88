"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .errors import warn
from .interrupts import uninterrupted

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from pathlib import Path

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
    errno.ELOOP: "it is a symbolic link that leads back to itself: remove it",
}
# What systems answer that can't sync a folder.
_NO_SYNC = frozenset({errno.EINVAL, errno.EACCES, errno.EPERM, errno.EBADF, errno.EISDIR, errno.ENOSYS, errno.ENOTSUP})
# A file is created and locked within microseconds; an older empty file was left by a killed process.
_EMPTY_SECONDS = 60
# Suffix of temporary folders, which tells them from the user's own folders.
_FOLDER = ".ort_trainer"
# The attribute with the access control list of a file on Linux.
_ACL = "system.posix_acl_access"


def real_path(path: Path) -> Path:
    """Returns the path that a symbolic link leads to, which need not exist; any other path is returned unchanged.

    Raises:
        OSError: If links lead back to themselves, or the system forbids following the link.
    """
    if not path.is_symlink():
        return path
    with contextlib.suppress(FileNotFoundError):
        path.stat()  # raises for loops, and for links of other users in a shared folder; os.path.realpath does not
    return path.parent.joinpath(os.path.realpath(path))


def check_target(target: Path) -> None:
    """Checks that a file can be written to a path.

    Raises:
        FileNotFoundError: If the folder does not exist.
        IsADirectoryError: If the target is a folder.
        FileExistsError: If the target is a device, a pipe or a socket, which a file would replace.
        OSError: If it is a symbolic link that can't be followed.
    """
    with explained(target):
        real = real_path(target)
    link = "" if real == target else f"it is a symbolic link to {str(real)!r}, and "
    if not real.parent.is_dir():
        raise FileNotFoundError(
            f"can't write {str(target)!r}: {link}the folder {str(real.parent)!r} does not exist: create it first"
        )
    if real.is_dir():
        raise IsADirectoryError(f"can't write {str(target)!r}: it is a folder: choose another path, or remove it")
    if real.exists() and not real.is_file():
        raise FileExistsError(f"can't write {str(target)!r}: it is a device, a pipe or a socket: choose another path")


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
        if isinstance(error, io.UnsupportedOperation):  # it has no errno
            error.errno = errno.ESPIPE
        if error.errno is None or str(error.strerror).startswith("can't write"):  # it has its own message
            raise
        way_out = _WAYS_OUT.get(error.errno, "try again, or write to another place")
        cause = error.strerror or str(error)
        message = f"can't write {str(target)!r}: {cause}; {way_out}. An existing file there is unchanged"
        raise OSError(error.errno, message) from error


@contextlib.contextmanager
def atomic_path(target: Path, like: Path | None = None) -> Iterator[Path]:
    """Yields a temporary path beside ``target``; if the block succeeds, syncs the file and moves it to ``target``.

    The new file has the mode, the access control list, the owner and the group of the one that it replaces, and until
    then only its owner can read it. A symbolic link stays: the file that it leads to is replaced.

    A killed process leaves its temporary file; the next write to the same path removes it, except on Windows.

    Args:
        target: The file.
        like: A file whose mode and owner a new file gets, if it exists.

    Raises:
        FileNotFoundError: If the folder does not exist.
        IsADirectoryError, FileExistsError: If the target is not a file.
        OSError: If writing fails, as :func:`explained` says; an existing file is unchanged.
    """
    import glob  # here, so that readers don't import it

    temporary = handle = None
    try:
        with explained(target):
            check_target(target)
            real = real_path(target)
            with uninterrupted():  # otherwise an interrupt could lose the name of the file
                name = real.with_name(_temporary_name(real.name))
                private = _replaced(real, like) is not None
                handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
                temporary = name
            mode = os.fstat(handle).st_mode
            handle = _locked(handle)
            remove_abandoned(real.parent, glob.escape(real.name))
            yield temporary
            temporary.chmod(mode)  # the writing library may have replaced the file
            _keep_access(temporary, _replaced(real, like))
            sync(temporary)
            temporary.replace(real)
        sync_folder(real.parent)
    finally:
        with uninterrupted():
            with contextlib.suppress(OSError):  # it is a lock: what was written through others is synced by now
                if handle is not None:
                    os.close(handle)
            if temporary is not None:
                with contextlib.suppress(OSError):  # the original error says more; another save removes the file
                    temporary.unlink(missing_ok=True)


def replace_all(files: Iterable[tuple[Path, Path]], like: Path | None = None, removed: Sequence[Path] = ()) -> None:
    """Moves files to their targets and removes others; links, modes and owners stay as in :func:`atomic_path`.

    Args:
        files: Each file, in a :func:`temporary_folder`, with its target on the same file system; moved in this order.
        like: A file whose mode and owner new files get, if it exists.
        removed: Files that are removed afterwards, if they exist.

    Raises:
        FileNotFoundError, IsADirectoryError, FileExistsError, OSError: As from :func:`atomic_path`. Nothing is moved,
            unless the system fails between two moves.
    """
    import shutil

    with contextlib.ExitStack() as stack:
        moves = []
        for file, target in files:
            check_target(target)
            real = real_path(target)
            with explained(target):
                if real != target:  # perhaps on another file system
                    folder = stack.enter_context(temporary_folder(real.parent, real.name))
                    file = shutil.copyfile(file, folder / real.name)
                _keep_access(file, _replaced(real, like))
                sync(file)
            moves.append((file, real))
        for path in removed:
            if path.is_dir():
                raise IsADirectoryError(f"can't write {str(path)!r}: it is a folder: remove it, or choose another path")
        with uninterrupted():
            for file, real in moves:
                with explained(real):
                    file.replace(real)
            for path in removed:
                with explained(path):
                    path.unlink(missing_ok=True)
        for parent in {real.parent for _, real in moves}:
            sync_folder(parent)


def _replaced(real: Path, like: Path | None) -> Path | None:
    """Returns the file whose mode and owner a file at a path gets; None for those of a new file."""
    return next((path for path in (real, like) if path is not None and path.exists()), None)


def _keep_access(new: Path, old: Path | None) -> None:
    """Gives a file the owner, the group, the access control list and the mode of another one.

    If the system does not let this user do so, the new file gets a stricter mode: some who can read the old file may
    not be able to read the new one, but never the other way round.
    """
    if old is None:
        return
    status, new_status = old.stat(), new.stat()
    mode, acl, same_group = stat.S_IMODE(status.st_mode) & 0o777, _acl(old), True
    if (status.st_uid, status.st_gid) != (new_status.st_uid, new_status.st_gid):
        same_group = _give(new, status.st_uid, status.st_gid) or _give(new, -1, status.st_gid)
    if acl is None and _acl(new) is not None:
        os.removexattr(new, _ACL)  # it came from the folder's default
    elif acl is not None:
        try:
            os.setxattr(new, _ACL, acl)
        except OSError:
            mode &= 0o700  # without the list, the bits of the group would mean something else
    if not same_group:
        shared = mode & mode >> 3 & 0o7  # what both the old group and all others may do
        mode = mode & 0o700 | shared << 3 | shared
    new.chmod(mode)


def _acl(path: Path) -> bytes | None:
    """Returns the access control list of a file, or None if it has none, or the system has no such lists."""
    try:
        return os.getxattr(path, _ACL)
    except (AttributeError, OSError):  # other systems, other file systems
        return None


def _give(path: Path, owner: int, group: int) -> bool:
    """Returns whether this user may give a file to an owner (-1: the present one) and a group."""
    try:
        os.chown(path, owner, group)
    except PermissionError:
        return False
    return True


@contextlib.contextmanager
def temporary_folder(folder: Path | None = None, name: str = "ort_trainer") -> Iterator[Path]:
    """Yields a new folder that only this user can read, and removes it when the block ends.

    A killed process leaves its folder; the next one of the same name removes it, except on Windows.

    Args:
        folder: The parent folder, if files are to be moved out of it; None for the system's temporary folder.
        name: Name of what is written.
    """
    import glob  # here, so that readers import none of these
    import shutil

    if folder is None:
        import tempfile
        from pathlib import Path

        folder = Path(tempfile.gettempdir())
    handle = None
    with uninterrupted():
        path = folder / f"{_temporary_name(name)}{_FOLDER}"
        path.mkdir(0o700)
    try:
        handle = None if fcntl is None else _locked(os.open(path, os.O_RDONLY))
        remove_abandoned(folder, glob.escape(name))
        yield path
    finally:
        with uninterrupted():
            for _ in range(2):  # the first stops at a handle that can't be closed
                with contextlib.suppress(OSError):
                    shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):  # it is a lock
                if handle is not None:
                    os.close(handle)


def _temporary_name(name: str) -> str:
    """Returns a new name that :func:`remove_abandoned` recognizes."""
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
    """Waits until a file is on the disk; on macOS, until the disk has received it."""
    _sync(path, os.O_RDWR)


def sync_folder(folder: Path) -> None:
    """Waits until the entries of a folder are on the disk, as far as the system can: the files are there anyway.

    Windows, and file systems such as CIFS, VirtualBox's and some of FUSE, can't sync a folder; a folder that this user
    may write but not read can't be opened for it.
    """
    if os.name == "nt":
        return
    try:
        _sync(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            warn(
                f"the files in {str(folder)!r} were written, but the system can't say that they are on the disk "
                f"({error.strerror}): check the disk before the machine is turned off"
            )


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
