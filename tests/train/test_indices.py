"""Indices out of range: rejected before the step, like PyTorch rejects them, and nothing changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.core.indices import STEPS, IndexRange, check_indices
from ort_trainer.step import Step
from tests.helpers import MLP, assert_same_state, mlp_batches, mlp_trainer

ROWS = 6


class Uses(nn.Module):
    """Indexes in many ways, each with its own input, [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, ROWS)

    def forward(self, x: torch.Tensor, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = x + self.rows.weight.sum()
        zeros = torch.zeros_like(x)
        with torch.no_grad():
            unwatched = self.rows(i["no_grad"])
        padded = F.pad(i["padded"][:, :1], (1, 0), value=-100)[:, 1:].reshape(-1)
        written = i["written"].clone()
        written[:, 0] = 0
        parts = i["parts"].clone()
        for part in parts.split(2, 1):
            part.clamp_(0, ROWS - 1)
        results = [
            unwatched,
            self.rows(i["embedding"].view(-1)),
            F.embedding_bag(i["embedding_bag"], self.rows.weight, mode="sum"),
            F.one_hot(i["one_hot"].long(), ROWS).float(),
            x.gather(1, i["gather"]),
            torch.take_along_dim(x, i["take_along_dim"], 1),
            zeros.scatter(1, i["scatter"], 1.0),
            zeros.clone().scatter_add_(1, i["scatter_add"], x[:, :4]),
            x.index_select(1, i["index_select"][0]),
            zeros.index_add(1, i["index_add"][0], x[:, :4]),
            x.index_fill(1, i["index_fill"][1], 1.0),
            x[:, i["getitem"][0]],
            x[torch.arange(x.shape[0]), i["pairs"][:, 2]],
            x[i["open"] // 2],
            self.rows(i["slice"][:, 1:3].transpose(0, 1).flatten()),
            F.cross_entropy(x, padded, ignore_index=2),
            F.nll_loss(x[:, :, None].expand(-1, -1, 4), i["images"], reduction="sum"),
            F.multi_margin_loss(x, i["margin"][:, 3].to(torch.int64)),
            self.rows(i["expanded"].expand(2, *x[:, :4].shape)[0, :, 1:]),
            self.rows(written),
            self.rows(parts),
            self.rows(i["computed"].clamp(0, ROWS - 1)),
        ]
        return torch.stack([result.float().mean() for result in results]).sum()


CHECKED = ["no_grad", "embedding", "embedding_bag", "one_hot", "gather", "scatter", "scatter_add"]
CHECKED += [
    "index_select",
    "index_add",
    "index_fill",
    "getitem",
    "pairs",
    "slice",
    "padded",
    "images",
    "margin",
    "expanded",
]
# PyTorch accepts any number in the first; indices that the model computes from an input are not checked.
OTHERS = ["take_along_dim", "parts", "open", "written", "computed"]


STEP_CALLS = [
    ("constant_pad_nd", ([1, 2], -1)),
    ("constant_pad_nd", ([-1, 0, 0, -1, 2, -1], -1)),
    ("expand", ([3, -1, 3, -1],)),
    ("flatten", (0, -1)),
    ("flatten", (1, 2)),
    ("flip", ([0, -1],)),
    ("movedim", ([0, 1], [2, 0])),
    ("movedim", (0, -1)),
    ("narrow", (-1, 1, 2)),
    ("narrow", (0, 0, 0)),
    ("narrow", (2, -4, 3)),
    ("permute", ([2, 0, -2],)),
    ("reshape", ([4, -1],)),
    ("roll", ([3], [])),
    ("roll", ([1, -2], [0, 2])),
    ("select", (-1, -2)),
    ("select", (0, 1)),
    ("slice", (0, None, None, 1)),
    ("slice", (-1, -3, 2**63 - 1, 2)),
    ("slice", (2, 1, -1, 1)),
    ("squeeze", ()),
    ("squeeze", (1,)),
    ("squeeze", (0,)),
    ("squeeze", ([1, 2],)),
    ("transpose", (0, -1)),
    ("unflatten", (-1, [2, -1])),
    ("unsqueeze", (-1,)),
    ("view", ([2, 2, 2],)),
]


@pytest.mark.parametrize(("name", "arguments"), STEP_CALLS)
def test_steps_are_those_of_pytorch(name: str, arguments: tuple) -> None:
    values = torch.arange(8).reshape(2, 1, 4)
    expected = getattr(torch.ops.aten, name)(values, *arguments)
    assert STEPS[name](values.numpy(), *arguments).tolist() == expected.tolist()


def test_all_steps_are_tested() -> None:
    assert {name for name, _ in STEP_CALLS} | {"t"} == STEPS.keys()
    assert STEPS["t"](torch.arange(8).reshape(2, 4).numpy()).tolist() == torch.arange(8).reshape(2, 4).t().tolist()


def good() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    i = torch.tensor([[0, 1, 2, 3], [5, 4, 3, 2], [1, 1, 1, 1]])
    return torch.linspace(-1, 1, 18).reshape(3, ROWS), {way: i.clone() for way in CHECKED + OTHERS}


def bad() -> Iterator[tuple[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """Yields batches in which one index is changed, each with the description of that index."""
    for way in [*CHECKED, *OTHERS[:2]]:
        for place in ((0, 0), (0, 3), (1, 0), (1, 2)):
            for value in (-1, -ROWS, -ROWS - 1, ROWS, 2):
                batch = good()
                batch[1][way][place] = value
                yield f"input 'i.{way}' has the value {value} at {list(place)}", batch


def test_what_pytorch_refuses_is_refused_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = Uses()
    options = ORTTrainerOptions({"utils": {"kernels": "onnxruntime"}})
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.0), options=options)
    trainer.train_step(*good())
    refused = set()
    for what, batch in bad():
        before = trainer.train_step_info.step
        try:
            expected = model(*batch).item()
        except (IndexError, RuntimeError):
            refused.add(what.split("'")[1])
            with pytest.raises(IndexError) as raised:
                trainer.train_step(*batch)
            assert what in str(raised.value) and "which must be from " in str(raised.value)
            assert 'test_indices.py", line' in str(raised.value)
            assert trainer.train_step_info.step == before
        else:
            assert trainer.train_step(*batch).item() == pytest.approx(expected, rel=1e-4), what
    assert refused == {f"i.{way}" for way in CHECKED}


@pytest.mark.engine
@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
def test_a_refused_step_has_not_begun(kernels: str) -> None:
    def trained(hostile: bool) -> dict:
        torch.manual_seed(0)
        options = {"utils": {"kernels": kernels}, "batch": {"gradient_accumulation_steps": 2}}
        trainer = mlp_trainer(options, model=MLP(dropout=0.5))
        for x, label in mlp_batches(5):
            for wrong in (-1, 3) if hostile else ():
                labels = label.clone()
                labels[2] = wrong
                with pytest.raises(IndexError, match=rf"input 'label' has the value {wrong} at \[2\].*, or -100"):
                    trainer.train_step(x, labels)
                with pytest.raises(IndexError, match="from 0 to 2"):
                    trainer.eval_step(x, labels)
                with pytest.raises(IndexError, match="cross_entropy_loss uses it as an index"):
                    trainer.forward(x, labels)
            trainer.train_step(x, label)
        return trainer.state_dict()

    assert_same_state(trained(True), trained(False))


def test_labels_do_not_matter_where_the_loss_is_not_asked_for() -> None:
    trainer = mlp_trainer()
    ((x, label),) = mlp_batches(1)
    _, logits = trainer.eval_step(x, label)
    trainer.train_step_info.fetches = ["logits"]
    assert torch.equal(trainer.eval_step(x, label - 3), logits)  # as they are in a test set without labels
    with pytest.raises(IndexError):
        trainer.train_step(x, label - 3)


def test_the_check_can_be_switched_off() -> None:
    trainer = mlp_trainer({"debug": {"check_indices": False}, "utils": {"kernels": "onnxruntime"}})
    ((x, label),) = mlp_batches(1)
    trainer.train_step(x, label)
    graph = trainer._loop.executor.graphs(True)[0]
    assert [(entry.input, entry.size) for entry in graph.index_ranges] == [("label", 3)]
    assert Step.from_bytes(graph.to_bytes()).index_ranges == graph.index_ranges
    counted_from_the_end = torch.where(label == 2, -1, label)
    ours, theirs = (trainer.eval_step(x, given)[0].item() for given in (counted_from_the_end, label))
    assert ours == theirs
    before = trainer.state_dict()
    label[1] = 7
    for step in (trainer.train_step, trainer.forward_backward, trainer.forward, trainer.eval_step):
        with pytest.raises(IndexError, match=r"'label' has the value 7 at \[1\], .* debug\.check_indices") as caught:
            step(x, label)
        assert isinstance(caught.value.__cause__, RuntimeError)  # ONNX Runtime's
    assert_same_state(trainer.state_dict(), before)


@pytest.mark.parametrize(
    "steps",
    [
        (("expand", (("dim('n') * 1000000000000", 2),)),),
        (("expand", ((1 << 30, 2),)), ("reshape", ((-1,),))),
        (("constant_pad_nd", ((0, 1 << 40), -1)),),
        (("constant_pad_nd", ((0, 0, 1 << 40, 0), -1)),),
    ],
)
def test_steps_of_a_file_that_would_take_all_memory(steps: tuple) -> None:
    entry = IndexRange("label", 3, operator="cross_entropy_loss", steps=steps)
    with pytest.raises(ValueError, match=r"step '\w+' of an index range makes \d+ elements, and at most 67108864"):
        check_indices([(entry, 3)], lambda name: np.full((1, 2), 5), {"n": 2})
