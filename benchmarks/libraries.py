"""Other libraries' models and loops with one more line, ``model = ORTModule(model)``: are the numbers equal, how fast?

Each script of examples/libraries and examples/recipes runs as it is, in PyTorch, and with the lines of ROWS added. Both
run in processes of their own, which take turns over several rounds. Losses and weights after the same steps are
compared, and medians of the time between two backward passes. A library that is not installed is left out.

    python benchmarks/libraries.py                 # all; half an hour on two cores
    python benchmarks/libraries.py --only CLIP timm --rounds 1
    python benchmarks/libraries.py --write         # and writes the table in docs/huggingface.md
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import inspect
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from one_line import extended, script
from sections import write_section

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "huggingface.md"
RESULTS = ROOT / "benchmarks" / "libraries.json"
"""The results of the last ``--write`` of each row, from which the table is made."""
FIRST_STEPS = 5
"""Steps that are not timed: exports and the warming up of caches."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        library: The distribution's name.
        script: A file below examples/, without its suffix.
        case: Argument ``case`` of the script's ``main``, if it has one; the row's name is made of library and case.
        lines: The lines to add; each stands after the first statement that assigns to what it assigns to.
        steps: What the script is asked for.
        note: Why PyTorch computes it, if it does.
    """

    library: str
    script: str
    case: str = ""
    lines: tuple[str, ...] = ("model = ORTModule(model)",)
    steps: int = 20
    note: str = ""

    @property
    def name(self) -> str:
        """The library and the case."""
        return f"{self.library}: {self.case}" if self.case else self.library


def _cases(library: str, script: str, *cases: str, line: str = "model = ORTModule(model)", note: str = "") -> list[Row]:
    return [Row(library, f"libraries/{script}", case, (line,), note=note) for case in cases]


ROWS = [
    *_cases(
        "transformers",
        "trainer_options",
        *("accumulation, clipping, decay, warm-up", "label smoothing, Adafactor", "gradient checkpointing", "bf16"),
    ),
    *_cases("transformers", "transformers_models", "CLIP", "ViT", "Whisper", "wav2vec2 with CTC"),
    Row("peft", "recipes/peft_methods_torch", steps=160),
    Row("trl", "recipes/trl_trainers_torch"),
    *_cases(
        "sentence-transformers",
        "sentence_transformers_losses",
        *("MultipleNegativesRankingLoss", "MatryoshkaLoss", "AdaptiveLayerLoss", "CoSENTLoss"),
        line="model[0].model = ORTModule(model[0].model)",
    ),
    *_cases("setfit", "setfit_few_shot", "", line="encoder[0].model = ORTModule(encoder[0].model)"),
    *_cases("accelerate", "accelerate_loop", ""),
    Row("lightning", "recipes/lightning_module_torch", lines=("self.model = ORTModule(self.model)",)),
    *_cases("diffusers", "diffusers_unet", "UNet with EMA", "UNet with LoRA"),
    *_cases(
        "torch-geometric",
        "geometric_graphs",
        "pooling by graph",
        note="the number of graphs is a value: pass it as `size`",
    ),
    *_cases("torch-geometric", "geometric_graphs", "pooling with size"),
    *_cases("torch-geometric", "geometric_graphs", "CSR matrix", note="a sparse tensor is an argument"),
    Row("timm", "recipes/timm_models_torch"),
    *_cases("segmentation-models-pytorch", "segmentation_models", "Unet", "FPN", "DeepLabV3Plus"),
    *_cases(
        "ultralytics", "ultralytics_detector", "YOLO", note="the loss, a part of its model, sizes tensors by values"
    ),
    *_cases("torchmetrics", "metrics_inside", "inside a module"),
    *_cases("torch", "orthogonal_weights", "parametrizations"),
    *_cases(
        "stable-baselines3",
        "stable_baselines",
        *("A2C", "PPO"),
        line="policy.mlp_extractor = ORTModule(policy.mlp_extractor)",
    ),
    *_cases("torchrl", "torchrl_policy", "PPO", line="network = ORTModule(network)"),
    *_cases("monai", "monai_networks", "UNet", "SegResNet", "UNETR"),
    *_cases("fastai", "fastai_learner", ""),
    *_cases(
        "pytorch-forecasting",
        "forecasting",
        "TFT",
        line="network = ORTModule(network)",
        note="the network is a LightningModule; a warning says so",
    ),
    *_cases("speechbrain", "speechbrain_brain", "", line="embed = ORTModule(embed)"),
    *_cases("open-clip-torch", "open_clip_pairs", ""),
]


PLAIN, ROUNDED, OURS = "plain", "rounded", "ours"


def train(row: Row, contender: str, weights: Path) -> dict[str, Any]:
    """Runs a script in this process.

    Args:
        row: What is run.
        contender: ``PLAIN``, in PyTorch; ``ROUNDED``, with other last bits of the weights after the first step; or
            ``OURS``, with the row's lines.
        weights: Where what the optimizers trained is written at the end.

    Returns:
        The losses, the seconds between two steps, and the reasons why PyTorch ran calls of an ORTModule.
    """
    import numpy as np
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ort_trainer.module.fallback import Fallback
    from ort_trainer.module.passes import SizedPasses

    ends: list[float] = []
    trained: dict[int, torch.Tensor] = {}
    calls = {"graphs": 0, "pytorch": 0}
    reasons: list[str] = []

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        is_first = not trained
        for group in optimizer.param_groups:
            trained.update({id(parameter): parameter for parameter in group["params"]})
        if contender == ROUNDED and is_first:
            with torch.no_grad():
                for parameter in trained.values():
                    parameter.mul_(1 + 2**-23)

    def backward(*args: Any, **kwargs: Any) -> None:
        own_backward(*args, **kwargs)
        ends.append(time.perf_counter())

    def graph(*args: Any, **kwargs: Any) -> Any:
        calls["graphs"] += 1
        return own_graph(*args, **kwargs)

    def run_in_pytorch(fallback: Any, reason: Exception, *args: Any) -> Any:
        calls["pytorch"] += 1
        reasons.append(str(reason))
        return own_fallback(fallback, reason, *args)

    own_backward: Any = torch.Tensor.backward
    own_graph, own_fallback = SizedPasses.__call__, Fallback.run
    register_optimizer_step_post_hook(after_step)
    path = ROOT / "examples" / f"{row.script}.py"
    sys.path.insert(0, str(path.parent))
    source = path.read_text(encoding="utf-8")
    module = script(path.stem, extended(source, row.lines) if contender == OURS else source)
    arguments = {"case": row.case} if "case" in inspect.signature(module.main).parameters else {}
    with (
        mock.patch.object(torch.Tensor, "backward", backward),
        mock.patch.object(SizedPasses, "__call__", graph),
        mock.patch.object(Fallback, "run", run_in_pytorch),
    ):
        losses = module.main(steps=row.steps, **arguments)
    np.savez(weights, *(parameter.detach().numpy(force=True) for parameter in trained.values()))
    times = [end - begin for begin, end in itertools.pairwise(ends[FIRST_STEPS:])]
    return {"losses": losses, "times": times, **calls, "reasons": list(dict.fromkeys(reasons))}


@dataclasses.dataclass
class Result:
    """What a row gave.

    Attributes:
        difference: The greatest difference of losses, relative to the greatest loss; and the norm of that of all
            trained weights, relative to theirs.
        after_rounding: The same of PyTorch, after one rounding.
        milliseconds: The median step in PyTorch, and with the lines.
        ratio: The median of their ratios in the rounds.
        graphs: The number of calls that graphs computed.
        reasons: Why PyTorch computed others.
        version: The version of the library.
    """

    difference: tuple[float, float] = (0.0, 0.0)
    after_rounding: tuple[float, float] = (0.0, 0.0)
    milliseconds: tuple[float, float] = (0.0, 0.0)
    ratio: float = 0.0
    graphs: int = 0
    reasons: tuple[str, ...] = ()

    version: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether the losses are PyTorch's, but for what a rounding does there."""
        return self.difference[0] <= max(1e-4, 10 * self.after_rounding[0])


