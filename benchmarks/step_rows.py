"""The rows of the tables of training steps, and how ort_trainer trains each."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from turns import Training

if TYPE_CHECKING:
    from step_models import Batch

__all__ = ["HALVES", "ROWS", "Row", "kernels_of", "ort_training"]

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
        utils: Options of the section ``utils`` of ort_trainer.
    """

    title: str
    label: str
    model: str
    steps: int
    dropout: bool = True
    precision: str = "fp32"
    accumulation: int = 1
    utils: Mapping[str, str] = dataclasses.field(default_factory=dict)


ROWS = {
    "mlp": Row("MLP 784-512-10, batch 64", "MLP", "mlp", 150),
    "convolutions": Row("six convolutions with batch norm, 16 x 32 x 32", "six convolutions", "convolutions", 8),
    "resnet18": Row("ResNet-18, 16 x 32 x 32", "ResNet-18", "resnet18", 3),
    "lstm": Row("two-layer LSTM of 256, 16 x 32 tokens", "LSTM", "lstm", 12),
    "bert": Row("BERT, 4 layers of 256, 8 x 128 tokens", "BERT", "bert", 5),
    "bert-no-dropout": Row("the same without dropout", "BERT, no dropout", "bert", 5, dropout=False),
    "gpt2": Row("GPT-2, 4 layers of 256, vocabulary 8000, 8 x 128 tokens", "GPT-2", "gpt2", 4),
    "gpt2-no-dropout": Row("the same without dropout", "GPT-2, no dropout", "gpt2", 4, dropout=False),
    "t5": Row("T5, 3 + 3 layers of 256, 8 x 64 + 32 tokens", "T5", "t5", 5),
    "tcn": Row("temporal convolutions, 5 blocks of 64, 16 x 256 steps", "TCN", "tcn", 15),
    "mobilenet": Row("eight blocks as in MobileNetV2, 16 x 32 x 32", "MobileNet-like", "mobilenet", 8),
    "unet": Row("U-Net with group norm, 4 x 64 x 64", "U-Net", "unet", 5),
    "vit": Row("ViT, 4 layers of 192, 8 x 64 patches", "ViT", "vit", 8),
    "small-gpt2": Row("GPT-2, 4 layers of 128, 2 x 48 tokens", "small GPT-2", "small-gpt2", 20),
    "llama": Row("Llama, 4 layers of 256, 8 x 128 tokens", "Llama", "llama", 4),
    "dlrm": Row("DLRM, 8 tables of 10,000 x 16, batch 256", "DLRM", "dlrm", 100),
    "bert-base": Row("BERT-base, 4 x 128 tokens", "BERT-base", "bert-base", 1),
    "gpt2-base": Row("GPT-2 of 124 million parameters, 2 x 128 tokens", "GPT-2 124M", "gpt2-base", 1),
    "resnet50": Row("ResNet-50, 4 x 224 x 224", "ResNet-50", "resnet50", 1),
    "masked-words": Row("BERT, 15 % of the labels of a vocabulary of 30,000", "masked words", "masked-words", 3),
    "padded-bert": Row(
        "BERT, 44 % of the tokens padded and left out",
        "BERT, padding",
        "padded-bert",
        5,
        utils={"remove_padding": "attention_mask"},
    ),
    "bert-lora": Row("LoRA of BERT-base, 4 x 128 tokens", "BERT-base, LoRA", "bert-lora", 1),
    "gpt2-lora": Row("LoRA of GPT-2 124M, 2 x 128 tokens", "GPT-2 124M, LoRA", "gpt2-lora", 1),
    "convnext": Row("ConvNeXt, 5 blocks of 32 to 256, 8 x 64 x 64", "ConvNeXt", "convnext", 8),
    "swin": Row("Swin, 6 blocks of 48 to 192, 8 x 64 x 64", "Swin", "swin", 5),
    "diffusion": Row("U-Net of a diffusion model, 8 x 32 x 32", "diffusion U-Net", "diffusion", 6),
    "whisper": Row("Whisper, 2 + 2 layers of 128, 4 x 200 frames + 24 tokens", "Whisper", "whisper", 8),
    "mixtral": Row("Mixtral, 2 layers of 128, 8 experts, 4 x 64 tokens", "Mixtral", "mixtral", 8),
    "qwen-lora": Row("LoRA of Qwen2, 4 layers of 256, 4 x 128 tokens", "Qwen2, LoRA", "qwen-lora", 5),
    "translator": Row("GRUs of 192 with attention, 16 x 24 + 25 tokens", "seq2seq, GRU", "translator", 6),
    "bert-bf16": Row("BERT in bfloat16", "BERT, bfloat16", "bert", 5, precision="bf16"),
    "bert-fp16": Row("BERT in fp16", "BERT, fp16", "bert", 5, precision="fp16"),
    "bert-accumulation": Row("BERT, 4 micro-batches an update", "BERT, 4 micro-batches", "bert", 8, accumulation=4),
}


def kernels_of(contender: str) -> dict[str, str]:
    """Returns the options of the section ``utils`` of a contender whose name says the kernels."""
    return {"kernels": contender.partition(", ")[2] or "auto"}


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
    options: Any = {
        "utils": {"grad_norm_clip": False, **row.utils, **(utils or {})},  # the others do not clip either
        "batch": {"gradient_accumulation_steps": row.accumulation},
        "distributed": dict(distributed or {}),
        "mixed_precision": {"enabled": True, "dtype": HALVES[row.precision]} if row.precision in HALVES else {},
    }
    config = optim.AdamConfig(lr=1e-3, lambda_coef=0.01)
    is_settled = _Chosen().is_made if options["utils"].get("kernels") == "fastest" else lambda: True
    trainer = ORTTrainer(task.model, task.description, config, loss_fn=task.loss_fn, options=ORTTrainerOptions(options))
    return Training(lambda: trainer.train_step(*inputs), trainer, row.accumulation, is_settled)


class _Chosen(logging.Handler):
    """Listens whether the trainer has chosen its kernels by measuring, or says why it does not measure."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: list[str] = []
        logger = logging.getLogger("ort_trainer")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a message."""
        self._messages.append(record.getMessage())

    def is_made(self) -> bool:
        """Returns whether the choice is made."""
        texts = "training goes on with", "training stays", "chosen in an earlier run"
        return any(text in message for message in self._messages for text in texts)
