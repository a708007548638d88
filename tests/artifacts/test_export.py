"""``ORTTrainer.export_artifacts``: continuing from the artifacts equals continuing in the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.state.training_api import read_checkpoint

from ..helpers import MLP, MLP_DESC, mlp_batches, mlp_trainer
from .twins import Artifacts, assert_same_state, assert_steps_alike, described, exported

pytestmark = pytest.mark.engine

# Both use the same arithmetic, so any difference comes from the export, and the trainer needs no second graph.
OWN: dict[str, Any] = {"utils": {"kernels": "onnxruntime"}}
MODELS = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx")
GROUPS = [{"params": ["fc1.weight", "fc1.bias"], "lr": 0.02}, {"params": ["fc2.bias"], "weight_decay": 0.5}]
SGD = [
    {"params": ["fc1.weight"], "momentum": 0.9, "weight_decay": 0.1},
    {"params": ["fc1.bias"], "momentum": 0.9, "dampening": 0.5},
    {"params": ["fc2.bias"], "momentum": 0.9, "nesterov": True},
]
ADAM = [
    {"params": ["fc1.weight"], "max_norm_clip": 0.3},
    {"params": ["fc1.bias"], "lambda_coef": 0.1, "weight_decay_mode": optim.AdamConfig.DecayMode(1)},
    {"params": ["fc2.bias"], "do_bias_correction": False},
]
LAMB = [
    {"params": ["fc1.weight"], "lambda_coef": 0.1, "do_bias_correction": True},
    {"params": ["fc2.bias"], "ratio_min": 0.5, "ratio_max": 2.0},
]
# A rule writes nodes by the hyper-parameters of each group.
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (lambda: optim.SGDConfig(lr=0.1), {}),
    "sgd, groups": (lambda: optim.SGDConfig(SGD, lr=0.05), {}),
    "adam, groups": (lambda: optim.AdamConfig(ADAM, lr=0.01), {}),
    "adamw, clipped by value": (lambda: optim.AdamWConfig(lr=0.01), {"utils": {"max_grad_value": 0.02}}),
    "adamw, clipped by both": (
        lambda: optim.AdamWConfig(GROUPS, lr=0.01, weight_decay=0.1),
        {"utils": {"max_grad_value": 0.02, "max_grad_norm": 0.1}},
    ),
    "lamb, groups": (lambda: optim.LambConfig(LAMB, lr=0.01), {}),
    "lion": (lambda: optim.LionConfig(lr=0.001, weight_decay=0.1), {}),
}


def options(more: dict[str, Any]) -> dict[str, Any]:
    return {**more, "utils": {**OWN["utils"], **more.get("utils", {})}}


@pytest.mark.parametrize("rule", RULES)
def test_optimizers(rule: str, tmp_path: Path) -> None:
    config, more = RULES[rule]
    trainer = mlp_trainer(options(more), config())
    batches = mlp_batches(25)
    for batch in batches[:5]:
        trainer.train_step(*batch)
    artifacts = exported(trainer, tmp_path / "artifacts")
    assert_same_state(trainer, artifacts.checkpoint(), 0.0)
    assert_updates_can_be_in_place(artifacts.folder)
    assert_steps_alike(trainer, artifacts, batches[5:], evaluates=False)


def test_a_schedule(tmp_path: Path) -> None:
    """Its arguments are stored; core/schedules.py has the formulas for trainers and devices."""
    config = optim.AdamWConfig(GROUPS, lr=0.01)
    trainer = mlp_trainer(options({"lr_scheduler": optim.PolyWarmupLRScheduler(20, 1e-4, 2.0, 0.1)}), config)
    batches = mlp_batches(25)
    for batch in batches[:3]:
        trainer.train_step(*batch)
    assert_steps_alike(trainer, exported(trainer, tmp_path / "artifacts"), batches[3:], evaluates=False)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "from AdamW"])
def test_optimizers_of_pytorch(name: str, tmp_path: Path) -> None:
    model = MLP()
    groups = [{"params": model.fc1.parameters(), "lr": 0.02}, {"params": model.fc2.parameters()}]
    kind = getattr(torch.optim, name.removeprefix("from "))
    optimizer = kind(groups, lr=0.01, **({"momentum": 0.9, "dampening": 0.1} if name == "SGD" else {}))
    config = optim.from_torch(optimizer) if name.startswith("from") else optimizer
    trainer = mlp_trainer(options({"utils": {"max_grad_norm": 0.2}}), config, model)
    batches = mlp_batches(15)
    for batch in batches[:2]:
        trainer.train_step(*batch)
    artifacts = exported(trainer, tmp_path / "artifacts")
    for batch in batches[2:]:
        loss, _ = trainer.train_step(*batch)
        assert abs(float(artifacts.train(batch)[0]) - float(loss)) <= 1e-6 * float(loss)
        artifacts.update()
    for key, value in trainer.state_dict(pytorch_format=True).items():
        np.testing.assert_allclose(artifacts.state.parameters[key].data, value.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_export_in_the_middle_of_a_window(reduction: str, tmp_path: Path) -> None:
    more = {"batch": {"gradient_accumulation_steps": 3, "gradient_reduction": reduction}}
    trainer = mlp_trainer(options(more), optim.AdamWConfig(lr=0.01, max_norm_clip=0.3))
    batches = mlp_batches(24)
    for batch in batches[:5]:
        trainer.train_step(*batch)
    artifacts = exported(trainer, tmp_path / "artifacts")
    share = 2 / 3 if reduction == "mean" else 1.0
    gradient = trainer.get_gradient("fc1.weight")
    assert gradient is not None
    np.testing.assert_allclose(artifacts.state.parameters["fc1.weight"].grad, gradient * share, rtol=1e-6)
    assert_steps_alike(trainer, artifacts, batches[5:], evaluates=False)


def test_dropout_draws_the_masks_of_the_trainer(tmp_path: Path) -> None:
    """With either kind of kernels: PyTorch's draw masks inside the graph, ONNX Runtime's before it runs."""
    trainer = mlp_trainer({}, optim.AdamWConfig(lr=0.01), MLP(dropout=0.3, hidden=64))
    batches = mlp_batches(15)
    for batch in batches[:5]:
        trainer.train_step(*batch)
    artifacts = exported(trainer, tmp_path / "artifacts")
    assert_steps_alike(trainer, artifacts, batches[5:])
    trainer.export_artifacts(tmp_path / "later")
    found, expected = (part.checkpoint().random for part in (artifacts, Artifacts(tmp_path / "later")))
    assert found is not None and expected is not None
    np.testing.assert_array_equal(found, expected)


class Tied(nn.Module):
    """Has an embedding tied to the last layer, norms with running statistics, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.frozen(self.embedding(tokens))) * self.scale
        hidden = self.norm(hidden.mean(1))
        logits = self.head(hidden)
        return F.cross_entropy(logits, tokens[:, 0]), logits


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.head(x * pair[0] + pair[1])


