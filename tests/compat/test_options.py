"""Options as old scripts write and read them."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from onnxruntime.capi._pybind_state import ArenaExtendStrategy

import ort_trainer
from ort_trainer.compat import options as module
from ort_trainer.compat.options import (
    ORTTrainerOptions,
    PropagateCastOpsStrategy,
    device_defaults,
    set_cuda_device_id,
    set_cuda_mem_limit,
)


def test_documented_spellings_mean_what_the_code_called_them() -> None:
    given = {
        "graph_transformer": {
            "propagate_cast_ops_config": {"propagate_cast_ops_strategy": "FLOOD_FILL", "propagate_cast_ops_level": 1}
        },
        "attn_dropout_recompute": False,
        "number_recompute_layers": 0,
    }
    text = repr(given)
    options = ORTTrainerOptions(given)
    assert repr(given) == text
    assert options.to_dict() == ORTTrainerOptions().to_dict()
    assert options.is_given("graph_transformer.propagate_cast_ops_config.level")
    assert options.is_given("graph_transformer.attn_dropout_recompute")


def test_a_respelled_value_is_checked_like_any_other() -> None:
    casts = {"propagate_cast_ops_config": {"propagate_cast_ops_level": -2}}
    with pytest.raises(ValueError, match=r"propagate_cast_ops_config\.level: must be an int of at least -1"):
        ORTTrainerOptions({"graph_transformer": casts})


def test_attributes_that_old_scripts_read() -> None:
    options = ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 3}})
    assert options._validated_opts["batch"] == {"gradient_accumulation_steps": 3}
    assert options._original_opts == {"batch": {"gradient_accumulation_steps": 3}}
    assert ORTTrainerOptions()._original_opts == {}
    with pytest.raises(TypeError, match="options must be ORTTrainerOptions, a dict"):
        ORTTrainerOptions(3)
    with pytest.raises(ValueError, match="Invalid options: .*gradient_accumulation_steps"):
        ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 0}}, _validate=False)


def test_options_are_read_by_documented_names_and_as_lists() -> None:
    options = ORTTrainerOptions({"gelu_recompute": True, "utils": {"frozen_weights": ["a"]}})
    for found in (options, options.showing({"distributed": {"world_size": 2}}), pickle.loads(pickle.dumps(options))):
        assert found.gelu_recompute is True and found.utils.frozen_weights == ["a"] != ["b"]
        casts = found.graph_transformer.propagate_cast_ops_config
        assert casts.strategy == PropagateCastOpsStrategy.FLOOD_FILL != PropagateCastOpsStrategy.NONE  # type: ignore[comparison-overlap]
        assert casts.propagate_cast_ops_strategy == "FLOOD_FILL" and casts.allow_layer_norm_mod_precision is False
    assert "gelu_recompute" not in options.to_dict()
    kinds = PropagateCastOpsStrategy
    assert [int(kind) for kind in (kinds.NONE, kinds.INSERT_AND_REDUCE, kinds.FLOOD_FILL)] == [0, 1, 2]


def paths(options: dict[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        yield from (f"{key}.{rest}" for rest in paths(value)) if isinstance(value, dict) and value else [key]


def test_validated_options_are_those_of_legacy_with_its_defaults() -> None:
    """Upstream's tests compare them: they have the names of legacy's code, and no new options."""
    found = ORTTrainerOptions({"batch": {}, "utils": {}})._validated_opts
    assert set(paths(found)) <= set((Path(__file__).parent / "documented_names.txt").read_text().split())
    assert found["_internal_use"]["onnx_opset_version"] == 14 and found["device"] == {"id": "cuda", "mem_limit": 0}
    casts = found["graph_transformer"]["propagate_cast_ops_config"]
    assert (casts["strategy"].name, casts["level"], casts["allow"]) == ("FLOOD_FILL", 1, [])
    given = {"utils": {"kernels": "auto"}, "_internal_use": {"onnx_opset_version": 19}}
    found = ORTTrainerOptions(given)._validated_opts
    assert found["utils"]["kernels"] == "auto" and "share_weights" not in found["utils"]
    assert found["_internal_use"]["onnx_opset_version"] == 19


def test_options_that_are_found_keep_what_was_given() -> None:
    given = {"distributed": {"enable_adasum": True}}
    options = ORTTrainerOptions(given)
    shown = options.showing({"distributed": {"world_size": 2}})
    assert shown.distributed.enable_adasum is True and shown._original_opts == given
    with pytest.warns(UserWarning, match="^no harm$"):
        shown.refuse("no harm")
    with pytest.raises(ValueError, match="allreduce_post_accumulation: must be True or False"):
        ORTTrainerOptions({"distributed": {"allreduce_post_accumulation": "yes"}})
    with pytest.raises(ValueError, match="horizontal_parallel_size: 2 processes can't share a layer"):
        ORTTrainerOptions({"distributed": {"horizontal_parallel_size": 2}})


@pytest.mark.parametrize(
    "given",
    [
        {"distributed": {"pipeline_parallel": {"num_pipeline_micro_batches": 2}}},
        {"graph_transformer": {"number_recompute_layers": 2}},
        {"provider_options": {"CPUExecutionProvider": {"x": "1"}}},
    ],
    ids=["pipeline", "recompute", "provider"],
)
def test_options_without_effect_are_kept_with_a_warning(given: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="has no effect"):
        options = ORTTrainerOptions(given)
    section, values = next(iter(given.items()))
    for key, value in values.items():
        found = dict(options.to_dict())[section][key]
        assert found == ({**found, **value} if isinstance(value, dict) else value)
    with pytest.raises(ValueError, match="has no effect"):
        ort_trainer.ORTTrainerOptions(given)


@pytest.mark.parametrize("prefix", ["", "propagate_cast_ops_"], ids=["code", "documentation"])
@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("strategy", PropagateCastOpsStrategy.INSERT_AND_REDUCE, "INSERT_AND_REDUCE"),
        ("strategy", None, None),
        ("level", -1, -1),
        ("allow", ["Add"], ("Add",)),
    ],
)
def test_the_propagation_of_casts_is_a_warning(prefix: str, key: str, value: Any, kept: Any) -> None:
    given = {"graph_transformer": {"propagate_cast_ops_config": {f"{prefix}{key}": value}}}
    message = rf"propagate_cast_ops_config.{key}: can't be changed from .*, because .* have no effect: casts stay"
    with pytest.warns(UserWarning, match=message):
        options = ORTTrainerOptions(given)
    assert getattr(options.graph_transformer.propagate_cast_ops_config, key) == kept
    with pytest.raises(ValueError, match=message):
        ort_trainer.ORTTrainerOptions(given)


@pytest.mark.parametrize("kind", [ort_trainer.ORTTrainerOptions, ORTTrainerOptions])
def test_what_happens_anyway_is_accepted_silently(kind: Any) -> None:
    given: dict[str, Any] = {
        "distributed": {"allreduce_post_accumulation": True},
        "utils": {"run_symbolic_shape_infer": True},
        "graph_transformer": {"propagate_cast_ops_config": {"strategy": PropagateCastOpsStrategy.NONE}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = kind(given)
    assert options.graph_transformer.propagate_cast_ops_config.strategy == "NONE"
    assert options.distributed.allreduce_post_accumulation and options.utils.run_symbolic_shape_infer


def test_the_default_operator_set_is_legacys() -> None:
    assert ORTTrainerOptions()._internal_use.onnx_opset_version == 14
    assert ORTTrainerOptions({"_internal_use": {"onnx_opset_version": 19}})._internal_use.onnx_opset_version == 19


def test_weights_are_copied_as_they_were() -> None:
    assert ORTTrainerOptions().utils.share_weights is False
    assert ORTTrainerOptions({"utils": {"share_weights": True}}).utils.share_weights is True
    assert ORTTrainerOptions({"utils": {"grad_norm_clip": False}}).utils.to_dict() == {
        **ORTTrainerOptions().utils.to_dict(),
        "grad_norm_clip": False,
    }
    with pytest.raises(ValueError, match="utils: must be a dict"):
        ORTTrainerOptions({"utils": 3})


def test_a_device_set_beforehand_is_that_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    set_cuda_mem_limit(1 << 30)
    set_cuda_device_id(1)
    try:
        for options in (ORTTrainerOptions(), ORTTrainerOptions({"device": {}})):
            assert (options.device.id, options.device.mem_limit) == ("cuda:1", 1 << 30)
        options = ORTTrainerOptions({"device": {"id": "cpu", "mem_limit": 5}})
        assert (options.device.id, options.device.mem_limit) == ("cpu", 5)
        with pytest.raises(ValueError, match="device_id must be less than 2, the CUDA devices here, but 2"):
            set_cuda_device_id(2)
    finally:
        device_defaults.clear()
    assert ORTTrainerOptions().device.mem_limit == 0 and not ORTTrainerOptions().is_given("device.id")


@pytest.mark.parametrize("function", [set_cuda_mem_limit, set_cuda_device_id])
def test_a_device_that_is_not_there(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.warns(UserWarning, match=rf"{function.__name__}\(7\) has no effect: there is no CUDA device"):
        function(7)
    function(0)
    assert ORTTrainerOptions().device.mem_limit == 0 and not ORTTrainerOptions().is_given("device.id")
    with pytest.raises(ValueError, match=rf"{function.__name__}\(\) takes an int of at least 0, but -1"):
        function(-1)
    for wrong in ("all", True):
        with pytest.raises(TypeError, match=rf"{function.__name__}\(\) takes an int, but {wrong!r}"):
            function(wrong)


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        ("arena_extend_strategy", ArenaExtendStrategy.kNextPowerOfTwo, ArenaExtendStrategy.kSameAsRequested),
        ("cudnn_conv_algo_search", "EXHAUSTIVE", "HEURISTIC"),
        ("do_copy_in_default_stream", True, False),
    ],
)
def test_settings_of_the_cuda_provider(name: str, default: Any, other: Any, recwarn: pytest.WarningsRecorder) -> None:
    function = module.PROVIDER_SETTINGS[f"set_{name}"]
    function(default)
    assert not recwarn
    with pytest.warns(UserWarning, match=rf"set_{name}\(.*provider_options={{'CUDAExecutionProvider': {{'{name}': '"):
        function(other)
    with pytest.raises(ValueError, match=rf"set_{name}\(\) takes one of \[.*, but 'sideways'"):
        function("sideways")
