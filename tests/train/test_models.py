"""Twenty steps of different architectures against PyTorch."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from ort_trainer import ExportError, ORTModule, ORTTrainer, ORTTrainerOptions, optim

from ..fidelity.layer_cases import Apply
from ..helpers import (
    MLP,
    MLP_DESC,
    TORCH,
    assert_close,
    assert_same_training,
    assert_same_weights,
    mlp_batches,
    mlp_trainer,
)
from ..zoo import Between, Tied

pytestmark = pytest.mark.engine

# Some exact gradients here are zero (a bias of keys, a constant added to all logits); the computed ones are rounding
# errors, which Adam would scale up to full steps in any direction. A larger epsilon keeps the runs comparable.
CONFIG = optim.AdamConfig(lr=1e-3, lambda_coef=0.01, epsilon=1e-4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, eps=1e-4)


def same(model: nn.Module, desc: dict[str, Any], batches: list, **options: Any) -> ORTTrainer:
    return assert_same_training(model, desc, batches, CONFIG, adamw, relative=1e-4, **options)


def cnn() -> nn.Module:
    # No bias before batch norm: its gradient is only rounding errors, which Adam would scale up.
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


IMAGES_DESC = {"inputs": [("input", ["batch", 1, 12, 12]), ("label", ["batch"])], "outputs": [("loss", [], True)]}


def images(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 1, 12, 12), torch.randint(0, 3, (size,))


def test_cnn_with_batch_norm_and_batches_of_any_size() -> None:
    sizes = [8] * 10 + [1, 2, 8, 3, 5, 8, 1, 8, 8, 4]
    trainer = same(cnn(), IMAGES_DESC, [images(size) for size in sizes])
    assert len(trainer.session.graphs(True)) == 1, "one export serves all batch sizes"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.position = nn.Parameter(torch.randn(32, 16) * 0.02)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.layer(hidden).mean(1))


ENCODER_DESC = {
    "inputs": [("tokens", ["batch", "length"]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}


def test_first_batch_of_one_does_not_freeze_the_sizes() -> None:
    shapes = [(1, 1), (4, 7), (1, 7), (4, 1), (2, 30), (4, 32)] * 3
    batches = [(torch.randint(0, 50, shape), torch.randint(0, 3, shape[:1])) for shape in shapes]
    trainer = same(Encoder(), ENCODER_DESC, batches)
    assert len(trainer.session.graphs(True)) == 1


def branching(y: torch.Tensor) -> torch.Tensor:
    """Branches on symbolic sizes, one of them on a size of 1."""
    if y.shape[0] > 1:
        y = y - y.mean(0)
    return y * 2 if y.shape[0] > 3 else y


@pytest.mark.parametrize("first", [1, 2, 5])
def test_branches_on_sizes(first: int) -> None:
    batches = [batch for n in [first, 1, 2, 5] * 5 for batch in mlp_batches(1, n, seed=n)]
    trainer = same(Between(branching), MLP_DESC, batches)
    assert len(trainer.session.graphs(True)) == 3


def test_batch_norm_refuses_a_single_value_as_pytorch_does() -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
    desc = {**MLP_DESC, "inputs": [("input", ["batch", 8]), ("label", ["batch"])]}
    trainer = ORTTrainer(model, desc, CONFIG, loss_fn=F.cross_entropy)
    x, y = mlp_batches(1)[0]
    trainer.train_step(x, y)
    with pytest.raises(ExportError, match="Expected more than 1 value per channel when training"):
        trainer.train_step(x[:1], y[:1])
    assert trainer.train_step_info.step == 1
    trainer.eval_step(x[:1], y[:1])


def test_tied_weights_have_both_names() -> None:
    trainer = same(Tied(), MLP_DESC, mlp_batches(20))
    weights = trainer.state_dict(pytorch_format=True)
    assert torch.equal(weights["second.weight"], weights["first.weight"])
    assert {"first.weight", "second.weight"} < trainer.state_dict()["model"]["full_precision"].keys()
    Tied().load_state_dict(weights, strict=True)
    group = [{"params": ["second.weight"], "lambda_coef": 0.5}]  # the other name of the tied weight
    other = mlp_trainer(config=optim.AdamConfig(group, lr=0.1), model=Tied())
    other.prepare(mlp_batches(1)[0])
    groups = other.loop.optimizer.groups
    assert [hyper["lambda_coef"] for _, hyper, _, names in groups if "first.weight" in names] == [0.5]


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    nothing: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] = ()


class WithLoss(nn.Module):
    """The loss inside the model, in several shapes of return value; some inputs, parameters and buffers unused."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.mlp = MLP()
        self.unused = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unused_buffer", torch.ones(3))
        self.register_buffer("transient", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor, extra: torch.Tensor, label: torch.Tensor) -> Any:
        self.steps += 1
        self.transient.mul_(1.5)
        logits = self.mlp(x)
        loss = F.cross_entropy(logits, label) * self.transient.detach().mean().clamp(max=2.0)
        if self.kind == "tuple":
            return loss, logits
        if self.kind == "dict":
            return {"loss": loss, "logits": logits}
        if self.kind == "nested":
            return (loss, {"a": [logits, None]})
        return Output(loss, logits, hidden=(logits * 2,))


