"""The key of an export: equal for the same program, different after any change that affects the graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer.capture import fingerprint
from ort_trainer.capture.borrow import borrowed, quiet
from ort_trainer.capture.capture import capture
from ort_trainer.capture.fingerprint import NoFingerprint
from ort_trainer.capture.step_module import ExportedStep, RecomputeOptions, StepModule
from ort_trainer.options import ModelDescription
from tests import processes

DESC = {"inputs": [("x", ["n", 4]), ("label", ["n"])], "outputs": [("loss", [], True), ("y", ["n", 4])]}


class Model(nn.Module):
    """Has one of each thing that can change."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(settings.get("seed", 0))
        self.first = nn.Linear(4, 4, bias=settings.get("bias", True))
        self.second = self.first if settings.get("tied") else nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=settings.get("momentum", 0.1))
        self.dropout = nn.Dropout(settings.get("p", 0.5))
        self.register_buffer("scale", torch.full((4,), settings.get("scale", 1.0)))
        self.table = torch.tensor(settings.get("table", [1.0, 2.0, 3.0, 4.0]))
        self.factor = settings.get("factor", 2.0)
        self.limit = settings.get("limit", 100)
        self.kind = settings.get("activation", torch.relu)
        self.low = settings.get("low")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.kind(self.first(x))) * self.factor
        if x.shape[0] < self.limit:
            y = y + 1
        with torch.no_grad():
            shift = y.mean() * self.factor
        if self.low is not None:
            with torch.autocast("cpu", dtype=self.low):
                y = y @ torch.ones(4, 4)
            y = y.float()
        return self.dropout(self.second(y)) * self.scale * self.table + shift + torch.tensor(self.factor)


