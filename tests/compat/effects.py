"""Observations that show the effect of an option, or of a property of TrainingParameters."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ort_trainer import (
    ExportError,
    ORTTrainer,
    ORTTrainerOptions,
    TrainingParameters,
    TrainingSession,
    VerificationError,
    amp,
    optim,
)
from ort_trainer.train.onnx_files import onnx_model

from ..graph.test_recompute import DESC, Encoder, batches, onnx_layers
from ..helpers import MLP, mlp_batches, mlp_trainer

RATE = "Learning_Rate"


@dataclass(frozen=True)
class Effect:
    """A value other than the default, and how to observe its effect.

    Attributes:
        value: The value, or a function that makes it in a new folder.
        seen: A function of the complete options (or properties) and the folder, which returns an observation.
        beside: Settings for both runs, with the value and without it.
    """

    value: Any
    seen: Callable[[dict[str, Any], Path], Any]
    beside: Mapping[str, Any] = field(default_factory=dict)

    def value_in(self, folder: Path) -> Any:
        """Returns the value."""
        return self.value(folder) if isinstance(self.value, InFolder) else self.value


class InFolder:
    """Makes the path of a file in a folder."""

    def __call__(self, folder: Path) -> str:
        return str(folder / "written.onnx")


def nested(path: str, value: Any, into: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns options with an additional value."""
    result: dict[str, Any] = copy.copy(dict(into or {}))
    key, _, rest = path.partition(".")
    result[key] = nested(rest, value, result.get(key)) if rest else value
    return result


# ---- options: what a trainer shows


def trainer_after(
    options: dict[str, Any],
    steps: int = 1,
    model: nn.Module | None = None,
    config: Any = None,
    factor: float = 1.0,
) -> ORTTrainer:
    torch.manual_seed(0)
    trainer = mlp_trainer(options, config or optim.SGDConfig(lr=0.1), model or MLP())
    for x, y in mlp_batches(steps):
        trainer.train_step(x * factor, y)
    return trainer


def weights(options: dict[str, Any], _: Path, steps: int = 1) -> list[float]:
    trainer = trainer_after(options, steps)
    return [trainer.get_parameter(name).double().sum().item() for name in ("fc1.weight", "fc2.weight")]


def saved(options: dict[str, Any], _: Path) -> list[str]:
    """Returns the names of the weights in a state dict."""
    return sorted(trainer_after(options).state_dict()["model"]["full_precision"])


def used_gradient(options: dict[str, Any], _: Path) -> float:
    """Returns the norm of a gradient that an update has used."""
    trainer = trainer_after(options, config=optim.AdamConfig(), factor=100.0)
    gradient = trainer.get_gradient("fc2.weight")
    assert gradient is not None
    return round(gradient.norm().item(), 6)


def moments(options: dict[str, Any], _: Path) -> float:
    """Returns the sum of a moment."""
    trainer = trainer_after(options, config=optim.AdamConfig())
    return float(trainer.state_dict()["optimizer"]["fc1.weight"]["Moment_1"].astype("float64").sum())


def precision(options: dict[str, Any], _: Path) -> Any:
    trainer = trainer_after(options, 0)
    trainer.train_step_info.fetches = ["logits"]
    logits = trainer.train_step(*mlp_batches(1)[0])
    return logits.tolist(), None if trainer.loss_scaler is None else trainer.loss_scaler.loss_scale


def wrong_label(options: dict[str, Any], _: Path) -> str:
    """Tries a label of -1, which PyTorch refuses, and ONNX Runtime would count from the end."""
    trainer = trainer_after(options, 0)
    ((x, y),) = mlp_batches(1)
    try:
        trainer.train_step(x, torch.where(y == 2, -1, y))
    except IndexError:
        return "refused"
    return "taken"


