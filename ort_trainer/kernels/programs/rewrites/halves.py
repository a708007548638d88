"""Products of halves on processors without arithmetic for them."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch

from ....engine.programs.processor import slow_halves
from ....fx.values import Node

aten = torch.ops.aten

_PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    torch.ops.ort_trainer.steps.default,
)
# To widen one of these views, the viewed value is cast and viewed again, so that it is cast once for all its views.
_WHOLE = (
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
# A widened value takes twice the memory, so it is reused within this many operators, and made again after that.
_NEAR = 40


def widen_products(graph: torch.fx.Graph) -> None:
    """Computes products of halves in fp32 and rounds the result, on processors without arithmetic for halves::

        mm(x, t(weight))    =>    half(mm(float(x), t(float(weight))))

    On such processors, PyTorch's kernels for halves also add up in fp32, but element by element: 10 to 60 times slower.
    Operands and results are rounded as before, so the same values overflow: a weight's gradient above 65504 is infinite
    in float16, and the loss scaler must see that. The intermediate values of attention and recurrent layers are not
    rounded.
    """
    dtypes = slow_halves()
    if dtypes:
        widener = _Widener(graph, dtypes)
        for position, node in enumerate(list(graph.nodes)):
            if node.target in _PRODUCTS and any(map(widener.is_half, node.all_input_nodes)):
                widener.widen(node, position)


class _Widener:
    def __init__(self, graph: torch.fx.Graph, dtypes: Collection[torch.dtype]) -> None:
        self._graph, self._dtypes = graph, dtypes
        self._wide: dict[Node, tuple[int, Node]] = {}

    def is_half(self, node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.dtype in self._dtypes

    def widen(self, node: Node, position: int) -> None:
        """Casts the operands and the result of a product."""
        with self._graph.inserting_before(node):
            args, kwargs = torch.fx.map_arg(
                (node.args, node.kwargs), lambda value: self._widened(value, position) if self.is_half(value) else value
            )
            product = self._wide_call(node.target, args, kwargs, node)
            if isinstance(node.meta["val"], torch.Tensor):
                self._replace(node, product)
            else:
                for part in list(node.users):
                    self._replace(part, self._wide_call(operator.getitem, (product, part.args[1]), {}, part))
        self._graph.erase_node(node)

    def _replace(self, node: Node, wide: Node) -> None:
        """Replaces a result, or a part of one, with the rounded wide result."""
        dtype = node.meta["val"].dtype
        if dtype in self._dtypes:
            wide = self._cast(wide, dtype, node)
        node.replace_all_uses_with(wide)
        if node.target is operator.getitem:
            self._graph.erase_node(node)

    def _widened(self, node: Node, position: int) -> Node:
        """Returns the fp32 copy of a value: the last one, unless it was made long before."""
        recent = self._wide.get(node)
        if recent is not None and position - recent[0] < _NEAR:
            return recent[1]
        if node.target in _WHOLE:
            base = self._widened(node.all_input_nodes[0], position)
            wide = self._wide_call(node.target, (base, *node.args[1:]), node.kwargs, node)
        else:
            wide = self._cast(node, torch.float32, node)
        self._wide[node] = position, wide
        return wide

    def _wide_call(self, target: Any, args: Any, kwargs: Any, origin: Node) -> Node:
        """Inserts the fp32 version of an operator."""
        new = self._graph.call_function(target, args, kwargs)
        new.meta.update(origin.meta)
        new.meta["val"] = self._wide_fake(origin.meta["val"])
        return new

    def _cast(self, value: Node, dtype: torch.dtype, origin: Node) -> Node:
        new = self._graph.call_function(aten._to_copy.default, (value,), {"dtype": dtype})
        new.meta.update(origin.meta)
        new.meta["val"] = value.meta["val"].to(dtype)
        return new

    def _wide_fake(self, value: Any) -> Any:
        """Returns fake tensors with halves made fp32."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._wide_fake, value))
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in self._dtypes else value
