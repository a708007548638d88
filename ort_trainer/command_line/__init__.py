"""The command ``ort-trainer``, also ``python -m ort_trainer``: one file a command, which imports what it needs."""

from .program import main

__all__ = ["main"]
