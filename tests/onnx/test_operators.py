"""Loss and gradient of what the onnx package's tests lack: other operators, broadcasts, several uses of a value."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F

from ort_trainer.core.errors import ExportError
from ort_trainer.onnx.load import load_onnx_model
from ort_trainer.onnx.module import OnnxModule

Function = Callable[[torch.Tensor], torch.Tensor]
V3 = torch.tensor([1.0, 2.0, 3.0])
V4 = torch.tensor([1.0, 2.0, 3.0, 4.0])
LABELS = torch.tensor([0, 1, 2, 0] * 8).view(2, 4, 4)
LABELS_TEXT = f"int64[2,4,4] {{{','.join(map(str, LABELS.flatten().tolist()))}}}"
KERNEL = torch.arange(1.0, 25.0) / 10
KERNEL_TEXT = ",".join(f"{value:.1f}" for value in KERNEL.tolist())
VECTOR3 = "s = Constant<value_floats=[1.,2.,3.]>()\n "
VECTOR4 = "s = Constant<value_floats=[1.,2.,3.,4.]>()\n "

# y = f(p) in ONNX's text form, and in PyTorch.
CASES: dict[str, tuple[str, Function]] = {
    "LRN": ("y = LRN<size=3,alpha=0.5>(p)", lambda p: F.local_response_norm(p, 3, alpha=0.5)),
    "Erf": ("y = Erf(p)", torch.erf),
    "Slice": (
        "a = Constant<value_ints=[3]>()\n b = Constant<value_ints=[0]>()\n c = Constant<value_ints=[2]>()\n "
        "d = Constant<value_ints=[-2]>()\n y = Slice(p, a, b, c, d)",
        lambda p: p[:, :, [3, 1]],
    ),
    "Mish": ("y = Mish(p)", F.mish),
    "Clip": ("l = Constant<value_float=0.3>()\n y = Clip(p, l)", lambda p: p.clip(0.3)),
    "Gather": ("a = Constant<value_ints=[0,2,0]>()\n y = Gather<axis=1>(p, a)", lambda p: p[:, [0, 2, 0]]),
    "GatherND": (
        "a = Constant<value=int64[2,2] {0,1,1,2}>()\n y = GatherND(p, a)",
        lambda p: torch.stack([p[0, 1], p[1, 2]]),
    ),
    "SimplifiedLayerNormalization": (
        f"{VECTOR4}y = SimplifiedLayerNormalization(p, s)",
        lambda p: F.rms_norm(p, (4,), V4, 1e-5),
    ),
    "com.microsoft.Gelu": ("y = com.microsoft.Gelu(p)", F.gelu),
    "com.microsoft.FastGelu": ("y = com.microsoft.FastGelu(p)", lambda p: F.gelu(p, approximate="tanh")),
    "com.microsoft.QuickGelu": ("y = com.microsoft.QuickGelu(p)", lambda p: p * torch.sigmoid(1.702 * p)),
    "com.microsoft.BiasGelu": (f"{VECTOR4}y = com.microsoft.BiasGelu(p, s)", lambda p: F.gelu(p + V4)),
    "com.microsoft.FakeQuant": (
        "s = Constant<value_float=0.05>()\n z = Constant<value_float=3.0>()\n"
        " y = com.microsoft.FakeQuant<quant_max=15>(p, s, z)",
        lambda p: torch.fake_quantize_per_tensor_affine(p, 0.05, 3, 0, 15),
    ),
    "ArgMax": (
        "q = ArgMax<axis=1>(p)\n f = Cast<to=1>(q)\n y = Mul(p, f)",
        lambda p: p * p.argmax(1, keepdim=True),
    ),
    "BatchNormalization, running statistics": (
        f"{VECTOR3}y = BatchNormalization(p, s, s, s, s)",
        lambda p: F.batch_norm(p, V3, V3, V3, V3),
    ),
    "BatchNormalization, training": (
        f"{VECTOR3}y, a, b = BatchNormalization<training_mode=1>(p, s, s, s, s)",
        lambda p: F.batch_norm(p, None, None, V3, V3, True),
    ),
    "Conv, auto_pad": (
        f'w2 = Constant<value=float[2,3,2,2] {{{KERNEL_TEXT}}}>()\n y = Conv<auto_pad="SAME_UPPER">(p, w2)',
        lambda p: F.conv2d(F.pad(p, (0, 1, 0, 1)), KERNEL.view(2, 3, 2, 2)),
    ),
    "Conv, auto_pad with strides": (
        "w2 = Constant<value=float[1,3,3,1] {1,2,3,4,5,6,7,8,9}>()\n "
        'y = Conv<auto_pad="SAME_LOWER",strides=[2,1]>(p, w2)',
        lambda p: F.conv2d(F.pad(p, (0, 0, 1, 0)), torch.arange(1.0, 10.0).view(1, 3, 3, 1), stride=(2, 1)),
    ),
    "Where of a number": (
        "z = Constant<value_float=0.3>()\n c = Less(p, z)\n m = ReduceMean<keepdims=0>(p)\n y = Where(c, p, m)",
        lambda p: torch.where(p < 0.3, p, p.mean()),
    ),
    "Where of a column": (
        "z = Constant<value_float=0.3>()\n c = Less(p, z)\n a = Constant<value_ints=[1,2,3]>()\n "
        "m = ReduceMean(p, a)\n y = Where(c, m, p)",
        lambda p: torch.where(p < 0.3, p.mean((1, 2, 3), keepdim=True), p),
    ),
    "ScatterElements, add": (
        "a = Constant<value=int64[2,1,2,1] {2,2,0,1}>()\n b = Constant<value_ints=[0,0]>()\n "
        "c = Constant<value_ints=[2,1]>()\n d = Constant<value_ints=[2,3]>()\n e = Constant<value_ints=[0]>()\n "
        "f = Constant<value_ints=[1]>()\n u = Slice(p, b, c, d)\n v = Slice(u, e, f, f)\n "
        'y = ScatterElements<axis=2,reduction="add">(p, a, v)',
        lambda p: p.scatter_add(2, torch.tensor([2, 2, 0, 1]).view(2, 1, 2, 1), p[:, :1, :2, :1]),
    ),
    "ScatterND, add": (
        "a = Constant<value=int64[2,1] {1,1}>()\n k = Constant<value_floats=[2.]>()\n u = Mul(p, k)\n "
        'y = ScatterND<reduction="add">(p, a, u)',
        lambda p: torch.stack([p[0], p[1] + 2 * p.sum(0)]),
    ),
    "Pow, broadcast": (
        "a = Constant<value_ints=[1,2,3]>()\n m = ReduceMean(p, a)\n e = Constant<value_floats=[1.,2.,3.,0.5]>()\n "
        "y = Pow(m, e)",
        lambda p: p.mean((1, 2, 3), keepdim=True) ** torch.tensor([1.0, 2.0, 3.0, 0.5]),
    ),
    "Pow, integer": ("e = Constant<value_int=3>()\n y = Pow(p, e)", lambda p: p**3),
    "LayerNormalization, all outputs": (
        f"{VECTOR4}n, m, i = LayerNormalization(p, s, s)\n nm = Add(n, m)\n y = Mul(nm, i)",
        lambda p: (
            (F.layer_norm(p, (4,), V4, V4) + p.mean(-1, keepdim=True))
            / (p.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        ),
    ),
    "SoftmaxCrossEntropyLoss, both outputs": (
        f"t = Constant<value={LABELS_TEXT}>()\n l, q = SoftmaxCrossEntropyLoss(p, t)\n y = Mul(l, q)",
        lambda p: F.cross_entropy(p, LABELS) * p.log_softmax(1),
    ),
    "MatMul with vectors": (
        f"{VECTOR4}m = MatMul(p, s)\n t = Transpose<perm=[0,2,1]>(m)\n v = Constant<value_floats=[1.,2.,3.]>()\n "
        "y = MatMul(t, v)",
        lambda p: (p @ V4).mT @ V3,
    ),
    "ReduceSum over nothing": ("y = ReduceSum<noop_with_empty_axes=1>(p)", lambda p: p),
    "Split, uneven": (
        "a, b = Split<axis=1,num_outputs=2>(p)\n c = ReduceSum(a)\n y = Mul(b, c)",
        lambda p: p[:, 2:] * p[:, :2].sum(),
    ),
    "Cast to double before the loss": ("d = Cast<to=11>(p)\n e = Mul(d, d)\n y = Cast<to=1>(e)", lambda p: p * p),
    "Ceil": ("q = Ceil(p)\n y = Sub(p, q)", lambda p: p - p.ceil()),
    "ConvTranspose, padding and dilation": (
        f"w2 = Constant<value=float[3,4,2,1] {{{KERNEL_TEXT}}}>()\n "
        "y = ConvTranspose<strides=[2,3],pads=[1,0,1,0],output_padding=[1,2],dilations=[2,1]>(p, w2)",
        lambda p: F.conv_transpose2d(p, KERNEL.view(3, 4, 2, 1), None, (2, 3), (1, 0), (1, 2), 1, (2, 1)),
    ),
    "ConvTranspose, groups": (
        f"w2 = Constant<value=float[3,2,2,2] {{{KERNEL_TEXT}}}>()\n y = ConvTranspose<group=3>(p, w2)",
        lambda p: F.conv_transpose2d(p, KERNEL.view(3, 2, 2, 2), groups=3),
    ),
    "Dropout that drops nothing": ("r = Constant<value_float=0.5>()\n y = Dropout(p, r)", lambda p: p),
    "Einsum, two free indices": (
        'y = Einsum<equation="abij,cbik->acjk">(p, p)',
        lambda p: torch.einsum("abij,cbik->acjk", p, p),
    ),
    "Floor": ("q = Floor(p)\n y = Sub(p, q)", lambda p: p - p.floor()),
    "LayerNormalization, one vector twice": (
        f"{VECTOR4}y = LayerNormalization(p, s, s)",
        lambda p: F.layer_norm(p, (4,), V4, V4),
    ),
    "LayerNormalization without bias": (
        f"{VECTOR4}y = LayerNormalization(p, s)",
        lambda p: F.layer_norm(p, (4,), V4),
    ),
    "LpNormalization, 1": ("y = LpNormalization<axis=1,p=1>(p)", lambda p: F.normalize(p, p=1, dim=1)),
    "Resize, cubic": (
        's = Constant<value_floats=[1.,1.,2.,2.]>()\n y = Resize<mode="cubic",cubic_coeff_a=-0.75>(p, , s)',
        lambda p: F.interpolate(p, scale_factor=2, mode="bicubic"),
    ),
    "Resize, nearest": (
        "s = Constant<value_floats=[1.,1.,2.,2.]>()\n "
        'y = Resize<coordinate_transformation_mode="asymmetric",nearest_mode="floor">(p, , s)',
        lambda p: F.interpolate(p, scale_factor=2),
    ),
    "Round": ("q = Round(p)\n y = Sub(p, q)", lambda p: p - p.round()),
    "Sign": ("q = Sign(p)\n y = Add(p, q)", lambda p: p + p.sign()),
    "Softplus": (
        "h = Constant<value_float=200.>()\n m = Sub(p, x)\n n = Mul(m, h)\n y = Softplus(n)",
        lambda p: F.softplus((p - X) * 200),
    ),
    "Split of which one part is used": ("a, y, b = Split<axis=3,num_outputs=3>(p)", lambda p: p[..., 2:4]),
    "Sum": ("y = Sum(p, x, p)", lambda p: 2 * p + X),
}
X = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)) * 0.8 + 0.1
W = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(2)) * 0.7 + 0.2


def model(body: str, opset: int = 20) -> onnx.ModelProto:
    """Returns a model that computes y from p = x * w; the loss is the sum of y's cubes."""
    found = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
        "g (float[N,3,4,4] x) => (float loss)\n"
        f"{{\n p = Mul(x, w)\n {body}\n y_2 = Mul(y, y)\n y_3 = Mul(y_2, y)\n loss = ReduceSum<keepdims=0>(y_3)\n}}"
    )
    found.graph.initializer.append(onnx.numpy_helper.from_array(W.numpy(), "w"))
    return found


