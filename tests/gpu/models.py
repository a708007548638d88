"""Small models of 24 kinds, without dropout, each with two batches; the model returns the loss itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Case = tuple[nn.Module, list[tuple[torch.Tensor, ...]]]


class WithLoss(nn.Module):
    """A model and its loss: the last argument is the label."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor] = F.cross_entropy) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(x), label)


class Recurrent(nn.Module):
    """A recurrent layer, whose last output is classified."""

    def __init__(self, kind: Callable[..., nn.Module], **options: object) -> None:
        super().__init__()
        self.layer = kind(8, 16, batch_first=True, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Encoder(nn.Module):
    """PyTorch's own Transformer layers, with or without a mask of padding."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 3)
        self.masked = masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = x[..., 0] > 1.5 if self.masked else None
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


class Dlrm(nn.Module):
    """Embedding bags and a dense part, whose products are classified."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.bottom, self.top = nn.Linear(4, 8), nn.Linear(14, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        parts = [self.bottom(dense), *(bag(sparse[:, n : n + 1]) for n, bag in enumerate(self.bags))]
        stacked = torch.stack(parts, 1)
        rows, columns = torch.triu_indices(4, 4, 1)
        pairs = (stacked @ stacked.transpose(1, 2))[:, rows, columns]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([parts[0], pairs], 1)).squeeze(1), label)


class Operators(nn.Module):
    """Tensors that forward makes itself, on the CPU and on the device, and operators with few uses."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(4, 8, 3, stride=2), nn.ConvTranspose1d(8, 4, 3, stride=2)
        self.norm, self.slope = nn.GroupNorm(2, 4), nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.up(self.down(x)))
        even = torch.arange(y.shape[2])[None, None] % 2 == 0
        y = torch.where(even.to(y.device), y, y.new_zeros(()) + y * 0.5)
        y = y + torch.linspace(0, 1, y.shape[2], device=y.device)
        return torch.sort(self.slope(y), dim=-1)[0].cumsum(-1).softmax(1)


class Mixture(nn.Module):
    """Two of four experts for each row, chosen by the highest scores."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 3)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        everything = torch.stack([expert(x) for expert in self.experts], 1)
        return (everything.gather(1, chosen[..., None].expand(-1, -1, 3)) * weights[..., None]).sum(1)


class Ctc(nn.Module):
    """A loss whose kernel reads lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        count, steps = x.shape[1], x.shape[0]
        lengths = [torch.full((count,), size, device=x.device) for size in (steps, label.shape[1])]
        return F.ctc_loss(self.head(x).log_softmax(-1), label, *lengths)


class HuggingFace(nn.Module):
    """A model of transformers, which returns the loss; its inputs are ids or images, and labels."""

    def __init__(self, model: nn.Module, name: str = "input_ids") -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(**{self.name: x, "labels": labels}).loss


def _draw(seed: int) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """Returns functions that draw normal numbers, and integers below a limit."""
    generator = torch.Generator().manual_seed(seed)
    return (
        lambda *shape: torch.randn(*shape, generator=generator),
        lambda high, *shape: torch.randint(0, high, shape, generator=generator),
    )


def _classifier(model: nn.Module, *shape: int, classes: int = 3) -> Case:
    batches: list[tuple[torch.Tensor, ...]] = []
    for seed in range(2):
        normal, integers = _draw(seed)
        batches.append((normal(6, *shape), integers(classes, 6)))
    return WithLoss(model), batches


def _regression(model: nn.Module, loss: Callable[..., torch.Tensor], *shape: int) -> Case:
    normal, _ = _draw(0)
    return WithLoss(model, loss), [(normal(6, *shape), normal(6, *shape)) for _ in range(2)]


def _language(kind: str, decoder: bool = True, **settings: object) -> Case:
    """A model of transformers with three layers of width 64, on texts of random ids."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**settings)
    name = f"{kind}{'ForSequenceClassification' if not decoder else _HEADS.get(kind, 'ForCausalLM')}"
    batches: list[tuple[torch.Tensor, ...]] = []
    for seed in range(2):
        _, integers = _draw(seed)
        ids = integers(100, 4, 16)
        batches.append((ids, ids if decoder else integers(2, 4)))
    return HuggingFace(getattr(transformers, name)(config)), batches


