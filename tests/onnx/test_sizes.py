"""ONNX models on batches of every size, including 1: one graph serves them all."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ExportError, ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.onnx.load import load_onnx_model
from ort_trainer.onnx.shapes import known_shapes, shape_of

from ..helpers import assert_close

# Batch sizes and lengths, including 1 for each and for both at once.
SIZES = [(4, 5), (1, 4), (3, 1), (1, 1), (2, 9)]


class Embeddings(nn.Module):
    """The start of a BERT: positions are a slice, whose size shape inference can't determine."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(12, 8), nn.Embedding(16, 8)
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(dropout)
        self.dense, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("ids", torch.arange(16)[None])

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.words(x) + self.places(self.ids[:, : x.size(1)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.dense(self.dropout(self.hidden(x))))).mean(1))


class Flattened(Embeddings):
    """Applies dropout to a tensor of batch times length rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.dropout(self.dense(self.hidden(x).reshape(-1, 8)))
        return self.head(rows.reshape(x.size(0), x.size(1), 8).mean(1))


class Joined(Embeddings):
    """Applies dropout to a sequence with one more token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        return self.head(self.dropout(torch.cat([hidden[:, :1], self.dense(hidden)], 1)).mean(1))


class Halved(Embeddings):
    """Applies dropout to every other token, a size that is not a simple expression."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.dense(self.hidden(x)[:, ::2])).mean(1))


class Normed(Embeddings):
    """Batch norm over all tokens."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__(dropout)
        self.batch_norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.batch_norm(torch.cat([self.hidden(x).reshape(-1, 8), self.dense.weight]))
        return self.head(self.dropout(rows[:-8].reshape(x.size(0), -1, 8)).mean(1))


def exported(model: nn.Module, path: Path, opset: int = 14) -> Path:
    names = {0: "batch", 1: "length"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            copy.deepcopy(model),
            (torch.zeros(3, 6, dtype=torch.int64),),
            str(path),
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            opset_version=opset,
            input_names=["x"],
            output_names=["logits"],
            dynamic_axes={"x": names, "logits": {0: "batch"}},
        )
    return path


DESC: dict[str, Any] = {
    "inputs": [("x", ["batch", "length"]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}


def trainer_of(path: Path, model: nn.Module, description: Any = DESC) -> ORTTrainer:
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False, "random_numbers": "pytorch"}})
    torch.manual_seed(11)
    trainer = ORTTrainer(path, description, optim.SGDConfig(lr=0.1), loss_fn="cross_entropy", options=options)
    trainer.load_state_dict(model.state_dict(), strict=False)  # the export has run batch norm once
    return trainer


