"""Types of all options, as attributes and as dicts; generated from the schema by `make docs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from .section import Section

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from enum import Enum
    from os import PathLike
    from typing import Any, Literal

    import onnx
    import torch

    from ..amp import LossScaler
    from ..engine.ort import SessionOptions
    from ..optim import LRScheduler


class BatchOptions(Section):
    """Section `batch` of the options."""

    gradient_accumulation_steps: int
    """Micro-batches per optimizer update; their gradients are summed in fp32."""
    gradient_reduction: Literal["mean", "sum", "weighted"]
    """How the gradients of an accumulation window are combined: by `mean`, by `sum`, or by a mean `weighted` with
    `train_step(..., gradient_weight=n)`: `sum(n * gradient) / sum(n)`."""


class BatchOptionsDict(TypedDict, total=False):
    """Section `batch` of the options, as a dict."""

    gradient_accumulation_steps: int
    gradient_reduction: Literal["mean", "sum", "weighted"]


class DeviceOptions(Section):
    """Section `device` of the options."""

    id: str
    """Device of the training, as `torch.device` takes it: `cpu`, `cuda`, `cuda:1`, `xpu`, `mps`."""
    mem_limit: int
    """Bytes that PyTorch, for the whole process, and ONNX Runtime may each allocate on a CUDA device; 0 for no limit.
    """


class DeviceOptionsDict(TypedDict, total=False):
    """Section `device` of the options, as a dict."""

    id: str | torch.device
    mem_limit: int


class PipelineParallelOptions(Section):
    """Section `distributed.pipeline_parallel` of the options."""

    pipeline_parallel_size: int
    """Pipeline stages."""
    num_pipeline_micro_batches: int
    """Micro-batches in flight in the pipeline."""
    pipeline_cut_info_string: str
    """Edges at which the pipeline is cut, with one cut fewer than stages: `,` between cuts, `:` between the edges of
    one cut; each edge is `producer` or `producer-consumer/consumer/...`."""
    sliced_schema: Mapping[str, tuple[int, ...]]
    """Shapes of the tensors that are sliced between micro-batches."""
    sliced_axes: Mapping[str, int]
    """Axis along which each tensor is sliced."""
    sliced_tensor_names: tuple[str, ...]
    """Names of the sliced tensors."""


class PipelineParallelOptionsDict(TypedDict, total=False):
    """Section `distributed.pipeline_parallel` of the options, as a dict."""

    pipeline_parallel_size: int
    num_pipeline_micro_batches: int
    pipeline_cut_info_string: str
    sliced_schema: Mapping[str, Sequence[int]]
    sliced_axes: Mapping[str, int]
    sliced_tensor_names: Sequence[str]


class DeepspeedZeroOptimizationOptions(Section):
    """Section `distributed.deepspeed_zero_optimization` of the options."""

    stage: int
    """ZeRO stage."""


class DeepspeedZeroOptimizationOptionsDict(TypedDict, total=False):
    """Section `distributed.deepspeed_zero_optimization` of the options, as a dict."""

    stage: int


class DistributedOptions(Section):
    """Section `distributed` of the options."""

    world_rank: int
    """Rank of this process."""
    world_size: int
    """Number of processes."""
    local_rank: int
    """Rank of this process on its machine, which selects the CUDA device if `device.id` is `cuda`."""
    data_parallel_size: int
    """Processes that share the data: all of them, so it must be the number of processes, or left out."""
    horizontal_parallel_size: int
    """Processes that share each layer."""
    pipeline_parallel: PipelineParallelOptions
    allreduce_post_accumulation: bool
    """Both values mean the same: gradients are reduced once per update, after the accumulation, never after each micro-
    batch."""
    deepspeed_zero_optimization: DeepspeedZeroOptimizationOptions
    enable_adasum: bool
    """Combines the gradients of the processes by Adasum instead of the mean; the number of processes must be a power of
    two."""
    timeout: float
    """Seconds that a process waits for the others before it raises `DistributedError`."""
    bucket_cap_mb: float
    """MiB of gradients per message, as in PyTorch's DistributedDataParallel."""
    reduce_dtype: Literal["float16", "bfloat16"] | None
    """The dtype for sending and reducing gradients: `float16` or `bfloat16`, or the torch.dtype of that name, which
    halves the traffic of fp32 gradients."""


