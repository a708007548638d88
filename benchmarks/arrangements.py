"""``ORTModule`` in PyTorch's engines for several processes, against the same layers without graphs.

A small language model trains in two processes of one thread each, over gloo. Contenders take turns (turns.py,
ranks.py); their losses show whether the numbers are equal.

    python benchmarks/arrangements.py                    # four minutes on two cores
    python benchmarks/arrangements.py --write            # and writes docs/distributed.md
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import Rank, launch
from sections import write_section
from turns import Contender, Result, measure, ratio, serve
from versions import versions

PAGE = Path(__file__).parents[1] / "docs" / "distributed.md"
SIZE = 2
WIDTH, HEADS, LAYERS, VOCABULARY, BATCH, LENGTH = 256, 4, 4, 1000, 8, 128
ROUNDS, STEPS = 6, 3


def make_model(graphs: bool) -> Any:
    """Returns embedding, layers and head in a row; with graphs, each layer is an ORTModule."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from ort_trainer import ORTModule

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, time, _ = x.shape
            qkv = self.qkv(self.first(x)).view(batch, time, 3, HEADS, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width of a head)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.second(x))))

    torch.manual_seed(0)
    layers: list[Any] = [Layer() for _ in range(LAYERS)]
    layers = [ORTModule(layer, fallback="error") if graphs else layer for layer in layers]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


def data_parallel(graphs: bool) -> Callable[[], Any]:
    from torch.nn.parallel import DistributedDataParallel

    return step_of(DistributedDataParallel(make_model(graphs)))


def sharded(graphs: bool, kept: bool = False, checkpoints: bool = False) -> Callable[[], Any]:
    """FSDP2 layer by layer.

    Args:
        graphs: Whether layers are graphs.
        kept: Whether the gathered weights are kept until the backward pass.
        checkpoints: Whether activations are computed again in the backward pass.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import fully_shard

    model = make_model(graphs)
    layers = list(model)[1:-1]
    if checkpoints:
        apply_activation_checkpointing(model, check_fn=lambda module: any(module is layer for layer in layers))
        layers = list(model)[1:-1]
    for layer in layers:
        fully_shard(layer, reshard_after_forward=not kept)
    return step_of(fully_shard(model))


def pipeline(graphs: bool) -> Callable[[], Any]:
    """Two stages, and four micro-batches forward and backward in turns."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    parts = list(make_model(graphs))
    half = len(parts) // 2
    rank = dist.get_rank()
    stage = torch.nn.Sequential(*(parts[half:] if rank else parts[:half]))
    schedule = Schedule1F1B(PipelineStage(stage, rank, SIZE, torch.device("cpu")), 4, loss_of)
    optimizer = torch.optim.AdamW(stage.parameters(), fused=True)
    tokens = batch_of(0, 2 * BATCH)  # as many samples as with two processes that share them

    def step() -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if rank:
            schedule.step(target=tokens[:, 1:].contiguous(), losses=losses)
        else:
            schedule.step(tokens[:, :-1].contiguous())
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.broadcast(loss, 1)
        return loss

    return step


def batch_of(rank: int, size: int) -> Any:
    """Returns tokens of the shape (size, length + 1)."""
    import torch

    return torch.randint(VOCABULARY, (size, LENGTH + 1), generator=torch.Generator().manual_seed(rank))


def loss_of(scores: Any, tokens: Any) -> Any:
    """Returns the cross entropy of scores (batch, time, vocabulary) for tokens (batch, time)."""
    import torch.nn.functional as F

    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def step_of(model: Any) -> Callable[[], Any]:
    """Returns a step of a model of which each process has a copy or a part."""
    import torch
    import torch.distributed as dist

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = batch_of(dist.get_rank(), BATCH)

    def step() -> torch.Tensor:
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


ARRANGEMENTS: dict[str, Callable[[bool], Callable[[], Any]]] = {
    "DistributedDataParallel": data_parallel,
    "FSDP2": sharded,
    "FSDP2, `reshard_after_forward=False`": functools.partial(sharded, kept=True),
    "FSDP2, activations computed again": functools.partial(sharded, checkpoints=True),
    "pipeline, 1F1B": pipeline,
}


def serve_rank(name: str, graphs: bool) -> None:
    """Runs a process of a contender; launches all if none is."""
    if "RANK" not in os.environ:
        launch((sys.executable, *sys.argv), SIZE)
        return
    import torch
    import torch.distributed as dist

    # Imports are not part of the measured start-up.
    import ort_trainer  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    serve(lambda: Rank(ARRANGEMENTS[name](graphs)))
    dist.destroy_process_group()


def contender(name: str, graphs: bool) -> Contender:
    """Returns how a contender is started."""
    command = (sys.executable, __file__, "--serve", name, *(["--graphs"] if graphs else []))
    return Contender(command, {"OMP_NUM_THREADS": "1"})


def line(name: str, eager: Result, graphs: Result) -> str:
    """Returns the line of an arrangement."""
    difference = max(abs(ours / theirs - 1) for ours, theirs in zip(graphs.losses, eager.losses, strict=True))
    equal = (
        f"yes, to {difference:.0e}" if 0 < difference < 1e-4 else "yes" if not difference else f"**{difference:.0e}**"
    )
    memories = [f"{result.profile['peak']:.0f}" if result.profile else "-" for result in (eager, graphs)]
    times = [f"{result.median * 1e3:.0f}" for result in (eager, graphs)]
    speed = "{:.2f} ({:.2f} - {:.2f})".format(*ratio(eager, graphs))
    return f"| {name} | yes | {equal} | {' | '.join(times)} | **{speed}** | {' | '.join(memories)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="blocks of steps of every contender")
    parser.add_argument("--write", action="store_true", help="write the table into docs/distributed.md")
    parser.add_argument("--serve", choices=list(ARRANGEMENTS), help=argparse.SUPPRESS)
    parser.add_argument("--graphs", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_rank(arguments.serve, arguments.graphs)
        return
    lines = [
        f"Python {platform.python_version()}, {versions(('torch',))}; {os.cpu_count()} cores; {SIZE} processes of one "
        f"thread; {LAYERS} layers of width {WIDTH}, {BATCH} sequences of {LENGTH} tokens a process.",
        "",
        "| arrangement | works | equal losses | layers as they are, ms a step | graphs, ms | speed (95 %) "
        "| memory as they are, MB | graphs, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in ARRANGEMENTS:
        contenders = {kind: contender(name, kind == "graphs") for kind in ("eager", "graphs")}
        results, died = measure(contenders, STEPS, arguments.rounds, 1, STEPS)
        if died:
            lines.append(f"| {name} | no: {'; '.join(died.values())} | | | | | | |")
        else:
            lines.append(line(name, results["eager"], results["graphs"]))
        print(lines[-1], file=sys.stderr)
    text = "\n".join(lines)
    print(f"\n{text}")
    if arguments.write:
        write_section(PAGE, "arrangements", text)


if __name__ == "__main__":
    main()
