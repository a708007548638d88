"""Caches exports on disk: a private folder with one file per export, named by its cache key.

A file holds a magic line, the SHA-256 of key and content, and the content. Reading it executes nothing, and a file that
differs from what was written counts as missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.dims import holds, symbols_of
from ..core.errors import check_file
from . import Step

_MAGIC = b"ort_trainer export 1\n"
_HEADER = len(_MAGIC) + hashlib.sha256().digest_size
_OFF = ("off", "0", "no", "false")
_DEFAULT_MEGABYTES = 1024
# A temporary file this old was left by a process killed while writing.
_ABANDONED_SECONDS = 3600


# The rooms whose source an export depends on; a test compares them with the imports.
_ROOMS = (
    *("capture", "core", "engine", "export", "fx", "graph", "kernels", "operators", "options", "outside"),
    "step",
)


def hash_of_sources() -> str:
    """Returns a hash of the current source files that an export depends on, in 2 ms."""
    package = Path(__file__).parents[1]
    sources = hashlib.sha256()
    for path in sorted(path for room in _ROOMS for path in (package / room).rglob("*.py")):
        content = path.read_bytes()
        sources.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return sources.hexdigest()


SOURCES_AT_IMPORT = hash_of_sources()
"""The hash when the package was imported: the running code may be older than the files."""


def export_cache() -> ExportCache | None:
    """Returns the cache that the environment configures; None if ``ORT_TRAINER_CACHE`` is ``off``.

    Raises:
        ValueError: If ``ORT_TRAINER_CACHE_MB`` is not a positive int.
    """
    chosen = os.environ.get("ORT_TRAINER_CACHE", "")
    if chosen.lower() in _OFF:
        return None
    megabytes = os.environ.get("ORT_TRAINER_CACHE_MB") or str(_DEFAULT_MEGABYTES)
    if not megabytes.isdecimal() or int(megabytes) == 0:
        raise ValueError(
            f"the environment variable ORT_TRAINER_CACHE_MB must be a whole number of megabytes, at least 1, but is "
            f"{megabytes!r}; to disable the cache, set ORT_TRAINER_CACHE to 'off'"
        )
    try:
        folder = Path(chosen).expanduser() if chosen else _users_caches() / "ort_trainer"
    except RuntimeError:  # a user without a home
        return None
    return ExportCache(folder.absolute(), int(megabytes) << 20)


def _users_caches() -> Path:
    """Returns the system's folder for the user's caches; platformdirs would be a dependency for this alone."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if os.name == "nt" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"])
    return Path.home() / ".cache"


