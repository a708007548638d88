"""``TrainingParameters``: the settings of a :class:`~ort_trainer.TrainingSession`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ...core.errors import shown

__all__ = ["TrainingParameters"]


@dataclass
class TrainingParameters:
    """Settings of a training session, with ONNX Runtime's names and defaults.

    Assigning a value of the wrong type raises; a setting without effect here raises when the session is created.

    Attributes:
        loss_output_name: The output of the model to minimize.
        training_optimizer_name: ``AdamOptimizer``, ``LambOptimizer``, ``SGDOptimizer``, or empty: then a run computes
            gradients without updates.
        lr_params_feed_name: The name of the input for the learning rate, a float32 of shape [1].
        optimizer_attributes_map: Weight -> its hyper-parameters: ``alpha``, ``beta``, ``lambda``, ``epsilon``,
            ``max_norm_clip``, ``ratio_min``, ``ratio_max``, if the optimizer has them.
        optimizer_int_attributes_map: Weight -> ``do_bias_correction``, ``weight_decay_mode``.
        weights_to_train: Initializers to train; empty for all floating-point ones.
        weights_not_to_train: Initializers not to train.
        immutable_weights: Operator -> input position -> value: an initializer at that input whose elements all have
            this value is a constant and not trained.
        gradient_accumulation_steps: Runs per weight update.
        enable_grad_norm_clip: Whether gradients are clipped to ``max_norm_clip``.
        use_mixed_precision: Whether matrix products and convolutions use fp16.
        loss_scale: The loss scale of mixed precision; 0 if it is fed as an input (``session.loss_scale_input_name``).
        set_gradients_as_graph_outputs: Whether to add the outputs ``<weight>_grad``: the window's gradients so far.
        model_after_graph_transforms_path: Where to write the forward graph.
        model_with_gradient_graph_path: Where to write the graph with the backward pass.
        model_with_training_graph_path: Where to write the graph with the optimizer's nodes.
    """

    allreduce_post_accumulation: bool = False
    attn_dropout_recompute: bool = False
    data_parallel_size: int = 1
    deepspeed_zero_stage: int = 0
    enable_adasum: bool = False
    enable_grad_norm_clip: bool = True
    gelu_recompute: bool = False
    gradient_accumulation_steps: int = 1
    horizontal_parallel_size: int = 1
    immutable_weights: dict[str, dict[int, float]] = field(default_factory=dict)
    loss_output_name: str = ""
    loss_scale: float = 0.0
    lr_params_feed_name: str = "Learning_Rate"
    model_after_graph_transforms_path: str = ""
    model_with_gradient_graph_path: str = ""
    model_with_training_graph_path: str = ""
    num_pipeline_micro_batches: int = 1
    number_recompute_layers: int = 0
    optimizer_attributes_map: dict[str, dict[str, float]] = field(default_factory=dict)
    optimizer_int_attributes_map: dict[str, dict[str, int]] = field(default_factory=dict)
    pipeline_cut_info_string: str = ""
    pipeline_parallel_size: int = 1
    propagate_cast_ops_allow: list[str] = field(default_factory=list)
    propagate_cast_ops_level: int = 1
    set_gradients_as_graph_outputs: bool = False
    sliced_axes: dict[str, int] = field(default_factory=dict)
    sliced_schema: dict[str, list[int]] = field(default_factory=dict)
    sliced_tensor_names: list[str] = field(default_factory=list)
    training_optimizer_name: str = ""
    transformer_layer_recompute: bool = False
    use_fp16_moments: bool = False
    use_memory_efficient_gradient: bool = False
    use_mixed_precision: bool = False
    weights_not_to_train: set[str] = field(default_factory=set)
    weights_to_train: set[str] = field(default_factory=set)
    world_rank: int = 0
    world_size: int = 1
    optimizer_initial_state: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        kinds = _KINDS.get(name)
        if kinds is None:
            raise AttributeError(f"TrainingParameters has no property {name!r}: choose from {sorted(_KINDS)}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"TrainingParameters.{name} must be a {wanted}, but {shown(value)} was given")
        super().__setattr__(name, _copied(value, kinds[0]))

    def set_optimizer_initial_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets the initial moments and update counts.

        Args:
            state: Weight -> ``Moment_1``, ``Moment_2`` and, with Adam, ``Update_Count`` (completed updates plus 1), as
                arrays; with LAMB also ``shared_optimizer_state`` -> ``Step``. ``get_optimizer_state`` returns this.

        Raises:
            TypeError: If it is not a dict of dicts.
        """
        if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
            raise TypeError(f"the optimizer's initial state must be a dict of dicts, but {state!r} was given")
        self.optimizer_initial_state = {
            name: {key: np.array(value) for key, value in entry.items()} for name, entry in state.items()
        }


def _copied(value: Any, kind: type) -> Any:
    if kind in (list, set, dict):
        return kind(copy.deepcopy(value))
    return kind(value)


# Property -> the accepted types; the first is its own type.
_ACCEPTED: dict[type, tuple[type, ...]] = {float: (float, int), list: (list, tuple), set: (set, frozenset, list, tuple)}
_KINDS: dict[str, tuple[type, ...]] = {}
for _field in fields(TrainingParameters):
    _default = _field.default_factory() if callable(_field.default_factory) else _field.default
    _KINDS[_field.name] = _ACCEPTED.get(type(_default), (type(_default),))
