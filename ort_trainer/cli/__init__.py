"""The ``ort-trainer`` command, also ``python -m ort_trainer``: one file per command, with its own imports."""

from .program import main

__all__ = ["main"]
