"""Random numbers: PyTorch's own masks, new in each step, off in evaluation, reproducible from a seed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from ort_trainer import ExportError, ORTTrainer, optim

from ..fidelity.layer_cases import Apply
from ..helpers import (
    MLP,
    MLP_DESC,
    Reference,
    assert_close,
    assert_same_training,
    assert_same_weights,
    mlp_batches,
    mlp_trainer,
)
from ..zoo import Between

pytestmark = [pytest.mark.engine, pytest.mark.options(random_numbers="pytorch")]


def same(model: nn.Module, desc: Any, batches: list[Any], seed: int, **settings: Any) -> None:
    """Trains with SGD; the masks of both follow from the seed."""
    assert_same_training(
        model, desc, batches, optim.SGDConfig(lr=0.1), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), seed=seed,
        **{"relative": 1e-4, **settings},
    )  # fmt: skip


def test_masks_are_those_that_pytorch_draws() -> None:
    same(MLP(dropout=0.4, hidden=64), MLP_DESC, mlp_batches(20), 7, relative=1e-5)


def two_masks(weights: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = F.dropout(x, 0.25, weights.training), F.dropout(x, 0.25, weights.training)
    return (a * b * weights[0]).mean(), a, b


def of_one_number(function: Any) -> nn.Module:
    return Apply(nn.ParameterList([nn.Parameter(torch.ones(()))]), function)


MASKS = {
    "inputs": [("x", ["n", 100])],
    "outputs": [("loss", [], True), ("a", ["n", 100]), ("b", ["n", 100])],
}


def test_fraction_scale_independence_and_seed() -> None:
    x = torch.ones(50, 100)

    def run(seed: int, evaluate: bool) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        trainer = ORTTrainer(of_one_number(two_masks), MASKS, optim.SGDConfig(lr=0.0))
        found = []
        for _ in range(3):
            found += trainer.train_step(x)[1:]
            if evaluate:
                assert torch.equal(trainer.eval_step(x)[1], x), "dropout is off in evaluation"
        return found

    masks = run(1, evaluate=True)
    for mask in masks:
        assert mask.unique().tolist() == [0.0, pytest.approx(4 / 3)]
        assert (mask > 0).float().mean() == pytest.approx(0.75, abs=0.02)
    for i, first in enumerate(masks):
        for second in masks[:i]:
            both = ((first > 0) & (second > 0)).float().mean()
            assert both == pytest.approx(0.75**2, abs=0.03), "masks are independent"
    assert all(torch.equal(a, b) for a, b in zip(masks, run(1, evaluate=False), strict=True))
    assert not torch.equal(masks[0], run(2, evaluate=False)[0])


def noise(weights: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    draws = (
        torch.randn_like(x) * 2 + 1,
        torch.rand(x.shape[0], 1000),
        torch.bernoulli(torch.full_like(x, 0.3)),
        torch.randint(2, 5, x.shape).float(),
        torch.empty_like(x).uniform_(-1, 3),
        torch.empty_like(x).normal_(5.0, 0.5),
        torch.randn(x.shape),
        torch.empty_like(x).exponential_(2.0),
        torch.empty_like(x).bernoulli_(0.2),
        torch.randperm(x.shape[1]).float().expand(x.shape),
    )
    return sum(d.sum() for d in draws) * weights[0], *draws


@pytest.mark.parametrize("step", ["train_step", "eval_step"])
def test_other_random_operators(step: str) -> None:
    names = ["randn_like", "rand", "bernoulli", "randint", "uniform", "normal", "randn", "exponential"]
    names += ["bernoulli_", "randperm"]
    desc = {"inputs": [("x", ["n", 1000])], "outputs": [("loss", [], True), *((n, ["n", 1000]) for n in names)]}
    trainer = ORTTrainer(of_one_number(noise), desc, optim.SGDConfig(lr=0.0))
    x = torch.zeros(20, 1000)
    first, second = (dict(zip(names, getattr(trainer, step)(x)[1:], strict=True)) for _ in range(2))
    moments = {
        "randn_like": (1, 2),
        "rand": (0.5, 12**-0.5),
        "bernoulli": (0.3, 0.21**0.5),
        "randint": (3, (2 / 3) ** 0.5),
        "uniform": (1, 4 * 12**-0.5),
        "normal": (5, 0.5),
        "randn": (0, 1),
        "exponential": (0.5, 0.5),
        "bernoulli_": (0.2, 0.4),
        "randperm": (499.5, 999999**0.5 / 12**0.5),
    }
    for name, (mean, deviation) in moments.items():
        assert first[name].mean().item() == pytest.approx(mean, abs=0.05), name
        assert first[name].std().item() == pytest.approx(deviation, rel=0.05), name
        assert not torch.equal(first[name], second[name]), name
    assert set(first["randint"].unique().tolist()) == {2.0, 3.0, 4.0}
    assert first["exponential"].min() > 0
    assert torch.equal(first["randperm"][0].sort().values, torch.arange(1000.0))


def test_pytorchs_global_generator_is_drawn_from(tmp_path: Path) -> None:
    """Without its own seed, the trainer draws as PyTorch's loop does, and so does the script around it."""

    def made() -> tuple[nn.Module, ORTTrainer]:
        torch.manual_seed(3)
        model = MLP(dropout=0.5)
        return model, mlp_trainer({"utils": {"random_numbers": "pytorch_global"}}, optim.SGDConfig(lr=0.1), model)

    model, trainer = made()
    reference, batches = Reference(model, lr=0.1), mlp_batches(4)
    torch.manual_seed(7)
    drawn = [(torch.rand(()), reference.step(*batch)) for batch in batches]

    def go_on(trainer: ORTTrainer, number: int) -> None:
        own, loss = drawn[number]
        assert torch.equal(torch.rand(()), own)
        assert_close(trainer.train_step(*batches[number])[0], loss, 1e-5, "loss")

    torch.manual_seed(7)
    for number in range(4):
        go_on(trainer, number)
        if number == 1:
            trainer.save_checkpoint(tmp_path / "state")
    assert_same_weights(trainer, reference.model, 1e-5)
    again = made()[1]
    again.load_checkpoint(tmp_path / "state")
    again.prepare(batches[0])
    for number in (2, 3):
        go_on(again, number)


