"""Some types of models, which the commit determines, are trained as in PyTorch: others in every gate."""

from __future__ import annotations

import itertools

from benchmarks import model_types, population

from .. import processes

# Processor seconds after which no type begins, those of a type, and the number of types on a fast machine.
SECONDS, QUICK_SECONDS, SECONDS_OF_TYPE, TYPES = 40.0, 5.0, 60, 3


def test_types_of_this_commit(seed: int, is_quick: bool) -> None:
    seconds = QUICK_SECONDS if is_quick else SECONDS
    survey = population.Survey(seed, SECONDS_OF_TYPE)
    end = processes.processor_seconds + seconds
    for name in population.draws(survey.seed):
        survey.take(name)
        if survey.types >= TYPES or survey.failures or processes.processor_seconds > end:
            break
    assert not survey.failures, f"benchmarks/population.py --seed {survey.seed} repeats it\n{survey.summary()}"


def test_settings_are_made_small_by_their_names() -> None:
    large = {"hidden_size": 768, "intermediate_size": 3072, "depths": [2, 6, 1], "num_attention_heads": 12, "type": "a"}
    small = {"hidden_size": 32, "intermediate_size": 64, "depths": [2, 2, 1], "num_attention_heads": 2, "type": "a"}
    assert {name: model_types.shrunk(name, value, True) for name, value in large.items()} == small
    assert model_types.shrunk("hidden_size", 768, False) == 768 and model_types.shrunk("num_layers", 12, False) == 2


def test_a_seed_draws_each_type_once() -> None:
    names = [*population.draws(3)]
    assert len({*names}) == len(names) == sum(map(len, model_types.types().values()))
    assert names[:20] == [*itertools.islice(population.draws(3), 20)]


def test_what_pytorch_does_not_train_is_no_failure() -> None:
    survey = population.Survey(1)
    assert "PyTorch can't train it" in survey.take("torch:ModuleList")
    assert survey.types == 0 and not survey.failures


def test_a_layer_is_judged_in_a_process_of_its_own() -> None:
    survey = population.Survey(1)
    line = survey.take("torch:Tanh")
    assert "trainer: equal" in line and "module: equal" in line and survey.types == 1
    short = population.Survey(1, seconds=1)
    assert "dropped  ended with" in short.take("torch:TransformerEncoderLayer") and not short.failures
