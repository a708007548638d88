"""What tests of drawn cases share."""

from __future__ import annotations

import pytest


@pytest.fixture
def is_quick(request: pytest.FixtureRequest) -> bool:
    """Whether ``make quick`` runs, which takes three minutes in all, so that a few cases must do."""
    return bool(request.config.getoption("affected")) and not request.config.getoption("gate")
