"""The models whose training steps are measured: each with a batch, a model description and a loss function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["MODELS", "Batch", "Task", "make_task", "without_dropout"]

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Task:
    """The task that a contender trains.

    Attributes:
        model: The model.
        batch: One batch; the last tensor is the label if there is a loss function.
        description: The model description for ``ORTTrainer``.
        loss_fn: The loss function; None if the model returns the loss.
    """

    model: nn.Module
    batch: Batch
    description: dict[str, Any]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = F.cross_entropy

    def loss(self, batch: Batch) -> torch.Tensor:
        """Returns the loss as PyTorch computes it."""
        if self.loss_fn is None:
            return self.model(*batch)
        return self.loss_fn(self.model(*batch[:-1]), batch[-1])


def _images(count: int, size: int, classes: int = 10) -> tuple[Batch, dict[str, Any]]:
    batch = torch.randn(count, 3, size, size), torch.randint(0, classes, (count,))
    description = {
        "inputs": [("input", ["batch", 3, size, size]), ("label", ["batch"])],
        "outputs": [("loss", [], True)],
    }
    return batch, description


def _mlp() -> Task:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
    description = {"inputs": [("input", ["batch", 784]), ("label", ["batch"])], "outputs": [("loss", [], True)]}
    return Task(model, (torch.randn(64, 784), torch.randint(0, 10, (64,))), description)


def _convolutions() -> Task:
    """Six 3x3 convolutions with batch norm, 32 to 128 channels; the size is halved twice."""
    layers: list[nn.Module] = []
    channels = 3
    for number, width in enumerate((32, 32, 64, 64, 128, 128)):
        stride = 2 if number in (2, 4) else 1
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return Task(model, *_images(16, 32))


def _shortcut(channels: int, width: int, stride: int) -> nn.Module:
    if stride == 1 and channels == width:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.convolution2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm1(self.convolution1(x)))
        return F.relu(self.norm2(self.convolution2(hidden)) + self.shortcut(x))


def _resnet18() -> Task:
    """ResNet-18 for images of 32 x 32: a 3x3 convolution and no pooling at the start."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for width in (64, 128, 256, 512):
        layers += [_ResidualBlock(channels, width, 1 if width == 64 else 2), _ResidualBlock(width, width, 1)]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return Task(model, *_images(16, 32))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 128)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden[:, -1])


def _lstm() -> Task:
    """A two-layer LSTM of width 256 on 16 texts of 32 tokens."""
    description = {"inputs": [("tokens", ["batch", 32]), ("label", ["batch"])], "outputs": [("loss", [], True)]}
    return Task(_Recurrent(), (torch.randint(0, 2000, (16, 32)), torch.randint(0, 4, (16,))), description)


class _Classifier(nn.Module):
    """A BERT that takes its inputs by position and returns only the logits."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids, attention_mask).logits


def _text_classifier(model: nn.Module, vocabulary: int, texts: int) -> Task:
    """Returns a BERT that classifies texts of 128 tokens."""
    batch = (
        torch.randint(0, vocabulary, (texts, 128)),
        torch.ones(texts, 128, dtype=torch.int64),
        torch.randint(0, 2, (texts,)),
    )
    shape = ["batch", "length"]
    description = {
        "inputs": [("input_ids", shape), ("attention_mask", shape), ("label", ["batch"])],
        "outputs": [("loss", [], True)],
    }
    return Task(_Classifier(model), batch, description)


def _bert() -> Task:
    """BERT with 4 layers of 256, 8 texts of 128 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    return _text_classifier(BertForSequenceClassification(config), 8000, 8)


def _padded_bert() -> Task:
    """The same, but the texts have 16, 32, ... 128 tokens, so 44 % of the places are padded."""
    task = _bert()
    mask = (torch.arange(128) < torch.arange(16, 129, 16)[:, None]).long()
    return replace(task, batch=(task.batch[0], mask, task.batch[2]))


