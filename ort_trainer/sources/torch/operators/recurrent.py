"""LSTM, GRU and RNN: one operator for each layer and direction, for sequences of any length.

torch 2.13 would take them apart step by step, which fixes the length. Here a layer is a loop over its steps
(``ort_trainer::steps``) which PyTorch's kernels run in Python and ONNX as a ``Scan``; its backward pass is another one.
Where PyTorch's kernels compute, an LSTM of fp32 is oneDNN's, forward and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch._decomp import decompositions

from ....runtime.aten import operators  # noqa: F401 - which defines the package's own
from ....runtime.aten.recurrent import CELLS
from .registry import Value, op, replacement, translation

_for_onnx: ContextVar[bool] = ContextVar("for_onnx", default=False)
_gru_cell = decompositions.gru_cell


@contextlib.contextmanager
def layers_for_onnx() -> Iterator[None]:
    """Under which oneDNN's layer is never picked: its backward operator has no translation."""
    before = _for_onnx.set(True)
    try:
        yield
    finally:
        _for_onnx.reset(before)


@replacement(decompositions, "_rnn_helper")
def _layers(
    value: torch.Tensor, hidden: Any, params: Any, biases: bool, count: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool, layer: Any,
) -> tuple[torch.Tensor, list[Any]]:  # fmt: skip
    """Runs the layers. (PyTorch compares their number with the wrong thing, and has no dropout between them.)"""
    value = value.transpose(0, 1) if batch_first else value
    final: list[Any] = []
    directions = (False, True) if bidirectional else (False,)
    for start in range(0, count * len(directions), len(directions)):
        if start and dropout and train:
            value = torch.dropout(value, dropout, train=True)
        outputs = []
        for number, reverse in enumerate(directions, start):
            output, state = layer(value, hidden[number], params[number], biases, reverse=reverse)
            outputs.append(output)
            final.append(state)
        value = torch.cat(outputs, -1) if bidirectional else output
    return (value.transpose(0, 1) if batch_first else value), final


@replacement(decompositions, "select_one_layer_lstm_function")
def _select_one_layer_lstm(input: torch.Tensor, hx: Any, params: Any) -> Any:
    """Picks oneDNN's layer for what it computes, halves in fp32; PyTorch itself does so without gradients only."""
    tensors = [input, *hx, *(weight for layer in params for weight in layer)]
    fit = all(tensor.dtype in _BY_ONEDNN and tensor.device.type == "cpu" for tensor in tensors)
    fit = fit and hx[0].size(2) == hx[1].size(2)  # no projection
    return _onednn_lstm if fit and torch._C._get_mkldnn_enabled() and not _for_onnx.get() else _lstm


_BY_ONEDNN = (torch.float32, torch.float16, torch.bfloat16)
_LSTM = 2  # oneDNN's number for the kind of layer


