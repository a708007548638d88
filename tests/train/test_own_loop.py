"""The user's own loops: gradients in ``p.grad``, passes without gradients, updates at any time; dcgan's loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim
from tests.helpers import MLP, assert_close, mlp_batches, mlp_trainer

pytestmark = pytest.mark.engine


class Normed(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.dropout(self.norm(torch.tanh(self.fc1(x)))))


def assert_same_state(model: nn.Module, reference: nn.Module, relative: float = 1e-5) -> None:
    for name, value in reference.state_dict().items():
        assert_close(model.state_dict()[name], value, relative, name)


@pytest.mark.parametrize("own_optimizer", [True, False], ids=["torch.optim", "optimizer_step"])
def test_gradients_are_added_to_those_that_are_there(own_optimizer: bool) -> None:
    model = Normed()
    reference = copy.deepcopy(model)
    trainer = mlp_trainer({"utils": {"max_grad_norm": 0.5}}, optim.AdamWConfig(lr=0.01), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    other = torch.optim.AdamW(reference.parameters(), lr=0.01)
    batches = iter(mlp_batches(60))
    for _ in range(20):
        for x, y in (next(batches), next(batches), next(batches)):
            loss, logits = trainer.forward_backward(x, y)
            expected = reference(x)
            assert_close(logits, expected.detach(), 1e-5, "logits")
            assert_close(loss, F.cross_entropy(expected, y).detach(), 1e-5, "loss")
            F.cross_entropy(expected, y).backward()
        model.fc2.bias.grad.mul_(2.0)
        reference.fc2.bias.grad.mul_(2.0)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(ours.grad, theirs.grad, 1e-5, "gradient")
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        if own_optimizer:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        else:
            assert trainer.optimizer_step()
            assert trainer.train_step_info.grad_norm == pytest.approx(float(norm), rel=1e-5)
        other.step()
        assert_same_state(model, reference)
        model.zero_grad()
        other.zero_grad()
    assert trainer.train_step_info.step == 0
    assert trainer.train_step_info.optimization_step == (0 if own_optimizer else 20)


def test_a_gradient_of_a_parameter_that_is_frozen_since_is_used() -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    trainer = mlp_trainer(config=optim.SGDConfig(lr=0.1), model=model)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for (x, y), frozen in zip(mlp_batches(3), (False, True, True), strict=True):
        for module in (model, reference):
            module.fc1.weight.requires_grad_(not frozen)
        trainer.forward_backward(x, y)
        F.cross_entropy(reference(x), y).backward()
    trainer.optimizer_step()
    other.step()
    assert_same_state(model, reference)
    trainer.lazy_reset_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_scale_is_not_in_the_gradients() -> None:
    model = MLP()
    trainer = mlp_trainer({"mixed_precision": {"enabled": True, "dtype": "float16"}}, optim.SGDConfig(lr=0.1), model)
    x, y = mlp_batches(1)[0]
    trainer.forward_backward(x, y)
    reference = copy.deepcopy(model)
    F.cross_entropy(reference(x), y).backward()
    assert_close(model.fc1.weight.grad, reference.fc1.weight.grad, 1e-2, "gradient")
    # An overflow is detected, and changes only the scale.
    before = copy.deepcopy(model.state_dict())
    scale = trainer.loss_scaler.loss_scale
    model.fc1.weight.grad[0, 0] = float("inf")
    assert not trainer.optimizer_step()
    assert trainer.loss_scaler.loss_scale == scale / 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_forward_in_training_mode() -> None:
    model = Normed(dropout=0.5)
    trainer = mlp_trainer(model=model)
    x, y = mlp_batches(1, size=64)[0]
    trainer.prepare((x, y))
    reference = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    loss, logits = trainer.forward(x, y)
    reference(x)
    assert_close(model.norm.running_mean, reference.norm.running_mean, 1e-5, "statistics")
    assert torch.equal(model.fc1.weight, before["fc1.weight"]) and model.fc1.weight.grad is None
    assert not torch.equal(logits, trainer.forward(x, y)[1])  # another mask
    assert_close(loss, F.cross_entropy(logits, y), 1e-5, "loss")
    trainer.train_step_info.fetches = ["logits"]
    assert trainer.forward(x, y).shape == (64, 3)
    assert_close(trainer.forward(x, training=False), model.eval()(x).detach(), 1e-5, "evaluated")
    assert trainer.train_step_info.step == 0


def test_predict_needs_no_label() -> None:
    model = Normed()
    trainer = mlp_trainer(model=model)
    x, y = mlp_batches(1)[0]
    with pytest.raises(TypeError, match="needs all inputs to export the model"):
        trainer.predict(x)
    trainer.train_step(x, y)
    model.eval()
    trainer.train_step_info.fetches = ["loss"]
    for found in (trainer.predict(x), trainer.predict(x=x), trainer.predict({"x": x})):
        assert_close(found, model(x).detach(), 1e-5, "prediction")
    assert trainer.train_step_info.fetches == ["loss"]


def test_a_partial_window_is_ended() -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    options = {"batch": {"gradient_accumulation_steps": 4}}
    trainer = mlp_trainer(options, optim.SGDConfig(lr=0.1), model)
    batches = mlp_batches(6)
    for number, (x, y) in enumerate(batches):
        trainer.train_step(x, y)
        (F.cross_entropy(reference(x), y) / (4 if number < 4 else 2)).backward()
        if number in (3, 5):
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="after 2 of 4 micro-batches of a train_step"):
        trainer.forward_backward(*batches[0])
    assert trainer.optimizer_step()
    assert_same_state(model, reference)
    assert not trainer.optimizer_step()  # there is nothing left
    assert trainer.train_step_info.optimization_step == 2
    trainer.forward_backward(*batches[0])


@pytest.mark.parametrize("kind", ["sgd", "sgd with momentum", "adam", "lamb", "lion"])
def test_gradients_and_their_norm_can_be_read_after_an_update(kind: str) -> None:
    configs: dict[str, Any] = {
        "sgd": optim.SGDConfig(lr=0.1),
        "sgd with momentum": optim.SGDConfig(lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        "adam": optim.AdamWConfig(lr=0.1),
        "lamb": optim.LambConfig(lr=0.1),
        "lion": optim.LionConfig(lr=0.1),
    }
    model = MLP()
    trainer = mlp_trainer({"batch": {"gradient_accumulation_steps": 2}}, configs[kind], model)
    assert trainer.train_step_info.grad_norm is None and trainer.train_step_info.learning_rate is None
    for _ in range(2):
        reference = copy.deepcopy(model)
        for x, y in mlp_batches(2):
            trainer.train_step(x, y)
            (F.cross_entropy(reference(x), y) / 2).backward()
        gradients = [parameter.grad for parameter in reference.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients)
        assert trainer.train_step_info.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert trainer.train_step_info.learning_rate == 0.1
        clipped = 1.0 if kind != "lamb" else max(1.0, float(norm))
        for name, parameter in reference.named_parameters():
            assert_close(trainer.get_gradient(name), parameter.grad / clipped, 1e-5, name)
    trainer.train_step(*mlp_batches(1)[0])
    assert trainer.train_step_info.grad_norm == pytest.approx(float(norm), rel=1e-5)


def test_a_norm_that_nobody_asked_for_is_gone_with_its_gradients() -> None:
    trainer = mlp_trainer(None, optim.SGDConfig(lr=0.1))
    batch = mlp_batches(1)[0]
    trainer.train_step(*batch)
    trainer.gradient_accumulation_steps = 2
    trainer.train_step(*batch)
    assert trainer.train_step_info.grad_norm is None


def test_clipping_by_value() -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    options = {"utils": {"max_grad_value": 0.02, "max_grad_norm": 0.5}, "batch": {"gradient_accumulation_steps": 2}}
    trainer = mlp_trainer(options, optim.SGDConfig(lr=0.5), model)
    for number, (x, y) in enumerate(mlp_batches(20)):
        trainer.train_step(x, y)
        (F.cross_entropy(reference(x), y) / 2).backward()
        if number % 2:
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            assert trainer.train_step_info.grad_norm == pytest.approx(float(norm), rel=1e-4)
            torch.nn.utils.clip_grad_value_(reference.parameters(), 0.02)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, reference)


def test_copies_have_no_gradients_to_show() -> None:
    trainer = mlp_trainer({"utils": {"share_weights": False}}, model=Normed())
    trainer.prepare(mlp_batches(1)[0])
    before = trainer.state_dict(pytorch_format=True)
    with pytest.raises(RuntimeError, match="the trainer works on copies of its weights: use train_step"):
        trainer.forward_backward(*mlp_batches(1)[0])
    assert all(torch.equal(value, before[name]) for name, value in trainer.state_dict(pytorch_format=True).items())


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh()
        )

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.layers(noise)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.BatchNorm1d(16), nn.Linear(16, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image).squeeze(1)


class Deceiving(nn.Module):
    """The generator followed by the discriminator."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.discriminator(self.generator(noise))


