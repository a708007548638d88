"""Arguments of forward(): tuples, dicts, None, numbers; several labels; numbers that a loss reads."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim
from tests.helpers import MLP, MLP_DESC, Reference, assert_close, mlp_batches, mlp_trainer

State = tuple[torch.Tensor, torch.Tensor]


class Recurrent(nn.Module):
    """Has a state of two tensors, as an LSTM, which takes longer to export."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(
        self, x: torch.Tensor, state: State | None = None, scale: float = 1.0, extra: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, State]:
        h, c = (x.new_zeros(1, len(x), 8),) * 2 if state is None else state
        h = torch.tanh(self.inner(x).mean(1) + self.outer(h))
        c = 0.5 * c + h
        y = c[0]
        if extra is not None:
            y = y + extra["bias"] * (2.0 if extra["double"] else 1.0)
        return self.head(y) * scale, (h, c)


def weighted(output: tuple[torch.Tensor, State], label: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(output[0], label, reduction="none") * weight).mean()


NESTED = {
    "inputs": [
        ("x", ["batch", "time", 4]),
        ("state.0", [1, "batch", 8]),
        ("state.1", [1, "batch", 8]),
        ("extra.bias", [8]),
        ("label", ["batch"]),
        ("weight", ["batch"]),
    ],
    "outputs": [("loss", [], True), ("logits", ["batch", 3]), ("h", [1, "batch", 8]), ("c", [1, "batch", 8])],
}


@pytest.mark.parametrize("desc", [NESTED, "auto"], ids=["described", "auto"])
def test_a_state_is_carried_and_a_dict_and_a_number_are_passed(desc: Any) -> None:
    model = Recurrent()
    theirs = Reference(model, lr=0.1)
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), loss_fn=weighted)
    ours = expected = (torch.zeros(1, 5, 8), torch.zeros(1, 5, 8))
    for number in range(8):
        x, y, w = torch.randn(5, 3, 4), torch.randint(0, 3, (5,)), torch.rand(5)
        scale = 1.0 if number < 6 else 2.0
        extra = {"bias": torch.linspace(0, 1, 8), "double": False}
        if desc == "auto":
            loss, logits, *state = trainer.train_step(x, ours, scale, extra, y, w)
        else:
            loss, logits, *state = trainer.train_step(x=x, state=ours, scale=scale, extra=extra, label=y, weight=w)
        output = theirs.model(x, expected, scale, extra)
        weighted(output, y, w).backward()
        assert_close(loss, weighted(output, y, w).detach(), 1e-5, "loss")
        assert_close(logits, output[0].detach(), 1e-5, "logits")
        theirs.update(divisor=1)
        ours, expected = tuple(state), tuple(value.detach() for value in output[1])
        assert_close(ours[1], expected[1], 1e-5, "state")
    assert len(trainer.session.graphs(True)) == 2  # one for each scale
    arguments = {"x": x, "state": ours, "scale": scale, "extra": extra}
    predicted = theirs.model(x, expected, scale, extra)[0].detach()
    assert_close(trainer.predict(**arguments)[0], predicted, 1e-4, "prediction")
    assert len(trainer.session.graphs(False)) == 1
    # A constant that is left out has forward()'s default, not its last value.
    del arguments["scale"]
    assert_close(trainer.predict(**arguments)[0], predicted / 2, 1e-4, "unscaled")


