from __future__ import annotations

import copy
import enum
import pickle
import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from ort_trainer import ORTTrainerOptions, amp, optim


def test_defaults() -> None:
    options = ORTTrainerOptions()
    assert options.batch.gradient_accumulation_steps == 1
    assert options.device.id == "cuda" and options.device.mem_limit == 0
    assert options.mixed_precision.enabled is False and options.mixed_precision.loss_scaler is None
    assert options.utils.frozen_weights == () and options.utils.grad_norm_clip is True
    assert options._internal_use.onnx_opset_version == 18
    assert options.provider_options == {} and options.session_options is None
    assert ORTTrainerOptions({}) == options == ORTTrainerOptions(None)


def test_values_are_kept_and_nothing_is_mutated() -> None:
    scaler = amp.LossScaler(4.0)
    scheduler = optim.LinearWarmupLRScheduler(10)
    given = {
        "batch": {"gradient_accumulation_steps": 3},
        "lr_scheduler": scheduler,
        "mixed_precision": {"enabled": True, "loss_scaler": scaler},
        "utils": {"frozen_weights": ["a"]},
        "provider_options": {"DnnlExecutionProvider": {"x": "1"}},
        "session_options": onnxruntime.SessionOptions(),
    }
    before = {**given, "utils": copy.deepcopy(given["utils"])}
    options = ORTTrainerOptions(given)
    assert given == before
    assert options.lr_scheduler is scheduler and options.mixed_precision.loss_scaler is scaler
    assert options.utils.frozen_weights == ("a",)
    assert options.provider_options["DnnlExecutionProvider"]["x"] == "1"
    given["utils"]["frozen_weights"].append("b")
    assert options.utils.frozen_weights == ("a",)
    assert ORTTrainerOptions(options.to_dict()) == options


def test_immutable() -> None:
    options = ORTTrainerOptions()
    with pytest.raises(AttributeError, match="options are immutable"):
        options.batch = 3
    with pytest.raises(AttributeError, match="options are immutable, so 'enabled'"):
        options.mixed_precision.enabled = True
    with pytest.raises(AttributeError, match="options are immutable"):
        del options.batch
    with pytest.raises(TypeError):
        options.provider_options["a"] = {}
    with pytest.raises(AttributeError, match="no option 'batc'.*'batch'"):
        options.batc  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": []}, "batch: must be a dict with any of the keys 'gradient_accumulation_steps' and 'gradient_red"),
        ({"mixed_precision": {"dtype": "bfloat16"}}, "mixed_precision.dtype: 'bfloat16' has no effect without"),
        ({"mixed_precision": {"dtype": "float16"}}, "mixed_precision.dtype: 'float16' has no effect without"),
        ({"utils": {"max_grad_norm": float("inf")}}, "utils.max_grad_norm: must be a positive, finite number"),
        ({"utils": {"max_grad_norm": 1.0, "grad_norm_clip": False}}, "utils.max_grad_norm: 1.0 has no effect with"),
        ({"utils": {"frozen_weights": [3]}}, "utils.frozen_weights.0: must be a str .*3, int"),
        (
            {"provider_options": {"CPUExecutionProvider": {"x": "1"}}},
            "provider_options.CPUExecutionProvider: has no effect, because ONNX Runtime ignores the options of the CPU",
        ),
        ({"provider_options": {"CPUExecutionProvider": 3}}, "CPUExecutionProvider: must be a dict .given: 3"),
        ({"_internal_use": {"onnx_opset_version": 99}}, "_internal_use.onnx_opset_version: must be an int from 12 to "),
        (
            {"graph_transformer": {"number_recompute_layers": 2}},
            "graph_transformer.number_recompute_layers: has no effect without transformer_layer_recompute",
        ),
        (
            {"graph_transformer": {"propagate_cast_ops_config": {"level": 1, "propagate_cast_ops_level": 1}}},
            "propagate_cast_ops_level: is another name of graph_transformer.propagate_cast_ops_config.level",
        ),
        ({"nonsense": 1}, "nonsense: unknown option .*: the options and their sections are 'batch', 'device',"),
        ({"debug": {"nonsense": 1}}, "debug.nonsense: unknown .*: the options of debug are .* and 'graph_save_paths'"),
    ],
)
def test_wrong_values(options: dict, message: str) -> None:
    """Those of several options together, and of none; test_bad_input.py has wrong values of each."""
    with pytest.raises(ValueError, match=f"Invalid options: .*{message}"):
        ORTTrainerOptions(options)


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"batch": {"gradient_accumulation_step": 4}}, "batch.gradient_accumulation_steps"),
        (
            {"gradient_accumulation_steps": 4},
            "batch.gradient_accumulation_steps, as in {'batch': {'gradient_accumulation_",
        ),
        ({"batch.gradient_accumulation_steps": 4}, "batch.gradient_accumulation_steps, as in {'batch': {'gradient_acc"),
        ({"debug": {"kernel": "pytorch"}}, "utils.kernels, as in {'utils': {'kernels': ...}}"),
        ({"distributed": {"pipeline_parallel_size": 2}}, "distributed.pipeline_parallel.pipeline_parallel_size, as"),
        ({"graph_transformer": {"propagate_cast_ops_levl": 2}}, "graph_transformer.propagate_cast_ops_config.level"),
        ({"mixed_precission": {}}, "mixed_precision"),
        ({"bf16": True}, "{'mixed_precision': {'enabled': True, 'dtype': 'bfloat16'}}"),
    ],
)
def test_what_an_unknown_option_may_have_meant(options: dict, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown option .*: did you mean {re.escape(meant)}"):
        ORTTrainerOptions(options)


def test_objects_of_pytorch_and_paths_are_values() -> None:
    paths = {"model_with_gradient_graph_path": Path("graph.onnx")}
    options = ORTTrainerOptions(
        {
            "device": {"id": torch.device("cuda", 1)},
            "utils": {"moments": torch.bfloat16},
            "debug": {"graph_save_paths": paths},
        }
    )
    assert (options.device.id, options.utils.moments) == ("cuda:1", "bfloat16")
    assert options.debug.graph_save_paths.model_with_gradient_graph_path == "graph.onnx"


def test_pickles() -> None:
    given = {"utils": {"frozen_weights": ["a"]}, "provider_options": {"DnnlExecutionProvider": {"x": "1"}}, "batch": {}}
    options = ORTTrainerOptions(given)
    found = pickle.loads(pickle.dumps(options))
    assert found == options and found.is_given("utils.frozen_weights") and not found.is_given("utils.kernels")
    assert pickle.loads(pickle.dumps(options.distributed)) == options.distributed


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(ValueError, match="^Invalid options: ") as caught:
        ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 0}, "x": 1, "debug": {"check_model_export": 1}})
    for path in ("batch.gradient_accumulation_steps", "x", "debug.check_model_export"):
        assert f"{path}: " in str(caught.value)


