"""``onnxruntime.training.ortmodule``: ``ORTModule`` with the arguments and environment variables that it had."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from torch import nn

import ort_trainer

from ..core.errors import shown, warn
from ..options import OptionsDict, ORTTrainerOptions
from ..step import Step

__all__ = ["DebugOptions", "LogLevel", "ORTModule"]

# Environment variables with an effect here; then those that ask for what happens anyway, with the values that do so.
_HONOURED = (
    *("ORTMODULE_LOG_LEVEL", "ORTMODULE_SAVE_ONNX_PATH"),
    *("ORTMODULE_ONNX_OPSET_VERSION", "ORTMODULE_MEMORY_OPT_LEVEL", "ORTMODULE_FALLBACK_POLICY"),
)
# A failed export is not tried again for calls of the same kind, as without retries; others have their graphs.
_ANYWAY = {"ORTMODULE_FALLBACK_RETRY": ("false", "0", "no"), "ORTMODULE_SKIPCHECK_POLICY": ("skip_check_disabled",)}


class LogLevel(IntEnum):
    """What is logged."""

    VERBOSE = 0
    INFO = 1
    WARNING = 2
    ERROR = 3
    FATAL = 4


_LEVELS = {
    LogLevel.VERBOSE: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.FATAL: logging.CRITICAL,
}


class DebugOptions:
    """What an ``ORTModule`` logs and writes.

    Args:
        log_level: Level of the logger ``ort_trainer``; the environment variable ``ORTMODULE_LOG_LEVEL`` has precedence.
        save_onnx: Whether to write the graphs as ONNX files: ``<prefix>_torch_exported_<mode>.onnx`` is the forward
            pass, ``<prefix>_backward_<mode>.onnx`` the backward pass, and the mode is ``training`` or ``inference``.
            ONNX Runtime's kernels compute them then, instead of PyTorch's. Later graphs, for other sizes or arguments,
            overwrite earlier ones.
        onnx_prefix: The prefix; required with ``save_onnx``.
        save_path: The folder, by default the current one; the environment variable ``ORTMODULE_SAVE_ONNX_PATH`` has
            precedence.

    Raises:
        OSError: If the folder is not writable.
        TypeError: If the prefix is not a string.
        ValueError: If there is no prefix, or a level is unknown.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str = "",
    ) -> None:
        chosen = os.environ.get("ORTMODULE_LOG_LEVEL", LogLevel(log_level).name)
        if chosen not in LogLevel.__members__:
            raise ValueError(f"the log level must be one of {list(LogLevel.__members__)}, but is {chosen!r}")
        self.log_level = LogLevel[chosen]
        self.save_onnx, self.onnx_prefix = save_onnx, onnx_prefix
        self.save_path = os.environ.get("ORTMODULE_SAVE_ONNX_PATH") or save_path or str(Path.cwd())
        if save_onnx:
            if not os.access(self.save_path, os.W_OK):
                raise OSError(
                    f"Directory {self.save_path} is not writable. Set the environment variable "
                    "ORTMODULE_SAVE_ONNX_PATH to a writable one"
                )
            if not isinstance(onnx_prefix, str):
                raise TypeError(f"onnx_prefix must be a string, but {shown(onnx_prefix)} was given")
            if not onnx_prefix:
                raise ValueError("onnx_prefix must be provided when save_onnx is set.")


class ORTModule(ort_trainer.ORTModule):
    """:class:`ort_trainer.ORTModule` with the arguments of the legacy class.

    Args:
        module: The module.
        debug_options: What it logs and writes; None for the defaults.
    """

    def __init__(self, module: nn.Module, debug_options: DebugOptions | None = None) -> None:
        chosen = DebugOptions() if debug_options is None else debug_options
        _warn_of_idle_variables()
        if debug_options is not None or "ORTMODULE_LOG_LEVEL" in os.environ:
            logging.getLogger(ort_trainer.__name__).setLevel(_LEVELS[chosen.log_level])
        super().__init__(module, _options(chosen))
        vars(self)["_given"] = debug_options
        if chosen.save_onnx:
            self._graphs.exported = _writer(chosen, module)

    def __reduce__(self) -> tuple[Any, ...]:
        return ORTModule, (self.module, self._given)


class _Options(ORTTrainerOptions):
    def __init__(self, options: OptionsDict) -> None:
        super().__init__(options)

    def tolerates(self, message: str) -> bool:
        """Warns of an option without effect on the module, as a variable is set for all of a script's modules."""
        warn(message)
        return True


def _options(debug: DebugOptions) -> ORTTrainerOptions:
    """Returns the options that the debug options and the environment variables ask for."""
    options: OptionsDict = {}
    opset = os.environ.get("ORTMODULE_ONNX_OPSET_VERSION")
    if opset is not None:
        options["_internal_use"] = {"onnx_opset_version": int(opset)}
    if debug.save_onnx or opset is not None:
        options["utils"] = {"kernels": "onnxruntime"}
    if os.environ.get("ORTMODULE_MEMORY_OPT_LEVEL", "0") != "0":
        options["graph_transformer"] = {"transformer_layer_recompute": True}
    return _Options(options)


def _writer(debug: DebugOptions, module: nn.Module) -> Callable[[Step, Sequence[Step]], None]:
    """Returns a function that writes exported graphs as ONNX files."""

    def write(forward: Step, backward: Sequence[Step]) -> None:
        mode = "training" if module.training else "inference"
        files = {"torch_exported": forward, **({"backward": backward[-1]} if backward else {})}
        for name, step in files.items():
            Path(debug.save_path, f"{debug.onnx_prefix}_{name}_{mode}.onnx").write_bytes(step.serialized())

    return write


_warned = threading.Event()


def _warn_of_idle_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Names, once, the variables that the legacy ``ORTModule`` read and that have no effect here."""
    idle = [
        name
        for name, value in sorted(environment.items())
        if name.startswith("ORTMODULE_") and name not in _HONOURED and value.lower() not in _ANYWAY.get(name, ())
    ]
    if idle and not _warned.is_set():
        _warned.set()
        warn(
            f"the environment variables {idle} have no effect on ort_trainer's ORTModule: it checks the module in "
            "every call, tries an export once for each kind of call, and caches exports as ORT_TRAINER_CACHE says"
        )
