"""Invalid values: at least one for every option and every constructor argument, and random ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings

from ort_trainer import ORTTrainer, ORTTrainerOptions, TrainStepInfo, amp, optim
from ort_trainer.options.model_desc import ModelDescription
from ort_trainer.options.schema import load_schema

from .helpers import MLP, MLP_DESC

SCHEMA = load_schema("trainer_options")


def leaves(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, rules in schema.items():
        if rules["type"] == "dict" and "schema" in rules:
            yield from leaves(rules["schema"], f"{path}{key}.")
        else:
            yield f"{path}{key}"


def nested(path: str, value: Any, into: dict | None = None) -> dict:
    result: dict = {} if into is None else into
    *sections, key = path.split(".")
    inner = result
    for name in sections:
        inner = inner.setdefault(name, {})
    inner[key] = value
    return result


# Option -> invalid values, each with a part of its message, wrong types first.
OPTIONS: dict[str, list[tuple[Any, str]]] = {
    "batch.gradient_accumulation_steps": [("4", "must be an int"), (0, "must be an int of at least 1")],
    "batch.gradient_reduction": [(1, "must be 'mean', 'sum' or 'weighted'"), ("Mean", "did you mean 'mean'?")],
    "device.id": [
        (0, "must be a device of PyTorch, such as 'cpu', 'cuda' or 'cuda:1' (given: 0"),
        ("gpu", "must be a device of PyTorch, such as 'cpu', 'cuda' or 'cuda:1'"),
    ],
    "device.mem_limit": [(1.5, "must be an int"), (-1, "must be an int of at least 0")],
    "distributed.world_rank": [(True, "must be an int"), (-1, "must be an int of at least 0")],
    "distributed.world_size": [("2", "must be an int"), (0, "must be an int of at least 1")],
    "distributed.local_rank": [("0", "must be an int"), (-1, "must be an int of at least 0")],
    "distributed.data_parallel_size": [("2", "must be an int"), (0, "must be an int of at least 1")],
    "distributed.horizontal_parallel_size": [
        ([], "must be an int"),
        (0, "must be an int of at least 1"),
        (2, "can't share"),
    ],
    "distributed.pipeline_parallel.pipeline_parallel_size": [
        ("1", "must be an int"),
        (0, "must be an int of at least 1"),
        (2, "stages can't be trained"),
    ],
    "distributed.pipeline_parallel.num_pipeline_micro_batches": [
        (1.0, "must be an int"),
        (2, "no effect without a pipeline"),
    ],
    "distributed.pipeline_parallel.pipeline_cut_info_string": [
        (3, "must be a str"),
        ("a", "no effect without a pipeline"),
    ],
    "distributed.pipeline_parallel.sliced_schema": [
        ([], "must be a dict with str keys"),
        ({"x": [1]}, "no effect without"),
    ],
    "distributed.pipeline_parallel.sliced_axes": [
        (3, "must be a dict with str keys, each value an int"),
        ({"x": 1}, "no effect without"),
    ],
    "distributed.pipeline_parallel.sliced_tensor_names": [
        ("x", "must be a list, each entry a str"),
        (["x"], "no effect without"),
    ],
    "distributed.allreduce_post_accumulation": [("yes", "must be True or False")],
    "distributed.deepspeed_zero_optimization.stage": [("1", "must be an int"), (2, "must be an int from 0 to 1")],
    "distributed.enable_adasum": [(1, "must be True or False")],
    "distributed.timeout": [
        ("10", "must be a positive, finite number of at most 10000000"),
        (0, "must be a positive"),
        (1e9, "of at most 10000000"),
    ],
    "distributed.bucket_cap_mb": [
        ("25", "must be a positive, finite number"),
        (-1, "must be a positive, finite number"),
    ],
    "distributed.reduce_dtype": [
        (16, "must be 'float16' or 'bfloat16', or the torch.dtype"),
        ("bf16", "did you mean 'bfloat16'?"),
    ],
    "lr_scheduler": [
        (0.1, "must be a schedule of ort_trainer.optim"),
        (optim.LinearWarmupLRScheduler, "pass an object, LinearWarmup"),
    ],
    "mixed_precision.enabled": [("fp16", "must be True or False")],
    "mixed_precision.dtype": [
        (16, "must be 'auto', 'float16' or 'bfloat16', or the torch.dtype"),
        ("bf16", "did you mean 'bfloat16'?"),
    ],
    "mixed_precision.loss_scaler": [
        (1024.0, "must be a loss scaler of ort_trainer.amp"),
        (amp.LossScaler(2.0), "no effect without mixed"),
    ],
    "graph_transformer.attn_dropout_recompute": [(1, "must be True or False")],
    "graph_transformer.gelu_recompute": [("yes", "must be True or False")],
    "graph_transformer.transformer_layer_recompute": [([], "must be True or False")],
    "graph_transformer.number_recompute_layers": [(True, "must be an int"), (-1, "must be an int of at least 0")],
    "graph_transformer.propagate_cast_ops_config.strategy": [
        (1, "must be 'NONE', 'INSERT_AND_REDUCE' or 'FLOOD_FILL'"),
        ("flood_fill", "did you mean 'FLOOD_FILL'?"),
    ],
    "graph_transformer.propagate_cast_ops_config.level": [
        ("1", "must be an int"),
        (-2, "must be an int of at least -1"),
    ],
    "graph_transformer.propagate_cast_ops_config.allow": [("Add", "must be a list, each entry a str")],
    "graph_transformer.allow_layer_norm_mod_precision": [
        (1, "must be True or False"),
        (True, "be changed from False"),
    ],
    "utils.frozen_weights": [("fc1.weight", "must be a list, each entry a str")],
    "utils.grad_norm_clip": [(1.0, "must be True or False")],
    "utils.max_grad_value": [("1", "must be a positive, finite number"), (0.0, "must be a positive, finite number")],
    "utils.max_grad_norm": [("1", "must be a positive, finite number"), (-1.0, "must be a positive, finite number")],
    "utils.memory_efficient_gradient": [("no", "must be True or False")],
    "utils.share_weights": [("no", "must be True or False")],
    "utils.random_numbers": [("numpy", "must be 'fast', 'pytorch' or 'pytorch_global' (given: 'numpy', str)")],
    "utils.kernels": [
        ("torch", "did you mean 'pytorch'?"),
        (True, "must be 'auto', 'onnxruntime', 'pytorch', 'compiled' or 'fastest'"),
    ],
    "utils.cuda_graphs": [(True, "must be 'auto', 'on' or 'off' (given: True, bool)")],
    "utils.remove_padding": [(True, "must be a str")],
    "utils.moments": [
        ("fp32", "did you mean 'float32'?"),
        (torch.float16, "must be 'float32' or 'bfloat16', or the torch."),
    ],
    "utils.save_frozen_weights": [("no", "must be True or False")],
    "utils.cache_exports": [("no", "must be True or False")],
    "utils.run_symbolic_shape_infer": [(0, "must be True or False")],
    "debug.deterministic_compute": [("no", "must be True or False")],
    "debug.check_model_export": [(1, "must be True or False")],
    "debug.check_indices": [(1, "must be True or False")],
    "debug.max_nonfinite_losses": [(0, "must be an int of at least 1"), (1.0, "must be an int")],
    "debug.verify_every": [(-1, "must be an int of at least 0"), (1.0, "must be an int"), (True, "must be an int")],
    **{
        f"debug.graph_save_paths.model_{key}_path": [(3, "must be a str")]
        for key in (
            "after_graph_transforms",
            "with_gradient_graph",
            "with_training_graph",
            "with_training_graph_after_optimization",
        )
    },
    "_internal_use.enable_internal_postprocess": [("no", "must be True or False")],
    "_internal_use.extra_postprocess": [("f", "must be a function ModelProto -> ModelProto, or None")],
    "_internal_use.onnx_opset_version": [("18", "must be an int"), (11, "must be an int from 12 to 23")],
    "_internal_use.enable_onnx_contrib_ops": [(0, "must be True or False")],
    "provider_options": [
        ("CPU", "must be a dict with str keys, each value a dict"),
        ({3: {}}, "keys must be str, but 3"),
    ],
    "session_options": [({}, "must be an onnxruntime.SessionOptions, or None")],
}


def test_every_option_has_a_wrong_value() -> None:
    assert set(OPTIONS) == set(leaves(SCHEMA))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [(path, value, message) for path, cases in OPTIONS.items() for value, message in cases],
    ids=lambda v: v if isinstance(v, str) and "." in v else "",
)
def test_wrong_options(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^Invalid options: ") as caught:
        ORTTrainerOptions(nested(path, value))
    assert message in str(caught.value)
    section = path.rpartition(".")[0]  # for sizes that must fit together, the message may name another one
    assert path in str(caught.value) or f"{section}." in str(caught.value)


# Class -> valid arguments, and invalid values of every argument with the exception and a part of its message.
GROUPS = [("weight", TypeError, "'params' must be a list"), ([{"params": ["a"]}], ValueError, "at least one of")]
RATE = [("fast", TypeError, "'lr' must be a number"), (-1, ValueError, "'lr' must be at least 0")]
CLIP = [(0, ValueError, "'max_norm_clip' must not be 0"), ("1", TypeError, "'max_norm_clip' must be a number")]
DECAYS = {
    "alpha": [(1.0, ValueError, "'alpha' must be at least 0 and below 1")],
    "beta": [(None, TypeError, "'beta' must be a number")],
    "lambda_coef": [(-0.1, ValueError, "'lambda_coef' must be at least 0")],
    "epsilon": [(float("nan"), ValueError, "'epsilon' must be at least 0")],
    "max_norm_clip": CLIP,
    "do_bias_correction": [(1, TypeError, "'do_bias_correction' must be a bool")],
}
STEPS = [(0, ValueError, "'total_steps' must be at least 1"), (1.5, TypeError, "'total_steps' must be an int")]
WARMUP = [(1.0, ValueError, "'warmup' is a share of total_steps"), ("0", TypeError, "'warmup' must be a number")]
CONSTRUCTORS: dict[Callable[..., Any], tuple[dict[str, Any], dict[str, list[tuple[Any, type[Exception], str]]]]] = {
    ORTTrainer: (
        {"model": MLP(), "model_desc": MLP_DESC, "optim_config": optim.SGDConfig(), "loss_fn": F.cross_entropy},
        {
            "model": [(None, TypeError, "model must be "), (MLP, TypeError, "model must be ")],
            "model_desc": [
                (3, TypeError, "model_desc must be a dict"),
                ("none", ValueError, "model_desc must be a dict or 'auto'"),
                ({"inputs": []}, ValueError, "Invalid model_desc: "),
            ],
            "optim_config": [("adam", TypeError, "optim_config must be a config of ort_trainer.optim")],
            "loss_fn": [
                (3, TypeError, "loss_fn must be a function"),
                (lambda x: x, TypeError, "must take two arguments"),
            ],
            "options": [(3, TypeError, "options must be ORTTrainerOptions, a dict")],
        },
    ),
    ORTTrainerOptions: ({}, {"options": [(3, TypeError, "options must be ORTTrainerOptions, a dict such as")]}),
    TrainStepInfo: (
        {"optimizer_config": optim.SGDConfig()},
        {
            "optimizer_config": [(None, TypeError, "optimizer_config must be an optimizer config")],
            "all_finite": [(1, TypeError, "all_finite must be a bool")],
            "fetches": [("loss", TypeError, "fetches must be a list"), (3, TypeError, "fetches must be a list")],
            "optimization_step": [(-1, ValueError, "must be at least 0"), (1.0, TypeError, "must be an int")],
            "step": [(-1, ValueError, "must be at least 0"), ("1", TypeError, "must be an int")],
        },
    ),
    optim.OptimizerConfig: (
        {"name": "SGDOptimizer", "params": [], "defaults": {"lr": 1.0}},
        {
            "name": [("Adam", ValueError, "name must be one of ['AdamOptimizer'")],
            "params": GROUPS,
            "defaults": [({}, ValueError, "defaults must be a dict with an 'lr'")],
        },
    ),
    optim.SGDConfig: (
        {},
        {
            "params": GROUPS,
            "lr": RATE,
            "momentum": [(-0.1, ValueError, "'momentum' must be at least 0")],
            "dampening": [("1", TypeError, "'dampening' must be a number")],
            "weight_decay": [(-1, ValueError, "'weight_decay' must be at least 0")],
            "nesterov": [(1, TypeError, "'nesterov' must be a bool"), (True, ValueError, "needs a momentum above 0")],
        },
    ),
    optim.LionConfig: (
        {},
        {
            "params": GROUPS,
            "lr": RATE,
            "betas": [(0.9, TypeError, "'betas' must be two"), ((1, 0.9), ValueError, "'betas' must be at least 0")],
            "weight_decay": [("1", TypeError, "'weight_decay' must be a number")],
        },
    ),
    optim.AdamConfig: (
        {},
        {
            "params": GROUPS,
            "lr": RATE,
            **DECAYS,
            "weight_decay_mode": [("before", ValueError, "must be an AdamConfig.DecayMode")],
        },
    ),
    optim.AdamWConfig: (
        {},
        {
            "params": GROUPS,
            "lr": RATE,
            "betas": [
                (0.9, TypeError, "'betas' must be two numbers"),
                ((0.9, 1), ValueError, "'betas' must be at least"),
            ],
            "eps": [(-1, ValueError, "'eps' must be at least 0")],
            "weight_decay": [("1", TypeError, "'weight_decay' must be a number")],
            "max_norm_clip": CLIP,
        },
    ),
    optim.LambConfig: (
        {},
        {
            "params": GROUPS,
            "lr": RATE,
            **DECAYS,
            "ratio_min": [("1", TypeError, "'ratio_min' must be a number")],
            "ratio_max": [(float("nan"), ValueError, "'ratio_max' must be at least")],
        },
    ),
    optim.LRScheduler: ({}, {}),
    optim.ConstantWarmupLRScheduler: ({"total_steps": 9}, {"total_steps": STEPS, "warmup": WARMUP}),
    optim.LinearWarmupLRScheduler: ({"total_steps": 9}, {"total_steps": STEPS, "warmup": WARMUP}),
    optim.CosineWarmupLRScheduler: (
        {"total_steps": 9},
        {"total_steps": STEPS, "cycles": [(0, ValueError, "'cycles' must be positive")], "warmup": WARMUP},
    ),
    optim.PolyWarmupLRScheduler: (
        {"total_steps": 9},
        {
            "total_steps": STEPS,
            "lr_end": [(-1, ValueError, "'lr_end' must be at least 0")],
            "power": [("2", TypeError, "'power' must be a number")],
            "warmup": WARMUP,
        },
    ),
    amp.LossScaler: (
        {"loss_scale": 1.0},
        {
            "loss_scale": [
                ("1", TypeError, "loss_scale must be an int or float"),
                (0, ValueError, "positive and finite"),
            ]
        },
    ),
    amp.DynamicLossScaler: (
        {},
        {
            "automatic_update": [(1, TypeError, "automatic_update must be a bool")],
            "loss_scale": [(float("inf"), ValueError, "loss_scale must be positive and finite")],
            "up_scale_window": [(0, ValueError, "must be at least 1"), (1.0, TypeError, "must be an int")],
            "min_loss_scale": [(-1, ValueError, "positive"), (2.0**30, ValueError, "is above max_loss_scale")],
            "max_loss_scale": [(None, TypeError, "max_loss_scale must be an int or float")],
        },
    ),
}


def public_constructors() -> set[Any]:
    found = {getattr(optim, name) for name in optim.__all__ if not name.startswith("_")} - {optim.from_torch}
    return found | {getattr(amp, name) for name in amp.__all__} | {ORTTrainer, ORTTrainerOptions, TrainStepInfo}


def test_every_constructor_argument_has_a_wrong_value() -> None:
    assert set(CONSTRUCTORS) == public_constructors()
    for made, (_, wrong) in CONSTRUCTORS.items():
        assert set(wrong) == set(inspect.signature(made).parameters), made


@pytest.mark.parametrize(
    ("made", "argument", "value", "error", "message"),
    [
        (made, argument, *case)
        for made, (_, wrong) in CONSTRUCTORS.items()
        for argument, cases in wrong.items()
        for case in cases
    ],
    ids=lambda v: getattr(v, "__name__", v) if isinstance(v, (type, str)) else "",
)
def test_wrong_arguments(made: Any, argument: str, value: Any, error: type[Exception], message: str) -> None:
    valid, _ = CONSTRUCTORS[made]
    made(**valid)
    with pytest.raises(error) as caught:
        made(**{**valid, argument: value})
    assert message in str(caught.value)


def test_a_built_in_loss_whose_arguments_nobody_knows() -> None:
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(torch.dist)
    ORTTrainer(MLP(), MLP_DESC, optim.SGDConfig(), loss_fn=torch.dist)


# ---- random input

KNOWN = sorted({part for path in leaves(SCHEMA) for part in path.split(".")})
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(optim.LinearWarmupLRScheduler(3))
)
KEYS = st.one_of(st.sampled_from(KNOWN), st.text(max_size=5), st.integers(), st.none())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner), st.dictionaries(KEYS, inner, max_size=4), st.sets(st.integers())
    ),
    max_leaves=12,
)
QUICK = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@QUICK
@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_random_options(options: dict) -> None:
    before = repr(options)
    try:
        valid = ORTTrainerOptions(options)
    except ValueError as error:
        assert str(error).startswith("Invalid options: ")
    else:
        assert set(valid) == set(SCHEMA)
    assert repr(options) == before


@QUICK
@given(st.sets(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=6), st.sets(st.sampled_from("xyz")))
def test_all_wrong_paths_are_named(paths: set[str], unknown: set[str]) -> None:
    options: dict = {**{f"unknown_{name}": 1 for name in unknown}, 7: 7}
    for path in paths:
        nested(path, OPTIONS[path][0][0], options)
    with pytest.raises(ValueError, match="^Invalid options: ") as caught:
        ORTTrainerOptions(options)
    assert "7: keys must be str" in str(caught.value)
    for path in (*paths, *(f"unknown_{name}" for name in unknown)):
        assert path in str(caught.value), path


SHAPES = st.lists(st.one_of(st.integers(-1, 5), st.text(max_size=2), st.booleans()), max_size=3)
ENTRIES = st.one_of(
    VALUES, st.tuples(st.text(max_size=3), SHAPES), st.tuples(st.text(max_size=3), SHAPES, st.booleans())
)


@QUICK
@given(
    st.one_of(
        st.dictionaries(st.sampled_from(["inputs", "outputs", "other"]), VALUES),
        st.fixed_dictionaries({"inputs": st.lists(ENTRIES, max_size=3), "outputs": st.lists(ENTRIES, max_size=3)}),
    )
)
def test_random_descriptions(description: dict) -> None:
    try:
        valid = ModelDescription(description)
    except ValueError as error:
        assert str(error).startswith("Invalid model_desc: ")
    else:
        assert len(valid.inputs) == len(description["inputs"]) and valid.loss in valid.outputs
