"""The versions and the processor listed in a report."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

__all__ = ["ENGINES", "processor", "versions"]

# The distributions of ONNX Runtime; one of them is the engine.
ENGINES = ("onnxruntime-training", "onnxruntime-training-cpu", "onnxruntime")


def versions(packages: Iterable[str]) -> str:
    """Returns the versions of the installed packages."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def processor() -> str:
    """Returns " of" and the processor's name, where Linux says it; otherwise nothing."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f" of {names[0]}" if names else ""
