"""Writes golden files: ``python -m tests.golden.make [NAME ...]``, from the folder of the repository.

Each is a small file of state in a format and version that this package writes or has written, or another program has;
``tests/golden/test_golden.py`` reads them all, for ever, and compares them with the numbers beside, ``<file>.json``.

When a format gets a new version: add an entry to :data:`FILES` whose name has the version, run this, and commit the new
file with its numbers. An existing file is never written again, because the program that wrote it is gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ort_trainer import CheckpointManager, Position, optim
from ort_trainer.core.sealed import DTYPES, read_header, read_tensors
from ort_trainer.core.sealed import write as write_sealed
from ort_trainer.state import save_checkpoint_file

from ..upstream import artifacts as upstream_artifacts
from .trainers import TRAINERS, _trainer, batch, losses_of_an_export, train, trained

DATA = Path(__file__).parent / "data"
API_KEY = "ort_trainer.checkpoint"
_SHOWN = 64  # longer tensors are compared by a hash


def plain(value: Any) -> Any:
    """Returns what was read from a file in the types of JSON, to be compared exactly."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        kind, array = type(value).__name__, value
        dtype = str(value.dtype).removeprefix("torch.")
        if isinstance(array, torch.Tensor):
            array = (array.float() if dtype == "bfloat16" else array).numpy()
        found = {kind: dtype, "shape": list(array.shape)}
        if array.size > _SHOWN:
            return {**found, "sha256": hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()}
        return {**found, "values": array.tolist()}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {key: plain(getattr(value, key)) for key in value.__dataclass_fields__}
    if isinstance(value, (set, frozenset, bytes)):
        return repr(value)
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _with_types(path: Path) -> None:
    """A file whose user's dict has values of types that JSON lacks."""
    user = {
        "tuple": (1, (2.5, [3])),
        "sets": [{"a"}, frozenset({(1, 2)})],
        "bytes": b"\x00\xff",
        "keys": {1: {None: ()}},
    }
    save_checkpoint_file(path, {"array": np.eye(2)}, {**user, "$set": {"$tuple": [torch.ones(2)]}})


def _checkpoint(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        user = {
            "epoch": 3,
            "best": 0.1,
            "flags": [True, None, [1, 2]],
            "$tensor": {"$dict": 1},
            "half": torch.ones(2, dtype=torch.bfloat16),
            "view": torch.arange(6).reshape(2, 3).T,
            "array": np.eye(2),
            "empty": torch.zeros(0, 3),
        }
        trainer = trained(name)
        trainer.save_checkpoint(path, user)
        Path(f"{path}.losses.json").write_text(json.dumps(train(trainer, 4, 5)) + "\n")  # how it went on

    return write


def _as_version(source: str, key: str, version: int) -> Callable[[Path], None]:
    """Returns a function that writes an older version of a sealed file; version 1 had no checksums."""
    later = ("micro_batches", "trainer") if key == API_KEY else ()

    def write(path: Path) -> None:
        with (DATA / source).open("rb") as file:
            header = read_header(file, source)
            read = read_tensors(file, header, source, header.tensors)
        said = json.loads(header.metadata[key])
        metadata = {key: json.dumps({k: v for k, v in said.items() if k not in later} | {"version": version})}
        if version > 1:
            stored = {name: (DTYPES[e.dtype], e.shape, read[name]) for name, e in header.tensors.items()}
            with path.open("wb") as file:
                write_sealed(file, stored, metadata)
            return
        entries: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for name, entry in header.tensors.items():
            start, end = end, end + read[name].nbytes
            entries[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(read[name].tobytes() for name in read))

    return write


def _managed(path: Path) -> None:
    """The parts of a CheckpointManager, in the middle of an epoch."""
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder) as manager:
        trainer = TRAINERS["adam-without-window"]()
        position = Position(torch.utils.data.DataLoader(list(range(5)), shuffle=True))
        for _ in position.epochs(1):
            for done, _number in enumerate(position.batches()):
                train(trainer, done)
                if done == 2:
                    break
            break
        path.write_bytes(manager.save(trainer, position, {"eval_loss": 0.25}, {"note": "managed"}).read_bytes())


def _fitted(path: Path) -> None:
    """What ``fit`` stores for its callbacks and its history."""
    with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder) as manager:
        trainer = TRAINERS["adam-without-window"]()
        trainer.fit([batch(number) for number in range(3)], epochs=2, checkpoints=manager, progress=False)
        assert manager.latest is not None
        path.write_bytes(manager.latest.read_bytes())


