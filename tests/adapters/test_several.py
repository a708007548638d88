"""Several adapters over one base: each trains as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ort_trainer import CheckpointError, ORTTrainer, api, optim
from ort_trainer.adapters import Adapters, LoRA, add_adapter, load_adapter, save_adapter
from ort_trainer.api import live_state
from ort_trainer.core.sealed import digest

from ..artifacts.twins import Artifacts
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns artifacts of a model with an adapter, beside those of the same model with another base."""
    folder = tmp_path_factory.mktemp("artifacts")
    other = classifier()
    other.head.weight.data += 1
    for name, base in (("base", classifier()), ("other", other)):
        torch.manual_seed(3)
        trainer = trainer_of(add_adapter(exported(base), LORA))
        trainer.prepare(batch(0))
        trainer.export_artifacts(folder / name)
    return folder


class Device(Artifacts):
    def train_and_update(self, step: int) -> None:
        self.train(batch(step))
        self.update()

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return {name: parameter.data for name, parameter in self.state.parameters.items() if parameter.requires_grad}


def test_on_a_device_each_trains_as_if_it_were_alone(folder: Path, tmp_path: Path) -> None:
    device = Device(folder / "base")
    adapters = api.Adapters(device.state, "first")
    adapters.add("second")
    order = [("second", 0), ("first", 1), ("first", 2), ("second", 3), ("first", 4), ("second", 5)]
    for name, step in order:
        adapters.activate(name)
        device.train_and_update(step)
    expected = {}
    for name in ("first", "second"):
        alone = Device(folder / "base")
        for step in (step for other, step in order if other == name):
            alone.train_and_update(step)
        expected[name] = alone.weights
        adapters.activate(name)
        np.testing.assert_equal(device.weights, alone.weights)
        adapters.save(name, tmp_path / name, include_optimizer_state=True)
        adapters.save(name, tmp_path / f"{name} without moments")
    assert (tmp_path / "first").stat().st_size < (folder / "base" / "checkpoint").stat().st_size
    # Another process goes on from the file.
    again = Device(folder / "base")
    loaded = api.Adapters(again.state)
    loaded.load("first", tmp_path / "first")
    loaded.load("afresh", tmp_path / "first without moments")
    loaded.add("copy", like="first")
    adapters.activate("first")
    device.train_and_update(6)
    for name, resumes in (("first", True), ("afresh", False), ("copy", True)):
        loaded.activate(name)
        np.testing.assert_equal(again.weights, expected["first"])
        again.train_and_update(6)
        equal = [np.array_equal(value, device.weights[key]) for key, value in again.weights.items()]
        assert all(equal) if resumes else not any(equal)
    loaded.activate("default")
    np.testing.assert_equal(again.weights, Device(folder / "base").weights)


def test_a_device_digests_its_base_once_and_again_after_a_change(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[str] = []

    def counted(named: Any) -> str:
        digests.append(digest(named))
        return digests[-1]

    monkeypatch.setattr(live_state, "digest", counted)
    device = Device(folder / "base")
    adapters = api.Adapters(device.state)
    adapters.add("other", like="default")
    adapters.save("other", tmp_path / "other")
    adapters.load("loaded", tmp_path / "other")
    adapters.activate("loaded")
    assert len(digests) == 1
    name = next(name for name, parameter in device.state.parameters.items() if not parameter.requires_grad)
    frozen = device.state.parameters[name]
    frozen.data = frozen.data + 1
    with pytest.raises(ValueError, match="is an adapter of another base"):
        adapters.load("again", tmp_path / "other")
    assert len({*digests}) == len(digests) == 2


def test_what_a_device_refuses(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no module yet: make the Module"):
        api.Adapters(api.CheckpointState.load_checkpoint(folder / "base" / "checkpoint"))
    device = Device(folder / "base")
    with pytest.raises(TypeError, match="state must be a CheckpointState"):
        api.Adapters(device.module)  # type: ignore[arg-type]
    adapters = api.Adapters(device.state)
    adapters.add("other")
    adapters.save("other", tmp_path / "other")
    device.module(*(tensor.numpy() for tensor in batch(0)))
    with pytest.raises(RuntimeError, match="gradients are of the active adapter: call lazy_reset_grad"):
        adapters.activate("other")
    for name, path, message in (
        ("other", tmp_path / "other", "'other' already"),
        ("new", folder / "base" / "checkpoint", "is no adapter of these models: it has .* Adapters.save"),
        ("new", folder / "base" / "training_model.onnx", "damaged or not"),
    ):
        with pytest.raises(ValueError, match=message):
            adapters.load(name, path)
    with pytest.raises(ValueError, match="no adapter 'new'"):
        adapters.save("new", tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        adapters.load("new", tmp_path / "new")
    with pytest.raises(ValueError, match="is an adapter of another base: load it with"):
        api.Adapters(Device(folder / "other").state).load("new", tmp_path / "other")
    alone = api.CheckpointState.load_checkpoint(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"has an adapter alone, for Adapters.load\(name, path\)"):
        api.Module(folder / "base" / "training_model.onnx", alone)
    assert adapters.names == ["default", "other"]
