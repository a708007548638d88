"""The trainers that wrote golden files, and that must read them for ever. Don't change them: add new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, amp, optim


class Net(nn.Module):
    """Parameters, running statistics, a count, and a buffer that ``state_dict()`` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.25)
        self.last = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.first(x))
        self.seen.copy_(found.detach().mean(0))
        return self.last(self.dropout(found))


DESC = {
    "inputs": [("x", ["batch", 4]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 2])],
}


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch that depends on no random generator."""
    return (torch.arange(24.0) * 0.37 + number).sin().reshape(6, 4), (torch.arange(6) * 5 + number) % 2


def net() -> Net:
    model = Net()
    with torch.no_grad():
        for number, value in enumerate(model.parameters()):
            value.copy_((torch.arange(float(value.numel())) + number).cos().reshape(value.shape) * 0.5)
    return model


def _trainer(config: Callable[[nn.Module], Any], **options: Any) -> ORTTrainer:
    torch.manual_seed(7)
    model = net()
    return ORTTrainer(model, DESC, config(model), loss_fn=F.cross_entropy, options=ORTTrainerOptions(options))


def _groups(model: nn.Module) -> Any:
    return optim.AdamConfig([{"params": ["last.weight", "last.bias"], "lr": 0.03}], lr=0.02, lambda_coef=0.01)


WINDOW = {"gradient_accumulation_steps": 3}
TRAINERS: dict[str, Callable[[], ORTTrainer]] = {
    # A window in the middle, a schedule, two groups.
    "adam": lambda: _trainer(_groups, batch=WINDOW, lr_scheduler=optim.LinearWarmupLRScheduler(20, 0.1)),
    "adam-without-window": lambda: _trainer(lambda _: optim.AdamConfig(lr=0.02)),
    # A count that all parameters share, and a window whose micro-batches have weights.
    "lamb": lambda: _trainer(lambda _: optim.LambConfig(lr=0.02), batch={**WINDOW, "gradient_reduction": "weighted"}),
    "sgd-float16": lambda: _trainer(
        lambda _: optim.SGDConfig(lr=0.02, momentum=0.9),
        batch=WINDOW,
        mixed_precision={"enabled": True, "loss_scaler": amp.DynamicLossScaler(loss_scale=512.0, up_scale_window=3)},
    ),
    "torch-adam": lambda: _trainer(lambda model: torch.optim.Adam(model.parameters(), lr=0.02), batch=WINDOW),
}


def train(trainer: ORTTrainer, *numbers: int) -> list[float]:
    """Trains on batches, and returns their losses."""
    weight = trainer.options.batch.gradient_reduction == "weighted"
    return [
        trainer.train_step(*batch(number), **({"gradient_weight": number + 1.0} if weight else {}))[0].item()
        for number in numbers
    ]


def trained(name: str) -> ORTTrainer:
    trainer = TRAINERS[name]()
    train(trainer, *range(4))
    return trainer


def losses_of_an_export() -> list[float]:
    """Returns the first losses of a small trainer on ONNX Runtime's kernels, which keeps one export in the cache."""
    torch.manual_seed(7)
    desc = {**DESC, "inputs": [("input", ["batch", 4]), ("label", ["batch"])]}
    options = ORTTrainerOptions({"utils": {"kernels": "onnxruntime"}})
    trainer = ORTTrainer(nn.Linear(4, 2), desc, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)
    return train(trainer, 0, 1, 2)
