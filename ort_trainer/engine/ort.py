"""The installed ONNX Runtime: what it is and can do, its devices, options, sessions and tensors.

Only this module imports ``onnxruntime``. The import takes a third of a second, so it is delayed until a function needs
it. :func:`preload` runs it while another process exports. Only functions with a ``torch.device`` need torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.errors import shown

if TYPE_CHECKING:
    import torch
    from onnxruntime import InferenceSession, OrtValue, RunOptions, SessionOptions


__all__ = [
    "CALLING_OUT",
    "CPU",
    "DOMAINS",
    "Device",
    "InferenceSession",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "available_providers",
    "check_engine",
    "element_type",
    "engine",
    "engine_identity",
    "has_cuda",
    "has_training",
    "installed_flavours",
    "is_session_options",
    "kernel_outputs",
    "known_providers",
    "lacks_provider",
    "load_format",
    "make_session",
    "maximum_opset",
    "own_options",
    "parse_device",
    "preload",
    "process_undisturbed",
    "profiling",
    "provider_failure",
    "providers_for",
    "require_engine",
    "require_onnx",
    "session_options",
    "to_ort_value",
]

DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft")
"""The built-in operator domains of every ONNX Runtime; operators of other domains come from loaded libraries."""

CALLING_OUT = ("EPContext", "PythonOp", "PythonOpGrad")
"""Operators of these domains that call Python, or that read files named in the model."""

# In ONNX Runtime 1.19 this fusion drops a graph output that is a range, so the output's memory is never written.
_WRONG = ("GatherToSliceFusion",)
# Fusions into operators that may lack a kernel for the type; see make_session.
_FUSIONS = ("MatMulScaleFusion", "MatmulTransposeFusion", "QuickGeluFusion")
# (release of ONNX Runtime, newest opset that it implements)
_OPSETS = (((1, 17), 20), ((1, 18), 21), ((1, 21), 22), ((1, 23), 23))
_LOAD_FORMAT = "session.load_model_format"
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_NO_ENGINE = """This needs ONNX Runtime, which is not installed. Install one of the three engines:
  pip install onnxruntime-training-cpu==1.19.2   the extra [cpu]: Python up to 3.12
  pip install onnxruntime-training==1.19.2       the extra [cuda]: the same with CUDA, Linux, Python up to 3.11
  pip install 'onnxruntime>=1.20'                the extra [stock]: any Python and platform"""


@functools.cache
def _installed_package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise LookupError(name)  # not in the cache: a notebook may install it later
    return Path(spec.origin).parent


def _folder(name: str) -> Path | None:
    """Returns the folder of an installed package; None if it is not installed."""
    with contextlib.suppress(LookupError):
        return _installed_package(name)
    return None


def _package() -> Path | None:
    """Returns the folder of the ``onnxruntime`` module; None if it is not installed."""
    return _folder("onnxruntime")


def _distributions(package: Path) -> list[str]:
    """Returns the names of the metadata folders of all ONNX Runtime distributions beside its module."""
    # Reading the metadata of every installed distribution would take longer than a whole first step should.
    return sorted(path.name for path in package.parent.glob("onnxruntime*.dist-info"))


def installed_flavours() -> tuple[str, ...]:
    """Returns the distributions that installed the ``onnxruntime`` module; several overwrite each other's files."""
    package = _package()
    return () if package is None else _flavours(package)


@functools.cache
def _flavours(package: Path) -> tuple[str, ...]:
    names = {name.split("-")[0].lower().replace("_", "-") for name in _distributions(package)}
    return tuple(sorted(name for name in names if name == "onnxruntime" or name.startswith("onnxruntime-")))


def has_training() -> bool:
    """Returns whether onnxruntime-training is installed."""
    return any(name.startswith("onnxruntime-training") for name in installed_flavours())


def require_engine() -> None:
    """Raises if ONNX Runtime is not installed.

    Raises:
        ModuleNotFoundError: If it is not installed; the message has the commands that install it.
    """
    if _package() is None:
        raise ModuleNotFoundError(_NO_ENGINE, name="onnxruntime")


def require_onnx() -> None:
    """Raises if the packages that read and write ONNX models are not installed.

    Raises:
        ModuleNotFoundError: If one is missing; the message has the command that installs them.
    """
    lacking = _lacks_onnx()
    if lacking:
        raise ModuleNotFoundError(f"This needs {lacking}")


