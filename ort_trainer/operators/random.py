"""Operators that draw random numbers, and what replaces them once the numbers are inputs of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..core.errors import ExportError
from ..engine.programs.operators import LIBRARY
from ..fx.explain import source_line
from ..fx.operator_table import Value, ir, keep, op, random_operator, replacement, translation
from ..graph.random_inputs import Lifter
from .dtypes import number

aten, ort_ops = torch.ops.aten, torch.ops.ort_trainer

# By default a distribution reads the values of its parameters to validate them.
replacement(torch.distributions.Distribution, "_validate_args")(False)

# Of dropout whose rate is an input of the graph.
_library: Any = torch.library.Library(LIBRARY, "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("dropout_backward(Tensor gradient, Tensor mask, Tensor kept) -> Tensor")
_library.impl("dropout_backward", lambda gradient, *_: torch.empty_like(gradient), "Meta")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1], inputs[1])


def _dropout_backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
    return ort_ops.dropout_backward(gradient, *ctx.saved_tensors), None, None


torch.library.register_autograd(f"{LIBRARY}::dropout", _dropout_backward, setup_context=_save, lib=_library)
# Replaced together with their dropout.
_BACKWARD = (aten.native_dropout_backward.default, ort_ops.dropout_backward.default)
keep(*_BACKWARD)


@random_operator(aten.native_dropout.default)
def _dropout(lifter: Lifter, node: torch.fx.Node) -> None:
    """Replaces ``native_dropout`` with a product with noise, 0 or 1 / (1 - p): what PyTorch computes on the CPU."""
    value, probability, *train = cast("tuple[Any, ...]", node.args)
    active = probability and (train[0] is not False if train else True)
    with lifter.graph.inserting_before(node):
        _replace_dropout(lifter, node, _noise(lifter, node, value, 1.0 - probability) if active else None)


@random_operator(ort_ops.dropout.default)
def _dropout_of_rate(lifter: Lifter, node: torch.fx.Node) -> None:
    """Does the same with a probability that is an input."""
    value, kept, fast = cast("tuple[Any, ...]", node.args)
    with lifter.graph.inserting_before(node):
        _replace_dropout(lifter, node, _noise(lifter, node, value, kept, fast))


def _replace_dropout(lifter: Lifter, node: torch.fx.Node, noise: _Noise | None) -> None:
    """Replaces the results of a dropout, and its backward operators; without noise, it passes its input on."""
    value, gets = cast("torch.fx.Node", node.args[0]), {user.args[1]: user for user in node.users}
    if 0 in gets:
        gets[0].replace_all_uses_with(value if noise is None else noise.apply(value, False))
    if 1 not in gets:
        return
    for user in list(gets[1].users):
        if user.target in _BACKWARD and noise is not None:
            with lifter.graph.inserting_before(user):
                user.replace_all_uses_with(noise.apply(user.args[0], True))
    if gets[1].users:
        mask = lifter.call(aten.ones_like.default, value, dtype=torch.bool) if noise is None else noise.mask()
        gets[1].replace_all_uses_with(mask)


@dataclass(frozen=True)
class _Noise:
    """The noise of one dropout: multiplies a tensor by it (in the backward pass or not), and gives its mask."""

    apply: Callable[[Any, bool], torch.fx.Node]
    mask: Callable[[], torch.fx.Node]


def _noise(lifter: Lifter, node: torch.fx.Node, value: torch.fx.Node, kept: Any, fast: bool = True) -> _Noise:
    """Draws noise; ``kept`` is a number, or the placeholder of one."""
    fake, call = value.meta["val"], lifter.call
    if kept == 0:  # PyTorch draws nothing
        return _Noise(
            lambda x, _: call(aten.mul.Tensor, x, 0.0), lambda: call(aten.zeros_like.default, value, dtype=torch.bool)
        )
    rate = kept if isinstance(kept, torch.fx.Node) else None
    overload, p = ("default", kept) if rate is None else ("rate", 0.0)
    factor: Any = 1.0 / kept if rate is None else rate  # the overloads compute it
    if lifter.draws.by_device or not (lifter.draws.fast and fast):
        noise = lifter.draw(node, fake, "bernoulli", (p, 1.0 if rate else factor), rate)
        return _Noise(lambda x, _: call(aten.mul.Tensor, x, noise), lambda: call(aten.ne.Scalar, noise, 0))
    number, lifter.masks = lifter.masks, lifter.masks + 1
    if lifter.draws.within:
        count = call(aten.sym_numel.default, value)
        packed = call(getattr(ort_ops.draw_mask, overload), lifter.key(), count, number, kept)
        return _Noise(
            lambda x, _: call(getattr(ort_ops.apply_mask, overload), x, packed, factor),
            lambda: call(ort_ops.unpack_mask.default, packed, value),
        )
    mask = lifter.draw(node, torch.empty_like(fake, dtype=torch.uint8), "mask", (p, float(number)), rate)
    return _Noise(
        lambda x, backward: call(
            aten.mul.Tensor, x, call(getattr(ort_ops.noise, overload), mask, factor, x.meta["val"].dtype, backward)
        ),
        lambda: call(aten.ne.Scalar, mask, 0),
    )


@translation(ort_ops.noise.default, ort_ops.noise.rate)
def _translate_noise(mask: Value, factor: float | Value, dtype: int, backward: bool) -> Value:
    """Turns one byte per element into 0 or the factor, in one pass over the memory.

    The backward pass repeats this with an explicit zero point of 0. Without that difference, it would be merged with
    the forward pass's noise, which would be kept until then at four bytes per element. In place of the factor, ``rate``
    has the probability of being kept.
    """
    if isinstance(factor, float):
        scale = op.Constant(value_float=factor)
    else:
        scale = op.Cast(op.Reciprocal(factor), to=ir.DataType.FLOAT)
    if backward:
        noise = op.DequantizeLinear(mask, scale, op.Cast(op.Constant(value_int=0), to=ir.DataType.UINT8))
    else:
        noise = op.DequantizeLinear(mask, scale)
    return noise if dtype == ir.DataType.FLOAT else op.Cast(noise, to=dtype)


@translation(ort_ops.dropout.default)
def _translate_dropout(value: Value, kept: Value, fast: bool) -> tuple[Value, Value]:
    """Serves evaluation, if dropout is active there, too."""
    rate = op.Sub(op.Constant(value_float=1.0), op.Cast(kept, to=ir.DataType.FLOAT))
    dropped, mask = op.Dropout(value, rate, op.Cast(op.Constant(value_int=1), to=ir.DataType.BOOL))
    return dropped, mask


def _replace(kind: str) -> Callable[[Lifter, torch.fx.Node], None]:
    """Returns the handler of operators whose results are the random numbers as they are."""

    def handler(lifter: Lifter, node: torch.fx.Node) -> None:
        node.replace_all_uses_with(lifter.draw(node, node.meta["val"], kind))

    return handler


random_operator(aten.rand.default, aten.rand_like.default)(_replace("uniform"))
random_operator(aten.randn.default, aten.randn_like.default)(_replace("normal"))
random_operator(aten.randperm.default)(_replace("permutation"))


@random_operator(aten.bernoulli.p)
def _bernoulli_p(lifter: Lifter, node: torch.fx.Node) -> None:
    probability = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    # This was bernoulli_(), which fills an existing tensor; the node's own value has lost that tensor's memory order.
    (filled,) = cast("tuple[torch.fx.Node]", node.args[:1])
    noise = lifter.draw(node, filled.meta["val"], "bernoulli", (float(probability), 1.0))  # type: ignore[arg-type]
    node.replace_all_uses_with(noise)


@random_operator(aten.bernoulli.default)
def _bernoulli(lifter: Lifter, node: torch.fx.Node) -> None:
    """Handles computed probabilities: 1 where a uniform number is below the probability."""
    (probability,) = node.args[:1]
    uniform = lifter.draw(node, node.meta["val"], "uniform")
    with lifter.graph.inserting_before(node):
        below = lifter.call(aten.lt.Tensor, uniform, probability)
        node.replace_all_uses_with(lifter.call(aten._to_copy.default, below, dtype=node.meta["val"].dtype))


def _integers(first: int) -> Callable[[Lifter, torch.fx.Node], None]:
    """Returns a handler. ``first`` is the position of the first bound; a single bound is the upper one."""

    def handler(lifter: Lifter, node: torch.fx.Node) -> None:
        bounds = [bound for bound in node.args[first : first + 2] if not isinstance(bound, (list, tuple))]
        low, high = bounds if len(bounds) == 2 else (0, bounds[0])
        if not isinstance(low, int) or not isinstance(high, int):
            raise ExportError(f"{node.target} supports only bounds that are plain numbers: {source_line(node)}")
        node.replace_all_uses_with(lifter.draw(node, node.meta["val"], "integers", (float(low), float(high))))

    return handler


random_operator(aten.randint.default, aten.randint.low)(_integers(0))
random_operator(aten.randint_like.default, aten.randint_like.low_dtype)(_integers(1))


def _or_defaults(arguments: tuple[Any, ...], defaults: tuple[float, float]) -> tuple[Any, Any]:
    """Returns up to two arguments, followed by defaults for those that are missing."""
    return (arguments[0] if arguments else defaults[0]), (arguments[1] if len(arguments) > 1 else defaults[1])


@random_operator(aten.normal_functional.default)
def _normal_functional(lifter: Lifter, node: torch.fx.Node) -> None:
    mean, deviation = _or_defaults(node.args[1:3], (0.0, 1.0))
    _affine(lifter, node, "normal", deviation, mean)


_uniform_ = torch.Tensor.uniform_


@replacement(torch.Tensor, "uniform_")
def _uniform_between(input: torch.Tensor, low: Any = 0.0, high: Any = 1.0, **named: Any) -> torch.Tensor:
    """Fills a tensor with uniform numbers between bounds; PyTorch reads them if they are tensors."""
    low, high = named.pop("from", low), named.pop("to", high)
    if not isinstance(low, torch.Tensor) and not isinstance(high, torch.Tensor):
        return _uniform_(input, low, high, **named)
    return input.copy_(_uniform_(torch.empty_like(input), **named) * (high - low) + low)


@random_operator(aten.uniform.default)
def _uniform(lifter: Lifter, node: torch.fx.Node) -> None:
    low, high = _or_defaults(node.args[1:3], (0.0, 1.0))
    _affine(lifter, node, "uniform", high - low, low)


@random_operator(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def _normal_tensors(lifter: Lifter, node: torch.fx.Node) -> None:
    mean, deviation = _or_defaults(node.args[:2], (0.0, 1.0))
    _affine(lifter, node, "normal", deviation, mean)


@random_operator(aten.normal.float_float)
def _normal_numbers(lifter: Lifter, node: torch.fx.Node) -> None:
    mean, deviation = node.args[:2]
    _affine(lifter, node, "normal", deviation, mean)


@translation(aten.uniform.default)
def _translate_uniform(value: Value, low: float = 0.0, high: float = 1.0, generator: None = None) -> Value:
    """Serves evaluation, where ONNX Runtime draws the numbers; so do the translations below."""
    return op.RandomUniformLike(value, low=low, high=high)


@translation(aten.bernoulli.default)
def _translate_bernoulli(probability: Value, generator: None = None) -> Value:
    """Returns 1 where a uniform number is below the probability; ONNX's Bernoulli does where it is greater."""
    return op.CastLike(op.Less(op.RandomUniformLike(probability), probability), probability)


