"""LSTM, GRU and RNN: one operator for each layer and direction, for sequences of any length.

torch 2.13 unrolls them, which fixes the length. Here a layer is a loop over its steps (``ort_trainer::steps``), and so
is its backward pass: a loop in Python on PyTorch's kernels, a ``Scan`` in ONNX. On PyTorch's kernels, oneDNN computes
an LSTM in fp32, forward and backward. The linear recurrence of state-space models (Mamba) is such a loop, too.

Only the product with the previous state is inside the loop; one product computes the inputs' part for all steps::

    input (time, batch, features) -> gates (time, batch, gates x hidden) -> loop -> output (time, batch, hidden)

The steps themselves are in ``engine/programs/recurrent.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch._decomp import decompositions

from ..engine.programs import operators  # noqa: F401 - which defines the package's own
from ..engine.programs.recurrent import CELLS
from ..fx.operator_table import Value, decomposition, ir, op, replacement, translation

_for_onnx: ContextVar[bool] = ContextVar("for_onnx", default=False)
_gru_cell = decompositions.gru_cell


@contextlib.contextmanager
def layers_for_onnx() -> Iterator[None]:
    """Disables oneDNN's layer within the context: its backward operator has no translation."""
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
    """Runs the layers. (PyTorch's own function checks their number wrongly, and omits the dropout between them.)"""
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
    """Picks oneDNN's layer where it applies, with halves in fp32; PyTorch itself does so only without gradients."""
    tensors = [input, *hx, *(weight for layer in params for weight in layer)]
    fit = all(tensor.dtype in _BY_ONEDNN and tensor.device.type == "cpu" for tensor in tensors)
    fit = fit and hx[0].size(2) == hx[1].size(2)  # no projection
    fit = fit and hx[0].size(1) != 0  # oneDNN refuses an empty batch
    # The second alone is True without oneDNN, too.
    usable = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled  # type: ignore[no-untyped-call]
    return _onednn_lstm if fit and usable and not _for_onnx.get() else _lstm


_BY_ONEDNN = (torch.float32, torch.float16, torch.bfloat16)
_LSTM = 2  # oneDNN's code for this kind of layer


