"""``onnxruntime.training.ortmodule``: what its options write and log, and its environment variables."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from ort_trainer.compat import ort_module
from ort_trainer.compat.ort_module import DebugOptions, LogLevel, ORTModule

X = torch.ones(4, 3)


def test_files_are_written(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    ours = ORTModule(copy.deepcopy(module), DebugOptions(save_onnx=True, onnx_prefix="my", save_path=str(tmp_path)))
    for found in (module, ours):
        found(X).sum().backward()
    torch.testing.assert_close(ours[0].weight.grad, module[0].weight.grad)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(X), module.eval()(X))
    names = ["my_backward_training.onnx", "my_torch_exported_inference.onnx", "my_torch_exported_training.onnx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        onnx.checker.check_model(onnx.load(tmp_path / name))


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="onnx_prefix must be provided"):
        DebugOptions(save_onnx=True)
    with pytest.raises(TypeError, match="onnx_prefix must be a string"):
        DebugOptions(save_onnx=True, onnx_prefix=3)
    with pytest.raises(OSError, match="nowhere is not writable"):
        DebugOptions(save_onnx=True, onnx_prefix="my", save_path=str(tmp_path / "nowhere"))


def test_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "ERROR")
    chosen = DebugOptions(LogLevel.INFO)
    assert chosen.save_path == str(tmp_path) and chosen.log_level == LogLevel.ERROR
    logger = logging.getLogger("ort_trainer")
    before = logger.level
    try:
        monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "20")
        monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
        ours = ORTModule(nn.Linear(3, 2))
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)
    options = ours._graphs._options
    with pytest.warns(UserWarning, match="has no effect: graph_transformer.transformer_layer_recompute"):
        ours(X)
    assert options._internal_use.onnx_opset_version == 20 and options.graph_transformer.transformer_layer_recompute
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "LOUD")
    with pytest.raises(ValueError, match="'VERBOSE', 'INFO', 'WARNING', 'ERROR', 'FATAL'.*'LOUD'"):
        DebugOptions()


def test_variables_without_effect_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ort_module._warned.clear()
    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", "False")  # as it is anyway
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    assert ORTModule(nn.Linear(3, 2))._fallback.policy == "error"
    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", "1")
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    with pytest.warns(UserWarning, match=r"\['ORTMODULE_FALLBACK_RETRY', 'ORTMODULE_USE_TRITON'\] have no effect"):
        ORTModule(nn.Linear(3, 2))
