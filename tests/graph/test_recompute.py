from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.core.dims import evaluate
from ort_trainer.core.errors import ExportError

from ..alive import Alive
from ..helpers import MLP_DESC, assert_same_training, mlp_batches

pytestmark = [pytest.mark.engine, pytest.mark.options(random_numbers="pytorch", kernels="onnxruntime")]

DESC = {"inputs": [("x", ["batch", 6, 8]), ("label", ["batch"])], "outputs": [("loss", [], True)]}
OPTIONS: dict[str, dict[str, Any]] = {
    "off": {},
    "attention dropout": {"graph_transformer": {"attn_dropout_recompute": True}},
    "gelu": {"graph_transformer": {"gelu_recompute": True}},
    "layers": {"graph_transformer": {"transformer_layer_recompute": True}},
    "memory efficient": {"utils": {"memory_efficient_gradient": True}},
    "all": {
        "graph_transformer": {
            "attn_dropout_recompute": True,
            "gelu_recompute": True,
            "transformer_layer_recompute": True,
            "number_recompute_layers": 1,
        },
        "utils": {"memory_efficient_gradient": True},
    },
    "layers, memory efficient": {
        "graph_transformer": {"transformer_layer_recompute": True},
        "utils": {"memory_efficient_gradient": True},
    },
}


class Layer(nn.Module):
    """A transformer layer of width 8 with one head, a causal mask and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.norm2 = nn.LayerNorm(8), nn.Linear(8, 24), nn.LayerNorm(8)
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).split(8, dim=-1)
        x = x + F.scaled_dot_product_attention(query, key, value, dropout_p=0.2, is_causal=True)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Encoder(nn.Module):
    """Two layers between others."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)  # without it, the layers would not be equal: only one's input would require grad
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 3)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x[:, 0])


def onnx_layers() -> onnx.ModelProto:
    """Returns three layers, each of a norm and two products, as an ONNX model with its loss."""
    draw = np.random.default_rng(0)
    nodes, value, weights = [], "x", {"head.weight": (8, 3)}
    for name in (f"layers.{number}" for number in range(3)):
        weights |= {f"{name}.norm.weight": (8,), f"{name}.up.weight": (8, 8), f"{name}.down.weight": (8, 8)}
        nodes += [
            onnx.helper.make_node("LayerNormalization", [value, f"{name}.norm.weight"], [f"{name}.a"]),
            onnx.helper.make_node("MatMul", [f"{name}.a", f"{name}.up.weight"], [f"{name}.b"]),
            onnx.helper.make_node("Tanh", [f"{name}.b"], [f"{name}.c"]),
            onnx.helper.make_node("MatMul", [f"{name}.c", f"{name}.down.weight"], [f"{name}.d"]),
            onnx.helper.make_node("Add", [value, f"{name}.d"], [name]),
        ]
        value = name
    nodes += [
        onnx.helper.make_node("MatMul", [value, "head.weight"], ["y"]),
        onnx.helper.make_node("ReduceL2", ["y"], ["loss"], keepdims=0),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "layers",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 8])],
        [onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, [])],
        [
            onnx.numpy_helper.from_array(draw.standard_normal(shape, np.float32) / 3, key)
            for key, shape in weights.items()
        ],
    )
    return onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 18)])


def batches(*lengths: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(3, length, 8, generator=generator), torch.randint(0, 3, (3,), generator=generator))
        for length in lengths
    ]


def train(options: dict[str, Any], model: nn.Module | None = None) -> tuple[ORTTrainer, list[torch.Tensor]]:
    """Trains three steps; returns the trainer, and the losses and the weights after them."""
    if model is None:
        torch.manual_seed(0)
        model = Encoder()
    torch.manual_seed(0)
    config = optim.SGDConfig(lr=0.1)
    trainer = ORTTrainer(model, DESC, config, loss_fn=F.cross_entropy, options=ORTTrainerOptions(options))
    losses = [trainer.train_step(*batch) for batch in batches(6, 6, 6)]
    return trainer, [*losses, *trainer.state_dict(pytorch_format=True).values()]


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[ORTTrainer, list[torch.Tensor]]]:
    found = {name: train(options) for name, options in OPTIONS.items()}
    torch.manual_seed(0)
    return {**found, "checkpoint": train({}, Encoder(checkpointed=True))}


def operators(trainer: ORTTrainer) -> Counter[str]:
    assert trainer.session is not None
    return Counter(node.op_type for node in trainer.session.graphs(training=True)[0].model.graph)


