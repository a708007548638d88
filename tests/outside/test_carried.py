"""State that a model keeps outside tensors is part of checkpoints."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim

_CENTER = {"of": torch.zeros(3)}


class _Recurrent(nn.Module):
    """Carries its state in a tuple, and counts its calls; what it leaves in ``seen`` nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 6), nn.Linear(6, 3)
        self.state: Any = None
        self.calls, self.seen = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, state = self.rnn(x, self.state)
        self.state = tuple(part.detach() for part in state)
        self.calls += 1
        self.seen = h.detach().mean()
        return self.head(h[-1]) / self.calls


def _loss_fn(prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(prediction - _CENTER["of"], label)
    _CENTER["of"] = _CENTER["of"] * 0.9 + prediction.detach().mean(0) * 0.1
    return loss


def _begin() -> tuple[_Recurrent, ORTTrainer]:
    torch.manual_seed(0)
    _CENTER["of"] = torch.zeros(3)
    model = _Recurrent()
    return model, ORTTrainer(model, "auto", optim.AdamConfig(lr=0.01), loss_fn=_loss_fn)


def _train(trainer: ORTTrainer, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(5, 4, 6, generator=generator), torch.randint(3, (4,), generator=generator)
        losses.append(float(trainer.train_step(x, y)[0]))
    return losses


def test_training_goes_on_with_it() -> None:
    expected = _train(_begin()[1], *range(5))
    trainer = _begin()[1]
    _train(trainer, 0, 1, 2)
    file = io.BytesIO()
    trainer.save_checkpoint(file)
    assert trainer.state_dict()["outside"].keys() == {"state", "calls", "global _CENTER"}
    file.seek(0)
    model, trainer = _begin()
    trainer.load_checkpoint(file)
    assert _train(trainer, 3, 4) == expected[3:]
    assert model.calls == 5
    file.seek(0)
    trainer.load_checkpoint(file)
    assert model.calls == 3
    assert _train(trainer, 3, 4) == expected[3:]
    assert len(trainer.session.graphs(True)) == 2


@pytest.mark.parametrize(
    "entry",
    [
        {"value": ["class", "os", "system"], "tensors": [], "dtypes": []},
        {"value": ["named", "os", "system", [["plain", "true"]]], "tensors": [], "dtypes": []},
        {"value": ["list", [["place", [["get", "model"]]]]], "tensors": [], "dtypes": []},
        {"value": ["tensor", 0], "tensors": [], "dtypes": []},
        {"value": ["plain", 1], "tensors": [torch.zeros(1)], "dtypes": ["load"]},
        {"value": 1, "tensors": [], "dtypes": []},
        {},
    ],
)
def test_a_damaged_entry_changes_nothing(entry: dict[str, Any]) -> None:
    _, trainer = _begin()
    state = {"train_step_info": {"step": 7, "optimization_step": 7}, "outside": {"calls": entry}}
    with pytest.warns(UserWarning, match="Missing key"), pytest.raises(ValueError, match=r"\[calls\] is damaged"):
        trainer.load_state_dict(state)
    assert trainer.train_step_info.step == 0


class _Memory:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def test_what_a_checkpoint_can_not_hold_is_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.memory = nn.Linear(6, 3), _Memory(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.head(x.mean(0)) + self.memory.value
            self.memory = _Memory(h.detach().mean().reshape(1))
            return h

    trainer = ORTTrainer(Net(), "auto", optim.SGDConfig(), loss_fn=F.cross_entropy)
    _train(trainer, 0)
    with pytest.warns(UserWarning, match="without what the model keeps in 'memory', an object of the class _Memory"):
        assert "outside" not in trainer.state_dict()