def tied_weights_buffers_and_loss_inside() -> tuple[ORTTrainer, list[Any]]:
    description = {"inputs": [("tokens", ["batch", "length"])], "outputs": [("loss", [], True), ("y", ["batch", 11])]}
    frozen = {"utils": {"frozen_weights": ["frozen.weight", "frozen.bias"]}}
    trainer = ORTTrainer(Tied(), description, optim.AdamWConfig(lr=0.01), options=ORTTrainerOptions(options(frozen)))
    return trainer, [(torch.randint(0, 11, (4 + number % 2, 3 + number % 3)),) for number in range(14)]


def inputs_in_a_pair() -> tuple[ORTTrainer, list[Any]]:
    trainer = ORTTrainer(
        Paired(), "auto", optim.AdamWConfig(lr=0.01), loss_fn=F.cross_entropy, options=ORTTrainerOptions(OWN)
    )
    return trainer, [
        (torch.randn(4, 6), (torch.randn(4, 6), torch.randn(4, 6)), torch.randint(0, 3, (4,))) for _ in range(12)
    ]


def double() -> tuple[ORTTrainer, list[Any]]:
    trainer = mlp_trainer(OWN, optim.AdamWConfig(lr=0.01), MLP().double())
    return trainer, [(x.double(), label) for x, label in mlp_batches(20)]


CASES = (tied_weights_buffers_and_loss_inside, inputs_in_a_pair, double)


