"""Measures the shapes that inference leaves unknown, by running the forward pass on batches of several sizes.

Shape inference stops at unknown sizes: an unknown size broadcast with 1 or with a symbol can be anything. Running the
model shows the actual sizes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ....core.dims import evaluate
from ....engine.ort import InferenceSession, session_options
from ....options import ModelDescription
from ....step.emitter import Emitter, Names
from ..nodes import shape_of
from .differentiate import serialized
from .evaluation import ToEvaluationPass

__all__ = ["MeasureShapesPass"]

_log = logging.getLogger(__name__)
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)

Sizes = Mapping[str, int]
Run = tuple[Sizes, Mapping[str, tuple[int, ...]]]


class MeasureShapesPass(ir.passes.InPlacePass):
    """Writes the shapes that inference leaves unknown into a model.

    A size becomes a number, a symbol, or an expression over symbols (see ``core.dims.evaluate``) that fits
    all runs: with the sizes of the batch, with two or three general ones, and with each symbol at 1. Sizes that depend
    on the values of a batch stay unknown.

    Args:
        description: Determines which dimensions of the inputs are symbols.
        batch: A sample of every input.
        state: The weights and buffers.
        fixed: Symbols with a fixed size in the model.
    """

    def __init__(
        self,
        description: ModelDescription,
        batch: Mapping[str, torch.Tensor],
        state: Mapping[str, torch.Tensor],
        fixed: Sizes,
    ) -> None:
        self._description, self._batch, self._state, self._fixed = description, batch, state, fixed

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        description = self._description
        taken = {value.name for value in model.graph.inputs}
        inputs = {entry.name: entry.shape for entry in description.inputs if entry.name in taken}
        own = description.sizes({name: tuple(value.shape) for name, value in self._batch.items()})
        symbols = {size for shape in inputs.values() for size in shape if isinstance(size, str)} - set(self._fixed)
        probe = ToEvaluationPass()(model.clone()).model
        unknown = {
            str(value.name)
            for node in probe.graph
            for value in node.outputs
            if value.name and _is_tensor(value) and not _is_known(shape_of(value), symbols)
        }
        found: dict[str, list[int | str | None]] = {}
        if unknown:
            try:
                runs, again = _Probe(probe, inputs, self._batch, self._state, unknown).runs(
                    {s: own[s] for s in symbols}
                )
            except Exception as error:  # ONNX Runtime's errors have no separate class
                _log.info("the shapes of the ONNX model can't be measured: %s", " ".join(str(error).split()))
                return ir.passes.PassResult(model, modified=False)
            for name in unknown:
                shapes = [(sizes, measured[name]) for sizes, measured in runs]
                if len({len(shape) for _, shape in shapes}) == 1 and runs[0][1][name] == again[name]:
                    columns = zip(*(shape for _, shape in shapes), strict=True)
                    found[name] = [_explain([sizes for sizes, _ in shapes], column) for column in columns]
        for node in model.graph:
            for value in node.outputs:
                if value.name in found:
                    value.shape = ir.Shape(found[value.name])
        return ir.passes.PassResult(model, bool(found))


def _is_tensor(value: ir.Value) -> bool:
    return value.type is None or isinstance(value.type, ir.TensorType)


def _is_known(shape: Sequence[int | str | None] | None, symbols: set[str]) -> bool:
    return shape is not None and all(isinstance(size, int) or size in symbols for size in shape)


class _Probe:
    """A session that returns the shapes of a model's values; it modifies the model."""

    def __init__(
        self,
        probe: ir.Model,
        inputs: Mapping[str, Sequence[int | str]],
        batch: Mapping[str, torch.Tensor],
        state: Mapping[str, torch.Tensor],
        wanted: Collection[str],
    ) -> None:
        self._inputs = inputs
        self._batch = {name: batch[name].cpu().numpy() for name in inputs}
        e = Emitter(probe.opset_imports, Names(ir.convenience.create_value_mapping(probe.graph)), "shape")
        values = [value for node in probe.graph for value in node.outputs if value.name in wanted]
        shapes = {e("Shape", value): str(value.name) for value in values}
        self._outputs = {str(shape.name): name for shape, name in shapes.items()}
        probe.graph.extend(e.nodes)
        probe.graph.outputs.clear()
        probe.graph.outputs.extend(shapes)
        for value in probe.graph.inputs:  # runs use fixed sizes for fixed symbols, so no shapes are needed
            if value.name in inputs:
                value.shape = None
        options = session_options(None, False)
        options.log_severity_level = 4  # failures for unsupported sizes are expected
        self._session = InferenceSession(serialized(probe), options, providers=["CPUExecutionProvider"])
        taken = {value.name for value in self._session.get_inputs()}
        self._taken = taken & set(inputs)
        self._state = {name: value.detach().cpu().numpy() for name, value in state.items() if name in taken}

    def runs(self, own: Sizes) -> tuple[list[Run], Mapping[str, tuple[int, ...]]]:
        """Returns the sizes and shapes of all runs, the batch's own first, and the shapes for a batch of zeros."""
        first = self._shapes(own)
        # A batch of zeros reveals the shapes that depend on values.
        again = self._try(own, blank=True)
        runs: list[Run] = [(own, first)]
        for family in _families(own) if own else ():
            found = [(sizes, self._try(sizes)) for sizes in family]
            if all(shapes is not None for _, shapes in found):
                runs += [(sizes, shapes) for sizes, shapes in found if shapes is not None]
                break
        else:
            if own:
                raise RuntimeError(f"the model only runs with the sizes {dict(own)}")
        ones = [{**own, symbol: 1} for symbol in own] + [dict.fromkeys(own, 1)]
        runs += [(sizes, shapes) for sizes in ones if (shapes := self._try(sizes)) is not None]
        return runs, first if again is None else again

    def _try(self, sizes: Sizes, blank: bool = False) -> Mapping[str, tuple[int, ...]] | None:
        try:
            return self._shapes(sizes, blank)
        except Exception:  # the model may not support these sizes
            return None

    def _shapes(self, sizes: Sizes, blank: bool = False) -> Mapping[str, tuple[int, ...]]:
        feed: dict[str, Any] = dict(self._state)
        for name in self._taken:
            array = self._batch[name]
            for axis, size in enumerate(self._inputs[name]):
                if isinstance(size, str) and size in sizes:
                    array = np.take(array, np.arange(sizes[size]) % array.shape[axis], axis)
            feed[name] = np.zeros_like(array) if blank else array
        shapes = self._session.run(list(self._outputs), feed)
        return {name: tuple(shape.tolist()) for name, shape in zip(self._outputs.values(), shapes, strict=True)}


