"""Settings of Sphinx for the site that ``make site`` builds from these pages and from the docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

project = "ort_trainer"
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "examples/browser/README.md",
    "js/README.md",
    "c/README.md",
]
exclude_patterns = [".*", "build", "dist", "out", "**/node_modules"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
pygments_style = "default"
pygments_dark_style = "github-dark"
html_title = "ort_trainer"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_use_ivar = True  # attributes that are properties too are not described twice


def setup(app: Sphinx) -> None:
    """Makes the table of contents, and a first page that leads to the index."""
    app.connect("source-read", _with_contents)
    app.connect("build-finished", _with_first_page)


def _with_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds hidden contents to each section of the index, from the links in its table."""
    if name != root_doc:
        return
    title, *sections = re.split(r"^## ", source[0], flags=re.MULTILINE)
    contents = [title]
    for section in sections:
        pages = re.findall(r"^\| \[([\w/.]+)\.(?:md|rst)\]", section, re.MULTILINE)
        contents.append(f"{section}\n{_contents(section.partition(chr(10))[0], *pages)}\n")
    # Titles instead of the names of the files.
    source[0] = re.sub(r"^\| \[[^\]]+\]", "| []", "## ".join(contents), flags=re.MULTILINE)


def _contents(caption: str, *pages: str) -> str:
    return "\n".join(("```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""))


def _with_first_page(app: Sphinx, error: Exception | None) -> None:
    page = app.builder.get_relative_uri("", root_doc)
    (Path(app.outdir) / "index.html").write_text(
        f'<meta http-equiv="refresh" content="0; url={page}">\n', encoding="utf-8"
    )
