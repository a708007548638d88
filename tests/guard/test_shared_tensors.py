"""The trainer trains the model's own tensors: the model is always current, and changes to it take effect."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from tests.helpers import MLP, MLP_DESC, assert_close, mlp_batches, mlp_trainer


class Normed(nn.Module):
    """Has buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.norm(torch.tanh(self.fc1(x))))


def assert_same_state(model: nn.Module, reference: nn.Module, relative: float = 1e-6) -> None:
    for name, value in reference.state_dict().items():
        assert_close(model.state_dict()[name], value, relative, name)


class Pair:
    """A model with a trainer, and a copy of it that PyTorch trains."""

    def __init__(self, model: nn.Module, options: dict[str, Any] | None = None) -> None:
        self.model, self.reference = model, copy.deepcopy(model)
        self.trainer = mlp_trainer(options, optim.AdamWConfig(lr=1e-2), model)
        self._optimizer = torch.optim.AdamW(self.reference.parameters(), lr=1e-2)
        self._batches = iter(mlp_batches(100, seed=4))

    def step(self, count: int = 1, relative: float = 1e-6) -> None:
        for _ in range(count):
            x, y = next(self._batches)
            x = x.to(next(self.model.parameters()).dtype)
            loss = F.cross_entropy(self.reference(x), y)
            assert_close(self.trainer.train_step(x, y)[0], loss.detach(), relative, "loss")
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            assert_same_state(self.model, self.reference, relative)


@pytest.mark.engine
def test_the_model_is_current_after_every_step() -> None:
    pair = Pair(Normed())
    ema = torch.optim.swa_utils.AveragedModel(pair.model)
    reference_ema = torch.optim.swa_utils.AveragedModel(pair.reference)
    for _ in range(20):
        pair.step()
        ema.update_parameters(pair.model)
        reference_ema.update_parameters(pair.reference)
    assert_same_state(ema.module, reference_ema.module)
    x, y = mlp_batches(1)[0]
    assert_close(pair.trainer.eval_step(x, y)[1], pair.model.eval()(x).detach(), 1e-6, "logits")


def halve(model: Normed) -> None:
    with torch.no_grad():
        model.fc1.weight.mul_(0.5)
        model.norm.running_mean.zero_()


def other_memory(model: Normed) -> None:
    model.fc1.weight.data = model.fc1.weight.data * 0.5
    model.norm.running_mean = torch.ones(16)


def assigned_state(model: Normed) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


def data_in_place(model: Normed) -> None:
    model.fc2.bias.data.add_(1.0)


CHANGES = [halve, other_memory, data_in_place]


@pytest.mark.parametrize("change", [*CHANGES, assigned_state], ids=lambda change: change.__name__)
@pytest.mark.parametrize("kernels", ["pytorch", "onnxruntime"])
def test_changes_of_weights_have_their_effect(change: Callable[[Normed], None], kernels: str) -> None:
    pair = Pair(Normed(), {"utils": {"kernels": kernels}})
    if change is assigned_state:  # the reference's optimizer would keep training the previous parameters
        pair.step(2)
        given = {name: value * 0.5 for name, value in pair.model.state_dict().items()}
        given["norm.num_batches_tracked"] = pair.model.norm.num_batches_tracked.clone()
        pair.model.load_state_dict(given, assign=True)
        pair.reference.load_state_dict(given)
    else:
        pair.step(2)
        change(pair.model)
        change(pair.reference)
    assert_close(pair.trainer.get_parameter("fc1.weight"), pair.reference.fc1.weight.detach(), 1e-6, "before a step")
    pair.step(3)


def test_bfloat16_weights_are_rounded_from_float32() -> None:
    model = Normed().bfloat16()
    trainer = mlp_trainer(None, optim.SGDConfig(lr=2**-12), model)
    batches = [(x.bfloat16(), y) for x, y in mlp_batches(4)]
    bias = model.fc2.bias.detach().clone()
    for batch in batches[:3]:
        trainer.train_step(*batch)
        ours = trainer.state_dict(pytorch_format=True)
        assert all(torch.equal(value, ours[name]) for name, value in model.state_dict().items())
    # Steps too small for a bfloat16 weight are not lost.
    kept = trainer.get_parameter("fc2.bias")
    assert kept.dtype == torch.float32 and not torch.equal(kept, bias.float())
    assert not torch.equal(kept, kept.bfloat16().float())
    # Any change of the model replaces them.
    model.fc2.bias.data.fill_(3.0)
    with torch.no_grad():
        model.fc1.weight.fill_(2.0)
    model.fc2.weight.data = torch.ones(3, 16, dtype=torch.bfloat16)
    model.norm.running_mean = torch.full((16,), 4.0, dtype=torch.bfloat16)
    for name, value in (("fc2.bias", 3.0), ("fc1.weight", 2.0), ("fc2.weight", 1.0)):
        assert torch.equal(trainer.get_parameter(name), torch.full_like(trainer.get_parameter(name), value))
    assert torch.equal(trainer.get_parameter("fc2.weight").bfloat16(), model.fc2.weight.detach())
    hidden = torch.tanh(F.linear(batches[3][0].float(), torch.full((16, 8), 2.0), model.fc1.bias.detach().float()))
    trainer.train_step(*batches[3])
    assert_close(model.norm.running_mean.float(), 0.9 * torch.full((16,), 4.0) + 0.1 * hidden.mean(0), 0.01, "mean")


def test_weights_are_made_contiguous_in_place() -> None:
    model = MLP()
    model.fc1.weight.data = torch.randn(8, 16).t()
    weight = model.fc1.weight
    pair = Pair(model)
    pair.step(2)
    assert model.fc1.weight is weight and weight.is_contiguous()


