"""Fixtures of all tests."""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxruntime.capi import _pybind_state

from ort_trainer.options import trainer_options

from .harness import choose, contexts, record
from .warm import freeze

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # there is one worker per core

# Tests never use the user's own cache. `make test` sets a permanent folder, so that only the first run exports
# everything; otherwise all workers of a run share a temporary one.
if "ORT_TRAINER_CACHE" not in os.environ:
    os.environ["ORT_TRAINER_CACHE"] = tempfile.mkdtemp(prefix="ort_trainer_exports_")
    atexit.register(shutil.rmtree, os.environ["ORT_TRAINER_CACHE"], ignore_errors=True)

# Some tests interrupt a step; shells make background processes ignore SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that ``tests/harness/run.py`` uses; a run from the command line needs none of them."""
    group = parser.getgroup("ort_trainer")
    group.addoption("--gate", action="store_true", help="run tests by lot, and what a change certainly affects")
    group.addoption("--affected", metavar="FILE", help="what a change can affect")
    group.addoption("--seed", default="", help="draws the sample")
    group.addoption("--until", type=float, metavar="TIME", help="skip what begins later, in seconds since 1970")
    group.addoption("--isolated", action="store_true", help="run exports in child processes, as users do")
    group.addoption("--reach", action="store_true", help="tell coverage which test runs")
    group.addoption("--record", metavar="FILE", help="write a line for each test, with what its time went into")


def pytest_configure(config: pytest.Config) -> None:
    """Starts what the options request.

    Exports run in this process, which saves a tenth of a second each; complete runs export in children, as users do.
    """
    os.environ["ORT_TRAINER_EXPORT_IN_PROCESS"] = "" if config.getoption("isolated") else "1"
    record.start(config)


def _affected(config: pytest.Config) -> choose.Affected | None:
    path = config.getoption("affected")
    return pickle.loads(Path(path).read_bytes()) if path else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replaces the default distribution of tests to workers."""
    from .harness.schedule import ByFile

    affected = None if config.getoption("gate") else _affected(config)
    return ByFile(config, log, affected) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """Excludes the collected tests from garbage collections, because they live until the end."""
    freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects tests, and skips those that run onnxruntime-training itself if it is missing."""
    if not hasattr(_pybind_state, "GradientGraphBuilder"):
        for item in items:
            if item.get_closest_marker("needs_training_engine"):
                item.add_marker(pytest.mark.skip(reason="needs the runtime of onnxruntime-training"))
    seed, affected = config.getoption("seed"), _affected(config)
    known = {item.nodeid: item for item in items}
    if config.getoption("gate"):
        names = choose.gate(list(known), seed, choose.Measured.read(), affected.certain if affected else ())
    elif affected is not None:
        names = affected.chosen(list(known), seed, choose.Measured.read())
    else:
        return
    items[:] = [known.pop(name) for name in names]
    config.hook.pytest_deselected(items=list(known.values()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests that there is no time left for."""
    if item.config.getoption("reach"):
        contexts.now_runs(item.nodeid)
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip("there was no time left for it")


def _chosen(node: pytest.Item | pytest.Collector) -> Iterator[None]:
    """Changes the defaults of the options in section ``utils`` that a mark names."""
    known = trainer_options._SCHEMA["utils"]["schema"]
    mark = node.get_closest_marker("options")
    chosen = {} if mark is None else mark.kwargs
    before = {name: known[name]["default"] for name in chosen}
    for name, value in chosen.items():
        known[name]["default"] = value
    yield
    for name, value in before.items():
        known[name]["default"] = value


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of the first drawn case: the commit determines it, so that every gate has other cases."""
    commit = request.config.getoption("seed") or choose.commit()
    return int.from_bytes(hashlib.sha256(commit.encode()).digest()[:3], "big") * 100


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """Excludes objects of earlier files from the garbage collection after each export."""
    freeze()


@pytest.fixture(autouse=True, scope="module")
def _options_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _chosen(request.node)


@pytest.fixture(autouse=True)
def _options_of_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _chosen(request.node)


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """Sets the same seed for every test, and restores global state that a test may change."""
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
