"""All readers of files, each with valid files of its format and the errors with which it refuses others."""

from __future__ import annotations

import functools
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

from ort_trainer import CheckpointError, ExportError
from ort_trainer.api import CheckpointState, Module, Optimizer
from ort_trainer.api.onnx_bytes import inference_model
from ort_trainer.engine.contained import check_contained, custom_operators
from ort_trainer.export.cache import Export
from ort_trainer.export.onnx import load_onnx_model
from ort_trainer.state import load_checkpoint_file, save_checkpoint_file
from ort_trainer.step import Step
from ort_trainer.upstream import read_upstream_checkpoint, upstream_checkpoint_bytes

from ..api.artifacts import make_artifacts
from ..artifacts.test_upstream_checkpoint import sample

LEGACY = Path(__file__).parent.parent / "state" / "data" / "legacy_1_16.h5"
UPSTREAM = Path(__file__).parent.parent / "golden" / "data" / "artifacts-upstream" / "mlp"


@dataclass(frozen=True)
class Reader:
    """A reader.

    Attributes:
        sound: Valid files.
        read: Reads bytes, with a folder to write them to.
        refusals: The errors that it may raise for all others.
    """

    sound: tuple[bytes, ...]
    read: Callable[[bytes, Path], Any]
    refusals: tuple[type[Exception], ...] = (CheckpointError,)

    def accepts(self, data: bytes, folder: Path) -> bool:
        """Returns whether it reads a file; any error that is not a refusal is raised."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files without checksums
            try:
                self.read(data, folder)
            except self.refusals:
                return False
        return True


def _checkpoint() -> bytes:
    file = io.BytesIO()
    weights = {"a": np.ones((3, 4), np.float32), "b": np.arange(5), "empty": np.zeros((0, 2), np.float16)}
    save_checkpoint_file(file, {"model": {"full_precision": weights}, "step": 3}, {"x": [1, 2.5, {"y": "z"}]})
    return file.getvalue()


def _from_path(data: bytes, folder: Path) -> Any:
    path = folder / "file"
    path.write_bytes(data)
    return load_checkpoint_file(path)


def _model() -> bytes:
    branches = (
        "then_branch = t () => (float[N,M] d) { d = Neg(c) }, else_branch = e () => (float[N,M] d) { d = Abs(c) }"
    )
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18, "own" : 1]> g (float[N,3] x) => (float[N,M] y) '
        "{ a = MatMul(x, w) b = Mul(a, n) c = own.F(b) i = Constant <value = bool {1}> () "
        f"y = If (i) <{branches}> }} "
        '<domain: "own", opset_import: ["" : 18]> F (p) => (q) { q = Neg(p) }'
    )
    for name, value in {"w": np.ones((3, 4), np.float32), "n": np.float32(3)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return model.SerializeToString()


def _load_model(data: bytes, folder: Path) -> Any:
    path = folder / "model.onnx"
    path.write_bytes(data)
    return load_onnx_model(path)


def _read_wire(data: bytes, folder: Path) -> Any:
    check_contained(data + b"", "the model")
    custom_operators(data)
    return inference_model(data, {}, ["y"])


def _read_upstreams(data: bytes, folder: Path) -> Any:
    state = CheckpointState.load_checkpoint(UPSTREAM / "checkpoint")
    if b"SGDOptimizerV2" not in data:
        return Module(data, state)
    return Optimizer(data, Module(UPSTREAM / "training_model.onnx", state))


def _export() -> bytes:
    known = {"state": {"w": "w"}, "guards": ("dim('n') > 2",), "fixed": {"m": 3}, "stored": _model()}
    graph = Step(kind="training", inputs=(), outputs=(), loss="loss", **known)
    return Export(graph, {"m": "here"}).to_bytes()


def _read_export(data: bytes, folder: Path) -> Any:
    return Export.from_bytes(data)


@functools.cache
def readers() -> dict[str, Reader]:
    artifacts = make_artifacts(dropout=True)

    def module(data: bytes, folder: Path) -> Any:
        return Module(data, CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint))

    return {
        "checkpoint": Reader((_checkpoint(),), _from_path),
        "training API's checkpoint": Reader(
            (artifacts.checkpoint, artifacts.nominal), lambda data, _: CheckpointState.load_checkpoint_from_buffer(data)
        ),
        "legacy": Reader((LEGACY.read_bytes(),), _from_path),
        "upstream": Reader((upstream_checkpoint_bytes(sample()),), lambda data, _: read_upstream_checkpoint(data)),
        "upstream's models": Reader(
            tuple((UPSTREAM / f"{kind}_model.onnx").read_bytes() for kind in ("training", "optimizer")),
            _read_upstreams,
            (ValueError,),
        ),
        "artifact": Reader((artifacts.training,), module, (ValueError,)),
        "ONNX bytes": Reader((artifacts.evaluation,), _read_wire, (ValueError,)),
        "ONNX model": Reader((_model(),), _load_model, (ExportError,)),
        "export": Reader((_export(),), _read_export, (ValueError,)),
    }
