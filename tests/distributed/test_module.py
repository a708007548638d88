"""``ORTModule`` in ``DistributedDataParallel``."""

from __future__ import annotations

import numpy as np
import pytest

from .world import run


def test_losses_are_those_without_it() -> None:
    for found in run("module_cases", ("losses",), 2, timeout=150)["losses"]:
        assert "error" not in found, found
        assert found["module losses"] == pytest.approx(found["eager losses"], rel=1e-6)
        np.testing.assert_allclose(found["module weights"], found["eager weights"], rtol=1e-5, atol=1e-6)
        assert list(found["module names"]) == list(found["eager names"])
