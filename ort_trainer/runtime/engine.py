"""What the installed ONNX Runtime can do: the one place that imports ``onnxruntime``; the rest of the package asks.

Its import takes a third of a second, so it waits until a function needs it: :func:`preload` does it while an export is
under way in another process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..sessions import new_session
from ..undisturbed import process_undisturbed
from .installed import require_engine

if TYPE_CHECKING:
    import onnx
    from onnxruntime import InferenceSession, SessionOptions

__all__ = [
    "InferenceSession",
    "SessionOptions",
    "is_session_options",
    "kernel_outputs",
    "make_session",
    "maximum_opset",
    "preload",
    "profiling",
    "providers_for",
    "resolve_device",
    "session_options",
    "training_bindings",
]

_log = logging.getLogger(__name__)
_OPSETS = (((1, 17), 20), ((1, 18), 21), ((1, 21), 22), ((1, 23), 23))
_LOAD_FORMAT = "session.load_model_format"
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def __getattr__(name: str) -> Any:
    """Gives the classes of ONNX Runtime that this module passes on, when they are asked for."""
    if name in ("InferenceSession", "SessionOptions"):
        return getattr(engine(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def engine() -> Any:
    """Returns the module ``onnxruntime``.

    That of onnxruntime-training imports ORTModule only to see whether it is there, and with it sympy, setuptools and
    ONNX: half a second and 40 MB. While it is imported here, it does not find ORTModule; afterwards anybody does.

    Raises:
        ModuleNotFoundError: If no ONNX Runtime is installed.
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
    """Imports what the first session needs, so that it need not wait for that."""
    engine()


def is_session_options(value: object) -> bool:
    """Returns whether something is an ``onnxruntime.SessionOptions``; no such thing exists before the import."""
    known = sys.modules.get("onnxruntime")
    return known is not None and isinstance(value, known.SessionOptions)


def maximum_opset() -> int:
    """Returns the newest ONNX operator set that the installed ONNX Runtime implements.

    ONNX Runtime has no call for this, but each of its releases is built with one release of ONNX: the release
    notes of both give the pairs below. Newer runtimes take at least what the last pair says.
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
    return torch.cuda.is_available() and _PROVIDERS["cuda"] in available_providers()


def resolve_device(name: str, explicit: bool, local_rank: int | None = None) -> torch.device:
    """Returns the device to train on.

    Args:
        name: The option ``device.id``: ``cpu``, ``cuda`` or ``cuda:N``.
        explicit: Whether the user asked for it by name. If not, a missing CUDA falls back to the CPU.
        local_rank: Which of the processes on this machine this one is; None if nobody says it. It chooses the device
            where the name does not; without it that is PyTorch's current one.

    Raises:
        ValueError: If the device was asked for by name and is not there.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    if not has_cuda():
        if not explicit:
            _log.info("no CUDA device in both ONNX Runtime and PyTorch: training runs on the CPU")
            return torch.device("cpu")
        onnxruntime = engine()

        raise ValueError(
            f"device.id {name!r} was asked for, but CUDA is not available (ONNX Runtime {onnxruntime.__version__} has "
            f"{available_providers()}, torch.cuda.is_available() is {torch.cuda.is_available()}): "
            "set device.id to 'cpu', leave it out, or install CUDA builds of both"
        )
    index, count = device.index, torch.cuda.device_count()
    if index is None and local_rank is not None:
        index = local_rank if count > 1 else 0  # some launchers let each process see one device only
        if index >= count:
            raise ValueError(
                f"there are {count} CUDA devices, but this process has the local rank {local_rank}: launch at most "
                f"{count} processes here, or set device.id"
            )
    index = torch.cuda.current_device() if index is None else index
    if index >= count:
        raise ValueError(f"device.id {name!r} was asked for, but there are {count} CUDA devices")
    return torch.device("cuda", index)


def providers_for(
    device: torch.device, provider_options: Mapping[str, Mapping[str, object]], mem_limit: int = 0
) -> list[tuple[str, dict[str, object]]]:
    """Returns the execution providers of a device with their options, in order of preference.

    Args:
        device: The device that the tensors live on.
        provider_options: Options per provider. A provider that the device does not imply comes first.
        mem_limit: Bytes that the CUDA provider may allocate; 0 is no limit.

    Raises:
        ValueError: If a provider is not installed.
    """
    available = available_providers() if provider_options else []
    unknown = sorted(set(provider_options) - set(available))
    if unknown:
        raise ValueError(f"provider_options names {unknown}, but the installed ONNX Runtime has only {available}")
    implied: dict[str, dict[str, object]] = {}
    if device.type == "cuda":
        # One stream for both libraries, so that neither reads what the other has not written yet.
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


