"""Files as trees of dicts, lists, numbers, texts and bytes, and such trees as files with correct checksums.

An attacker can write any tree, so a file is attacked by changing its tree: see :mod:`tests.hostile.attacks`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h5py
import onnx
import xxhash
from google.protobuf.json_format import MessageToDict, ParseDict

from ort_trainer.core.sealed import read_header, read_tensors

__all__ = ["CONTAINERS", "DEEP", "Container", "Twin"]

DEEP = "<100,000 lists>"
"""A text in whose place JSON has lists within lists."""
_NO_CHECKSUM = "0" * 16


class Twin(str):
    """A key of JSON that is equal to no other, so that an object can have the same one twice."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True)
class Container:
    """A file format.

    Attributes:
        tree: Returns a file's tree.
        file: Returns a tree's file; any error means that there is no such file.
    """

    tree: Callable[[bytes], Any]
    file: Callable[[Any], bytes]


def _as_text(value: Any) -> str:
    """Returns JSON; a text at the top stays as it is."""
    return _dumped(value) if not isinstance(value, str) or value == DEEP else value


def _dumped(value: Any) -> str:
    return json.dumps(value, default=lambda part: part.hex()).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000)


def _parsed(text: str) -> Any:
    """Returns the value of JSON with objects or lists; other text as it is."""
    try:
        return json.loads(text) if text[:1] in "{[" else text
    except ValueError:
        return text


def _sealed_tree(data: bytes) -> Any:
    header = read_header(io.BytesIO(data), "the file")
    contents = read_tensors(io.BytesIO(data), header, "the file", header.tensors)
    return {
        "metadata": {key: _parsed(text) for key, text in header.metadata.items()},
        "tensors": {
            name: {"dtype": entry.dtype, "shape": list(entry.shape), "data": contents[name].tobytes()}
            for name, entry in header.tensors.items()
        },
    }


def _sealed_file(tree: Any) -> bytes:
    metadata = {key: _as_text(value) for key, value in tree["metadata"].items()}
    contents = [tensor.get("data", b"") for tensor in tree["tensors"].values()]
    checksums = {name: xxhash.xxh3_64_hexdigest(data) for name, data in zip(tree["tensors"], contents, strict=True)}
    metadata |= {"checksums": json.dumps(checksums), "header_checksum": _NO_CHECKSUM}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for (name, tensor), data in zip(tree["tensors"].items(), contents, strict=True):
        others = {key: value for key, value in tensor.items() if key != "data"}
        header[name] = {**others, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    mark = b'"header_checksum":"'
    text = text.replace(mark + _NO_CHECKSUM.encode(), mark + xxhash.xxh3_64_hexdigest(text).encode())
    return text + b"".join(contents)


def _onnx_tree(data: bytes) -> Any:
    return _with_metadata(MessageToDict(onnx.ModelProto.FromString(data)), _parsed)


def _onnx_file(tree: Any) -> bytes:
    return bytes(ParseDict(_with_metadata(tree, _as_text), onnx.ModelProto()).SerializeToString())


def _with_metadata(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a model's tree in which the values of all metadata are changed."""
    if isinstance(value, list):
        return [_with_metadata(part, change) for part in value]
    if not isinstance(value, dict):
        return value
    changed = {key: _with_metadata(part, change) for key, part in value.items() if key != "metadataProps"}
    if isinstance(value.get("metadataProps"), list):
        changed["metadataProps"] = [
            {**entry, "value": change(entry["value"])} if isinstance(entry, dict) and "value" in entry else entry
            for entry in value["metadataProps"]
        ]
    elif "metadataProps" in value:
        changed["metadataProps"] = value["metadataProps"]
    return changed


def _headed_tree(data: bytes) -> tuple[Any, bytes]:
    """Returns the JSON at the beginning, after eight bytes with its length, and the rest."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def _headed_file(head: Any, *rest: bytes) -> bytes:
    text = _dumped(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *rest])


def _export_tree(data: bytes) -> Any:
    head, rest = _headed_tree(data)
    steps = []
    for length in head.pop("lengths"):
        about, graph = _headed_tree(rest[:length])
        rest = rest[length:]
        about["step"] = _parsed(about["step"])
        step: dict[str, Any] = {"about": about, "graph": graph}
        if about["programs"]:
            programs, constants = _headed_tree(graph)
            programs["programs"] = {key: _parsed(text) for key, text in programs["programs"].items()}
            step["graph"] = {"head": programs, "constants": constants}
        steps.append(step)
    return {"head": head, "steps": steps}


def _export_file(tree: Any) -> bytes:
    steps = []
    for step in tree["steps"]:
        about, graph = step["about"], step["graph"]
        if isinstance(graph, dict):
            head = graph["head"]
            if isinstance(head.get("programs"), dict):
                head = {**head, "programs": {key: _as_text(value) for key, value in head["programs"].items()}}
            graph = _headed_file(head, graph["constants"])
        if "step" in about:
            about = {**about, "step": _as_text(about["step"])}
        steps.append(_headed_file(about, graph))
    return _headed_file({**tree["head"], "lengths": [*map(len, steps)]}, *steps)


def _hdf5_tree(data: bytes) -> Any:
    def tree(group: Any) -> Any:
        return {name: tree(part) if isinstance(part, h5py.Group) else part[()] for name, part in group.items()}

    with h5py.File(io.BytesIO(data)) as file:
        return tree(file)


def _hdf5_file(tree: Any) -> bytes:
    def put(group: Any, parts: Any) -> None:
        for name, part in parts.items():
            if isinstance(part, dict):
                put(group.create_group(name), part)
            else:
                group[name] = part

    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        put(opened, tree)
    return file.getvalue()


CONTAINERS = {
    "sealed": Container(_sealed_tree, _sealed_file),
    "JSON": Container(json.loads, lambda tree: _dumped(tree).encode()),
    "ONNX": Container(_onnx_tree, _onnx_file),
    "export": Container(_export_tree, _export_file),
    "HDF5": Container(_hdf5_tree, _hdf5_file),
    "bytes": Container(lambda data: data, lambda data: data),
}
