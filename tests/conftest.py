"""Fixtures of all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from onnxruntime.capi import _pybind_state

from ort_trainer.options import trainer_options

from .warm import freeze

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # as many workers run as there are cores

# Nothing of the user's own cache is used or changed. `make test` names a folder that stays, so that only the first run
# exports everything; without it there is one for this run, which all its workers share.
if "ORT_TRAINER_CACHE" not in os.environ:
    os.environ["ORT_TRAINER_CACHE"] = tempfile.mkdtemp(prefix="ort_trainer_exports_")
    atexit.register(shutil.rmtree, os.environ["ORT_TRAINER_CACHE"], ignore_errors=True)

# Some tests interrupt a step, which raises nothing in what a shell runs in the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replaces the distribution that is the default of several workers."""
    from .schedule import ByFile

    return ByFile(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """Takes the tests out of garbage collections, as they are there until the end."""
    freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what needs onnxruntime-training's gradient builder, where there is none."""
    if hasattr(_pybind_state, "GradientGraphBuilder"):
        return
    for item in items:
        if item.get_closest_marker("needs_gradient_builder"):
            item.add_marker(pytest.mark.skip(reason="stock onnxruntime does not differentiate ONNX models"))


def _chosen(node: pytest.Item | pytest.Collector) -> Iterator[None]:
    """Gives the options of section ``utils`` that a mark names other defaults."""
    known = trainer_options._SCHEMA["utils"]["schema"]
    mark = node.get_closest_marker("options")
    chosen = {} if mark is None else mark.kwargs
    before = {name: known[name]["default"] for name in chosen}
    for name, value in chosen.items():
        known[name]["default"] = value
    yield
    for name, value in before.items():
        known[name]["default"] = value


@pytest.fixture(autouse=True, scope="module")
def _options_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _chosen(request.node)


@pytest.fixture(autouse=True)
def _options_of_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _chosen(request.node)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives every test the same seed, and puts back what a test may change for others."""
    monkeypatch.delenv("ORT_TRAINER_EXPORT_IN_PROCESS", raising=False)
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
