"""Hugging Face's Trainer on a small GPT-2, with options that change how it computes."""

import tempfile
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

CASES = {
    "accumulation, clipping, decay, warm-up": {
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_steps": 5,
        "lr_scheduler_type": "cosine",
    },
    "label smoothing, Adafactor": {"label_smoothing_factor": 0.1, "optim": "adafactor"},
    "gradient checkpointing": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "bf16": {"bf16": True},
}  # fmt: skip


def rows(count, length=32):
    """Returns pieces of the documentation of Python, as characters."""
    text = torch.tensor(list("\n".join(topics.values()).encode("ascii", errors="replace")[: count * length]))
    return [{"input_ids": row, "labels": row} for row in text.view(count, length)]


def main(steps=20, case="bf16"):
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=True, disable_tqdm=True, **CASES[case],
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows(500))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    for case in CASES:
        print(f"{case}: the loss is {main(case=case)[-1]:.3f}")