def _two_processes(path: Path) -> None:
    torch.multiprocessing.spawn(_one_of_two, (str(path),), nprocs=2)


def _one_of_two(rank: int, path: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23517", "WORLD_SIZE": "2", "RANK": str(rank)}
    os.environ |= {"LOCAL_RANK": str(rank)}
    options = {"deepspeed_zero_optimization": {"stage": 1}}
    window = {"gradient_accumulation_steps": 3}
    trainer = _trainer(lambda _: optim.AdamConfig(lr=0.02), batch=window, distributed=options)
    train(trainer, rank, 2 + rank, 4 + rank, 6 + rank)
    trainer.save_checkpoint(path)
    torch.distributed.destroy_process_group()


def _of_the_older_api(path: Path) -> None:
    """A file of ``onnxruntime.capi.ort_trainer.save_checkpoint``: its own state among the user's."""
    from ort_trainer.compat.older_api import _OWN_STATE

    own = {"global_step": 4, "loss_scaler": {"loss_scale": 32768.0, "stable_steps": 3}}
    trained("adam-without-window").save_checkpoint(path, {"epoch": 2, _OWN_STATE: own})


def _artifacts(path: Path) -> None:
    """A folder with the models (metadata format 2) and checkpoints of an export, in the middle of a window."""
    trained("adam").export_artifacts(path)


def _artifacts_of_format_1(path: Path) -> None:
    """Format 1 had neither ``index_ranges`` nor ``micro_batches``: updates took the sum of the gradients."""
    import onnx

    from ort_trainer.step.contract import METADATA

    path.mkdir()
    trainer = TRAINERS["adam-without-window"]()
    train(trainer, 0, 1)
    trainer.export_artifacts(path, nominal_checkpoint=False)
    for source in path.glob("*.onnx"):
        model = onnx.load(source)
        for entry in model.metadata_props:
            if entry.key == METADATA:
                said = json.loads(entry.value)
                said.pop("index_ranges", None)
                assert said["format"] == 2 and "micro_batches" not in said, "written later than format 1"
                entry.value = json.dumps({**said, "format": 1})
        onnx.save(model, source)


def _legacy_zero(rank: int) -> Callable[[Path], None]:
    """One of the two files of a legacy run with ZeRO, as ``tests/state/test_legacy.py`` describes them."""

    def write(path: Path) -> None:
        from ..state.test_legacy import write as write_hdf5
        from ..state.test_legacy import zero_state

        weight = np.arange(12, dtype=np.float32).reshape(3, 4)
        pieces = [weight.ravel()[:5] + 100, weight.ravel()[5:] + 100]
        write_hdf5(path, zero_state(rank, pieces, weight))

    return write


def _legacy_lamb(path: Path) -> None:
    from ..state.test_legacy import options_of
    from ..state.test_legacy import write as write_hdf5

    weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    state = {
        "model": {"full_precision": {"a/w": weight}},
        "optimizer": {
            "a/w": {"Moment_1": weight + 1, "Moment_2": weight + 2},
            "shared_optimizer_state": {"Step": np.array([4])},
        },
        "trainer_options": {**options_of(), "optimizer_name": "LambOptimizer"},
        "train_step_info": {"optimization_step": 3, "step": 3},
    }
    write_hdf5(path, state)


def _of_upstream(config: Any) -> Callable[[Path], None]:
    """A file that onnxruntime-training 1.19.2 itself wrote after two updates."""

    def write(path: Path) -> None:
        from ..artifacts.upstream_runs import FLAVOR, STANDARD, Upstream

        with tempfile.TemporaryDirectory() as folder:
            trainer = _trainer(lambda _: config, **STANDARD)
            trainer.prepare(batch(0))
            trainer.export_artifacts(folder, flavor=FLAVOR)
            upstream = Upstream(Path(folder), lr=0.02)
            for number in range(2):
                upstream.train(batch(number))
            for key, value in {"epoch": 3, "loss": 0.5, "name": "größe"}.items():
                upstream.state.properties[key] = value
            upstream.save(path)

    return write


def _upstream_nominal(path: Path) -> None:
    """A nominal file that onnxruntime-training 1.19.2 itself wrote."""
    from onnx import numpy_helper
    from onnxruntime.capi import _pybind_state

    tensors = [numpy_helper.from_array(np.ones((2, 3), np.float32), name).SerializeToString() for name in ("a", "b")]
    _pybind_state.save_checkpoint(tensors[:1], tensors[1:], str(path), True)


def _upstream_version_1(path: Path) -> None:
    """Version 1 differs from 2 in its number; the reader knows no other difference."""
    data = bytearray((DATA / "upstream-2-adamw").read_bytes())
    root = int.from_bytes(data[:4], "little")
    table = root - int.from_bytes(data[root : root + 4], "little", signed=True)
    place = root + int.from_bytes(data[table + 4 : table + 6], "little")
    assert data[place : place + 4] == (2).to_bytes(4, "little")
    data[place : place + 4] = (1).to_bytes(4, "little")
    path.write_bytes(data)


def _upstream_in_two_files(path: Path) -> None:
    from ort_trainer.upstream import read_upstream_checkpoint, write_upstream_checkpoint

    write_upstream_checkpoint(path, read_upstream_checkpoint(DATA / "upstream-2-adamw"), limit=0)


def _weights(path: Path) -> None:
    from safetensors.torch import save_file

    save_file(trained("adam").state_dict(pytorch_format=True), path)


def _flat(name: str) -> Callable[[Path], None]:
    """The flat dict of the older functions, which had no file of its own."""

    def write(path: Path) -> None:
        from ort_trainer.compat.training_session.flat_state import flat_state_dict

        flat = flat_state_dict(trained(name), include_optimizer_state=True)
        with path.open("wb") as file:
            np.savez_compressed(file, **{key: value.numpy() for key, value in flat.items()})

    return write


def _export(path: Path) -> None:
    """What the cache of exports keeps; version 0.1.0 wrote its file in the same way."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ORT_TRAINER_CACHE"] = folder
        losses_of_an_export()
        (kept,) = Path(folder).glob("*.export")
        path.write_bytes(kept.read_bytes())


FILES: dict[str, Callable[[Path], None]] = {
    # Checkpoints of ORTTrainer, by version.
    **{f"trainer-2-{name}.ortckpt": _checkpoint(name) for name in TRAINERS},
    "trainer-2-two-processes.ortckpt": _two_processes,
    "trainer-2-managed.ortckpt": _managed,
    "trainer-2-fit.ortckpt": _fitted,
    "trainer-2-older-api.ortckpt": _of_the_older_api,
    "trainer-3-types.ortckpt": _with_types,
    "trainer-1-adam.ortckpt": _as_version("trainer-2-adam.ortckpt", "manifest", 1),
    # Models of the training API by metadata format, and its checkpoints by version.
    "artifacts-2": _artifacts,
    "artifacts-1": _artifacts_of_format_1,
    **{
        f"api-{version}{kind}": _as_version(f"artifacts-2/{kind.removeprefix('-') or 'checkpoint'}", API_KEY, version)
        for version in (2, 1)
        for kind in ("", "-nominal_checkpoint")
    },
    # Exports in the cache, by version of the package; no other version finds them.
    "export-0.2.0.export": _export,
    # Files of other programs.
    "legacy-rank-0.h5": _legacy_zero(0),
    "legacy-rank-1.h5": _legacy_zero(1),
    "legacy-lamb.h5": _legacy_lamb,
    "upstream-2-adamw": _of_upstream(optim.AdamWConfig(lr=0.02)),
    "upstream-2-sgd": _of_upstream(optim.SGDConfig(lr=0.02)),
    "upstream-2-nominal": _upstream_nominal,
    "upstream-2-two-files": _upstream_in_two_files,
    "upstream-1": _upstream_version_1,
    **{f"artifacts-upstream/{kind}": partial(upstream_artifacts.write, kind) for kind in upstream_artifacts.MODELS},
    "weights.safetensors": _weights,
    "flat-adam.npz": _flat("adam"),
    "flat-lamb.npz": _flat("lamb"),
}


def main(names: list[str]) -> None:
    """Writes the files that do not exist yet, and the numbers of those that have none."""
    from .test_golden import CHECKS, numbers

    warnings.simplefilter("ignore")
    DATA.mkdir(exist_ok=True)
    for name, write in FILES.items():
        if not (DATA / name).exists() and (not names or name in names):
            (DATA / name).parent.mkdir(exist_ok=True)
            write(DATA / name)
            print(name)
    for name in CHECKS:
        target = DATA / f"{name}.json"
        if not target.exists():
            with tempfile.TemporaryDirectory() as folder:
                target.write_text(json.dumps(numbers(name, Path(folder))) + "\n")
            print(target.name)


if __name__ == "__main__":
    main(sys.argv[1:])
