"""The contract between exporters and engines: a graph, and what it computes.

The graph is an ONNX model, or a graph of programs that PyTorch's kernels run. What is known of it is JSON, in artifacts
in the model's metadata.

Reading it needs neither torch nor onnx. A step computes, from state, inputs and random numbers, the outputs, the
gradients and the new buffers of the model; an optimizer model computes the new weights and state tensors from the old
ones, the gradients and the learning rates. All state enters as inputs and leaves as outputs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from ..core.dims import holds, symbols_of
from ..core.errors import shown, warn
from ..core.indices import IndexRange
from .program_graph import ProgramGraph

if TYPE_CHECKING:  # onnx_ir takes half a second to import, which would delay every start
    import onnx_ir as ir

METADATA = "ort_trainer.artifact"
"""The metadata key."""
SIZES = "__sizes"
"""Input of a backward pass, a tensor without elements whose dimensions after the first have the symbolic sizes."""
FORMAT = 2
"""The format written. Format 1, which can still be read, lacks ``index_ranges`` and ``micro_batches``."""

IR_VERSION = 10
"""IR version of all models of artifacts: the highest that onnxruntime 1.19, the oldest supported, can read."""

Dim = int | str
"""A size, or an expression over symbolic dimensions that :func:`~ort_trainer.core.dims.evaluate` understands."""
Model = TypeVar("Model", "Step", "OptimizerModel")


# Named tuples, because defining a dataclass takes a millisecond, a hundredth of the time to import ONNX Runtime.
class TensorSpec(NamedTuple):
    """An input or output that the user sees.

    Attributes:
        name: Its name, in the graph too.
        dtype: The name of the element type, which is the same in NumPy and PyTorch; see :func:`dtype_name`.
        shape: For an input, sizes and names of dimensions as described. For an output, sizes and expressions; None if
            the shape depends on the values of the batch.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None


