"""A language model of words: nn.Transformer's encoder under a causal mask that is kept from call to call."""

import math

import torch
import torch.nn.functional as F
from cookbook_data import columns, words
from torch import nn

from ort_trainer import ORTTrainer

VOCABULARY, WIDTH, BATCH, LENGTH = 500, 32, 8, 15


class TransformerModel(nn.Transformer):
    def __init__(self):
        super().__init__(d_model=WIDTH, nhead=2, dim_feedforward=64, num_encoder_layers=2, dropout=0.0)
        self.src_mask = None
        self.input_emb = nn.Embedding(VOCABULARY, WIDTH)
        position = torch.arange(100).unsqueeze(1)
        angle = position * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        self.register_buffer("places", torch.stack((angle.sin(), angle.cos()), dim=2).view(100, 1, WIDTH))
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, src):
        if self.src_mask is None or self.src_mask.size(0) != len(src):
            self.src_mask = torch.log(torch.tril(torch.ones(len(src), len(src))))
        x = self.input_emb(src) * math.sqrt(WIDTH) + self.places[: len(src)]
        output = self.decoder(self.encoder(x, mask=self.src_mask))
        return F.log_softmax(output, dim=-1).flatten(0, 1)


def batch(text, start):
    length = min(LENGTH, len(text) - 1 - start)
    return text[start : start + length], text[start + 1 : start + 1 + length].flatten()


@torch.no_grad()
def evaluate(model, text):
    model.eval()
    pairs = [batch(text, start) for start in range(0, len(text) - 1, LENGTH)]
    total = sum(F.nll_loss(model(data), target, reduction="sum").item() for data, target in pairs)
    return total / (text.numel() - BATCH)


def main(steps=600):
    torch.manual_seed(1)
    text = columns(words(VOCABULARY), BATCH)
    text, held_out = text[:-200], text[-200:]
    model = TransformerModel()
    lr, best = 1.0, float("inf")
    trainer = ORTTrainer(model, "auto", torch.optim.SGD(model.parameters(), lr=lr), loss_fn=F.nll_loss)
    losses = []
    for step in range(steps):
        model.train()
        data, target = batch(text, step * LENGTH % (len(text) - 1))
        model.zero_grad()
        loss, _ = trainer.forward_backward(data, target)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-lr)
        losses.append(loss.item())
        if step % 10 == 9:
            found = evaluate(model, held_out)
            if found > best:
                lr /= 4.0
            best = min(best, found)
    print(f"loss of the held-out text: {best:.3f}")
    return losses


if __name__ == "__main__":
    main()
