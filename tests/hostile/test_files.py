"""Damaged and malicious files: each reader refuses them with its own error, and does nothing else."""

from __future__ import annotations

import json
import resource
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ort_trainer import CheckpointError
from ort_trainer.state import load_checkpoint_file

from .damage import ABSURD, HEADERS, changed, sealed, truncated, with_header
from .readers import LEGACY, readers
from .watch import WATCH

# Each HDF5 file is first read in its own process.
SLOW = {"legacy": 25, "adapted ONNX model": 25, "artifact": 4, "ONNX model": 4, "upstream's models": 8}
SLOW |= {name: 8 for name in readers() if name not in SLOW and name.startswith(("checkpoint of", "adapter's"))}
SLOW |= {name: 4 for name in readers() if name not in SLOW and readers()[name].form == "ONNX"}
NAMES = sorted(readers())
# Numbers alone.
WITHOUT_FORMAT = ("external data", "upstream's second file")


@pytest.fixture(autouse=True)
def nothing_is_executed(tmp_path: Path) -> Iterator[None]:
    """Asserts that no program, pickle or library is run, and that no file named in a file is opened."""
    (tmp_path / "evil").write_text("never read")
    readers()["legacy"].accepts(LEGACY.read_bytes(), tmp_path)  # imports h5py, which asks for the platform
    WATCH.seen.clear()
    WATCH.on = True
    try:
        yield
    finally:
        WATCH.on = False
    assert not WATCH.seen
    assert (tmp_path / "evil").read_text() == "never read"


@pytest.mark.parametrize("name", NAMES)
def test_sound_files_are_read(name: str, tmp_path: Path) -> None:
    reader = readers()[name]
    assert all(reader.accepts(data, tmp_path) for data in reader.sound)


@pytest.mark.parametrize("name", NAMES)
def test_cut_off_anywhere(name: str, tmp_path: Path) -> None:
    reader = readers()[name]
    whole = reader.sound[0]
    results = [reader.accepts(data, tmp_path) for data in truncated(whole, SLOW.get(name, 1))]
    if name in ("ONNX bytes", "ONNX model", "upstream's models"):  # a truncated message can be a valid message
        assert results.count(False) > len(results) // 2
    elif name == "export":  # so can the model, which is the last part
        assert not any(results[:90])
    else:
        assert not any(results)


@pytest.mark.parametrize("name", NAMES)
def test_changed_anywhere(name: str, tmp_path: Path) -> None:
    reader = readers()[name]
    count = 160 // SLOW.get(name, 1)
    for data in reader.sound:
        results = [reader.accepts(data, tmp_path) for data in changed(data, count)]
        if name in ("checkpoint", "training API's checkpoint"):
            assert not any(results), "no byte of a sealed file may change"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_FORMAT])
def test_files_of_another_kind(name: str, tmp_path: Path) -> None:
    """Refuses other formats, wrong first bytes, empty files, noise, and absurd lengths at the beginning."""
    reader = readers()[name]
    noise = np.random.default_rng(0).bytes(2000)
    forms = {
        "checkpoint": ("sealed", "HDF5"),
        "legacy": ("sealed", "HDF5"),
        "training API's checkpoint": ("sealed", "bytes"),
    }
    read = forms.get(name, (reader.form,))  # each may read files of others with these forms
    others = [data for other in readers().values() if other.form not in read for data in other.sound]
    whole = reader.sound[0]
    starts = [absurd + whole[len(absurd) :] for absurd in ABSURD]
    for data in (b"", b"\x00", noise, noise[:8] + whole[8:], b"\x80\x04cos\nsystem\n(S'true'\ntR.", *others, *starts):
        if name == "legacy" and data in starts:
            continue  # HDF5 may start anywhere in a file
        assert not reader.accepts(data, tmp_path), data[:40]


