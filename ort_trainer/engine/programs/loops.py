"""Machine code of fused loops, which PyTorch's Inductor has compiled from a graph, as text for an ONNX file.

Only the cache of exports stores such code, and it checks who may write to its files.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Callable

import torch

from ...core.atomic import temporary_folder

__all__ = ["encode", "load"]


def encode(code: bytes, operators: str) -> str:
    """Returns machine code as text.

    Args:
        code: A shared library that Inductor has written ahead of time.
        operators: The operators that it calls through PyTorch's dispatcher, in Inductor's format; may be empty.
    """
    return json.dumps([base64.b85encode(zlib.compress(code)).decode(), operators])


@functools.lru_cache(maxsize=64)  # equal code is loaded only once
def load(text: str) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Returns machine code as a function of tensors, which must have the strides that they had at compilation.

    Args:
        text: From :func:`encode`.

    Raises:
        ValueError: If the text is not machine code for this machine.
    """
    try:
        code, operators = json.loads(text)
        library = zlib.decompress(base64.b85decode(code))
        # Loading maps the file into memory, after which it may be deleted.
        with temporary_folder() as folder:
            path = folder / "loops.so"
            path.write_bytes(library)
            if operators:
                path.with_suffix(".json").write_text(operators, encoding="utf-8")
            run: Callable[[list[torch.Tensor]], list[torch.Tensor]]
            run = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1).run
    except (ValueError, TypeError, zlib.error, RuntimeError) as error:
        raise ValueError(f"compiled loops can't be loaded: {error}") from error
    return run
