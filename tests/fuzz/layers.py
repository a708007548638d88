"""Which operations can a drawn model have? A table of source text."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .faces import ROOTS, TAGS

__all__ = ["LAYERS", "Layer", "Shape", "Written", "write"]


@dataclass(frozen=True)
class Shape:
    """Shape of the value between two layers.

    Attributes:
        kind: ``v``: (batch, width), ``s``: (batch, time, width), or ``i``: (batch, width, side, side).
        width: Number of features or channels; always even.
        side: Height and width of an image; 0 for other kinds.
    """

    kind: str
    width: int
    side: int = 0


@dataclass(frozen=True)
class Layer:
    """An operation, as templates of source text.

    The templates may contain ``{n}`` (a unique name), ``{w}`` (the width), ``{v}`` (a new width), ``{s}`` (the side),
    ``{f}`` (a number between 0 and 1), ``{k}`` (1, 2 or 3), ``{i}`` (an index below the width), ``{half}`` (half of the
    width), ``{act}`` (a function), ``{root}`` (a name in the model), and ``{tag}`` and ``{other}`` (any two names).

    Attributes:
        kinds: The kinds of shapes that it takes.
        init: Code in ``__init__``.
        forward: Code in ``forward``, which replaces h.
        width: The width of the result, as an expression.
        side: The side of the result, as an expression.
        turns: The kind of the result, if it differs.
        before: Code before the model.
        needs: A condition on width and side.
    """

    kinds: str
    init: str
    forward: str
    width: str = "w"
    side: str = "s"
    turns: str = ""
    before: str = ""
    needs: str = "True"


@dataclass(frozen=True)
class Written:
    """A layer as source text.

    Attributes:
        before: Code before the model.
        init: Code in ``__init__``.
        forward: Code in ``forward``.
        shape: Shape of the result.
    """

    before: str
    init: str
    forward: str
    shape: Shape


_ACTIVATIONS = (
    *("torch.relu", "torch.tanh", "torch.sigmoid", "torch.sin", "F.gelu", "F.silu", "F.elu", "F.softplus", "F.mish"),
    *("F.leaky_relu", "F.hardswish", "F.hardtanh", "F.selu", "F.celu", "F.logsigmoid", "F.tanhshrink", "F.relu6"),
    *("F.hardsigmoid", "F.softsign", "torch.atan", "torch.erf", "torch.square", "torch.abs", "torch.exp"),
)

_STRAIGHT = """
class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x); ctx.scale = scale
        return (x * 2).round() / 2
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * (x.abs() < 2) * ctx.scale, None
"""

_SCALED = """
class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer('mean', torch.zeros(width))
    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().flatten(0, -2).mean(0), alpha=0.1)
        return (x - self.mean) * self.scale
"""

_DOUBLED = """
class Doubled(nn.Module):
    def forward(self, w): return w + w.tanh()
