"""``model_desc="auto"``: what the first batch determines, and what later batches change."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ExportError, ORTTrainer, optim
from ort_trainer.capture.describe import name_sample

from ..fidelity.transformer_cases import CASES
from ..helpers import (
    MLP,
    MLP_DESC,
    assert_close,
    assert_same_training,
    assert_same_weights,
    mlp_batches,
)

TRANSFORMERS = {case.name: case for case in CASES}
CONFIG = optim.SGDConfig(lr=0.1)


def shapes(trainer: ORTTrainer) -> dict[str, list[int | str]]:
    return {entry.name: list(entry.shape) for entry in trainer.model_desc.inputs}


def test_a_transformer_with_its_loss_inside(tmp_path: Any) -> None:
    case = TRANSFORMERS["BERT, classification"]
    draw = torch.Generator().manual_seed(0)
    trainer = ORTTrainer(case.model(), "auto", CONFIG)
    loss, logits = trainer.train_step(**case.batch(draw, 4, 9))
    assert loss.shape == () and logits.shape == (4, 2)
    assert shapes(trainer) == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "sequence"],
        "labels": ["batch"],
    }
    assert trainer.model_desc.output_names == ["loss", "logits"]
    for batch, length in ((3, 7), (1, 9)):
        trainer.train_step(case.batch(draw, batch, length))
    assert len(trainer.session.graphs(True)) == 1
    trainer.save_as_onnx(tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    dims = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.output}
    assert dims == {"loss": [], "logits": ["batch", 2]}
    with pytest.raises(ValueError, match="Mismatch in dynamic shape sequence"):
        batch = case.batch(draw, 4, 9)
        trainer.train_step({**batch, "attention_mask": batch["attention_mask"][:, :8]})


def test_encoder_and_decoder_have_lengths_of_their_own() -> None:
    case = TRANSFORMERS["T5"]
    draw = torch.Generator().manual_seed(0)
    trainer = ORTTrainer(case.model(), "auto", CONFIG)
    batch = case.batch(draw, 4, 9)
    batch["labels"] = torch.randint(3, 50, (4, 9))  # as long as the input by chance
    trainer.train_step(**batch)
    assert shapes(trainer)["labels"] == ["batch", "labels_1"]
    trainer.train_step(**case.batch(draw, 4, 7))
    # The cache of keys and values is not a tensor, so the described outputs end there.
    assert trainer.model_desc.output_names == ["loss", "logits"]


def test_loss_function_by_position_and_by_name() -> None:
    x, label = mlp_batches(1)[0]
    for args, kwargs in (((x, label), {}), ((), {"x": x, "target": label}), ((), {"target": label, "x": x})):
        trainer = ORTTrainer(MLP(), "auto", CONFIG, loss_fn=F.cross_entropy)
        loss, output = trainer.train_step(*args, **kwargs)
        torch.testing.assert_close(loss, F.cross_entropy(output, label))
        assert shapes(trainer) == {"x": ["batch", 8], ("target" if kwargs else "label"): ["batch"]}


def test_optional_arguments_of_forward_are_not_taken_for_the_label() -> None:
    class Weighted(MLP):
        def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x if weight is None else x * weight)

    x, label = mlp_batches(1)[0]
    trainer = ORTTrainer(Weighted(), "auto", CONFIG, loss_fn=F.cross_entropy)
    trainer.train_step(x.numpy(), np.asarray(label))
    assert list(shapes(trainer)) == ["x", "label"]


def test_another_size_of_a_float_dimension_exports_anew(caplog: pytest.LogCaptureFixture) -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 3, 3)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.conv(image).mean((2, 3))

    model = Conv()
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.0), loss_fn=F.cross_entropy)
    with caplog.at_level(logging.WARNING, logger="ort_trainer"):
        for height in (8, 8, 9, 10, 8):
            image, label = torch.randn(4, 1, height, 8), torch.randint(0, 3, (4,))
            loss, _ = trainer.train_step(image, label)
            torch.testing.assert_close(loss, F.cross_entropy(model(image), label).detach())
    assert shapes(trainer)["image"] == ["batch", 1, "image_2", 8]
    assert len(trainer.session.graphs(True)) == 2
    assert caplog.text.count("exported again") == 1
    # Both graphs exist, and the first one is still valid for its one size only.
    assert trainer.eval_step(torch.randn(2, 1, 12, 8), torch.tensor([0, 1]))[1].shape == (2, 3)


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    cost: torch.Tensor
    nothing: Any = None


@pytest.mark.parametrize(
    ("returned", "names", "loss"),
    [
        (lambda y: {"logits": y, "loss": y.sum()}, ["logits", "loss"], "loss"),
        (lambda y: (y.sum(), y, (y, [y])), ["output_0", "output_1", "output_2_0", "output_2_1_0"], "output_0"),
        (lambda y: Output(y, y.sum()), ["value", "cost"], "cost"),
        (lambda y: {"loss": y.sum(), "x": y, "cache": object(), "late": y}, ["loss", "x_"], "loss"),
        (lambda y: y.mean(), ["output"], "output"),
        (lambda y: {"a_b": y, "a": {"b": y}, 0: y, "0": y, "l": y.sum()}, ["a_b", "a_b_", "0", "0_", "l"], "l"),
    ],
    ids=["dict", "tuple", "dataclass", "not tensors", "bare", "equal names"],
)
def test_which_output_is_the_loss(returned: Any, names: list[str], loss: str) -> None:
    class Model(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            return returned(super().forward(x))

    trainer = ORTTrainer(Model(), "auto", CONFIG)
    trainer.train_step(mlp_batches(1)[0][0])
    assert trainer.model_desc.output_names == names
    assert trainer.model_desc.loss.name == loss


def test_an_output_called_loss_beside_that_of_the_loss_function() -> None:
    class Model(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            return {"logits": super().forward(x), "loss": x.mean()}

    x, label = mlp_batches(1)[0]
    trainer = ORTTrainer(Model(), "auto", CONFIG, loss_fn=lambda y, label: F.cross_entropy(y["logits"], label))
    loss, logits, own = trainer.train_step(x, label)
    assert trainer.model_desc.output_names == ["loss", "logits", "loss_"]
    assert_close(loss, F.cross_entropy(logits, label), 1e-5, "loss")
    assert_close(own, x.mean(), 1e-5, "the model's own")


class Triplet(MLP):
    def forward(self, anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(super(Triplet, self).forward(x) for x in (anchor, positive, negative))


@pytest.mark.parametrize("desc", ["auto", "written"])
def test_a_loss_without_a_label(desc: str) -> None:
    def loss_fn(parts: Any, *, margin: float = 1.0) -> torch.Tensor:
        anchor, positive, negative = parts
        return F.relu(F.pairwise_distance(anchor, positive) - F.pairwise_distance(anchor, negative) + margin).mean()

    model, draw = Triplet(), torch.Generator().manual_seed(1)
    reference = copy.deepcopy(model)
    names = ["anchor", "positive", "negative"]
    written = {
        "inputs": [(name, ["batch", 8]) for name in names],
        "outputs": [("loss", [], True), ("out", ["batch", 3])],
    }
    trainer = ORTTrainer(model, "auto" if desc == "auto" else written, optim.SGDConfig(lr=0.1), loss_fn=loss_fn)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        if step == 2:
            trainer.loss_parameters["margin"] = 2.0
        batch = [torch.randn(5, 8, generator=draw) for _ in names]
        ours = trainer.train_step(**dict(zip(names, batch, strict=True))) if step else trainer.train_step(*batch)
        loss = loss_fn(reference(*batch), margin=2.0 if step == 2 else 1.0)
        assert_close(ours[0], loss.detach(), 1e-5, "loss")
        theirs.zero_grad()
        loss.backward()
        theirs.step()
    assert_same_weights(trainer, reference, 1e-5)
    assert trainer.model_desc.input_names == names
    with pytest.raises(TypeError, match="4 inputs were given"):
        trainer.train_step(*batch, batch[0])


def test_a_loss_parameter_is_not_a_label() -> None:
    def loss_fn(prediction: torch.Tensor, margin: torch.Tensor) -> torch.Tensor:
        return F.triplet_margin_loss(*prediction, margin=margin)

    x = torch.ones(5, 8)
    assert list(name_sample(Triplet(), loss_fn, (x, x, x), {}, ["margin"])) == ["anchor", "positive", "negative"]
    assert list(name_sample(MLP(), loss_fn, (x, x), {})) == ["x", "label"]


def test_further_labels_have_the_names_of_the_loss_function() -> None:
    def loss_fn(prediction: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (F.cross_entropy(prediction, target, reduction="none") * weight).mean()

    x, label = mlp_batches(1)[0]
    trainer = ORTTrainer(MLP(), "auto", CONFIG, loss_fn=loss_fn)
    trainer.train_step(x, label, torch.ones(5))
    assert trainer.model_desc.input_names == ["x", "label", "weight"]


class AnyName(MLP):
    """Takes arguments of any name, as Hugging Face's models do."""

    def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
        return super().forward(x)


