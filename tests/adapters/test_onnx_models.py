"""Adapters of ONNX models, against the same adapters in plain PyTorch, peft and ONNX Runtime's LoraAdapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from ort_trainer import CheckpointError, ORTTrainer, optim
from ort_trainer.adapters import LoRA, add_adapter, export_adapter, load_adapter, merge_adapter, save_adapter
from ort_trainer.core.sealed import DTYPES, read_header, read_tensors, write
from ort_trainer.onnx.load import FOLDED_FROM

from .models import LowRank, batch, classifier, exported, quantized, round_weights, tensors

LORA = LoRA(rank=4, alpha=8, targets=["q_proj", "v_proj"])
HEAD = ("head.weight", "head.bias")


def in_pytorch(model: nn.Module, adapted: onnx.ModelProto, lora: LoRA = LORA) -> nn.Module:
    """Returns a model with the adapters of an adapted ONNX model, of which only these are trained."""
    stored = tensors(adapted)
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if f"{name}.lora_A.weight" in stored:
            a, b = (stored[f"{name}.lora_{part}.weight"] for part in "AB")
            model.set_submodule(name, LowRank(layer, a, b, lora.scale))
    for name in lora.also_train:
        model.get_parameter(name).requires_grad_(True)
    return model


def train_both(model: nn.Module, trainer: ORTTrainer, steps: int = 20) -> None:
    """Trains in PyTorch and here, and compares losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        ids, label = batch(step)
        loss = nn.functional.cross_entropy(model(ids), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert trainer.train_step(ids, label)[0].item() == pytest.approx(loss.item(), rel=1e-4)


def trainer_of(model: onnx.ModelProto) -> ORTTrainer:
    return ORTTrainer(model, "auto", optim.AdamWConfig(lr=1e-2), loss_fn="cross_entropy")


def run(model: onnx.ModelProto | bytes, ids: torch.Tensor, options: object = None) -> np.ndarray:
    data = model if isinstance(model, bytes) else model.SerializeToString()
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, settings, providers=["CPUExecutionProvider"])
    return session.run(None, {"ids": ids.numpy()}, options)[0]


@pytest.mark.engine
@pytest.mark.parametrize("fold", [False, True], ids=["weights", "constants"])
def test_an_adapter_trains_merges_and_is_exported(tmp_path, fold: bool) -> None:
    """PyTorch, the merged model, and the base with the exported adapter compute the same; the base what it did."""
    base = exported(classifier(), fold)
    lora = LoRA(4, 8, targets=LORA.targets, also_train=() if fold else HEAD)
    adapted = add_adapter(base, lora)
    reference = in_pytorch(classifier(), adapted, lora)
    trainer = trainer_of(adapted)
    train_both(reference, trainer)
    assert len(trainer.loop.source.trainable) == 8 + len(lora.also_train)
    ids = batch(30)[0]
    expected = reference(ids).detach().numpy()
    np.testing.assert_allclose(trainer.predict(ids).numpy(), expected, rtol=1e-4, atol=1e-5)
    merged = merge_adapter(trainer)
    np.testing.assert_allclose(run(merged, ids), expected, rtol=1e-4, atol=1e-5)
    assert len(merged.graph.node) == len(base.graph.node)
    export_adapter(trainer, tmp_path / "a.onnx_adapter", tmp_path / "base.onnx")
    exported_base = (tmp_path / "base.onnx").read_bytes()
    stored = tensors(onnx.load_from_string(exported_base))
    # Not 0: a product over no elements is not zero in every ONNX Runtime.
    assert {min(value.shape) for name, value in stored.items() if "lora" in name} == {1}
    if not lora.also_train:
        np.testing.assert_allclose(run(exported_base, ids), run(base, ids), rtol=1e-5, atol=1e-6)
    if hasattr(onnxruntime, "LoraAdapter"):  # onnxruntime 1.20 and newer
        adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
        adapter.Load(str(tmp_path / "a.onnx_adapter"))
        options.add_active_adapter(adapter)
        np.testing.assert_allclose(run(exported_base, ids, options), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["MatMulNBits", "DequantizeLinear"])
