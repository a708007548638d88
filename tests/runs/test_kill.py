"""A user's own loop is killed twice, and ends as if it had not been."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ort_trainer import CheckpointManager, ORTTrainer, Position

from ..helpers import MLP, assert_same_state, mlp_trainer
from .loaders import loader, seed


def train(folder: Path, kind: str, kill_at: int = 0, number: int = 0) -> tuple[ORTTrainer, list[float]]:
    """Trains for three epochs of six batches, in windows of four, and saves after every third batch in a thread.

    Returns:
        The trainer and its losses, including those before a kill, which are in the user's dict.
    """
    seed(number)
    trainer = mlp_trainer({"batch": {"gradient_accumulation_steps": 4}}, model=MLP(dropout=0.3))
    with CheckpointManager(folder, keep_last=2, keep_best=("loss", "min"), async_save=True) as manager:
        position = Position(loader(kind))
        user = manager.resume(trainer, position)
        losses = [] if user is None else list(user["losses"])
        for _ in position.epochs(3):
            for x, label in position.batches():
                loss = float(trainer.train_step(x, label)[0])
                losses.append(loss + torch.rand(1).item() + random.random() + float(np.random.rand()))
                if position.batch % 3 == 0:
                    manager.save(trainer, position, {"loss": loss}, {"losses": losses})
                if trainer.train_step_info.step == kill_at:
                    manager.wait()
                    signal.raise_signal(signal.SIGKILL)
            manager.save(trainer, position, user_dict={"losses": losses})
    return trainer, losses


KILLED = """if True:
    import sys
    from pathlib import Path
    from tests.runs.test_kill import train
    folder, kind, kill_at, number = sys.argv[1:]
    train(Path(folder), kind, int(kill_at), int(number))
"""


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["workers generator", "stateful"])
def test_bit_for_bit(kind: str, tmp_path: Path) -> None:
    expected, losses = train(tmp_path / "whole", kind)
    # After the third batch of an epoch, in the middle of a window; and after the end of the second epoch.
    for kill_at, number in ((5, 0), (14, 98)) if kind == "stateful" else ((11, 0),):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), kind, str(kill_at), str(number)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
        manager = CheckpointManager(tmp_path / "run")
        assert manager.checkpoints[-1].step == kill_at // 3 * 3
    resumed, found = train(tmp_path / "run", kind, number=99)
    assert found == losses and len(found) == 18
    assert_same_state(resumed.state_dict(), expected.state_dict())
