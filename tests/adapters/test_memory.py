"""Floats of quantized weights are in memory for one layer at a time, in a trainer's step and in an ORTModule."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper
import pytest
import torch
from onnx.numpy_helper import from_array
from torch import nn

from ort_trainer import ORTModule, ORTTrainer, optim
from ort_trainer.adapters import LoRA, add_adapter

from ..alive import Alive

WIDTH, LAYERS = 64, 6
FLOATS = 4 * WIDTH * WIDTH


def quantized_layers() -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    x, nodes, initializers = "x", [], []
    for at in range(LAYERS):
        codes, floats, product, result = f"{at}.weight", f"{at}.floats", f"{at}.product", f"{at}.tanh"
        initializers.append(from_array(generator.integers(-127, 128, (WIDTH, WIDTH)).astype(np.int8), codes))
        initializers.append(from_array(np.full(WIDTH, 1e-3, np.float32), f"{at}.scale"))
        nodes.append(onnx.helper.make_node("DequantizeLinear", [codes, f"{at}.scale"], [floats], axis=1))
        nodes.append(onnx.helper.make_node("MatMul", [x, floats], [product]))
        nodes.append(onnx.helper.make_node("Tanh", [product], [result]))
        x = result
    values = [onnx.helper.make_tensor_value_info(name, 1, ["batch", WIDTH]) for name in ("x", x)]
    graph = onnx.helper.make_graph(nodes, "layers", values[:1], values[1:], initializers)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


class Quantized(nn.Module):
    """A linear layer of integers, with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8))
        self.register_buffer("scale", torch.full((WIDTH, 1), 1e-3))
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))

    def forward(self, x):
        return torch.tanh(nn.functional.linear(x, self.codes.float() * self.scale) + self.adapter(x))


def test_in_a_step() -> None:
    model = add_adapter(quantized_layers(), LoRA(2, targets="linear"))
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn="mse")
    x = torch.randn(2, WIDTH)
    for _ in range(2):
        trainer.train_step(x, x)
    with Alive() as alive:  # the third step, which is not compared with PyTorch
        trainer.train_step(x, x)
    assert alive.peak < 4 * FLOATS


@pytest.mark.parametrize("ours", [True, False])
def test_in_a_module(ours: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Quantized() for _ in range(LAYERS)))
    model = ORTModule(model, fallback="error") if ours else model
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        model(torch.randn(2, WIDTH)).sum().backward()
    floats = [tensor for tensor in kept if tensor.dtype == torch.float32 and tensor.numel() == WIDTH * WIDTH]
    assert len(kept) > 4 and bool(floats) != ours
