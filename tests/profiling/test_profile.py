"""ORTTrainer.profile on both kinds of kernels: its figures, its files, and that it does not change the training."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.profiling import ModuleTime, Profile

from ..helpers import MLP, mlp_batches, mlp_trainer

pytestmark = pytest.mark.engine
KERNELS = ["pytorch", "onnxruntime"]
on_both = pytest.mark.parametrize("kernels", KERNELS)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.2), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.drop(torch.tanh(self.dense(x))))


class Nested(nn.Module):
    """Two layers of the same shape, and code outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.sigmoid())


def options(kernels: str, accumulation: int = 1) -> dict[str, Any]:
    return {"utils": {"kernels": kernels}, "batch": {"gradient_accumulation_steps": accumulation}}


def nested_trainer(kernels: str, accumulation: int = 1, model: nn.Module | None = None) -> ORTTrainer:
    return mlp_trainer(options(kernels, accumulation), model=Nested() if model is None else model)


def profiled(trainer: ORTTrainer, steps: int = 2, **given: Any) -> Profile:
    profile = trainer.profile(steps, **given)
    for batch in mlp_batches(steps):
        trainer.train_step(*batch)
    return profile


def by_path(profile: Profile) -> dict[str, ModuleTime]:
    found = {row.path: row for row in profile.modules}
    assert len(found) == len(profile.modules)
    return found


def norms(profile: Profile, kernels: str) -> float:
    """Returns the number of layer-norm calls per step."""
    calls = {row.name: row.calls for row in profile.operators}
    return calls["aten.native_layer_norm" if kernels == "pytorch" else "LayerNormalization"]


def is_within(path: str, other: str) -> bool:
    """Returns whether a module is a direct child of another one."""
    return path not in ("", "(loss)", "(fused)") and path.rpartition(".")[0] == other


