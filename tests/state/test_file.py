from __future__ import annotations

import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from ort_trainer import CheckpointError, read_user_dict
from ort_trainer.core.sealed import read_header
from ort_trainer.state import load_checkpoint_file, save_checkpoint_file

from ..helpers import mlp_batches, mlp_trainer

USER = {
    "epoch": 3,
    "best": 0.1,
    "name": "a/b",
    "flags": [True, None, [1, 2]],
    "nested": {"weights": torch.arange(3), "array": np.eye(2), "": {}},
    "$tensor": {"$dict": 1},
    "view": torch.arange(6).reshape(2, 3).T,
    "half": torch.ones(2, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "scalar": np.float32(0.5),
    "nested/weights": torch.ones(2),
}
TYPES: dict[str, Any] = {
    "tuple": (1, (2.5, [3, (4,)])),
    "sets": [{1, "a"}, frozenset({(1, 2)}), set()],
    "bytes": b"\x00\xff",
    "keys": {1: "a", (2, 3): {"b": 4}, None: (), "c": 5},
    "$set": {"$tuple": [1]},
    "random": random.Random(3).getstate(),
}


def damage(path: Path, tensor: str) -> None:
    """Flips a bit of a tensor in a file."""
    with path.open("r+b") as file:
        place = read_header(file, "the file").tensors[tensor].start
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def same(a, b) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return a == b


def test_round_trip(tmp_path: Path) -> None:
    shared = np.arange(4.0)
    state = {"model": {"a/b": shared, "tied": shared}, "step": 3}
    save_checkpoint_file(tmp_path / "a", state, USER)
    found, user = load_checkpoint_file(tmp_path / "a")
    assert same(found, state) and same(user, USER)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert len(safetensors.torch.load_file(tmp_path / "a")) == 1 + 6, "a repeated tensor is stored once"
    buffer = io.BytesIO()
    save_checkpoint_file(buffer, state, USER)
    buffer.seek(0)
    assert same(load_checkpoint_file(buffer)[1], USER)
    assert load_checkpoint_file(str(tmp_path / "a"))[0]["step"] == 3


def test_values_of_the_user_have_the_types_that_they_had(tmp_path: Path) -> None:
    save_checkpoint_file(tmp_path / "a", {}, TYPES)
    _, user = load_checkpoint_file(tmp_path / "a")
    assert user == TYPES and repr(user["tuple"]) == repr(TYPES["tuple"])
    random.Random().setstate(user["random"])
    save_checkpoint_file(tmp_path / "b", {}, USER)  # without them, every version can read the file
    for name, version in (("a", 3), ("b", 2)):
        with (tmp_path / name).open("rb") as file:
            assert json.loads(read_header(file, name).metadata["manifest"])["version"] == version
    with pytest.raises(TypeError, match="state/a has the key 1 of type int: keys must be str"):
        save_checkpoint_file(tmp_path / "c", {"a": {1: 2}}, {})
    with pytest.raises(TypeError, match="state/a is a set, which a checkpoint can't hold: .* dicts with str keys"):
        save_checkpoint_file(tmp_path / "c", {"a": {1}}, {})


def test_the_users_dict_without_the_rest(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    path = tmp_path / "a"
    save_checkpoint_file(path, {"model": {"large": torch.ones(1000), "shared": shared}}, {**USER, "shared": shared})
    damage(path, "state/model/large")  # read_user_dict does not read it
    assert same(read_user_dict(path), {**USER, "shared": shared})
    with path.open("rb") as opened:
        assert same(read_user_dict(opened), {**USER, "shared": shared})
    damage(path, "state/model/shared")
    damage(path, "user/half")
    with pytest.raises(CheckpointError, match=r"'.*a' is damaged: \['state/model/shared', 'user/half'\] do not match"):
        read_user_dict(path)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        read_user_dict(tmp_path / "b")
    with pytest.raises(TypeError, match="path must be a path or a binary file, but a int was given"):
        read_user_dict(3)
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match="was written by torch.save"):
        read_user_dict(path)


def test_existing_file_is_refused_or_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint_file(path, {"x": 1}, {})
    with pytest.raises(FileExistsError, match="already exists: choose another path, or pass overwrite=True"):
        save_checkpoint_file(path, {"x": 2}, {})
    assert load_checkpoint_file(path)[0] == {"x": 1}
    save_checkpoint_file(path, {"x": 2}, {}, overwrite=True)
    assert load_checkpoint_file(path)[0] == {"x": 2}
    assert oct(path.stat().st_mode)[-3:] == oct(0o666 & ~_umask())[-3:]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    save_checkpoint_file(path, {"x": 1}, {})

    def fail(*_) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint_file(path, {"x": 2}, {}, overwrite=True)
    monkeypatch.undo()
    assert load_checkpoint_file(path)[0] == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (
            {"a": [object()]},
            "user/a/0 is a object, which a checkpoint can't hold: .* dicts, lists, tuples, sets",
        ),
        ({"a": {1: 1j}}, "user/a/1/1 is a complex, which a checkpoint can't hold"),
        ({"a": np.array(["x"])}, "user/a is an array of dtype <U1"),
        ({"a": torch.eye(2).to_sparse()}, r"user/a is a torch.sparse_coo tensor"),
        ([1], "user_dict must be a dict"),
    ],
)
def test_what_can_not_be_stored(tmp_path: Path, user, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        save_checkpoint_file(tmp_path / "a", {}, user)
    assert not list(tmp_path.iterdir())


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="the folder .* does not exist"):
        save_checkpoint_file(tmp_path / "no" / "a", {}, {})
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load_checkpoint_file(tmp_path / "no")
    with pytest.raises(TypeError, match="path must be a path or a binary file, but a int"):
        save_checkpoint_file(3, {}, {})
    with pytest.raises(TypeError, match="path must be a path or a binary file, but a int"):
        load_checkpoint_file(3)


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint_file(path, {"x": np.ones(4)}, {})
    whole = path.read_bytes()
    for data in (b"", b"nonsense", whole[:-3], whole[: len(whole) // 2], b"\x80\x04" + b"x" * 100):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="is damaged or not a checkpoint"):
            load_checkpoint_file(path)
    for manifest, message in (
        (None, "not a checkpoint of ort_trainer. .*artifacts.trainer_state_dict.path.*; .* --to trainer' converts it"),
        ({"format": "other"}, "not a checkpoint of ort_trainer"),
        ({"format": "ort_trainer checkpoint", "version": 99}, "has the checkpoint version 99"),
        ({"format": "ort_trainer checkpoint", "version": True}, "has the checkpoint version True; .* reads 1 to 3"),
        ({"format": "ort_trainer checkpoint", "version": 2}, "has the checkpoint version 2, but no checksums"),
    ):
        metadata = None if manifest is None else {"manifest": json.dumps(manifest)}
        safetensors.torch.save_file({"t": torch.ones(1)}, path, metadata)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint_file(path)


def test_files_without_checksums_are_read_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "a"

    def write(manifest: dict) -> None:
        text = json.dumps({"format": "ort_trainer checkpoint", "version": 1, "user": {}, **manifest})
        safetensors.torch.save_file({"t": torch.ones(2)}, path, {"manifest": text})

    write({"state": {"a": {"$tensor": "t"}}})
    with pytest.warns(UserWarning, match="was written by an earlier ort_trainer, without checksums, .*save it again"):
        assert same(load_checkpoint_file(path)[0], {"a": torch.ones(2)})
    for manifest, message in (
        ({"state": {"a": {"$tensor": "b"}}}, "names the tensor 'b', which is missing"),
        ({"user": {}}, "lacks the state or the user dict"),
    ):
        write(manifest)
        with pytest.warns(UserWarning), pytest.raises(CheckpointError, match=message):
            load_checkpoint_file(path)


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    trainer = mlp_trainer()
    trainer.train_step(*mlp_batches(1)[0])
    trainer.save_checkpoint(path)
    whole = path.read_bytes()
    trainer.train_step(*mlp_batches(1)[0])
    before = trainer.state_dict()
    draw = random.Random(0)
    for _ in range(100):
        damaged = bytearray(whole)
        for place in draw.sample(range(8 * len(whole)), 3):
            damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            trainer.load_checkpoint(path)
    path.write_bytes(whole)
    damage(path, "state/optimizer/fc1.bias/Moment_2")
    with pytest.raises(CheckpointError, match=r"\['state/optimizer/fc1.bias/Moment_2'\] does not match"):
        trainer.load_checkpoint(path)
    assert same(trainer.state_dict(), before)
    path.write_bytes(whole)
    trainer.load_checkpoint(path)
    assert not same(trainer.state_dict(), before)
