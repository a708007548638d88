"""Origins of nodes: as text, by names that ONNX Runtime has changed, and in nested modules."""

from __future__ import annotations

from ort_trainer.step.origins import FUSED, LOSS, Origin, Origins, with_parents

MODULES = [("", "Net"), ("first", "Linear"), ("body", "Sequential"), ("body.0", "ReLU"), (LOSS, "")]


def origins() -> Origins:
    places = {
        "program": [Origin("body.0", False), None, Origin(LOSS, True)],
        "aten.mm.default/MatMul_6": [Origin("body.0", True)],
        "aten.mm.default/MatMul_60": [Origin("", False)],
    }
    return Origins.of(places, MODULES)


def test_places_survive_as_text() -> None:
    found = Origins.from_text(origins().to_text())
    assert found.modules == (("", "Net"), ("body", "Sequential"), ("body.0", "ReLU"), (LOSS, "")), "those that occur"
    assert [found.place("program", step) for step in range(3)] == [Origin("body.0", False), None, Origin(LOSS, True)]


def test_a_node_with_a_new_name() -> None:
    found = origins()
    assert found.place("fused aten.mm.default/MatMul_60/MatmulTransposeFusion/") == Origin("", False)
    assert found.place("aten.mm.default/MatMul_6/MatmulTransposeFusion/") == Origin("body.0", True)
    assert found.place("Gather_token_1") is None


def test_nothing_is_known_of_an_empty_text() -> None:
    assert Origins.from_text("").place("anything") is None and not Origins.from_text("").modules


def test_parents() -> None:
    around = {path: [*with_parents(path)] for path in ("", LOSS, FUSED, "a.0.b", f"{LOSS}.a")}
    assert around == {
        "": [""],
        LOSS: [LOSS],
        FUSED: [FUSED],
        "a.0.b": ["a.0.b", "a.0", "a", ""],
        f"{LOSS}.a": [f"{LOSS}.a", LOSS],
    }
