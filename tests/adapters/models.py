"""A small model with attention in PyTorch, in ONNX, and with low-rank adapters in plain PyTorch."""

from __future__ import annotations

import io

import numpy as np
import onnx
import torch
from torch import nn

WIDTH, WORDS, CLASSES = 32, 50, 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        values = self.v_proj(x)
        return self.out(torch.softmax(self.q_proj(x) @ x.transpose(1, 2), -1) @ values)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


class LowRank(nn.Module):
    """A linear layer with an adapter: the definition."""

    def __init__(self, base: nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T @ self.b.T)


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (4 + seed % 2, 7), generator=generator)
    return ids, torch.randint(0, CLASSES, (len(ids),), generator=generator)


def exported(model: nn.Module, fold: bool = False) -> onnx.ModelProto:
    """Returns a model as torch.onnx writes it: with weights as they are, or transposed into constants."""
    file = io.BytesIO()
    axes = {"ids": {0: "batch", 1: "time"}}
    torch.onnx.export(
        model.eval(),
        (batch(0)[0],),
        file,
        input_names=["ids"],
        output_names=["logits"],
        dynamic_axes=axes,
        dynamo=False,
        do_constant_folding=fold,
    )
    return onnx.load_from_string(file.getvalue())


def tensors(model: onnx.ModelProto) -> dict[str, torch.Tensor]:
    return {value.name: torch.from_numpy(onnx.numpy_helper.to_array(value).copy()) for value in model.graph.initializer}


def quantized(model: onnx.ModelProto, names: list[str], kind: str) -> onnx.ModelProto:
    """Returns a model whose products with some weights of shape (out, in) are quantized, as other tools write them."""
    weights = tensors(model)
    transposed = {node.output[0]: node for node in model.graph.node if node.op_type == "Transpose"}
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.node[:]
    for node in model.graph.node:
        maker = transposed.get(node.input[1]) if node.op_type == "MatMul" else None
        if node.op_type == "Transpose" and node.input[0] in names:
            continue
        if maker is None or maker.input[0] not in names:
            changed.graph.node.append(node)
            continue
        name = maker.input[0]
        weight = weights[name].numpy()
        of_blocks = weight.reshape(len(weight), -1, WIDTH)
        scale = (np.abs(of_blocks).max(2) / 7).astype(np.float32)
        codes = np.rint(of_blocks / scale[..., None]).astype(np.int8)
        if kind == "MatMulNBits":
            unsigned = (codes + 8).astype(np.uint8)
            packed = unsigned[..., ::2] | (unsigned[..., 1::2] << 4)
            parts = {f"{name}_Q4": packed, f"{name}_scales": scale.reshape(-1)}
            new = onnx.helper.make_node(
                kind, [node.input[0], *parts], node.output, f"{node.name}_Q4", domain="com.microsoft"
            )
            settings = {"K": weight.shape[1], "N": weight.shape[0], "bits": 4, "block_size": WIDTH}
            new.attribute.extend(onnx.helper.make_attribute(*pair) for pair in settings.items())
            changed.graph.node.append(new)
        else:
            codes = codes.reshape(weight.shape)
            parts = {f"{name}_codes": codes.T.copy(), f"{name}_scale": scale.reshape(-1)}
            floats = f"{name}_floats"
            changed.graph.node.append(onnx.helper.make_node("DequantizeLinear", [*parts], [floats], axis=1))
            changed.graph.node.append(onnx.helper.make_node("MatMul", [node.input[0], floats], node.output, node.name))
        changed.graph.initializer.extend(onnx.numpy_helper.from_array(value, key) for key, value in parts.items())
    kept = [value for value in changed.graph.initializer if value.name not in names]
    del changed.graph.initializer[:]
    changed.graph.initializer.extend(kept)
    if kind == "MatMulNBits":
        changed.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return changed


def round_weights(model: nn.Module, names: list[str]) -> None:
    """Rounds weights of a model in PyTorch to the values that :func:`quantized` stores."""
    for name, parameter in model.named_parameters():
        if name in names:
            scale = parameter.data.abs().amax(1, keepdim=True) / 7
            parameter.data = (parameter.data / scale).round() * scale
