"""Reads the HDF5 checkpoints that the legacy ``ORTTrainer`` (ONNX Runtime 1.10 to 1.16) wrote.

Only this module imports h5py, and only to read such a file. It never reads the user's dict in a legacy file, because it
is a pickle, which can execute anything when it is loaded.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import CheckpointError, shown
from ..core.foreign import is_hdf5
from ..core.forked import end, forked
from ..core.optimizer_keys import UPDATE_COUNT

StateDict = dict[str, Any]
_NUMERIC_OPTIONS = (
    "zero_stage",
    "world_rank",
    "world_size",
    "data_parallel_size",
    "horizontal_parallel_size",
    "gradient_accumulation_steps",
)
_SECTIONS = ("model", "optimizer", "partition_info", "train_step_info", "trainer_options", "user_dict")
# Bounds far above what an intact file needs: additional memory plus a multiple of the file's size, and CPU time.
_MEMORY = 256 << 20
_SIZES = 4
_SECONDS = 5
_BYTES_PER_SECOND = 20 << 20
# Bound on wall-clock time, because a waiting child uses no CPU time.
_LONGEST_WAIT = 60
_TIMEOUTS = ("SIGXCPU", "SIGALRM", "SIGKILL")


def is_legacy_file(path: Path) -> bool:
    """Returns whether a file is HDF5, judged by its first bytes."""
    with path.open("rb") as file:
        return is_hdf5(file.read(8))


def load_legacy_file(path: Path, name: str) -> StateDict:
    """Reads a checkpoint of a run with one process.

    Args:
        path: The file.
        name: The file's name for messages.

    Returns:
        The state dict.

    Raises:
        CheckpointError: If the file is damaged, not a checkpoint, or one of several files of a distributed run.
        ImportError: If h5py is not installed.
    """
    state = _read(path, name)
    return _aggregate([state]) if "partition_info" in state or _is_sharded(state) else state


def aggregate_legacy_files(files: Sequence[Any]) -> StateDict:
    """Merges the files of a ZeRO run, one per rank, into one state dict.

    Args:
        files: Paths of the files of all ranks, in any order.

    Returns:
        The state dict that a run with one process would have written.

    Raises:
        FileNotFoundError: If a file does not exist.
        CheckpointError: If a file is not a legacy checkpoint, a rank is missing, or the parts do not fit together.
    """
    paths = [Path(file) for file in files]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"there is no checkpoint {str(path)!r}")
        if not is_legacy_file(path):
            raise CheckpointError(
                f"Expected number of files to load: 1, got {len(paths)}: only the files of a distributed legacy run "
                f"(HDF5) can be loaded together, and {str(path)!r} is not one of those"
            )
    return _aggregate([_read(path, repr(str(path))) for path in paths])


def legacy_values(path: Path, name: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the path and the value of each entry of a file, reading one at a time; None for the user's dict.

    Args:
        path: The file.
        name: The file's name for messages.

    Raises:
        CheckpointError: If the file is damaged or not a checkpoint.
        ImportError: If h5py is not installed.
    """
    with _opened(path, name) as (file, h5py):
        _check_sections(file, name)
        yield from _leaves(file, h5py, name, path.stat().st_size)


def _read(path: Path, name: str) -> StateDict:
    with _opened(path, name) as (file, h5py):
        return _nest(file, h5py, name, path.stat().st_size)


