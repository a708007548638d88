"""Records the module of each operator where PyTorch does not: if the module itself is differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import traceback as fx_traceback
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["marked_modules"]

_STACK = "nn_module_stack"


@contextlib.contextmanager
def marked_modules(step: nn.Module) -> Iterator[None]:
    """Gives operators the ``nn_module_stack`` that torch.export would give them, while modules of a step run."""
    names = {id(part): name for name, part in step.named_modules()}
    around: list[tuple[nn.Module, Any]] = []

    def enter(part: nn.Module, _: Any) -> None:
        name = names.get(id(part))
        if name is not None:  # else a module of another thread
            known = fx_traceback.current_meta.get(_STACK)
            around.append((part, known))
            kind = f"{type(part).__module__}.{type(part).__qualname__}"
            fx_traceback.current_meta[_STACK] = {**(known or {}), name: (name, kind)}

    def leave(part: nn.Module, *_: Any) -> None:
        if around and around[-1][0] is part:
            known = around.pop()[1]
            if known is None:
                fx_traceback.current_meta.pop(_STACK, None)
            else:
                fx_traceback.current_meta[_STACK] = known

    with contextlib.ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enter).remove)
        # Called after errors too; otherwise the next operators would be in the wrong module.
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        stack.enter_context(fx_traceback.preserve_node_meta())
        yield
