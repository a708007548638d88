"""Reads and writes protobuf messages as bytes: sequences of fields, each a number with a value.

Every engine depends on google.protobuf, but it was slower with a descriptor of the same fields: its import takes 13 to
45 ms (this module's 1 ms), and it takes 300 to 700 ms to parse and copy a model of 268 MB. This module reads the graph
of such a model from a memory-mapped file in 2 ms, without touching the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# Wire types of a field.
VARINT, _EIGHT_BYTES, BYTES, _GROUP, _GROUP_END, _FOUR_BYTES = range(6)

DEEPEST = 100
"""How deep messages and groups may be nested, as in ONNX's Python and C++ libraries."""

ELEMENT_TYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
}
"""ONNX's numbers of the element types that NumPy has."""


class Malformed(ValueError):
    """The bytes are not a valid message."""


class Field(NamedTuple):
    """A field: its number, its value, and the raw bytes of both.

    The value is bytes, an int, or None for a group and a number of fixed size. Protobuf skips a field of a known number
    with another wire type.
    """

    number: int
    value: memoryview | int | None
    raw: memoryview


def fields(data: memoryview) -> Iterator[Field]:
    """Yields the fields of a message.

    Raises:
        Malformed: If it is not a valid message.
    """
    position = start = 0
    groups: list[int] = []  # numbers of those that are open
    while position < len(data):
        key, position = _read_varint(data, position)
        number, kind = key >> 3, key & 7
        value: memoryview | int | None = None
        if number == 0 or key >> 32:  # protobuf would drop the upper bits
            raise Malformed(f"invalid field at byte {start}")
        if kind == VARINT:
            value, position = _read_varint(data, position)
        elif kind == _GROUP and len(groups) < DEEPEST:
            groups.append(number)
        elif kind == _GROUP_END and groups[-1:] == [number]:
            groups.pop()
        else:
            size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind)
            if kind == BYTES:
                size, position = _read_varint(data, position)
            if size is None or position + size > len(data):
                raise Malformed(f"invalid field at byte {start}")
            if kind == BYTES:
                value = data[position : position + size]
            position += size
        if not groups:
            yield Field(number, value, data[start:position])
            start = position
    if groups:
        raise Malformed(f"the group at byte {start} has no end")


def delimited(data: memoryview) -> Iterator[Field]:
    """Yields the fields of a message that have bytes."""
    return (entry for entry in fields(data) if isinstance(entry.value, memoryview))


def varints(data: memoryview) -> list[int]:
    """Returns the numbers packed into one field."""
    numbers, position = [], 0
    while position < len(data):
        number, position = _read_varint(data, position)
        numbers.append(number)
    return numbers


def content(entry: Field) -> memoryview:
    """Returns the bytes of a field.

    Raises:
        Malformed: If it has another wire type.
    """
    if not isinstance(entry.value, memoryview):
        raise Malformed(f"field {entry.number} is not bytes")
    return entry.value


def text(data: memoryview, number: int) -> str:
    """Returns a string field: the last if there are several, as every reader does, and "" if there is none."""
    strings = [decoded(content(f)) for f in delimited(data) if f.number == number]
    return strings[-1] if strings else ""


def merged(data: memoryview, number: int) -> memoryview | None:
    """Returns the message in a field; None if there is none. Several ones merge into one, as for every reader."""
    parts = [content(f) for f in delimited(data) if f.number == number]
    return memoryview(b"".join(parts)) if len(parts) > 1 else next(iter(parts), None)


def decoded(data: memoryview) -> str:
    """Returns bytes as a str."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"a name is not valid UTF-8 ({error})") from error


def field(number: int, value: bytes) -> bytes:
    """Returns a bytes field."""
    return tag(number, BYTES) + varint(len(value)) + value


def tag(number: int, kind: int) -> bytes:
    """Returns the key at the start of a field."""
    return varint(number << 3 | kind)


def varint(number: int) -> bytes:
    """Returns a number as a varint: seven bits per byte, lowest first."""
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
    raise Malformed("a number is truncated or too long")
