"""The ``env`` command: describes the installation and its features, for bug reports.

People run it when something is broken, so it prints an error in place of each fact that it can't determine.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .output import OK, say, say_facts, say_json, size

# These are imported, because a broken installation still has a version; for the others the version is enough.
_IMPORTED = ("numpy", "torch", "onnx")
_LOOKED_UP = (
    "safetensors",
    "xxhash",
    "onnxscript",
    "onnx_ir",
    "cerberus",
    "networkx",
    "flatbuffers",
    "h5py",
    "transformers",
    "accelerate",
    "torchdata",
)
_VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "WORLD_SIZE", "RANK", "LOCAL_RANK")


def add(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "env",
        help="print versions and the engine's features, for bug reports",
        description="Prints versions, the engine and its features, threads, and the export cache. It works even if "
        "packages are missing or broken, and lists those.",
        epilog="Exit code: 0.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    facts = {
        "ort_trainer": f"{own_version()} in {Path(__file__).parents[1]}",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": _attempt(platform.platform),
        "packages": _packages(),
        "engine": _attempt(_engine),
        "can train": _attempt(_abilities),
        "runs on": _attempt(_devices),
        "processors": _attempt(_processors),
        "cache of exports": _attempt(_cache),
        "variables": {name: value for name, value in sorted(os.environ.items()) if _is_of_interest(name)},
    }
    if args.json:
        say_json(facts)
    else:
        plain = {name: value for name, value in facts.items() if not isinstance(value, dict)}
        say_facts(plain, indent="")
        for name, part in facts.items():
            if isinstance(part, dict) and part:
                say()
                say(name)
                say_facts(part)
    return OK


def _attempt(find_out: Callable[[], Any]) -> Any:
    """Returns the result of a function, or a description of its error."""
    try:
        return find_out()
    except Exception as error:  # anything may be broken
        return "not known: " + " ".join(f"{type(error).__name__}: {error}".split())


def own_version() -> str:
    """Returns the version of this package."""
    assert __package__ is not None
    return str(sys.modules[__package__.partition(".")[0]].__version__)


def _packages() -> dict[str, str]:
    versions = {}
    for name in _IMPORTED:
        versions[name] = _version(name)
        if versions[name] != "not installed":
            imported = _attempt(functools.partial(importlib.import_module, name))
            if isinstance(imported, str):
                versions[name] += f", but importing it fails: {imported.removeprefix('not known: ')}"
    return versions | {name: _version(name) for name in _LOOKED_UP}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec(name) is None:
            return "not installed"
        return str(_attempt(lambda: importlib.import_module(name).__version__))


def _engine() -> dict[str, Any]:
    from ..engine.ort import installed_flavours

    if importlib.util.find_spec("onnxruntime") is None:
        return {"distribution": "none: PyTorch's kernels train, and files of ONNX and artifacts can't be written"}
    facts: dict[str, Any] = {"distribution": " and ".join(installed_flavours()) or "not known"}
    if len(installed_flavours()) > 1:
        facts["problem"] = "several distributions overwrite each other's files: uninstall all of them, then install one"
    onnxruntime = _attempt(_onnxruntime)
    if isinstance(onnxruntime, str):
        return facts | {"problem": f"importing it fails: {onnxruntime.removeprefix('not known: ')}"}
    facts |= {"version": onnxruntime.__version__, "providers": onnxruntime.get_available_providers()}
    return facts | {"newest opset": _attempt(_newest_opset), "CUDA": _attempt(_cuda)}


def _onnxruntime() -> Any:
    from ..engine.ort import engine

    return engine()


def _newest_opset() -> int:
    from ..engine.ort import maximum_opset

    return maximum_opset()


def _cuda() -> str:
    import torch

    from ..engine.ort import available_providers

    torchs = f"torch is built for {torch.version.cuda}" if torch.version.cuda else "torch is built without it"
    seen = f"torch sees {torch.cuda.device_count()} devices" if torch.cuda.is_available() else "torch sees no device"
    ours = "has" if "CUDAExecutionProvider" in available_providers() else "does not have"
    return f"{torchs}, {seen}, the engine {ours} the provider"


def _abilities() -> dict[str, str]:
    """Returns for each kind of model whether the installation can train it, or the error that prevents it."""

    def models() -> str:
        for needed in ("torch", "onnxscript", "cerberus", "networkx"):
            importlib.import_module(needed)
        if importlib.util.find_spec("onnxruntime") is not None:
            _onnxruntime()
        return "yes"

    def artifacts() -> str:
        importlib.import_module("..api.load", __package__)
        return "yes"

    asked = {"PyTorch and ONNX models": models, "exported artifacts": artifacts}
    return {what: str(_attempt(ask)).replace("not known:", "no:") for what, ask in asked.items()}


def _devices() -> dict[str, str]:
    """Returns what each part runs on, if options and the model leave it open."""
    from ..engine.devices import resolve_device
    from ..engine.ort import lacks_provider

    device = resolve_device(None)
    lacking = lacks_provider(device)
    return {
        "training": f"PyTorch's kernels on {device}",
        "evaluation": f"{'PyTorch' if lacking else 'ONNX Runtime'}'s kernels on {device}",
        "utils.kernels 'onnxruntime'": f"no: {lacking}" if lacking else f"ONNX Runtime's kernels on {device}",
        "exported artifacts": "ONNX Runtime's kernels on cpu",
    }


def _processors() -> dict[str, Any]:
    facts: dict[str, Any] = {"architecture": platform.machine(), "in this machine": os.cpu_count()}
    if hasattr(os, "sched_getaffinity"):
        facts["for this process"] = len(os.sched_getaffinity(0))
    facts["threads of torch"] = _attempt(lambda: importlib.import_module("torch").get_num_threads())
    return facts


def _cache() -> dict[str, Any] | str:
    from ..step.cache import export_cache

    cache = export_cache()
    if cache is None:
        return "off"
    files = [path.stat().st_size for path in cache.folder.glob("*.export")]
    return {
        "folder": str(cache.folder),
        "files": f"{len(files)}, {size(sum(files))}",
        "limit": size(cache.limit),
    }


def _is_of_interest(name: str) -> bool:
    return name in _VARIABLES or name.startswith("ORT_TRAINER_")
