"""Runs of a graph of programs as one CUDA graph, which the device starts by itself instead of kernel by kernel."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..devices import default_generator

_log = logging.getLogger(__name__)
Function = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
# A size that occurs this often is probably one of few; before, runs also prepare the libraries of CUDA.
_RUNS_BEFORE = 3
# Each captured run keeps its results, such as all gradients, in memory of its own.
_MOST = 4
_RUNS = "runs before a capture"


class CapturedRun:
    """A captured run, whose inputs and results are in fixed places: the next run overwrites the results.

    Args:
        function: Computes results from a list of tensors, which it empties.
        state: Tensors that stay where they are, such as parameters.
        others: The other tensors, which are copied to fixed places.
        beside: Another run of the same step, whose memory this one shares, as they run one after another.

    Attributes:
        results: What a run computes.
    """

    def __init__(
        self,
        function: Function,
        state: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        beside: CapturedRun | None = None,
    ) -> None:
        self._places = [value.clone() for value in others]
        self._graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside._graph.pool()
        # Other threads, such as those that pin the memory of batches, may call CUDA meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.results = function([*state, *self._places])

    def run(self, others: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Runs the graph on other values; returns :attr:`results`."""
        if others:
            torch._foreach_copy_(self._places, list(others))
        self._graph.replay()
        return self.results


class Captures:
    """Decides which runs of a graph of programs are captured.

    Args:
        way: The option ``utils.cuda_graphs``: ``auto`` or ``on``.
        device: Where the runs are.
    """

    def __init__(self, way: str, device: torch.device) -> None:
        self._way, self._device, self._refused = way, device, ""
        self._captured: weakref.WeakSet[CapturedRun] = weakref.WeakSet()

    def run(
        self, kept: dict[Any, Any], function: Function, state: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Runs a function, captured if it has run several times.

        Args:
            kept: Where the captured run of this function is kept, as long as its state stays where it is.
            function: Computes results from a list of tensors, which it empties.
            state: Tensors that stay where they are.
            others: The other tensors.

        Raises:
            RuntimeError: If the option requires a CUDA graph, but the function reads values back.
        """
        captured = kept.get(CapturedRun)
        if captured is not None:
            return captured.run(others)  # type: ignore[no-any-return]
        count = kept[_RUNS] = kept.get(_RUNS, 0) + 1
        if self._refused and self._way == "on":
            raise self._error()
        if self._refused or count < _RUNS_BEFORE or len(self._captured) >= _MOST:
            return function([*state, *others])
        if count == _RUNS_BEFORE:
            return self._tried(function, state, others)
        beside = next(iter(self._captured), None)
        generator = default_generator(self._device)
        before = generator.get_state()
        try:
            captured = kept[CapturedRun] = CapturedRun(function, state, others, beside)
        except RuntimeError as error:
            # A generator that was in a capture that failed draws no more numbers, unless its state is another object.
            generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
            generator.set_state(before)
            self._refuse(str(error).partition("\n")[0])
            return function([*state, *others])
        self._captured.add(captured)
        return captured.run(others)

    def _tried(
        self, function: Function, state: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Runs a function once without a graph, where an operator that waits for the device is an error."""
        here = [value for value in (*state, *others) if value.device.type == "cpu" and value.numel()]
        if here:  # a graph would keep the value that it had
            self._refuse(f"{len(here)} of its tensors are on the CPU")
            return function([*state, *others])
        generator = default_generator(self._device)
        before = generator.get_state()
        try:
            with _no_waiting():
                return function([*state, *others])
        except RuntimeError as error:
            generator.set_state(before)
            self._refuse(f"an operator reads values back: {str(error).partition(chr(10))[0]}")
        return function([*state, *others])

    def _refuse(self, why: str) -> None:
        self._refused = why
        if self._way == "on":
            raise self._error()
        _log.info("steps run without a CUDA graph: %s", why)

    def _error(self) -> RuntimeError:
        return RuntimeError(
            f"utils.cuda_graphs is 'on', but the step can't be a CUDA graph: {self._refused}; set it to 'auto'"
        )


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """A context in which PyTorch's operators raise an error before they wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