def test_labels_beside_arguments_of_any_name() -> None:
    def weighted(output: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        loss = F.cross_entropy(output, target, reduction="none")
        return (loss if weight is None else loss * weight).mean()

    def both(output: torch.Tensor, soft: torch.Tensor, hard: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, hard) + F.mse_loss(output, soft)

    x, label = mlp_batches(1)[0]
    weight, soft = torch.rand(5), torch.rand(5, 3)
    for loss_fn, args, kwargs, values in (
        (weighted, (x, label, weight), {}, (label, weight)),
        (weighted, (), {"x": x, "target": label, "weight": weight}, (label, weight)),
        (weighted, (x, label), {}, (label,)),
        (both, (), {"x": x, "a": soft, "b": label}, (soft, label)),
        (F.cross_entropy, (x, label), {}, (label,)),
    ):
        model = AnyName()
        expected = loss_fn(model(x), *values).detach()
        trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.0), loss_fn=loss_fn)
        assert_close(trainer.eval_step(*args, **kwargs)[0], expected, 1e-5, str(kwargs))
    with pytest.raises(TypeError, match=r"inputs \['y'\] may be for forward.*name labels as .*\['target', 'weight'\]"):
        ORTTrainer(AnyName(), "auto", CONFIG, loss_fn=weighted).train_step(x=x, y=label, w=weight)


