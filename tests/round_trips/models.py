"""Models with every kind of state that could get lost, each with a batch and a trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim


class Everything(nn.Module):
    """Tied, frozen, empty, transposed and 0-d parameters, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.mixed = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.rand(()) + 1)
        self.empty = nn.Parameter(torch.randn(0, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(7))
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True, True]))
        self.register_buffer("seen", torch.rand(()), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) + self.embedding(self.positions) * self.mask.unsqueeze(1)
        hidden = self.norm(self.frozen(hidden.mean(1)))
        if self.training:
            self.seen.add_(1)
        hidden = self.mixed(F.linear(hidden, self.transposed)) * self.scale
        hidden = torch.cat([hidden, self.empty.to(hidden.dtype)])
        return self.head(hidden)


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        make: Makes one, with different weights each time.
        description: The model description.
        batch: Its tensors by name.
        loss_fn: The loss function; None if the model returns the loss.
        dtype: The dtype that the model is converted to.
    """

    make: Callable[[], nn.Module]
    description: dict[str, Any]
    batch: dict[str, torch.Tensor]
    loss_fn: Any = None
    dtype: torch.dtype = torch.float32

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().to(self.dtype)

    def trainer(self, model: nn.Module) -> ORTTrainer:
        options = ORTTrainerOptions({"utils": {"kernels": "auto"}})
        return ORTTrainer(model, self.description, optim.AdamConfig(lr=0.01), loss_fn=self.loss_fn, options=options)


def everything(dtype: torch.dtype = torch.float32) -> Case:
    generator = torch.Generator().manual_seed(1)
    batch = {
        "ids": torch.randint(11, (5, 7), generator=generator),
        "label": torch.randint(11, (5,), generator=generator),
    }
    description = {
        "inputs": [("ids", ["batch", 7]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", 11])],
    }
    return Case(Everything, description, batch, lambda logits, label: F.cross_entropy(logits.float(), label), dtype)


class WithLoss(nn.Module):
    """A language model of transformers that returns loss and logits."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.language_model(input_ids=input_ids, labels=labels, use_cache=False)
        return found.loss, found.logits


def _language_model(make: Callable[[], nn.Module]) -> Case:
    ids = torch.randint(30, (2, 6), generator=torch.Generator().manual_seed(1))
    description = {
        "inputs": [("input_ids", ["batch", 6]), ("labels", ["batch", 6])],
        "outputs": [("loss", [], True), ("logits", ["batch", 6, 30])],
    }
    return Case(lambda: WithLoss(make()), description, {"input_ids": ids, "labels": ids.clone()})


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 30, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    return _language_model(lambda: GPT2LMHeadModel(GPT2Config(**sizes)))


def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 8}
    return _language_model(lambda: BertForMaskedLM(BertConfig(**sizes)))


CASES: dict[str, Callable[[], Case]] = {
    "everything": everything,
    "float16": lambda: everything(torch.float16),
    "bfloat16": lambda: everything(torch.bfloat16),
    "gpt2": gpt2,
    "bert": bert,
}


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns copies of everything in ``state_dict``, and of the buffers that it leaves out."""
    found = {**dict(model.named_buffers(remove_duplicate=False)), **model.state_dict()}
    return {name: value.detach().clone() for name, value in found.items()}