def test_wrong_type() -> None:
    with pytest.raises(TypeError, match="options must be ORTTrainerOptions, a dict .* or None, but \\[\\] was given"):
        ORTTrainerOptions([])


SLICED = {"sliced_schema": {"x": [4, 8]}, "sliced_axes": {"x": 0}, "sliced_tensor_names": ["x"]}


@pytest.mark.parametrize(
    ("distributed", "messages"),
    [
        ({"world_rank": 1, "world_size": 1}, ["world_rank: 1 must be below distributed.world_size, 1"]),
        ({"local_rank": 2, "world_size": 2}, ["local_rank: 2 must be below distributed.world_size, 2"]),
        ({"world_size": 4, "data_parallel_size": 2}, ["data_parallel_size: 2 must equal distributed.world_size, 4"]),
        ({"world_size": 3, "enable_adasum": True}, ["enable_adasum: .* power of two, but distributed.world_size is 3"]),
        ({"reduce_dtype": "float16", "enable_adasum": True}, ["reduce_dtype: 'float16' has no effect with .*adasum"]),
        ({"pipeline_parallel": SLICED}, [f"{key}: has no effect without a pipeline" for key in SLICED]),
    ],
)
def test_distributed_settings_that_do_not_fit(distributed: dict, messages: list[str]) -> None:
    with pytest.raises(ValueError, match="^Invalid options: ") as caught:
        ORTTrainerOptions({"distributed": distributed})
    for message in messages:
        assert re.search(message, str(caught.value))


@pytest.mark.parametrize("others", [{}, {"num_pipeline_micro_batches": 4, "pipeline_cut_info_string": "a,b", **SLICED}])
def test_a_pipeline_is_refused_with_the_way_to_go(others: dict) -> None:
    pipeline = {"pipeline_parallel_size": 3, **others}
    message = (
        "^Invalid options: [^:;]*pipeline_parallel_size: 3 stages can't [^;]*: for large [^;]*distributed.pipelining"
    )
    idle = "".join(rf"; [^:;]*{key}: has no effect without a pipeline; leave it out \(given: [^;]*\)" for key in others)
    with pytest.raises(ValueError, match=f"{message}{idle}$"):
        ORTTrainerOptions({"distributed": {"world_size": 3, "pipeline_parallel": pipeline}})


@pytest.mark.parametrize(
    "distributed",
    [
        {"world_size": 2},
        {"world_rank": 3, "local_rank": 1, "data_parallel_size": 4},
        {"world_size": 4, "world_rank": 3, "data_parallel_size": 4, "enable_adasum": True, "timeout": 30},
        {"deepspeed_zero_optimization": {"stage": 1}, "reduce_dtype": torch.bfloat16, "bucket_cap_mb": 0.5},
    ],
)
def test_options_of_several_processes_are_a_value(distributed: dict) -> None:
    """Only a trainer can tell whether they have an effect."""
    options = ORTTrainerOptions({"distributed": distributed})
    for key, value in distributed.items():
        found = dict(options.to_dict()["distributed"])[key]
        assert found == (str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value)