def test_a_loss_function_that_returns_nothing() -> None:
    x, label = mlp_batches(1)[0]
    with pytest.raises(ExportError, match=r"loss_fn returned None for the prediction and the labels \['label'\]"):
        ORTTrainer(MLP(), "auto", CONFIG, loss_fn=lambda output, target: None).train_step(x, label)


def test_what_is_not_clear() -> None:
    x, label = mlp_batches(1)[0]
    with pytest.raises(ValueError, match=r"which output is the loss.*\{'output': \[5, 3\]\}: return the loss as"):
        ORTTrainer(MLP(), "auto", CONFIG).train_step(x)
    loss_fn = nn.CrossEntropyLoss()
    with pytest.raises(TypeError, match=r"forward\(\) of MLP takes \['x'\], so \['a', 'b'\] are for loss_fn, but"):
        ORTTrainer(MLP(), "auto", CONFIG, loss_fn=loss_fn).train_step(x=x, a=label, b=label)
    with pytest.raises(TypeError, match=r"so \['label', 'label_2'\] are for loss_fn, but loss_fn does not take them"):
        ORTTrainer(MLP(), "auto", CONFIG, loss_fn=loss_fn).train_step(x, x, label)
    with pytest.raises(ValueError, match="must be a dict or 'auto', but 'automatic' was given"):
        ORTTrainer(MLP(), "automatic", CONFIG)
    with pytest.raises(RuntimeError, match="derived from the first batch"):
        _ = ORTTrainer(MLP(), "auto", CONFIG).model_desc

    class Nothing(MLP):
        def forward(self, x: torch.Tensor) -> Any:
            return "text"

    with pytest.raises(ExportError, match="returns no tensor"):
        ORTTrainer(Nothing(), "auto", CONFIG).train_step(x)


