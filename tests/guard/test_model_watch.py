"""Changes of a model after the start: modes and settings take effect, another model is an error."""

from __future__ import annotations

import copy
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.guard.guard import ModelWatch

from ..helpers import assert_close, assert_same_weights

DESC = {"inputs": [("x", ["b", 8]), ("y", ["b"])], "outputs": [("loss", [], True)]}


class Net(nn.Module):
    """A model with everything that can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(16, 3)
        self.scale = 1.0
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.dropout(torch.relu(self.norm(self.body(x))))) * self.scale


class Pair:
    """A trainer's model and a copy for PyTorch, which are changed and trained in the same way."""

    def __init__(self, model: nn.Module, share: bool = True) -> None:
        self.models = [model, copy.deepcopy(model)]
        options = ORTTrainerOptions({"utils": {"grad_norm_clip": False, "share_weights": share}})
        self.trainer = ORTTrainer(model, DESC, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)

    @property
    def reference(self) -> nn.Module:
        return self.models[1]

    def change(self, change: Callable[[nn.Module], object]) -> None:
        for model in self.models:
            change(model)

    def step(self, size: int = 6) -> None:
        x, y = torch.randn(size, 8), torch.randint(0, 3, (size,))
        before = torch.get_rng_state()
        loss = F.cross_entropy(self.reference(x), y)
        torch.set_rng_state(before)
        self.trainer.session and self.trainer.session.generator.set_state(before)
        ours = self.trainer.train_step(x, y)
        assert_close(ours, loss.detach(), 1e-5, "loss")
        trained = [p for p in self.reference.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for parameter in self.reference.parameters():
            parameter.grad = None
        assert_same_weights(self.trainer, self.reference, 1e-5)


@pytest.mark.options(random_numbers="pytorch")
def test_modes_settings_and_frozen_parameters_have_their_effect_at_every_step() -> None:
    pair = Pair(Net())
    pair.change(lambda m: (m.train(), m.norm.eval()))
    changes: list[Callable[[nn.Module], object]] = [
        lambda m: None,
        lambda m: m.norm.train(),
        lambda m: m.body.requires_grad_(False),
        lambda m: m.norm.eval(),
        lambda m: (m.body.requires_grad_(True), m.norm.train()),
        lambda m: setattr(m, "scale", 0.5),
        lambda m: setattr(m.norm, "momentum", 0.7),
        lambda m: setattr(m.dropout, "p", 0.5),
        lambda m: (setattr(m.dropout, "p", 0.0), setattr(m, "scale", 1.0), setattr(m.norm, "momentum", 0.1)),
    ]
    for change in changes:
        pair.change(change)
        pair.step()
    exported = len(pair.trainer.session.graphs(True))
    assert exported == 7, "the last change restores what was exported before"
    pair.step(size=3)
    assert len(pair.trainer.session.graphs(True)) == exported


class Averaged(Net):
    """Has a second network that its forward pass never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(Net()).requires_grad_(False)


def test_the_mode_of_a_module_that_no_graph_asks_for_does_not_count() -> None:
    pair = Pair(Averaged())
    pair.step()
    for change in (lambda m: m.average.eval(), lambda m: m.train()):
        pair.change(change)
        pair.step()
    assert len(pair.trainer.session.graphs(True)) == 1
    pair.change(lambda m: m.dropout.eval())
    pair.step()
    assert len(pair.trainer.session.graphs(True)) == 2


def test_a_setting_reaches_evaluation_and_a_mode_does_not() -> None:
    pair = Pair(Net())
    pair.step()
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    for change in (lambda m: None, lambda m: setattr(m, "scale", 0.25), lambda m: m.norm.eval()):
        pair.change(change)
        theirs = copy.deepcopy(pair.reference).eval()
        assert_close(pair.trainer.eval_step(x, y), F.cross_entropy(theirs(x), y).detach(), 1e-5, "evaluation")
    assert len(pair.trainer.session.graphs(False)) == 2


def test_a_model_in_evaluation_mode_is_trained_as_it_was_before() -> None:
    pair = Pair(Net())
    pair.change(lambda m: m.norm.eval())
    pair.step()
    pair.models[0].eval()  # for an evaluation by the user
    with pytest.warns(UserWarning, match=r"the modes of the last training step.*: call model\.train\(\) before"):
        pair.step()
    assert pair.models[0].training is False, "the trainer does not change modes"
    fresh = Pair(Net().eval())  # as from_pretrained() returns it
    fresh.reference.train()
    with pytest.warns(UserWarning, match="all modules of Net are in evaluation mode, and are trained in training"):
        fresh.step()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "all modules of")  # once
        fresh.step()
        trainer = ORTTrainer(nn.Linear(8, 3).eval(), "auto", optim.SGDConfig(), loss_fn=F.cross_entropy)
        trainer.train_step(torch.randn(4, 8), torch.randint(0, 3, (4,)))  # no mode matters


class Features(nn.Module):
    """A loss with dropout and statistics, such as a distance of features of another network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).requires_grad_(False)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.net(output), self.net(target))


