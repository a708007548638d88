"""ONNX models in ORTTrainer: PyTorch's numbers, step by step, and the errors."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from onnx.external_data_helper import convert_model_to_external_data
from torch import nn

from ort_trainer import ExportError, ORTTrainer, ORTTrainerOptions, amp, optim, register_onnx_operator
from ort_trainer.engine import ort as engine
from ort_trainer.onnx import user_operators

from ..helpers import (
    MLP,
    MLP_DESC,
    assert_close,
    assert_same_weights,
    mlp_batches,
    mlp_trainer,
)

pytestmark = pytest.mark.engine

NO_CLIPPING: dict[str, Any] = {"utils": {"grad_norm_clip": False}}


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 3, 2, 2)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2))
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))


class Recurrent(nn.Module):
    def __init__(self, kind: str, **arguments: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(4, 5, **arguments)
        self.head = nn.Linear(10 if arguments.get("bidirectional") else 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][-1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(x)).mean(1))


def spread(model: nn.Module) -> nn.Module:
    """Makes all weights different, because the exporter merges equal ones."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator) * 0.1)
    return model


def exported(model: nn.Module, sample: torch.Tensor, path: Path, axis: int = 0, training: bool = False) -> Path:
    """Exports a forward pass with PyTorch's older exporter, which keeps layers and the names of weights."""
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            copy.deepcopy(model),
            (sample,),
            str(path),
            dynamo=False,
            training=mode,
            do_constant_folding=False,
            opset_version=17,
            input_names=["x"],
            output_names=["logits"],
            dynamic_axes={"x": {axis: "batch"}, "logits": {0: "batch"}},
        )
    return path


