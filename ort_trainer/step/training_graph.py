"""``TrainingGraph``: an exported graph with everything that the session needs to know about it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..core.dims import holds, symbols_of
from ..core.indices import IndexRange

if TYPE_CHECKING:  # onnx_ir takes half a second to import, which would delay every start
    import onnx_ir as ir

__all__ = ["Dim", "RandomInput", "TensorSpec", "TrainingGraph"]

Dim = int | str
"""A size, or an expression over symbolic dimensions that :func:`~ort_trainer.core.dims.evaluate` understands."""


@dataclass(frozen=True)
class TensorSpec:
    """A batch input or an output of the graph.

    Attributes:
        name: The name in the model description, which is also the name of the graph's value.
        dtype: Element type.
        shape: Sizes; None if they depend on the values in a batch.
        described: Sizes from the model description, which bind the symbols of all other shapes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Dim, ...] | None
    described: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class RandomInput:
    """A random tensor that the session samples for every step.

    Attributes:
        name: Name of the graph input.
        kind: ``key`` (an integer from which the graph draws masks), ``mask`` (1 with probability p, otherwise 0, drawn
            from such a key), ``bernoulli`` (the same, drawn as in PyTorch), ``uniform`` ([0, 1)), ``normal`` (mean 0,
            standard deviation 1), ``exponential``, ``integers`` (low to high - 1) or ``permutation`` (of 0 to size - 1,
            for the only size).
        dtype: Element type.
        shape: Sizes.
        parameters: (p, number of the mask in the graph) for ``mask``, (p, factor on the result) for ``bernoulli``,
            (low, high) for ``integers``, (rate,) for ``exponential``; empty otherwise.
        order: The dimensions in memory order, largest stride first; empty for a contiguous tensor. PyTorch fills a
            transposed tensor in a different order than a contiguous one.
    """

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[Dim, ...]
    parameters: tuple[float, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainingGraph:
    """One exported step: the forward and backward pass, or only the forward pass for evaluation.

    The ONNX model is a pure function. Its inputs are the state (parameters and buffers), the batch, the loss scale and
    the random tensors; its outputs are the described outputs, a gradient for each parameter that has one, and the new
    value of each buffer that the step changes.

    Attributes:
        stored: The ONNX model, or the bytes of its file, which :attr:`model` parses on first use.
        training: Whether this is the joint forward and backward graph.
        inputs: The batch.
        outputs: The described outputs, including the loss.
        loss: Name of the loss.
        state: Parameter or buffer name -> graph input, for those that the graph uses.
        gradients: Parameter name -> graph output.
        buffer_updates: Buffer name -> graph output.
        loss_scale: Graph input by which the loss is multiplied before the backward pass; None for evaluation.
        random: Random inputs, in the order in which PyTorch would draw them.
        guards: Conditions on the symbols under which the graph is valid.
        fixed: Symbol -> its only valid size, for sizes that the model's code fixes.
        programs: Key -> program of PyTorch's operators; the graph's nodes refer to programs by key.
        origins: The modules that the nodes come from, as text of :class:`~ort_trainer.step.origins.Origins`; empty if
            unknown.
        index_ranges: What operators allow in the integer inputs that they index with.
        kept: The cache file for later processes; empty if there is none. It is not part of the bytes.
    """

    stored: ir.Model | bytes
    training: bool
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    loss: str
    state: Mapping[str, str]
    gradients: Mapping[str, str] = field(default_factory=dict)
    buffer_updates: Mapping[str, str] = field(default_factory=dict)
    loss_scale: TensorSpec | None = None
    random: tuple[RandomInput, ...] = ()
    guards: tuple[str, ...] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    origins: str = ""
    index_ranges: tuple[IndexRange, ...] = ()
    kept: str = ""

    def __post_init__(self) -> None:
        for name in ("state", "gradients", "buffer_updates", "fixed", "programs"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @functools.cached_property
    def model(self) -> ir.Model:
        """The ONNX model, parsed on first use: the imports for that take half a second."""
        if not isinstance(self.stored, bytes):
            return self.stored
        import onnx
        import onnx_ir as ir

        model: ir.Model = ir.from_proto(onnx.ModelProto.FromString(self.stored))
        return model

    def serialized(self) -> bytes:
        """Returns the ONNX model as bytes."""
        if isinstance(self.stored, bytes) and "model" not in vars(self):  # a parsed model may have been changed
            return self.stored
        import onnx_ir as ir

        return bytes(ir.to_proto(self.model).SerializeToString())

    @property
    def is_standard(self) -> bool:
        """Whether the graph has only ONNX's own operators."""
        return not self.programs and all(not node.domain for node in self.model.graph.all_nodes())

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Returns the size of every symbolic dimension for the shapes of a batch (input name -> shape)."""
        return {
            symbol: size
            for spec in self.inputs
            for symbol, size in zip(spec.described, shapes.get(spec.name, ()), strict=False)
            if isinstance(symbol, str)
        }

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns whether the graph is valid for a batch of these shapes (input name -> shape)."""
        return next(self.objections(shapes), None) is None

    def objections(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        """Yields the reasons why the graph is not valid for a batch of these shapes; inputs may be missing."""
        for spec in self.inputs:
            for axis, (described, size) in enumerate(zip(spec.described, shapes.get(spec.name, ()), strict=False)):
                if isinstance(described, int) and described != size:
                    yield f"dimension {axis} of {spec.name!r} is {size}, and was {described}"
        sizes = self.sizes(shapes)
        for symbol, size in self.fixed.items():
            if sizes.get(symbol, size) != size:
                yield f"dimension {symbol!r} is {sizes[symbol]}, and the model fixed it at {size}"
        for guard in self.guards:
            if symbols_of(guard) <= sizes.keys() and not holds(guard, sizes):
                yield f"the model relies on {guard}, which is false"

    def to_bytes(self) -> bytes:
        """Returns the graph as bytes: the other fields as JSON, followed by the ONNX model."""
        rest = json.dumps(_to_json(self)).encode()
        return len(rest).to_bytes(8, "little") + rest + self.serialized()

    @classmethod
    def from_bytes(cls, data: bytes) -> TrainingGraph:
        """Returns the graph from :meth:`to_bytes`.

        Raises:
            ValueError: If the data is not a training graph.
        """
        end = 8 + int.from_bytes(data[:8], "little")
        try:
            rest = json.loads(data[8:end])
            for key, kind in (("inputs", TensorSpec), ("outputs", TensorSpec), ("random", RandomInput)):
                rest[key] = tuple(_spec_from_json(kind, spec) for spec in rest[key])
            if rest["loss_scale"] is not None:
                rest["loss_scale"] = _spec_from_json(TensorSpec, rest["loss_scale"])
            rest["guards"] = tuple(rest["guards"])
            rest["index_ranges"] = tuple(map(IndexRange.from_json, rest["index_ranges"]))
            return cls(stored=data[end:], **rest)
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"this is not a training graph: {error!r}") from error

    def pruned(self, names: Sequence[str]) -> TrainingGraph:
        """Returns the part of the graph that computes the given outputs and the buffers, with the inputs it needs.

        For a training graph, this is its forward pass.
        """
        from .prune import prune

        model = prune(self.model, [*names, *self.buffer_updates.values()])
        kept = {spec.name: spec for spec in self.outputs}
        left = {value.name for value in model.graph.inputs}
        return dataclasses.replace(
            self,
            stored=model,
            inputs=tuple(spec for spec in self.inputs if spec.name in left),
            outputs=tuple(kept[name] for name in names),
            state={name: value for name, value in self.state.items() if value in left},
            gradients={},
            loss_scale=self.loss_scale if self.loss_scale is not None and self.loss_scale.name in left else None,
            random=tuple(spec for spec in self.random if spec.name in left),
            index_ranges=tuple(entry for entry in self.index_ranges if entry.input in left),
        )


_APART = ("stored", "kept")


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, IndexRange):
        return value._asdict()
    if dataclasses.is_dataclass(value):
        return {f.name: _to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name not in _APART}
    if isinstance(value, Mapping):
        return dict(value)
    return [_to_json(entry) for entry in value] if isinstance(value, tuple) else value


def _spec_from_json(kind: type[Any], spec: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in spec.items()}
    dtype = getattr(torch, values["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{values['dtype']!r} is not a dtype")
    return kind(**{**values, "dtype": dtype})