@pytest.mark.options(random_numbers="pytorch")
def test_a_loss_keeps_its_own_modes_in_training_and_in_evaluation() -> None:
    model, loss = nn.Linear(8, 3), Features().eval()
    reference, their_loss = copy.deepcopy((model, loss))
    trainer = ORTTrainer(
        model, "auto", optim.SGDConfig(lr=0.1), loss_fn=loss, options={"utils": {"grad_norm_clip": False}}
    )
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    changes: list[Callable[[nn.Module], object]] = [
        lambda m: None,
        lambda m: m.net[1].train(),
        lambda m: m.eval(),
    ]
    for change in changes:
        change(loss), change(their_loss)
        x, y = torch.randn(6, 8), torch.randn(6, 3)
        expected = their_loss(reference(x), y)
        assert_close(trainer.train_step(x, y)[0], expected.detach(), 1e-5, "loss")
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        evaluated = copy.deepcopy(their_loss)(reference(x), y).detach()  # an evaluation moves no statistics
        assert_close(trainer.eval_step(x, y)[0], evaluated, 1e-5, "evaluation")
        for ours, theirs in zip(loss.buffers(), their_loss.buffers(), strict=True):
            assert_close(ours, theirs, 1e-5, "statistics")
    assert len(trainer.session.graphs(True)) == len(trainer.session.graphs(False)) == 2
    loss.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'net\.0\.weight'.* of loss_fn require grad now, but only the model is"):
        trainer.train_step(x, y)


def test_a_loss_that_is_a_part_of_the_model_has_the_modes_of_the_model() -> None:
    model = nn.Linear(8, 3)
    model.loss = Features()
    trainer = ORTTrainer(model.eval(), "auto", optim.SGDConfig(lr=0.0), loss_fn=model.loss)
    with pytest.warns(UserWarning, match="are trained in training mode"):
        trainer.train_step(torch.randn(6, 8), torch.randn(6, 3))
    assert model.loss.net[1].num_batches_tracked == 2


class FrozenNorm(Net):
    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self


def test_an_overridden_train_method_is_asked() -> None:
    pair = Pair(FrozenNorm())
    pair.reference.train()
    pair.step()
    pair.step()


def test_a_mixture_that_looks_like_a_mistake_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    model = Net().eval()
    model.head = nn.Linear(16, 3)
    with caplog.at_level(logging.WARNING, "ort_trainer"):
        Pair(model).step()
    assert "the model is in evaluation mode except for 'head'" in caplog.text