def kept_bytes(trainer: ORTTrainer) -> int:
    """Returns the bytes that the forward pass keeps for the backward pass, as ONNX Runtime computes it.

    The backward pass is everything that depends on the loss scale. Inputs of the graph, and values that are computed
    from weights alone, do not count; a reshaped value counts once.
    """
    assert trainer.session is not None
    graph = trainer.session.graphs(training=True)[0]
    assert graph.loss_scale is not None
    proto = ir.to_proto(graph.model)
    activation = {spec.name for spec in graph.inputs}
    backward = {graph.loss_scale.name}
    original: dict[str, str] = {}
    kept: set[str] = set()
    for node in proto.graph.node:
        if backward & {*node.input}:
            backward |= {*node.output}
            kept |= {original.get(name, name) for name in node.input if name in activation}
        elif activation & {*node.input}:
            activation |= {*node.output}
            if node.op_type in ("Reshape", "Identity", "Squeeze", "Unsqueeze"):
                original[node.output[0]] = original.get(node.input[0], node.input[0])
    names = sorted(kept - {value.name for value in proto.graph.input})
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    sizes = {"batch": 3}
    state = {graph.state[name]: value.numpy() for name, value in trainer.session.parameters.items()}
    inputs = zip(graph.inputs, batches(6)[0], strict=True)
    feeds = {**state, **{spec.name: value.numpy() for spec, value in inputs}}
    feeds[graph.loss_scale.name] = torch.ones([int(size) for size in graph.loss_scale.shape or ()]).numpy()
    feeds |= {spec.name: torch.ones([evaluate(size, sizes) for size in spec.shape]).numpy() for spec in graph.random}
    needed = {value.name for value in session.get_inputs()}
    return sum(value.nbytes for value in session.run(names, {k: v for k, v in feeds.items() if k in needed}))


@pytest.mark.parametrize("name", [*OPTIONS, "checkpoint"])
def test_the_numbers_stay(name: str, trained: dict[str, tuple[ORTTrainer, list[torch.Tensor]]]) -> None:
    for ours, theirs in zip(trained[name][1], trained["off"][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in (*OPTIONS, "checkpoint") if name != "off"])
def test_less_is_kept(name: str, trained: dict[str, tuple[ORTTrainer, list[torch.Tensor]]]) -> None:
    assert kept_bytes(trained[name][0]) < 0.95 * kept_bytes(trained["off"][0])


def test_what_is_computed_twice(trained: dict[str, tuple[ORTTrainer, list[torch.Tensor]]]) -> None:
    """There is one GELU and one softmax per layer; matrix products are repeated for whole layers only."""
    counts = {name: operators(trainer) for name, (trainer, _) in trained.items()}
    del counts["memory efficient"], counts["layers, memory efficient"]  # these may compute a value several times
    assert {name: count["Erf"] for name, count in counts.items()} == {
        "off": 2, "attention dropout": 2, "gelu": 4, "layers": 3, "all": 4, "checkpoint": 4,
    }  # fmt: skip
    assert counts["layers"]["Softmax"] == 3 and counts["checkpoint"]["Softmax"] == 4
    assert counts["gelu"]["Softmax"] == counts["off"]["Softmax"] == 2
    products = {name: count["MatMul"] + count["Gemm"] for name, count in counts.items()}
    assert products["off"] == products["gelu"] == products["attention dropout"]
    assert products["off"] < products["layers"] == products["all"] < products["checkpoint"]


def test_same_as_pytorch_with_its_dropout_masks() -> None:
    torch.manual_seed(0)
    assert_same_training(
        Encoder(),
        {**DESC, "inputs": [("x", ["batch", "length", 8]), ("label", ["batch"])]},
        batches(5, 6, 7),
        optim.SGDConfig(lr=0.1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        options=OPTIONS["all"],
        relative=1e-5,
        seed=7,
    )


class Blocks(nn.Module):
    """Residual blocks in a Sequential, with batch norm, whose running statistics must be updated once."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_layers_of_any_class() -> None:
    torch.manual_seed(0)
    trainer = assert_same_training(
        Blocks(),
        MLP_DESC,
        mlp_batches(3),
        optim.SGDConfig(lr=0.1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        options={"graph_transformer": {"transformer_layer_recompute": True, "number_recompute_layers": 3}},
        relative=1e-5,
    )
    assert operators(trainer)["Tanh"] == 6


class NewGELU(nn.Module):
    """The tanh formula, written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


def test_gelu_that_is_a_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), NewGELU(), nn.Linear(16, 3))
    desc = {"inputs": [("input", ["batch", 8]), ("label", ["batch"])], "outputs": [("loss", [], True)]}
    trainer = assert_same_training(
        model,
        desc,
        mlp_batches(2),
        optim.SGDConfig(lr=0.1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        options=OPTIONS["gelu"],
        relative=1e-5,
    )
    assert operators(trainer)["Tanh"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_dropout_recompute": True}, "attn_dropout_recompute: the training graph has no dropout on the result"),
        ({"gelu_recompute": True}, "gelu_recompute: the training graph has no GELU"),
        (
            {"transformer_layer_recompute": True, "number_recompute_layers": 4},
            "number_recompute_layers is 4, but the graph has 3 layers",
        ),
    ],
)
def test_what_the_model_does_not_have_is_refused(options: dict[str, Any], message: str) -> None:
    trainer = ORTTrainer(
        Blocks(),
        MLP_DESC,
        optim.SGDConfig(lr=0.1),
        loss_fn=F.cross_entropy,
        options=ORTTrainerOptions({"graph_transformer": options}),
    )
    with pytest.raises(ExportError, match=message):
        trainer.prepare(mlp_batches(1)[0])


