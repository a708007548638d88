"""The flavor ``onnxruntime-training``: upstream's runtime trains exactly like the trainer, step by step."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from ort_trainer import ORTTrainer, optim
from ort_trainer import artifacts as our_artifacts
from ort_trainer.api import CheckpointState, Module, Optimizer
from ort_trainer.artifacts.step_models import check_portable
from ort_trainer.optim.update_writer import ParameterUpdate
from ort_trainer.upstream.write_models import optimizer_model

from ..helpers import MLP, MLP_DESC, assert_close, mlp_batches
from .upstream_runs import FLAVOR, STANDARD_OPTIONS, Upstream, make_trainer, write

pytestmark = pytest.mark.needs_training_engine


def assert_trains_alike(trainer: ORTTrainer, upstream: Upstream, batches: Any, relative: float = 1e-5) -> None:
    for number, batch in enumerate(batches):
        ours, theirs = trainer.train_step(*batch), upstream.train(batch)
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(mine, torch.from_numpy(other), relative, f"outputs of step {number}")
    for mine, other in zip(trainer.eval_step(*batches[0]), upstream.evaluate(batches[0]), strict=True):
        assert_close(mine, torch.from_numpy(other), relative, "evaluation")
    found = upstream.parameters()
    for name, value in trainer.state_dict(pytorch_format=True).items():
        if value.is_floating_point():
            assert_close(value, torch.from_numpy(found[name]), relative, name)


CONFIGS: dict[str, Any] = {
    "adamw": optim.AdamWConfig(lr=1e-2, weight_decay=0.1),
    "adam after": optim.AdamConfig(lr=1e-2, lambda_coef=0.1, max_norm_clip=0.3, weight_decay_mode=1),
    "uncorrected": optim.AdamConfig(lr=1e-3, do_bias_correction=False),
    "sgd": optim.SGDConfig(lr=0.1),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_mlp_trains_as_in_the_trainer(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(CONFIGS[kind])
    batches = mlp_batches(20)
    write(trainer, tmp_path, batches[0])
    upstream = Upstream(tmp_path, lr=CONFIGS[kind].lr)
    assert upstream.module.input_names() == ["x", "label"]
    assert upstream.module.output_names() == ["loss", "logits"]
    assert_trains_alike(trainer, upstream, batches)
    assert "Expected shape" not in capfd.readouterr().err, "a warning in every step"


class ConvNet(nn.Module):
    """For 8 x 8 images: batch norm, pooling, a buffer, and an unused layer; the loss is the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)  # before a norm, the gradient of a bias is rounding noise
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(64, 3)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("mean", torch.full((1, 8, 8), 0.1, dtype=torch.float16))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.max_pool2d(torch.relu(self.norm(self.conv(image - self.mean))), 2)
        logits = self.fc(hidden.flatten(1)) + self.frozen
        return logits, F.cross_entropy(logits, label)


IMAGES = {
    "inputs": [("image", ["batch", 1, 8, 8]), ("label", ["batch"])],
    "outputs": [("logits", ["batch", 3]), ("loss", [], True)],
}


def image_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for size in (6, *range(4, 3 + count))
    ]


def test_a_network_with_batch_norm_trains_as_in_the_trainer(tmp_path: Path) -> None:
    """Running statistics, like gradients, change in place; batch sizes vary."""
    trainer = ORTTrainer(ConvNet(), IMAGES, optim.AdamWConfig(lr=1e-2), options=STANDARD_OPTIONS)
    batches = image_batches(20)
    write(trainer, tmp_path, batches[0])
    upstream = Upstream(tmp_path, lr=1e-2)
    assert upstream.module.output_names() == ["loss", "logits"]
    trained = {name for name, parameter in upstream.state.parameters if parameter.requires_grad}
    assert trained == {"conv.weight", "norm.weight", "norm.bias", "fc.weight", "fc.bias"}
    for number, batch in enumerate(batches):
        (logits, loss), (their_loss, theirs) = trainer.train_step(*batch), upstream.train(batch)
        assert_close(loss, torch.from_numpy(their_loss), 1e-5, f"loss of step {number}")
        assert_close(logits, torch.from_numpy(theirs), 1e-5, f"logits of step {number}")
    (logits, _), (_, theirs) = trainer.eval_step(*batches[0]), upstream.evaluate(batches[0])
    assert_close(logits, torch.from_numpy(theirs), 1e-5, "evaluation")
    found = upstream.parameters()
    for name, value in trainer.state_dict(pytorch_format=True).items():
        if name not in ("norm.num_batches_tracked", "mean"):
            assert_close(value, torch.from_numpy(found[name]), 1e-5, name)
    assert not np.allclose(found["norm.running_mean"], 0.0)
    assert "mean" not in found, "it is float16, which the runtime can't load from a checkpoint"
    upstream.save(tmp_path / "trained")
    for batch in batches[:2]:  # diverge, before loading the saved state
        trainer.train_step(*batch)
    trainer.load_state_dict(our_artifacts.trainer_state_dict(tmp_path / "trained"), strict=False)
    for number, batch in enumerate(batches[:5]):
        (_, loss), (theirs, _) = trainer.train_step(*batch), upstream.train(batch)
        assert_close(loss, torch.from_numpy(theirs), 1e-5, f"loss of step {number} after the way back")


