"""Several adapters over one base: each trains as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ort_trainer import ORTTrainer, optim
from ort_trainer.adapters import Adapters, LoRA, add_adapter, load_adapter, save_adapter

from .models import batch, classifier, exported, tensors
from .test_onnx_models import LORA, trainer_of


def weights(trainer: ORTTrainer) -> dict[str, torch.Tensor]:
    trained = {*trainer.loop.contents.trainable}
    return {name: value for name, value in trainer.state_dict(pytorch_format=True).items() if name in trained}


def alone(model, steps: list[int]) -> dict[str, torch.Tensor]:
    """Returns the weights of an adapter that trains by itself."""
    trainer = trainer_of(model)
    for step in steps:
        trainer.train_step(*batch(step))
    return weights(trainer)


def test_each_trains_as_if_it_were_alone(tmp_path) -> None:
    base = exported(classifier())
    first = add_adapter(base, LORA)
    trainer = trainer_of(first)
    adapters = Adapters(trainer, "first")
    torch.manual_seed(7)
    adapters.add("second")
    adapters.activate("second")
    save_adapter(trainer, tmp_path / "second")
    second = load_adapter(base, tmp_path / "second")
    assert not np.array_equal(*(tensors(model)["layers.0.q_proj.lora_A.weight"] for model in (first, second)))
    order = [("second", 0), ("first", 1), ("first", 2), ("second", 3), ("first", 4), ("second", 5)]
    for name, step in order:
        adapters.activate(name)
        trainer.train_step(*batch(step))
    assert adapters.names == ["second", "first"]
    for name, model in (("first", first), ("second", second)):
        adapters.activate(name)
        expected = alone(model, [step for chosen, step in order if chosen == name])
        for key, value in weights(trainer).items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
    adapters.add("copy", like="second")
    adapters.remove("first")
    adapters.activate("copy")
    assert adapters.names == ["copy", "second"]
    trainer.train_step(*batch(6))
    expected = alone(second, [0, 3, 5, 6])
    assert all(torch.equal(value, expected[key]) for key, value in weights(trainer).items())


def test_of_a_pytorch_model() -> None:
    pytest.importorskip("peft")
    model = add_adapter(classifier(), LoRA(4, targets="attention"))
    trainer = ORTTrainer(
        model, "auto", optim.AdamWConfig(lr=1e-2), loss_fn=lambda y, label: nn.functional.cross_entropy(y, label)
    )
    adapters = Adapters(trainer)
    adapters.add("other")
    ids, label = batch(0)
    start = model(ids)
    trainer.train_step(ids=ids, label=label)
    trained = model(ids)
    adapters.activate("other")
    torch.testing.assert_close(model(ids), start)
    adapters.activate("default")
    torch.testing.assert_close(model(ids), trained)


def test_what_is_refused() -> None:
    options = {"batch": {"gradient_accumulation_steps": 2}}
    model = add_adapter(exported(classifier()), LORA)
    trainer = ORTTrainer(model, "auto", optim.AdamWConfig(), loss_fn="cross_entropy", options=options)
    adapters = Adapters(trainer)
    adapters.add("other")
    with pytest.raises(ValueError, match="'other' already"):
        adapters.add("other")
    with pytest.raises(ValueError, match=r"no adapter 'another': there are \['default', 'other'\]"):
        adapters.activate("another")
    with pytest.raises(ValueError, match="'default' is the active adapter"):
        adapters.remove("default")
    trainer.train_step(*batch(0))
    with pytest.raises(RuntimeError, match="gradients of the active adapter"):
        adapters.activate("other")
    trainer.train_step(*batch(1))
    adapters.activate("other")
    with pytest.raises(RuntimeError, match="has made 1 updates"):
        Adapters(trainer)
    with pytest.raises(TypeError, match="trainer must be an ORTTrainer"):
        Adapters(model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name must be a str, but 3 was given"):
        adapters.add(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trains all weights"):
        Adapters(trainer_of(exported(classifier())))
