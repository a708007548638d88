"""Attacks on files: a drawn change of the bytes, of a part, or of what is at the path."""

from __future__ import annotations

import math
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .containers import CONTAINERS, DEEP, Twin
from .damage import changed

__all__ = ["PLACES", "attacked", "cleared", "paths_of"]

WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 5, 625, 10**8, 1 << 31, 1 << 62, 1 << 63, 1 << 70, 10**400, 0.5, 1e308, 5e-324),
    *(math.nan, math.inf, -math.inf, "", "text", "../evil", "/evil", "a\0b", "\ud800", "NaN", "1e999", "float32"),
    *([], {}, [[1]], [None], ["text"], {"a": 1}, {"": {}}, [0] * 1000, "[" * 5000, "-" * 20_000 + "1", DEEP),
    *(b"", b"\0" * 8, np.zeros(0, np.float32), np.full((2, 1), np.nan), np.array(-(2**62))),
)
"""Values of other parts; a container that can't hold one says so."""
Path_ = tuple[Any, ...]


def paths_of(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yields the paths of all parts of a tree; of a list of numbers only that of its first element."""
    if path:
        yield path
    if isinstance(value, dict):
        keys: Any = value
    elif isinstance(value, list) and len(value) > 16 and not any(isinstance(part, (dict, list)) for part in value):
        keys = (0,)
    else:
        keys = range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from paths_of(value[key], (*path, key))


def _near(value: Any, source: random.Random) -> Any:
    """Returns a value of the same type that is wrong or almost right."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return source.choice((value + 1, value - 1, -value, value << 31, value << 65, str(value), float(value)))
    if isinstance(value, float):
        return source.choice((-value, value * 1e300, math.nan, int(value) if math.isfinite(value) else 0))
    if isinstance(value, (str, bytes)):
        more = "AAAA" if isinstance(value, str) else b"AAAA"
        return source.choice((value[:0], value[:-4], value + more, value * 1000, value[::-1]))
    if isinstance(value, list):
        return source.choice(([], value[:-1], value * 2, value[::-1], [value], value * 1000))
    if isinstance(value, dict):
        return source.choice(({}, [value], dict(list(value.items())[1:]), {"": value}))
    array = np.asarray(value)
    return source.choice((array[None], array.astype("S"), array.astype(np.float16), array.ravel()[:-1]))


def _part(tree: Any, path: Path_) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _with(tree: Any, path: Path_, change: Callable[[Any], Any]) -> Any:
    """Returns a copy of a tree in which one part is changed."""
    if not path:
        return change(tree)
    if isinstance(tree, dict):
        return {key: _with(part, path[1:], change) if key == path[0] else part for key, part in tree.items()}
    return [_with(part, path[1:], change) if at == path[0] else part for at, part in enumerate(tree)]


def _without(key: Any) -> Callable[[Any], Any]:
    return lambda owner: _rebuilt(owner, [(other, part) for other, part in _entries(owner) if other != key])


def _entries(owner: Any) -> list[tuple[Any, Any]]:
    return list(owner.items() if isinstance(owner, dict) else enumerate(owner))


def _rebuilt(owner: Any, entries: list[tuple[Any, Any]]) -> Any:
    return dict(entries) if isinstance(owner, dict) else [part for _, part in entries]


def _renamed(key: Any, name: str) -> Callable[[Any], Any]:
    return lambda owner: _rebuilt(owner, [(name if other == key else other, part) for other, part in _entries(owner)])


def _more(name: str, part: Any) -> Callable[[Any], Any]:
    return lambda owner: _rebuilt(owner, [*_entries(owner), (name, part)])


def _changed_part(tree: Any, path: Path_, mutation: str, source: random.Random) -> Any:
    *above, key = path
    name = source.choice(("../evil", "", "a\0b", "__class__", "x", f"{key}"[:-1], f"{key}".upper()))
    if mutation == "wrong":
        wrong = source.choice(WRONG)
        return _with(tree, path, lambda _: wrong)
    if mutation == "near":
        near = _near(_part(tree, path), source)
        return _with(tree, path, lambda _: near)
    if mutation == "swap":
        other = _part(tree, source.choice(list(paths_of(tree))))
        return _with(tree, path, lambda _: other)
    if mutation == "drop":
        return _with(tree, tuple(above), _without(key))
    if mutation == "rename":
        return _with(tree, tuple(above), _renamed(key, name))
    part = _part(tree, path) if source.random() < 0.5 else source.choice(WRONG)
    return _with(tree, tuple(above), _more(Twin(key) if mutation == "twice" else name, part))


def attacked(whole: bytes, form: str, parts: Mapping[Path_, Any], source: random.Random) -> tuple[str, bytes]:
    """Returns a description of a drawn attack on a file, and the attacked file.

    Args:
        whole: The file.
        form: Its container.
        parts: The paths of its parts, with the mutations to draw from.
        source: Draws.
    """
    container = CONTAINERS[form]
    while parts and source.random() < 0.85:
        tree, told = container.tree(whole), []
        try:
            for _ in range(source.choice((1, 1, 1, 2))):
                path = source.choice(list(parts))
                mutation = source.choice(parts[path].mutations)
                tree = _changed_part(tree, path, mutation, source)
                told.append(f"{mutation} {'/'.join(map(str, path))}")
            return ", ".join(told), container.file(tree)
        except Exception:  # no file of this container can be so
            continue
    if source.random() < 0.3:
        length = source.randrange(len(whole) + 1)
        return f"truncated to {length}", whole[:length]
    return "other bytes", next(changed(whole, 1000, source.getrandbits(30)))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path may have only 108 bytes
        opened.bind(path.name)
        os.chdir(here)


PLACES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "nothing": lambda path: None,
    "an empty file": Path.touch,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": _socket,
}
"""What may be in place of a file."""


def cleared(folder: Path) -> Path:
    """Returns an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
