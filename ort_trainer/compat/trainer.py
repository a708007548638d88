"""``ORTTrainer`` and ``TrainingSession`` for old scripts: the current ones, with the private names that they use."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import onnx
import torch
from torch import nn

import ort_trainer

from ..onnx.load import OnnxModel
from ..options import ModelDescription, OptionsDict
from ..train.onnx_files import onnx_model
from ..train.transaction import in_transaction
from .options import ASSERTED, ORTTrainerOptions, raising
from .training_session import TrainerSession


class _Input(NamedTuple):
    """An input, as legacy described it once it knew the dtype."""

    name: str
    shape: list[int | str]
    dtype: torch.dtype | None


class _Output(NamedTuple):
    """An output, as legacy described it once it knew the dtype."""

    name: str
    shape: list[int | str]
    is_loss: bool
    dtype: torch.dtype | None
    dtype_amp: torch.dtype | None = None


class ORTTrainer(ort_trainer.ORTTrainer):
    """:class:`ort_trainer.ORTTrainer` for old scripts.

    If a batch has other fixed sizes or another number of dimensions than the model description, the trainer corrects
    its copy of the description, with a warning.

    Args:
        model: The model; all arguments are those of :class:`ort_trainer.ORTTrainer`.
        model_desc: The description.
        optim_config: The optimizer config.
        loss_fn: The loss function.
        options: Settings, as :class:`ort_trainer.compat.options.ORTTrainerOptions`; None for the defaults. With
            ``ort_trainer.ORTTrainerOptions``, the warnings of this class are errors.
    """

    @raising(*ASSERTED)
    def __init__(
        self,
        model: nn.Module | OnnxModel | onnx.ModelProto | str | os.PathLike[str],
        model_desc: Mapping[str, Any] | str,
        optim_config: ort_trainer.optim.OptimizerConfig,
        loss_fn: Callable[..., Any] | str | None = None,
        options: ort_trainer.ORTTrainerOptions | OptionsDict | None = None,
    ) -> None:
        super().__init__(model, model_desc, optim_config, loss_fn, ORTTrainerOptions.of(options))

    def eval_step(self, *args: Any, **kwargs: Any) -> torch.Tensor | Any:
        """Runs the model in evaluation mode; fetched outputs come in the order of the description, as legacy's did."""
        outputs, fetches = super().eval_step(*args, **kwargs), self.train_step_info.fetches
        if len(fetches) < 2:
            return outputs
        by_name = dict(zip(fetches, outputs, strict=True))
        return [by_name[name] for name in self.loop.description.output_names if name in by_name]

    # The exceptions that legacy's documentation lists.
    @raising((RuntimeError, RuntimeWarning), ((TypeError, OSError), ValueError))
    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Writes the evaluation graph with the current weights; see :meth:`ort_trainer.ORTTrainer.save_as_onnx`."""
        super().save_as_onnx(path)

    @property
    def model_desc(self) -> ModelDescription:
        """The model description; once training or evaluation has begun, its entries also have dtypes."""
        description, session = super().model_desc, self.session
        graphs = [] if session is None else [*session.graphs(True), *session.graphs(False)]
        if not graphs:
            return description
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in (*graphs[0].inputs, *graphs[0].outputs)}
        typed: Any = copy.copy(description)
        typed.inputs = tuple(_Input(e.name, list(e.shape), dtypes.get(e.name)) for e in description.inputs)
        typed.outputs = tuple(
            _Output(e.name, list(e.shape), e.is_loss, dtypes.get(e.name)) for e in description.outputs
        )
        return typed  # type: ignore[no-any-return]

    @property
    def _training_session(self) -> TrainerSession | None:
        """State and setup of the session; None before the first step, if the model is a PyTorch model."""
        return None if self.session is None else TrainerSession(self)

    @property
    @in_transaction
    def _onnx_model(self) -> onnx.ModelProto | None:
        """The model that ``save_as_onnx`` writes, as a new object; None if there is no session."""
        return None if self.session is None else onnx_model(self.loop, self.model_desc.output_names)

    # A loaded state never waits for the first step, as in legacy.
    _load_state_dict = None


class TrainingSession(ort_trainer.TrainingSession):
    """:class:`ort_trainer.TrainingSession` for old scripts: a parameter without effect is only a warning."""

    _options = ORTTrainerOptions
