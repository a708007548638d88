from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from ort_trainer.api import CheckpointState, Module, Optimizer, TrainingSession, set_seed
from ort_trainer.api.random_numbers import RandomNumbers
from ort_trainer.core import masks
from ort_trainer.engine.numpy_memory import StateTensor
from ort_trainer.engine.ort import Device
from ort_trainer.engine.programs import dropout
from ort_trainer.step.contract import RandomInput

from .artifacts import PARAMETERS, TRAINED, Artifacts, make_artifacts

pytestmark = pytest.mark.engine


class Reference:
    """The same model in PyTorch."""

    def __init__(self) -> None:
        self.w, self.b = (torch.nn.Parameter(torch.tensor(PARAMETERS[name])) for name in TRAINED)
        self.optimizer = torch.optim.SGD([self.w, self.b], lr=0.1, momentum=0.5)

    def loss(self, x: np.ndarray, target: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.from_numpy(x) @ self.w + self.b
        return torch.nn.functional.mse_loss(y, torch.from_numpy(target)), y


def batches(count: int, rows: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.random((rows, 3), np.float32), rng.random((rows, 2), np.float32)) for _ in range(count)]


def load(artifacts: Artifacts, **options: object) -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint)
    module = Module(artifacts.training, state, artifacts.evaluation, **options)
    return state, module, Optimizer(artifacts.optimizer, module)


def close(actual: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_default_session_options(artifacts: Artifacts) -> None:
    _, module, optimizer = load(artifacts)
    entry = "session.intra_op.allow_spinning"
    assert module._train._session.get_session_options().get_session_config_entry(entry) == "0"
    # Threads spin during the update, and stop afterwards.
    update = optimizer._session.get_session_options()
    assert update.get_session_config_entry("session.force_spinning_stop") == "1"
    with pytest.raises(RuntimeError, match="allow_spinning"):
        update.get_session_config_entry(entry)
    # The user's options apply to both sessions.
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 3
    _, module, optimizer = load(artifacts, session_options=options)
    for session in (module._train._session, optimizer._session):
        assert session.get_session_options().intra_op_num_threads == 3
    with pytest.raises(RuntimeError, match="spinning"):
        optimizer._session.get_session_options().get_session_config_entry("session.force_spinning_stop")


def test_trains_like_pytorch(artifacts: Artifacts) -> None:
    state, module, optimizer = load(artifacts)
    reference = Reference()
    for x, target in batches(20):
        loss, y, positive = module(x, target)
        expected, expected_y = reference.loss(x, target)
        close(loss, expected)
        close(y, expected_y)
        assert np.array_equal(positive, np.array(np.nonzero(expected_y.detach().numpy() > 0)))
        close(state.parameters["mean"].data, expected_y.mean(0))
        reference.optimizer.zero_grad()
        expected.backward()
        close(state.parameters["w"].grad, reference.w.grad)
        optimizer.step()
        reference.optimizer.step()
        module.lazy_reset_grad()
    close(state.parameters["w"].data, reference.w)
    close(state.parameters["b"].data, reference.b)


def test_gradients_sum_until_they_are_reset(artifacts: Artifacts) -> None:
    state, module, optimizer = load(artifacts)
    reference = Reference()
    for number, (x, target) in enumerate(batches(9)):
        module(x, target)
        reference.loss(x, target)[0].backward()
        if number % 3 == 2:
            for name in TRAINED:
                close(state.parameters[name].grad, getattr(reference, name).grad)
            optimizer.step()
            module.lazy_reset_grad()
            close(state.parameters["w"].grad, reference.w.grad)  # readable until the next step
            reference.optimizer.step()
            reference.optimizer.zero_grad()
    close(state.parameters["w"].data, reference.w)


def test_a_reset_forgets_what_is_not_finite(artifacts: Artifacts) -> None:
    state, module, _ = load(artifacts)
    ((x, target),) = batches(1)
    module(x * np.float32(np.inf), target)
    assert not np.isfinite(state.parameters["w"].grad).all()
    module.lazy_reset_grad()
    module(x, target)
    assert np.isfinite(state.parameters["w"].grad).all()


def test_gradients_are_zero_before_the_first_step(artifacts: Artifacts) -> None:
    state = CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint)
    assert state.parameters["w"].grad is None
    Module(artifacts.training, state)
    assert np.array_equal(state.parameters["w"].grad, np.zeros((3, 2)))
    assert state.parameters["mean"].grad is None


