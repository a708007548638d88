"""Artifacts of onnxruntime-training train in ``ort_trainer.api``, with the numbers of its own runtime."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ort_trainer.api import CheckpointState, Module, Optimizer, TrainingSession
from ort_trainer.artifacts import convert_artifacts
from ort_trainer.artifacts.files import model_bytes
from ort_trainer.artifacts.from_upstream import converted_optimizer, converted_step
from ort_trainer.cli import main
from ort_trainer.upstream import read_upstream_checkpoint

from .artifacts import LOSSES, MODELS, batch, train

FOLDER = Path(__file__).parent.parent / "golden" / "data" / "artifacts-upstream"


def opened(folder: Path, checkpoint: str = "checkpoint") -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint(folder / checkpoint)
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, Optimizer(folder / "optimizer_model.onnx", module)


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER / "mlp", tmp_path / "mlp"))


@pytest.mark.parametrize("kind", MODELS)
def test_losses_weights_and_moments_are_upstreams(kind: str, tmp_path: Path) -> None:
    """All state goes round: the file that upstream's runtime wrote after its steps is the file written here."""
    state, module, optimizer = opened(FOLDER / kind)
    losses = train(module, optimizer, kind)
    assert losses == pytest.approx(json.loads((FOLDER / kind / LOSSES).read_text()), rel=1e-5)
    with pytest.warns(UserWarning, match="gradients since the last reset") if not state._state.reset else _quiet():
        CheckpointState.save_checkpoint(state, tmp_path / "trained", include_optimizer_state=True)
    found, expected = (read_upstream_checkpoint(path) for path in (tmp_path / "trained", FOLDER / kind / "trained"))
    assert found.parameters.keys() == expected.parameters.keys()
    for name, parameter in expected.parameters.items():
        assert found.parameters[name].requires_grad == parameter.requires_grad
        np.testing.assert_allclose(found.parameters[name].data, parameter.data, rtol=1e-4, atol=1e-5)
    assert found.groups["group0"].step == expected.groups["group0"].step
    for name, moments in expected.groups["group0"].moments.items():
        for slot, value in moments.items():
            np.testing.assert_allclose(found.groups["group0"].moments[name][slot], value, rtol=1e-4, atol=1e-6)


class _quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_evaluation_and_a_model_for_inference(tmp_path: Path) -> None:
    state, module, _ = opened(FOLDER / "transformer", "trained")
    inputs, labels = batch("transformer", 5)
    trained = float(np.asarray(module(inputs, labels)).reshape(()))
    assert float(np.asarray(module.eval()(inputs, labels)).reshape(())) == pytest.approx(trained, rel=1e-5)
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["y"])
    proto = onnx.load(tmp_path / "model.onnx")
    assert [value.name for value in proto.graph.input] == ["x"]
    assert {node.domain for node in proto.graph.node} == {""}
    assert state.parameters["last.weight"].shape == (3, 8)


def test_further_outputs_have_the_sizes_of_the_batch(mlp: Path) -> None:
    """As generate_artifacts adds them with additional_output_names."""
    for name in ("training", "eval"):
        proto = onnx.load(mlp / f"{name}_model.onnx")
        loss = next(node for node in proto.graph.node if node.op_type == "SoftmaxCrossEntropyLoss")
        axis = proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param
        logits = onnx.helper.make_tensor_value_info(loss.input[0], onnx.TensorProto.FLOAT, [axis, 4])
        proto.graph.output.insert(1, logits)
        onnx.save(proto, mlp / f"{name}_model.onnx")
    _, module, _ = opened(mlp)
    inputs, labels = batch("mlp", 0)
    for count in (len(labels), 3):
        loss_value, scores = module(inputs[:count], labels[:count])
        assert scores.shape == (count, 4)
        chosen = scores[np.arange(count), labels[:count]]
        assert loss_value == pytest.approx((np.log(np.exp(scores).sum(1)) - chosen).mean(), rel=1e-4)


def test_the_learning_rate_and_updates_continue() -> None:
    state, _, optimizer = opened(FOLDER / "transformer", "trained")
    assert state._state.optimization_step == 5
    assert optimizer.get_learning_rate() == pytest.approx(0.001)