def test_two_optimizers_and_one_discriminator() -> None:
    """The loop of pytorch/examples' dcgan: real and fake batches for the discriminator, then the generator."""
    generator, discriminator = Generator(), Discriminator()
    g, d = copy.deepcopy(generator), copy.deepcopy(discriminator)
    loss_fn = F.binary_cross_entropy_with_logits
    optimizers = [
        torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-5) for m in (generator, discriminator)
    ]
    theirs = [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-5) for m in (g, d)]

    desc = {"inputs": [("image", ["b", 8]), ("label", ["b"])], "outputs": [("loss", [], True)]}
    judge = ORTTrainer(discriminator, desc, optimizers[1], loss_fn)
    desc = {"inputs": [("noise", ["b", 4]), ("label", ["b"])], "outputs": [("loss", [], True)]}
    forger = ORTTrainer(Deceiving(generator, discriminator), desc, optimizers[0], loss_fn)

    ones, zeros = torch.ones(6), torch.zeros(6)
    for _ in range(20):
        real, noise = torch.rand(6, 8), torch.randn(6, 4)
        # Ours: the generator runs in PyTorch, on the weights that the other trainer trains.
        fake = generator(noise).detach()
        losses = [judge.forward_backward(real, ones), judge.forward_backward(fake, zeros)]
        judge.optimizer_step()
        discriminator.zero_grad()
        losses.append(forger.train_step(noise, ones))
        # PyTorch's.
        made = g(noise)
        expected = [loss_fn(d(real), ones), loss_fn(d(made.detach()), zeros)]
        theirs[1].zero_grad()
        (expected[0] + expected[1]).backward()
        theirs[1].step()
        expected.append(loss_fn(d(g(noise)), ones))
        theirs[0].zero_grad()
        expected[2].backward()
        theirs[0].step()
        for ours, other in zip(losses, expected, strict=True):
            assert_close(ours, other.detach(), 1e-3, "loss")
    assert_same_state(generator, g, 1e-3)
    assert_same_state(discriminator, d, 1e-3)
    assert all(parameter.grad is None for parameter in discriminator.parameters())
