"""Numbers of several digits, read column by column: an LSTM and CTC, which needs no positions of the digits."""

import torch
import torch.nn.functional as F
from cookbook_data import digits
from torch import nn

MOST, BLANK = 4, 10


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 11)

    def forward(self, columns):
        return self.head(self.lstm(columns)[0]).log_softmax(-1)


def ctc(log_probability, numbers, columns, lengths):
    return F.ctc_loss(log_probability.transpose(0, 1), numbers, columns, lengths, blank=BLANK)


def batch(data, step, size=16):
    """Returns images as columns (size, 32, 8), the digits (size, 4), and how many columns and digits are filled."""
    images, labels = data
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(len(images), (size, MOST), generator=generator)
    lengths = torch.randint(1, MOST + 1, (size,), generator=generator)
    columns = images[rows].transpose(-1, -2).reshape(size, MOST * 8, 8)
    return columns, labels[rows], 8 * lengths, lengths


@torch.no_grad()
def evaluate(model, data):
    hits = 0
    for columns, numbers, filled, lengths in (batch(data, step) for step in range(-4, 0)):
        best = model(columns).argmax(-1)
        for row, number, end, length in zip(best, numbers, filled, lengths, strict=True):
            read = [digit for digit in row[:end].unique_consecutive().tolist() if digit != BLANK]
            hits += read == number[:length].tolist()
    print(f"{hits} of 64 numbers are read")


def main(steps=200):
    torch.manual_seed(1)
    data = digits()
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        columns, numbers, filled, lengths = batch(data, step)
        optimizer.zero_grad()
        loss = ctc(model(columns), numbers, filled, lengths)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    evaluate(model, data)
    return losses


if __name__ == "__main__":
    main()
