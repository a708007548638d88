"""Sequence models from real scripts, with changing batch sizes and lengths: one export for all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ort_trainer import ExportError, ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.graph.cell_loops import roll_up_loops

from ..helpers import Reference, assert_close, assert_same_training, assert_same_weights

pytestmark = pytest.mark.engine

TOKENS = 30
CONFIG = optim.SGDConfig(lr=0.3)
SHAPES = [(7, 4), (7, 4), (5, 4), (1, 4), (9, 4), (7, 3), (2, 1), (12, 2), (1, 1), (7, 4)]
LANGUAGE_DESC = {
    "inputs": [("tokens", ["length", "batch"]), ("next", ["length", "batch"])],
    "outputs": [("loss", [], True)],
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)


def language_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def language_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randint(0, TOKENS, shape), torch.randint(0, TOKENS, shape)) for shape in SHAPES]


class TransformerLanguageModel(nn.Transformer):
    """Keeps the mask of its last call, and lets ``nn.TransformerEncoder`` detect the kind of mask."""

    def __init__(self) -> None:
        super().__init__(d_model=8, nhead=2, dim_feedforward=16, num_encoder_layers=2, dropout=0.0)
        self.mask: torch.Tensor | None = None
        self.embedding = nn.Embedding(TOKENS, 8)
        self.decoder = nn.Linear(8, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.mask is None or self.mask.size(0) != len(tokens):
            self.mask = torch.log(torch.tril(torch.ones(len(tokens), len(tokens))))
        return self.decoder(self.encoder(self.embedding(tokens) * 8**0.5, mask=self.mask))


def test_language_model_of_a_transformer() -> None:
    model = TransformerLanguageModel()
    trainer = same(model, LANGUAGE_DESC, language_batches(), language_loss)
    tokens, following = language_batches()[0]
    reference = copy.deepcopy(model)
    reference.load_state_dict(trainer.state_dict(pytorch_format=True))
    with torch.no_grad():
        expected = language_loss(reference.eval()(tokens), following)
    assert_close(trainer.eval_step(tokens, following), expected, 1e-5, "loss in evaluation")


class RecurrentLanguageModel(nn.Module):
    """Gets its last state, detached, as in a script that processes a long text."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)
        self.rnn = kind(8, 8, num_layers=2)

    def forward(self, tokens: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None = None) -> tuple[Any, ...]:
        output, left = self.rnn(self.embedding(tokens), h if c is None else (h, c))
        return self.decoder(output), *(left if isinstance(left, tuple) else [left])


@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize(("kind", "names"), [(nn.LSTM, "hc"), (nn.GRU, "h")], ids=["lstm", "gru"])
def test_language_model_that_carries_its_state(kind: type[nn.LSTM | nn.GRU], names: str, kernels: str) -> None:
    model = RecurrentLanguageModel(kind)
    pointers = [weight.data_ptr() for weight in model.rnn._flat_weights]
    states = [(n, [2, "batch", 8]) for n in names]
    desc = {
        "inputs": [("tokens", ["length", "batch"]), *states, ("next", ["length", "batch"])],
        "outputs": [
            ("loss", [], True),
            ("logits", ["length", "batch", TOKENS]),
            *((f"left_{n}", shape) for n, shape in states),
        ],
    }

    def loss_fn(outputs: Any, following: torch.Tensor) -> torch.Tensor:
        return language_loss(outputs[0], following)

    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False, "kernels": kernels}})
    trainer = ORTTrainer(model, desc, CONFIG, loss_fn=loss_fn, options=options)
    theirs = Reference(model, loss_fn=loss_fn, lr=0.3)
    state: list[torch.Tensor] = []
    for tokens, following in language_batches():
        if not state or state[0].shape[1] != tokens.shape[1]:
            state = expected = [torch.zeros(2, tokens.shape[1], 8) for _ in names]
        loss, _, *state = trainer.train_step(tokens, *state, following)
        assert_close(loss, theirs.step(tokens, *expected, following), 1e-4, "loss")
        expected = [value.detach() for value in theirs.outputs[1:]]
        for mine, other in zip(state, expected, strict=True):
            assert_close(mine, other, 1e-4, "state")
    assert_same_weights(trainer, theirs.model, 1e-4)
    assert len(trainer.session.graphs(True)) == 1
    assert [weight.data_ptr() for weight in model.rnn._flat_weights] == pointers


