"""Functions that run are reported once, and another profiler goes on afterwards."""

from __future__ import annotations

import cProfile
import functools
import gc
import sys
from typing import Any

import pytest
import torch

from ort_trainer.outside.calls import Calls, functions_in


class _Scale:
    def __add__(self, other: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.relu(other)

    @functools.cached_property
    def kept(self) -> int:
        return 1

    half = functools.partialmethod(__add__, torch.ones(()))


def test_each_function_that_runs_is_reported_once() -> None:
    names: list[str] = []
    scale = _Scale()
    with Calls(lambda frame: names.append(frame.f_code.co_name), int):
        for _ in range(2):
            scale + torch.ones(2)
            scale.half()
            (lambda: scale.kept)()
    assert names == ["__add__", "<lambda>", "kept"]
    assert sys.getprofile() is None


def test_what_the_garbage_collector_calls_is_not_reported() -> None:
    class Kept:
        def __del__(self) -> None:
            collected.append("deleted")

    collected: list[str] = []
    names: list[str] = []
    kept: Any = Kept()
    kept.itself = kept

    def callback(phase: str, info: dict[str, Any]) -> None:
        collected.append(phase)

    gc.callbacks.append(callback)
    try:
        with Calls(lambda frame: names.append(frame.f_code.co_name), int):
            del kept
            gc.collect()
    finally:
        gc.callbacks.remove(callback)
    assert collected == ["start", "deleted", "stop"]
    assert names == []


def test_another_profiler_goes_on() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        with Calls(lambda frame: None, int):
            pass
        now: Any = sys.getprofile()
        assert now is profiler
    finally:
        profiler.disable()


@pytest.mark.parametrize(("name", "steps"), [("__add__", ()), ("kept", ("func",)), ("half", ("func",))])
def test_functions_in_attributes(name: str, steps: tuple[Any, ...]) -> None:
    ((way, function),) = functions_in(vars(_Scale)[name])
    assert tuple(step.key for step in way) == steps
    assert function.__name__ == ("kept" if name == "kept" else "__add__")
