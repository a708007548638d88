"""Stop requests by signals: in a user's own loop, in ``fit``, from another process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ort_trainer import ORTTrainer, StopSignals
from ort_trainer.fit import Callback, FitState

from ..helpers import mlp_batches, mlp_trainer

BATCHES = mlp_batches(6)


class Send(Callback):
    """Sends this process a signal at a given moment, and records what it sees."""

    def __init__(self, moment: str, batch: int = 3, name: str = "SIGTERM") -> None:
        self.moment, self.batch, self.name = moment, batch, name
        self.steps, self.exception = 0, None

    def _send(self, moment: str, state: FitState) -> None:
        if moment == self.moment and state.batch == self.batch:
            os.kill(os.getpid(), getattr(signal, self.name))

    def on_train_batch_start(self, state: FitState, trainer: ORTTrainer) -> None:
        self._send("batch", state)

    def on_validation_start(self, state: FitState, trainer: ORTTrainer) -> None:
        self._send("evaluation", state)

    def on_exception(self, state: FitState, trainer: ORTTrainer, exception: BaseException) -> None:
        self.exception = exception


def test_a_loop_of_ones_own_ends_after_the_step() -> None:
    trainer, steps = mlp_trainer(), 0
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals() as stop:
        for step, batch in enumerate(BATCHES):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)  # some schedulers send it to the group and to the process
            trainer.train_step(*batch)
            steps += 1
            if stop:
                break
    assert steps == 3 == trainer.train_step_info.step
    assert stop and stop.signal == "SIGTERM"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_second_ctrl_c_insists() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopSignals() as stop:
        assert not stop and stop.signal is None
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == "SIGTERM"
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_end_of_a_child_raises_nothing_after_a_stop_request() -> None:
    def raise_error(number: int, frame: Any) -> None:
        raise RuntimeError("DataLoader worker is killed")

    before = signal.signal(signal.SIGCHLD, raise_error)
    try:
        with StopSignals() as stop:
            with pytest.raises(RuntimeError, match="is killed"):
                signal.raise_signal(signal.SIGCHLD)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGCHLD)
            assert stop
        assert signal.getsignal(signal.SIGCHLD) is raise_error
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_other_signals_and_ignored_ones() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with StopSignals(["SIGUSR1", "SIGUSR2"]) as stop:
            signal.raise_signal(signal.SIGUSR1)
            assert not stop
            signal.raise_signal(signal.SIGUSR2)
            assert stop.signal == "SIGUSR2"
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("signals", "error", "message"),
    [
        ("SIGTERM", TypeError, r"must be a list of names such as \['SIGTERM'\], but 'SIGTERM' was given"),
        (15, TypeError, "must be a list of names"),
        (["SIGKILL"], ValueError, "'SIGKILL' is not a signal that can be handled, such as 'SIGTERM'"),
        ([15], ValueError, "15 is not a signal that can be handled"),
        ([["SIGTERM"]], ValueError, "is not a signal that can be handled"),
    ],
)
def test_wrong_signals(signals: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StopSignals(signals)
    with pytest.raises(error, match=message):
        mlp_trainer().fit(BATCHES, stop_signals=signals, progress=False)


def in_thread(work: Callable[[], Any]) -> list[BaseException]:
    found: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


def test_another_thread_is_told_so() -> None:
    (error,) = in_thread(StopSignals().__enter__)
    assert isinstance(error, RuntimeError) and "Python handles signals only there" in str(error)
    (error,) = in_thread(lambda: mlp_trainer().fit(BATCHES, stop_signals=["SIGTERM"], progress=False))
    assert isinstance(error, RuntimeError) and "only there" in str(error)
    assert not in_thread(lambda: mlp_trainer().fit(BATCHES, progress=False))


@pytest.mark.parametrize("moment", ["batch", "evaluation"])
def test_fit_saves_and_goes_on(moment: str, tmp_path: Path) -> None:
    """Bit for bit, as after Ctrl-C, which tests/fit/test_resume.py compares."""
    options = {"batch": {"gradient_accumulation_steps": 4}}
    send = Send(moment, 3 if moment == "batch" else 6)
    state = mlp_trainer(options).fit(
        BATCHES, BATCHES[:2], 2, callbacks=[send], checkpoints=tmp_path, stop_signals=["SIGTERM"], progress=False
    )
    assert state.status == "interrupted" and isinstance(send.exception, KeyboardInterrupt)
    assert (state.steps, len(state.history)) == ((4, 0) if moment == "batch" else (6, 0))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    result = mlp_trainer(options).fit(BATCHES, BATCHES[:2], 2, checkpoints=tmp_path, resume=True, progress=False)
    assert result.status == "completed" and result.steps == 12 - state.steps


def test_workers_of_a_loader_are_not_torn_out() -> None:
    """A forked worker has the handlers of its parent: it ends on SIGTERM, and leaves Ctrl-C to the parent."""
    with StopSignals() as stop:
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM and not stop
        loader = DataLoader(BATCHES, batch_size=None, num_workers=1)
        assert len(list(loader)) == 6


class Slow(Dataset[Any]):
    """Slow samples, made by workers; one of them sends the signal to the whole group."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == 32 and os.getpid() != self.parent:
            os.kill(self.parent, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.full((8,), index / 64), index % 3


def test_a_signal_that_ends_workers_too_ends_the_fit_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler sends the signal to all processes of a job."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    loader = DataLoader(Slow(os.getpid()), batch_size=4, num_workers=1, multiprocessing_context="fork")
    trainer = mlp_trainer()
    state = trainer.fit(loader, checkpoints=tmp_path, stop_signals=["SIGTERM"], progress=False)
    assert state.status == "interrupted" and 0 < state.steps <= 8
    resumed = mlp_trainer()
    resumed.fit(DataLoader(Slow(os.getpid()), batch_size=4), checkpoints=tmp_path, resume=True, progress=False)
    assert resumed.train_step_info.step == 16
