from __future__ import annotations

import signal
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ort_trainer.api import CheckpointState, LinearLRScheduler, TrainingSession

from .artifacts import PARAMETERS, Artifacts
from .test_module import Reference, batches, close


def session_of(artifacts: Artifacts, **others: object) -> tuple[CheckpointState, TrainingSession]:
    state = CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint)
    return state, TrainingSession(state, artifacts.training, artifacts.evaluation, artifacts.optimizer, **others)


@pytest.mark.engine
def test_trains_like_pytorch_from_files(artifacts: Artifacts, tmp_path: Path) -> None:
    for name in ("training", "evaluation", "optimizer", "checkpoint"):
        (tmp_path / name).write_bytes(getattr(artifacts, name))
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = TrainingSession(
        state, str(tmp_path / "training"), tmp_path / "evaluation", tmp_path / "optimizer", session_options=options
    )
    assert repr(session).startswith("TrainingSession(Module(") and repr(session).endswith("learning_rate=0.1))")
    reference = Reference()
    for x, target in batches(20):
        loss, *_ = session.train_step([x, target])
        expected, _ = reference.loss(x, target)
        close(loss, expected)
        reference.optimizer.zero_grad()
        expected.backward()
        session.optimizer_step()
        reference.optimizer.step()
        session.lazy_reset_grad()
        close(session.eval_step({"target": target, "x": x})[0], reference.loss(x, target)[0])
    close(state.parameters["w"].data, reference.w)


@pytest.mark.engine
def test_values_of_the_runtime_and_options_of_a_run(artifacts: Artifacts) -> None:
    _, session = session_of(artifacts)
    batch = batches(1)[0]
    expected = session.eval_step(list(batch))
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in batch]
    for step in (session.train_step, session.eval_step):
        for found, wanted in zip(step(values, onnxruntime.RunOptions()), expected, strict=True):
            assert isinstance(found, onnxruntime.OrtValue) and np.array_equal(found.numpy(), wanted)


def test_names_sizes_and_buffers(artifacts: Artifacts) -> None:
    _, session = session_of(artifacts)
    for training in (True, False):
        assert session.input_names(training) == ["x", "target"]
        assert session.output_names(training) == ["loss", "y", "positive"]
        session._module.train(training)
        assert session._module.input_names() == ["x", "target"]
        assert session._module.output_names() == ["loss", "y", "positive"]
    for trainable_only, names in ((False, list(PARAMETERS)), (True, ["w", "b"])):
        values = np.concatenate([PARAMETERS[name].ravel() for name in names])
        assert session.get_parameters_size(trainable_only) == values.size
        buffer = session.to_buffer(trainable_only)
        assert isinstance(buffer, onnxruntime.OrtValue) and np.array_equal(buffer.numpy(), values)
        other, target = session_of(artifacts)
        target.from_buffer(onnxruntime.OrtValue.ortvalue_from_numpy(values + 1))
        for name, parameter in other.parameters.items():
            assert np.array_equal(parameter.data, PARAMETERS[name] + (name in names))
    nominal = TrainingSession(CheckpointState.load_checkpoint_from_buffer(artifacts.nominal), artifacts.training)
    with pytest.raises(RuntimeError, match="from_buffer"):
        nominal.train_step(list(batches(1)[0]))
    nominal.from_buffer(session.to_buffer(False).numpy())
    assert np.array_equal(nominal.to_buffer(False).numpy(), session.to_buffer(False).numpy())


def test_rates_and_a_schedule(artifacts: Artifacts) -> None:
    """A warm-up of 2 updates, 6 in total."""
    _, session = session_of(artifacts)
    session.train_step(list(batches(1)[0]))
    assert session.get_learning_rate() == pytest.approx(0.1)
    session.set_learning_rate(0.5)
    assert session.get_learning_rate() == 0.5
    with pytest.raises(RuntimeError, match=r"no scheduler to step: call register_linear_lr_scheduler\(\) first"):
        session.scheduler_step()
    session.register_linear_lr_scheduler(2, 6, 0.1)
    rates = []
    for _ in range(8):
        rates.append(session.get_learning_rate())
        session.optimizer_step()
        session.scheduler_step()
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.075, 0.05, 0.025, 0.0, 0.0])
    scheduler = LinearLRScheduler(session._optimizer, 2, 6, 0.1)
    assert repr(scheduler) == (
        "LinearLRScheduler(warmup_step_count=2, total_step_count=6, initial_lr=0.1, learning_rate=0.0)"
    )


