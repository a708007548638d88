"""``TrainingGraph``: everything that the session needs to know about one exported graph."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..dims import holds, symbols_of
from ..indices import IndexRange

if TYPE_CHECKING:  # onnx_ir takes half a second to import, which a start need not wait for
    import onnx_ir as ir

__all__ = ["Dim", "RandomInput", "TensorSpec", "TrainingGraph"]

Dim = int | str
"""A size, or an expression over symbolic dimensions that :func:`~ort_trainer.dims.evaluate` understands."""


@dataclass(frozen=True)
class TensorSpec:
    """A batch input or an output of the graph.

    Attributes:
        name: The name in the model description, which is also the name of the graph's value.
        dtype: Element type.
        shape: Sizes; None where they depend on the values of a batch.
        described: Sizes as the model description has them; they bind the symbols of all other shapes.
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
        kind: ``key`` (a whole number, that masks are drawn from within the graph), ``mask`` (1 with probability p, else
            0, drawn from such a key), ``bernoulli`` (the same, drawn as PyTorch does), ``uniform`` ([0, 1)), ``normal``
            (mean 0, deviation 1), ``exponential``, ``integers`` (low to high - 1) or ``permutation`` (of 0 to the one
            size - 1).
        dtype: Element type.
        shape: Sizes.
        parameters: (p, number of the mask in the graph) of ``mask``, (p, factor on the result) of ``bernoulli``, (low,
            high) of ``integers``, (rate,) of ``exponential``; empty otherwise.
        order: The dimensions in the order of memory, the one with the largest stride first, where that is not their own
            order: PyTorch fills a transposed tensor in another order than a contiguous one.
    """

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[Dim, ...]
    parameters: tuple[float, ...] = ()
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainingGraph:
    """One exported step: forward and backward pass, or the forward pass alone for evaluation.

    The ONNX model is a function. Its inputs are the state (parameters and buffers), the batch, the loss scale and the
    random tensors; its outputs are the described outputs, a gradient for each parameter that gets one, and the new
    value of each buffer that the step changes.

    Attributes:
        stored: The ONNX model, or the bytes of its file, which are read when somebody looks at :attr:`model`.
        training: Whether this is the joint forward and backward graph.
        inputs: The batch.
        outputs: The described outputs, the loss among them.
        loss: Name of the loss.
        state: Parameter or buffer name -> graph input. What the graph does not use is not in here.
        gradients: Parameter name -> graph output.
        buffer_updates: Buffer name -> graph output.
        loss_scale: Graph input by which the loss is multiplied before the backward pass; None for evaluation.
        random: Random inputs, in the order in which PyTorch would draw them.
        guards: Conditions on the symbols under which the graph is the right one.
        fixed: Symbol -> the only size that the graph has for it, where the model itself fixes the size.
        programs: Key -> program of PyTorch's operators, where the graph's nodes call some; they name them by their
            keys.
        origins: Where in the user's model the nodes come from, as text of :class:`~ort_trainer.graph.origins.Origins`;
            empty where that is not known.
        index_ranges: What operators allow in the integer inputs that they index with.
        kept: The file that it is kept in for later processes; empty if there is none. Not written into the bytes.
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
        """The ONNX model. It takes half a second to import what reads one, which a start need not wait for."""
        if not isinstance(self.stored, bytes):
            return self.stored
        import onnx
        import onnx_ir as ir

        model: ir.Model = ir.from_proto(onnx.ModelProto.FromString(self.stored))
        return model

    def serialized(self) -> bytes:
        """Returns the ONNX model as bytes."""
        if isinstance(self.stored, bytes) and "model" not in vars(self):  # which somebody may have changed
            return self.stored
        import onnx_ir as ir

        return bytes(ir.to_proto(self.model).SerializeToString())

    @property
    def is_standard(self) -> bool:
        """Whether it has ONNX's own operators only."""
        return not self.programs and all(not node.domain for node in self.model.graph.all_nodes())

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Returns the size of every symbolic dimension for the shapes of a batch (input name -> shape)."""
        return {
            symbol: size
            for spec in self.inputs
            for symbol, size in zip(spec.described, shapes.get(spec.name, ()), strict=False)
            if isinstance(symbol, str)
        }

    def accepts(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether the graph is right for these sizes of the symbolic dimensions, as far as they are known."""
        if any(sizes.get(symbol, size) != size for symbol, size in self.fixed.items()):
            return False
        known = (guard for guard in self.guards if symbols_of(guard) <= sizes.keys())
        return all(holds(guard, sizes) for guard in known)

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns whether the graph is right for a batch of these shapes (input name -> shape)."""
        fixed = all(
            described == size
            for spec in self.inputs
            for described, size in zip(spec.described, shapes.get(spec.name, ()), strict=False)
            if isinstance(described, int)
        )
        return fixed and self.accepts(self.sizes(shapes))

    def to_bytes(self) -> bytes:
        """Returns all of it as bytes: the ONNX model, and the rest as JSON before it."""
        rest = json.dumps(_to_json(self)).encode()
        return len(rest).to_bytes(8, "little") + rest + self.serialized()

    @classmethod
    def from_bytes(cls, data: bytes) -> TrainingGraph:
        """Returns the graph that :meth:`to_bytes` wrote.

        Raises:
            ValueError: If it is something else.
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
            raise ValueError(f"this is no training graph: {error!r}") from error

    def pruned(self, names: Sequence[str]) -> TrainingGraph:
        """Returns the part of a graph that some of its outputs and its buffers need, without the other inputs.

        Of a training graph that is its forward pass.
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
        raise TypeError(f"{values['dtype']!r} is no element type")
    return kind(**{**values, "dtype": dtype})