class DistributedOptionsDict(TypedDict, total=False):
    """Section `distributed` of the options, as a dict."""

    world_rank: int
    world_size: int
    local_rank: int
    data_parallel_size: int
    horizontal_parallel_size: int
    pipeline_parallel: PipelineParallelOptionsDict
    allreduce_post_accumulation: bool
    deepspeed_zero_optimization: DeepspeedZeroOptimizationOptionsDict
    enable_adasum: bool
    timeout: float
    bucket_cap_mb: float
    reduce_dtype: Literal["float16", "bfloat16"] | torch.dtype | None


class MixedPrecisionOptions(Section):
    """Section `mixed_precision` of the options."""

    enabled: bool
    """Trains in `mixed_precision.dtype` under PyTorch's autocast policy, with fp32 master weights."""
    dtype: Literal["auto", "float16", "bfloat16"]
    """`float16` or `bfloat16`, or the torch.dtype of that name."""
    loss_scaler: LossScaler | None
    """A `LossScaler` or subclass."""


class MixedPrecisionOptionsDict(TypedDict, total=False):
    """Section `mixed_precision` of the options, as a dict."""

    enabled: bool
    dtype: Literal["auto", "float16", "bfloat16"] | torch.dtype
    loss_scaler: LossScaler | None


class PropagateCastOpsConfigOptions(Section):
    """Section `graph_transformer.propagate_cast_ops_config` of the options."""

    strategy: Literal["NONE", "INSERT_AND_REDUCE", "FLOOD_FILL"] | None
    """No strategy is applied, so `NONE` is accepted, too."""
    level: int
    """Belongs to `strategy`."""
    allow: tuple[str, ...]
    """Belongs to `strategy`."""


class PropagateCastOpsConfigOptionsDict(TypedDict, total=False):
    """Section `graph_transformer.propagate_cast_ops_config` of the options, as a dict."""

    strategy: Literal["NONE", "INSERT_AND_REDUCE", "FLOOD_FILL"] | Enum | None
    level: int
    allow: Sequence[str]
    propagate_cast_ops_strategy: Literal["NONE", "INSERT_AND_REDUCE", "FLOOD_FILL"] | Enum | None
    propagate_cast_ops_level: int
    propagate_cast_ops_allow: Sequence[str]
    allow_layer_norm_mod_precision: bool


class GraphTransformerOptions(Section):
    """Section `graph_transformer` of the options."""

    attn_dropout_recompute: bool
    """Recomputes the dropout of attention weights in the backward pass, from the softmax and the mask, instead of
    storing its result."""
    gelu_recompute: bool
    """Recomputes GELU activations in the backward pass, from their input, instead of storing result and derivative."""
    transformer_layer_recompute: bool
    """Recomputes whole layers in the backward pass and stores only their inputs."""
    number_recompute_layers: int
    """Number of layers that `transformer_layer_recompute` recomputes, starting with the first; 0 for all but the last.
    """
    propagate_cast_ops_config: PropagateCastOpsConfigOptions
    allow_layer_norm_mod_precision: bool
    """Layer norm in a lower precision."""


class GraphTransformerOptionsDict(TypedDict, total=False):
    """Section `graph_transformer` of the options, as a dict."""

    attn_dropout_recompute: bool
    gelu_recompute: bool
    transformer_layer_recompute: bool
    number_recompute_layers: int
    propagate_cast_ops_config: PropagateCastOpsConfigOptionsDict
    allow_layer_norm_mod_precision: bool