@contextlib.contextmanager
def _opened(path: Path, name: str) -> Iterator[tuple[Any, Any]]:
    """Yields the open file and h5py; turns errors inside the context into errors about a damaged file."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            f"{name} is a checkpoint of the legacy ORTTrainer (HDF5); to read it, install h5py: "
            "pip install 'ort_trainer[legacy]'"
        ) from error
    size = path.stat().st_size

    def read_every_value() -> None:
        with h5py.File(path, "r") as file:
            _check_sections(file, name)
            for _ in _leaves(file, h5py, name, size):
                pass

    _rehearse(read_every_value, size, name)
    try:
        with h5py.File(path, "r") as file:
            yield file, h5py
    except CheckpointError:
        raise
    except (OSError, LookupError, RuntimeError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"{name} is damaged: {error!r}") from error


def _check_sections(file: Any, name: str) -> None:
    unknown = sorted(set(file) - set(_SECTIONS))
    if unknown or "model" not in file:
        raise CheckpointError(
            f"{name} is an HDF5 file, but not a checkpoint of the legacy ORTTrainer: it holds {sorted(file)[:10]}"
        )


def _nest(file: Any, h5py: Any, name: str, size: int) -> StateDict:
    """Returns the nested state dict; joins parameter names with slashes, which HDF5 has split into groups."""
    _check_sections(file, name)
    state: StateDict = {key: {} for key in file if key != "user_dict"}
    for (section, *path), value in _leaves(file, h5py, name, size):
        if section == "user_dict":
            warnings.warn(
                f"the user_dict in {name} is a pickle, which could execute anything, so it is left out. To keep it, "
                "read it in the old environment and store it there as JSON",
                UserWarning,
                stacklevel=5,
            )
        elif section == "model" and len(path) > 1:
            state[section].setdefault(path[0], {})["/".join(path[1:])] = value
        elif section in ("optimizer", "partition_info") and len(path) > 1:
            state[section].setdefault("/".join(path[:-1]), {})[path[-1]] = value
        elif section in ("train_step_info", "trainer_options") and len(path) == 1 and value.ndim == 0:
            state[section][path[0]] = value.item()
        else:
            raise CheckpointError(f"{name} is damaged: {'/'.join((section, *path))!r} does not belong there")
    return state


def _leaves(
    group: Any, h5py: Any, name: str, size: int, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields (path, array) of every dataset; ``size`` is that of the file, which is never compressed."""
    for key in group:
        here = (*path, key)
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise CheckpointError(f"{name} has a link at {'/'.join(here)!r}: links are not supported")
        entry = group[key]
        if isinstance(entry, h5py.Group):
            yield from _leaves(entry, h5py, name, size, here)
        elif not isinstance(entry, h5py.Dataset):
            raise CheckpointError(f"{name} is damaged: {'/'.join(here)!r} is a data type, not data")
        elif entry.external or entry.is_virtual:
            raise CheckpointError(f"{name} keeps {'/'.join(here)!r} in another file, which is not supported")
        elif entry.nbytes > size:
            raise CheckpointError(f"{name} is damaged: {'/'.join(here)!r} claims to be larger than the file")
        elif here == ("user_dict",):
            yield here, None
        else:
            value = entry[()]
            array = np.asarray(value.decode() if isinstance(value, bytes) else value)
            _check_kind(array, here, name)
            # PyTorch supports only this machine's byte order.
            yield here, array.astype(array.dtype.newbyteorder("="), copy=False)


def _check_kind(array: np.ndarray[Any, Any], path: tuple[str, ...], name: str) -> None:
    """Raises if a value has the wrong kind for its path."""
    where = "/".join(path)
    numeric = path[0] in ("model", "optimizer", "partition_info", "train_step_info")
    if (numeric or path[-1] in _NUMERIC_OPTIONS) and array.dtype.kind not in "biuf":
        raise CheckpointError(f"{name} is damaged: {where!r} must be numbers, but its dtype is {array.dtype}")
    counts = (
        path[-1] == UPDATE_COUNT or path[0] in ("partition_info", "train_step_info") or path[-1] in _NUMERIC_OPTIONS
    )
    if counts and not np.isfinite(array).all():
        raise CheckpointError(f"{name} is damaged: {where!r} must be finite, but it is {array}")


def _is_sharded(state: Mapping[str, Any]) -> bool:
    options = state.get("trainer_options", {})
    return bool(options.get("zero_stage", 0) > 0 or options.get("horizontal_parallel_size", 1) > 1)


def _aggregate(states: list[StateDict]) -> StateDict:
    """Merges the state dicts of all ranks; turns errors into errors about damaged checkpoints."""
    try:
        return _put_together(states)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError) as error:
        raise CheckpointError(f"the checkpoints of the ranks are damaged: {error!r}") from error


def _put_together(states: list[StateDict]) -> StateDict:
    """Merges the state dicts of all ranks; damage raises whatever error it causes."""
    options = [state.get("trainer_options", {}) for state in states]
    if any(entry.get("horizontal_parallel_size", 1) > 1 for entry in options):
        raise CheckpointError(
            "the checkpoint is from a Megatron run (horizontal_parallel_size > 1), whose files can't be merged here: "
            "merge them in the old environment with onnxruntime.training.checkpoint.aggregate_checkpoints, and load "
            "the result with load_state_dict"
        )
    size = options[0].get("world_size", 1)
    ranks = sorted(entry.get("world_rank", 0) for entry in options)
    if (
        size != len(ranks)
        or ranks != list(range(len(ranks)))
        or any(entry.get("world_size", 1) != size for entry in options)
    ):
        raise CheckpointError(
            f"the checkpoint belongs to a run of {shown(size)} ranks, which needs the file of each rank once, but "
            f"those of ranks {ranks} were given"
        )
    states = sorted(states, key=lambda state: state.get("trainer_options", {}).get("world_rank", 0))
    first = states[0]
    shapes: dict[str, Any] = {}
    for state in states:
        shapes |= {name: info["original_dim"] for name, info in state.get("partition_info", {}).items()}
    merged: StateDict = {"model": _merge([state["model"] for state in states], lambda path: shapes.get(path[-1]))}
    if "optimizer" in first:
        merged["optimizer"] = _merge(
            [state.get("optimizer", {}) for state in states],
            lambda path: shapes.get(path[0]) if path[-1].startswith("Moment_") else None,
        )
    if "train_step_info" in first:
        merged["train_step_info"] = first["train_step_info"]
    if "trainer_options" in first:
        merged["trainer_options"] = {
            **first["trainer_options"],
            **dict.fromkeys(("world_size", "data_parallel_size", "horizontal_parallel_size"), 1),
            **dict.fromkeys(("world_rank", "zero_stage"), 0),
        }
    return merged


