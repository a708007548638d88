"""TRL's trainers on lines of Python's documentation: SFT with an adapter, DPO, a reward model, and GRPO."""

import argparse
import csv
import logging
import pydoc
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)


def lines():
    text = "\n".join(pydoc.plain(pydoc.render_doc(module)) for module in (argparse, csv, logging))
    return [line for line in (" ".join(line.split()) for line in text.splitlines()) if 5 < len(line.split()) < 12][:200]


def tokenizer_for(texts):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<pad>", "<unk>", "<end>"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>", name_or_path="words"
    )


def main(steps=20):
    texts = lines()
    tokenizer = tokenizer_for(texts)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=2,
    )
    halves = [(" ".join(words[:3]), " " + " ".join(words[3:])) for words in map(str.split, texts)]
    starts, ends = zip(*halves, strict=True)
    pairs = {"prompt": starts, "chosen": ends, "rejected": ends[::-1]}
    found = []

    def train(trainer_class, config_class, model_class, data, steps=steps, key="loss", **arguments):
        torch.manual_seed(1)
        model = model_class(config)
        with tempfile.TemporaryDirectory() as folder:
            options = config_class(
                folder,
                max_steps=steps,
                learning_rate=1e-2,
                per_device_train_batch_size=4,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                bf16=False,
                use_cpu=True,
                disable_tqdm=True,
                **arguments.pop("options", {}),
            )
            data = Dataset.from_dict(data)
            trainer = trainer_class(model, args=options, train_dataset=data, processing_class=tokenizer, **arguments)
            trainer.train()
        found.extend(row[key] for row in trainer.state.log_history if key in row)

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    train(SFTTrainer, SFTConfig, LlamaForCausalLM, {"text": texts}, peft_config=adapter)
    train(DPOTrainer, DPOConfig, LlamaForCausalLM, pairs, ref_model=LlamaForCausalLM(config))
    train(RewardTrainer, RewardConfig, LlamaForSequenceClassification, pairs)

    def variety(completions, **_):
        return [float(len(set(text.split()))) for text in completions]

    options = {"num_generations": 4, "max_completion_length": 8}
    prompts = {"prompt": starts}
    train(GRPOTrainer, GRPOConfig, LlamaForCausalLM, prompts, 4, "reward", reward_funcs=variety, options=options)
    print(f"the last mean number of different words is {found[-1]:.2f}")
    return found


if __name__ == "__main__":
    main()
