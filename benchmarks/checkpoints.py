"""The cost of checksums: saving and loading a trainer's checkpoint with and without them, on a RAM disk.

Each way runs in its own process, and they take turns (turns.py). ``before`` writes with safetensors and reads through
a memory map; ``sealed`` is ``save_checkpoint`` and ``load_checkpoint``. Saves include the sync and the rename.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --hashes    # the speed of checksums, which led to the choice of XXH3
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from turns import Contender, Training, measure, ratio, serve
from versions import versions

WAYS = ("before", "sealed")
WORK = ("save", "load")


def make_trainer(width: int) -> Any:
    import torch
    from torch.nn import functional as F

    from ort_trainer import ORTTrainer, optim

    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    description = {
        "inputs": [("input", ["batch", width]), ("y", ["batch"])],
        "outputs": [("loss", [], True), ("z", ["batch", width])],
    }
    trainer = ORTTrainer(model, description, optim.AdamConfig(lr=1e-3), loss_fn=F.cross_entropy)
    trainer.train_step(torch.randn(2, width), torch.arange(2))
    return trainer


def save_before(trainer: Any, path: Path) -> None:
    import safetensors.torch

    from ort_trainer.core.atomic import atomic_path
    from ort_trainer.state.file import encode
    from ort_trainer.state.state_dict import to_state_dict
    from ort_trainer.train import state

    def write(found: Any) -> None:
        tensors: dict[str, Any] = {}
        manifest = json.dumps(encode(to_state_dict(found), "state", tensors, {}))
        with atomic_path(path) as temporary:
            safetensors.torch.save_file(tensors, temporary, {"manifest": manifest})

    state.save(trainer._loop, True, write)


def load_before(trainer: Any, path: Path) -> None:
    import safetensors.torch

    from ort_trainer.state.file import decode

    with safetensors.safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        trainer.load_state_dict(decode(json.loads(opened.metadata()["manifest"]), tensors))


def contend(way: str, work: str, width: int, folder: str) -> Training:
    trainer = make_trainer(width)
    path = Path(folder) / f"{way}-{work}"
    save = (
        partial(save_before, trainer, path)
        if way == "before"
        else partial(trainer.save_checkpoint, path, overwrite=True)
    )
    load = partial(load_before, trainer, path) if way == "before" else partial(trainer.load_checkpoint, path)
    save()

    def step() -> float:
        (save if work == "save" else load)()
        return 0.0

    return Training(step)


def compare(width: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for work in WORK:
            contenders = {
                way: Contender(
                    (sys.executable, __file__, "--contender", way, work, "--width", str(width), "--folder", folder)
                )
                for way in WAYS
            }
            found, _ = measure(contenders, steps=3, rounds=rounds, starts=1, needed="before")
            size = (Path(folder) / f"sealed-{work}").stat().st_size
            for way in WAYS:
                best, median = min(found[way].times), found[way].median
                print(
                    f"| {work} | {way} | {median:.3f} | {size / median / 1e9:.2f} | {size / best / 1e9:.2f} |",
                    flush=True,
                )
            times, low, high = ratio(found["sealed"], found["before"])
            print(f"| {work} | sealed / before | {times:.2f} ({low:.2f} to {high:.2f}) | | |", flush=True)
        print(f"\n{size / 1e6:.0f} MB")


def hashes() -> None:
    import numpy as np
    import xxhash

    data: Any = np.random.default_rng(0).integers(0, 255, 256 << 20, dtype=np.uint8)
    pieces = np.array_split(data, 64)

    def on(threads: int, function: Callable[[Any], Any]) -> Callable[[], Any]:
        def run() -> None:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(function, pieces))

        return run

    contenders: dict[str, Callable[[], Any]] = {
        "copy": data.copy,
        "crc32": lambda: zlib.crc32(data),
        "crc32, 2 threads": on(2, zlib.crc32),
        "sha256": lambda: hashlib.sha256(data).digest(),
        "sha256, 2 threads": on(2, lambda piece: hashlib.sha256(piece).digest()),
        "blake2b": lambda: hashlib.blake2b(data).digest(),
        "xxh3_64": lambda: xxhash.xxh3_64_intdigest(data),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(5):  # in turns
        for name, contender in contenders.items():
            begin = time.perf_counter()
            contender()
            times[name].append(time.perf_counter() - begin)
    print("| checksum | GB/s |\n|---|---|")
    for name, found in times.items():
        print(f"| {name} | {data.nbytes / statistics.median(found) / 1e9:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hashes", action="store_true")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        way, work = arguments.contender
        serve(lambda: contend(way, work, arguments.width, arguments.folder))
        return
    installed = versions(("torch", "numpy", "safetensors", "xxhash"))
    print(f"Python {platform.python_version()}, {installed}; {os.cpu_count()} cores\n")
    if arguments.hashes:
        hashes()
        return
    print("| work | way | median, s | GB/s | best GB/s |\n|---|---|---|---|---|")
    compare(arguments.width, arguments.rounds)


if __name__ == "__main__":
    main()
