"""Does the fuzzer notice what it is for?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ort_trainer.capture.verification import Verification
from ort_trainer.guard.reads import Reads
from ort_trainer.onnx.operators import quantization
from ort_trainer.optim.rule import ParameterBatch
from ort_trainer.train.strategy import Strategy

from .. import processes
from . import onnx_graphs, onnx_judge, program
from .compare import Outcome, compare
from .layers import LAYERS, Shape, write
from .losses import LOSSES
from .optimizers import OPTIMIZERS
from .recipe import OPTIONS, WAYS, Recipe, draw
from .run import Fuzzer
from .train import TRAIN
from .worker import Worker

SMALL = Recipe(1, layers=((0, "linear", 0), (1, "layer norm", 0)), sizes=((2, 3),) * 4)
SETTING = Recipe(1, layers=SMALL.layers, sizes=SMALL.sizes, settings=(("read", "attribute", 0),))


class _Here:
    """Compares cases in this process, where the package can be changed."""

    seconds = 0.0

    def compare(self, recipe: Recipe, text: str | None = None) -> dict[str, Outcome]:
        return compare(recipe, text)


def _fails(recipe: Recipe, kind: str, folder: Path) -> str:
    """Returns the text of the script of a case that fails."""
    fuzzer = Fuzzer(folder, _Here())
    fuzzer.take(recipe)
    assert [line for line in fuzzer.failures if kind in line] == fuzzer.failures != []
    (path,) = folder.iterdir()
    return path.read_text()


def test_a_case_that_is_trained_as_in_pytorch() -> None:
    recipe = Recipe(1, layers=SMALL.layers, sizes=SMALL.sizes, settings=SETTING.settings, ways=WAYS)
    assert {way: outcome.kind for way, outcome in compare(recipe).items()} == dict.fromkeys(WAYS, "equal")
    assert set(TRAIN) == set(WAYS)


def test_a_description_of_a_model_that_can_not_be_copied() -> None:
    options = (("described", True),)
    recipe = Recipe(1, layers=SMALL.layers, settings=(("read", "read-only dict", 0),), options=options)
    assert compare(recipe)["pytorch"].kind == "equal"


def test_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reduce(self: Strategy, meeting: Any) -> Any:
        return {name: value * 1.01 for name, value in meeting.own.gradients.items()}, meeting.own.share

    monkeypatch.setattr(Strategy, "reduce", reduce)
    text = _fails(SMALL, "wrong", tmp_path)
    assert "LayerNorm" not in text and "SIZES = [(2, 3)]" in text  # one step of the head alone
    monkeypatch.undo()
    # The script repeats the case without the tests; nothing differs now.
    environment = {**os.environ, "ORT_TRAINER_CACHE": "off", "PYTHONPATH": str(Path(__file__).parents[2])}
    (path,) = tmp_path.iterdir()
    run = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=True)
    assert "equal state head.weight" in run.stdout and "DIFFERENT" not in run.stdout


def test_a_wrong_gradient_of_an_onnx_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(seed, onnx_graphs.draw(seed)) for seed in range(40)]
    seed, case = next((seed, case) for seed, case in cases if case.quantized)
    assert onnx_judge.judge(case, seed)[0] == "equal"
    monkeypatch.setattr(quantization, "_straight", lambda rounded, values: rounded)
    outcomes = [onnx_judge.judge(case, seed)[0] for seed, case in cases if case.quantized and seed % 8]
    assert "wrong" in outcomes


def test_a_stale_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Reads, "variant", lambda self, structure: structure)
    monkeypatch.setattr(Verification, "is_due", lambda self, step: False)
    text = _fails(SETTING, "wrong", tmp_path)
    assert "model.v = " in text and "LayerNorm" not in text


def test_an_error_of_another_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reduce(self: Strategy, meeting: Any) -> Any:
        return dict(meeting.own.gradients).pop("none"), meeting.own.share

    monkeypatch.setattr(Strategy, "reduce", reduce)
    assert "KeyError: 'none'" in _fails(SMALL, "raw error", tmp_path)


def test_an_error_of_a_kernel_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends in a file of the package, as kernels have no frames of Python."""
    monkeypatch.setattr(ParameterBatch, "by_slot", defaultdict(list))
    recipe = Recipe(1, layers=SMALL.layers, sizes=SMALL.sizes, optimizer="adamw")
    outcome = compare(recipe)["pytorch"]
    assert outcome.kind == "raw error" and outcome.text.startswith("RuntimeError: ")