class Tokens(nn.Module):
    """Returns a loss only with targets, as many GPT models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits = self.head(self.embedding(tokens))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_targets_that_were_left_out_are_named() -> None:
    tokens = torch.randint(20, (4, 6))
    for given in ({}, {"targets": None}):
        with pytest.raises(ValueError, match=r"pass 'targets' as well, because forward\(\) of Tokens"):
            ORTTrainer(Tokens(), "auto", CONFIG).train_step(tokens=tokens, **given)
    description = {
        "inputs": [("tokens", ["batch", "length"])],
        "outputs": [("logits", ["batch", "length", 20]), ("loss", [], True)],
    }
    with pytest.raises(ExportError, match="return only 1 tensors: pass 'targets' as well"):
        ORTTrainer(Tokens(), description, CONFIG).train_step(tokens)


def test_predicting_needs_no_targets_of_any_length() -> None:
    model = Tokens()
    trainer = ORTTrainer(model, "auto", CONFIG)
    tokens = torch.randint(20, (4, 6))
    trainer.train_step(tokens, tokens)
    for shape in ((4, 6), (3, 9)):
        tokens = torch.randint(20, shape)
        assert_close(trainer.predict(tokens), model(tokens)[0].detach(), 1e-5, "logits")
    assert len(trainer.session.graphs(False)) == 1


class Segmenter(nn.Module):
    """Enlarges its prediction to the size of the labels, by a ratio of symbolic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, stride=4)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.interpolate(self.conv(image), size=labels.shape[-2:], mode="bilinear"), labels)


def test_ratios_of_symbolic_sizes() -> None:
    batches = [(torch.randn(2, 3, 16, 16), torch.randint(0, 5, (2, size, size))) for size in (16, 16, 11)]
    trainer = assert_same_training(
        Segmenter(), "auto", batches, CONFIG, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), loss_fn=None
    )
    assert len(trainer.session.graphs(True)) == 1


