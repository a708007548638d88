"""The versions of torch that have been tested, and what changed in them for this package.

An export uses private parts of torch, which change without notice; ``tests/test_imports.py`` lists where. So a version
that has not passed all tests (docs/limits.md#versions) must pass ``self_check.py`` first. What changed:

* 2.12: ``torch.utils.checkpoint`` no longer applies a function of its own, ``_NoopSaveInputs``.
* 2.14: what it runs instead of ``_checkpoint_without_reentrant_generator`` has another name.
* 2.14: ``autograd.Function.apply`` is compiled, and no longer calls ``_functorch.utils.unwrap_dead_wrappers``, which
  was watched to notice custom backward passes. ``capture.py`` watches the creation of their ``ctx``, which all versions
  have in common.
"""

from __future__ import annotations

import torch
from torch.utils import checkpoint

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The minor versions with which all tests pass, oldest first."""

_GENERATOR = "_checkpoint_without_reentrant_generator"
CHECKPOINT_GENERATOR = next(name for name in (f"{_GENERATOR}_impl", _GENERATOR) if hasattr(checkpoint, name))
"""The function in ``torch.utils.checkpoint`` that runs before and after what is checkpointed."""


def is_tested() -> bool:
    """Returns whether the installed torch is a release of a tested minor version."""
    release, _, _ = torch.__version__.partition("+")
    minor, _, patch = release.rpartition(".")
    return minor in TESTED and patch.isdecimal()  # "2.15.0a0" and "2.15.0rc1" precede the release