def test_headers_that_say_what_they_should_not(tmp_path: Path) -> None:
    """Refuses them in bounded memory. The files have no checksums, so only the header can tell."""
    tracemalloc.start()
    try:
        for name in ("checkpoint", "training API's checkpoint"):
            reader = readers()[name]
            for what, change in HEADERS.items():
                assert not reader.accepts(with_header(reader.sound[0], change), tmp_path), what
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("version", [4, 5, 99, 0, -1, "2", None, 2.5, [], True, 1 << 80])
def test_other_versions(version: Any, tmp_path: Path) -> None:
    manifest = {"format": "ort_trainer checkpoint", "version": version, "state": {}, "user": {}}
    path = tmp_path / "file"
    path.write_bytes(sealed({"manifest": manifest}))
    newer = type(version) is int and version > 3
    with pytest.raises(CheckpointError, match="so update ort_trainer" if newer else "has the checkpoint version"):
        load_checkpoint_file(path)
    newer = type(version) is int and version > 3
    with pytest.raises(CheckpointError, match="so update ort_trainer" if newer else "version|is damaged"):
        path.write_bytes(sealed({"ort_trainer.checkpoint": {"version": version}}))
        readers()["training API's checkpoint"].read(path)


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "null",
        "[]",
        "3",
        "NaN",
        "[" * 50_000,
        '{"a":' * 50_000,
        "9" * 5000,
        *(
            json.dumps({"format": "ort_trainer checkpoint", "version": 2, **rest})
            for rest in (
                {},
                {"state": [], "user": {}},
                {"state": {}, "user": None},
                {"state": {"a": {"$tensor": "gone"}}, "user": {}},
                {"state": {"a": {"$tensor": "../evil"}}, "user": {}},
                {"state": {"a": {"$tensor": ["t"]}}, "user": {}},
                {"state": {"a": {"$array": {}}}, "user": {}},
                {"state": {"a": {"$array": "eighth"}}, "user": {}},  # NumPy has no such type
                {"state": {"$tensor": "t"}, "user": {}},
                {"state": 7, "user": {"$dict": 7}},
                *({"state": {}, "user": {"a": wrong}} for wrong in ({"$pairs": [1]}, {"$set": [[1]]}, {"$bytes": "x"})),
                {"state": {}, "user": {"$tuple": []}},
            )
        ),
    ],
)
def test_manifests_that_say_what_they_should_not(manifest: str, tmp_path: Path) -> None:
    import ml_dtypes

    tensors = {"t": np.ones(2, np.float32), "eighth": np.ones(2, ml_dtypes.float8_e4m3fn)}
    path = tmp_path / "file"
    path.write_bytes(sealed({"manifest": manifest}, tensors))
    with pytest.raises(CheckpointError):
        load_checkpoint_file(path)


