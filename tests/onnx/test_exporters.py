"""ONNX models of other exporters than torch.onnx train: of scikit-learn, of Keras, and of ONNX Runtime's optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from ort_trainer import ExportError, ORTTrainer, ORTTrainerOptions, optim

from .round_trips import CASES, batches_of, exported, model_of, trained

pytestmark = pytest.mark.engine

DATA = Path(__file__).parent / "data"
OPTIONS: dict[str, Any] = {"utils": {"grad_norm_clip": False}}


def likelihood(probabilities: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(probabilities.log(), label)


def test_a_classifier_of_scikit_learn_trains_like_pytorch() -> None:
    """One of its outputs needs an operator that only evaluates, and is left out."""
    path, options = DATA / "skl_classifier.onnx", ORTTrainerOptions(OPTIONS)
    trainer = ORTTrainer(path, "auto", optim.SGDConfig(lr=0.1), loss_fn=likelihood, options=options)
    weights = {
        tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()).requires_grad_()
        for tensor in onnx.load(path).graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    }
    for size in (6, 5):
        x, y = torch.rand(size, 64), torch.randint(0, 10, (size,))
        hidden = torch.relu(x @ weights["coefficient"] + weights["intercepts"])
        expected = F.cross_entropy(hidden @ weights["coefficient1"] + weights["intercepts1"], y)
        torch.testing.assert_close(trainer.train_step(X=x, y=y)[0], expected.detach(), rtol=1e-4, atol=1e-6)
        expected.backward()
        with torch.no_grad():
            for weight in weights.values():
                weight -= 0.1 * weight.grad
                weight.grad = None
    for name, weight in weights.items():
        torch.testing.assert_close(trainer.get_parameter(name), weight.detach(), rtol=1e-4, atol=1e-6)
    description = {"inputs": [("X", ["n", 64]), ("y", ["n"])], "outputs": [("loss", [], True), ("label", ["n"])]}
    with pytest.raises(ExportError, match="'label' in model_desc can't be computed: .*operator ArrayFeatureExtractor"):
        ORTTrainer(path, description, optim.SGDConfig(), loss_fn=likelihood)


@pytest.mark.parametrize(("name", "shape"), [("keras_cnn", (8, 8, 1)), ("keras_rnn", (8, 8))])
def test_models_of_keras_have_the_gradient_that_onnx_runtime_measures(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    options = ORTTrainerOptions(OPTIONS)
    path, rate = DATA / f"{name}.onnx", 1e-3
    trainer = ORTTrainer(path, "auto", optim.SGDConfig(lr=rate), loss_fn="cross_entropy", options=options)
    x, label = torch.rand(5, *shape, generator=torch.Generator().manual_seed(0)), torch.arange(5)

    def loss_of(proto: onnx.ModelProto) -> float:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        return F.cross_entropy(torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), label).item()

    before = onnx.load(path)
    assert trainer.train_step(x=x, label=label)[0].item() == pytest.approx(loss_of(before), rel=1e-5)
    trainer.save_as_onnx(tmp_path / "after.onnx")
    after = onnx.load(tmp_path / "after.onnx")
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in before.graph.initializer}
    steps = {t.name: onnx.numpy_helper.to_array(t) - values[t.name] for t in after.graph.initializer}
    gradients = {name: step / -rate for name, step in steps.items() if values[name].dtype == np.float32 and step.any()}
    assert len(gradients) >= 4
    squares = sum(float((gradient.astype(np.float64) ** 2).sum()) for gradient in gradients.values())
    far = 0.02 / squares**0.5
    losses = []
    for sign in (1, -1):
        moved = onnx.ModelProto.FromString(before.SerializeToString())
        for tensor in moved.graph.initializer:
            if tensor.name in gradients:
                value = values[tensor.name] + np.float32(sign * far) * gradients[tensor.name]
                tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
        losses.append(loss_of(moved))
    assert (losses[0] - losses[1]) / (2 * far) == pytest.approx(squares, rel=2e-2)
    assert trainer.train_step(x=x[:3], label=label[:3])[0].isfinite()
    assert len(trainer.session.graphs(True)) == 1


@pytest.mark.parametrize("name", ["BERT, classification", "Llama"])
def test_what_onnx_runtime_has_optimized(name: str, tmp_path: Path) -> None:
    """Its extended level writes operators of com.microsoft, and folds transposed weights."""
    case = CASES[name]
    model, batches = model_of(case, "older", 17), batches_of(case)
    exported(case, model, batches[0], "older", 17, tmp_path / "m.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(tmp_path / "m.onnx", options, providers=["CPUExecutionProvider"])
    assert any(node.domain == "com.microsoft" for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    found = trained(case, model, batches, tmp_path / "optimized.onnx", "older")
    assert found.loss <= 1 and found.weights <= 1 and found.exports == 1, found
