"""Addresses of the documentation's pages, for messages: those that the installed package names."""

from __future__ import annotations

import importlib.metadata


def page(name: str) -> str:
    """Returns the address of a page, such as ``"models.md#branches-on-values"``."""
    try:
        entries = importlib.metadata.metadata("ort_trainer").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:  # on the path without an installation
        entries = []
    addresses = dict(entry.split(", ", 1) for entry in entries)
    return f"{addresses.get('Documentation', 'docs').rstrip('/')}/{name}"
