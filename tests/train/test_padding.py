"""Steps that leave out padded places: the same numbers as PyTorch's, with fewer rows in products, or an error."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.core.errors import ExportError

from ..helpers import Reference, assert_close, assert_same_weights

CLASSES, WIDTH = 11, 8
aten = torch.ops.aten


class Tagger(nn.Module):
    """Has operators that treat places separately, and others: attention, a layer that has time first, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(CLASSES, WIDTH), nn.Embedding(9, WIDTH)
        self.both, self.norm, self.scale = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.weights, self.gate = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.head, self.dropout = nn.Linear(WIDTH, CLASSES), nn.Dropout(0.2)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x = self.norm(self.dropout(x))
        query, key, value = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.both(x).split(WIDTH, 2))
        allowed = mask[:, None, None, :] > 0
        x = x + F.scaled_dot_product_attention(query, key, value, allowed).transpose(1, 2).flatten(2)
        left, right = self.gate(self.scale(x)).chunk(2, 2)
        x = x + torch.cat([F.silu(left)[..., :3], F.elu(right)[..., 3:]], 2)
        first = x.transpose(0, 1)
        x = x + self.attention(first, first, first, key_padding_mask=mask == 0)[0].transpose(0, 1)
        pooled = self.weights(x).squeeze(2).masked_fill(mask == 0, -1e9).softmax(1)
        x = x + (pooled[:, None] @ x) + (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        logits: torch.Tensor = self.head(self.dropout(F.gelu(x)))
        return logits


class Bag(nn.Module):
    """Adds the mean of a sequence to each of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.words(tokens))
        logits: torch.Tensor = self.head(x + (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None])
        return logits


class Choosing(Bag):
    """Does something else if a batch has padding."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens, mask)
        return logits * 2 if mask.min() > 0 else logits * 3


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def batch(size: int, length: int, padded: bool = True, ignored: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(size * length)
    tokens = torch.randint(0, CLASSES, (size, length), generator=generator)
    lengths = torch.randint(1, length + 1, (size, 1), generator=generator) if padded else torch.full((size, 1), length)
    mask = (torch.arange(length) < lengths).long()
    labels = torch.randint(0, CLASSES, (size, length), generator=generator)
    return tokens, mask, torch.where(mask > 0, labels, -100) if ignored else labels


def trainer(model: nn.Module, mask: str = "mask", shape: Any = ("batch", "time"), **utils: Any) -> ORTTrainer:
    desc = {
        "inputs": [(name, [*shape]) for name in ("tokens", "mask", "labels")],
        "outputs": [("loss", [], True), ("logits", [*shape, CLASSES])],
    }
    options = ORTTrainerOptions({"utils": {"remove_padding": mask, **utils}})
    return ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), loss_fn=loss_of, options=options)


class RowsOfProducts(TorchDispatchMode):
    """Collects the numbers of rows that matrices by places have in products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm.default, torch.ops.mkldnn._linear_pointwise.default):
            self.found |= {value.shape[0] for value in args[:2] if torch.is_tensor(value) and value.dim() == 2}
        return func(*args, **(kwargs or {}))


def test_training_equals_pytorchs() -> None:
    """Over 20 steps with PyTorch's own masks, for batches that differ; the first has no padding."""
    train_as_pytorch(Tagger(), [batch(3, 5, padded=False), batch(4, 7), batch(3, 9), batch(5, 6)] * 5, kernels="auto")


