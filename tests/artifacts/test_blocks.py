"""onnxblocks as loss and optimizer of ``generate_artifacts``: the numbers of PyTorch."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ort_trainer import optim
from ort_trainer.api import CheckpointState, Module
from ort_trainer.artifacts import generate_artifacts
from ort_trainer.artifacts.blocks import optimizer_config, with_loss
from ort_trainer.compat import onnxblock

DIMS = ("n", "time")


def model(*shape: Any) -> onnx.ModelProto:
    """A linear layer of which the exporter has given the sizes of the output names of their own."""
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n,3] x) => (float[out_n,out_k] y) { y = Gemm(x, w, b) }'
    proto = onnx.parser.parse_model(text)
    for name, value in zip("wb", weights(), strict=True):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.numpy(), name))
    return proto


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(12.0).reshape(3, 4).sin(), torch.arange(4.0).cos()


class Own(onnxblock.Block):
    """A user's block, of others."""

    def build(self, prediction: str) -> str:
        squared = onnxblock.loss.MSELoss()(prediction, target_name="first")
        clipped = onnxblock.blocks.Clip(-0.5, 0.5)(onnxblock.blocks.Cast(onnx.TensorProto.FLOAT)(prediction))
        other = onnxblock.loss.L1Loss("sum")(clipped, target_name="first")
        scaled = onnxblock.blocks.Mul()(other, onnxblock.blocks.Constant(0.1)())
        return str(onnxblock.blocks.ReduceSum(keepdims=False)(onnxblock.blocks.Add()(squared, scaled)))


