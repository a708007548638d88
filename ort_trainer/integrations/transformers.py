"""``OrtTrainer``: Hugging Face's ``Trainer`` with the model as an ``ORTModule``."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..core.errors import shown
from ..module import ORTModule
from ..options import OptionsDict, ORTTrainerOptions

try:
    import accelerate  # noqa: F401 # Trainer needs it, but only notices when its arguments are created
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        "ort_trainer.integrations.transformers needs transformers and accelerate: "
        "pip install 'ort_trainer[transformers]'"
    ) from error


__all__ = ["OrtTrainer"]

# Training arguments that would bypass the module's graphs, or make them wrong -> what to do instead.
_REFUSED = {
    "torch_compile": "leave it out: the model runs as graphs already",
    "deepspeed": "leave it out: each process has the complete model",
    "fsdp": "leave it out: each process has the complete model",
    "parallelism_config": "leave it out: each process has the complete model",
}


class OrtTrainer(Trainer):  # type: ignore[misc] # the type checker does not follow transformers
    """Hugging Face's ``Trainer``; calls of the model run as the graphs of an ``ORTModule``.

    Everything else is Hugging Face's, as with ``Trainer(model=ORTModule(model))``. In addition, models of
    ``model_init`` are wrapped, and training arguments that do not go with graphs are refused.

    Args:
        model: As for ``Trainer``; None with ``model_init``.
        args: As for ``Trainer``.
        *rest: As for ``Trainer``.
        ort_options: Options of the :class:`~ort_trainer.ORTModule`.
        **kwargs: As for ``Trainer``.

    Raises:
        ValueError: If ``args`` has unsupported settings, or ``ort_options`` has options without effect.

    Example:
        >>> trainer = OrtTrainer(model, TrainingArguments("out", num_train_epochs=3), train_dataset=dataset)
        >>> trainer.train()
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        *rest: Any,
        ort_options: ORTTrainerOptions | OptionsDict | None = None,
        **kwargs: Any,
    ) -> None:
        for name, advice in _REFUSED.items():
            value = getattr(args, name, None)
            if value not in (None, False, "", [], {}):
                raise ValueError(f"OrtTrainer does not support TrainingArguments({name}={shown(value)}): {advice}")
        self._ort_options = ort_options
        super().__init__(model if model is None else self._wrapped(model), args, *rest, **kwargs)

    def call_model_init(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns a new model of ``model_init``, as an ``ORTModule``."""
        return self._wrapped(super().call_model_init(*args, **kwargs))

    def _wrapped(self, model: nn.Module) -> nn.Module:
        if not isinstance(model, ORTModule):
            return ORTModule(model, self._ort_options)
        if self._ort_options is not None:
            raise ValueError(
                "ort_options have no effect on a model that is an ORTModule already: pass them to ORTModule"
            )
        return model
