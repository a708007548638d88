"""Losses, recurrent layers, the layers of torch.nn, and what a forward pass may do in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .case import Batch, Case

FEATURES = 8
CLASSES = 5


def vectors(draw: torch.Generator, batch: int, length: int) -> Batch:
    return {"x": torch.randn(batch, FEATURES, generator=draw), "y": torch.randn(batch, CLASSES, generator=draw)}


def sequences(draw: torch.Generator, batch: int, length: int) -> Batch:
    x = torch.randn(batch, length, FEATURES, generator=draw)
    return {"x": x, "y": torch.randn(batch, CLASSES, generator=draw)}


def short_sequences(draw: torch.Generator, batch: int, length: int) -> Batch:
    """Makes sequences for models that unroll them, whose graphs grow with the length."""
    return sequences(draw, batch, length // 2)


def tokens(draw: torch.Generator, batch: int, length: int) -> Batch:
    ids = torch.randint(0, 20, (batch, length), generator=draw)
    return {"x": ids, "y": torch.randn(batch, CLASSES, generator=draw)}


def _with_label(label: Callable[[torch.Generator, int], torch.Tensor]) -> Callable[[torch.Generator, int, int], Batch]:
    def batch(draw: torch.Generator, batch: int, length: int) -> Batch:
        return {"x": torch.randn(batch, FEATURES, generator=draw), "y": label(draw, batch)}

    return batch


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def _input_named_x(module: nn.Module) -> nn.Module:
    return Apply(module, lambda own, x: own(x))


class Apply(nn.Module):
    """Applies a function to a module and an input x."""

    def __init__(self, module: nn.Module, function: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.module, x)


def _loss(name: str, loss: Any, label: Callable[[torch.Generator, int], torch.Tensor]) -> Case:
    return Case(name, lambda: _input_named_x(network()), _with_label(label), loss)


def _classes(draw: torch.Generator, batch: int) -> torch.Tensor:
    return torch.randint(0, CLASSES, (batch,), generator=draw)


def _some_ignored(draw: torch.Generator, batch: int) -> torch.Tensor:
    labels = _classes(draw, batch)
    labels[0] = -100
    return labels


def _real(draw: torch.Generator, batch: int) -> torch.Tensor:
    return torch.randn(batch, CLASSES, generator=draw)


def _probabilities(draw: torch.Generator, batch: int) -> torch.Tensor:
    return torch.rand(batch, CLASSES, generator=draw).softmax(-1)


def _signs(draw: torch.Generator, batch: int) -> torch.Tensor:
    return torch.randint(0, 2, (batch, CLASSES), generator=draw).float() * 2 - 1


def _bits(draw: torch.Generator, batch: int) -> torch.Tensor:
    return torch.randint(0, 2, (batch, CLASSES), generator=draw).float()


def _several(draw: torch.Generator, batch: int) -> torch.Tensor:
    labels = torch.full((batch, CLASSES), -1)
    labels[:, :2] = torch.stack([torch.randperm(CLASSES, generator=draw)[:2] for _ in range(batch)])
    return labels


def _counts(draw: torch.Generator, batch: int) -> torch.Tensor:
    return torch.randint(0, 4, (batch, CLASSES), generator=draw).float()


def _kl_of_logs(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.kl_div(logits.log_softmax(-1), target.log(), reduction="sum", log_target=True)


def _cosine_triplet(anchor: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    return F.triplet_margin_with_distance_loss(
        anchor, positive, anchor.roll(1, 0), distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)
    )


WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.25])


def speech(draw: torch.Generator, batch: int, length: int) -> Batch:
    labels = torch.randint(1, CLASSES, (batch, 3), generator=draw)
    return {"x": torch.randn(batch, length - 1, FEATURES, generator=draw), "y": labels}


def _ctc(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    frames = torch.full((logits.shape[0],), logits.shape[1])
    return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), labels, frames, torch.full_like(frames, labels.shape[1]))


LOSSES = [
    _loss("cross entropy", F.cross_entropy, _classes),
    _loss("cross entropy, class weights", nn.CrossEntropyLoss(weight=WEIGHTS), _classes),
    _loss("cross entropy, ignore_index", F.cross_entropy, _some_ignored),
    _loss("cross entropy, label smoothing", nn.CrossEntropyLoss(label_smoothing=0.1), _some_ignored),
    _loss("cross entropy, weights, smoothing", nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), _some_ignored),
    _loss("cross entropy, sum", nn.CrossEntropyLoss(reduction="sum"), _some_ignored),
    _loss("cross entropy, class probabilities", F.cross_entropy, _probabilities),
    _loss("negative log likelihood", lambda z, y: F.nll_loss(z.log_softmax(-1), y), _some_ignored),
    _loss("MSE", F.mse_loss, _real),
    _loss("L1", F.l1_loss, _real),
    _loss("smooth L1", nn.SmoothL1Loss(beta=0.5), _real),
    _loss("Huber", nn.HuberLoss(delta=0.7), _real),
    _loss("BCE with logits", nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), _bits),
    _loss("BCE", lambda z, y: F.binary_cross_entropy(z.sigmoid(), y), _bits),
    _loss("KL divergence", lambda z, y: F.kl_div(z.log_softmax(-1), y, reduction="batchmean"), _probabilities),
    _loss("KL divergence of logs", _kl_of_logs, _probabilities),
    _loss("Poisson likelihood", nn.PoissonNLLLoss(), _counts),
    _loss("Gaussian likelihood", lambda z, y: F.gaussian_nll_loss(z, y, z.exp()), _real),
    _loss("hinge embedding", nn.HingeEmbeddingLoss(), _signs),
    _loss("soft margin", nn.SoftMarginLoss(), _signs),
    _loss("multi-label margin", nn.MultiLabelMarginLoss(), _several),
    _loss("multi-label soft margin", nn.MultiLabelSoftMarginLoss(), _bits),
    _loss("multi margin", nn.MultiMarginLoss(), _classes),
    _loss("cosine embedding", lambda z, y: F.cosine_embedding_loss(z, y.flip(0), y.mean(-1).sign()), _real),
    _loss("margin ranking", lambda z, y: F.margin_ranking_loss(z, z.flip(0), y.sign(), 0.1), _real),
    _loss("triplet", lambda z, y: F.triplet_margin_loss(z, y, z.roll(1, 0), swap=True), _real),
    _loss("triplet with cosine distance", _cosine_triplet, _real),
    # On kernels other than PyTorch's, the recursion is unrolled for each length.
    Case("CTC", lambda: _input_named_x(network()), speech, _ctc, exports=2),
]  # fmt: skip


class Recurrent(nn.Module):
    """A recurrent network over a sequence, all of whose states are used."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.rnn = kind(FEATURES, 6, batch_first=True, **settings)
        self.head = nn.LazyLinear(CLASSES)
        self.head(self.rnn(torch.zeros(1, 1, FEATURES))[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, state = self.rnn(x)
        state = state[0] if isinstance(state, tuple) else state
        return self.head(output.mean(1)) + state.mean()


class Translator(nn.Module):
    """``nn.Transformer`` from a sequence to itself, with masks whose kind it must find out itself."""

    def __init__(self, function: Callable[[nn.Transformer, torch.Tensor, torch.Tensor], torch.Tensor], **settings: Any):
        super().__init__()
        self.transformer = nn.Transformer(FEATURES, 2, 1, 1, 16, dropout=0.0, **settings)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(x.transpose(0, 1)))
        return self.head(self.function(self.transformer, x, mask).mean(1))


def _causal(own: nn.Transformer, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return own(x, x.flip(1), tgt_mask=mask)


def _hinted(own: nn.Transformer, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return own(x, x.flip(1), src_mask=mask, tgt_mask=mask, src_is_causal=True, tgt_is_causal=True)


def _padded(own: nn.Transformer, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Applies boolean masks, including masks of padding, with the sequence first."""
    padding, after = x[..., 0] > 1.0, mask < 0
    value = x.transpose(0, 1)
    encoded = own.encoder(value, after.T & after, padding, is_causal=False)
    return own.decoder(value, encoded, after, None, None, padding).transpose(0, 1)


def _recurrent(name: str, kind: Any, **settings: Any) -> Case:
    return Case(name, lambda: Recurrent(kind, **settings), sequences, F.mse_loss)


def _translator(name: str, function: Any, **settings: Any) -> Case:
    return Case(name, lambda: Translator(function, **settings), sequences, F.mse_loss)


class Cells(nn.Module):
    """A loop in Python over the cells of LSTM and GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(FEATURES, 6), nn.GRUCell(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = cell = x.new_zeros(x.shape[0], 6)
        out = x.new_zeros(x.shape[0], CLASSES)
        for step in x.unbind(1):
            hidden, cell = self.first(step, (hidden, cell))
            out = self.second(hidden, out)
        return out


RECURRENT = [
    _recurrent("RNN", nn.RNN),
    _recurrent("RNN with ReLU, no biases", nn.RNN, nonlinearity="relu", bias=False),
    _recurrent("LSTM", nn.LSTM),
    _recurrent("LSTM, bidirectional, two layers", nn.LSTM, num_layers=2, bidirectional=True),
    _recurrent("LSTM with projection", nn.LSTM, proj_size=4),
    _recurrent("GRU", nn.GRU),
    _recurrent("GRU, bidirectional, two layers", nn.GRU, num_layers=2, bidirectional=True),
    Case("cells of LSTM and GRU", Cells, short_sequences, F.mse_loss, exports=2),
    _translator("nn.Transformer, a causal mask", _causal, batch_first=True),
    _translator("nn.Transformer, is_causal", _hinted, batch_first=True, norm_first=True),
    _translator("nn.Transformer, masks of padding", _padded),
]


def _wide(module: nn.Module, width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), module, nn.Linear(width, CLASSES))


def _activation(name: str, module: nn.Module, width: int = 16) -> Case:
    return Case(name, lambda: _input_named_x(_wide(module, width)), vectors, F.mse_loss)


ACTIVATIONS = [
    _activation(type(module).__name__ + (f" {arguments}" if arguments else ""), module, width)
    for module, arguments, width in [
        (nn.GELU(), "", 16), (nn.GELU("tanh"), "tanh", 16), (nn.SiLU(), "", 16), (nn.Mish(), "", 16),
        (nn.ReLU(), "", 16), (nn.ReLU6(), "", 16), (nn.LeakyReLU(0.1), "", 16), (nn.PReLU(16), "", 16),
        (nn.ELU(), "", 16), (nn.CELU(0.5), "", 16), (nn.SELU(), "", 16), (nn.GLU(), "", 8),
        (nn.Hardswish(), "", 16), (nn.Hardsigmoid(), "", 16), (nn.Hardtanh(), "", 16), (nn.Hardshrink(), "", 16),
        (nn.Softshrink(), "", 16), (nn.Tanhshrink(), "", 16), (nn.Softplus(2.0), "", 16), (nn.Softsign(), "", 16),
        (nn.LogSigmoid(), "", 16), (nn.Threshold(0.1, -1.0), "", 16), (nn.Softmax(-1), "", 16),
        (nn.LogSoftmax(-1), "", 16), (nn.Softmin(-1), "", 16), (nn.LayerNorm(16), "", 16),
        (nn.RMSNorm(16), "", 16), (nn.BatchNorm1d(16), "", 16),
    ]
]  # fmt: skip


class Shared(nn.Module):
    """Applies one layer three times, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(FEATURES, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.layer(x)
        return self.head(x.mean(1))


class Checkpointed(nn.Module):
    """Recomputes the activations of the first part in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda value: torch.tanh(self.first(value)).sin(), x, use_reentrant=False)
        return self.second(hidden)


class StraightThrough(torch.autograd.Function):
    """Rounds in the forward pass; the gradient ignores the rounding."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx.scale = scale
        return torch.round(value * scale) / scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (value,) = ctx.saved_tensors
        return grad * (value.abs() < 1), None


class Unused(nn.Module):
    """Has unused parameters, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = (nn.Linear(FEATURES, CLASSES) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.lonely = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + self.frozen(x)


class Bags(nn.Module):
    """Embeddings with and without padding_idx, with sparse gradients, and embedding bags."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.embedding = module
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        return self.head(hidden.mean(1) if hidden.dim() == 3 else hidden)


def _in_place(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = own[0](x)
    hidden[:, 1] = 0.5
    hidden[:, 2:4] *= 2.0
    hidden[hidden > 1.0] = 1.0
    hidden.add_(x.mean(-1, keepdim=True)).tanh_()
    output = own[1](hidden)
    output[..., 0].mul_(output[..., 1].detach().clone())
    return output


def _complex_indexing(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    table = own[0](x)
    rows = torch.arange(x.shape[0] - 1, -1, -1)
    picked = table[rows[:, None], torch.tensor([0, 3, 3, 7])]
    chosen = table.gather(1, table.argsort(-1)[:, :4])
    swapped = table.index_select(1, torch.tensor([7, 0])).flip(1)
    top = table.topk(2).values
    return own[1](torch.cat([picked + chosen, swapped, top], 1)) + table[::2].sum() + table[-1, None, ::3].mean()


def _nan_untaken(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = own[0](x)
    safe = torch.where(hidden > 0, hidden, 1.0)
    return own[1](torch.where(hidden > 0, safe.sqrt(), torch.where(hidden.isnan(), hidden.log(), 0.1 * hidden)))


def _einsum(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.einsum("bi,ji->bj", x, own[0].weight)
    outer = torch.einsum("bi,bj->bij", hidden, x)
    return own[1](torch.einsum("bii->bi", outer) + torch.einsum("bij,kj->bi", outer, own[0].weight))


def _detached(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = own[0](x)
    with torch.no_grad():
        gate = own[0](x).sigmoid()
    return own[1](hidden * gate + hidden.detach().exp())


def _cumulative(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = own[0](x)
    return own[1](hidden.cumsum(-1) + hidden.logcumsumexp(-1) + hidden.sigmoid().cumprod(-1) + hidden.cummax(-1).values)


def _reductions(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = own[0](x)
    summary = [
        hidden.std(-1), hidden.var(-1, unbiased=False), hidden.logsumexp(-1), hidden.norm(dim=-1), hidden.amax(-1),
        hidden.amin(-1), hidden.median(-1).values, hidden.sigmoid().prod(-1), hidden.max(), hidden.min(), hidden.mean(),
        hidden.norm(p=1), hidden.kthvalue(2).values, hidden.max(0).values.sum(),
    ]  # fmt: skip
    return own[1](hidden) + sum(value.unsqueeze(-1) if value.dim() else value for value in summary)


def _shapes(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = own[0](x)
    first, second = hidden.chunk(2, -1)
    stacked = torch.stack([first, second], 1).transpose(1, 2).reshape(x.shape[0], -1)
    rolled = stacked.roll(1, -1).unsqueeze(1).repeat(1, 2, 1).movedim(1, -1).mean(-1)
    parts = rolled.split([3, 5], -1)
    joined = torch.cat([parts[1], parts[0]], -1).view(-1, 2, 4).permute(0, 2, 1).contiguous().flatten(1)
    return own[1](joined.tril() + joined.unsqueeze(0).squeeze(0) + torch.diag_embed(joined).sum(-1))


def _distances(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = own[0](x)
    other = own[0](x.flip(0) + 0.5)
    near = torch.cdist(hidden, other).mean(-1) + F.pairwise_distance(hidden, other)
    return own[1](hidden) + (near + F.cosine_similarity(hidden, other)).unsqueeze(-1)


def _normalized(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return own[1](F.normalize(own[0](x), dim=-1) + F.normalize(own[0](x), p=1.0, dim=0))


def _masked(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = own[0](x)
    mask = x > 0.3
    return own[1](
        hidden.masked_fill(mask, -2.0) + hidden.clamp(-0.5, 0.5) + torch.maximum(hidden, x) + hidden.fmod(0.7)
    )


def _double_precision(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return own[1]((own[0](x).double().exp() + 1).log().float())


def _attention(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    query, key, value = own[0](x).chunk(3, -1)
    causal = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    mask = (x[..., 0] > -1.0).unsqueeze(1).expand(-1, x.shape[1], -1)
    return own[1](causal + F.scaled_dot_product_attention(query, key, value, attn_mask=mask)).mean(1)


def _squeezes(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = own[0](x).unsqueeze(0).unsqueeze(-1)
    return own[1](hidden.squeeze(-1).squeeze()) + own[0](x)[:1].squeeze().sum()


def _function(name: str, function: Any, batch: Any = vectors, first: int = FEATURES, exports: int = 1) -> Case:
    def make() -> nn.Module:
        return Apply(nn.Sequential(nn.Linear(FEATURES, first), nn.Linear(FEATURES, CLASSES)), function)

    return Case(name, make, batch, F.mse_loss, exports)


def _weight_normalized() -> nn.Module:
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    return _input_named_x(
        nn.Sequential(weight_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), weight_norm(nn.Linear(8, CLASSES)))
    )


def _spectral() -> nn.Module:
    spectral_norm = torch.nn.utils.parametrizations.spectral_norm
    return _input_named_x(nn.Sequential(spectral_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES)))


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(FEATURES, FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x.tanh())


class Grid(nn.Module):
    """A spatial transformer: an affine grid, and an image sampled on it."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.angle = nn.Linear(FEATURES, 6)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = F.affine_grid(self.angle(x).view(-1, 2, 3), [x.shape[0], 1, 4, 4], align_corners=False)
        image = torch.einsum("bi,bj->bij", x, x).unsqueeze(1)
        return self.head(F.grid_sample(image, grid, mode=self.mode, align_corners=False).flatten(1))


def _linear_algebra(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = own[0](x)
    matrix = torch.eye(3) + 0.1 * hidden[:, :3].unsqueeze(-1) * hidden[:, 3:6].unsqueeze(-2)
    return (
        own[1](hidden)
        + torch.linalg.vector_norm(matrix, dim=(-2, -1)).unsqueeze(-1)
        + torch.linalg.matrix_norm(matrix).mean()
    )


def _distributions(own: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Computes a divergence between distributions, which read the values of their parameters by default."""
    mean, deviation = own[0](x).chunk(2, -1)
    posterior = torch.distributions.Normal(mean, F.softplus(deviation))
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    return own[1](own[0](x)) + torch.distributions.kl_divergence(posterior, prior).mean()


FUNCTIONS = [
    _function("torch.distributions", _distributions),
    _function("in-place operations", _in_place),
    _function("complex indexing", _complex_indexing, exports=2),
    _function("torch.where with NaN in the branch not taken", _nan_untaken),
    _function("einsum", _einsum),
    _function("detach and no_grad", _detached),
    _function("cumulative functions", _cumulative),
    _function("reductions", _reductions),
    _function("reshaping", _shapes),
    _function("squeezes", _squeezes),
    _function("distances", _distances),
    _function("normalization", _normalized),
    _function("masks and clamps", _masked),
    _function("double precision inside", _double_precision),
    _function("attention, causal and masked", _attention, sequences, 3 * FEATURES),
    _function("norms of matrices", _linear_algebra),
    _function("custom autograd.Function", lambda own, x: own[1](StraightThrough.apply(own[0](x), 4.0))),
    Case("torch.utils.checkpoint", Checkpointed, vectors, F.mse_loss),
    Case("unused and frozen parameters", Unused, vectors, F.mse_loss),
    Case("shared layers", Shared, sequences, F.mse_loss),
    Case("embedding", lambda: Bags(nn.Embedding(20, 6)), tokens, F.mse_loss),
    Case("embedding with padding_idx", lambda: Bags(nn.Embedding(20, 6, padding_idx=3)), tokens, F.mse_loss),
    Case(
        "embedding, scale_grad_by_freq", lambda: Bags(nn.Embedding(20, 6, scale_grad_by_freq=True)), tokens, F.mse_loss
    ),
    Case("embedding bag, mean", lambda: Bags(nn.EmbeddingBag(20, 6)), tokens, F.mse_loss),
    Case("embedding bag, sum", lambda: Bags(nn.EmbeddingBag(20, 6, mode="sum")), tokens, F.mse_loss),
    Case("embedding bag, max", lambda: Bags(nn.EmbeddingBag(20, 6, mode="max")), tokens, F.mse_loss),
    Case("weight norm", _weight_normalized, vectors, F.mse_loss),
    Case("spectral norm", _spectral, vectors, F.mse_loss),
    Case("bilinear", Bilinear, vectors, F.mse_loss),
    Case("spatial transformer, bilinear", lambda: Grid("bilinear"), vectors, F.mse_loss),
    Case("spatial transformer, nearest", lambda: Grid("nearest"), vectors, F.mse_loss),
]
