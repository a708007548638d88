"""The gain of each graph rewrite, and of everything else that makes ort_trainer's steps fast.

For each model there is a contender with everything switched on, and one for each lever with everything but that lever.
They take turns, each in its own process (see turns.py). A lever is measured on the models that it targets. The gain is
the time without it divided by the time with it, so the gains of two levers need not multiply to that of both.

    python benchmarks/rewrites.py                       # everything; ten minutes on two cores
    python benchmarks/rewrites.py --quick               # three rounds
    python benchmarks/rewrites.py --rows gpt2           # this model only
    python benchmarks/rewrites.py --write               # and writes docs/reference/benchmarks.md
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sections import write_section
from step_rows import ROWS, ort_training
from turns import Contender, Result, measure, ratio, serve
from versions import ENGINES, versions

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "benchmarks.md"
PACKAGES = ("torch", *ENGINES, "transformers")
EVERYTHING = "everything"
REWRITES = "ort_trainer.kernels.programs.rewrites"


@dataclasses.dataclass(frozen=True)
class Lever:
    """Something that makes steps faster.

    Attributes:
        title: The title in the table.
        rows: The models that it is measured on.
        utils: Options of the section ``utils`` that switch it off.
        switch_off: Switches it off in this process, if no option does.
    """

    title: str
    rows: tuple[str, ...]
    utils: Mapping[str, str] = dataclasses.field(default_factory=dict)
    switch_off: Callable[[], None] | None = None


def replace(module: str, name: str, value: object) -> None:
    """Replaces a name of a module; the name must exist, so that a renamed function is noticed."""
    found = importlib.import_module(module)
    getattr(found, name)
    setattr(found, name, value)


def leave_out(*names: str) -> None:
    """Disables rewrites of differentiated graphs."""
    rewrites = importlib.import_module(REWRITES)
    functions = [getattr(rewrites, name) for name in names]
    kept = tuple(function for function in rewrites._REWRITES if function not in functions)
    assert len(kept) == len(rewrites._REWRITES) - len(names)
    replace(REWRITES, "_REWRITES", kept)


def leave_out_before(name: str, *names: str) -> None:
    """Disables a rewrite before differentiation, and others of differentiated graphs."""
    leave_out(*names)
    replace(REWRITES, name, lambda graph: None)


def without_reuse() -> None:
    """Allocates separate memory for every result."""
    replace("ort_trainer.kernels.programs.encode", "find_reuse", lambda node, is_free: None)


def without_kept_memory() -> None:
    """Lets the C library return freed memory to the system."""
    replace("ort_trainer.engine.programs.runner", "keep_freed_memory", lambda: None)


LEVERS = {
    "gelu": Lever("rewrite `gelu.py`", ("gpt2",), switch_off=functools.partial(leave_out_before, "fuse_gelu")),
    "attention": Lever(
        "rewrite `attention.py`", ("bert", "gpt2"), switch_off=functools.partial(leave_out_before, "drop_plain_masks")
    ),
    "views": Lever(
        "rewrite `views.py`",
        ("mlp", "bert"),
        switch_off=functools.partial(leave_out_before, "join_selects", "join_selects", "drop_needless_views"),
    ),
    "linear": Lever(
        "rewrite `linear.py`", ("mlp", "bert", "gpt2"), switch_off=functools.partial(leave_out, "use_onednn")
    ),
    "cross_entropy": Lever(
        "rewrite `cross_entropy.py`", ("gpt2",), switch_off=functools.partial(leave_out, "fuse_cross_entropy")
    ),
    "linear_cross_entropy": Lever(
        "rewrite `linear_cross_entropy.py`",
        ("gpt2",),
        switch_off=functools.partial(leave_out, "fuse_linear_cross_entropy"),
    ),
    "convolutions": Lever(
        "rewrite `convolutions.py`",
        ("convnext",),
        switch_off=functools.partial(leave_out, "order_images", "sum_bias_gradients"),
    ),
    "rows": Lever(
        "rewrite `rows.py`",
        ("dlrm", "mixtral"),
        switch_off=functools.partial(leave_out_before, "select_rows", "add_rows"),
    ),
    "halves": Lever("rewrite `halves.py`", ("bert-fp16",), switch_off=functools.partial(leave_out, "widen_products")),
    "reuse": Lever("results over dead operands, `reuse.py`", ("bert", "gpt2"), switch_off=without_reuse),
    "random_numbers": Lever("fast random numbers", ("bert", "gpt2"), {"random_numbers": "pytorch"}),
    "memory": Lever("freed memory is kept", ("convolutions", "lstm", "bert", "gpt2"), switch_off=without_kept_memory),
    "kernels": Lever(
        "PyTorch's kernels, with all that builds on them",
        ("mlp", "convolutions", "lstm", "bert", "gpt2"),
        {"kernels": "onnxruntime"},
    ),
}
MODELS = [name for name in ROWS if any(name in lever.rows for lever in LEVERS.values())]


def serve_without(name: str, row: str) -> None:
    """Runs a contender's process: everything but one lever."""
    from ort_trainer import ORTTrainer  # noqa: F401 - imports are no part of the start-up that is measured

    lever = LEVERS.get(name, Lever(EVERYTHING, ()))
    if lever.switch_off is not None:
        lever.switch_off()
    serve(functools.partial(ort_training, ROWS[row], lever.utils))


