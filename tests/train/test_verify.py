"""``debug.verify_every``: a step that PyTorch computes otherwise is refused, and no other."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, VerificationError, optim
from ort_trainer.capture import verification
from ort_trainer.capture.eager import SavedTensors, run_eagerly
from ort_trainer.export import builder
from ort_trainer.guard.reads import Reads
from ort_trainer.runs import Position
from ort_trainer.step import Step
from tests.fidelity.layer_cases import Apply
from tests.helpers import MLP, MLP_DESC, assert_same_state, mlp_batches, mlp_trainer
from tests.zoo import Normed

VERIFIED = {"debug": {"verify_every": 1}}
PYTORCH = {**VERIFIED, "utils": {"random_numbers": "pytorch"}}


@pytest.fixture(autouse=True)
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the guard see no change of what is read outside tensors."""
    monkeypatch.setattr(Reads, "_look", lambda reads: None)


class Outside:
    """Holds a value whose changes no guard sees in these tests."""

    factor = 1.0
    slope: float


class Model(Normed):
    """Has what a graph may fix and what a run may leave: a batch norm, a count, a list, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        super().__init__(dropout)
        self.outside, self.calls = Outside(), []
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        self.count.add_(1)
        return self.fc2(self.dropout(torch.relu(self.norm(self.fc1(x))) * self.outside.factor))


def trainer_of(model: nn.Module, options: dict[str, Any], loss_fn: Any = F.cross_entropy) -> ORTTrainer:
    return ORTTrainer(model, MLP_DESC, optim.AdamConfig(lr=1e-2), loss_fn, options=ORTTrainerOptions(options))


def generators() -> list[Any]:
    of_numpy = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    return [random.getstate(), of_numpy, torch.get_rng_state().tolist()]


@pytest.mark.engine
@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize("share", [True, False])
def test_a_value_from_outside_that_has_changed_is_found(share: bool, kernels: str) -> None:
    model = Model()
    trainer = trainer_of(model, {**VERIFIED, "utils": {"share_weights": share, "kernels": kernels}})
    (first, second) = mlp_batches(2)
    trainer.train_step(*first)
    before, drawn, calls = trainer.state_dict(), generators(), list(model.calls)
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    model.outside.factor = 2.0
    for _ in range(2):
        with pytest.raises(
            VerificationError, match=r"step 2 differs .*output 'loss' is .*tensors differ.* not taken"
        ) as e:
            trainer.train_step(*second)
    assert "a difference of" in str(e.value) and 'debug.verify_every="off"' in str(e.value)
    if share:
        with pytest.raises(VerificationError):
            trainer.forward_backward(*second)
    assert_same_state(trainer.state_dict(), before)
    assert generators() == drawn and model.calls == calls
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == addresses
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    model.outside.factor = 1.0
    trainer.train_step(*second)
    assert trainer.train_step_info.step == 2


def test_graphs_that_differ_are_made_anew_once() -> None:
    model = Model(dropout=0.5)
    trainer, batch = trainer_of(model, {"debug": {"verify_every": "auto"}}), mlp_batches(1)[0]
    for _ in range(3):
        trainer.train_step(*batch)
    model.outside.factor = 2.0
    with pytest.warns(UserWarning, match=r"step 4 differs .*\n.*made anew, once"):
        trainer.train_step(*batch)
    trainer.eval_step(*batch)
    trainer.train_step(*batch)
    model.outside.factor = 3.0
    trainer.eval_step(*batch)
    before = trainer.state_dict()
    vars(trainer._loop._verifier._turns).update(_spent=0.0, _last_cost=0.0)  # as in long runs
    with pytest.raises(VerificationError, match=r"step 6 differs .*last step that was compared before was run 5\."):
        trainer.train_step(*batch)
    assert_same_state(trainer.state_dict(), before)


class Loud(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("forward")
        return super().forward(x)


def test_comparisons_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for every in ("off", 1):
        trainer = trainer_of(Loud(), {"debug": {"verify_every": every}})
        for batch in mlp_batches(3):
            trainer.train_step(*batch)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "forward" in said[0]


def test_which_steps_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    steps = [Step(kind="training", inputs=(), outputs=(), loss="", state={}) for _ in range(2)]
    monkeypatch.setattr("ort_trainer.capture.verification.time.process_time", lambda: now[0])

    def compared(count: int, seconds: float, expected: Sequence[int] = (), at: int = 0) -> list[int]:
        found = []
        for _ in range(count):
            if turns.number in expected:
                turns.expect()
            now[0] += 1.0
            is_due, began = turns.is_due(steps[at]), now[0]
            if is_due:
                found.append(turns.number)
                now[0] += seconds
                turns.passed(steps[at], began)
        return found

    turns = verification.Verification("auto")
    found = compared(5000, 2.0)
    assert found[:7] == [1, 2, 4, 8, 16, 32, 64] and max(np.diff(found)) <= 260
    assert sum(number > 100 for number in found) * 2.0 <= 0.01 * 5000, "a hundredth of the time"
    assert compared(2, 2.0, at=1)[0] == 5001
    found = compared(2000, 0.01, expected=[6000, 6500])
    assert {6000, 6500} <= set(found)
    position = Position([None] * 77)
    found = [compared(1, 0.01) for _ in position.epochs(2) for _ in position.batches()]
    assert [at for at, numbers in enumerate(found) if numbers] == [0, 77], "the first run of an epoch"
    steps[1] = dataclasses.replace(steps[1])
    assert compared(1, 2.0, at=1) == [turns.last], "the first run of a graph that is made anew"
    turns = verification.Verification("auto")
    assert compared(3000, 20.0)[7:] == [2101]
    turns = verification.Verification(3)
    assert compared(7, 2.0) == [3, 6]


def test_it_trains_as_without_it() -> None:
    """With all that a step draws, counts and leaves; the generators draw the same afterwards."""
    verified, other = (trainer_of(Model(dropout=0.5), options) for options in (PYTORCH, {"utils": PYTORCH["utils"]}))
    for batch in mlp_batches(4):
        drawn = generators()
        verified.train_step(*batch)
        assert generators() == drawn
        other.train_step(*batch)
    assert_same_state(verified.state_dict(), other.state_dict())


class Hooked(Normed):
    """Its forward pass has a line for each kind of difference."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.outside = Outside()
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.fc1(x)))
        self.seen.add_(hidden.detach().mean(0) * self.outside.factor)
        # The same value with another gradient.
        return self.fc2(hidden.detach() + (hidden - hidden.detach()) * self.outside.factor)