def _families(own: Sizes) -> Iterator[list[Sizes]]:
    """Yields sets of sizes that distinguish the symbols, each for models with more constraints than the last."""
    symbols = sorted(own)
    count = len(symbols)

    def family(factors: Mapping[str, int]) -> list[Sizes]:
        rotations = (_PRIMES[:count], _PRIMES[1 : count + 1], _PRIMES[2 : count + 2][::-1])
        return [{s: n * factors[s] for s, n in zip(symbols, numbers, strict=True)} for numbers in rotations]

    if count + 2 > len(_PRIMES):
        return
    yield family(dict.fromkeys(own, 1))
    yield family(own)  # for sizes that must be multiples of a number
    # For sizes that must be equal, such as one dimension with two names.
    leaders = {symbol: next(other for other in symbols if own[other] == own[symbol]) for symbol in symbols}
    if len(set(leaders.values())) < count:
        for factors in (dict.fromkeys(own, 1), own):
            yield [{s: sizes[leaders[s]] for s in symbols} for sizes in family(factors)]


def _explain(runs: Sequence[Sizes], found: Sequence[int]) -> int | str | None:
    """Returns the number, symbol or expression that equals a size in all runs; None if there is no simple one."""
    if len(set(found)) == 1:
        return found[0]
    plain = {f"dim({symbol!r})": symbol for symbol in runs[0]}
    for candidate in _candidates(runs[1:3], found[1:3]):
        if all(evaluate(candidate, sizes) == size for sizes, size in zip(runs, found, strict=True)):
            return plain.get(candidate, candidate)
    return None


def _candidates(runs: Sequence[Sizes], found: Sequence[int]) -> Iterator[str]:
    """Yields expressions that may fit two runs with prime sizes."""
    (one, other), (size, size_of_other) = runs, found
    for symbol in one:
        factor, rest = divmod(size_of_other - size, other[symbol] - one[symbol])
        if not rest:
            offset = size - factor * one[symbol]
            yield _times(factor, f"dim({symbol!r})") + (f" + {offset}" if offset else "")
    for first, second in itertools.combinations_with_replacement(one, 2):
        factor, rest = divmod(size, one[first] * one[second])
        if not rest:
            yield _times(factor, f"dim({first!r}) * dim({second!r})")


def _times(factor: int, term: str) -> str:
    return term if factor == 1 else f"{factor} * {term}"