def _onednn_lstm(
    input: torch.Tensor, hidden: Any, params: Any, has_biases: bool, reverse: bool = False
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Runs one layer in one direction, in training mode: the backward operator needs the workspace that this keeps."""
    weights = list(params) if has_biases else [*params, *(torch.zeros(params[0].shape[:1]) for _ in range(2))]
    first, cell = (state.unsqueeze(0).contiguous().float() for state in hidden)
    # Autocast would cast to halves again, for which oneDNN has no backward kernel on most processors.
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        output, last, last_cell, _ = torch.ops.aten.mkldnn_rnn_layer.default(
            input.contiguous().float(),
            *(weight.float() for weight in weights[:4]),
            first,
            cell,
            reverse,
            [],  # batch_sizes
            _LSTM,
            first.size(2),  # hidden_size
            1,  # num_layers
            has_biases,
            False,  # bidirectional
            False,  # batch_first
            True,  # train
        )
    return output.to(input.dtype), (last.squeeze(0).to(hidden[0].dtype), last_cell.squeeze(0).to(hidden[1].dtype))


def _lstm(
    input: torch.Tensor, hidden: Any, params: Any, has_biases: bool, reverse: bool = False
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Runs one layer in one direction as a loop; ``params`` are W_ih, W_hh, perhaps b_ih, b_hh, perhaps W_hr."""
    projection = list(params[4 if has_biases else 2 :])
    gates, wide, back = _prepared(input, hidden, params, params[2] + params[3] if has_biases else None)
    weights = [wide(weight) for weight in (params[1], *projection)]
    output, cells = _run(_LSTMLayer, reverse, gates, *map(wide, hidden), *weights)
    return back(output), (back(output[_last(reverse)]), back(cells[_last(reverse)]))


@replacement(decompositions, "one_layer_rnn")
def _gru_or_rnn(
    input: torch.Tensor, hidden: Any, params: Any, has_biases: bool, hidden_fn: Any, reverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the same for a GRU or an RNN: ``hidden_fn`` is PyTorch's GRU cell, or the name of an RNN's activation."""
    if hidden_fn is _gru_cell:
        # n = tanh(W_in x + b_in + r * (W_hn h + b_hn)): r multiplies the second bias, so the two can't be added.
        gates, wide, back = _prepared(input, [hidden], params, params[2] if has_biases else None)
        bias = wide(params[3]) if has_biases else gates.new_zeros(params[1].shape[0])
        output = _run(_GRULayer, reverse, gates, wide(hidden), wide(params[1]), bias)
    else:
        gates, wide, back = _prepared(input, [hidden], params, params[2] + params[3] if has_biases else None)
        output = _run(_RNNLayer, f"rnn_{hidden_fn}", reverse, gates, wide(hidden), wide(params[1]))
    return back(output), back(output[_last(reverse)])


@replacement(decompositions, "rnn_cell")
def _name_of_activation(nonlinearity: Callable[..., Any]) -> str:
    """Returns an RNN's activation by name, in place of its cell."""
    return "relu" if "relu" in getattr(nonlinearity, "__name__", str(nonlinearity)) else "tanh"


def _last(reverse: bool) -> int:
    """Returns the index of the step that a loop computes last."""
    return 0 if reverse else -1


_Cast = Callable[[torch.Tensor], torch.Tensor]


def _prepared(
    input: torch.Tensor, hidden: Sequence[torch.Tensor], params: Any, bias: torch.Tensor | None
) -> tuple[torch.Tensor, _Cast, _Cast]:
    """Returns the inputs' contribution to the gates of all steps, and casts to the loop's dtype and back.

    The loop computes in fp32 or wider: in halves, sums over many steps would lose small terms.
    """
    gates = F.linear(input, params[0], bias)
    narrow = torch.promote_types(gates.dtype, hidden[0].dtype)
    wide = torch.promote_types(narrow, torch.float32)
    return gates.to(wide), lambda value: value.to(wide), lambda value: value.to(narrow)


class _Layer(torch.autograd.Function):
    """A layer in one direction, whose gradient is another loop."""

    made_of_operators = True
    """Exempts the layer from the check for the user's custom backward passes: this one is found again when needed."""


def _run(layer: type[_Layer], *args: Any) -> Any:
    return layer.apply(*args)  # type: ignore[no-untyped-call]


def _loop(
    cell: str, reverse: bool, states: list[torch.Tensor], sequences: list[torch.Tensor], weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Runs a cell step by step; returns the states after the last step, then what it computes at each step."""
    results: list[torch.Tensor] = torch.ops.ort_trainer.steps.default(cell, reverse, states, sequences, weights)
    return results


def _before(first: torch.Tensor, sequence: torch.Tensor, reverse: bool) -> torch.Tensor:
    """Returns the states before all steps, from the initial state and the states after the steps."""
    first = first.unsqueeze(0)
    # No intermediate size may be length - 1: PyTorch would check whether that is 1.
    return torch.cat([sequence, first])[1:] if reverse else torch.cat([first, sequence])[:-1]


def _product(gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a weight that every step multiplies by: the sum over steps and batch."""
    return gradient.flatten(0, 1).t() @ value.flatten(0, 1)


class _LSTMLayer(_Layer):
    """gates (time, batch, 4 x hidden) and the first h and c -> h and c after each step, (time, batch, hidden)."""

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
        for gradient in d_hidden:  # for a projection, whose operand o * tanh(c) is not kept
            d_weights.append(_product(gradient, activated.chunk(4, -1)[3] * cells.tanh()))
        return None, d_gates, d_h, d_c, *d_weights


class _GRULayer(_Layer):
    """gates (time, batch, 3 x hidden) and the first h -> h after each step, (time, batch, hidden)."""

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
        # d_of_h is the gradient of W h + b; in the third gate it has the factor r, which d_gates lacks.
        d_h, d_gates, d_of_h = _loop("gru_backward", not ctx.reverse, [torch.zeros_like(h)], sequences, [weight])
        return None, d_gates, d_h, _product(d_of_h, previous), d_of_h.sum((0, 1))


class _RNNLayer(_Layer):
    """gates (time, batch, hidden) and the first h -> h after each step, (time, batch, hidden)."""

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


_scans = importlib.import_module("torch._higher_order_ops.associative_scan")  # a function there has the same name
_associative_scan, _is_exporting = _scans.associative_scan, torch.compiler.is_exporting


@replacement(_scans, "associative_scan")
def _scan_of_pairs(
    combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """Runs a linear recurrence step by step, for any length; PyTorch's own function would fix the length."""
    if not isinstance(xs, (tuple, list)) or len(xs) != 2 or not _is_linear(combine_fn):
        return _associative_scan(combine_fn, xs, dim, reverse, combine_mode)
    factors, terms = (x.movedim(dim, 0) for x in xs)
    if reverse:
        factors, terms = factors.flip(0), terms.flip(0)
    scanned = factors.cumprod(0), torch.ops.ort_trainer.linear_recurrence(factors, terms)
    scanned = tuple((value.flip(0) if reverse else value).movedim(0, dim) for value in scanned)
    return list(scanned) if isinstance(xs, list) else scanned


def _is_linear(combine: Callable[..., Any]) -> bool:
    """Returns whether a function composes two steps ``a * h + b``, each given as a pair (a, b)."""
    try:
        return all(tuple(combine((a, b), (c, d))) == (a * c, c * b + d) for a, b, c, d in ((2, 3, 5, 7), (-1, 4, 9, 6)))
    except (TypeError, AttributeError, ValueError):  # it needs tensors
        return False


@replacement(torch.compiler, "is_exporting")
def _is_exporting_without_scan() -> bool:
    """Returns False to transformers' Mamba, which avoids the scan in exports because it had no ONNX translation."""
    # Frame 1 is transformers' is_torchdynamo_exporting(), which frame 2 calls to choose.
    chooses_scan = "associative_scan" in sys._getframe(2).f_code.co_varnames
    return not chooses_scan and _is_exporting()


def _keep_states(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _linear_recurrence_backward(ctx: Any, d_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of a and b in h_t = a_t h_(t-1) + b_t.

    They are d_t h_(t-1) and d_t, the gradient of h_t, with d_t = d_output_t + a_(t+1) d_(t+1).
    """
    factors, states = ctx.saved_tensors
    first = torch.zeros_like(states[0])
    d_states = _loop("linear_backward", True, [first], [d_output, factors], [])[-1]
    return d_states * _before(first, states, reverse=False), d_states


torch.library.register_autograd(
    "ort_trainer::linear_recurrence", _linear_recurrence_backward, setup_context=_keep_states
)


@decomposition(torch.ops.ort_trainer.linear_recurrence.default)
def _linear_recurrence(factors: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    return _loop("linear", False, [torch.zeros_like(terms[0])], [factors, terms], [])[-1]


@translation(torch.ops.ort_trainer.steps.default)
def _scan(
    cell: str, reverse: bool, states: Sequence[Value], sequences: Sequence[Value], weights: Sequence[Value]
) -> Sequence[Value]:
    """Writes a ``Scan`` whose body is one step; the weights are values of the outer graph."""
    maths = _Values(op.Constant(value=ir.tensor(1.0, dtype=states[0].dtype)))
    at_start = [_inner(value, f"state_{index}", value.shape) for index, value in enumerate(states)]
    at_step = [_inner(value, f"given_{index}", value.shape[1:]) for index, value in enumerate(sequences)]
    symbols = [[_Symbol(value, maths) for value in values] for values in (at_start, at_step, weights)]
    after, per_step = CELLS[cell](maths, *symbols)
    outputs: list[Value] = []
    for symbol in (*after, *per_step):
        outputs.append(maths.node("Identity", symbol).value if symbol.value in outputs else symbol.value)
    body = ir.Graph([*at_start, *at_step], outputs, nodes=maths.nodes, name=cell)
    direction = int(reverse)
    attributes: dict[str, Any] = {
        "body": body,
        "num_scan_inputs": len(sequences),
        "scan_input_directions": [direction] * len(sequences),
        "scan_output_directions": [direction] * len(per_step),
    }
    results: Sequence[Value] = op.add(ir.node("Scan", [*states, *sequences], attributes, num_outputs=len(outputs)))
    return results


def _inner(value: Value, name: str, shape: Any) -> Value:
    return ir.Value(name=name, type=value.type, shape=ir.Shape(shape))


class _Symbol:
    """A value of the body, with arithmetic operators."""

    def __init__(self, value: Value, maths: _Values) -> None:
        self.value, self.maths = value, maths

    def __add__(self, other: _Symbol) -> _Symbol:
        return self.maths.node("Add", self, other)

    def __sub__(self, other: _Symbol) -> _Symbol:
        return self.maths.node("Sub", self, other)

    def __mul__(self, other: _Symbol) -> _Symbol:
        return self.maths.node("Mul", self, other)


class _Values:
    """Writes the maths of a step as ONNX nodes."""

    def __init__(self, one: Value) -> None:
        self.nodes: list[Any] = []
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

    def relu_backward(self, gradient: _Symbol, result: _Symbol) -> _Symbol:
        zero = self.node("Sub", self.one, self.one)
        # No result is below 0. (Within a Scan, ONNX Runtime infers no shape for LessOrEqual.)
        closed = self.node("Equal", result, zero)
        closed.value.type = ir.TensorType(ir.DataType.BOOL)
        passed = self.node("Where", closed, zero, gradient)
        passed.value.type = gradient.value.type
        return passed