def test_gradients_and_buffers_are_compared() -> None:
    model = Hooked()
    trainer = trainer_of(model, VERIFIED)
    ((x, label),) = mlp_batches(1)
    trainer.train_step(x, label)
    model.outside.factor = 2.0
    with pytest.raises(VerificationError, match=r"differs .*: the gradient of 'fc1.weight' is .* at \[\d+, \d+\], and"):
        trainer.train_step(x, label)
    model.outside.factor = 1.0
    trainer.train_step(x, label)
    name = trainer.session.graphs(True)[0].buffer_updates["seen"]
    executor, run = trainer._loop._executor, trainer._loop._executor._runners_for(True)[0].run

    def wrong(*args: Any, **kwargs: Any) -> Any:
        results, written = run(*args, **kwargs)
        return results, {**written, name: written[name] + 1.0}

    executor._runners_for(True)[0].run = wrong
    before = model.seen.clone()
    with pytest.raises(VerificationError, match=r"differs .*: buffer 'seen' is .* at \[\d+\]"):
        trainer.train_step(x, label)
    assert torch.equal(model.seen, before)


def test_a_wrong_weight_in_the_graph_is_found() -> None:
    """The graph's runner was bound to another tensor than the model has."""
    trainer = mlp_trainer(VERIFIED)
    ((x, label),) = mlp_batches(1)
    trainer.train_step(x, label)
    runner = trainer._loop._executor._runners_for(True)[0]
    runner.rebind("fc2.bias", torch.ones(3))
    with pytest.raises(VerificationError, match="output 'loss'"):
        trainer.train_step(x, label)


