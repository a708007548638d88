"""Models that can't be exported: refused before anything runs, with a way out."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from ort_trainer import ExportError, ORTTrainer, ORTTrainerOptions, optim

from ..helpers import MLP, MLP_DESC, assert_same_weights, mlp_batches, mlp_trainer

DESC = {"inputs": [("x", ["b", 8]), ("y", ["b"])], "outputs": [("loss", [], True)]}
X, Y = mlp_batches(1)[0]


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return MLP()


def with_sparse_buffer() -> nn.Module:
    model = MLP()
    model.register_buffer("eye", torch.eye(3).to_sparse())
    return model


def lazy() -> nn.Module:
    model = MLP()
    model.fc1 = nn.LazyLinear(16)
    return model


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return MLP()


class _FabricModule(MLP):
    """Stands in for Fabric's wrapper of a model, which is recognized by its name."""


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: torch.compile(MLP()), TypeError, r"model is the result of torch.compile\(\).*model._orig_mod"),
        (lambda: nn.DataParallel(MLP()), TypeError, "model is a DataParallel.*use the module inside, model.module"),
        (lambda: _FabricModule(), TypeError, r"was returned by Fabric.setup\(\).*use the module inside, model.module"),
        (lambda: torch.jit.script(nn.Linear(8, 3)), TypeError, "model is a TorchScript module"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(8, 3))), TypeError, "model.0 is a TorchScript module"),
        (lazy, ValueError, r"\['fc1.weight', 'fc1.bias'\] of MLP are lazy.*run the model once"),
        (with_sparse_buffer, ValueError, r"\['eye'\] of MLP are sparse.*to_dense\(\), or train .* ORTModule"),
        (on_meta, ValueError, "are on the meta device and have no values yet: initialize the model first"),
        (made_in_inference_mode, ValueError, r"were made under torch.inference_mode\(\)"),
    ],
)
def test_models_that_are_refused(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mlp_trainer(model=make())


@pytest.mark.parametrize("part", ["in place", "layer", "loss"])
def test_what_is_compiled_inside_is_exported_as_it_is(part: str) -> None:
    model, plain = MLP(), MLP()
    plain.load_state_dict(model.state_dict())
    if part == "in place":
        model.compile()
    elif part == "layer":
        model.fc1 = torch.compile(model.fc1)
    else:
        loss_fn = torch.compile(nn.CrossEntropyLoss())
        ours = ORTTrainer(model, MLP_DESC, optim.AdamConfig(lr=1e-2), loss_fn=loss_fn)
        assert torch.equal(ours.train_step(X, Y)[0], mlp_trainer(model=plain).train_step(X, Y)[0])
        return
    assert torch.equal(mlp_trainer(model=model).train_step(X, Y)[0], mlp_trainer(model=plain).train_step(X, Y)[0])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_steps_do_not_depend_on_the_mode_of_autograd(context, tmp_path) -> None:
    model = MLP(dropout=0.5)
    plain, inside = mlp_trainer(model=copy.deepcopy(model)), mlp_trainer(model=copy.deepcopy(model))
    batches = mlp_batches(4)
    for trainer in (plain, inside):
        torch.manual_seed(0)
        if trainer is plain:
            trainer.train_step(*batches[0])
    with context():
        inside.train_step(*(value.clone() for value in batches[0]))
        inside.eval_step(X, Y)
    for batch in batches[1:]:
        for trainer in (plain, inside):
            trainer.train_step(*batch)
    with context():
        inside.save_checkpoint(tmp_path / "a.ortckpt")
        inside.load_checkpoint(tmp_path / "a.ortckpt")
        inside.set_parameter("fc1.bias", torch.zeros(16))
    plain.set_parameter("fc1.bias", torch.zeros(16))
    assert torch.equal(plain.train_step(X, Y)[0], inside.train_step(X, Y)[0])
    found = inside.state_dict(pytorch_format=True)
    assert all(torch.equal(value, found[name]) for name, value in plain.state_dict(pytorch_format=True).items())


class Stateful(nn.Module):
    """Keeps a tensor that is not a buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self.kind = kind
        self.plain = torch.zeros(3)
        self.left: torch.Tensor | None = None
        self.kept = [torch.zeros(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "in place":
            self.plain.add_(torch.arange(3.0))
        elif self.kind == "a view":
            self.plain[1:].mul_(2.0)
        elif self.kind == "in a list":
            self.kept[0].add_(1.0)
        elif self.kind == "read in the next call":
            self.left = x.mean(0)[:3] if self.left is None else self.left.detach() * 0.5 + x.mean(0)[:3]
            return self.fc(x) + self.left
        elif self.kind == "table":
            if self.left is None or self.left.shape[0] != x.shape[1]:
                self.left = torch.cos(torch.arange(x.shape[1]).float())
            return self.fc(x * self.left)
        elif self.kind == "of the weights":
            if self.left is None:
                self.left = self.fc.weight.detach().sum(0)
            return self.fc(x * self.left)
        elif self.kind == "not read":
            self.left = x.mean(0)
        elif self.kind == "assigned":
            self.plain = self.plain + torch.arange(3.0)
        local = torch.tensor([1.0, 2.0, 3.0])
        local[0] = 5.0
        return self.fc(x) + self.plain + local.mul_(2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("in place", "changes the attribute 'plain' in place, a plain tensor.*self.plain.add_"),
        ("a view", r"changes the attribute 'plain' in place, a plain tensor.*self.plain\[1:\]"),
        ("in a list", r"changes a tensor from outside in place, a plain tensor.*self.kept\[0\]"),
    ],
)
def test_tensors_that_are_no_buffers_can_not_change(kind: str, message: str) -> None:
    trainer = ORTTrainer(Stateful(kind), DESC, optim.SGDConfig(), loss_fn=F.cross_entropy)
    with pytest.raises(ExportError, match=f"(?s){message}"):
        trainer.train_step(X, Y)


@pytest.mark.parametrize("kind", ["read", "not read", "table", "read in the next call", "of the weights", "assigned"])
def test_tensors_that_are_no_buffers_can_be_read_or_left(kind: str) -> None:
    model, reference = Stateful(kind), Stateful(kind)
    reference.load_state_dict(model.state_dict())
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
    trainer = ORTTrainer(model, DESC, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        loss = F.cross_entropy(reference(X), Y)
        assert torch.allclose(trainer.train_step(X, Y), loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kept = "plain" if kind == "assigned" else "left"
    if kind != "read":
        assert torch.allclose(getattr(model, kept), getattr(reference, kept))


class Buffers(nn.Module):
    """Assigns buffers: from the input, from each other, from values that require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)
        for name in ("row", "older", "newer", "mean"):
            self.register_buffer(name, torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.fc(x + self.older) + self.mean[:3]
        self.row = x[0]
        self.newer, self.older = self.older + self.row, self.newer
        self.mean = result.mean() * torch.arange(8.0)
        return result


def test_buffers_can_be_assigned_from_inputs_and_from_each_other() -> None:
    model = Buffers()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
    trainer = ORTTrainer(model, DESC, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)
    for x, y in mlp_batches(4):
        loss = F.cross_entropy(reference(x), y)
        assert torch.allclose(trainer.train_step(x, y), loss.detach(), rtol=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reference.mean = reference.mean.detach()
    assert_same_weights(trainer, reference, 1e-5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cayley", r"_linalg_(check_errors|solve_ex).default has no ONNX translation.*: module '0\.parametrizations"),
        ("householder", "linalg_householder_product.default has no ONNX translation: module '0.parametrizations"),
    ],
)
@pytest.mark.options(kernels="onnxruntime")
def test_an_operator_of_a_library_is_named_with_its_module(kind: str, message: str) -> None:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map=kind), nn.Linear(8, 3))
    desc = {**DESC, "inputs": [("input", ["b", 8]), ("y", ["b"])]}
    with pytest.raises(ExportError, match=f"(?s){message}"):
        ORTTrainer(model, desc, optim.SGDConfig(), loss_fn=F.cross_entropy).train_step(X, Y)


