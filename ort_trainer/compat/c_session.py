"""``onnxruntime.capi._pybind_state.TrainingSession``: the C class whose model is loaded by a method."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.ort import SessionOptions
from . import trainer
from .training_session import TrainingParameters

__all__ = ["TrainingConfigurationResult", "TrainingSession"]


@dataclass(frozen=True)
class TrainingConfigurationResult:
    """What loading a model decides.

    Attributes:
        loss_scale_input_name: The input for the loss scale; empty if it is not fed.
    """

    loss_scale_input_name: str = ""


class TrainingSession(trainer.TrainingSession):
    """A session whose constructor reads no model; :meth:`load_model` or :meth:`read_bytes` does.

    Args:
        options: An ``onnxruntime.SessionOptions``.
    """

    def __init__(self, options: SessionOptions | None = None) -> None:
        self._given_options = options

    def load_model(
        self,
        path: str | os.PathLike[str],
        parameters: TrainingParameters,
        providers: Sequence[str],
        provider_options: Sequence[Mapping[str, str]],
    ) -> TrainingConfigurationResult:
        """Reads the model from a file.

        Args:
            path: The path.
            parameters: The parameters.
            providers: Execution providers in order of preference; empty for all available.
            provider_options: Their options in the same order; may be empty.

        Returns:
            The name of the input for the loss scale.
        """
        super().__init__(path, parameters, self._given_options, providers or None, provider_options or None)
        return TrainingConfigurationResult(self.loss_scale_input_name)

    def read_bytes(
        self,
        model: bytes,
        parameters: TrainingParameters,
        providers: Sequence[str],
        provider_options: Sequence[Mapping[str, str]],
    ) -> TrainingConfigurationResult:
        """Reads the model from its serialized form; otherwise the same as :meth:`load_model`."""
        super().__init__(model, parameters, self._given_options, providers or None, provider_options or None)
        return TrainingConfigurationResult(self.loss_scale_input_name)

    def finalize(self) -> None:
        """Frees the model's memory; the session can read another one."""
        self.__dict__ = {"_given_options": self._given_options}

    def __getattr__(self, name: str) -> Any:
        if name == "_trainer":
            raise RuntimeError("the session has no model: call load_model() or read_bytes() first")
        return super().__getattr__(name)