class Keyed(nn.Module):
    """Takes entries whose names would be the same, and what is required, but only by name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Any, *, scale: float, bias: torch.Tensor | None = None) -> torch.Tensor:
        value = self.head(x["a"]["b"] + 10 * x["a.b"] + 100 * x[0] * x["0"]) * scale
        return value if bias is None else value + bias


@pytest.mark.parametrize("way", ["by position", "by name", "module"])
@pytest.mark.parametrize("with_tensor", [False, True])
def test_entries_and_arguments_by_name(way: str, with_tensor: bool) -> None:
    model = Keyed()
    module = ORTModule(copy.deepcopy(model), fallback="error")
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.0), loss_fn=F.mse_loss)
    for step in range(3):
        x = {"a": {"b": torch.randn(5, 4)}, "a.b": torch.randn(5, 4), "0": 1.0 + step, 0: 2.0}
        y, named = torch.randn(5, 3), {"scale": 1.0 + step, **({"bias": torch.randn(3)} if with_tensor else {})}
        expected = model(x, **named)
        if way == "module":
            output = module(x, **named)
        elif way == "by name":
            _, output = trainer.train_step(x=x, label=y, **named)
        else:
            _, output = trainer.train_step(x, y, **named)
        assert_close(output, expected.detach(), 1e-5, way)


def test_what_does_not_fit_is_refused_by_name() -> None:
    trainer = ORTTrainer(Recurrent(), NESTED, optim.SGDConfig(), loss_fn=weighted)
    x, y, w, state = torch.randn(5, 3, 4), torch.zeros(5, dtype=torch.int64), torch.ones(5), torch.zeros(1, 5, 8)
    good = {"x": x, "state": (state, state), "extra": {"bias": torch.ones(8), "double": True}, "label": y, "weight": w}
    trainer.train_step(good)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"state": None}, r"input 'state' is None, but the model description has \['state.0', 'state.1'\] for it"),
        ({"state": (state,)}, r"input 'state' is a nested value with the parts \['state.0'\]"),
        ({"scale": torch.ones(())}, r"inputs \['scale'\] are tensors, but the model description has no such tensors"),
        ({"x": nn.utils.rnn.pack_sequence([x[0]])}, "input 'x' is a PackedSequence: give the padded tensor"),
        (
            {"x": [1.0, 2.0]},
            r"'x' must be a torch.Tensor or .*, but a list was given: make a tensor of it, torch.tensor",
        ),
        ({"label": 3}, "input 'label' must be a torch.Tensor or a numpy array, but a int was given: 3"),
        ({"stride": 2}, r"unknown inputs \['stride'\]"),
    ]
    for change, message in cases:
        with pytest.raises(TypeError, match=message):
            trainer.train_step({**good, **change})
    assert trainer.train_step_info.step == 1
    # Parts may be given by their own names, too.
    apart = {**good, "state.0": state, "state.1": state}
    del apart["state"]
    trainer.train_step(apart)
    assert len(trainer.session.graphs(True)) == 1


def test_numbers_that_change_all_the_time_are_refused_in_the_end() -> None:
    class Scaled(MLP):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x) * scale

    trainer = mlp_trainer(model=Scaled())
    x, y = mlp_batches(1)[0]
    with pytest.raises(RuntimeError, match="exported 16 times already. Pass values that change often as tensor inputs"):
        for number in range(17):
            trainer.eval_step(x=x, label=y, scale=float(number))


class Encoder(nn.Module):
    """A model with a loss of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code = self.down(x)
        return self.up(code), code


def annealed(output: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
    return F.mse_loss(output[0], x) + beta * output[1].square().mean()


class Inside(Encoder):
    """The same, with the loss inside."""

    def forward(self, x: torch.Tensor, beta: float) -> torch.Tensor:
        return annealed(super().forward(x), x, beta)


ENCODED = {"inputs": [("x", ["b", 8]), ("target", ["b", 8])], "outputs": [("loss", [], True)]}


@pytest.mark.parametrize("kind", ["described", "auto", "inside"])
def test_a_number_of_the_loss_changes_without_an_export(kind: str) -> None:
    inside = kind == "inside"
    model = Inside() if inside else Encoder()
    theirs = Reference(model, loss_fn=None if inside else annealed, lr=0.1)
    desc: Any = ENCODED if kind == "described" else "auto"
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), None if inside else annealed)

    def step(x: torch.Tensor) -> torch.Tensor:
        outputs = trainer.train_step(x) if inside else trainer.train_step(x, x)
        return outputs[0] if isinstance(outputs, list) else outputs

    for number in range(20):
        beta = trainer.loss_parameters["beta"] = 0.1 * number
        x = torch.randn(5, 8)
        loss = theirs.model(x, beta) if inside else annealed(theirs.model(x), x, beta)
        assert_close(step(x), loss.detach(), 1e-5, "loss")
        loss.backward()
        theirs.update(divisor=1)
    assert len(trainer.session.graphs(True)) == 1
    trainer.loss_parameters["beta"] = "high"
    with pytest.raises(TypeError, match=r"loss_parameters\['beta'\] must be a number, but 'high' was given"):
        step(x)
    trainer.loss_parameters = {"x": 1.0}
    with pytest.raises(
        ValueError, match=r"loss_parameters \['x'\] must be valid argument names and differ from the inputs"
    ):
        step(x)


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, beta: float = 1.0) -> dict[str, torch.Tensor]:
        loss = self.linear(x).square().mean() * beta
        return {"loss": loss, "doubled": 2 * loss}