def test_a_trainer_can_not_be_copied() -> None:
    trainer = mlp_trainer()
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"an ORTTrainer can't be .*trainer.state_dict\(\)"):
            attempt(trainer)


def test_trainers_that_start_in_several_threads() -> None:
    results: dict[int, object] = {}
    models = [MLP(dropout=0.1) for _ in range(3)]

    def work(number: int) -> None:
        try:
            trainer = ORTTrainer(models[number], MLP_DESC, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
            trainer.eval_step(X, Y)
            trainer.train_step(X, Y)
            results[number] = trainer
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    work(2)
    for thread in threads:
        thread.join()
    for number, model in enumerate(models):
        trainer = results[number]
        assert isinstance(trainer, ORTTrainer), trainer
        alone = ORTTrainer(model, MLP_DESC, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
        alone.train_step(X, Y)
        found = trainer.state_dict(pytorch_format=True)
        assert all(torch.equal(value, found[name]) for name, value in alone.state_dict(pytorch_format=True).items())


@pytest.mark.parametrize(("kernels", "relative"), [("pytorch", 1e-5), ("onnxruntime", 1e-3)])
def test_bfloat16_parameters_are_trained_as_float32(kernels: str, relative: float) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 16).bfloat16()
            self.head = nn.Linear(16, 3)
            self.register_buffer("shift", torch.ones(16, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(x.bfloat16()) + self.shift).float())

    model = Narrow()
    reference = copy.deepcopy(model)
    masters = [p.detach().float().requires_grad_() for p in reference.parameters()]
    optimizer = torch.optim.AdamW(masters, 0.01, weight_decay=0.01)
    config, options = optim.AdamConfig(lr=0.01, lambda_coef=0.01), ORTTrainerOptions({"utils": {"kernels": kernels}})
    trainer = ORTTrainer(model, DESC, config, loss_fn=F.cross_entropy, options=options)
    for x, y in mlp_batches(10, size=16):
        loss = F.cross_entropy(reference(x), y)
        assert torch.allclose(trainer.train_step(x, y), loss.detach(), rtol=1e-4)
        reference.zero_grad()
        loss.backward()
        for master, parameter in zip(masters, reference.parameters(), strict=True):
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, reference.parameters(), strict=True):
                parameter.copy_(master)
    assert_same_weights(trainer, reference, relative)
    assert trainer.get_parameter("body.weight").dtype == torch.float32
    model.load_state_dict(trainer.state_dict(pytorch_format=True))
    trainer.load_state_dict(trainer.state_dict())


