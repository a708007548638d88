"""Training from artifacts: the import time of the API, and its steps and memory compared with the trainer's.

Import times are medians over fresh processes that take turns: of ONNX Runtime alone, of the names that train, which
import it, and of ort_trainer.api before any name is used, which does not import it. Steps are full steps with AdamW of
the MLP in train_step.py; its trainer writes the artifacts. The contenders are separate processes that take turns
(turns.py). Those that train from artifacts have no torch.

    python benchmarks/training_api.py
    python benchmarks/training_api.py --write             # and writes docs/reference/benchmarks.md
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sections import write_section
from turns import Contender, Profile, Training, measure, ratio, serve
from versions import ENGINES, versions

ROOT = Path(__file__).parents[1]
STOCK = ROOT / ".stock"
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
ROW = "mlp"

TRAINER, TRAINER_ON_STOCK, ARTIFACTS, ARTIFACTS_ON_STOCK = CONTENDERS = (
    "trainer",
    "trainer, stock engine",
    "artifacts",
    "artifacts, stock engine",
)
IMPORTS = {
    "import onnxruntime": True,
    "from ort_trainer.api import CheckpointState, Module, Optimizer": True,
    "import ort_trainer.api": False,  # no name is used yet
}
"""Statement that is timed -> whether ONNX Runtime is loaded when it is done."""
TIMED = (
    "import sys, time; begin = time.perf_counter(); {}; took = time.perf_counter() - begin; "
    "assert ('onnxruntime' in sys.modules) == {}; print(took)"
)


def write_artifacts(folder: str) -> None:
    """Runs a process that trains a step, and writes the artifacts and the batch."""
    import numpy as np
    from step_models import make_task
    from step_rows import ROWS, ort_training

    training = ort_training(ROWS[ROW])
    training.step()
    training.trainer.export_artifacts(folder)
    np.savez(Path(folder) / "batch.npz", *(part.numpy() for part in make_task(ROWS[ROW].model).batch))


@dataclasses.dataclass(frozen=True)
class ArtifactsTraining(Training):
    """Training from artifacts.

    Attributes:
        updates: The seconds of every update so far.
    """

    updates: list[float] = dataclasses.field(default_factory=list)

    def profile(self, steps: int) -> Profile:
        """Returns the time of the update in a step."""
        for _ in range(steps):
            self.step()
        return {"optimizer": statistics.median(self.updates[-steps:]) * 1e3}


def artifacts_training(folder: Path) -> Training:
    """Returns the training from artifacts."""
    import numpy as np

    from ort_trainer.api import CheckpointState, Module, Optimizer, engine

    own = engine.default_options

    def with_threads(update: bool = False) -> engine.SessionOptions:
        options = own(update)
        options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])  # as the trainer's
        return options

    engine.default_options = with_threads  # the default options, except for the number of threads
    with np.load(folder / "batch.npz") as file:
        batch = [file[name] for name in file.files]
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)

    updates: list[float] = []

    def step() -> float:
        loss = module(*batch)
        begin = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - begin)
        module.lazy_reset_grad()
        return loss

    return ArtifactsTraining(step, updates=updates)


def serve_contender(name: str, folder: str) -> None:
    """Runs a contender's process."""
    if name in (ARTIFACTS, ARTIFACTS_ON_STOCK):
        # The engine for training imports torch if it is installed. A device has none.
        sys.modules["torch"] = None  # type: ignore[assignment]
        import ort_trainer.api  # noqa: F401 - imports are no part of the start-up that is measured

        serve(lambda: artifacts_training(Path(folder)))
        return
    from step_rows import ROWS, ort_training

    from ort_trainer import ORTTrainer  # noqa: F401

    serve(lambda: ort_training(ROWS[ROW]))


def environment(stock: bool, threads: int = 1) -> dict[str, str]:
    """Returns the environment of a process: this package on the path, preceded by the stock engine if ``stock``."""
    parts = [str(STOCK)] * stock + [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(parts).rstrip(os.pathsep), "OMP_NUM_THREADS": str(threads)}


def import_times(repeat: int) -> dict[str, float]:
    """Returns the median seconds of each import on the stock engine."""
    found: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(repeat + 1):
        for statement, loads in IMPORTS.items():
            command = [sys.executable, "-c", TIMED.format(statement, loads)]
            # Write bytecode, as an installed package has it; the first import writes it.
            variables = {**os.environ, **environment(stock=True), "PYTHONDONTWRITEBYTECODE": ""}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
            found[statement].append(float(done.stdout))
    return {statement: statistics.median(times[1:]) for statement, times in found.items()}


def step_table(steps: int, rounds: int, threads: int) -> list[str]:
    """Measures the contenders, and returns the table."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, __file__, "--artifacts", folder], check=True, env={**os.environ, **environment(False)}
        )
        contenders = {
            name: Contender(
                (sys.executable, __file__, "--serve", name, "--folder", folder), environment("stock" in name, threads)
            )
            for name in CONTENDERS
        }
        results, _ = measure(contenders, steps, rounds, profiled=steps, needed=TRAINER)
    lines = [
        "| contender | median, ms | update, ms | trainer's time / its time (95 %) | peak memory, MB | / trainer's "
        "| second start, s |",
        "|---|---|---|---|---|---|---|",
    ]
    trainer = results[TRAINER]
    for name, result in results.items():
        middle, low, high = ratio(trainer, result)
        speed = "1" if name == TRAINER else f"**{middle:.2f}** ({low:.2f} - {high:.2f})"
        assert result.profile is not None
        lines.append(
            f"| {name} | {result.median * 1e3:.4g} | {result.profile['optimizer']:.2f} | {speed} | {result.peak:.0f} | "
            f"{result.peak / trainer.peak:.2f} | {result.starts[-1]:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="blocks of steps of every contender")
    parser.add_argument("--steps", type=int, default=100, help="steps of a block")
    parser.add_argument("--repeat", type=int, default=15, help="processes for an import time")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of every contender")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--artifacts", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_contender(arguments.serve, arguments.folder)
        return
    if arguments.artifacts:
        write_artifacts(arguments.artifacts)
        return
    cores = f"{os.cpu_count()} cores, {arguments.threads} threads a contender"
    text = [f"Python {platform.python_version()}, {versions(('torch', *ENGINES))}; {cores}.", ""]
    times = import_times(arguments.repeat)
    alone = next(iter(times.values()))
    text += ["| import | ms | / onnxruntime's |", "|---|---|---|"]
    text += [f"| `{statement}` | {took * 1e3:.0f} | {took / alone:.2f} |" for statement, took in times.items()]
    text += ["", *step_table(arguments.steps, arguments.rounds, arguments.threads)]
    print("\n".join(text))
    if arguments.write:
        write_section(PAGE, "training api", "\n".join(text))


if __name__ == "__main__":
    main()
