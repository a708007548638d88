"""Where in the user's code an operator of a captured graph comes from."""

from __future__ import annotations

import torch

__all__ = ["source_line"]


def source_line(node: torch.fx.Node) -> str:
    """Returns the file, line and text of the user's code that an operator comes from; a hint where that is unknown."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    return " ".join(line.strip() for line in lines[-2:]) or "its line in the model's source is not known"