def trained_in_pytorch(model: nn.Module, batches: list[Any], lr: float = 1e-2) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def random_batches(shape: list[int], axis: int = 0, tokens: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for step in range(8):
        size = [4, 3][step % 2]
        shape[axis] = size
        x = torch.randint(0, 12, shape, generator=generator) if tokens else torch.randn(shape, generator=generator)
        batches.append((x, torch.randint(0, 3, (size,), generator=generator)))
    return batches


CASES: dict[str, tuple[Any, list[int], int, bool]] = {
    "convolutions and batch norm": (ConvNet, [4, 2, 8, 8], 0, True),
    "attention": (Attention, [4, 6], 0, False),
    "lstm": (lambda: Recurrent("LSTM", num_layers=2, bidirectional=True), [3, 4, 4], 1, False),
    "gru": (lambda: Recurrent("GRU"), [3, 4, 4], 1, False),
    "rnn": (lambda: Recurrent("RNN", nonlinearity="relu"), [3, 4, 4], 1, False),
}


@pytest.mark.parametrize("name", CASES)
def test_exported_models_train_like_pytorch(name: str, tmp_path: Path) -> None:
    make, shape, axis, training = CASES[name]
    model = spread(make()).train(training)
    tokens = name == "attention"
    batches = random_batches(list(shape), axis, tokens)
    path = exported(model, batches[0][0], tmp_path / "m.onnx", axis, training)
    described: list[Any] = list(shape)
    described[axis] = "batch"
    description = {
        "inputs": [("x", described), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", 3])],
    }
    options = ORTTrainerOptions(NO_CLIPPING)
    trainer = ORTTrainer(path, description, optim.AdamConfig(lr=1e-2), loss_fn="cross_entropy", options=options)
    trainer.load_state_dict(model.state_dict(), strict=False)  # the export has run batch norm once
    losses = [trainer.train_step(x, y)[0].item() for x, y in batches]
    assert losses == pytest.approx(trained_in_pytorch(model, batches), rel=1e-4)
    assert len(trainer.session.graphs(True)) == 1
    state = trainer.state_dict(pytorch_format=True)
    known = {key: value for key, value in model.state_dict().items() if "num_batches" not in key}
    assert set(known) == set(state)
    for key, value in known.items():
        # The running variance is the population's in ONNX but the sample's in PyTorch. The true gradient of the bias of
        # attention's keys is zero, and Adam amplifies its rounding noise.
        tolerance = {"norm.running_var": 5e-2, "layer.self_attn.in_proj_bias": 5e-2}.get(key, 1e-3)
        assert_close(state[key], value.detach(), tolerance, key)


def test_what_save_as_onnx_wrote_trains_on(tmp_path: Path) -> None:
    model = MLP()
    first = mlp_trainer(NO_CLIPPING, model=model)
    batches = mlp_batches(9)
    theirs = trained_in_pytorch(copy.deepcopy(model), batches)
    ours = [first.train_step(x, y)[0].item() for x, y in batches[:3]]
    first.save_as_onnx(tmp_path / "1.onnx")
    second = ORTTrainer(
        tmp_path / "1.onnx", MLP_DESC, optim.AdamConfig(lr=1e-2), options=ORTTrainerOptions(NO_CLIPPING)
    )
    second.load_state_dict({key: value for key, value in first.state_dict().items() if key != "random"})
    assert set(second.state_dict(pytorch_format=True) if second.session else model.state_dict()) == set(
        model.state_dict()
    )
    ours += [second.train_step(x, y)[0].item() for x, y in batches[3:6]]
    second.save_as_onnx(tmp_path / "2.onnx")
    third = ORTTrainer(tmp_path / "2.onnx", "auto", optim.AdamConfig(lr=1e-2), options=ORTTrainerOptions(NO_CLIPPING))
    third.load_state_dict(second.state_dict())
    ours += [third.train_step(x, y)[0].item() for x, y in batches[6:]]
    assert ours == pytest.approx(theirs, rel=1e-4)
    third.export_for_inference(tmp_path / "3.onnx")
    x, y = batches[0]
    found = engine.InferenceSession(tmp_path / "3.onnx").run(None, {"x": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), third.eval_step(x, y)[1], rtol=1e-5, atol=1e-6)


def mlp_proto(tmp_path: Path) -> onnx.ModelProto:
    return onnx.load(exported(MLP(), mlp_batches(1)[0][0], tmp_path / "mlp.onnx"))


def test_losses_by_name_and_by_callable_and_the_users_proto(tmp_path: Path) -> None:
    proto = mlp_proto(tmp_path)
    before = proto.SerializeToString()
    smoothed = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)
    for loss_fn, reference in (("cross_entropy", F.cross_entropy), (smoothed, smoothed)):
        torch.manual_seed(0)
        model = MLP()
        trainer = ORTTrainer(proto, "auto", optim.SGDConfig(lr=0.1), loss_fn=loss_fn)
        trainer.prepare({"x": mlp_batches(1)[0][0], "label": mlp_batches(1)[0][1]})
        trainer.load_state_dict(model.state_dict())
        for x, y in mlp_batches(5):
            expected = reference(model(x), y)
            expected.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            loss, logits = trainer.train_step(x=x, label=y)
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
            assert logits.shape == (5, 3)
    assert proto.SerializeToString() == before


def test_an_onnx_model_has_its_state_at_once(tmp_path: Path) -> None:
    first = mlp_trainer(NO_CLIPPING)
    x, y = mlp_batches(1)[0]
    first.train_step(x, y)
    first.save_as_onnx(tmp_path / "m.onnx")

    def make() -> ORTTrainer:
        return ORTTrainer(tmp_path / "m.onnx", MLP_DESC, optim.AdamConfig(lr=1e-2))

    trainer = make()
    for name, value in first.state_dict(pytorch_format=True).items():
        assert torch.equal(trainer.state_dict(pytorch_format=True)[name], value)
    trainer.save_checkpoint(tmp_path / "c")
    trainer.save_as_onnx(tmp_path / "again.onnx")
    trainer.set_parameter("fc2.bias", torch.ones(3))
    other = make()
    other.load_state_dict(trainer.state_dict())
    other.prepare()
    assert len(other.session.graphs(True)) == 1
    assert torch.equal(other.train_step(x, y)[0], trainer.train_step(x, y)[0])
    other.load_checkpoint(tmp_path / "c")
    assert torch.equal(other.eval_step(x, y)[0], first.eval_step(x, y)[0])
    with pytest.raises(RuntimeError, match="the model's inputs are unknown before the first batch"):
        mlp_trainer().prepare()


def test_external_data(tmp_path: Path) -> None:
    proto = mlp_proto(tmp_path)
    plain = ORTTrainer(proto, MLP_DESC, optim.SGDConfig(lr=0.1), loss_fn="cross_entropy")
    convert_model_to_external_data(proto, location="weights.bin", size_threshold=0)
    onnx.save(proto, tmp_path / "external.onnx")
    trainer = ORTTrainer(tmp_path / "external.onnx", MLP_DESC, optim.SGDConfig(lr=0.1), loss_fn="cross_entropy")
    for x, y in mlp_batches(3):
        assert torch.equal(trainer.train_step(x, y)[0], plain.train_step(x, y)[0])
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ExportError, match="external data of 'fc1.weight' can't be read: .*weights.bin"):
        ORTTrainer(tmp_path / "external.onnx", MLP_DESC, optim.SGDConfig())
    lost = onnx.load(tmp_path / "external.onnx", load_external_data=False)
    with pytest.raises(ExportError, match="is in an external file, but only the model itself was given"):
        ORTTrainer(lost, MLP_DESC, optim.SGDConfig())


