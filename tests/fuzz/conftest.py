"""What tests of drawn cases share: the commit determines which cases, so that every gate has others."""

from __future__ import annotations

import hashlib

import pytest

from ..harness import choose


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of the first case."""
    commit = request.config.getoption("seed") or choose.commit()
    return int.from_bytes(hashlib.sha256(commit.encode()).digest()[:3], "big") * 100


@pytest.fixture
def is_quick(request: pytest.FixtureRequest) -> bool:
    """Whether ``make quick`` runs, which takes three minutes in all, so that a few cases must do."""
    return bool(request.config.getoption("affected")) and not request.config.getoption("gate")