def contender(name: str, row: str) -> Contender:
    """Returns how the process without a lever is started."""
    return Contender((sys.executable, __file__, "--serve", name, "--rows", row))


HEAD = [
    "| lever | model | step with it, ms | without, ms | gain: without / with (95 %) | peak memory with it, MB "
    "| without, MB |",
    "|---|---|---|---|---|---|---|",
]


def table(row: str, results: Mapping[str, Result]) -> list[str]:
    """Returns the lines of a model."""
    ours = results[EVERYTHING]
    lines = []
    for name, without in results.items():
        if name == EVERYTHING:
            continue
        middle, low, high = ratio(without, ours)
        lines.append(
            f"| {LEVERS[name].title} | {ROWS[row].title} | {ours.median * 1e3:.4g} | {without.median * 1e3:.4g} | "
            f"**{middle:.2f}** ({low:.2f} - {high:.2f}) | {ours.peak:.0f} | {without.peak:.0f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--levers", nargs="+", default=list(LEVERS), choices=list(LEVERS))
    parser.add_argument("--rounds", type=int, help="blocks of steps of every contender; 8, or 3 with --quick")
    parser.add_argument("--steps", type=int, help="steps of a block, instead of the row's own number")
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reference/benchmarks.md")
    parser.add_argument("--serve", choices=(EVERYTHING, *LEVERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_without(arguments.serve, arguments.rows[0])
        return
    rounds = arguments.rounds or (3 if arguments.quick else 8)
    text = [f"Python {platform.python_version()}, {versions(PACKAGES)}; {os.cpu_count()} cores.", "", *HEAD]
    print("\n".join(text), flush=True)
    below: list[str] = []
    for row in arguments.rows:
        names = [EVERYTHING, *(name for name in arguments.levers if row in LEVERS[name].rows)]
        contenders = {name: contender(name, row) for name in names}
        # One start each, because only the steps matter here.
        results, died = measure(contenders, arguments.steps or ROWS[row].steps, rounds, starts=1, needed=EVERYTHING)
        lines = table(row, results)
        print("\n".join(lines), flush=True)
        text += lines
        below += [
            f"- without {LEVERS[name].title}, {ROWS[row].label}: fails with `{why[:200]}`."
            for name, why in died.items()
        ]
    for line in below:
        print(line)
    if arguments.write:
        write_section(PAGE, "levers", "\n".join([*text, "", *below]))


if __name__ == "__main__":
    main()