def test_evaluation_changes_nothing(artifacts: Artifacts) -> None:
    state, module, _ = load(artifacts)
    before = CheckpointState.save_checkpoint_to_buffer(state, include_optimizer_state=True)
    ((x, target),) = batches(1)
    assert module.eval() is module
    assert not module.training
    loss, _, _ = module(x, target)
    close(loss, Reference().loss(x, target)[0])
    assert CheckpointState.save_checkpoint_to_buffer(state, include_optimizer_state=True) == before
    assert module.train().training


def test_inputs_of_any_kind(artifacts: Artifacts) -> None:
    _, module, _ = load(artifacts)
    ((x, target),) = batches(1)
    loss, y, positive = module.eval()(x, target)
    as_values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in (x, target)]
    for mixed in ((x, as_values[1]), (as_values[0], target)):
        found = module(*mixed)
        assert all(isinstance(value, np.ndarray) for value in found)
        assert np.array_equal(found[0], loss)
    for mode in (True, False):
        found = module.train(mode)(*as_values)
        assert all(isinstance(value, onnxruntime.OrtValue) for value in found)
        for value, expected in zip(found, (loss, y, positive), strict=True):
            assert np.array_equal(value.numpy(), expected)
    module.eval()
    for found in (module(target=target, x=x), module(x, target=target), module(x.copy("F"), target[::-1][::-1])):
        assert np.array_equal(found[0], loss)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("as_values", [True, False])
def test_results_keep_their_memory(artifacts: Artifacts, mode: bool, as_values: bool) -> None:
    _, module, _ = load(artifacts)
    module.train(mode)

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        """Returns arrays, some of which are views of OrtValues that no longer exist."""
        if not as_values:
            return list(module(*arrays))
        return [value.numpy() for value in module(*map(onnxruntime.OrtValue.ortvalue_from_numpy, arrays))]

    data = batches(20, rows=500)
    kept = [run(*batch) for batch in data]
    again = [[value.copy() for value in run(*batch)] for batch in data]
    for found, expected in zip(kept, again, strict=True):
        assert all(np.array_equal(value, copy) for value, copy in zip(found, expected, strict=True))


def test_buffers_keep_their_memory(artifacts: Artifacts) -> None:
    state, module, _ = load(artifacts)
    kept = [module.get_contiguous_parameters(trainable_only=flag).numpy() for flag in (False, True) * 50]
    others = [np.ones(size, np.float32) for size in (8, 10) * 50]
    state.parameters["w"] = np.zeros((3, 2), np.float32)
    for found, flag in zip(kept, (False, True) * 50, strict=True):
        names = TRAINED if flag else PARAMETERS
        assert np.array_equal(found, np.concatenate([PARAMETERS[name].reshape(-1) for name in names]))
    assert len(others) == 100


def test_batches_of_any_size(artifacts: Artifacts) -> None:
    _, module, _ = load(artifacts)
    for rows in (4, 1, 7, 4):
        ((x, target),) = batches(1, rows)
        loss, y, _ = module(x, target)
        close(loss, Reference().loss(x, target)[0])
        assert y.shape == (rows, 2)


def test_a_single_output_comes_bare() -> None:
    from . import artifacts as made

    known = made.OUTPUTS
    try:
        made.OUTPUTS = known[:1]
        _, module, _ = load(make_artifacts())
    finally:
        made.OUTPUTS = known
    ((x, target),) = batches(1)
    close(module(x, target), Reference().loss(x, target)[0])


def test_modules_share_a_state(artifacts: Artifacts) -> None:
    state, module, optimizer = load(artifacts)
    other = Module(artifacts.training, state, artifacts.evaluation)
    reference = Reference()
    for number, (x, target) in enumerate(batches(8)):
        (module, other)[number % 2](x, target)
        reference.loss(x, target)[0].backward()
        if number % 4 == 3:
            optimizer.step()
            other.lazy_reset_grad()
            reference.optimizer.step()
            reference.optimizer.zero_grad()
            close(other.eval()(x, target)[0], reference.loss(x, target)[0])
            other.train()
    close(state.parameters["w"].data, reference.w)


def test_threads_take_turns(artifacts: Artifacts) -> None:
    _, module, _ = load(artifacts)
    module.eval()
    given = batches(4, rows=50)
    expected = [module(*batch)[1] for batch in given]

    def same(number: int) -> bool:
        return all(np.array_equal(module(*given[number])[1], expected[number]) for _ in range(100))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(same, range(4)))


