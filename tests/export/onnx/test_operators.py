"""Operators in their common forms: loss and gradient match those of the same function in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F

from ort_trainer.export.onnx import OnnxModule, load_onnx_model

Function = Callable[[torch.Tensor], torch.Tensor]
V3 = torch.tensor([1.0, 2.0, 3.0])
V4 = torch.tensor([1.0, 2.0, 3.0, 4.0])
LABELS = torch.tensor([0, 1, 2, 0] * 8).view(2, 4, 4)
LABELS_TEXT = f"int64[2,4,4] {{{','.join(map(str, LABELS.flatten().tolist()))}}}"
KERNEL = torch.arange(1.0, 25.0) / 10
KERNEL_TEXT = ",".join(f"{value:.1f}" for value in KERNEL.tolist())


def reference_shrink(p: torch.Tensor) -> torch.Tensor:
    return torch.where(p > 0.3, p - 0.1, torch.where(p < -0.3, p + 0.1, 0 * p))


def depth_to_space(p: torch.Tensor) -> torch.Tensor:
    apart = p.reshape(2, 4, 3, 4).reshape(2, 2, 2, 1, 3, 4)
    return apart.permute(0, 3, 4, 1, 5, 2).reshape(2, 1, 6, 8) * torch.arange(1.0, 7.0).view(6, 1)


def space_to_depth(p: torch.Tensor) -> torch.Tensor:
    return p.reshape(2, 3, 2, 2, 2, 2).permute(0, 3, 5, 1, 2, 4).reshape(2, 12, 2, 2).softmax(-1)


AXES = "a = Constant<value_ints=[{}]>()\n y = {}(p, a)"
ROWS = (
    "a = Constant<value_ints=[0,4,3,4]>()\n q = Reshape(p, a)\n c = Constant<value=float[1,1,6,1] {1,2,3,4,5,6}>()\n "
)
VECTOR3 = "s = Constant<value_floats=[1.,2.,3.]>()\n "
VECTOR4 = "s = Constant<value_floats=[1.,2.,3.,4.]>()\n "
PADS = "a = Constant<value_ints=[0,0,1,1,0,0,2,1]>()\n "

# y = f(p) in ONNX's text form, and in PyTorch.
CASES: dict[str, tuple[str, Function]] = {
    "Abs": ("m = Neg(p)\n y = Abs(m)", lambda p: (-p).abs()),
    "Add": ("y = Add(p, x)", lambda p: p + X),
    "Cast": ("d = Cast<to=11>(p)\n y = Cast<to=1>(d)", lambda p: p),
    "Clip": ("l = Constant<value_float=0.3>()\n y = Clip(p, l)", lambda p: p.clip(0.3)),
    "Concat": ("y = Concat<axis=1>(p, x, p)", lambda p: torch.cat([p, X, p], 1)),
    "Conv": (
        f"w2 = Constant<value=float[2,3,2,2] {{{KERNEL_TEXT}}}>()\n y = Conv<pads=[1,0,0,1],strides=[2,1]>(p, w2)",
        lambda p: F.conv2d(F.pad(p, (0, 1, 1, 0)), KERNEL.view(2, 3, 2, 2), stride=(2, 1)),
    ),
    "Cos": ("y = Cos(p)", torch.cos),
    "Div": ("y = Div(x, p)", lambda p: X / p),
    "Erf": ("y = Erf(p)", torch.erf),
    "Exp": ("y = Exp(p)", torch.exp),
    "Expand": ("a = Constant<value_ints=[2,1,1,1,1]>()\n y = Expand(p, a)", lambda p: p.expand(2, 2, 3, 4, 4)),
    "Flatten": ("f = Flatten(p)\n y = Softmax(f)", lambda p: p.flatten(1).softmax(-1)),
    "Gather": ("a = Constant<value_ints=[0,2,0]>()\n y = Gather<axis=1>(p, a)", lambda p: p[:, [0, 2, 0]]),
    "GatherElements": (
        "a = Constant<value=int64[1,1,2,1] {0,1}>()\n s = Constant<value_ints=[2,3,2,4]>()\n b = Expand(a, s)\n "
        "y = GatherElements<axis=2>(p, b)",
        lambda p: p[:, :, :2],
    ),
    "GatherND": (
        "a = Constant<value=int64[2,2] {0,1,1,2}>()\n y = GatherND(p, a)",
        lambda p: torch.stack([p[0, 1], p[1, 2]]),
    ),
    "Gelu": ("y = Gelu(p)", F.gelu),
    "Gemm": (
        "f = Flatten<axis=2>(p)\n c = Constant<value_floats=[1.]>()\n y = Gemm<transB=1,alpha=0.5>(f, f, c)",
        lambda p: 0.5 * p.flatten(0, 1).flatten(1) @ p.flatten(0, 1).flatten(1).T + 1,
    ),
    "GlobalAveragePool": ("y = GlobalAveragePool(p)", lambda p: p.mean((2, 3))),
    "Identity": ("y = Identity(p)", lambda p: p),
    "LayerNormalization": (
        f"{VECTOR4}b = Neg(s)\n y = LayerNormalization(p, s, b)",
        lambda p: F.layer_norm(p, (4,), V4, -V4),
    ),
    "LeakyRelu": ("m = Sub(p, x)\n y = LeakyRelu<alpha=0.2>(m)", lambda p: F.leaky_relu(p - X, 0.2)),
    "Log": ("y = Log(p)", torch.log),
    "LogSoftmax": ("y = LogSoftmax<axis=1>(p)", lambda p: p.log_softmax(1)),
    "MatMul": ("t = Transpose<perm=[0,1,3,2]>(p)\n y = MatMul(p, t)", lambda p: p @ p.mT),
    "Max": ("y = Max(p, x)", lambda p: torch.maximum(p, X)),
    "Min": ("y = Min(p, x)", lambda p: torch.minimum(p, X)),
    "Mul": ("y = Mul(p, x)", lambda p: p * X),
    "Neg": ("y = Neg(p)", lambda p: -p),
    "Pad": (f"{PADS}y = Pad(p, a)", lambda p: F.pad(p, (1, 1, 1, 2))),
    "Pow": ("e = Constant<value_float=3.>()\n y = Pow(p, e)", lambda p: p**3),
    "Reciprocal": ("y = Reciprocal(p)", lambda p: 1 / p),
    "ReduceL2": (AXES.format("1,3", "ReduceL2"), lambda p: p.norm(dim=(1, 3))),
    "ReduceLogSumExp": (AXES.format("2", "ReduceLogSumExp"), lambda p: p.logsumexp(2)),
    "ReduceMean": (AXES.format("0,2", "ReduceMean"), lambda p: p.mean((0, 2))),
    "ReduceSum": (AXES.format("1", "ReduceSum"), lambda p: p.sum(1)),
    "Relu": ("m = Sub(p, x)\n y = Relu(m)", lambda p: (p - X).relu()),
    "Reshape": (
        "a = Constant<value_ints=[0,-1]>()\n f = Reshape(p, a)\n y = Softmax(f)",
        lambda p: p.flatten(1).softmax(-1),
    ),
    "ScatterElements": (
        "a = Constant<value=int64[1,1,1,1] {2}>()\n u = Constant<value=float[1,1,1,1] {2}>()\n "
        "y = ScatterElements<axis=2>(p, a, u)",
        lambda p: p.scatter(2, torch.full((1, 1, 1, 1), 2), torch.full((1, 1, 1, 1), 2.0)),
    ),
    "ScatterND": (
        "a = Constant<value=int64[1,1] {1}>()\n b = Constant<value_ints=[0]>()\n u = Gather<axis=0>(x, b)\n "
        "y = ScatterND(p, a, u)",
        lambda p: torch.cat([p[:1], X[:1]]),
    ),
    "Sigmoid": ("y = Sigmoid(p)", torch.sigmoid),
    "SimplifiedLayerNormalization": (
        f"{VECTOR4}y = SimplifiedLayerNormalization(p, s)",
        lambda p: F.rms_norm(p, (4,), V4, 1e-5),
    ),
    "Sin": ("y = Sin(p)", torch.sin),
    "Slice": (
        "a = Constant<value_ints=[3]>()\n b = Constant<value_ints=[0]>()\n c = Constant<value_ints=[2]>()\n "
        "d = Constant<value_ints=[-2]>()\n y = Slice(p, a, b, c, d)",
        lambda p: p[:, :, [3, 1]],
    ),
    "Softmax": ("y = Softmax<axis=1>(p)", lambda p: p.softmax(1)),
    "SoftmaxCrossEntropyLoss": (
        f't = Constant<value={LABELS_TEXT}>()\n y = SoftmaxCrossEntropyLoss<ignore_index=1,reduction="sum">(p, t)',
        lambda p: F.cross_entropy(p, LABELS, ignore_index=1, reduction="sum"),
    ),
    "Split": (
        "y1, y2 = Split<axis=2,num_outputs=2>(p)\n y = Mul(y1, y2)",
        lambda p: p[:, :, :2] * p[:, :, 2:],
    ),
    "Sqrt": ("y = Sqrt(p)", torch.sqrt),
    "Squeeze": (
        "a = Constant<value_ints=[1]>()\n u = Unsqueeze(p, a)\n y = Squeeze(u, a)",
        lambda p: p,
    ),
    "Sub": ("y = Sub(x, p)", lambda p: X - p),
    "Tanh": ("y = Tanh(p)", torch.tanh),
    "Tile": ("a = Constant<value_ints=[1,1,2,2]>()\n y = Tile(p, a)", lambda p: p.tile(1, 1, 2, 2)),
    "TopK": ("k = Constant<value_ints=[2]>()\n y, i = TopK<axis=3>(p, k)", lambda p: p.topk(2).values),
    "Transpose": ("t = Transpose<perm=[0,3,1,2]>(p)\n y = Softmax(t)", lambda p: p.permute(0, 3, 1, 2).softmax(-1)),
    "Trilu": ("y = Trilu<upper=0>(p)", torch.tril),
    "Unsqueeze": (
        "a = Constant<value_ints=[1]>()\n u = Unsqueeze(p, a)\n y = Softmax<axis=2>(u)",
        lambda p: p.softmax(1),
    ),
    "Where": (
        "z = Constant<value_float=0.3>()\n c = Less(p, z)\n q = Mul(p, p)\n y = Where(c, q, p)",
        lambda p: torch.where(p < 0.3, p * p, p),
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
    "Acos": ("y = Acos(p)", torch.acos),
    "Acosh": ("o = Constant<value_float=1.5>()\n q = Add(p, o)\n y = Acosh(q)", lambda p: torch.acosh(p + 1.5)),
    "ArgMax": (
        "q = ArgMax<axis=1>(p)\n f = Cast<to=1>(q)\n y = Mul(p, f)",
        lambda p: p * p.argmax(1, keepdim=True),
    ),
    "Asin": ("y = Asin(p)", torch.asin),
    "Asinh": ("y = Asinh(p)", torch.asinh),
    "Atan": ("y = Atan(p)", torch.atan),
    "Atanh": ("y = Atanh(p)", torch.atanh),
    "AveragePool, padding counts": (
        "y = AveragePool<kernel_shape=[3,3],pads=[1,1,1,1],count_include_pad=1>(p)",
        lambda p: F.avg_pool2d(p, 3, 1, 1),
    ),
    "AveragePool, padding does not count": (
        "y = AveragePool<kernel_shape=[3,3],pads=[1,1,1,1]>(p)",
        lambda p: F.avg_pool2d(p, 3, 1, 1, count_include_pad=False),
    ),
    "AveragePool, ceil_mode": (
        "y = AveragePool<kernel_shape=[3,3],strides=[2,2],ceil_mode=1>(p)",
        lambda p: F.avg_pool2d(p, 3, 2, ceil_mode=True),
    ),
    "BatchNormalization, running statistics": (
        f"{VECTOR3}y = BatchNormalization(p, s, s, s, s)",
        lambda p: F.batch_norm(p, V3, V3, V3, V3),
    ),
    "BatchNormalization, training": (
        f"{VECTOR3}y, a, b = BatchNormalization<training_mode=1>(p, s, s, s, s)",
        lambda p: F.batch_norm(p, None, None, V3, V3, True),
    ),
    "CastLike": ("y = CastLike(p, x)", lambda p: p),
    "Conv, auto_pad": (
        f'w2 = Constant<value=float[2,3,2,2] {{{KERNEL_TEXT}}}>()\n y = Conv<auto_pad="SAME_UPPER">(p, w2)',
        lambda p: F.conv2d(F.pad(p, (0, 1, 0, 1)), KERNEL.view(2, 3, 2, 2)),
    ),
    "Conv, auto_pad with strides": (
        "w2 = Constant<value=float[1,3,3,1] {1,2,3,4,5,6,7,8,9}>()\n "
        'y = Conv<auto_pad="SAME_LOWER",strides=[2,1]>(p, w2)',
        lambda p: F.conv2d(F.pad(p, (0, 0, 1, 0)), torch.arange(1.0, 10.0).view(1, 3, 3, 1), stride=(2, 1)),
    ),
    "AveragePool, auto_pad": (
        'y = AveragePool<kernel_shape=[2,2],auto_pad="SAME_UPPER">(p)',
        lambda p: F.avg_pool2d(F.pad(p, (0, 1, 0, 1)), 2, 1) / F.avg_pool2d(F.pad(p * 0 + 1, (0, 1, 0, 1)), 2, 1),
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
    "Gelu, tanh": ('y = Gelu<approximate="tanh">(p)', lambda p: F.gelu(p, approximate="tanh")),
    "Slice backwards": (
        "a = Constant<value_ints=[-1]>()\n b = Constant<value_ints=[-99]>()\n c = Constant<value_ints=[2]>()\n "
        "d = Constant<value_ints=[-1]>()\n f = Slice(p, a, b, c, d)\n y = Mul(f, x)",
        lambda p: p.flip(2) * X,
    ),
    "MatMul with vectors": (
        f"{VECTOR4}m = MatMul(p, s)\n t = Transpose<perm=[0,2,1]>(m)\n v = Constant<value_floats=[1.,2.,3.]>()\n "
        "y = MatMul(t, v)",
        lambda p: (p @ V4).mT @ V3,
    ),
    "Pad, axes": (
        "a = Constant<value_ints=[1,2]>()\n b = Constant<value_ints=[-1]>()\n y = Pad(p, a, , b)",
        lambda p: F.pad(p, (1, 2)),
    ),
    "ReduceSum over nothing": ("y = ReduceSum<noop_with_empty_axes=1>(p)", lambda p: p),
    "Split, uneven": (
        "a, b = Split<axis=1,num_outputs=2>(p)\n c = ReduceSum(a)\n y = Mul(b, c)",
        lambda p: p[:, 2:] * p[:, :2].sum(),
    ),
    "Cast to double before the loss": ("d = Cast<to=11>(p)\n e = Mul(d, d)\n y = Cast<to=1>(e)", lambda p: p * p),
    "Ceil": ("q = Ceil(p)\n y = Sub(p, q)", lambda p: p - p.ceil()),
    "Celu": ("m = Sub(p, x)\n y = Celu<alpha=2.>(m)", lambda p: F.celu(p - X, 2.0)),
    "ConvTranspose": (
        f"w2 = Constant<value=float[3,2,2,2] {{{KERNEL_TEXT}}}>()\n y = ConvTranspose<strides=[2,2]>(p, w2)",
        lambda p: F.conv_transpose2d(p, KERNEL.view(3, 2, 2, 2), stride=2),
    ),
    "ConvTranspose, padding and dilation": (
        f"w2 = Constant<value=float[3,4,2,1] {{{KERNEL_TEXT}}}>()\n "
        "y = ConvTranspose<strides=[2,3],pads=[1,0,1,0],output_padding=[1,2],dilations=[2,1]>(p, w2)",
        lambda p: F.conv_transpose2d(p, KERNEL.view(3, 4, 2, 1), None, (2, 3), (1, 0), (1, 2), 1, (2, 1)),
    ),
    "ConvTranspose, groups": (
        f"w2 = Constant<value=float[3,2,2,2] {{{KERNEL_TEXT}}}>()\n y = ConvTranspose<group=3>(p, w2)",
        lambda p: F.conv_transpose2d(p, KERNEL.view(3, 2, 2, 2), groups=3),
    ),
    "Cosh": ("y = Cosh(p)", torch.cosh),
    "CumSum": ("a = Constant<value_int=2>()\n y = CumSum(p, a)", lambda p: p.cumsum(2)),
    "CumSum, reverse and exclusive": (
        "a = Constant<value_int=2>()\n y = CumSum<reverse=1,exclusive=1>(p, a)",
        lambda p: p.flip(2).cumsum(2).flip(2) - p,
    ),
    "DepthToSpace": (f"{ROWS}d = DepthToSpace<blocksize=2>(q)\n y = Mul(d, c)", depth_to_space),
    "DepthToSpace, CRD": (
        f'{ROWS}d = DepthToSpace<blocksize=2,mode="CRD">(q)\n y = Mul(d, c)',
        lambda p: F.pixel_shuffle(p.reshape(2, 4, 3, 4), 2) * torch.arange(1.0, 7.0).view(6, 1),
    ),
    "Dropout that drops nothing": ("r = Constant<value_float=0.5>()\n y = Dropout(p, r)", lambda p: p),
    "Einsum, product of matrices": (
        'y = Einsum<equation="abij,abkj->abik">(p, p)',
        lambda p: torch.einsum("abij,abkj->abik", p, p),
    ),
    "Einsum, inner product": (
        'y = Einsum<equation="abij,abij->ab">(p, x)',
        lambda p: torch.einsum("abij,abij->ab", p, X),
    ),
    "Einsum, one operand": ('y = Einsum<equation="abij->ja">(p)', lambda p: p.sum((1, 2)).T),
    "Einsum, two free indices": (
        'y = Einsum<equation="abij,cbik->acjk">(p, p)',
        lambda p: torch.einsum("abij,cbik->acjk", p, p),
    ),
    "Elu": ("m = Sub(p, x)\n y = Elu<alpha=1.5>(m)", lambda p: F.elu(p - X, 1.5)),
    "Floor": ("q = Floor(p)\n y = Sub(p, q)", lambda p: p - p.floor()),
    "GlobalMaxPool": ("y = GlobalMaxPool(p)", lambda p: p.amax((2, 3))),
    "GroupNormalization": (
        "s = Constant<value_floats=[1.,1.,1.]>()\n y = GroupNormalization<num_groups=1>(p, s, s)",
        lambda p: F.group_norm(p, 1) + 1,
    ),
    "HardSigmoid": ("y = HardSigmoid(p)", lambda p: (0.2 * p + 0.5).clip(0, 1)),
    "HardSwish": ("y = HardSwish(p)", F.hardswish),
    "InstanceNormalization": (
        f"{VECTOR3}y = InstanceNormalization(p, s, s)",
        lambda p: F.instance_norm(p, weight=V3, bias=V3),
    ),
    "LayerNormalization, one vector twice": (
        f"{VECTOR4}y = LayerNormalization(p, s, s)",
        lambda p: F.layer_norm(p, (4,), V4, V4),
    ),
    "LayerNormalization without bias": (
        f"{VECTOR4}y = LayerNormalization(p, s)",
        lambda p: F.layer_norm(p, (4,), V4),
    ),
    "LRN": ("y = LRN<size=3,alpha=0.5>(p)", lambda p: F.local_response_norm(p, 3, alpha=0.5)),
    "LpNormalization, 1": ("y = LpNormalization<axis=1,p=1>(p)", lambda p: F.normalize(p, p=1, dim=1)),
    "LpNormalization, 2": ("y = LpNormalization<axis=1>(p)", lambda p: F.normalize(p, dim=1)),
    "MaxPool": ("y = MaxPool<kernel_shape=[2,2]>(p)", lambda p: F.max_pool2d(p, 2, 1)),
    "MaxPool, dilation": (
        "y = MaxPool<kernel_shape=[2,2],dilations=[2,2]>(p)",
        lambda p: F.max_pool2d(p, 2, 1, 0, 2),
    ),
    "MaxPool, ceil_mode": (
        "y = MaxPool<kernel_shape=[3,3],strides=[2,2],pads=[1,0,1,0],ceil_mode=1>(p)",
        lambda p: F.max_pool2d(p, 3, 2, (1, 0), ceil_mode=True),
    ),
    "Mean": ("y = Mean(p, x)", lambda p: (p + X) / 2),
    "MeanVarianceNormalization": (
        "y = MeanVarianceNormalization(p)",
        lambda p: (p - p.mean((0, 2, 3), keepdim=True)) / p.std((0, 2, 3), keepdim=True, unbiased=False),
    ),
    "Mish": ("y = Mish(p)", F.mish),
    "NegativeLogLikelihoodLoss": (
        f"t = Constant<value={LABELS_TEXT}>()\n q = LogSoftmax<axis=1>(p)\n "
        "y = NegativeLogLikelihoodLoss<ignore_index=1>(q, t)",
        lambda p: F.cross_entropy(p, LABELS, ignore_index=1),
    ),
    "PRelu": ("s = Constant<value_float=0.2>()\n m = Sub(p, x)\n y = PRelu(m, s)", lambda p: F.leaky_relu(p - X, 0.2)),
    "Pad, edge": (f'{PADS}y = Pad<mode="edge">(p, a)', lambda p: F.pad(p, (1, 1, 1, 2), mode="replicate")),
    "Pad, reflect": (f'{PADS}y = Pad<mode="reflect">(p, a)', lambda p: F.pad(p, (1, 1, 1, 2), mode="reflect")),
    "ReduceL1": (AXES.format("1", "ReduceL1"), lambda p: p.abs().sum(1)),
    "ReduceLogSum": (AXES.format("1", "ReduceLogSum"), lambda p: p.sum(1).log()),
    "ReduceMax": (AXES.format("2,3", "ReduceMax"), lambda p: p.amax((2, 3), keepdim=True)),
    "ReduceMax of all": ("y = ReduceMax(p)", lambda p: p.amax()),
    "ReduceMin": ("a = Constant<value_ints=[1]>()\n y = ReduceMin<keepdims=0>(p, a)", lambda p: p.amin(1)),
    "ReduceSumSquare": (AXES.format("1", "ReduceSumSquare"), lambda p: (p * p).sum(1)),
    "Resize, cubic": (
        's = Constant<value_floats=[1.,1.,2.,2.]>()\n y = Resize<mode="cubic",cubic_coeff_a=-0.75>(p, , s)',
        lambda p: F.interpolate(p, scale_factor=2, mode="bicubic"),
    ),
    "Resize, linear": (
        's = Constant<value_floats=[1.,1.,2.,1.5]>()\n y = Resize<mode="linear">(p, , s)',
        lambda p: F.interpolate(p, scale_factor=(2, 1.5), mode="bilinear"),
    ),
    "Resize, linear between corners": (
        "s = Constant<value=int64[4] {2,3,7,5}>()\n "
        'y = Resize<mode="linear",coordinate_transformation_mode="align_corners">(p, , , s)',
        lambda p: F.interpolate(p, size=(7, 5), mode="bilinear", align_corners=True),
    ),
    "Resize, nearest": (
        "s = Constant<value_floats=[1.,1.,2.,2.]>()\n "
        'y = Resize<coordinate_transformation_mode="asymmetric",nearest_mode="floor">(p, , s)',
        lambda p: F.interpolate(p, scale_factor=2),
    ),
    "Round": ("q = Round(p)\n y = Sub(p, q)", lambda p: p - p.round()),
    "Selu": ("m = Sub(p, x)\n y = Selu(m)", lambda p: F.selu(p - X)),
    "Shrink": ("y = Shrink<lambd=0.3,bias=0.1>(p)", reference_shrink),
    "Sign": ("q = Sign(p)\n y = Add(p, q)", lambda p: p + p.sign()),
    "Sinh": ("y = Sinh(p)", torch.sinh),
    "Softplus": (
        "h = Constant<value_float=200.>()\n m = Sub(p, x)\n n = Mul(m, h)\n y = Softplus(n)",
        lambda p: F.softplus((p - X) * 200),
    ),
    "Softsign": ("y = Softsign(p)", F.softsign),
    "SpaceToDepth": ("d = SpaceToDepth<blocksize=2>(p)\n y = Softmax(d)", space_to_depth),
    "Split of which one part is used": ("a, y, b = Split<axis=3,num_outputs=3>(p)", lambda p: p[..., 2:4]),
    "Sum": ("y = Sum(p, x, p)", lambda p: 2 * p + X),
    "Tan": ("y = Tan(p)", torch.tan),
    "ThresholdedRelu": ("y = ThresholdedRelu<alpha=0.3>(p)", lambda p: F.threshold(p, 0.3, 0)),
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


def test_settings_are_no_weights() -> None:
    body = "y = Resize(p, , scales)\n k = Clip(y, low)"
    found = model(body)
    for name, value in (("scales", [1.0, 1.0, 2.0, 2.0]), ("low", [0.0]), ("eps", 1e-3), ("free", [1.0])):
        found.graph.initializer.append(onnx.numpy_helper.from_array(torch.tensor(value).numpy(), name))
    assert set(load_onnx_model(found).parameters) == {"w", "free"}
