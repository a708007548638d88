"""The user's own loops: gradients in ``p.grad``, passes without gradients, updates at any time; dcgan's loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim
from tests.helpers import MLP, Reference, assert_close, assert_same_parameters, mlp_batches, mlp_trainer
from tests.zoo import Normed

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("own_optimizer", [True, False], ids=["torch.optim", "optimizer_step"])
def test_gradients_are_added_to_those_that_are_there(own_optimizer: bool) -> None:
    model = Normed()
    theirs = Reference(model, torch.optim.AdamW, lr=0.01)
    trainer = mlp_trainer({"utils": {"max_grad_norm": 0.5}}, optim.AdamWConfig(lr=0.01), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = iter(mlp_batches(60))
    for _ in range(20):
        for batch in (next(batches), next(batches), next(batches)):
            loss, logits = trainer.forward_backward(*batch)
            assert_close(loss, theirs.backward(*batch), 1e-5, "loss")
            assert_close(logits, theirs.outputs.detach(), 1e-5, "logits")
        model.fc2.bias.grad.mul_(2.0)
        theirs.model.fc2.bias.grad.mul_(2.0)
        for mine, other in zip(model.parameters(), theirs.model.parameters(), strict=True):
            assert_close(mine.grad, other.grad, 1e-5, "gradient")
        norm = torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.5)
        if own_optimizer:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        else:
            assert trainer.optimizer_step()
            assert trainer.train_step_info.grad_norm == pytest.approx(float(norm), rel=1e-5)
        theirs.update(divisor=1)
        assert_same_parameters(model, theirs.model)
        model.zero_grad()
    assert trainer.train_step_info.step == 0
    assert trainer.train_step_info.optimization_step == (0 if own_optimizer else 20)


def test_a_gradient_of_a_parameter_that_is_frozen_since_is_used() -> None:
    model = MLP()
    theirs = Reference(model, lr=0.1)
    trainer = mlp_trainer(config=optim.SGDConfig(lr=0.1), model=model)
    for batch, frozen in zip(mlp_batches(3), (False, True, True), strict=True):
        for module in (model, theirs.model):
            module.fc1.weight.requires_grad_(not frozen)
        trainer.forward_backward(*batch)
        theirs.backward(*batch)
    trainer.optimizer_step()
    theirs.update(divisor=1)
    assert_same_parameters(model, theirs.model)
    trainer.lazy_reset_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_scale_is_not_in_the_gradients() -> None:
    model, batch = MLP(), mlp_batches(1)[0]
    theirs = Reference(model, lr=0.1)
    trainer = mlp_trainer({"mixed_precision": {"enabled": True, "dtype": "float16"}}, optim.SGDConfig(lr=0.1), model)
    trainer.forward_backward(*batch)
    theirs.backward(*batch)
    assert_close(model.fc1.weight.grad, theirs.model.fc1.weight.grad, 1e-2, "gradient")
    # An overflow is detected, and changes only the scale.
    scale = trainer.loss_scaler.loss_scale
    model.fc1.weight.grad[0, 0] = float("inf")
    assert not trainer.optimizer_step()
    assert trainer.loss_scaler.loss_scale == scale / 2
    assert_same_parameters(model, theirs.model, 0.0)


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


def test_a_partial_window_takes_no_other_passes() -> None:
    trainer = mlp_trainer({"batch": {"gradient_accumulation_steps": 4}})
    batches = mlp_batches(2)
    for batch in batches:
        trainer.train_step(*batch)
    with pytest.raises(RuntimeError, match="after 2 of 4 micro-batches of a train_step"):
        trainer.forward_backward(*batches[0])
    assert trainer.optimizer_step()
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
        theirs = Reference(model, lr=0.0)
        for batch in mlp_batches(2):
            trainer.train_step(*batch)
            theirs.backward(*batch, scale=0.5)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in theirs.model.parameters()])
        assert trainer.train_step_info.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert trainer.train_step_info.learning_rate == 0.1
        clipped = 1.0 if kind != "lamb" else max(1.0, float(norm))
        for name, parameter in theirs.model.named_parameters():
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
    theirs = Reference(model, lr=0.5)
    options = {"utils": {"max_grad_value": 0.02, "max_grad_norm": 0.5}, "batch": {"gradient_accumulation_steps": 2}}
    trainer = mlp_trainer(options, optim.SGDConfig(lr=0.5), model)
    for number, batch in enumerate(mlp_batches(20)):
        trainer.train_step(*batch)
        theirs.backward(*batch, scale=0.5)
        if number % 2:
            norm = torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.5)
            assert trainer.train_step_info.grad_norm == pytest.approx(float(norm), rel=1e-4)
            torch.nn.utils.clip_grad_value_(theirs.model.parameters(), 0.02)
            theirs.update(divisor=1)
    assert_same_parameters(model, theirs.model)


def test_copies_have_no_gradients_to_show() -> None:
    trainer = mlp_trainer({"utils": {"share_weights": False}}, model=Normed())
    trainer.prepare(mlp_batches(1)[0])
    before = trainer.state_dict(pytorch_format=True)
    with pytest.raises(RuntimeError, match="the trainer works on copies of its weights: use train_step"):
        trainer.forward_backward(*mlp_batches(1)[0])
    assert all(torch.equal(value, before[name]) for name, value in trainer.state_dict(pytorch_format=True).items())


def test_two_optimizers_and_one_discriminator() -> None:
    """The loop of pytorch/examples' dcgan: real and fake batches for the discriminator, then the generator."""
    generator = nn.Sequential(nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
    discriminator = nn.Sequential(
        nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.BatchNorm1d(16), nn.Linear(16, 1), nn.Flatten(0)
    )
    g, d = copy.deepcopy(generator), copy.deepcopy(discriminator)
    loss_fn = F.binary_cross_entropy_with_logits
    ours, theirs = (
        [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-5) for m in pair]
        for pair in ((generator, discriminator), (g, d))
    )
    desc = {"inputs": [("input", ["b", 8]), ("label", ["b"])], "outputs": [("loss", [], True)]}
    judge = ORTTrainer(discriminator, desc, ours[1], loss_fn)
    desc = {"inputs": [("input", ["b", 4]), ("label", ["b"])], "outputs": [("loss", [], True)]}
    forger = ORTTrainer(nn.Sequential(generator, discriminator), desc, ours[0], loss_fn)

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
        for loss, other in zip(losses, expected, strict=True):
            assert_close(loss, other.detach(), 1e-3, "loss")
    assert_same_parameters(generator, g, 1e-3)
    assert_same_parameters(discriminator, d, 1e-3)
    assert all(parameter.grad is None for parameter in discriminator.parameters())