def _lacks_onnx() -> str:
    """Returns which packages are missing that read and write ONNX models, and what to do; "" if none is."""
    missing = [name for name in ("onnx", "onnx_ir", "onnxscript") if _folder(name) is None]
    return f"{', '.join(missing)}, not installed: pip install 'ort_trainer[onnx]'" if missing else ""


def check_engine() -> None:
    """Warns if several distributions of ONNX Runtime overwrite each other."""
    clashing = [n for n in installed_flavours() if not n.startswith(("onnxruntime-extensions", "onnxruntime-genai"))]
    if len(clashing) > 1:
        warnings.warn(
            f"several distributions of ONNX Runtime are installed: {', '.join(clashing)}. They overwrite each other's "
            "files; uninstall all of them and install one",
            RuntimeWarning,
            stacklevel=3,
        )


def engine_identity() -> str:
    """Returns text that identifies the installed ONNX Runtime; it differs whenever the kernels may differ."""
    package = _package()
    return "none" if package is None else _identity(package)


@functools.cache
def _identity(package: Path) -> str:
    parts = _distributions(package)
    for library in sorted(package.glob("capi/*pybind11_state*")):
        status = library.stat()
        parts.append(f"{library.name} {status.st_size} {status.st_mtime_ns}")
    return f"{package} {sorted(parts)}"


