"""Small data for the cookbook: handwritten digits, and the prose of Python's own documentation."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from sklearn.datasets import load_digits

__all__ = ["batches", "characters", "columns", "digits", "words"]


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 1797 images (1797, 1, 8, 8) with values from -1 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)


def batches(size: int, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns shuffled batches of digits; the same ones for the same epoch."""
    images, labels = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    return [(images[rows], labels[rows]) for rows in order.split(size)]


def words(vocabulary: int) -> torch.Tensor:
    """Returns the documentation as numbers of words; 0 is any word that is not among the most frequent ones."""
    found = " ".join(topics.values()).split()[:100_000]
    counts: dict[str, int] = {}
    for word in found:
        counts[word] = counts.get(word, 0) + 1
    ranks = {word: rank for rank, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word)), start=1)}
    return torch.tensor([ranks[word] if ranks[word] < vocabulary else 0 for word in found])


def columns(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Returns a text as columns (length, count) that are read side by side."""
    length = len(tokens) // count
    return tokens[: length * count].view(count, length).t().contiguous()


def characters() -> torch.Tensor:
    """Returns the documentation as the numbers, below 128, of its ASCII characters."""
    text = "\n".join(topics.values())[:200_000]
    return torch.tensor(list(text.encode("ascii", errors="replace")))
