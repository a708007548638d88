"""Changes in place through views: exact, or refused by the line."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ort_trainer import ORTModule, ORTTrainer, optim
from ort_trainer.core.errors import ExportError

Change = Callable[[torch.Tensor], Any]
WRONG: dict[str, Change] = {
    "windows with gaps": lambda y: y.unfold(1, 1, 5).add_(1.0),
    "a rest behind the windows": lambda y: y.unfold(1, 4, 4).mul_(2.0),
    "windows that overlap": lambda y: y.unfold(1, 3, 1)[:, :, 0].add_(1.0),
    "a view of windows": lambda y: y.t().unfold(0, 2, 3)[0].copy_(torch.ones(6, 2)),
    "a part of windows": lambda y: y.detach().unfold(1, 2, 3).unbind(1)[1].add_(1.0),
    "an item": lambda y: operator.setitem(y.unfold(1, 1, 5), 0, 1.0),  # type: ignore[call-overload]
    "the result of an operator": lambda y: torch.mul(y[:, :2].detach(), 2.0, out=y.detach().unfold(1, 1, 5)[..., 0]),
    "rows that overlap": lambda y: y.as_strided((3, 3), (1, 1))[1].add_(1.0),
}
RIGHT: dict[str, Change] = {
    "windows side by side": lambda y: y.unfold(1, 3, 3).add_(1.0),
    "single elements": lambda y: y.unfold(0, 1, 1).add_(1.0),
    "windows that are only read": lambda y: y[:, ::2].add_(y.unfold(1, 2, 2).sum(-1)),
    "strides with gaps": lambda y: y.as_strided((2, 3), (6, 2), 1).add_(1.0),
    "a step": lambda y: y[:, ::5].add_(1.0),
    "a diagonal": lambda y: y.diagonal()[1:3].mul_(2.0),
    "a row": lambda y: y[1].add_(1.0),
    "a part": lambda y: y.detach().split(4, 1)[1].add_(1.0),
    "one of several copies": lambda y: y[:, :1].expand(6, 6)[:, 0].add_(1.0),
    "transposed": lambda y: y.t()[::2].zero_(),
    "another shape": lambda y: y.view(-1)[::5].add_(1.0),
}


class Changing(nn.Module):
    """Changes a hidden layer in place."""

    def __init__(self, *changes: Change) -> None:
        super().__init__()
        self.linear, self.changes = nn.Linear(6, 6), changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = x.new_zeros(())
        for change in self.changes:
            y = self.linear(x) * 2.0
            change(y)
            loss = loss + (y * y).mean()
        return loss


@pytest.mark.parametrize("name", WRONG)
def test_what_a_graph_gets_wrong_is_refused(name: str) -> None:
    model = Changing(WRONG[name])
    with pytest.raises(
        ExportError, match=r"in place through (unfold|as_strided)\(\)(.|\n)*x\[:, ::step\](.|\n)*test_view_writes"
    ):
        ORTModule(model, fallback="error")(torch.randn(6, 6))
    if name == "windows with gaps":
        trainer = ORTTrainer(model, {"inputs": [("x", ["n", 6])], "outputs": [("loss", [], True)]}, optim.SGDConfig())
        with pytest.raises(ExportError, match="leaves out elements or has them several times"):
            trainer.train_step(torch.randn(6, 6))
        compiled: Any = torch.compile(model, backend="ort_trainer")
        with pytest.raises(Exception, match=r"in place through unfold\(\)"):
            compiled(torch.randn(6, 6))


def test_all_other_views_give_what_pytorch_gives() -> None:
    model, x = Changing(*RIGHT.values()), torch.randn(6, 6)
    expected = model(x)
    expected.backward()
    theirs = [parameter.grad for parameter in model.parameters()]
    for compiled in (ORTModule(model), torch.compile(model, backend="ort_trainer")):
        model.zero_grad()
        loss = compiled(x)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], theirs)


def test_gradients_of_windows_are_sums_over_them() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Flatten()), torch.randn(6, 6)

    def loss(model: Any) -> torch.Tensor:
        return model(x).unfold(1, 3, 1).square().sum()

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).unfold(1, 3, 1).square().sum()

    loss(model).backward()
    theirs = [parameter.grad for parameter in model.parameters()]
    for compiled in (ORTModule(Windows()), torch.compile(Windows(), backend="ort_trainer")):
        model.zero_grad()
        compiled(x).backward()
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], theirs)
