from __future__ import annotations

import pytest

from .artifacts import Artifacts, make_artifacts


@pytest.fixture(scope="session")
def artifacts() -> Artifacts:
    return make_artifacts()


@pytest.fixture(scope="session")
def with_dropout() -> Artifacts:
    return make_artifacts(dropout=True)