class RandomInput(NamedTuple):
    """A random tensor that is sampled for every step.

    Attributes:
        name: Name of the graph input.
        kind: ``key`` (an integer from which the graph draws masks), ``mask`` (1 with probability p, otherwise 0, drawn
            from such a key), ``bernoulli`` (the same, drawn as in PyTorch), ``uniform`` ([0, 1)), ``normal`` (mean 0,
            standard deviation 1), ``exponential``, ``integers`` (low to high - 1) or ``permutation`` (of 0 to size - 1,
            for the only size).
        dtype: The name of the element type.
        shape: Sizes and expressions.
        parameters: (p, number of the mask in the graph) for ``mask``, (p, factor on the result) for ``bernoulli``,
            (low, high) for ``integers``, (rate,) for ``exponential``; empty otherwise.
        order: The dimensions in memory order, largest stride first; empty for a contiguous tensor. PyTorch fills a
            transposed tensor in a different order than a contiguous one.
        probability: Graph input that is p in each run, in place of the p and the factor 1 / p in ``parameters``; empty
            if p is fixed.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[Dim, ...]
    parameters: tuple[float, ...] = ()
    order: tuple[int, ...] = ()
    probability: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: the forward and backward pass for training, or only the forward pass for evaluation.

    Of a call of a module, without a loss, the passes are two steps, ``forward`` and ``backward``. The forward pass also
    returns what the backward pass needs of it; the backward pass takes that, parameters, inputs and random tensors of
    the forward pass by their names there, the gradients of outputs, and :data:`SIZES`.

    The graph is a pure function. Its inputs are the state (parameters and buffers), the batch, the loss scale and
    the random tensors; its outputs are the described outputs, a gradient for each parameter that has one, and the new
    value of each buffer that the step changes.

    Attributes:
        kind: ``training`` or ``evaluation``; of a call, ``forward`` or ``backward``.
        export: Identifies the export that the artifacts of a step come from, the same in all of them; empty before.
        inputs: The batch, in order.
        outputs: The described outputs, including the loss, in order.
        left: Names of the last outputs: tensors that the model's code keeps, in an attribute or a container. A run
            stores them there instead of returning them.
        loss: Name of the loss; empty for a call.
        state: Name of a parameter or buffer -> graph input, for those that the graph uses.
        gradients: Name of a trained parameter -> graph output.
        sums: Name of a trained parameter -> graph input, the sum of its earlier gradients; empty if the step computes
            only its own gradients.
        buffer_updates: Name of a buffer that training changes -> graph output.
        reset: With ``sums``, graph input, bool [1]: True overwrites them with the gradients, False adds to them.
        input_updates: Name of an input that a call changes in place -> graph output.
        differentiable: Of the forward pass of a call, name of an output that requires grad -> its part: gradients of
            different parts have no computation in common.
        saved: What the forward pass of a call returns for the backward pass.
        tangents: Of a backward pass, name of an output of the call -> graph input, its gradient.
        input_gradients: Of a backward pass, name of an input of the call -> graph output.
        depends: Of a backward pass, graph output -> names of the call's outputs whose gradients it depends on.
        random: The random inputs, in the order in which PyTorch would draw them. The common key of masks comes first.
        guards: Conditions on the sizes under which the graph is valid; see :func:`ort_trainer.core.dims.holds`.
        fixed: Name of a dimension -> its only valid size, for sizes that the model's code fixes.
        index_ranges: What operators allow in the integer inputs that they index with; empty disables the check.
        assumptions: Graph output, a bool -> its value in a valid run, and the line of the model's condition. In other
            runs the model takes another branch, so all results are invalid.
        loss_scale: Graph input by which the loss is multiplied before the backward pass; None if there is none.
        programs: The graph, if PyTorch's kernels run it; None if it is an ONNX model.
        origins: The modules that the nodes come from, as text of :class:`~ort_trainer.step.origins.Origins`; empty if
            unknown.
        stored: The ONNX model, or the bytes of its file, which :attr:`model` parses on first use; empty with programs.
        kept: The cache file for later processes; empty if there is none. It is not part of the bytes.
        measured: What showed that these kernels are the fastest; empty if that was not measured.
        seconds: How long this process took to export it, or to load it from the cache. It is not part of the bytes.
    """

    kind: str
    export: str = ""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    loss: str
    left: tuple[str, ...] = ()
    state: Mapping[str, str]
    gradients: Mapping[str, str] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)
    buffer_updates: Mapping[str, str] = field(default_factory=dict)
    input_updates: Mapping[str, str] = field(default_factory=dict)
    differentiable: Mapping[str, int] = field(default_factory=dict)
    saved: tuple[TensorSpec, ...] = ()
    tangents: Mapping[str, str] = field(default_factory=dict)
    input_gradients: Mapping[str, str] = field(default_factory=dict)
    depends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reset: str = "lazy_reset_grad"
    random: tuple[RandomInput, ...] = ()
    guards: tuple[str, ...] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)
    index_ranges: tuple[IndexRange, ...] = ()
    assumptions: Mapping[str, tuple[bool, str]] = field(default_factory=dict)
    loss_scale: TensorSpec | None = None
    programs: ProgramGraph | None = None
    origins: str = ""
    stored: ir.Model | bytes = b""
    kept: str = ""
    measured: str = ""
    seconds: float = 0.0

    kinds: ClassVar[tuple[str, ...]] = ("training", "evaluation")

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if isinstance(value, dict):
                object.__setattr__(self, name, MappingProxyType({**value}))

    @property
    def training(self) -> bool:
        """Whether this is a training step."""
        return self.kind == "training"

    @property
    def in_onnx(self) -> bool:
        """Whether the graph is an ONNX model, and not programs of PyTorch's kernels."""
        return self.programs is None

    @property
    def program_texts(self) -> Collection[str]:
        """The texts of the programs of a graph; empty for an ONNX model."""
        return () if self.programs is None else self.programs.programs.values()

    @functools.cached_property
    def model(self) -> ir.Model:
        """The ONNX model, parsed on first use: the imports for that take half a second.

        Raises:
            ValueError: If there is none, because PyTorch's kernels run the graph.
        """
        if self.programs is not None:
            raise ValueError(
                f"the {self.kind} graph has programs of PyTorch's kernels in place of ONNX operators: set "
                "utils.kernels to 'onnxruntime' for a graph of these"
            )
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

    def to_bytes(self) -> bytes:
        """Returns the step as bytes: the length of what is known of it, that as JSON, and the graph."""
        about = json.dumps({"programs": self.programs is not None, "step": to_metadata(self)}).encode()
        graph = self.serialized() if self.programs is None else self.programs.to_bytes()
        return b"".join([len(about).to_bytes(8, "little"), about, graph])

    @classmethod
    def from_bytes(cls, data: bytes) -> Step:
        """Returns the step from :meth:`to_bytes`.

        Raises:
            ValueError: If the data is not a step.
        """
        end = 8 + int.from_bytes(data[:8], "little")
        try:
            about = json.loads(data[8:end])
            text, of_programs = about["step"], about["programs"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"this is not a step: {error!r}") from error
        step = from_metadata(cls, text, "the graph")
        if of_programs:
            return replace(step, programs=ProgramGraph.from_bytes(data[end:]))
        return replace(step, stored=data[end:])

    @property
    def kernels(self) -> str:
        """Whose kernels compute the step, in the genitive; compiled loops take the place of some of PyTorch's."""
        if self.programs is None:
            return "ONNX Runtime's"
        return "compiled loops and PyTorch's" if self.programs.has_loops else "PyTorch's"

    @property
    def is_standard(self) -> bool:
        """Whether the graph has only ONNX's own operators."""
        return self.in_onnx and all(not node.domain for node in self.model.graph.all_nodes())

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Returns the size of every symbolic dimension for the shapes of a batch (input name -> shape)."""
        return {
            symbol: size
            for spec in self.inputs
            for symbol, size in zip(spec.shape or (), shapes.get(spec.name, ()), strict=False)
            if isinstance(symbol, str)
        }

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns whether the graph is valid for a batch of these shapes (input name -> shape)."""
        return next(self.objections(shapes), None) is None

    def objections(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        """Yields the reasons why the graph is not valid for a batch of these shapes; inputs may be missing."""
        for spec in self.inputs:
            for axis, (described, size) in enumerate(zip(spec.shape or (), shapes.get(spec.name, ()), strict=False)):
                if isinstance(described, int) and described != size:
                    yield f"dimension {axis} of {spec.name!r} is {size}, and was {described}"
        sizes = self.sizes(shapes)
        for symbol, size in self.fixed.items():
            if sizes.get(symbol, size) != size:
                yield f"dimension {symbol!r} is {sizes[symbol]}, and the model fixed it at {size}"
        for guard in self.guards:
            if symbols_of(guard) <= sizes.keys() and not holds(guard, sizes):
                yield f"the model relies on {guard}, which is false"

    def unchecked(self) -> Step:
        """Returns the step without its assumptions, for runtimes that don't check them; warns if there are any."""
        if not self.assumptions:
            return self
        from .prune import prune

        lines = "; ".join(dict.fromkeys(f"{line} (here {value})" for value, line in self.assumptions.values()))
        warn(f"the written model takes one branch for all values, and does not check that a batch takes it: {lines}")
        outputs = [spec.name for spec in self.outputs] + [*self.gradients.values(), *self.buffer_updates.values()]
        model = prune(self.model, outputs, [value.name or "" for value in self.model.graph.inputs])
        return replace(self, stored=model, assumptions={})

    def pruned(self, names: Sequence[str]) -> Step:
        """Returns the part of the graph that computes the given outputs and the buffers, with the inputs it needs.

        For a training graph, this is its forward pass.
        """
        outputs = [*names, *self.buffer_updates.values()]
        part, needed = self._part(outputs)
        inputs = needed | set(self.state.values())
        # Drops assumptions about inputs that these outputs do not need, such as a label.
        assumptions = {name: assumed for name, assumed in self.assumptions.items() if self._part([name])[1] <= inputs}
        if assumptions:
            part, needed = self._part([*outputs, *assumptions])
        kept = {spec.name: spec for spec in self.outputs}
        left = needed.union(spec.probability for spec in self.random)  # which the graph itself need not read
        return replace(
            self,
            **part,
            inputs=tuple(spec for spec in self.inputs if spec.name in left),
            outputs=tuple(kept[name] for name in names),
            left=tuple(name for name in self.left if name in names),
            state={name: value for name, value in self.state.items() if value in left},
            gradients={},
            loss_scale=self.loss_scale if self.loss_scale is not None and self.loss_scale.name in left else None,
            random=tuple(spec for spec in self.random if spec.name in left),
            index_ranges=tuple(entry for entry in self.index_ranges if entry.input in left),
            assumptions=assumptions,
        )

    def _part(self, outputs: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
        """Returns the part of the graph that computes some outputs, as fields of a step, and the inputs it needs."""
        if self.programs is not None:
            part = self.programs.pruned(outputs)
            return {"programs": part}, part.inputs
        from .prune import prune

        probabilities = [spec.probability for spec in self.random]
        model = prune(self.model, outputs, probabilities)
        return {"stored": model}, {value.name or "" for value in model.graph.inputs}


class Slot(NamedTuple):
    """A tensor that the optimizer keeps.

    Attributes:
        input: Graph input, the old value.
        output: Graph output, the new one.
        dtype: NumPy's name of the element type.
        shape: Sizes.
        initial: The value of all its elements before the first update.
    """

    input: str
    output: str
    dtype: str
    shape: tuple[int, ...]
    initial: float = 0.0


@dataclass(frozen=True)
class OptimizerModel:
    """An optimizer model.

    Attributes:
        export: Identifies the export; the same in all its artifacts.
        name: Name of the optimizer, such as ``AdamOptimizer``.
        weights: Name of a parameter -> graph input and output.
        gradients: Name of a parameter -> graph input.
        state: Key of a tensor that the optimizer keeps, such as ``<parameter>.Moment_1`` -> the tensor.
        rates: Number of learning rates.
        learning_rate: Graph input, float32 [rates]: one for each parameter group, then one for all other parameters.
        micro_batches: Graph input, int64 [1]: number of micro-batches accumulated, for an update with the mean of
            their gradients; None if the update takes the sum.
    """

    export: str
    name: str
    weights: Mapping[str, tuple[str, str]]
    gradients: Mapping[str, str]
    state: Mapping[str, Slot]
    rates: int = 1
    learning_rate: str = "learning_rate"
    micro_batches: str | None = None
    kind: str = "optimizer"

    kinds: ClassVar[tuple[str, ...]] = ("optimizer",)


# Kinds of steps that are not artifacts.
_OF_CALLS = ("forward", "backward")
# What is not in the metadata, and what is left out of them where it is empty, as artifacts have always done.
_APART = ("stored", "programs", "kept", "seconds", "sums", "model")
_MAY_LACK = frozenset({"micro_batches", "loss_scale", "origins", "order", "probability", "measured"}) | frozenset(
    {"left", "input_updates", "differentiable", "saved", "tangents", "input_gradients", "depends", "assumptions"}
)


# Fields that are tuples of named tuples -> the class of those.
_SEVERAL: Mapping[str, type[Any]] = {
    "inputs": TensorSpec,
    "outputs": TensorSpec,
    "saved": TensorSpec,
    "random": RandomInput,
}


def dtype_name(dtype: object) -> str:
    """Returns the name of an element type of NumPy or PyTorch, such as ``float32``; ``bfloat16`` is PyTorch's only."""
    return str(dtype).removeprefix("torch.")


def to_metadata(model: Step | OptimizerModel) -> str:
    """Returns the text that :func:`from_metadata` reads."""
    entries = _json_fields({key: value for key, value in vars(model).items() if key not in _APART})
    if isinstance(model, Step) and model.sums:
        entries["gradients"] = {name: [model.sums[name], output] for name, output in model.gradients.items()}
    return json.dumps({"format": FORMAT, **entries})


def from_metadata(cls: type[Model], text: str | None, name: str) -> Model:
    """Returns a model's description of itself.

    Args:
        cls: :class:`Step` or :class:`OptimizerModel`.
        text: The metadata under the key :data:`METADATA`; None if missing.
        name: Name of the model in error messages.

    Raises:
        ValueError: If the model is not an artifact, is another kind of artifact, or has a newer format.
    """
    if text is None:
        raise ValueError(
            f"{name} is not an ort_trainer artifact: write artifacts with ORTTrainer.export_artifacts() or "
            "ort_trainer.artifacts.generate_artifacts()"
        )
    try:
        values: dict[str, Any] = json.loads(text)
        version, kind = values.pop("format"), values["kind"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{name} is damaged: its metadata can't be read ({error})") from error
    if version not in range(1, FORMAT + 1):
        newer = isinstance(version, int) and version > FORMAT
        way = "update ort_trainer, or export again" if newer else "export again"
        raise ValueError(
            f"{name} has artifact format {shown(version)}, but this ort_trainer reads formats 1 to {FORMAT}: {way}"
        )
    if kind not in (*Step.kinds, *OptimizerModel.kinds, *_OF_CALLS):
        raise ValueError(f"{name} is damaged: unknown kind {shown(kind)} in its metadata")
    if kind not in cls.kinds and not (cls is Step and kind in _OF_CALLS):
        raise ValueError(f"expected the {' or '.join(cls.kinds)} model of an export, but {name} is the {kind} model")
    try:
        if not values.keys().isdisjoint(_APART):
            raise ValueError(f"unexpected fields, one of {list(_APART)}")
        for key, parts in _SEVERAL.items():
            if key in values:
                values[key] = tuple(parts(**_tuples(entry)) for entry in values[key])
        if "loss_scale" in values:
            values["loss_scale"] = TensorSpec(**_tuples(values["loss_scale"]))
        if "index_ranges" in values:
            values["index_ranges"] = tuple(map(IndexRange.from_json, values["index_ranges"]))
        if cls is OptimizerModel:
            values["state"] = {key: Slot(**_tuples(entry)) for key, entry in values["state"].items()}
        elif any(isinstance(value, list) for value in values.get("gradients", {}).values()):
            pairs = values["gradients"].items()
            values["sums"] = {key: before for key, (before, _) in pairs}
            values["gradients"] = {key: output for key, (_, output) in pairs}
        return cls(**_tuples({k: _tuples(v) if isinstance(v, dict) else v for k, v in values.items()}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{name} is damaged: its metadata don't describe the {kind} model ({error})") from error


def _json_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields in the types of JSON, without those that are omitted if empty."""
    return {key: _plain(value) for key, value in values.items() if value or key not in _MAY_LACK}


def _plain(value: Any) -> Any:
    """Returns a value in the types of JSON, named tuples as dicts."""
    if isinstance(value, tuple):
        return _json_fields(value._asdict()) if hasattr(value, "_asdict") else [_plain(part) for part in value]
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, Mapping) else value


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with tuples in place of JSON's lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
