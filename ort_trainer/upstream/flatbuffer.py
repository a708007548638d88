"""Reads the tables of a flatbuffer and checks every offset.

The package ``flatbuffers`` trusts offsets: from a damaged file it reads wrong bytes, or fewer than the file declares.
"""

from __future__ import annotations

import struct

from ..core.errors import CheckpointError


class Table:
    """A table of a flatbuffer, whose fields are read by their numbers in the schema.

    An offset beyond the buffer raises a :class:`~ort_trainer.CheckpointError`.

    Args:
        data: The whole buffer.
        position: Position of the table.
        name: Name of the file in error messages.
    """

    def __init__(self, data: memoryview, position: int, name: str) -> None:
        self._data, self._position, self._name = data, position, name
        self._fields = position - self._number("<i", position)
        self._length = self._number("<H", self._fields)

    @classmethod
    def root(cls, data: memoryview, name: str) -> Table:
        """Returns the root table of a buffer."""
        if len(data) < 8:
            raise CheckpointError(f"{name} is damaged: it ends after {len(data)} bytes")
        return cls(data, struct.unpack_from("<I", data)[0], name)

    def integer(self, field: int, default: int = 0, format: str = "<q") -> int:
        """Returns an int, of 64 bits by default."""
        place = self._place(field)
        return default if place is None else self._number(format, place)

    def boolean(self, field: int) -> bool:
        """Returns a bool."""
        return bool(self.integer(field, 0, "<B"))

    def float(self, field: int) -> float:
        """Returns a float of 32 bits."""
        place = self._place(field)
        return 0.0 if place is None else float(struct.unpack_from("<f", self._part(place, 4))[0])

    def text(self, field: int) -> str | None:
        """Returns a string; None if it is missing."""
        content = self._vector(field, 1)
        if content is None:
            return None
        try:
            return bytes(content).decode()
        except UnicodeDecodeError:
            raise self._damaged("a string in it is not valid UTF-8") from None

    def data(self, field: int) -> memoryview | None:
        """Returns a view of a vector of bytes; None if it is missing."""
        return self._vector(field, 1)

    def integers(self, field: int, most: int) -> tuple[int, ...]:
        """Returns a vector of at most ``most`` ints of 64 bits.

        Many tables may share one vector, so a small damaged file could make a long one be read many times.
        """
        content = self._vector(field, 8)
        if content is not None and len(content) > 8 * most:
            raise self._damaged(f"a vector in it has {len(content) // 8} numbers, and at most {most} are possible")
        return () if content is None else struct.unpack(f"<{len(content) // 8}q", content)

    def table(self, field: int) -> Table | None:
        """Returns the table that a field points to; None if it is missing."""
        place = self._place(field)
        return None if place is None else self._table_at(place)

    def tables(self, field: int) -> list[Table]:
        """Returns a vector of tables."""
        offsets = self._vector(field, 4)
        if offsets is None:
            return []
        start = self._target(self._required(field)) + 4
        return [self._table_at(start + offset) for offset in range(0, len(offsets), 4)]

    def _table_at(self, place: int) -> Table:
        return Table(self._data, self._target(place), self._name)

    def _place(self, field: int) -> int | None:
        """Returns the position of a field; None if it is missing."""
        # The vtable begins with its own length and the table's, both uint16; then each field has a uint16 offset.
        entry = 4 + 2 * field
        if entry + 2 > self._length:
            return None
        offset = self._number("<H", self._fields + entry)
        return self._position + offset if offset else None

    def _required(self, field: int) -> int:
        place = self._place(field)
        assert place is not None
        return place

    def _vector(self, field: int, size: int) -> memoryview | None:
        """Returns a view of a vector whose elements have ``size`` bytes; None if it is missing."""
        place = self._place(field)
        if place is None:
            return None
        start = self._target(place)
        return self._part(start + 4, size * self._number("<I", start))

    def _target(self, place: int) -> int:
        """Returns the position to which an offset points: flatbuffers count from the offset itself."""
        return place + self._number("<I", place)

    def _number(self, format: str, place: int) -> int:
        return int(struct.unpack_from(format, self._part(place, struct.calcsize(format)))[0])

    def _part(self, start: int, size: int) -> memoryview:
        """Returns a part of the buffer, after a check that it lies inside."""
        if start < 0 or start + size > len(self._data):
            raise self._damaged(f"it has {len(self._data)} bytes, but points to byte {start + size}")
        return self._data[start : start + size]

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._name} is damaged: {why}")
