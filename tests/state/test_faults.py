"""Kills during saves, and disk faults: the old file remains, the error says what to do, and training continues."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from ort_trainer.core.atomic import atomic_path, remove_abandoned, temporary_folder
from ort_trainer.state import load_checkpoint_file, save_checkpoint_file

from .. import processes
from . import fault_cases
from .fault_cases import CASES


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("faults") / "outcomes.json"
    (ended,) = processes.run([processes.Call(fault_cases.main, (file,))], timeout=300)
    assert ended.code == 0, ended.output
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", [f"{kind}, {name}" for kind, names in CASES.items() for name in names])
def test_a_fault_is_explained_and_survived(case: str, outcomes: dict[str, str]) -> None:
    if outcomes[case].startswith("skip"):
        pytest.skip(outcomes[case])
    assert not outcomes[case], outcomes[case]


def save_number(path: Path, number: int) -> None:
    """Saves tensors filled with a number."""
    state = {str(count): np.full((500_000,), number, np.int64) for count in range(2)}
    save_checkpoint_file(path, state, {"number": number}, overwrite=True)


def saved_number(path: Path) -> int:
    """Returns the number that fills all tensors of a file."""
    state, user = load_checkpoint_file(path)
    assert list(state) == ["0", "1"]
    for value in state.values():
        assert value.shape == (500_000,) and (value == user["number"]).all()
    return int(user["number"])


def kill_while_saving(path: Path, number: int, seconds: float) -> None:
    """Forks a process that saves one number after the other, and kills it."""
    child = os.fork()
    if not child:
        try:
            while True:
                number += 1
                save_number(path, number)
        finally:
            os._exit(1)  # it failed before it was killed
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def kill_often(folder: Path, count: int) -> int:
    """Kills processes at random moments of their saves; returns how often they left a temporary file."""
    path, generator, left, number = folder / "a.ortckpt", random.Random(0), 0, 0
    save_number(path, 0)  # before the clock starts, as the first save takes longer
    start = time.perf_counter()
    save_number(path, 0)
    took = time.perf_counter() - start
    for _ in range(count):
        kill_while_saving(path, number, 0.005 + generator.random() * 3 * took)
        found = saved_number(path)
        assert found >= number  # an earlier one never comes back
        litter = [each for each in folder.iterdir() if each != path and each.stat().st_size]
        left, number = left + len(litter), found
        assert len(litter) <= 1  # from this kill: each save removes the litter of the previous one
    save_number(path, number + 1)
    assert saved_number(path) == number + 1
    assert [each for each in folder.iterdir() if each != path and each.stat().st_size] == []
    return left


def test_killed_saves_leave_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    hits = 0
    for _ in range(5):  # on a busy machine, a save may take longer or shorter than the one that was measured
        hits += kill_often(tmp_path, 30)
        if hits >= 5:
            return
    raise AssertionError(f"only {hits} kills hit a save")


def test_only_what_nobody_writes_is_removed(tmp_path: Path) -> None:
    left, others = tmp_path / ".a.01234567.tmp", tmp_path / ".b.01234567.tmp"
    left.write_bytes(b"x")
    others.write_bytes(b"x")
    empty = tmp_path / ".a.89abcdef.tmp"
    empty.touch()  # from a process that has not locked it yet
    with atomic_path(tmp_path / "a") as first:
        first.write_bytes(b"first")
        with atomic_path(tmp_path / "a") as second:
            second.write_bytes(b"second")
            remove_abandoned(tmp_path, "a")
            assert {path.name for path in tmp_path.iterdir()} == {empty.name, others.name, first.name, second.name}
    assert (tmp_path / "a").read_bytes() == b"first"
    os.utime(empty, (0, 0))
    remove_abandoned(tmp_path, "?")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_temporary_folder_in_a_relative_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("target").mkdir()
    with temporary_folder(Path("target"), "a") as made:
        (made / "file").touch()
        assert made.parent == Path("target") and made.match(".a.????????.tmp.ort_trainer")
        remove_abandoned(Path("target"), "a")
        assert [path.name for path in Path("target").rglob("*")] == [made.name, "file"]
        left = made.rename(tmp_path / made.name)  # as a killed process leaves it
    remove_abandoned(tmp_path, "a")
    assert not left.exists() and not list(Path("target").iterdir())
