"""Trains a small BERT to predict which package of the standard library a docstring or comment comes from.

It has what a fine-tuning script needs: a Hugging Face model, tokenizer and collator, batches of varying length, a
warm-up schedule, no weight decay on biases and norms, gradient accumulation, an evaluation after each epoch, the best
and the last checkpoint, and at the end a folder for ``from_pretrained`` and an ONNX file. The model starts from random
weights to avoid a download; to start from pretrained ones, replace the one line that makes it.

    python examples/finetune_text_classification.py --out out/finetune
    python examples/finetune_text_classification.py --out out/finetune --resume     # after an interruption
    diff examples/finetune_text_classification_pytorch.py examples/finetune_text_classification.py

The last command compares it with the same script in plain PyTorch, which prints the same losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from text_data import PACKAGES, TextData, held_out_batches, load_text_data, train_batches
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

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


def make_trainer(model: BertForSequenceClassification, updates: int) -> ORTTrainer:
    """Returns a trainer with a warm-up schedule over the given number of updates."""
    undecayed = [name for name, parameter in model.named_parameters() if parameter.dim() < 2]  # biases and norms
    groups = [{"params": undecayed, "weight_decay": 0.0}]
    config = optim.AdamWConfig(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, max_norm_clip=1.0)
    options = ORTTrainerOptions(
        {
            "batch": {"gradient_accumulation_steps": ACCUMULATION_STEPS},
            # Use PyTorch's own dropout masks to get the same losses as the other script; steps are faster without this.
            "utils": {"random_numbers": "pytorch"},
            "lr_scheduler": optim.LinearWarmupLRScheduler(total_steps=updates, warmup=WARMUP),
        }
    )
    return ORTTrainer(model, "auto", config, options=options)


def evaluate(trainer: ORTTrainer, data: TextData, batch_size: int) -> float:
    """Returns the accuracy on the test texts."""
    right = 0
    for batch in held_out_batches(data, batch_size):
        _, logits = trainer.eval_step(**batch)
        right += int((logits.argmax(-1) == batch["labels"]).sum())
    return right / len(data.test)


def main(arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/finetune"), help="folder of the results")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the training texts")
    parser.add_argument("--batch-size", type=int, default=16, help="texts in a micro-batch")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and the order of the texts")
    parser.add_argument("--limit", type=int, help="use only this many texts")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
    options = parser.parse_args(arguments)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # of save_pretrained
    data = load_text_data(options.limit)
    print(f"{len(data.train)} training texts, {len(data.test)} test texts")

    torch.manual_seed(options.seed)
    model = make_model(data)
    torch.manual_seed(options.seed)  # the trainer takes this seed for its dropout masks
    batches = len(train_batches(data, options.batch_size, options.seed, 0))
    trainer = make_trainer(model, updates=options.epochs * batches // ACCUMULATION_STEPS)
    losses: list[float] = []
    accuracies: list[float] = []
    if options.resume:
        progress = trainer.load_checkpoint(out / "last.ortckpt")
        losses, accuracies = progress["losses"], progress["accuracies"]
    for epoch in range(len(accuracies), options.epochs):
        for batch in train_batches(data, options.batch_size, options.seed, epoch):
            loss, _ = trainer.train_step(**batch)
            losses.append(loss.item())
        accuracies.append(evaluate(trainer, data, options.batch_size))
        mean = sum(losses[-batches:]) / batches
        print(f"epoch {epoch + 1}: mean loss {mean:.5f}, last {losses[-1]:.5f}, test accuracy {accuracies[-1]:.2%}")
        progress = {"epoch": epoch + 1, "losses": losses, "accuracies": accuracies}
        if accuracies[-1] > max(accuracies[:-1], default=-1.0):
            trainer.save_checkpoint(out / "best.ortckpt", progress, overwrite=True)
        trainer.save_checkpoint(out / "last.ortckpt", progress, overwrite=True)

    best = trainer.load_checkpoint(out / "best.ortckpt")
    model.load_state_dict(trainer.state_dict(pytorch_format=True), strict=True)
    model.save_pretrained(out / "model")
    data.tokenizer.save_pretrained(out / "model")
    print(f"best epoch: {best['epoch']}, test accuracy {max(accuracies):.2%}; always guessing: {data.baseline:.2%}")
    trainer.export_for_inference(out / "model.onnx")
    print(f"largest difference of the ONNX file's logits: {onnx_difference(out / 'model.onnx', model, data):.1e}")
    return Result(losses, accuracies, data.baseline)


def onnx_difference(path: Path, model: BertForSequenceClassification, data: TextData) -> float:
    """Returns the largest difference between the logits of an ONNX file in onnxruntime and of the PyTorch model."""
    batch = next(iter(held_out_batches(data, 8)))
    del batch["labels"]
    model.eval()
    with torch.no_grad():
        expected = model(**batch).logits.numpy()
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {name: values.numpy() for name, values in batch.items()})
    return float(np.abs(logits - expected).max())


if __name__ == "__main__":
    main()