def test_memory_is_freed(artifacts: Artifacts) -> None:
    """A session keeps its state alive, and nothing keeps the session."""
    state, session = session_of(artifacts)
    references = weakref.ref(session), weakref.ref(state._state)
    del state
    assert references[1]() is not None
    session.eval_step(list(batches(1)[0]))
    del session
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize(
    ("buffer", "error", "text"),
    [
        (
            np.zeros(9, np.float32),
            ValueError,
            "the buffer has 9 elements, but all parameters have 10, and .* trained ones have 8",
        ),
        (np.zeros(8), TypeError, "the buffer has dtype float64, but the parameters have float32"),
        (np.zeros((2, 4), np.float32), ValueError, r"one dimension, but its shape is \[2, 4\]"),
        ([0.0], TypeError, r"the buffer must be an OrtValue or a numpy array, but \[0.0\] was given"),
    ],
)
def test_wrong_buffers(artifacts: Artifacts, buffer: object, error: type[Exception], text: str) -> None:
    state, session = session_of(artifacts)
    with pytest.raises(error, match=text):
        session.from_buffer(buffer)
    for name in PARAMETERS:
        assert np.array_equal(state.parameters[name].data, PARAMETERS[name])


def test_what_was_not_given_is_missed(artifacts: Artifacts) -> None:
    state = CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint)
    session = TrainingSession(state, artifacts.training, b"", b"")
    ((x, target),) = batches(1)
    with pytest.raises(RuntimeError, match=r"evaluation needs the evaluation model: pass it as eval_model_uri \(or"):
        session.eval_step([x, target])
    with pytest.raises(RuntimeError, match="no optimizer: pass the optimizer model as optimizer_model"):
        session.optimizer_step()
    with pytest.raises(TypeError, match="input_values must be a list of arrays or OrtValues"):
        session.train_step(x)


@pytest.mark.engine
def test_a_run_that_fails_changes_nothing(artifacts: Artifacts) -> None:
    state, session = session_of(artifacts)
    ((x, target),) = batches(1)
    session.train_step([x, target])
    before = CheckpointState.save_checkpoint_to_buffer(state, include_optimizer_state=True)
    stopped = onnxruntime.RunOptions()
    stopped.terminate = True
    for call in (
        lambda: session.train_step([x, target], stopped),
        lambda: session.optimizer_step(stopped),
        lambda: session.eval_step([x, target], stopped),
    ):
        with pytest.raises(Exception, match="terminate"):
            call()
        assert CheckpointState.save_checkpoint_to_buffer(state, include_optimizer_state=True) == before
    session.train_step([x, target])
    gradient = state.parameters["w"].grad
    session.lazy_reset_grad()
    session.train_step([x, target])
    np.testing.assert_allclose(gradient, 2 * state.parameters["w"].grad, rtol=1e-6)


class Interrupted:
    """An ONNX Runtime session whose runs are interrupted by Ctrl-C."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, *args: Any) -> None:
        self._session.run_with_iobinding(*args)
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_finds_a_step_done(artifacts: Artifacts) -> None:
    expected, session = session_of(artifacts)
    state, interrupted = session_of(artifacts)
    for runner in (interrupted._module._train, interrupted._optimizer):
        runner._session = Interrupted(runner._session)
    for x, target in batches(3):  # the second and third add to the gradients
        session.train_step([x, target])
        session.optimizer_step()
        with pytest.raises(KeyboardInterrupt):
            interrupted.train_step([x, target])
        with pytest.raises(KeyboardInterrupt):
            interrupted.optimizer_step()
        saved = [CheckpointState.save_checkpoint_to_buffer(s, include_optimizer_state=True) for s in (state, expected)]
        assert saved[0] == saved[1]