class Weighted(nn.Module):
    def __init__(self, *weights: float) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))

    def forward(self, prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(prediction, label, weight=self.weights)


def key(
    model: nn.Module | None = None,
    size: int = 6,
    dtype: torch.dtype = torch.float32,
    desc: dict[str, Any] | None = None,
    loss_fn: Any = F.cross_entropy,
    training: bool = True,
    frozen: tuple[str, ...] = (),
    **settings: Any,
) -> str:
    model = Model() if model is None else model
    description = ModelDescription(desc or DESC)
    trainable = frozenset(name for name, _ in model.named_parameters() if name not in frozen)
    step = ExportedStep(model, description, loss_fn, trainable, **settings)
    sample = [torch.randn(size, 4, dtype=dtype), torch.randint(0, 4, (size,))]
    module = StepModule(step)
    with quiet(), borrowed(module, {f"model.{name}" for name in trainable} if training else set(), training):
        program = capture(module, description.inputs, sample, step.autocast_for(sample))
        return fingerprint.fingerprint(program, module, step, training)


def test_the_same_program_has_the_same_key() -> None:
    assert key() == key()


def test_values_of_parameters_and_buffers_do_not_count() -> None:
    assert key(Model(seed=1, scale=3.0)) == key()


def test_sizes_of_the_sample_do_not_count_where_they_are_symbolic() -> None:
    assert key(size=11) == key()


def test_the_key_is_the_same_in_another_process() -> None:
    # Both processes are new: other tests may have changed PyTorch's configuration in this one, which is part of the
    # key. Every interpreter orders sets differently.
    program = "from tests.capture.test_fingerprint import print_key; print_key()"
    command = [sys.executable, "-c", program]
    other = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    (fork,) = processes.run([processes.Call(print_key)])
    assert fork.code == 0 and fork.output == other != ""


def print_key() -> None:
    print(key())


def renamed(part: str, number: int, name: str) -> dict[str, Any]:
    entries: list[Any] = list(DESC[part])  # type: ignore[call-overload]
    entries[number] = (name, *entries[number][1:])
    return {**DESC, part: entries}


CHANGES: dict[str, Callable[[], str]] = {
    "a number in forward": lambda: key(Model(factor=2.5)),
    "the last bit of a number": lambda: key(Model(factor=2.0000000000000004)),
    "a tensor that is a plain attribute": lambda: key(Model(table=[1.0, 2.0, 3.0, 4.5])),
    "the sign of a zero": lambda: key(Model(table=[1.0, 2.0, 3.0, -0.0])),
    "a branch on a size": lambda: key(Model(limit=3)),
    "a condition on a size": lambda: key(Model(limit=101)),
    "another function": lambda: key(Model(activation=torch.tanh)),
    "the p of a dropout": lambda: key(Model(p=0.25)),
    "the momentum of a norm": lambda: key(Model(momentum=0.2)),
    "no bias": lambda: key(Model(bias=False)),
    "tied weights": lambda: key(Model(tied=True)),
    "a block under autocast": lambda: key(Model(low=torch.bfloat16)),
    "the dtype of the model": lambda: key(Model().double(), dtype=torch.float64),
    "the loss": lambda: key(loss_fn=lambda y, label: F.cross_entropy(y, label, label_smoothing=0.1)),
    "the weights of a loss": lambda: key(loss_fn=Weighted(1.0, 2.0, 3.0, 4.0)),
    "other weights of a loss": lambda: key(loss_fn=Weighted(1.0, 2.0, 3.0, 5.0)),
    "evaluation": lambda: key(training=False),
    "mixed precision": lambda: key(autocast=torch.bfloat16),
    "mixed precision in halves": lambda: key(autocast=torch.float16),
    "a frozen parameter": lambda: key(frozen=("first.weight",)),
    "the operator set": lambda: key(opset=19),
    "no simplification": lambda: key(simplified=False),
    "recomputation": lambda: key(recompute=RecomputeOptions(cheap=True)),
    "recomputed layers": lambda: key(recompute=RecomputeOptions(layers=True, layer_count=1)),
    "a static dimension": lambda: key(desc={**DESC, "inputs": [("x", [6, 4]), ("label", [6])]}),
    "the name of a dimension": lambda: key(desc={**DESC, "inputs": [("x", ["m", 4]), ("label", ["m"])]}),
    "the name of an output": lambda: key(desc=renamed("outputs", 1, "z")),
    "the name of a label": lambda: key(desc=renamed("inputs", 1, "target")),
    "one output less": lambda: key(desc={**DESC, "outputs": DESC["outputs"][:1]}),
}


def test_whatever_changes_the_graph_changes_the_key() -> None:
    keys = {"nothing": key(), **{name: change() for name, change in CHANGES.items()}}
    same = [(a, b) for a in keys for b in keys if a < b and keys[a] == keys[b]]
    assert not same


@pytest.mark.parametrize("setting", ["defaults", "config", "engine", "versions", "sources"])
def test_what_works_on_the_program_counts(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    if setting == "defaults":
        monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    elif setting == "config":
        with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            assert key() != before
        return
    elif setting == "engine":
        monkeypatch.setattr(fingerprint, "engine_identity", lambda: "another one")
    elif setting == "versions":
        monkeypatch.setattr(fingerprint, "_versions", lambda: ("another torch",))
    else:
        monkeypatch.setattr(fingerprint, "SOURCES_AT_IMPORT", "other code")
        monkeypatch.setattr(fingerprint, "hash_of_sources", lambda: "other code")
    assert key() != before


def test_a_package_that_is_edited_while_it_runs_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "hash_of_sources", lambda: "other code")
    with pytest.raises(NoFingerprint, match="the source of ort_trainer has been changed since it was imported"):
        key()


def test_tensors_that_share_memory_count() -> None:
    """A constant that is a parameter is refused, so it must not share a key with one of the same values."""

    def model(shared: bool) -> nn.Module:
        made = Model()
        made.table = made.first.bias.detach() if shared else made.first.bias.detach().clone()
        return made

    assert key(model(True)) != key(model(False))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


LIBRARY = torch.library.Library("ort_trainer_fingerprint_tests", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Twice.apply, "custom autograd functions"),
        (torch.ops.ort_trainer_fingerprint_tests.twice, "is not an operator of PyTorch"),
    ],
    ids=["autograd function", "operator"],
)
def test_what_is_written_elsewhere_has_no_key(function: Any, reason: str) -> None:
    with pytest.raises(NoFingerprint, match=reason):
        key(Model(activation=function))


def test_an_operator_that_the_package_replaces_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "composites", lambda: {"ort_trainer_fingerprint_tests.twice.default": None})
    twice = torch.ops.ort_trainer_fingerprint_tests.twice
    assert key(Model(activation=twice)) == key(Model(activation=twice)) != key()


def test_under_a_mode_there_is_no_key() -> None:
    with torch.device("cpu"), pytest.raises(NoFingerprint, match="a mode of PyTorch is active"):
        key()


def test_an_unknown_object_has_no_text() -> None:
    with pytest.raises(NoFingerprint, match=r"the graph contains a builtins\.object"):
        fingerprint._value((1, [object()]))


@pytest.mark.parametrize(
    "pair", [(1, 1.0), (1, True), ("1", 1), (0.0, -0.0), ((1,), [1]), (None, "None"), (1.0, 1 + 0j)]
)
def test_different_values_have_different_texts(pair: tuple[Any, Any]) -> None:
    assert fingerprint._value(pair[0]) != fingerprint._value(pair[1])