class Noisy(nn.Module):
    """Draws random numbers of all kinds, with sizes that depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.fc(x)
        noise = torch.randn_like(x) + torch.rand_like(x) + torch.empty_like(x).exponential_(3.0)
        columns = torch.randperm(8) + torch.randint(0, 3, (8,))
        return self.fc(F.dropout(x, 0.2) + 0.1 * noise + 0.01 * columns)


@pytest.mark.parametrize("kind", ["dropout", "all kinds"])
def test_random_numbers_are_drawn_in_the_graph(kind: str, tmp_path: Path) -> None:
    trainer = make_trainer(optim.SGDConfig(lr=0.5), MLP(dropout=0.3) if kind == "dropout" else Noisy())
    x = torch.randn(32, 8)
    batch = (x, x[:, :3].argmax(1))  # learnable
    write(trainer, tmp_path, batch)
    upstream = Upstream(tmp_path, lr=0.5)
    losses = {float(upstream.train(batch, update=False)[0]) for _ in range(5)}
    assert len(losses) == 5, "every call draws anew"
    assert float(upstream.evaluate(batch)[0]) == float(upstream.evaluate(batch)[0])
    upstream.module.lazy_reset_grad()
    first = float(upstream.evaluate(batch)[0])
    for _ in range(60):
        upstream.train(batch)
    assert float(upstream.evaluate(batch)[0]) < 0.7 * first
    upstream.train(mlp_batches(1, size=3)[0])  # a different size


def test_a_trained_trainer_goes_on_in_upstream(tmp_path: Path) -> None:
    """The checkpoint has weights, moments and the update count; gradients accumulate over a window of two."""
    trainer = make_trainer(optim.AdamWConfig(lr=1e-2), batch={"gradient_accumulation_steps": 2})
    batches = mlp_batches(14)
    for batch in batches[:4]:
        trainer.train_step(*batch)
    write(trainer, tmp_path, batches[0])
    upstream = Upstream(tmp_path, lr=1e-2)
    for number, batch in enumerate(batches[4:]):
        (loss, _), (other, _) = trainer.train_step(*batch), upstream.train(batch, update=number % 2 == 1)
        assert_close(loss, torch.from_numpy(other), 1e-5, f"loss of step {number}")


def test_a_rate_in_the_model(tmp_path: Path) -> None:
    """For a runtime that can't set one."""
    trainer = make_trainer(optim.SGDConfig(lr=0.1))
    batches = mlp_batches(3)
    with pytest.raises(TypeError, match="fixed_learning_rate must be a bool, but 0.1"):
        write(trainer, tmp_path, batches[0], fixed_learning_rate=0.1)
    assert not list(tmp_path.iterdir())
    write(trainer, tmp_path, batches[0], fixed_learning_rate=True)
    assert_trains_alike(trainer, Upstream(tmp_path), batches)


def test_a_nominal_checkpoint(tmp_path: Path) -> None:
    """The parameters are loaded from a flat buffer."""
    trainer = make_trainer(optim.SGDConfig(lr=0.1))
    batches = mlp_batches(3)
    write(trainer, tmp_path, batches[0])
    values = Upstream(tmp_path).module.get_contiguous_parameters()
    nominal = Upstream(tmp_path, "nominal_checkpoint", lr=0.1, values=values)
    assert_trains_alike(trainer, nominal, batches)


ADAM = optim.AdamWConfig
REFUSED: dict[str, tuple[Any, str]] = {
    "lamb": (optim.LambConfig(), "only AdamW and SGD, not LambOptimizer"),
    "lion": (optim.LionConfig(), "only AdamW and SGD, not Lion"),
    "momentum": (optim.SGDConfig(momentum=0.9), "has no momentum"),
    "decay": (optim.SGDConfig(weight_decay=0.1), "has no weight_decay"),
    "rates": (ADAM([{"params": ["a"], "lr": 0.5}]), r"one learning rate .* \[0.001, 0.5\]"),
    "groups": (ADAM([{"params": ["a"], "eps": 0.5}]), "one optimizer for all parameters"),
    "uncorrected": (optim.AdamConfig(do_bias_correction=False, lambda_coef=0.1), r"do_bias_correction=False\): use"),
}


