from __future__ import annotations

import copy
import enum

import onnxruntime
import pytest

from ort_trainer import ORTTrainerOptions, amp, optim
from ort_trainer.schema import load_schema


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
        "provider_options": {"CPUExecutionProvider": {"x": "1"}},
        "session_options": onnxruntime.SessionOptions(),
    }
    before = {**given, "utils": copy.deepcopy(given["utils"])}
    options = ORTTrainerOptions(given)
    assert given == before
    assert options.lr_scheduler is scheduler and options.mixed_precision.loss_scaler is scaler
    assert options.utils.frozen_weights == ("a",)
    assert options.provider_options["CPUExecutionProvider"]["x"] == "1"
    given["utils"]["frozen_weights"].append("b")  # type: ignore[index]
    assert options.utils.frozen_weights == ("a",)
    assert ORTTrainerOptions(options.to_dict()) == options


def test_immutable() -> None:
    options = ORTTrainerOptions()
    with pytest.raises(AttributeError, match="options are immutable"):
        options.batch = 3  # type: ignore[misc]
    with pytest.raises(AttributeError, match="options are immutable, so 'enabled'"):
        options.mixed_precision.enabled = True
    with pytest.raises(AttributeError, match="options are immutable"):
        del options.batch
    with pytest.raises(TypeError):
        options.provider_options["a"] = {}
    with pytest.raises(AttributeError, match="no option 'batc'.*'batch'"):
        options.batc  # noqa: B018


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": {"enabled": "yes"}}, "mixed_precision.enabled: must be of boolean type .*'yes', str"),
        ({"batch": {"gradient_accumulation_steps": 0}}, "batch.gradient_accumulation_steps: min value is 1"),
        (
            {"batch": {"gradient_accumulation_steps": True}},
            "batch.gradient_accumulation_steps: must be of integer type",
        ),
        ({"batch": {"gradient_accumulation_steps": 1.5}}, "batch.gradient_accumulation_steps: must be of integer"),
        ({"batch": []}, "batch: must be of dict type"),
        ({"device": {"id": "gpu:9"}}, "device.id: value does not match"),
        ({"device": {"mem_limit": -1}}, "device.mem_limit: min value is 0"),
        ({"utils": {"frozen_weights": [3]}}, "utils.frozen_weights.0: must be of string type .*3, int"),
        ({"lr_scheduler": 3}, "lr_scheduler: must be of lr_scheduler type"),
        ({"mixed_precision": {"enabled": True, "loss_scaler": 2.0}}, "loss_scaler: must be of loss_scaler type"),
        ({"mixed_precision": {"loss_scaler": amp.LossScaler(2.0)}}, "loss_scaler: has no effect without"),
        ({"session_options": {}}, "session_options: must be of session_options type"),
        ({"provider_options": {"CPUExecutionProvider": 3}}, "provider_options.CPUExecutionProvider: must be of dict"),
        ({"_internal_use": {"extra_postprocess": 3}}, "_internal_use.extra_postprocess: Must be callable or None"),
        ({"_internal_use": {"onnx_opset_version": 11}}, "_internal_use.onnx_opset_version: min value is 12"),
        ({"_internal_use": {"onnx_opset_version": 99}}, "_internal_use.onnx_opset_version: max value"),
        (
            {"graph_transformer": {"attn_dropout_recompute": 1}},
            "graph_transformer.attn_dropout_recompute: must be of boolean type .*1, int",
        ),
        ({"graph_transformer": {"gelu_recompute": "yes"}}, "graph_transformer.gelu_recompute: must be of boolean type"),
        (
            {"graph_transformer": {"transformer_layer_recompute": 2}},
            "graph_transformer.transformer_layer_recompute: must be of boolean type",
        ),
        (
            {"graph_transformer": {"number_recompute_layers": -1}},
            "graph_transformer.number_recompute_layers: min value is 0",
        ),
        (
            {"graph_transformer": {"number_recompute_layers": True, "transformer_layer_recompute": True}},
            "graph_transformer.number_recompute_layers: must be of integer type",
        ),
        (
            {"graph_transformer": {"number_recompute_layers": 2}},
            "graph_transformer.number_recompute_layers: has no effect without transformer_layer_recompute",
        ),
        ({"utils": {"memory_efficient_gradient": 0}}, "utils.memory_efficient_gradient: must be of boolean type"),
        (
            {"graph_transformer": {"propagate_cast_ops_config": {"strategy": "NONE"}}},
            "propagate_cast_ops_config.strategy: can't be changed from 'FLOOD_FILL': casts stand where .*autocast",
        ),
        (
            {"graph_transformer": {"propagate_cast_ops_config": {"strategy": "flood"}}},
            "propagate_cast_ops_config.strategy: unallowed value flood",
        ),
        (
            {"graph_transformer": {"propagate_cast_ops_config": {"propagate_cast_ops_strategy": "INSERT_AND_REDUCE"}}},
            "propagate_cast_ops_config.strategy: can't be changed from 'FLOOD_FILL'",
        ),
        (
            {"graph_transformer": {"propagate_cast_ops_config": {"level": 2}}},
            "propagate_cast_ops_config.level: can't be changed from 1",
        ),
        (
            {"graph_transformer": {"propagate_cast_ops_config": {"propagate_cast_ops_level": -2}}},
            "propagate_cast_ops_config.level: .*min value is -1",
        ),
        (
            {"graph_transformer": {"propagate_cast_ops_config": {"allow": ["Add"]}}},
            "propagate_cast_ops_config.allow: can't be changed from \\[\\]",
        ),
        (
            {"graph_transformer": {"propagate_cast_ops_config": {"propagate_cast_ops_allow": [1]}}},
            "propagate_cast_ops_config.allow",
        ),
        (
            {"graph_transformer": {"propagate_cast_ops_config": {"level": 1, "propagate_cast_ops_level": 1}}},
            "'level' and 'propagate_cast_ops_level' are two names of one setting",
        ),
        (
            {"graph_transformer": {"allow_layer_norm_mod_precision": True}},
            "graph_transformer.allow_layer_norm_mod_precision: can't be changed from False: layer norm",
        ),
        ({"nonsense": 1}, "nonsense: unknown field"),
        ({"debug": {"nonsense": 1}}, "debug.nonsense: unknown field"),
    ],
)
def test_wrong_values(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid options: .*{message}"):
        ORTTrainerOptions(options)


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(ValueError, match="^Invalid options: ") as caught:
        ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 0}, "x": 1, "debug": {"check_model_export": 1}})
    for path in ("batch.gradient_accumulation_steps", "x", "debug.check_model_export"):
        assert f"{path}: " in str(caught.value)