@pytest.mark.parametrize("kind", ["tuple", "dict", "nested", "dataclass"])
def test_loss_inside_the_model(kind: str) -> None:
    desc = {
        "inputs": [("x", ["batch", 8]), ("extra", ["other"]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", 3])],
    }
    batches = [(x, torch.zeros(number + 1), y) for number, (x, y) in enumerate(mlp_batches(20))]
    model = WithLoss(kind)
    if kind in ("dict", "dataclass"):
        trainer = ORTTrainer(model, desc, CONFIG)
        output = copy.deepcopy(model)(*batches[0])
        first = trainer.train_step(*batches[0])
        expected = output["loss"] if kind == "dict" else output.loss
        assert_close(first[0], expected.detach(), 1e-5, "loss")
        return
    trainer = same(model, desc, batches, loss_fn=None)
    assert int(trainer.state_dict(pytorch_format=True)["steps"]) == 20
    assert "transient" not in trainer.state_dict(pytorch_format=True)
    assert trainer.state_dict()["transient_buffers"]["transient"] == pytest.approx(1.5**20, rel=1e-5)


class Awkward(nn.Module):
    """Parameters of 1 to 8 elements, an empty one, frozen ones, and names that are no Python, or only a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in range(1, 9)])
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.fc = nn.Linear(8, 3)
        self.named = nn.ParameterDict({name: torch.randn(3) for name in ("a/b", "class", '"', "\\", "\n")})
        self.x = nn.Parameter(torch.randn(3))  # the name of an input, too
        self.register_parameter("loss", nn.Parameter(torch.randn(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.scalar + sum(v.sum() for v in self.vectors) + self.empty.sum() + self.frozen.sum()
        return self.fc(x) * self.x + total + sum(self.named.values()) + self.loss


def test_awkward_parameters_and_names(tmp_path: Any) -> None:
    model = Awkward()
    trainer = same(model, MLP_DESC, mlp_batches(20))
    weights = trainer.state_dict(pytorch_format=True)
    assert torch.equal(weights["frozen"], model.frozen)
    assert weights["named.a/b"].shape == (3,)
    trainer.save_checkpoint(tmp_path / "a.ortckpt")
    other = mlp_trainer(config=CONFIG, model=Awkward())
    other.load_checkpoint(tmp_path / "a.ortckpt")
    other.prepare(mlp_batches(1)[0])
    restored = other.state_dict(pytorch_format=True)
    assert all(torch.equal(restored[name], value) for name, value in weights.items())


def test_frozen_weights_option() -> None:
    model = MLP()
    before = model.fc1.weight.detach().clone()

    def optimizer(reference: nn.Module) -> torch.optim.Optimizer:
        reference.fc1.weight.requires_grad_(False)
        return adamw(reference)

    trainer = assert_same_training(
        model,
        MLP_DESC,
        mlp_batches(20),
        CONFIG,
        optimizer,
        relative=1e-5,
        options={"utils": {"frozen_weights": ["fc1.weight"], "grad_norm_clip": False}},
    )
    assert torch.equal(trainer.state_dict(pytorch_format=True)["fc1.weight"], before)
    assert model.fc1.weight.requires_grad, "the user's model is left as it was"
    assert "fc1.weight" not in trainer.state_dict()["optimizer"]


def test_the_users_model_is_left_as_it_was_found() -> None:
    model: Any = cnn()
    model.eval()
    model[1].train()
    model[-1].weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    flags = [p.requires_grad for p in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    options = ORTTrainerOptions({"utils": {"share_weights": False}})
    trainer = ORTTrainer(model, IMAGES_DESC, optim.SGDConfig(lr=0.5), loss_fn=F.cross_entropy, options=options)
    for _ in range(2):
        trainer.train_step(*images(3))
    trainer.eval_step(*images(3))
    assert [module.training for module in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    trained = trainer.state_dict(pytorch_format=True)
    assert torch.equal(trained["10.weight"], state["10.weight"])
    assert not torch.equal(trained["0.weight"], state["0.weight"])


def test_non_contiguous_inputs_and_arrays_train_correctly() -> None:
    batches = [(x.T.contiguous().T, y) for x, y in mlp_batches(20)]
    assert not batches[0][0].is_contiguous()
    model = MLP()
    second = mlp_trainer({"utils": {"grad_norm_clip": False}}, CONFIG, copy.deepcopy(model))
    assert_same_training(model, MLP_DESC, batches, CONFIG, adamw)
    for x, y in batches:
        second.train_step(x.numpy(), label=y.numpy())
    assert_same_weights(second, model, 1e-6)


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -7 * grad * ctx.saved_tensors[0]


class Special(nn.Module):
    """Features that an exporter easily loses and that need more than a function."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 3)
        self.rnn = nn.LSTM(8, 8, 3, dropout=0.5, batch_first=True)
        self.register_buffer("average", torch.zeros(8))
        if case == "own backward, a layer with two names":
            self.fc0 = self.fc1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc1(x)
        if self.case == "own backward, a layer with two names":
            y = self.fc0(OwnBackward.apply(y))
        if self.case == "assigned buffer":
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
            y = y + self.average
        if self.case == "dropout between layers":
            y = self.rnn(y[:, None].expand(-1, 3, -1))[0][:, -1]
        return self.fc2(y)


def hooked(y: torch.Tensor) -> torch.Tensor:
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 3)
    return y


def hooked_node(y: torch.Tensor) -> torch.Tensor:
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda grads: (grads[0] * 3,))
    return y