def own(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(prediction, target) + 0.1 * F.l1_loss(prediction.clamp(-0.5, 0.5), target, reduction="sum")


W = np.array([0.5, 1.0, 2.0, 0.25], np.float32)
CLASSES, NUMBERS = torch.tensor([3, 0, 1, 2, 3]), torch.linspace(0, 1, 20).reshape(5, 4)
LOSSES: dict[str, tuple[Any, Any, torch.Tensor]] = {
    "mse": (onnxblock.loss.MSELoss(), F.mse_loss, NUMBERS),
    "l1": (onnxblock.loss.L1Loss("sum"), lambda y, t: F.l1_loss(y, t, reduction="sum"), NUMBERS),
    "cross entropy": (onnxblock.loss.CrossEntropyLoss(), F.cross_entropy, CLASSES),
    "weighted cross entropy": (
        onnxblock.loss.CrossEntropyLoss(weight=W, ignore_index=1),
        lambda y, t: F.cross_entropy(y, t, torch.tensor(W), ignore_index=1),
        CLASSES,
    ),
    "binary": (onnxblock.loss.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits, NUMBERS),
    "weighted binary": (
        onnxblock.loss.BCEWithLogitsLoss(weight=W, pos_weight=2 * W),
        lambda y, t: F.binary_cross_entropy_with_logits(y, t, torch.tensor(W), pos_weight=torch.tensor(2 * W)),
        NUMBERS,
    ),
    "own": (Own(), own, NUMBERS),
}


def test_a_layer_of_a_block_is_trained(tmp_path: Path) -> None:
    class Head(onnxblock.Block):
        def build(self, hidden: str) -> str:
            return str(onnxblock.loss.MSELoss()(onnxblock.blocks.Linear(4, 4)(hidden), "y"))

    generate_artifacts(model(), loss=Head(), artifact_directory=tmp_path)
    names = {*CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters}
    assert {"w", "b"} < names and len(names) == 4


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss(name: str, tmp_path: Path) -> None:
    block, function, label = LOSSES[name]
    proto = model()
    generate_artifacts(proto, loss=block, artifact_directory=tmp_path, additional_output_names=["y"])
    assert len(proto.graph.input) == 1, "the user's model is not changed"
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert [*state.parameters] == ["w", "b"], "constants of a block are not trained"
    module = Module(tmp_path / "training_model.onnx", state)
    x = torch.linspace(-2, 2, 15).reshape(5, 3)
    found, prediction = module(x.numpy(), label.numpy())
    leaves = [value.requires_grad_() for value in weights()]
    expected = function(x @ leaves[0] + leaves[1], label)
    expected.backward()
    np.testing.assert_allclose(prediction, (x @ leaves[0] + leaves[1]).detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5)
    for key, leaf in zip("wb", leaves, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(state.parameters[key].grad, leaf.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_optimizers() -> None:
    clip = onnxblock.optim.ClipGradNorm(0.5)
    adam, limit = optimizer_config(onnxblock.optim.AdamW(False, (0.8, 0.99), 1e-5, 0.25, clip))
    assert limit == 0.5 and isinstance(adam, optim.AdamConfig)
    found = (adam.alpha, adam.beta, adam.epsilon, adam.lambda_coef)
    assert found == pytest.approx((0.8, 0.99, 1e-5, 0.25))
    assert not adam.do_bias_correction and adam.weight_decay_mode == optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
    assert adam.max_norm_clip == math.inf
    sgd, limit = optimizer_config(onnxblock.optim.SGD())
    assert isinstance(sgd, optim.SGDConfig) and limit is None


def test_a_clipping_optimizer_updates(tmp_path: Path) -> None:
    from ort_trainer.api import Optimizer

    block = onnxblock.optim.SGD(onnxblock.optim.ClipGradNorm(0.01))
    generate_artifacts(model(), loss=onnxblock.loss.MSELoss(), optimizer=block, artifact_directory=tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state)
    optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
    before = {name: parameter.data for name, parameter in state.parameters.items()}
    optimizer.set_learning_rate(1.0)
    module(np.ones((5, 3), np.float32), NUMBERS.numpy())
    optimizer.step()
    moved = np.concatenate([(state.parameters[name].data - before[name]).ravel() for name in before])
    assert np.linalg.norm(moved) == pytest.approx(0.01, rel=1e-4)


def test_what_blocks_can_not_be(tmp_path: Path) -> None:
    class Pair(onnxblock.Block):
        def build(self, *names: str) -> Any:
            return names * 2

    with pytest.raises(ValueError, match=r"Pair returned \('y', 'y'\)"):
        with_loss(model(), Pair(), None)
    with pytest.raises(TypeError, match=r"loss is the onnxblock MSELoss.*LossType"):
        generate_artifacts(nn.Linear(2, 2), loss=onnxblock.loss.MSELoss(), artifact_directory=tmp_path)
    with pytest.raises(ValueError, match=r"ClipGradNorm has the operators \[\]|AdamW or SGD"):
        optimizer_config(onnxblock.blocks.PassThrough())
    with pytest.raises(RuntimeError, match="no model to add to"):
        onnxblock.loss.MSELoss()("y")
    with pytest.raises(ValueError, match="reduction must be one of"):
        onnxblock.loss.MSELoss("median")
    with onnxblock.base(model()), pytest.raises(RuntimeError, match="have a model already"), onnxblock.empty_base():
        pass
    with onnxblock.base(model()), pytest.raises(LookupError, match="no input or output 'z'"):
        onnxblock.blocks.InputLike("z")()


def test_every_block_builds_a_valid_model() -> None:
    b = onnxblock.blocks
    with onnxblock.base(model()) as handle:
        hidden = b.Linear(4, 2)("y")
        for block in (b.Sigmoid(), b.Log(), b.Neg(), b.Abs(), b.Pow(2.0), b.ReduceMean(), b.PassThrough()):
            hidden = block(hidden)
        hidden = b.Div()(b.Sub()(hidden, b.Constant(1.0)()), b.Constant(2.0)())
        encoded = b.LabelEncoder(keys_int64s=[1, 2], values_floats=[0.5, 1.5], default_float=0.0)(
            b.Cast(onnx.TensorProto.INT64)(hidden)
        )
        b.SequenceConstruct()(hidden, encoded)
    onnx.checker.check_model(handle.model)


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime.training") is None, reason="blocks of onnxruntime-training")
def test_upstreams_own_blocks(tmp_path: Path) -> None:
    from onnxruntime.training import onnxblock as theirs

    config, limit = optimizer_config(theirs.optim.AdamW(weight_decay=0.5, clip_grad=theirs.optim.ClipGradNorm(2.0)))
    assert (config.lambda_coef, limit) == (0.5, 2.0)
    weighted = theirs.loss.BCEWithLogitsLoss(pos_weight=np.full(4, 2, np.float32))
    generate_artifacts(model(), loss=weighted, artifact_directory=tmp_path)
    assert [*CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters] == ["w", "b"]
    generate_artifacts(model(), loss=theirs.loss.MSELoss(), artifact_directory=tmp_path)
    module = Module(tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "checkpoint"))
    x = torch.linspace(-2, 2, 15).reshape(5, 3)
    w, b = weights()
    assert module(x.numpy(), NUMBERS.numpy()) == pytest.approx(F.mse_loss(x @ w + b, NUMBERS).item(), rel=1e-5)
