"""Conditions and loops.

Conditions and trip counts that are known during the trace are decided and unrolled. For a condition on a batch's
values, both branches are computed, and the results of one are selected: ``torch.cond`` would need support in every
later stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..module import Body
from ..node_table import Node, operator
from ..values import Value, as_tensor, integers, is_traced

_Tensor = torch.Tensor


@operator("If", known_inputs=True)
def _if(condition: Value, *, then_branch: Body, else_branch: Body, node: Node) -> tuple[Value, ...]:
    if isinstance(condition, _Tensor) and is_traced(condition):
        return _by_batch(condition, then_branch, else_branch, node)
    return tuple((then_branch if bool(condition.reshape(-1)[0]) else else_branch)())


def _by_batch(condition: _Tensor, then_branch: Body, else_branch: Body, node: Node) -> tuple[Value, ...]:
    """Runs both branches, and selects the results of one by the values of the batch."""
    if node.training and (then_branch.updates_statistics or else_branch.updates_statistics):
        raise node.error(
            "its condition depends on the values of a batch, and a branch has a BatchNormalization, whose running "
            "statistics would be updated even if the other branch is chosen: move it out of the branch"
        )
    chosen = condition.reshape(())
    results = []
    for branch, taken in ((then_branch, chosen), (else_branch, ~chosen)):
        # No gradient may flow through the branch not taken: an infinite one, times zero, would be NaN.
        outside = {
            number: torch.where(taken, value, value.detach()) if value.is_floating_point() else value
            for number, value in branch.outside_tensors()
        }
        results.append(branch.with_outside(outside))
    selected = []
    for a, b in zip(*results, strict=True):
        tensors = isinstance(a, _Tensor) and isinstance(b, _Tensor)
        if not tensors or a.shape != b.shape or a.dtype != b.dtype:
            shapes = " and ".join(
                f"{x.dtype} {list(x.shape)}" if isinstance(x, _Tensor) else "a sequence" for x in (a, b)
            )
            raise node.error(
                f"its condition depends on the values of a batch, so both branches are computed, but they return "
                f"{shapes}: make the condition depend on shapes only, or let both return the same shape"
            )
        selected.append(torch.where(chosen, a, b))
    return tuple(selected)


def _known_condition(condition: Value, node: Node) -> bool:
    """Returns whether a loop continues; an absent condition means yes."""
    if condition is None:
        return True
    if isinstance(condition, _Tensor) and is_traced(condition):
        raise node.error(
            "its condition depends on the values of a batch, but a graph for training has a fixed number of "
            "iterations: make the trip count a constant, or compute it from shapes"
        )
    return bool(condition.reshape(-1)[0])


@operator("Loop", known_inputs=True)
def _loop(count: Value, condition: Value, *initial: Value, body: Body, node: Node) -> tuple[Value, ...]:
    limit = None if count is None else int(integers(count, "its trip count", node)[0])
    carried, scanned = list(initial), [[] for _ in range(body.outputs - 1 - len(initial))]  # type: ignore[var-annotated]
    go_on, trip = _known_condition(condition, node), 0
    while go_on and (limit is None or trip < limit):
        outputs = body(np.array(trip, dtype=np.int64), np.array(True), *carried)
        carried = outputs[1 : 1 + len(initial)]
        for values, value in zip(scanned, body.tensors(outputs)[1 + len(initial) :], strict=True):
            values.append(value)
        trip += 1
        go_on = (limit is None or trip < limit) and _known_condition(outputs[0], node)
    first = 1 + len(initial)
    return (*carried, *(_stacked(values, body, first + i) for i, values in enumerate(scanned)))


def _stacked(values: list[_Tensor], body: Body, output: int, axis: int = 0) -> _Tensor:
    """Returns the scanned output of all iterations; without iterations an empty tensor of its dtype."""
    return torch.stack(values, axis) if values else torch.empty((0,), dtype=body.dtype(output))


@operator("Scan", since=9, known_inputs=True)
def _scan(
    *inputs: Value,
    body: Body,
    num_scan_inputs: int,
    scan_input_axes: list[int] | None = None,
    scan_input_directions: list[int] | None = None,
    scan_output_axes: list[int] | None = None,
    scan_output_directions: list[int] | None = None,
) -> tuple[Value, ...]:
    states = len(inputs) - num_scan_inputs
    axes = scan_input_axes or [0] * num_scan_inputs
    backward = scan_input_directions or [0] * num_scan_inputs
    sequences = [as_tensor(value) for value in inputs[states:]]
    sequences = [x.flip(a) if b else x for x, a, b in zip(sequences, axes, backward, strict=True)]
    carried, scanned = _scanned(body, list(inputs[:states]), sequences, axes)
    to = scan_output_axes or [0] * len(scanned)
    reverse = scan_output_directions or [0] * len(scanned)
    results = [
        _stacked(list(reversed(values)) if turned else values, body, states + i, axis)
        for i, (values, axis, turned) in enumerate(zip(scanned, to, reverse, strict=True))
    ]
    return (*carried, *results)


def _scanned(
    body: Body, carried: list[Value], sequences: Sequence[_Tensor], axes: Sequence[int]
) -> tuple[list[Value], list[list[_Tensor]]]:
    """Runs the body over slices of the sequences; returns the final states, and each scanned output of all steps."""
    states = len(carried)
    scanned: list[list[_Tensor]] = [[] for _ in range(body.outputs - states)]
    for parts in zip(*(x.unbind(axis) for x, axis in zip(sequences, axes, strict=True)), strict=True):
        outputs = body(*carried, *parts)
        carried = outputs[:states]
        for values, value in zip(scanned, body.tensors(outputs)[states:], strict=True):
            values.append(value)
    return carried, scanned


@operator("Scan", until=8, known_inputs=True)
def _scan_of_batches(
    lengths: Value, *inputs: Value, body: Body, num_scan_inputs: int, directions: list[int] | None = None, node: Node
) -> tuple[Value, ...]:
    if lengths is not None:
        raise node.error("sequence_lens is not supported: use a Scan of opset 9, or sequences of one length")
    states = len(inputs) - num_scan_inputs
    sequences = [as_tensor(value) for value in inputs[states:]]
    backward = directions or [0] * num_scan_inputs
    sequences = [x.flip(1) if b else x for x, b in zip(sequences, backward, strict=True)]
    results = []
    for i in range(sequences[0].shape[0]):
        carried, scanned = _scanned(
            body, [as_tensor(v)[i] for v in inputs[:states]], [x[i] for x in sequences], [0] * num_scan_inputs
        )
        results.append([*map(as_tensor, carried), *(_stacked(v, body, states + k) for k, v in enumerate(scanned))])
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
