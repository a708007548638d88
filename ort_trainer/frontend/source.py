"""Where in the user's code an operator of a captured graph comes from."""

from __future__ import annotations

import re
from pathlib import Path

import torch

__all__ = ["source_line"]

_TORCH = str(Path(torch.__file__).parent)


def source_line(node: torch.fx.Node) -> str:
    """Returns the file, line and text of the user's code that an operator comes from; a hint where that is unknown."""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)\n\s*(.*)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    if not own:
        return "its line in the model's source is not known"
    file, line, function, text = own[-1]
    return f'File "{file}", line {line}, in {function}: {text.strip()}'
