"""Damages the bytes of files: in a few ways for all formats, and safetensors files with invalid headers."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ort_trainer.core.sealed import write

# Lengths and counts that no valid file has.
ABSURD = (
    b"\xff" * 8,
    b"\x00" * 8,
    (1 << 40).to_bytes(8, "little"),
    (1 << 63).to_bytes(8, "little"),
    b"\xff\xff\xff\x7f",
    b"\x00\x00\x00\x80",
)


def truncated(data: bytes, percent: int = 1) -> Iterator[bytes]:
    """Yields the data truncated after every ``percent`` percent, without the whole."""
    for part in range(0, 100, percent):
        yield data[: len(data) * part // 100]


def changed(data: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yields the data with random but repeatable damage: bits flipped, bytes overwritten, copied or removed."""
    source = random.Random(seed)
    for number in range(count):
        damaged = bytearray(data)
        for _ in range(source.choice((1, 1, 2, 4))):
            place = source.randrange(len(damaged))
            if number % 4 == 0:
                damaged[place] ^= 1 << source.randrange(8)
            elif number % 4 == 1:
                absurd = source.choice(ABSURD)
                damaged[place : place + len(absurd)] = absurd
            elif number % 4 == 2:
                start, length = source.randrange(len(data)), source.randrange(64)
                damaged[place : place + length] = data[start : start + length]
            else:
                del damaged[place : place + source.randrange(1, 16)]
        if damaged != data:
            yield bytes(damaged)


def with_header(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Returns a safetensors file with a changed header without checksums, as an attacker could write it."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for key in ("checksums", "header_checksum"):
        header["__metadata__"].pop(key, None)
    replaced = change(header)
    text = replaced if isinstance(replaced, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def sealed(metadata: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]] | None = None) -> bytes:
    """Returns a sealed file with correct checksums."""
    file = io.BytesIO()
    stored = {
        name: (value.dtype.name, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        for name, value in (tensors or {}).items()
    }
    write(
        file, stored, {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    )
    return file.getvalue()


# Changes of a header that must be refused. Some name files that must not be touched.
HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no JSON": lambda h: b"{",
    "a list": lambda h: b"[]",
    "a number": lambda h: b"17",
    "deep lists": lambda h: b"[" * 100_000,
    "deep dicts": lambda h: b'{"a":' * 100_000,
    "no UTF-8": lambda h: b"\xff\xfe",
    "twice": lambda h: b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":{}}',
    "a huge number": lambda h: b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
    "metadata that are a list": lambda h: h.update(__metadata__=[]),
    "metadata with numbers": lambda h: h["__metadata__"].update(x=3),
    "no metadata": lambda h: h.pop("__metadata__"),
    "one checksum only": lambda h: h["__metadata__"].update(header_checksum="00000000"),
    **{
        f"{key} {value!r:.40}": lambda h, key=key, value=value: _first(h).update({key: value})
        for key, values in {
            "dtype": ["X", "../evil", None, 3, [], "O", "object", "F128"],
            "shape": [[-1], [1 << 62, 1 << 62], [0.5], ["3"], None, "3", [[3]], [True], {}, [float("nan")], [1] * 70],
            "data_offsets": [[0], [-4, 0], [4, 0], [0, 1 << 62], [1 << 62, (1 << 62) + 4], [0, 0.5], None, [None] * 2],
        }.items()
        for value in values
    },
}


def _first(header: dict[str, Any]) -> dict[str, Any]:
    return next(value for key, value in header.items() if key != "__metadata__")
