"""The way of a batch and of an export through the package: calls, files and changes of file; and the package's size.

In a step every call of a function whose code is the package's counts; a change of file is a call in another file than
the call before. An export is measured by its stations, the functions with a name that it calls exactly once, however
deep: what it calls for every node or symbol is a tool of a station. A hop is a different pair of files, that of a
station and that of the function of the package that called it, so a reader who follows the calls opens another file
once for each hop. A way that enters every file from one other has a hop fewer than files.

    python benchmarks/way.py [--calls]
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import ort_trainer
from ort_trainer import ORTTrainer, optim
from ort_trainer.engine import Request

PACKAGE = Path(ort_trainer.__file__).parent
# What the loop is made of; other rooms should call its methods.
_INSIDE = re.compile(
    r"\b_?loop\.(_\w+|config|contents|device|graphs|holds_gradients|info|losses|pending\w*|precision|profiler|rates"
    r"|session|source|strategy|window)\b"
)


class Way:
    """The package's calls in a run of a function.

    Args:
        run: The function.

    Attributes:
        calls: The code of each call, with those that were running, the outermost first.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self.calls: list[tuple[CodeType, tuple[CodeType, ...]]] = []
        self._running: tuple[CodeType, ...] = ()
        sys.setprofile(self._event)
        try:
            run()
        finally:
            sys.setprofile(None)

    @property
    def counts(self) -> dict[str, int]:
        """The figures of a step by name."""
        files = [_file(code) for code, _ in self.calls]
        return {
            "calls": len(self.calls),
            "functions": len({code for code, _ in self.calls}),
            "files": len(set(files)),
            "changes of file": sum(one != other for one, other in itertools.pairwise(files)),
        }

    @property
    def stations(self) -> list[tuple[CodeType, tuple[CodeType, ...]]]:
        """The calls of an export that are its stations."""
        times = Counter(code for code, _ in self.calls)
        return [call for call in self.calls if times[call[0]] == 1 and not call[0].co_name.startswith("<")]

    @property
    def counts_of_stations(self) -> dict[str, int]:
        """The figures of an export by name."""
        stations = self.stations
        hops = {(_file(running[-1]), _file(code)) for code, running in stations if running}
        hops = {(one, other) for one, other in hops if one != other}
        return {"stations": len(stations), "hops": len(hops), "files": len({_file(code) for code, _ in stations})}

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "return") and frame.f_code.co_filename.startswith(str(PACKAGE)):
            if event == "call":
                self.calls.append((frame.f_code, self._running))
                self._running = (*self._running, frame.f_code)
            else:
                self._running = self._running[:-1]


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(PACKAGE))


def steady_step() -> Way:
    """Returns the way of one ``train_step`` with two linear layers and Adam, after four others."""
    trainer, x, y = _trainer()
    for _ in range(4):  # of which the fourth is compared with PyTorch, but not the fifth
        trainer.train_step(x, y)
    return Way(lambda: trainer.train_step(x, y))


def one_export() -> Way:
    """Returns the way of an export of the same model, in this process, after another that imports what it needs."""
    trainer, x, y = _trainer()
    builder = trainer.loop.source.builder(trainer.model_desc)
    request = Request({"input": x, "y": y}, True)
    builder.build(request)
    return Way(lambda: builder.build(request))


def _trainer() -> tuple[ORTTrainer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    inputs, outputs = [("input", ["batch", 8]), ("y", ["batch"])], [("loss", [], True), ("out", ["batch", 4])]
    description = {"inputs": inputs, "outputs": outputs}
    trainer = ORTTrainer(model, description, optim.AdamConfig(lr=1e-3), nn.functional.cross_entropy)
    return trainer, torch.randn(4, 8), torch.randint(0, 4, (4,))


def reaching_in() -> dict[str, int]:
    """Returns, by file, the number of lines that use what the loop is made of; they say ``loop``, not ``self``."""
    found = {
        str(path.relative_to(PACKAGE)): sum(bool(_INSIDE.search(line)) for line in path.read_text().splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    return {name: count for name, count in found.items() if count}


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="print the step's calls and the export's stations too")
    arguments = parser.parse_args()
    # An export in this process, from nothing.
    os.environ.update({"ORT_TRAINER_EXPORT_IN_PROCESS": "1", "ORT_TRAINER_CACHE": "off"})
    step, export = steady_step(), one_export()
    for what, counts, calls in (
        ("a step", step.counts, step.calls),
        ("an export", export.counts_of_stations, export.stations),
    ):
        for code, running in calls if arguments.calls else ():
            depth = "  " * len(running)
            print(f"{depth}{getattr(code, 'co_qualname', code.co_name)}  {_file(code)}:{code.co_firstlineno}")
        print(f"{what:12}" + ", ".join(f"{count} {name}" for name, count in counts.items()))
    files = list(PACKAGE.rglob("*.py"))
    print(
        f"the package {sum(len(path.read_text().splitlines()) for path in files)} lines, {len(files)} files, ", end=""
    )
    print(f"{len([path for path in files if path.parent == PACKAGE])} flat modules")
    inside = reaching_in()
    outside = {name: count for name, count in inside.items() if not name.startswith("train/")}
    for what, found in (("", inside), (" outside train/", outside)):
        print(f"the loop    {sum(found.values())} lines in {len(found)} files{what} reach into it")


if __name__ == "__main__":
    main()
