"""Computes forward values a second time in the backward pass instead of keeping them: memory is traded for time.

What the backward pass reads of the forward pass has to be kept between the two. A *region* is a part of the forward
pass that is recomputed: its nodes are copied to where the first gradient needs them, and the gradients read the
copies, so that of the region only its inputs are kept::

    input -> region -> ... loss            input -> region -> ... loss
               |                             |
               v                    -->    after(input, gradients so far) -> copy of the region
            gradient                                                             |-> gradient

A copy alone achieves nothing: ONNX Runtime would merge it with the original, or run it during the forward pass. So it
reads its inputs by way of the operator ``after``, which waits until the gradients above the region are done, in
whatever order a runtime executes the nodes.

Random numbers are inputs of the graph, so a copy sees the dropout masks of its original.
"""

from .apply import apply_recompute, asks_for_recomputation

__all__ = ["apply_recompute", "asks_for_recomputation"]
