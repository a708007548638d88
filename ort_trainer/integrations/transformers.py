"""``OrtTrainer``: Hugging Face's ``Trainer`` that computes in ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..core.errors import shown
from ..core.signatures import signature_of
from ..optim import SGDConfig
from ..options import ORTTrainerOptions
from ..trainer import ORTTrainer

try:
    import accelerate  # noqa: F401 # Trainer needs it, but only notices when its arguments are created
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        "ort_trainer.integrations.transformers needs transformers and accelerate: "
        "pip install 'ort_trainer[transformers]'"
    ) from error


__all__ = ["OrtTrainer"]

# Training arguments that would be ignored or do harm, with what to do instead.
_REFUSED = {
    "fp16": "set bf16=True, which needs no loss scale",
    "fp16_full_eval": "leave it out: the model is evaluated as it is trained",
    "bf16_full_eval": "leave it out: the model is evaluated as it is trained, with bf16=True in bfloat16",
    "torch_compile": "leave it out: the model is compiled into an ONNX graph",
    "use_liger_kernel": "leave it out: its kernels can't be exported",
    "neftune_noise_alpha": "leave it out: its noise depends on values that a graph can't access",
    "torch_empty_cache_steps": "leave it out: PyTorch's allocator does not hold the activations",
    "auto_find_batch_size": "set per_device_train_batch_size: it does not detect ONNX Runtime's out-of-memory error",
    "deepspeed": "leave it out: each process has the complete model",
    "fsdp": "leave it out: each process has the complete model",
    "parallelism_config": "leave it out: each process has the complete model",
    "debug": "leave it out: hooks do not see the values in a graph",
}
# These optimizers update weights during PyTorch's own backward pass.
_OPTIMIZERS_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
# accelerate's names for a single process, and for several that each have the complete model.
_DATA_PARALLEL = ("NO", "MULTI_CPU", "MULTI_GPU")
_OPTIONS_OF_THE_LOOP = ("batch", "device", "distributed", "lr_scheduler", "mixed_precision")


class OrtTrainer(Trainer):  # type: ignore[misc] # the type checker does not follow transformers
    """Hugging Face's ``Trainer``, with the forward and backward passes of training and evaluation in ONNX Runtime.

    Everything else is Hugging Face's: data loading, optimizer, schedule, clipping, callbacks, logs, checkpoints. For
    training, ``compute_loss`` is exported together with the model, even if overridden; for evaluation, only the model.

    Args:
        model: As for ``Trainer``; None with ``model_init``.
        args: As for ``Trainer``.
        *rest: As for ``Trainer``.
        ort_options: Options of ``ORTTrainer`` for the computation, such as those of section ``utils``. The loop, device
            and precision are set by ``args``.
        **kwargs: As for ``Trainer``.

    Raises:
        ValueError: If ``args`` has unsupported settings, or ``ort_options`` has settings that belong in ``args``.

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
            raise ValueError(f"ort_options has {taken}, which TrainingArguments sets here: leave them out")
        self._parts: dict[tuple[Any, ...], tuple[_Loss | _Forward, ORTTrainer]] = {}
        super().__init__(model, args, *rest, **kwargs)
        distributed = str(getattr(self.accelerator.distributed_type, "value", self.accelerator.distributed_type))
        if distributed not in _DATA_PARALLEL or self.args.n_gpu > 1:
            raise ValueError(
                f"OrtTrainer supports only data parallel training with one device per process, but this process has "
                f"{self.args.n_gpu} GPUs and accelerate is configured for {distributed}: start one process per GPU "
                "with torchrun, or use a single process and one GPU with CUDA_VISIBLE_DEVICES=0"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Sets up accelerate without PyTorch's data parallel wrapper, because our trainer averages gradients."""
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
            batch[_ITEMS] = torch.as_tensor(num_items_in_batch, device=self.args.device)
        if not self._is_divided(num_items_in_batch):
            batch[_PARTS] = torch.tensor(float(self.current_gradient_accumulation_steps), device=self.args.device)
        key = (model, _Loss, frozenset(batch))
        if key not in self._parts:
            trainer = self._add(key, _Loss(model, self.compute_loss))
            trainer.prepare(batch)
            _share_generator(trainer, self.args.device)
        loss: torch.Tensor = self._parts[key][1].forward_backward(batch)
        return loss

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs a prediction step as ``Trainer`` does, with the model's forward pass in ONNX Runtime."""
        return super().prediction_step(_InOnnxRuntime(self, model), *args, **kwargs)

    def run_model(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Returns the model's output in evaluation mode, computed in ONNX Runtime."""
        key = (model, _Forward, frozenset(inputs))
        if key not in self._parts:
            # Run the model once for the structure of its output.
            with torch.no_grad():
                example = model.eval()(**inputs)
            self._add(key, _Forward(model, example))
        part, trainer = self._parts[key]
        assert isinstance(part, _Forward)
        _, *tensors = trainer.eval_step(inputs)
        return part.rebuild(tensors)

    def _is_divided(self, num_items_in_batch: torch.Tensor | int | None) -> bool:
        """Whether the loss is already divided by the size of the window, by the rule of ``Trainer.training_step``."""
        stated: bool | None = getattr(self, "loss_is_scaled_for_ga", None)
        if stated is not None:
            return stated
        by_model: bool = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return by_model or self.compute_loss_func is not None

    def _add(self, key: tuple[Any, ...], part: _Loss | _Forward) -> ORTTrainer:
        """Stores a part and its trainer, and drops those of a model that ``model_init`` has replaced."""
        options = ORTTrainerOptions({**self._ort_options, "device": {"id": str(self.args.device)}})
        # Trainer's optimizer updates the weights; this one is unused and has no state.
        trainer = ORTTrainer(part, "auto", SGDConfig(), options=options)
        self._parts = {known: value for known, value in self._parts.items() if known[0] is key[0]}
        self._parts[key] = part, trainer
        return trainer


def _share_generator(trainer: ORTTrainer, device: torch.device) -> None:
    """Makes dropout draw from PyTorch's own generator, which Trainer seeds, saves and restores."""
    session = trainer.loop.executor
    assert session is not None
    on_cpu = device.type == "cpu"
    session.generator = torch.default_generator if on_cpu else torch.cuda.default_generators[device.index or 0]


class _InOnnxRuntime:
    """A stand-in for a model in evaluation: calls run in ONNX Runtime, everything else is the model's own."""

    def __init__(self, trainer: OrtTrainer, model: nn.Module) -> None:
        self._trainer, self._model = trainer, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = signature_of(self._model.forward).parameters
        return self._trainer.run_model(self._model, {**dict(zip(names, args, strict=False)), **kwargs})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _check_arguments(args: Any) -> None:
    """Rejects training arguments that would have no effect or the wrong one."""
    for name, advice in _REFUSED.items():
        value = getattr(args, name, None)
        # 0 and 0.0 are real values, as in neftune_noise_alpha=0.0; unset arguments are False, None or empty.
        if value not in (None, False, "", [], {}):
            raise ValueError(f"OrtTrainer does not support TrainingArguments({name}={shown(value)}): {advice}")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(word in optimizer for word in _OPTIMIZERS_IN_BACKWARD):
        raise ValueError(
            f"OrtTrainer does not support TrainingArguments(optim={optimizer!r}), which updates weights during "
            "PyTorch's backward pass: choose another, such as 'adamw_torch'"
        )


# Inputs beside the model's: the divisors of the loss, which change from step to step.
_ITEMS = "num_items_in_batch"
_PARTS = "ort_trainer_micro_batches"


class _Loss(nn.Module):
    """The loss as ``Trainer.compute_loss`` computes it, divided as ``Trainer.training_step`` divides it.

    Args:
        model: The model.
        compute_loss: The bound method of the trainer.
    """

    def __init__(self, model: nn.Module, compute_loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.compute_loss = compute_loss

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Returns the loss for the backward pass."""
        items, parts = inputs.pop(_ITEMS, None), inputs.pop(_PARTS, None)
        loss = self.compute_loss(self.model, inputs, num_items_in_batch=items)
        return loss if parts is None else loss / parts


class _Forward(nn.Module):
    """The model itself, with its outputs as a flat list.

    Args:
        model: The model.
        example: An example of its outputs, for their structure.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()
        self.model = model
        leaves, self._structure = pytree.tree_flatten(example)
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns a zero, as the loss that every graph needs, followed by the tensors among the model's outputs."""
        tensors = [leaf for leaf in pytree.tree_leaves(self.model(**inputs)) if isinstance(leaf, torch.Tensor)]
        return torch.zeros((), device=tensors[0].device), *tensors

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Rebuilds the model's output; entries that are not tensors, such as a cache of keys and values, are None."""
        values = iter(tensors)
        leaves = [next(values) if is_tensor else None for is_tensor in self._is_tensor]
        return pytree.tree_unflatten(leaves, self._structure)
