"""``onnxruntime.training.checkpoint``: the experimental functions and the aggregation of files."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from ort_trainer import CheckpointError, ORTTrainer, optim
from ort_trainer.compat import checkpoint

from ..helpers import MLP, mlp_batches, mlp_trainer

pytestmark = pytest.mark.filterwarnings("ignore:experimental_:DeprecationWarning")
REAL = Path(__file__).parent.parent / "state" / "data" / "legacy_1_16.h5"
X, Y = mlp_batches(1)[0]


@pytest.fixture(scope="module")
def trained() -> ORTTrainer:
    trainer = mlp_trainer(config=optim.LambConfig(lr=1e-2))
    trainer.train_step(X, Y)
    return trainer


def test_flat_state_goes_on_where_it_stopped(trained: ORTTrainer, tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"experimental_state_dict\(\) is only for old scripts"):
        state = checkpoint.experimental_state_dict(trained)
    names = set(MLP().state_dict())
    assert set(state) == names | {f"Moment_{n}_{name}" for n in (1, 2) for name in names} | {"Step"}
    assert state["Step"].tolist() == [2] and all(isinstance(value, torch.Tensor) for value in state.values())
    assert set(checkpoint.experimental_state_dict(trained, include_optimizer_state=False)) == names
    checkpoint.experimental_save_checkpoint(trained, tmp_path, "a", {"best": 0.5})
    expected = [trained.train_step(X, Y)[0].item() for _ in range(2)]
    checkpoint.experimental_load_state_dict(trained, state, strict=True)
    assert [trained.train_step(X, Y)[0].item() for _ in range(2)] == expected
    assert checkpoint.experimental_load_checkpoint(trained, tmp_path, "a", strict=True) == {"best": 0.5}
    assert [trained.train_step(X, Y)[0].item() for _ in range(2)] == expected
    with warnings.catch_warnings():  # the caller chose to leave the optimizer's state out
        warnings.simplefilter("error", UserWarning)
        checkpoint.experimental_load_state_dict(trained, {name: state[name] for name in names}, strict=True)
    del state["Moment_1_fc1.weight"]
    with pytest.raises(RuntimeError, match=r"Missing keys: \['Moment_1'\] in state_dict\[optimizer\]\[fc1.weight\]"):
        checkpoint.experimental_load_state_dict(trained, state, strict=True)


def test_a_nested_state_dict_is_loaded_too(trained: ORTTrainer) -> None:
    state = trained.state_dict()
    expected = [trained.train_step(X, Y)[0].item() for _ in range(2)]
    checkpoint.experimental_load_state_dict(trained, state, strict=False)
    assert trained.train_step_info.step == state["train_step_info"]["step"]
    assert [trained.train_step(X, Y)[0].item() for _ in range(2)] == expected
    weights = trained.state_dict(pytorch_format=True)
    with pytest.raises(RuntimeError, match=r"state_dict\[model\] has no name in common with the trainer"):
        checkpoint.experimental_load_state_dict(trained, {"model": weights}, strict=False)
    with pytest.raises(RuntimeError, match=r"so nothing would be restored: it has \['module.fc1.weight'"):
        flat = {f"module.{name}": value for name, value in weights.items()}
        checkpoint.experimental_load_state_dict(trained, flat, strict=False)
    assert all(torch.equal(value, weights[name]) for name, value in trained.state_dict(pytorch_format=True).items())


def test_a_weight_may_be_called_like_a_moment() -> None:
    model = torch.nn.Module()
    model.Moment_1_x = torch.nn.Parameter(torch.zeros(2))
    model.Step = torch.nn.Parameter(torch.zeros(2))
    desc = {"inputs": [("a", [2])], "outputs": [("loss", [], True)]}
    model.forward = lambda a: (a * model.Moment_1_x * model.Step).sum()
    trainer = ORTTrainer(model, desc, optim.SGDConfig())
    flat = {"Moment_1_x": torch.ones(2), "Step": torch.full([2], 3.0)}
    checkpoint.experimental_load_state_dict(trainer, flat, strict=True)
    loaded = trainer.state_dict()["model"]["full_precision"]
    assert {name: value.tolist() for name, value in loaded.items()} == {"Moment_1_x": [1, 1], "Step": [3, 3]}


def test_aggregate_checkpoints() -> None:
    with pytest.warns(UserWarning, match="is a pickle"):
        weights = checkpoint.aggregate_checkpoints([REAL])
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "fc1.bias": (16,),
        "fc1.weight": (16, 8),
        "fc2.bias": (10,),
        "fc2.weight": (10, 16),
    }
    with pytest.warns(UserWarning, match="is a pickle"):
        state = checkpoint.aggregate_checkpoints([REAL], pytorch_format=False)
    assert state["train_step_info"] == {"optimization_step": 4, "step": 4}
    with pytest.raises(TypeError, match="paths must be a list of at least one path"):
        checkpoint.aggregate_checkpoints(str(REAL))
    with pytest.raises(CheckpointError, match="Expected number of files to load: 1, got 2"):
        checkpoint.aggregate_checkpoints([REAL, __file__])
