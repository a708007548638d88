"""A trainer's state and session settings, with the method names of ONNX Runtime's former class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...engine.ort import SessionOptions
from ...trainer import ORTTrainer
from .flat_state import flat_state_dict, load_flat_state_dict

__all__ = ["TrainerSession"]

_STEPS = "the trainer's train_step() and eval_step() run it, and trainer.session runs their halves"
# What ONNX Runtime's classes had, and what there is instead.
_ELSEWHERE = {
    **dict.fromkeys(("run", "run_with_ort_values", "run_with_iobinding", "io_binding"), _STEPS),
    "run_async": "call run() in a thread",
    "run_with_ortvaluevector": "call run_with_ort_values() or run_with_iobinding()",
    **dict.fromkeys(("load_model", "read_bytes"), "the constructor reads the model"),
    **dict.fromkeys(("finalize", "__del__"), "there is nothing to finalize; memory is freed with the object"),
    **dict.fromkeys(("get_tuning_results", "set_tuning_results"), "no kernel is tuned"),
    "_sess": "there is no C session; the methods of this object are those that it had",
}


class TrainerSession:
    """Reads and restores the state of a started trainer.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: ORTTrainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        instead = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}", name=name, obj=self)

    def get_modelmeta(self) -> Any:
        """Returns the ``onnxruntime.ModelMetadata`` of the training graph."""
        return self._session.inference_session.get_modelmeta()

    def get_providers(self) -> list[str]:
        """Returns the names of the execution providers, in order."""
        return list(self._session.inference_session.get_providers())

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Returns the options of the execution providers."""
        return dict(self._session.inference_session.get_provider_options())

    def get_session_options(self) -> SessionOptions:
        """Returns the ``onnxruntime.SessionOptions`` of the training graph."""
        return self._session.inference_session.get_session_options()

    def get_profiling_start_time_ns(self) -> int:
        """Returns the start time of profiling in nanoseconds."""
        return int(self._session.inference_session.get_profiling_start_time_ns())

    def end_profiling(self) -> str:
        """Ends profiling (``sess_options.enable_profiling``) and returns the name of the result file."""
        return str(self._session.inference_session.end_profiling())

    def get_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns trained weights, moments and update counts in one flat dict of copies.

        The keys are the names of weights, ``Moment_1_<weight>``, ``Moment_2_<weight>``, and ``Update_Count_<weight>``
        (Adam) or ``Step`` (LAMB). Frozen weights and buffers are not included.
        """
        state = flat_state_dict(self._trainer, include_optimizer_state=True)
        layout = self._trainer.loop.layout
        held = set(layout.tensors) - set(layout.trainable)
        return {name: value.numpy() for name, value in state.items() if name not in held}

    def load_state(self, dict: Mapping[str, Any], strict: bool = False) -> None:
        """Restores what :meth:`get_state` returned.

        Args:
            dict: The state.
            strict: Whether names must match exactly; if not, only names that both have are restored.

        Raises:
            RuntimeError: If names differ and ``strict`` is True.
            TypeError, ValueError: If a value is invalid. Nothing has changed then.
        """
        full: Mapping[str, Any] = dict
        if strict and isinstance(dict, Mapping):
            layout = self._trainer.loop.layout
            tensors = {**self._session.parameters, **self._session.buffers}
            held = {name: own for name, own in layout.canonical.items() if own not in layout.trainable}
            full = {
                **{name: tensors[held[name]].detach().cpu().numpy() for name in held if name in layout.tensors},
                **dict,
            }
        load_flat_state_dict(self._trainer, full, strict)

    def get_model_state(self, include_mixed_precision_weights: bool = False) -> dict[str, dict[str, Any]]:
        """Returns the trained weights as copies.

        Args:
            include_mixed_precision_weights: Whether to add the weights rounded to fp16, as mixed precision uses them.

        Returns:
            ``full_precision`` -> name -> array, and with mixed precision ``mixed_precision`` -> name -> array.
        """
        trained = self._trainer.loop.layout.trainable
        weights = {name: self._session.parameters[name].detach().cpu().numpy().copy() for name in trained}
        state: dict[str, dict[str, Any]] = {"full_precision": weights}
        if include_mixed_precision_weights and self._trainer.loop.precision.mixed:
            state["mixed_precision"] = {name: value.astype(np.float16) for name, value in weights.items()}
        return state

    def get_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Returns moments and update counts: weight -> ``Moment_1``, ``Moment_2``, ``Update_Count``."""
        state: dict[str, dict[str, Any]] = self._trainer.state_dict()["optimizer"]
        return state

    def get_partition_info_map(self) -> dict[str, dict[str, list[int]]]:
        """Returns an empty dict, because weights are not partitioned between ranks."""
        return {}

    @property
    def _session(self) -> Any:
        session = self._trainer.loop.session
        assert session is not None
        return session
