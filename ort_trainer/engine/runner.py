"""Runs one training graph on ONNX Runtime, in memory that PyTorch owns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.dims import evaluate
from ..core.indices import IndexRange
from ..core.masks import KEYS
from ..step import Dim, RandomInput, Step
from .ort import make_session
from .programs.dropout import draw_mask, unpacked

if TYPE_CHECKING:
    from .ort import InferenceSession, SessionOptions

__all__ = ["Check", "GraphRunner", "Plan", "as_taken", "load", "sample"]

Check = Callable[[Mapping[str, torch.Tensor], str], None]
"""Receives the fetched outputs of a run by name, and the name of the loss; raises to discard the run."""


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


@dataclass(frozen=True)
class _Output:
    """An output to fetch.

    Attributes:
        name: Its name.
        shape: Its sizes; None if only ONNX Runtime can determine them.
        bound: The dtype in which ONNX Runtime writes it.
        dtype: The dtype in which it is returned.
    """

    name: str
    shape: tuple[int, ...] | None
    bound: torch.dtype
    dtype: torch.dtype


@dataclass
class _Binding:
    """Tensors that are bound once: the state and a set of destinations, and the loss scale until it changes.

    Attributes:
        binding: ONNX Runtime's own binding.
        destinations: Graph output -> the tensor that it is written to, which must live as long as the binding.
        loss_scale: The tensor that is bound as the loss scale.
    """

    binding: Any
    destinations: Mapping[str, torch.Tensor]
    loss_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that a run needs for batches of one shape and one choice of outputs; computed once, used in each step.

    Attributes:
        runner: The runner of the graph.
        outputs: The outputs to fetch.
        random: The random inputs with their shapes.
        indices: The index ranges, with their sizes, of inputs that the fetched outputs depend on.
        bindings: Key of a set of destinations -> its binding.
    """

    runner: GraphRunner
    outputs: tuple[_Output, ...]
    random: tuple[tuple[RandomInput, tuple[int, ...]], ...]
    indices: tuple[tuple[IndexRange, int], ...] = ()
    bindings: dict[str, _Binding] = field(default_factory=dict)


