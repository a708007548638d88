"""The importer's operators of com.microsoft, compared with what ONNX Runtime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from ort_trainer.core.errors import ExportError
from ort_trainer.engine.ort import InferenceSession, engine
from ort_trainer.onnx.module import OnnxModule

_random = np.random.default_rng(0)


def _f(*shape: int) -> Any:
    return _random.normal(size=shape).astype(np.float32)


def _i(*values: Any) -> Any:
    return np.array(values, dtype=np.int32)


_X, _SCALE = _f(2, 3, 8), _f(8)
_ANGLES = _f(6, 2)
_ROTARY = np.cos(_ANGLES), np.sin(_ANGLES)
_PLACES = np.array([[0, 1, 2], [3, 4, 5]], dtype=np.int64)
_PACKED = _random.integers(0, 256, (5, 2, 8), dtype=np.uint8)
_IDS = _random.integers(0, 7, (2, 3)).astype(np.int32)

# Operator, inputs, attributes, number of outputs; an attribute "domain" is the operator's.
_CASES: dict[str, tuple[str, list[Any], dict[str, Any], int]] = {
    "layer norm": ("LayerNormalization", [_X, _SCALE, _f(8)], {"domain": "", "axis": -1}, 3),
    "simplified layer norm": ("SimplifiedLayerNormalization", [_X, _SCALE], {"domain": "", "epsilon": 1e-3}, 2),
    "skip": ("SkipLayerNormalization", [_X, _f(2, 3, 8), _SCALE, _f(8), _f(8)], {"epsilon": 1e-3}, 1),
    "skip, sum": ("SkipLayerNormalization", [_X, _f(2, 3, 8), _SCALE], {}, 4),
    "simplified skip": ("SkipSimplifiedLayerNormalization", [_X, _f(2, 3, 8), _SCALE, _f(8)], {"epsilon": 1e-3}, 1),
    "embedding": (
        "EmbedLayerNormalization",
        [_IDS, _i([0, 1, 0], [1, 0, 1]), _f(7, 8), _f(4, 8), _f(2, 8), _SCALE, _f(8), _i([1, 1, 0], [1, 1, 1])],
        {"epsilon": 1e-5, "mask_index_type": 1},
        2,
    ),
    "embedding, positions": (
        "EmbedLayerNormalization",
        [_IDS, None, _f(7, 8), _f(4, 8), None, _SCALE, _f(8), None, _i([2, 1, 0], [3, 2, 1])],
        {},
        2,
    ),
    "gelu": ("Gelu", [_X], {}, 1),
    "bias gelu": ("BiasGelu", [_X, _f(8)], {}, 1),
    "fast gelu": ("FastGelu", [_X, _f(8)], {}, 1),
    "quick gelu": ("QuickGelu", [_X], {"alpha": 1.5}, 1),
    "product": ("FusedMatMul", [_f(2, 4, 3), _f(2, 5, 4)], {"alpha": 0.5, "transA": 1, "transB": 1}, 1),
    "product of batches": ("FusedMatMul", [_f(3, 2, 4), _f(2, 4, 5)], {"transBatchA": 1}, 1),
    "product of both batches": (
        "FusedMatMul",
        [_f(4, 2, 3), _f(5, 2, 4)],
        {"transBatchA": 1, "transA": 1, "transBatchB": 1, "transB": 1},
        1,
    ),
    "gemm": (
        "FusedGemm",
        [_f(3, 4), _f(5, 3), _f(4, 1)],
        {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1, "activation": "LeakyRelu", "activation_alpha": 0.2},
        1,
    ),
    "convolution": (
        "FusedConv",
        [_f(1, 2, 6, 6), _f(3, 2, 3, 3), _f(3), _f(1, 3, 4, 4)],
        {"activation": "Relu", "kernel_shape": [3, 3]},
        1,
    ),
    "convolution, clipped": (
        "FusedConv",
        [_f(1, 2, 6, 6), _f(3, 2, 3, 3), _f(3)],
        {"activation": "Clip", "activation_params": [-0.5, 0.5], "pads": [1, 0, 1, 2], "strides": [2, 2]},
        1,
    ),
    "attention": ("Attention", [_X, _f(8, 24), _f(24)], {"num_heads": 2}, 1),
    "attention, causal": ("Attention", [_X, _f(8, 24), _f(24)], {"num_heads": 2, "unidirectional": 1}, 2),
    "attention, lengths": ("Attention", [_X, _f(8, 24), _f(24), _i(2, 3)], {"num_heads": 2}, 1),
    "attention, mask": (
        "Attention",
        [_X, _f(8, 24), _f(24), _i([1, 0, 1], [1, 1, 0])],
        {"num_heads": 2, "scale": 0.3},
        1,
    ),
    "attention, sizes and past": (
        "Attention",
        [_X, _f(8, 24), _f(24), None, _f(2, 2, 2, 3, 4)],
        {"num_heads": 2, "unidirectional": 1},
        2,
    ),
    "attention, added": (
        "Attention",
        [_X, _f(8, 20), _f(20), None, None, _f(2, 2, 3, 3)],
        {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 4]},
        1,
    ),
    "heads": ("MultiHeadAttention", [_X, _f(2, 5, 8), _f(2, 5, 8), _f(24)], {"num_heads": 2}, 1),
    "heads, mask": (
        "MultiHeadAttention",
        [_X, _f(2, 5, 8), _f(2, 5, 8), None, _i([1, 1, 1, 0, 0], [1, 1, 1, 1, 0])],
        {"num_heads": 2},
        1,
    ),
    "heads, added": (
        "MultiHeadAttention",
        [_X, _f(2, 5, 8), _f(2, 5, 8), None, None, _f(1, 2, 3, 5)],
        {"num_heads": 2, "scale": 0.2},
        1,
    ),
    "heads, past": (
        "MultiHeadAttention",
        [_X, _f(2, 3, 8), _f(2, 3, 8), None, None, None, _f(2, 2, 4, 4), _f(2, 2, 4, 4)],
        {"num_heads": 2},
        3,
    ),
    "groups": (
        "GroupQueryAttention",
        [_f(2, 3, 32), _f(2, 3, 16), _f(2, 3, 16), None, None, _i(2, 2), _i(3)],
        {"num_heads": 4, "kv_num_heads": 2},
        3,
    ),
    "groups, window": (
        "GroupQueryAttention",
        [_f(1, 5, 32), _f(1, 5, 16), _f(1, 5, 16), None, None, _i(4), _i(5)],
        {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 2, "scale": 0.4},
        3,
    ),
    "groups, packed and rotated": (
        "GroupQueryAttention",
        [_f(2, 3, 128), None, None, None, None, _i(2, 2), _i(3), *(np.cos(a := _f(6, 8)), np.sin(a))],
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1},
        3,
    ),
    "rotary": ("RotaryEmbedding", [_X, _PLACES, *_ROTARY], {}, 1),
    "rotary, interleaved": ("RotaryEmbedding", [_f(2, 2, 3, 4), _PLACES, *_ROTARY], {"interleaved": 1}, 1),
    "rotary, first position": ("RotaryEmbedding", [_X, np.array([2]), *_ROTARY], {}, 1),
    "rotary, partial": (
        "RotaryEmbedding",
        [_X, _PLACES, _ROTARY[0][:, :1], _ROTARY[1][:, :1]],
        {"num_heads": 2, "rotary_embedding_dim": 2},
        1,
    ),
    "few bits": (
        "MatMulNBits",
        [_f(3, 32), _PACKED, _f(10)],
        {"K": 32, "N": 5, "bits": 4, "block_size": 16},
        1,
    ),
    "few bits, zero points": (
        "MatMulNBits",
        [_f(3, 30), _PACKED, _f(10), _random.integers(0, 256, 5, dtype=np.uint8)],
        {"K": 30, "N": 5, "bits": 4, "block_size": 16},
        1,
    ),
    "dequantized": (
        "DequantizeLinear",
        [_random.integers(0, 256, (3, 4), dtype=np.uint8), _f(4), _PACKED[0, 0, :4]],
        {"axis": 1},
        1,
    ),
    "quantized": ("QuantizeLinear", [_f(3, 4), np.float32(0.02), np.uint8(120)], {}, 1),
}


# ONNX Runtime 1.19 computes these otherwise than newer releases, which this package follows: it differs in a bias, a
# mask, a bias that is broadcast to a batch, and the size of a window.
_CORRECTED = ("simplified skip", "heads, mask", "heads, added", "groups, window")


def _model(op_type: str, inputs: list[Any], attributes: dict[str, Any], outputs: int) -> onnx.ModelProto:
    names = ["" if value is None else f"in{i}" for i, value in enumerate(inputs)]
    results = [f"out{i}" for i in range(outputs)]
    # The outputs of skips between the first and the sum are not computed on CPUs.
    if op_type == "SkipLayerNormalization" and outputs == 4:
        results[1:3] = ["", ""]
    attributes = {"domain": "com.microsoft", **attributes}
    node = helper.make_node(op_type, names, results, **attributes)
    graph = helper.make_graph(
        [node],
        "graph",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype), np.shape(value)
            )
            for name, value in zip(names, inputs, strict=True)
            if name
        ],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in results if name],
    )
    imports = [helper.make_opsetid("", 16), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize("name", _CASES)
def test_computes_what_onnx_runtime_computes(name: str) -> None:
    if name in _CORRECTED and engine().__version__.startswith("1.19."):
        pytest.skip("computed otherwise by ONNX Runtime 1.19")
    op_type, inputs, attributes, outputs = _CASES[name]
    model = _model(op_type, inputs, attributes, outputs)
    feeds = {f"in{i}": np.asarray(value) for i, value in enumerate(inputs) if value is not None}
    for value in model.graph.output:
        value.ClearField("type")
    expected = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    module = OnnxModule(model)
    values = {k: torch.from_numpy(v.copy()) for k, v in feeds.items()}
    floats = [v.requires_grad_() for v in values.values() if v.is_floating_point()]
    found = list(module(**values).values())
    for result, reference in zip(found, expected, strict=True):
        assert result.shape == reference.shape
        np.testing.assert_allclose(result.detach().numpy(), reference, rtol=1e-3, atol=2e-4)
    if found[0].is_floating_point():
        (gradient,) = torch.autograd.grad(found[0].square().sum(), floats[:1], allow_unused=True)
        assert gradient is not None and torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("attention", {"do_rotary": 1}, "operator Attention of com.microsoft 1: do_rotary"),
        ("convolution", {"activation": "Selu"}, "activation 'Selu' is not supported"),
        ("few bits", {"bits": 3}, "bits is 3, but must be 2, 4 or 8"),
        ("simplified layer norm", {"stash_type": 10}, "stash_type is 10"),
        ("product", {"gamma": 1.0}, "attribute 'gamma'"),
    ],
)
def test_refused(name: str, change: dict[str, Any], message: str) -> None:
    op_type, inputs, attributes, outputs = _CASES[name]
    model = _model(op_type, inputs, {**attributes, **change}, outputs)
    feeds = {f"in{i}": torch.from_numpy(np.asarray(v).copy()) for i, v in enumerate(inputs) if v is not None}
    with pytest.raises(ExportError, match=message):
        OnnxModule(model)(**feeds)
