"""Reads and writes protobuf messages as bytes: sequences of fields, each a number with a value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = [
    "BYTES",
    "VARINT",
    "Field",
    "Malformed",
    "content",
    "decoded",
    "field",
    "fields",
    "tag",
    "text",
    "varint",
    "varints",
]

# Types of a field's value; the two others ended with protobuf's first version.
VARINT, _EIGHT_BYTES, BYTES, _FOUR_BYTES = 0, 1, 2, 5


class Malformed(ValueError):
    """The bytes are no message."""


class Field(NamedTuple):
    """A field: its number, its value (bytes, or a number), and the bytes of both."""

    number: int
    value: memoryview | int
    raw: memoryview


def fields(data: memoryview) -> Iterator[Field]:
    """Yields the fields of a message.

    Raises:
        Malformed: If it is none.
    """
    position = 0
    while position < len(data):
        start = position
        key, position = _read_varint(data, position)
        number, kind = key >> 3, key & 7
        value: memoryview | int
        if kind == VARINT:
            value, position = _read_varint(data, position)
        else:
            size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind)
            if kind == BYTES:
                size, position = _read_varint(data, position)
            if size is None or position + size > len(data):
                raise Malformed(f"byte {start} begins no field")
            value = data[position : position + size]
            position += size
        yield Field(number, value, data[start:position])


def varints(data: memoryview) -> list[int]:
    """Returns numbers that are packed into one field."""
    found, position = [], 0
    while position < len(data):
        number, position = _read_varint(data, position)
        found.append(number)
    return found


def content(found: Field) -> memoryview:
    """Returns the bytes of a field that has bytes by its number."""
    if isinstance(found.value, int):
        raise Malformed(f"field {found.number} is a number")
    return found.value


def text(data: memoryview, number: int) -> str:
    """Returns a field that is a text; of several the last one, as all readers do, and an empty one if there is none."""
    found = [decoded(content(f)) for f in fields(data) if f.number == number]
    return found[-1] if found else ""


def decoded(data: memoryview) -> str:
    """Returns bytes as a text."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"a name is no text ({error})") from error


def field(number: int, value: bytes) -> bytes:
    """Returns a field with bytes."""
    return tag(number, BYTES) + varint(len(value)) + value


def tag(number: int, kind: int) -> bytes:
    """Returns what a field begins with."""
    return varint(number << 3 | kind)


def varint(number: int) -> bytes:
    """Returns a number as protobuf writes it: seven bits a byte, the lowest first."""
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Returns the number at a position, and the position after it."""
    number = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        number |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return number, position
    raise Malformed("it ends within a number")
