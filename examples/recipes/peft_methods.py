"""Methods of PEFT on a GPT-2, with Hugging Face's Trainer."""

import tempfile
from pydoc_data.topics import topics

import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from ort_trainer.integrations.transformers import HuggingFaceTrainer

TASK = "CAUSAL_LM"
LAYERS = {"task_type": TASK, "target_modules": ["c_attn"], "fan_in_fan_out": True}
METHODS = {
    "LoRA": LoraConfig(**LAYERS, r=4),
    "DoRA": LoraConfig(**LAYERS, r=4, use_dora=True),
    "PiSSA": LoraConfig(**LAYERS, r=4, init_lora_weights="pissa"),
    "AdaLoRA": AdaLoraConfig(**LAYERS, init_r=6, target_r=4, total_step=20),
    "VeRA": VeraConfig(**LAYERS, r=8),
    "IA3": IA3Config(**LAYERS, feedforward_modules=[]),
    "prompt tuning": PromptTuningConfig(task_type=TASK, num_virtual_tokens=4),
    "prefix tuning": PrefixTuningConfig(task_type=TASK, num_virtual_tokens=4),
}
SIZES = {"vocab_size": 128, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
REST = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def rows(count, length=32):
    """Returns pieces of the documentation of Python, as characters."""
    text = torch.tensor(list("\n".join(topics.values()).encode("ascii", errors="replace")[: count * length]))
    return [{"input_ids": row, "labels": row} for row in text.view(count, length)]


def trained(config, steps):
    torch.manual_seed(1)
    model = get_peft_model(GPT2LMHeadModel(GPT2Config(**SIZES, **REST)), config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True
        )
        trainer = HuggingFaceTrainer(model, arguments, train_dataset=rows(200), eval_dataset=rows(40))
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    return [*(entry["loss"] for entry in trainer.state.log_history if "loss" in entry), evaluated]


def main(steps=100):
    losses = []
    for name, config in METHODS.items():
        losses += trained(config, steps // len(METHODS))
        print(f"{name}: the loss is {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