def test_adasum_takes_means() -> None:
    given = {"distributed": {"enable_adasum": True}, "batch": {"gradient_reduction": "sum"}}
    with pytest.raises(ValueError, match="enable_adasum: Adasum combines means .* is 'sum'"):
        ORTTrainerOptions(given)


def test_options_that_show_what_was_found() -> None:
    options = ORTTrainerOptions({"distributed": {"timeout": 30}, "utils": {"frozen_weights": ["a"]}})
    shown = options.showing({"distributed": {"world_rank": 1, "world_size": 2}})
    assert (shown.distributed.world_rank, shown.distributed.world_size, shown.distributed.timeout) == (1, 2, 30)
    assert not shown.is_given("distributed.world_rank") and shown.is_given("distributed.timeout")
    assert shown.utils == options.utils and options.distributed.world_rank == 0


def test_distributed_settings_of_one_process() -> None:
    one = {"world_size": 1, "data_parallel_size": 1, "pipeline_parallel": {"num_pipeline_micro_batches": 1}}
    assert ORTTrainerOptions({"distributed": one}) == ORTTrainerOptions()


def test_the_documentations_spellings() -> None:
    session = onnxruntime.SessionOptions()
    options = ORTTrainerOptions(
        {
            "graph_transformer": {"propagate_cast_ops_config": {"propagate_cast_ops_level": 1}},
            "attn_dropout_recompute": False,
            "_internal_use": {"provider_options": {"CPUExecutionProvider": {}}, "session_options": session},
        }
    )
    assert options.session_options is session and list(options.provider_options) == ["CPUExecutionProvider"]
    with pytest.raises(
        ValueError, match=r"propagate_cast_ops_config.level: must be an int of at least -1 \(given: 'a', str"
    ):
        ORTTrainerOptions({"graph_transformer": {"propagate_cast_ops_config": {"propagate_cast_ops_level": "a"}}})
    with pytest.raises(
        ValueError, match="gelu_recompute: is another name of graph_transformer.gelu_recompute, which is"
    ):
        ORTTrainerOptions({"gelu_recompute": False, "graph_transformer": {"gelu_recompute": False}})
    with pytest.raises(ValueError, match="graph_transformer: must be a dict with any of the keys"):
        ORTTrainerOptions({"gelu_recompute": False, "graph_transformer": 3})


def test_cast_strategy_is_known_by_its_enum() -> None:
    strategy = enum.Enum("PropagateCastOpsStrategy", ["FLOOD_FILL"])["FLOOD_FILL"]  # as in onnxruntime.training
    for name in ("strategy", "propagate_cast_ops_strategy"):
        options = ORTTrainerOptions({"graph_transformer": {"propagate_cast_ops_config": {name: strategy}}})
        assert options == ORTTrainerOptions()


@pytest.mark.parametrize("opset", [12, 13, 14])
def test_legacy_opsets_are_kept(opset: int) -> None:
    options = ORTTrainerOptions({"_internal_use": {"onnx_opset_version": opset}})
    assert options._internal_use.onnx_opset_version == opset


def test_is_given() -> None:
    assert ORTTrainerOptions({"device": {"id": "cuda"}}).is_given("device.id")
    assert not ORTTrainerOptions({"device": {}}).is_given("device.id")


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"batch": {"gradient_accumulation_steps": np.int64(3)}, "utils": {"max_grad_norm": np.float32(0.5)}}
    options = ORTTrainerOptions(given)
    assert type(options.batch.gradient_accumulation_steps) is int and options.batch.gradient_accumulation_steps == 3
    assert type(options.utils.max_grad_norm) is float and options.utils.max_grad_norm == 0.5
    with pytest.raises(ValueError, match="gradient_accumulation_steps: must be an int"):
        ORTTrainerOptions({"batch": {"gradient_accumulation_steps": np.float32(3)}})


def test_changed_options_keep_what_was_given() -> None:
    before = ORTTrainerOptions({"utils": {"frozen_weights": ["a"], "grad_norm_clip": False}, "device": {"id": "cpu"}})
    after = before.changed({"utils": {"frozen_weights": ["a", "b"]}, "batch": {"gradient_accumulation_steps": 2}})
    assert after.utils.frozen_weights == ("a", "b") and after.utils.grad_norm_clip is False
    assert after.batch.gradient_accumulation_steps == 2 and after.device.id == "cpu"
    assert (
        after.is_given("device.id") and after.is_given("utils.grad_norm_clip") and not after.is_given("utils.kernels")
    )
    assert before.utils.frozen_weights == ("a",) and type(after) is type(before)
