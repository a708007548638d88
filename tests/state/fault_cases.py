"""Runs every writer into every fault, and writes errors by case as JSON. Run by test_faults.py."""

from __future__ import annotations

import copy
import json
import re
import tempfile
import traceback
from pathlib import Path

import torch

from ort_trainer import CheckpointManager
from ort_trainer.api import CheckpointState
from ort_trainer.state import load_checkpoint_file

from ..helpers import MLP, mlp_batches, mlp_trainer
from .faults import FAULTS, MOUNTED, Fault, free, own_mounts

BATCHES = mlp_batches(3)
CASES = {
    "full disk": ["save", "manager", "thread", "export"],
    "limited files": ["save", "manager", "onnx", "debug", "artifacts"],
    "vanished folder": ["save", "manager", "thread", "onnx"],
    "vanishing folder": ["save", "manager"],
    "no permission": ["save", "manager"],
    "read-only disk": ["save", "thread"],
}


class Writers:
    """All functions that write files, each with its own folder."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = MLP()
        self.trainer, self.twin = mlp_trainer(model=copy.deepcopy(model)), mlp_trainer(model=model)
        self.managers: dict[Path, CheckpointManager] = {}
        self.step()
        with tempfile.TemporaryDirectory() as folder:
            self.trainer.export_artifacts(folder)
            self.state = CheckpointState.load_checkpoint(Path(folder) / "checkpoint")

    def step(self) -> None:
        """Trains on, and checks that the faults have not changed the training."""
        batch = BATCHES[self.trainer.train_step_info.step % 3]
        assert torch.equal(self.trainer.train_step(*batch)[0], self.twin.train_step(*batch)[0])

    def save(self, folder: Path) -> None:
        self.trainer.save_checkpoint(folder / "a.ortckpt", overwrite=True)

    def manager(self, folder: Path, later: bool = False) -> None:
        if folder not in self.managers:
            self.managers[folder] = CheckpointManager(folder, keep_last=2, async_save=later)
        self.managers[folder].save(self.trainer)
        self.managers[folder].wait()

    def thread(self, folder: Path) -> None:
        self.manager(folder, later=True)

    def export(self, folder: Path) -> None:
        self.trainer.export_artifacts(folder)

    def onnx(self, folder: Path) -> None:
        self.trainer.save_as_onnx(folder / "a.onnx")

    def debug(self, folder: Path) -> None:
        paths = {"model_with_gradient_graph_path": str(folder / "graph.onnx")}
        mlp_trainer({"debug": {"graph_save_paths": paths}}, model=MLP()).prepare(BATCHES[0])

    def artifacts(self, folder: Path) -> None:
        CheckpointState.save_checkpoint(self.state, folder / "state")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def case(fault: Fault, writers: Writers, name: str) -> None:
    """Checks a write, a fault, further training, and another write."""
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    folder.chmod(0o755)
    write = getattr(writers, name)
    try:
        fault.prepare(folder)
        write(folder)
        before = content(folder)
        writers.step()
        with fault.happens(folder):
            try:
                write(folder)
            except OSError as error:
                message, number = str(error), error.errno
            else:
                raise AssertionError("there was no error")
        assert number == fault.number, message
        assert re.search(f"can't write '{re.escape(str(folder))}.*{fault.way_out}", message), message
        assert content(folder) == before, sorted(content(folder))
        writers.step()
        write(folder)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        if name in ("save", "manager", "thread"):
            saved = load_checkpoint_file(max(folder.glob("*.ortckpt")))[0]["model"]["full_precision"]
            for key, value in writers.trainer.state_dict(pytorch_format=True).items():
                assert (saved[key] == value.numpy()).all(), key
    finally:
        free(folder)


def main(file: Path) -> None:
    writers, refused = Writers(), own_mounts()
    found: dict[str, str] = {}
    for kind, names in CASES.items():
        for name in names:
            found[f"{kind}, {name}"] = ""
            if kind in MOUNTED and refused:
                found[f"{kind}, {name}"] = f"skip: nothing can be mounted here: {refused}"
                continue
            try:
                case(FAULTS[kind], writers, name)
            except Exception:
                found[f"{kind}, {name}"] = traceback.format_exc()
    file.write_text(json.dumps(found))
