"""HDF5 checkpoints of the legacy trainer: a real one from 1.16.3, and synthetic ones for other cases."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import CheckpointError, ORTTrainer, ORTTrainerOptions, optim, read_user_dict
from ort_trainer.state import aggregate_legacy_files, load_checkpoint_file

h5py = pytest.importorskip("h5py")
REAL = Path(__file__).parent / "data" / "legacy_1_16.h5"
# How training continued in 1.16.3 (with session.disable_prepacking) after it had written the file.
LOSSES = [2.0168495178222656, 1.9389431476593018, 1.8656558990478516, 1.796957015991211]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def trainer_of(model: nn.Module, config: Any = None) -> ORTTrainer:
    desc = {
        "inputs": [("x", ["batch", 8]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("prediction", ["batch", 10])],
    }
    options = ORTTrainerOptions(
        {"lr_scheduler": optim.LinearWarmupLRScheduler(20, 0.1), "utils": {"grad_norm_clip": False}}
    )
    config = optim.AdamConfig(lr=1e-2, lambda_coef=0.01) if config is None else config
    return ORTTrainer(model, desc, config, loss_fn=F.cross_entropy, options=options)


def write(path: Path, state: Mapping[str, Any]) -> Path:
    """Writes nested dicts as the legacy trainer did: one group per dict, so slashes in names create groups, too."""

    def fill(group: Any, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                fill(group.create_group(key), value)
            else:
                group[key] = value

    with h5py.File(path, "w") as file:
        fill(file, state)
    return path


def options_of(rank: int = 0, size: int = 1, zero: int = 0, horizontal: int = 1) -> dict[str, Any]:
    return {
        "mixed_precision": False,
        "zero_stage": zero,
        "world_rank": rank,
        "world_size": size,
        "optimizer_name": "AdamOptimizer",
        "data_parallel_size": size,
        "horizontal_parallel_size": horizontal,
    }


@pytest.mark.parametrize("name", ["path", "file"])
def test_a_real_checkpoint_goes_on_as_legacy_did(name: str) -> None:
    trainer = trainer_of(Net())
    with pytest.warns(UserWarning, match="user_dict in .* is a pickle"):
        if name == "path":
            assert trainer.load_checkpoint(REAL) == {}
        else:
            with REAL.open("rb") as file:
                assert trainer.load_checkpoint(file) == {}
    assert (trainer.train_step_info.step, trainer.train_step_info.optimization_step) == (4, 4)
    if name == "path":
        x, label = torch.arange(40.0).reshape(5, 8).sin(), torch.arange(5)
        losses = [trainer.train_step(x, label)[0].item() for _ in LOSSES]
        assert losses == pytest.approx(LOSSES, rel=1e-5)


def test_the_users_dict_alone_is_refused() -> None:
    with pytest.raises(CheckpointError, match="is a pickle, which could execute anything: read it in the old env"):
        read_user_dict(REAL)


@pytest.mark.filterwarnings("ignore:the user_dict")
def test_it_goes_through_the_same_checks_as_ours() -> None:
    with pytest.raises(
        ValueError, match="the state is from AdamConfig or AdamWConfig, but the trainer uses LambConfig"
    ):
        trainer_of(Net(), optim.LambConfig()).load_checkpoint(REAL)
    other = Net()
    other.fc1 = nn.Linear(8, 4)
    other.fc2 = nn.Linear(4, 10)
    with pytest.raises(ValueError, match=r"full_precision\]\[fc1.weight\] has shape \[16, 8\], but the trainer has"):
        trainer_of(other).load_checkpoint(REAL)


def test_names_with_slashes_come_back(tmp_path: Path) -> None:
    weight, moment = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    entry = {"Moment_1": moment, "Moment_2": moment, "Update_Count": np.array([3])}
    state = {
        "model": {
            "full_precision": {"block/a.weight": weight, "block/deep/b.weight": 2 * weight, "scale": np.float32(4)}
        },
        "optimizer": {"block/a.weight": entry, "block/deep/b.weight": entry, "scale": {"Update_Count": np.array([3])}},
        "trainer_options": options_of(),
        "train_step_info": {"optimization_step": 2, "step": 2},
    }
    found, user_dict = load_checkpoint_file(write(tmp_path / "any.name", state))
    assert user_dict == {}
    assert set(found["model"]["full_precision"]) == {"block/a.weight", "block/deep/b.weight", "scale"}
    assert np.array_equal(found["model"]["full_precision"]["block/deep/b.weight"], 2 * weight)
    assert found["model"]["full_precision"]["scale"] == np.array(4, np.float32)
    assert set(found["optimizer"]) == {"block/a.weight", "block/deep/b.weight", "scale"}
    assert found["optimizer"]["block/a.weight"]["Update_Count"].tolist() == [3]
    assert found["trainer_options"] == options_of() and found["train_step_info"] == {"optimization_step": 2, "step": 2}


def test_a_tied_weight_under_its_first_name_is_enough(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(10, 10, bias=False)
            self.b = nn.Linear(10, 10, bias=False)
            self.b.weight = self.a.weight
            self.first = nn.Linear(8, 10, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.relu(self.a(self.first(x))))

    names = {"a.weight": (10, 10), "first.weight": (10, 8)}
    state = {
        "model": {"full_precision": {name: np.full(shape, 0.5, np.float32) for name, shape in names.items()}},
        "optimizer": {},
        "trainer_options": {**options_of(), "optimizer_name": "SGDOptimizer"},
        "train_step_info": {"optimization_step": 2, "step": 2},
    }
    trainer = trainer_of(Tied(), optim.SGDConfig())
    trainer.load_checkpoint(write(tmp_path / "tied.h5", state))
    del state["model"]["full_precision"]["a.weight"]
    with pytest.raises(RuntimeError, match=r"Missing keys: \['a.weight', 'b.weight'\]"):
        trainer.load_checkpoint(write(tmp_path / "other.h5", state))


def zero_state(rank: int, pieces: list[np.ndarray[Any, Any]], weight: np.ndarray[Any, Any]) -> dict[str, Any]:
    moments = {"Moment_1": pieces[rank], "Moment_2": 2 * pieces[rank], "Update_Count": np.array([5])}
    return {
        "model": {"full_precision": {"w": weight, "b": np.ones(2, np.float32)}},
        "optimizer": {
            "w": moments,
            **({"b": {"Moment_1": np.ones(2, np.float32), "Update_Count": np.array([5])}} if rank == 1 else {}),
        },
        "partition_info": {"w": {"original_dim": np.array([3, 4]), "megatron_row_partition": 0}},
        "trainer_options": options_of(rank, 2, zero=1),
        "train_step_info": {"optimization_step": 4, "step": 4},
    }


def test_files_of_a_zero_run_are_put_together(tmp_path: Path) -> None:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    pieces = [weight.ravel()[:5] + 100, weight.ravel()[5:] + 100]
    paths = [write(tmp_path / f"rank{rank}", zero_state(rank, pieces, weight)) for rank in (1, 0)]
    state = aggregate_legacy_files(paths)
    assert np.array_equal(state["model"]["full_precision"]["w"], weight)
    assert np.array_equal(state["optimizer"]["w"]["Moment_1"], weight + 100)
    assert np.array_equal(state["optimizer"]["w"]["Moment_2"], 2 * (weight + 100))
    assert state["optimizer"]["w"]["Update_Count"].tolist() == [5]
    assert set(state["optimizer"]) == {"w", "b"}
    assert state["train_step_info"] == {"optimization_step": 4, "step": 4}
    assert state["trainer_options"]["world_size"] == 1 and state["trainer_options"]["zero_stage"] == 0
    with pytest.raises(CheckpointError, match=r"run of 2 ranks, .* those of ranks \[1\] were given"):
        load_checkpoint_file(paths[0])
    with pytest.raises(CheckpointError, match=r"those of ranks \[0, 0\] were given"):
        load_checkpoint_file(paths[1], paths[1])
    write(paths[0], zero_state(1, [pieces[0], pieces[1][1:]], weight))
    with pytest.raises(CheckpointError, match="do not fit together: 'w/Moment_1' differs"):
        load_checkpoint_file(*paths)


def test_what_can_not_be_put_together_is_refused(tmp_path: Path) -> None:
    megatron = {"model": {}, "trainer_options": options_of(0, 2, horizontal=2)}
    with pytest.raises(CheckpointError, match="Megatron run .* in the old environment"):
        load_checkpoint_file(write(tmp_path / "m.h5", megatron))
    with pytest.raises(CheckpointError, match="Expected number of files to load: 1, got 2"):
        load_checkpoint_file(REAL, __file__)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load_checkpoint_file(REAL, tmp_path / "none")


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    content = REAL.read_bytes()
    (tmp_path / "half.h5").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint_file(tmp_path / "half.h5")
    with pytest.raises(CheckpointError, match="not a checkpoint of the legacy ORTTrainer: it holds"):
        load_checkpoint_file(write(tmp_path / "foreign.h5", {"weights": {"w": np.ones(2)}}))
    with pytest.raises(CheckpointError, match="'train_step_info/step' does not belong there"):
        load_checkpoint_file(write(tmp_path / "odd.h5", {"model": {}, "train_step_info": {"step": np.ones(2)}}))


def test_a_small_file_can_not_claim_to_be_large(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "bomb.h5", "w") as file:
        file.create_dataset("model/full_precision/w", shape=(1 << 40,), dtype="f4", chunks=(1024,))
    with pytest.raises(CheckpointError, match="'model/full_precision/w' claims to be larger than the file"):
        load_checkpoint_file(tmp_path / "bomb.h5")
    with h5py.File(tmp_path / "cycle.h5", "w") as file:
        inner = file.create_group("model/full_precision")
        inner["again"] = file["model"]
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint_file(tmp_path / "cycle.h5")


def test_links_out_of_the_file_are_refused(tmp_path: Path) -> None:
    target = write(tmp_path / "target.h5", {"model": {"full_precision": {"w": np.ones(2, np.float32)}}})
    with h5py.File(tmp_path / "linked.h5", "w") as file:
        file["model/full_precision/w"] = h5py.ExternalLink(str(target), "/model/full_precision/w")
    with pytest.raises(CheckpointError, match="has a link at 'model/full_precision/w'"):
        load_checkpoint_file(tmp_path / "linked.h5")
    (tmp_path / "raw").write_bytes(b"12345678")
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        group = file.create_group("model/full_precision")
        group.create_dataset("w", shape=(2,), dtype="f4", external=[(str(tmp_path / "raw"), 0, 8)])
    with pytest.raises(CheckpointError, match="keeps 'model/full_precision/w' in another file"):
        load_checkpoint_file(tmp_path / "raw.h5")


def test_without_h5py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "h5py":
            raise ImportError("No module named 'h5py'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"install h5py: pip install 'ort_trainer\[legacy\]'"):
        load_checkpoint_file(REAL)


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_save_are_refused(tmp_path: Path, zipped: bool) -> None:
    torch.save({"model": {}}, tmp_path / "old.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="was written by torch.save.* load_state_dict"):
        load_checkpoint_file(tmp_path / "old.pt")


def test_values_of_a_wrong_kind_are_refused_by_name(tmp_path: Path) -> None:
    weights = {"model": {"full_precision": {"w": np.ones(2, np.float32)}}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": {"full_precision": {"w": "text"}}}, "'model/full_precision/w' must be numbers"),
        ({"model": {"full_precision": {"w": np.void(b"1234")}}}, "'model/full_precision/w' must be numbers"),
        ({"model": {"full_precision": {"w": np.dtype("f4")}}}, "'model/full_precision/w' is a data type"),
        ({**weights, "optimizer": {"w": {"Update_Count": np.inf}}}, "'optimizer/w/Update_Count' must be finite"),
        ({**weights, "trainer_options": {"zero_stage": "1"}}, "'trainer_options/zero_stage' must be numbers"),
        ({**weights, "trainer_options": {"world_size": np.nan}}, "'trainer_options/world_size' must be finite"),
    ]
    for number, (state, message) in enumerate(cases):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint_file(write(tmp_path / f"{number}.h5", state))
    with h5py.File(tmp_path / "reference.h5", "w") as file:
        file["model/full_precision/v"] = np.ones(2)
        file["model/full_precision/w"] = file["model/full_precision/v"].ref
    with pytest.raises(CheckpointError, match="'model/full_precision/w' must be numbers"):
        load_checkpoint_file(tmp_path / "reference.h5")


def test_big_endian_weights_are_converted(tmp_path: Path) -> None:
    values = np.arange(128, dtype=np.float32).reshape(16, 8)
    state, _ = load_checkpoint_file(
        write(tmp_path / "big.h5", {"model": {"full_precision": {"w": values.astype(">f4")}}})
    )
    found = state["model"]["full_precision"]["w"]
    assert found.dtype == np.float32 and found.dtype.isnative and np.array_equal(found, values)