def check(body: str, function: Function, opset: int) -> None:
    module = OnnxModule(model(body, opset))
    weight = W.clone().requires_grad_()
    y = function(X * weight)
    expected = (y * y * y).sum()
    expected.backward()
    loss = module(X)["loss"]
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=5e-5, atol=1e-6)
    found = module.get_parameter("w").grad
    norm = max(weight.grad.norm().item(), 1e-2)
    assert (found - weight.grad).norm().item() <= 2e-4 * norm


@pytest.mark.parametrize("name", CASES)
def test_operators(name: str) -> None:
    check(*CASES[name], opset=21 if name == "GroupNormalization" else 20)


@pytest.mark.parametrize(
    ("opset", "older", "newer"),
    [
        (10, "y = Clip<min=0.3>(p)", "low = Constant<value_float=0.3>()\n y = Clip(p, low)"),
        (9, "y = Slice<starts=[1], ends=[-1], axes=[2]>(p)", "a = Constant<value_ints=[1]>()\n"
         " b = Constant<value_ints=[-1]>()\n c = Constant<value_ints=[2]>()\n y = Slice(p, a, b, c)"),
        (10, "y = Pad<pads=[0,0,1,0,0,0,0,2], value=0.5>(p)",
         "a = Constant<value_ints=[0,0,1,0,0,0,0,2]>()\n v = Constant<value_float=0.5>()\n y = Pad(p, a, v)"),
        (12, "y = ReduceMax<axes=[1]>(p)", "a = Constant<value_ints=[1]>()\n y = ReduceMax(p, a)"),
    ],
)  # fmt: skip
def test_attributes_that_became_inputs(opset: int, older: str, newer: str) -> None:
    losses = [OnnxModule(model(body, version))(X)["loss"] for body, version in ((older, opset), (newer, 20))]
    assert losses[0] == losses[1]


def test_a_missing_attribute_that_became_an_input_is_named() -> None:
    with pytest.raises(ExportError, match=r"TopK of ai.onnx 9: it lacks the attributes \['k'\], which are required"):
        OnnxModule(model("y, z = TopK(p)", opset=9))


def test_clip_without_a_limit_in_half_precision() -> None:
    text = """<ir_version: 8, opset_import: ["": 10]>
    g (float16[3] x) => (float16[3] y) { y = Clip<min=0.0>(x) }"""
    x = torch.tensor([-1.0, 2.0, 60000.0], dtype=torch.float16)
    assert OnnxModule(onnx.parser.parse_model(text))(x)["y"].tolist() == [0.0, 2.0, 60000.0]


def test_settings_are_no_weights() -> None:
    body = "y = Resize(p, , scales)\n k = Clip(y, low)"
    found = model(body)
    for name, value in (("scales", [1.0, 1.0, 2.0, 2.0]), ("low", [0.0]), ("eps", 1e-3), ("free", [1.0])):
        found.graph.initializer.append(onnx.numpy_helper.from_array(torch.tensor(value).numpy(), name))
    assert set(load_onnx_model(found).parameters) == {"w", "free"}
