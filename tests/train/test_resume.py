"""N steps equal k steps, a save, a kill, a new process, a load and N - k steps, bit for bit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from ort_trainer import ORTTrainer, ORTTrainerOptions, amp, optim
from ort_trainer.state import load_checkpoint_file

from .. import processes
from ..zoo import Tied

TOTAL = 11
FIRST_SCALE = 2.0**18  # which overflows
SAVED = 5  # in the middle of every window but those of one micro-batch


class Net(Tied):
    """A model with all kinds of state: dropout, batch norm, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(torch.relu(self.norm(self.first(x)))))[:, :3]


Config = Callable[[nn.Module], Any]


def ours(config: Any, **settings: Any) -> Config:
    return lambda model: config(lr=0.02, **settings)


def theirs(optimizer: Any, **settings: Any) -> Config:
    return lambda model: optimizer(model.parameters(), **{"lr": 0.02, **settings})


# Optimizer, micro-batches of a window, and the options of mixed precision.
CASES: dict[str, tuple[Config, int, dict[str, Any]]] = {
    "Adam": (ours(optim.AdamConfig, lambda_coef=0.1), 1, {}),
    "AdamW": (ours(optim.AdamWConfig), 3, {}),
    "LAMB": (ours(optim.LambConfig), 1, {}),
    "Lion": (ours(optim.LionConfig), 2, {}),
    "SGD": (ours(optim.SGDConfig, momentum=0.9, nesterov=True), 4, {}),
    "fp16": (ours(optim.AdamConfig), 2, {"enabled": True}),
    "bf16": (ours(optim.LambConfig), 2, {"enabled": True, "dtype": torch.bfloat16}),
    "torch SGD": (theirs(torch.optim.SGD, momentum=0.9), 2, {}),
    "torch AdamW": (theirs(torch.optim.AdamW, amsgrad=True), 1, {}),
    "torch NAdam": (theirs(torch.optim.NAdam), 2, {}),
    "torch ASGD": (theirs(torch.optim.ASGD), 1, {}),
    "torch Adafactor, fp16": (theirs(torch.optim.Adafactor), 2, {"enabled": True}),
}


def make(name: str) -> ORTTrainer:
    torch.manual_seed(3)
    config, accumulation, precision = CASES[name]
    model = Net()
    optimizer = config(model)
    if precision.get("enabled") and "dtype" not in precision:
        precision = {**precision, "loss_scaler": amp.DynamicLossScaler(loss_scale=FIRST_SCALE, up_scale_window=2)}
    is_theirs = isinstance(optimizer, torch.optim.Optimizer)
    schedule = (
        lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=TOTAL, cycle_momentum=False)
        if is_theirs
        else optim.CosineWarmupLRScheduler(TOTAL, warmup=0.2)
    )
    options = {
        "batch": {"gradient_accumulation_steps": accumulation},
        "lr_scheduler": schedule,
        "mixed_precision": precision,
        "utils": {"grad_norm_clip": True},
    }
    desc = {
        "inputs": [("x", ["batch", 8]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", 3])],
    }
    return ORTTrainer(model, desc, optimizer, loss_fn=F.cross_entropy, options=ORTTrainerOptions(options))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def run(trainer: ORTTrainer, start: int, stop: int, evaluate: bool = False) -> None:
    for step in range(start, stop):
        trainer.train_step(*batch(step))
        if evaluate and step % 4 == 0:
            trainer.eval_step(*batch(step))  # must not disturb anything


def begin(folder: Path) -> None:
    """Runs in the first process, which is killed."""
    for name in CASES:
        trainer = make(name)
        run(trainer, 0, SAVED, evaluate=name == "Adam")
        trainer.save_checkpoint(folder / f"{name}.part", {"start": SAVED, "tensor": torch.tensor(SAVED)})
        run(trainer, SAVED, TOTAL)
        trainer.save_checkpoint(folder / f"{name}.whole")
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        run(trainer, 0, 1)


def resume(folder: Path) -> None:
    """Runs in the second process."""
    for name in CASES:
        trainer = make(name)
        torch.manual_seed(999)  # the global generator must not matter
        assert trainer.load_checkpoint(folder / f"{name}.part") == {"start": SAVED, "tensor": torch.tensor(SAVED)}
        run(trainer, SAVED, TOTAL)
        trainer.save_checkpoint(folder / f"{name}.resumed")


def in_process(function: Callable[[Path], None], folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)  # the number of threads affects rounding in PyTorch's kernels
    function(folder)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of all cases after they were killed and resumed."""
    folder = tmp_path_factory.mktemp("resumed")
    for function, code in ((begin, -signal.SIGKILL), (resume, 0)):
        call = processes.Call(in_process, (function, folder, torch.get_num_threads()))
        (ended,) = processes.run([call], timeout=300)
        assert ended.code == code, ended.output
    return folder


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, entry in value.items() for k, v in flatten(entry, f"{path}/{key}").items()}
    return {path: value}


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_resume_after_a_kill(name: str, resumed: Path) -> None:
    part, whole, found = (
        flatten(load_checkpoint_file(resumed / f"{name}.{kind}")[0]) for kind in ("part", "whole", "resumed")
    )
    accumulation = CASES[name][1]
    assert any(key.startswith("/gradients/") for key in part) == bool(SAVED % accumulation), "where the part ends"
    changed = {"/model/full_precision/first.weight", "/model/full_precision/norm.running_mean", "/random"}
    for key in changed:
        assert not np.array_equal(part[key], whole[key]), f"{key} is the same after {SAVED} and {TOTAL} steps"
    if "fp16" in name:
        assert part["/loss_scaler/loss_scale"] != FIRST_SCALE, "a new scaler has that"
    assert whole.keys() == found.keys()
    for key, value in whole.items():
        assert np.array_equal(value, found[key]), key


@pytest.mark.engine
def test_saving_and_evaluating_change_nothing(resumed: Path, tmp_path: Path) -> None:
    trainer = make("Adam")
    run(trainer, 0, TOTAL)
    trainer.save_checkpoint(tmp_path / "whole")
    found, expected = (flatten(load_checkpoint_file(path)[0]) for path in (tmp_path / "whole", resumed / "Adam.whole"))
    assert all(np.array_equal(found[key], expected[key]) for key in found.keys() | expected.keys())


def test_every_optimizer_is_resumed() -> None:
    configs = {type(config(Net())) for config, _, _ in CASES.values()}
    assert set(optim.rules.CONFIGS.values()) <= configs


def test_without_optimizer_states(tmp_path: Path) -> None:
    trainer = make("Adam")
    run(trainer, 0, 3)
    trainer.save_checkpoint(tmp_path / "a", include_optimizer_states=False)
    other = make("Adam")
    with pytest.warns(UserWarning, match="Missing key: optimizer in state_dict"):
        other.load_checkpoint(tmp_path / "a")
    other.prepare(batch(0))
    assert other.train_step_info.step == 3
    assert other.state_dict()["optimizer"]["first.weight"]["Update_Count"].tolist() == [1]


def test_number_of_files() -> None:
    with pytest.raises(ValueError, match="Expected number of files to load: 1, got 2"):
        make("Adam").load_checkpoint(__file__, __file__)
