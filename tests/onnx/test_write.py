"""What comes out is the model that came in, with other weights."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from onnx.external_data_helper import convert_model_to_external_data

from ort_trainer import ORTTrainer, optim
from ort_trainer.engine import ort as engine
from ort_trainer.step.onnx_file import WEIGHTS

pytestmark = pytest.mark.engine

TEXT = """<ir_version: 8, opset_import: ["" : 17, "my" : 1], producer_name: "someone", doc_string: "a model",
    metadata_props: ["licence": "MIT"]>
    g (float[N,3] x, int64[N] label) => (float loss, float[N,4] scores, float[N,3] h)
    <float[3,4] w = {1, 2, 3, 4, -1, -2, -3, -4, 0.5, 0.1, 0.2, 0.3}, float low = {-9}, float[3] scale = {1, 2, 3},
     float[3] bias = {0, 0.1, 0.2}, float[3] mean = {0.1, 0.2, 0.3}, float[3] var = {1, 2, 3}, float ratio = {0.5},
     bool yes = {1}>
    {
      n, m, v = BatchNormalization<training_mode=1>(x, scale, bias, mean, var)
      d = my.dropped(n, ratio, yes)
      c = Clip(d, low)
      h = Identity(c)
      scores = MatMul(h, w)
      loss = SoftmaxCrossEntropyLoss(scores, label)
    }
    <domain: "my", opset_import: ["" : 17]>
    dropped (x, ratio, yes) => (y) { y = Dropout(x, ratio, yes) }"""


def model() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(TEXT)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))
    proto.graph.node[0].name, proto.graph.node[0].doc_string = "the norm", "of the batch"
    return proto


def trained(source: onnx.ModelProto | Path) -> ORTTrainer:
    trainer = ORTTrainer(source, "auto", optim.SGDConfig(lr=0.1))
    draw = torch.Generator().manual_seed(0)
    for size in (5, 6):
        trainer.train_step(torch.randn(size, 3, generator=draw), torch.randint(0, 4, (size,), generator=draw))
    return trainer


def test_only_the_weights_are_others(tmp_path: Path) -> None:
    given = ir.to_proto(ir.from_proto(model()))  # without empty fields
    trainer = trained(given)
    trainer.save_as_onnx(tmp_path / "m.onnx")
    found = onnx.load(tmp_path / "m.onnx")
    entries = {entry.key: entry.value for entry in found.metadata_props}
    said = json.loads(entries.pop(WEIGHTS))
    assert entries == {"licence": "MIT"}
    assert said == {"trained": ["w", "scale", "bias"], "frozen": [], "buffers": ["mean", "var"]}
    state = trainer.state_dict(pytorch_format=True)
    for tensor in found.graph.initializer:
        if tensor.name in state:
            value = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
            assert torch.equal(value, state[tensor.name])
    changed = {"w", "scale", "bias", "mean", "var"}
    for proto in (given, found):
        for tensor in proto.graph.initializer:
            if tensor.name in changed:
                tensor.ClearField("raw_data")
        del proto.metadata_props[:]
        del proto.graph.value_info[:]
    assert found == given
    again = ORTTrainer(tmp_path / "m.onnx", "auto", optim.SGDConfig(lr=0.1))
    for name, value in again.state_dict(pytorch_format=True).items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize("names", [["scores", "h"], ["h"]])
def test_the_inference_form_computes_what_eval_step_computes(names: list[str], tmp_path: Path) -> None:
    trainer = trained(model())
    trainer.export_for_inference(tmp_path / "m.onnx", names)
    found = onnx.load(tmp_path / "m.onnx")
    assert [value.name for value in found.graph.input] == ["x"]
    assert [value.name for value in found.graph.output] == names
    x, label = torch.randn(7, 3), torch.zeros(7, dtype=torch.int64)
    expected = dict(zip(["loss", "scores", "h"], trainer.eval_step(x, label), strict=True))
    for name, value in zip(
        names, engine.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x.numpy()}), strict=True
    ):
        torch.testing.assert_close(torch.from_numpy(value), expected[name], rtol=1e-5, atol=1e-6)


def test_a_file_with_external_data(tmp_path: Path) -> None:
    given = model()
    convert_model_to_external_data(given, location="weights.bin", size_threshold=0)
    onnx.save(given, tmp_path / "m.onnx")
    trainer = trained(tmp_path / "m.onnx")
    (tmp_path / "weights.bin").unlink()
    trainer.save_as_onnx(tmp_path / "new.onnx")
    state = trainer.state_dict(pytorch_format=True)
    for tensor in onnx.load(tmp_path / "new.onnx").graph.initializer:
        if tensor.name in state:
            assert torch.equal(torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()), state[tensor.name])


def test_a_file_whose_initializers_are_inputs(tmp_path: Path) -> None:
    """Up to IR version 3 they had to be, so the written file has a newer version."""
    given = onnx.parser.parse_model(
        '<ir_version: 3, opset_import: ["" : 9]> g (float[N,3] x, float[3,2] w) => (float[N,2] y) { y = MatMul(x, w) }'
    )
    given.graph.initializer.append(onnx.numpy_helper.from_array(torch.ones(3, 2).numpy(), "w"))
    trainer = ORTTrainer(given, "auto", optim.SGDConfig(lr=0.1), loss_fn="mse")
    x = torch.randn(4, 3)
    trainer.train_step(x=x, label=torch.zeros(4, 2))
    trainer.save_as_onnx(tmp_path / "m.onnx")
    assert [value.name for value in onnx.load(tmp_path / "m.onnx").graph.input] == ["x"]
    (found,) = engine.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), x @ trainer.get_parameter("w"))


def test_a_running_statistic_that_is_an_output(tmp_path: Path) -> None:
    given = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,3] x) => (float loss, float[N,3] h, float[3] m)
        <float[3] scale = {1, 2, 3}, float[3] bias = {0, 1, 2}, float[3] mean = {0, 0, 1}, float[3] var = {1, 2, 3}>
        { h, m, v = BatchNormalization<training_mode=1>(x, scale, bias, mean, var)
          loss = ReduceMean<keepdims=0>(h) }"""
    )
    trainer = ORTTrainer(given, "auto", optim.SGDConfig(lr=0.1))
    x = torch.randn(4, 3)
    trainer.train_step(x)
    for names in (["h"], ["m", "h"]):
        trainer.export_for_inference(tmp_path / "m.onnx", names)
        found = engine.InferenceSession(tmp_path / "m.onnx").run(names, {"x": x.numpy()})
        expected = {"h": trainer.eval_step(x)[1], "m": trainer.state_dict(pytorch_format=True)["mean"]}
        for name, value in zip(names, found, strict=True):
            torch.testing.assert_close(torch.from_numpy(value), expected[name], rtol=1e-5, atol=1e-6)