class Varied(nn.Module):
    """Reads attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.power = 1
        self.act = torch.tanh
        self.shift: float | None = None
        self.table = torch.ones(3)
        self.calls = 0
        self.last: torch.Tensor | None = None
        self.notes: list[float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result = self.act(self.conv(x[:, None])).mean(2) * self.table
        self.last = result.detach().sum()
        return result**self.power if self.shift is None else result**self.power + self.shift * torch.arange(3.0)


VARIED: list[Callable[[Varied], object]] = [
    lambda m: None,
    lambda m: setattr(m, "power", 2),
    lambda m: setattr(m, "act", torch.sin),
    lambda m: setattr(m, "shift", 0.5),
    lambda m: (setattr(m.conv, "stride", (2,)), setattr(m.conv, "padding", (0,))),
    lambda m: m.table.fill_(2.0),
    lambda m: setattr(m, "table", torch.arange(3.0)),
    lambda m: m.register_forward_hook(lambda module, args, output: output * 0.5),
]


def test_attributes_of_every_kind_have_their_effect() -> None:
    pair = Pair(Varied())
    for change in VARIED:
        pair.change(change)
        pair.step()
        for model in pair.models:
            model(torch.randn(2, 8))  # forward() counts its calls, so this changes an attribute that it assigns itself
    # Two changes of a tensor's values cost nothing: they are an input.
    assert len(pair.trainer.session.graphs(True)) == len(VARIED) - 2
    pair.change(lambda m: setattr(m, "notes", [1.0]))  # forward() does not read it
    pair.step()
    assert len(pair.trainer.session.graphs(True)) == len(VARIED) - 2
    assert pair.models[0].calls == pair.models[1].calls == 2 * len(VARIED) + 1, "a step counts as a call"


def test_what_is_noticed_is_noticed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    watch = ModelWatch(model, [name for name, _ in model.named_parameters()], ())
    first = watch.variant(True)
    model.norm.eval()
    monkeypatch.setattr(watch, "_log_changes", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        watch.variant(True)
    monkeypatch.undo()
    assert watch.variant(True) != first
    model.norm.train()
    assert watch.variant(True) == first


def test_trainers_of_one_model_in_several_threads() -> None:
    model = Net()
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    results: list[object] = []

    def work(frozen: list[str]) -> None:
        try:
            options = ORTTrainerOptions({"utils": {"frozen_weights": frozen}})
            trainer = ORTTrainer(model, DESC, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)
            for _ in range(3):
                trainer.train_step(x, y)
            results.append(len(trainer.session.graphs(True)))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=work, args=(frozen,)) for frozen in ([], ["body.weight"])]
    for thread in threads:
        thread.start()
    work([])
    for thread in threads:
        thread.join()
    assert results == [1, 1, 1]


OTHER_MODELS: list[tuple[Callable[[Net], object], str]] = [
    (lambda m: setattr(m, "head", nn.Linear(16, 3)), "module 'head' was replaced by another Linear"),
    (lambda m: setattr(m, "extra", nn.Linear(2, 2)), "module 'extra' was added"),
    (lambda m: delattr(m, "dropout"), "module 'dropout' was removed"),
    (lambda m: setattr(m, "bias", nn.Parameter(torch.zeros(3))), "parameter 'bias' was added"),
    (lambda m: setattr(m.head, "bias", None), "parameter 'head.bias' was removed"),
    (lambda m: m.double(), r"parameter 'body.bias' had dtype torch.float32 and now has torch.float64"),
    (lambda m: setattr(m.head.weight, "data", torch.zeros(3, 4)), r"had shape \[3, 16\] and now has \[3, 4\]"),
]


@pytest.mark.parametrize(("change", "message"), OTHER_MODELS, ids=[m[:40] for _, m in OTHER_MODELS])
def test_another_model_is_refused(change: Callable[[Net], object], message: str) -> None:
    model = Net()
    watch = ModelWatch(model, [name for name, _ in model.named_parameters()], ())
    first = [watch.variant(mode) for mode in (True, False)]
    assert [watch.variant(mode) for mode in (True, False)] == first
    change(model)
    for _ in range(2):  # not only the first time
        with pytest.raises(RuntimeError, match=message):
            watch.variant(True)


@pytest.mark.parametrize("share", [True, False])
def test_a_trainer_refuses_it_and_goes_on_when_it_is_undone(share: bool) -> None:
    pair = Pair(Net(), share)
    pair.step()
    model = pair.models[0]
    head, model.head = model.head, nn.Linear(16, 3)
    for step in (pair.trainer.train_step, pair.trainer.eval_step):
        with pytest.raises(RuntimeError, match="the model has changed since the trainer was made: module 'head'"):
            step(torch.randn(2, 8), torch.randint(0, 3, (2,)))
    model.head = head
    pair.step()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)  # other objects, the same model
    pair.step()
    frozen = nn.Parameter(model.head.bias.detach().clone(), requires_grad=False)
    model.head.bias = frozen
    pair.reference.head.bias.requires_grad_(False)
    pair.step()
    frozen.requires_grad_(True)
    pair.reference.head.bias.requires_grad_(True)
    if share:
        return
    model.to("meta")
    pair.step()  # the graph exists, and the trainer has the weights
    model.scale = 0.5
    with pytest.raises(RuntimeError, match="'body.weight'.* are on the meta device now, but an export"):
        pair.trainer.train_step(torch.randn(2, 8), torch.randint(0, 3, (2,)))


def test_weights_assigned_before_the_first_step_are_those_that_train() -> None:
    pair = Pair(Net())
    state = {name: value + 0.1 if value.is_floating_point() else value for name, value in Net().state_dict().items()}
    pair.change(lambda m: m.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True))
    assert torch.equal(pair.trainer.get_parameter("head.bias"), state["head.bias"])
    pair.step()


def test_a_parameter_that_was_frozen_at_the_start_stays_so() -> None:
    model = Net()
    model.head.requires_grad_(False)
    trainer = ORTTrainer(model, DESC, optim.SGDConfig(), loss_fn=F.cross_entropy)
    model.head.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="'head.weight', 'head.bias' require grad now.*no optimizer state"):
            trainer.train_step(torch.randn(2, 8), torch.randint(0, 3, (2,)))
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="has no parameter to train"):
        trainer.train_step(torch.randn(2, 8), torch.randint(0, 3, (2,)))


def test_a_setting_that_changes_all_the_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ort_trainer.train.step_graphs._MAXIMUM_GRAPHS", 2)
    pair = Pair(Net())
    for momentum in (0.1, 0.2):  # a batch norm does more with it than to multiply
        pair.change(lambda m, momentum=momentum: setattr(m.norm, "momentum", momentum))
        pair.step()
    pair.models[0].norm.momentum = 0.3
    with pytest.raises(RuntimeError, match="exported 2 times already. Pass values that change often as tensor"):
        pair.trainer.train_step(torch.randn(2, 8), torch.randint(0, 3, (2,)))


def test_settings_of_a_loss_module_have_their_effect() -> None:
    loss_fn = nn.CrossEntropyLoss()
    model = Net()
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    options = ORTTrainerOptions({"utils": {"frozen_weights": [name for name, _ in model.named_parameters()][1:]}})
    trainer = ORTTrainer(model, DESC, optim.SGDConfig(lr=0.0), loss_fn=loss_fn, options=options)
    for smoothing in (0.0, 0.3, 0.0):
        loss_fn.label_smoothing = smoothing
        expected = loss_fn(copy.deepcopy(model)(x), y).detach()
        assert_close(trainer.train_step(x, y), expected, 1e-5, "loss")
    assert len(trainer.session.graphs(True)) == 2


class Configured(nn.Module):
    """A layer that reads a configuration, which is the same object for all layers, and what is imported."""

    def __init__(self, settings: dict[str, float]) -> None:
        super().__init__()
        self.layer, self.settings = nn.Linear(8, 8), settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.settings["scale"] if "math" in sys.modules else x


def test_what_all_layers_share_is_compared_once_and_imports_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"scale": 1.0, **{f"other{number}": 0.0 for number in range(100)}}
    model = nn.Sequential(*(Configured(settings) for _ in range(6)), nn.Linear(8, 3))
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    batch = torch.randn(4, 8), torch.randint(0, 3, (4,))
    trainer.train_step(*batch)
    compared: list[int] = []
    unchanged = trainer.loop.source.guard._reads._unchanged
    same_parts = unchanged.__globals__["has_same_parts"]
    monkeypatch.setitem(
        unchanged.__globals__, "has_same_parts", lambda now, then: compared.append(len(now)) or same_parts(now, then)
    )
    monkeypatch.setitem(sys.modules, "imported_meanwhile", sys)
    loss = trainer.train_step(*batch)[0]
    assert compared.count(len(settings)) == 1 and max(compared) < len(sys.modules) - 1
    settings["scale"] = 0.5
    assert trainer.train_step(*batch)[0] != loss
    assert len(trainer.loop.started().graphs(True)) == 2
