"""Trains a function of a linear layer on PyTorch's kernels, and counts the operators that are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.engine.programs import Program

from ..helpers import assert_close

Function = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """A function of a linear layer, and its mean square."""

    def __init__(self, function: Function, width: int) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(width, 5 * width // 6), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)).square().mean()


def trained(function: Function, rows: int = 7, width: int = 6) -> Counter[str]:
    """Compares loss and gradients with PyTorch's, within 1e-5; returns the operators that were called."""
    model = Model(function, width)
    desc = {"inputs": [("x", ["batch", width])], "outputs": [("loss", [], True)]}
    options = ORTTrainerOptions({"utils": {"kernels": "pytorch", "grad_norm_clip": False}})
    ours = ORTTrainer(model, desc, optim.SGDConfig(lr=1.0), options=options)
    x = torch.randn(rows, width) * 2
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = model(x)
    expected.backward()
    loss = ours.train_step(x)
    assert_close(loss, expected.detach(), 1e-5, "loss")
    after = ours.state_dict(pytorch_format=True)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close(before[name] - after[name], parameter.grad, 1e-5, name)
    assert ours.session is not None
    graph = ours.session.graphs(True)[0].programs
    assert graph is not None
    return Counter(target for text in graph.programs.values() for target, _, _ in Program.from_text(text).steps)


# Rows and columns of a product that is worth oneDNN's preparation, and whose result is not small.
LARGE = (128, 300)