class UtilsOptions(Section):
    """Section `utils` of the options."""

    frozen_weights: tuple[str, ...]
    """Names of parameters that are not trained, in addition to those with `requires_grad=False`."""
    save_frozen_weights: bool
    """Whether state dicts and checkpoints have the weights that are not trained."""
    grad_norm_clip: bool
    """Clips gradients by their global norm to `utils.max_grad_norm`, or otherwise to `max_norm_clip` of the optimizer
    config."""
    max_grad_norm: float | None
    """Limit of the global gradient norm for every optimizer and parameter group, which overrides `max_norm_clip`."""
    max_grad_value: float | None
    """Limit of the absolute value of every gradient element, as in `torch.nn.utils.clip_grad_value_`; applied after any
    clipping by norm."""
    memory_efficient_gradient: bool
    """Recomputes values in the backward pass that need only elementwise operations and layer norms; a minimum cut finds
    the best values to store instead."""
    share_weights: bool
    """Trains the given PyTorch model's own parameters and buffers, so that the model is current after every step, and
    changes to it take effect."""
    random_numbers: Literal["fast", "pytorch", "pytorch_global"]
    """How dropout draws its masks: `fast` uses 16-bit numbers from NumPy's SFC64; `pytorch` draws the same masks as
    PyTorch with the same seed, at five to ten times the cost."""
    kernels: Literal["auto", "onnxruntime", "pytorch", "compiled", "fastest"]
    """Whose kernels compute a training step: ONNX Runtime's, or PyTorch's."""
    cuda_graphs: Literal["auto", "on", "off"]
    """Whether a step on a CUDA device is captured as a CUDA graph, which the device starts by itself instead of kernel
    by kernel."""
    remove_padding: str
    """Name of the input that is an attention mask [batch, time]: training does not compute what only places that it
    masks would need."""
    moments: Literal["float32", "bfloat16"]
    """Dtype in which the optimizer keeps its moments, as a name or a torch.dtype."""
    cache_exports: bool
    """Stores the exported graphs of PyTorch models in the user's cache folder for the next start of the script; see
    slow_steps.md in the documentation."""
    run_symbolic_shape_infer: bool
    """Both values mean the same: sizes are symbolic in every export, without ONNX Runtime's symbolic shape inference.
    """


class UtilsOptionsDict(TypedDict, total=False):
    """Section `utils` of the options, as a dict."""

    frozen_weights: Sequence[str]
    save_frozen_weights: bool
    grad_norm_clip: bool
    max_grad_norm: float | None
    max_grad_value: float | None
    memory_efficient_gradient: bool
    share_weights: bool
    random_numbers: Literal["fast", "pytorch", "pytorch_global"]
    kernels: Literal["auto", "onnxruntime", "pytorch", "compiled", "fastest"]
    cuda_graphs: Literal["auto", "on", "off"]
    remove_padding: str
    moments: Literal["float32", "bfloat16"] | torch.dtype
    cache_exports: bool
    run_symbolic_shape_infer: bool


class GraphSavePathsOptions(Section):
    """Section `debug.graph_save_paths` of the options."""

    model_after_graph_transforms_path: str
    """ONNX file, written when the first training graph is built, whatever kernels train: the forward pass with the
    loss, extracted from the training graph after all passes."""
    model_with_gradient_graph_path: str
    """ONNX file, written when the first training graph is built, whatever kernels train: the training graph with loss,
    outputs, gradients and new buffers."""
    model_with_training_graph_path: str
    """ONNX file, written when the first training graph is built, whatever kernels train: the training graph with the
    optimizer's update as nodes, one model for a complete training step."""
    model_with_training_graph_after_optimization_path: str
    """ONNX file, written when the first training graph is built, whatever kernels train: the training graph as ONNX
    Runtime runs it, after its optimizations (the update runs on PyTorch's kernels)."""


class GraphSavePathsOptionsDict(TypedDict, total=False):
    """Section `debug.graph_save_paths` of the options, as a dict."""

    model_after_graph_transforms_path: str | PathLike[str]
    model_with_gradient_graph_path: str | PathLike[str]
    model_with_training_graph_path: str | PathLike[str]
    model_with_training_graph_after_optimization_path: str | PathLike[str]


