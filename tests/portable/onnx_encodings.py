"""The same ONNX model in other encodings, models that name files at every place where one can, and damaged ones.

Protobuf reads a message in many encodings: numbers and lengths with more bytes than they need, fields in any order,
a message in several parts that merge, fields with an unknown number or another wire type. All readers must see in
them what protobuf sees.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from onnx import GraphProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto

VARINT, EIGHT_BYTES, BYTES, GROUP, GROUP_END, FOUR_BYTES = range(6)
_FIXED = {FieldDescriptor.TYPE_FLOAT: (FOUR_BYTES, "<f"), FieldDescriptor.TYPE_DOUBLE: (EIGHT_BYTES, "<d")}
_LARGEST_NUMBER = (1 << 29) - 1


def varint(number: int, width: int = 0) -> bytes:
    """Returns a varint of at least ``width`` bytes."""
    parts = bytearray()
    number &= (1 << 64) - 1
    while number > 127 or len(parts) + 1 < width:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def field(number: int, value: bytes) -> bytes:
    """Returns a field of bytes."""
    return varint(number << 3 | BYTES) + varint(len(value)) + value


class Encoder:
    """Encodes messages; each choice that protobuf leaves open is drawn.

    Args:
        source: Draws the choices.
    """

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def message(self, message: Message) -> bytes:
        """Returns an encoding of a message."""
        encoded = [(f.number, part) for f, value in message.ListFields() for part in self._parts(f, value)]
        encoded += [self._skipped(message.DESCRIPTOR) for _ in range(self._source.choice((0, 0, 1, 2)))]
        numbers = [number for number, _ in encoded]
        self._source.shuffle(numbers)
        rest = {number: iter([part for other, part in encoded if other == number]) for number in numbers}
        return b"".join(next(rest[number]) for number in numbers)

    def _varint(self, number: int, limit: int) -> bytes:
        return varint(number, self._source.choice((0, 0, 2, self._source.randint(1, limit))))

    def _tag(self, number: int, kind: int) -> bytes:
        return self._varint(number << 3 | kind, 5)

    def _bytes(self, number: int, value: bytes) -> bytes:
        return self._tag(number, BYTES) + self._varint(len(value), 5) + value

    def _parts(self, f: FieldDescriptor, value: Any) -> Iterator[bytes]:
        """Yields the fields that hold a value, which may be repeated."""
        values = list(value) if f.is_repeated else [value]
        if f.message_type is not None:
            for item in values:
                halves = [item] if f.is_repeated else self._halves(item)
                yield from (self._bytes(f.number, self.message(half)) for half in halves)
        elif f.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            if not f.is_repeated and self._source.random() < 0.2:
                yield self._bytes(f.number, b"replaced by the last one")
            for item in values:
                yield self._bytes(f.number, item.encode() if isinstance(item, str) else item)
        else:
            encoded = [self._scalar(f, item) for item in values]
            if f.is_repeated and self._source.random() < 0.5:
                yield self._bytes(f.number, b"".join(part for _, part in encoded))
            else:
                yield from (self._tag(f.number, kind) + part for kind, part in encoded)

    def _scalar(self, f: FieldDescriptor, value: Any) -> tuple[int, bytes]:
        if f.type in _FIXED:
            kind, form = _FIXED[f.type]
            return kind, struct.pack(form, value)
        return VARINT, self._varint(int(value), 10)

    def _halves(self, message: Message) -> list[Message]:
        """Returns messages that merge to this one."""
        parts = [type(message)(), type(message)()]
        for f, _ in message.ListFields():
            only = type(message)()
            only.CopyFrom(message)
            for other, _ in message.ListFields():
                if other.number != f.number:
                    only.ClearField(other.name)
            self._source.choice(parts).MergeFrom(only)
        return parts

    def _skipped(self, kind: Descriptor) -> tuple[int, bytes]:
        """Returns a field that protobuf skips: of an unknown number, or of another wire type than a known one has."""
        numbers = {f.number: f for f in kind.fields if not f.is_repeated or f.message_type is not None}
        number = self._source.choice([*numbers, 900, _LARGEST_NUMBER])
        allowed = [VARINT, EIGHT_BYTES, FOUR_BYTES, GROUP]
        f = numbers.get(number)
        if f is not None:
            is_bytes = f.message_type is not None or f.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
            allowed = [kind for kind in allowed if kind == GROUP or is_bytes]
        return number, self._unread(number, self._source.choice(allowed))

    def _unread(self, number: int, kind: int, depth: int = 0) -> bytes:
        start = self._tag(number, kind)
        if kind == VARINT:
            return start + self._varint(self._source.getrandbits(32), 10)
        if kind in (EIGHT_BYTES, FOUR_BYTES):
            return start + self._source.randbytes(8 if kind == EIGHT_BYTES else 4)
        kinds = (VARINT, EIGHT_BYTES, FOUR_BYTES, GROUP)[: 4 if depth < 3 else 3]
        inner = [self._unread(self._source.randint(1, 30), self._source.choice(kinds), depth + 1) for _ in range(3)]
        return start + b"".join(inner) + field(13, b"in a group") + self._tag(number, GROUP_END)


def paths(kind: Descriptor, target: Descriptor, used: tuple[FieldDescriptor, ...] = ()) -> Iterator[Any]:
    """Yields the fields that lead from one kind of message to another one, each field at most once."""
    if kind is target:
        yield used
        return
    for f in kind.fields:
        if f.message_type is not None and f not in used:
            yield from paths(f.message_type, target, (*used, f))


def placed(model: ModelProto, path: tuple[FieldDescriptor, ...], content: Message) -> ModelProto:
    """Returns a model with a message at a place."""
    changed = ModelProto()
    changed.CopyFrom(model)
    place: Any = changed
    for f in path:
        place = getattr(place, f.name)
        place = place.add() if f.is_repeated else place
    place.MergeFrom(content)
    return changed


def reaching_out(model: ModelProto) -> Iterator[ModelProto]:
    """Yields models with a tensor in another file, or a node that calls out, at every place where one can be."""
    named = TensorProto(name="leak", data_type=TensorProto.FLOAT, dims=[4])
    named.external_data.add(key="location", value="../secret")
    marked = TensorProto(name="leak", data_location=TensorProto.EXTERNAL)
    both = TensorProto(data_location=TensorProto.EXTERNAL)
    both.MergeFrom(named)
    for index, path in enumerate(paths(ModelProto.DESCRIPTOR, TensorProto.DESCRIPTOR)):
        yield placed(model, path, (both, named, marked)[index % 3])
    nodes = [NodeProto(op_type=name, domain="com.microsoft") for name in ("EPContext", "PythonOp", "PythonOpGrad")]
    nodes.append(NodeProto(op_type="ATen", domain="org.pytorch.aten"))
    for index, path in enumerate(paths(ModelProto.DESCRIPTOR, NodeProto.DESCRIPTOR)):
        yield placed(model, path, nodes[index % len(nodes)])


def damaged(sound: bytes) -> Iterator[bytes]:
    """Yields files that no reader takes for a model; the last ones would be read as one that names a file."""
    leak = TensorProto(data_location=TensorProto.EXTERNAL)
    leak.external_data.add(key="location", value="../secret")
    graph = GraphProto(initializer=[leak]).SerializeToString()
    ends = [
        *(b"\x00\x00", b"\x02\x00", b"\x3c", b"\x3e", b"\x3f", b"\x3b", b"\x3b\x44", b"\x3b\x43\x3c\x44"),
        *(b"\x3a\x7f", b"\x3d\x00", b"\x39\x00", b"\x80" * 11, b"\x08" + b"\x80" * 10 + b"\x01"),
        *(b"\x3a" + b"\xff" * 9 + b"\x01", b"\x3b" * 101 + b"\x3c" * 101, b"\x3b" * 100_000 + b"\x3c" * 100_000),
    ]
    # A tag of 33 bits, of which protobuf drops the last.
    ends.append(varint((7 << 3 | BYTES) + (1 << 32)) + varint(len(graph)) + graph)
    for levels in (40, 1000):
        nested = graph
        for _ in range(levels):
            nested = field(1, field(5, field(6, nested)))
        ends.append(field(7, nested))
    # With a text that a reader could look for before it reads the rest.
    signed = field(100, b"location") + sound
    yield from (signed + end for end in ends)
    yield signed[:-1]


def write_encodings(folder: Path, model: bytes, count: int = 10) -> None:
    """Writes an artifact's evaluation model in other encodings, and models that must be refused."""
    sound = ModelProto.FromString(model)
    entries = list(sound.metadata_props)
    del sound.metadata_props[:]
    sound.metadata_props.extend(
        StringStringEntryProto(key=entry.key, value="replaced by the last one") for entry in entries
    )
    sound.metadata_props.extend(entries)
    for tensor in sound.graph.initializer:
        tensor.data_location = TensorProto.DEFAULT
    encoder = Encoder(random.Random(0))
    files = {
        "sound": [encoder.message(sound) for _ in range(count)],
        "reaching_out": [encoder.message(changed) for changed in reaching_out(sound)],
        "damaged": list(damaged(model)),
    }
    for kind, contents in files.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for path in (folder / kind).iterdir():
            path.unlink()
        for index, content in enumerate(contents):
            (folder / kind / f"{index}.onnx").write_bytes(content)