def test_threads_make_modules_of_one_state(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def slowly(like: StateTensor, device: Device) -> StateTensor:
        time.sleep(0.02)  # gives another thread time to start the same
        made.append(StateTensor(np.zeros(like.shape, like.dtype), device))
        return made[-1]

    monkeypatch.setattr("ort_trainer.api.live_state._zeros", slowly)
    state = CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint)
    with ThreadPoolExecutor(4) as threads:
        modules = list(threads.map(lambda _: Module(artifacts.training, state), range(4)))
    assert len(made) == len(TRAINED)  # all bindings use them
    ((x, target),) = batches(1)
    for module in modules:
        module(x, target)
        close(state.parameters["b"].grad, torch.from_numpy(difference_of(state, x, target).sum(0)))
        module.lazy_reset_grad()


def test_a_run_that_fails_draws_nothing(with_dropout: Artifacts) -> None:
    state, module, _ = load(with_dropout)
    session = TrainingSession(state, with_dropout.training)
    ((x, target),) = batches(1)
    module(x, target)
    before = CheckpointState.save_checkpoint_to_buffer(state, include_optimizer_state=True)
    stopped = onnxruntime.RunOptions()
    stopped.terminate = True
    with pytest.raises(Exception, match="terminate"):
        session.train_step([x, target], stopped)
    assert CheckpointState.save_checkpoint_to_buffer(state, include_optimizer_state=True) == before


def test_training_goes_on_from_a_checkpoint(artifacts: Artifacts) -> None:
    data = batches(12)

    def train(module: Module, optimizer: Optimizer, part: list) -> None:
        for number, (x, target) in part:
            module(x, target)
            if number % 4 == 3:
                optimizer.step()
                module.lazy_reset_grad()

    whole, module, optimizer = load(artifacts)
    train(module, optimizer, list(enumerate(data)))
    first, module, optimizer = load(artifacts)
    train(module, optimizer, list(enumerate(data))[:6])  # ends in the middle of a window
    saved = CheckpointState.save_checkpoint_to_buffer(first, include_optimizer_state=True)
    second = CheckpointState.load_checkpoint_from_buffer(saved)
    module = Module(artifacts.training, second)
    train(module, Optimizer(artifacts.optimizer, module), list(enumerate(data))[6:])
    for name in PARAMETERS:
        assert np.array_equal(whole.parameters[name].data, second.parameters[name].data)


def test_without_the_optimizer_it_begins_anew(artifacts: Artifacts, tmp_path: Path) -> None:
    state, module, optimizer = load(artifacts)
    for x, target in batches(2):
        module(x, target)
        optimizer.step()
    saved = CheckpointState.save_checkpoint_to_buffer(state)
    for complete in (True, False):
        CheckpointState.save_checkpoint(state, tmp_path / "saved", complete)
        assert ((tmp_path / "saved").read_bytes() == saved) != complete
    fresh = CheckpointState.load_checkpoint(tmp_path / "saved")
    reference = Reference()
    reference.w, reference.b = (torch.nn.Parameter(torch.tensor(fresh.parameters[name].data)) for name in TRAINED)
    reference.optimizer = torch.optim.SGD([reference.w, reference.b], lr=0.1, momentum=0.5)
    module = Module(artifacts.training, fresh)
    optimizer = Optimizer(artifacts.optimizer, module)
    for x, target in batches(3):
        module(x, target)
        optimizer.step()
        module.lazy_reset_grad()
        reference.loss(x, target)[0].backward()
        reference.optimizer.step()
        reference.optimizer.zero_grad()
    close(fresh.parameters["w"].data, reference.w)


def rates(optimizer: Optimizer, module: Module, count: int) -> list[float]:
    ((x, target),) = batches(1)
    module(x, target)
    found = []
    for _ in range(count):
        found.append(optimizer.get_learning_rate())
        optimizer.step()
    return found


def test_the_schedule_of_the_export_runs_by_itself_until_a_rate_is_set() -> None:
    _, module, optimizer = load(make_artifacts(schedule={"kind": "linear", "total_steps": 5, "warmup_steps": 1}))
    assert rates(optimizer, module, 4) == pytest.approx([0, 0.1, 0.075, 0.05])
    optimizer.set_learning_rate(0.3)
    assert rates(optimizer, module, 2) == [0.3, 0.3]


def test_the_learning_rate_counts(artifacts: Artifacts) -> None:
    state, module, optimizer = load(artifacts)
    ((x, target),) = batches(1)
    module(x, target)
    optimizer.set_learning_rate(0)
    optimizer.step()
    assert np.array_equal(state.parameters["w"].data, PARAMETERS["w"])
    optimizer.set_learning_rate(np.float32(0.5))
    optimizer.step()
    moment = 1.5 * state.parameters["w"].grad
    np.testing.assert_allclose(state.parameters["w"].data, PARAMETERS["w"] - 0.5 * moment, rtol=1e-6)