class Layer(nn.Module):
    """One recurrent layer over a sequence (batch, length, 4), or over each sequence separately."""

    def __init__(self, kind: str, given: bool = False, batched: bool = True, **settings: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(4, 6, batch_first=True, **settings)
        self.head = nn.Linear((settings.get("proj_size") or 6) * (2 if self.rnn.bidirectional else 1), 3)
        self.given, self.batched = given, batched

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.batched:
            return self.head(self.rnn(x[0])[0].mean(0)).expand(len(x), -1)
        output, left = self.rnn(x, self._first(x) if self.given else None)
        states = left if isinstance(left, tuple) else (left,)
        return self.head(output.mean(1)) + torch.cat([state.mean((0, 2)).unsqueeze(-1) for state in states], -1)[:, :1]

    def _first(self, x: torch.Tensor) -> Any:
        """Returns initial states that depend on the batch, so that their gradient matters."""
        count = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        widths = [self.rnn.proj_size or 6, 6] if isinstance(self.rnn, nn.LSTM) else [6]
        states = [(x.mean((1, 2)) * (n + 1)).view(1, -1, 1).expand(count, -1, width) for n, width in enumerate(widths)]
        return tuple(states) if len(states) > 1 else states[0]


LAYER_DESC = {"inputs": [("x", ["batch", "length", 4]), ("label", ["batch"])], "outputs": [("loss", [], True)]}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm, given states, no biases": ("LSTM", {"given": True, "bias": False}),
    "lstm, projection, both directions": ("LSTM", {"given": True, "proj_size": 3, "bidirectional": True}),
    "gru, given states, both directions": ("GRU", {"given": True, "bidirectional": True, "num_layers": 2}),
    "gru, no biases": ("GRU", {"bias": False}),
    "gru, one sequence": ("GRU", {"batched": False}),
    "rnn, given states": ("RNN", {"given": True}),
    "rnn, relu, backwards": ("RNN", {"nonlinearity": "relu", "bidirectional": True}),
}


@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize("case", LAYERS)
def test_layers(case: str, kernels: str) -> None:
    kind, settings = LAYERS[case]
    batches = [(torch.randn(size, length, 4), torch.randint(0, 3, (size,))) for length, size in SHAPES]
    options = {"utils": {"grad_norm_clip": False, "kernels": kernels}}
    same(Layer(kind, **settings), LAYER_DESC, batches, F.cross_entropy, options=options)


class Packed(nn.Module):
    """A layer over a packed batch; the loss includes the final states of the sequences."""

    def __init__(self, kind: str, batch_first: bool, is_sorted: bool, total: bool, **settings: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(4, 6, batch_first=batch_first, **settings)
        self.head = nn.Linear((settings.get("proj_size") or 6) * (2 if self.rnn.bidirectional else 1), 3)
        self.batch_first, self.is_sorted, self.total = batch_first, is_sorted, total

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        value = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(value, lengths, self.batch_first, self.is_sorted)
        output, left = self.rnn(packed)
        total = x.shape[1] if self.total else None
        padded, counts = pad_packed_sequence(output, batch_first=True, padding_value=0.5, total_length=total)
        states = left if isinstance(left, tuple) else (left,)
        ends = torch.cat([state.mean((0, 2)).unsqueeze(-1) for state in states], -1)
        return self.head(padded.sum(1) / counts.unsqueeze(-1)) + ends[:, -1:] * torch.tensor([1.0, -1.0, 2.0])


PACKED_DESC = {
    "inputs": [("x", ["batch", "length", 4]), ("lengths", ["batch"]), ("label", ["batch"])],
    "outputs": [("loss", [], True)],
}
PACKED: dict[str, tuple[Any, ...]] = {
    "lstm, both directions": (("LSTM", True, False, False), {"bidirectional": True, "num_layers": 2}),
    "lstm, projection, total length": (("LSTM", False, True, True), {"proj_size": 3}),
    "gru, both directions": (("GRU", False, False, False), {"bidirectional": True}),
    "rnn, sorted": (("RNN", True, True, False), {"bias": False}),
}


def packed_batches(shortened: int) -> list[tuple[torch.Tensor, ...]]:
    found: list[tuple[torch.Tensor, ...]] = []
    for steps, size in SHAPES:
        longest = max(1, steps - shortened)
        lengths = torch.randint(1, longest + 1, (size,))
        lengths[0] = longest
        lengths = lengths.sort(descending=True).values
        found.append((torch.randn(size, steps, 4), lengths, torch.randint(0, 3, (size,))))
    return found


@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences(case: str, kernels: str) -> None:
    given, settings = PACKED[case]
    _, _, is_sorted, total = given
    batches = packed_batches(shortened=2 if total else 0)
    if not is_sorted:
        batches = [(x, lengths.flip(0), y) for x, lengths, y in batches]
    options = {"utils": {"grad_norm_clip": False, "kernels": kernels}}
    same(Packed(*given, **settings), PACKED_DESC, batches, F.cross_entropy, options=options)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 2], "pad_packed_sequence: the longest sequence has 3 of the 5 steps.*pass total_length"),
        ([5, 0], "lengths must be 1 to 5"),
        ([9, 5], "lengths must be 1 to 5"),
    ],
)
def test_wrong_lengths_of_packed_sequences(lengths: list[int], message: str) -> None:
    """A graph of ONNX operators can't raise its own error, but the node's name tells where it failed."""
    trainer = ORTTrainer(Packed("GRU", True, True, False), PACKED_DESC, CONFIG, loss_fn=F.cross_entropy)
    trainer.train_step(torch.randn(2, 5, 4), torch.tensor([5, 2]), torch.tensor([0, 1]))
    with pytest.raises((ValueError, RuntimeError), match=f"{message}|checked_lengths"):
        trainer.train_step(torch.randn(2, 5, 4), torch.tensor(lengths), torch.tensor([0, 1]))