def test_a_training_session_and_bytes(mlp: Path) -> None:
    state = CheckpointState.load_checkpoint_from_buffer((mlp / "checkpoint").read_bytes())
    models = [(mlp / f"{name}_model.onnx").read_bytes() for name in ("training", "eval", "optimizer")]
    session = TrainingSession(state, *models)
    assert session.input_names(True) == ["x", "labels"]
    before = CheckpointState.save_checkpoint_to_buffer(state)
    session.train_step(list(batch("mlp", 0)))
    session.optimizer_step()
    session.lazy_reset_grad()
    after = CheckpointState.load_checkpoint_from_buffer(CheckpointState.save_checkpoint_to_buffer(state))
    assert not np.array_equal(
        after.parameters["0.weight"].data,
        CheckpointState.load_checkpoint_from_buffer(before).parameters["0.weight"].data,
    )


def test_a_label_out_of_range_is_an_error(mlp: Path) -> None:
    _, module, _ = opened(mlp)
    inputs, labels = batch("mlp", 0)
    with pytest.raises(IndexError, match=r"labels.*4"):
        module(inputs, labels + 4)


def test_a_nominal_checkpoint_takes_its_shapes_from_the_model(mlp: Path) -> None:
    from ort_trainer.upstream import write_upstream_checkpoint

    full = read_upstream_checkpoint(mlp / "checkpoint")
    full.nominal = True
    write_upstream_checkpoint(mlp / "nominal", full)
    state, module, _ = opened(mlp, "nominal")
    inputs = batch("mlp", 0)
    with pytest.raises(RuntimeError, match="nominal"):
        module(*inputs)
    given, other, _ = opened(mlp)
    module.copy_buffer_to_parameters(other.get_contiguous_parameters(), trainable_only=False)
    assert module(*inputs) == pytest.approx(other(*inputs), rel=1e-6)
    assert {name: p.shape for name, p in state.parameters.items()} == {n: p.shape for n, p in given.parameters.items()}


@pytest.mark.parametrize("kind", MODELS)
def test_converted_artifacts_train_without_onnx(kind: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER / kind, tmp_path / "theirs"))
    shutil.copy(folder / "trained", folder / "checkpoint")
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    assert main(["verify", str(tmp_path / "ours")]) == 0
    theirs, ours = opened(folder), opened(tmp_path / "ours")
    assert train(*ours[1:], kind) == pytest.approx(train(*theirs[1:], kind), rel=1e-6)
    assert list(ours[0].parameters) == list(theirs[0]._state.parameters)
    assert not ours[0]._state.is_upstream


def test_what_is_not_converted(mlp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(mlp), str(mlp.parent / "target"), "--to", "weights"]) == 1
    assert "is a folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match="the same folder"):
        convert_artifacts(mlp, mlp)
    with pytest.raises(TypeError, match="target must be the path"):
        convert_artifacts(mlp, 3)
    (mlp / "training_model.onnx").unlink()
    with pytest.raises(FileNotFoundError, match="there is no model .*training_model.onnx"):
        convert_artifacts(mlp, mlp.parent / "target")
    assert not (mlp.parent / "target").exists()
    convert_artifacts(FOLDER / "transformer", mlp.parent / "target", include_optimizer_state=False)


def test_clipping_and_both_modes_of_adam(mlp: Path) -> None:
    """The update of ``torch.optim.AdamW`` on gradients clipped by their norm, and that of Transformers' old AdamW."""
    import torch

    proto = onnx.load(mlp / "optimizer_model.onnx")
    for mode in (0, 1):
        _as_adam(proto, mlp, adam_mode=mode, weight_decay=0.1, max_norm=0.05)
        state, module, optimizer = opened(mlp)
        optimizer.set_learning_rate(0.1)
        weights = {name: torch.tensor(parameter.data) for name, parameter in state.parameters.items()}
        moments = {name: (torch.zeros_like(weight), torch.zeros_like(weight)) for name, weight in weights.items()}
        for number in range(1, 4):
            module(*batch("mlp", number))
            gradients = {name: torch.tensor(state.parameters[name].grad) for name in weights}
            norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
            assert norm > 0.05
            for name, weight in weights.items():
                first, second = moments[name]
                gradient = gradients[name] * (0.05 / (norm + 1e-6))
                first.mul_(0.9).add_(gradient, alpha=0.1)
                second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                root = second.sqrt() / (1 - 0.999**number) ** 0.5
                if mode == 0:
                    weight.mul_(1 - 0.1 * 0.1).sub_(0.1 / (1 - 0.9**number) * first / (root + 1e-8))
                else:
                    step = 0.1 * (1 - 0.999**number) ** 0.5 / (1 - 0.9**number)
                    weight.sub_(step * first / (second.sqrt() + 1e-8))
                    weight.mul_(1 - 0.1 * 0.1)
            optimizer.step()
            module.lazy_reset_grad()
        for name, weight in weights.items():
            np.testing.assert_allclose(state.parameters[name].data, weight.numpy(), rtol=2e-5, atol=1e-6)


