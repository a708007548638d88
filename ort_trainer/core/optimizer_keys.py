"""Names of optimizers and of their counts in state dicts and exported models; a rule names its moments."""

from __future__ import annotations

UPDATE_COUNT = "Update_Count"
"""A parameter's updates done plus 1."""
SHARED = "shared_optimizer_state"
"""Key of the state that all parameters share, beside the names of parameters."""
STEP = "Step"
"""The update count in that shared state, for optimizers that keep one for all parameters."""

CONFIGS = {
    "AdamOptimizer": "AdamConfig or AdamWConfig",
    "LambOptimizer": "LambConfig",
    "LionOptimizer": "LionConfig",
    "SGDOptimizer": "SGDConfig",
}
"""Name of an optimizer -> the configs that it may come from, in the words of a script."""