def test_data_of_a_packed_sequence_is_refused() -> None:
    class Model(Packed):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return self.head(pack_padded_sequence(x, lengths, True).data.mean(0))

    trainer = ORTTrainer(Model("GRU", True, True, False), PACKED_DESC, CONFIG, loss_fn=F.cross_entropy)
    with pytest.raises(ExportError, match=r"uses \.data of a PackedSequence.*compute on the padded batch"):
        trainer.train_step(torch.randn(2, 5, 4), torch.tensor([5, 2]), torch.tensor([0, 1]))


class Loop(nn.Module):
    """A loop over two cells, whose last steps get the loop's own outputs."""

    def __init__(self, further: int = 0, looks: bool = False, drops_out: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(1, 6), nn.GRUCell(6, 6, bias=False), nn.Linear(6, 1)
        self.further, self.looks, self.dropout = further, looks, nn.Dropout(0.0)
        self.drops_out = drops_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = other = x.new_zeros(len(x), 6)
        outputs, seen = [], x.new_zeros(())
        steps = list(x.split(1, dim=1))
        for number in range(len(steps) + self.further):
            given = steps[number] if number < len(steps) else outputs[-1]
            h, c = self.first(given, (h, c))
            other = self.second(self.dropout(h) if self.drops_out else h, other)
            outputs.append(self.head(other))
            if self.looks and number == 4:
                seen = c.square().mean()
        return torch.cat(outputs, dim=1) + seen + c.mean()


LOOPS: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 0),
    "steps that depend on the loop": ({"further": 2}, 2),
    "a cell state in between is used": ({"looks": True}, 0),
    "dropout between the cells": ({"drops_out": True}, 9),
}


@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize("case", LOOPS)
def test_loops_over_cells(case: str, kernels: str) -> None:
    settings, _ = LOOPS[case]
    steps = 9 + settings.get("further", 0)
    desc = {"inputs": [("x", ["batch", 9]), ("y", ["batch", steps])], "outputs": [("loss", [], True)]}
    batches = [(torch.randn(size, 9), torch.randn(size, steps)) for size in [4, 4, 3, 1, 5, 4, 1, 3]]
    options = {"utils": {"grad_norm_clip": False, "kernels": kernels}}
    same(Loop(**settings), desc, batches, F.mse_loss, options=options)


def test_a_loop_over_cells_with_closures() -> None:
    """The loop of pytorch/examples' time_sequence_prediction, with fewer and smaller steps."""
    model = Loop().double()
    reference = copy.deepcopy(model)
    wave = torch.sin(torch.arange(21) / 4.0 + torch.randint(-9, 9, (5, 1))).double()
    x, y = wave[:, :-1].contiguous(), wave[:, 1:].contiguous()
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(), loss_fn=F.mse_loss)
    optimizers = [torch.optim.LBFGS(part.parameters(), lr=0.8, max_iter=4) for part in (model, reference)]

    def ours() -> torch.Tensor:
        optimizers[0].zero_grad()
        return trainer.forward_backward(x, y)[0]

    def theirs() -> torch.Tensor:
        optimizers[1].zero_grad()
        loss = F.mse_loss(reference(x), y)
        loss.backward()
        return loss

    for _ in range(5):
        assert_close(optimizers[0].step(ours), optimizers[1].step(theirs).detach(), 1e-6, "loss")
    assert_same_weights(trainer, reference, 1e-6)


@pytest.mark.parametrize("case", LOOPS)
def test_loops_over_cells_become_layers(case: str) -> None:
    settings, left = LOOPS[case]
    graph = torch.export.export(Loop(**settings).double(), (torch.randn(3, 9).double(),), strict=False).graph_module
    before = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.lstm_cell.default)
    assert len(before) == 9 + settings.get("further", 0)
    roll_up_loops(graph.graph)
    after = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.lstm_cell.default)
    assert len(after) == left
    graph.graph.lint()


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_layers_in_mixed_precision(kind: str, dtype: torch.dtype) -> None:
    """States are accumulated in fp32, so losses stay closer to fp32 than a half could represent."""
    torch.manual_seed(0)
    model = Layer(kind, given=True)
    batch = torch.randn(4, 30, 4), torch.randint(0, 3, (4,))
    expected = F.cross_entropy(model(batch[0]), batch[1]).item()
    options = ORTTrainerOptions({"mixed_precision": {"enabled": True, "dtype": str(dtype).removeprefix("torch.")}})
    trainer = ORTTrainer(model, LAYER_DESC, CONFIG, loss_fn=F.cross_entropy, options=options)
    assert trainer.train_step(*batch).item() == pytest.approx(expected, rel=2e-2)


def same(
    model: nn.Module, desc: dict[str, Any], batches: list[Any], loss_fn: Any, exports: int = 1, options: Any = None
) -> ORTTrainer:
    trainer = assert_same_training(model, desc, batches, CONFIG, sgd, loss_fn=loss_fn, relative=1e-4, options=options)
    assert len(trainer.session.graphs(True)) == exports
    return trainer