def __getattr__(name: str) -> Any:
    """Returns the classes of ONNX Runtime that this module re-exports, on first use."""
    if name in ("InferenceSession", "OrtValue", "RunOptions", "SessionOptions"):
        return getattr(engine(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def engine() -> Any:
    """Returns the module ``onnxruntime``.

    onnxruntime-training imports ORTModule only to check that it exists, and with it sympy, setuptools and ONNX: half a
    second and 40 MB. This function hides ORTModule during the import only.

    Raises:
        ModuleNotFoundError: If ONNX Runtime is not installed.
    """
    require_engine()
    kept_out = "onnxruntime.training"
    if "onnxruntime" in sys.modules or kept_out in sys.modules:
        return importlib.import_module("onnxruntime")
    sys.modules[kept_out] = None  # type: ignore[assignment]
    try:
        with process_undisturbed():
            return importlib.import_module("onnxruntime")
    finally:
        del sys.modules[kept_out]


def preload() -> None:
    """Imports ONNX Runtime, if it is installed, before the first session needs it."""
    if _package() is not None:
        engine()


def is_session_options(value: object) -> bool:
    """Returns whether a value is an ``onnxruntime.SessionOptions``, without importing ONNX Runtime."""
    onnxruntime = sys.modules.get("onnxruntime")
    return onnxruntime is not None and isinstance(value, onnxruntime.SessionOptions)


def maximum_opset() -> int:
    """Returns the newest ONNX opset that the installed ONNX Runtime implements.

    ONNX Runtime has no function for this, but each of its releases is built with one release of ONNX. The pairs come
    from the release notes of both; newer runtimes support at least the last opset.
    """
    import onnx

    onnxruntime = engine()

    version = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    newest = max(opset for release, opset in _OPSETS if version >= release or release == _OPSETS[0][0])
    return min(newest, onnx.defs.onnx_opset_version())


def available_providers() -> list[str]:
    """Returns the names of the execution providers of the installed ONNX Runtime."""
    return list(engine().get_available_providers())


def known_providers() -> list[str]:
    """Returns the names of all execution providers that ONNX Runtime knows, installed or not."""
    return list(dict.fromkeys([*engine().get_all_providers(), *available_providers()]))


def has_cuda() -> bool:
    """Returns whether both ONNX Runtime and PyTorch can use a CUDA device here."""
    import torch

    return torch.cuda.is_available() and _PROVIDERS["cuda"] in available_providers()


class Device(NamedTuple):
    """A device for state and outputs.

    Attributes:
        type: ``cpu`` or ``cuda``, ONNX Runtime's name.
        number: Index among the devices of this type.
    """

    type: str
    number: int = 0

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.number}"


CPU = Device("cpu")


def parse_device(text: str) -> Device:
    """Returns the device that a name stands for.

    Raises:
        TypeError: If the name is not a str.
        ValueError: If the device is unknown or unavailable.
    """
    if not isinstance(text, str):
        raise TypeError(f"device must be a str, such as 'cpu' or 'cuda:1', but {shown(text)} was given")
    kind, colon, index = text.partition(":")
    has_valid_index = index.isdecimal() if colon else True
    if kind not in _PROVIDERS or not has_valid_index or (kind == "cpu" and index.strip("0")):
        raise ValueError(f"unknown device {text!r}: use 'cpu', 'cuda' or 'cuda:N'")
    available = available_providers()
    if _PROVIDERS[kind] not in available:
        raise ValueError(
            f"device {text!r} needs {_PROVIDERS[kind]}, but the installed ONNX Runtime {engine().__version__} has "
            f"only {available}: use device='cpu', or uninstall it and install a build that has it"
        )
    return Device(kind, int(index or 0))


def lacks_provider(device: torch.device) -> str:
    """Returns why ONNX Runtime can't compute on a device of PyTorch; "" if it can."""
    if _package() is None:
        return "ONNX Runtime is not installed (pip install 'onnxruntime>=1.20')"
    if _lacks_onnx():
        return f"it needs {_lacks_onnx()}"
    if device.type == "cpu" or (device.type in _PROVIDERS and _PROVIDERS[device.type] in available_providers()):
        return ""
    lacking = _PROVIDERS.get(device.type, "an execution provider for it")
    return f"ONNX Runtime {engine().__version__} lacks {lacking}, and training runs on {device}"


def providers_for(
    device: torch.device | Device, provider_options: Mapping[str, Mapping[str, object]] = {}, mem_limit: int = 0
) -> list[tuple[str, dict[str, object]]]:
    """Returns the execution providers of a device with their options, in order of preference.

    Args:
        device: The device that the tensors live on.
        provider_options: Options per provider. Providers that the device does not imply come first.
        mem_limit: Bytes that the CUDA provider may allocate; 0 for no limit.

    Raises:
        ValueError: If a provider is not installed.
    """
    available = available_providers() if provider_options else []
    unknown = sorted(set(provider_options) - set(available))
    if unknown:
        raise ValueError(f"provider_options names {unknown}, but the installed ONNX Runtime has only {available}")
    implied: dict[str, dict[str, object]] = {}
    if device.type == "cuda":
        if isinstance(device, Device):
            implied[_PROVIDERS["cuda"]] = {"device_id": str(device.number)}
        else:
            import torch

            # Both libraries share one stream, so that neither reads data that the other has not written yet.
            stream = torch.cuda.current_stream(device).cuda_stream
            implied[_PROVIDERS["cuda"]] = {"device_id": str(device.index), "user_compute_stream": str(stream)}
        if mem_limit:
            implied[_PROVIDERS["cuda"]]["gpu_mem_limit"] = str(mem_limit)
    implied[_PROVIDERS["cpu"]] = {}
    extra = {name: dict(options) for name, options in provider_options.items() if name not in implied}
    for name, options in provider_options.items():
        if name in implied:
            implied[name].update(options)
    return [*extra.items(), *implied.items()]


def session_options(user_options: SessionOptions | None, deterministic: bool) -> SessionOptions:
    """Returns the options for all ONNX Runtime sessions of a trainer.

    Args:
        user_options: The user's options, used as they are and never changed; None for the package's.
        deterministic: The option ``debug.deterministic_compute``.

    Raises:
        ValueError: If the user's options lack the requested deterministic compute, or expect models in ONNX
            Runtime's own format.
    """
    if user_options is not None:
        if load_format(user_options) != "ONNX":
            raise ValueError(
                f"session_options have {_LOAD_FORMAT} {load_format(user_options)!r}, but models in ONNX "
                "Runtime's own format (.ort) can't be differentiated; training graphs are always ONNX: leave it out"
            )
        if deterministic and not user_options.use_deterministic_compute:
            raise ValueError(
                "debug.deterministic_compute is True, but the given session_options are used as they are and have "
                "use_deterministic_compute = False: set it to True in them"
            )
        return user_options
    import torch

    # Both libraries get the same number of threads.
    options = own_options()
    options.intra_op_num_threads = torch.get_num_threads()
    options.use_deterministic_compute = deterministic
    return options


def own_options(update: bool = False) -> SessionOptions:
    """Returns new options, with what all sessions of this package share.

    Args:
        update: Whether the session updates the weights, with many short operators.
    """
    options: SessionOptions = engine().SessionOptions()
    # Threads that keep spinning after a run take the cores from what runs next: the update, on PyTorch's threads or in
    # another session. Within an update they do spin: waking a thread takes as long as its share of an operator. Within
    # a step, spinning would make processes that share the cores wait for each other.
    spinning = ("session.force_spinning_stop", "1") if update else ("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(*spinning)
    # ONNX Runtime would keep a memory plan for every combination of shapes: 6 KB each for two layers. Without, steps
    # take no longer and use 3% less memory.
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    return options


def load_format(options: SessionOptions) -> str:
    """Returns the format of models that a session with these options expects: ``ONNX``, or another of the user's."""
    try:
        return str(options.get_session_config_entry(_LOAD_FORMAT))
    except RuntimeError:  # not set
        return "ONNX"


def make_session(
    model: bytes, options: SessionOptions, providers: Sequence[tuple[str, dict[str, object]] | str]
) -> InferenceSession:
    """Returns a session of a model.

    ONNX Runtime's optimizer sometimes fuses operators into one for which it has no kernel, such as a transposition and
    a product of doubles. The session of such a model disables these fusions.
    """
    onnxruntime = engine()
    make = functools.partial(onnxruntime.InferenceSession, model, options, list(providers))
    try:
        session: InferenceSession = make(disabled_optimizers=[*_WRONG])
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:  # no kernel for a fused operator
        session = make(disabled_optimizers=[*_WRONG, *_FUSIONS])
    return session


@contextlib.contextmanager
def profiling(options: SessionOptions, prefix: str) -> Iterator[None]:
    """A context whose new sessions record the time of every node, and write a file in their ``end_profiling``.

    Args:
        options: The sessions' options. They can't be copied, so the context changes and then restores them, even the
            user's own.
        prefix: Prefix of the file's path.
    """
    previous = options.enable_profiling, options.profile_file_prefix
    options.enable_profiling, options.profile_file_prefix = True, prefix
    try:
        yield
    finally:
        options.enable_profiling, options.profile_file_prefix = previous


@functools.lru_cache(maxsize=4096)
def kernel_outputs(model: bytes, device: str) -> tuple[int, ...] | None:
    """Returns the ONNX element types of a node's outputs, or None if there is no kernel for its types.

    ONNX Runtime has no list of its kernels, but it looks them up when it creates a session, which takes 0.2 ms for one
    node.

    Args:
        model: A serialized model with one node, whose outputs need no types.
        device: The kind of a device; one without a provider has the kernels of the CPU.

    Returns:
        The types; an empty tuple if an output is no tensor, or if the node is refused for any other reason, which may
        not apply in its actual model.
    """
    import onnx

    onnxruntime = engine()
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    available = onnxruntime.get_available_providers()
    providers = [name for name in dict.fromkeys((_PROVIDERS.get(device), _PROVIDERS["cpu"])) if name in available]
    try:
        session = onnxruntime.InferenceSession(model, options, providers)
    except NoKernel:
        return None
    except Exception as error:  # there is no separate exception class for types that ONNX does not allow
        return None if "Type Error" in str(error) else ()
    types = [output.type for output in session.get_outputs()]
    if not all(kind.startswith("tensor(") for kind in types):  # sequences of tensors, which SplitToSequence returns
        return ()
    return tuple(onnx.TensorProto.DataType.Value(kind[len("tensor(") : -1].upper()) for kind in types)


def element_type(kind: str) -> str:
    """Returns NumPy's name of the element type in ONNX Runtime's name of a type: float32 for ``tensor(float)``."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)


def provider_failure() -> type[Exception]:
    """Returns the class of the error that a failed execution provider raises."""
    engine()
    from onnxruntime.capi import onnxruntime_pybind11_state as bindings

    failure: type[Exception] = bindings.EPFail
    return failure


def to_ort_value(array: np.ndarray[Any, Any], device: Device) -> OrtValue:
    """Returns a copy of an array as an OrtValue that owns its memory, which lives as long as any view of it."""
    kind = engine().OrtValue
    if array.dtype == bool or not array.size:  # ONNX Runtime can't allocate these itself
        value: OrtValue = kind.ortvalue_from_numpy(array.copy(), device.type, device.number)
        return value
    value = kind.ortvalue_from_shape_and_type(array.shape, array.dtype.type, device.type, device.number)
    value.update_inplace(array)
    return value


@contextlib.contextmanager
def process_undisturbed() -> Iterator[None]:
    """Restores what imports of ONNX Runtime's training packages change: they log, and append to ``sys.path``.

    The first logged record gives the root logger a handler, after which the user's ``logging.basicConfig`` would do
    nothing.
    """
    root = logging.getLogger()
    level, handlers, path = root.level, list(root.handlers), list(sys.path)
    try:
        yield
    finally:
        root.setLevel(level)
        # A thread may import while others add handlers of their own: logging adds one only where there is none.
        for handler in [] if handlers else [each for each in root.handlers if type(each) is logging.StreamHandler]:
            root.removeHandler(handler)
        sys.path[:] = path