def test_an_error_of_the_package_is_a_refusal() -> None:
    recipe = Recipe(1, optimizer="adam itself", options=(("share_weights", False),))
    assert compare(recipe)["pytorch"].kind == "refused"


@pytest.mark.parametrize("statement", ["os.abort()", "os._exit(3)"])
def test_the_end_of_a_process_is_an_outcome(statement: str) -> None:
    text = program.source(SMALL).replace("def config():", f"def config():\n    import os; {statement}")
    worker = Worker()
    try:
        assert worker.compare(SMALL, text)["pytorch"].kind == "crash"
        assert worker.compare(SMALL)["pytorch"].kind == "equal"  # in another process
    finally:
        worker.close()
        processes.processor_seconds += worker.seconds


def test_a_hang_is_an_outcome() -> None:
    text = program.source(SMALL).replace("def config():", "def config():\n    import time; time.sleep(60)")
    worker = Worker(patience=5)
    try:
        assert worker.compare(SMALL, text)["pytorch"] == Outcome("crash", "no answer in 5 seconds")
    finally:
        worker.close()


@pytest.mark.parametrize("shape", [Shape("v", 6), Shape("s", 4), Shape("i", 2, 5), Shape("i", 8, 4)], ids=str)
def test_pytorch_trains_every_layer(shape: Shape) -> None:
    data = {"v": "vectors", "s": "sequences", "i": "images"}[shape.kind]
    first = {8: ((0, "convolution", 1), (1, "strided convolution", 1))}.get(shape.width, ())
    for kind in LAYERS:
        for seed in range(2):
            if write(kind, seed, "l2", shape) is not None:
                recipe = Recipe(1, data, (*first, (2, kind, seed)), sizes=((2, 5), (3, 4)), ways=())
                assert compare(recipe).get("case", Outcome("")).kind in ("", "not finite"), (kind, compare(recipe))


def test_pytorch_trains_every_loss_and_optimizer() -> None:
    for data in ("vectors", "sequences"):
        for loss in LOSSES:
            recipe = Recipe(1, data, loss=loss, sizes=((2, 5), (3, 4)), ways=())
            assert compare(recipe).get("case", Outcome("")).kind in ("", "not finite"), loss
    for optimizer in OPTIMIZERS:
        assert compare(Recipe(1, layers=SMALL.layers, optimizer=optimizer, ways=())) == {}, optimizer


def test_pytorch_trains_with_every_option() -> None:
    for name, values in OPTIONS.items():
        data = "images" if name == "bad" else "sequences"  # PyTorch refuses all bad batches of these
        for value in values:
            recipe = Recipe(
                1, data, SMALL.layers[:1], "cross entropy", options=((name, value),), sizes=SMALL.sizes, ways=()
            )
            assert compare(recipe) == {}, (name, value)


def test_losses_are_not_scaled_to_the_limit_where_kernels_overflow_later() -> None:
    drawn = [recipe for recipe in map(draw, range(500)) if recipe.dtype == "autocast16"]
    scalers = {dict(recipe.options).get("scaler") for recipe in drawn if "onnxruntime" in recipe.ways}
    assert scalers == {"constant"} and len({dict(recipe.options).get("scaler") for recipe in drawn}) > 1


def test_a_seed_is_a_case() -> None:
    for seed in range(50):
        recipe = draw(seed)
        assert recipe == draw(seed) == Recipe.from_text(recipe.to_text())
        assert program.source(recipe) == program.source(draw(seed))
    assert len({program.source(draw(seed)) for seed in range(50)}) == 50
    assert torch.get_default_dtype() == torch.float32
