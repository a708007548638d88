"""How a process finds its rank and world, and how this relates to the options."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from onnxruntime.capi import _pybind_state

from ort_trainer import DistributedError, ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.compat.options import ORTTrainerOptions as OldOptions
from ort_trainer.distributed.launch import Rank, find_place
from ort_trainer.train.strategy import Strategy

from .data_parallel_cases import LOSS, mlp
from .world import ROOT, environments, free_port, run

MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
LAUNCHERS = {"torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"), "mpirun": MPIRUN, "srun": SRUN}
LAUNCHERS["an older srun"] = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
VARIABLES = {"MASTER_ADDR", "MASTER_PORT", *(name for names in LAUNCHERS.values() for name in names)}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    if dist.is_initialized():
        dist.destroy_process_group()


def options(**distributed: Any) -> ORTTrainerOptions:
    return ORTTrainerOptions({"distributed": distributed})


def trainer_with(given: ORTTrainerOptions) -> ORTTrainer:
    return ORTTrainer(mlp(), "auto", optim.SGDConfig(), LOSS, given)


def launched(monkeypatch: pytest.MonkeyPatch, **variables: Any) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def in_group(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)


ALL = {"world_rank": 2, "world_size": 4, "local_rank": 1, "data_parallel_size": 4}


@pytest.mark.parametrize(
    "given", [{}, ALL, {"world_rank": 2}, {"enable_adasum": True}], ids=["", "all", "rank", "adasum"]
)
def test_the_environment_says_the_place(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    launched(monkeypatch, RANK=2, WORLD_SIZE=4, LOCAL_RANK=1)
    place = find_place(options(**given))
    assert (place.rank, place.size, place.local_rank) == (2, 4, 1)
    shown = place.shown_in(options(**given))
    assert {key: getattr(shown.distributed, key) for key in ALL} == ALL
    assert not shown.is_given("distributed.data_parallel_size") or given == ALL


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_says_the_place(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    names = LAUNCHERS[launcher]
    launched(monkeypatch, **dict(zip(names, (2, 4, 1), strict=True)))
    place = find_place(options())
    assert (place.rank, place.size, place.local_rank) == (2, 4, 1)
    with pytest.raises(ValueError, match=f"world_size is 3, but the environment variable {names[1]} is 4"):
        find_place(options(world_size=3))
    with pytest.raises(ValueError, match=f"^{names[1]} is 4, but MASTER_ADDR and MASTER_PORT .*{launcher.split()[-1]}"):
        trainer_with(options())
    in_group(monkeypatch, 2, 4)
    assert find_place(options()).local_rank == 1


def test_the_launcher_of_the_script_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mpirun runs in an allocation of Slurm, and either may start torchrun."""
    for count, launcher in enumerate(("srun", "mpirun", "torchrun"), start=2):
        launched(monkeypatch, **dict(zip(LAUNCHERS[launcher], (1, count, 0), strict=True)))
        assert find_place(options()).size == count


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": 4},
        {"SLURM_NTASKS": 4, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500},
        {"SLURM_NTASKS": 4, "SLURM_PROCID": 0, "SLURM_LOCALID": 0},
        {"SLURM_PROCID": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500},
        {"SLURM_NTASKS": 4, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_STEP_NUM_TASKS": 1},
        {"SLURM_NTASKS": 1, "SLURM_PROCID": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500},
        dict(zip(MPIRUN, (0, 1, 0), strict=True)),
    ],
    ids=[
        "allocation",
        "with an address",
        "batch script",
        "its tasks left open",
        "shell of srun",
        "one task",
        "mpirun -n 1",
    ],
)
def test_one_process_of_an_allocation_is_alone(monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any]) -> None:
    launched(monkeypatch, **variables)
    assert find_place(options()) == Rank()


