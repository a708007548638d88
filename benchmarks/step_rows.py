"""The rows of the tables of training steps, and how ort_trainer trains each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from turns import Training

if TYPE_CHECKING:
    from step_models import Batch

__all__ = ["HALVES", "ROWS", "Row", "ort_training"]

HALVES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the tables.

    Attributes:
        title: The title in the table.
        label: The label in the charts, which must make sense without the preceding row.
        model: The name in ``step_models.MODELS``.
        steps: The number of steps of a block.
        dropout: Whether the model keeps its dropout.
        precision: ``fp32``, or the dtype of mixed precision, a key of ``HALVES``.
        accumulation: Micro-batches per update.
    """

    title: str
    label: str
    model: str
    steps: int
    dropout: bool = True
    precision: str = "fp32"
    accumulation: int = 1


ROWS = {
    "mlp": Row("MLP 784-512-10, batch 64", "MLP", "mlp", 150),
    "convolutions": Row("six convolutions with batch norm, 16 x 32 x 32", "six convolutions", "convolutions", 8),
    "resnet18": Row("ResNet-18, 16 x 32 x 32", "ResNet-18", "resnet18", 3),
    "lstm": Row("two-layer LSTM of 256, 16 x 32 tokens", "LSTM", "lstm", 12),
    "bert": Row("BERT, 4 layers of 256, 8 x 128 tokens", "BERT", "bert", 5),
    "bert-no-dropout": Row("the same without dropout", "BERT, no dropout", "bert", 5, dropout=False),
    "gpt2": Row("GPT-2, 4 layers of 256, vocabulary 8000, 8 x 128 tokens", "GPT-2", "gpt2", 4),
    "gpt2-no-dropout": Row("the same without dropout", "GPT-2, no dropout", "gpt2", 4, dropout=False),
    "bert-bf16": Row("BERT in bfloat16", "BERT, bfloat16", "bert", 5, precision="bf16"),
    "bert-fp16": Row("BERT in fp16", "BERT, fp16", "bert", 5, precision="fp16"),
    "bert-accumulation": Row("BERT, 4 micro-batches an update", "BERT, 4 micro-batches", "bert", 8, accumulation=4),
}


def ort_training(
    row: Row,
    utils: Mapping[str, str] | None = None,
    distributed: Mapping[str, Any] | None = None,
    batch: Callable[[Batch], Batch] = lambda batch: batch,
) -> Training:
    """Returns the training of a row by ort_trainer.

    Args:
        row: The row.
        utils: Options of the section ``utils``, beside those that make it comparable with the other contenders.
        distributed: Options of the section ``distributed``.
        batch: Returns the batch to train with, given the row's batch.
    """
    from step_models import make_task

    from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

    task = make_task(row.model, row.dropout)
    inputs = batch(task.batch)
    options = ORTTrainerOptions(
        {
            "utils": {"grad_norm_clip": False, **(utils or {})},  # the others do not clip either
            "batch": {"gradient_accumulation_steps": row.accumulation},
            "distributed": dict(distributed or {}),
            "mixed_precision": {"enabled": True, "dtype": HALVES[row.precision]} if row.precision in HALVES else {},
        }
    )
    config = optim.AdamConfig(lr=1e-3, lambda_coef=0.01)
    trainer = ORTTrainer(task.model, task.description, config, loss_fn=task.loss_fn, options=options)
    return Training(lambda: trainer.train_step(*inputs), trainer, row.accumulation)