def test_a_state_that_is_loaded_early_is_in_the_model_at_once(tmp_path: Path) -> None:
    trained = Pair(Normed())
    trained.step(3)
    trained.trainer.save_checkpoint(tmp_path / "state")
    model = Normed()
    trainer = mlp_trainer(None, optim.AdamWConfig(lr=1e-2), model)
    trainer.load_checkpoint(tmp_path / "state")
    assert_same_state(model, trained.model)
    with torch.no_grad():
        model.fc1.weight.zero_()  # later changes take effect
        trained.model.fc1.weight.zero_()
    for batch in mlp_batches(2):
        assert torch.equal(trainer.train_step(*batch)[0], trained.trainer.train_step(*batch)[0])
    assert torch.equal(model.fc1.weight, trained.model.fc1.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.to("meta"), "is on the meta device"),
        (lambda model: setattr(model.norm, "running_mean", None), r"'norm.running_mean' of Normed was removed"),
        (lambda model: setattr(model.norm, "running_mean", torch.zeros(3)), r"now has shape \[3\]"),
        (lambda model: model.norm.double(), "dtype torch.float64|had dtype torch.float32 and now has torch.float64"),
    ],
    ids=["meta", "gone", "shape", "dtype"],
)
def test_what_can_not_be_taken_over_is_an_error(change: Callable[[Normed], Any], message: str) -> None:
    pair = Pair(Normed())
    pair.step()
    kept = copy.deepcopy(pair.model.state_dict())
    change(pair.model)
    with pytest.raises(RuntimeError, match=message):
        pair.trainer.train_step(*mlp_batches(1)[0])
    assert pair.trainer.train_step_info.step == 1
    assert len(kept)


def test_two_trainers_share_a_part() -> None:
    """A body with two heads: each trainer updates the body with its own optimizer."""

    class Headed(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body, self.head = body, nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(x)))

    body = nn.Linear(8, 16)
    models = [Headed(body), Headed(body)]
    references = copy.deepcopy(models)
    assert references[0].body is references[1].body
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
    trainers = [
        ORTTrainer(model, MLP_DESC, optim.SGDConfig(lr=0.1, momentum=0.9), F.cross_entropy, options) for model in models
    ]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in references]
    for number, (x, y) in enumerate(mlp_batches(20)):
        turn = number % 2
        loss = F.cross_entropy(references[turn](x), y)
        assert_close(trainers[turn].train_step(x, y)[0], loss.detach(), 1e-5, "loss")
        optimizers[turn].zero_grad()
        loss.backward()
        optimizers[turn].step()
        if number == 10:  # through one model, for both trainers
            body.weight.data = body.weight.data * 0.5
            references[0].body.weight.data = references[0].body.weight.data * 0.5
    for model, reference in zip(models, references, strict=True):
        assert_same_state(model, reference, 1e-5)


@pytest.mark.parametrize("kind", ["same", "slices", "buffer"])
def test_memory_in_common_stays_in_common(kind: str) -> None:
    from tests.engine.test_ownership import batches, sharing_copy

    model = sharing_copy(kind)
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    for x, y in batches(3):
        trainer.train_step(x, y)
    ours = trainer.state_dict(pytorch_format=True)
    assert all(torch.equal(value, ours[name]) for name, value in model.state_dict().items())


def test_copies_leave_the_model_alone() -> None:
    model = Normed()
    before = copy.deepcopy(model.state_dict())
    trainer = mlp_trainer({"utils": {"share_weights": False}}, model=model)
    for batch in mlp_batches(2):
        trainer.train_step(*batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.fc1.weight.zero_()
    assert trainer.get_parameter("fc1.weight").any()


@pytest.mark.parametrize("kernels", ["pytorch", "onnxruntime"])
def test_other_memory_is_taken_over_and_the_former_left_alone(kernels: str) -> None:
    """Averaged weights replace the trained ones during an evaluation, by reference, as in many scripts."""

    class Square(MLP):
        def __init__(self) -> None:
            super().__init__(hidden=16)
            self.mix, self.again = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc2(self.again(torch.tanh(self.mix(torch.tanh(self.fc1(x))))))

    pair = Pair(Square(), {"utils": {"kernels": kernels}})
    pair.step(2)
    x, y = mlp_batches(1)[0]
    for model in (pair.model, pair.reference):
        backup = {name: parameter.data for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 0.1)
        expected = F.cross_entropy(model(x), y).detach()
        if model is pair.model:
            assert_close(pair.trainer.eval_step(x, y)[0], expected, 1e-6, "loss of the average")
        for name, parameter in model.named_parameters():
            parameter.data = backup[name]
    pair.step(2)
    for model in (pair.model, pair.reference):
        model.mix.weight.data, model.again.weight.data = model.again.weight.data, model.mix.weight.data
    pair.step(2)
    for model in (pair.model, pair.reference):
        model.mix.weight.data = model.mix.weight.data.t()  # at the same address
    pair.step(2)
    assert pair.model.mix.weight.is_contiguous()


def test_both_kinds_of_kernels_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of both kinds write the gradients of one window."""
    pair = Pair(Normed())
    source = pair.trainer.loop.source
    for number in range(6):
        monkeypatch.setattr(source, "_kernels", lambda number=number: ("pytorch", "onnxruntime")[number % 2])
        for model in (pair.model, pair.reference):
            model.norm.momentum = 0.1 + 0.1 * (number % 2)  # another graph
        pair.step()
    programs = [bool(graph.programs) for graph in pair.trainer.session.graphs(True)]
    assert programs == [True, False]