def updates_of(config: Any, max_value: float = math.inf) -> dict[str, ParameterUpdate]:
    """Returns the updates of two parameters."""
    groups = {name: config.group_of(name) for name in ("a", "b")}
    return {
        name: ParameterUpdate(config.rule, group, config.hyper_parameters(group), math.inf, max_value)
        for name, group in groups.items()
    }


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizers_that_upstream_does_not_have_are_refused(kind: str) -> None:
    config, match = REFUSED[kind]
    with pytest.raises(ValueError, match=match):
        optimizer_model(updates_of(config), config.learning_rates, 18)


def test_clipping_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="utils.max_grad_value"):
        optimizer_model(updates_of(ADAM(), 0.5), [0.001], 18)


def test_a_trainer_on_pytorch_kernels(tmp_path: Path) -> None:
    """Upstream's runtime can't call them, so another graph is exported."""
    trainer = make_trainer(ADAM(lr=0.01), utils={"kernels": "pytorch"})
    batches = mlp_batches(3)
    write(trainer, tmp_path, batches[0])
    session = trainer.loop.executor
    assert session is not None
    (graph,) = session.graphs(True)
    with pytest.raises(ValueError, match="programs of PyTorch's kernels in place of ONNX operators"):
        check_portable(graph)
    assert_trains_alike(trainer, Upstream(tmp_path, lr=0.01), batches)


class Changing(MLP):
    """Has a buffer that a step changes."""

    def __init__(self, dtype: torch.dtype, read: bool) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(8, dtype=dtype))
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * self.level if self.read else x
        if self.training:
            self.level.add_(1)
        return super().forward(scaled)


