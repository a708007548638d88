"""Messages name addresses that the installed package has."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from ort_trainer.core.pages import page

ROOT = Path(__file__).resolve().parents[2]


def test_addresses_are_those_of_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"Project-URL": ["Repository, https://example.org/r", "Documentation, https://example.org/docs"]}
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: type("", (), {"get_all": found.get})())
    assert page("limits.md#x") == "https://example.org/docs/limits.md#x"

    def none(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", none)
    assert page("limits.md") == "docs/limits.md"
    assert re.search(r'^Documentation = "https://\S+/docs"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_pages_that_messages_name_are_there() -> None:
    pages = {
        name: file
        for file in (ROOT / "ort_trainer").rglob("*.py")
        for name in re.findall(r"\bpage\([\"']([\w.#-]+)[\"']\)", file.read_text())
    }
    assert len(pages) >= 6
    for name, file in pages.items():
        target, _, anchor = name.partition("#")
        text = (ROOT / "docs" / target).read_text()
        headings = {
            re.sub(r"[^\w -]", "", line.strip("# ").lower()).replace(" ", "-")
            for line in text.splitlines()
            if line[:1] == "#"
        }
        assert not anchor or anchor in headings, (name, file)
