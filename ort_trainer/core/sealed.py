"""Sealed files: safetensors files in which every tensor and the header carry a checksum.

A sealed file is an ordinary safetensors file, which every reader of that format opens: 8 bytes with the length of the
header, the header as JSON, and the bytes of the tensors. Its metadata has two more entries: ``checksums``, JSON with
the XXH3 (64 bits) of each tensor's bytes, and ``header_checksum``, the XXH3 of the length and the header, computed with
zeros in place of its own digits. Checksums detect damage, but they are not a signature: anyone who can write the file
can write them.

Files are read in pieces into our own memory, never mapped. A file that is truncated or overwritten while it is read
raises an error (a mapped one would end the process), and the verified bytes are the ones that are used. Each piece is
hashed while it is in the processor's caches: with a second pass, reading 256 MB takes 1.1 times as long, writing 1.3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import xxhash

from .errors import CheckpointError, shown, warn

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
"""The format's name of a dtype -> its name in PyTorch and NumPy."""
_CODES = {name: code for code, name in DTYPES.items()}
_SIZES = {"BOOL": 1, "BF16": 2, **{code: 1 for code in DTYPES if code.startswith("F8")}}
_SIZES |= {code: int(code[1:]) // 8 for code in DTYPES if code not in _SIZES}

VERSION = 2
"""The version of formats built on sealed files, unless they number their own; 1 was the same without checksums."""

_PIECE = 1 << 20  # fits into the processor's caches, so that each byte is read from memory once
_LONGEST_HEADER = 100_000_000  # the limit of other readers of the format
_LARGEST = 2**63 - 1
_NO_CHECKSUM = "0" * 16
_MARK = b'"header_checksum":"'

Array = np.ndarray[Any, Any]
Stored = tuple[str, tuple[int, ...], Array]
"""A tensor to write: its dtype (a value of :data:`DTYPES`), its shape, and its bytes as uint8."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Attributes:
        dtype: The format's name of the dtype, a key of :data:`DTYPES`.
        shape: The shape.
        start: Offset of its first byte in the file.
        end: Offset of the byte after its last.
        checksum: 16 hexadecimal digits; None in a file that is not sealed.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    checksum: str | None


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Attributes:
        metadata: The metadata, without the checksums.
        tensors: The tensors by name.
        sealed: Whether the file has checksums.
    """

    metadata: dict[str, str]
    tensors: dict[str, Entry]
    sealed: bool


def write(file: BinaryIO, tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> None:
    """Writes a sealed file.

    Args:
        file: Open, empty and seekable: the header is written last.
        tensors: The tensors by name.
        metadata: Other metadata of the header.

    Raises:
        TypeError: If the format does not support a dtype.
        ValueError: If the header would be too long for readers of the format.
    """
    # Large dtypes first, so that each tensor is aligned.
    names = sorted(tensors, key=lambda name: (-_size(name, tensors[name][0]), name))
    start = len(_header(names, tensors, metadata, dict.fromkeys(names, _NO_CHECKSUM)))
    if start > _LONGEST_HEADER:
        raise ValueError(
            f"the values that are not tensors or arrays take {start} bytes of text, but a checkpoint holds at most "
            f"{_LONGEST_HEADER}: store long lists of numbers as arrays"
        )
    file.seek(start)

    checksums = {}
    for name in names:
        checksum = xxhash.xxh3_64()
        for piece in _pieces(tensors[name][2]):
            checksum.update(piece)
            file.write(piece)
        checksums[name] = checksum.hexdigest()
    header = _header(names, tensors, metadata, checksums)
    file.seek(0)
    file.write(header)


def digest(tensors: Iterable[tuple[str, Stored]]) -> str:
    """Returns the XXH3 (128 bits) of tensors with their names, dtypes and shapes; their order matters."""
    checksum = xxhash.xxh3_128()
    for name, (dtype, shape, data) in tensors:
        checksum.update(json.dumps([name, dtype, list(shape)]).encode())
        for piece in _pieces(data):
            checksum.update(piece)
    return checksum.hexdigest()


def _size(name: str, dtype: str) -> int:
    """Returns the bytes per element of a dtype."""
    if dtype not in _CODES:
        raise TypeError(f"{name} is a tensor of dtype {dtype}, which a checkpoint can't hold: convert it first")
    return _SIZES[_CODES[dtype]]


def _header(
    names: Iterable[str], tensors: Mapping[str, Stored], metadata: Mapping[str, str], checksums: Mapping[str, str]
) -> bytes:
    """Returns the bytes of a file before the tensors, padded to a multiple of 8, whatever the checksums are."""
    checksum_entries = {"checksums": json.dumps(checksums), "header_checksum": _NO_CHECKSUM}
    entries: dict[str, Any] = {"__metadata__": {**metadata, **checksum_entries}}
    end = 0
    for name in names:
        dtype, shape, data = tensors[name]
        start, end = end, end + data.nbytes
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header.replace(_MARK + _NO_CHECKSUM.encode(), _MARK + xxhash.xxh3_64_hexdigest(header).encode())


def _pieces(data: Array) -> Iterator[memoryview]:
    view = data.data
    for start in range(0, len(view), _PIECE):
        yield view[start : start + _PIECE]


def read_header(file: BinaryIO, name: str) -> Header:
    """Reads the header of a file, sealed or not, and checks everything except the contents of the tensors.

    Args:
        file: Open and seekable.
        name: The file's name for messages.

    Raises:
        CheckpointError: If the file is damaged or not a safetensors file.
    """
    try:
        return _read_header(file)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged or not a checkpoint: {error}") from error


def _read_header(file: BinaryIO) -> Header:
    size = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
        raise ValueError(f"it has {size} bytes, and its first 8 are not a valid header length")
    text = file.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_once)
    except ValueError as error:
        raise ValueError(f"its header can't be read: {error}") from error
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its header is not that of a safetensors file")
    checksums = _read_checksums(metadata, prefix + text, header)
    tensors = {key: _entry(key, value, 8 + length, checksums) for key, value in header.items()}
    _check_places(tensors, 8 + length, size)
    return Header(metadata, tensors, checksums is not None)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the dict of a JSON object whose names are unique; ``json.loads`` alone would keep the last duplicate."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("it contains a duplicate name")
    return entries


def _read_checksums(metadata: dict[str, str], header: bytes, tensors: Mapping[str, Any]) -> dict[str, str] | None:
    """Removes the checksums from the metadata, checks the header's, and returns the tensors'; None without any."""
    header_checksum, tensor_checksums = metadata.pop("header_checksum", None), metadata.pop("checksums", None)
    if header_checksum is None and tensor_checksums is None:
        return None
    blank = header.replace(_MARK + str(header_checksum).encode(errors="replace"), _MARK + _NO_CHECKSUM.encode())
    if header_checksum is None or tensor_checksums is None or header_checksum != xxhash.xxh3_64_hexdigest(blank):
        raise ValueError("its header does not match its checksum")
    checksums = json.loads(tensor_checksums, object_pairs_hook=_once)
    if not isinstance(checksums, dict) or checksums.keys() != tensors.keys():
        raise ValueError("its checksums are not those of its tensors")
    return checksums


def _entry(name: str, entry: Any, begin: int, checksums: Mapping[str, Any] | None) -> Entry:
    """Checks the header's entry of a tensor; ``begin`` is the offset of the first tensor in the file."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"the entry of the tensor {shown(name)} is invalid: {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"the tensor {shown(name)} has the unknown dtype {shown(dtype)}")
    if not _are_counts(shape) or len(shape) > 64:
        raise ValueError(f"the tensor {shown(name)} has the invalid shape {shown(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the tensor {shown(name)} has the invalid offsets {shown(offsets)}")
    start, end = offsets
    # Without the zeros, because the other sizes of an empty tensor may be too large, too.
    if math.prod(max(size, 1) for size in shape) * _SIZES[dtype] > _LARGEST:
        raise ValueError(f"the tensor {shown(name)} has the invalid shape {shown(shape)}")
    if end - start != math.prod(shape) * _SIZES[dtype]:
        raise ValueError(f"the tensor {shown(name)} has {end - start} bytes, but the shape {shown(shape)} of {dtype}")
    checksum = None if checksums is None else checksums[name]
    if checksum is not None and not isinstance(checksum, str):
        raise ValueError(f"the tensor {shown(name)} has the invalid checksum {shown(checksum)}")
    return Entry(dtype, tuple(shape), begin + start, begin + end, checksum)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _LARGEST for value in values)


def _check_places(tensors: Mapping[str, Entry], begin: int, size: int) -> None:
    """Checks that the tensors fill the rest of the file without gaps or overlaps."""
    end = begin
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            what = "overlaps the one before it" if entry.start < end else "does not follow the one before it"
            raise ValueError(f"the tensor {shown(name)} {what}")
        end = entry.end
    if end != size:
        raise ValueError(f"it has {size} bytes, but its header says {end}{': it is truncated' if size < end else ''}")


def check_version(version: Any, header: Header, name: str, newest: int = VERSION) -> None:
    """Checks the version in a file's metadata, and warns if the file has no checksums.

    Args:
        version: The version in the metadata.
        header: The header.
        name: The file's name for messages.
        newest: The highest known version.

    Raises:
        CheckpointError: If the version is unknown, or does not match the presence of checksums.
    """
    if type(version) is not int or not 1 <= version <= newest:
        newer = type(version) is int and version > newest
        raise CheckpointError(
            f"{name} has the checkpoint version {shown(version)}; this ort_trainer reads 1 to {newest}"
            + (": it was written by a newer version, so update ort_trainer" if newer else "")
        )
    if (version > 1) != header.sealed:
        has = "checksums" if header.sealed else "no checksums"
        raise CheckpointError(f"{name} is damaged: it has the checkpoint version {version}, but {has}")
    if not header.sealed:
        warn(
            f"{name} was written by an earlier ort_trainer, without checksums, so damage to it can't be detected: "
            "load it and save it again"
        )


def verify(file: BinaryIO, header: Header, name: str, tensors: Iterable[str] | None = None) -> None:
    """Compares tensors with their checksums; does nothing for a file without checksums.

    Args:
        file: Open and seekable.
        header: The file's header.
        name: The file's name for messages.
        tensors: Names of the tensors; all by default.

    Raises:
        CheckpointError: If the file is damaged; the message names the tensors.
    """
    _refuse(damaged_tensors(file, header, name, tensors), name)


def damaged_tensors(file: BinaryIO, header: Header, name: str, tensors: Iterable[str] | None = None) -> list[str]:
    """Returns the names of the tensors that do not match their checksums; for the arguments see :func:`verify`.

    Raises:
        CheckpointError: If the file is truncated meanwhile.
    """
    if not header.sealed:
        return []
    checksums = {}
    for tensor in header.tensors if tensors is None else tensors:
        entry = header.tensors[tensor]
        checksum = xxhash.xxh3_64()
        file.seek(entry.start)
        for start in range(entry.start, entry.end, _PIECE):
            piece = memoryview(bytearray(min(_PIECE, entry.end - start)))
            _fill(file, piece, name)
            checksum.update(piece)
        checksums[tensor] = checksum.hexdigest()
    return _different(header, checksums)


def read_tensors(file: BinaryIO, header: Header, name: str, tensors: Iterable[str]) -> dict[str, Array]:
    """Reads tensors and compares them with their checksums.

    Args:
        file: Open and seekable.
        header: The file's header.
        name: The file's name for messages.
        tensors: Names of the tensors.

    Returns:
        The bytes of each tensor, in its own memory: uint8, one dimension.

    Raises:
        CheckpointError: If the file is damaged; the message names the tensors.
    """
    arrays, checksums = {}, {}
    for tensor in tensors:
        entry = header.tensors[tensor]
        arrays[tensor] = np.empty(entry.end - entry.start, np.uint8)
        checksum = xxhash.xxh3_64()
        file.seek(entry.start)
        for piece in _pieces(arrays[tensor]):
            _fill(file, piece, name)
            checksum.update(piece)
        checksums[tensor] = checksum.hexdigest()
    if header.sealed:
        _refuse(_different(header, checksums), name)
    return arrays


def _fill(file: BinaryIO, piece: memoryview, name: str) -> None:
    """Reads the next bytes of a file into memory."""
    if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
        raise CheckpointError(f"{name} is damaged: it became shorter while it was read")


def _different(header: Header, checksums: Mapping[str, str]) -> list[str]:
    """Returns the names of the tensors whose checksums differ from those in the header."""
    return [tensor for tensor, checksum in checksums.items() if checksum != header.tensors[tensor].checksum]


def _refuse(damaged: list[str], name: str) -> None:
    """Raises a CheckpointError if any tensors are damaged."""
    if damaged:
        raise CheckpointError(
            f"{name} is damaged: {shown(damaged)} {'does' if len(damaged) == 1 else 'do'} not match the stored "
            "checksum, so nothing was loaded. Load an earlier checkpoint, or a copy of this one"
        )