def infinite_loss(options: dict[str, Any], _: Path) -> int:
    """Returns how many steps are counted when the loss is not finite."""
    trainer = trainer_after(options, 0)
    with contextlib.suppress(FloatingPointError):
        trainer.train_step(mlp_batches(1)[0][0] * math.inf, mlp_batches(1)[0][1])
    return trainer.train_step_info.step


class ReadingMLP(MLP):
    """Reads a file, which is not watched."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(self.file.read_text())


def unwatched_setting(options: dict[str, Any], folder: Path) -> int:
    """Returns how many steps are counted when a setting has changed that its graph lacks."""
    model = ReadingMLP(folder / "gain")
    model.file.write_text("1.0")
    trainer = trainer_after(options, 1, model)
    model.file.write_text("2.0")
    with contextlib.suppress(VerificationError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train_step(*mlp_batches(1)[0])
    return trainer.train_step_info.step


@functools.cache
def operators_of(text: str) -> Any:
    torch.manual_seed(0)
    given = ORTTrainerOptions(nested("utils.kernels", "onnxruntime", ast.literal_eval(text)))
    trainer = ORTTrainer(Encoder(), DESC, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=given)
    trainer.prepare(batches(6)[0])
    return Counter(node.op_type for node in trainer.session.graphs(True)[0].model.graph)


def operators(options: dict[str, Any], _: Path) -> Any:
    """Returns the nodes of a transformer's training graph, in ONNX Runtime's operators."""
    return operators_of(repr(options))


def graph(look: Callable[[Any], Any]) -> Callable[[dict[str, Any], Path], Any]:
    """Makes an observation of the training graph, or of an error."""

    def seen(options: dict[str, Any], _: Path) -> Any:
        try:
            return look(trainer_after(options).session.graphs(True)[0])
        except Exception as error:
            return type(error).__name__

    return seen


def own_session(look: Callable[[onnxruntime.InferenceSession], Any]) -> Callable[[dict[str, Any], Path], Any]:
    """Makes an observation of ONNX Runtime's session, or of an error."""

    def seen(options: dict[str, Any], _: Path) -> Any:
        try:
            return look(trainer_after(options).session.inference_session)
        except Exception as error:
            return type(error).__name__

    return seen


def own_weights(options: dict[str, Any], _: Path) -> bool:
    """Returns whether the model itself is trained."""
    model = MLP()
    before = model.fc1.weight.detach().clone()
    trainer_after(options, model=model)
    return not torch.equal(model.fc1.weight, before)


def masks(options: dict[str, Any], _: Path) -> Any:
    return trainer_after(options, 2, MLP(dropout=0.5)).eval_step(*mlp_batches(1)[0])[0].item()


def files(options: dict[str, Any], folder: Path) -> int:
    """Returns how many files a step leaves in a folder that is also the cache."""
    before = os.environ.get("ORT_TRAINER_CACHE")
    os.environ["ORT_TRAINER_CACHE"] = str(folder)
    try:
        trainer_after(options, model=MLP(hidden=7))
    finally:
        os.environ.pop("ORT_TRAINER_CACHE") if before is None else os.environ.update(ORT_TRAINER_CACHE=before)
    return sum(path.is_file() for path in folder.rglob("*"))


def deterministic(options: dict[str, Any], _: Path) -> bool:
    """Returns whether PyTorch's operators are deterministic while they compute a step."""
    found: list[bool] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.tanh.default:
                found.append(torch.are_deterministic_algorithms_enabled())
            return func(*args, **(kwargs or {}))

    trainer = trainer_after(options)
    with Mode():
        trainer.train_step(*mlp_batches(1)[0])
    return found[0]  # later ones are of a comparison


def written(options: dict[str, Any], folder: Path) -> bool:
    trainer_after(options)
    return (folder / "written.onnx").is_file()


def device(options: dict[str, Any], _: Path) -> str:
    try:
        return str(trainer_after(options, 0).loop.device)
    except ValueError as error:
        return str(error)