class _OwnLoss(nn.Module):
    """A model of Hugging Face's that returns its own loss; without labels, that of predicting its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.name = model, str(model.main_input_name)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(**{self.name: inputs}, labels=inputs if labels is None else labels).loss


def _masked_words() -> Task:
    """A masked language model: BERT with 4 layers of 256, vocabulary 30,000, 8 x 128 tokens, 15 % with a label."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=30000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    tokens = torch.randint(0, 30000, (8, 128))
    labels = torch.where(torch.rand(8, 128) < 0.15, tokens, -100)
    shape = ["batch", "length"]
    description = {"inputs": [("inputs", shape), ("labels", shape)], "outputs": [("loss", [], True)]}
    return Task(_OwnLoss(BertForMaskedLM(config)), (tokens, labels), description, None)


def _language_model(model: nn.Module, texts: int, length: int) -> Task:
    description = {"inputs": [("inputs", ["batch", "length"])], "outputs": [("loss", [], True)]}
    config: Any = model.config
    return Task(_OwnLoss(model), (torch.randint(0, config.vocab_size, (texts, length)),), description, None)


def _gpt2() -> Task:
    """GPT-2 with 4 layers of 256 and a vocabulary of 8000, 8 texts of 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=8000, n_positions=128, n_embd=256, n_layer=4, n_head=4)
    return _language_model(GPT2LMHeadModel(config), 8, 128)


class _Residual1d(nn.Module):
    """Two dilated convolutions over the past, with a shortcut (Bai et al., 2018)."""

    def __init__(self, channels: int, width: int, dilation: int) -> None:
        super().__init__()
        self.padding = 2 * dilation
        self.convolution1 = nn.Conv1d(channels, width, 3, dilation=dilation)
        self.convolution2 = nn.Conv1d(width, width, 3, dilation=dilation)
        self.dropout = nn.Dropout(0.1)
        self.shortcut: nn.Module = nn.Identity() if channels == width else nn.Conv1d(channels, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(F.relu(self.convolution1(F.pad(x, (self.padding, 0)))))
        hidden = self.dropout(F.relu(self.convolution2(F.pad(hidden, (self.padding, 0)))))
        return F.relu(hidden + self.shortcut(x))


def _tcn() -> Task:
    """A temporal convolutional network: five blocks of 64 channels on 16 series of 256 steps."""
    blocks = [_Residual1d(8 if number == 0 else 64, 64, 2**number) for number in range(5)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10))
    description = {"inputs": [("input", ["batch", 8, 256]), ("label", ["batch"])], "outputs": [("loss", [], True)]}
    return Task(model, (torch.randn(16, 8, 256), torch.randint(0, 10, (16,))), description)


class _InvertedResidual(nn.Module):
    """A block of MobileNetV2 (Sandler et al., 2018)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        inner = 4 * channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU6(),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.adds = stride == 1 and channels == width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def _mobilenet() -> Task:
    """Eight inverted residual blocks, 16 to 64 channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    channels = 16
    for width, stride in ((16, 1), (24, 2), (24, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1)):
        layers.append(_InvertedResidual(channels, width, stride))
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return Task(model, *_images(16, 32))


class _NormalizedConvolutions(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.convolution1, self.norm1 = nn.Conv2d(channels, width, 3, 1, 1), nn.GroupNorm(8, width)
        self.convolution2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm2(self.convolution2(F.silu(self.norm1(self.convolution1(x))))))


class _UNet(nn.Module):
    """Three levels of convolutions with group norm and SiLU (Ronneberger et al., 2015)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down1, self.down2 = _NormalizedConvolutions(3, width), _NormalizedConvolutions(width, 2 * width)
        self.middle = _NormalizedConvolutions(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join2 = _NormalizedConvolutions(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join1 = _NormalizedConvolutions(2 * width, width)
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        first = self.down1(input)
        second = self.down2(F.max_pool2d(first, 2))
        third = self.middle(F.max_pool2d(second, 2))
        second = self.join2(torch.cat([second, self.up2(third)], 1))
        return self.head(self.join1(torch.cat([first, self.up1(second)], 1)))


def _unet() -> Task:
    """A U-Net of 32 to 128 channels that labels the pixels of 4 images of 64 x 64."""
    description = {
        "inputs": [("input", ["batch", 3, 64, 64]), ("label", ["batch", 64, 64])],
        "outputs": [("loss", [], True)],
    }
    return Task(_UNet(), (torch.randn(4, 3, 64, 64), torch.randint(0, 4, (4, 64, 64))), description)


class _Logits(nn.Module):
    """A model of Hugging Face's that returns only the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.model(input).logits


def _vit() -> Task:
    """A vision transformer with 4 layers of 192 on 8 images of 64 x 64, 64 patches each."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    return Task(_Logits(ViTForImageClassification(config)), *_images(8, 64))


def _small_gpt2() -> Task:
    """GPT-2 with 4 layers of 128 and a vocabulary of 5000, 2 texts of 48 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=5000, n_positions=48, n_embd=128, n_layer=4, n_head=4)
    return _language_model(GPT2LMHeadModel(config), 2, 48)


def _llama() -> Task:
    """Llama with 4 layers of 256, 8 heads for 4 of keys and values, and a vocabulary of 8000; 8 texts of 128 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    return _language_model(LlamaForCausalLM(config), 8, 128)


def _t5() -> Task:
    """T5 with 3 + 3 layers of 256 and a vocabulary of 8000; 8 texts of 64 tokens, 32 tokens of each answer."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=8000, d_model=256, d_kv=64, d_ff=1024, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    description = {
        "inputs": [("inputs", ["batch", "length"]), ("labels", ["batch", "answer"])],
        "outputs": [("loss", [], True)],
    }
    batch = torch.randint(1, 8000, (8, 64)), torch.randint(1, 8000, (8, 32))
    return Task(_OwnLoss(T5ForConditionalGeneration(config)), batch, description, None)


class _Recommender(nn.Module):
    """DLRM (Naumov et al., 2019): tables for categories, a network for numbers, products of all pairs."""

    def __init__(self, tables: int = 8, rows: int = 10000, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        rows = [dense, *(table(categories[:, index]) for index, table in enumerate(self.tables))]
        stacked = torch.stack(rows, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        first, second = self.get_buffer("pairs")
        return self.top(torch.cat([dense, products[:, first, second]], 1))[:, 0]


def _dlrm() -> Task:
    """DLRM with 8 tables of 10,000 rows of 16, 256 samples."""
    description = {
        "inputs": [("numbers", ["batch", 13]), ("categories", ["batch", 8]), ("label", ["batch"])],
        "outputs": [("loss", [], True)],
    }
    batch = torch.randn(256, 13), torch.randint(0, 10000, (256, 8)), torch.randint(0, 2, (256,)).float()
    return Task(_Recommender(), batch, description, F.binary_cross_entropy_with_logits)


def _bert_base() -> Task:
    """BERT-base (110 million parameters), 4 texts of 128 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    return _text_classifier(BertForSequenceClassification(BertConfig()), 30522, 4)


def _gpt2_base() -> Task:
    """GPT-2 with 124 million parameters, 2 texts of 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _language_model(GPT2LMHeadModel(GPT2Config()), 2, 128)


class _LowRank(nn.Module):
    """A frozen layer beside a trained product of rank 8 (LoRA: Hu et al., 2021)."""

    def __init__(self, layer: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 2 * self.up(self.down(x))


def _low_rank(task: Task, adapted: tuple[str, ...], width: int, outputs: int, trained: str = "none") -> Task:
    """Freezes a model, but for what is added to some layers of ``width`` and the parameters that have a name."""
    for name, parameter in task.model.named_parameters():
        parameter.requires_grad_(trained in name)
    for module in [*task.model.modules()]:
        for name, layer in module.named_children():
            if name in adapted:
                setattr(module, name, _LowRank(layer, width, outputs))
    return task


def _bert_lora() -> Task:
    """BERT-base of which only LoRA of queries and values and the classifier are trained; 4 texts of 128 tokens."""
    return _low_rank(_bert_base(), ("query", "value"), 768, 768, "classifier")


def _gpt2_lora() -> Task:
    """GPT-2 with 124 million parameters of which only LoRA of attention is trained; 2 texts of 128 tokens."""
    return _low_rank(_gpt2_base(), ("c_attn",), 768, 3 * 768)


class _Bottleneck(nn.Module):
    """A block of ResNet-50 (He et al., 2016)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = _shortcut(channels, 4 * width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def _resnet50() -> Task:
    """ResNet-50, 4 images of 224 x 224."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(count):
            layers.append(_Bottleneck(channels, width, 2 if number == 0 and width > 64 else 1))
            channels = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return Task(model, *_images(4, 224, 1000))


def _convnext() -> Task:
    """ConvNeXt with stages of 1, 1, 2 and 1 blocks of 32 to 256 channels, 8 images of 64 x 64."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        depths=[1, 1, 2, 1], hidden_sizes=[32, 64, 128, 256], patch_size=2, image_size=64, num_labels=10
    )
    return Task(_Logits(ConvNextForImageClassification(config)), *_images(8, 64))


def _swin() -> Task:
    """Swin with stages of 2 blocks of 48, 96 and 192, windows of 4 x 4, 8 images of 64 x 64."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=48,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        window_size=4,
        num_labels=10,
    )
    return Task(_Logits(SwinForImageClassification(config)), *_images(8, 64))


class _DenoisingBlock(nn.Module):
    """A residual block that knows the time, as in DDPM (Ho et al., 2020)."""

    def __init__(self, channels: int, width: int, time: int) -> None:
        super().__init__()
        self.norm1, self.convolution1 = nn.GroupNorm(8, channels), nn.Conv2d(channels, width, 3, 1, 1)
        self.time = nn.Linear(time, width)
        self.norm2, self.convolution2 = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, 1, 1)
        self.shortcut: nn.Module = nn.Identity() if channels == width else nn.Conv2d(channels, width, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.convolution1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.convolution2(F.silu(self.norm2(hidden))) + self.shortcut(x)


class _PixelAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).flatten(2).transpose(1, 2)[:, None].chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value)[:, 0]
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class _DenoisingUNet(nn.Module):
    """Predicts the noise of an image at a time."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, 1, 1)
        self.block1, self.down1 = _DenoisingBlock(width, width, time), nn.Conv2d(width, width, 3, 2, 1)
        self.block2, self.down2 = _DenoisingBlock(width, 2 * width, time), nn.Conv2d(2 * width, 2 * width, 3, 2, 1)
        self.middle1, self.attention = _DenoisingBlock(2 * width, 2 * width, time), _PixelAttention(2 * width)
        self.middle2 = _DenoisingBlock(2 * width, 2 * width, time)
        self.up2, self.up1 = _DenoisingBlock(4 * width, width, time), _DenoisingBlock(2 * width, width, time)
        self.norm, self.head = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, 1, 1)

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(self.width // 2) * (-9.21 / (self.width // 2)))
        angles = time[:, None].float() * rates
        known = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        first = self.block1(self.first(image), known)
        second = self.block2(self.down1(first), known)
        third = self.middle2(self.attention(self.middle1(self.down2(second), known)), known)
        second = self.up2(torch.cat([F.interpolate(third, scale_factor=2.0), second], 1), known)
        first = self.up1(torch.cat([F.interpolate(second, scale_factor=2.0), first], 1), known)
        return self.head(F.silu(self.norm(first)))


def _diffusion() -> Task:
    """A U-Net of 32 and 64 channels that predicts the noise of 8 images of 32 x 32."""
    image = ["batch", 3, 32, 32]
    description = {
        "inputs": [("image", image), ("time", ["batch"]), ("noise", image)],
        "outputs": [("loss", [], True)],
    }
    batch = torch.randn(8, 3, 32, 32), torch.randint(0, 1000, (8,)), torch.randn(8, 3, 32, 32)
    return Task(_DenoisingUNet(), batch, description, F.mse_loss)


def _whisper() -> Task:
    """Whisper with 2 + 2 layers of 128 and a vocabulary of 4000, 4 spectrograms of 200 frames, texts of 24 tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=4000,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_source_positions=100,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    description = {
        "inputs": [("inputs", ["batch", 80, 200]), ("labels", ["batch", "length"])],
        "outputs": [("loss", [], True)],
    }
    batch = torch.randn(4, 80, 200), torch.randint(3, 4000, (4, 24))
    return Task(_OwnLoss(WhisperForConditionalGeneration(config)), batch, description, None)


def _mixtral() -> Task:
    """Mixtral with 2 layers of 128, 8 experts of 256, 2 for a token, vocabulary 4000; 4 texts of 64 tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=4000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    return _language_model(MixtralForCausalLM(config), 4, 64)


def _qwen_lora() -> Task:
    """Qwen2 with 4 layers of 256, vocabulary 8000, with LoRA of queries and values; 4 texts of 128 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    return _low_rank(_language_model(Qwen2ForCausalLM(config), 4, 128), ("q_proj", "v_proj"), 256, 256)


class _Translator(nn.Module):
    """An encoder and a decoder of GRUs with attention over the encoder's states (Luong et al., 2015)."""

    def __init__(self, vocabulary: int = 4000, width: int = 192) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.join, self.head = nn.Linear(2 * width, width), nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        states, last = self.encoder(self.source(source))
        decoded, _ = self.decoder(self.target(target[:, :-1]), last)
        weights = torch.softmax(decoded @ states.transpose(1, 2), -1)
        logits = self.head(torch.tanh(self.join(torch.cat([decoded, weights @ states], -1))))
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def _translator() -> Task:
    """GRUs of 192 with attention and a vocabulary of 4000; 16 texts of 24 tokens into 25."""
    description = {
        "inputs": [("source", ["batch", 24]), ("target", ["batch", 25])],
        "outputs": [("loss", [], True)],
    }
    batch = torch.randint(0, 4000, (16, 24)), torch.randint(0, 4000, (16, 25))
    return Task(_Translator(), batch, description, None)


MODELS: dict[str, Callable[[], Task]] = {
    "mlp": _mlp,
    "convolutions": _convolutions,
    "resnet18": _resnet18,
    "lstm": _lstm,
    "bert": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
    "tcn": _tcn,
    "mobilenet": _mobilenet,
    "unet": _unet,
    "vit": _vit,
    "small-gpt2": _small_gpt2,
    "llama": _llama,
    "dlrm": _dlrm,
    "bert-base": _bert_base,
    "gpt2-base": _gpt2_base,
    "resnet50": _resnet50,
    "masked-words": _masked_words,
    "padded-bert": _padded_bert,
    "bert-lora": _bert_lora,
    "gpt2-lora": _gpt2_lora,
    "convnext": _convnext,
    "swin": _swin,
    "diffusion": _diffusion,
    "whisper": _whisper,
    "mixtral": _mixtral,
    "qwen-lora": _qwen_lora,
    "translator": _translator,
}


def make_task(name: str, dropout: bool = True) -> Task:
    """Returns one of the models, the same in every process."""
    torch.manual_seed(0)
    task = MODELS[name]()
    if not dropout:
        without_dropout(task.model)
    return task


def without_dropout(model: nn.Module) -> None:
    """Sets every dropout of a model to zero."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):  # attention, which calls the function itself
            module.dropout_prob = 0.0  # type: ignore[assignment]
