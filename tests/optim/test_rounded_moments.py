"""Moments in bfloat16, against the same rules with moments in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.optim import rounded_moments
from ort_trainer.optim.update import OptimizerUpdate

from ..helpers import MLP, MLP_DESC, assert_same_state, mlp_batches, mlp_trainer

CONFIGS: dict[str, Any] = {
    "adam": optim.AdamConfig(lr=0.01, lambda_coef=0.1),
    "adam, decay after": optim.AdamConfig(
        lr=0.01, lambda_coef=0.1, weight_decay_mode=optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
    ),
    "lamb": optim.LambConfig(lr=0.01),
    "lion": optim.LionConfig(lr=0.01),
    "momentum": optim.SGDConfig(lr=0.1, momentum=0.9, dampening=0.5),
    "sgd": optim.SGDConfig(lr=0.1),
}
SHAPES = {"long": (7, 9), "short": (3,), "transposed": (6, 5), "scalar": (), "double": (4,)}


def updates(config: Any, count: int, rounds: bool) -> tuple[OptimizerUpdate, dict[str, torch.Tensor]]:
    """Returns an update after some steps, and its weights."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    weights["double"] = weights["double"].double()
    update = OptimizerUpdate(config, weights, dict.fromkeys(weights, 0), clip=False, rounds_moments=rounds)
    for number in range(count):
        gradients = {name: torch.randn_like(value) * 4.0 for name, value in weights.items()}
        gradients["transposed"] = torch.randn(5, 6).t()
        update.step(gradients, [config.lr], 4.0, number=number)
    return update, weights


@pytest.mark.parametrize("block", [4, 1 << 18])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_update_is_the_rule_s(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_moments, "_BLOCK", block)
    torch.manual_seed(1)
    rounded, ours = updates(CONFIGS[name], 1, True)
    torch.manual_seed(1)
    exact, theirs = updates(CONFIGS[name], 1, False)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)  # the first moments are zero, which nothing rounds
    assert {key: float(count) for key, count in rounded.counts.items()} == {
        key: float(count) for key, count in exact.counts.items()
    }
    for parameter, slots in exact.slots.items():
        for slot, value in slots.items():
            found = rounded.slots[parameter][slot]
            assert found.dtype == (torch.float64 if parameter == "double" else torch.bfloat16)
            torch.testing.assert_close(found.to(value.dtype), value, rtol=2**-7, atol=0)


def test_a_second_moment_moves_although_its_updates_are_smaller_than_its_steps() -> None:
    weights = {"w": torch.zeros(4096)}
    config = optim.AdamConfig(lr=0.0)
    update = OptimizerUpdate(config, weights, {"w": 0}, clip=False, rounds_moments=True)
    update.slots["w"]["Moment_2"].fill_(1.0)
    for number in range(200):
        update.step({"w": torch.full([4096], 2.0)}, [0.0], number=number)
    expected = 4.0 - 3.0 * 0.999**200
    found = update.slots["w"]["Moment_2"].float()
    # Each element is a random walk around the exact value, so their mean has a 64th of its deviation.
    assert found.mean().item() == pytest.approx(expected, rel=2e-3)
    assert 0.005 < found.std() / expected < 0.05
    assert torch.isfinite(found).all()


def test_not_finite_moments_stay_what_they_are() -> None:
    weights = {"w": torch.zeros(4)}
    update = OptimizerUpdate(optim.AdamConfig(), weights, {"w": 0}, clip=False, rounds_moments=True)
    nan_of_cuda = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # one more would be -0
    update.step({"w": torch.cat([torch.tensor([np.inf, -np.inf, np.nan]), nan_of_cuda])}, [0.1])
    assert update.slots["w"]["Moment_1"].tolist()[:2] == [np.inf, -np.inf]
    assert update.slots["w"]["Moment_1"][2:].isnan().all()


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_training(name: str, tmp_path: Path) -> None:
    """Losses are nearly those of float32; a checkpoint restores all, also with moments of the other dtype."""
    losses = {}
    for moments in ("float32", "bfloat16"):
        torch.manual_seed(0)
        trainer = mlp_trainer({"utils": {"moments": moments}}, CONFIGS[name])
        losses[moments] = [trainer.train_step(*batch)[0].item() for batch in mlp_batches(20)]
        trainer.save_checkpoint(tmp_path / moments)
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=5e-3)
    assert losses["bfloat16"] != losses["float32"]
    state = trainer.state_dict()
    assert state["optimizer"]["fc1.weight"]["Moment_1"].dtype == np.float32
    sizes = [(tmp_path / moments).stat().st_size for moments in losses]
    elements = sum(value.size for value in state["model"]["full_precision"].values())
    assert sizes[0] - sizes[1] == pytest.approx(2 * 2 * elements, abs=16)  # two moments

    more = mlp_batches(3, seed=9)
    expected = [trainer.train_step(*batch)[0].item() for batch in more]
    for source in (tmp_path / "bfloat16", state):
        again = mlp_trainer({"utils": {"moments": "bfloat16"}}, CONFIGS[name])
        again.load_checkpoint(source) if isinstance(source, Path) else again.load_state_dict(source)
        again.prepare(more[0])
        assert_same_state(again.state_dict(), state)
        assert [again.train_step(*batch)[0].item() for batch in more] == expected
    other = mlp_trainer({}, CONFIGS[name])
    other.load_checkpoint(tmp_path / "bfloat16")
    other.prepare(more[0])
    assert_same_state(other.state_dict()["optimizer"], state["optimizer"])


def test_an_optimizer_of_pytorch_keeps_its_own() -> None:
    model = MLP()
    with pytest.raises(ValueError, match=r"utils.moments 'bfloat16' has no effect on Adam, .*: leave it out"):
        ORTTrainer(
            model,
            MLP_DESC,
            torch.optim.Adam(model.parameters()),
            loss_fn=torch.nn.functional.cross_entropy,
            options=ORTTrainerOptions({"utils": {"moments": "bfloat16"}}),
        )
