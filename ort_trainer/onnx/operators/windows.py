"""Where the windows of convolutions and pools lie on their input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..node_table import Node
from ..values import Number

greatest: Any = torch.sym_max
"""The greater of two numbers that may be symbolic."""
least: Any = torch.sym_min
"""The smaller of two numbers that may be symbolic."""


class Windows:
    """The windows of one node.

    Attributes:
        sizes: The sizes of the input in each spatial dimension.
        kernel: The number of elements in a window, in each dimension.
        strides: The distance of two windows.
        dilations: The distance of two elements in a window.
        extents: The distance of the first and the last element in a window, plus 1.
        before: The padding before the input.
        after: The padding after it.
    """

    def __init__(
        self,
        sizes: Sequence[Number],
        kernel: Sequence[int],
        strides: Sequence[int] | None,
        dilations: Sequence[int] | None,
    ) -> None:
        rank = len(sizes)
        self.sizes, self.kernel = list(sizes), list(kernel)
        self.strides, self.dilations = list(strides or [1] * rank), list(dilations or [1] * rank)
        self.extents = [(size - 1) * step + 1 for size, step in zip(self.kernel, self.dilations, strict=True)]
        self.before: list[Number] = [0] * rank
        self.after: list[Number] = [0] * rank

    @property
    def symmetric(self) -> bool:
        """Whether the padding is a fixed number, not negative, and the same on both sides."""
        pairs = zip(self.before, self.after, strict=True)
        return all(isinstance(a, int) and isinstance(b, int) and a == b >= 0 for a, b in pairs)

    def counts(self, ceil: bool) -> list[Number]:
        """Returns the number of windows in each dimension.

        Args:
            ceil: Whether a last window may extend beyond the padding, if it begins on the input or on the padding
                before it.
        """
        counts = []
        for i, size in enumerate(self.sizes):
            rest, stride = size + self.before[i] + self.after[i] - self.extents[i], self.strides[i]
            if ceil:
                counts.append(least((rest + stride - 1) // stride + 1, (size + self.before[i] + stride - 1) // stride))
            else:
                counts.append(rest // stride + 1)
        return counts

    def needed(self, ceil: bool) -> list[Number]:
        """Returns the padding after the input that the last windows need; negative if they don't reach its end."""
        return [
            (count - 1) * stride + extent - size - before
            for count, stride, extent, size, before in zip(
                self.counts(ceil), self.strides, self.extents, self.sizes, self.before, strict=True
            )
        ]


def windows_of(
    x: torch.Tensor,
    kernel: Sequence[int],
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    node: Node,
) -> Windows:
    """Returns the windows on an input of batch, channels and 1 to 3 spatial dimensions.

    Raises:
        ExportError: If there are other dimensions, or ``auto_pad`` is unknown.
    """
    rank = x.dim() - 2
    if not 1 <= rank <= 3:
        raise node.error(f"its input has {rank} spatial dimensions, but PyTorch supports 1 to 3")
    windows = Windows(x.shape[2:], kernel, strides, dilations)
    if any(len(values) != rank for values in (windows.kernel, windows.strides, windows.dilations)):
        raise node.error(f"kernel_shape, strides and dilations must have {rank} entries, as many as spatial dimensions")
    if auto_pad == "NOTSET":
        pads = pads or [0] * (2 * rank)
        if len(pads) != 2 * rank:
            raise node.error(f"pads are {list(pads)}, but must be {2 * rank} numbers")
        windows.before, windows.after = list(pads[:rank]), list(pads[rank:])
    elif auto_pad != "VALID":
        # The output has ceil(size / stride) windows: this is the total padding that they need.
        totals = [
            greatest(((size + stride - 1) // stride - 1) * stride + extent - size, 0) if stride > 1 else extent - 1
            for size, stride, extent in zip(windows.sizes, windows.strides, windows.extents, strict=True)
        ]
        windows.before, windows.after = same_pads(node, totals, auto_pad)
    return windows


def same_pads(node: Node, totals: Sequence[Number], auto_pad: str) -> tuple[list[Number], list[Number]]:
    """Splits padding in halves: the smaller is before the input for SAME_UPPER, and after it for SAME_LOWER.

    Raises:
        ExportError: If ``auto_pad`` is unknown.
    """
    smaller = [total // 2 for total in totals]
    greater = [total - half for total, half in zip(totals, smaller, strict=True)]
    if auto_pad == "SAME_UPPER":
        return smaller, greater
    if auto_pad == "SAME_LOWER":
        return greater, smaller
    raise node.error(f"auto_pad is {auto_pad!r}, but must be NOTSET, SAME_UPPER, SAME_LOWER or VALID")


def padded(x: torch.Tensor, before: Sequence[Number], after: Sequence[Number], value: Any = 0) -> torch.Tensor:
    """Pads the last dimensions; negative numbers crop them."""
    if all(isinstance(number, int) and number == 0 for number in (*before, *after)):
        return x
    pairs = zip(reversed(before), reversed(after), strict=True)
    return F.pad(x, [number for pair in pairs for number in pair], value=value)