def test_masks_are_those_of_the_trainer(with_dropout: Artifacts) -> None:
    set_seed(5)
    state, module, _ = load(with_dropout)
    torch.manual_seed(5)
    for x, target in batches(3):
        module(x, target)
        mask = dropout.draw_mask(torch.randint(2**62, ()), 8, 3, 0.5)
        kept = dropout.unpacked(mask, (4, 2)).numpy()
        difference = difference_of(state, x, target)
        np.testing.assert_allclose(state.parameters["b"].grad, (difference * kept).sum(0), rtol=1e-5, atol=1e-6)
        module.lazy_reset_grad()


def difference_of(state: CheckpointState, x: np.ndarray, target: np.ndarray) -> np.ndarray:
    y = x @ state.parameters["w"].data + state.parameters["b"].data
    return (y - target) * 2 / y.size


@pytest.mark.parametrize("count", [1, 5, 1000, 300_001])
@pytest.mark.parametrize("kept", [0.9, 0.25, 0.0, 1.0])
def test_a_mask_of_any_size(count: int, kept: float) -> None:
    expected = dropout.unpacked(dropout.draw_mask(torch.tensor(2**61 + 7), count, 4, kept), (count,)).numpy()
    assert np.array_equal(masks.unpacked(masks.draw_mask(2**61 + 7, count, 4, kept), count), expected)


@pytest.mark.parametrize("kinds", [("mask",), ("normal",), ("mask", "uniform")])
def test_a_draw_can_be_undone(kinds: tuple[str, ...]) -> None:
    numbers = RandomNumbers()
    parameters = {"mask": (0.5, 1.0)}
    wanted = [(RandomInput("r", kind, "float32", (700,), parameters.get(kind, ())), (700,)) for kind in kinds]
    for _ in range(400):  # the generator refills its words within these
        numbers.draw(wanted)
    before = numbers.get_state()
    drawn = numbers.draw(wanted)
    numbers.undo()
    np.testing.assert_array_equal(numbers.get_state(), before)
    np.testing.assert_array_equal(numbers.draw(wanted), drawn)


def test_random_numbers_go_on_from_a_state() -> None:
    spec = (RandomInput("mask", "mask", "uint8", (100,), (0.5, 1)), (100,))
    torch.manual_seed(11)
    legacy = torch.get_rng_state().numpy()
    assert legacy.size > 624
    set_seed(11)
    numbers = RandomNumbers()
    for _ in range(400):  # beyond the end of a block of 624 words
        expected = int(torch.randint(2**62, ()))
        assert np.array_equal(numbers.draw([spec])[0], masks.unpacked(masks.draw_mask(expected, 100, 1, 0.5), 100))
    restored = RandomNumbers(numbers.get_state())
    assert np.array_equal(restored.draw([spec])[0], numbers.draw([spec])[0])


@pytest.mark.parametrize(
    ("kind", "dtype", "parameters", "mean", "low", "high"),
    [
        ("bernoulli", "float32", (0.25, 4.0), 1.0, 0, 4),
        ("uniform", "float16", (), 0.5, 0, 1),
        ("uniform", "float64", (), 0.5, 0, 1),
        ("normal", "float32", (), 0.0, -9, 9),
        ("exponential", "float32", (2.0,), 0.5, 0, 99),
        ("integers", "int64", (3.0, 8.0), 5.0, 3, 7),
        ("permutation", "int64", (), 9999.5, 0, 19999),
    ],
)
def test_other_random_numbers(kind: str, dtype: str, parameters: tuple, mean: float, low: float, high: float) -> None:
    set_seed(0)
    (values,) = RandomNumbers().draw([(RandomInput("r", kind, dtype, (20000,), parameters), (20000,))])
    assert values.dtype == dtype
    assert values.shape == (20000,)
    assert low <= values.min() and values.max() <= high
    assert kind != "uniform" or values.max() < 1
    assert abs(values.astype(np.float64).mean() - mean) < 0.02 * (high - low)


def test_a_seed_reaches_states_that_are_loaded(with_dropout: Artifacts) -> None:
    ((x, target),) = batches(1)
    found = []
    for _ in range(2):
        state, module, _ = load(with_dropout)
        module(x, target)
        module.lazy_reset_grad()
        set_seed(3)
        module(x, target)
        found.append(state.parameters["b"].grad)
    assert np.array_equal(*found)
    saved = CheckpointState.load_checkpoint_from_buffer(CheckpointState.save_checkpoint_to_buffer(state))
    other = Module(with_dropout.training, saved)
    module.lazy_reset_grad()
    module(x, target)
    other(x, target)
    assert np.array_equal(state.parameters["b"].grad, saved.parameters["b"].grad)
