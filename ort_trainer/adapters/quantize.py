"""``quantize``: linear layers whose weights are stored in 8 or 4 bits, as a base for adapters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import nn

from ..core.errors import shown
from ..core.quantized import check_kind, int4_numbers, int8_rows
from .lora import matching

if TYPE_CHECKING:
    import onnx

_BLOCKS = (32, 64, 128)


@overload
def quantize(
    model: onnx.ModelProto | str | os.PathLike[str], kind: str, block: int = 32, keep: Sequence[str] = ()
) -> onnx.ModelProto: ...
@overload
def quantize(model: nn.Module, kind: str, block: int = 32, keep: Sequence[str] = ()) -> nn.Module: ...
def quantize(model: Any, kind: str, block: int = 32, keep: Sequence[str] = ()) -> Any:
    """Rounds the weights of a model's linear layers, which can't be trained then; adapters can, beside them.

    Rounding is symmetric around zero: in 8 bits with a scale for each output, in 4 bits with a scale for each block of
    inputs of an output. A step computes the floats of one layer at a time.

    In an ONNX model, 8 bits are a ``DequantizeLinear`` before the product, and 4 bits a ``MatMulNBits``, which ONNX
    Runtime computes without the floats. Weights that other nodes read too, such as a tied embedding, stay. A PyTorch
    model is changed in place: a :class:`QuantizedLinear` replaces each ``torch.nn.Linear``.

    Args:
        model: An ONNX model, which is not changed, the path of one, or a PyTorch model.
        kind: ``int8`` or ``int4``.
        block: The number of weights that share a scale in 4 bits: 32, 64 or 128.
        keep: Layers to leave as they are, such as a classifier that is to be trained: paths, or their last parts.

    Returns:
        The model.

    Raises:
        TypeError: If the model is neither of these.
        ValueError: If ``kind`` or ``block`` is none of the above, ``keep`` matches nothing, or the model has no linear
            layer.
    """
    check_kind(kind)
    if isinstance(block, bool) or not isinstance(block, int) or block not in _BLOCKS:
        raise ValueError(f"block must be one of {list(_BLOCKS)}, but {shown(block)} was given")
    if isinstance(model, nn.Module):
        return _in_pytorch(model, kind, block, keep)
    from .quantize_onnx import in_onnx  # onnx takes long to import

    quantized = in_onnx(model, kind, block, lambda layers: _kept(layers, keep))
    if quantized is None:
        raise _nothing()
    return quantized


def _kept(layers: Sequence[str], keep: Sequence[str]) -> set[str]:
    """Returns the layers that some names leave out."""
    return {*matching(keep, layers, "keep")} if keep else set()


def _nothing() -> ValueError:
    return ValueError("the model has no linear layer with floats of 32 bits, so there is nothing to quantize")


def _in_pytorch(model: nn.Module, kind: str, block: int, keep: Sequence[str]) -> nn.Module:
    if type(model) is nn.Linear:
        return QuantizedLinear(model, kind, block)
    kept = _kept([name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)], keep)
    tied = [id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)]
    chosen = [
        (name, layer)
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
        and name not in kept
        and layer.weight.dtype == torch.float32
        and tied.count(id(layer.weight)) == 1
    ]
    if not chosen:
        raise _nothing()
    quantized = {layer: QuantizedLinear(layer, kind, block) for _, layer in chosen}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if layer in quantized:
            model.set_submodule(name, quantized[layer])
    return model


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is stored in 8 or 4 bits, as :func:`quantize` makes it.

    Args:
        layer: The layer.
        kind: ``int8`` or ``int4``.
        block: The number of weights that share a scale in 4 bits.

    Attributes:
        weight: The integers, frozen, int8: [out, in], or two of 4 bits in a byte, [out, blocks * block / 2].
        scale: The scales, frozen: [out, 1], or [out, blocks, 1].
        bias: The layer's bias, or None.
    """

    def __init__(self, layer: nn.Linear, kind: str, block: int = 32) -> None:
        check_kind(kind)
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = layer.in_features, layer.out_features, kind
        floats = layer.weight.detach().float().numpy(force=True)
        if kind == "int8":
            numbers, scale = int8_rows(floats)
        else:
            numbers, scale = int4_numbers(floats, block)
            # A byte has a number of each half of the row: halves are put together faster than pairs.
            first, second = np.split(numbers.reshape(len(numbers), -1), 2, axis=1)
            numbers = first | (second << 4)
        device = layer.weight.device
        # As int8 in any case: transformers' T5 converts its activations to the type of some weights, except int8.
        self.weight = nn.Parameter(torch.from_numpy(numbers.view(np.int8)).to(device), requires_grad=False)
        self.scale = nn.Parameter(torch.from_numpy(scale[..., None]).to(device), requires_grad=False)
        self.bias = layer.bias

    def floats(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the weight that the integers stand for, of shape [out, in]."""
        if self.kind == "int8":
            return self.weight.to(dtype) * self.scale.to(dtype)
        numbers = torch.cat([self.weight & 15, (self.weight >> 4) & 15], 1).view(*self.scale.shape[:2], -1)
        floats = (numbers.to(dtype) - 8) * self.scale.to(dtype)
        return floats.flatten(1)[:, : self.in_features]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns ``input @ weight.T + bias``."""
        return nn.functional.linear(input, self.floats(input.dtype), self.bias)

    def extra_repr(self) -> str:
        """Returns the sizes and the kind, for ``repr``."""
        return f"{super().extra_repr()}, kind={self.kind!r}"
