"""Models of sequences as their scripts have them, with batches and lengths that change: one export for all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim

from ..helpers import assert_close, assert_same_training

pytestmark = pytest.mark.engine

TOKENS = 30
CONFIG = optim.SGDConfig(lr=0.3)
SHAPES = [(7, 4)] * 10 + [(5, 4), (7, 4), (1, 4), (9, 4), (7, 3), (2, 1), (7, 4), (12, 2), (1, 1), (7, 4)]
LANGUAGE_DESC = {
    "inputs": [("tokens", ["length", "batch"]), ("next", ["length", "batch"])],
    "outputs": [("loss", [], True)],
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)


def language_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def language_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randint(0, TOKENS, shape), torch.randint(0, TOKENS, shape)) for shape in SHAPES]


class TransformerLanguageModel(nn.Transformer):
    """It keeps the mask of its last call, and lets ``nn.TransformerEncoder`` find out what kind of mask it is."""

    def __init__(self) -> None:
        super().__init__(d_model=8, nhead=2, dim_feedforward=16, num_encoder_layers=2, dropout=0.0)
        self.mask: torch.Tensor | None = None
        self.embedding = nn.Embedding(TOKENS, 8)
        self.decoder = nn.Linear(8, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.mask is None or self.mask.size(0) != len(tokens):
            self.mask = torch.log(torch.tril(torch.ones(len(tokens), len(tokens))))
        return self.decoder(self.encoder(self.embedding(tokens) * 8**0.5, mask=self.mask))


def test_language_model_of_a_transformer() -> None:
    model = TransformerLanguageModel()
    trainer = same(model, LANGUAGE_DESC, language_batches(), language_loss)
    tokens, following = language_batches()[0]
    reference = copy.deepcopy(model)
    reference.load_state_dict(trainer.state_dict(pytorch_format=True))
    with torch.no_grad():
        expected = language_loss(reference.eval()(tokens), following)
    assert_close(trainer.eval_step(tokens, following), expected, 1e-5, "loss in evaluation")


def same(model: nn.Module, desc: dict[str, Any], batches: list[Any], loss_fn: Any, exports: int = 1) -> ORTTrainer:
    trainer = assert_same_training(model, desc, batches, CONFIG, sgd, loss_fn=loss_fn, relative=1e-4)
    assert len(trainer.session.graphs(True)) == exports
    return trainer
