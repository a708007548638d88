"""``HuggingFaceTrainer``: Hugging Face's ``Trainer`` with the model as an ``ORTModule``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..core.errors import shown
from ..core.report import Report
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


__all__ = ["HuggingFaceTrainer"]

# Training arguments that would bypass the module's graphs, or make them wrong -> what to do instead.
_REFUSED = {
    "torch_compile": "leave it out: the model runs as graphs already",
    "deepspeed": "leave it out: each process has the complete model",
    "parallelism_config": "leave it out: each process has the complete model",
}


class HuggingFaceTrainer(Trainer):  # type: ignore[misc] # the type checker does not follow transformers
    """Hugging Face's ``Trainer``; calls of the model run as the graphs of an ``ORTModule``.

    Everything else is Hugging Face's, as with ``Trainer(model=ORTModule(model))``. In addition, models of
    ``model_init`` are wrapped, and training arguments that do not go with graphs are refused. With ``fsdp`` each layer
    that accelerate shards is an ``ORTModule``, and PyTorch runs what lies between them.

    To see what has run, print :meth:`report`. There is no ``profile`` as in ``ORTTrainer``: measure with
    ``torch.profiler``.

    Args:
        model: As for ``Trainer``; None with ``model_init``.
        args: As for ``Trainer``.
        *rest: As for ``Trainer``.
        ort_options: Options of the :class:`~ort_trainer.ORTModule`.
        **kwargs: As for ``Trainer``.

    Raises:
        TypeError: If the model is divided among processes already.
        ValueError: If ``args`` has unsupported settings, or ``ort_options`` has options without effect.

    Example:
        >>> trainer = HuggingFaceTrainer(model, TrainingArguments("out", num_train_epochs=3), train_dataset=dataset)
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
                raise ValueError(
                    f"HuggingFaceTrainer does not support TrainingArguments({name}={shown(value)}): {advice}"
                )
        self._ort_options, self._fsdp = ort_options, _fsdp_config(args)
        super().__init__(model if model is None else self._wrapped(model), args, *rest, **kwargs)

    def report(self) -> Report:
        """Returns what the model has run as graphs and in PyTorch; ``print()`` shows it.

        Raises:
            TypeError: If there are several modules, as with ``fsdp``: each layer has its own report.
        """
        model = self.model
        if not isinstance(model, ORTModule):
            raise TypeError("with fsdp each layer is an ORTModule with its own report(): see trainer.model.modules()")
        report: Report = model.report()
        return report

    def call_model_init(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns a new model of ``model_init`` with its ``ORTModule``."""
        return self._wrapped(super().call_model_init(*args, **kwargs))

    def _wrapped(self, model: nn.Module) -> nn.Module:
        if self._fsdp is not None:
            return self._with_wrapped_layers(model, self._fsdp)
        if not isinstance(model, ORTModule):
            return ORTModule(model, self._ort_options)
        if self._ort_options is not None:
            raise ValueError(
                "ort_options have no effect on a model that is an ORTModule already: pass them to ORTModule"
            )
        return model

    def _with_wrapped_layers(self, model: nn.Module, config: Mapping[str, Any]) -> nn.Module:
        """Replaces each layer that accelerate shards by an ``ORTModule``, and returns the model."""
        kinds = config.get("transformer_layer_cls_to_wrap") or getattr(model, "_no_split_modules", None) or []
        kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        layers = [
            (part, name, child)
            for part in model.modules()
            for name, child in part.named_children()
            if type(child).__name__ in kinds
        ]
        if not layers:
            raise ValueError(
                f"HuggingFaceTrainer with fsdp runs each sharded layer as graphs, but {type(model).__name__} has no "
                f"layers of the classes {sorted(kinds)}: name them in fsdp_config['transformer_layer_cls_to_wrap']"
            )
        for part, name, child in layers:
            setattr(part, name, ORTModule(child, self._ort_options))
        return model


def __getattr__(name: str) -> Any:
    if name == "OrtTrainer":  # its name until 0.2, which differs from ORTTrainer by its case alone
        warnings.warn("OrtTrainer is now called HuggingFaceTrainer", DeprecationWarning, stacklevel=2)
        return HuggingFaceTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _fsdp_config(args: Any) -> Mapping[str, Any] | None:
    """Returns the settings of FSDP in training arguments; None without FSDP.

    Raises:
        ValueError: If they do not shard whole layers by FSDP2.
    """
    if not getattr(args, "fsdp", None):
        return None
    config: Mapping[str, Any] = args.fsdp_config or {}
    version = int(config.get("version", config.get("fsdp_version", 2)))
    policy = config.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    if version != 2 or policy != "TRANSFORMER_BASED_WRAP" or config.get("xla"):
        raise ValueError(
            "HuggingFaceTrainer takes TrainingArguments(fsdp=True) with version 2 and the auto_wrap_policy "
            f"'TRANSFORMER_BASED_WRAP', on PyTorch's devices, but fsdp_config has version {version}, "
            f"{shown(policy)} and xla={shown(config.get('xla', False))}: FSDP1 and parts of layers have no graphs"
        )
    return config
