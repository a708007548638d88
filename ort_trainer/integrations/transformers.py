"""``OrtTrainer``: Hugging Face's ``Trainer``, with the computation in ONNX Runtime."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import shown
from ..optim import SGDConfig
from ..options import ORTTrainerOptions
from ..trainer import ORTTrainer
from .exported_parts import ITEMS, PARTS, Forward, Loss

try:
    import accelerate  # noqa: F401 # Trainer needs it, but notices only when its arguments are made
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        "ort_trainer.integrations.transformers needs transformers and accelerate: "
        "pip install 'ort_trainer[transformers]'"
    ) from error

__all__ = ["OrtTrainer"]

# Training arguments that would be ignored, or worse, with what to do instead.
_REFUSED = {
    "fp16": "set bf16=True, which needs no loss scale",
    "fp16_full_eval": "leave it out: the model is evaluated as it is trained",
    "bf16_full_eval": "leave it out: the model is evaluated as it is trained, with bf16=True in bfloat16",
    "torch_compile": "leave it out: the model is compiled into an ONNX graph",
    "use_liger_kernel": "leave it out: its kernels can't be exported",
    "neftune_noise_alpha": "leave it out: its noise depends on values that a graph does not know",
    "torch_empty_cache_steps": "leave it out: PyTorch's allocator does not hold the activations",
    "auto_find_batch_size": "set per_device_train_batch_size: it does not know ONNX Runtime's out-of-memory error",
    "deepspeed": "leave it out: each process has the whole model",
    "fsdp": "leave it out: each process has the whole model",
    "parallelism_config": "leave it out: each process has the whole model",
    "debug": "leave it out: hooks do not see the values in a graph",
}
# They update weights while PyTorch's own backward pass runs.
_OPTIMIZERS_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
# What accelerate calls one process, and several of which each has the whole model.
_DATA_PARALLEL = ("NO", "MULTI_CPU", "MULTI_GPU")
_OPTIONS_OF_THE_LOOP = ("batch", "device", "distributed", "lr_scheduler", "mixed_precision")


class OrtTrainer(Trainer):  # type: ignore[misc] # the type checker does not follow transformers
    """Hugging Face's ``Trainer``, with the forward and backward passes of training and evaluation in ONNX Runtime.

    Everything else is Hugging Face's: data loading, optimizer, schedule, clipping, callbacks, logs, checkpoints. In
    training, ``compute_loss`` is exported together with the model, overridden or not; in evaluation, the model is.

    Args:
        model: As for ``Trainer``; None with ``model_init``.
        args: As for ``Trainer``.
        *rest: As for ``Trainer``.
        ort_options: Options of ``ORTTrainer`` for the computation, such as those of section ``utils``. Loop, device and
            precision follow ``args``.
        **kwargs: As for ``Trainer``.

    Raises:
        ValueError: If ``args`` ask for what does not go through ONNX, or ``ort_options`` decide what is up to ``args``.

    Example:
        >>> trainer = OrtTrainer(model, TrainingArguments("out", num_train_epochs=3), train_dataset=dataset)
        >>> trainer.train()
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        *rest: Any,
        ort_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if args is not None:
            _check_arguments(args)
        self._ort_options = dict(ort_options or {})
        taken = [name for name in _OPTIONS_OF_THE_LOOP if name in self._ort_options]
        if taken:
            raise ValueError(f"ort_options has {taken}, which follow TrainingArguments here: leave them out")
        self._parts: dict[tuple[Any, ...], tuple[Loss | Forward, ORTTrainer]] = {}
        super().__init__(model, args, *rest, **kwargs)
        distributed = str(getattr(self.accelerator.distributed_type, "value", self.accelerator.distributed_type))
        if distributed not in _DATA_PARALLEL or self.args.n_gpu > 1:
            raise ValueError(
                f"OrtTrainer trains on one device in each process, data parallel, but there are {self.args.n_gpu} GPUs "
                f"in this process and accelerate was configured for {distributed}: start one process for each GPU with "
                "torchrun, or show a single process one GPU with CUDA_VISIBLE_DEVICES=0"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Does as ``Trainer`` does, but for the wrapper of PyTorch's data parallel training: gradients are averaged."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Adds the gradients of a micro-batch to ``p.grad`` and returns its loss, divided as ``Trainer`` divides it."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batch = dict(self._prepare_inputs(inputs))
        if num_items_in_batch is not None:
            batch[ITEMS] = torch.as_tensor(num_items_in_batch, device=self.args.device)
        if not self._is_divided(num_items_in_batch):
            batch[PARTS] = torch.tensor(float(self.current_gradient_accumulation_steps), device=self.args.device)
        key = (model, Loss, frozenset(batch))
        if key not in self._parts:
            trainer = self._add(key, Loss(model, self.compute_loss))
            trainer.prepare(batch)
            _share_generator(trainer, self.args.device)
        loss: torch.Tensor = self._parts[key][1].forward_backward(batch)
        return loss

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Does as ``Trainer`` does, with the model's forward pass in ONNX Runtime."""
        return super().prediction_step(_InOnnxRuntime(self, model), *args, **kwargs)

    def run_model(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Returns what the model returns in evaluation mode, computed in ONNX Runtime."""
        key = (model, Forward, frozenset(inputs))
        if key not in self._parts:
            # Once, to see the structure of what it returns.
            with torch.no_grad():
                example = model.eval()(**inputs)
            self._add(key, Forward(model, example))
        part, trainer = self._parts[key]
        assert isinstance(part, Forward)
        _, *tensors = trainer.eval_step(inputs)
        return part.rebuild(tensors)

    def _is_divided(self, num_items_in_batch: torch.Tensor | int | None) -> bool:
        """Whether the loss is already divided by the size of the window, by the rule of ``Trainer.training_step``."""
        stated: bool | None = getattr(self, "loss_is_scaled_for_ga", None)
        if stated is not None:
            return stated
        by_model: bool = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return by_model or self.compute_loss_func is not None

    def _add(self, key: tuple[Any, ...], part: Loss | Forward) -> ORTTrainer:
        """Keeps a part and what runs it, and forgets those of a model that ``model_init`` has replaced."""
        options = ORTTrainerOptions({**self._ort_options, "device": {"id": str(self.args.device)}})
        # The weights are updated by Trainer's optimizer: this one does nothing and keeps nothing.
        trainer = ORTTrainer(part, "auto", SGDConfig(), options=options)
        self._parts = {known: value for known, value in self._parts.items() if known[0] is key[0]}
        self._parts[key] = part, trainer
        return trainer


def _share_generator(trainer: ORTTrainer, device: torch.device) -> None:
    """Lets dropout draw from PyTorch's own generator, which Trainer seeds, saves and restores."""
    session = trainer.loop.session
    assert session is not None
    on_cpu = device.type == "cpu"
    session.generator = torch.default_generator if on_cpu else torch.cuda.default_generators[device.index or 0]


class _InOnnxRuntime:
    """Stands for a model in evaluation: its call is computed in ONNX Runtime, all else is the model's own."""

    def __init__(self, trainer: OrtTrainer, model: nn.Module) -> None:
        self._trainer, self._model = trainer, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = inspect.signature(self._model.forward).parameters
        return self._trainer.run_model(self._model, {**dict(zip(names, args, strict=False)), **kwargs})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _check_arguments(args: Any) -> None:
    """Refuses training arguments that would have no effect, or not theirs."""
    for name, advice in _REFUSED.items():
        value = getattr(args, name, None)
        # An int 0 and a float 0.0 are values, such as neftune_noise_alpha=0.0; what is left out is False, None or [].
        if value not in (None, False, "", [], {}):
            raise ValueError(f"OrtTrainer does not support TrainingArguments({name}={shown(value)}): {advice}")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(word in optimizer for word in _OPTIMIZERS_IN_BACKWARD):
        raise ValueError(
            f"OrtTrainer does not support TrainingArguments(optim={optimizer!r}), which updates weights during "
            "PyTorch's backward pass: take another one, such as 'adamw_torch'"
        )