class IntegerLength(Tokens):
    """Checks the type of a size, as some libraries do."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        if type(tokens.shape[1]) is not int:
            raise TypeError("a length must be an int")
        return super().forward(tokens, targets)


def test_a_capture_that_fails_with_open_sizes_leaves_those_of_the_first_dimension(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = IntegerLength()
    expected = copy.deepcopy(model)
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.0))
    for shape in ((2, 6), (3, 6), (3, 4)):
        tokens = torch.randint(20, shape)
        loss = trainer.train_step(tokens, tokens)[1]
        assert_close(loss, expected(tokens, tokens)[1].detach(), 1e-5, "loss")
    fixes = [record.getMessage() for record in caplog.records if "fixes" in record.getMessage()]
    assert len(fixes) == 2 and fixes[0].endswith(
        "'targets_1' at 6: every other size needs its own export. With symbolic sizes, torch.export could not capture "
        "IntegerLength: TypeError: a length must be an int"
    )
    model = IntegerLength()
    model.forward = lambda tokens, targets: 1 / 0
    with pytest.raises(ExportError, match="ZeroDivisionError"):
        ORTTrainer(model, "auto", CONFIG).train_step(tokens, tokens)


class Observer(nn.Module):
    """Sizes its buffer in its first call, as an observer of a quantized layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("largest", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if not self.largest.numel():
                self.largest.resize_(3).zero_()
            self.largest.copy_(torch.maximum(self.largest, self.layer.weight.abs().amax(1)))
        return self.layer(x) / self.largest.clamp(min=1.0)


def test_a_buffer_that_gets_its_size_in_the_first_call() -> None:
    model = Observer()
    x, label = torch.randn(5, 4), torch.randint(3, (5,))
    with pytest.raises(ExportError, match=r"size of the buffers \['largest'\].*call the model once before"):
        ORTTrainer(model, "auto", CONFIG, loss_fn=F.cross_entropy).train_step(x, label)
    assert model.largest.shape == (0,)
    model(x)
    loss, prediction = ORTTrainer(model, "auto", CONFIG, loss_fn=F.cross_entropy).train_step(x, label)
    assert_close(loss, F.cross_entropy(prediction, label), 1e-5, "loss")


def test_later_batches_that_do_not_fit() -> None:
    x, label = mlp_batches(1)[0]
    trainer = ORTTrainer(MLP(), "auto", CONFIG, loss_fn=F.cross_entropy)
    trainer.train_step(x, label)
    with pytest.raises(TypeError, match=r"unknown inputs \['mask'\].*the first batch gave this description"):
        trainer.train_step(x=x, label=label, mask=x)
    with pytest.raises(ValueError, match="Mismatch in dynamic shape batch.*the first batch gave this description"):
        trainer.train_step(x, label[:3])
    with pytest.raises(TypeError, match=r"inputs \['label'\] are missing.*predict"):
        trainer.eval_step({"x": x})
    with pytest.raises(
        ValueError, match=r"MLP does not take .* \[5, 9\].*; earlier .*'x' \['batch', 8\]: mat1 and mat2"
    ):
        trainer.train_step(torch.randn(5, 9), label)
    with pytest.raises(TypeError, match=r"a list was given: make a tensor of it, torch.tensor\(...\)$"):
        trainer.train_step(x, label.tolist())
    with pytest.raises(TypeError, match=r"a list was given: make a tensor of it, torch.stack\(...\)$"):
        trainer.train_step(list(x), label)
    assert shapes(trainer)["x"] == ["batch", 8], "a wrong batch does not widen the description"
    trainer.train_step(x, label)
    with pytest.raises(TypeError, match="inputs of forward.* and a label, but only 1 value"):
        ORTTrainer(MLP(), "auto", CONFIG, loss_fn=F.cross_entropy).train_step(x)


def test_a_first_batch_that_is_refused_decides_nothing() -> None:
    x, label = mlp_batches(1)[0]
    refused = [(x.double(), label), (x, label[:1]), (x, label + 9), (x[:, :3], label), (x, label, label)]
    for batch in refused:
        trainer = ORTTrainer(MLP(), "auto", CONFIG, loss_fn=F.cross_entropy)
        with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)):
            trainer.train_step(*batch)
        trainer.train_step(x, label)
        assert shapes(trainer) == {"x": ["batch", 8], "label": ["batch"]}


def test_deriving_leaves_no_trace() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), MLP())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trainer = ORTTrainer(model.eval(), "auto", CONFIG, loss_fn=F.cross_entropy)
    trainer.prepare(mlp_batches(1)[0])
    assert torch.equal(torch.get_rng_state(), state) and not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Untidy(nn.Module):
    """Changes its input, counts in Python, appends to a list, and keeps values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self.calls = 0
        self.history: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        x.mul_(2)
        x[:, 0] = 0
        self.seen = x.sum()
        return self.fc(x) * len(self.history)


@pytest.mark.parametrize("in_process", [False, True])
def test_only_steps_of_training_leave_something(in_process: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_TRAINER_EXPORT_IN_PROCESS", "1" if in_process else "")
    model = Untidy()
    x, label = mlp_batches(1)[0]
    given = x.clone()
    expected = F.cross_entropy(copy.deepcopy(model)(x.clone()), label).detach()
    trainer = ORTTrainer(model, "auto", CONFIG, loss_fn=F.cross_entropy)
    trainer.prepare((x, label))
    assert model.calls == 0 and model.history == [] and not hasattr(model, "seen")
    assert torch.allclose(trainer.train_step(x, label)[0], expected)
    trainer.eval_step(x, label)
    assert torch.equal(x, given)
    assert model.calls == 1 and model.history == [1] and model.seen.shape == ()


def test_modules_are_described_in_their_own_modes() -> None:
    """In training mode, PyTorch refuses a batch norm of one row."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].eval()
    x, label = torch.randn(1, 6), torch.randint(3, (1,))
    expected = F.cross_entropy(model(x), label)
    trainer = ORTTrainer(model, "auto", CONFIG, loss_fn=F.cross_entropy)
    assert_close(trainer.train_step(x, label)[0], expected.detach(), 1e-6, "loss")
    assert not model[1].training and model.training