class DebugOptions(Section):
    """Section `debug` of the options."""

    deterministic_compute: bool
    """Requests kernels that give bitwise equal results in every run, from ONNX Runtime or from PyTorch, whichever
    computes the step."""
    check_model_export: bool
    """Before the first step, compares the evaluation graph with the model in evaluation mode, run by PyTorch (relative
    1e-2, absolute 1e-6 or four roundings of the largest element) and raises if they differ."""
    check_indices: bool
    """Checks before every step (of exported artifacts, too) that inputs used as indices by the model or the loss (class
    labels, rows of an embedding) are in range, and raises an IndexError with the value and its place; see limits.md in
    the documentation."""
    max_nonfinite_losses: int | None
    """Number of consecutive steps with an infinite or NaN loss at which training stops: the last of them raises a
    FloatingPointError instead of training."""
    verify_every: int | str | None
    """Which steps (or micro-batches, or calls of an ORTModule) are repeated in eager PyTorch on a copy of the state,
    and compared before they take effect."""
    graph_save_paths: GraphSavePathsOptions


class DebugOptionsDict(TypedDict, total=False):
    """Section `debug` of the options, as a dict."""

    deterministic_compute: bool
    check_model_export: bool
    check_indices: bool
    max_nonfinite_losses: int | None
    verify_every: int | str | None
    graph_save_paths: GraphSavePathsOptionsDict


class InternalUseOptions(Section):
    """Section `_internal_use` of the options."""

    enable_internal_postprocess: bool
    """Runs the trainer's passes that make the exported graph smaller: they fold constants, merge common subexpressions,
    and remove operators without effect."""
    extra_postprocess: Callable[[onnx.ModelProto], onnx.ModelProto] | None
    """A function `ModelProto -> ModelProto` that runs on every exported graph after the trainer's passes."""
    onnx_opset_version: int
    """ONNX operator set of files and of graphs on ONNX Runtime's kernels: 18, or a later one that the installed ONNX
    Runtime supports."""
    enable_onnx_contrib_ops: bool
    """Whether graphs may contain operators outside standard ONNX."""


class InternalUseOptionsDict(TypedDict, total=False):
    """Section `_internal_use` of the options, as a dict."""

    enable_internal_postprocess: bool
    extra_postprocess: Callable[[onnx.ModelProto], onnx.ModelProto] | None
    onnx_opset_version: int
    enable_onnx_contrib_ops: bool
    provider_options: Mapping[str, Mapping[str, Any]]
    session_options: SessionOptions | None


class Options(Section):
    """All sections of the options."""

    batch: BatchOptions
    device: DeviceOptions
    distributed: DistributedOptions
    lr_scheduler: LRScheduler | torch.optim.lr_scheduler.LRScheduler | Callable[[int], float] | None
    """A schedule from `ort_trainer.optim`, or an instance of a subclass of `_LRScheduler`; a schedule of
    `torch.optim.lr_scheduler` over the trainer's optimizer, which is stepped after each update; or a function from the
    number of completed updates to a factor on the rates."""
    mixed_precision: MixedPrecisionOptions
    graph_transformer: GraphTransformerOptions
    utils: UtilsOptions
    debug: DebugOptions
    _internal_use: InternalUseOptions
    provider_options: Mapping[str, Mapping[str, Any]]
    """Execution provider name -> its options."""
    session_options: SessionOptions | None
    """An `onnxruntime.SessionOptions` for every session of the trainer."""


class OptionsDict(TypedDict, total=False):
    """The dict that `ORTTrainerOptions` takes."""

    batch: BatchOptionsDict
    device: DeviceOptionsDict
    distributed: DistributedOptionsDict
    lr_scheduler: LRScheduler | torch.optim.lr_scheduler.LRScheduler | Callable[[int], float] | None
    mixed_precision: MixedPrecisionOptionsDict
    graph_transformer: GraphTransformerOptionsDict
    utils: UtilsOptionsDict
    debug: DebugOptionsDict
    _internal_use: InternalUseOptionsDict
    provider_options: Mapping[str, Mapping[str, Any]]
    session_options: SessionOptions | None
    attn_dropout_recompute: bool
    gelu_recompute: bool
    transformer_layer_recompute: bool
    number_recompute_layers: int
