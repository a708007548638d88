"""All readers of files, each with valid files of its format and the errors with which it refuses others."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx.parser
import torch
from onnx.external_data_helper import convert_model_to_external_data
from torch.utils.data import DataLoader, TensorDataset

from ort_trainer import CheckpointError, CheckpointManager, ExportError, ORTTrainer, Position, amp, optim, quantize
from ort_trainer.adapters import LoRA, add_adapter, export_adapter, load_adapter, merge_adapter, save_adapter
from ort_trainer.api import CheckpointState, Module, Optimizer
from ort_trainer.api.onnx_bytes import inference_model
from ort_trainer.cli.describe import describe
from ort_trainer.engine.contained import check_contained, custom_operators
from ort_trainer.engine.programs.program import Program
from ort_trainer.fit import EarlyStopping
from ort_trainer.onnx.load import load_onnx_model
from ort_trainer.onnx.module import OnnxModule
from ort_trainer.state import load_checkpoint_file, save_checkpoint_file
from ort_trainer.step import Step
from ort_trainer.step.cache import Export, ExportCache
from ort_trainer.upstream import read_upstream_checkpoint, upstream_checkpoint_bytes, write_upstream_checkpoint

from ..api.artifacts import make_artifacts
from ..artifacts.test_upstream_checkpoint import sample
from ..helpers import MLP, mlp_batches, mlp_trainer
from .attacks import cleared

LEGACY = Path(__file__).parent.parent / "state" / "data" / "legacy_1_16.h5"
UPSTREAM = Path(__file__).parent.parent / "golden" / "data" / "artifacts-upstream" / "mlp"
_OF_MODELS = (ExportError, ValueError)


@dataclass(frozen=True)
class Reader:
    """A reader.

    Attributes:
        sound: Valid files.
        read: Reads a file in a folder of its own.
        refusals: The errors that it may raise for all others.
        file: The name of the file in its folder.
        form: Its container.
        beside: Other files of the folder.
        by_path: Whether a path is read, not bytes.
    """

    sound: tuple[bytes, ...]
    read: Callable[[Path], Any]
    refusals: tuple[type[Exception], ...] = (CheckpointError,)
    file: str = "file"
    form: str = "sealed"
    beside: Mapping[str, bytes] = field(default_factory=dict)
    by_path: bool = True

    def prepared(self, folder: Path) -> Path:
        """Returns the path of the file, which is not yet there, beside which all others are."""
        for name, content in self.beside.items():
            (cleared(folder / "case") / name).write_bytes(content)
        return folder / "case" / self.file if self.beside else cleared(folder / "case") / self.file

    def accepts(self, data: bytes, folder: Path) -> bool:
        """Returns whether it reads a file; any error that is not a refusal is raised."""
        path = self.prepared(folder)
        path.write_bytes(data)
        return self.accepts_path(path)

    def accepts_path(self, path: Path) -> bool:
        """Returns whether it reads what is at a path."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files without checksums
            try:
                self.read(path)
            except self.refusals:
                return False
        return True


def from_bytes(read: Callable[[bytes], Any]) -> Callable[[Path], Any]:
    return lambda path: read(path.read_bytes())


def _checkpoint() -> bytes:
    file = io.BytesIO()
    weights = {"a": np.ones((3, 4), np.float32), "b": np.arange(5), "empty": np.zeros((0, 2), np.float16)}
    save_checkpoint_file(file, {"model": {"full_precision": weights}, "step": 3}, {"x": [1, 2.5, {"y": "z"}]})
    return file.getvalue()


class Carrying(MLP):
    """A model that leaves a tensor and a number for its next step."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.count = torch.zeros(3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + 0.1 * self.mean
        self.mean, self.count = y.detach().mean(0), self.count + 1
        return y + 0.001 * self.count


def state_of_all(trainer: ORTTrainer) -> Any:
    """Returns a trainer's state, and that of all generators."""
    random_state = [torch.get_rng_state(), np.random.get_state()[1], list(random.getstate()[1])]
    return trainer.state_dict(), random_state