def test_dropout_is_drawn_by_the_trainer(tmp_path: Path) -> None:
    model = MLP(dropout=0.5)
    x, y = mlp_batches(1, size=40)[0]
    path = exported(model, x, tmp_path / "d.onnx", training=True)

    def losses() -> list[float]:
        torch.manual_seed(7)
        options = ORTTrainerOptions({"utils": {"random_numbers": "pytorch"}})
        trainer = ORTTrainer(path, MLP_DESC, optim.SGDConfig(lr=0.0), loss_fn="cross_entropy", options=options)
        found = [trainer.train_step(x, y)[0].item() for _ in range(4)]
        expected = F.cross_entropy(model.eval()(x), y)
        torch.testing.assert_close(trainer.eval_step(x, y)[0], expected.detach(), rtol=1e-5, atol=1e-6)
        return found

    first = losses()
    assert losses() == first and len(set(first)) == 4
    # The masks that PyTorch draws.
    torch.manual_seed(7)
    model.train()
    generator = torch.Generator().manual_seed(7)
    mask = torch.empty(40, 16).bernoulli_(0.5, generator=generator) * 2
    hidden = torch.tanh(model.fc1(x)) * mask
    assert F.cross_entropy(model.fc2(hidden), y).item() == pytest.approx(first[0], rel=1e-5)