def answer(row: Row, contender: str, folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Runs a contender; returns what it says, and its losses and weights.

    Raises:
        RuntimeError: If it fails; the message is its last line.
    """
    import numpy as np

    path = folder / f"{contender}.npz"
    command = [sys.executable, __file__, "--train", row.name, contender, str(path)]
    environment = {**os.environ, "ORT_TRAINER_CACHE": str(folder / "exports"), "ORT_TRAINER_PROGRESS": "0"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    if ended.returncode:
        raise RuntimeError((ended.stderr.strip().splitlines() or ["no message"])[-1])
    said = json.loads(ended.stdout.splitlines()[-1])
    with np.load(path) as arrays:
        weights = [arrays[name].ravel() for name in arrays.files]
    return said, [np.asarray(said["losses"]), np.concatenate([np.zeros(1), *weights])]


def differences(expected: list[Any], found: list[Any]) -> tuple[float, float]:
    """Returns how far losses and weights are from others."""
    import numpy as np

    losses = float(np.abs(found[0] - expected[0]).max()) / float(np.abs(expected[0]).max())
    norm = float(np.linalg.norm(expected[1])) or 1.0  # an optimizer that is not torch's shows no weights
    return losses, float(np.linalg.norm(found[1] - expected[1])) / norm


def measure(row: Row, rounds: int, folder: Path) -> Result:
    """Runs the contenders of a row in turns.

    Raises:
        RuntimeError: If one fails; the message is its last line.
    """
    result = Result(version=importlib.metadata.version(row.library))
    times: list[list[float]] = []
    for number in range(rounds):
        plain, expected = answer(row, PLAIN, folder)
        ours, found = answer(row, OURS, folder)
        if number == 0:
            result.after_rounding = differences(expected, answer(row, ROUNDED, folder)[1])
            result.difference = differences(expected, found)
            result.graphs, result.reasons = ours["graphs"], tuple(ours["reasons"])
        times.append([statistics.median(said["times"]) for said in (plain, ours)])
    eager, graph = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    result.milliseconds = eager, graph
    result.ratio = statistics.median(plain / ours for plain, ours in times)
    return result


def table(results: dict[Row, Result]) -> str:
    """Returns the table of docs/huggingface.md."""
    lines = [
        "| library | case | the line | graphs | losses differ by | PyTorch's after a rounding | ms per step | faster |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, result in results.items():
        case = f"{row.case}; {row.note}" if row.note else row.case
        script_link = f"[{case or 'a loop'}](../examples/{row.script}.py)"
        begin = f"| {row.library} {result.version} | {script_link} | `{row.lines[0]}` |"
        graphs = "no" if not result.graphs else "some" if result.reasons else "yes"
        eager, graph = result.milliseconds
        lines.append(
            f"{begin} {graphs} | {_figure(result.difference[0])} | {_figure(result.after_rounding[0])} | "
            f"{eager:.3g} → {graph:.3g} | {result.ratio:.2f} |"
        )
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def main() -> None:
    """Runs the rows that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table in docs/huggingface.md")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        name, contender, weights = arguments.train
        (row,) = (row for row in ROWS if row.name == name)
        print(json.dumps(train(row, contender, Path(weights))))
        return
    stored: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    wrong = []
    for row in ROWS:
        if not any(part in row.name for part in arguments.only):
            continue
        if not any(importlib.metadata.distributions(name=row.library)):
            print(f"{row.name}: not installed", flush=True)
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                result = measure(row, arguments.rounds, Path(folder))
        except RuntimeError as error:
            print(f"{row.name}: {error}", flush=True)
            wrong.append(row.name)
            continue
        print(f"{row.name}: {result}", flush=True)
        first_lines = [reason.splitlines()[0] for reason in result.reasons]  # without the paths of this machine
        stored[row.name] = {**dataclasses.asdict(result), "reasons": first_lines}
        if not result.is_equal or (not result.graphs and not row.note):
            wrong.append(row.name)
    if arguments.write:
        RESULTS.write_text(json.dumps(stored, indent=1), encoding="utf-8")
        machine = (
            f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
        )
        known = {row: Result(**stored[row.name]) for row in ROWS if row.name in stored}
        write_section(PAGE, "libraries", f"{table(known)}\n\nMeasured on {machine}, {arguments.rounds} rounds.")
    if wrong:
        raise SystemExit(f"not as in PyTorch, or without graphs: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