def test_the_group_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, RANK="x", WORLD_SIZE=4, LOCAL_RANK=0)
    in_group(monkeypatch, 1, 2)
    place = find_place(options())
    assert (place.rank, place.size, place.local_rank) == (1, 2, 0)
    with pytest.raises(ValueError, match="distributed.world_size is 4, but the size of the process group is 2"):
        find_place(options(world_size=4))
    monkeypatch.delenv("LOCAL_RANK")
    assert find_place(options()).local_rank is None
    assert find_place(options(local_rank=3)).local_rank == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world_size": 2}, "world_size is 2, but the environment variable WORLD_SIZE is 4: leave the option"),
        ({"world_size": 1}, "world_size is 1, but the environment variable WORLD_SIZE is 4"),
        ({"world_rank": 0}, "world_rank is 0, but the environment variable RANK is 2"),
        ({"local_rank": 0}, "local_rank is 0, but the environment variable LOCAL_RANK is 1"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2, but .* variable WORLD_SIZE is 4"),
    ],
)
def test_options_that_disagree(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str) -> None:
    launched(monkeypatch, RANK=2, WORLD_SIZE=4, LOCAL_RANK=1)
    with pytest.raises(ValueError, match=f"^distributed.{message}"):
        find_place(options(**given))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": 0}, "variable RANK is set, but WORLD_SIZE is not: .* set WORLD_SIZE, or unset RANK"),
        ({"WORLD_SIZE": 2}, "variable WORLD_SIZE is set, but RANK is not"),
        ({"RANK": "first", "WORLD_SIZE": 2}, "variable RANK must be a whole number from 0, but it is 'first'"),
        ({"RANK": -1, "WORLD_SIZE": 2}, "variable RANK must be a whole number from 0, but it is '-1'"),
        ({"RANK": 0, "WORLD_SIZE": 0}, "variable WORLD_SIZE must be a whole number from 1, but it is '0'"),
        ({"RANK": 0, "WORLD_SIZE": ""}, "variable WORLD_SIZE must be a whole number from 1, but it is ''"),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 1.5}, "LOCAL_RANK must be a whole number from 0, but it is '1.5'"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK is 2, but it must be below WORLD_SIZE, 2"),
        ({"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": 1}, "WORLD_SIZE is 2, but MASTER_ADDR of the environment"),
        ({"RANK": 0, "WORLD_SIZE": 2}, "MASTER_ADDR and MASTER_PORT of the environment, .* or use torchrun"),
    ],
)
def test_environments_that_no_launcher_leaves(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any], message: str
) -> None:
    launched(monkeypatch, **variables)
    with pytest.raises(ValueError, match=message):
        trainer_with(options())


def test_adasum_needs_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, RANK=0, WORLD_SIZE=6)
    with pytest.raises(ValueError, match="enable_adasum: .* power of two, but it is 6"):
        trainer_with(options(enable_adasum=True))


@pytest.mark.parametrize("key", ["world_size", "data_parallel_size", "world_rank", "local_rank"])
def test_several_processes_that_nobody_launched(key: str) -> None:
    count = 2 if key.endswith("size") else "N"
    message = (
        f"distributed.{key} is 2, but this process was launched alone: .*`torchrun --nproc-per-node {count} script"
    )
    with pytest.raises(ValueError, match=message):
        trainer_with(options(**{key: 2}))
    with pytest.raises(ValueError, match=message):  # nor does a lenient trainer train something else
        trainer_with(OldOptions({"distributed": {key: 2}}))


FOR_SEVERAL = {
    "deepspeed_zero_optimization": {"stage": 1},
    "enable_adasum": True,
    "timeout": 30,
    "bucket_cap_mb": 50,
    "reduce_dtype": "float16",
}


@pytest.mark.parametrize("key", FOR_SEVERAL)
def test_what_has_no_effect_in_one_process(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"distributed": {key: FOR_SEVERAL[key], "world_size": 1, "world_rank": 0, "local_rank": 0}}
    with pytest.raises(ValueError, match=rf"^distributed.{key}[a-z.]*: has no effect in one process; leave it out, or"):
        trainer_with(ORTTrainerOptions(given))
    with pytest.warns(UserWarning, match=f"^distributed.{key}"):
        trainer_with(OldOptions(given))
    # The same script, launched with one process; some platforms omit the address.
    launched(monkeypatch, RANK=0, WORLD_SIZE=1)
    assert type(trainer_with(ORTTrainerOptions(given)).loop.strategy) is Strategy
    assert not dist.is_initialized()


def test_a_launch_of_one_process_has_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DistributedSampler, which needs the group, works as with several processes."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    launched(monkeypatch, RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    trainer = trainer_with(options())
    assert type(trainer.loop.strategy) is Strategy and dist.get_world_size() == 1
    assert type(trainer_with(options(timeout=5)).loop.strategy) is Strategy


def test_the_processes_of_mpirun_meet_by_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, **dict(zip(MPIRUN, (1, 2, 1), strict=True)), MASTER_ADDR="127.0.0.1", MASTER_PORT=1)

    def rendezvous(*arguments: Any, **_: Any) -> Any:
        raise RuntimeError(f"called with {arguments}")

    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    with pytest.raises(DistributedError, match=r"rank 1 of 2 could not join .*: called with \('env://', 1, 2\)"):
        trainer_with(options())


