"""Which losses and labels can a drawn case have? A table of source text."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOSSES", "Loss"]


@dataclass(frozen=True)
class Loss:
    """A loss, and what draws its labels.

    Attributes:
        function: An expression: what takes (prediction, label).
        label: An expression of ``shape``, that of the prediction, of ``dtype``, that of the model, and ``g``, a
            generator.
        flat: Whether the function takes (rows, classes) alone, so that a sequence is flattened.
    """

    function: str
    label: str
    flat: bool = False


_CLASSES = "torch.randint(shape[-1], shape[:-1], generator=g)"
_VALUES = "torch.randn(shape, generator=g, dtype=dtype)"
_BITS = "torch.randint(2, shape, generator=g)"

LOSSES: dict[str, Loss] = {
    "mse": Loss("F.mse_loss", _VALUES),
    "cross entropy": Loss("F.cross_entropy", _CLASSES, True),
    "cross entropy module": Loss("nn.CrossEntropyLoss(label_smoothing=0.1)", _CLASSES, True),
    "weighted cross entropy": Loss(
        "nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, CLASSES, dtype=DTYPE))", _CLASSES, True
    ),
    "sum of cross entropies": Loss("nn.CrossEntropyLoss(reduction='sum')", _CLASSES, True),
    "ignored labels": Loss("nn.CrossEntropyLoss(ignore_index=0)", _CLASSES, True),
    "cross entropy of probabilities": Loss(
        "F.cross_entropy", "torch.rand(shape, generator=g, dtype=dtype).softmax(-1)", True
    ),
    "own cross entropy": Loss("lambda p, y: -p.log_softmax(-1).gather(-1, y[..., None]).mean()", _CLASSES),
    "cross entropy of int32": Loss("lambda p, y: F.cross_entropy(p, y.long())", f"{_CLASSES}.int()", True),
    "cross entropy of uint8": Loss("F.cross_entropy", f"{_CLASSES}.to(torch.uint8)", True),
    "unreduced": Loss("lambda p, y: F.cross_entropy(p, y, reduction='none').pow(2).mean()", _CLASSES, True),
    "nll": Loss("lambda p, y: F.nll_loss(F.log_softmax(p, -1), y)", _CLASSES, True),
    "multi margin": Loss("nn.MultiMarginLoss(p=2, margin=0.5)", _CLASSES, True),
    "focal": Loss(
        "lambda p, y: ((1 - (e := F.cross_entropy(p, y, reduction='none')).neg().exp()) ** 2 * e).mean()",
        _CLASSES,
        True,
    ),
    "accuracy as well": Loss(
        "lambda p, y: F.cross_entropy(p, y) + 0.0 * (p.argmax(-1) == y).to(p.dtype).mean()", _CLASSES, True
    ),
    "mse of doubles": Loss("F.mse_loss", f"{_VALUES}.double()"),
    "mse module": Loss("nn.MSELoss(reduction='sum')", _VALUES),
    "l1": Loss("nn.L1Loss()", _VALUES),
    "smooth l1": Loss("nn.SmoothL1Loss(beta=0.5)", _VALUES),
    "huber": Loss("nn.HuberLoss(delta=0.7)", _VALUES),
    "bce with logits": Loss("nn.BCEWithLogitsLoss()", f"{_BITS}.to(dtype)"),
    "bce with weights": Loss(
        "nn.BCEWithLogitsLoss(pos_weight=torch.full((CLASSES,), 2.0, dtype=DTYPE))", f"{_BITS}.to(dtype)"
    ),
    "bce of booleans": Loss("lambda p, y: F.binary_cross_entropy(p.sigmoid(), y.to(p.dtype))", f"{_BITS}.bool()"),
    "kl": Loss("lambda p, y: F.kl_div(p.log_softmax(-1), y, reduction='batchmean')", f"{_VALUES}.softmax(-1)"),
    "kl module": Loss("nn.KLDivLoss(log_target=True, reduction='sum')", f"{_VALUES}.log_softmax(-1)"),
    "poisson": Loss("nn.PoissonNLLLoss(full=True)", "torch.randint(4, shape, generator=g).to(dtype)"),
    "gaussian": Loss("lambda p, y: F.gaussian_nll_loss(p, y, p.square() + 0.5)", _VALUES),
    "soft margin": Loss("nn.SoftMarginLoss()", f"{_BITS}.to(dtype) * 2 - 1"),
    "multi label": Loss("nn.MultiLabelSoftMarginLoss()", f"{_BITS}.to(dtype)", False),
    "hinge embedding": Loss("nn.HingeEmbeddingLoss(margin=0.8)", f"{_BITS} * 2 - 1"),
    "cosine": Loss("lambda p, y: 1 - F.cosine_similarity(p, y, -1).mean()", _VALUES),
    "log cosh": Loss("lambda p, y: torch.log(torch.cosh(p - y)).mean()", _VALUES),
    "quantile": Loss("lambda p, y: torch.maximum(0.9 * (y - p), 0.1 * (p - y)).mean()", _VALUES),
    "masked mse": Loss("lambda p, y: ((p - y) ** 2)[y > 0].sum() / y.numel()", _VALUES),
    "with a penalty": Loss("lambda p, y: F.mse_loss(p, y) + 0.01 * p.norm() + 0.01 * p.abs().amax()", _VALUES),
    "half of the rows": Loss("lambda p, y: F.mse_loss(p[: len(p) // 2 + 1], y[: len(y) // 2 + 1])", _VALUES),
    "dice": Loss(
        "lambda p, y: 1 - (2 * (p.sigmoid() * y).sum() + 1) / (p.sigmoid().sum() + y.sum() + 1)", f"{_BITS}.to(dtype)"
    ),
    "contrastive": Loss("lambda p, y: F.cross_entropy(p @ y.t(), torch.arange(len(p)))", _VALUES, True),
    "triplet": Loss("lambda p, y: F.triplet_margin_loss(p, y, p.detach().flip(0) + 1)", _VALUES),
    "largest rows": Loss(
        "lambda p, y: (p - y).square().flatten(1).mean(1).topk(len(p) // 2 + 1).values.mean()", _VALUES
    ),
    "without labels": Loss("lambda p, y: p.square().mean() + 0.0 * y.sum()", _VALUES),
}
