"""Class labels out of range in an ONNX model, with the loss in the model or in a loss function."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest
import torch

from ort_trainer import ORTTrainer, optim
from tests.helpers import mlp_batches


def model(loss: bool) -> onnx.ModelProto:
    end = "flat = Reshape(label, minus)\n loss = SoftmaxCrossEntropyLoss<ignore_index=-7>(y, flat)" if loss else ""
    inputs = ", int64[N, 1] label" if loss else ""
    found = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\n'
        f"g (float[N, 8] x{inputs}) => (float {'loss' if loss else '[N, 3] y'})\n"
        f"<int64[1] minus = {{-1}}> {{\n y = MatMul(x, w)\n {end}\n}}"
    )
    weight = torch.linspace(-1, 1, 24).reshape(8, 3).numpy()
    found.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return found


@pytest.mark.parametrize("loss", [True, False])
def test_labels_out_of_range(loss: bool) -> None:
    ((x, label),) = mlp_batches(1)
    shape = (-1, 1) if loss else (-1,)
    trainer = ORTTrainer(model(loss), "auto", optim.SGDConfig(lr=0.1), loss_fn=None if loss else "cross_entropy")
    ignored = -7 if loss else -100
    trainer.train_step(x, label.reshape(shape))
    trainer.eval_step(x, label.reshape(shape))
    for value in (3, -1, ignored):
        changed = label.clone()
        changed[3] = value
        if value == ignored:
            trainer.train_step(x, changed.reshape(shape))
            continue
        for step in (trainer.train_step, trainer.eval_step):
            with pytest.raises(IndexError, match=rf"'label' has the value {value} at \[3.*0 to 2, or {ignored}"):
                step(x, changed.reshape(shape))
    assert trainer.train_step_info.step == 2