@on_both
def test_names_of_modules_and_operators(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = Nested()
    found = by_path(profile := profiled(nested_trainer(kernels, model=model), trace=None))
    kinds = {path: type(part).__name__ for path, part in model.named_modules()}
    assert {path: row.kind for path, row in found.items() if path[:1] != "("} == kinds
    assert list(found)[: len(kinds)] == list(kinds), "in the model's order"
    assert found["(loss)"].forward > 0
    names = {row.name for row in profile.operators}
    expected = {"aten.tanh", "aten.mm", "aten.sigmoid"} if kernels == "pytorch" else {"LogSoftmax", "Mul", "Reciprocal"}
    assert expected <= names
    assert norms(profile, kernels) == 2
    report = capsys.readouterr().out
    assert report == f"{profile}\n"
    assert "layers.1.dense  Linear" in report or "of less than 1%" in report
    assert all(row.name in report for row in profile.operators[:20])


@on_both
def test_layers_of_the_same_shape_are_told_apart(kernels: str) -> None:
    trainer = nested_trainer(kernels)
    trace = Path("trace.json")
    profiled(trainer, 1, trace=trace)
    events = [event["args"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "operator"]
    for layer in (0, 1):
        for part in ("dense", "norm", "drop"):
            passes = {args["pass"] for args in events if args.get("module") == f"layers.{layer}.{part}"}
            assert passes == {"forward", "backward"}, (layer, part)
    counts = [sum(args.get("module", "").startswith(f"layers.{layer}") for args in events) for layer in (0, 1)]
    # The first layer does not compute the gradient of its input.
    assert 0 < counts[0] <= counts[1]


@on_both
def test_parts_make_the_whole(kernels: str) -> None:
    profile = profiled(nested_trainer(kernels), 3)
    assert profile.steps == 3 == len(profile.seconds) and profile.done
    assert profile.milliseconds == pytest.approx(1000 * sum(profile.seconds) / 3)
    operators = sum(row.milliseconds for row in profile.operators)
    assert 0 < profile.products < operators <= profile.milliseconds
    assert profile.optimizer > 0 and profile.overhead > 0
    assert operators + profile.optimizer + profile.overhead == pytest.approx(profile.milliseconds)
    times = [row.milliseconds for row in profile.operators]
    assert times == sorted(times, reverse=True)
    modules = by_path(profile)
    for path, row in modules.items():
        assert row.share == pytest.approx((row.forward + row.backward) / profile.milliseconds)
        for attribute in ("forward", "backward"):
            inside = [getattr(other, attribute) for name, other in modules.items() if is_within(name, path)]
            assert getattr(row, attribute) >= sum(inside) - 1e-9
    assert modules[""].backward > 0 and modules["layers.1.norm"].backward > 0
    outermost = [modules[path] for path in ("", "(loss)", "(fused)") if path in modules]
    assert sum(row.share for row in outermost) <= operators / profile.milliseconds + 1e-9


def events_of(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in found} == {"M", "X"}
    return [event for event in found if event["ph"] == "X"]


def around(events: list[dict[str, Any]], inner: dict[str, Any]) -> Iterator[dict[str, Any]]:
    end = inner["ts"] + inner["dur"]
    for event in events:
        if event is not inner and event["ts"] <= inner["ts"] + 1e-3 and end <= event["ts"] + event["dur"] + 1e-3:
            yield event


@on_both
def test_the_trace(kernels: str, tmp_path: Path) -> None:
    trainer = nested_trainer(kernels)
    profile = profiled(trainer)
    assert profile.trace == tmp_path / "ort_trainer_trace.json"
    assert f"trace: {profile.trace}" in str(profile)
    assert [path.name for path in tmp_path.iterdir()] == ["ort_trainer_trace.json"], "no other file is left"
    events = events_of(profile.trace)
    for event in events:
        assert event["name"] and math.isfinite(event["ts"]) and event["ts"] >= 0 <= event["dur"]
        assert {"pid", "tid", "cat", "args"} <= event.keys()
    kinds = [event["cat"] for event in events]
    assert kinds.count("step") == kinds.count("run") == kinds.count("update") == 2
    assert min(event["ts"] for event in events) == 0
    for event in events:
        categories = {other["cat"] for other in around(events, event)}
        if event["cat"] in ("run", "update"):
            assert "step" in categories
        if event["cat"] == "operator":
            assert "run" in categories, event
            if event["args"].get("module"):
                names = [other["name"] for other in around(events, event) if other["cat"] == "module"]
                assert {event["args"]["module"], event["args"]["pass"]} <= {*names}, event
    assert all(event["tid"] == 1 for event in events), "everything ran on one thread"


@on_both
def test_training_stays_the_same(kernels: str) -> None:
    """Covers random masks, accumulation, and two batch sizes, which need two graphs if a size is fixed."""
    model = Nested()
    trained = []
    for is_profiled in (False, True):
        torch.manual_seed(5)
        trainer = nested_trainer(kernels, 2, copy.deepcopy(model))
        profile = trainer.profile(5, trace=None) if is_profiled else None
        batches = [batch for size in (3, 6, 3, 6, 1, 4, 3) for batch in mlp_batches(1, size, seed=size)]
        outputs = [trainer.train_step(*batch) for batch in batches]
        trained.append((trainer.state_dict(pytorch_format=True), outputs))
    assert profile is not None and profile.done and len(profile.seconds) == 5
    for ours, theirs in zip(*(outputs for _, outputs in trained), strict=True):
        assert all(map(torch.equal, ours, theirs))
    for name, value in trained[0][0].items():
        assert torch.equal(value, trained[1][0][name]), name


class ByLength(nn.Module):
    """Has one graph per branch."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.short(x) if x.shape[0] < 4 else self.long(x).relu()


@on_both
def test_several_graphs_are_one_profile(kernels: str) -> None:
    trainer = mlp_trainer(options(kernels), model=ByLength())
    profile = trainer.profile(4, trace=None)
    for size in (2, 6, 2, 6):
        trainer.train_step(*mlp_batches(1, size)[0])
    assert trainer.session is not None and len(trainer.session.graphs(True)) == 2
    assert {"short", "long", "", "(loss)"} <= by_path(profile).keys()
    linear = [row.calls for row in profile.operators if row.name in ("aten.threshold_backward", "Relu", "FusedGemm")]
    assert linear and min(linear) <= 1, "a mean over all steps"


@on_both
def test_a_step_that_fails_is_not_counted(kernels: str) -> None:
    model = Nested()
    torch.manual_seed(1)
    ours, theirs = (nested_trainer(kernels, model=copy.deepcopy(model)) for _ in range(2))
    profile = ours.profile(2, trace=None)
    batches = mlp_batches(3)
    for trainer in (ours, theirs):
        trainer.train_step(*batches[0])
        for wrong in (torch.full_like(batches[0][1], 99), torch.zeros(2, 2)):
            with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)):
                trainer.train_step(batches[0][0], wrong)
    assert not profile.done and profile.left == 1
    for trainer in (ours, theirs):
        for batch in batches[1:]:
            trainer.train_step(*batch)
    assert profile.done and len(profile.seconds) == 2
    assert norms(profile, kernels) == 2
    for name, value in ours.state_dict(pytorch_format=True).items():
        assert torch.equal(value, theirs.state_dict(pytorch_format=True)[name]), name


@on_both
def test_one_profile_after_the_other(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = nested_trainer(kernels)
    first = profiled(trainer, 1, trace="first.json")
    trainer.train_step(*mlp_batches(1)[0])
    second = profiled(trainer, 2, trace="second.json")
    assert (len(first.seconds), len(second.seconds)) == (1, 2)
    assert [row.path for row in first.modules] == [row.path for row in second.modules]
    assert Path("first.json").exists() and Path("second.json").exists()
    assert capsys.readouterr().out.count("training steps of") == 2


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


class WithFunction(Nested):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Doubling.apply(x))


class Wrapped(nn.Module):
    """A part without gradients, a part that is called twice, and names that this package uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.loss_fn = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.model(x)
        return self.head(self.loss_fn(self.loss_fn(x)))


@on_both
@pytest.mark.parametrize("kind", [WithFunction, Wrapped])
def test_whatever_way_the_model_is_captured(kernels: str, kind: type[nn.Module]) -> None:
    model = kind()
    found = by_path(profiled(mlp_trainer(options(kernels), model=model), trace=None))
    assert {path for path in found if path[:1] != "("} == {path for path, _ in model.named_modules()}
    if kind is Wrapped:
        assert found["model"].backward == 0 < found["model"].forward


@on_both
def test_a_loss_function_with_modules(kernels: str) -> None:
    trainer = ORTTrainer(
        MLP(),
        {"inputs": [("x", ["n", 8]), ("label", ["n"])], "outputs": [("loss", [], True)]},
        optim.SGDConfig(lr=0.1),
        loss_fn=nn.CrossEntropyLoss(),
        options=ORTTrainerOptions(options(kernels)),
    )
    found = by_path(profiled(trainer, trace=None))
    assert found["(loss)"].backward > 0 and not any("loss_fn" in path or "model" in path for path in found)


def test_the_cache_keeps_the_names(caplog: pytest.LogCaptureFixture) -> None:
    model = Nested()
    paths = [
        {row.path for row in profiled(mlp_trainer(model=copy.deepcopy(model)), trace=None).modules} for _ in range(2)
    ]
    assert paths[0] == paths[1] and "layers.0.dense" in paths[0]


def test_onnx_models_are_one_module(tmp_path: Path) -> None:
    trainer = mlp_trainer()
    trainer.prepare(mlp_batches(1)[0])
    trainer.save_as_onnx("model.onnx")
    again = ORTTrainer("model.onnx", "auto", optim.SGDConfig(lr=0.1))
    profile = again.profile(2, trace=None)
    for x, label in mlp_batches(2):
        again.train_step(x=x, label=label)
    assert [row.kind for row in profile.modules] == ["OnnxModule"] and profile.operators and profile.products > 0


@pytest.mark.parametrize("steps", [0, -3])
def test_steps_must_be_positive(steps: int) -> None:
    with pytest.raises(ValueError, match=f"profile: steps must be at least 1, but {steps} was given"):
        mlp_trainer().profile(steps)


@pytest.mark.parametrize("steps", [True, 2.0, "3", None, torch.zeros(50, 50)])
def test_steps_must_be_a_number(steps: Any) -> None:
    with pytest.raises(TypeError, match="profile: steps must be an int, but .{1,80} was given"):
        mlp_trainer().profile(steps)


def test_the_trace_must_be_a_path_that_can_be_written(tmp_path: Path) -> None:
    trainer = mlp_trainer()
    with pytest.raises(FileNotFoundError, match=r"profile: trace: can't write .*the folder .*missing' does not exist"):
        trainer.profile(trace=tmp_path / "missing" / "trace.json")
    with pytest.raises(IsADirectoryError, match="profile: trace: can't write .*: it is a folder"):
        trainer.profile(trace=tmp_path)
    with pytest.raises(ValueError, match="profile: trace must be a path, or None for no file, but it is empty"):
        trainer.profile(trace="")
    with pytest.raises(TypeError, match="profile: trace must be a path, or None for no file, but 3 was given"):
        trainer.profile(trace=3)
    profiled(trainer, 1, trace=None)


def test_two_profiles_at_a_time_are_refused() -> None:
    trainer = mlp_trainer()
    profile = trainer.profile(3, trace=None)
    trainer.train_step(*mlp_batches(1)[0])
    with pytest.raises(RuntimeError, match="a profile of 3 steps is running, with 2 left: call train_st"):
        trainer.profile()
    for batch in mlp_batches(2):
        trainer.train_step(*batch)
    assert profile.done


def test_waiting_between_steps_is_no_part_of_a_step() -> None:
    trainer = mlp_trainer()
    profile = trainer.profile(3, trace=None)
    for batch in mlp_batches(3):
        trainer.train_step(*batch)
        time.sleep(0.05)
    assert profile.waiting >= 50 and profile.milliseconds < 1000 * sum(profile.seconds) / 3 + 1
    assert f"{profile.waiting:.2f} ms between two steps" in str(profile)


def test_there_are_no_results_before_the_end() -> None:
    trainer = mlp_trainer()
    profile = trainer.profile(2, trace=None)
    trainer.train_step(*mlp_batches(1)[0])
    names = ("seconds", "milliseconds", "operators", "modules", "products", "optimizer", "waiting", "overhead")
    for name in names:
        with pytest.raises(
            RuntimeError, match="no results yet: 1 of 2 steps have been measured. Call train_step 1 more"
        ):
            getattr(profile, name)
    assert str(profile) == repr(profile) == "<Profile: 1 of 2 steps>" and not profile.done


def test_a_trace_that_can_not_be_written_breaks_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    trainer = mlp_trainer()
    profile = trainer.profile(1, trace=folder / "trace.json")
    folder.rmdir()
    with pytest.warns(UserWarning, match="the trace of the profile could not be written: can't write"):
        trainer.train_step(*mlp_batches(1)[0])
    assert profile.done and "the trace could not be written" in str(profile)
    assert trainer.train_step_info.step == 1


def test_evaluation_in_between_is_no_step() -> None:
    trainer = mlp_trainer()
    profile = trainer.profile(2, trace=None)
    batches = mlp_batches(2)
    trainer.eval_step(*batches[0])
    trainer.train_step(*batches[0])
    trainer.eval_step(*batches[0])
    assert profile.left == 1
    trainer.train_step(*batches[1])
    assert profile.done
