"""state_dict and load_state_dict: both formats, strict or not, before or after the first step."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim
from ort_trainer.optim import rules

from ..helpers import MLP, mlp_batches, mlp_trainer
from ..zoo import Tied

# Every optimizer that has a file, by its name in state dicts.
CONFIGS = {
    **rules.CONFIGS,
    "momentum": lambda lr=0.1: optim.SGDConfig([{"params": ["fc1.bias"], "momentum": 0.0}], lr, 0.9, dampening=0.1),
}


def slots(kind: str) -> set[str]:
    """Returns the keys of a parameter in the state dict; for the legacy optimizers, those that legacy wrote."""
    known = {
        "AdamOptimizer": {"Moment_1", "Moment_2", "Update_Count"},
        "LambOptimizer": {"Moment_1", "Moment_2"},
        "momentum": {"Momentum", "Update_Count"},
    }
    if kind in known:
        return known[kind]
    config = CONFIGS[kind]()
    hyper = config.hyper_parameters(config.group_of("fc1.weight"))
    return {*config.rule.slots_for(hyper), *(["Update_Count"] if config.rule.keeps_count(hyper) else [])}


@pytest.fixture(scope="module")
def trained() -> ORTTrainer:
    trainer = mlp_trainer()
    for x, y in mlp_batches(3):
        trainer.train_step(x, y)
    return trainer


def fresh(prepared: bool = False) -> ORTTrainer:
    trainer = mlp_trainer()
    if prepared:
        trainer.prepare(mlp_batches(1)[0])
    return trainer


@pytest.mark.parametrize("kind", CONFIGS)
def test_layout(kind: str) -> None:
    trainer = mlp_trainer({"lr_scheduler": optim.LinearWarmupLRScheduler(9)}, CONFIGS[kind]())
    x, y = mlp_batches(1)[0]
    trainer.train_step(x, y)
    trainer.train_step(x, y)
    state = trainer.state_dict()
    names = list(MLP().state_dict())
    weights = state["model"]["full_precision"]
    assert list(weights) == names and all(isinstance(w, np.ndarray) for w in weights.values())
    assert state["train_step_info"] == {"optimization_step": 2, "step": 2}
    assert state["trainer_options"]["optimizer_name"] == trainer.optim_config.name
    assert state["trainer_options"]["mixed_precision"] is False and state["trainer_options"]["world_size"] == 1
    optimizer = state["optimizer"]
    if kind == "SGDOptimizer":
        assert optimizer == {}
    else:
        shared = optimizer.pop("shared_optimizer_state", None)
        assert list(optimizer) == [name for name in names if kind != "momentum" or name != "fc1.bias"]
        assert (shared is not None) == (kind == "LambOptimizer")
        if kind == "LambOptimizer":
            assert shared["Step"].tolist() == [3] and shared["Step"].dtype == np.int64
        for name, entry in optimizer.items():
            assert set(entry) == slots(kind)
            assert entry.pop("Update_Count", np.array([3])).tolist() == [3]
            assert all(value.shape == weights[name].shape for value in entry.values())
    assert state["gradients"] == {} and "last_lr" in state["lr_scheduler"]


def test_arrays_are_copies(trained: ORTTrainer) -> None:
    state = trained.state_dict()
    state["model"]["full_precision"]["fc1.weight"][:] = 7
    trained.state_dict(pytorch_format=True)["fc1.weight"].fill_(7)
    assert not (trained.state_dict()["model"]["full_precision"]["fc1.weight"] == 7).any()


def test_before_the_first_step() -> None:
    model = MLP()
    trainer, same = mlp_trainer(model=model), fresh()
    state = trainer.state_dict(pytorch_format=True)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    same.load_state_dict(trainer.state_dict())
    with pytest.raises(RuntimeError, match=r"before the first batch: call prepare\(\)"):
        trainer.save_as_onnx("unused")
    for x, y in mlp_batches(2):
        assert torch.equal(trainer.train_step(x, y)[0], same.train_step(x, y)[0])


@pytest.mark.parametrize("kind", ["config", "torch"])
def test_what_changes_between_loading_and_the_first_step_is_in_the_state(kind: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Sequential, ORTTrainer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options = {"batch": {"gradient_accumulation_steps": 2}}
        config = own if kind == "torch" else optim.AdamConfig(lr=0.01)
        return model, ORTTrainer(model, "auto", config, loss_fn=F.cross_entropy, options=options)

    def halve(model: nn.Sequential) -> None:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
            model[1].running_mean.add_(1)

    batches = mlp_batches(7)
    model, trainer = make()
    for x, y in batches[:3]:
        trainer.train_step(x, y)
    state = trainer.state_dict()
    halve(model)
    trainer.lazy_reset_grad()
    trainer.gradient_accumulation_steps = 3
    expected = [trainer.train_step(x, y)[0].item() for x, y in batches[3:]]

    for way in ("train", "its own state", "a checkpoint"):
        model, trainer = make()
        trainer.load_state_dict(state)
        halve(model)
        trainer.lazy_reset_grad()
        trainer.gradient_accumulation_steps = 3
        if way == "its own state":
            trainer.load_state_dict(trainer.state_dict())
        elif way == "a checkpoint":
            trainer.save_checkpoint(tmp_path / "checkpoint")
            model, trainer = make()
            trainer.load_checkpoint(tmp_path / "checkpoint")
        assert [trainer.train_step(x, y)[0].item() for x, y in batches[3:]] == expected, way


@pytest.mark.parametrize(("kind", "prepared"), [("AdamOptimizer", False), *((kind, True) for kind in CONFIGS)])
def test_round_trip(kind: str, prepared: bool) -> None:
    batches = mlp_batches(6)
    first, second = (
        mlp_trainer({"lr_scheduler": optim.LinearWarmupLRScheduler(20, 0.3)}, CONFIGS[kind](lr=0.05)) for _ in range(2)
    )
    for x, y in batches[:3]:
        first.train_step(x, y)
    state = first.state_dict()
    given = copy.deepcopy(state)
    if prepared:
        second.prepare(batches[0])
    second.load_state_dict(state)
    assert second.train_step_info.step == second.train_step_info.optimization_step == 3
    state["model"]["full_precision"]["fc1.weight"][:] = 0  # the caller's array is not the trainer's
    assert repr(second.state_dict()) == repr(given)
    for x, y in batches[3:]:
        assert torch.equal(first.train_step(x, y)[0], second.train_step(x, y)[0])
    assert second.lr_scheduler.get_last_lr() == first.lr_scheduler.get_last_lr() != [0.0]


@pytest.mark.parametrize("prepared", [False, True])
def test_pytorch_format(prepared: bool, trained: ORTTrainer) -> None:
    model = MLP()
    model.load_state_dict(trained.state_dict(pytorch_format=True), strict=True)
    trainer = fresh(prepared)
    trainer.load_state_dict(model.state_dict())
    x, y = mlp_batches(1)[0]
    model.eval()
    torch.testing.assert_close(trainer.eval_step(x, y)[1], model(x).detach(), rtol=1e-5, atol=1e-6)
    assert trainer.train_step_info.step == 0


def test_two_loads_before_the_first_step_are_both_applied(trained: ORTTrainer) -> None:
    state = trained.state_dict()
    weights = {"fc1.weight": torch.ones(16, 8)}
    trainer = fresh()
    trainer.load_state_dict(state)
    trainer.load_state_dict(weights, strict=False)
    trainer.prepare(mlp_batches(1)[0])
    found = trainer.state_dict()
    assert (found["model"]["full_precision"]["fc1.weight"] == 1).all()
    assert (found["model"]["full_precision"]["fc2.bias"] == state["model"]["full_precision"]["fc2.bias"]).all()
    assert found["optimizer"]["fc1.weight"]["Update_Count"].tolist() == [4]


def broken(trained: ORTTrainer, edit: Any) -> dict[str, Any]:
    state = trained.state_dict()
    edit(state)
    return state


CASES = [
    (
        lambda s: s["model"]["full_precision"].pop("fc1.bias"),
        RuntimeError,
        r"Missing keys: \['fc1.bias'\] in state_dict\[model\]",
    ),
    (
        lambda s: s["model"]["full_precision"].update(z=np.ones(1)),
        RuntimeError,
        r"Unexpected keys: \['z'\] in state_dict\[model\]",
    ),
    (lambda s: s["model"].update(half={}), RuntimeError, r"Unexpected keys: \['half'\] in state_dict\[model\]"),
    (
        lambda s: s["optimizer"].pop("fc1.bias"),
        RuntimeError,
        r"Missing keys: \['fc1.bias'\] in state_dict\[optimizer\]",
    ),
    (lambda s: s["optimizer"].update(z={}), RuntimeError, r"Unexpected keys: \['z'\] in state_dict\[optimizer\]"),
    (
        lambda s: s["optimizer"]["fc1.bias"].pop("Moment_2"),
        RuntimeError,
        r"Missing keys: \['Moment_2'\] in state_dict\[optimizer\]\[fc1.bias\]",
    ),
    (lambda s: s.pop("trainer_options"), RuntimeError, r"Missing keys: \['optimizer_name'\]"),
    (
        lambda s: s["train_step_info"].pop("step"),
        RuntimeError,
        r"Missing keys: \['step'\] in state_dict\[train_step_info\]",
    ),
    (lambda s: s.update(extra={}), RuntimeError, r"Unexpected keys: \['extra'\] in state_dict\."),
    *(
        (
            lambda s, key=key: s[key].update(extra=1),
            RuntimeError,
            rf"Unexpected keys: \['extra'\] in state_dict\[{key}\]",
        )
        for key in ("train_step_info", "trainer_options", "window")
    ),
    (lambda s: s["window"].pop("unit"), RuntimeError, r"Missing keys: \['unit'\] in state_dict\[window\]"),
    (lambda s: s["trainer_options"].pop("world_size"), RuntimeError, r"Missing keys: \['world_size'\] in state_dict"),
    (
        lambda s: s["trainer_options"].update(optimizer_name="LambOptimizer"),
        ValueError,
        "the state is from LambConfig, but the trainer uses AdamConfig or AdamWConfig",
    ),
    (
        lambda s: s["model"]["full_precision"].update({"fc1.bias": np.ones(3, np.float32)}),
        ValueError,
        r"fc1.bias\] has shape \[3\], but the trainer has \[16\]",
    ),
    (
        lambda s: s["model"]["full_precision"].update({"fc1.bias": np.ones(16, np.int64)}),
        ValueError,
        r"fc1.bias\] has dtype torch.int64",
    ),
    (
        lambda s: s["model"]["full_precision"].update({"fc1.bias": [1.0]}),
        TypeError,
        r"fc1.bias\] must be a tensor or a numpy array, but it is a list",
    ),
    (
        lambda s: s["optimizer"]["fc2.bias"].update(Moment_1=np.ones(1, np.float32)),
        ValueError,
        r"Moment_1\] has shape \[1\]",
    ),
    (
        lambda s: s["optimizer"]["fc2.bias"].update(Update_Count=np.zeros(1, np.int64)),
        ValueError,
        r"Update_Count\] must be a single number, at least 1",
    ),
    (lambda s: s["train_step_info"].update(step=-1), ValueError, r"\[step\] must be an int, at least 0"),
    (lambda s: s.update(model=3), TypeError, r"state_dict\[model\] must be a dict, but it is a int"),
    (
        lambda s: s.update(random=np.zeros(100, np.uint8)),
        ValueError,
        r"state_dict\[random\] is not a state of a random generator",
    ),
    (
        lambda s: s.update(gradients={"fc1.bias": np.zeros(16, np.float32)}),
        ValueError,
        "gradients] is not empty, but state_dict\\[window\\] has no micro-batch",
    ),
]


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(("edit", "error", "message"), CASES)
def test_what_does_not_fit_is_refused_whole(trained, prepared, edit, error, message, prepared_trainers) -> None:
    trainer = prepared_trainers[prepared]
    state = broken(trained, edit)
    before = _everything(trainer)
    with pytest.raises(error, match=message):
        trainer.load_state_dict(state)
    assert _everything(trainer) == before


@pytest.fixture(scope="module")
def prepared_trainers() -> dict[bool, ORTTrainer]:
    return {False: fresh(), True: fresh(prepared=True)}


def _everything(trainer: ORTTrainer) -> str:
    return repr((trainer.state_dict(), trainer.train_step_info))


@pytest.mark.filterwarnings("ignore:Missing key")
def test_not_strict_restores_what_both_have(trained: ORTTrainer) -> None:
    state = trained.state_dict()
    expected = state["model"]["full_precision"]["fc2.weight"].copy()
    del state["model"]["full_precision"]["fc1.bias"], state["optimizer"]["fc2.bias"]
    state["model"]["full_precision"]["other"] = np.ones(1)
    state["optimizer"]["other"] = {}
    trainer = fresh(prepared=True)
    before = trainer.state_dict()["model"]["full_precision"]["fc1.bias"]
    trainer.load_state_dict(state, strict=False)
    after = trainer.state_dict()
    assert (after["model"]["full_precision"]["fc2.weight"] == expected).all()
    assert (after["model"]["full_precision"]["fc1.bias"] == before).all()
    assert after["optimizer"]["fc1.bias"]["Update_Count"] == 4 and after["optimizer"]["fc2.bias"]["Update_Count"] == 1


@pytest.mark.parametrize("prepared", [False, True])
def test_a_state_with_no_name_in_common_is_refused_also_if_not_strict(prepared: bool, trained: ORTTrainer) -> None:
    trainer = fresh(prepared)
    before = _everything(trainer)
    weights = {f"module.{name}": value for name, value in MLP().state_dict().items()}
    nested = trained.state_dict()
    nested["model"]["full_precision"] = weights
    cases = [
        (
            weights,
            "state_dict has no name in common with the trainer, so nothing would be restored: it has ['module.fc1",
        ),
        ({"model_state_dict": trained.state_dict(pytorch_format=True)}, "...]: pass its entry 'model_state_dict'"),
        (nested, "state_dict[model][full_precision] has no name in common with the trainer"),
        ({"model": weights}, "state_dict[model] has no name in common with the trainer"),
        ({"weights": weights, "epoch": {}}, "it has ['weights', 'epoch'], but the trainer has ['model', 'optimizer', "),
    ]
    for state, message in cases:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            trainer.load_state_dict(state, strict=False)
    assert _everything(trainer) == before


def test_the_state_that_parameters_share_is_checked_as_well(trained: ORTTrainer) -> None:
    shared = {"Step": np.array([2]), "Speed": np.array([2])}
    lamb = mlp_trainer(config=optim.LambConfig())
    lamb.prepare(mlp_batches(1)[0])
    state = lamb.state_dict()
    state["optimizer"]["shared_optimizer_state"] = shared
    with pytest.raises(RuntimeError, match=r"Unexpected keys: \['Speed'\] in .*\[shared_optimizer_state\]"):
        lamb.load_state_dict(state)
    lamb.load_state_dict(state, strict=False)
    assert lamb.state_dict()["optimizer"]["shared_optimizer_state"]["Step"] == [2]
    # The legacy documentation writes the key in lower case.
    state["optimizer"]["shared_optimizer_state"] = {"step": np.array([5])}
    lamb.load_state_dict(state)
    assert lamb.state_dict()["optimizer"]["shared_optimizer_state"]["Step"] == [5]
    # Adam's parameters share nothing.
    state = trained.state_dict()
    state["optimizer"]["shared_optimizer_state"] = shared
    with pytest.raises(RuntimeError, match=r"Unexpected keys: \['shared_optimizer_state'\] in state_dict\[optimizer\]"):
        fresh().load_state_dict(state)


def test_missing_sections_are_warned_about(trained: ORTTrainer) -> None:
    trainer = fresh(prepared=True)
    for key in ("model", "optimizer", "train_step_info", "random", "window"):
        state = trained.state_dict()
        del state[key]
        with pytest.warns(UserWarning, match=f"Missing key: {key} in state_dict"):
            trainer.load_state_dict(state)
    scheduled = mlp_trainer({"lr_scheduler": optim.LinearWarmupLRScheduler(9)})
    with pytest.warns(UserWarning, match="Missing key: lr_scheduler in state_dict") as found:
        scheduled.load_state_dict(trained.state_dict())
    assert found[0].filename == __file__
    scheduled.prepare(mlp_batches(1)[0])
    state = scheduled.state_dict()
    with pytest.warns(UserWarning, match="The trainer has no lr_scheduler, so it ignores that of state_dict"):
        mlp_trainer().load_state_dict(state)
    for edit, message in (("pop", "Missing keys"), ("__setitem__", "Unexpected keys")):
        changed = {**state, "lr_scheduler": dict(state["lr_scheduler"])}
        getattr(changed["lr_scheduler"], edit)(*(("last_lr",) if edit == "pop" else ("extra", 1)))
        with pytest.raises(RuntimeError, match=rf"{message}: .* in state_dict\[lr_scheduler\]"):
            scheduled.load_state_dict(changed)
        scheduled.load_state_dict(changed, strict=False)
    with pytest.raises(TypeError, match="state_dict must be a dict, but a list was given"):
        trainer.load_state_dict([])


def test_a_state_from_the_middle_of_a_window_without_gradients_begins_it_anew(trained: ORTTrainer) -> None:
    state = trained.state_dict()  # as the legacy trainer wrote it: 3 steps, no gradients
    del state["gradients"], state["random"], state["window"]
    trainer = mlp_trainer({"batch": {"gradient_accumulation_steps": 2}})
    with pytest.warns(UserWarning, match="after 1 of 2 micro-batches of a window, without their gradients"):
        trainer.load_state_dict(state)
    assert trainer.train_step_info.step == 2


def test_a_tied_weight_with_two_values_is_refused() -> None:
    trainer, state = mlp_trainer(model=Tied()), Tied().state_dict()
    trainer.load_state_dict(state)
    state["second.weight"] = state["second.weight"] + 1
    message = "different values for 'first.weight' and 'second.weight', which are tied in the model"
    with pytest.raises(ValueError, match=message):
        trainer.load_state_dict(state)


@pytest.mark.parametrize("size", [16, 5056])
def test_the_random_state_of_another_device_gives_other_numbers(size: int, trained: ORTTrainer) -> None:
    """That of CUDA has 16 bytes, that of the CPU 5056; what is no generator's is refused."""
    state = trained.state_dict()
    own = state["random"]
    state["random"] = np.arange(size, dtype=np.uint8) if size != len(own) else own
    first, second = fresh(), fresh()
    first.load_state_dict(state)
    second.load_state_dict(state)
    assert np.array_equal(first.state_dict()["random"], second.state_dict()["random"])
    assert np.array_equal(first.state_dict()["random"], own) == (size == len(own))
    state["random"] = np.zeros(40, np.uint8)
    with pytest.raises(ValueError, match="is not a state of a random generator on cpu"):
        fresh().load_state_dict(state)
