"""What the models of an export say about themselves: JSON in their metadata, which ONNX Runtime gives back.

The training model computes, from state, inputs and random numbers, the outputs, the new gradient buffers and the new
buffers of the model; the evaluation model computes the outputs; the optimizer model computes the new weights and state
tensors from the old ones, the gradients and the learning rates. All state comes in as inputs and goes out as outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..errors import shown
from ..indices import IndexRange

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
"""Key of the metadata."""
FORMAT = 2
"""What is written. Format 1 has no ``index_ranges`` and no ``micro_batches``; both are read."""

Model = TypeVar("Model", "StepModel", "OptimizerModel")


# A dataclass takes a millisecond to make, which is a hundredth of what importing ONNX Runtime takes.
class Tensor(NamedTuple):
    """An input or output of the user.

    Attributes:
        name: Its name, which is also that of the graph's value.
        dtype: NumPy's name of the element type.
        shape: Of an input the sizes and the names of dimensions, as described; of an output the sizes, expressions for
            :func:`ort_trainer.dims.evaluate` among them, or None where they depend on the values of a batch.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None


class RandomTensor(NamedTuple):
    """An input that is drawn anew for every training step; see ``ort_trainer.graph.RandomInput``.

    Attributes:
        name: Name of the graph input.
        kind: ``mask``, ``bernoulli``, ``uniform``, ``normal``, ``exponential``, ``integers`` or ``permutation``.
        dtype: NumPy's name of the element type.
        shape: Sizes, expressions among them.
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
        export: What the artifacts of one export have in common.
        inputs: What a step takes, in order.
        outputs: What it returns, in order.
        loss: Name of the output that is the loss.
        state: Name of a parameter or buffer -> graph input.
        gradients: Name of a trained parameter -> graph input of its gradient buffer, and graph output.
        buffer_updates: Name of a buffer that training changes -> graph output.
        reset: Graph input, bool [1]: whether the gradient buffers are overwritten instead of added to.
        random: What is drawn, in order; masks are drawn from one key, which is drawn first if there are any.
        guards: Conditions on the sizes under which the graph is right; :func:`ort_trainer.dims.holds`.
        fixed: Name of a dimension -> the only size that the graph has for it.
        index_ranges: What is allowed in inputs that are indices; empty where nothing is looked at.
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
        initial: What all its elements are before the first update.
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
        export: What the artifacts of one export have in common.
        name: The optimizer's, such as ``AdamOptimizer``.
        weights: Name of a parameter -> graph input and output.
        gradients: Name of a parameter -> graph input.
        state: Key of a tensor that the optimizer keeps, such as ``<parameter>.Moment_1`` -> the tensor.
        rates: Number of learning rates.
        learning_rate: Graph input, float32 [rates]: of each parameter group, and last of all other parameters.
        micro_batches: Graph input, int64 [1]: how many are in the gradients, whose mean the update takes; None where
            it takes their sum.
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
    # What is None is left out, as files of format 1 have it.
    said = {key: _plain(value) for key, value in vars(model).items() if value is not None}
    return json.dumps({"format": FORMAT, **said})


def from_metadata(cls: type[Model], text: str | None, name: str) -> Model:
    """Returns what a model says about itself.

    Args:
        cls: :class:`StepModel` or :class:`OptimizerModel`.
        text: The metadata under the key :data:`METADATA`; None where there are none.
        name: What messages call the model.

    Raises:
        ValueError: If it is no artifact, another kind of artifact, or of a later format.
    """
    if text is None:
        raise ValueError(
            f"{name} is no artifact of ort_trainer: write artifacts with ORTTrainer.export_artifacts() or "
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
            f"{name} has the format {shown(given)} of artifacts; this ort_trainer reads 1 to {FORMAT}: {way}"
        )
    if kind not in ("training", "evaluation", "optimizer"):
        raise ValueError(f"{name} is damaged: its metadata name the kind {shown(kind)}, which there is not")
    if kind not in cls.kinds:
        raise ValueError(f"{name} is the {kind} model of an export, where the {' or '.join(cls.kinds)} model belongs")
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
        raise ValueError(f"{name} is damaged: its metadata do not describe a {kind} model ({error})") from error


def _plain(value: Any) -> Any:
    """Returns what JSON has for a value: a dict for what has named fields."""
    if isinstance(value, (Tensor, RandomTensor, Slot, IndexRange)):
        return value._asdict()
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, Mapping) else value


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
