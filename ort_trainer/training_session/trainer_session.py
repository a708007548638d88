"""The session of a trainer by the names that ONNX Runtime's class had: its state, and how it is set up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..runtime.engine import SessionOptions
from ..trainer import ORTTrainer
from .flat_state import flat_state_dict, load_flat_state_dict

__all__ = ["TrainerSession"]


class TrainerSession:
    """Reads and restores the state of a trainer that has begun.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: ORTTrainer) -> None:
        self._trainer = trainer

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
        """Returns when profiling began, in nanoseconds."""
        return int(self._session.inference_session.get_profiling_start_time_ns())

    def end_profiling(self) -> str:
        """Ends profiling and returns the name of the file with the results (``sess_options.enable_profiling``)."""
        return str(self._session.inference_session.end_profiling())

    def get_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns trained weights, moments and update counts in one flat dict of copies.

        Keys are the names of weights, ``Moment_1_<weight>``, ``Moment_2_<weight>``, and ``Update_Count_<weight>``
        (Adam) or ``Step`` (LAMB). Frozen weights and buffers are not in it.
        """
        state = flat_state_dict(self._trainer, include_optimizer_state=True)
        layout = self._trainer.loop.layout
        held = set(layout.tensors) - set(layout.trainable)
        return {name: value.numpy() for name, value in state.items() if name not in held}

    def load_state(self, dict: Mapping[str, Any], strict: bool = False) -> None:
        """Restores what :meth:`get_state` returned.

        Args:
            dict: The state.
            strict: Whether names must match exactly; if not, only what both have is restored.

        Raises:
            RuntimeError: If names do not match and ``strict`` is True.
            TypeError, ValueError: If a value does not fit. Nothing has changed then.
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
            include_mixed_precision_weights: Whether to add what mixed precision computes with, rounded to fp16.

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
        """Returns how weights are partitioned between ranks: not at all."""
        return {}

    @property
    def _session(self) -> Any:
        session = self._trainer.loop.session
        assert session is not None
        return session
