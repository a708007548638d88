"""Does the graph still mean what the model means? Asked once a step."""

from .guard import Guard, ModelChangedError, ModelWatch

__all__ = ["Guard", "ModelChangedError", "ModelWatch"]
