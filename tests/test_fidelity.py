"""Every case of the catalogue has PyTorch's losses and weights, with varying batch sizes and lengths."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

from .fidelity.case import Case
from .fidelity.catalogue import SECTIONS
from .fidelity.compare import compare, compare_as_onnx

pytestmark = pytest.mark.engine

# Since which version of transformers a model is captured in one piece, or its configuration means what it means here.
SINCE = {"Mamba": "5.20", "SegFormer": "5.14", "Wav2Vec2": "5.23"}
CASES = {case.name: case for cases in SECTIONS.values() for case in cases}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    since = SINCE.get(request.param.name)
    if since is not None and Version(version("transformers")) < Version(since):
        pytest.skip(f"transformers before {since} has another form of this model (docs/limits.md)")
    return request.param


def test_twenty_steps(case: Case) -> None:
    found = compare(case, thorough=False)
    assert found.loss <= 1e-4, found
    assert found.excess <= 1.0, found
    assert found.exports <= case.exports, found


@pytest.mark.slow
def test_two_steps_as_an_onnx_graph(case: Case) -> None:
    assert compare_as_onnx(case) <= 1e-4


def test_names_are_unique() -> None:
    assert len(CASES) == sum(len(cases) for cases in SECTIONS.values())
