"""The gradient of cross entropy without a second matrix of the logits' size."""

from __future__ import annotations

import torch

aten = torch.ops.aten


def fuse_cross_entropy(graph: torch.fx.Graph) -> None:
    """Fuses the gradients of log-softmax and of the negative log likelihood::

        nll_loss_backward -> _log_softmax_backward_data    =>    cross_entropy_backward

    The first one is a matrix as large as the logits, all zeros but for one number per row; fused, it is never made.
    """
    fused = torch.ops.ort_trainer.cross_entropy_backward.default
    for node in list(graph.nodes):
        if node.target is not aten._log_softmax_backward_data.default:
            continue
        sparse, output, axis, dtype = node.args
        if sparse.target is not aten.nll_loss_backward.default or len(sparse.users) != 1:
            continue
        gradient, scores, target, weight, reduction, ignored, total = sparse.args
        fake = output.meta["val"]
        if scores is not output or weight is not None or fake.dim() != 2 or axis not in (1, -1) or fake.dtype != dtype:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(fused, (gradient, output, target, reduction, ignored, total))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