@dataclasses.dataclass(frozen=True)
class Export:
    """An exported step, and remarks about it.

    Attributes:
        step: The step.
        reasons: The symbols that it fixes, with the places where the model fixes them.
        modes_read: Names of the step's modules whose mode the graph depends on. A cached graph may come from a model
            with other names; these are the names in the captured model.
        kept: The path of the graph in the cache; empty if it is not cached.
        found: Whether the graph was in the cache already.
        remarks: Messages about the export.
        problems: Why the cache could not be read or written.
        backward: The backward passes of a call, whose forward pass is the step; empty for others.
        output: What the captured run writes for people, with the lines that do it; not kept in the cache.
        notes: What the captured model reads and leaves outside tensors, as JSON values; not kept in the cache.
    """

    step: Step
    reasons: Mapping[str, str]
    modes_read: tuple[str, ...] = ()
    kept: str = ""
    found: bool = False
    remarks: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    backward: tuple[Step, ...] = ()
    output: tuple[str, ...] = ()
    notes: Any = None

    def accepts(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether the graph is valid for these sizes of all symbolic dimensions."""
        fixed = all(sizes.get(symbol) == size for symbol, size in self.step.fixed.items())
        return fixed and not violated(self.step.guards, sizes)

    def to_bytes(self) -> bytes:
        """Serializes the export."""
        steps = [step.to_bytes() for step in (self.step, *self.backward)]
        head = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("step", "backward")}
        text = json.dumps({**head, "lengths": list(map(len, steps))}).encode()
        return b"".join([len(text).to_bytes(8, "little"), text, *steps])

    @classmethod
    def from_bytes(cls, data: bytes) -> Export:
        """Reads what :meth:`to_bytes` wrote.

        Raises:
            ValueError: If ``data`` is not an export.
        """
        end = 8 + int.from_bytes(data[:8], "little")
        try:
            head = json.loads(data[8:end])
            ends = list(itertools.accumulate(head.pop("lengths"), initial=end))
            if ends[-1] != len(data):
                raise ValueError(f"it has {len(data)} bytes instead of {ends[-1]}")
            step, *backward = (Step.from_bytes(data[start:stop]) for start, stop in itertools.pairwise(ends))
            lists = {name: tuple(value) for name, value in head.items() if isinstance(value, list)}
            export = cls(step=step, backward=tuple(backward), **{**head, **lists})
            for guard in export.step.guards:
                symbols_of(guard)
            dict(export.step.fixed), dict(export.reasons)
        except (TypeError, AttributeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"this is not an export: {error!r}") from error
        return export


def violated(guards: Iterable[str], sizes: Mapping[str, int]) -> set[str]:
    """Returns the symbols in all conditions that these sizes violate."""
    return {symbol for guard in guards if not holds(guard, sizes) for symbol in symbols_of(guard)}


class ExportCache:
    """A folder of exports; if it grows too large, the least recently used are evicted.

    Any number of processes may use it at once: files appear atomically, and a file that vanishes counts as missing.

    Args:
        folder: The folder, created by the first :meth:`store`.
        limit: Maximum total size of its files in bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit

    def path(self, key: str) -> Path:
        """Returns the file of a key."""
        return self.folder / f"{key}.export"

    def load(self, key: str) -> tuple[bytes | None, str]:
        """Returns the content for a key, or None, and a message if there is a problem."""
        path = self.path(key)
        try:
            problem = _problem(self.folder.stat())
            if problem:
                return None, f"cached exports in {self.folder} are not used: the folder {problem}"
            check_file(path, "cached export")
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                problem = _problem(status)
                if status.st_size > self.limit:
                    problem = "is larger than the cache limit"
                data = b"" if problem else file.read(self.limit + 1)
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            return None, f"the cached export {path} can't be read ({error}), so the model is exported again"
        if problem:
            return None, f"the cached export {path} is not used, so the model is exported again: the file {problem}"
        content = memoryview(data)[_HEADER:]
        if data[:_HEADER] != _header(key, content):
            return None, f"the cached export {path} is damaged, so the model is exported again"
        with contextlib.suppress(OSError):
            os.utime(path)  # records the time of the last use, for eviction
        return bytes(content), ""

    def store(self, key: str, content: bytes) -> str:
        """Stores the content for a key; returns the reason if it can't, otherwise an empty string."""
        if len(content) + _HEADER > self.limit:
            return f"this export is not cached: its {len(content) >> 20} MB exceed the cache limit"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            problem = _problem(self.folder.stat())
            if problem:
                return f"cached exports in {self.folder} are not used: the folder {problem}"
            # mkstemp makes files that only the owner can read.
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
            return f"this export is not cached: {error}"
        return ""

    def _make_room(self) -> None:
        """Evicts the least recently used files beyond the limit, and deletes files left by killed processes."""
        newest_first = sorted(self._files(".export"), key=lambda entry: entry[1].st_mtime, reverse=True)
        total = 0
        for path, status in newest_first:
            total += status.st_size
            if total > self.limit:
                path.unlink(missing_ok=True)
        for path, status in self._files(".tmp"):
            if time.time() - status.st_mtime > _ABANDONED_SECONDS:
                path.unlink(missing_ok=True)

    def _files(self, ending: str) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.folder.iterdir():
            if path.name.endswith(ending):
                with contextlib.suppress(FileNotFoundError):  # another process may have evicted it
                    yield path, path.stat()


def _header(key: str, content: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(content)
    return _MAGIC + digest.digest()


def _problem(status: os.stat_result) -> str:
    """Returns why a file or folder could hold another user's data; empty if it can't."""
    if os.name == "nt":  # has no such owners and modes; the user's folders are private
        return ""
    if status.st_uid != os.geteuid():
        return "belongs to another user"
    if stat.S_IMODE(status.st_mode) & 0o022:
        return "is writable by others (fix it with chmod go-w)"
    return ""
