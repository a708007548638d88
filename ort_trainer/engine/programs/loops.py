"""Fused loops, which PyTorch's Inductor has compiled from a graph, as text for an ONNX file.

For a CPU they are a library of C functions, which a program calls between PyTorch's kernels. For a GPU they are the
Python source that launches them, and the kernels that Triton compiled. Only the cache of exports stores such code, and
it checks who may write to its files.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ...core.atomic import temporary_folder
from ...step.program_graph import LOOPS

EMPTY, VIEW = f"{LOOPS}empty", f"{LOOPS}view"
"""Targets of steps that make memory for loops, or take it in another form: a size, strides, and dtype or offset."""
RUN = f"{LOOPS}run"
"""Target of a step that runs all of a program's loops, with what lies between, on a list of tensors."""

# As Inductor's own source calls them: neither checks anything, and each takes half a microsecond.
_OF_MEMORY = {
    EMPTY: torch._C._dynamo.guards._empty_strided_cpu,  # type: ignore[attr-defined]
    VIEW: torch._C._dynamo.guards._reinterpret_tensor,  # type: ignore[attr-defined]
}
# Triton's JSON files name others by their path: this stands for the folder.
_FOLDER = b"<folder of the kernels>"
# Triton's kernels read words of this many bytes; other tensors are copied.
_ALIGNMENT = 16


def encode(library: bytes, functions: Mapping[str, int]) -> str:
    """Returns loops for a CPU as text.

    Args:
        library: The shared library of their functions. Each takes addresses of tensors and 64-bit integers, and returns
            the address of a message if it fails, or else 0.
        functions: Name of a function -> how many arguments it takes.
    """
    return json.dumps({"library": _packed(library), "functions": dict(functions)})


def encode_kernels(source: str, folder: Path, device: torch.device) -> str:
    """Returns loops for a GPU as text.

    Args:
        source: The source that Inductor has written.
        folder: Where Inductor worked.
        device: The device that the source names.
    """
    files, here = {}, str(folder).encode()
    for path in filter(Path.is_file, folder.rglob("*")):
        files[str(path.relative_to(folder))] = _packed(_moved(path, path.read_bytes(), here, _FOLDER))
    return json.dumps({"source": source, "files": files, "device": str(device)})


def takes_addresses(target: str) -> bool:
    """Returns whether a step with this target calls a function that takes the addresses of tensors."""
    return target.startswith(LOOPS) and target not in (EMPTY, VIEW, RUN)


@functools.lru_cache(maxsize=64)  # equal code is loaded only once
def load(text: str, device: torch.device) -> Mapping[str, Callable[..., Any]]:
    """Returns loops as what steps call, by target. Tensors must have the strides that they had at compilation.

    Args:
        text: From :func:`encode` or :func:`encode_kernels`.
        device: Where they run.

    Raises:
        ValueError: If the text is not code for this machine and this device.
    """
    try:
        parts = json.loads(text)
        return _of_library(**parts) if "library" in parts else {RUN: _of_kernels(**parts, here=device)}
    except (OSError, ValueError, TypeError, AttributeError, zlib.error, RuntimeError, SyntaxError) as error:
        raise ValueError(f"compiled loops can't be loaded: {error}") from error


def _of_library(library: str, functions: Mapping[str, int]) -> Mapping[str, Callable[..., Any]]:
    code = _unpacked(library)
    # Loading maps the file into memory, after which it may be deleted.
    with temporary_folder() as folder:
        path = folder / "loops.so"
        path.write_bytes(code)
        loaded = ctypes.CDLL(str(path))
    found: dict[str, Callable[..., Any]] = {**_OF_MEMORY}
    for name, count in functions.items():
        function = found[f"{LOOPS}{name}"] = getattr(loaded, name)
        function.argtypes, function.restype = (ctypes.c_int64,) * count, ctypes.c_int64
        function.errcheck = _raise_message
    return found


def _raise_message(address: int, *_: Any) -> None:
    """Raises an error with the message whose address a function returns; 0 is none."""
    if address:
        raise RuntimeError(ctypes.string_at(address).decode())


def _of_kernels(
    source: str, files: Mapping[str, str], device: str, here: torch.device
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    if device != str(here):
        raise ValueError(f"they were compiled for {device}, and are to run on {here}")
    from torch._inductor.codecache import PyCodeCache

    # Files are read as long as kernels run for the first time. Each function has its own: to overwrite a library that
    # is in use would end the process.
    own = tempfile.TemporaryDirectory(prefix="ort_trainer")
    folder = Path(own.name)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_moved(path, _unpacked(data), _FOLDER, str(folder).encode()))
    with inductor_works_in(folder):
        run: Any = PyCodeCache.load(source).call

    def run_aligned(values: list[torch.Tensor], keep: object = own) -> list[torch.Tensor]:
        result: list[torch.Tensor] = run([v.clone() if v.data_ptr() % _ALIGNMENT else v for v in values])
        return result

    return run_aligned


@contextlib.contextmanager
def inductor_works_in(folder: Path) -> Iterator[None]:
    """Lets Inductor build and load its own files in a folder that only this user can write to.

    Its default is a folder in the system's temporary folder with the user's name, which anybody may have created.
    """
    from torch._inductor.utils import clear_caches  # of paths in the folder that it used before

    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder), TRITON_CACHE_DIR=str(folder / "triton")):
        clear_caches()
        try:
            yield
        finally:
            clear_caches()


def _moved(path: Path, data: bytes, before: bytes, after: bytes) -> bytes:
    """Returns what a file holds, if it lies in another folder."""
    return data.replace(before, after) if path.suffix == ".json" else data


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text, validate=True))