def _as_adam(proto: onnx.ModelProto, folder: Path, max_norm: float, **attributes: Any) -> None:
    """Writes an optimizer model as upstream's generator does with ``AdamW(clip_grad=ClipGradNorm(max_norm))``."""
    make, domain = onnx.helper.make_node, "com.microsoft"
    graph = onnx.helper.make_graph(
        [
            make("InplaceClipGradNorm", ["gradients"], ["clipped"], domain=domain, max_norm=max_norm),
            make(
                "AdamWOptimizer",
                ["learning_rate", "step", "params", "clipped", "first_order_moments", "second_order_moments"],
                ["updated"],
                domain=domain,
                alpha=0.9,
                beta=0.999,
                epsilon=1e-8,
                **attributes,
            ),
        ],
        "optimizer",
        proto.graph.input,
        proto.graph.output,
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=proto.opset_import), folder / "optimizer_model.onnx")


def _model(nodes: list[Any], inputs: dict[str, list[Any]], outputs: list[str], initializers: Any = ()) -> bytes:
    make, float32 = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    integers = {"labels": onnx.TensorProto.INT64, "lazy_reset_grad": onnx.TensorProto.BOOL}
    given = [make(name, integers.get(name, float32), shape) for name, shape in inputs.items()]
    graph = onnx.helper.make_graph(nodes, "g", given, [make(name, float32, None) for name in outputs], [*initializers])
    for value in graph.output:
        value.ClearField("type")
    imports = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports).SerializeToString()


def test_a_parameter_without_dimensions_is_updated() -> None:
    from ort_trainer.engine.ort import InferenceSession

    node = onnx.helper.make_node("SGDOptimizerV2", ["learning_rate", "params", "gradients"], ["updated"],
                                 domain="com.microsoft")  # fmt: skip
    data = _model([node], {"learning_rate": [1], "params": [], "gradients": []}, ["updated"])
    model, said = converted_optimizer(data, "m", {"s": np.array(0, np.float32)})
    given = {"learning_rate": np.array([0.5]), "s": np.array(2.0), "s_grad": np.array(3.0)}
    session = InferenceSession(model_bytes(model, said))
    (new,) = session.run(None, {name: value.astype(np.float32) for name, value in given.items()})
    assert new.shape == () and new == 0.5


def test_a_batch_norm_that_is_used_twice_updates_its_statistics_twice() -> None:
    from ort_trainer.engine.ort import InferenceSession

    make, domain = onnx.helper.make_node, "com.microsoft"
    norms = [
        make("BatchNormInternal", [x, "scale", "bias", "mean", "var"], [y, *(f"{y}_{part}" for part in "abcd")],
             domain=domain, momentum=0.5)
        for x, y in (("x", "y"), ("y", "z"))
    ]  # fmt: skip
    gradient = make("ReduceMean", ["z"], ["loss"], keepdims=0)
    names = ["scale", "scale_grad.accumulation.buffer", "lazy_reset_grad"]
    accumulate = [
        make("Identity", ["scale"], ["scale_grad"]),
        make("InPlaceAccumulatorV2", [names[1], "scale_grad", names[2]], ["flag"], domain=domain),
    ]
    inputs: dict[str, list[Any]] = {"x": [4, 2], **{key: [2] for key in ("scale", "bias", "mean", "var", names[1])}}
    data = _model([*norms, gradient, *accumulate], {**inputs, names[2]: [1]}, ["loss", "flag"])
    parameters = dict.fromkeys(["scale", "bias", "mean", "var"], np.ones(2, np.float32))
    model, said = converted_step(data, "m", "training", parameters)
    assert said.buffer_updates.keys() == {"mean", "var"}
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    given = {name: np.ones(2, np.float32) for name in inputs if name != "x"}
    session = InferenceSession(model_bytes(model, said))
    (mean,) = session.run([said.buffer_updates["mean"]], {**given, "x": x, names[2]: np.array([True])})
    # The mean of x, then that of what the norm returned, which is the bias.
    np.testing.assert_allclose(mean, 0.5 * (0.5 * 1 + 0.5 * x.mean(0)) + 0.5 * 1, rtol=1e-5)