def test_a_base_that_others_have_quantized(kind: str) -> None:
    names = [f"layers.{at}.{part}.weight" for at in range(2) for part in ("q_proj", "v_proj", "out")]
    model = classifier()
    round_weights(model, names)
    adapted = add_adapter(quantized(exported(classifier()), names, kind), LoRA(4, 8, targets=["q_proj", "out"]))
    trainer = trainer_of(adapted)
    train_both(in_pytorch(model, adapted), trainer)
    with pytest.raises(ValueError, match=r"'layers.0.q_proj' is quantized, .* use export_adapter"):
        merge_adapter(trainer)


def test_the_adapter_alone_is_stored_and_loaded(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    base = exported(classifier())
    trainer = trainer_of(add_adapter(base, LoRA(4, 8, targets=LORA.targets, also_train=HEAD)))
    for step in range(3):
        trainer.train_step(*batch(step))
    save_adapter(trainer, tmp_path / "adapter")
    ids, label = batch(30)
    expected = trainer.predict(ids)
    again = trainer_of(load_adapter(base, tmp_path / "adapter"))
    again.prepare((ids, label))
    torch.testing.assert_close(again.predict(ids), expected, rtol=0, atol=0)
    in_peft = peft.PeftModel.from_pretrained(classifier(), str(tmp_path / "adapter"))
    torch.testing.assert_close(in_peft(ids), expected)
    in_peft.save_pretrained(str(tmp_path / "of_peft"))
    of_peft = trainer_of(load_adapter(base, tmp_path / "of_peft"))
    of_peft.prepare((ids, label))
    torch.testing.assert_close(of_peft.predict(ids), expected)


def test_a_pytorch_model_gets_an_adapter_of_peft(tmp_path) -> None:
    pytest.importorskip("peft")
    model = add_adapter(classifier(), LoRA(4, 8, targets="attention", also_train=HEAD))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 10 and model.peft_config["default"].r == 4
    trainer = ORTTrainer(
        model, "auto", optim.AdamWConfig(lr=1e-2), loss_fn=lambda y, label: nn.functional.cross_entropy(y, label)
    )
    for step in range(2):
        ids, label = batch(step)
        trainer.train_step(ids=ids, label=label)
    with pytest.raises(ValueError, match="is of PyTorch: save its adapter with its own save_pretrained"):
        save_adapter(trainer, tmp_path / "adapter")
    export_adapter(trainer, tmp_path / "a.onnx_adapter", tmp_path / "base.onnx")
    ids = batch(1)[0]
    if hasattr(onnxruntime, "LoraAdapter"):
        adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
        adapter.Load(str(tmp_path / "a.onnx_adapter"))
        options.add_active_adapter(adapter)
        given = run((tmp_path / "base.onnx").read_bytes(), ids, options)
        np.testing.assert_allclose(given, trainer.predict(ids=ids).numpy(), rtol=1e-4, atol=1e-5)


def test_dropout_acts_in_training_alone() -> None:
    adapted = add_adapter(exported(classifier()), LoRA(4, 8, dropout=0.5, targets=["q_proj"]))
    for value in adapted.graph.initializer:
        if value.name.endswith("lora_B.weight"):
            value.CopyFrom(onnx.numpy_helper.from_array(np.ones(value.dims, np.float32), value.name))
    trainer = trainer_of(adapted)
    ids, label = batch(0)
    losses = {trainer.forward(ids, label)[0].item() for _ in range(3)}
    assert len(losses) == 3
    assert len({trainer.eval_step(ids, label)[0].item() for _ in range(2)}) == 1
    assert all(node.op_type != "Dropout" for node in merge_adapter(trainer).graph.node)


def test_layers_that_share_a_weight_share_the_adapter() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, ids):
            return self.layer(self.layer(nn.functional.one_hot(ids, 6).float())).mean(1)

    torch.manual_seed(0)
    model = Twice()
    import io

    file = io.BytesIO()
    sample = torch.randint(0, 6, (3, 4))
    torch.onnx.export(model, (sample,), file, input_names=["ids"], output_names=["y"], dynamo=False)
    lora = LoRA(2, targets="linear")
    adapted = add_adapter(onnx.load_from_string(file.getvalue()), lora)
    assert [name for name in tensors(adapted) if "lora" in name] == ["layer.lora_A.weight", "layer.lora_B.weight"]
    trainer = ORTTrainer(adapted, "auto", optim.AdamWConfig(lr=1e-2), loss_fn="cross_entropy")
    reference = in_pytorch(model, adapted, lora)
    optimizer = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2)
    label = torch.tensor([0, 3, 5])
    for _ in range(5):
        loss = nn.functional.cross_entropy(reference(sample), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert trainer.train_step(sample, label)[0].item() == pytest.approx(loss.item(), rel=1e-4)
    np.testing.assert_allclose(run(merge_adapter(trainer), sample), reference(sample).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["q_porj"]}, r"targets names \['q_porj'\], which match no linear layer. The nearest are .*q_proj"),
        ({"targets": r"encoder\..*"}, "match no linear layer"),
        ({"targets": "("}, "is no regular expression"),
        ({"targets": []}, "must not be empty"),
        ({"rank": 64}, "rank 64 is beyond the size of 'layers.0.q_proj', a layer from 32 to 32 features: use at most"),
        ({"rank": 64, "targets": "linear"}, "rank 64 is beyond the size of 'layers.0.v_proj', .* use at most 32"),
        (
            {"rank": 8, "targets": ["head", "out"]},
            r"use at most 5, or leave out what is smaller with exclude=\['head'\]",
        ),
        ({"exclude": ["q_porj"]}, r"exclude names \['q_porj'\], which match no linear layer. The nearest are .*q_proj"),
        ({"exclude": r"layers\..*"}, r"exclude='layers.*' leaves none of the layers \['layers.0.q_proj', 'layers.1"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"dropout": 1.0}, "dropout must be at least 0 and less than 1"),
        ({"alpha": float("nan")}, "alpha must be finite"),
        ({"also_train": ["head.wieght"]}, r"no such weight: the nearest are .*head.weight"),
        ({"also_train": ["layers.0.out.weight_codes"]}, "holds integers, such as quantized weights"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    base = quantized(exported(classifier()), ["layers.0.out.weight"], "DequantizeLinear")
    with pytest.raises(ValueError, match=message):
        add_adapter(base, LoRA(**{"rank": 4, "targets": ["q_proj"], **settings}))


def test_what_is_no_adapter_is_refused(tmp_path) -> None:
    base = exported(classifier())
    with pytest.raises(ValueError, match="has no adapter"):
        merge_adapter(base)
    with pytest.raises(ValueError, match="all are an adapter's"):
        export_adapter(base, tmp_path / "a.onnx_adapter")
    with pytest.raises(ValueError, match="already"):
        add_adapter(add_adapter(base, LORA), LORA)
    with pytest.raises(TypeError, match="takes a LoRA"):
        add_adapter(base, {"rank": 4})  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="an ONNX model, its path, or a torch.nn.Module, but 3 was given"):
        add_adapter(3, LORA)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="an ONNX model or its path, but 3 was given"):
        load_adapter(3, tmp_path)  # type: ignore[arg-type]
    for function in (merge_adapter, save_adapter):
        with pytest.raises(TypeError, match="a trainer, an ONNX model or its path, but the class dict was given"):
            function(dict, *([tmp_path] if function is save_adapter else []))  # type: ignore[operator]
    assert not list(tmp_path.iterdir())


