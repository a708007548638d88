"""How exported models describe themselves: JSON in their metadata, which ONNX Runtime returns.

The training model computes, from state, inputs and random numbers, the outputs, the new gradient buffers and the new
buffers of the model; the evaluation model computes the outputs; the optimizer model computes the new weights and state
tensors from the old ones, the gradients and the learning rates. All state enters as inputs and leaves as outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..core.errors import shown
from ..core.indices import IndexRange

__all__ = [
    "FORMAT",
    "METADATA",
    "OptimizerModel",
    "RandomTensor",
    "Slot",
    "StepModel",
    "Tensor",
    "from_metadata",
    "to_metadata",
]

METADATA = "ort_trainer.artifact"
"""The metadata key."""
FORMAT = 2
"""The format written. Format 1, which can still be read, lacks ``index_ranges`` and ``micro_batches``."""

Model = TypeVar("Model", "StepModel", "OptimizerModel")


# Defining a dataclass takes a millisecond, a hundredth of the time to import ONNX Runtime.
class Tensor(NamedTuple):
    """An input or output that the user sees.

    Attributes:
        name: Its name, in the graph too.
        dtype: NumPy's name of the element type.
        shape: For an input, sizes and names of dimensions as described. For an output, sizes and expressions for
            :func:`ort_trainer.core.dims.evaluate`; None if the shape depends on the values of the batch.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None


class RandomTensor(NamedTuple):
    """An input that is sampled for every training step; see ``ort_trainer.step.RandomInput``.

    Attributes:
        name: Name of the graph input.
        kind: ``mask``, ``bernoulli``, ``uniform``, ``normal``, ``exponential``, ``integers`` or ``permutation``.
        dtype: NumPy's name of the element type.
        shape: Sizes and expressions.
        parameters: As for ``RandomInput``.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int | str, ...]
    parameters: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepModel:
    """A training or an evaluation model.

    Attributes:
        kind: ``training`` or ``evaluation``.
        export: Identifies the export; the same in all its artifacts.
        inputs: The inputs of a step, in order.
        outputs: The outputs of a step, in order.
        loss: Name of the output that is the loss.
        state: Name of a parameter or buffer -> graph input.
        gradients: Name of a trained parameter -> graph input of its gradient buffer, and graph output.
        buffer_updates: Name of a buffer that training changes -> graph output.
        reset: Graph input, bool [1]: True overwrites the gradient buffers, False adds to them.
        random: The random inputs, in order. If there are masks, their common key is drawn first.
        guards: Conditions on the sizes under which the graph is valid; see :func:`ort_trainer.core.dims.holds`.
        fixed: Name of a dimension -> the only size that the graph supports for it.
        index_ranges: The valid ranges of inputs used as indices; empty disables the check.
    """

    kind: str
    export: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    loss: str
    state: Mapping[str, str]
    gradients: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    buffer_updates: Mapping[str, str] = field(default_factory=dict)
    reset: str = "lazy_reset_grad"
    random: tuple[RandomTensor, ...] = ()
    guards: tuple[str, ...] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)
    index_ranges: tuple[IndexRange, ...] = ()

    kinds: ClassVar[tuple[str, ...]] = ("training", "evaluation")


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


def to_metadata(model: StepModel | OptimizerModel) -> str:
    """Returns the text that :func:`from_metadata` reads."""
    # Leave out None, as format 1 does.
    said = {key: _plain(value) for key, value in vars(model).items() if value is not None}
    return json.dumps({"format": FORMAT, **said})


def from_metadata(cls: type[Model], text: str | None, name: str) -> Model:
    """Returns a model's description of itself.

    Args:
        cls: :class:`StepModel` or :class:`OptimizerModel`.
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
        found: dict[str, Any] = json.loads(text)
        given, kind = found.pop("format"), found["kind"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{name} is damaged: its metadata can't be read ({error})") from error
    if given not in range(1, FORMAT + 1):
        newer = isinstance(given, int) and given > FORMAT
        way = "update ort_trainer, or export again" if newer else "export again"
        raise ValueError(
            f"{name} has artifact format {shown(given)}, but this ort_trainer reads formats 1 to {FORMAT}: {way}"
        )
    if kind not in ("training", "evaluation", "optimizer"):
        raise ValueError(f"{name} is damaged: unknown kind {shown(kind)} in its metadata")
    if kind not in cls.kinds:
        raise ValueError(f"expected the {' or '.join(cls.kinds)} model of an export, but {name} is the {kind} model")
    try:
        for key, parts in (("inputs", Tensor), ("outputs", Tensor), ("random", RandomTensor)):
            if key in found:
                found[key] = tuple(parts(**_tuples(entry)) for entry in found[key])
        if "index_ranges" in found:
            found["index_ranges"] = tuple(map(IndexRange.from_json, found["index_ranges"]))
        if cls is OptimizerModel:
            found["state"] = {key: Slot(**_tuples(entry)) for key, entry in found["state"].items()}
        return cls(**_tuples({k: _tuples(v) if isinstance(v, dict) else v for k, v in found.items()}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{name} is damaged: its metadata don't describe the {kind} model ({error})") from error


def _plain(value: Any) -> Any:
    """Returns a value in the types of JSON, named tuples as dicts."""
    if isinstance(value, (Tensor, RandomTensor, Slot, IndexRange)):
        return value._asdict()
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, Mapping) else value


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
