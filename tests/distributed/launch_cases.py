"""The cases that the processes of test_launch.py run."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ort_trainer import ORTTrainer, TrainingParameters, TrainingSession, optim
from ort_trainer.compat import older_api

from .data_parallel_cases import LOSS, batches, make, mlp, part, result


def train(rank: int, size: int, distributed: dict[str, Any], **options: Any) -> dict[str, Any]:
    trainer = make(optim.AdamConfig(lr=0.01), {"distributed": distributed, **options})
    losses = [float(trainer.train_step(*part(batch, rank, size))[0]) for batch in batches(4)]
    found = trainer.options.distributed
    shown = [found.world_rank, found.world_size, found.local_rank, found.data_parallel_size]
    strategy: Any = trainer.loop.strategy
    buckets = len(list(strategy.buckets)) if size > 1 else 0
    return result(trainer, losses, shown=shown, buckets=buckets, zero_stage=strategy.zero_stage)


def plain(rank: int, size: int) -> dict[str, Any]:
    return train(rank, size, {})


def given(rank: int, size: int) -> dict[str, Any]:
    """All ranks and sizes are given, and agree."""
    return train(rank, size, {"world_rank": rank, "world_size": size, "local_rank": rank, "data_parallel_size": size})


def small_buckets(rank: int, size: int) -> dict[str, Any]:
    return train(rank, size, {"bucket_cap_mb": 0.0001})


def low_precision(rank: int, size: int) -> dict[str, Any]:
    return train(rank, size, {"reduce_dtype": torch.bfloat16})


def adasum(rank: int, size: int) -> dict[str, Any]:
    return train(rank, size, {"enable_adasum": True})


def sharded(rank: int, size: int) -> dict[str, Any]:
    return train(rank, size, {"deepspeed_zero_optimization": {"stage": 1}})


def sharded_adasum(rank: int, size: int) -> dict[str, Any]:
    return train(rank, size, {"deepspeed_zero_optimization": {"stage": 1}, "enable_adasum": True})


def disagreeing(rank: int, size: int) -> dict[str, Any]:
    return train(rank, size, {"world_size": 8})


def shared_groups(rank: int, size: int) -> dict[str, Any]:
    """Ten trainers share one group; another timeout needs its own."""
    counts = []
    for timeout in [600] * 5 + [60] * 5:
        trainer = make(optim.SGDConfig(), {"distributed": {"timeout": timeout}})
        counts.append(len(dist.distributed_c10d._world.pg_map))
        assert trainer.loop.strategy.processes.timeout == timeout  # type: ignore[attr-defined]
    return {"counts": counts}


def older(rank: int, size: int) -> dict[str, Any]:
    """The class of ONNX Runtime 1.3 to 1.7, with arguments at their defaults and without."""
    described = older_api.IODescription
    found = {}
    for name, arguments in {"default": {}, "given": {"world_rank": rank, "world_size": size}}.items():
        description = older_api.ModelDescription(
            [described("x", ["batch", 8], torch.float32), described("label", ["batch"], torch.int64, num_classes=4)],
            [described("loss", [], torch.float32), described("prediction", ["batch", 4], torch.float32)],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rate = described("rate", [1], torch.float32)
            trainer = older_api.ORTTrainer(
                mlp(),
                LOSS,
                description,
                "AdamOptimizer",
                None,
                rate,
                "cpu",
                allreduce_post_accumulation=True,
                **arguments,
            )
        for batch in batches(4):
            trainer.train_step(*part(batch, rank, size), torch.tensor([0.01]))
        found |= {f"{name}.{key}": value.numpy() for key, value in trainer.state_dict(False).items()}
    return found


def session(rank: int, size: int) -> dict[str, Any]:
    """ONNX Runtime's TrainingSession."""
    path = Path(tempfile.gettempdir(), f"ort_trainer_session_{os.getpid()}.onnx")
    trainer = ORTTrainer(
        mlp(),
        {"inputs": [("input", ["batch", 8]), ("label", ["batch"])], "outputs": [("loss", [], True)]},
        optim.AdamConfig(),
        LOSS,
    )
    trainer.prepare(batches(1)[0])
    trainer.save_as_onnx(path)
    parameters = TrainingParameters(loss_output_name="loss", training_optimizer_name="AdamOptimizer")
    if size > 1:
        parameters.world_rank, parameters.world_size, parameters.data_parallel_size = rank, size, size
        parameters.deepspeed_zero_stage = 1
    made = TrainingSession(path, parameters)
    path.unlink()
    for batch in batches(4):
        x, y = part(batch, rank, size)
        feed = {"input": x.numpy(), "label": y.numpy(), "Learning_Rate": np.array([0.01], np.float32)}
        made.run(["loss"], feed)
    return made.get_state()


def joined_again(rank: int, size: int) -> dict[str, Any]:
    """The launcher's group, after it was destroyed twice."""
    for _ in range(2):
        dist.destroy_process_group()
        trainer = make(optim.SGDConfig(), {"distributed": {"timeout": 60}})
    return {"ranks": [row["rank"] for row in trainer.gather({"rank": rank})]}


def another_group(rank: int, size: int) -> dict[str, Any]:
    """A group that the script makes, without a launcher's variables, after another one was destroyed."""
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        port = os.environ.pop(name)
    path = Path(tempfile.gettempdir(), f"ort_trainer_group_{port}")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    found = train(rank, size, {"local_rank": 1 - rank})
    return found | {"groups": len(dist.distributed_c10d._world.pg_map)}
