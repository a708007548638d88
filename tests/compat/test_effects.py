"""Every value other than the default has an effect, or its row in docs/reference/names.md says that it is refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ort_trainer import ORTTrainer, ORTTrainerOptions, TrainingParameters, optim
from ort_trainer.compat.options import ORTTrainerOptions as OldOptions
from ort_trainer.compat.trainer import ORTTrainer as OldTrainer
from ort_trainer.engine.ort import has_cuda

from ..helpers import MLP, MLP_DESC, mlp_batches
from .effects import OF_SESSIONS, OPTIONS, PROPERTIES, RECOMPUTED, former_options_of, nested
from .test_names import OPTIONS as OPTION_ROWS
from .test_names import RULES, SESSION_ROWS

CLASS = "onnxruntime.capi._pybind_state.TrainingParameters."
REFUSED = re.compile(r"refused beyond the default, `(.*?)`(?: and `.*`)?(?:, after `install\(\)` (a warning))?; (.+)")
SAME = re.compile("works, differs: both values mean the same.*")
STATES = {old: state for old, new, state in OPTION_ROWS if new}
VALUES = {path: effect.value for path, effect in OPTIONS.items()} | RECOMPUTED
NEW_NAMES = {old: new for old, new, _ in OPTION_ROWS if new}
PROPERTY_STATES = {
    old.removeprefix(CLASS): state
    for old, _, state in SESSION_ROWS
    if old.startswith(CLASS) and not old.endswith("__init__")
}


def another(default: Any, rules: dict[str, Any]) -> Any:
    """Returns a value of the same type other than the default."""
    if "allowed" in rules:
        return [value for value in rules["allowed"] if value != default][-1]
    if isinstance(default, dict):
        return {"x": [1] if "schema" in rules.get("valuesrules", {}) else 1}
    if isinstance(default, (bool, int)):
        return not default if isinstance(default, bool) else default + 1
    return {str: "x", list: ["x"]}[type(default)]


def refused(states: dict[str, str]) -> list[str]:
    return [name for name, state in states.items() if REFUSED.fullmatch(state)]


def same(states: dict[str, str]) -> set[str]:
    return {name for name, state in states.items() if SAME.fullmatch(state)}


def in_old_scripts(lenient: str | None, said: str | re.Pattern[str], make: Callable[[], object]) -> None:
    """Checks that a value causes a warning, or is refused."""
    with pytest.warns(UserWarning, match=said) if lenient else pytest.raises(ValueError, match=said):
        make()


def test_every_row_is_tried() -> None:
    works = {NEW_NAMES[old] for old in STATES} - {NEW_NAMES[old] for old in refused(STATES)}
    assert works - same(STATES) == set(VALUES)
    works = set(PROPERTY_STATES) - set(refused(PROPERTY_STATES)) - same(PROPERTY_STATES)
    assert works == PROPERTIES.keys() | OF_SESSIONS
    assert len(refused(PROPERTY_STATES)) == 9
    assert not any("refused beyond" in state for state in STATES.values() if not REFUSED.fullmatch(state))


@pytest.mark.parametrize("value", [False, True])
def test_values_that_mean_the_same_are_accepted(value: bool) -> None:
    assert same(STATES) == {"distributed.allreduce_post_accumulation", "utils.run_symbolic_shape_infer"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in same(STATES):
            ORTTrainerOptions(nested(path, value))
        for name in same(PROPERTY_STATES):
            ORTTrainerOptions(former_options_of(**{name: value}))


@pytest.mark.parametrize("old", refused(STATES))
def test_options_that_are_refused_beyond_their_default(old: str) -> None:
    rules = RULES[NEW_NAMES[old]]
    default, lenient, _ = REFUSED.fullmatch(STATES[old]).groups()
    assert default == repr(rules["default"])
    given = nested(old, another(rules["default"], rules))
    ORTTrainerOptions(nested(old, rules["default"]))
    key = NEW_NAMES[old].rpartition(".")[2]
    with pytest.raises(ValueError, match=f"Invalid options: .*{key}"):
        ORTTrainerOptions(given)
    in_old_scripts(lenient, key, lambda: OldOptions(given))


@pytest.mark.parametrize("old", [old for old in STATES if NEW_NAMES[old] in VALUES and old != NEW_NAMES[old]])
def test_other_spellings_of_options(old: str) -> None:
    value, beside = VALUES[NEW_NAMES[old]], OPTIONS[NEW_NAMES[old]].beside if NEW_NAMES[old] in OPTIONS else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, other = (OldOptions(nested(name, value, beside)) for name in (old, NEW_NAMES[old]))
    assert one == other != OldOptions(beside)


@pytest.mark.parametrize("path", OPTIONS)
def test_options_have_an_effect(path: str, tmp_path: Path) -> None:
    effect = OPTIONS[path]
    folders = [tmp_path / "without", tmp_path / "with"]
    for folder in folders:
        folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        without = effect.seen(dict(effect.beside), folders[0])
        found = effect.seen(nested(path, effect.value_in(folders[1]), effect.beside), folders[1])
    assert found != without


# Options without effect on this model or device.
IDLE_HERE = [path for path, state in STATES.items() if "after `install()` a warning" in state]
IDLE_HERE = [path for path in IDLE_HERE if path in VALUES and (path != "device.mem_limit" or not has_cuda())]
THE_REST = (MLP_DESC, optim.SGDConfig(), "cross_entropy")


@pytest.mark.parametrize("path", IDLE_HERE)
def test_what_has_no_effect_here_is_refused(path: str) -> None:
    assert len(IDLE_HERE) >= 5
    with pytest.raises((ValueError, RuntimeError), match=path.rpartition(".")[2]):
        options = ORTTrainerOptions(nested(path, VALUES[path]))
        ORTTrainer(MLP(), *THE_REST, options).train_step(*mlp_batches(1)[0])


def test_old_scripts_are_warned_of_what_has_no_effect_here() -> None:
    """Tests all together, except one that has no effect only by itself."""
    alone = "graph_transformer.number_recompute_layers"
    with pytest.warns(UserWarning, match="number_recompute_layers: has no effect without"):
        OldOptions(nested(alone, VALUES[alone]))
    given: dict[str, Any] = {}
    for path in (path for path in IDLE_HERE if path != alone):
        given = nested(path, VALUES[path], given)
    with pytest.warns(UserWarning) as caught:
        OldTrainer(MLP(), *THE_REST, OldOptions(given)).train_step(*mlp_batches(1)[0])
    texts = [str(warning.message) for warning in caught]
    for path in (path for path in IDLE_HERE if path != alone):
        assert any(path.rpartition(".")[2] in text for text in texts), path


@pytest.mark.parametrize("name", refused(PROPERTY_STATES))
def test_properties_that_are_refused_beyond_their_default(name: str) -> None:
    default, lenient, _ = REFUSED.fullmatch(PROPERTY_STATES[name]).groups()
    known = getattr(TrainingParameters(), name)
    assert default == repr(known)
    value = {"sliced_schema": {"x": [1]}}.get(name, another(known, {}))
    said = re.compile(name.removeprefix("use_").removeprefix("propagate_cast_ops_"))
    ORTTrainerOptions(former_options_of(**{name: known}))
    with pytest.raises(ValueError, match=said):
        ORTTrainerOptions(former_options_of(**{name: value}))
    in_old_scripts(lenient, said, lambda: OldOptions(former_options_of(**{name: value})))


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_are_options(name: str) -> None:
    value, changes = PROPERTIES[name]
    expected = former_options_of()
    for path, option in changes.items():
        expected = nested(path, option, expected)
    assert former_options_of(**{name: value}) == expected != former_options_of()
