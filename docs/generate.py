"""Writes what follows from other files; --check says whether it is up to date.

From the schema of the options docs/reference/options.md, the options in docs/reference/names.md, and their types in
ort_trainer/options/sections.py; from the imports the picture of docs/contributing.md; from benchmarks/results/ the
tables of speed and their pictures; from these and docs/reference/fidelity.md the figures in the text of any page; from
examples/cookbook/ and examples/recipes/ the differences between scripts in any page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cookbook_diffs import with_diffs
from figures import equality, onnx_equality, with_blocks
from option_types import option_types
from room_picture import room_picture
from speed import blocks, pictures, read_results

from ort_trainer.options.checks import SPELLINGS
from ort_trainer.options.schema import leaves, listed_options, load_schema

HERE = Path(__file__).resolve().parent
REFERENCE = HERE / "reference"
ROOT = HERE.parent
HEAD = """# Options

All keys of [ORTTrainerOptions](trainer_options.rst), written by `make docs` from `schemas/trainer_options.json`. A key
with the state *data parallel only* is checked, and refused beyond its default, as each process trains the whole model
([distributed.md](../distributed.md#what-is-not-there)); one with *only the default* is refused with any other value.
None is ignored. After `ort_trainer.compat.install()`, what has no effect and does no harm is a warning:
[names.md](names.md#options) says which.

| option | type | default | allowed | state | meaning |
|---|---|---|---|---|---|
"""
PAGES = (ROOT / "README.md", *sorted(HERE.glob("*.md")), *sorted(REFERENCE.glob("*.md")))


def from_reference(text: str) -> str:
    """Returns text of the schema, whose links lead from docs/, for a page of docs/reference/."""
    return re.sub(r"\]\((?=\w+\.md)", "](../", text)


def rows() -> Iterator[str]:
    """Yields a table row for every option."""
    for option in listed_options():
        allowed = ", ".join(option.allowed).replace("|", "\\|")
        facts = f"{option.type} | `{option.default!r}` | {allowed} | {option.state}"
        yield f"| `{option.key}` | {facts} | {from_reference(option.meaning)} |"


def name_rows(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row of docs/reference/names.md for every option, and for every other spelling of one."""
    states = {}
    for path, rules in leaves(schema):
        meta = rules["meta"]
        accepted = [rules["default"], *meta.get("happens", ())]
        refused = f"refused beyond the default, {' and '.join(f'`{value!r}`' for value in accepted)}"
        if "only_default" in meta:
            installed = "" if "refused" in meta else ", after `install()` a warning"
            states[path] = f"{refused}{installed}; {meta['only_default']}"
        else:
            states[path] = f"works, differs: {meta['differs']}" if meta.get("differs") else "works"
    for spelling, path in [*((path, path) for path in states), *SPELLINGS.items()]:
        yield f"| `{spelling}` | `{path}` | {from_reference(states[path])} |"


def main() -> None:
    schema = load_schema("trainer_options")
    rules = dict(leaves(schema))
    results = read_results(ROOT / "benchmarks" / "results")
    fidelity, onnx = ((REFERENCE / name).read_text(encoding="utf-8") for name in ("fidelity.md", "onnx_operators.md"))
    names = ["| option | in `ort_trainer` | state |", "|---|---|---|", *name_rows(schema)]
    equal = {"equality": [*equality(fidelity)], "onnx-equality": [*onnx_equality(onnx)]}
    figures = {**blocks(results), **equal, "options": names}
    texts = {page: with_blocks(page.read_text(encoding="utf-8"), figures) for page in PAGES}
    targets = {
        **{page: with_diffs(text, ROOT / "examples") for page, text in texts.items()},
        REFERENCE / "options.md": HEAD + "\n".join(rows()) + "\n",
        ROOT / "ort_trainer" / "options" / "sections.py": option_types(
            schema, {spelling: rules[path] for spelling, path in SPELLINGS.items()}
        ),
        **{HERE / "images" / f"{name}.svg": picture for name, picture in pictures(results).items()},
        HERE / "images" / "rooms.svg": room_picture(),
    }
    for target, text in targets.items():
        if target.exists() and target.read_text(encoding="utf-8") == text:
            continue
        if "--check" in sys.argv:
            sys.exit(f"{target.relative_to(ROOT)} is out of date: run make docs")
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
