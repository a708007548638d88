"""Recomputes forward values in the backward pass instead of keeping them: trades time for memory.

Forward values that the backward pass reads must be kept between the two. A *region* is a part of the forward pass that
is recomputed: its nodes are copied to where the first gradient needs them, and the gradients read the copies. Only the
inputs of the region are kept::

    input -> region -> ... loss            input -> region -> ... loss
               |                             |
               v                    -->    after(input, gradients so far) -> copy of the region
            gradient                                                             |-> gradient

A copy alone achieves nothing: ONNX Runtime would merge it with the original, or run it during the forward pass. So it
reads its inputs through the operator ``after``, which waits for the gradients above the region, whatever order a
runtime executes the nodes in.

Random numbers are inputs of the graph, so a copy has the same dropout masks as its original.
"""

from .apply import apply_recompute, asks_for_recomputation

__all__ = ["apply_recompute", "asks_for_recomputation"]
