"""``generate_artifacts``: its artifacts of untrained models train like PyTorch."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ExportError, compat, optim
from ort_trainer.api import CheckpointState, Module
from ort_trainer.artifacts import LossType, OptimType, generate_artifacts

from ..helpers import MLP, MLP_DESC, mlp_batches
from .twins import Artifacts


class Convolution(nn.Module):
    """Has strides, groups, pooling, and a norm whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(6 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


class Words(nn.Module):
    """The parts of a transformer, with an embedding; the older exporter needs no com.microsoft operators for them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.norm = nn.LayerNorm(8)
        self.query = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens))
        weights = torch.softmax(self.query(hidden) @ hidden.transpose(1, 2), -1)
        return self.head(F.gelu(weights @ hidden).mean(1))


def onnx_of(model: nn.Module, sample: torch.Tensor, path: Path, **names: Any) -> Path:
    torch.onnx.export(
        model,
        (sample,),
        str(path),
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
        **{"input_names": ["x"], "output_names": ["y"], **names},
    )
    return path


def assert_trains_like(
    model: nn.Module, artifacts: Artifacts, optimizer: torch.optim.Optimizer, loss_fn: Any, batches: Any
) -> None:
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(*batch[:-1]), batch[-1])
        loss.backward()
        optimizer.step()
        assert float(artifacts.train(batch)[0]) == pytest.approx(loss.item(), rel=1e-4)
        artifacts.update()
    found = {**artifacts.checkpoint().parameters, **artifacts.checkpoint().buffers}
    for name, value in model.state_dict().items():
        if name in found and "running_var" not in name:  # ONNX defines it differently
            np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
    assert {name for name, _ in model.named_parameters()} <= found.keys()


@pytest.mark.engine
def test_a_pytorch_module(tmp_path: Path) -> None:
    model, batches = MLP(), mlp_batches(20)
    generate_artifacts(
        model,
        frozen_params=["fc1.bias"],
        loss=LossType.CrossEntropyLoss,
        optimizer=optim.AdamWConfig(lr=0.01),
        artifact_directory=tmp_path,
        additional_output_names=[],
        nominal_checkpoint=True,
        sample_batch=batches[0],
        options={"utils": {"frozen_weights": ["fc2.bias"]}},
    )
    artifacts = Artifacts(tmp_path)
    assert artifacts.module.output_names() == ["loss"]
    trained = [name for name, parameter in artifacts.state.parameters.items() if parameter.requires_grad]
    assert trained == ["fc1.weight", "fc2.weight"] and all(p.requires_grad for p in model.parameters())
    model.fc1.bias.requires_grad_(False)
    model.fc2.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.fc1.weight, model.fc2.weight], lr=0.01)
    assert_trains_like(model, artifacts, optimizer, F.cross_entropy, batches)


def test_an_optimizer_of_pytorch_and_a_description(tmp_path: Path) -> None:
    model, batches = MLP(), mlp_batches(3)
    generate_artifacts(
        model,
        loss="cross_entropy",
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        artifact_directory=str(tmp_path),
        model_desc=MLP_DESC,
        sample_batch=batches[0],
    )
    artifacts = Artifacts(tmp_path)
    assert artifacts.module.output_names() == ["loss", "logits"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert_trains_like(model, artifacts, optimizer, F.cross_entropy, batches)


@pytest.mark.parametrize("kind", ["convolution", "words"])
def test_an_onnx_model_trains_like_pytorch(kind: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = kind == "convolution"
    model = Convolution() if images else Words()

    def given(size: int) -> torch.Tensor:
        if images:
            return torch.randn(size, 3, 8, 8, generator=generator)
        return torch.randint(0, 13, (size, 6), generator=generator)

    path = onnx_of(model, given(4), tmp_path / "model.onnx")
    generate_artifacts(
        onnx.load(path) if images else path,
        loss=LossType.CrossEntropyLoss,
        optimizer=optim.SGDConfig(lr=0.05, momentum=0.9),
        artifact_directory=tmp_path / "artifacts",
        additional_output_names=["y"],
    )
    for name in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"):
        written = onnx.load(tmp_path / "artifacts" / name)
        onnx.checker.check_model(written, full_check=True)
        assert [entry.domain for entry in written.opset_import] == [""] and written.ir_version <= 10
    artifacts = Artifacts(tmp_path / "artifacts")
    assert artifacts.module.input_names() == ["x", "labels"] and artifacts.module.output_names() == ["loss", "y"]
    classes = 5 if images else 4
    for wrong, mode in ((-1, True), (classes, True), (-1, False), (classes, False)):
        labels = torch.tensor([0, wrong, 0, -100])
        with pytest.raises(
            IndexError, match=rf"'labels' has the value {wrong} at \[1\], .* 0 to {classes - 1}, or -100"
        ):
            artifacts.module.train(mode)(given(4).numpy(), labels.numpy())
    artifacts.module.train()
    batches = [(given(size), torch.randint(0, classes, (size,), generator=generator)) for size in (4, 6, 5) * 5]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    assert_trains_like(model, artifacts, optimizer, F.cross_entropy, batches)


LOSSES = {
    LossType.MSELoss: F.mse_loss,
    LossType.L1Loss: F.l1_loss,
    LossType.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: LossType, tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    path = onnx_of(model, torch.randn(2, 4), tmp_path / "model.onnx")
    generate_artifacts(path, ["weight"], loss=loss, optimizer=OptimType.SGD, artifact_directory=tmp_path, prefix="a_")
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.onnx", "a_training_model.onnx", "a_eval_model.onnx", "a_optimizer_model.onnx", "a_checkpoint"
    }  # fmt: skip
    state = CheckpointState.load_checkpoint(tmp_path / "a_checkpoint")
    module = Module(tmp_path / "a_training_model.onnx", state)
    assert module.input_names() == ["x", "target"]
    assert [parameter.requires_grad for parameter in state.parameters.values()] == [True, False]
    x, target = torch.randn(5, 4), torch.rand(5, 3)
    expected = LOSSES[loss](model(x), target)
    assert float(module(x.numpy(), target.numpy())) == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    assert model.weight.grad is not None
    np.testing.assert_allclose(state.parameters["weight"].grad, model.weight.grad, rtol=1e-5, atol=1e-7)


def with_loss() -> onnx.ModelProto:
    found = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[N,4] x, float[N,3] t) => (float loss, float[N,3] y)\n'
        "{ h = MatMul(x, w)\n y = Tanh(h)\n d = Sub(y, t)\n s = Mul(d, d)\n loss = ReduceMean<keepdims=0>(s) }"
    )
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    found.graph.initializer.append(onnx.numpy_helper.from_array(weight.numpy(), "w"))
    return found


def test_a_loss_in_the_model_and_values_within(tmp_path: Path) -> None:
    proto = with_loss()
    before = proto.SerializeToString()
    generate_artifacts(proto, artifact_directory=tmp_path, additional_output_names=["s", "h"])
    assert proto.SerializeToString() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "eval_model.onnx", "training_model.onnx"]
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    assert module.output_names() == ["loss", "y", "s", "h"]
    x, target = np.ones((2, 4), np.float32), np.zeros((2, 3), np.float32)
    loss, y, _, h = module(x, target)
    np.testing.assert_allclose(h, x @ state.parameters["w"].data, rtol=1e-6)
    assert float(loss) == pytest.approx(float((y**2).mean()), rel=1e-6)


def test_a_function_as_loss_and_one_output_of_several(tmp_path: Path) -> None:
    def huber(prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.huber_loss(prediction, label, delta=0.3)

    proto = with_loss()
    x, target, label = torch.randn(2, 4), torch.randn(2, 3), torch.randn(2, 3)
    arguments: dict[str, Any] = {"loss": huber, "artifact_directory": tmp_path, "loss_input_names": ["y", "mark"]}
    more = ["s", "h", "y"]  # not in the order of the model
    generate_artifacts(proto, sample_batch=(x, target, label), additional_output_names=more, **arguments)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    assert module.output_names() == ["loss_1", *more]
    assert module.input_names() == ["x", "t", "mark"]
    weight = torch.from_numpy(state.parameters["w"].data)
    expected = huber(torch.tanh(x @ weight), label)
    found = module(x.numpy(), target.numpy(), label.numpy())[0]
    assert float(found) == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(ValueError, match=r"sample_batch=\(x, t, label\)"):
        generate_artifacts(proto, **arguments)


def test_upstreams_enumerations() -> None:
    """Names, numbers, defaults and the order of arguments match what scripts use."""
    import inspect

    assert {kind.name: kind.value for kind in LossType} == {
        "MSELoss": 1, "CrossEntropyLoss": 2, "BCEWithLogitsLoss": 3, "L1Loss": 4
    }  # fmt: skip
    assert {kind.name: kind.value for kind in OptimType} == {"AdamW": 1, "SGD": 2}
    try:
        from onnxruntime.training import artifacts
    except ImportError:
        return
    theirs = inspect.signature(artifacts.generate_artifacts).parameters
    ours = list(inspect.signature(generate_artifacts).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs.values()]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in ours[len(theirs) :])


class Strange(Enum):
    Huber = 1


def half_frozen() -> MLP:
    model = MLP()
    model.fc1.requires_grad_(False)
    return model


PYTORCH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": 3}, TypeError, "model must be a torch.nn.Module"),
    ({"sample_batch": None}, ValueError, r"give sample_batch="),
    (
        {"requires_grad": ["fc3.bias"]},
        ValueError,
        r"unknown parameters \['fc3.bias'\] in requires_grad.*the model has \['fc1.weight'",
    ),
    ({"frozen_params": ["fc3.bias"]}, ValueError, r"unknown parameters \['fc3.bias'\] in frozen_params"),
    ({"requires_grad": "fc1.bias"}, TypeError, "requires_grad must be a list of names"),
    (
        {"requires_grad": ["fc1.bias"], "frozen_params": ["fc1.bias"]},
        ValueError,
        "both requires_grad and frozen_params: .'fc1.bias'",
    ),
    ({"requires_grad": []}, RuntimeError, "no parameter to train"),
    ({"loss": Strange.Huber}, TypeError, "loss must be a LossType .MSELoss"),
    ({"loss": 2}, TypeError, "loss must be a LossType"),
    ({"loss": nn.MSELoss}, TypeError, r"loss must be a LossType .*but the class MSELoss .*: pass an object, MSELoss"),
    (
        {"model": half_frozen(), "requires_grad": ["fc1.bias"]},
        ValueError,
        r"\['fc1.bias'\], which are frozen in the module",
    ),
    ({"optimizer": "adam"}, TypeError, "optimizer must be an OptimType .AdamW, SGD"),
    ({"ort_format": True}, ValueError, "ort_format must be False"),
    ({"custom_op_library": "ops.so"}, ValueError, "custom_op_library must be None"),
    ({"prefix": "a/b"}, ValueError, "prefix must be a str without folders"),
    (
        {"additional_output_names": ["hidden"]},
        ValueError,
        r"unknown additional_output_names \['hidden'\]: the described outputs are",
    ),
    ({"loss_input_names": ["logits"]}, ValueError, "loss_input_names is for ONNX models"),
    ({"flavor": "mine"}, ValueError, "flavor must be one of"),
    ({"nominal_checkpoint": 1}, TypeError, "nominal_checkpoint must be a bool"),
]


@pytest.mark.parametrize(("changes", "error", "message"), PYTORCH, ids=lambda value: str(value)[:40])
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    arguments = {
        "model": MLP(),
        "loss": LossType.CrossEntropyLoss,
        "optimizer": OptimType.AdamW,
        "artifact_directory": tmp_path / "artifacts",
        "sample_batch": mlp_batches(1)[0],
    }
    with pytest.raises(error, match=message):
        generate_artifacts(**{**arguments, **changes})
    assert not list(tmp_path.iterdir())


ONNX: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"loss": LossType.MSELoss}, ValueError, r"outputs \['loss', 'y'\]: choose one for the loss with loss_input_names"),
    ({"loss": LossType.MSELoss, "loss_input_names": ["z"]}, ValueError, "must be an output of the model"),
    ({"loss_input_names": ["y"]}, ValueError, "loss_input_names needs a loss: give a loss"),
    ({"loss": LossType.MSELoss, "loss_input_names": ["y", "x"]}, ValueError, "gives the label the name 'x', which"),
    ({"additional_output_names": ["z"]}, ValueError, r"unknown additional_output_names \['z'\]: no node"),
    ({"model_desc": {}}, ValueError, "model_desc is for PyTorch modules"),
    (
        {"loss": LossType.MSELoss, "loss_input_names": ["y"], "sample_batch": {}},
        ValueError,
        "sample_batch is not needed with MSELoss",
    ),
    (
        {"loss": LossType.CrossEntropyLoss, "loss_input_names": ["loss"]},
        ValueError,
        "needs the classes as second dimension",
    ),
    ({"model": "missing.onnx"}, FileNotFoundError, "missing.onnx"),
    ({"model": onnx.ModelProto()}, ExportError, "not an ONNX model"),
]


@pytest.mark.parametrize(("changes", "error", "message"), ONNX, ids=lambda value: str(value)[:40])
def test_wrong_arguments_with_an_onnx_model(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    arguments = {"model": with_loss(), "artifact_directory": tmp_path}
    with pytest.raises(error, match=message):
        generate_artifacts(**{**arguments, **changes})
    assert not list(tmp_path.iterdir())


SCRIPT = """
import onnx
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, Module, Optimizer

artifacts.generate_artifacts(
    onnx.load("model.onnx"),
    requires_grad=["weight", "bias"],
    loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.AdamW,
    artifact_directory=".",
)
import numpy as np

module = Module("training_model.onnx", CheckpointState.load_checkpoint("checkpoint"), "eval_model.onnx")
optimizer = Optimizer("optimizer_model.onnx", module)
losses = []
for _ in range(30):
    module.train()
    losses.append(float(module(np.eye(4, dtype=np.float32), np.array([0, 1, 2, 0]))))
    optimizer.set_learning_rate(0.05)
    optimizer.step()
    module.lazy_reset_grad()
assert losses[-1] < 0.6 * losses[0], losses
"""


def test_an_unchanged_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of onnxruntime-training's documentation, after ``install()``."""
    monkeypatch.chdir(tmp_path)
    onnx_of(nn.Linear(4, 3), torch.randn(2, 4), tmp_path / "model.onnx")
    compat.install()
    try:
        exec(SCRIPT, {"__name__": "script"})
    finally:
        compat.uninstall()
