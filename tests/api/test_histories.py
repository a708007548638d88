"""Random histories of training from artifacts in Python, C and JavaScript: the weights are PyTorch's at each stop."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from ort_trainer import ORTTrainer, optim
from ort_trainer.artifacts import trainer_state_dict

from ..harness.import_map import ROOT
from ..helpers import assert_close
from ..histories import run_histories, run_many_histories
from .languages import REFUSALS, InPython, Language, Program

# A rate that was set replaces the schedule.
pytestmark = pytest.mark.filterwarnings("ignore:Missing key. lr_scheduler")
SIZES = st.sampled_from([4, 5, 7])
NAMES = ["0.weight", "3.bias", "2.weight", "2.running_mean"]
RATE, WARMUP, TOTAL = 0.01, 5, 20
# Exports: updates with the sum of the gradients at a constant rate, or with their mean by a schedule.
OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {},
    "mean": {
        "batch": {"gradient_accumulation_steps": 2},
        "lr_scheduler": optim.lr_scheduler.LinearWarmupLRScheduler(TOTAL, warmup=WARMUP / TOTAL),
    },
}
PROPERTIES = [0, -3, 2**40, 0.5, 2.0**100, "", 'ü €😀\n"']
# What a user should not read: errors of what lies beneath.
RAW = re.compile(
    r"^$|undefined|not a function|Cannot |BigInt|std::|map::|vector|_M_|is NULL|\[ONNXRuntimeError\]|/onnxruntime_src/"
)
BAD_BATCHES: list[Callable[[Any, Any], tuple[Any, ...]]] = [
    lambda x, y: (x.astype(np.float64), y),
    lambda x, y: (x, y.astype(np.int32)),
    lambda x, y: (y, x),
    lambda x, y: (x[:, :2], y),
    lambda x, y: (x[:, :, None], y),
    lambda x, y: (x[0, 0], y),
    lambda x, y: (x, y[:1]),
    lambda x, y: (x[:0], y[:0]),
    lambda x, y: (x, y + 5),
    lambda x, y: (x, y - 5),
    lambda x, y: (x,),
    lambda x, y: (x, y, y),
    lambda x, y: (),
]


def model() -> nn.Sequential:
    """Returns a model with a frozen bias."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))
    made[0].bias.requires_grad_(False)
    return made


def linear(base: float, done: int, warmup: int, total: int) -> float:
    """Returns the rate of a linear schedule."""
    return base * (done / warmup if done < warmup else max(0.0, (total - done) / (total - warmup)))