EASILY_LOST = {
    "own backward": lambda: Between(OwnBackward.apply),
    "hook": lambda: Between(hooked),
    "hook of a node": lambda: Between(hooked_node),
    "own backward, a layer with two names": lambda: Special("own backward, a layer with two names"),
    "assigned buffer": lambda: Special("assigned buffer"),
    "dropout between layers": lambda: Special("dropout between layers"),
}


@pytest.mark.options(random_numbers="pytorch")
@pytest.mark.parametrize("case", EASILY_LOST)
def test_what_an_exporter_loses_easily(case: str) -> None:
    """Uses SGD, because Adam would hide a gradient that is wrong by a factor."""
    assert_same_training(
        EASILY_LOST[case](), MLP_DESC, mlp_batches(20), optim.SGDConfig(lr=0.05),
        lambda reference: torch.optim.SGD(reference.parameters(), lr=0.05), relative=1e-4, seed=5,
    )  # fmt: skip


def test_double_precision() -> None:
    batches = [(x.double(), y) for x, y in mlp_batches(20)]
    assert_same_training(MLP().double(), MLP_DESC, batches, CONFIG, adamw, relative=1e-9)


def test_loss_function_that_is_a_module_with_buffers() -> None:
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.3, 0.5]), label_smoothing=0.1)
    trainer = same(MLP(), MLP_DESC, mlp_batches(20), loss_fn=loss_fn)
    assert list(trainer.state_dict(pytorch_format=True)) == list(MLP().state_dict())