def test_an_adapter_of_another_base_is_refused(tmp_path) -> None:
    base = exported(classifier())
    save_adapter(add_adapter(base, LORA), tmp_path / "adapter")
    other = classifier()
    other.layers[1].q_proj.weight.data[0, 0] += 1e-3
    with pytest.raises(ValueError, match="another base: it adapts 'layers.1.q_proj', and .* no linear layer with this"):
        load_adapter(exported(other), tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    for change, message in [
        ('"use_dora": true,', "sets use_dora to True"),
        ('"init_lora_weights": "pissa_niter_4",', "which may change the base"),
        ('"use_rslora": true, "r": 1' + "0" * 400 + ",", "is damaged, or not of peft: int too large"),
        ('"r": true,', "is damaged, or not of peft: rank must be an int"),
        ('"lora_dropout": "x",', "is damaged, or not of peft: dropout must be a number"),
        ('"task_type": ' + "[" * 100_000 + ",", "is damaged, or not of peft: RecursionError"),
    ]:
        text = config.read_text()
        names = [name for name in json.loads(text) if f'"{name}"' not in change]
        kept = {name: json.loads(text)[name] for name in names}
        config.write_text("{" + change + json.dumps(kept)[1:])
        with pytest.raises(CheckpointError, match=message):
            load_adapter(base, tmp_path / "adapter")
        config.write_text(text)
    config.write_text("{}")
    with pytest.raises(ValueError, match="is damaged, or not of peft"):
        load_adapter(base, tmp_path / "adapter")


def of_nodes(nodes: list, values: dict[str, np.ndarray], inputs: str = "x", width: int = 8) -> onnx.ModelProto:
    """Returns a model of float inputs [n, 8], or of integers [n], with one output y [n, width]."""
    info = onnx.helper.make_tensor_value_info
    kind, shape = (7, ["n"]) if inputs == "ids" else (1, ["n", 8])
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = onnx.helper.make_graph(nodes, "g", [info(inputs, kind, shape)], [info("y", 1, ["n", width])], initializers)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def with_ones(adapted: onnx.ModelProto) -> onnx.ModelProto:
    """Fills B, so that the adapter changes the output."""
    for value in adapted.graph.initializer:
        if value.name.endswith("lora_B.weight"):
            value.CopyFrom(onnx.numpy_helper.from_array(np.full(value.dims, 0.1, np.float32), value.name))
    return adapted


def run_of(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feed)[0]


def test_merging_with_factors_and_weights_that_others_read() -> None:
    generator = np.random.default_rng(0)
    make = onnx.helper.make_node
    w = generator.standard_normal((8, 8)).astype(np.float32)
    scaled = of_nodes([make("Gemm", ["x", "fc.weight"], ["y"], transB=1, alpha=0.5)], {"fc.weight": w})
    tied = of_nodes(
        [
            make("Gather", ["words", "ids"], ["a"]),
            make("Transpose", ["words"], ["t"], perm=[1, 0]),
            make("MatMul", ["a", "t"], ["y"]),
        ],
        {"words": w},
        "ids",
    )
    for model, feed in ((scaled, {"x": w[:3]}), (tied, {"ids": np.array([0, 5, 7])})):
        adapted = with_ones(add_adapter(model, LoRA(2, targets="linear")))
        assert not np.allclose(run_of(adapted, feed), run_of(model, feed), atol=1e-2)
        merged = run_of(merge_adapter(adapted), feed)
        np.testing.assert_allclose(merged, run_of(adapted, feed), rtol=1e-4, atol=1e-4)


def test_paths_are_unique_and_of_the_layer() -> None:
    """Also where names that are made unique meet others, and where a merged bias has another layer's name."""
    make = onnx.helper.make_node
    values = {name: np.eye(8, dtype=np.float32) * at for at, name in enumerate(("w1", "w2", "w3"), 1)}
    names = ("/fc/MatMul", "/fc_1/MatMul", "/fc/MatMul_1")
    nodes = [
        make("MatMul", [f"h{at}" if at else "x", f"w{at + 1}"], [f"h{at + 1}"], name) for at, name in enumerate(names)
    ]
    nodes.append(make("Add", ["h3", "norm.bias"], ["s"]))
    nodes.append(make("Add", ["s", "norm.bias"], ["y"]))
    model = of_nodes(nodes, {**values, "norm.bias": np.zeros(8, np.float32)})
    adapted = add_adapter(model, LoRA(2, targets="linear"))
    found = [name.rpartition(".lora")[0] for name in tensors(adapted) if name.endswith("lora_A.weight")]
    assert len({*found}) == 3 and {"fc", "fc_1"} < {*found} and not any("norm" in name for name in found)


def test_a_path_that_is_the_end_of_another(tmp_path) -> None:
    make = onnx.helper.make_node
    values = {name: np.eye(8, dtype=np.float32) for name in ("head.weight", "dec.head.weight")}
    model = of_nodes(
        [make("MatMul", ["x", "head.weight"], ["h"]), make("MatMul", ["h", "dec.head.weight"], ["y"])], values
    )
    adapted = add_adapter(model, LoRA(2, targets="head"))
    save_adapter(adapted, tmp_path / "adapter")
    again = load_adapter(model, tmp_path / "adapter")
    assert [name for name in tensors(again) if "lora" in name] == ["head.lora_A.weight", "head.lora_B.weight"]
    export_adapter(adapted, tmp_path / "a.onnx_adapter")
    with pytest.raises(ValueError, match="give two paths"):
        export_adapter(adapted, tmp_path / "a", tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        export_adapter(adapted, tmp_path / "nowhere" / "a", tmp_path / "base.onnx")
    assert not (tmp_path / "base.onnx").exists()
    with pytest.raises(ValueError, match=r"\['linear'\], which match no linear layer. The model has no linear layer"):
        add_adapter(of_nodes([make("Relu", ["x"], ["y"])], {}), LoRA(2, targets="linear"))


def adapted_paths(model: onnx.ModelProto) -> list[str]:
    return [name.removesuffix(".lora_A.weight") for name in tensors(model) if name.endswith(".lora_A.weight")]


@pytest.mark.parametrize("in_pytorch", [False, True], ids=["onnx", "peft"])
def test_layers_that_are_excluded_or_smaller_than_the_rank(in_pytorch: bool) -> None:
    def adapted(lora: LoRA) -> list[str]:
        if not in_pytorch:
            return sorted(adapted_paths(add_adapter(base, lora)))
        names = [name for name, _ in add_adapter(classifier(), lora).named_parameters() if ".lora_A." in name]
        return sorted(name.removeprefix("base_model.model.").partition(".lora_A.")[0] for name in names)

    if in_pytorch:
        pytest.importorskip("peft")
    base = exported(classifier())
    layers = [f"layers.{at}.{part}" for at in range(2) for part in ("out", "q_proj", "v_proj")]
    with pytest.warns(
        UserWarning, match=r"no adapter is added to \['head'\], which have fewer features than the rank 8"
    ):
        assert adapted(LoRA(8, targets="linear")) == layers
    assert adapted(LoRA(8, targets="linear", exclude=["head", "layers.1.out"])) == [
        x for x in layers if x != "layers.1.out"
    ]
    assert adapted(LoRA(4, targets="linear", exclude="attention")) == ["head", "layers.0.out", "layers.1.out"]
    assert adapted(LoRA(8, targets=["q_proj", "out"], exclude=r"layers\.0\..*")) == ["layers.1.out", "layers.1.q_proj"]
    with pytest.raises(
        ValueError, match="rank 8 is beyond the size of 'head', a layer from 32 to 5 features: use at most"
    ):
        adapted(LoRA(8, targets=["head"]))


def optimized(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Returns a model as ONNX Runtime's optimizer writes it."""
    settings = onnxruntime.SessionOptions()
    settings.optimized_model_filepath = str(path)
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    settings.log_severity_level = 3
    onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return onnx.load(path)


def without_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model whose nodes and weights have no names that say anything."""
    names = {value.name: f"val_{at}" for at, value in enumerate(model.graph.initializer)}
    anonymous = onnx.ModelProto()
    anonymous.CopyFrom(model)
    del anonymous.graph.value_info[:]
    for value in anonymous.graph.initializer:
        value.name = names[value.name]
    for node in anonymous.graph.node:
        node.name = ""
        node.input[:] = [names.get(name, name) for name in node.input]
    return anonymous


def test_an_adapter_fits_other_exports_of_its_base(tmp_path) -> None:
    """Whatever the names, and whether the weights are stored transposed."""
    whole, folded = exported(classifier()), exported(classifier(), fold=True)
    exports = [
        whole,
        folded,
        optimized(folded, tmp_path / "optimized.onnx"),
        without_names(whole),
        without_names(folded),
    ]
    ids = batch(3)[0]
    for at, first in enumerate(exports):
        adapted = with_ones(add_adapter(first, LoRA(4, targets="linear")))
        expected = run(adapted, ids)
        save_adapter(adapted, tmp_path / str(at))
        for second in exports:
            loaded = load_adapter(second, tmp_path / str(at))
            np.testing.assert_allclose(run(loaded, ids), expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(run(merge_adapter(loaded), ids), expected, rtol=1e-4, atol=1e-4)
    assert not np.allclose(run(whole, ids), expected, atol=1e-2)
    save_adapter(add_adapter(whole, LoRA(4, also_train=HEAD)), tmp_path / "head")
    load_adapter(folded, tmp_path / "head")
    with pytest.raises(
        ValueError, match=r"also has the weights \['head.bias', 'head.weight'\], which the model has not"
    ):
        load_adapter(without_names(whole), tmp_path / "head")
    weights = tmp_path / "head" / "adapter_model.safetensors"
    with weights.open("rb") as file:
        header = read_header(file, "head")
        stored = {
            name: (DTYPES[header.tensors[name].dtype], header.tensors[name].shape, data)
            for name, data in read_tensors(file, header, "head", header.tensors).items()
        }
    with weights.open("w+b") as file:
        write(file, stored, {"format": "pt", "ort_trainer.matrices": "[1]"})
    with pytest.raises(CheckpointError, match=r"damaged: its ort_trainer.matrices are '\[1\]'"):
        load_adapter(whole, tmp_path / "head")


def test_layers_with_equal_matrices_are_told_by_name_or_not_at_all(tmp_path) -> None:
    make = onnx.helper.make_node
    values = {f"layer{at}.weight": np.eye(8, dtype=np.float32) for at in range(2)}
    model = of_nodes(
        [make("MatMul", ["x", "layer0.weight"], ["h"]), make("MatMul", ["h", "layer1.weight"], ["y"])], values
    )
    save_adapter(add_adapter(model, LoRA(2, targets=["layer1"])), tmp_path / "adapter")
    assert adapted_paths(load_adapter(model, tmp_path / "adapter")) == ["layer1"]
    with pytest.raises(ValueError, match=r"'layer1', which can't be told .* equal: \['val_0', 'val_1'\] in the model"):
        load_adapter(without_names(model), tmp_path / "adapter")


def test_an_adapter_of_an_earlier_version(tmp_path) -> None:
    """It had a digest of all weights by name, and layers without a path were called as their weights."""
    w = (np.arange(64).reshape(8, 8) / 64).astype(np.float32)
    model = of_nodes([onnx.helper.make_node("MatMul", ["x", "val_2"], ["y"], "node_linear")], {"val_2": w})
    record = onnx.helper.make_tensor_value_info("val_2", 1, [8, 8])
    record.metadata_props.add(key=FOLDED_FROM, value="['fc.weight']")
    model.graph.value_info.append(record)
    save_adapter(add_adapter(model, LoRA(2, targets=["fc"])), tmp_path / "new")
    tensors_of = {"A": np.ones((2, 8), np.float32), "B": np.ones((8, 2), np.float32)}
    (tmp_path / "old").mkdir()
    shutil.copy(tmp_path / "new" / "adapter_config.json", tmp_path / "old")
    with (tmp_path / "old" / "adapter_model.safetensors").open("w+b") as file:
        stored = {
            f"base_model.model.val_2.lora_{part}.weight": ("float32", array.shape, array.reshape(-1).view(np.uint8))
            for part, array in tensors_of.items()
        }
        write(file, stored, {"format": "pt", "ort_trainer.base": "cba27c858e64cd8b12e83412f2a2b281"})
    assert adapted_paths(load_adapter(model, tmp_path / "old")) == ["fc"]
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(w.T, "val_2"))
    with pytest.raises(ValueError, match="an earlier version of ort_trainer has saved it, .* and save it again"):
        load_adapter(model, tmp_path / "old")


@pytest.mark.parametrize("suffix", ["_quantized", "_DQ_Q4"])
def test_paths_of_weights_that_onnxruntime_has_quantized(suffix: str) -> None:
    """Its quantizers rename a weight and make new nodes, and leave what the exporter recorded at the old name."""
    make = onnx.helper.make_node
    w = np.arange(64, dtype=np.int8).reshape(8, 8)
    values = {f"val_{at}{suffix}": w + at for at in range(2)} | {"scale": np.float32(0.01), "v_proj.weight": w / 64}
    nodes = [make("DequantizeLinear", [f"val_{at}{suffix}", "scale"], [f"w{at}"]) for at in range(2)]
    # A weight that the quantizer has not folded: rounded in each run.
    nodes += [
        make("QuantizeLinear", ["v_proj.weight", "scale"], ["q2"]),
        make("DequantizeLinear", ["q2", "scale"], ["w2"]),
    ]
    nodes += [
        make("MatMul", [f"h{at}" if at else "x", f"w{at}"], ["y" if at == 2 else f"h{at + 1}"], f"node_linear_{at}_Q4")
        for at in range(3)
    ]
    model = of_nodes(
        nodes,
        {name: np.asarray(value, np.int8 if value.dtype == np.int8 else np.float32) for name, value in values.items()},
    )
    for name, origin in (("val_0", "['q_proj.weight']"), ("val_1", "__import__('os')")):
        record = onnx.helper.make_tensor_value_info(name, 1, [8, 8])
        record.metadata_props.add(key=FOLDED_FROM, value=origin)
        model.graph.value_info.append(record)
    adapted = add_adapter(model, LoRA(2))
    assert adapted_paths(adapted) == ["q_proj", "v_proj"]
    with pytest.raises(ValueError, match="'v_proj' is quantized"):
        merge_adapter(add_adapter(model, LoRA(2, targets=["v_proj"])))
    # A layer whose path nothing says can be named by its node or its weight.
    for target in (r"node_linear_1_.*", [f"val_1{suffix}"]):
        assert adapted_paths(add_adapter(model, LoRA(2, targets=target))) == ["val_1"]
    with pytest.raises(ValueError, match=r"match no linear layer. The model has \['q_proj', 'val_1', 'v_proj'\]"):
        add_adapter(model, LoRA(2, targets=["nothing of these"]))


def test_products_of_integers_are_named() -> None:
    make = onnx.helper.make_node
    nodes = [
        make("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        make("MatMulInteger", ["q", "fc.weight_quantized", "zero"], ["i"]),
        make("Cast", ["i"], ["f"], to=1),
        make("Mul", ["f", "scale"], ["y"]),
    ]
    model = of_nodes(nodes, {"fc.weight_quantized": np.eye(8, dtype=np.int8)})
    message = (
        "no linear layer .* can't get an adapter, .*: 1 MatMulInteger. Add the adapter before .*ort_trainer.quantize"
    )
    for targets in ("linear", ["fc"]):
        with pytest.raises(ValueError, match=message):
            add_adapter(model, LoRA(2, targets=targets))


@pytest.mark.parametrize("text", ["[" * 5000, "-" * 200_000 + "1", "5", "{1}", "__import__('os').system('touch evil')"])
def test_a_hint_for_names_may_be_anything(text: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.onnx's list of scopes only names layers; whatever it says, nothing is evaluated."""
    monkeypatch.chdir(tmp_path)
    model = exported(classifier(), fold=True)
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=text)
    assert add_adapter(model, LoRA(2, targets="linear")).graph.node
    assert not any(tmp_path.iterdir())