@pytest.mark.parametrize(("spare", "is_found"), [(1e9, True), (0.0, False)])
def test_a_wrong_gradient_is_found_if_there_is_memory_for_another(
    spare: float, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ort_trainer.train.verify.spare_memory", lambda device: spare)
    model = Model()
    model.outside.slope = 1.0

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * model.outside.slope

    options = {"debug": {"verify_every": "auto"}}
    trainer = trainer_of(model, options, lambda y, label: F.cross_entropy(Scaled.apply(y), label))
    batches = mlp_batches(2)
    trainer.train_step(*batches[0])
    model.outside.slope = 2.0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.train_step(*batches[1])
    assert any("the gradient of 'fc1.weight' is" in str(one.message) for one in warned) is is_found


def test_a_backward_pass_keeps_at_most_so_many_bytes() -> None:
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(100, 4)
    for limit, are_complete in ((10_000, True), (1_764, False), (63, False)):
        saved = SavedTensors(limit, [weight], [weight])
        with saved:
            y = torch.sigmoid(x @ weight)  # keeps x and y, 1,600 bytes each
        assert saved.are_complete is are_complete and y.requires_grad
    saved = SavedTensors(0, [weight, x], [])
    with saved:
        _ = x.view(50, 8)[:, :4] @ weight  # a view of what is there anyway
    assert saved.are_complete


def test_each_so_many_th_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch's own gradients are compared; a step that was refused is compared again."""
    compared: list[float] = []
    run = builder.run_eagerly  # type: ignore[attr-defined]

    def counted(*args: Any) -> Any:
        compared.append(args[3])
        return run(*args)

    monkeypatch.setattr(builder, "run_eagerly", counted)
    model = Model()
    options = {"debug": {"verify_every": 2}, "batch": {"gradient_accumulation_steps": 3}}
    trainer = trainer_of(model, options)
    for number, batch in enumerate(mlp_batches(7), 1):
        trainer.train_step(*batch)
        assert len(compared) == number // 2
    model.outside.factor = 2.0
    for _ in range(2):
        with pytest.raises(VerificationError, match="step 8 differs"):
            trainer.train_step(*mlp_batches(1)[0])
    assert trainer.train_step_info.optimization_step == 2
    for every in (None, 0):
        assert trainer_of(Model(), {"debug": {"verify_every": every}})._loop._verifier is None


@pytest.mark.engine
@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision(dtype: str, kernels: str) -> None:
    options = {
        **VERIFIED,
        "mixed_precision": {"enabled": True, "dtype": dtype},
        "utils": {"kernels": kernels},
        "batch": {"gradient_accumulation_steps": 2},
    }
    trainer = trainer_of(model := Model(), options)
    for batch in mlp_batches(6):
        trainer.train_step(*batch)
        trainer.eval_step(*batch)
    x, label = mlp_batches(1)[0]
    trainer.train_step(x * 1e30, label)  # overflows, here and there
    trainer.train_step(x, label)
    model.outside.factor = 3.0
    with pytest.raises(VerificationError):
        trainer.train_step(x, label)


def test_losses_that_are_nan_in_pytorch_too() -> None:
    trainer = mlp_trainer({"debug": {"verify_every": 1, "max_nonfinite_losses": 2}})
    x, label = mlp_batches(1)[0]
    trainer.train_step(x, label)
    trainer.train_step(x * float("nan"), label)
    with pytest.raises(FloatingPointError):
        trainer.train_step(x * float("nan"), label)


class Random(nn.Module):
    """Draws random numbers in most ways; also a dropout without a use, and one that drops all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)
        self.in_place, self.of_channels = nn.Dropout(0.4, inplace=True), nn.Dropout1d(0.3)

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(self.fc(h)), 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.in_place(self.fc(x[:, None].expand(-1, 5, -1)) * 1.0)
        h = self.layer(h + torch.rand_like(h) * 0.1)
        h = checkpoint(self.inner, h, use_reentrant=False)
        F.dropout(h, 0.5)
        h = self.lstm(h * torch.bernoulli(torch.full_like(h, 0.7)))[0]
        h = F.alpha_dropout(self.of_channels(h), 0.1)
        h = F.dropout(F.dropout(h, 1.0) + h, 0.1)
        return self.out(F.scaled_dot_product_attention(h, h, h, dropout_p=0.2).mean(1))


@pytest.mark.parametrize("numbers", ["fast", "pytorch"])
@pytest.mark.parametrize("kernels", ["pytorch", "onnxruntime"])
def test_pytorch_takes_the_random_numbers_of_the_graph(numbers: str, kernels: str) -> None:
    trainer = trainer_of(Random(), {**VERIFIED, "utils": {"random_numbers": numbers, "kernels": kernels}})
    for batch in mlp_batches(3):
        trainer.train_step(*batch)
    wrapped = ORTModule(Random(), {**VERIFIED, "utils": {"random_numbers": numbers, "kernels": kernels}}, "error")
    for x, label in mlp_batches(3):
        F.cross_entropy(wrapped(x), label).backward()


class Leaving(Model):
    """Leaves tensors in many places: in lists that grow, in a list, as a table that depends on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.grown, self.others, self.last, self.table = [], [], [torch.zeros(3)], None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1]) * 2.0
        y = super().forward(x + self.table)
        self.others.append(y.detach().amax(0))
        self.grown.append(y.detach().mean(0))
        self.last[0] = y.detach().amin(0) * self.outside.slope
        return y


