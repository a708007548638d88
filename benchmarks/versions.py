"""The versions listed in a report."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

__all__ = ["ENGINES", "versions"]

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
