"""What a run reads and leaves outside tensors: errors, threads, buffers, numbers that change."""

from __future__ import annotations

import copy
import enum
import functools
import itertools
import json
import logging
import math
import os
import random
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from ort_trainer import ExportError, ORTModule, ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.outside.leftovers import decode, encode
from ort_trainer.outside.places import Access

from ..helpers import assert_close, assert_same_weights
from .programs import in_a_loop

X, Y = torch.randn(4, 6), torch.randint(3, (4,))


class Net(nn.Module):
    """Calls a function with itself and what it returns."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.fc(x))


@torch.fx.wrap
def _shifted(h: torch.Tensor, by: list[float] = [1.0]) -> torch.Tensor:  # noqa: B006
    return h + by[0]


def trainer_of(model: nn.Module, loss_fn: Any = F.cross_entropy) -> ORTTrainer:
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
    return ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn=loss_fn, options=options)


REFUSED: list[tuple[Net, str]] = [
    (
        Net(lambda net, h: [h, net.fc.bias.requires_grad_(False)][0]),
        "changes requires_grad of 'fc.bias'",
    ),
    (Net(lambda net, h: h * next(net.steps), steps=itertools.count(1)), "reads the iterator 'steps'"),
    (Net(lambda net, h: h * net.draw.random(), draw=random.Random(0)), "draws numbers from 'draw'"),
    (Net(lambda net, h: h * net.draw.random(), draw=np.random.default_rng(0)), "draws numbers from 'draw'"),
    (Net(lambda net, h: h * random.random()), "draws numbers from random,"),
    (Net(lambda net, h: h * float(np.random.rand())), "draws numbers from numpy.random,"),
    (Net(lambda net, h: setattr(net, "lock", threading.Lock()) or h), "leaves an object of the class lock in 'lock'"),
    (Net(lambda net, h: setattr(net, "more", nn.Linear(3, 3)) or net.more(h)), "makes or replaces modules"),
    (Net(lambda net, h: net.fc.register_forward_hook(lambda *_: None) and h), "makes or replaces modules"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_a_graph_can_not_do_is_refused_with_its_place(model: Net, message: str) -> None:
    before = set(vars(model)), list(model._modules)
    with pytest.raises(ExportError, match=message):
        trainer_of(model).train_step(X, Y)
    assert (set(vars(model)), list(model._modules)) == before


def _exchanges(net: Any, h: torch.Tensor) -> torch.Tensor:
    if net.kind == "sparse":  # as BigBird does for a short text: another module around the same layers
        dense = nn.Sequential(nn.Linear(3, 3), nn.ReLU())  # whose first weights take random numbers
        dense[0] = net.part[0]
        net.kind, net.part = "dense", dense
    net.__dict__["calls"].append(1)
    return net.part(h)


@pytest.mark.parametrize("evaluates", [False, True])
def test_modules_that_the_first_step_exchanges(evaluates: bool) -> None:
    models = [Net(_exchanges, kind="sparse", part=nn.Sequential(nn.Linear(3, 3), nn.Tanh()), calls=[]) for _ in "12"]
    models[1].load_state_dict(models[0].state_dict())
    trainer, sgd = trainer_of(models[0]), torch.optim.SGD(models[1].parameters(), lr=0.1)
    state = torch.get_rng_state()
    models[1](X)
    expected = torch.get_rng_state()
    torch.set_rng_state(state)
    if evaluates:
        trainer.eval_step(X, Y)
    for step in range(3):
        loss = F.cross_entropy(models[1](X), Y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        assert_close(trainer.train_step(X, Y)[0], loss.detach(), 1e-6, f"loss {step}")
        assert models[0].kind == "dense" and len(models[0].calls) == step + 1
    assert_same_weights(trainer, models[1], 1e-6)
    assert torch.equal(torch.get_rng_state(), expected) and not torch.equal(state, expected)


def test_modules_that_a_run_exchanges_after_it_has_drawn() -> None:
    model = Net(lambda net, h: _exchanges(net, F.dropout(h)), kind="sparse", part=nn.Sequential(nn.Tanh()), calls=[])
    with pytest.raises(ExportError, match="makes or replaces modules"):
        trainer_of(model).train_step(X, Y)
    assert model.kind == "sparse" and not model.calls


_numbers = itertools.count()


def _next_number() -> float:
    return float(next(_numbers))


def test_a_count_from_which_a_run_takes_nothing_is_no_iterator_that_it_reads() -> None:
    assert trainer_of(Net(lambda net, h: h * _next_number() if h.dim() > 2 else h)).train_step(X, Y)[0].isfinite()
    with pytest.raises(ExportError, match="reads the iterator 'global _numbers'"):
        trainer_of(Net(lambda net, h: h * _next_number() if h.dim() < 3 else h)).train_step(X, Y)


def _norm_outside(net: Any, h: torch.Tensor) -> torch.Tensor:
    return net.norms[0](h)


def _scheduled(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.step += 1
    return (
        h * (0.5 * (1 + math.cos(net.step / 10)))
        + math.pow(2, -net.step)
        + round(net.step / 3)
        + math.floor(net.step / 2)
    )


def test_functions_of_a_counter_need_one_graph() -> None:
    model = Net(_scheduled, step=0)
    reference = copy.deepcopy(model)
    trainer, sgd = trainer_of(model), torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(20):
        loss = F.cross_entropy(reference(X), Y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        assert_close(trainer.train_step(X, Y)[0], loss.detach(), 1e-5, f"loss {step}")
    assert len(trainer.session.graphs(True)) == 1


class Meter:
    def __init__(self) -> None:
        self.val, self.sum, self.count, self.avg, self.history = 0.0, 0.0, 0, 0.0, []

    def update(self, val: float, n: int) -> None:
        self.val, self.sum, self.count = val, self.sum + val * n, self.count + n
        self.avg = self.sum / self.count
        self.history.append(val)


class Metered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(prediction, label)
        self.meter.update(loss.item(), label.size(0))
        return loss


@pytest.mark.parametrize("kernels", ["auto", "compiled"])
def test_an_average_in_the_loss(kernels: str) -> None:
    reference, loss, their_loss = nn.Linear(6, 3), Metered(), Metered()
    options = {"utils": {"grad_norm_clip": False, "kernels": kernels}}
    trainer = ORTTrainer(copy.deepcopy(reference), "auto", optim.SGDConfig(lr=0.1), loss_fn=loss, options=options)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    for rows in (4, 3, 4):
        expected = their_loss(reference(X[:rows]), Y[:rows])
        sgd.zero_grad()
        expected.backward()
        sgd.step()
        assert_close(trainer.train_step(X[:rows], Y[:rows])[0], expected.detach(), 1e-5, "loss")
        assert {**vars(loss.meter), "history": 0} == pytest.approx({**vars(their_loss.meter), "history": 0})
        assert loss.meter.history == pytest.approx(their_loss.meter.history)
    assert len(trainer.session.graphs(True)) == 1


def test_a_buffer_that_is_none_at_first() -> None:
    def centred(net: Any, h: torch.Tensor) -> torch.Tensor:
        if net.is_centred and net.centre is None:
            net.centre = h.detach().mean(0)
        return h - net.centre if net.is_centred else h

    model = Net(centred, is_centred=False)
    model.register_buffer("centre", None)
    trainer = trainer_of(model)
    trainer.train_step(X, Y)
    model.is_centred = True
    with pytest.raises(ExportError, match="run the model once before"):
        trainer.train_step(X, Y)
    model(X)
    with pytest.raises(
        RuntimeError, match=r"buffers \['centre'\] were None when .* a new trainer that loads this one's"
    ):
        trainer.train_step(X, Y)
    other = trainer_of(model)
    other.load_state_dict(trainer.state_dict(), strict=False)
    expected = F.cross_entropy(model(X), Y).detach()
    assert_close(other.train_step(X, Y)[0], expected, 1e-5, "loss")


def _in_place(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.steps += 1
    return h * net.steps


UNDONE: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Callable[[], Any]]] = {
    "steps": (_in_place, lambda: torch.zeros(())),
    "norms": (_norm_outside, lambda: [nn.BatchNorm1d(3)]),
    "random": (lambda net, h: h * net.random.random(), lambda: random.Random(0)),
    "numpy": (lambda net, h: h * net.numpy.uniform(), lambda: np.random.default_rng(0)),
    "legacy": (lambda net, h: h * net.legacy.rand(), lambda: np.random.RandomState(0)),
    "torch": (lambda net, h: h * torch.rand(1, generator=net.torch), lambda: torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("name", UNDONE)
def test_pytorch_runs_a_call_from_where_it_was(name: str) -> None:
    function, make = UNDONE[name]
    model, reference = (Net(function, **{name: make()}) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    wrapped = ORTModule(model)
    for _ in range(2):
        assert torch.allclose(wrapped(X), reference(X), rtol=1e-5)


def test_containers_of_a_model_stay_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_TRAINER_EXPORT_IN_PROCESS", "1")
    settings: Any = {"scales": [2.0]}
    model = Net(lambda net, h: h * net.settings["scales"][0], settings=settings)
    trainer_of(model).train_step(X, Y)
    assert model.settings is settings
    assert model.settings["scales"] is settings["scales"]


def test_hooks_of_parameters_are_refused_later_too() -> None:
    model = Net(lambda net, h: h)
    trainer = trainer_of(model)
    trainer.train_step(X, Y)
    for register in (model.fc.weight.register_hook, model.fc.weight.register_post_accumulate_grad_hook):
        handle = register(lambda value: None)
        with pytest.raises(ExportError, match="'fc.weight' has a backward hook"):
            trainer.train_step(X, Y)
        handle.remove()
        trainer.train_step(X, Y)


def test_hooks_of_all_modules() -> None:
    model = Net(lambda net, h: h)
    trainer = trainer_of(model)
    before = trainer.eval_step(X, Y)[1]
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _, result: result * 2 if isinstance(module, nn.Linear) else None
    )
    assert_close(trainer.eval_step(X, Y)[1], before * 2, 1e-5, "outputs")
    handle.remove()
    assert_close(trainer.eval_step(X, Y)[1], before, 1e-5, "outputs")


class _Reversal(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * -_Reversal.scale


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: Any) -> torch.Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.owner.scale, None


def _with_hook(net: Any, h: torch.Tensor) -> torch.Tensor:
    h.register_hook(lambda gradient: gradient * net.owner.scale)
    return h


SCALES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Any]] = {
    "class": (lambda net, h: _Reversal.apply(h) * -1.0, _Reversal),
    "object": (lambda net, h: _Scaled.apply(h, net.owner), types.SimpleNamespace(scale=1.0)),
    "hook": (_with_hook, types.SimpleNamespace(scale=1.0)),
}


@pytest.mark.parametrize("kind", SCALES)
def test_a_setting_that_a_backward_pass_reads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, owner = SCALES[kind]
    model = Net(function, owner=owner)
    wrapped = ORTModule(model)
    for scale in (1.0, 0.25):
        monkeypatch.setattr(owner, "scale", scale)
        model.zero_grad()
        wrapped(X).sum().backward()
        assert torch.allclose(model.fc.bias.grad, torch.full((3,), 4 * scale))


def test_what_a_backward_pass_leaves_is_refused() -> None:
    def forward(net: Any, h: torch.Tensor) -> torch.Tensor:
        h.register_hook(lambda gradient: net.norms.append(gradient.norm()))
        return h

    model = Net(forward, norms=[])
    with pytest.raises(ExportError, match="the backward pass changes 'norms'"):
        trainer_of(model).train_step(X, Y)
    assert model.norms == []
    ORTModule(model)(X).sum().backward()
    assert len(model.norms) == 1 and type(model.norms[0]) is torch.Tensor


def test_tensors_outside_that_require_grad_get_it() -> None:
    model = Net(lambda net, h: net.parts[0](h) * net.factor, parts=[nn.Linear(3, 3)], factor=torch.ones(3).exp())
    model.parts[0].weight.grad = None
    ORTModule(model)(X).sum().backward()
    assert model.parts[0].weight.grad is not None
    with torch.no_grad():
        assert torch.allclose(ORTModule(model, {}, fallback="error")(X), model(X))


def _adds_to_a_weight(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.fc.bias.data.add_(1.0)
    return h


def _replaces_a_weight(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.fc.bias.data = net.fc.bias.data + 1.0
    return h


@pytest.mark.parametrize("forward", [_adds_to_a_weight, _replaces_a_weight])
def test_weights_that_a_run_changes_are_put_back(forward: Any) -> None:
    model, reference = Net(forward), Net(forward)
    reference.load_state_dict(model.state_dict())
    wrapped = ORTModule(model)
    for _ in range(2):
        wrapped(X), reference(X)
        assert torch.equal(model.fc.bias, reference.fc.bias)
    before = model.fc.bias.detach().clone()
    with pytest.raises(ExportError, match="changes a tensor through .data after it has computed with it"):
        trainer_of(model).train_step(X, Y)
    assert torch.equal(model.fc.bias, before)


def _reads_data(net: Any, h: torch.Tensor) -> torch.Tensor:
    return h * net.fc.weight.data.norm() - h.data.mean()


def _changes_a_buffer(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.mean.data.mul_(0.9).add_(h.data.mean(0))
    return h + net.mean


def _replaces_a_buffer(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.mean.data = net.mean.data * 0.9 + h.data.mean(0)
    return h + net.mean


@pytest.mark.parametrize("forward", [_reads_data, _changes_a_buffer, _replaces_a_buffer])
def test_data_of_tensors(forward: Any) -> None:
    """Reading it detaches, changing it changes the buffer."""
    model = Net(forward)
    model.register_buffer("mean", torch.zeros(3))
    reference = copy.deepcopy(model)
    trainer, optimizer = trainer_of(model), torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(reference(X), Y)
        loss.backward()
        optimizer.step()
        assert float(trainer.train_step(X, Y)[0]) == pytest.approx(loss.item(), rel=1e-5)
        assert_close(model.mean, reference.mean, 1e-5, "buffer")
    called = copy.deepcopy(reference)
    for net in (ORTModule(called, fallback="error"), reference):
        net.zero_grad()
        net(X).sum().backward()
    assert_close(called.fc.weight.grad, reference.fc.weight.grad, 1e-5, "gradient")
    assert_close(called.mean, reference.mean, 1e-5, "buffer of a call")


def _changes_what_was_read(net: Any, h: torch.Tensor) -> torch.Tensor:
    h = h.exp()
    h.data.clamp_(max=1.0)
    return h


def test_changes_that_autograd_does_not_notice_are_refused() -> None:
    model, reference = (Net(_changes_what_was_read) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    with pytest.raises(ExportError, match=r"changes a tensor through .data after it has computed with it"):
        trainer_of(model).train_step(X, Y)
    for net in (ORTModule(model), reference):
        net(X).sum().backward()
    assert torch.equal(model.fc.weight.grad, reference.fc.weight.grad)


def _cached_by_size(net: Any, h: torch.Tensor) -> torch.Tensor:
    key = (h.shape[0], "mask")
    if key not in net.cache:
        net.cache[key] = torch.full((h.shape[0], 1), float(len(net.cache) + 1))
    return h * net.cache[key]


def _told_by_size(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.last = f"a batch of {h.shape[0]}"
    return h * net.cache.setdefault(str(h.shape[0]), float(len(net.cache) + 1))


@pytest.mark.parametrize("function", [_cached_by_size, _told_by_size])
def test_sizes_as_keys_and_texts(function: Any) -> None:
    model, reference = (Net(function, cache={}, last="") for _ in range(2))
    reference.load_state_dict(model.state_dict())
    trainer, step_of_pytorch = trainer_of(model), in_a_loop(reference)
    for rows in (4, 3, 4):
        loss = step_of_pytorch(X[:rows], Y[:rows])
        assert float(trainer.train_step(X[:rows], Y[:rows])[0]) == pytest.approx(loss.item(), rel=1e-5)
        assert model.last == reference.last
    assert list(model.cache) == list(reference.cache)


def test_a_value_that_one_branch_leaves() -> None:
    def forward(net: Any, h: torch.Tensor) -> torch.Tensor:
        if (h.abs() > 1e3).any():
            return h * 0.0 + net.good
        net.good = h.detach().mean(0)
        return h

    model, reference = (Net(forward, good=torch.zeros(3)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    trainer = trainer_of(model)
    for x in (X, X * 1e5, X * 2):
        loss = F.cross_entropy(reference(x), Y)
        assert float(trainer.train_step(x, Y)[0]) == pytest.approx(loss.item(), rel=1e-5)
        assert_close(model.good, reference.good, 1e-5, "good")
        reference.load_state_dict(model.state_dict())


class _Flags(enum.Flag):
    A = 1
    B = 2
    C = 4


@pytest.mark.parametrize(
    "value",
    [
        *(slice(0, 2), range(3), b"ab", 3j, torch.strided, functools.partial(max, 2)),
        *((F.relu, {"at": torch.device("cpu")}), types.MappingProxyType({"a": 1}), {"a": 1}.values()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_constants_come_back_from_their_code(value: Any) -> None:
    code = json.loads(json.dumps(encode(value, [], {id(max): (Access("get", "model"),)})))
    again = decode(code, (), types.SimpleNamespace(model=max))
    assert repr(again) == repr(value) and type(again) is type(value)


def test_a_device_that_a_run_leaves() -> None:
    model = Net(lambda net, h: (vars(net).update(device=h.device, at=slice(len(h))), h)[1])
    trainer_of(model).train_step(X, Y)
    assert model.device == X.device and model.at == slice(len(X))


def test_combinations_of_flags() -> None:
    def forward(net: Any, h: torch.Tensor) -> torch.Tensor:
        net.seen = net.flags & (_Flags.A | _Flags.B)
        return h * 2 if _Flags.B in net.flags else h

    model = Net(forward, flags=_Flags.A, seen=None)
    trainer = trainer_of(model)
    for flags in (_Flags.A, _Flags.A | _Flags.B | _Flags.C, _Flags.A):
        model.flags = flags
        _, outputs = trainer.eval_step(X, Y)
        assert_close(outputs, model.fc(X) * (2 if _Flags.B in flags else 1), 1e-5, "outputs")
        trainer.train_step(X, Y)
        assert model.seen == flags & (_Flags.A | _Flags.B)


def test_equal_contents_are_no_change() -> None:
    def forward(net: Any, h: torch.Tensor) -> torch.Tensor:
        os.environ[__name__] = os.environ.get(__name__, "1") + ""  # as PyTorch sets its own, within a capture
        return h

    os.environ[__name__] = "a text of its own"
    model = Net(forward)
    trainer_of(model).train_step(X, Y)
    assert os.environ.pop(__name__) == "a text of its own"


def test_pytorch_draws_as_if_no_graph_had_been_tried() -> None:
    def forward(net: Any, h: torch.Tensor) -> torch.Tensor:
        return h * random.random() * float(np.random.rand())

    def outputs(module: Any) -> list[torch.Tensor]:
        random.seed(3)
        np.random.seed(3)
        return [module(X) for _ in range(2)]

    model = Net(forward)
    with pytest.warns(UserWarning, match="draws numbers from random and numpy.random"):
        ours = outputs(ORTModule(model))
    for found, expected in zip(ours, outputs(model), strict=True):
        assert torch.equal(found, expected)


def test_another_thread_may_draw_meanwhile() -> None:
    drawn: list[float] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.wait(0.001):
            drawn.append(random.random())
            np.random.rand()

    thread = threading.Thread(target=load)
    thread.start()
    trainer_of(Net(lambda net, h: h)).train_step(X, Y)
    ORTModule(Net(lambda net, h: h))(X)
    stop.set()
    thread.join()
    drawn += [random.random() for _ in range(1000)]
    assert len(set(drawn)) == len(drawn), "no number comes twice"


def test_functions_that_a_tracer_replaces() -> None:
    """As in models of timm: a function with the mark of torch.fx.wrap, read at two places."""
    model = Net(lambda net, h: _shifted(h) * net.twice(h), twice=lambda h: _shifted(h))
    ours = ORTModule(model, fallback="error")
    for _ in range(2):
        assert torch.allclose(ours(X), model(X))


def test_a_buffer_of_another_size() -> None:
    model = Net(lambda net, h: h * (net.scale.sum() / net.scale.shape[0]))
    model.register_buffer("scale", torch.arange(8.0) + 1)
    ours = ORTModule(model)
    for scale in (model.scale, torch.arange(5.0) * 3, model.scale[:4]):
        model.scale = scale
        assert torch.allclose(ours(X), model(X))
    trainer = trainer_of(model)
    trainer.train_step(X, Y)
    model.scale = model.scale[:2]  # at the same address
    with pytest.raises(RuntimeError, match=r"'scale' of Net now has shape \[2\]"):
        trainer.train_step(X, Y)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.tau = nn.Linear(6, 3), 1.0

    def forward(self, batch: dict[str, Any], alpha: float, warm: int = 0) -> torch.Tensor:
        scale = alpha * 2 if warm < 3 else alpha
        return self.fc(batch["x"]) * scale / self.tau


class Focal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gamma, self.step = nn.Linear(6, 3), 2.0, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        return torch.where(h > self.step, h, h.abs() ** self.gamma) + (h.abs() + 1).pow(exponent=self.gamma)


def test_a_tensor_that_no_place_leads_to_is_refused() -> None:
    logger: Any = logging.getLogger("of a test")
    logger.scale = torch.ones(4)
    trainer = trainer_of(Net(lambda net, h: h * logger.scale.sum()))
    with pytest.raises(ExportError, match=r"a tensor of shape \[4\] that was there before the step"):
        trainer.train_step(X, Y)


def test_exponents_and_bounds_become_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = Focal(), Focal()
    reference.load_state_dict(model.state_dict())
    trainer, step_of_pytorch = trainer_of(model), in_a_loop(reference)
    for step in range(5):
        monkeypatch.setitem(globals(), "step", step)  # no variable of forward, but an attribute there has its name
        model.gamma = reference.gamma = 2.0 - 0.3 * step
        model.step = reference.step = 0.1 * step
        loss = step_of_pytorch(X, Y)
        assert float(trainer.train_step(X, Y)[0]) == pytest.approx(loss.item(), rel=1e-5)
    assert len(trainer.session.graphs(True)) == 2


def test_numbers_that_change_become_inputs() -> None:
    model, reference = Annealed(), Annealed()
    reference.load_state_dict(model.state_dict())
    ours = ORTModule(model)
    for step in range(8):
        model.tau = reference.tau = 1.0 - 0.1 * step
        batch = {"x": X, "path": f"{step}.png"}
        for module in (ours, reference):
            module(batch, 0.5 * step, warm=step).square().sum().backward()
        assert torch.allclose(model.fc.weight.grad, reference.fc.weight.grad, rtol=1e-5)
    # The first call, the first with other numbers, and the first from the third step on, where another branch begins.
    assert sum(map(len, ours._graphs._by_kind.values())) == 3


def test_a_number_in_a_loss_becomes_an_input() -> None:
    weight = 1.0

    def loss_fn(prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(prediction, label) * weight

    model = Net(lambda net, h: h)
    trainer = trainer_of(model, loss_fn)
    with pytest.warns(UserWarning, match="loss_fn reads"):
        for weight in (1.0, 0.5, 0.25, 0.125):  # noqa: B007 - the loss reads it
            expected = loss_fn(model(X), Y).item()
            assert float(trainer.train_step(X, Y)[0]) == pytest.approx(expected, rel=1e-5)
    assert len(trainer.session.graphs(True)) == 2


def _decides_once(net: Any, h: torch.Tensor) -> torch.Tensor:
    if net.kind is None:
        net.kind = "one" if h.dtype == torch.float32 else "another"
    return h * 2 if net.kind == "one" else h * 3


def _warms_up(net: Any, h: torch.Tensor) -> torch.Tensor:
    warm, net.kind = net.kind, "warm"
    return h * 2 if warm else h * 3


def _toggles(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.kind = None if net.kind else "odd"
    return h * 2


@pytest.mark.parametrize(("function", "graphs"), [(_decides_once, 1), (_warms_up, 2), (_toggles, 2)])
def test_a_setting_that_the_first_step_makes(function: Any, graphs: int) -> None:
    model, reference = Net(function, kind=None), Net(function, kind=None)
    reference.load_state_dict(model.state_dict())
    trainer, step_of_pytorch = trainer_of(model), in_a_loop(reference)
    for step in range(5):
        if step == 3:  # back to the state of the first step
            assert len(trainer.session.graphs(True)) == graphs
            model.kind = reference.kind = None
        loss = step_of_pytorch(X, Y)
        assert float(trainer.train_step(X, Y)[0]) == pytest.approx(loss.item(), rel=1e-5)
        assert model.kind == reference.kind
    assert len(trainer.session.graphs(True)) == graphs


def test_no_code_of_the_model_runs_in_the_guard() -> None:
    model = nn.Sequential(spectral_norm(nn.Linear(6, 3)))
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    trainer = trainer_of(model)
    trainer.prepare((X, Y))
    trainer.eval_step(X, Y)
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, value in model.named_buffers():  # each access of the weight in training mode would change them
        assert torch.equal(value, buffers[name])


def test_hooks_that_the_first_run_makes() -> None:
    def forward(net: Any, h: torch.Tensor) -> torch.Tensor:
        if not getattr(net, "is_hooked", False):
            net.act.register_forward_hook(lambda module, args, output: output * net.factor)
            net.is_hooked = True
        return net.act(h)

    model, reference = (Net(forward, act=nn.Tanh(), factor=2.0) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    trainer = trainer_of(model)
    for factor in (2.0, 2.0, 3.0):
        model.factor = reference.factor = factor
        assert float(trainer.eval_step(X, Y)[0]) == pytest.approx(F.cross_entropy(reference(X), Y).item(), rel=1e-5)
    assert not model.act._forward_hooks and not hasattr(model, "is_hooked")
    assert torch.allclose(model(X), reference(X))


def test_hooks_that_count_by_the_id_of_a_module() -> None:
    """As those of torchinfo and thop do; a tracer may have stand-ins for the modules of a model that uses one twice."""
    counts: list[list[int]] = []
    for wrap in (ORTModule, lambda module: module):
        layer = nn.Linear(6, 6)
        model = nn.Sequential(layer, nn.Tanh(), layer)
        known = {id(layer): 0, id(model[1]): 0}

        def count(module: nn.Module, *_: Any, known: dict[int, int] = known) -> None:
            known[id(module)] += 1

        layer.register_forward_hook(count)
        model[1].register_forward_hook(count)
        wrapped = wrap(model)
        for _ in range(3):
            wrapped(X)
        counts.append(list(known.values()))
    assert counts[0] == counts[1] == [6, 3]


def _last_of_three(net: Any, h: torch.Tensor) -> torch.Tensor:
    h = h + net.queue[0]
    net.queue.append(h.detach().mean(0))
    return h


def _sum_of_three(net: Any, h: torch.Tensor) -> torch.Tensor:
    h = h + sum(net.queue)
    net.queue.append(h.detach().mean(0))
    return h


def _asks_whether_they_are_one(net: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * 2 if net.queue[0] is net.queue[1] else h + net.queue[0]
    net.queue.append(h.detach().mean(0))
    return h


@pytest.mark.parametrize(
    ("function", "graphs"), [(_last_of_three, 1), (_sum_of_three, 3), (_asks_whether_they_are_one, 3)]
)
def test_tensors_that_are_one_in_the_first_step(function: Any, graphs: int) -> None:
    model, reference = (Net(function, queue=deque([torch.zeros(3)] * 3, maxlen=3)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    trainer, step_of_pytorch = trainer_of(model), in_a_loop(reference)
    for _ in range(5):
        loss = step_of_pytorch(X, Y)
        assert float(trainer.train_step(X, Y)[0]) == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(model.queue, reference.queue, strict=True):
        assert_close(ours, theirs, 1e-5, "queue")
    assert len(trainer.session.graphs(True)) == graphs


def test_gradients_reach_what_is_left() -> None:
    def forward(net: Any, h: torch.Tensor) -> torch.Tensor:
        net.aux = h.square().mean()
        return h

    model, reference = Net(forward), Net(forward)
    reference.load_state_dict(model.state_dict())
    for module, net in ((ORTModule(model), model), (reference, reference)):
        (module(X).sum() + net.aux).backward()
    assert torch.allclose(model.fc.weight.grad, reference.fc.weight.grad)


def test_a_step_that_fails_leaves_nothing() -> None:
    def forward(net: Any, h: torch.Tensor) -> torch.Tensor:
        net.kept = h.detach()
        return h

    model = Net(forward, kept=None)
    options = ORTTrainerOptions({"debug": {"max_nonfinite_losses": 1}})
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)
    trainer.train_step(X, Y)
    kept = model.kept
    with pytest.raises(FloatingPointError):
        trainer.train_step(X * float("nan"), Y)
    assert model.kept is kept
    trainer.eval_step(X, Y)
    assert model.kept is kept, "evaluation leaves nothing"


class Settings:
    """As a config of transformers, of which saving sets an attribute."""

    def __init__(self) -> None:
        self.scale, self.dtype = 2.0, "auto"


class Cache:
    """Has an attribute of this name, too."""

    def start(self, h: torch.Tensor) -> torch.Tensor:
        self.dtype = "float32"
        return h


def test_what_only_other_code_assigns_is_no_change() -> None:
    model = Net(lambda net, h: Cache.start(Cache(), h) if h.ndim > 2 else h * net.settings.scale, settings=Settings())
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    trainer.train_step(X, Y)
    model.settings.dtype = "float32"
    trainer.train_step(X, Y)
    assert [graph.runs for graph in trainer.report().graphs] == [2]
