"""The site of the documentation, made by `make site` of pages that stay plain Markdown for who reads them as files."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

from ddpdebug import __version__

project = "ddpdebug"
release = __version__
extensions = ["myst_parser"]

# Sources are looked for from the repository's root, so that README.md and links to it are as they are elsewhere.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "deploy/README.md"]
exclude_patterns = [".*", "build", "changelog", "ddpdebug", "ddpdebug-runs", "tests"]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 4  # with the names that GitHub gives them
highlight_language = "none"
nitpicky = True

html_theme = "furo"
html_title = f"ddpdebug {release}"
html_extra_path = ["site"]  # the way from the site's root to docs/index.html
html_copy_source = False
html_show_search_summary = False  # its excerpts are fetched from the pages, which a browser forbids on a disk

_SECTION = re.compile(r"^## (.+)\n((?:.*\n)*?)(?=^## |\Z)", re.MULTILINE)
_ENTRY = re.compile(r"^- \[([^]]+)\]\(([^)]+)\.md\)", re.MULTILINE)


def _contents(_: Sphinx, page: str, source: list[str]) -> None:
    """Make the table of contents from what readers of the files have in its place: lists of links, and folders."""
    if page == root_doc:
        for title, text in _SECTION.findall(source[0]):
            pages = "\n".join(f"{name} <{file}>" for name, file in _ENTRY.findall(text))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"
    elif page in {"docs/decisions/README", "docs/runbooks/README"}:
        source[0] += "\n```{toctree}\n:glob:\n\n[!R]*\n```\n"  # all but this README


def setup(app: Sphinx) -> None:
    """Subscribe to the one event that is needed."""
    app.connect("source-read", _contents)
