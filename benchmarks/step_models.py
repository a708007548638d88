"""The models whose training steps are measured: each with a batch, a model description and a loss function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.convolution2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

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


def _bert() -> Task:
    """BERT with 4 layers of 256, 8 texts of 128 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    batch = torch.randint(0, 8000, (8, 128)), torch.ones(8, 128, dtype=torch.int64), torch.randint(0, 2, (8,))
    shape = ["batch", "length"]
    description = {
        "inputs": [("input_ids", shape), ("attention_mask", shape), ("label", ["batch"])],
        "outputs": [("loss", [], True)],
    }
    return Task(_Classifier(BertForSequenceClassification(config)), batch, description)


class _LanguageModel(nn.Module):
    """A GPT-2 that returns the loss of its own predictions."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.gpt(input_ids, labels=input_ids).loss


def _gpt2() -> Task:
    """GPT-2 with 4 layers of 256 and a vocabulary of 8000, 8 texts of 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=8000, n_positions=128, n_embd=256, n_layer=4, n_head=4)
    description = {"inputs": [("input_ids", ["batch", "length"])], "outputs": [("loss", [], True)]}
    return Task(_LanguageModel(GPT2LMHeadModel(config)), (torch.randint(0, 8000, (8, 128)),), description, None)


MODELS: dict[str, Callable[[], Task]] = {
    "mlp": _mlp,
    "convolutions": _convolutions,
    "resnet18": _resnet18,
    "lstm": _lstm,
    "bert": _bert,
    "gpt2": _gpt2,
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
            module.dropout_prob = 0.0