def test_a_forgotten_loss_function() -> None:
    x, label = mlp_batches(1)[0]
    advice = "if one is the label, pass the loss function as loss_fn"
    for args, kwargs in (((x, label), {}), ((), {"x": x, "label": label}), (({"x": x, "label": label},), {})):
        with pytest.raises(TypeError, match=rf"takes \['x'\]; {advice}"):
            ORTTrainer(MLP(), "auto", CONFIG).train_step(*args, **kwargs)
    with pytest.raises(ValueError, match=advice):
        ORTTrainer(MLP(), MLP_DESC, CONFIG)
    described = {"inputs": MLP_DESC["inputs"][:1], "outputs": MLP_DESC["outputs"][:1]}
    with pytest.raises(ExportError, match="if it is the prediction, pass the loss function as loss_fn"):
        ORTTrainer(MLP(), described, CONFIG).train_step(x)


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda x, label: (x.tolist(), label.tolist()), r"\['x', 'label'\] are no tensors: .*torch.tensor\("),
        (lambda x, label: (x, label.tolist()), r"\['label'\] are no tensors: make them with torch.tensor\("),
        (lambda x, label: (x, 3), r"\['label'\] are no tensors: make them with torch.tensor\("),
        (lambda x, label: (list(x), label), r"\['x'\] are no tensors: make them with torch.stack\("),
    ],
)
def test_lists_in_the_first_batch(convert: Any, message: str) -> None:
    with pytest.raises((TypeError, ExportError), match=message):
        ORTTrainer(MLP(), "auto", CONFIG, loss_fn=F.cross_entropy).train_step(*convert(*mlp_batches(1)[0]))


def test_an_unexpected_input_is_named() -> None:
    x, label = mlp_batches(1)[0]
    for args, kwargs in (((x, label), {"mask": x}), ((), {"x": x, "mask": x})):
        trainer = ORTTrainer(MLP(), "auto", CONFIG, loss_fn=F.cross_entropy if args else None)
        with pytest.raises(TypeError, match=r"unexpected input 'mask': forward\(\) of MLP takes \['x'\]"):
            trainer.train_step(*args, **kwargs)


def test_a_forward_that_fails_is_told_with_its_line() -> None:
    trainer = ORTTrainer(MLP(), "auto", CONFIG, loss_fn=F.cross_entropy)
    with pytest.raises(ExportError, match=r"(?s)runs MLP on the first batch.*RuntimeError.*mat1 and mat2.*in forward"):
        trainer.train_step(torch.randn(4, 5), torch.zeros(4, dtype=torch.long))


def test_a_model_on_the_cpu_leaves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the state of their generators would initialize them, which takes seconds and memory."""

    def fails(*_: Any) -> Any:
        raise AssertionError("a run on the CPU reads the state of a GPU")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", fails)
    trainer = ORTTrainer(nn.Sequential(nn.Linear(3, 2), nn.Dropout()), "auto", CONFIG, loss_fn=F.cross_entropy)
    before = torch.get_rng_state()
    trainer.prepare((torch.randn(4, 3, generator=torch.Generator()), torch.zeros(4, dtype=torch.int64)))
    assert torch.equal(torch.get_rng_state(), before)