def batches(sizes: list[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [
        (torch.randint(0, 12, size, generator=draw), torch.randint(0, 3, size[:1], generator=draw)) for size in sizes
    ]


def assert_trains_like_pytorch(trainer: ORTTrainer, model: nn.Module, sizes: list[tuple[int, int]]) -> None:
    """Compares losses and weights; both draw the same dropout masks from the same seed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(11)
    for x, label in batches(sizes):
        model.eval()
        loss = trainer.eval_step(x=x, label=label)[0]
        assert loss.item() == pytest.approx(F.cross_entropy(model(x), label).item(), abs=1e-5)
        model.train()
        expected = F.cross_entropy(model(x), label)
        assert trainer.train_step(x=x, label=label)[0].item() == pytest.approx(expected.item(), abs=1e-5)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    known = model.state_dict()
    for name, value in trainer.state_dict(pytorch_format=True).items():
        if name in known and "running" not in name:
            assert_close(value, known[name].detach(), 1e-4, name)


@pytest.mark.parametrize("make", [Embeddings, Flattened, Joined])
def test_one_graph_trains_batches_of_every_size(make: type[Embeddings], tmp_path: Path) -> None:
    model = make()
    trainer = trainer_of(exported(model, tmp_path / "m.onnx"), model)
    assert_trains_like_pytorch(trainer, model, SIZES)
    assert [dict(graph.fixed) for graph in trainer.session.graphs(True)] == [{}]
    assert len(trainer.session.graphs(False)) == 1


def test_without_dropout_and_in_the_order_of_an_epoch(tmp_path: Path) -> None:
    model = Embeddings(dropout=0.0)
    trainer = trainer_of(exported(model, tmp_path / "m.onnx"), model)
    assert_trains_like_pytorch(trainer, model, [(4, 6), (1, 6), (3, 1), (1, 1)])


@pytest.mark.parametrize("first", [(1, 1), (1, 4)])
@pytest.mark.parametrize("description", [DESC, "auto"])
def test_the_first_batch_may_have_size_one(first: tuple[int, int], description: Any, tmp_path: Path) -> None:
    model = Embeddings()
    trainer = trainer_of(exported(model, tmp_path / "m.onnx"), model, description)
    assert_trains_like_pytorch(trainer, model, [first, (4, 5), (3, 1)])
    assert len(trainer.session.graphs(True)) == 1


def test_batch_norm_of_one_sequence(tmp_path: Path) -> None:
    model = Normed(dropout=0.0)
    trainer = trainer_of(exported(model, tmp_path / "m.onnx"), model)
    for x, label in batches(SIZES):
        model.train()
        expected = F.cross_entropy(model(x), label)
        assert trainer.train_step(x, label)[0].item() == pytest.approx(expected.item(), abs=1e-5)
        model.zero_grad()
        expected.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad


def test_a_size_that_is_no_simple_expression_is_built_for(tmp_path: Path) -> None:
    model = Halved()
    trainer = trainer_of(exported(model, tmp_path / "m.onnx"), model)
    assert_trains_like_pytorch(trainer, model, [(4, 5), (1, 4), (3, 1), (4, 5)])
    assert len(trainer.session.graphs(True)) == 3


def test_masks_have_the_shape_of_what_they_drop(tmp_path: Path) -> None:
    model = Flattened()
    trainer = trainer_of(exported(model, tmp_path / "m.onnx"), model)
    x, label = batches([(4, 5)])[0]
    trainer.train_step(x, label)
    (graph,) = trainer.session.graphs(True)
    (mask,) = graph.random
    assert mask.shape == ("dim('batch')*dim('length')", 8)


def test_random_numbers_of_other_operators(tmp_path: Path) -> None:
    """Noise and Bernoulli masks of unknown size: a step with one sequence draws its own noise."""
    import onnx

    class Noisy(Embeddings):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.hidden(x)
            return self.head((hidden + torch.randn_like(hidden) * torch.bernoulli(torch.sigmoid(hidden))).mean(1))

    model = Noisy()
    path = exported(model, tmp_path / "m.onnx", 15)
    assert {"RandomNormalLike", "Bernoulli"} <= {node.op_type for node in onnx.load(path).graph.node}
    trainer = trainer_of(path, model)
    for x, label in batches(SIZES):
        assert trainer.train_step(x, label)[0].item() != trainer.eval_step(x, label)[0].item()
    assert [len(graph.random) for graph in trainer.session.graphs(True)] == [2]


def test_sizes_that_depend_on_values_are_refused(tmp_path: Path) -> None:
    class Chosen(Embeddings):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.dropout(self.hidden(x)[x > 3]).sum(0)).expand(x.size(0), 3)

    model = Chosen()
    trainer = trainer_of(exported(model, tmp_path / "m.onnx"), model)
    x = torch.arange(20).reshape(4, 5) % 12
    with pytest.raises(ExportError, match="NonZero.*: the shape of its result depends on the values"):
        trainer.train_step(x, torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("exporter", ["older", "newer"])
def test_bert_trains_batches_of_every_size(exporter: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=1,
        num_labels=3,
        num_attention_heads=2,
        intermediate_size=32,
        attn_implementation="eager",  # draws masks in the order of the graph
        pad_token_id=None,  # ONNX has no untrained rows
    )

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertForSequenceClassification(config)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bert(x, attention_mask=(x != 11).long()).logits

    model = Bert().train()
    with torch.no_grad():  # the newer exporter merges equal weights
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.02)
    path = tmp_path / "m.onnx"
    if exporter == "older":
        exported(model, path)
    else:
        dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        torch.onnx.export(
            copy.deepcopy(model),
            (torch.zeros(3, 6, dtype=torch.int64),),
            str(path),
            dynamo=True,
            optimize=False,
            verbose=False,
            input_names=["x"],
            output_names=["logits"],
            dynamic_shapes=(dynamic,),
        )
    trainer = trainer_of(path, model)
    assert_trains_like_pytorch(trainer, model, [(4, 5), *itertools.product((1, 2), (1, 7))])
    assert [dict(graph.fixed) for graph in trainer.session.graphs(True)] == [{}]


MODELS = {
    "Gemm": ("y = Gemm(x, w)", "n,features", [7, 3], ("n", 7)),
    "Gemm, transposed": ("y = Gemm<transB = 1>(x, w)", "n,features", [3, 7], ("n", 7)),
    "MatMul": ("y = MatMul(x, w)", "n,time,features", [7, 3], ("n", "time", 7)),
    "MatMul of batches": ("y = MatMul(x, w)", "n,time,features", [2, 7, 3], ("n", "time", "features")),
    "Conv": ("y = Conv<group = 2>(x, w)", "n,channels,a,b", [4, 3, 1, 1], ("n", 6, "a", "b")),
    "another domain": ("y = own.Gemm(x, w)", "n,features", [7, 3], ("n", "features")),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_weight_fixes_sizes_that_the_file_names(name: str) -> None:
    text, given, weight, expected = MODELS[name]
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17, "own" : 1]> g (float[{given}] x) => (float y) {{ {text} }}'
    )
    value = torch.zeros(weight).numpy()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(value, "w"))
    loaded = load_onnx_model(proto)
    assert shape_of(next(value for value in loaded.model.graph.inputs if value.name == "x")) == expected


def test_an_output_has_the_sizes_of_the_inputs_under_their_names() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> '
        "g (float[n,3] x) => (float[out_n,out_k] y, float[n,3] x, float[own] z)"
        "{ y = Gemm(x, w) s = Shape(x) z = Reshape(x, s) }"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(torch.zeros(3, 4).numpy(), "w"))
    found = known_shapes(load_onnx_model(proto).model)
    assert (found["x"], found["y"]) == (("n", 3), ("n", 4))
