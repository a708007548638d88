"""Random histories of a trainer: whatever a script does between steps, the model is PyTorch's at each stop."""

from __future__ import annotations

import copy
import functools
import io
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from ort_trainer import ORTTrainer, optim

from ..helpers import assert_close
from ..histories import run_histories, run_many_histories

SIZES = st.sampled_from([4, 5, 7, 10])
PLACES = st.sampled_from(["fc1", "norm", "fc2"])
# Name -> the trainer's config (None for the optimizer itself), and PyTorch's optimizer.
OPTIMIZERS: dict[str, tuple[Callable[[], Any] | None, Callable[..., torch.optim.Optimizer]]] = {
    "SGDConfig": (lambda: optim.SGDConfig(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "AdamWConfig": (lambda: optim.AdamWConfig(lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "SGD": (None, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "Adam": (None, lambda p: torch.optim.Adam(p, lr=0.01)),
    "RMSprop": (None, lambda p: torch.optim.RMSprop(p, lr=0.01)),
}


class Net(nn.Module):
    """Reads a number and a flag, has running statistics, counts its calls, and leaves a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.gain, self.is_smooth = 1.0, True
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        hidden = self.fc1(x)
        hidden = self.norm(torch.tanh(hidden) if self.is_smooth else F.gelu(hidden)) * self.gain
        self.last = hidden.detach().square().mean()  # near one: a mean would be noise around zero
        return self.fc2(hidden)


class Plain(nn.Module):
    """Two layers, for ONNX models, which a script can't change as it changes a module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.norm(torch.tanh(self.fc1(x))))


@functools.cache
def onnx_model() -> bytes:
    """Returns the model of Plain, with its first weights."""
    torch.manual_seed(0)
    file = io.BytesIO()
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(Plain(), (torch.randn(4, 6),), file, dynamo=True, dynamic_shapes=shapes, verbose=False)
    return file.getvalue()


class History(RuleBasedStateMachine):
    """A trainer of a module or an ONNX model, and the same in PyTorch."""

    @initialize(
        kind=st.sampled_from(sorted(OPTIMIZERS)),
        size=st.integers(1, 3),
        kernels=st.sampled_from(["pytorch", "onnxruntime"]),
        is_module=st.sampled_from([True, True, False]),
    )
    def begin(self, kind: str, size: int, kernels: str, is_module: bool) -> None:
        torch.manual_seed(0)
        self.is_module = is_module or not kind.endswith("Config")  # PyTorch's optimizers have parameters of a module
        self.kind, self.kernels, self.size, self.drawn = kind, kernels, size, 0
        self.theirs: Any = Net() if self.is_module else Plain()
        self.micro_batches, self.steps, self.updates = 0, 0, 0
        self.optimizer = OPTIMIZERS[kind][1](self.theirs.parameters())
        self.make()

    def make(self) -> None:
        """Makes another model and trainer, as another process would."""
        self.model: Any = Net() if self.is_module else None
        config, own = OPTIMIZERS[self.kind]
        self.own = None if config else own(self.model.parameters())
        self.trainer = ORTTrainer(
            self.model if self.is_module else onnx.load_from_string(onnx_model()),
            "auto",
            config() if config else self.own,
            loss_fn=F.cross_entropy,
            options={
                "batch": {"gradient_accumulation_steps": self.size},
                "utils": {"grad_norm_clip": False, "kernels": self.kernels},
            },
        )
        if config:  # a rate that was assigned is the script's, not the trainer's state
            self.trainer.optim_config.lr = self.optimizer.param_groups[0]["lr"]
        if self.is_module:
            self.model.load_state_dict({name: value.clone() for name, value in self.theirs.state_dict().items()})
            self.take_settings()

    def take_settings(self) -> None:
        """Gives our model what a script sets by itself."""
        self.model.gain, self.model.is_smooth = self.theirs.gain, self.theirs.is_smooth
        for name, module in self.theirs.named_modules():
            self.model.get_submodule(name).training = module.training
        for name, parameter in self.theirs.named_parameters():
            self.model.get_parameter(name).requires_grad_(parameter.requires_grad)

    @property
    def is_between_windows(self) -> bool:
        return not self.micro_batches

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.drawn += 1
        generator = torch.Generator().manual_seed(self.drawn)
        return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.theirs(x), y)
        loss.backward()
        return loss.detach()

    def update(self, count: int) -> None:
        for parameter in self.theirs.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.micro_batches, self.updates = 0, self.updates + 1

    def train_theirs(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.backward(x, y)
        self.micro_batches, self.steps = self.micro_batches + 1, self.steps + 1
        if self.micro_batches == self.size:
            self.update(self.size)
        return loss

    @rule(size=SIZES, in_thread=st.booleans())
    def train(self, size: int, in_thread: bool) -> None:
        x, y = self.batch(size)
        losses = []

        def step() -> None:
            losses.append(self.trainer.train_step(x, y)[0])

        if in_thread:
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()
        else:
            step()
        assert_close(losses[0], self.train_theirs(x, y), 1e-4, "loss")

    @rule(size=SIZES)
    def evaluate(self, size: int) -> None:
        x, y = self.batch(size)
        reference = copy.deepcopy(self.theirs).eval()
        with torch.no_grad():
            logits = reference(x)
        loss, found = self.trainer.eval_step(x, y)
        assert_close(found, logits, 1e-4, "logits")
        assert_close(loss, F.cross_entropy(logits, y), 1e-4, "loss of an evaluation")
        assert_close(self.trainer.predict(x), logits, 1e-4, "prediction")

    @precondition(lambda self: self.is_module and self.is_between_windows)
    @rule(size=SIZES, passes=st.integers(1, 2))
    def own_loop(self, size: int, passes: int) -> None:
        self.model.zero_grad()
        for _ in range(passes):
            x, y = self.batch(size)
            assert_close(self.trainer.forward_backward(x, y)[0], self.backward(x, y), 1e-4, "loss of an own loop")
        for name, parameter in self.theirs.named_parameters():
            ours = self.model.get_parameter(name).grad
            assert (ours is None) == (parameter.grad is None), name
            if ours is not None:
                assert_close(ours, parameter.grad, 1e-4, f"gradient of {name}")
        if self.own is None:
            self.trainer.optimizer_step()
        else:
            self.own.step()
            self.updates -= 1  # the trainer does not see it
        self.model.zero_grad()
        self.update(1)

    @precondition(lambda self: not self.is_between_windows)
    @rule(drops=st.booleans())
    def end_window(self, drops: bool) -> None:
        if drops:
            self.trainer.lazy_reset_grad()
            self.optimizer.zero_grad()
            self.micro_batches = 0
        else:
            assert self.trainer.optimizer_step()
            self.update(self.micro_batches)

    @rule(elsewhere=st.booleans(), file=st.booleans(), strict=st.booleans())
    def save_and_load(self, elsewhere: bool, file: bool, strict: bool) -> None:
        stored = io.BytesIO()
        if file:
            self.trainer.save_checkpoint(stored)
        state = self.trainer.state_dict()
        left = self.model.last if self.is_module else None
        if elsewhere:
            self.make()
        if file:
            stored.seek(0)
            self.trainer.load_checkpoint(stored, strict=strict)
        else:
            self.trainer.load_state_dict(state, strict=strict)
        if self.is_module:
            self.model.last = left

    @rule(size=SIZES)
    def lose_steps(self, size: int) -> None:
        """Goes on, and then back to what was saved, as after a crash."""
        stored = io.BytesIO()
        self.trainer.save_checkpoint(stored)
        self.trainer.train_step(*self.batch(size))
        self.make()
        stored.seek(0)
        self.trainer.load_checkpoint(stored)

    @rule(place=PLACES, factor=st.sampled_from([0.5, 1.5]), replaces=st.booleans())
    def change_weights(self, place: str, factor: float, replaces: bool) -> None:
        for model in (self.model, self.theirs) if self.is_module else (self.theirs,):
            with torch.no_grad():
                weight = model.get_submodule(place).weight
                if replaces:
                    weight.data = weight.data * factor
                else:
                    weight.mul_(factor)
        if not self.is_module:
            name = f"{place}.weight"
            self.trainer.set_parameter(name, self.trainer.get_parameter(name) * factor)

    @precondition(lambda self: self.is_module)
    @rule(gain=st.sampled_from([0.5, 1.0, 2.0]), is_smooth=st.booleans())
    def change_settings(self, gain: float, is_smooth: bool) -> None:
        self.theirs.gain, self.theirs.is_smooth = gain, is_smooth
        self.take_settings()

    @precondition(lambda self: self.is_module)
    @rule()
    def change_mode(self) -> None:
        self.theirs.norm.train(not self.theirs.norm.training)
        self.take_settings()

    @precondition(lambda self: self.is_module and self.is_between_windows)
    @rule(place=st.sampled_from(["fc1", "norm"]))
    def freeze(self, place: str) -> None:
        for parameter in self.theirs.get_submodule(place).parameters():
            parameter.requires_grad_(not parameter.requires_grad)
        self.take_settings()

    @rule(rate=st.sampled_from([0.003, 0.02]))
    def change_rate(self, rate: float) -> None:
        groups = [*self.optimizer.param_groups, *(self.own.param_groups if self.own else ())]
        for group in groups:
            group["lr"] = rate
        if self.own is None:
            self.trainer.optim_config.lr = rate

    @precondition(lambda self: self.is_between_windows)
    @rule(size=st.integers(1, 3))
    def change_window(self, size: int) -> None:
        self.size = self.trainer.gradient_accumulation_steps = size

    @rule(
        bad=st.sampled_from(
            [
                lambda x, y: (x.double(), y),
                lambda x, y: (x[:, :3], y),
                lambda x, y: (x, y[:1]),
                lambda x, y: (x, y + 7),
                lambda x, y: (x,),
                lambda x, y: (x, y, y),
                lambda x, y: (x.tolist(), y),
            ]
        )
    )
    def give_a_bad_batch(self, bad: Callable[..., Any]) -> None:
        if self.steps:  # the first batch says what the others must be
            with pytest.raises((TypeError, ValueError, IndexError, RuntimeError)):
                self.trainer.train_step(*bad(*self.batch(4)))

    @rule(size=SIZES)
    def fork(self, size: int) -> None:
        """A child trains for itself."""
        x, y = self.batch(size)
        child = os.fork()
        if not child:
            code = 1
            try:
                self.trainer.train_step(x, y)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    @precondition(lambda self: self.trainer.loop.graphs.has_started)
    @rule()
    def write_files(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.trainer.save_as_onnx(Path(folder) / "model.onnx")

    @invariant()
    def is_pytorchs(self) -> None:
        if not hasattr(self, "trainer"):
            return
        ours = self.model.state_dict() if self.is_module else self.trainer.state_dict(pytorch_format=True)
        for name, value in self.theirs.state_dict().items():
            assert_close(ours[name], value, 1e-4, name)
        info = self.trainer.train_step_info
        assert (info.step, info.optimization_step) == (self.steps, self.updates)
        if self.is_module and self.steps and self.theirs.last is not None and self.model.last is not None:
            assert_close(self.model.last, self.theirs.last, 1e-4, "what the model has left")


def test_histories() -> None:
    run_histories(History)


@pytest.mark.torture
def test_many_histories() -> None:
    run_many_histories(History)