@translation(aten.exponential.default)
def _translate_exponential(value: Value, rate: float = 1.0, generator: None = None) -> Value:
    """Returns -log(1 - u) / rate; as in PyTorch it is never 0, because a Gumbel distribution takes its logarithm."""
    least = 2.0**-24
    return op.Mul(
        op.Neg(op.Log(op.RandomUniformLike(value, low=least, high=1.0 - least))), number(1.0 / rate, value.dtype)
    )


@translation(aten.randperm.default)
def _translate_randperm(n: Any, dtype: int = -1, **placement: Any) -> Value:
    """Returns the sort order of uniform numbers."""
    size = op.Constant(value_ints=[n]) if isinstance(n, int) else op.Reshape(n, [1])
    _, order = op.TopK(op.RandomUniformLike(op.ConstantOfShape(size), dtype=ir.DataType.DOUBLE), size)
    return order if dtype in (-1, ir.DataType.INT64) else op.Cast(order, to=dtype)


@random_operator(aten.exponential.default)
def _exponential(lifter: Lifter, node: torch.fx.Node) -> None:
    rate = node.args[1] if len(node.args) > 1 else 1.0
    noise = lifter.draw(node, node.meta["val"], "exponential", (float(rate),))  # type: ignore[arg-type]
    node.replace_all_uses_with(noise)


def _affine(lifter: Lifter, node: torch.fx.Node, kind: str, factor: Any, offset: Any) -> None:
    """Replaces a random operator with noise * factor + offset."""
    noise = lifter.draw(node, node.meta["val"], kind)
    with lifter.graph.inserting_before(node):
        scaled = lifter.call(aten.mul.Tensor, noise, factor)
        node.replace_all_uses_with(lifter.call(aten.add.Tensor, scaled, offset))