class GraphRunner:
    """An ONNX Runtime session of a training graph.

    Args:
        graph: The graph.
        state: The tensors for ``graph.state``; they must not move in memory.
        providers: Execution providers with their options.
        options: Options of the ONNX Runtime session.
        device: The device of all tensors.

    Attributes:
        keeps_destinations: Whether runs write into bound destinations; otherwise destinations are optional.
    """

    keeps_destinations = True
    _scaled: tuple[float, torch.Tensor] | None = None

    def __init__(
        self,
        graph: Step,
        state: Mapping[str, torch.Tensor],
        providers: Sequence[tuple[str, dict[str, object]]],
        options: SessionOptions,
        device: torch.device,
    ) -> None:
        self.graph = graph
        self._device = device
        self._place = (device.type, device.index or 0)
        self._state = {graph.state[name]: state[name] for name in graph.state}
        self._prepare()
        self._settings = (providers, options)
        self.inference_session = self._load()
        self._nothing = torch.zeros(1, device=device)

    def _prepare(self) -> None:
        """A hook that runs before the graph is loaded."""

    def _load(self) -> InferenceSession:
        return load(self.graph, *self._settings)

    def rebind(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces the tensor of a parameter or buffer; the caller must clear the bindings of all plans."""
        self._state[self.graph.state[name]] = tensor

    def scale(self, value: float) -> torch.Tensor | None:
        """Returns the loss scale as a graph input, the same tensor until it changes; None if the graph has none."""
        spec = self.graph.loss_scale
        if spec is None:
            return None
        if self._scaled is None or self._scaled[0] != value:
            assert spec.shape is not None
            shape = [int(size) for size in spec.shape]
            self._scaled = value, torch.full(shape, value, dtype=getattr(torch, spec.dtype), device=self._device)
        return self._scaled[1]

    def plan(self, shapes: Mapping[str, tuple[int, ...]], names: Sequence[str]) -> Plan:
        """Returns a plan for inputs of these shapes that fetches the named outputs."""
        sizes = self.graph.sizes(shapes)
        specs = {spec.name: spec for spec in self.graph.outputs}
        dtypes = {name: getattr(torch, specs[name].dtype) for name in names}
        return Plan(
            self,
            tuple(
                _Output(name, _sizes(specs[name].shape, sizes), _bound_type(dtype), dtype)
                for name, dtype in dtypes.items()
            ),
            tuple((spec, _sizes(spec.shape, sizes) or ()) for spec in self.graph.random),
            tuple(
                (entry, evaluate(entry.size, sizes))
                for entry in self.graph.index_ranges
                if self.graph.training or not set(names).isdisjoint(entry.outputs)
            ),
        )

    def run(
        self,
        plan: Plan,
        batch: Mapping[str, torch.Tensor],
        *,
        destination_key: str = "",
        destinations: Mapping[str, torch.Tensor] | None = None,
        loss_scale: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[dict[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Runs the graph once.

        Args:
            plan: From :meth:`plan`, for the shapes of the batch.
            batch: Contiguous tensors by input name.
            destination_key: Identifies a set of destinations, which is bound once per plan.
            destinations: Graph output -> the tensor that it is written to, for gradients and updated buffers; required
                if the plan has no binding for the key yet.
            loss_scale: Value of the loss scale input.
            generator: Draws the random inputs.

        Returns:
            The fetched outputs by name, in new tensors; and tensors with other outputs: the destinations, or
            equivalents.
        """
        known = plan.bindings.get(destination_key)
        if known is None:
            known = plan.bindings[destination_key] = self._bind(destinations or {})
        binding = known.binding
        given = [as_taken(value) for value in batch.values()]  # kept alive during the run: bindings hold addresses only
        for name, value in zip(batch, given, strict=True):
            binding.bind_input(name, *self._describe(name, value))
        if self.graph.loss_scale is not None and loss_scale is not None and loss_scale is not known.loss_scale:
            name = self.graph.loss_scale.name
            binding.bind_input(name, *self._describe(name, loss_scale))
            known.loss_scale = loss_scale
        sampled = self._draw(plan, generator)  # kept alive as well
        for (spec, _), value in zip(plan.random, sampled, strict=True):
            binding.bind_input(spec.name, *self._describe(spec.name, value))
        results: dict[str, torch.Tensor] = {}
        for output in plan.outputs:
            if output.shape is None:
                binding.bind_output(output.name, *self._place)
            else:
                value = results[output.name] = torch.empty(output.shape, dtype=output.bound, device=self._device)
                binding.bind_output(output.name, *self._describe(output.name, value))
        self._launch(binding)
        if len(results) < len(plan.outputs):
            # get_outputs() returns them in the order of their first binding.
            bound = [*known.destinations, *(output.name for output in plan.outputs)]
            found = dict(zip(bound, binding.get_outputs(), strict=True))
            for output in plan.outputs:
                if output.shape is None:
                    results[output.name] = torch.from_numpy(found[output.name].numpy()).to(self._device)
        fetched = {
            output.name: results[output.name] if output.bound is output.dtype else results[output.name].to(output.dtype)
            for output in plan.outputs
        }
        return fetched, known.destinations

    def _draw(self, plan: Plan, generator: torch.Generator | None) -> list[torch.Tensor]:
        """Returns new random numbers for a run."""
        return sample(plan.random, self._device, generator)

    def _launch(self, binding: Any) -> None:
        """Runs the bound inputs and outputs on ONNX Runtime."""
        self.inference_session.run_with_iobinding(binding)

    def _bind(self, destinations: Mapping[str, torch.Tensor]) -> _Binding:
        binding = self.inference_session.io_binding()
        for name, value in self._state.items():
            binding.bind_input(name, *self._describe(name, value))
        for name, value in destinations.items():
            binding.bind_output(name, *self._describe(name, value))
        return _Binding(binding, destinations)

    def _describe(self, name: str, value: torch.Tensor) -> tuple[Any, ...]:
        """Returns device, element type, shape and address of a tensor, for a binding."""
        kind = _NUMPY_TYPES.get(value.dtype)
        if kind is None:
            raise TypeError(
                f"{name!r} has dtype {value.dtype}, which can't be shared with ONNX Runtime: use one of "
                f"{[str(dtype) for dtype in _NUMPY_TYPES]}"
            )
        # An empty tensor has no address, but ONNX Runtime requires one.
        address = value.data_ptr() or self._nothing.data_ptr()
        return (*self._place, kind, value.shape, address)


def load(graph: Step, providers: Sequence[tuple[str, dict[str, object]]], options: SessionOptions) -> InferenceSession:
    """Returns an ONNX Runtime session of a graph."""
    return make_session(graph.serialized(), options, providers)


def as_taken(value: torch.Tensor) -> torch.Tensor:
    """Returns a batch's tensor in the dtype of the graph's input: bfloat16 becomes fp32."""
    return value.float() if value.dtype is torch.bfloat16 else value


def _bound_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _sizes(shape: Sequence[Dim] | None, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    return None if shape is None else tuple(evaluate(size, sizes) for size in shape)


def sample(
    wanted: Sequence[tuple[RandomInput, tuple[int, ...]]], device: torch.device, generator: torch.Generator | None
) -> list[torch.Tensor]:
    """Returns new random numbers for random inputs, contiguous and in dtypes that can be bound."""
    # All masks of a run are drawn from one key, which is drawn before anything else.
    with_key = any(spec.kind in ("key", "mask") for spec, _ in wanted)
    key = torch.randint(KEYS, (), generator=generator, device=device).cpu() if with_key else None
    return [_sample(spec, shape, device, generator, key) for spec, shape in wanted]


def _sample(
    spec: RandomInput,
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator | None,
    key: torch.Tensor | None,
) -> torch.Tensor:
    """Returns new random numbers, sampled as in PyTorch except for masks."""
    if key is not None and spec.kind == "key":
        return key
    if key is not None and spec.kind == "mask":
        kept, number = spec.parameters
        return unpacked(draw_mask(key, math.prod(shape), int(number), kept), shape).to(device)
    dtype = getattr(torch, spec.dtype)
    if spec.kind == "permutation":
        return torch.randperm(*shape, generator=generator, dtype=dtype, device=device)
    order = spec.order or tuple(range(len(shape)))
    value = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device)
    # A view with PyTorch's own strides, on which the order of the drawn numbers depends.
    value = value.permute([order.index(axis) for axis in range(len(shape))])
    return _fill(value, spec, generator).contiguous().to(_bound_type(dtype))


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
