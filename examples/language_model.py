"""Trains a small GPT-2 on the source code of the standard library, then generates some Python with it.

It shows tied weights (the embedding is also the output layer), a loss inside the model, and fetching only the loss from
each step, because the logits of a language model are large. ORTTrainer measures the perplexity of unseen files before
and after, and PyTorch measures it again with the trained weights loaded back into the model.

    python examples/language_model.py --out out/language_model
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from text_data import read_source, source_files, train_tokenizer
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

BLOCK = 128
VOCABULARY = 2000
LEARNING_RATE = 4e-3
TEST_BLOCKS = 64  # at most; enough to measure with
PROMPTS = ("def read", "import os\n", "class Error(")


@dataclass(frozen=True)
class Result:
    """The loss of every step, the perplexities of unseen files, and what the model wrote."""

    losses: list[float]
    perplexity_before: float
    perplexity_after: float
    perplexity_in_pytorch: float
    samples: list[str]


def load_blocks(limit: int | None) -> tuple[torch.Tensor, torch.Tensor, PreTrainedTokenizerFast]:
    """Returns token ids (blocks, BLOCK) of training files and of others, and the tokenizer, trained on the former."""
    files = source_files()
    random.Random(0).shuffle(files)
    sources = [read_source(path) for path in files[:limit]]
    held_out = max(1, len(sources) // 10)
    tokenizer = train_tokenizer(sources[held_out:], VOCABULARY)
    test = _blocks(sources[:held_out], tokenizer)
    return _blocks(sources[held_out:], tokenizer), test[:: 1 + len(test) // TEST_BLOCKS], tokenizer


def _blocks(sources: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    ids = [token for source in sources for token in [*tokenizer.encode(source), tokenizer.eos_token_id]]
    return torch.tensor(ids[: len(ids) // BLOCK * BLOCK]).view(-1, BLOCK)


def make_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """Returns a GPT-2 of 2 layers with random weights."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=BLOCK,
        n_embd=128,
        n_layer=2,
        n_head=4,
        # No dropout, because the run is short.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default, but without this transformers warns about the class name
    return model


def perplexity(trainer: ORTTrainer, blocks: torch.Tensor, batch_size: int) -> float:
    """Returns the perplexity of the blocks with the trainer's weights."""
    total = 0.0
    for ids in blocks.split(batch_size):
        total += trainer.eval_step(input_ids=ids, labels=ids).item() * len(ids)
    return math.exp(total / len(blocks))


@torch.no_grad()
def perplexity_in_pytorch(model: GPT2LMHeadModel, blocks: torch.Tensor, batch_size: int) -> float:
    """Returns the perplexity of the blocks with a PyTorch model."""
    model.eval()
    total = sum(model(input_ids=ids, labels=ids).loss.item() * len(ids) for ids in blocks.split(batch_size))
    return math.exp(total / len(blocks))


def write(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Returns the prompt and the model's continuation."""
    model.eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=60, do_sample=True, temperature=0.7)
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def main(arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/language_model"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=600, help="batches to train with")
    parser.add_argument("--batch-size", type=int, default=8, help=f"blocks of {BLOCK} tokens in a batch")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout, the order of the blocks and samples")
    parser.add_argument("--limit", type=int, help="use only this many source files")
    options = parser.parse_args(arguments)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # of save_pretrained
    train, test, tokenizer = load_blocks(options.limit)
    print(f"{train.numel()} training tokens, {test.numel()} test tokens")

    torch.manual_seed(options.seed)
    model = make_model(tokenizer)
    schedule = optim.CosineWarmupLRScheduler(total_steps=options.steps, warmup=0.05)
    undecayed = [name for name, parameter in model.named_parameters() if parameter.dim() < 2]  # biases and norms
    config = optim.AdamWConfig([{"params": undecayed, "weight_decay": 0.0}], lr=LEARNING_RATE, max_norm_clip=1.0)
    trainer = ORTTrainer(model, "auto", config, options=ORTTrainerOptions({"lr_scheduler": schedule}))
    # Steps then return only the loss; the logits, which are not used, would be 8 MB even here.
    trainer.train_step_info.fetches = ["loss"]
    before = perplexity(trainer, test, options.batch_size)
    order = torch.Generator().manual_seed(options.seed)
    losses = []
    for _ in tqdm(range(options.steps), unit="step"):
        ids = train[torch.randint(len(train), (options.batch_size,), generator=order)]
        losses.append(trainer.train_step(input_ids=ids, labels=ids).item())
    after = perplexity(trainer, test, options.batch_size)

    model.load_state_dict(trainer.state_dict(pytorch_format=True), strict=True)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    in_pytorch = perplexity_in_pytorch(model, test, options.batch_size)
    print(f"perplexity of unseen files: {before:.2f} before, {after:.2f} after; {in_pytorch:.2f} in PyTorch")
    torch.manual_seed(options.seed)
    samples = [write(model, tokenizer, prompt) for prompt in PROMPTS]
    for sample in samples:
        print(f"{'-' * 80}\n{sample}")
    return Result(losses, before, after, in_pytorch, samples)


if __name__ == "__main__":
    main()