def _path(h: torch.Tensor) -> torch.Tensor:
    return h * h.new_empty((h.shape[0], 1)).bernoulli_(0.7).div_(0.7)


def _attention(h: torch.Tensor) -> torch.Tensor:
    query = h.reshape(-1, 2, 3, 2)
    return F.scaled_dot_product_attention(query, query, query, dropout_p=0.3).reshape(h.shape)


def _recomputed(h: torch.Tensor) -> torch.Tensor:
    """Recomputed in the backward pass, where dropout must use the mask of the forward pass."""
    return checkpoint(lambda value: F.dropout(torch.tanh(value), 0.3).sin(), h, use_reentrant=False)


KINDS = {
    "dropout1d": lambda h: F.dropout1d(h.reshape(-1, 4, 3), 0.3).reshape(h.shape),
    "dropout2d": lambda h: F.dropout2d(h.reshape(-1, 4, 3, 1), 0.3).reshape(h.shape),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.3, True),
    "feature alpha dropout": lambda h: F.feature_alpha_dropout(h.reshape(-1, 4, 3), 0.3, True).reshape(h.shape),
    "in place": lambda h: F.dropout(h.clone(), 0.3, inplace=True),
    "attention": _attention,
    "stochastic depth": _path,
    "recomputation": _recomputed,
    "gumbel softmax": lambda h: F.gumbel_softmax(h),
    "permutations": lambda h: h[torch.randperm(h.shape[0])][:, torch.randperm(12)],
    "noise": lambda h: h + torch.normal(0.0, 0.5, size=(12,)) + torch.randn_like(h),
    # As NEFTune draws, by which embeddings are disturbed (Jain et al. 2023).
    "between tensors": lambda h: h + torch.zeros_like(h).uniform_(-1 / torch.sqrt(torch.tensor(h.numel())), 0.1),
    "mixture": lambda h: torch.lerp(h, h.flip(0), torch.rand(())),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_draws_what_pytorch_draws(kind: str) -> None:
    same(Between(lambda h: KINDS[kind](h), 12), MLP_DESC, mlp_batches(4), 5)


def _of_rank_4(h: torch.Tensor) -> torch.Tensor:
    return h.reshape(-1, 2, 2, 3)


