"""Identifies the installed ONNX Runtime without importing it."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from pathlib import Path

__all__ = ["can_call_pytorch", "check_engine", "engine_identity", "installed_flavours", "require_engine"]

_NO_ENGINE = """ort_trainer runs on ONNX Runtime, which is not installed. Install one of the three engines:
  pip install onnxruntime-training-cpu==1.19.2   the extra [cpu]: PyTorch and ONNX models, Python up to 3.12
  pip install onnxruntime-training==1.19.2       the extra [cuda]: the same with CUDA, Linux, Python up to 3.11
  pip install 'onnxruntime>=1.20'                the extra [stock]: PyTorch models, on any Python and platform"""


def _package() -> Path | None:
    """Returns the folder of the ``onnxruntime`` module; None if it is not installed."""
    spec = importlib.util.find_spec("onnxruntime")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _distributions(package: Path) -> list[str]:
    """Returns the names of the metadata folders of all ONNX Runtime distributions beside its module."""
    # Reading the metadata of every installed distribution would take longer than a whole first step should.
    return sorted(path.name for path in package.parent.glob("onnxruntime*.dist-info"))


@functools.cache
def installed_flavours() -> tuple[str, ...]:
    """Returns the distributions that installed the ``onnxruntime`` module; several overwrite each other's files."""
    package = _package()
    found = [] if package is None else _distributions(package)
    names = {name.split("-")[0].lower().replace("_", "-") for name in found}
    return tuple(sorted(name for name in names if name == "onnxruntime" or name.startswith("onnxruntime-")))


def can_call_pytorch() -> bool:
    """Returns whether graph nodes can call PyTorch's operators.

    Only onnxruntime-training and onnxruntime-training-cpu support this.
    """
    return any(name.startswith("onnxruntime-training") for name in installed_flavours())


def require_engine() -> None:
    """Raises if ONNX Runtime is not installed.

    Raises:
        ModuleNotFoundError: If it is not installed; the message has the commands that install it.
    """
    if _package() is None:
        raise ModuleNotFoundError(_NO_ENGINE, name="onnxruntime")


def check_engine() -> None:
    """Warns if several distributions of ONNX Runtime overwrite each other.

    Raises:
        ModuleNotFoundError: If none is installed.
    """
    require_engine()
    clashing = [n for n in installed_flavours() if not n.startswith(("onnxruntime-extensions", "onnxruntime-genai"))]
    if len(clashing) > 1:
        warnings.warn(
            f"several distributions of ONNX Runtime are installed: {', '.join(clashing)}. They overwrite each other's "
            "files; uninstall all of them and install one",
            RuntimeWarning,
            stacklevel=3,
        )


@functools.cache
def engine_identity() -> str:
    """Returns text that identifies the installed ONNX Runtime; it differs whenever the kernels may differ."""
    package = _package()
    if package is None:
        return "none"
    found = _distributions(package)
    for library in sorted(package.glob("capi/*pybind11_state*")):
        status = library.stat()
        found.append(f"{library.name} {status.st_size} {status.st_mtime_ns}")
    return f"{package} {sorted(found)}"