def test_a_build_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert find_place(options()) == Rank()
    launched(monkeypatch, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, but PyTorch .* was built without torch.distributed"):
        trainer_with(options())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert type(trainer_with(options()).loop.strategy) is Strategy


def test_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the CUDA support that can be tested without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    class Stop(Exception):
        pass

    def initialize(backend: str, timeout: Any, **others: Any) -> None:
        raise Stop(backend, timeout.total_seconds())

    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(dist, "init_process_group", initialize)
    launched(monkeypatch, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    with pytest.raises(Stop, match="'cpu:gloo,cuda:nccl', 20.0"):
        trainer_with(options(timeout=20))
    with pytest.raises(Stop, match="'gloo', 600.0"):
        trainer_with(ORTTrainerOptions({"device": {"id": "cpu"}}))


# ---- in several processes

SESSION = ("session",) if hasattr(_pybind_state, "GradientGraphBuilder") else ()
ALONE = ("plain", *SESSION)
TOGETHER = (
    *("given", "small_buckets", "low_precision", "adasum", "sharded", "sharded_adasum", "disagreeing", "shared_groups"),
    *("older", "joined_again", "another_group"),
)


@functools.cache
def world(size: int) -> dict[str, list[dict[str, Any]]]:
    if size > 1:
        world(1)  # fills the export cache
    return run("launch_cases", (*ALONE, *TOGETHER) if size > 1 else ALONE, size)


def weights(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name.startswith("weight.")}


def assert_equal(found: dict[str, Any], wanted: dict[str, Any], rtol: float = 0.0) -> None:
    assert set(found) == set(wanted) and found
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("case", ALONE)
def test_processes_train_as_one(case: str) -> None:
    (alone,), together = world(1)[case], world(2)[case]
    for found in together:
        if case == "session":
            assert_equal(found, alone, 1e-6)
        else:
            assert_equal(weights(found), weights(alone), 1e-6)


@pytest.mark.parametrize("case", ["given", "small_buckets", "another_group"])
def test_what_changes_no_number(case: str) -> None:
    for rank, found in enumerate(world(2)[case]):
        assert_equal(weights(found), weights(world(2)["plain"][0]))
        assert found["shown"].tolist() == [rank, 2, 1 - rank if case == "another_group" else rank, 2]
        assert found["buckets"] == (4 if case == "small_buckets" else 1)


def test_sharding() -> None:
    for case, like in (("sharded", "plain"), ("sharded_adasum", "adasum")):
        for found in world(2)[case]:
            assert found["zero_stage"] == 1
            assert_equal(weights(found), weights(world(2)[like][0]), 1e-6)


@pytest.mark.parametrize("case", ["low_precision", "adasum"])
def test_what_changes_numbers(case: str) -> None:
    plain, (first, second) = weights(world(2)["plain"][0]), (weights(found) for found in world(2)[case])
    assert_equal(second, first)
    differences = [np.abs(first[name] - plain[name]).max() for name in plain]
    assert 1e-6 < max(differences) < 0.05


def test_disagreeing_options_are_errors_of_all_processes() -> None:
    for found in world(2)["disagreeing"]:
        assert "distributed.world_size is 8, but the size of the process group is 2" in str(found["error"])


def test_trainers_share_groups() -> None:
    for found in world(2)["shared_groups"]:
        counts = found["counts"].tolist()
        assert len(set(counts[:5])) == 1 and set(counts[5:]) == {counts[0] + 1}
    assert all(found["groups"] == 2 for found in world(2)["another_group"])


def test_a_group_that_was_left_is_joined_again() -> None:
    for found in world(2)["joined_again"]:
        assert "error" not in found and found["ranks"].tolist() == [0, 1]


def test_old_scripts() -> None:
    for found in world(2)["older"]:
        plain = weights(world(2)["plain"][0])
        for name in ("default", "given"):
            of_case = {
                key.replace(f"{name}.", "weight."): value for key, value in found.items() if key.startswith(name)
            }
            assert_equal(of_case, plain, 1e-6)


def test_the_script_of_the_page_trains_the_same_and_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script does not destroy the group itself, and one process ends before the other."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "distributed.md").read_text(), re.DOTALL)
    end = "import time\ntime.sleep(2 * trainer.world_rank)\nprint(loss.item(), flush=True)\n"
    monkeypatch.chdir(tmp_path)
    alone: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "distributed.md", "exec"), alone)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", block + end],
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments(2)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    losses = [float(output) for output in outputs]  # and no warning besides
    assert np.mean(losses) == pytest.approx(alone["loss"].item(), rel=1e-5) and losses[0] != losses[1]