@pytest.mark.parametrize("place", ["initializer", "attribute", "list of tensors", "function", "graph in a function"])
@pytest.mark.parametrize("model", ["training_model.onnx", "optimizer_model.onnx"])
def test_models_name_no_other_files(mlp: Path, model: str, place: str) -> None:
    proto = onnx.load(mlp / model)
    tensor = onnx.TensorProto(name="learning_rate", data_type=onnx.TensorProto.FLOAT, dims=[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="secret")
    if place == "initializer":
        proto.graph.initializer.append(tensor)
    elif place == "attribute":
        proto.graph.node[0].attribute.append(onnx.helper.make_attribute("secret", tensor))
    elif place == "list of tensors":
        proto.graph.node[0].attribute.append(onnx.helper.make_attribute("secret", [tensor]))
    else:
        value = tensor if place == "function" else onnx.GraphProto(name="graph", initializer=[tensor])
        node = onnx.helper.make_node("Constant", [], ["y"], value=value)
        opset = [onnx.helper.make_opsetid("", 18)]
        proto.functions.append(onnx.helper.make_function("own", "F", [], ["y"], [node], opset))
    onnx.save(proto, mlp / model)
    with pytest.raises(ValueError, match=rf"{model} keeps the data of .* in another file"):
        convert_artifacts(mlp, mlp.parent / "target")


def _changed(path: Path, operator: str, other: str) -> None:
    proto = onnx.load(path)
    for node in proto.graph.node:
        if node.op_type == operator:
            node.op_type, node.domain = other, "com.microsoft"
    onnx.save(proto, path)


def test_unknown_operators_are_named(mlp: Path) -> None:
    _changed(mlp / "training_model.onnx", "Relu", "GistPack8Encoder")
    _changed(mlp / "optimizer_model.onnx", "SGDOptimizerV2", "AdamOptimizer")
    state = CheckpointState.load_checkpoint(mlp / "checkpoint")
    with pytest.raises(ValueError, match=r"training_model.onnx.*GistPack8Encoder.*generate_artifacts"):
        Module(mlp / "training_model.onnx", state)
    module = Module(FOLDER / "mlp" / "training_model.onnx", state)
    with pytest.raises(ValueError, match=r"AdamW or SGD.*\['AdamOptimizer'\]"):
        Optimizer(mlp / "optimizer_model.onnx", module)


def test_models_in_the_wrong_place_are_refused(mlp: Path) -> None:
    state = CheckpointState.load_checkpoint(mlp / "checkpoint")
    with pytest.raises(ValueError, match="accumulates no gradients"):
        Module(mlp / "eval_model.onnx", state)
    with pytest.raises(ValueError, match="training model of onnxruntime-training"):
        Module(mlp / "training_model.onnx", state, mlp / "training_model.onnx")
    ours = Path(__file__).parent.parent / "golden" / "data" / "artifacts-2"
    with pytest.raises(ValueError, match=r"model of ort_trainer.*use the models and the checkpoint"):
        Module(ours / "training_model.onnx", state)
    with pytest.raises(ValueError, match="use the checkpoint that was written with it"):
        Module(mlp / "training_model.onnx", CheckpointState.load_checkpoint(ours / "checkpoint"))


@pytest.mark.parametrize("cut", [0, 100, 2000])
def test_damaged_models_are_refused(cut: int, mlp: Path) -> None:
    data = (mlp / "training_model.onnx").read_bytes()[:cut]
    with pytest.raises(ValueError, match="damaged|accumulates no gradients"):
        Module(data, CheckpointState.load_checkpoint(mlp / "checkpoint"))
