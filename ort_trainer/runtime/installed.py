"""Which ONNX Runtime is installed; nothing here imports it."""

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
    """Returns the folders with the metadata of all distributions of ONNX Runtime beside its module."""
    # Reading the metadata of every installed distribution takes longer than a first step may.
    return sorted(path.name for path in package.parent.glob("onnxruntime*.dist-info"))


@functools.cache
def installed_flavours() -> tuple[str, ...]:
    """Returns the distributions that installed the ``onnxruntime`` module: several overwrite each other."""
    package = _package()
    found = [] if package is None else _distributions(package)
    names = {name.split("-")[0].lower().replace("_", "-") for name in found}
    return tuple(sorted(name for name in names if name == "onnxruntime" or name.startswith("onnxruntime-")))


def can_call_pytorch() -> bool:
    """Returns whether nodes of a graph can be PyTorch's operators.

    onnxruntime-training and onnxruntime-training-cpu have the means for it.
    """
    return any(name.startswith("onnxruntime-training") for name in installed_flavours())


def require_engine() -> None:
    """Does nothing if there is an ONNX Runtime.

    Raises:
        ModuleNotFoundError: If there is none; the text has the commands that install one.
    """
    if _package() is None:
        raise ModuleNotFoundError(_NO_ENGINE, name="onnxruntime")


def check_engine() -> None:
    """Warns when two distributions of ONNX Runtime overwrite each other.

    Raises:
        ModuleNotFoundError: If there is none.
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
    """Returns a text that differs wherever the kernels of the installed ONNX Runtime may."""
    package = _package()
    if package is None:
        return "none"
    found = _distributions(package)
    for library in sorted(package.glob("capi/*pybind11_state*")):
        status = library.stat()
        found.append(f"{library.name} {status.st_size} {status.st_mtime_ns}")
    return f"{package} {sorted(found)}"