def test_accumulation_frozen_weights_and_resume(tmp_path: Path) -> None:
    options = {
        "batch": {"gradient_accumulation_steps": 2},
        "utils": {"frozen_weights": ["fc1.weight"], "grad_norm_clip": False},
    }
    proto = mlp_proto(tmp_path)

    def make() -> ORTTrainer:
        config = optim.AdamConfig([{"params": ["fc2.weight"], "lambda_coef": 0.1}], lr=1e-2)
        return ORTTrainer(proto, MLP_DESC, config, loss_fn="cross_entropy", options=ORTTrainerOptions(options))

    torch.manual_seed(0)
    model = MLP()
    model.load_state_dict(
        {i.name: torch.from_numpy(onnx.numpy_helper.to_array(i).copy()) for i in proto.graph.initializer}
    )
    model.fc1.weight.requires_grad_(False)
    decayed, plain = [model.fc2.weight], [model.fc1.bias, model.fc2.bias]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    trainer = make()
    for step, (x, y) in enumerate(mlp_batches(8)):
        loss = F.cross_entropy(model(x), y)
        (loss / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        if step == 5:  # in the middle of a window
            trainer.save_checkpoint(tmp_path / "c")
            trainer = make()
            trainer.load_checkpoint(tmp_path / "c")
        torch.testing.assert_close(trainer.train_step(x, y)[0], loss.detach(), rtol=1e-4, atol=1e-6)
    for name, value in trainer.state_dict(pytorch_format=True).items():
        assert_close(value, model.state_dict()[name], 1e-4, name)


def test_mixed_precision(tmp_path: Path) -> None:
    scaler = amp.DynamicLossScaler(loss_scale=2.0**10, up_scale_window=3)
    precision = {"enabled": True, "loss_scaler": scaler}
    options = ORTTrainerOptions({**NO_CLIPPING, "mixed_precision": precision})
    proto = mlp_proto(tmp_path)
    trainer = ORTTrainer(proto, MLP_DESC, optim.AdamConfig(lr=1e-2), loss_fn="cross_entropy", options=options)
    model = MLP()
    trainer.prepare(mlp_batches(1)[0])
    trainer.load_state_dict(model.state_dict())
    theirs = trained_in_pytorch(model, mlp_batches(12))
    ours = []
    for step, (x, y) in enumerate(mlp_batches(12)):
        if step == 4:
            before = trainer.get_parameter("fc1.weight")
            trainer.train_step(x * torch.inf, y)
            assert not trainer.train_step_info.all_finite
            assert torch.equal(before, trainer.get_parameter("fc1.weight"))
        ours.append(trainer.train_step(x, y)[0].item())
    # Doubled after 3 finite steps, halved after the non-finite step, doubled after 3 and 3 and 2.
    assert trainer.train_step_info.optimization_step == 12 and trainer.loss_scaler.loss_scale == 2.0**12
    assert ours == pytest.approx(theirs, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_trained_in_single_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = MLP()
    half = copy.deepcopy(model).to(dtype)
    batches = mlp_batches(20)
    path = exported(half, batches[0][0].to(dtype), tmp_path / "m.onnx")
    description = {**MLP_DESC, "outputs": [("loss", [], True), ("logits", ["batch", 3])]}
    trainer = ORTTrainer(
        path, description, optim.SGDConfig(lr=0.1), loss_fn="cross_entropy", options=ORTTrainerOptions(NO_CLIPPING)
    )
    masters = copy.deepcopy(half).float()
    for x, y in batches:
        rounded = {name: value.to(dtype) for name, value in masters.named_parameters()}
        expected = F.cross_entropy(torch.func.functional_call(half, rounded, (x.to(dtype),)), y)
        expected.backward()
        assert trainer.train_step(x.to(dtype), y)[0].item() == pytest.approx(expected.item(), rel=2e-3)
        with torch.no_grad():
            for parameter in masters.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    for name, value in masters.named_parameters():
        assert trainer.get_parameter(name).dtype == torch.float32
        assert_close(trainer.get_parameter(name), value.detach(), 2e-3, name)
    trainer.save_as_onnx(tmp_path / "new.onnx")
    kind = onnx.TensorProto.BFLOAT16 if dtype == torch.bfloat16 else onnx.TensorProto.FLOAT16
    assert {tensor.data_type for tensor in onnx.load(tmp_path / "new.onnx").graph.initializer} == {kind}


def test_quantized_weights_are_frozen_and_pass_the_gradient_on() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    g (float[N,16] x) => (float loss)
    <int8[16,16] q, float[16] scales, uint8[8,1,8] nibbles, float[8] steps, float[16,16] w> {
      h = MatMul(x, w)
      d = DequantizeLinear<axis=1>(q, scales)
      a = MatMul(h, d)
      b = com.microsoft.MatMulNBits<K=16,N=8,bits=4,block_size=16>(a, nibbles, steps)
      s = Mul(b, b)
      loss = ReduceMean<keepdims=0>(s)
    }"""
    proto = onnx.parser.parse_model(text)
    draw = np.random.default_rng(0)
    values = {
        "q": draw.integers(-9, 9, (16, 16)).astype(np.int8),
        "scales": draw.uniform(0.01, 0.1, 16).astype(np.float32),
        "nibbles": draw.integers(0, 255, (8, 1, 8)).astype(np.uint8),
        "steps": draw.uniform(0.01, 0.1, 8).astype(np.float32),
        "w": draw.normal(size=(16, 16)).astype(np.float32),
    }
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
    trainer = ORTTrainer(proto, "auto", optim.SGDConfig(lr=0.1), options=ORTTrainerOptions(NO_CLIPPING))
    assert list(trainer.state_dict(pytorch_format=True)) == ["w"]
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    low, high = tensors["nibbles"].reshape(8, 8) & 15, tensors["nibbles"].reshape(8, 8) >> 4
    second = (torch.stack([low, high], -1).reshape(8, 16).float() - 8) * tensors["steps"][:, None]
    weight = tensors["w"].clone().requires_grad_()
    for size in (4, 5):
        x = torch.randn(size, 16)
        expected = (x @ weight @ (tensors["q"].float() * tensors["scales"]) @ second.T).square().mean()
        (gradient,) = torch.autograd.grad(expected, weight)
        torch.testing.assert_close(trainer.train_step(x), expected.detach())
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    torch.testing.assert_close(trainer.get_parameter("w"), weight.detach())


class Steep(torch.autograd.Function):
    """A sign whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def steep(x: torch.Tensor, sizes: list[int], *, scale: float = 1.0) -> torch.Tensor:
    return Steep.apply(x).reshape(sizes) * scale


def test_a_registered_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """<ir_version: 8, opset_import: ["" : 18, "my.own" : 2]>
    g (float[N,3,2] x) => (float loss)
    <float[3,1] w = {0.5, 2.0, 1.5}> {
      p = Mul(x, w)
      s = Shape(x)
      y = my.own.Steep<scale=3.0>(p, s)
      z = Sign(p)
      sum = Add(y, z)
      product = Mul(sum, x)
      loss = ReduceMean<keepdims=0>(product)
    }"""
    description = {"inputs": [("x", ["N", 3, 2])], "outputs": [("loss", [], True)]}

    def make() -> ORTTrainer:
        return ORTTrainer(onnx.parser.parse_model(text), description, optim.SGDConfig(lr=0.1))

    with pytest.raises(ExportError, match=r"operator Steep of my.own 2: it is not supported.*register_onnx_operator"):
        make()
    monkeypatch.setattr(user_operators, "_registered", defaultdict(list))
    register_onnx_operator("Steep", steep, domain="my.own", since=2, numbers=[1])
    register_onnx_operator("Sign", lambda x: x * 5)  # in place of the package's own
    trainer = make()
    for size in (2, 3):
        x = torch.randn(size, 3, 2)
        weight = trainer.get_parameter("w").clone().requires_grad_()
        p = x * weight
        expected = ((3 * Steep.apply(p) + 5 * p) * x).mean()
        expected.backward()
        torch.testing.assert_close(trainer.train_step(x), expected.detach())
        assert weight.grad is not None
        torch.testing.assert_close(trainer.get_parameter("w"), (weight - 0.1 * weight.grad).detach())
    assert len(trainer.session.graphs(True)) == 1
    with pytest.raises(TypeError, match="function must be callable, but 3 was given"):
        register_onnx_operator("A", 3)


def detached(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weight = (1 - p.softmax(-1).gather(1, y[:, None])[:, 0]).detach()
    return (F.cross_entropy(p, y, reduction="none") * weight).mean()


def straight_through(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(p + (p.round() - p).detach(), y)


@pytest.mark.parametrize("loss_fn", [detached, straight_through])
def test_a_loss_keeps_the_gradient_that_pytorch_gives_it(loss_fn: Any, tmp_path: Path) -> None:
    model = MLP()
    trainer = ORTTrainer(mlp_proto(tmp_path), MLP_DESC, optim.SGDConfig(lr=0.1), loss_fn=loss_fn)
    trainer.load_state_dict(model.state_dict())
    for x, y in mlp_batches(3):
        expected = loss_fn(model(x), y)
        assert trainer.train_step(x, y)[0].item() == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    assert_same_weights(trainer, model, 1e-4)


def test_losses_of_any_number_of_labels(tmp_path: Path) -> None:
    proto = mlp_proto(tmp_path)
    x, y = mlp_batches(1)[0]
    none = ORTTrainer(proto, "auto", optim.SGDConfig(), loss_fn=lambda out: out.mean())
    loss, logits = none.train_step(x)
    torch.testing.assert_close(loss, logits.mean())
    weight = torch.rand(len(x))
    two = ORTTrainer(
        proto,
        "auto",
        optim.SGDConfig(),
        loss_fn=lambda out, label, weight: (F.cross_entropy(out, label, reduction="none") * weight).mean(),
    )
    loss, logits = two.train_step(x=x, label=y, weight=weight)
    torch.testing.assert_close(loss, (F.cross_entropy(logits, y, reduction="none") * weight).mean())


def test_a_loss_that_is_detached_as_a_whole_and_a_batch_that_tells_nothing(tmp_path: Path) -> None:
    proto = mlp_proto(tmp_path)
    x, y = mlp_batches(1)[0]
    trainer = ORTTrainer(proto, MLP_DESC, optim.SGDConfig(), loss_fn=lambda p, y: F.cross_entropy(p, y).detach())
    with pytest.raises(ExportError, match="the loss depends on no trainable parameter"):
        trainer.train_step(x, y)
    trainer = ORTTrainer(proto, MLP_DESC, optim.SGDConfig(lr=0.0), loss_fn="cross_entropy")
    with torch.no_grad():
        assert trainer.train_step(x, torch.full_like(y, -100))[0].isnan()
        assert trainer.train_step(x, y)[0].isfinite()


TEXT = """<ir_version: 8, opset_import: ["" : 18, "my" : 1]>
    g (float[N,3] x, float[N] unused) => (float[N,3] h, float[N,3] y, float loss)
    <float[3] w = {0.5, 2.0, 1.5}, float[3] mean = {0.1, 0.2, 0.3},
     float[3] var = {1.0, 2.0, 3.0}, float[3] b = {0.0, 0.1, 0.2}>
    {
      h = my.normalized (x, w, b, mean, var)
      r = RandomNormalLike<mean=1.0, scale=0.1>(h)
      y = Mul(h, r)
      loss = ReduceMean<keepdims=0>(y)
    }
    <domain: "my", opset_import: ["" : 18]>
    normalized (x, w, b, mean, var) => (y) { y, m, v = BatchNormalization<training_mode=1>(x, w, b, mean, var) }"""


def test_functions_random_numbers_and_unused_inputs(tmp_path: Path) -> None:
    def make() -> ORTTrainer:
        torch.manual_seed(3)
        description = {"inputs": [("x", ["N", 3]), ("unused", ["N"])], "outputs": [("loss", [], True), ("y", ["N", 3])]}
        return ORTTrainer(onnx.parser.parse_model(TEXT), description, optim.SGDConfig(lr=0.1))

    x, unused = torch.randn(4, 3), torch.zeros(4)
    trainer = make()
    assert set(trainer.session.buffers) == {"mean", "var"} and set(trainer.session.parameters) == {"w", "b"}
    losses = [trainer.train_step(x, unused)[0].item() for _ in range(2)]
    mean = torch.tensor([0.1, 0.2, 0.3])
    for _ in range(2):
        mean = 0.9 * mean + 0.1 * x.mean(0)
    torch.testing.assert_close(trainer.state_dict(pytorch_format=True)["mean"], mean)
    trainer.save_checkpoint(tmp_path / "c")
    later = [trainer.train_step(x, unused)[0].item() for _ in range(2)]
    resumed = make()
    resumed.load_checkpoint(tmp_path / "c")
    assert [resumed.train_step(x, unused)[0].item() for _ in range(2)] == later and len({*losses, *later}) == 4
    noise = torch.empty(4, 3).normal_(generator=torch.Generator().manual_seed(3)) * 0.1 + 1.0
    weight = torch.tensor([0.5, 2.0, 1.5])
    expected = F.batch_norm(x, None, None, weight, torch.tensor([0.0, 0.1, 0.2]), True) * noise
    assert losses[0] == pytest.approx(expected.mean().item(), rel=1e-4, abs=1e-6)


def test_the_loss_function_takes_the_first_described_output(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(TEXT)
    description = {
        "inputs": [("x", ["N", 3]), ("unused", ["N"]), ("label", ["N", 3])],
        "outputs": [("mse", [], True), ("y", ["N", 3])],
    }
    trainer = ORTTrainer(proto, description, optim.SGDConfig(), loss_fn="mse")
    x, label = torch.randn(4, 3), torch.randn(4, 3)
    loss, y = trainer.train_step(x, torch.zeros(4), label)
    torch.testing.assert_close(loss, F.mse_loss(y, label), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"model_desc": {"inputs": [("a", [1]), ("y", [1])], "outputs": [("loss", [], True)]}},
            ValueError,
            r"model_desc has inputs \['a'\], but forward\(\) of OnnxModule takes \['x'\]",
        ),
        (
            {"model_desc": {**MLP_DESC, "outputs": [("loss", [], True), ("other", [1])]}},
            ValueError,
            r"unknown outputs \['other'\] in model_desc: the ONNX model has \['logits'\]",
        ),
        ({"loss_fn": None}, ValueError, r"unknown outputs \['loss'\] in model_desc: the ONNX model has \['logits'\]"),
        ({"loss_fn": "hinge"}, TypeError, r"or one of \['bce_with_logits', .*but 'hinge' was given"),
        ({"options": {"utils": {"frozen_weights": ["fc9"]}}}, ValueError, r"unknown parameters \['fc9'\] in utils"),
        ({"model": "no.onnx"}, FileNotFoundError, "no.onnx"),
        ({"model": Path(__file__)}, ExportError, "is not an ONNX model"),
        ({"model": onnx.ModelProto()}, ExportError, "the model is not an ONNX model: it has no nodes"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    given = {"model_desc": MLP_DESC, "loss_fn": "cross_entropy", **arguments}
    given["options"] = ORTTrainerOptions(arguments.get("options"))
    model = given.pop("model", None) or mlp_proto(tmp_path)
    if isinstance(arguments.get("model"), onnx.ModelProto):
        model = arguments["model"]
    with pytest.raises(error, match=message):
        ORTTrainer(model, optim_config=optim.SGDConfig(), **given)


def test_errors_of_the_first_step(tmp_path: Path) -> None:
    proto = mlp_proto(tmp_path)
    x, y = mlp_batches(1)[0]
    trainer = ORTTrainer(proto, MLP_DESC, optim.SGDConfig(), loss_fn="cross_entropy")
    with pytest.raises(TypeError, match=r"input 'x' has dtype torch.float64, but the ONNX model takes torch.float32"):
        trainer.train_step(x.double(), y)
    assert trainer.train_step_info.step == 0 and not trainer.session.graphs(True)
    vector = {**MLP_DESC, "outputs": [("logits", ["batch", 3], True)], "inputs": MLP_DESC["inputs"][:1]}
    with pytest.raises(ExportError, match=r"the loss must be a scalar, but its shape is \[\w+, 3\]"):
        ORTTrainer(proto, vector, optim.SGDConfig()).train_step(x)
    frozen = ORTTrainerOptions({"utils": {"frozen_weights": [i.name for i in proto.graph.initializer]}})
    none = ORTTrainer(proto, MLP_DESC, optim.SGDConfig(), loss_fn="cross_entropy", options=frozen)
    with pytest.raises(RuntimeError, match="OnnxModule has no parameter to train"):
        none.train_step(x, y)
    none.eval_step(x, y)


def test_batches_of_other_sizes_and_the_trained_file(tmp_path: Path) -> None:
    model = MLP()
    batches = [batch for size in (4, 7) * 10 for batch in mlp_batches(1, size, seed=size)]
    description = {**MLP_DESC, "outputs": [("loss", [], True), ("logits", ["batch", 3])]}
    options = ORTTrainerOptions(NO_CLIPPING)
    path = mlp_proto(tmp_path)
    trainer = ORTTrainer(path, description, optim.AdamConfig(lr=1e-2), loss_fn="cross_entropy", options=options)
    trainer.prepare(batches[0])
    trainer.load_state_dict(model.state_dict())
    ours = [trainer.train_step(x, y)[0].item() for x, y in batches]
    assert ours == pytest.approx(trained_in_pytorch(model, batches), rel=1e-4)
    assert_same_weights(trainer, model, 1e-4)
    assert len(trainer.session.graphs(True)) == 1
    x, y = batches[0]
    trainer.save_as_onnx(tmp_path / "trained.onnx")
    again = ORTTrainer(tmp_path / "trained.onnx", description, optim.SGDConfig(), loss_fn="cross_entropy")
    assert_close(again.eval_step(x, y)[0], trainer.eval_step(x, y)[0], 1e-6, "saved and loaded")
    with pytest.raises(TypeError, match=r"input 'x' has dtype torch.float64, but the ONNX model takes torch.float32"):
        ORTTrainer(path, description, optim.SGDConfig(), loss_fn="cross_entropy").train_step(x.double(), y)