def test_what_is_left_is_compared_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outside, "slope", 1.0, raising=False)
    model = Leaving()
    trainer = trainer_of(model, VERIFIED)
    *first, last = mlp_batches(4)
    for batch in first:
        trainer.train_step(*batch)
    assert len(model.grown) == len(model.others) == 3
    monkeypatch.setattr(Outside, "slope", 2.0)
    with pytest.raises(VerificationError, match=r"output 'left\.\d' is .* in PyTorch"):
        trainer.train_step(*last)
    assert len(model.grown) == 3


def test_parameters_in_bfloat16() -> None:
    trainer = trainer_of(Apply(MLP().bfloat16(), lambda own, x: own(x.bfloat16())), VERIFIED)
    for batch in mlp_batches(4):
        trainer.train_step(*batch)


def test_fit_stops_with_the_error() -> None:
    model = Model()
    trainer, batches = trainer_of(model, VERIFIED), mlp_batches(3)
    trainer.fit(batches, epochs=1, progress=False)
    model.outside.factor = 2.0
    with pytest.raises(VerificationError, match="step 4 differs"):
        trainer.fit(batches, epochs=2, progress=False)


def test_what_pytorch_itself_cannot_run() -> None:
    """PyTorch has no LSTM in half precision on this CPU, or the step is compared."""
    model = Apply(nn.LSTM(8, 3, batch_first=True), lambda own, x: own(x[:, None])[0][:, 0])
    trainer = trainer_of(model, {**VERIFIED, "mixed_precision": {"enabled": True, "dtype": "float16"}})
    try:
        trainer.train_step(*mlp_batches(1)[0])
    except VerificationError as error:
        assert "step 1 can't be compared, because it raises in PyTorch itself (RuntimeError: " in str(error)
        assert trainer.train_step_info.step == 0


def test_an_onnx_model_is_compared_with_the_module_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
        onnx.helper.make_node("Tanh", ["h"], ["logits"]),
    ]
    weights = [
        onnx.numpy_helper.from_array(np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), "w"),
        onnx.numpy_helper.from_array(np.zeros(3, np.float32), "b"),
    ]
    x, logits = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", size])
        for name, size in (("x", 8), ("logits", 3))
    )
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "g", [x], [logits], weights), opset_imports=[onnx.helper.make_opsetid("", 18)]
    )
    trainer = ORTTrainer(
        proto, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=ORTTrainerOptions(VERIFIED)
    )
    for batch in mlp_batches(3):
        trainer.train_step(*batch)
    monkeypatch.setattr(builder, "run_eagerly", lambda step, *args: run_eagerly(changed(step), *args))
    with pytest.raises(VerificationError, match="step 4 differs .*output 'loss'"):
        trainer.train_step(*mlp_batches(1)[0])


def changed(step: Any) -> Any:
    return dataclasses.replace(step, loss_fn=lambda logits, label: F.cross_entropy(logits * 2, label))
