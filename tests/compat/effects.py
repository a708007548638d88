"""Observations that show the effect of an option, and the options that properties of TrainingParameters set."""

from __future__ import annotations

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

import onnx
import onnxruntime
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ort_trainer import ORTTrainer, TrainingParameters, VerificationError, amp, optim
from ort_trainer.compat.training_session.parameters import options_of
from ort_trainer.onnx.load import load_onnx_model
from ort_trainer.train.onnx_files import onnx_model

from ..helpers import MLP, mlp_batches, mlp_trainer


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
    "utils.frozen_weights": Effect(["fc1.weight"], weights),
    "utils.save_frozen_weights": Effect(False, saved, {"utils": {"frozen_weights": ["fc1.weight"]}}),
    "utils.grad_norm_clip": Effect(False, used_gradient),
    "utils.max_grad_norm": Effect(0.01, used_gradient),
    "utils.max_grad_value": Effect(0.001, used_gradient),
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

# Options whose effect is on graphs of large models, with a value: test_recompute.py tests each.
RECOMPUTED: dict[str, Any] = {
    "graph_transformer.attn_dropout_recompute": True,
    "graph_transformer.gelu_recompute": True,
    "graph_transformer.transformer_layer_recompute": True,
    "graph_transformer.number_recompute_layers": 2,
    "utils.memory_efficient_gradient": True,
}


# ---- properties of TrainingParameters: which options they are

SCALE = "mixed_precision.loss_scaler"
# By the property, a value other than the default, and the options that it sets: one with this value, unless given.
PROPERTIES: dict[str, tuple[Any, Mapping[str, Any]]] = {
    **{
        path.rpartition(".")[2]: (value, {path: value})
        for path, value in {
            "batch.gradient_accumulation_steps": 2,
            "distributed.data_parallel_size": 2,
            "distributed.enable_adasum": True,
            "distributed.world_rank": 1,
            "distributed.world_size": 2,
            "graph_transformer.attn_dropout_recompute": True,
            "graph_transformer.gelu_recompute": True,
            "graph_transformer.number_recompute_layers": 1,
            "graph_transformer.transformer_layer_recompute": True,
            "debug.graph_save_paths.model_after_graph_transforms_path": "a.onnx",
            "debug.graph_save_paths.model_with_gradient_graph_path": "a.onnx",
            "debug.graph_save_paths.model_with_training_graph_path": "a.onnx",
        }.items()
    },
    "deepspeed_zero_stage": (1, {"distributed.deepspeed_zero_optimization.stage": 1}),
    "enable_grad_norm_clip": (False, {"utils.grad_norm_clip": False}),
    "immutable_weights": ({"Gemm": {2: 0.25}}, {"utils.frozen_weights": ["fc2.bias"]}),
    "use_fp16_moments": (True, {"utils.moments": "bfloat16"}),
    "use_memory_efficient_gradient": (True, {"utils.memory_efficient_gradient": True}),
    "use_mixed_precision": (True, {"mixed_precision.enabled": True, SCALE: 1.0}),
    "weights_not_to_train": ({"fc1.weight"}, {"utils.frozen_weights": ["fc1.weight"]}),
    "weights_to_train": ({"fc1.weight"}, {"utils.frozen_weights": ["fc1.bias", "fc2.weight", "fc2.bias"]}),
}
# Properties of the session itself, or of its optimizer: training_session/test_session.py tests their effects.
OF_SESSIONS = {
    *("loss_output_name", "loss_scale", "lr_params_feed_name", "optimizer_attributes_map"),
    *("optimizer_int_attributes_map", "set_gradients_as_graph_outputs", "set_optimizer_initial_state"),
    "training_optimizer_name",
}


@functools.cache
def exported() -> bytes:
    """An MLP with its loss, whose last bias has one value."""
    torch.manual_seed(4)
    model = MLP()
    nn.init.constant_(model.fc2.bias, 0.25)
    trainer = mlp_trainer(model=model)
    trainer.prepare(mlp_batches(1)[0])
    return bytes(onnx_model(trainer.loop, ["loss", "logits"]).SerializeToString())


def parameters_with(**properties: Any) -> TrainingParameters:
    return TrainingParameters(**{"loss_output_name": "loss", "training_optimizer_name": "AdamOptimizer", **properties})


def former_options_of(**properties: Any) -> dict[str, Any]:
    """Returns the options of a session with these properties; of a loss scaler its scale."""
    found = options_of(parameters_with(**properties), load_onnx_model(exported()), "", {}, None)
    precision = found.get("mixed_precision", {})
    if "loss_scaler" in precision:
        precision["loss_scaler"] = precision["loss_scaler"].loss_scale
    return found