# The memory order of the dropped tensors differs from the order of their dimensions; so does PyTorch's mask.
LAYOUTS = {
    "views": [
        lambda h: F.dropout(h.t(), 0.3).t(),
        lambda h: F.dropout(_of_rank_4(h).permute(2, 0, 3, 1), 0.3).permute(1, 3, 0, 2),
        lambda h: F.dropout(_of_rank_4(h).to(memory_format=torch.channels_last).sin(), 0.3),
        lambda h: F.dropout(_of_rank_4(h).transpose(1, 3).tanh(), 0.3).transpose(1, 3),
        lambda h: _of_rank_4(h) + F.dropout(_of_rank_4(h).transpose(0, 2)[:, 1:], 0.3).transpose(0, 2),
        lambda h: F.dropout(h.t().unsqueeze(0).expand(3, -1, -1), 0.3).sum(0).t(),
    ],
    "other operators": [
        lambda h: F.dropout(h.t().sin(), 0.3, inplace=True).t(),
        lambda h: (h.t() + torch.randn_like(h.t())).t(),
        lambda h: (h.t() * torch.rand_like(h.t())).t(),
        lambda h: (h.t() * torch.empty_like(h.t()).uniform_(1, 2) + torch.empty_like(h.t()).normal_()).t(),
        lambda h: (h.t() * torch.bernoulli(h.t().sigmoid())).t(),
        lambda h: F.alpha_dropout(h.t(), 0.3, True).t(),
        # Kernels whose results are contiguous, though PyTorch's description of them says otherwise.
        lambda h: F.dropout(F.logsigmoid(h.t()), 0.3).t(),
        lambda h: F.dropout(F.batch_norm(h.reshape(-1, 4, 3).mT, None, None, training=True), 0.3).mT.reshape(-1, 12),
    ],
    "recomputed": [lambda h: checkpoint(lambda v: F.dropout(v.t().tanh(), 0.3).t().sin(), h, use_reentrant=False)],
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_masks_lie_in_memory_as_those_of_pytorch(kind: str) -> None:
    model = Between(lambda h: sum(layout(h).reshape(-1, 12) for layout in LAYOUTS[kind]), 12)
    same(model, MLP_DESC, mlp_batches(2) + mlp_batches(1, size=7), 5)


def test_masks_lie_in_memory_as_the_inputs() -> None:
    """The first batch of one row stands in for others; what is the order of each is seen anew."""
    model = Apply(nn.ModuleList([nn.Linear(8, 3)]), lambda own, x: own[0](F.dropout(torch.as_tensor(x), 0.3).mean(1)))
    batches = [(torch.randn(size, 8, 5).transpose(1, 2), torch.zeros(size, dtype=torch.int64)) for size in (1, 4, 4)]
    batches.insert(2, (batches[1][0].contiguous(), batches[1][1]))
    batches.append((batches[1][0].numpy(), batches[1][1]))
    same(model, "auto", batches, 5, options={"debug": {"verify_every": 1}}, relative=1e-5)


def convolved(conv: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(conv(x.transpose(1, 2)).transpose(1, 2), 0.3, conv.training)


SEQUENCE_MODELS = {
    "encoder": lambda: Apply(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True), lambda own, x: own(x)
    ),
    "decoder": lambda: Apply(
        nn.TransformerDecoderLayer(8, 2, 16, dropout=0.2, batch_first=True), lambda own, x: own(x, x.flip(1))
    ),
    "convolution": lambda: Apply(nn.Conv1d(8, 8, 3, padding=1), convolved),
}


@pytest.mark.parametrize("name", SEQUENCE_MODELS)
def test_layers_that_transpose_have_the_masks_of_pytorch(name: str) -> None:
    desc = {"inputs": [("x", ["b", "t", 8]), ("y", ["b", "t", 8])], "outputs": [("loss", [], True)]}
    draw = torch.Generator().manual_seed(3)
    batches = [tuple(torch.randn(2, b, t, 8, generator=draw)) for b, t in ((4, 5), (4, 5), (3, 6), (2, 4))]
    same(SEQUENCE_MODELS[name](), desc, batches, 11, loss_fn=F.mse_loss)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2LMHeadModel"])
def test_transformers_with_their_dropout(name: str) -> None:
    """The masks of all layers are PyTorch's, so steps with dropout agree as closely as steps without."""
    bert = name.startswith("Bert")
    sizes = {"vocab_size": 50, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    model = getattr(transformers, name)((transformers.BertConfig if bert else transformers.GPT2Config)(**sizes))
    ids = torch.randint(3, 50, (4, 9))
    labels = ids[:, 0] % 2 if bert else ids
    desc = {
        "inputs": [("input_ids", ["batch", "length"]), ("labels", ["batch"] if bert else ["batch", "length"])],
        "outputs": [("loss", [], True)],
    }
    reference = Reference(model, torch.optim.AdamW, None, clip=1.0, lr=1e-3, weight_decay=0.0, eps=1e-4)
    torch.manual_seed(7)
    trainer = ORTTrainer(model, desc, optim.AdamConfig(lr=1e-3, epsilon=1e-4))
    torch.manual_seed(7)
    for _ in range(8):
        loss = reference.model(input_ids=ids, labels=labels).loss
        torch.testing.assert_close(trainer.train_step(ids, labels), loss.detach(), rtol=1e-4, atol=1e-5)
        loss.backward()
        reference.update(divisor=1)


def test_a_random_operator_that_is_not_supported_is_named() -> None:
    class Shuffled(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc2(self.fc1(x[:, torch.multinomial(torch.ones(8), 8)]))  # the line of the error

    with pytest.raises(
        ExportError, match=r"random operator aten.multinomial.*not supported.*test_dropout.py.*the line"
    ):
        mlp_trainer(model=Shuffled()).train_step(*mlp_batches(1)[0])


def test_no_warning_is_given_in_normal_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = ORTTrainer(MLP(0.1), MLP_DESC, optim.AdamConfig(), loss_fn=F.cross_entropy)
        trainer.train_step(*mlp_batches(1)[0])
        trainer.eval_step(*mlp_batches(1)[0])