"""

_ROWS = "torch.arange(h.shape[0])"
_CAUSAL = "torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()"

LAYERS: dict[str, Layer] = {
    # Layers with weights.
    "linear": Layer("vs", "self.{n} = nn.Linear({w}, {v})", "h = {act}(self.{n}(h))", "v"),
    "linear without bias": Layer("vs", "self.{n} = nn.Linear({w}, {v}, bias=False)", "h = self.{n}(h)", "v"),
    "linear as a function": Layer(
        "vs",
        "self.{n} = nn.Parameter(torch.randn({v}, {w}) * 0.3)",
        "h = F.linear(h, self.{n})",
        "v",
    ),
    "bilinear": Layer("v", "self.{n} = nn.Bilinear({w}, {w}, {v})", "h = self.{n}(h, h.tanh())", "v"),
    "two heads": Layer(
        "vs",
        "self.{n} = nn.ModuleDict({{'a': nn.Linear({w}, {half}), 'b': nn.Linear({w}, {half})}})",
        "h = torch.cat([self.{n}['a'](h), {act}(self.{n}['b'](h))], -1)",
    ),
    "the same twice": Layer("vs", "self.{n} = nn.Linear({w}, {w})", "h = self.{n}({act}(self.{n}(h)))"),
    "tied transposed": Layer(
        "vs", "self.{n} = nn.Linear({w}, {v})", "h = F.linear({act}(self.{n}(h)), self.{n}.weight.t())"
    ),
    "tied parameter": Layer(
        "vs",
        "self.{n} = nn.Linear({w}, {w}); self.{n}b = nn.Linear({w}, {w}); self.{n}b.weight = self.{n}.weight",
        "h = self.{n}b({act}(self.{n}(h)))",
    ),
    "residual": Layer(
        "vs",
        "self.{n} = nn.Sequential(nn.LayerNorm({w}), nn.Linear({w}, {v}), nn.GELU(), nn.Linear({v}, {w}))",
        "h = h + self.{n}(h)",
    ),
    "frozen": Layer(
        "vs", "self.{n} = nn.Linear({w}, {w}); self.{n}.weight.requires_grad_(False)", "h = {act}(self.{n}(h))"
    ),
    "unused": Layer("vsi", "self.{n} = nn.Linear(3, 3)", "pass"),
    "parameter": Layer("vs", "self.{n} = nn.Parameter(torch.full(({w},), {f}))", "h = h * self.{n} + self.{n}.sum()"),
    "scalar parameter": Layer("vsi", "self.{n} = nn.Parameter(torch.tensor({f}))", "h = {act}(h * self.{n})"),
    "parameter list": Layer(
        "vs",
        "self.{n} = nn.ParameterList([nn.Parameter(torch.ones({w}) * {f}) for _ in range({k})])",
        "for p in self.{n}: h = h + p.tanh()",
    ),
    "layer norm": Layer("vs", "self.{n} = nn.LayerNorm({w})", "h = self.{n}(h)"),
    "layer norm without weights": Layer("vs", "", "h = F.layer_norm(h, ({w},), eps=1e-3)"),
    "rms norm": Layer("vs", "self.{n} = nn.RMSNorm({w})", "h = self.{n}(h)"),
    "group norm": Layer("vi", "self.{n} = nn.GroupNorm(2, {w})", "h = self.{n}(h)", needs="w >= 4"),
    "group norm of a sequence": Layer(
        "s", "self.{n} = nn.GroupNorm(2, {w})", "h = self.{n}(h.transpose(1, 2)).transpose(1, 2)", needs="w >= 4"
    ),
    "batch norm": Layer("v", "self.{n} = nn.BatchNorm1d({w}, momentum={f})", "h = self.{n}(h)"),
    "batch norm of a sequence": Layer(
        "s", "self.{n} = nn.BatchNorm1d({w})", "h = self.{n}(h.transpose(1, 2)).transpose(1, 2)"
    ),
    "batch norm of an image": Layer(
        "i", "self.{n} = nn.BatchNorm2d({w}, affine={k} > 1)", "h = torch.relu(self.{n}(h))"
    ),
    "frozen batch norm": Layer("v", "self.{n} = nn.BatchNorm1d({w}).eval()", "h = self.{n}(h)"),
    "instance norm": Layer("i", "self.{n} = nn.InstanceNorm2d({w}, affine=True)", "h = self.{n}(h)", needs="s > 1"),
    "instance norm with statistics": Layer(
        "i", "self.{n} = nn.InstanceNorm2d({w}, track_running_stats=True)", "h = self.{n}(h)", needs="s > 1"
    ),
    "local response norm": Layer("i", "self.{n} = nn.LocalResponseNorm(2)", "h = self.{n}(h)"),
    "weight norm": Layer(
        "vs", "self.{n} = nn.utils.parametrizations.weight_norm(nn.Linear({w}, {v}))", "h = {act}(self.{n}(h))", "v"
    ),
    "spectral norm": Layer(
        "vs", "self.{n} = nn.utils.parametrizations.spectral_norm(nn.Linear({w}, {v}))", "h = self.{n}(h)", "v"
    ),
    "old weight norm": Layer("vs", "self.{n} = nn.utils.weight_norm(nn.Linear({w}, {v}))", "h = self.{n}(h)", "v"),
    "own parametrization": Layer(
        "vs",
        "self.{n} = nn.Linear({w}, {w}); nn.utils.parametrize.register_parametrization(self.{n}, 'weight', Doubled())",
        "h = self.{n}(h)",
        before=_DOUBLED,
    ),
    "buffer that moves": Layer("vs", "self.{n} = Scaled({w})", "h = self.{n}(h)", before=_SCALED),
    "constant buffer": Layer(
        "vs", "self.register_buffer('{n}', torch.linspace(-1, 1, {w}))", "h = h + self.{n} * h.detach().mean()"
    ),
    "counting buffer": Layer(
        "vs",
        "self.register_buffer('{n}', torch.tensor(0))",
        "self.{n} += 1; h = h / self.{n}.to(h.dtype).add(1).log2()",
    ),
    "prelu": Layer("vsi", "self.{n} = nn.PReLU()", "h = self.{n}(h)"),
    "module activation": Layer("vsi", "self.{n} = nn.LeakyReLU({f})", "h = self.{n}(h)"),
    "threshold": Layer("vsi", "self.{n} = nn.Threshold(0.1, {f})", "h = self.{n}(h)"),
    # Random numbers.
    "dropout": Layer("vsi", "self.{n} = nn.Dropout({f} * 0.5)", "h = self.{n}(h)"),
    "dropout as a function": Layer("vs", "", "h = F.dropout(h, {f} * 0.5, self.training)"),
    "dropout of channels": Layer("i", "self.{n} = nn.Dropout2d({f} * 0.5)", "h = self.{n}(h)"),
    "alpha dropout": Layer("vs", "self.{n} = nn.AlphaDropout({f} * 0.5)", "h = self.{n}(h)"),
    "noise": Layer("vs", "", "h = h + torch.randn_like(h) * 0.1 if self.training else h"),
    "uniform noise": Layer(
        "vs",
        "",
        "if self.training: h = h * (1 + 0.1 * torch.rand(h.shape[0], *[1] * (h.dim() - 1), dtype=h.dtype))",
    ),
    "bernoulli": Layer("vs", "", "if self.training: h = h * torch.bernoulli(torch.full_like(h, 0.8))"),
    # Sequences.
    "attention": Layer(
        "s",
        "self.{n} = nn.MultiheadAttention({w}, 2, batch_first=True)",
        "h = h + self.{n}(h, h, h, need_weights=False)[0]",
    ),
    "attention with weights": Layer(
        "s",
        "self.{n} = nn.MultiheadAttention({w}, 2, batch_first=True, bias=False)",
        "h, a = self.{n}(h, h, h); h = h * a.amax(-1, keepdim=True)",
    ),
    "causal attention": Layer(
        "s",
        "self.{n} = nn.MultiheadAttention({w}, 2, batch_first=True, dropout=0.1)",
        f"h = h + self.{{n}}(h, h, h, attn_mask=~{_CAUSAL}, is_causal={{k}} > 1, need_weights=False)[0]",
    ),
    "scaled dot product": Layer(
        "s",
        "self.{n} = nn.Linear({w}, 3 * {w})",
        "q, k, v = self.{n}(h).chunk(3, -1); h = F.scaled_dot_product_attention(q, k, v, is_causal={k} > 1)",
    ),
    "heads by hand": Layer(
        "s",
        "self.{n} = nn.Linear({w}, 3 * {w})",
        "q, k, v = self.{n}(h).reshape(h.shape[0], h.shape[1], 3, 2, {half}).permute(2, 0, 3, 1, 4); "
        "a = (q @ k.transpose(-1, -2) / {w} ** 0.5).masked_fill(~" + _CAUSAL + ", float('-inf')).softmax(-1); "
        "h = (a @ v).transpose(1, 2).reshape(h.shape)",
    ),
    "attention with a float mask": Layer(
        "s",
        "self.{n} = nn.Linear({w}, {w})",
        "m = -{f} * torch.arange(h.shape[1], dtype=h.dtype).sub(2).abs().expand(h.shape[1], -1); "
        "h = F.scaled_dot_product_attention(self.{n}(h), h, h, attn_mask=m)",
    ),
    "encoder layer": Layer(
        "s",
        "self.{n} = nn.TransformerEncoderLayer({w}, 2, {v}, 0.1 * ({k} - 1), batch_first=True, norm_first={k} > 2)",
        "h = self.{n}(h)",
    ),
    "gru": Layer("s", "self.{n} = nn.GRU({w}, {v}, batch_first=True)", "h = self.{n}(h)[0]", "v"),
    "gru in both directions": Layer(
        "s",
        "self.{n} = nn.GRU({w}, {half}, num_layers=2, batch_first=True, bidirectional=True)",
        "h, s = self.{n}(h); h = h + s[-1][:, None].repeat(1, 1, 2)",
        "half * 2",
    ),
    "lstm": Layer(
        "s", "self.{n} = nn.LSTM({w}, {v}, batch_first=True)", "h, (a, c) = self.{n}(h); h = h * c[-1][:, None]", "v"
    ),
    "lstm with projections": Layer(
        "s", "self.{n} = nn.LSTM({w}, {v} + 2, batch_first=True, proj_size={v})", "h = self.{n}(h)[0]", "v"
    ),
    "rnn, time first": Layer(
        "s",
        "self.{n} = nn.RNN({w}, {v}, nonlinearity='relu')",
        "h = self.{n}(h.transpose(0, 1))[0].transpose(0, 1)",
        "v",
    ),
    "convolution over time": Layer(
        "s",
        "self.{n} = nn.Conv1d({w}, {v}, 3, padding=1)",
        "h = {act}(self.{n}(h.transpose(1, 2)).transpose(1, 2))",
        "v",
    ),
    "causal convolution": Layer(
        "s",
        "self.{n} = nn.Conv1d({w}, {w}, {k}, groups={half})",
        "h = self.{n}(F.pad(h.transpose(1, 2), ({k} - 1, 0))).transpose(1, 2)",
    ),
    "positions": Layer("s", "self.{n} = nn.Embedding(64, {w})", "h = h + self.{n}(torch.arange(h.shape[1]))"),
    "cumulative sum": Layer("s", "", "h = h.cumsum(1) / torch.arange(1, h.shape[1] + 1, dtype=h.dtype)[:, None]"),
    "shift in time": Layer("s", "", "h = torch.cat([h[:, :1], h[:, :-1]], 1)"),
    "flip": Layer("s", "", "h = h + h.flip(1)"),
    "mask of lengths": Layer("s", "", "h = h.masked_fill((torch.arange(h.shape[1]) > 4)[None, :, None], {f})"),
    "packed gru": Layer(
        "s",
        "self.{n} = nn.GRU({w}, {w}, batch_first=True)",
        "p = nn.utils.rnn.pack_padded_sequence(h, torch.full((h.shape[0],), h.shape[1]), batch_first=True); "
        "h = nn.utils.rnn.pad_packed_sequence(self.{n}(p)[0], batch_first=True)[0]",
    ),
    "sort in time": Layer("s", "", "h = h.sort(1).values"),
    "softmax in time": Layer("s", "", "h = h.softmax(1) * h"),
    "outer product in time": Layer("s", "", "h = torch.einsum('btd,bsd,bsv->btv', h, h.tanh(), h) / h.shape[1]"),
    "mean over time": Layer("s", "", "h = h.mean(1)", turns="v"),
    "last step": Layer("s", "", "h = h[:, -1]", turns="v"),
    "maximum over time": Layer("s", "", "h = h.max(1).values", turns="v"),
    "attention pooling": Layer(
        "s", "self.{n} = nn.Linear({w}, 1)", "h = (self.{n}(h).softmax(1) * h).sum(1)", turns="v"
    ),
    "first and last": Layer("s", "", "h = torch.cat([h[:, 0], h[:, -1]], -1)", "w * 2", turns="v", needs="w <= 8"),
    "gathered step": Layer(
        "s",
        "",
        "i = h.detach().sum(-1).argmax(1); h = h.gather(1, i[:, None, None].expand(-1, 1, {w})).squeeze(1)",
        turns="v",
    ),
    "indexed step": Layer("s", "", f"h = h[{_ROWS}, h.detach()[..., 0].argmin(1)]", turns="v"),
    "variance over time": Layer("s", "", "h = h.var(1, unbiased=False) + h.mean(1)", turns="v"),
    "logsumexp over time": Layer("s", "", "h = h.logsumexp(1)", turns="v"),
    "norm over time": Layer("s", "", "h = (h + 0.1).norm(dim=1)", turns="v"),
    # Images.
    "convolution": Layer("i", "self.{n} = nn.Conv2d({w}, {v}, 3, padding=1)", "h = {act}(self.{n}(h))", "v"),
    "strided convolution": Layer(
        "i",
        "self.{n} = nn.Conv2d({w}, {v}, 3, stride=2, padding=1, bias=False)",
        "h = self.{n}(h)",
        "v",
        "(s + 1) // 2",
    ),
    "depthwise convolution": Layer(
        "i", "self.{n} = nn.Conv2d({w}, {w}, 3, padding='same', groups={w})", "h = self.{n}(h)"
    ),
    "circular convolution": Layer(
        "i",
        "self.{n} = nn.Conv2d({w}, {v}, 3, padding=1, padding_mode='circular')",
        "h = self.{n}(h)",
        "v",
        needs="s > 1",
    ),
    "dilated convolution": Layer(
        "i", "self.{n} = nn.Conv2d({w}, {v}, 3, padding=2, dilation=2)", "h = torch.relu(self.{n}(h))", "v"
    ),
    "transposed convolution": Layer(
        "i", "self.{n} = nn.ConvTranspose2d({w}, {v}, 2, stride=2)", "h = self.{n}(h)", "v", "s * 2", needs="s <= 4"
    ),
    "maximum pooling": Layer("i", "self.{n} = nn.MaxPool2d(2)", "h = self.{n}(h)", side="s // 2", needs="s > 1"),
    "average pooling": Layer("i", "", "h = F.avg_pool2d(h, 3, 1, 1, count_include_pad={k} > 1)"),
    "norm pooling": Layer("i", "", "h = F.lp_pool2d(h.abs() + 0.1, 2, 2)", side="s // 2", needs="s > 1"),
    "interpolation": Layer(
        "i", "", "h = F.interpolate(h, scale_factor=2, mode='bilinear')", side="s * 2", needs="s <= 4"
    ),
    "nearest": Layer("i", "self.{n} = nn.Upsample(scale_factor=2)", "h = self.{n}(h)", side="s * 2", needs="s <= 4"),
    "reflection": Layer("i", "", "h = F.pad(h, (1, 1, 1, 1), mode='reflect')[:, :, 2:, 1:-1]", needs="s > 1"),
    "pixel shuffle": Layer("i", "", "h = F.pixel_shuffle(h, 2)", "w // 4", "s * 2", needs="w == 8 and s <= 4"),
    "residual convolution": Layer(
        "i",
        "self.{n} = nn.Sequential(nn.Conv2d({w}, {w}, 3, padding=1), nn.BatchNorm2d({w}), nn.ReLU(inplace=True))",
        "h = h + self.{n}(h)",
    ),
    "squeeze and excite": Layer(
        "i", "self.{n} = nn.Conv2d({w}, {w}, 1)", "h = h * self.{n}(h.mean((2, 3), keepdim=True)).sigmoid()"
    ),
    "channels last": Layer(
        "i", "self.{n} = nn.LayerNorm({w})", "h = self.{n}(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"
    ),
    "memory format": Layer("i", "", "h = h.to(memory_format=torch.channels_last)"),
    "flattened": Layer(
        "i", "self.{n} = nn.Linear({w} * {s} * {s}, {v})", "h = self.{n}(h.flatten(1))", "v", "0", turns="v"
    ),
    "global average": Layer("i", "", "h = F.adaptive_avg_pool2d(h, 1).flatten(1)", side="0", turns="v"),
    "global maximum": Layer("i", "", "h = h.amax((2, 3))", side="0", turns="v"),
    "pixels as a sequence": Layer("i", "", "h = h.flatten(2).transpose(1, 2)", side="0", turns="s"),
    # Shapes, indices and selections.
    "activation": Layer("vsi", "", "h = {act}(h)"),
    "softmax": Layer("vsi", "", "h = h.softmax(1)"),
    "log softmax": Layer("vs", "", "h = F.log_softmax(h, -1)"),
    "normalize": Layer("vs", "", "h = F.normalize(h + 0.1, dim=-1)"),
    "glu": Layer("vs", "self.{n} = nn.Linear({w}, 2 * {w})", "h = F.glu(self.{n}(h))"),
    "as a sequence": Layer("v", "", "h = h.reshape(h.shape[0], {half}, 2)", "2", turns="s"),
    "expanded": Layer("v", "", "h = h[:, None].expand(-1, 3, -1)", turns="s"),
    "transposed twice": Layer("v", "", "h = h.t().contiguous().t().tanh()"),
    "split": Layer("vs", "", "a, b = h.split({half}, -1); h = torch.cat([b * 2, a * b], -1)"),
    "chunks in place": Layer(
        "vs", "", "h = h * 1.0; a, b = h[..., :{half}], h[..., {half}:]; a.mul_({f}); b.add_(1.0)"
    ),
    "unbind": Layer("vs", "", "h = torch.stack(h.unbind(-1)[::-1], -1)"),
    "stack": Layer("vs", "", "h = torch.stack([h, h.tanh()], -1).sum(-1)"),
    "roll": Layer("vs", "", "h = h.roll({k}, -1) - h"),
    "index": Layer("vs", "", "h = h[..., torch.tensor([{i}, 0, {i}, 1])]", "4"),
    "index select": Layer("vs", "", "h = h.index_select(-1, torch.arange({w} - 1, -1, -1))"),
    "index by a buffer": Layer("vs", "self.register_buffer('{n}', torch.randperm({w}))", "h = h + h[..., self.{n}]"),
    "gather": Layer("vs", "", "h = h.gather(-1, h.detach().argsort(-1))"),
    "take along": Layer("vs", "", "h = torch.take_along_dim(h, h.detach().argmax(-1, keepdim=True), -1) + h"),
    "where": Layer("vsi", "", "h = torch.where(h > {f}, h, h * 0.1)"),
    "masked fill": Layer("vsi", "", "h = h.masked_fill(h < -{f}, -1.0)"),
    "masked in place": Layer("vs", "", "h = h * 1.0; h[h < 0] = {f}"),
    "selected rows": Layer("v", "", "h = h.clone(); h[h[:, 0] > 0] *= 2.0"),
    "clamp": Layer("vsi", "", "h = h.clamp(-1.0, {f})"),
    "clamp by tensors": Layer("vs", "", "h = torch.minimum(h, h.mean(-1, keepdim=True) + {f})"),
    "cumsum": Layer("vs", "", "h = h.cumsum(-1)"),
    "cumprod": Layer("vs", "", "h = (h.tanh() + 1.5).cumprod(-1)"),
    "cummax": Layer("vs", "", "h = h.cummax(-1).values"),
    "topk": Layer("vs", "", "h = h.topk({half}, -1).values.repeat_interleave(2, -1)", "half * 2"),
    "kth value": Layer("vs", "", "h = h - h.kthvalue(2, -1, keepdim=True).values"),
    "median": Layer("vs", "", "h = h - h.median(-1, keepdim=True).values"),
    "sort": Layer("vs", "", "h = h.sort(-1, descending=True)[0]"),
    "einsum": Layer("v", "", "h = torch.einsum('bi,bj->bij', h, h.tanh()).sum(1)"),
    "matmul": Layer("v", "", "h = h @ (h.t() @ h) / h.shape[0]"),
    "baddbmm": Layer("s", "", "h = torch.baddbmm(h, h @ h.transpose(1, 2), h, alpha=0.1)"),
    "distances": Layer("v", "", "h = h + torch.cdist(h, h.detach() + 1.0).mean(1, keepdim=True)"),
    "triangle": Layer("v", "", "h = torch.einsum('bi,bj->bij', h, h).tril().sum(-1)"),
    "diagonal": Layer("v", "", "h = torch.diag_embed(h).sum(1) + h.unsqueeze(2).expand(-1, -1, {w}).diagonal(0, 1, 2)"),
    "windows": Layer("vs", "", "h = F.pad(h, (1, 1)).unfold(-1, 3, 1).mean(-1)"),
    "scatter": Layer("vs", "", "h = torch.zeros_like(h).scatter(-1, h.detach().argsort(-1), h)"),
    "scatter add": Layer("vs", "", "h = torch.zeros_like(h).scatter_add(-1, (h.detach() > 0).long(), h.tanh()) + h"),
    "index add": Layer("vs", "", "h = h.index_add(-1, torch.tensor([0, {i}]), h[..., :2])"),
    "index put": Layer("v", "", f"h = h.clone(); h[{_ROWS}, 0] = h[{_ROWS}, {{i}}] * 2"),
    "assigned slice": Layer("vs", "", "h = h.clone(); h[..., 1:] = h[..., :-1] * {f}"),
    "one hot": Layer("vs", "", "h = h + F.one_hot(h.detach().argmax(-1), {w}).to(h.dtype)"),
    "one by one": Layer("v", "", "h = torch.cat([h[:, i : i + 1] * (i + 1) for i in range({w})], 1)"),
    "statistics": Layer("vs", "", "h = (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + {f})"),
    "extremes": Layer("vs", "", "h = (h - h.amin(-1, keepdim=True)) / (h.amax(-1, keepdim=True) + 1.0)"),
    "product": Layer("vs", "", "h = h + h.tanh().prod(-1, keepdim=True)"),
    "repeat": Layer("vs", "", "h = h.repeat(*[1] * (h.dim() - 1), 2)", "w * 2", needs="w <= 6"),
    "movedim": Layer(
        "s", "", "h = h.movedim(1, 0).reshape(h.shape[1], -1).reshape(h.shape[1], h.shape[0], -1).movedim(0, 1)"
    ),
    "size as a number": Layer("vs", "", "h = h / (h.shape[0] + 1) ** 0.5"),
    "branch on a size": Layer("vs", "", "h = h * 2 if h.shape[0] > 2 else h + 1"),
    "branch on a mode": Layer("vs", "", "h = h * {f} if self.training else h"),
    "branch on a value": Layer("vs", "", "h = h * {f} if h.sum() > 0 else h + 1"),
    "detached": Layer("vs", "", "h = h - h.detach() * {f}"),
    "no grad": Layer("vs", "", "with torch.no_grad(): m = h.mean(0, keepdim=True)\nh = h - m"),
    "powers": Layer("vs", "", "h = (h.abs() + {f}) ** {k} * 0.5"),
    "logarithm": Layer("vs", "", "h = torch.log1p(h.abs()) * h.sign()"),
    "rsqrt": Layer("vs", "", "h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3)"),
    "remainder": Layer("vs", "", "h = torch.remainder(h, 1.0 + {f})"),
    "lerp": Layer("vs", "", "h = torch.lerp(h, h.tanh(), {f})"),
    "addcmul": Layer("vs", "", "h = torch.addcmul(h, h.tanh(), h.sigmoid(), value={f})"),
    "nan to num": Layer("vs", "", "h = torch.nan_to_num(h / (h > 0).to(h.dtype), 0.0, 1.0, -1.0)"),
    "complex": Layer("vs", "", "h = torch.view_as_real(torch.fft.rfft(h, dim=-1) * (1 + 0.5j)).flatten(-2)[..., :{w}]"),
    "in place": Layer("vsi", "", "h = h * 1.0; h.mul_({f}).add_(1.0).relu_()"),
    "in place activation": Layer("vsi", "self.{n} = nn.ELU(inplace=True)", "h = self.{n}(h + 0.0)"),
    "float and back": Layer("vs", "", "h = (h.double() * {f}).to(h.dtype)"),
    "straight through": Layer("vs", "", "h = Straight.apply(h, {f})", before=_STRAIGHT),
    "checkpoint": Layer(
        "vs",
        "self.{n} = nn.Sequential(nn.Linear({w}, {w}), nn.Tanh(), nn.Linear({w}, {w}))",
        "h = torch.utils.checkpoint.checkpoint(self.{n}, h, use_reentrant=False)",
    ),
    "checkpoint with dropout": Layer(
        "vs",
        "self.{n} = nn.Sequential(nn.Linear({w}, {w}), nn.Dropout(0.2))",
        "h = torch.utils.checkpoint.checkpoint(self.{n}, h, use_reentrant=False)",
    ),
    "nested lists": Layer(
        "vs",
        "self.{n} = nn.ModuleList([nn.Linear({w}, {w}) for _ in range({k})])",
        "for layer in self.{n}: h = {act}(layer(h)) + h",
    ),
    "lookup": Layer(
        "vs",
        "self.{n} = nn.Embedding(5, {w}, padding_idx=0)",
        "h = h + self.{n}((h.detach().mean(-1) > 0).long() + 1)",
    ),
    "embedding bag": Layer(
        "v", "self.{n} = nn.EmbeddingBag(7, {w}, mode='mean')", "h = h + self.{n}((h.detach() > 0).long() * 2 + 1)"
    ),
    "number in a tensor": Layer(  # which the graph does not know
        "v",
        "",
        "c = h.detach().square().add(1).sign().sum(1)[0].long(); h = h[:, :c] * torch.arange(c).to(h.dtype) / {w}; "
        "h = h + torch.zeros(c).to(h.dtype) + h.detach()[:, c - {k}].mean()",
    ),
    "vmap": Layer("vs", "", "h = torch.func.vmap(lambda r: r * r.sum())(h) * {f}"),
    "hook": Layer(
        "vs",
        "self.{n} = nn.Linear({w}, {w}); self.{n}.register_forward_hook(lambda m, x, y: y * {f})",
        "h = self.{n}(h)",
    ),
    # Names.
    "parameters of any name": Layer(
        "vs",
        "self.{n} = nn.ParameterDict({{{tag!r}: torch.ones({w}), {other!r}: torch.full(({w},), 0.5)}})",
        "h = h * self.{n}[{tag!r}] + self.{n}[{other!r}]",
    ),
    "modules of any name": Layer(
        "vs",
        "self.{n} = nn.ModuleDict({{{tag!r}: nn.Linear({w}, {w}), {other!r}: Scaled({w})}})",
        "h = self.{n}[{other!r}](self.{n}[{tag!r}](h))",
        before=_SCALED,
    ),
    "buffers of any name": Layer(
        "vs",
        "self.{n} = nn.Module(); self.{n}.register_buffer({tag!r}, torch.zeros({w})); "
        "self.{n}.register_parameter({other!r}, nn.Parameter(torch.ones({w})))",
        "b = getattr(self.{n}, {tag!r}); b.add_(h.detach().flatten(0, -2).mean(0)); "
        "h = h * getattr(self.{n}, {other!r}) + b",
    ),
    "parameter of the model": Layer(
        "vs", "setattr(self, {root!r}, nn.Parameter(torch.full(({w},), {f})))", "h = h * getattr(self, {root!r})"
    ),
    "parameters in a list of the model": Layer(
        "vs",
        "setattr(self, {root!r}, nn.ParameterList([torch.ones({w}), torch.full(({w},), {f})]))",
        "h = h * getattr(self, {root!r})[0] + getattr(self, {root!r})[1]",
    ),
    "dots and underscores": Layer(
        "vs",
        "self.{n} = nn.Module(); self.{n}.a = nn.Linear({w}, {w}); self.{n}.a_weight = nn.Parameter(torch.ones({w})); "
        "self.{n}_a = nn.Linear({w}, {w}); self.{n}_a_weight = nn.Parameter(torch.ones({w}))",
        "h = self.{n}_a(self.{n}.a(h) * self.{n}.a_weight) * self.{n}_a_weight",
    ),
    "stack of layers": Layer(
        "s",
        "self.{n} = nn.ModuleList([nn.TransformerEncoderLayer({w}, 2, 4, 0.1, 'gelu', batch_first=True) "
        "for _ in range(2)])",
        "for layer in self.{n}: h = layer(h)",
    ),
    "gelu": Layer("vs", "self.{n} = nn.Linear({w}, {w})", "h = F.gelu(self.{n}(h), approximate='tanh')"),
    "hook before": Layer(
        "vs",
        "self.{n} = nn.Linear({w}, {w}); self.{n}.register_forward_pre_hook(lambda m, x: (x[0] + {f},))",
        "h = self.{n}(h)",
    ),
    "list of parts": Layer("vs", "", "p = []\nfor i in range({k}): p.append(h * (i + 1))\nh = sum(p)"),
}


def write(kind: str, seed: int, name: str, shape: Shape) -> Written | None:
    """Returns a layer with drawn numbers; None if it does not take the shape.

    Args:
        kind: A key of :data:`LAYERS`.
        seed: Draws the numbers.
        name: The layer's name in the model.
        shape: Shape of the value before it.
    """
    layer, draw = LAYERS[kind], random.Random(f"{kind} {seed}")
    fill = {
        "n": name,
        "w": shape.width,
        "v": draw.choice((4, 6, 8)),
        "s": shape.side,
        "f": draw.choice((0.2, 0.5, 0.7)),
        "k": draw.choice((1, 2, 3)),
        "i": draw.randrange(shape.width),
        "half": shape.width // 2,
        "act": draw.choice(_ACTIVATIONS),
        "root": draw.choice(ROOTS),
    }
    fill["tag"], fill["other"] = draw.sample(TAGS, 2)
    if shape.kind not in layer.kinds or not eval(layer.needs, {}, fill):
        return None
    width, side = eval(layer.width, {}, fill), eval(layer.side, {}, fill)
    result = Shape(layer.turns or shape.kind, width, side if (layer.turns or shape.kind) == "i" else 0)
    if width % 2 or (result.kind == "i" and not side):
        return None
    return Written(layer.before, layer.init.format(**fill), layer.forward.format(**fill), result)