@pytest.mark.parametrize("case", CASES)
def test_models(case: Any, tmp_path: Path) -> None:
    trainer, batches = case()
    for batch in batches[:3]:
        trainer.train_step(*batch)
    artifacts = exported(trainer, tmp_path / "artifacts")
    flat = [tuple(torch.utils._pytree.tree_leaves(batch)) for batch in batches[3:]]
    if case is inputs_in_a_pair:
        names = artifacts.module.input_names()
        assert names[0] == "x" and len(names) == 4
        for given, batch in zip(batches[3:], flat, strict=True):
            loss = trainer.train_step(*given)[0]
            assert abs(float(artifacts.train(batch)[0]) - float(loss)) <= 1e-6 * float(loss)
            artifacts.update()
        assert_same_state(trainer, artifacts.checkpoint())
        return
    assert_steps_alike(trainer, artifacts, flat)


def test_loss_parameters_are_inputs(tmp_path: Path) -> None:
    def loss_fn(prediction: torch.Tensor, label: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return beta * F.cross_entropy(prediction, label)

    trainer = ORTTrainer(MLP(), MLP_DESC, optim.SGDConfig(lr=0.1), loss_fn=loss_fn, options=ORTTrainerOptions(OWN))
    trainer.loss_parameters["beta"] = 0.5
    (x, label), second = mlp_batches(2)
    trainer.train_step(x, label)
    artifacts = exported(trainer, tmp_path / "artifacts")
    assert artifacts.module.input_names() == ["x", "label", "beta"]
    trainer.loss_parameters["beta"] = 2.0
    loss, _ = trainer.train_step(*second)
    assert float(artifacts.train((*second, torch.tensor(2.0)))[0]) == pytest.approx(float(loss), rel=1e-6)


def test_what_the_files_are(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    trainer = mlp_trainer(OWN, optim.LambConfig(lr=0.01), MLP(dropout=0.1))
    trainer.train_step(*mlp_batches(1)[0])
    trainer.export_artifacts(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*MODELS, "checkpoint", "nominal_checkpoint"])
    for name in MODELS:
        model = onnx.load(folder / name)
        onnx.checker.check_model(model, full_check=True)
        assert model.ir_version <= 10
        assert [(entry.domain, entry.version <= 21) for entry in model.opset_import] == [("", True)]
        assert not [tensor for tensor in model.graph.initializer if tensor.dims and max(tensor.dims) > 8]
    checkpoint, nominal = read_checkpoint(folder / "checkpoint"), read_checkpoint(folder / "nominal_checkpoint")
    assert nominal.nominal and not checkpoint.nominal
    assert {name: value.shape for name, value in nominal.parameters.items()} == {
        name: value.shape for name, value in checkpoint.parameters.items()
    }
    exports = {described(folder, name).export for name in MODELS} | {checkpoint.export, nominal.export}
    assert len(exports) == 1 and len(exports.pop()) == 64


def test_an_export_has_an_id_of_its_content(tmp_path: Path) -> None:
    def export(folder: str, **changes: Any) -> str:
        trainer = mlp_trainer(options(changes), optim.AdamWConfig(lr=0.01))
        trainer.train_step(*mlp_batches(1)[0])
        trainer.export_artifacts(tmp_path / folder)
        return described(tmp_path / folder, "training_model.onnx").export

    first = export("first")
    assert first == export("second") and first != export("third", utils={"max_grad_value": 0.5})


def assert_updates_can_be_in_place(folder: Path) -> None:
    """Checks that nothing reads an old value after its new value is computed, so both may share memory."""
    said: Any = described(folder, "optimizer_model.onnx")
    graph = onnx.load(folder / "optimizer_model.onnx").graph
    producer = {output: node for node in graph.node for output in node.output}
    pairs = [*said.weights.values(), *((slot.input, slot.output) for slot in said.state.values())]
    elementwise = {"Add", "Sub", "Mul"}
    for old, new in pairs:
        ancestors, waiting = set(), [new]
        while waiting:
            name = waiting.pop()
            if name in producer and name not in ancestors:
                ancestors.add(name)
                waiting += producer[name].input
        readers = [node for node in graph.node if old in node.input]
        assert readers and all(set(node.output) <= ancestors for node in readers), (old, new)
        assert producer[new].op_type in elementwise


def test_what_can_not_be_exported(tmp_path: Path) -> None:
    batch = mlp_batches(1)[0]

    def refused(match: str, more: Any = None, config: Any = None, model: Any = None, **arguments: Any) -> None:
        trainer = mlp_trainer(more, config, model)
        with pytest.raises(ValueError, match=match):
            trainer.export_artifacts(tmp_path / "artifacts", **arguments)

    refused("float16.*bfloat16", {"mixed_precision": {"enabled": True, "dtype": "float16"}})
    refused("'weighted'.*'mean'", {"batch": {"gradient_reduction": "weighted"}})
    refused("'fc1.weight' .*bfloat16.*float", model=MLP().bfloat16())
    refused("halved is Python code.*LinearWarmup", {"lr_scheduler": halved})
    model = MLP()
    refused("torch.optim.RMSprop.*ort_trainer.optim", config=torch.optim.RMSprop(model.parameters()), model=model)
    refused("amsgrad=True", config=torch.optim.AdamW(model.parameters(), amsgrad=True), model=model)
    model.fc2.bias = nn.Parameter(model.fc1.bias.data[:3])
    refused("share memory", model=model)
    with pytest.raises(ValueError, match="flavor must be one of"):
        prepared().export_artifacts(tmp_path / "artifacts", flavor="upstream")
    with pytest.raises(TypeError, match="nominal_checkpoint must be a bool"):
        prepared().export_artifacts(tmp_path / "artifacts", nominal_checkpoint=1)
    with pytest.raises(ValueError, match="fixed_learning_rate is for"):
        prepared().export_artifacts(tmp_path / "artifacts", fixed_learning_rate=True)
    trainer = mlp_trainer(OWN)
    with pytest.raises(RuntimeError, match="before the first batch: call prepare"):
        trainer.export_artifacts(tmp_path / "artifacts")
    trainer.prepare(batch)
    assert trainer.session is not None
    for _ in range(2):  # a window of one, so artifacts could not compute the mean
        trainer.session.train_step(batch)
    with pytest.raises(ValueError, match="after 2 micro-batches of a window of 1.*optimizer_step"):
        trainer.export_artifacts(tmp_path / "artifacts")
    trainer.lazy_reset_grad()
    file = tmp_path / "file"
    file.write_text("")
    for target, error in ((tmp_path / "no" / "no", FileNotFoundError), (file, NotADirectoryError), ("", ValueError)):
        with pytest.raises(error):
            trainer.export_artifacts(target)
    with pytest.raises(TypeError, match="directory must be a str or a path"):
        trainer.export_artifacts(None)
    assert not (tmp_path / "artifacts").exists()


def halved(step: int) -> float:
    return 0.5


def prepared() -> ORTTrainer:
    trainer = mlp_trainer(OWN)
    trainer.prepare(mlp_batches(1)[0])
    return trainer


def test_the_update_of_a_parameter_that_came_later(tmp_path: Path) -> None:
    """Different counts are kept separately."""
    model = MLP()
    trainer = mlp_trainer(OWN, optim.AdamWConfig(lr=0.01), model)
    model.fc1.weight.requires_grad_(False)
    trainer.train_step(*mlp_batches(1)[0])
    model.fc1.weight.requires_grad_(True)
    batches = mlp_batches(10)
    for batch in batches[:2]:
        trainer.train_step(*batch)
    artifacts = exported(trainer, tmp_path / "artifacts")
    optimizer = artifacts.checkpoint().optimizer
    assert optimizer is not None
    counts = {key: int(value[0]) for key, value in optimizer.items() if key.endswith("Update_Count")}
    assert counts["fc1.weight.Update_Count"] == 3 and counts["fc1.bias.Update_Count"] == 4
    assert_steps_alike(trainer, artifacts, batches[2:])


def test_large_gradients_are_made_where_they_are_kept(tmp_path: Path) -> None:
    """The nodes that compute them are in the branches, which avoids a copy."""
    more = {**OWN, "batch": {"gradient_accumulation_steps": 2}}
    trainer = mlp_trainer(more, optim.AdamWConfig(lr=0.01), MLP(hidden=1 << 13))
    batches = mlp_batches(6)
    for batch in batches[:3]:
        trainer.train_step(*batch)
    artifacts = exported(trainer, tmp_path / "artifacts")
    nodes = onnx.load(tmp_path / "artifacts" / "training_model.onnx").graph.node
    moved = [[node.op_type for node in entry.attribute[0].g.node] for entry in nodes if entry.op_type == "If"]
    assert [kinds[-1] for kinds in moved] == ["MatMul", "Identity"] and "MatMul" not in moved[1]
    assert_steps_alike(trainer, artifacts, batches[3:])