@pytest.mark.parametrize(
    ("draw", "name"), [(random.random, "random"), (np.random.rand, r"numpy\.random"), (lambda: 1.0, "")]
)
def test_random_numbers_from_outside_torch_are_refused(draw: Callable[[], float], name: str) -> None:
    class Drawing(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * draw()

    random.seed(1)
    np.random.seed(1)
    expected = draw()
    random.seed(1)
    np.random.seed(1)
    trainer = ORTTrainer(Drawing(), "auto", optim.SGDConfig(), loss_fn=F.cross_entropy)
    context = (
        pytest.raises(ExportError, match=f"draws numbers from {name}, which") if name else contextlib.nullcontext()
    )
    with context:
        trainer.train_step(torch.rand(5, 8), torch.tensor([0, 1, 2, 0, 1]))
    assert not name or draw() != expected, "no generator of the process is put back"


def test_gradients_of_the_loss_to_tensors_outside_the_model() -> None:
    """A teacher's parameters require grad as well, but usually no gradient reaches them."""
    weight, teacher = nn.Parameter(torch.tensor(0.5)), nn.Linear(8, 3)

    def weighted(prediction: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return (F.mse_loss(prediction, target) + F.mse_loss(prediction, teacher(x).detach())) * weight

    reference = nn.Linear(8, 3)
    model = copy.deepcopy(reference)
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn=weighted)
    message = r"passes gradients to \['loss_fn.<variable 1>'\], .*: make them parameters of the model, or .* ORTModule"
    with pytest.raises(ExportError, match=message):
        trainer.train_step(X, X)
    weight.requires_grad_(False)
    expected = weighted(reference(X), X)
    torch.testing.assert_close(trainer.train_step(X, X)[0], expected.detach())
    weight.requires_grad_(True)
    with pytest.raises(ExportError, match=message):
        trainer.train_step(X, X)
    torch.testing.assert_close(trainer.eval_step(X, X)[0], weighted(model(X), X).detach())
