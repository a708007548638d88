"""Sealed files: they restore what was written, refuse any damage, and work with other readers of the format."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from ort_trainer import CheckpointError
from ort_trainer.core.sealed import DTYPES, Stored, read_header, read_tensors, verify, write


def stored(tensor: torch.Tensor) -> Stored:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy()


TENSORS = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
    "flags": torch.tensor([True, False, True]),
    'a "name"/ü': torch.ones(3, dtype=torch.bfloat16),
    "large": torch.arange(3 << 20, dtype=torch.int32),  # several pieces
}


def sealed(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    write(file, {name: stored(tensor) for name, tensor in tensors.items()}, metadata or {})
    return file.getvalue()


def check(data: bytes) -> None:
    file = io.BytesIO(data)
    header = read_header(file, "the file")
    assert header.sealed
    verify(file, header, "the file")


@pytest.fixture(scope="module")
def small() -> bytes:
    return sealed({name: value for name, value in TENSORS.items() if name != "large"}, {"note": '"header_checksum":"'})


def test_round_trip_and_other_readers() -> None:
    data = sealed(TENSORS, {"note": "x"})
    file = io.BytesIO(data)
    header = read_header(file, "the file")
    assert header.sealed and header.metadata == {"note": "x"} and header.tensors.keys() == TENSORS.keys()
    found = read_tensors(file, header, "the file", ["large", "weight"])
    assert list(found) == ["large", "weight"]
    assert found["large"].tobytes() == TENSORS["large"].numpy().tobytes()
    assert header.tensors["weight"].shape == (2, 3) and header.tensors["weight"].dtype == "F32"
    theirs = safetensors.torch.load(data)
    assert theirs.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert theirs[name].dtype == tensor.dtype and torch.equal(theirs[name], tensor), name
    aligned = {
        name: entry.start % torch.empty(0, dtype=TENSORS[name].dtype).element_size()
        for name, entry in header.tensors.items()
    }
    assert not any(aligned.values())


@pytest.mark.parametrize("code", DTYPES)
def test_every_data_type_is_what_other_readers_take_it_for(code: str) -> None:
    dtype = getattr(torch, DTYPES[code])
    tensor = torch.tensor([0, 1, 1, 0], dtype=torch.uint8).repeat(8).view(torch.bool if code == "BOOL" else dtype)
    data = sealed({"t": tensor})
    ((_, theirs),) = safetensors.deserialize(data)
    assert theirs["dtype"] == code and theirs["shape"] == list(tensor.shape)
    assert bytes(theirs["data"]) == tensor.view(torch.uint8).numpy().tobytes()
    assert read_header(io.BytesIO(data), "the file").tensors["t"].dtype == code


def test_every_flipped_bit_is_found(small: bytes) -> None:
    header = read_header(io.BytesIO(small), "the file")
    places = {place: name for name, entry in header.tensors.items() for place in range(entry.start, entry.end)}
    check(small)
    for place in range(len(small)):
        damaged = bytearray(small)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CheckpointError, match="the file is damaged") as error:
            check(bytes(damaged))
        if place in places:
            assert repr(places[place]) in str(error.value), place


def test_every_cut_is_found(small: bytes) -> None:
    for length in range(len(small)):
        with pytest.raises(CheckpointError, match="the file is damaged or not a checkpoint: it has .* bytes"):
            check(small[:length])
    with pytest.raises(CheckpointError, match="it has .* bytes, but its header says"):
        check(small + b"\0")


def test_damage_is_named_in_any_piece_of_a_tensor() -> None:
    data = bytearray(sealed(TENSORS))
    entry = read_header(io.BytesIO(data), "the file").tensors["large"]
    data[entry.end - 1] ^= 128
    file = io.BytesIO(data)
    header = read_header(file, "the file")
    verify(file, header, "the file", ["weight", "empty"])
    for fail in (lambda: verify(file, header, "the file"), lambda: read_tensors(file, header, "the file", ["large"])):
        with pytest.raises(CheckpointError, match=r"is damaged: \['large'\] does not match the stored checksum"):
            fail()


def test_a_file_that_shrinks_while_it_is_read() -> None:
    file = io.BytesIO(sealed(TENSORS))
    header = read_header(file, "the file")
    file.truncate(header.tensors["large"].end - 5)
    with pytest.raises(CheckpointError, match="the file is damaged: it became shorter while it was read"):
        read_tensors(file, header, "the file", header.tensors)


def test_a_file_without_checksums_is_read() -> None:
    file = io.BytesIO(safetensors.torch.save(TENSORS, {"note": "x"}))
    header = read_header(file, "the file")
    assert not header.sealed and header.metadata == {"note": "x"}
    verify(file, header, "the file")
    assert read_tensors(file, header, "the file", ["scalar"])["scalar"].view(np.int64) == [7]


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(**changes: object) -> dict[str, object]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has 0 bytes, and its first 8 are not a valid header length"),
        (b"\xff" * 8, "not a valid header length"),
        ((2**63).to_bytes(8, "little") + b"{}", "not a valid header length"),
        (raw(b"[" * 100_000), "recursion|Stack overflow"),
        (raw(b'{"t": 1, "t": 2}'), "its header can't be read: it contains a duplicate name"),
        (raw(b"\xff\xfe{}"), "its header can't be read: .*utf-8"),
        (raw(b"9" * 10_000), "its header can't be read|its header is not that"),
        (raw([1]), "its header is not that of a safetensors file"),
        (raw({"__metadata__": {"a": 1}}), "its header is not that of a safetensors file"),
        (raw({"t": 3}), "the entry of the tensor 't' is invalid: 3"),
        (raw(tensor(extra=1), b"x" * 8), "the entry of the tensor 't' is invalid"),
        (raw(tensor(dtype="F31"), b"x" * 8), "the tensor 't' has the unknown dtype 'F31'"),
        (raw(tensor(dtype=["F32"]), b"x" * 8), "has the unknown dtype"),
        (raw(tensor(shape=[-2]), b"x" * 8), r"has the invalid shape \[-2\]"),
        (raw(tensor(shape=[True, 2]), b"x" * 8), "has the invalid shape"),
        (raw(tensor(shape=[2.0]), b"x" * 8), "has the invalid shape"),
        (raw(tensor(shape=[1] * 100), b"x" * 4), "has the invalid shape"),
        (raw(tensor(shape=[2**62, 4]), b"x" * 8), "has the invalid shape"),
        (raw(tensor(shape=[0, 2**62, 2**62], data_offsets=[0, 0])), "has the invalid shape"),
        (raw(tensor(data_offsets=[0]), b"x" * 8), r"has the invalid offsets \[0\]"),
        (raw(tensor(data_offsets=[8, 0]), b"x" * 8), "has -8 bytes, but the shape"),
        (raw(tensor(data_offsets=[0, 12]), b"x" * 12), r"has 12 bytes, but the shape \[2\] of F32"),
        (raw(tensor(data_offsets=[8, 16]), b"x" * 16), "'t' does not follow the one before it"),
        (raw(tensor(data_offsets=[2**62, 2**62 + 8]), b"x" * 8), "'t' does not follow the one before it"),
        (raw({**tensor(), "u": tensor()["t"]}, b"x" * 8), "overlaps the one before it"),
        (raw(tensor(), b"x" * 7), "its header says .*: it is truncated"),
        (raw({**tensor(), "__metadata__": {"checksums": "{}"}}, b"x" * 8), "its header does not match its checksum"),
        (raw({**tensor(), "__metadata__": {"header_checksum": "\ud800"}}, b"x" * 8), "does not match its checksum"),
    ],
)  # fmt: skip
def test_impossible_headers(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"the file is damaged or not a checkpoint: .*({message})"):
        read_header(io.BytesIO(data), "the file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: {}, "its checksums are not those of its tensors"),
        (lambda found: [1], "its checksums are not those of its tensors"),
        (lambda found: {**found, "other": "0" * 16}, "its checksums are not those of its tensors"),
        (lambda found: dict.fromkeys(found, 7), "has the invalid checksum 7"),
        (lambda found: dict.fromkeys(found, "g" * 16), r"\['t'\] does not match the stored checksum"),
    ],
)
def test_hostile_checksums_in_a_header_whose_own_is_right(
    change: Callable[[dict], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps = json.dumps
    monkeypatch.setattr(
        json, "dumps", lambda value, **kw: dumps(change(value) if isinstance(value.get("t"), str) else value, **kw)
    )
    data = sealed({"t": torch.ones(2)})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=message):
        check(data)


def test_what_can_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="t is a tensor of dtype complex128, which a checkpoint can't hold"):
        sealed({"t": torch.ones(2, dtype=torch.complex128)})
    monkeypatch.setattr("ort_trainer.core.sealed._LONGEST_HEADER", 1000)
    with pytest.raises(ValueError, match="bytes of text, but a checkpoint holds at most 1000: store long lists"):
        sealed({}, {"note": "x" * 1000})
