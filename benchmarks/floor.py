"""The floor of training steps: their matrix products, convolutions, attention and recurrent layers alone.

A step of ort_trainer calls these with a batch of the row. The floor is the time of the same calls on the same tensors,
one after another, with nothing between them. What a step takes beyond it goes to everything else: norms, activations,
losses, the update of the weights, and the loop of the step. The trainer and its floor take turns, each in its own
process (see turns.py); of each step above the limit the largest parts of the rest are printed.

    python benchmarks/floor.py                   # everything
    python benchmarks/floor.py --rows bert mlp   # these rows only
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from contenders import FLOOR, LOOPS, OURS
from step_rows import ROWS, Row, kernels_of, ort_training
from turns import Contender, Training, measure, ratio, serve
from versions import ENGINES, versions

from ort_trainer.profiling.figures import is_product

__all__ = ["floor_training"]

CONTENDERS = (OURS, LOOPS, FLOOR)
LIMIT = 1.3
SHOWN = 6


def floor_training(row: Row) -> Training:
    """Returns the training of a row whose steps after the second are only its products."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[tuple[Any, Any, Any]] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if is_product(str(func)):
                calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    training = ort_training(row)

    def step() -> Any:
        if calls:
            with torch.no_grad():
                for function, args, kwargs in calls:
                    function(*args, **kwargs)
            return 0.0
        if training.trainer.train_step_info.step == 0:
            return training.step()
        with Noting():  # type: ignore[no-untyped-call]
            return training.step()

    return Training(step)


def main() -> None:
    """Measures the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=[name for name in ROWS if name != "bert-fp16"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        row, name = ROWS[arguments.rows[0]], arguments.serve
        training = floor_training if name == FLOOR else functools.partial(ort_training, utils=kernels_of(name))
        serve(functools.partial(training, row))
        return
    print(versions(("torch", *ENGINES, "transformers")))
    for name in arguments.rows:
        contenders = {
            each: Contender((sys.executable, __file__, "--serve", each, "--rows", name))
            for each in CONTENDERS
            if each in arguments.contenders or each == FLOOR
        }
        results, _ = measure(contenders, ROWS[name].steps, arguments.rounds, 1, profiled=5, needed=FLOOR)
        floor = results.pop(FLOOR)
        for each, result in results.items():
            share, low, high = ratio(result, floor)
            line = f"{ROWS[name].label}, {each}: {result.median * 1e3:.4g} ms, {share:.2f} ({low:.2f} - {high:.2f})"
            print(f"{line} of the floor, {floor.median * 1e3:.4g} ms", flush=True)
            profile = result.profile
            if profile is None or share < LIMIT:
                continue
            rest = [("the update", profile["optimizer"]), ("the loop", profile["overhead"]), *profile["operators"]]
            largest = sorted((part for part in rest if not is_product(part[0])), key=lambda part: -part[1])[:SHOWN]
            print("   " + ", ".join(f"{part} {milliseconds:.2f}" for part, milliseconds in largest), flush=True)


if __name__ == "__main__":
    main()
