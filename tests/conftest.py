"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from onnxruntime.capi import _pybind_state

from ort_trainer.sources.torch import export  # noqa: F401
from ort_trainer.sources.torch.decompositions import decomposition_table

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # as many workers run as there are cores

# Exports run in forked children: what is imported and built here, none of them has to do again.
decomposition_table()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what needs onnxruntime-training's gradient builder, where there is none."""
    if hasattr(_pybind_state, "GradientGraphBuilder"):
        return
    for item in items:
        if item.get_closest_marker("needs_gradient_builder"):
            item.add_marker(pytest.mark.skip(reason="stock onnxruntime does not differentiate ONNX models"))


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