def test_loss_function_that_uses_the_models_weights() -> None:
    model = MLP()

    class Regularized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = model.fc1

        def forward(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(logits, label) + self.part.weight.square().sum()

    trainer = ORTTrainer(model, MLP_DESC, optim.SGDConfig(lr=0.0), loss_fn=Regularized())
    x, y = mlp_batches(1)[0]
    trainer.prepare((x, y))
    trainer.session.train_step([x, y])
    (F.cross_entropy(model(x), y) + model.fc1.weight.square().sum()).backward()
    assert_close(trainer.session.gradients["fc1.weight"], model.fc1.weight.grad, 1e-5, "gradient")


def test_several_options_objects_are_not_needed() -> None:
    """One options object, one description and one group list serve two trainers."""
    groups = [{"params": ["fc1.weight"], "lambda_coef": 0.1}]
    desc = copy.deepcopy(MLP_DESC)
    options = ORTTrainerOptions({"mixed_precision": {"enabled": True}})
    before = copy.deepcopy((groups, desc, options.to_dict()["batch"]))
    losses = []
    model = MLP()
    for _ in range(2):
        config = optim.AdamConfig(groups, lr=0.1)
        trainer = ORTTrainer(copy.deepcopy(model), desc, config, loss_fn=F.cross_entropy, options=options)
        losses.append([trainer.train_step(x, y)[0].item() for x, y in mlp_batches(4)])
        assert options.mixed_precision.loss_scaler is None
    assert losses[0] == losses[1]
    assert (groups, desc, options.to_dict()["batch"]) == before


@pytest.mark.parametrize(("branches", "graphs"), [(False, 1), (True, 2)])
def test_convolutions_of_large_batches_need_no_other_graph(branches: bool, graphs: int) -> None:
    """PyTorch compares the batch with 16 to choose a library; a branch of the model on that number is still kept."""

    def conv(layer: nn.Module, input: torch.Tensor) -> torch.Tensor:
        return (layer(input) * (3 if branches and input.shape[0] >= 16 else 2)).mean((2, 3))

    model = Apply(nn.Conv2d(1, 3, 3), conv)
    desc = {**IMAGES_DESC, "inputs": [("x", ["batch", 1, 12, 12]), ("label", ["batch"])]}
    assert len(same(model, desc, [images(size) for size in (4, 20, 5)]).session.graphs(True)) == graphs


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


reverse = Reversed.apply  # bound before any trainer could notice


INDEX = torch.tensor([0, 1, 1, 2, 5, 5, 5, 7])


def mean_by_index(hidden: torch.Tensor) -> torch.Tensor:
    index = INDEX.expand(hidden.shape[0], -1)
    return torch.zeros_like(hidden).scatter_reduce(1, index, hidden, "mean", include_self=False)


def without_gradient(hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        means = mean_by_index(hidden)
    return hidden + means


def without_autocast(hidden: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return mean_by_index(hidden)


def rounded_down(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * (-hidden.shape[0] // 2) + hidden.shape[0] % 3


def rounded_up(hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([hidden[: -(-hidden.shape[0] // 2)], hidden[-(-hidden.shape[0] // 2) :]])


@pytest.mark.parametrize(
    "function",
    [
        reverse,
        lambda hidden: mean_by_index(reverse(hidden)),
        without_gradient,
        without_autocast,
        rounded_down,
        rounded_up,
        lambda hidden: F.adaptive_max_pool1d(hidden.T.unsqueeze(0), 3).mean() + hidden,
    ],
    ids=[
        "apply bound early", "a composite beside a custom function", "inside no_grad", "inside autocast",
        "floor division of a negative size", "ceiling division of a size", "adaptive pooling of a dynamic size",
    ],
)  # fmt: skip
def test_what_is_easily_wrong_without_an_error(function: Any) -> None:
    sizes = [5, 8, 4, 7]
    same(Between(function), MLP_DESC, [batch for size in sizes for batch in mlp_batches(1, size, seed=size)])


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(
            lambda logits, label: F.cross_entropy(logits[label > 0], label[label > 0]),
            marks=pytest.mark.skipif(TORCH < (2, 12), reason="torch's cross_entropy reads the number of rows"),
        ),
        lambda logits, label: (
            (F.cross_entropy(logits, label, reduction="none") * (label > 0)).sum() / label.nonzero().shape[0]
        ),
        lambda logits, label: (logits[logits.detach() > 0] ** 2).mean(),
        lambda logits, label: torch.masked_select(logits, (label > 0)[:, None]).exp().mean(),
        lambda logits, label: _positive(_positive(logits)).pow(2).sum(),
        lambda logits, label: logits.pow(2).sum() / torch.unique(label).shape[0],
        lambda logits, label: F.pad(_positive(logits), (0, 0, 0, 2 * len(logits) - len(_positive(logits)))).exp().sum(),
    ],
    ids=["selected rows", "their number", "elements", "masked_select", "rows of rows", "unique", "a difference"],
)
@pytest.mark.parametrize("kernels", ["pytorch", "onnxruntime"])
def test_losses_over_rows_that_values_select(loss: Any, kernels: str) -> None:
    model = MLP()
    trainer = ORTTrainer(model, "auto", CONFIG, loss_fn=loss, options={"utils": {"kernels": kernels}})
    for x, label in [*mlp_batches(2), *mlp_batches(1, 7)]:
        expected = loss(model(x), label).detach()
        assert_close(trainer.eval_step(x, label)[0], expected, 1e-5, "evaluated")
        assert_close(trainer.train_step(x, label)[0], expected, 1e-5, "trained")
    assert len(trainer.session.graphs(True)) == 1


def _positive(rows: torch.Tensor) -> torch.Tensor:
    return rows[rows[:, 0] > 0]


def selected_rows(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs have sizes that depend on values; two are views."""
    rows = _positive(layer(x))
    return rows.pow(2).sum(), rows.reshape(-1, 2, 2).clone(), rows.t().clone()


def test_outputs_whose_sizes_depend_on_values() -> None:
    model = Apply(nn.Linear(8, 4), selected_rows)
    called, reference = ORTModule(copy.deepcopy(model)), copy.deepcopy(model)
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=1e-9), options={"utils": {"kernels": "pytorch"}})
    for x, _ in [*mlp_batches(2), *mlp_batches(1, 7)]:
        expected = reference(x)
        for found in (trainer.train_step(x), called(x)):
            for mine, theirs in zip(found, expected, strict=True):
                assert mine.shape == theirs.shape
                assert_close(mine.detach(), theirs.detach(), 1e-5, "output")
        for outputs in (called(x), reference(x)):
            (outputs[0] + outputs[1].sum() * 2 + outputs[2].exp().mean()).backward()
    assert_close(called.module.module.weight.grad, reference.module.weight.grad, 1e-5, "gradient")
    assert [spec.shape for spec in trainer.session.graphs(True)[0].outputs] == [(), None, None]


def with_saved_tensors_doubled(hidden: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value * 2, lambda value: value):
        return torch.tanh(hidden)


def on_cpu(hidden: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(hidden)


def test_hooks_that_change_saved_tensors_are_refused() -> None:
    same(Between(on_cpu), MLP_DESC, mlp_batches(2))
    with pytest.raises(ExportError, match=r"saved_tensors_hooks, .* remove them, or change the values in forward"):
        mlp_trainer(model=Between(with_saved_tensors_doubled)).train_step(*mlp_batches(1)[0])


def test_reentrant_checkpoints_and_late_hooks_are_refused() -> None:
    reentrant = Between(lambda hidden: torch.utils.checkpoint.checkpoint(torch.tanh, hidden, use_reentrant=True))
    with pytest.raises(ExportError, match="pass use_reentrant=False"):
        mlp_trainer(model=reentrant).train_step(*mlp_batches(1)[0])
    hooked = MLP()
    hooked.fc1.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ExportError, match=r"parameter 'fc1.weight' has a backward hook"):
        mlp_trainer(model=hooked).train_step(*mlp_batches(1)[0])


class Remembering(MLP):
    """Adds to a buffer what requires grad; in PyTorch the buffer has a history from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.fc1(x))
        self.mean.mul_(0.9).add_(h.mean(0) * 0.1)
        return self.fc2(h)


@pytest.mark.parametrize("kernels", ["pytorch", "onnxruntime"])
def test_buffers_that_get_a_history(kernels: str) -> None:
    same(Remembering(), MLP_DESC, mlp_batches(20), options={"utils": {"kernels": kernels, "grad_norm_clip": False}})


class Parted(MLP):
    """Gives a part of a split to a buffer, so its zero gradient has symbolic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.tanh(self.fc1(x)).split(8, 1)
        self.mean.copy_(first.mean(0))
        return self.fc2(torch.cat([second, second], 1))


def test_a_history_that_is_refused() -> None:
    with pytest.raises(ExportError, match=r"changes 'mean' in place to a value that requires grad.*\n?.*detach\(\)"):
        mlp_trainer(model=Parted()).train_step(*mlp_batches(1)[0])


def test_dropouts_that_stay_on_in_evaluation_are_independent() -> None:
    class Twice(MLP):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return super().forward(x), F.dropout(x, 0.5, True), F.dropout(x, 0.5, True)

    outputs = [("loss", [], True), ("y", ["batch", 3]), ("a", ["batch", 8]), ("b", ["batch", 8])]
    desc = {**MLP_DESC, "outputs": outputs}
    trainer = ORTTrainer(Twice(), desc, CONFIG, loss_fn=lambda p, y: F.cross_entropy(p[0], y))
    first, second = trainer.eval_step(torch.ones(20, 8), torch.zeros(20, dtype=torch.long))[2:]
    assert not torch.equal(first, second)
