"""A language model of words: an LSTM that carries its state through the text, clipping, and an update by hand."""

import torch
import torch.nn.functional as F
from cookbook_data import columns, words
from torch import nn

from ort_trainer import ORTTrainer

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH = 500, 32, 2, 8, 15


class LSTMModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, hidden):
        output, hidden = self.lstm(self.encoder(tokens), hidden)
        return self.decoder(output).flatten(0, 1), hidden

    def init_hidden(self):
        return torch.zeros(LAYERS, BATCH, WIDTH), torch.zeros(LAYERS, BATCH, WIDTH)


def criterion(output, target):
    return F.cross_entropy(output[0], target)


def batch(text, start):
    length = min(LENGTH, len(text) - 1 - start)
    return text[start : start + length], text[start + 1 : start + 1 + length].flatten()


@torch.no_grad()
def evaluate(model, text):
    model.eval()
    hidden = model.init_hidden()
    total = 0.0
    for start in range(0, len(text) - 1, LENGTH):
        data, target = batch(text, start)
        output, hidden = model(data, hidden)
        total += F.cross_entropy(output, target, reduction="sum").item()
    return total / (text.numel() - BATCH)


def main(steps=600):
    torch.manual_seed(1)
    text = columns(words(VOCABULARY), BATCH)
    text, held_out = text[:-200], text[-200:]
    model = LSTMModel()
    lr, best = 5.0, float("inf")
    trainer = ORTTrainer(model, "auto", torch.optim.SGD(model.parameters(), lr=lr), loss_fn=criterion)
    losses = []
    hidden = model.init_hidden()
    for step in range(steps):
        model.train()
        data, target = batch(text, step * LENGTH % (len(text) - 1))
        model.zero_grad()
        loss, _, *hidden = trainer.forward_backward(data, tuple(hidden), target)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
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
