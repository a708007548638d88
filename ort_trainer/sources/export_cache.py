"""Exports kept on disk: a folder of the user's own with one file an export, found by its key.

A file is a magic line, the SHA-256 of its key and content, and the content. Nothing in it is executed when it is read,
and a file that is not exactly what was written counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["SOURCES_AT_IMPORT", "ExportCache", "export_cache", "hash_of_sources"]

_MAGIC = b"ort_trainer export 1\n"
_HEADER = len(_MAGIC) + hashlib.sha256().digest_size
_OFF = ("off", "0", "no", "false")
_DEFAULT_MEGABYTES = 1024
# A temporary file so old is of a process that was killed while it wrote.
_ABANDONED_SECONDS = 3600


# The rooms of this package that an export depends on; a test reads the imports to see whether these are all.
_ROOMS = (
    *("dims", "errors", "forked", "graph", "indices", "masks", "nested", "options", "runtime", "sessions", "sources"),
    "undisturbed",
)


def hash_of_sources() -> str:
    """Returns a hash of the source files that an export depends on, as they are now, which takes 2 ms."""
    package = Path(__file__).parents[1]
    sources = hashlib.sha256()
    for path in sorted(path for room in _ROOMS for path in _files_of(package / room)):
        content = path.read_bytes()
        sources.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return sources.hexdigest()


def _files_of(room: Path) -> Iterator[Path]:
    return room.rglob("*.py") if room.is_dir() else iter([room.with_suffix(".py")])


SOURCES_AT_IMPORT = hash_of_sources()
"""What the package was when it was imported: the code that runs may be older than the files."""


def export_cache() -> ExportCache | None:
    """Returns the cache that the environment asks for; None where ``ORT_TRAINER_CACHE`` is ``off``.

    Raises:
        ValueError: If ``ORT_TRAINER_CACHE_MB`` is no positive number.
    """
    chosen = os.environ.get("ORT_TRAINER_CACHE", "")
    if chosen.lower() in _OFF:
        return None
    megabytes = os.environ.get("ORT_TRAINER_CACHE_MB") or str(_DEFAULT_MEGABYTES)
    if not megabytes.isdecimal() or int(megabytes) == 0:
        raise ValueError(
            f"the environment variable ORT_TRAINER_CACHE_MB is {megabytes!r}, but must be a whole number of megabytes, "
            "at least 1; to keep no exports set ORT_TRAINER_CACHE to 'off'"
        )
    try:
        folder = Path(chosen).expanduser() if chosen else _users_caches() / "ort_trainer"
    except RuntimeError:  # a user without a home
        return None
    return ExportCache(folder.absolute(), int(megabytes) << 20)


def _users_caches() -> Path:
    """Returns where the system has its users' caches."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if os.name == "nt" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"])
    return Path.home() / ".cache"


class ExportCache:
    """A folder of exports, of which those that were not used for longest go when there are too many.

    Any number of processes may use it at once: a file appears whole, and one that has vanished was never there.

    Args:
        folder: The folder; it is made when there is something to keep.
        limit: How many bytes its files may have together.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit

    def path(self, key: str) -> Path:
        """Returns the file of a key."""
        return self.folder / f"{key}.export"

    def load(self, key: str) -> tuple[bytes | None, str]:
        """Returns what is kept under a key, or None; and what there is to say about that, if anything."""
        path = self.path(key)
        try:
            problem = _problem(self.folder.stat())
            if problem:
                return None, f"exports kept in {self.folder} are not used: the folder {problem}"
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                problem = _problem(status)
                if status.st_size > self.limit:
                    problem = "is larger than all files together may be"
                data = b"" if problem else file.read(self.limit + 1)
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            return None, f"the kept export {path} can't be read ({error}), so the model is exported again"
        if problem:
            return None, f"the kept export {path} is not used, so the model is exported again: the file {problem}"
        content = memoryview(data)[_HEADER:]
        if data[:_HEADER] != _header(key, content):
            return None, f"the kept export {path} is damaged, so the model is exported again"
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of the last use, by which files are chosen to go
        return bytes(content), ""

    def store(self, key: str, content: bytes) -> str:
        """Keeps something under a key; returns why that was not possible, or nothing."""
        if len(content) + _HEADER > self.limit:
            return f"this export is not kept: its {len(content) >> 20} MB are more than the cache may have"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            problem = _problem(self.folder.stat())
            if problem:
                return f"exports kept in {self.folder} are not used: the folder {problem}"
            # Nobody but the owner may read what mkstemp makes.
            handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_header(key, content))
                    file.write(content)
                Path(temporary).replace(self.path(key))
            finally:
                Path(temporary).unlink(missing_ok=True)
            self._make_room()
        except OSError as error:
            return f"this export is not kept: {error}"
        return ""

    def _make_room(self) -> None:
        """Deletes what was used longest ago until the rest is within the limit, and what killed processes left."""
        known = sorted(self._files(".export"), key=lambda found: found[1].st_mtime, reverse=True)
        total = 0
        for path, status in known:
            total += status.st_size
            if total > self.limit:
                path.unlink(missing_ok=True)
        for path, status in self._files(".tmp"):
            if time.time() - status.st_mtime > _ABANDONED_SECONDS:
                path.unlink(missing_ok=True)

    def _files(self, ending: str) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.folder.iterdir():
            if path.name.endswith(ending):
                with contextlib.suppress(FileNotFoundError):  # another process makes room as well
                    yield path, path.stat()


def _header(key: str, content: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(content)
    return _MAGIC + digest.digest()


def _problem(status: os.stat_result) -> str:
    """Returns why a file or folder can't be trusted to have what this user put there; nothing if it can."""
    if os.name == "nt":  # which has no owners and modes of this kind; the user's folders are their own
        return ""
    if status.st_uid != os.geteuid():
        return "belongs to someone else"
    if stat.S_IMODE(status.st_mode) & 0o022:
        return "may be written by others (chmod go-w makes it right)"
    return ""
