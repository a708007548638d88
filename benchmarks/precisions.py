"""Training steps of ort_trainer in fp32 and in mixed precision with fp16 or bfloat16, and of PyTorch in bfloat16.

The contenders take turns, each in its own process (see turns.py). Whether half precision is faster depends on the
processor: without native arithmetic for it, products are computed in fp32.

    python benchmarks/precisions.py                     # ten minutes on two cores
    python benchmarks/precisions.py --quick             # three rounds
    python benchmarks/precisions.py --rows bert         # this model only
    python benchmarks/precisions.py --write             # and writes docs/reference/benchmarks.md
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from sections import write_section
from step_rows import HALVES, ROWS, ort_training
from train_step import eager_training
from turns import Contender, Result, measure, ratio, serve
from versions import ENGINES, versions

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "benchmarks.md"
PACKAGES = ("torch", *ENGINES, "transformers")
FULL, EAGER = "fp32", "eager, bf16"
CONTENDERS = (FULL, *HALVES, EAGER)
MODELS = [name for name, row in ROWS.items() if name == row.model]


def serve_contender(name: str, row: str) -> None:
    """Runs a contender's process."""
    import torch  # noqa: F401 - imports are no part of the start-up that is measured

    from ort_trainer import ORTTrainer  # noqa: F401

    chosen = dataclasses.replace(ROWS[row], precision="bf16" if name == EAGER else name)
    serve(
        functools.partial(eager_training, chosen, False) if name == EAGER else functools.partial(ort_training, chosen)
    )


HEAD = [
    f"| model | fp32, ms | {' | '.join(f'{name}, ms | fp32 / {name} (95 %)' for name in HALVES)} | {EAGER}, ms |",
    f"|---|---|{'---|---|' * len(HALVES)}---|",
]


def line(row: str, results: Mapping[str, Result]) -> str:
    """Returns the line of a model."""
    cells = [ROWS[row].title, f"{results[FULL].median * 1e3:.4g}"]
    for name in HALVES:
        middle, low, high = ratio(results[FULL], results[name])
        cells += [f"{results[name].median * 1e3:.4g}", f"**{middle:.2f}** ({low:.2f} - {high:.2f})"]
    return f"| {' | '.join([*cells, f'{results[EAGER].median * 1e3:.4g}'])} |"


def processor() -> str:
    """Returns the half-precision dtypes whose products are computed in fp32 here."""
    from ort_trainer.engine.programs.processor import slow_halves

    slow = [name for name, dtype in HALVES.items() if any(str(known) == f"torch.{dtype}" for known in slow_halves())]
    return f"products of {' and '.join(slow)} computed in fp32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--rounds", type=int, help="blocks of steps of every contender; 8, or 3 with --quick")
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reference/benchmarks.md")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_contender(arguments.serve, arguments.rows[0])
        return
    rounds = arguments.rounds or (3 if arguments.quick else 8)
    place = f"Python {platform.python_version()}, {versions(PACKAGES)}; {os.cpu_count()} cores with {processor()}."
    text = [place, "", *HEAD]
    print("\n".join(text), flush=True)
    for row in arguments.rows:
        contenders = {
            name: Contender((sys.executable, __file__, "--serve", name, "--rows", row)) for name in CONTENDERS
        }
        results, died = measure(contenders, ROWS[row].steps, rounds, starts=1, needed=FULL)
        if died:
            raise SystemExit(f"{row}: {died}")
        text.append(line(row, results))
        print(text[-1], flush=True)
    if arguments.write:
        write_section(PAGE, "precisions", "\n".join(text))


if __name__ == "__main__":
    main()