@pytest.mark.parametrize("kernels", ["pytorch", "onnxruntime"])
def test_a_number_of_the_loss_promotes_no_scalar(kernels: str) -> None:
    model, x = Halved(), torch.randn(4, 8, dtype=torch.bfloat16)
    options = ORTTrainerOptions({"utils": {"kernels": kernels}})
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.0), options=options)
    trainer.loss_parameters["beta"] = 0.3
    assert torch.equal(trainer.train_step(x)[1], model(x, 0.3)["doubled"].detach())


def test_a_missing_number_is_named() -> None:
    trainer = ORTTrainer(Encoder(), ENCODED, optim.SGDConfig(), annealed)
    with pytest.raises(TypeError, match="missing a required argument: 'beta'.*as trainer.loss_parameters"):
        trainer.train_step(torch.randn(5, 8), torch.randn(5, 8))


def test_a_changed_closure_is_used_with_a_warning() -> None:
    factor = 1.0

    def loss_fn(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return factor * F.cross_entropy(logits, label)

    model = MLP()
    trainer = ORTTrainer(model, MLP_DESC, optim.SGDConfig(lr=0.0), loss_fn)
    x, y = mlp_batches(1)[0]
    expected = F.cross_entropy(model(x), y).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(trainer.train_step(x, y)[0], expected, 1e-5, "loss")
    factor = 3.0
    with pytest.warns(UserWarning, match="loss_fn reads 'factor', which has changed from 1.0 to 3.0"):
        assert_close(trainer.train_step(x, y)[0], 3 * expected, 1e-5, "loss")
    factor = 1.0
    assert_close(trainer.train_step(x, y)[0], expected, 1e-5, "loss")
    assert len(trainer.session.graphs(True)) == 2


def _in_closure(weight: torch.Tensor) -> Any:
    return lambda logits, label: F.cross_entropy(logits, label, weight=weight)


def _in_containers(weight: torch.Tensor) -> Any:
    held = {"weights": [weight]}
    return lambda logits, label: F.cross_entropy(logits, label, weight=held["weights"][0])


def _in_module(weight: torch.Tensor) -> Any:
    module = nn.CrossEntropyLoss(weight=weight)
    return lambda logits, label: module(logits, label)


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: nn.CrossEntropyLoss(weight=weight),
        lambda weight: functools.partial(F.cross_entropy, weight=weight),
        _in_closure,
        _in_containers,
        _in_module,
    ],
    ids=["module", "partial", "closure", "containers", "module in a closure"],
)
def test_tensors_that_a_loss_holds_are_watched(make: Any) -> None:
    model, weight = MLP(), torch.ones(3)
    trainer = ORTTrainer(model, MLP_DESC, optim.SGDConfig(lr=0.0), make(weight))
    x, y = mlp_batches(1)[0]

    def check() -> None:
        expected = F.cross_entropy(model(x), y, weight=weight).detach()
        assert_close(trainer.train_step(x, y)[0], expected, 1e-5, "loss")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check()
        check()
        weight[0] = 5.0
        check()
        weight.fill_(1.0)
        check()
    assert len(trainer.session.graphs(True)) == 1, "it is an input of the graph"


def test_another_tensor_in_a_loss() -> None:
    model, loss_fn = MLP(), nn.CrossEntropyLoss(weight=torch.ones(3))
    trainer = ORTTrainer(model, MLP_DESC, optim.SGDConfig(lr=0.0), loss_fn)
    x, y = mlp_batches(1)[0]
    for _ in range(2):
        assert_close(trainer.train_step(x, y)[0], loss_fn(model(x), y).detach(), 1e-5, "loss")
        loss_fn.weight = torch.tensor([1.0, 2.0, 3.0])


def test_a_loss_that_reads_the_model_is_not_exported_anew() -> None:
    model = MLP()

    def loss_fn(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, label) + 0.0 * len(list(model.children()))

    trainer = ORTTrainer(model, MLP_DESC, optim.SGDConfig(lr=0.1), loss_fn)
    for x, y in mlp_batches(2):
        model.train()
        trainer.train_step(x, y)
        model.eval()
        trainer.eval_step(x, y)
    assert len(trainer.session.graphs(True)) == len(trainer.session.graphs(False)) == 1
