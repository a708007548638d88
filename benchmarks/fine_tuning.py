"""Fine-tuning a language model: all weights, LoRA, and LoRA on a base of 8 and 4 bits; time of a step, and memory.

The contenders take turns, each in its own process (see turns.py). PyTorch trains peft's adapters of rank 8, and so does
ort_trainer. Memory is the peak after the first step, less that of a process that imports the same and trains nothing;
this needs Linux.

    python benchmarks/fine_tuning.py                     # a quarter of an hour on two cores
    python benchmarks/fine_tuning.py --rows bert --rounds 3
    python benchmarks/fine_tuning.py --write             # and writes the table of docs/adapters.md
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memory import eager
from sections import write_section
from turns import Contender, Result, Training, measure, memory, ratio, serve
from versions import versions

if TYPE_CHECKING:
    import torch

PAGE = Path(__file__).parents[1] / "docs" / "adapters.md"
NOTHING, FULL_EAGER, FULL = "imports", "all weights, PyTorch", "all weights"
LORA_EAGER, LORA_MODULE, LORA = "LoRA, PyTorch", "LoRA, ORTModule", "LoRA"
INT8, INT4 = "LoRA, base of 8 bits", "LoRA, base of 4 bits"
CONTENDERS = (NOTHING, FULL_EAGER, FULL, LORA_EAGER, LORA_MODULE, LORA, INT8, INT4)


@dataclasses.dataclass(frozen=True)
class Row:
    """A model to tune.

    Attributes:
        title: What the table calls it.
        make: Returns it.
        targets: The layers that get adapters.
        head: The layer that no base rounds, as usual.
        trains_head: Whether it is trained as a whole, beside the adapters.
        rows, tokens: The size of a batch.
    """

    title: str
    make: Callable[[], Any]
    targets: tuple[str, ...]
    head: str
    trains_head: bool = False
    rows: int = 4
    tokens: int = 128


def _bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig())


def _qwen() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=12, vocab_size=32000, use_cache=False))


ROWS = {
    "bert": Row("BERT-base, 4 x 128 tokens", _bert, ("query", "value"), "classifier", trains_head=True),
    "qwen": Row(
        "12 layers of a Qwen2.5 of 0.5 billion, 32,000 words, 2 x 128 tokens",
        _qwen,
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        "lm_head",
        rows=2,
    ),
}


def training(contender: str, row: Row) -> Training:
    """Returns the training of a contender."""
    import peft
    import torch
    from torch import nn

    from ort_trainer import ORTModule, ORTTrainer, optim, quantize

    class WithLoss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, labels=labels).loss

    if contender == NOTHING:
        return Training(lambda: 0.0)
    torch.manual_seed(0)
    tuned = row.make()
    ids = torch.randint(0, tuned.config.vocab_size, (row.rows, row.tokens))
    labels = torch.randint(0, 2, (row.rows,)) if row.trains_head else ids
    if contender in (INT8, INT4):
        tuned = quantize(tuned, "int8" if contender == INT8 else "int4", keep=[row.head])
    if contender not in (FULL_EAGER, FULL):
        config = peft.LoraConfig(target_modules=[*row.targets], modules_to_save=[row.head] if row.trains_head else None)
        tuned = peft.get_peft_model(tuned, config)
    model: Any = WithLoss(tuned).train()
    if contender in (FULL, LORA, INT8, INT4):
        trainer = ORTTrainer(model, "auto", optim.AdamWConfig(lr=1e-4), options={"utils": {"grad_norm_clip": False}})
        return from_second_step(lambda: trainer.train_step(ids, labels))
    step = eager(ORTModule(model) if contender == LORA_MODULE else model)
    return from_second_step(lambda: step(ids, labels))


def from_second_step(step: Callable[[], Any]) -> Training:
    """Returns a training whose peak memory is that of the second step and later ones."""
    count = itertools.count()

    def counted() -> Any:
        if next(count) == 1:
            memory("VmRSS", reset=True)
        return step()

    return Training(counted)


HEAD = (
    "| model | | a step, ms | against PyTorch (95 %) | against all weights | memory, MB | of all weights' |\n"
    "|---|---|---|---|---|---|---|"
)


def lines(row: Row, results: Mapping[str, Result]) -> list[str]:
    """Returns the lines of a model."""
    made = []
    imports = results[NOTHING].own
    for name in CONTENDERS[1:]:
        reference = FULL_EAGER if name in (FULL_EAGER, FULL) else LORA_EAGER
        middle, low, high = ratio(results[reference], results[name])
        full = FULL_EAGER if name in (FULL_EAGER, LORA_EAGER) else FULL
        used = results[name].own - imports
        cells = (
            row.title if name == CONTENDERS[1] else "",
            name,
            f"{results[name].median * 1e3:.4g}",
            "1" if name == reference else f"**{middle:.2f}** ({low:.2f} - {high:.2f})",
            f"{1 / ratio(results[full], results[name])[0]:.2f}",
            f"{used:.0f}",
            f"{used / (results[full].own - imports):.2f}",
        )
        made.append(f"| {' | '.join(cells)} |")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rounds", type=int, default=8, help="blocks of steps of every contender")
    parser.add_argument("--write", action="store_true", help="write the table into docs/adapters.md")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        import peft  # noqa: F401 - imports are no part of what is measured
        import transformers  # noqa: F401

        import ort_trainer  # noqa: F401

        serve(functools.partial(training, arguments.serve, ROWS[arguments.rows[0]]))
        return
    place = f"Python {platform.python_version()}, {versions(['torch', 'transformers', 'peft'])}; {os.cpu_count()} cores"
    text = [HEAD]
    print(f"{place}\n\n{HEAD}", flush=True)
    for name in arguments.rows:
        contenders = {
            each: Contender((sys.executable, __file__, "--serve", each, "--rows", name)) for each in CONTENDERS
        }
        results, died = measure(contenders, 1, arguments.rounds, starts=2)
        if died:
            raise SystemExit(f"{name}: {died}")
        found = lines(ROWS[name], results)
        text += found
        print("\n".join(found), flush=True)
    if arguments.write:
        write_section(PAGE, "fine-tuning", "\n".join([*text, "", f"Measured with {place}."]))


if __name__ == "__main__":
    main()
