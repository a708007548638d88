"""The kernels of an engine behind one seam: the only place that asks whose kernels run a step."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..step import Step
from .ort import session_options
from .programs.runner import ProgramRunner
from .runner import GraphRunner, SessionRunner
from .torch_memory import TorchMemory

if TYPE_CHECKING:
    from .ort import SessionOptions

Providers = Sequence[tuple[str, dict[str, object]]]


class Runners:
    """Makes runners on a device, each of the kind of kernels that its graph was made for.

    Args:
        device: The device of all tensors.
        given_options: The user's options of ONNX Runtime's sessions, used as they are; None for the package's.
        deterministic: Whether to request deterministic kernels.
        providers: The execution providers of ONNX Runtime's sessions with their options, in order of preference.
        cuda_graphs: The option ``utils.cuda_graphs``.

    Attributes:
        memory: The memory of all tensors.
        providers: As given.
    """

    def __init__(
        self,
        device: torch.device,
        given_options: SessionOptions | None,
        deterministic: bool,
        providers: Providers,
        cuda_graphs: str = "off",
    ) -> None:
        self.memory, self.providers = TorchMemory(device), providers
        self._given_options, self._deterministic, self._cuda_graphs = given_options, deterministic, cuda_graphs
        if given_options is not None:
            session_options(given_options, deterministic)  # checks them

    @functools.cached_property
    def options(self) -> SessionOptions:
        """Options of ONNX Runtime's sessions; created when needed, because importing ONNX Runtime takes a while."""
        return session_options(self._given_options, self._deterministic)

    def runner(self, step: Step, state: Mapping[str, torch.Tensor] | None = None) -> GraphRunner:
        """Returns a runner of a graph.

        Args:
            step: The graph.
            state: The tensors for ``step.state``; None if calls receive them with the inputs.
        """
        tensors = {} if state is None else state
        if step.programs is not None:
            return ProgramRunner(step, tensors, self.memory, self._deterministic, self._cuda_graphs)
        return SessionRunner(step, tensors, self.memory, self.options, self.providers)