def _vit() -> Case:
    import transformers

    sizes = {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.ViTConfig(**sizes, **_WIDTHS)
    normal, integers = _draw(0)
    batches: list[tuple[torch.Tensor, ...]] = [(normal(4, 3, 16, 16), integers(2, 4)) for _ in range(2)]
    return HuggingFace(transformers.ViTForImageClassification(config), "pixel_values"), batches


_HEADS = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}
_WIDTHS = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
_TEXT = {**_WIDTHS, "vocab_size": 100, "max_position_embeddings": 32}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _dlrm() -> Case:
    normal, integers = _draw(0)
    return Dlrm(), [(normal(16, 4), integers(50, 16, 3), integers(2, 16).float()) for _ in range(2)]


def _ctc() -> Case:
    normal, integers = _draw(0)
    return Ctc(), [(normal(12, 3, 8), integers(5, 3, 4) + 1) for _ in range(2)]


def _mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 3))


def _convolutions(*last: nn.Module) -> nn.Module:
    first = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 16, 3, groups=4, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*first, *second, *last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": lambda: _classifier(_mlp(nn.ReLU()), 8),
    "mlp with norms": lambda: _classifier(_mlp(nn.LayerNorm(32), nn.GELU(), nn.BatchNorm1d(32)), 8),
    "convolutions": lambda: _classifier(_convolutions(), 3, 16, 16),
    "channels last": lambda: _classifier(_convolutions().to(memory_format=torch.channels_last), 3, 16, 16),  # type: ignore[call-overload]
    "upsampling": lambda: _classifier(_convolutions(nn.Upsample(scale_factor=2, mode="bilinear")), 3, 16, 16),
    "lstm": lambda: _classifier(Recurrent(nn.LSTM, num_layers=2), 6, 8),
    "gru": lambda: _classifier(Recurrent(nn.GRU, bidirectional=True), 6, 8),
    "rnn": lambda: _classifier(Recurrent(nn.RNN), 6, 8),
    "encoder": lambda: _classifier(Encoder(False), 10, 32),
    "encoder with padding": lambda: _classifier(Encoder(True), 10, 32),
    "dlrm": _dlrm,
    "operators": lambda: _regression(Operators(), F.smooth_l1_loss, 4, 15),
    "mixture of experts": lambda: _classifier(Mixture(), 8),
    "autoencoder": lambda: _regression(nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8)), F.mse_loss, 8),
    "ctc": _ctc,
    "gpt2": lambda: _language("GPT2", n_embd=64, n_layer=3, n_head=4, vocab_size=100, n_positions=32, resid_pdrop=0.0,
                              embd_pdrop=0.0, attn_pdrop=0.0, **_SPECIAL),
    "bert": lambda: _language("Bert", decoder=False, **_TEXT, **_QUIET),
    "electra": lambda: _language("Electra", decoder=False, embedding_size=64, **_TEXT, **_QUIET),
    "llama": lambda: _language("Llama", num_key_value_heads=2, **_TEXT, **_SPECIAL),
    "qwen2": lambda: _language("Qwen2", num_key_value_heads=2, **_TEXT, **_SPECIAL),
    "mistral": lambda: _language("Mistral", num_key_value_heads=2, sliding_window=8, **_TEXT, **_SPECIAL),
    "opt": lambda: _language("OPT", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128,
                             word_embed_proj_dim=64, vocab_size=100, max_position_embeddings=32, dropout=0.0,
                             attention_dropout=0.0, **_SPECIAL),
    "t5": lambda: _language("T5", d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=100,
                            dropout_rate=0.0, decoder_start_token_id=0),
    "vit": _vit,
}  # fmt: skip
"""Name -> model and batches."""
