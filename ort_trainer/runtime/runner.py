"""Runs one training graph on ONNX Runtime, on memory that PyTorch owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ..graph import Dim, RandomInput, TrainingGraph, evaluate
from .engine import InferenceSession, SessionOptions, make_session

__all__ = ["GraphRunner", "load"]

_NUMPY_TYPES: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}
# A training run meets as many shapes as there are (batch, length) pairs; each keeps a binding of a few kilobytes.
_MAXIMUM_PLANS = 256


@dataclass
class _Plan:
    """What a run needs for batches of one shape: computed once, used at every step.

    Attributes:
        binding: Binds the state, and the gradients of one destination, which never move.
        outputs: Described output -> shape; None where ONNX Runtime must find it out.
        random: Shape of every random input.
    """

    binding: Any
    outputs: dict[str, tuple[int, ...] | None]
    random: list[tuple[int, ...]]


class GraphRunner:
    """An ONNX Runtime session of a training graph, with its bindings.

    Args:
        graph: The graph.
        state: The tensors behind ``graph.state``; they must stay where they are in memory.
        providers: Execution providers with their options.
        options: Options of the ONNX Runtime session.
        device: Where all tensors are.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        state: Mapping[str, torch.Tensor],
        providers: Sequence[tuple[str, dict[str, object]]],
        options: SessionOptions,
        device: torch.device,
    ) -> None:
        self.graph = graph
        self._device = device
        self._state = {graph.state[name]: state[name] for name in graph.state}
        self.inference_session = load(graph, providers, options)
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._nothing = torch.zeros(1, device=device)

    def run(
        self,
        batch: Mapping[str, torch.Tensor],
        names: Sequence[str],
        *,
        destinations: Mapping[str, torch.Tensor] | None = None,
        destination_key: str = "",
        loss_scale: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> dict[str, torch.Tensor]:
        """Runs the graph once.

        Args:
            batch: Contiguous tensors by input name.
            names: The described outputs to fetch; the others are not returned.
            destinations: Graph outputs that are written into given tensors: gradients and updated buffers.
            destination_key: Identifies the set of destinations, so that it is bound once.
            loss_scale: Value of the loss scale input.
            generator: Draws the random inputs.

        Returns:
            The fetched outputs by name, in new tensors.
        """
        destinations = destinations or {}
        key = (destination_key, tuple(names), *((name, tuple(value.shape)) for name, value in batch.items()))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(batch, names, destinations)
            if len(self._plans) > _MAXIMUM_PLANS:
                del self._plans[next(iter(self._plans))]
        binding = plan.binding
        # Kept until the run is over: the binding holds addresses only. Graphs take bfloat16 as fp32.
        given = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in batch.items()}
        for name, value in given.items():
            self._bind_input(binding, name, value)
        if self.graph.loss_scale is not None and loss_scale is not None:
            self._bind_input(binding, self.graph.loss_scale.name, loss_scale)
        drawn = [
            _draw(spec, shape, self._device, generator)
            for spec, shape in zip(self.graph.random, plan.random, strict=True)
        ]
        for spec, value in zip(self.graph.random, drawn, strict=True):
            self._bind_input(binding, spec.name, value)
        dtypes = {spec.name: spec.dtype for spec in self.graph.outputs}
        results: dict[str, torch.Tensor] = {}
        for name, shape in plan.outputs.items():
            if shape is None:
                binding.bind_output(name, self._device.type, self._device.index or 0)
            else:
                results[name] = torch.empty(shape, dtype=_bound_type(dtypes[name]), device=self._device)
                self._bind_output(binding, name, results[name])
        self.inference_session.run_with_iobinding(binding)
        if len(results) < len(plan.outputs):
            found = dict(zip(self._bound_names(plan, destinations), binding.get_outputs(), strict=True))
            for name in plan.outputs:
                if name not in results:
                    results[name] = torch.from_numpy(found[name].numpy()).to(self._device)
        return {name: results[name].to(dtypes[name]) for name in names}

    def _make_plan(
        self, batch: Mapping[str, torch.Tensor], names: Sequence[str], destinations: Mapping[str, torch.Tensor]
    ) -> _Plan:
        sizes = self.graph.sizes({name: tuple(value.shape) for name, value in batch.items()})
        shapes = {spec.name: spec.shape for spec in self.graph.outputs}
        binding = self.inference_session.io_binding()
        for name, value in self._state.items():
            self._bind_input(binding, name, value)
        for name, value in destinations.items():
            self._bind_output(binding, name, value)
        return _Plan(
            binding,
            {name: _sizes(shapes[name], sizes) for name in dict.fromkeys(names)},
            [_sizes(spec.shape, sizes) or () for spec in self.graph.random],
        )

    def _bound_names(self, plan: _Plan, destinations: Mapping[str, torch.Tensor]) -> list[str]:
        """Returns the bound outputs in the order in which they were bound first."""
        return [*destinations, *plan.outputs]

    def _bind_input(self, binding: Any, name: str, value: torch.Tensor) -> None:
        binding.bind_input(name, *self._describe(name, value))

    def _bind_output(self, binding: Any, name: str, value: torch.Tensor) -> None:
        binding.bind_output(name, *self._describe(name, value))

    def _describe(self, name: str, value: torch.Tensor) -> tuple[Any, ...]:
        if value.dtype not in _NUMPY_TYPES:
            raise TypeError(
                f"{name!r} has dtype {value.dtype}, which can't be shared with ONNX Runtime: use one of "
                f"{[str(dtype) for dtype in _NUMPY_TYPES]}"
            )
        # An empty tensor has no address, and ONNX Runtime wants one.
        address = value.data_ptr() if value.numel() else self._nothing.data_ptr()
        return (
            self._device.type,
            self._device.index or 0,
            _NUMPY_TYPES[value.dtype],
            tuple(value.shape),
            address,
        )


def load(
    graph: TrainingGraph, providers: Sequence[tuple[str, dict[str, object]]], options: SessionOptions
) -> InferenceSession:
    """Returns an ONNX Runtime session of a graph."""
    return make_session(ir.to_proto(graph.model).SerializeToString(), options, providers)


def _bound_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _sizes(shape: Sequence[Dim] | None, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    return None if shape is None else tuple(evaluate(size, sizes) for size in shape)


def _draw(
    spec: RandomInput, shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    """Returns new random numbers, contiguous and of a type that can be bound, drawn as PyTorch itself would."""
    if spec.kind == "permutation":
        return torch.randperm(*shape, generator=generator, dtype=spec.dtype, device=device)
    order = spec.order or tuple(range(len(shape)))
    value = torch.empty([shape[axis] for axis in order], dtype=spec.dtype, device=device)
    # A view with PyTorch's own strides; what a generator puts where depends on them.
    value = value.permute([order.index(axis) for axis in range(len(shape))])
    return _fill(value, spec, generator).contiguous().to(_bound_type(spec.dtype))


def _fill(value: torch.Tensor, spec: RandomInput, generator: torch.Generator | None) -> torch.Tensor:
    if spec.kind == "bernoulli":
        probability, factor = spec.parameters
        value.bernoulli_(probability, generator=generator)
        return value if factor == 1.0 else value.mul_(factor)
    if spec.kind == "uniform":
        return value.uniform_(generator=generator)
    if spec.kind == "normal":
        return value.normal_(generator=generator)
    if spec.kind == "exponential":
        return value.exponential_(*spec.parameters, generator=generator)
    low, high = (int(bound) for bound in spec.parameters)
    return value.random_(low, high, generator=generator)