def test_wrong_type() -> None:
    with pytest.raises(TypeError, match="options must be a dict or None, but a list was given"):
        ORTTrainerOptions([])  # type: ignore[arg-type]


def _unsupported(schema: dict, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], dict]]:
    found = []
    for key, rules in schema.items():
        if rules.get("unsupported"):
            found.append(((*path, key), rules))
        elif rules["type"] == "dict" and "schema" in rules:
            found += _unsupported(rules["schema"], (*path, key))
    return found


_OTHER = {"integer": 1, "boolean": None, "string": "other", "list": ["a"], "dict": {"a": 1}}


@pytest.mark.parametrize(
    ("path", "rules"),
    _unsupported(load_schema("trainer_options")),
    ids=lambda v: ".".join(v) if isinstance(v, tuple) else "",
)
def test_what_is_not_supported_is_refused(path: tuple[str, ...], rules: dict) -> None:
    default = rules["default"]
    other = {"boolean": not default, "integer": 2 if default != 2 else 3}.get(rules["type"], _OTHER[rules["type"]])
    if path[-1] == "sliced_schema":
        other = {"a": [1]}
    if path[-1] == "stage":
        other = 1
    for value, fails in ((other, True), (default, False)):
        options: dict = {}
        inner = options
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
        if fails:
            with pytest.raises(ValueError, match=f"{'.'.join(path)}: is not supported yet"):
                ORTTrainerOptions(options)
        else:
            ORTTrainerOptions(options)


def test_cast_strategy_is_known_by_its_enum() -> None:
    strategy = enum.Enum("PropagateCastOpsStrategy", ["FLOOD_FILL"]).FLOOD_FILL  # as onnxruntime.training has it
    for name in ("strategy", "propagate_cast_ops_strategy"):
        options = ORTTrainerOptions({"graph_transformer": {"propagate_cast_ops_config": {name: strategy}}})
        assert options == ORTTrainerOptions()


@pytest.mark.parametrize("opset", [12, 13, 14])
def test_legacy_opsets_are_accepted_with_a_warning(opset: int) -> None:
    with pytest.warns(UserWarning, match=f"onnx_opset_version {opset} is older"):
        options = ORTTrainerOptions({"_internal_use": {"onnx_opset_version": opset}})
    assert options._internal_use.onnx_opset_version == 18


def test_is_given() -> None:
    assert ORTTrainerOptions({"device": {"id": "cuda"}}).is_given("device.id")
    assert not ORTTrainerOptions({"device": {}}).is_given("device.id")