def test_names_that_are_paths_are_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor may have any name: it is only a key of a dict, never a path."""
    monkeypatch.chdir(tmp_path)
    names = ["../evil", str(tmp_path / "evil"), "evil\0", "$(touch evil2)", "__import__('os').system('touch evil2')"]
    tensors = {f"state/{name}": np.full(2, number, np.float32) for number, name in enumerate(names)}
    state = {name: {"$array": f"state/{name}"} for name in names}
    path = tmp_path / "file"
    path.write_bytes(
        sealed({"manifest": {"format": "ort_trainer checkpoint", "version": 2, "state": state, "user": {}}}, tensors)
    )
    found, _ = load_checkpoint_file(path)
    assert [found[name].tolist() for name in names] == [[number] * 2 for number in range(len(names))]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["case", "evil", "file"]


API: dict[str, list[Any]] = {
    "export": [None, 3, []],
    "trainable": [None, "wb", [3], ["gone"]],
    "learning_rates": [None, [], ["0.1"], [float("nan")], [-1.0], [float("inf")], 0.1, [True]],
    "schedule": [[], {}, {"kind": "x"}, {"kind": "linear"}, {"kind": []}, {"kind": "linear", "total_steps": "5"}],
    "optimization_step": [-1, 0.5, None, "3", True],
    "properties": [None, [], {"a": None}, {"a": [1]}, {"a": {}}],
    "nominal": [None, 1, "yes"],
    "order": [None, [], {}, {"parameters": ["gone"]}, {"parameters": None}, {"parameters": [["w"]]}, {"other": []}],
    "has_optimizer": [],
    "strange": [3],
}


def test_checkpoints_of_the_training_api_with_wrong_fields(tmp_path: Path) -> None:
    reader = readers()["training API's checkpoint"]
    key = "ort_trainer.checkpoint"
    cases = 0
    for field, values in API.items():
        for value in values:

            def change(header: dict[str, Any], field: str = field, value: Any = value) -> None:
                found = json.loads(header["__metadata__"][key])
                found.update({field: value, "version": 1})
                header["__metadata__"][key] = json.dumps(found)

            assert not reader.accepts(with_header(reader.sound[0], change), tmp_path), (field, value)
            cases += 1
    for shape in ([1 << 62], [1 << 40, 1 << 40], [-1], None, [0.5], "3"):
        for dtype in ("float32", "O", "../evil", None):

            def blank(header: dict[str, Any], shape: Any = shape, dtype: Any = dtype) -> None:
                found = json.loads(header["__metadata__"][key])
                found.update(version=1, shapes={name: [dtype, shape] for name in found["shapes"]})
                header["__metadata__"][key] = json.dumps(found)

            assert not reader.accepts(with_header(reader.sound[1], blank), tmp_path), (shape, dtype)
            cases += 1
    assert cases > 50


def test_hdf5_that_takes_all_memory_or_time(tmp_path: Path) -> None:
    """HDF5's library allocates by a length in the file; neither this process nor its child may do so."""
    data = LEGACY.read_bytes()
    place = data.index(b"GCOL") + 8
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in (1 << 31, 1 << 34, 1 << 40, (1 << 64) - 1):
        (tmp_path / "file").write_bytes(data[:place] + size.to_bytes(8, "little") + data[place + 8 :])
        with pytest.raises(CheckpointError, match="is damaged"):
            load_checkpoint_file(tmp_path / "file")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_hdf5_of_many_ways_to_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 40 groups has two links to the next, so a walk has a million million paths."""
    monkeypatch.setattr("ort_trainer.state.legacy._SECONDS", 1)
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "file", "w") as file:
        group = file.create_group("model/full_precision")
        for _ in range(40):
            inner = group.create_group("a")
            group["b"] = inner
            group = inner
    with pytest.raises(CheckpointError, match="takes more than 1 seconds"):
        load_checkpoint_file(tmp_path / "file")


def test_hdf5_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits uses no CPU time."""
    (tmp_path / "file").write_bytes(LEGACY.read_bytes())
    for name, value in (("_SECONDS", 0), ("_LONGEST_WAIT", 1), ("_check_sections", lambda *_: time.sleep(60))):
        monkeypatch.setattr(f"ort_trainer.state.legacy.{name}", value)
    with pytest.raises(CheckpointError, match="takes more than 0 seconds"):
        load_checkpoint_file(tmp_path / "file")


# Ways to damage a file: the operation, its position in thousandths, and its bytes.
EDITS = st.lists(
    st.tuples(st.sampled_from(["cut", "flip", "put", "drop", "double"]), st.integers(0, 999), st.binary(max_size=12)),
    min_size=1,
    max_size=6,
)


def edited(data: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for what, part, given_bytes in edits:
        place = len(data) * part // 1000
        rest = place + len(given_bytes)
        if what == "cut":
            data = data[:place]
        elif what == "flip":
            data = (
                data[:place] + bytes(a ^ b for a, b in zip(data[place:rest], given_bytes, strict=False)) + data[rest:]
            )
        elif what == "put":
            data = data[:place] + given_bytes + data[rest:]
        elif what == "drop":
            data = data[:place] + data[rest:]
        else:
            data = data[:rest] + data[place:]
    return data


@pytest.mark.parametrize("name", NAMES)
def test_fuzzed(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, 200 // SLOW.get(name, 1))


def fuzz(name: str, folder: Path, examples: int) -> None:
    """Lets Hypothesis search for a file that makes a reader raise an unexpected error or crash."""
    reader = readers()[name]

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(reader.sound), EDITS)
    def run(data: bytes, edits: list[tuple[str, int, bytes]]) -> None:
        reader.accepts(edited(data, edits), folder)

    run()