def trainer_of(trained: nn.Module, kind: str) -> ORTTrainer:
    config = optim.AdamWConfig(lr=RATE)
    return ORTTrainer(trained, "auto", config, loss_fn=F.cross_entropy, options=OPTIONS[kind])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a folder of artifacts for each kind, and damaged checkpoints."""
    found = tmp_path_factory.mktemp("artifacts")
    for kind in OPTIONS:
        trainer = trainer_of(model(), kind)
        trainer.prepare((torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)))
        trainer.export_artifacts(found / kind)
    whole = (found / "sum" / "checkpoint").read_bytes()
    (found / "damaged").write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    (found / "cut").write_bytes(whole[:-1])
    (found / "empty").write_bytes(b"")
    return found


def bad_calls(folder: Path) -> list[tuple[Any, ...]]:
    """Returns calls that must be refused in every language."""
    parameter = np.zeros((8, 6), np.float32)
    nowhere = str(folder / "no" / "file")
    files = ["damaged", "cut", "empty", "no", "sum", "sum/training_model.onnx"]
    return [
        *(("set_rate", rate) for rate in (-1.0, 1e39)),
        ("parameter", "weight"),
        ("set_parameter", "weight", parameter),
        ("set_parameter", "0.weight", parameter[:1]),
        ("set_parameter", "0.weight", parameter.astype(np.float64)),
        ("set_parameter", "2.num_batches_tracked", np.zeros((), np.int64)),
        ("set_buffer", parameter.reshape(-1), True),
        ("set_buffer", np.zeros(91), True),
        ("export", str(folder / "exported"), ["nothing"]),
        ("save", nowhere, True, False),
        *(("load", str(folder / "sum"), str(folder / file), is_kept) for file in files for is_kept in (False, True)),
        *(("open", str(folder / "no"), is_kept) for is_kept in (False, True)),
        *(("schedule", *counts, RATE) for counts in ((3, 2), (0, 0), (-1, 2))),
        ("schedule", 1, 2, -RATE),
    ]


def histories_in(folder: Path, ours: Language) -> type[RuleBasedStateMachine]:
    """Returns the histories of the artifacts in a folder, in a language."""
    kept = str(folder / "kept")
    python = InPython()

    class History(RuleBasedStateMachine):
        """A module, an optimizer and a state, and the same in PyTorch."""

        @initialize(kind=st.sampled_from(sorted(OPTIONS)), is_nominal=st.booleans())
        def begin(self, kind: str, is_nominal: bool) -> None:
            self.kind, self.files, self.drawn = kind, str(folder / kind), 0
            self.theirs, self.rate, self.properties = model(), None, {}
            self.begin_anew()
            is_nominal = is_nominal and "nominal" not in ours.lacks
            first = "nominal_checkpoint" if is_nominal else "checkpoint"
            ours("load", self.files, str(folder / kind / first), False)
            if is_nominal:
                self.assert_refused("evaluate", *self.batch(4))
                for name in dict(self.floats()).keys() - self.trainable:
                    ours("set_parameter", name, self.theirs.state_dict()[name].numpy())
                trained = [parameter.detach().numpy().reshape(-1) for parameter in self.trainable.values()]
                ours("set_buffer", np.concatenate(trained), True)
            self.is_ready = True

        def begin_anew(self) -> None:
            named = dict(self.theirs.named_parameters())
            self.trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
            self.optimizer = torch.optim.AdamW(self.trainable.values(), lr=RATE)
            self.optimizer.zero_grad()
            self.updates, self.micro_batches = 0, 0

        def floats(self) -> Iterator[tuple[str, torch.Tensor]]:
            """Returns what our checkpoints call parameters."""
            return ((name, value) for name, value in self.theirs.state_dict().items() if value.is_floating_point())

        @property
        def next_rate(self) -> float:
            if self.rate is not None:
                return self.rate
            return RATE if self.kind == "sum" else linear(RATE, self.updates, WARMUP, TOTAL)

        def batch(self, size: int) -> tuple[Any, Any]:
            self.drawn += 1
            random = np.random.default_rng(self.drawn)
            return random.standard_normal((size, 6)).astype(np.float32), random.integers(0, 3, size)

        def backward_theirs(self, x: Any, y: Any) -> torch.Tensor:
            loss = F.cross_entropy(self.theirs(torch.tensor(x)), torch.tensor(y))
            loss.backward()
            self.micro_batches += 1
            return loss.detach()

        def update_theirs(self) -> None:
            count = self.micro_batches if self.kind == "mean" else 1
            trained = self.optimizer.param_groups[0]["params"]
            gradients = [parameter.grad for parameter in trained]
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient / count
            self.optimizer.param_groups[0]["lr"] = self.next_rate
            self.optimizer.step()
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
            self.updates += 1

        def reset_theirs(self) -> None:
            self.optimizer.zero_grad()
            self.micro_batches = 0

        @rule(size=SIZES)
        def backward(self, size: int) -> None:
            batch = self.batch(size)
            assert_close(torch.tensor(ours("train", *batch)[0]), self.backward_theirs(*batch), 1e-4, "loss")

        @precondition(lambda self: self.micro_batches)
        @rule()
        def update(self) -> None:
            ours("step")
            self.update_theirs()

        @rule()
        def reset(self) -> None:
            ours("reset")
            self.reset_theirs()

        @rule(size=SIZES)
        def step(self, size: int) -> None:
            self.backward(size)
            self.update()
            self.reset()

        @rule(
            sizes=st.lists(SIZES, min_size=1, max_size=3),
            updates=st.booleans(),
            resets=st.booleans(),
            opens=st.booleans(),
        )
        def overlap(self, sizes: list[int], updates: bool, resets: bool, opens: bool) -> None:
            """Asks for several steps before the first one is done, where the language allows it."""
            batches = [self.batch(size) for size in sizes]
            between = [("step",)] * updates + [("open", self.files, False)] * opens + [("reset",)] * resets
            losses = ours.together([call for batch in batches for call in (("train", *batch), *between)])
            for batch, loss in zip(batches, losses[:: 1 + len(between)], strict=True):
                assert_close(torch.tensor(loss[0]), self.backward_theirs(*batch), 1e-4, "loss")
                if updates:
                    self.update_theirs()
                if resets:
                    self.reset_theirs()

        def assert_logits(self, found: Any, x: Any) -> torch.Tensor:
            with torch.no_grad():
                logits = copy.deepcopy(self.theirs).eval()(torch.tensor(x))
            assert_close(torch.tensor(found), logits, 1e-4, "logits")
            return logits

        @rule(size=SIZES)
        def evaluate(self, size: int) -> None:
            x, y = self.batch(size)
            loss, found = ours("evaluate", x, y)
            logits = self.assert_logits(found, x)
            assert_close(torch.tensor(loss), F.cross_entropy(logits, torch.tensor(y)), 1e-4, "loss of an evaluation")

        @rule(size=SIZES)
        def export(self, size: int) -> None:
            path = str(folder / "exported")
            ours("export", path, ["output"])
            x, _ = self.batch(size)
            self.assert_logits(onnxruntime.InferenceSession(path).run(["output"], {"input": x})[0], x)

        @rule(rate=st.sampled_from([0.0, 0.003, 0.02]))
        def change_rate(self, rate: float) -> None:
            ours("set_rate", rate)
            self.rate = rate

        @precondition(lambda self: "schedule" not in ours.lacks)
        @rule(warmup=st.integers(0, 2), size=SIZES)
        def follow_a_schedule(self, warmup: int, size: int) -> None:
            total = self.updates + 3
            ours("schedule", warmup, total, RATE)
            for _ in range(2):
                self.rate = linear(RATE, self.updates, warmup, total)
                self.step(size)
                ours("step_schedule")
            self.rate = linear(RATE, self.updates, warmup, total)

        @precondition(lambda self: "train_into" not in ours.lacks)
        @rule(name=st.sampled_from(["train", "evaluate"]), size=SIZES)
        def write_into(self, name: str, size: int) -> None:
            """Gives tensors for the outputs of four rows."""
            batch = self.batch(size)
            if size != 4:
                self.assert_refused(f"{name}_into", *batch)
            elif name == "train":
                assert_close(torch.tensor(ours("train_into", *batch)[0]), self.backward_theirs(*batch), 1e-4, "loss")
            else:
                self.assert_logits(ours("evaluate_into", *batch)[1], batch[0])

        @rule(name=st.sampled_from(NAMES), factor=st.sampled_from([0.5, 1.5]))
        def change_a_parameter(self, name: str, factor: float) -> None:
            ours("set_parameter", name, ours("parameter", name) * np.float32(factor))
            self.theirs.state_dict()[name].mul_(factor)

        @rule(factor=st.sampled_from([0.5, 1.5]), trainable_only=st.booleans())
        def change_all(self, factor: float, trainable_only: bool) -> None:
            ours("set_buffer", ours("buffer", trainable_only) * np.float32(factor), trainable_only)
            for name, value in self.floats():
                if not trainable_only or name in self.trainable:
                    value.mul_(factor)

        @rule(name=st.sampled_from(["best", "ü"]), value=st.sampled_from(PROPERTIES))
        def set_property(self, name: str, value: Any) -> None:
            ours("set_property", name, value)
            self.properties[name] = value

        @rule(complete=st.booleans(), in_memory=st.booleans())
        def save_and_load(self, complete: bool, in_memory: bool) -> None:
            ours("save", kept, complete, in_memory)
            ours("load", self.files, kept, in_memory)
            if not complete:
                self.begin_anew()

        @rule(in_memory=st.booleans())
        def open_again(self, in_memory: bool) -> None:
            ours("open", self.files, in_memory)

        @rule(size=SIZES)
        def lose_steps(self, size: int) -> None:
            """Goes on, and then back to what was saved, as after a crash."""
            ours("save", kept, True, False)
            ours("train", *self.batch(size))
            ours("step")
            ours("load", self.files, kept, False)

        @rule(size=SIZES)
        def go_on_in_python(self, size: int) -> None:
            """Python writes the same file, and does a step."""
            before = self.saved()
            python("load", self.files, kept, False)
            python("save", kept, True, False)
            assert Path(kept).read_bytes() == before
            batch = self.batch(size)
            python("train", *batch)
            python("step")
            python("save", kept, True, False)
            ours("load", self.files, kept, False)
            self.backward_theirs(*batch)
            self.update_theirs()

        @rule()
        def go_on_in_a_trainer(self) -> None:
            ours("save", kept, True, False)
            model_of_trainer = model()
            trainer = trainer_of(model_of_trainer, self.kind)
            trainer.load_state_dict(trainer_state_dict(kept))
            for name, value in self.theirs.state_dict().items():
                assert_close(model_of_trainer.state_dict()[name], value, 1e-4, name)

        def saved(self) -> bytes:
            ours("save", kept, True, False)
            return Path(kept).read_bytes()

        def assert_refused(self, *call: Any) -> None:
            before = self.saved()
            with pytest.raises(REFUSALS) as refusal:
                ours(*call)
            assert not RAW.search(str(refusal.value)), f"{call}: {refusal.value}"
            assert self.saved() == before

        @rule(name=st.sampled_from(["train", "evaluate"]), bad=st.sampled_from(BAD_BATCHES))
        def give_a_bad_batch(self, name: str, bad: Callable[[Any, Any], tuple[Any, ...]]) -> None:
            self.assert_refused(name, *bad(*self.batch(4)))

        @rule(in_memory=st.booleans())
        def load_of_another_export(self, in_memory: bool) -> None:
            (other,) = OPTIONS.keys() - {self.kind}
            self.assert_refused("load", self.files, str(folder / other / "checkpoint"), in_memory)
            self.assert_refused("open", str(folder / other), in_memory)

        @rule(call=st.sampled_from([call for call in bad_calls(folder) if call[0] not in ours.lacks]))
        def do_what_is_refused(self, call: tuple[Any, ...]) -> None:
            self.assert_refused(*call)

        @invariant()
        def is_pytorchs(self) -> None:
            if not hasattr(self, "is_ready"):
                return
            for name, value in self.floats():
                assert_close(torch.tensor(ours("parameter", name)), value, 1e-4, name)
            assert ours("rate") == pytest.approx(self.next_rate, rel=1e-6)
            for name, value in self.properties.items():
                assert ours("property", name) == value

    return History


@pytest.fixture(scope="module", params=["Python", "C", "JavaScript"])
def ours(request: pytest.FixtureRequest) -> Iterator[Language]:
    if request.param == "Python":
        yield InPython()
        return
    needed = ("make", "cmake", "g++") if request.param == "C" else ("make", "node", "npm")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    if request.param == "C":
        if not Path("/usr/include/xxhash.h").exists() or not (ROOT / ".stock").exists():
            pytest.skip("libxxhash-dev, or the stock engine of `make setup-stock`, is not installed")
        made, target = Program(ROOT / "build" / "c" / "histories"), "build-c"
    else:
        if subprocess.run(["make", "js/node_modules/.installed"], cwd=ROOT).returncode:
            pytest.skip("npm can't install the packages of js/package-lock.json")
        lacks = ("nominal", "schedule", "train_into", "evaluate_into")
        made, target = Program("node", ROOT / "js" / "test" / "histories.mjs", lacks=lacks), "js/dist/index.js"
    subprocess.run(["make", target], cwd=ROOT, check=True)
    yield made
    made.close()


def test_histories(folder: Path, ours: Language) -> None:
    run_histories(histories_in(folder, ours), 12, 20)


@pytest.mark.torture
def test_many_histories(folder: Path, ours: Language) -> None:
    run_many_histories(histories_in(folder, ours))