class Named(MLP):
    """Has a parameter with the runtime's name for the input that resets gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy_reset_grad = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.lazy_reset_grad)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (Named(), "is named 'lazy_reset_grad', which onnxruntime-training reserves"),
        (Changing(torch.float32, read=True), "both changes the buffer 'level' and uses its old value"),
        (Changing(torch.int64, read=True), "changes the buffer 'level' of dtype int64"),
        (MLP().double(), "float32 weights only, but 'fc1.weight' is float64"),
    ],
    ids=["name", "read", "whole", "double"],
)
def test_models_that_upstream_can_not_train_are_refused(model: nn.Module, match: str, tmp_path: Path) -> None:
    trainer = make_trainer(ADAM(), model)
    x, label = mlp_batches(1)[0]
    with pytest.raises(ValueError, match=match):
        write(trainer, tmp_path, (x.double() if "float64" in match else x, label))


def test_a_counter_that_nothing_reads_stands_still(tmp_path: Path) -> None:
    trainer = make_trainer(ADAM(lr=0.01), Changing(torch.int64, read=False))
    batches = mlp_batches(3)
    write(trainer, tmp_path, batches[0])
    assert_trains_alike(trainer, Upstream(tmp_path, lr=0.01), batches)


def test_a_schedule_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(ADAM(), lr_scheduler=optim.lr_scheduler.LinearWarmupLRScheduler(10, 0.1))
    with pytest.raises(ValueError, match="can't store a learning-rate schedule"):
        write(trainer, tmp_path / "new", mlp_batches(1)[0])
    assert not (tmp_path / "new").exists()


def test_gradients_of_an_unfinished_window_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(ADAM(), batch={"gradient_accumulation_steps": 2})
    batch = mlp_batches(1)[0]
    trainer.train_step(*batch)
    with pytest.raises(ValueError, match="an incomplete accumulation window"):
        write(trainer, tmp_path, batch)
    trainer.train_step(*batch)
    write(trainer, tmp_path, batch, nominal_checkpoint=False)
    assert not (tmp_path / "nominal_checkpoint").exists()


def test_without_an_optimizer(tmp_path: Path) -> None:
    """Gradients and evaluation still work."""
    our_artifacts.generate_artifacts(
        MLP(),
        loss=our_artifacts.LossType.CrossEntropyLoss,
        artifact_directory=tmp_path,
        sample_batch=mlp_batches(1)[0],
        model_desc={**MLP_DESC, "inputs": [MLP_DESC["inputs"][0], ("labels", ["batch"])]},
        flavor=FLAVOR,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"training_model.onnx", "eval_model.onnx", "checkpoint"}


class Tied(nn.Module):
    """Has an LSTM, for which onnxruntime-training's gradient builder has no gradient, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def test_an_lstm_with_a_tied_weight_trains_and_is_exported(tmp_path: Path) -> None:
    desc = {
        "inputs": [("tokens", ["batch", 5]), ("label", ["batch", 5])],
        "outputs": [("loss", [], True), ("logits", ["batch", 5, 20])],
    }
    generator = torch.Generator().manual_seed(2)
    batches = [tuple(torch.randint(0, 20, (2, 3 + n % 2, 5), generator=generator)) for n in range(6)]
    trainer = ORTTrainer(
        Tied(),
        desc,
        optim.AdamWConfig(lr=0.01),
        loss_fn=lambda logits, label: F.cross_entropy(logits.flatten(0, 1), label.flatten()),
        options=STANDARD_OPTIONS,
    )
    write(trainer, tmp_path, batches[0])
    upstream = Upstream(tmp_path, lr=0.01)
    for number, batch in enumerate(batches):
        (loss, _), (other, _) = trainer.train_step(*batch), upstream.train(batch)
        assert_close(loss, torch.from_numpy(other), 1e-5, f"loss of step {number}")
    assert "head.weight" not in upstream.parameters()
    upstream.module.eval().export_model_for_inferencing(str(tmp_path / "inference.onnx"), ["logits"])
    session = onnxruntime.InferenceSession(str(tmp_path / "inference.onnx"), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"tokens": batches[0][0].numpy()})
    assert_close(trainer.eval_step(*batches[0])[1], torch.from_numpy(logits), 1e-5, "logits")


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_artifacts_of_an_onnx_model_train_as_those_of_upstreams_own_tool(optimizer: str, tmp_path: Path) -> None:
    from onnxruntime.training import artifacts

    weights = {"w": (16, 8), "b": (16,), "v": (3, 16)}
    initializers = [numpy_helper.from_array(torch.randn(shape).numpy(), name) for name, shape in weights.items()]
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["hidden"], transB=1),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "v"], ["logits"], transB=1),
    ]
    x, logits = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", c]) for n, c in (("x", 8), ("logits", 3)))
    graph = helper.make_graph(nodes, "model", [x], [logits], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    runs = []
    for tool, folder, flavor in ((our_artifacts, "ours", {"flavor": FLAVOR}), (artifacts, "theirs", {})):
        (tmp_path / folder).mkdir()
        tool.generate_artifacts(
            copy.deepcopy(model),
            requires_grad=["w", "v"],
            frozen_params=["b"],
            loss=tool.LossType.CrossEntropyLoss,
            optimizer=tool.OptimType[optimizer],
            artifact_directory=tmp_path / folder,
            **flavor,
        )
        path = tmp_path / folder / "optimizer_model.onnx"
        found = onnx.load(path)
        found.ir_version = 10  # theirs has the version of the installed onnx, which their runtime refuses
        onnx.save(found, path)
        runs.append(Upstream(tmp_path / folder, lr=0.02))
    ours, theirs = runs
    assert ours.module.input_names() == theirs.module.input_names() == ["x", "labels"]
    for number, batch in enumerate(mlp_batches(20)):
        ours, theirs = (torch.from_numpy(run.train(batch)[0]) for run in runs)
        assert_close(ours, theirs, 1e-5, f"loss of step {number}")
    for name in weights:
        ours, theirs = (torch.from_numpy(run.parameters()[name]) for run in runs)
        assert_close(ours, theirs, 1e-5, name)


def test_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "on_device.md"
    head, upstream = page.read_text().split("## Artifacts of onnxruntime-training")
    first, *_ = re.findall(r"```python\n(.*?)```", head, re.DOTALL)  # defines the trainer and a batch
    blocks = [first, *re.findall(r"```python\n(.*?)```", upstream, re.DOTALL)]
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), scope)
    for name, value in scope["trainer"].state_dict(pytorch_format=True).items():
        np.testing.assert_array_equal(value.numpy(), scope["state"].parameters[name].data)
    assert scope["trainer"].train_step_info.optimization_step == 2
    state = CheckpointState.load_checkpoint("ours/trained")
    module = Module("ours/training_model.onnx", state, "ours/eval_model.onnx")
    pairs = [(module, Optimizer("ours/optimizer_model.onnx", module)), (scope["module"], scope["optimizer"])]
    for number in range(5):  # both continue alike from the converted checkpoint
        losses = []
        for runtime, optimizer in pairs:
            losses.append(runtime.train()(scope["x"].numpy(), scope["label"].numpy())[0])
            optimizer.step()
            runtime.lazy_reset_grad()
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5, err_msg=f"step {number}")
