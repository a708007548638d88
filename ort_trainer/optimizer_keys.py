"""What a state dict, and the models of an export, call an optimizer's counts; moments are named by its rule."""

from __future__ import annotations

__all__ = ["SHARED", "STEP", "UPDATE_COUNT"]

UPDATE_COUNT = "Update_Count"
"""Of a parameter: updates done plus 1."""
SHARED = "shared_optimizer_state"
"""In a state dict, where the name of a parameter stands otherwise: what an optimizer keeps for all of them."""
STEP = "Step"
"""The same count where an optimizer keeps one for all parameters."""