def _merge(parts: Sequence[Mapping[str, Any]], shape_of: Any, path: tuple[str, ...] = ()) -> StateDict:
    """Merges nested dicts of the ranks; ``shape_of`` returns the complete shape of a tensor that may be split."""
    merged: StateDict = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if key in part]
        here = (*path, key)
        nested = isinstance(values[0], Mapping)
        merged[key] = _merge(values, shape_of, here) if nested else _join(values, shape_of(here), here)
    return merged


def _join(values: list[Any], shape: Any, path: tuple[str, ...]) -> Any:
    """Concatenates the ranks' parts of a tensor, or returns the value that is equal in all ranks."""
    if shape is not None:
        whole_shape = [int(size) for size in np.ravel(shape)]
        if sum(np.size(value) for value in values) == math.prod(whole_shape):
            return np.concatenate([np.ravel(value) for value in values]).reshape(whole_shape)
    if all(np.array_equal(value, values[0]) for value in values[1:]):
        return values[0] if shape is None else _checked_whole(values[0], whole_shape, path)
    raise CheckpointError(f"the checkpoints of the ranks do not fit together: {'/'.join(path)!r} differs between them")


def _checked_whole(value: Any, whole_shape: list[int], path: tuple[str, ...]) -> Any:
    """Returns a tensor that no rank has split, in its complete shape."""
    if np.size(value) != math.prod(whole_shape):
        raise CheckpointError(
            f"the checkpoints of the ranks do not fit together: {'/'.join(path)!r} has {np.size(value)} of "
            f"{math.prod(whole_shape)} elements"
        )
    return np.reshape(value, whole_shape)


def _rehearse(function: Callable[[], object], size: int, name: str) -> None:
    """Calls a function in a forked child process with bounds on memory and time, and discards its result.

    The HDF5 library is written in C and trusts its files: a damaged file can make it run forever, or allocate any
    amount of memory. Without fork (on Windows) this does nothing; memory is limited on Linux only.

    Args:
        function: Reads a file.
        size: Size of the file in bytes, from which the bounds follow.
        name: The file's name for messages.

    Raises:
        CheckpointError: If the function fails, crashes, or exceeds the bounds.
    """
    if not hasattr(os, "fork"):
        return
    seconds = _SECONDS + size // _BYTES_PER_SECOND

    def work(writer: int) -> None:
        warnings.simplefilter("ignore")
        try:
            _bound(_MEMORY + _SIZES * size, seconds)
            function()
        except BaseException as error:
            problem = str(error) if isinstance(error, CheckpointError) else repr(error)
            os.write(writer, problem.encode(errors="replace")[:4000])
            raise

    child, reader = forked(work)
    try:
        with os.fdopen(reader, "rb") as stream:
            problem = stream.read().decode(errors="replace")  # until the child ends
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:
        end(child)
        raise
    if status == 0:
        return
    if status < 0:
        death = signal.Signals(-status).name
        takes_long = f"reading it takes more than {seconds} seconds, too long for its size"
        problem = takes_long if death in _TIMEOUTS else f"reading it crashes the process ({death})"
    raise CheckpointError(problem if name in problem else f"{name} is damaged: {problem}")


def _bound(memory: int, seconds: int) -> None:
    """Limits the time of this process and, on Linux, the memory that it may still allocate."""
    import resource  # here, because Windows does not have it

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, highest = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if highest < 0 else min(seconds, highest), highest))
    for number in (signal.SIGXCPU, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGXCPU, signal.SIGALRM))
    signal.alarm(_LONGEST_WAIT + 2 * seconds)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        limit = pages * resource.getpagesize() + memory
        _, highest = resource.getrlimit(resource.RLIMIT_AS)
        if highest == resource.RLIM_INFINITY or limit < highest:
            resource.setrlimit(resource.RLIMIT_AS, (limit, highest))
