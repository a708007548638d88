"""What is said of names and arguments that are not there."""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

import ort_trainer
from ort_trainer import ORTModule, ORTTrainer, optim
from ort_trainer.core.unknown import explains_calls, meant, nearest
from ort_trainer.trainer import _ELSEWHERE_IN_TRAINER

MODEL, CONFIG = nn.Linear(2, 2), optim.AdamWConfig(lr=1e-3)
TRAINER: Any = ORTTrainer
MODULE: Any = ORTModule
CONFIGS: Any = optim


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TRAINER(MODEL, "auto", optimizer=CONFIG), "no argument 'optimizer': did you mean optim_config"),
        (lambda: TRAINER(MODEL, "auto", CONFIG, loss=F.mse_loss), "no argument 'loss': did you mean loss_fn"),
        (lambda: TRAINER(MODEL, "auto", CONFIG, lossfn=1), "no argument 'lossfn': did you mean loss_fn"),
        (
            lambda: TRAINER(MODEL, CONFIG, loss_fn=F.mse_loss),
            r"(?s)missing.*'optim_config'\..*ORTTrainer\(model, .auto",
        ),
        (lambda: CONFIGS.AdamWConfig(learning_rate=1), r"no argument 'learning_rate': did you mean lr\? It is called"),
        (lambda: CONFIGS.SGDConfig(beta=1), "SGDConfig.. has no argument 'beta': there are dampening, lr"),
        (
            lambda: MODULE(MODEL, optimizer=1),
            "no argument 'optimizer': there are fallback, methods, module, options",
        ),
        (lambda: MODULE(MODEL, {}, "warn", (), 1), "positional arguments.* It is called as in ORTModule"),
    ],
)
def test_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_arguments_of_fit() -> None:
    trainer: Any = ORTTrainer(MODEL, "auto", CONFIG, loss_fn=F.mse_loss)
    with pytest.raises(
        TypeError, match=r"^ORTTrainer.fit\(\) has no argument 'num_epochs': did you mean epochs\? It is"
    ):
        trainer.fit([], num_epochs=2)
    with pytest.raises(TypeError, match=r"missing .*'train_loader'\. It is called as in trainer.fit\("):
        trainer.fit()


def test_errors_from_inside_stay_as_they_are() -> None:
    class Thing:
        @explains_calls("Thing(1)", {})
        def __init__(self, value: int) -> None:
            self.value = value + "1"  # type: ignore[operator]

    with pytest.raises(TypeError, match=r"^unsupported operand"):
        Thing(1)


def test_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'AdamW': did you mean AdamWConfig"):
        _ = optim.AdamW
    with pytest.raises(
        ImportError, match="has no OrtTrainer: from ort_trainer.integrations.transformers import Hugging"
    ):
        _ = ort_trainer.OrtTrainer
    with pytest.raises(ImportError, match="has no AdamWConfig: from ort_trainer.optim import AdamWConfig"):
        _ = ort_trainer.AdamWConfig
    assert not hasattr(optim, "nothing") and not hasattr(ort_trainer, "nothing")
    assert meant("x", ["b", "a"], {}) == "there are a, b"


def test_the_nearest_names() -> None:
    assert nearest("Q_PORJ", ["k_proj", "q_proj", "norm"], 2) == ["q_proj", "k_proj"]
    assert nearest("flood_fill", ["NONE", "FLOOD_FILL"]) == ["FLOOD_FILL"]
    assert not nearest("xyzzy", ["weight"]) and not nearest("x", [])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("train", r"did you mean fit for a whole run, or train_step for a batch\?"),
        ("step", r"did you mean train_step\?"),
        ("save", "did you mean save_checkpoint, or save_as_onnx"),
        ("load", r"did you mean load_checkpoint\?"),
        ("train_stp", r"did you mean train_step\?"),
        ("loss_func", r"did you mean loss_fn\?"),
        ("nothing", "there are device, .*, fit,"),
    ],
)
def test_attributes_of_a_trainer(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=f"^'ORTTrainer' object has no attribute '{name}': {hint}"):
        getattr(ORTTrainer(MODEL, "auto", CONFIG, loss_fn=F.mse_loss), name)


def test_hints_name_what_a_trainer_has() -> None:
    trainer = ORTTrainer(MODEL, "auto", CONFIG, loss_fn=F.mse_loss)
    for hint in _ELSEWHERE_IN_TRAINER.values():
        for name in (part.split(" ")[0] for part in re.split(", or ", hint)):
            operator.attrgetter(name)(trainer)


def test_an_error_inside_a_property_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = ORTTrainer(MODEL, "auto", CONFIG, loss_fn=F.mse_loss)
    monkeypatch.delattr(trainer, "_loop")
    with pytest.raises(AttributeError, match="has no attribute '_loop'$"):
        _ = trainer.session


def test_the_former_name_of_hugging_faces_trainer() -> None:
    module = importlib.import_module("ort_trainer.integrations.transformers")
    with pytest.warns(DeprecationWarning, match="now called HuggingFaceTrainer"):
        assert module.OrtTrainer is module.HuggingFaceTrainer
    assert not hasattr(module, "OtherTrainer")


def test_a_model_whose_work_is_in_another_method() -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def act(self, x: Any) -> Any:
            return self.layer(x)

    with pytest.raises(TypeError, match=r"Agent defines no forward\(\).*ORTModule\(model, methods="):
        ORTTrainer(Agent(), "auto", CONFIG, loss_fn=F.mse_loss)
    agent = Agent()
    agent.forward = agent.act  # type: ignore[method-assign]
    assert ORTTrainer(agent, "auto", CONFIG, loss_fn=F.mse_loss)
