"""``quantize``, and adapters beside what it returns: against PyTorch with the rounded weights."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx.helper
import pytest
import torch
from torch import nn

from ort_trainer import ORTModule, ORTTrainer, optim, quantize
from ort_trainer.adapters import LoRA, add_adapter, export_adapter
from ort_trainer.adapters.quantize import QuantizedLinear

from .models import LowRank, batch, classifier, exported, tensors
from .test_onnx_models import in_pytorch, run, train_both, trainer_of

LORA = LoRA(4, 8, targets=["q_proj", "out"])


def rounded(kind: str) -> nn.Module:
    """Returns the classifier with float weights that have the values of the quantized ones."""
    model = classifier()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = QuantizedLinear(layer, kind).floats()
    return model


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_onnx_model(kind: str, tmp_path) -> None:
    base = exported(classifier())
    quantized = quantize(base, kind)
    ids = batch(3)[0]
    expected = rounded(kind)(ids).detach()
    np.testing.assert_allclose(run(quantized, ids), expected, rtol=1e-4, atol=1e-5)
    assert len(quantized.SerializeToString()) < {"int8": 0.6, "int4": 0.5}[kind] * len(base.SerializeToString())
    adapted = add_adapter(quantized, LORA)
    trainer = trainer_of(adapted)
    train_both(in_pytorch(rounded(kind), adapted), trainer)
    export_adapter(trainer, tmp_path / "a.onnx_adapter", tmp_path / "base.onnx")
    np.testing.assert_allclose(run((tmp_path / "base.onnx").read_bytes(), ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_pytorch_model(kind: str) -> None:
    """Its adapters train in a trainer and in a module as beside floats of these values."""
    torch.manual_seed(1)
    drawn = {name: (torch.randn(4, 32) / 6, torch.zeros(32, 4)) for name in ("layers.0.q_proj", "layers.1.out")}

    def adapted(model: nn.Module) -> nn.Module:
        model.requires_grad_(False)
        for name, parts in drawn.items():
            model.set_submodule(name, LowRank(model.get_submodule(name), *copy.deepcopy(parts), 2.0))
        return model

    trainer = ORTTrainer(
        adapted(quantize(classifier(), kind)), "auto", optim.AdamWConfig(lr=1e-2), loss_fn="cross_entropy"
    )
    train_both(adapted(rounded(kind)), trainer, steps=6)
    whole = {name: value.dtype for name, value in trainer.state_dict(pytorch_format=True).items()}
    assert whole["layers.0.v_proj.weight"] == torch.int8
    ours, theirs = ORTModule(adapted(quantize(classifier(), kind)), fallback="error"), adapted(rounded(kind))
    ids, label = batch(0)
    for model in (ours, theirs):
        nn.functional.cross_entropy(model(ids), label).backward()
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_peft_adapts_quantized_layers() -> None:
    pytest.importorskip("peft")
    model = add_adapter(quantize(classifier(), "int4", block=32), LORA)
    trainer = ORTTrainer(
        model, "auto", optim.AdamWConfig(lr=1e-2), loss_fn=lambda y, label: y.square().mean() + 0 * label.sum()
    )
    ids, label = batch(0)
    losses = [trainer.train_step(ids=ids, label=label)[0].item() for _ in range(3)]
    assert losses[-1] < losses[0]


def test_blocks_and_rows_that_are_not_whole() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(70, 5)
    for kind, block in (("int8", 32), ("int4", 32), ("int4", 64), ("int4", 128)):
        ours = QuantizedLinear(layer, kind, block)
        assert ours.floats().shape == layer.weight.shape
        step = ours.scale.max().item()
        assert (ours.floats() - layer.weight).abs().max().item() <= 0.5001 * step
        assert repr(ours) == f"QuantizedLinear(in_features=70, out_features=5, bias=True, kind='{kind}')"


def test_weights_that_others_read_stay() -> None:
    """An embedding that is also the last product, and a bias of a Gemm that is scaled."""
    generator = np.random.default_rng(0)
    make, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    values = {
        "words": generator.standard_normal((9, 32)).astype(np.float32),
        "fc.weight": generator.standard_normal((7, 32)).astype(np.float32),
        "fc.bias": generator.standard_normal(7).astype(np.float32),
    }
    nodes = [
        make("Gather", ["words", "ids"], ["x"]),
        make("Gemm", ["x", "fc.weight", "fc.bias"], ["a"], transB=1, beta=2.0),
        make("Transpose", ["words"], ["turned"], perm=[1, 0]),
        make("MatMul", ["x", "turned"], ["b"]),
        make("Concat", ["a", "b"], ["y"], axis=1),
    ]
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = onnx.helper.make_graph(nodes, "g", [info("ids", 7, ["n"])], [info("y", 1, ["n", 16])], initializers)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    ids = torch.tensor([0, 3, 8])
    for kind in ("int8", "int4"):
        ours = quantize(model, kind)
        assert sorted(name for name in tensors(ours) if "." not in name or "bias" in name) == ["fc.bias", "words"]
        layer = nn.Linear(32, 7, bias=False)
        layer.weight.data = torch.from_numpy(values["fc.weight"])
        x = values["words"][ids]
        expected = x @ QuantizedLinear(layer, kind).floats().numpy().T + 2 * values["fc.bias"]
        np.testing.assert_allclose(run(ours, ids)[:, :7], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((classifier, "int2"), r"kind must be one of \['int8', 'int4'\], but 'int2' was given"),
        ((classifier, "int4", 48), r"block must be one of \[32, 64, 128\], but 48 was given"),
        ((lambda: nn.Embedding(3, 4), "int8"), "has no linear layer"),
    ],
)
def test_bad_arguments(arguments, message: str) -> None:
    make, *rest = arguments
    with pytest.raises(ValueError, match=message):
        quantize(make(), *rest)
    with pytest.raises(TypeError, match="an ONNX model, its path, or a torch.nn.Module, but 3 was given"):
        quantize(3, "int8")  # type: ignore[call-overload]


def test_layers_that_are_kept() -> None:
    model = quantize(classifier(), "int8", keep=["head", "layers.0.out"])
    kept = [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
    assert kept == ["layers.0.out", "head"]
    adapted = add_adapter(
        quantize(exported(classifier()), "int8", keep=["head"]), LoRA(4, targets=["out"], also_train=["head.weight"])
    )
    assert "head.weight" in tensors(adapted) and "layers.0.out.weight.int8" in tensors(adapted)
    with pytest.raises(ValueError, match=r"keep names \['haed'\], which match no linear layer. The nearest are"):
        quantize(classifier(), "int8", keep=["haed"])


def test_integers_are_not_trained() -> None:
    model = quantize(classifier(), "int8")
    with pytest.raises(RuntimeError, match="floating point"):
        model.head.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="holds integers, such as quantized weights"):
        add_adapter(quantize(exported(classifier()), "int8"), LoRA(4, also_train=["head.weight.int8"]))


def test_paths_stay_and_checkpoints_know_the_integers(tmp_path) -> None:
    base = exported(classifier(), fold=True)  # whose weights have no names
    quantized = [quantize(model, "int8") for model in (base, exported(torch.nn.Module.double(classifier()).float()))]
    lora = LoRA(4, targets="attention")
    assert all("layers.0.v_proj.lora_A.weight" in tensors(add_adapter(model, lora)) for model in quantized)
    other = classifier()
    other.layers[0].out.weight.data.neg_()
    options = {"utils": {"save_frozen_weights": False}}

    def trainer(model: onnx.ModelProto) -> ORTTrainer:
        return ORTTrainer(model, "auto", optim.AdamWConfig(), loss_fn="cross_entropy", options=options)

    trainer(add_adapter(quantized[1], lora)).save_checkpoint(tmp_path / "a.ortckpt")
    trainer(add_adapter(quantized[1], lora)).load_checkpoint(tmp_path / "a.ortckpt")
    with pytest.raises(ValueError, match="this trainer has others"):
        trainer(add_adapter(quantize(exported(other), "int8"), lora)).load_checkpoint(tmp_path / "a.ortckpt")
    with pytest.raises(ValueError, match="quantize the base, and add the adapter to the result"):
        quantize(add_adapter(base, lora), "int8")
