"""How does a person repeat a failure? With a script that needs only PyTorch and the package."""

from __future__ import annotations

import inspect
import re

from . import program, train
from .compare import Outcome
from .recipe import Recipe

__all__ = ["script"]

_SCRIPT = '''"""{title}

{outcome}

Repeat the case as it was drawn: make fuzz CASE={seed}
"""

import itertools, sys, tempfile, types, warnings
from pathlib import Path
from unittest import mock

import torch

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim

PROGRAM = r"""
{text}
"""
_COUNT = itertools.count()


def make():
    name = f"fuzzed_{{next(_COUNT)}}"
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(PROGRAM.replace("program_of_a_case", name), f"<{{name}}>", "exec"), vars(module))
    return module


{functions}


torch.manual_seed(17)
theirs = in_pytorch(make)
torch.manual_seed(17)
ours = {call}
for name, value in theirs.items():
    if name not in ours:
        print("MISSING", name)
        continue
    same = torch.allclose(value.double(), ours[name].double(), rtol=1e-4, atol=1e-5, equal_nan=True)
    print("equal" if same else "DIFFERENT", name, *([] if same else [value.tolist(), ours[name].tolist()]))
'''
_CALLS = {
    "pytorch": "with_trainer(make())",
    "onnxruntime": "with_trainer(make(), 'onnxruntime')",
    "module": "with_module(make())",
    "module onnxruntime": "with_module(make(), 'onnxruntime')",
    "compile": "with_compile(make())",
    "cached": "cached(make)",
    "resumed": "resumed(make)",
    "own loop": "own_loop(make())",
    "compiled": "with_trainer(make(), 'compiled')",
    "module compiled": "with_module(make(), 'compiled')",
}


def script(recipe: Recipe, way: str, outcome: Outcome, text: str | None = None) -> str:
    """Returns a script that trains a case in PyTorch and in one way, and prints what differs."""
    functions = [getattr(train, name) for name in train.__all__ if name != "TRAIN"]
    written = "\n\n\n".join(inspect.getsource(function).strip() for function in functions)
    return _SCRIPT.format(
        title=f"{outcome.kind}: {way}",
        outcome=outcome.text.replace("\\", "/").replace('"""', "'''"),
        seed=recipe.seed,
        text=(program.source(recipe) if text is None else text).strip(),
        functions=re.sub(r"-> [\w\[\], .]+:", ":", written)
        .replace("Callable[[], Any]", "object")
        .replace("Any", "object"),
        call=_CALLS[way],
    )
