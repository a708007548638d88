"""What does autocast do with an operator that other operators replace? It sees only these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .operator_table import Operator

aten = torch.ops.aten
_KEYS = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
# What autocast computes in the widest dtype of its arguments, and not in fp32.
_IN_WIDEST = {("cuda", aten.bilinear.default), ("cuda", aten.grid_sampler.default)}


def as_operator(operator: Operator, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function in place of an operator: in fp32 where autocast computes the operator in fp32.

    Args:
        operator: The operator. If autocast has a rule for it, this is to compute it in fp32; those that autocast
            computes in halves are products, and none of these is replaced.
        function: What replaces it.
        *args: Its arguments.
        **kwargs: Its arguments by name.
    """
    values = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    device = values[0].device.type if values else ""
    is_ruled = (
        isinstance(operator, torch._ops.OpOverload)
        and device in _KEYS
        and torch.is_autocast_enabled(device)
        and operator.has_kernel_for_dispatch_key(_KEYS[device])
    )
    if not is_ruled or (device, operator) in _IN_WIDEST:
        return function(*args, **kwargs)
    args, kwargs = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEYS[device])):
        return function(*args, **kwargs)


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