@pytest.mark.parametrize(
    ("layers", "message"), [(0, "the graph has no layers"), (1, "the graph has no layers"), (2, None)]
)
def test_a_single_layer_is_none(layers: int, message: str | None) -> None:
    parts = [nn.Sequential(nn.Tanh(), nn.Linear(8, 8)) for _ in range(layers)]
    model = nn.Sequential(*parts, nn.Linear(8, 3))
    desc = {"inputs": [("input", ["batch", 8]), ("label", ["batch"])], "outputs": [("loss", [], True)]}
    options = ORTTrainerOptions(OPTIONS["layers"])
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)
    if message is None:
        trainer.train_step(*mlp_batches(1)[0])
        assert operators(trainer)["Tanh"] == 3
        return
    with pytest.raises(ExportError, match=message):
        trainer.prepare(mlp_batches(1)[0])


def test_with_mixed_precision() -> None:
    """Casts of the weights are computed once; recomputed values keep their precision."""
    mixed = {"mixed_precision": {"enabled": True, "dtype": "float16"}}
    plain, recomputed = (train({**mixed, **options})[1] for options in ({}, OPTIONS["all"]))
    for ours, theirs in zip(recomputed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [*(name for name in OPTIONS if name != "off"), "checkpoint"])
def test_programs_compute_the_same_in_less_memory(name: str) -> None:
    torch.manual_seed(0)
    models = Encoder(), Encoder(checkpointed=name == "checkpoint")
    models[1].load_state_dict(models[0].state_dict())
    x, label = torch.randn(64, 6, 8), torch.randint(0, 3, (64,))
    losses, peaks = [], []
    for model, chosen in zip(models, ("off", name), strict=True):
        torch.manual_seed(1)
        options = OPTIONS.get(chosen, {})
        options = {**options, "utils": {**options.get("utils", {}), "kernels": "pytorch", "random_numbers": "fast"}}
        config = optim.SGDConfig(lr=0.1)
        ours = ORTTrainer(model, DESC, config, loss_fn=F.cross_entropy, options=ORTTrainerOptions(options))
        losses.append([ours.train_step(x, label) for _ in range(4)])
        with Alive() as alive:  # the fifth step, which is not compared with PyTorch
            ours.train_step(x, label)
        peaks.append(alive.peak)
    assert torch.equal(*map(torch.stack, losses))
    assert peaks[1] < {"attention dropout": 0.99, "gelu": 0.96}.get(name, 0.9) * peaks[0]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_layers_of_an_onnx_model(count: int) -> None:
    """Weights tell its layers, as its nodes are in no modules."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    chosen = {"transformer_layer_recompute": True, "number_recompute_layers": count}
    found = []
    for options in ({}, {"graph_transformer": chosen}):
        description = {"inputs": [("x", ["batch", 8])], "outputs": [("loss", [], True)]}
        trainer = ORTTrainer(onnx_layers(), description, optim.SGDConfig(lr=0.01), options=ORTTrainerOptions(options))
        losses = [trainer.train_step(x).item() for _ in range(3)]
        found.append((losses, operators(trainer)))
    (losses, once), (same, again) = found
    assert same == losses and losses[2] < losses[0]
    assert again["Tanh"] - once["Tanh"] == again["LayerNormalization"] - once["LayerNormalization"] == (count or 2)


def test_an_onnx_model_has_as_many_layers_as_its_weights_tell() -> None:
    options = {"graph_transformer": {"transformer_layer_recompute": True, "number_recompute_layers": 4}}
    trainer = ORTTrainer(onnx_layers(), "auto", optim.SGDConfig(), options=ORTTrainerOptions(options))
    with pytest.raises(ExportError, match="number_recompute_layers is 4, but the graph has 3 layers"):
        trainer.train_step(torch.randn(4, 8))


class Square(torch.autograd.Function):
    """Hides which modules the nodes come from."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def test_layers_beside_a_custom_function() -> None:
    class Squared(Encoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Square.apply(super().forward(x))

    found = []
    for name in ("off", "layers"):
        torch.manual_seed(0)
        found.append(train(OPTIONS[name], Squared()))
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))
    once, again = (operators(trainer)["LayerNormalization"] for trainer, _ in found)
    assert again - once == 2


class Standardized(nn.Module):
    """The gradient of ``std`` computes the mean again, behind operators of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        return self.head((h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 0.2))


def test_values_that_the_backward_pass_computes_anyway() -> None:
    assert_same_training(
        Standardized(), MLP_DESC, mlp_batches(4), optim.SGDConfig(lr=0.1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1), options=OPTIONS["memory efficient"],
    )  # fmt: skip
