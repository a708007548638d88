"""install() provides the old import paths, and leaves other parts of the installed ONNX Runtime alone."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator

import pytest

import ort_trainer
from ort_trainer import amp, compat, optim
from ort_trainer.compat import gradient_graph, older_api, trainer
from ort_trainer.compat import options as old_options

pytestmark = pytest.mark.engine

HAS_TRAINING = importlib.util.find_spec("onnxruntime.training") is not None


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.parametrize(
    ("statement", "name", "value"),
    [
        ("from onnxruntime.training import ORTTrainer", "ORTTrainer", trainer.ORTTrainer),
        ("from onnxruntime.training import TrainStepInfo", "TrainStepInfo", ort_trainer.TrainStepInfo),
        ("from onnxruntime.training.orttrainer import ORTTrainer", "ORTTrainer", trainer.ORTTrainer),
        ("from onnxruntime.training.orttrainer import optim", "optim.SGDConfig", old_options.SGDConfig),
        ("import onnxruntime.training as t", "t.optim.LambConfig", old_options.LambConfig),
        ("import onnxruntime", "onnxruntime.training.amp.LossScaler", amp.LossScaler),
        ("from onnxruntime.training.amp.loss_scaler import *", "DynamicLossScaler", amp.DynamicLossScaler),
        ("from onnxruntime.training.optim.config import AdamConfig", "AdamConfig", old_options.AdamConfig),
        ("from onnxruntime.training.optim import _LRScheduler", "_LRScheduler", optim._LRScheduler),
        ("from onnxruntime.training import optim", "optim.lr_scheduler._LRScheduler", optim._LRScheduler),
        ("import onnxruntime.capi.ort_trainer as ort", "ort.IODescription", older_api.IODescription),
        ("from onnxruntime.capi import ort_trainer", "ort_trainer.ORTTrainer", older_api.ORTTrainer),
        ("from onnxruntime.training import *", "ORTTrainer", trainer.ORTTrainer),
        (
            "from onnxruntime.training.experimental import export_gradient_graph",
            "export_gradient_graph",
            gradient_graph.export_gradient_graph,
        ),
    ],
)
def test_old_imports_give_our_names(installed: None, statement: str, name: str, value: object) -> None:
    names: dict[str, object] = {}
    exec(statement, names)
    assert eval(name, names) is value


def test_options_of_both_paths_are_one_class(installed: None) -> None:
    training = importlib.import_module("onnxruntime.training")
    options = importlib.import_module("onnxruntime.training.orttrainer_options")
    assert training.ORTTrainerOptions is options.ORTTrainerOptions
    assert issubclass(training.ORTTrainerOptions, ort_trainer.ORTTrainerOptions)


def test_sessions_are_registered_together() -> None:
    compat.install()
    onnxruntime = sys.modules["onnxruntime"]
    try:
        assert issubclass(onnxruntime.TrainingSession, ort_trainer.TrainingSession)
        assert onnxruntime.TrainingParameters is ort_trainer.TrainingParameters
    finally:
        compat.uninstall()
    assert not hasattr(onnxruntime, "TrainingSession")


def test_an_ortmodule_is_available(installed: None) -> None:
    training = importlib.import_module("onnxruntime.training")
    found = importlib.import_module("onnxruntime.training.ortmodule")
    assert training.is_ortmodule_available() and training.ORTModule is found.ORTModule
    assert issubclass(found.ORTModule, ort_trainer.ORTModule)


@pytest.mark.skipif(HAS_TRAINING, reason="onnxruntime-training has one")
def test_a_stock_engine_gets_our_gradient_builder(installed: None) -> None:
    state = importlib.import_module("onnxruntime.capi._pybind_state")
    assert state.GradientGraphBuilder is gradient_graph.GradientGraphBuilder
    compat.uninstall()
    assert not hasattr(state, "GradientGraphBuilder")


@pytest.mark.engine
def test_an_engine_without_cuda_gets_the_settings_of_its_devices(installed: None) -> None:
    state = importlib.import_module("onnxruntime.capi._pybind_state")
    names = ["set_cuda_device_id", "set_cuda_mem_limit", "set_gpu_mem_limit", *old_options.PROVIDER_SETTINGS]
    for name in names:
        assert callable(getattr(state, name))
    with pytest.warns(UserWarning, match=r"set_arena_extend_strategy\(kSameAsRequested\) has no effect on PyTorch's"):
        state.set_arena_extend_strategy(state.ArenaExtendStrategy.kSameAsRequested)
    compat.uninstall()
    assert not any(hasattr(state, name) for name in names)


@pytest.mark.skipif(not HAS_TRAINING, reason="a stock engine has none")
def test_the_gradient_builder_is_that_of_onnxruntime_training(installed: None) -> None:
    state = importlib.import_module("onnxruntime.capi._pybind_state")
    own = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    assert state.GradientGraphBuilder is own.GradientGraphBuilder


@pytest.mark.skipif(not HAS_TRAINING, reason="stock onnxruntime has no package of this name")
def test_what_onnxruntime_training_has_besides_goes_on_working() -> None:
    training = importlib.import_module("onnxruntime.training")
    before = {name: vars(training)[name] for name in ("artifacts", "PropagateCastOpsStrategy")}
    theirs = training.optim.AdamConfig
    fused = training.optim.FusedAdam
    compat.install()
    try:
        assert {name: vars(training)[name] for name in before} == before
        assert training.optim.FusedAdam is fused and training.optim.AdamConfig is old_options.AdamConfig
        assert importlib.import_module("onnxruntime.training.api").CheckpointState
    finally:
        compat.uninstall()
    assert training.optim.AdamConfig is theirs and not hasattr(training, "ORTTrainer")


@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        (
            "import onnxruntime.training.ortmodule.experimental.json_config",
            "^onnxruntime.training.ortmodule.experimental can't be imported: ort_trainer has ORTModule, .*leave it",
        ),
        (
            "import onnxruntime.training.experimental.exporter",
            r"experimental.exporter can't be imported: .* export_gradient_graph",
        ),
        ("import onnxruntime.training.nothing", r"onnxruntime.training.nothing can't be imported: .* has it"),
        ("from onnxruntime.training.optim import Nothing", r"training.optim.Nothing can't be imported: .* has it"),
    ],
)
def test_what_is_missing_is_said(installed: None, statement: str, missing: str) -> None:
    with pytest.raises(ImportError, match=missing):
        exec(statement, {})


def test_names_can_still_be_looked_for(installed: None) -> None:
    training = importlib.import_module("onnxruntime.training")
    assert not hasattr(training, "nothing") and importlib.util.find_spec("onnxruntime.nothing") is None


def test_a_second_call_does_nothing_and_uninstall_undoes_all() -> None:
    before, finders = set(sys.modules), list(sys.meta_path)
    compat.install()
    module = sys.modules["onnxruntime.training.orttrainer"]
    compat.install()
    assert sys.modules["onnxruntime.training.orttrainer"] is module
    compat.uninstall()
    compat.uninstall()
    assert sys.meta_path == finders
    left = {name for name in sys.modules if name.startswith("onnxruntime")}
    assert "onnxruntime.training.orttrainer" not in left and "onnxruntime.capi.ort_trainer" not in left
    assert HAS_TRAINING or not {name for name in left - before if "training" in name}
    with pytest.raises(ImportError):
        importlib.import_module("onnxruntime.capi.ort_trainer")


def test_a_failing_install_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from ort_trainer.compat import modules, registry

    monkeypatch.setitem(registry._NAMES, "onnxruntime.capi.ort_trainer.none", {"x": 1})
    monkeypatch.setattr(modules, "set_name", _fail_on_x(modules.set_name))
    with pytest.raises(RuntimeError, match="stop"):
        compat.install()
    assert "onnxruntime.training.orttrainer" not in sys.modules


def _fail_on_x(original: object) -> object:
    def fail(module: object, name: str, value: object) -> None:
        if name == "x":
            raise RuntimeError("stop")
        original(module, name, value)

    return fail
