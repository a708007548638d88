"""Gradients pass straight through rounding, as in PyTorch's fake quantization."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper
import onnx.parser
import pytest
import torch

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.onnx.module import OnnxModule

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
W = torch.tensor([[1.0, 2, 3, 0.5], [1, 1, 2, 1], [4, -2, 3, -1], [0.1, 0.2, 0.3, -1]])
B = torch.tensor([[1, 200], [30, 4], [90, 60], [7, 80]])
VALUES = {
    "w": W,
    "s": torch.tensor(0.02),
    "c": torch.tensor([0.02, 0.03, 0.01, 0.2]),
    "z": torch.tensor(3, dtype=torch.int8),
    "d": torch.tensor([0, 1, -5, 100], dtype=torch.int8),
    "b": B.to(torch.uint8),
    "bz": torch.tensor(60, dtype=torch.uint8),
    "bs": torch.tensor(0.01),
    "r": torch.tensor(0.5),
    "u": torch.tensor(100, dtype=torch.uint8),
    "v": torch.tensor(0.1),
    "k": B.T.reshape(2, 4, 1).to(torch.uint8),
}


def model(body: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[n,4] x) => (y) {{ h = MatMul(x, w) {body} }}'
    )
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for name, value in VALUES.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.numpy(), name))
    return proto


def gradients(function: object, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = function(w)  # type: ignore[operator]
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    assert w.grad is not None
    return y.detach(), w.grad


def fake(x: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.02, 3, -128, 127)


def of_range(x: torch.Tensor) -> torch.Tensor:
    """As DynamicQuantizeLinear and DequantizeLinear."""
    low, high = x.detach().amin().clamp(max=0), x.detach().amax().clamp(min=0)
    scale = (high - low) / 255
    zero = int((-low / scale).round().clamp(0, 255))
    return torch.fake_quantize_per_tensor_affine(x, scale.item(), zero, 0, 255)


def to_float8(x: torch.Tensor) -> torch.Tensor:
    """PyTorch has no fake quantization to these."""
    inside = x.clamp(-448, 448)
    assert 0 < (x == inside).sum() < x.numel()
    return inside + (inside.to(torch.float8_e4m3fn).float() - inside).detach()


BACK = (B - 60) * 0.01
CASES = {
    "in pairs": ("q = QuantizeLinear(h, s, z) y = DequantizeLinear(q, s, z)", fake),
    "channels": (
        "q = QuantizeLinear<axis=1>(h, c, d) y = DequantizeLinear<axis=1>(q, c, d)",
        lambda h: torch.fake_quantize_per_channel_affine(h, VALUES["c"], VALUES["d"].int(), 1, -128, 127),
    ),
    "moved": (
        "q = QuantizeLinear(h, s, z) t = Transpose<perm=[1,0]>(q) "
        "a = Concat<axis=0>(t, t) y = DequantizeLinear(a, s, z)",
        lambda h: torch.cat([fake(h).T, fake(h).T]),
    ),
    "weights": (
        "q = QuantizeLinear(w, s, z) v2 = DequantizeLinear(q, s, z) y = MatMul(x, v2)",
        None,
    ),
    "dynamic": (
        "q, p, o = DynamicQuantizeLinear(h) m = MatMulInteger(q, b, o, bz) f = CastLike(m, p) e = Mul(p, bs) "
        "y = Mul(f, e)",
        lambda h: of_range(h) @ BACK,
    ),
    "dynamic convolution": (
        "i = Constant<value_ints=[2]>() q, p, o = DynamicQuantizeLinear(h) g1 = Unsqueeze(q, i) "
        "m = ConvInteger(g1, k, o, bz) f = Cast<to=1>(m) e = Mul(p, bs) t = Squeeze(f, i) y = Mul(t, e)",
        lambda h: of_range(h) @ BACK,
    ),
    "dynamic, of zeros": (
        "n = Sub(h, h) q, p, o = DynamicQuantizeLinear(n) t = DequantizeLinear(q, p, o) y = Add(t, h)",
        lambda h: h,
    ),
    "product": (
        "q = QuantizeLinear(h, v, u) m = QLinearMatMul(q, v, u, b, bs, bz, r, u) y = DequantizeLinear(m, r, u)",
        lambda h: torch.fake_quantize_per_tensor_affine(
            torch.fake_quantize_per_tensor_affine(h, 0.1, 100, 0, 255) @ BACK, 0.5, 100, 0, 255
        ),
    ),
    "convolution": (
        "i = Constant<value_ints=[2]>() q = QuantizeLinear(h, v, u) g1 = Unsqueeze(q, i) "
        "m = QLinearConv(g1, v, u, k, bs, bz, r, u) t = Squeeze(m, i) y = DequantizeLinear(t, r, u)",
        lambda h: torch.fake_quantize_per_tensor_affine(
            torch.fake_quantize_per_tensor_affine(h, 0.1, 100, 0, 255) @ BACK, 0.5, 100, 0, 255
        ),
    ),
    "8-bit floats": (
        "q = QuantizeLinear<output_dtype=17>(h, s) y = DequantizeLinear(q, s)",
        lambda h: to_float8(h / 0.02) * 0.02,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    body, function = CASES[case]
    module = OnnxModule(model(body)).eval()
    (y, gradient), w = gradients(lambda _: module(X)["y"], module.w), W.clone().requires_grad_()
    expected = gradients(lambda w: X @ fake(w) if function is None else function(X @ w), w)
    torch.testing.assert_close(y, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-5, atol=1e-5)


def test_a_quantized_output_and_other_operators_have_integers() -> None:
    body = (
        "q = QuantizeLinear(h, s, z) i = Cast<to=6>(q) j = Constant<value=int32 {2}>() a = Div(i, j) y = Cast<to=1>(a)"
    )
    module = OnnxModule(model(body))
    whole = ((X @ W) / 0.02).round().add(3).clamp(-128, 127).int()
    assert torch.equal(module(X)["y"], torch.div(whole, 2, rounding_mode="trunc").float())
    proto = model("y = QuantizeLinear(h, s, z)")
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT8
    assert torch.equal(OnnxModule(proto)(X)["y"], whole.to(torch.int8))


@pytest.mark.parametrize("kernels", ["pytorch", "onnxruntime"])
def test_a_trainer(kernels: str) -> None:
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False, "kernels": kernels}, "device": {"id": "cpu"}})
    trainer = ORTTrainer(model(CASES["dynamic"][0]), "auto", optim.SGDConfig(lr=0.1), loss_fn="mse", options=options)
    w = W.clone().requires_grad_()
    target = torch.zeros(6, 2)
    loss = torch.nn.functional.mse_loss(of_range(X @ w) @ BACK, target)
    loss.backward()
    assert w.grad is not None
    torch.testing.assert_close(trainer.train_step(x=X, label=target)[0], loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trainer.get_parameter("w"), W - 0.1 * w.grad, rtol=1e-5, atol=1e-5)
    assert np.isfinite(trainer.eval_step(x=X, label=target)[0].item())
