"""Does the graph still mean what the model means? Asked once a step."""

from .guard import Guard

__all__ = ["Guard"]
