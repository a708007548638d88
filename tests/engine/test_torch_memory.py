"""Tensors that can't be read by their address: refused by name, wherever inputs are taken, or brought into memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.engine.torch_memory import TorchMemory, readable

X, LABEL = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
DESC = {
    "inputs": [("input", ["n", 6]), ("label", ["n"])],
    "outputs": [("loss", [], True), ("logits", ["n", 3])],
}


def masked() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return masked_tensor(X.clone(), torch.ones(4, 6, dtype=torch.bool))


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(4, 6)


def freed() -> torch.Tensor:
    tensor = torch.randn(4, 6)
    tensor.untyped_storage().resize_(0)
    return tensor


def transformed(transform: Any) -> torch.Tensor:
    """Returns a tensor that has left a transform of torch.func."""
    inside: list[torch.Tensor] = []
    transform(lambda x: inside.append(x) or x.sum())(X)
    return inside[0]


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([X, X[:2]])


WITHOUT: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "masked": (masked, r"a MaskedTensor: call to_tensor\(\)"),
    "fake": (fake, "a FakeTensor, which holds no values"),
    "meta": (lambda: X.to("meta"), "'meta', which holds no values"),
    "zero": (lambda: torch._efficientzerotensor(4, 6), r"a zero tensor: call clone\(\)"),
    "freed": (freed, "storage was freed"),
    "freed parameter": (lambda: nn.Parameter(freed()), "storage was freed"),
    "lazy": (nn.UninitializedParameter, "call the module once"),
    "vmap": (lambda: transformed(torch.func.vmap), "of a transform of torch.func, such as vmap"),
    "grad": (lambda: transformed(torch.func.grad), "of a transform of torch.func, such as vmap"),
    "functional": (lambda: torch._to_functional_tensor(X), "torch.func.functionalize"),
    "two tensors": (lambda: TwoTensor(X, X.clone()), "a TwoTensor, which holds no values: pass a plain tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), "to_padded_tensor"),
    "mkldnn": (X.to_mkldnn, r"torch._mkldnn: call to_dense\(\)"),
    "empty and meta": (lambda: torch.empty(0, 6, device="meta"), "'meta', which holds no values"),
    "empty and fake": (lambda: FakeTensorMode().from_tensor(torch.empty(0, 6)), "a FakeTensor"),
    "sparse": (X.to_sparse, r"torch.sparse_coo: call to_dense\(\)"),
    "rows": (X.to_sparse_csr, r"torch.sparse_csr: call to_dense\(\)"),
    "nested": (nested, "to_padded_tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), r"dequantize\(\)"),
}


@pytest.fixture(scope="module")
def faces() -> dict[str, Callable[[torch.Tensor], Any]]:
    """What takes inputs: both kinds of kernels in training and evaluation, and a module."""
    found: dict[str, Callable[[torch.Tensor], Any]] = {}
    for kernels in ("pytorch", "onnxruntime"):
        options = ORTTrainerOptions({"utils": {"kernels": kernels}})
        trainer = ORTTrainer(nn.Linear(6, 3), DESC, optim.SGDConfig(lr=0.0), loss_fn=F.cross_entropy, options=options)
        trainer.train_step(X, LABEL)
        found[f"train_step, {kernels}"] = lambda x, trainer=trainer: trainer.train_step(x, LABEL)[1]
    found["eval_step"] = lambda x: trainer.eval_step(x, LABEL)[1]
    found["predict"] = trainer.predict
    first = ORTTrainer(nn.Linear(6, 3), DESC, optim.SGDConfig(lr=0.0), loss_fn=F.cross_entropy)
    found["a first step"] = lambda x: first.train_step(x, LABEL)[1]
    module = ORTModule(nn.Linear(6, 3), fallback="error")
    module(X)
    found["module"] = module
    return found


@pytest.mark.parametrize("name", WITHOUT)
def test_a_tensor_without_values_in_memory_is_refused(
    name: str, faces: dict[str, Callable[[torch.Tensor], Any]]
) -> None:
    make, match = WITHOUT[name]
    for face in faces.values():
        with pytest.raises(TypeError, match=rf"input 'input' must be an ordinary tensor.*{match}"):
            face(make())


def test_a_tensor_that_is_negated_when_it_is_read(faces: dict[str, Callable[[torch.Tensor], Any]]) -> None:
    value = torch._neg_view(-X)
    assert value.is_neg()
    for what, face in faces.items():
        torch.testing.assert_close(face(value), face(X), msg=what)


def test_gradients_go_through_a_negated_input() -> None:
    x = X.clone().requires_grad_()
    module = nn.Linear(6, 3)
    ours, theirs = (torch.autograd.grad(m(torch._neg_view(x)).sum(), x)[0] for m in (ORTModule(module), module))
    torch.testing.assert_close(ours, theirs)


def test_parameters_that_are_negated_when_they_are_read() -> None:
    model = nn.Linear(6, 3)
    model.weight = nn.Parameter(torch._neg_view(model.weight.detach().clone()))
    expected = model(X)
    trainer = ORTTrainer(model, DESC, optim.SGDConfig(lr=0.0), loss_fn=F.cross_entropy)
    trainer.train_step(X, LABEL)
    torch.testing.assert_close(trainer.predict(X), expected.detach())


def test_ordinary_tensors_are_themselves() -> None:
    for value in (X, nn.Parameter(X), X[:0], X[:, :0], X.t(), torch.tensor(1.0), X.bool(), X.bfloat16()):
        assert readable("x", value) is value
    value = torch.complex(X, X).conj()
    assert not readable("x", value).is_conj() and torch.equal(readable("x", value), value)


def test_nothing_is_bound_at_address_zero() -> None:
    """The last resort, behind the checks of inputs."""
    memory = TorchMemory(torch.device("cpu"))
    for make, _ in (WITHOUT[name] for name in ("fake", "zero", "freed")):
        with pytest.raises(TypeError, match="'state' must be an ordinary tensor"):
            memory._described("state", make())
    assert memory._described("empty", X[:0])[-1]


@pytest.mark.parametrize("key", ["0.weight", "1.running_mean"])
def test_a_model_whose_storage_was_freed(key: str) -> None:
    """As FSDP frees it: before there is a graph, and later."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))

    def free(model: nn.Module) -> nn.Module:
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        tensors[key].untyped_storage().resize_(0)
        return model

    with pytest.raises(ValueError, match=rf"the storage of \['{key}'\] of Sequential was freed"):
        ORTTrainer(free(model()), "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    own = model()
    trainer = ORTTrainer(own, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    trainer.train_step(X, LABEL)
    free(own)
    for call in (trainer.train_step, trainer.eval_step):
        with pytest.raises(RuntimeError, match=f"'{key}' of Sequential has lost its value, because its storage was"):
            call(X, LABEL)
    for policy in ("error", "warn"):
        with pytest.raises(ValueError, match=rf"the storage of \['{key}'\] of Sequential was freed"):
            ORTModule(free(model()), fallback=policy)(X)
        own = model()
        module = ORTModule(own, fallback=policy)
        module(X)
        free(own)
        with pytest.raises(ValueError, match=rf"the storage of \['{key}'\] of Sequential was freed"):
            module(X)
