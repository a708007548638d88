"""Bytes of artifacts, and memory while training from them, of models trained whole or in part.

    python benchmarks/device_memory.py            # a minute
    python benchmarks/device_memory.py --write    # and writes the table into docs/on_device.md

The memory is what training adds to a process in which ONNX Runtime is loaded, as ``memory_budget`` counts it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sections import write_section
from step_models import MODELS, Task
from torch import nn
from versions import ENGINES, versions

from ort_trainer import optim
from ort_trainer.artifacts import generate_artifacts

PAGE = Path(__file__).parent.parent / "docs" / "on_device.md"


def _wide() -> Task:
    """A model whose weights take more than its activations."""
    layers = [part for _ in range(8) for part in (nn.Linear(1024, 1024), nn.ReLU())]
    description = {"inputs": [("input", ["n", 1024]), ("label", ["n"])], "outputs": [("loss", [], True)]}
    return Task(nn.Sequential(*layers, nn.Linear(1024, 3)), (torch.randn(4, 1024), torch.arange(4) % 3), description)


ROWS: dict[str, Callable[[], Task]] = {
    "MLP, 64 samples": MODELS["mlp"],
    "8 layers of 1024, 4 samples": _wide,
    "MobileNet-like, 16 images": MODELS["mobilenet"],
    "BERT, 4 x 256, 8 texts": MODELS["bert"],
    "GPT-2, 4 x 128, 2 texts": MODELS["small-gpt2"],
}
PARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "biases and norms": {"frozen": True},
    "the same, int8": {"frozen": True, "quantize_frozen": "int8"},
    "the same, int4": {"frozen": True, "quantize_frozen": "int4"},
}
HEAD = [
    "| model | what is trained | parameters | trained | training model, MB | checkpoint, MB | memory, MB |",
    "|---|---|---|---|---|---|---|",
]


def line(name: str, part: str, task: Task, frozen: bool = False, **settings: Any) -> str:
    """Returns a row of the table."""
    parameters = dict(task.model.named_parameters())
    left_out = [key for key, value in parameters.items() if frozen and value.dim() > 1]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        generate_artifacts(
            task.model,
            loss=task.loss_fn,
            optimizer=optim.AdamWConfig(lr=1e-3),
            frozen_params=left_out,
            artifact_directory=folder,
            model_desc=task.description,
            sample_batch=task.batch,
            memory_budget="1000GB",  # it all fits: only the measurement is wanted
            **settings,
        )
        said = json.loads((folder / "memory.json").read_text())
        sizes = [(folder / file).stat().st_size / 1e6 for file in ("training_model.onnx", "checkpoint")]
    whole = sum(value.numel() for value in parameters.values())
    trained = sum(parameters[key].numel() for key in said["trained"])
    numbers = [f"{whole:,}", f"{trained:,}", *(f"{size:.2f}" for size in sizes), f"{said['peak'] / 1e6:.0f}"]
    return f"| {' | '.join([name, part, *numbers])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/on_device.md")
    arguments = parser.parse_args()
    place = f"Python {platform.python_version()}, {versions(('torch', *ENGINES))}"
    text = [f"{place}; {os.cpu_count()} cores. Memory without the loaded engine; AdamW.", "", *HEAD]
    print("\n".join(text), flush=True)
    for name, make in ROWS.items():
        for part, settings in PARTS.items():
            text.append(line(name, part, make(), **settings))
            print(text[-1], flush=True)
    if arguments.write:
        write_section(PAGE, "device memory", "\n".join(text))


if __name__ == "__main__":
    main()
