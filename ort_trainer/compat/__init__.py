"""Lets scripts of the legacy trainer run unchanged: :func:`install` puts the old import paths in place.

Nothing outside of this package depends on it.
"""

from .registry import install, uninstall

__all__ = ["install", "uninstall"]
