"""The cache of exports under load: many processes and models, kills, full disks, damage and deletion at once."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim
from ort_trainer.step.cache import ExportCache

from .. import processes
from ..helpers import assert_close

pytestmark = pytest.mark.torture

PROCESSES, MODELS = 16, 50
SECONDS = float(os.environ.get("CACHE_SECONDS", "120"))
# Of a file that a process with a "full disk" may write: less than the smallest export.
FULL = 4096


def train(number: int) -> None:
    """Trains one of the models, and compares its losses with PyTorch's."""
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(8, 4 + number), nn.GELU(), nn.Linear(4 + number, 4))
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    theirs = nn.Sequential(nn.Linear(8, 4 + number), nn.GELU(), nn.Linear(4 + number, 4))
    theirs.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.3)
    options = {"utils": {"grad_norm_clip": False}}
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.3), loss_fn=F.cross_entropy, options=options)
    for _ in range(3):
        sgd.zero_grad()
        expected = F.cross_entropy(theirs(x), y)
        expected.backward()
        sgd.step()
        assert_close(trainer.train_step(x, y)[0], expected.detach(), 1e-4, f"loss of model {number}")


def train_many(seed: int, until: float) -> None:
    """Trains models in children, some of which are killed, and some of which have a full disk."""
    draw, trained = random.Random(seed), 0
    while time.time() < until:
        number, is_full, is_killed = draw.randrange(MODELS), draw.random() < 0.1, draw.random() < 0.2
        child = os.fork()
        if not child:
            code = 1
            try:
                if is_full:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, FULL))
                train(number)
                code = 0
            finally:
                os._exit(code)
        if is_killed:
            time.sleep(draw.random() * 2)
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0 or (is_killed and status == -signal.SIGKILL), (number, status, is_full)
        trained += not status
    print("trained", trained)


def disturb(folder: Path, until: float) -> None:
    """Damages, deletes and opens up what is in the folder."""
    draw = random.Random(0)
    while time.time() < until:
        time.sleep(draw.random())
        files = sorted(folder.glob("*.export"))
        try:
            match draw.choice(["cut", "change", "open", "delete", "delete all", "folder"]):
                case "cut" if files:
                    os.truncate(draw.choice(files), draw.randrange(2000))
                case "change" if files:
                    with draw.choice(files).open("r+b") as file:
                        file.seek(draw.randrange(5000))
                        file.write(b"changed")
                case "open" if files:
                    draw.choice(files).chmod(0o666)
                case "delete" if files:
                    draw.choice(files).unlink()
                case "delete all" if draw.random() < 0.1:
                    shutil.rmtree(folder, ignore_errors=True)  # others write there meanwhile
                case "folder":
                    folder.chmod(draw.choice([0o777, 0o500, 0o700, 0o700]))
        except FileNotFoundError:
            continue
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)


def test_many_processes_and_faults_at_once(tmp_path: Path) -> None:
    folder, until = tmp_path / "cache", time.time() + SECONDS
    environment = {**os.environ, "ORT_TRAINER_CACHE": str(folder), "ORT_TRAINER_CACHE_MB": "1"}
    environment["ORT_TRAINER_EXPORT_IN_PROCESS"] = "1"
    calls = [processes.Call(train_many, (seed, until), environment) for seed in range(PROCESSES)]
    ended = processes.run([*calls, processes.Call(disturb, (folder, until))], timeout=SECONDS + 300)
    assert [process.code for process in ended] == [0] * len(ended), [p.output[-2000:] for p in ended if p.code]
    trained = sum(int(process.output.split()[-1]) for process in ended[:-1])
    assert trained > PROCESSES
    cache = ExportCache(folder, 1 << 20)
    for path in folder.glob("*.export"):
        content, problem = cache.load(path.stem)
        assert content is not None or "is damaged" in problem or "writable by others" in problem
