"""The trainer for old scripts: mistakes that legacy ignored cause warnings, and private names exist."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F

import ort_trainer
from ort_trainer import optim
from ort_trainer.compat.options import ORTTrainerOptions
from ort_trainer.compat.trainer import ORTTrainer

from ..helpers import MLP, MLP_DESC, assert_same_weights, mlp_batches

Messages = list[list[str]]


def description(x: list[Any], label: list[Any], logits: list[Any]) -> dict[str, Any]:
    return {"inputs": [("x", x), ("label", label)], "outputs": [("loss", [], True), ("logits", logits)]}


def old(desc: dict[str, Any] = MLP_DESC, **sections: Any) -> ORTTrainer:
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}, "device": {"id": "cpu"}, **sections})
    return ORTTrainer(MLP(), desc, optim.SGDConfig(lr=0.1), F.cross_entropy, options)


def compared(trainer: ORTTrainer, model: MLP, sizes: list[int]) -> Messages:
    """Trains with batches of these sizes, compares with PyTorch, and returns the warnings of each step."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    found: Messages = []
    for seed, size in enumerate(sizes):
        x, y = mlp_batches(1, size, seed)[0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = trainer.train_step(x, y)[0]
        found.append([str(entry.message) for entry in caught])
        expected = F.cross_entropy(reference(x), y)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    assert_same_weights(trainer, reference, 1e-5)
    return found


@pytest.mark.parametrize(
    ("desc", "corrected", "message"),
    [
        (description([4, 8], [4], [4, 3]), ["x_0", 8], "inputs 'x' [4, 8], 'label' [4] have the shapes [5, 8], [5]"),
        (description(["n", 8], ["n", 2], ["n", 3]), ["n", 8], "inputs 'label' ['n', 2] have the shapes [5]"),
        (description(["n", 8], [], ["n", 3]), ["n", 8], "inputs 'label' [] have the shapes [5]"),
    ],
    ids=["sizes", "rank", "scalar"],
)
def test_a_description_that_does_not_fit_is_corrected(desc: dict[str, Any], corrected: list[Any], message: str) -> None:
    before = copy.deepcopy(desc)
    trainer = old(desc)
    model = MLP()
    trainer.load_state_dict(model.state_dict())
    found = compared(trainer, model, [5, 5, 3] if desc["inputs"][1][1] else [5, 5])
    assert len(found[0]) == 1 and f"model_desc contradicts the batch and is corrected: {message}" in found[0][0]
    assert found[1:] == [[]] * (len(found) - 1)
    assert list(trainer.model_desc.inputs[0].shape) == corrected and desc == before
    assert trainer.session is not None and len(trainer.session.graphs(True)) == 1


def test_symbols_with_two_sizes_stay_an_error_and_nothing_is_corrected() -> None:
    trainer = old(description(["n", 7], ["n"], ["n", 3]))
    with (
        pytest.warns(UserWarning, match="is corrected"),
        pytest.raises(ValueError, match="Mismatch in dynamic shape n"),
    ):
        trainer.train_step(torch.randn(4, 8), torch.zeros(3, dtype=torch.int64))
    assert list(trainer.model_desc.inputs[0].shape) == ["n", 7]


def test_outside_of_compat_a_description_must_fit() -> None:
    desc = description([4, 8], [4, 2], [4, 3])
    trainer = ort_trainer.ORTTrainer(MLP(), desc, optim.SGDConfig(), F.cross_entropy)
    x, y = mlp_batches(1, 4)[0]
    with pytest.raises(ValueError, match="input 'label' has 1 dimensions"):
        trainer.train_step(x, y)
    with pytest.raises(ValueError, match="input 'x' has size 5 in dimension 0"):
        trainer.train_step(*mlp_batches(1, 5)[0])
    # With the current options, compat's trainer raises the current errors.
    strict = ort_trainer.ORTTrainerOptions()
    with pytest.raises(ValueError, match="input 'label' has 1 dimensions"):
        ORTTrainer(MLP(), desc, optim.SGDConfig(), F.cross_entropy, strict).train_step(x, y)


def test_two_trainers_begin_with_one_model() -> None:
    model = MLP()
    before = copy.deepcopy(model.state_dict())
    first, second = (ORTTrainer(model, MLP_DESC, optim.SGDConfig(lr=0.1), F.cross_entropy) for _ in range(2))
    x, y = mlp_batches(1)[0]
    losses = [[trainer.train_step(x, y)[0].item() for _ in range(3)] for trainer in (first, second)]
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_fetches_come_in_the_order_of_fetches_in_training_and_of_the_description_in_evaluation() -> None:
    trainer = old()
    trainer.train_step_info.fetches = ["logits", "loss"]
    x, y = mlp_batches(1)[0]
    assert [output.dim() for output in trainer.eval_step(x, y)] == [0, 2]
    assert [output.dim() for output in trainer.train_step(x, y)] == [2, 0]
    trainer.train_step_info.fetches = ["logits"]
    assert trainer.eval_step(x).dim() == 2


def test_a_description_gets_dtypes() -> None:
    trainer = old()
    assert trainer.model_desc.inputs[0][:2] == ("x", ["batch", 8]) and len(trainer.model_desc.inputs[0]) == 2
    x, y = mlp_batches(1)[0]
    trainer.eval_step(x, y)
    for _ in range(2):
        assert trainer.model_desc.inputs == (("x", ["batch", 8], torch.float32), ("label", ["batch"], torch.int64))  # type: ignore[comparison-overlap]
        assert trainer.model_desc.outputs[1] == ("logits", ["batch", 3], False, torch.float32, None)  # type: ignore[comparison-overlap]
        assert trainer.model_desc.loss.name == "loss" and trainer.model_desc.input_names == ["x", "label"]
        trainer.train_step(x, y)


def test_one_schedule_for_two_trainers_is_a_warning() -> None:
    schedule = optim.LinearWarmupLRScheduler(10, 0.0)
    first = old(lr_scheduler=schedule)
    with pytest.warns(UserWarning, match="lr_scheduler: another trainer uses this LinearWarmupLRScheduler"):
        second = old(lr_scheduler=schedule)
    x, y = mlp_batches(1)[0]
    for trainer, expected in ((first, 0.1), (first, 0.09), (second, 0.1)):
        trainer.train_step(x, y)
        assert schedule.get_last_lr() == pytest.approx([expected])


def test_private_names() -> None:
    trainer = ORTTrainer(MLP(), MLP_DESC, optim.AdamConfig(lr=0.1), F.cross_entropy)
    assert isinstance(trainer.options, ORTTrainerOptions)
    assert trainer._training_session is None and trainer._onnx_model is None and trainer._load_state_dict is None
    weights = MLP().state_dict()
    trainer.load_state_dict(weights)
    assert trainer._training_session is None and trainer._onnx_model is None and trainer._load_state_dict is None
    x, y = mlp_batches(1)[0]
    trainer.train_step(x, y)
    session, model = trainer._training_session, trainer._onnx_model
    assert session is not None and model is not None
    onnx.checker.check_model(model, full_check=True)
    saved = {value.name: onnx.numpy_helper.to_array(value) for value in model.graph.initializer}
    current = session.get_model_state()["full_precision"]
    assert saved.keys() == current.keys() == weights.keys()
    assert all((saved[name] == current[name]).all() for name in current)
    assert session.get_optimizer_state().keys() == weights.keys() and session.get_partition_info_map() == {}
    assert session.get_session_options() is not None
    with pytest.raises(RuntimeError, match=re.escape("Missing keys: ['fc2.weight']")):
        session.load_state({name: value for name, value in session.get_state().items() if name != "fc2.weight"}, True)


def test_weights_that_are_tied_are_restored_under_their_first_name() -> None:
    class Tied(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.same = self.fc2

    trainer = ORTTrainer(Tied(), MLP_DESC, optim.AdamConfig(lr=0.1), F.cross_entropy)
    x, y = mlp_batches(1)[0]
    trainer.train_step(x, y)
    session = trainer._training_session
    assert session is not None
    state = session.get_state()
    assert "same.weight" not in state and "fc2.weight" in state
    expected = [trainer.train_step(x, y)[0].item() for _ in range(2)]
    session.load_state(state, strict=True)
    assert [trainer.train_step(x, y)[0].item() for _ in range(2)] == expected
