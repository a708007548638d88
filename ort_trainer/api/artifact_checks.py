"""Checks an exported model's description of itself: the types of its fields, and whether it matches the graph."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..core.dims import symbols_of
from ..core.indices import STEPS, IndexRange
from ..core.protobuf import ELEMENT_TYPES
from ..engine.ort import element_type
from ..step.contract import OptimizerModel, RandomInput, Slot, Step, TensorSpec


def check_described(model: Step | OptimizerModel, name: str) -> None:
    """Checks that all fields of a description have values of the right types.

    Args:
        model: The model's description of itself.
        name: Name of the model in error messages.

    Raises:
        ValueError: If a value is invalid; the message names the field.
    """
    try:
        _check_optimizer(model) if isinstance(model, OptimizerModel) else _check_step(model)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is damaged: its metadata don't describe the {model.kind} model ({error})") from error


def _check_optimizer(model: OptimizerModel) -> None:
    _require(isinstance(model.export, str), "export")
    _texts([model.name, model.learning_rate, model.micro_batches or ""], "name")
    _require(isinstance(model.rates, int) and 0 < model.rates < 1 << 20, "rates")
    _pairs(model.weights, "weights")
    _texts(_items(model.gradients, "gradients").values(), "gradients")
    for key, slot in _items(model.state, "state").items():
        _tensor(slot, f"state {key!r}", (slot.input, slot.output), sized=True)
        _require(_is_number(slot.initial), f"state {key!r}")


def _check_step(model: Step) -> None:
    _require(isinstance(model.export, str), "export")
    for spec in (*_sequence(model.inputs, "inputs"), *_sequence(model.outputs, "outputs")):
        _tensor(spec, "inputs or outputs", (spec.name,))
    named = {size for spec in model.inputs for size in spec.shape or ()}
    for spec in model.outputs:
        _require(_symbols(spec.shape or ()) <= named, f"outputs: the shape of {spec.name!r}")
    _texts([model.loss, model.reset], "loss")
    _texts(_items(model.state, "state").values(), "state")
    _require(model.sums.keys() == model.gradients.keys(), "gradients")
    _texts([*model.sums.values(), *model.gradients.values()], "gradients")
    _texts(_items(model.buffer_updates, "buffer_updates").values(), "buffer_updates")
    for random in _sequence(model.random, "random"):
        _tensor(random, "random", (random.name, random.kind, random.probability))
        _require(_symbols(random.shape) <= named, f"random: the shape of {random.name!r}")
        _require(all(_is_number(value) for value in _sequence(random.parameters, "random")), "random")
    for guard in _sequence(model.guards, "guards"):
        _require(isinstance(guard, str), "guards")
        symbols_of(guard)
    for size in _items(model.fixed, "fixed").values():
        _require(isinstance(size, int), "fixed")
    integers = {spec.name for spec in model.inputs if "int" in spec.dtype}
    for entry in _sequence(model.index_ranges, "index_ranges"):
        _check_range(entry, integers, named)


def _check_range(entry: IndexRange, inputs: Collection[str], named: Collection[int | str]) -> None:
    what = "index_ranges"
    _texts([entry.input, entry.operator, entry.source, *_sequence(entry.outputs, what)], what)
    _require(entry.input in inputs, f"{what}: input")
    _require(isinstance(entry.from_end, bool), f"{what}: from_end")
    _require(entry.ignored is None or _is_whole(entry.ignored), f"{what}: ignored")
    _require(_is_size(entry.size, named), f"{what}: size")
    for step in _sequence(entry.steps, what):
        _require(isinstance(step, tuple) and len(step) == 2 and step[0] in STEPS, f"{what}: steps")
        _require(all(_is_argument(value, named) for value in _sequence(step[1], what)), f"{what}: steps")
        try:
            inspect.signature(STEPS[step[0]]).bind(None, *step[1])
        except TypeError as error:
            raise ValueError(f"{what}: step {step[0]!r}: {error}") from error


def _is_argument(value: Any, named: Collection[int | str]) -> bool:
    """Returns whether a value is a valid argument of a step."""
    if isinstance(value, tuple):
        return all(_is_argument(part, named) for part in value)
    return value is None or isinstance(value, bool) or _is_size(value, named)


def _is_size(value: Any, named: Collection[int | str]) -> bool:
    """Returns whether a value is an int, or an expression of named dimensions."""
    return _is_whole(value) or (isinstance(value, str) and symbols_of(value) <= {*named})


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tensor(spec: TensorSpec | RandomInput | Slot, where: str, texts: Iterable[Any], sized: bool = False) -> None:
    """Checks the dtype and shape of a tensor, and its names; if ``sized``, all sizes must be numbers."""
    _texts(texts, where)
    _require(isinstance(spec.dtype, str) and spec.dtype in ELEMENT_TYPES.values(), f"{where}: dtype")
    if spec.shape is None and isinstance(spec, TensorSpec):
        return
    for size in _sequence(spec.shape, where):
        if isinstance(size, str) and not sized:
            if "dim(" in size:  # otherwise it is a name, and any name is valid
                symbols_of(size)
        else:
            _require(_is_whole(size) and size >= 0, f"{where}: shape")


def _symbols(shape: Iterable[int | str]) -> set[str]:
    """Returns the named dimensions that a shape uses."""
    return set().union(*(symbols_of(size) for size in shape))


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} has an invalid value")


def _sequence(value: Any, what: str) -> Sequence[Any]:
    _require(isinstance(value, tuple), what)
    return value  # type: ignore[no-any-return]


def _items(value: Any, what: str) -> Mapping[str, Any]:
    _require(isinstance(value, Mapping), what)
    return value  # type: ignore[no-any-return]


def _texts(values: Iterable[Any], what: str) -> None:
    _require(all(isinstance(value, str) for value in values), what)


def _pairs(value: Any, what: str) -> None:
    for pair in _items(value, what).values():
        _require(isinstance(pair, tuple) and len(pair) == 2, what)
        _texts(pair, what)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_fits(model: Step | OptimizerModel, inputs: Sequence[Any], outputs: Sequence[Any], name: str) -> None:
    """Checks that the graph has the inputs and outputs that the model describes.

    Args:
        model: The model's description of itself.
        inputs: ONNX Runtime's descriptions of the graph's inputs.
        outputs: ONNX Runtime's descriptions of the graph's outputs.
        name: Name of the model in error messages.

    Raises:
        ValueError: If one is missing or has a different type or shape, or if the graph has an unexpected input.
    """
    described_inputs, described_outputs = _named(model)
    for kind, described, values in (("input", described_inputs, inputs), ("output", described_outputs, outputs)):
        values_by_name = {value.name: value for value in values}
        # Extra outputs do no harm.
        mismatched = [key for key in described if key not in values_by_name] + [
            key for key in values_by_name if key not in described and kind == "input"
        ]
        if mismatched:
            raise ValueError(f"{name} is damaged: its metadata and its graph disagree about the {kind}s {mismatched}")
        for key, (dtype, shape) in described.items():
            value = values_by_name[key]
            if dtype is not None and element_type(value.type) != dtype:
                raise ValueError(f"{name} is damaged: {kind} {key!r} is a {value.type}, but its metadata say {dtype}")
            if shape is not None and not _fits(value.shape, shape):
                raise ValueError(
                    f"{name} is damaged: {kind} {key!r} has shape {value.shape}, but its metadata say {list(shape)}"
                )


def _fits(shape: Sequence[Any], described: Sequence[int | str]) -> bool:
    """Returns whether a shape of the graph has the described rank, and the same sizes where both are numbers."""
    return len(shape) == len(described) and all(
        size == described_size
        for size, described_size in zip(shape, described, strict=True)
        if isinstance(size, int) and isinstance(described_size, int)
    )


_Described = dict[str, tuple[str | None, Sequence[int | str] | None]]


def _named(model: Step | OptimizerModel) -> tuple[_Described, _Described]:
    """Returns the dtypes and shapes, where described, of the inputs and the outputs that the graph must have."""
    inputs: _Described = {}
    outputs: _Described = {}
    if isinstance(model, OptimizerModel):
        inputs[model.learning_rate] = "float32", (model.rates,)
        if model.micro_batches is not None:
            inputs[model.micro_batches] = "int64", (1,)
        inputs |= dict.fromkeys((*(old for old, _ in model.weights.values()), *model.gradients.values()), (None, None))
        outputs |= dict.fromkeys((new for _, new in model.weights.values()), (None, None))
        for slot in model.state.values():
            inputs[slot.input] = outputs[slot.output] = slot.dtype, slot.shape
        return inputs, outputs
    inputs |= dict.fromkeys(model.state.values(), (None, None))
    inputs |= {spec.name: (spec.dtype, spec.shape) for spec in model.inputs}
    inputs |= {spec.name: (spec.dtype, spec.shape) for spec in model.random}
    outputs |= {spec.name: (spec.dtype, spec.shape) for spec in model.outputs}
    if model.kind == "training":
        inputs |= dict.fromkeys(model.sums.values(), (None, None))
        if model.gradients:
            inputs[model.reset] = "bool", (1,)
        outputs |= dict.fromkeys((*model.gradients.values(), *model.buffer_updates.values()), (None, None))
    return inputs, outputs