@pytest.mark.parametrize("loss", ["flat", "transposed", "with labels of sequences", "other names"])
def test_labels_of_each_token(loss: str) -> None:
    """Also if only the first batch says, or nothing does, that labels and tokens have the sizes of the mask."""
    pools = loss == "with labels of sequences"

    class Words(Bag):
        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
            x = torch.relu(self.words(tokens))
            return (self.head(x), (x * mask[..., None]).sum(1)) if pools else self.head(x)

    def of_batch(result: Any, labels: torch.Tensor, kinds: Any = None) -> torch.Tensor:
        logits = result[0] if pools else result
        if loss == "transposed":
            return F.cross_entropy(logits.transpose(1, 2), labels)
        flat = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return flat + F.cross_entropy(result[1], kinds) if pools else flat

    desc: Any = "auto"
    if loss == "other names":
        inputs = [(name, [f"{name}_0", f"{name}_1"]) for name in ("tokens", "mask", "labels")]
        desc = {"inputs": inputs, "outputs": [("loss", [], True), ("logits", ["a", "b", CLASSES])]}
    model = Words()
    theirs = copy.deepcopy(model)
    update = torch.optim.SGD(theirs.parameters(), lr=0.1)
    options = ORTTrainerOptions({"utils": {"remove_padding": "mask"}})
    ours = ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), loss_fn=of_batch, options=options)
    for size, length in ((3, 5), (2, 7), (4, 5)):
        tokens, mask, labels = batch(size, length)
        given = tokens, mask, labels, *([torch.arange(size)] if pools else ())
        update.zero_grad()
        expected = of_batch(theirs(tokens, mask), *given[2:])
        expected.backward()
        update.step()
        assert_close(ours.train_step(*given)[0], expected.detach(), 1e-5, "loss")


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_compiled_training_equals_pytorchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second trainer from the cache, whose conditions can't depend on a batch's values."""
    monkeypatch.setenv("ORT_TRAINER_CACHE", str(tmp_path))
    for _ in range(2):
        train_as_pytorch(Bag(), [batch(4, 7), batch(3, 9)] * 3, kernels="compiled")


def train_as_pytorch(model: nn.Module, batches: list[tuple[torch.Tensor, ...]], kernels: str) -> None:
    reference = Reference(model, loss_fn=loss_of, lr=0.1)
    torch.manual_seed(5)
    losses = [reference.step(*given) for given in batches]
    ours = trainer(model, kernels=kernels, random_numbers="pytorch_global")
    torch.manual_seed(5)
    for given, loss in zip(batches, losses, strict=True):
        assert_close(ours.train_step(*given)[0], loss, 1e-4, "loss")
    assert_same_weights(ours, reference.model, 1e-4)


def test_the_first_batch_with_padding_may_take_another_branch() -> None:
    train_as_pytorch(
        Choosing(), [batch(3, 5, padded=False), batch(4, 7), batch(3, 5, padded=False), batch(2, 5)], "pytorch"
    )


def test_padded_places_are_not_computed() -> None:
    """Products have a row for each kept place; outputs that are fetched are zero at the others."""
    torch.manual_seed(1)
    given = _, mask, _ = batch(6, 9)
    ours = trainer(Tagger())
    _, logits = ours.train_step(*given)
    assert bool((logits[mask == 0] == 0).all()) and bool((logits[mask > 0] != 0).all())
    with RowsOfProducts() as rows:
        ours.train_step(*given)
    assert int(mask.sum()) in rows.found


def test_padded_places_that_reach_the_loss_are_an_error() -> None:
    model = Tagger()
    weights = copy.deepcopy(model.state_dict())
    ours = trainer(model)
    with pytest.raises(ValueError, match="remove_padding is 'mask', but places where it is zero reach the loss"):
        ours.train_step(*batch(4, 7, ignored=False))
    assert ours.train_step_info.step == 0
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inputs are \['tokens', 'mask', 'labels'\]: name the attention mask"):
        trainer(Tagger(), "padding")
    with pytest.raises(ValueError, match="needs PyTorch's kernels, but utils.kernels is 'onnxruntime'"):
        trainer(Tagger(), kernels="onnxruntime")
    with pytest.raises(ExportError, match=r"an attention mask \[batch, time\] of two sizes that differ"):
        trainer(Tagger(), "mask", shape=[4, "time"]).train_step(*batch(4, 7))
