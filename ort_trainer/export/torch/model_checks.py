"""Rejects models that can't be exported, before anything runs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["check_joint", "check_model"]

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_model(model: nn.Module) -> None:
    """Checks that a model is a plain module with values.

    Raises:
        TypeError: If the model is wrapped or compiled.
        ValueError: If its parameters or buffers have no values yet, or can't be changed.
    """
    for path, module in model.named_modules():
        where, kind = f"model.{path}" if path else "model", type(module).__name__
        if isinstance(module, _WRAPPERS):
            raise TypeError(
                f"{where} is a {kind}, but the trainer itself averages the gradients of several processes: use the "
                f"module inside, {where}.module, and start one process per device"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{where} is a TorchScript module, which can't be exported: use the original module")
        if not path and kind == "OptimizedModule" and hasattr(module, "_orig_mod"):
            raise TypeError(
                f"{where} is the result of torch.compile(), which can't be exported: use the module inside, "
                f"{where}._orig_mod"
            )
    if type(model).__name__ == "_FabricModule":
        raise TypeError(
            "model was returned by Fabric.setup(), and its forward casts and moves its inputs: use the module inside, "
            "model.module; the trainer has options for devices and mixed precision"
        )
    name = type(model).__name__
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [key for key, tensor in tensors if is_lazy(tensor)]  # type: ignore[no-untyped-call]
    if lazy:
        raise ValueError(
            f"parameters {lazy[:3]} of {name} are lazy and have no shape yet: run the model once on a batch, model(x), "
            "before you pass it to the trainer"
        )
    meta = [key for key, tensor in tensors if tensor.is_meta]
    if meta:
        raise ValueError(
            f"{meta[:3]} of {name} are on the meta device and have no values yet: initialize the model first, with "
            "model.to_empty(device='cpu') and its initialization, or model.load_state_dict(..., assign=True)"
        )
    frozen = [key for key, tensor in tensors if tensor.is_inference()]
    if frozen:
        raise ValueError(
            f"{frozen[:3]} of {name} were made under torch.inference_mode() and can't be differentiated: make the "
            "model outside of it"
        )


def check_joint(model: nn.Module) -> None:
    """Checks that several processes can train a model together.

    Raises:
        ValueError: If one of its modules communicates with other processes during a pass.
    """
    found = [path for path, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if found:
        raise ValueError(
            f"{found[:3]} of {type(model).__name__} are SyncBatchNorm, which exchanges batch statistics with the other "
            "processes during the forward and backward pass, but these run as one graph here: leave out "
            "nn.SyncBatchNorm.convert_sync_batchnorm(), and each process normalizes by its own batch, as PyTorch's "
            "BatchNorm does; or use a normalization without batch statistics (GroupNorm, LayerNorm)"
        )