def alone(options: dict[str, Any], _: Path) -> str:
    """Returns the error of a trainer in one process; tests/distributed/ tests several."""
    try:
        trainer_after(options, 0)
    except ValueError as error:
        return str(error)
    return "trains"


def checked(options: dict[str, Any], _: Path) -> str:
    """Returns the error for a graph whose results differ from the model's."""
    try:
        trainer_after(nested("_internal_use.extra_postprocess", spoilt, options))
    except RuntimeError as error:
        return str(error)[:40]
    return "trained"


def spoilt(model: onnx.ModelProto) -> onnx.ModelProto:
    """Changes the results of the model."""
    for node in model.graph.node:
        node.op_type = "Sigmoid" if node.op_type == "Tanh" else node.op_type
    return model


def contrib(model: onnx.ModelProto) -> None:
    """Inserts an operator of ONNX Runtime's own."""
    for node in model.graph.node:
        if node.op_type == "Tanh":
            node.op_type, node.domain = "Gelu", "com.microsoft"
    model.opset_import.add(domain="com.microsoft", version=1)


def threads(count: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = count
    return options


LAYERS = {"graph_transformer": {"transformer_layer_recompute": True}}
HALF = {"mixed_precision": {"enabled": True}}
ON_SESSIONS = {"utils": {"kernels": "onnxruntime"}}
WINDOW = {"batch": {"gradient_accumulation_steps": 2}}
two_steps = functools.partial(weights, steps=2)
op_types = graph(lambda g: Counter(node.op_type for node in g.model.graph))
SEVERAL = {
    "world_rank": 1,
    "world_size": 2,
    "local_rank": 1,
    "data_parallel_size": 2,
    "deepspeed_zero_optimization.stage": 1,
    "enable_adasum": True,
    "timeout": 30,
    "bucket_cap_mb": 1,
    "reduce_dtype": "bfloat16",
}
# By the option's path, without options whose non-default values are refused according to docs/reference/names.md.
OPTIONS: dict[str, Effect] = {
    "batch.gradient_accumulation_steps": Effect(2, weights),
    "batch.gradient_reduction": Effect("sum", two_steps, WINDOW),
    "device.id": Effect("cpu" if torch.cuda.is_available() else "cuda", device),
    "device.mem_limit": Effect(1 << 20, own_session(lambda s: s.get_provider_options()), ON_SESSIONS),
    **{f"distributed.{key}": Effect(value, alone) for key, value in SEVERAL.items()},
    "lr_scheduler": Effect(lambda count: 0.5, weights),
    "mixed_precision.enabled": Effect(True, precision),
    "mixed_precision.dtype": Effect("float16", precision, HALF),
    "mixed_precision.loss_scaler": Effect(amp.DynamicLossScaler(loss_scale=8.0), precision, HALF),
    "graph_transformer.attn_dropout_recompute": Effect(True, operators),
    "graph_transformer.gelu_recompute": Effect(True, operators),
    "graph_transformer.transformer_layer_recompute": Effect(True, operators),
    "graph_transformer.number_recompute_layers": Effect(2, operators, LAYERS),
    "utils.frozen_weights": Effect(["fc1.weight"], weights),
    "utils.save_frozen_weights": Effect(False, saved, {"utils": {"frozen_weights": ["fc1.weight"]}}),
    "utils.grad_norm_clip": Effect(False, used_gradient),
    "utils.max_grad_norm": Effect(0.01, used_gradient),
    "utils.max_grad_value": Effect(0.001, used_gradient),
    "utils.memory_efficient_gradient": Effect(True, operators),
    "utils.share_weights": Effect(False, own_weights),
    "utils.random_numbers": Effect("pytorch", masks),
    "utils.kernels": Effect("onnxruntime", graph(lambda g: bool(g.programs))),
    "utils.cuda_graphs": Effect("on", device),  # refused on the CPU
    "utils.remove_padding": Effect("x", graph(lambda g: bool(g.programs))),  # refused: x is no mask of two sizes
    "utils.moments": Effect("bfloat16", moments),
    "utils.cache_exports": Effect(False, files),
    "debug.deterministic_compute": Effect(True, deterministic),
    "debug.check_model_export": Effect(True, checked),
    "debug.check_indices": Effect(False, wrong_label, ON_SESSIONS),
    "debug.max_nonfinite_losses": Effect(1, infinite_loss),
    "debug.verify_every": Effect(1, unwatched_setting),
    **{
        f"debug.graph_save_paths.model_{key}_path": Effect(InFolder(), written)
        for key in (
            "after_graph_transforms",
            "with_gradient_graph",
            "with_training_graph",
            "with_training_graph_after_optimization",
        )
    },
    "_internal_use.enable_internal_postprocess": Effect(False, op_types, ON_SESSIONS),
    "_internal_use.extra_postprocess": Effect(spoilt, op_types, ON_SESSIONS),
    "_internal_use.onnx_opset_version": Effect(19, graph(lambda g: g.model.opset_imports[""]), ON_SESSIONS),
    "_internal_use.enable_onnx_contrib_ops": Effect(
        False, graph(lambda g: bool(g.inputs)), {"_internal_use": {"extra_postprocess": contrib}}
    ),
    "provider_options": Effect(
        {"CPUExecutionProvider": {"x": "1"}}, own_session(lambda s: s.get_providers()), ON_SESSIONS
    ),
    "session_options": Effect(
        threads(3), own_session(lambda s: s.get_session_options().intra_op_num_threads), ON_SESSIONS
    ),
}


# ---- properties of TrainingParameters: what a session shows


@functools.cache
def exported() -> bytes:
    """An MLP with its loss, whose last bias has one value."""
    torch.manual_seed(4)
    model = MLP()
    nn.init.constant_(model.fc2.bias, 0.25)
    trainer = mlp_trainer(model=model)
    trainer.prepare(mlp_batches(1)[0])
    return bytes(onnx_model(trainer.loop, ["loss", "logits"]).SerializeToString())


def onnx_file(folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(exported())
    return path


def two_losses() -> bytes:
    proto = onnx.ModelProto.FromString(exported())
    proto.graph.node.append(onnx.helper.make_node("Add", ["loss", "loss"], ["other_loss"]))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("other_loss", onnx.TensorProto.FLOAT, []))
    return proto.SerializeToString()


def session_of(
    properties: Mapping[str, Any], model: bytes | None = None, made: type[TrainingSession] = TrainingSession
) -> TrainingSession:
    parameters = TrainingParameters()
    given = {"loss_output_name": "loss", "training_optimizer_name": "AdamOptimizer", **properties}
    state = given.pop("set_optimizer_initial_state", None)
    for name, value in given.items():
        setattr(parameters, name, value)
    if state:
        parameters.set_optimizer_initial_state(state)
    return made(exported() if model is None else model, parameters)


def runs(session: TrainingSession, count: int = 1) -> TrainingSession:
    for x, y in mlp_batches(count):
        fed = {entry.name for entry in session.get_inputs()}
        extra = {RATE: np.array([0.1], np.float32), "loss_scale": np.array([8.0], np.float32)}
        feed = {"x": x.numpy() * 100, "label": y.numpy(), **{k: v for k, v in extra.items() if k in fed}}
        session.run(["loss"], feed)
    return session


def trained(properties: dict[str, Any], _: Path) -> Any:
    """Returns sums of the weights after two runs."""
    state = runs(session_of(properties), 2).get_state()
    return {name: float(value.sum()) for name, value in state.items() if name.startswith("fc")}


def first_run(properties: dict[str, Any], _: Path) -> Any:
    return {name: float(value.sum()) for name, value in runs(session_of(properties)).get_state().items()}


def minimized(properties: dict[str, Any], _: Path) -> Any:
    try:
        session = session_of(properties, two_losses())
    except ValueError as error:
        return str(error)
    return float(runs(session).get_state()["fc1.weight"].sum())


def names_of(properties: dict[str, Any], _: Path) -> Any:
    session = session_of(properties)
    return [entry.name for entry in (*session.get_inputs(), *session.get_outputs())]


def state_of(properties: dict[str, Any], _: Path) -> Any:
    return {name: value.tolist() for name, value in session_of(properties).get_state().items()}


def file_of(properties: dict[str, Any], folder: Path) -> bool:
    session_of(properties)
    return (folder / "written.onnx").is_file()


def moments_of(properties: dict[str, Any], _: Path) -> float:
    """Returns the sum of a moment."""
    return float(runs(session_of(properties)).get_optimizer_state()["fc1.weight"]["Moment_1"].astype("float64").sum())


def programs_of(properties: dict[str, Any], _: Path) -> set[str]:
    """Returns the programs that compute the step, which compute values again or keep them."""
    return set(session_of(properties)._trainer.session.graphs(True)[0].programs.programs.values())


def programs_of_layers(properties: dict[str, Any], _: Path) -> set[str]:
    session = session_of(properties, onnx_layers().SerializeToString())
    return set(session._trainer.session.graphs(True)[0].programs.programs.values())


def refused(properties: dict[str, Any], _: Path) -> str:
    """Returns the error of a session in one process."""
    try:
        session_of(properties)
    except (ValueError, ExportError) as error:
        return str(error)
    return "trains"


EPSILON = {"optimizer_attributes_map": {"fc1.weight": {"epsilon": 1.0}, "fc2.weight": {"epsilon": 1.0}}}
MOMENTS = {"fc2.bias": {"Moment_1": np.ones(3, np.float32), "Moment_2": np.ones(3, np.float32), "Update_Count": [5]}}
PROPERTIES: dict[str, Effect] = {
    **{
        key: Effect(value, refused)
        for key, value in {
            "attn_dropout_recompute": True,
            "data_parallel_size": 2,
            "deepspeed_zero_stage": 1,
            "enable_adasum": True,
            "gelu_recompute": True,
            "world_rank": 1,
            "world_size": 2,
        }.items()
    },
    "enable_grad_norm_clip": Effect(False, trained, EPSILON),
    "gradient_accumulation_steps": Effect(2, first_run),
    "immutable_weights": Effect({"Gemm": {2: 0.25}}, state_of),
    "loss_output_name": Effect("other_loss", minimized, {"training_optimizer_name": "SGDOptimizer"}),
    "loss_scale": Effect(8.0, names_of, {"use_mixed_precision": True}),
    "lr_params_feed_name": Effect("rate", names_of),
    **{
        f"model_{key}_path": Effect(InFolder(), file_of)
        for key in ("after_graph_transforms", "with_gradient_graph", "with_training_graph")
    },
    "number_recompute_layers": Effect(1, programs_of_layers, {"transformer_layer_recompute": True}),
    "optimizer_attributes_map": Effect({"fc1.weight": {"alpha": 0.1}}, trained),
    "optimizer_int_attributes_map": Effect({"fc1.weight": {"do_bias_correction": 0}}, trained),
    "set_gradients_as_graph_outputs": Effect(True, names_of),
    "set_optimizer_initial_state": Effect(MOMENTS, state_of),
    "training_optimizer_name": Effect("LambOptimizer", trained),
    "transformer_layer_recompute": Effect(True, programs_of_layers),
    "use_fp16_moments": Effect(True, moments_of),
    "use_memory_efficient_gradient": Effect(True, programs_of),
    "use_mixed_precision": Effect(True, names_of),
    "weights_not_to_train": Effect({"fc1.weight"}, state_of),
    "weights_to_train": Effect({"fc1.weight"}, state_of),
}
