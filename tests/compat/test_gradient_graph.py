"""The gradient graphs of a stock engine: what is refused. calls.py compares gradients with PyTorch's."""

from __future__ import annotations

import onnx
import pytest

from ort_trainer.compat.gradient_graph import GradientGraphBuilder

from .effects import exported

WEIGHTS = {"fc1.weight", "fc1.bias"}


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gradients of \['x'\] were asked for, which are not weights of the model"):
        GradientGraphBuilder(exported(), {"loss"}, {"x", "fc1.bias"}, "loss")
    with pytest.raises(ValueError, match=r"only the loss, 'loss', is differentiated, but \['logits', 'loss'\] were"):
        GradientGraphBuilder(exported(), {"loss", "logits"}, WEIGHTS, "loss")
    builder = GradientGraphBuilder(exported(), {"loss"}, WEIGHTS, "loss")
    with pytest.raises(RuntimeError, match=r"there are no gradients yet: call build\(\) first"):
        builder.get_model()


def test_random_numbers_are_refused() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[N,2] x) => (float loss) <float[2] w = {1.0, 2.0}, '
        "float half = {0.5}, bool yes = {1}> "
        "{ h = Mul(x, w)\n y = Dropout(h, half, yes)\n loss = ReduceMean<keepdims=0>(y) }"
    )
    builder = GradientGraphBuilder(model.SerializeToString(), {"loss"}, {"w"}, "loss")
    with pytest.raises(NotImplementedError, match="the model draws random numbers, .* set the ratio of Dropout to 0"):
        builder.build()
