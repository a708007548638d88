from __future__ import annotations

import copy

import pytest

from ort_trainer.options.model_desc import ModelDescription

from ..helpers import MLP_DESC

_OUT = [("loss", [], True)]
_IN = [("x", ["batch", 8])]


def test_reads_names_shapes_and_loss_without_mutation() -> None:
    before = copy.deepcopy(MLP_DESC)
    description = ModelDescription(MLP_DESC)
    assert before == MLP_DESC
    assert description.input_names == ["x", "label"] and description.output_names == ["loss", "logits"]
    assert description.inputs[0].shape == ("batch", 8)
    assert description.loss.name == "loss"
    assert description.sizes({"x": (4, 8)}) == {"batch": 4}


@pytest.mark.parametrize(
    ("desc", "message"),
    [
        ({"inputs": [(3, [])], "outputs": _OUT}, r"the first element of the tuple \(aka name\) must be a string"),
        ({"inputs": [("x", 3)], "outputs": _OUT}, r"the second element of the tuple \(aka shape\) must be a list"),
        (
            {"inputs": _IN, "outputs": [("l", [], 1)]},
            r"the third element of the tuple \(aka is_loss\) must be a boolean",
        ),
        ({"inputs": [("x", [1.5])], "outputs": _OUT}, "each shape must be either a string or integer"),
        ({"inputs": [("x", [True])], "outputs": _OUT}, "each shape must be either a string or integer"),
        ({"inputs": _IN, "outputs": [*_OUT, ("b", [], True)]}, "outputs.1: only one is_loss can bet set to True"),
        ({"inputs": [("x",)], "outputs": _OUT}, "inputs.0: must be a tuple with size 2"),
        ({"inputs": [["x", []]], "outputs": _OUT}, "must be a tuple with size 2"),
        ({"inputs": [3], "outputs": _OUT}, "must be a tuple with size 2"),
        ({"inputs": _IN, "outputs": [("l", [], True, 1)]}, "must be a tuple with size 2 or 3"),
        ({"inputs": _IN}, "outputs: required field"),
        ({"inputs": _IN, "outputs": _OUT, "more": 1}, "more: unknown field"),
        ({"inputs": [], "outputs": _OUT}, "inputs: min length is 1"),
        ({"inputs": tuple(3 for _ in "a"), "outputs": _OUT}, "must be"),
        ({"inputs": [("x", [0])], "outputs": _OUT}, "each integer of a shape must be positive, but 0 was given"),
        ({"inputs": [("x", [""])], "outputs": _OUT}, "a symbolic dimension needs a name"),
        ({"inputs": [("", [])], "outputs": _OUT}, "must not be empty"),
        ({"inputs": [*_IN, *_IN], "outputs": _OUT}, r"names must be unique, but \['x'\]"),
        ({"inputs": _IN, "outputs": [("l", [])]}, "one output must be the loss"),
    ],
)
def test_errors(desc: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid model_desc: .*{message}"):
        ModelDescription(desc)


def test_entries_read_like_the_tuples_that_they_are_written_as() -> None:
    description = ModelDescription(MLP_DESC)
    assert description.inputs[0][0] == "x" and description.inputs[0][1] == ["batch", 8]
    name, shape, is_loss = description.outputs[0]
    assert (name, shape, is_loss) == ("loss", [], True) and len(description.outputs[0]) == 3
    assert description.inputs[0].shape == ("batch", 8) != [8, "batch"]  # type: ignore[comparison-overlap]
    assert description.inputs[0].shape != ["batch"] and description.inputs[0].shape != "batch"  # type: ignore[comparison-overlap]
    assert hash(description.inputs[0].shape) == hash(("batch", 8))
    assert description.inputs[0] == ModelDescription(MLP_DESC).inputs[0]
    with pytest.raises(TypeError):
        description.inputs[0].shape[0] = "n"


def test_wrong_type() -> None:
    with pytest.raises(TypeError, match="model_desc must be a dict .* or 'auto', .*: an example is {'inputs'"):
        ModelDescription([])