def same(a: Any, b: Any) -> bool:
    """Returns whether two states are equal, bit for bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (np.ndarray, torch.Tensor)):
        a, b = np.asarray(a), np.asarray(b)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and (a == b or a != a)


@contextlib.contextmanager
def unchanged_if_refused(trainer: ORTTrainer) -> Iterator[None]:
    """Asserts that an error in the block has changed nothing; afterwards, restores the trainer."""
    before, numbers = state_of_all(trainer), (torch.get_rng_state(), np.random.get_state(), random.getstate())
    try:
        yield
    except OSError:  # of what it writes
        raise
    except Exception:
        assert same(state_of_all(trainer), before), "a refused file has changed something"
        raise
    finally:
        if not same(state_of_all(trainer), before):
            trainer.load_state_dict(before[0])
        torch.set_rng_state(numbers[0])
        np.random.set_state(numbers[1])
        random.setstate(numbers[2])


def loader() -> DataLoader[Any]:
    data = TensorDataset(torch.randn(24, 8), torch.randint(0, 3, (24,)))
    return DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))


def _of_a_trainer(trainer: ORTTrainer, folder: Path) -> Reader:
    """Returns the reader of checkpoints of a trainer that has begun."""
    batches = mlp_batches(5)
    for batch in batches:
        trainer.train_step(*batch)
    trainer.save_checkpoint(folder / "file", overwrite=True, user_dict={"epoch": 3, "scores": [0.5, {"a": (1, {2})}]})

    def read(path: Path) -> None:
        with unchanged_if_refused(trainer):
            trainer.load_checkpoint(path)
        # What it has read can be used.
        trainer.load_checkpoint(path)
        trainer.train_step(*batches[0])
        trainer.load_checkpoint(folder / "file")

    return Reader(((folder / "file").read_bytes(),), read, (CheckpointError, RuntimeError, ValueError))


def _our_trainer(folder: Path) -> Reader:
    options = {
        "mixed_precision": {"enabled": True, "loss_scaler": amp.DynamicLossScaler()},
        "batch": {"gradient_accumulation_steps": 3},
        "lr_scheduler": optim.LinearWarmupLRScheduler(20, 0.1),
        "utils": {"grad_norm_clip": False},
    }
    return _of_a_trainer(mlp_trainer(options, model=Carrying()), folder)


def _torchs_optimizer(folder: Path) -> Reader:
    model = MLP()
    optimizer = torch.optim.AdamW([{"params": [model.fc1.weight], "lr": 0.1}, {"params": [model.fc2.weight]}])
    return _of_a_trainer(mlp_trainer(None, optimizer, model), folder)


def _run(folder: Path) -> Reader:
    manager, trainer, position = CheckpointManager(folder / "run"), mlp_trainer(), Position(loader())
    for _ in position.epochs(1):
        for batch in position.batches():
            trainer.train_step(*batch)
            if position.batch == 2:
                file = manager.save(trainer, position, {"eval": 1.0}, user_dict={"epoch": 1})
                break
        break

    def read(path: Path) -> None:
        again, here = CheckpointManager(path.parent), Position(loader())
        with unchanged_if_refused(trainer):
            again.resume(trainer, here)
            assert again.latest in (None, path)
            for _ in here.epochs(1):
                for batch in here.batches():
                    trainer.train_step(*batch)
            again.save(trainer, here, {"eval": 2.0})

    others = {"latest": (folder / "run" / "latest").read_bytes()}
    # A ValueError says that loader or epochs do not fit.
    return Reader((file.read_bytes(),), read, (CheckpointError, RuntimeError, ValueError), file.name, beside=others)


def _fit(folder: Path) -> Reader:
    trainer = mlp_trainer()

    def fit(data: DataLoader[Any], path: Path, epochs: int, resume: bool) -> None:
        stopping = [EarlyStopping()]
        trainer.fit(data, mlp_batches(1), epochs, checkpoints=path, resume=resume, callbacks=stopping, progress=False)

    fit(loader(), folder / "fit", 1, False)

    def read(path: Path) -> None:
        data = loader()
        with unchanged_if_refused(trainer):
            fit(data, path.parent, 2, True)

    content = (folder / "fit" / "last.ortckpt").read_bytes()
    return Reader((content,), read, (CheckpointError, RuntimeError, ValueError), "last.ortckpt")


def _model() -> onnx.ModelProto:
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
    return model


def _load_model(path: Path) -> None:
    OnnxModule(load_onnx_model(path))


def _external(folder: Path) -> dict[str, Reader]:
    model = _model()
    convert_model_to_external_data(model, location="data.bin", size_threshold=0)
    onnx.save(model, folder / "model.onnx")
    content, data = ((folder / name).read_bytes() for name in ("model.onnx", "data.bin"))

    def read_beside(path: Path) -> None:
        _load_model(path.with_name("model.onnx"))

    return {
        "ONNX model with external data": Reader(
            (content,), _load_model, (ExportError,), "model.onnx", "ONNX", {"data.bin": data}
        ),
        "external data": Reader((data,), read_beside, (ExportError,), "data.bin", "bytes", {"model.onnx": content}),
    }


def _adapters(folder: Path) -> dict[str, Reader]:
    base = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[N,4] x) => (float[N,4] y) '
        "{ a = MatMul(x, v) b = Relu(a) y = Gemm(b, w, c) }"
    )
    base.graph.node[2].input[1:] = ["head.weight", "head.bias"]
    weights = {"v": np.ones((4, 4)), "head.weight": np.eye(4), "head.bias": np.ones(4)}
    for name, value in weights.items():
        base.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    base.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layer', 'node_MatMul']")
    adapted = add_adapter(base, LoRA(2, dropout=0.1, targets=["layer"], also_train=["head.bias"]))
    save_adapter(adapted, folder / "adapter")
    settings, tensors = "adapter_config.json", "adapter_model.safetensors"
    files = {name: (folder / "adapter" / name).read_bytes() for name in (settings, tensors)}

    def read(path: Path) -> None:
        merge_adapter(load_adapter(base, path.parent))

    def use(path: Path) -> None:
        refused = []
        for action in (
            _load_model,
            lambda path: add_adapter(path, LoRA(1, targets="linear")),
            merge_adapter,
            lambda path: save_adapter(path, path.with_name("saved")),
            lambda path: export_adapter(path, path.with_name("adapter"), path.with_name("base")),
            lambda path: quantize(path, "int8"),
        ):
            try:
                action(path)
            except _OF_MODELS as error:
                refused.append(error)
        if isinstance(next(iter(refused), None), ExportError):
            raise refused[0]

    return {
        "adapter's settings": Reader(
            (files[settings],), read, (ValueError,), settings, "JSON", {tensors: files[tensors]}
        ),
        "adapter's weights": Reader(
            (files[tensors],), read, (ValueError,), tensors, beside={settings: files[settings]}
        ),
        "adapted ONNX model": Reader((adapted.SerializeToString(),), use, _OF_MODELS, "model.onnx", "ONNX"),
    }


def _read_wire(data: bytes) -> None:
    check_contained(data + b"", "the model")
    custom_operators(data)
    inference_model(data, {}, ["y"])


def _read_upstreams(data: bytes) -> Any:
    state = CheckpointState.load_checkpoint(UPSTREAM / "checkpoint")
    if b"SGDOptimizerV2" not in data:
        return Module(data, state)
    return Optimizer(data, Module(UPSTREAM / "training_model.onnx", state))


def _upstream_in_two(folder: Path) -> dict[str, Reader]:
    write_upstream_checkpoint(folder / "checkpoint", sample(), limit=100)
    content, data = ((folder / name).read_bytes() for name in ("checkpoint", "checkpoint.data"))

    def read_beside(path: Path) -> None:
        read_upstream_checkpoint(path.with_name("checkpoint"))

    return {
        "upstream in two files": Reader(
            (content,), read_upstream_checkpoint, file="checkpoint", form="bytes", beside={"checkpoint.data": data}
        ),
        "upstream's second file": Reader(
            (data,), read_beside, file="checkpoint.data", form="bytes", beside={"checkpoint": content}
        ),
    }


def _export() -> bytes:
    known = {
        "state": {"w": "w"},
        "guards": ("dim('n') > 2",),
        "fixed": {"m": 3},
        "stored": _model().SerializeToString(),
    }
    graph = Step(kind="training", inputs=(), outputs=(), loss="loss", **known)
    return Export(graph, {"m": "here"}).to_bytes()


def _kept_export(folder: Path) -> tuple[bytes, Reader]:
    """Returns an export as a trainer keeps it, and the reader of its file."""
    with mock.patch.dict(os.environ, ORT_TRAINER_CACHE=str(folder / "cache")):
        mlp_trainer().train_step(*mlp_batches(1)[0])
    cache = ExportCache(folder / "cache", 1 << 30)
    keys = [path.stem for path in sorted(cache.folder.glob("*.export"))]
    contents = {key: cache.load(key)[0] for key in keys}
    key, content = next((key, content) for key, content in contents.items() if content and b'"calls"' in content)

    def read(path: Path) -> None:
        content, problem = ExportCache(path.parent, 1 << 30).load(path.stem)
        if content is None:
            raise ValueError(problem)
        _read_export(content)

    return content, Reader((cache.path(key).read_bytes(),), read, (ValueError,), f"{key}.export", "bytes")


def _read_export(data: bytes) -> None:
    export = Export.from_bytes(data)
    for step in (export.step, *export.backward):
        for text in step.programs.programs.values() if step.programs is not None else ():
            Program.from_text(text)


@functools.cache
def readers() -> dict[str, Reader]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A trainer's own file is read again after each attack.
        kept = Path(tempfile.mkdtemp(prefix="ort_trainer_hostile_"))
        return _readers(folder, kept)


def _readers(folder: Path, kept: Path) -> dict[str, Reader]:
    artifacts = make_artifacts(dropout=True)
    state = functools.partial(CheckpointState.load_checkpoint_from_buffer, artifacts.checkpoint)
    content, kept_export = _kept_export(folder)
    upstreams = tuple((UPSTREAM / f"{kind}_model.onnx").read_bytes() for kind in ("training", "optimizer"))

    def module(path: Path) -> None:
        Module(artifacts.training, state(), path)

    def optimizer(path: Path) -> None:
        Optimizer(path, Module(artifacts.training, state()))

    (kept / "torch").mkdir()
    model = _model().SerializeToString()
    return {
        "checkpoint": Reader((_checkpoint(),), load_checkpoint_file),
        "checkpoint of a trainer": _our_trainer(kept),
        "checkpoint of PyTorch's optimizer": _torchs_optimizer(kept / "torch"),
        "checkpoint of a run": _run(folder),
        "checkpoint of fit": _fit(folder),
        "training API's checkpoint": Reader((artifacts.checkpoint, artifacts.nominal), CheckpointState.load_checkpoint),
        "legacy": Reader((LEGACY.read_bytes(),), load_checkpoint_file, form="HDF5"),
        "upstream": Reader((upstream_checkpoint_bytes(sample()),), read_upstream_checkpoint, form="bytes"),
        **_upstream_in_two(folder),
        "upstream's models": Reader(upstreams, from_bytes(_read_upstreams), (ValueError,), form="ONNX", by_path=False),
        "artifact": Reader((artifacts.training,), lambda path: Module(path, state()), (ValueError,), form="ONNX"),
        "evaluation artifact": Reader((artifacts.evaluation,), module, (ValueError,), form="ONNX"),
        "optimizer artifact": Reader((artifacts.optimizer,), optimizer, (ValueError,), form="ONNX"),
        "ONNX bytes": Reader(
            (artifacts.evaluation,), from_bytes(_read_wire), (ValueError,), form="ONNX", by_path=False
        ),
        "ONNX model": Reader((model,), _load_model, (ExportError,), "model.onnx", "ONNX"),
        **_external(folder),
        **_adapters(folder),
        "export": Reader((_export(), content), from_bytes(_read_export), (ValueError,), form="export", by_path=False),
        "kept export": kept_export,
    }


def describes(path: Path) -> None:
    """Asserts that ``ort-trainer inspect`` describes what is at a path, or says what is wrong with it."""
    with contextlib.suppress(ValueError, FileNotFoundError, ImportError):
        describe(path)