def session_options(given: SessionOptions | None, deterministic: bool, threads: int = 0) -> SessionOptions:
    """Returns the options that every ONNX Runtime session of a trainer is made with.

    Args:
        given: The user's own; used as they are and never written to.
        deterministic: The option ``debug.deterministic_compute``.
        threads: How many threads ONNX Runtime computes with; 0 for as many as PyTorch.

    Raises:
        ValueError: If deterministic compute was asked for and the user's own options do not have it, or if these expect
            models in ONNX Runtime's own format.
    """
    if given is not None:
        if _config_entry(given, _LOAD_FORMAT) not in (None, "ONNX"):
            raise ValueError(
                f"session_options have {_LOAD_FORMAT} {_config_entry(given, _LOAD_FORMAT)!r}, but models in ONNX "
                "Runtime's own format (.ort) can't be differentiated, and what is trained is always ONNX: leave it out"
            )
        if deterministic and not given.use_deterministic_compute:
            raise ValueError(
                "debug.deterministic_compute is True, but the given session_options are used as they are and have "
                "use_deterministic_compute = False: set it on them too"
            )
        return given
    onnxruntime = engine()

    options = onnxruntime.SessionOptions()
    # Both libraries get the same number of threads, and ONNX Runtime's do not spin after a run: spinning threads
    # would take the cores from the optimizer update, which runs on PyTorch's pool right after.
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads == 1:
        # In the order of the graph. By itself ONNX Runtime leaves what only outputs need, such as the gradients of
        # weights, to the end, and holds everything that they are computed from until then.
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.use_deterministic_compute = deterministic
    # ONNX Runtime would keep a plan of the memory for every combination of shapes that it ever meets: 6 KB each for two
    # layers. Without, a step takes no longer, and 3% less memory.
    options.enable_mem_pattern = False
    options.log_severity_level = 3
    return options


def _config_entry(options: SessionOptions, key: str) -> str | None:
    """Returns an entry of a session's configuration; None where there is none, for which ONNX Runtime raises."""
    try:
        return str(options.get_session_config_entry(key))
    except RuntimeError:
        return None


@contextlib.contextmanager
def profiling(options: SessionOptions, prefix: str) -> Iterator[None]:
    """Sessions that are made within it note the time of every node, and write a file at their ``end_profiling``.

    Args:
        options: What the sessions are made with. They can't be copied, so they are set and then put back, the user's
            own too.
        prefix: What the path of the file begins with.
    """
    known = options.enable_profiling, options.profile_file_prefix
    options.enable_profiling, options.profile_file_prefix = True, prefix
    try:
        yield
    finally:
        options.enable_profiling, options.profile_file_prefix = known


def make_session(
    model: bytes, options: SessionOptions, providers: Sequence[tuple[str, dict[str, object]] | str]
) -> InferenceSession:
    """Returns a session of a model."""
    session: InferenceSession = new_session(engine(), model, options, providers)
    return session


@functools.lru_cache(maxsize=4096)
def kernel_outputs(model: bytes, device: str) -> tuple[int, ...] | None:
    """Returns the ONNX element types that the one node of a model gives, or None if there is no kernel for its types.

    ONNX Runtime has no list of its kernels, but it looks for them when it makes a session, which takes 0.2 ms for one
    node.

    Args:
        model: A serialized model of one node, whose outputs need no types.
        device: ``cpu`` or ``cuda``.

    Returns:
        The types; none at all for a node that is refused for any other reason, of which there may be some that do not
        count where it has its place in a model.
    """
    import onnx

    onnxruntime = engine()
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    available = onnxruntime.get_available_providers()
    providers = [name for name in dict.fromkeys((_PROVIDERS[device], _PROVIDERS["cpu"])) if name in available]
    try:
        session = onnxruntime.InferenceSession(model, options, providers)
    except NoKernel:
        return None
    except Exception as error:  # that ONNX does not allow a type has no separate exception class
        return None if "Type Error" in str(error) else ()
    names = (output.type.removeprefix("tensor(").removesuffix(")") for output in session.get_outputs())
    return tuple(onnx.TensorProto.DataType.Value(name.upper()) for name in names)


def training_bindings() -> Any:
    """Returns the part of ONNX Runtime that differentiates ONNX graphs.

    Raises:
        RuntimeError: If the installed distribution is not onnxruntime-training.
    """
    onnxruntime = engine()
    # The module of the bindings themselves: compat puts names of its own into _pybind_state, which passes them on.
    from onnxruntime.capi import onnxruntime_pybind11_state as bindings

    if not hasattr(bindings, "GradientGraphBuilder"):
        raise RuntimeError(
            f"training an ONNX model needs onnxruntime-training, which differentiates it, but ONNX Runtime "
            f"{onnxruntime.__version__} is installed without: with Python up to 3.12 uninstall onnxruntime and install "
            "onnxruntime-training-cpu==1.19.2, or train the PyTorch model itself, which works with any ONNX Runtime"
        )
    return bindings


def infer_symbolic_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model with the shapes that ONNX Runtime's symbolic shape inference finds, as terms of names."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    found: onnx.ModelProto = SymbolicShapeInference.infer_shapes(model, auto_merge=True, guess_output_rank=True)
    return found


def make_ort_value(array: Any, device_type: str, device_id: int) -> Any:
    """Returns a copy of a numpy array as an ``onnxruntime.OrtValue`` on a device, in separate memory."""
    onnxruntime = engine()

    if array.dtype == bool or not array.size:  # of these it can't make any
        return onnxruntime.OrtValue.ortvalue_from_numpy(array.copy(), device_type, device_id)
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type, device_type, device_id)
    value.update_inplace(array)
    return value
