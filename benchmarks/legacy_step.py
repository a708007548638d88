"""The contender "legacy 1.16.3": the ORTTrainer of onnxruntime-training 1.16.3, the last release that has it.

It runs in its own environment (make setup-legacy), started by train_step.py. To train these models with a newer torch,
it gets some help, which adds no significant cost to its steps:

1. Models are exported by TorchScript, with the arguments that torch.onnx.export still has.
2. Prepacking of weights is switched off: otherwise the engine would always use the initial weights of a product.
3. All sizes are fixed. With symbolic sizes, a reshape in the backward pass of GPT-2 gets a wrong size.
4. Attention is computed step by step, because the export of PyTorch's fused attention has dropout without its mask.
5. Classifiers with up to 8 classes get 16: the graph optimizer treats so small a bias as a constant, and loses it.
6. Integer buffers become attributes: the trainer rejects buffers that the export omits as unknown frozen weights.
"""

from __future__ import annotations

import argparse
from typing import Any

import onnxruntime
import torch
from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim
from step_models import MODELS, make_task
from torch import nn
from turns import Training, serve

_export = torch.onnx.export
_GONE = ("_retain_param_name", "example_outputs", "enable_onnx_checker", "use_external_data_format")
_LARGEST_LOST_BIAS = 8


def export_by_torchscript(model: nn.Module, args: Any, path: Any, **options: Any) -> Any:
    """Replaces torch.onnx.export for a caller from 2020."""
    kept = {name: value for name, value in options.items() if name not in _GONE}
    return _export(model, args, path, dynamo=False, **kept)


def help_model(model: nn.Module) -> None:
    """Changes a model, in place, into one that the legacy trainer can train."""
    for module in list(model.modules()):
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"  # type: ignore[union-attr]
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child.out_features <= _LARGEST_LOST_BIAS:
                setattr(module, name, nn.Linear(child.in_features, 2 * _LARGEST_LOST_BIAS))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_floating_point():
                delattr(module, name)
                vars(module)[name] = buffer  # setattr would make it a buffer again


def make_training(model: str, dropout: bool) -> Training:
    """Returns the training of one of the models."""
    torch.onnx.export = export_by_torchscript  # type: ignore[assignment]
    task = make_task(model, dropout)
    help_model(task.model)
    sizes = [list(value.shape) for value in task.batch]
    names = [name for name, _ in task.description["inputs"]]
    description = {**task.description, "inputs": list(zip(names, sizes, strict=True))}
    loss_fn = task.loss_fn
    session_options = onnxruntime.SessionOptions()
    session_options.add_session_config_entry("session.disable_prepacking", "1")
    options = ORTTrainerOptions(
        {"device": {"id": "cpu"}, "session_options": session_options, "utils": {"grad_norm_clip": False}}
    )
    trainer = ORTTrainer(
        task.model,
        description,
        optim.AdamConfig(lr=1e-3, lambda_coef=0.01),
        # The legacy trainer requires a function of exactly two parameters.
        None if loss_fn is None else lambda scores, label: loss_fn(scores, label),
        options,
    )
    return Training(lambda: trainer.train_step(*task.batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--no-dropout", action="store_true")
    arguments = parser.parse_args()
    serve(lambda: make_training(arguments.model, not arguments.no_dropout))


if __name__ == "__main__":
    main()
