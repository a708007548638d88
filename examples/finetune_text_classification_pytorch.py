"""The same as finetune_text_classification.py in plain PyTorch, line by line; both print the same losses.

    python examples/finetune_text_classification_pytorch.py --out out/finetune_pytorch
    diff examples/finetune_text_classification_pytorch.py examples/finetune_text_classification.py

It cannot resume: a checkpoint would need the moments of the optimizer, the state of the schedule and of the random
numbers, and the accumulated gradients. It does not write an ONNX file either.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from text_data import PACKAGES, TextData, held_out_batches, load_text_data, train_batches
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils.logging import disable_progress_bar

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
WARMUP = 0.1
ACCUMULATION_STEPS = 2


@dataclass(frozen=True)
class Result:
    """The loss of every micro-batch, the test accuracies, and the accuracy of guessing."""

    losses: list[float]
    accuracies: list[float]
    baseline: float


def make_model(data: TextData) -> BertForSequenceClassification:
    """Returns a BERT of 2 layers with random weights."""
    config = BertConfig(
        vocab_size=len(data.tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=data.tokenizer.model_max_length,
        pad_token_id=data.tokenizer.pad_token_id,
        id2label=dict(enumerate(PACKAGES)),
        label2id={package: label for label, package in enumerate(PACKAGES)},
    )
    return BertForSequenceClassification(config)


def make_optimizer(model: BertForSequenceClassification, updates: int) -> tuple[AdamW, LambdaLR]:
    """Returns an optimizer and a warm-up schedule over the given number of updates."""
    undecayed = [parameter for parameter in model.parameters() if parameter.dim() < 2]  # biases and norms
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    optimizer = AdamW(
        [{"params": undecayed, "weight_decay": 0.0}, {"params": decayed}], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
    )
    warmup_updates = WARMUP * updates

    def factor(update: int) -> float:
        if update < warmup_updates:
            return update / max(1.0, warmup_updates)
        return max(0.0, (updates - update) / max(1.0, updates - warmup_updates))

    return optimizer, LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(model: BertForSequenceClassification, data: TextData, batch_size: int) -> float:
    """Returns the accuracy on the test texts."""
    model.eval()
    right = 0
    for batch in held_out_batches(data, batch_size):
        logits = model(**batch).logits
        right += int((logits.argmax(-1) == batch["labels"]).sum())
    return right / len(data.test)


def main(arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/finetune_pytorch"), help="folder of the results")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the training texts")
    parser.add_argument("--batch-size", type=int, default=16, help="texts in a micro-batch")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and the order of the texts")
    parser.add_argument("--limit", type=int, help="use only this many texts")
    options = parser.parse_args(arguments)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # of save_pretrained
    data = load_text_data(options.limit)
    print(f"{len(data.train)} training texts, {len(data.test)} test texts")

    torch.manual_seed(options.seed)
    model = make_model(data)
    torch.manual_seed(options.seed)  # for the dropout masks
    batches = len(train_batches(data, options.batch_size, options.seed, 0))
    optimizer, schedule = make_optimizer(model, updates=options.epochs * batches // ACCUMULATION_STEPS)
    losses: list[float] = []
    accuracies: list[float] = []
    for epoch in range(options.epochs):
        model.train()
        for batch in train_batches(data, options.batch_size, options.seed, epoch):
            loss = model(**batch).loss
            (loss / ACCUMULATION_STEPS).backward()
            losses.append(loss.item())
            if len(losses) % ACCUMULATION_STEPS == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accuracies.append(evaluate(model, data, options.batch_size))
        mean = sum(losses[-batches:]) / batches
        print(f"epoch {epoch + 1}: mean loss {mean:.5f}, last {losses[-1]:.5f}, test accuracy {accuracies[-1]:.2%}")
        if accuracies[-1] > max(accuracies[:-1], default=-1.0):
            model.save_pretrained(out / "model")

    data.tokenizer.save_pretrained(out / "model")
    best = accuracies.index(max(accuracies)) + 1
    print(f"best epoch: {best}, test accuracy {max(accuracies):.2%}; always guessing: {data.baseline:.2%}")
    return Result(losses, accuracies, data.baseline)


if __name__ == "__main__":
    main()