def _onednn_lstm(
    input: torch.Tensor, hidden: Any, params: Any, has_biases: bool, reverse: bool = False
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """One layer in one direction, in training: the backward operator needs the workspace that it keeps."""
    weights = list(params) if has_biases else [*params, *(torch.zeros(params[0].shape[:1]) for _ in range(2))]
    first, cell = (state.unsqueeze(0).contiguous().float() for state in hidden)
    # Autocast would give it halves again, for which oneDNN lacks the backward kernel on most processors.
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        output, last, last_cell, _ = torch.ops.aten.mkldnn_rnn_layer.default(
            input.contiguous().float(),
            *(weight.float() for weight in weights[:4]),
            first,
            cell,
            reverse,
            [],
            _LSTM,
            first.size(2),
            1,
            has_biases,
            False,
            False,
            True,
        )
    return output.to(input.dtype), (last.squeeze(0).to(hidden[0].dtype), last_cell.squeeze(0).to(hidden[1].dtype))


def _lstm(
    input: torch.Tensor, hidden: Any, params: Any, has_biases: bool, reverse: bool = False
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    projection = list(params[4 if has_biases else 2 :])
    gates, wide, back = _prepared(input, hidden, params, params[2] + params[3] if has_biases else None)
    weights = [wide(weight) for weight in (params[1], *projection)]
    output, cells = _run(_LSTMLayer, reverse, gates, *map(wide, hidden), *weights)
    return back(output), (back(output[_last(reverse)]), back(cells[_last(reverse)]))


@replacement(decompositions, "one_layer_rnn")
def _gru_or_rnn(
    input: torch.Tensor, hidden: Any, params: Any, has_biases: bool, hidden_fn: Any, reverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if hidden_fn is _gru_cell:
        gates, wide, back = _prepared(input, [hidden], params, params[2] if has_biases else None)
        bias = wide(params[3]) if has_biases else gates.new_zeros(params[1].shape[0])
        output = _run(_GRULayer, reverse, gates, wide(hidden), wide(params[1]), bias)
    else:
        gates, wide, back = _prepared(input, [hidden], params, params[2] + params[3] if has_biases else None)
        output = _run(_RNNLayer, f"rnn_{hidden_fn}", reverse, gates, wide(hidden), wide(params[1]))
    return back(output), back(output[_last(reverse)])


@replacement(decompositions, "rnn_cell")
def _name_of_activation(nonlinearity: Callable[..., Any]) -> str:
    return "relu" if "relu" in getattr(nonlinearity, "__name__", str(nonlinearity)) else "tanh"


def _last(reverse: bool) -> int:
    return 0 if reverse else -1


_Cast = Callable[[torch.Tensor], torch.Tensor]


def _prepared(
    input: torch.Tensor, hidden: Sequence[torch.Tensor], params: Any, bias: torch.Tensor | None
) -> tuple[torch.Tensor, _Cast, _Cast]:
    """Returns what the inputs add to the gates of all steps, and casts to the type of the loop and back.

    The loop computes in fp32 at least: sums over many steps would lose what is small in halves.
    """
    gates = F.linear(input, params[0], bias)
    narrow = torch.promote_types(gates.dtype, hidden[0].dtype)
    wide = torch.promote_types(narrow, torch.float32)
    return gates.to(wide), lambda value: value.to(wide), lambda value: value.to(narrow)


class _Layer(torch.autograd.Function):
    """A layer in one direction, whose gradient is another loop."""

    made_of_operators = True
    """Its backward pass is found again whenever the layer is differentiated: none of the user's, who has to say so."""


def _run(layer: type[_Layer], *args: Any) -> Any:
    return layer.apply(*args)  # type: ignore[no-untyped-call]


def _loop(
    cell: str, reverse: bool, states: list[torch.Tensor], sequences: list[torch.Tensor], weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    found: list[torch.Tensor] = torch.ops.ort_trainer.steps.default(cell, reverse, states, sequences, weights)
    return found


def _before(first: torch.Tensor, sequence: torch.Tensor, reverse: bool) -> torch.Tensor:
    """Returns what every step found, of what the steps left: the first one found the initial state."""
    first = first.unsqueeze(0)
    # No size in between may be one less than the length: PyTorch would look whether it is 1.
    return torch.cat([sequence, first])[1:] if reverse else torch.cat([first, sequence])[:-1]


def _product(gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a weight that every step multiplies by: the sum over steps and batch."""
    return gradient.flatten(0, 1).t() @ value.flatten(0, 1)


class _LSTMLayer(_Layer):
    @staticmethod
    def forward(ctx: Any, reverse: bool, gates: Any, h: Any, c: Any, *weights: Any) -> Any:
        _, _, output, cells, activated = _loop("lstm", reverse, [h, c], [gates], list(weights))
        ctx.reverse = reverse
        ctx.save_for_backward(output, cells, activated, h, c, *weights)
        ctx.set_materialize_grads(False)
        return output, cells

    @staticmethod
    def backward(ctx: Any, d_output: Any, d_cells: Any) -> Any:
        output, cells, activated, h, c, *weights = ctx.saved_tensors
        d_output = torch.zeros_like(output) if d_output is None else d_output
        sequences = [d_output, activated, cells, _before(c, cells, ctx.reverse)]
        sequences += [] if d_cells is None else [d_cells]
        states = [torch.zeros_like(h), torch.zeros_like(c)]
        d_h, d_c, d_gates, *d_hidden = _loop("lstm_backward", not ctx.reverse, states, sequences, weights)
        d_weights = [_product(d_gates, _before(h, output, ctx.reverse))]
        for gradient in d_hidden:  # of a projection, whose operand o * tanh(c) is not kept
            d_weights.append(_product(gradient, activated.chunk(4, -1)[3] * cells.tanh()))
        return None, d_gates, d_h, d_c, *d_weights


class _GRULayer(_Layer):
    @staticmethod
    def forward(ctx: Any, reverse: bool, gates: Any, h: Any, weight: Any, bias: Any) -> Any:
        _, output, activated = _loop("gru", reverse, [h], [gates], [weight, bias])
        ctx.reverse = reverse
        ctx.save_for_backward(output, activated, h, weight)
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Any) -> Any:
        output, activated, h, weight = ctx.saved_tensors
        previous = _before(h, output, ctx.reverse)
        sequences = [d_output, activated, previous]
        d_h, d_gates, d_of_h = _loop("gru_backward", not ctx.reverse, [torch.zeros_like(h)], sequences, [weight])
        return None, d_gates, d_h, _product(d_of_h, previous), d_of_h.sum((0, 1))


class _RNNLayer(_Layer):
    @staticmethod
    def forward(ctx: Any, cell: str, reverse: bool, gates: Any, h: Any, weight: Any) -> Any:
        _, output = _loop(cell, reverse, [h], [gates], [weight])
        ctx.cell, ctx.reverse = cell, reverse
        ctx.save_for_backward(output, h, weight)
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Any) -> Any:
        output, h, weight = ctx.saved_tensors
        states = [torch.zeros_like(h)]
        d_h, d_gates = _loop(f"{ctx.cell}_backward", not ctx.reverse, states, [d_output, output], [weight])
        return None, None, d_gates, d_h, _product(d_gates, _before(h, output, ctx.reverse))


@translation(torch.ops.ort_trainer.steps.default)
def _scan(
    cell: str, reverse: bool, states: Sequence[Value], sequences: Sequence[Value], weights: Sequence[Value]
) -> Sequence[Value]:
    """A ``Scan`` whose body is one step; the weights are values of the graph around it."""
    maths = _Values(op.Constant(value=ir.tensor(1.0, dtype=states[0].dtype)))
    at_start = [_inner(value, f"state_{index}", value.shape) for index, value in enumerate(states)]
    at_step = [_inner(value, f"given_{index}", value.shape[1:]) for index, value in enumerate(sequences)]
    symbols = [[_Symbol(value, maths) for value in values] for values in (at_start, at_step, weights)]
    after, given = CELLS[cell](maths, *symbols)
    outputs: list[ir.Value] = []
    for symbol in (*after, *given):
        outputs.append(maths.node("Identity", symbol).value if symbol.value in outputs else symbol.value)
    body = ir.Graph([*at_start, *at_step], outputs, nodes=maths.nodes, name=cell)
    direction = int(reverse)
    attributes: dict[str, Any] = {
        "body": body,
        "num_scan_inputs": len(sequences),
        "scan_input_directions": [direction] * len(sequences),
        "scan_output_directions": [direction] * len(given),
    }
    found: Sequence[Value] = op.add(ir.node("Scan", [*states, *sequences], attributes, num_outputs=len(outputs)))
    return found


def _inner(value: ir.Value, name: str, shape: Any) -> ir.Value:
    return ir.Value(name=name, type=value.type, shape=ir.Shape(shape))


class _Symbol:
    """A value of the body, with operators."""

    def __init__(self, value: ir.Value, maths: _Values) -> None:
        self.value, self.maths = value, maths

    def __add__(self, other: _Symbol) -> _Symbol:
        return self.maths.node("Add", self, other)

    def __sub__(self, other: _Symbol) -> _Symbol:
        return self.maths.node("Sub", self, other)

    def __mul__(self, other: _Symbol) -> _Symbol:
        return self.maths.node("Mul", self, other)


class _Values:
    """The maths of a step as nodes of ONNX."""

    def __init__(self, one: ir.Value) -> None:
        self.nodes: list[ir.Node] = []
        self.one = _Symbol(one, self)

    def node(self, kind: str, *inputs: _Symbol, **attributes: Any) -> _Symbol:
        return self._nodes(kind, inputs, attributes, 1)[0]

    def _nodes(self, kind: str, inputs: Sequence[_Symbol], attributes: Any, count: int) -> list[_Symbol]:
        values = [symbol.value for symbol in inputs]
        node = ir.node(kind, values, attributes, num_outputs=count)
        for output in node.outputs:
            output.type = values[0].type
        self.nodes.append(node)
        return [_Symbol(output, self) for output in node.outputs]

    def addmm(self, bias: _Symbol | None, left: _Symbol, right: _Symbol, transposed: bool = False) -> _Symbol:
        operands = [left, right] if bias is None else [left, right, bias]
        return self.node("Gemm", *operands, transB=int(transposed))

    def chunk(self, value: _Symbol, count: int) -> list[_Symbol]:
        return self._nodes("Split", [value], {"axis": 1, "num_outputs": count}, count)

    def cat(self, values: Sequence[_Symbol]) -> _Symbol:
        return self.node("Concat", *values, axis=1)

    def sigmoid(self, value: _Symbol) -> _Symbol:
        return self.node("Sigmoid", value)

    def tanh(self, value: _Symbol) -> _Symbol:
        return self.node("Tanh", value)

    def relu(self, value: _Symbol) -> _Symbol:
        return self.node("Relu", value)

    def sign(self, value: _Symbol) -> _Symbol:
        return self.node("Sign", value)
