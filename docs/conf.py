"""Sphinx's settings for the site: the pages of the repository as they are. `python docs/make_site.py site` builds it.

The source folder is the repository, so that links between pages lead where they lead on a repository's host; files that are no
pages become downloads. The navigation is the tables of docs/README.md, in their order. Nothing is fetched from elsewhere.
"""

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "README.md"

project = "simrl"
copyright = "the simrl maintainers, Apache-2.0"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "version"
]
root_doc = "README"
extensions = ["myst_parser"]
myst_heading_anchors = 4
include_patterns = [
    "*.md",
    "docs/*.md",
    "experiments/**.md",
    "profiles/README.md",
    "traces/README.md",
]
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]  # blocks of output with an ellipsis

html_theme = "furo"
html_title = f"simrl {release}"
html_show_sphinx = False
templates_path = ["templates"]
html_additional_pages = {"index": "index.html"}
html_sidebars = {
    "**": ["sidebar/brand.html", "sidebar/search.html", "sidebar/scroll-start.html", "sidebar/navigation.html",
           "versions.html", "sidebar/scroll-end.html"]
}  # fmt: skip


def sections(index: str) -> dict[str, list[str]]:
    """Return the pages that the tables of docs/README.md link, by the heading above them."""
    found: dict[str, list[str]] = {}
    for heading, text in re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", index, re.MULTILINE):
        links = re.findall(r"^\| \[[^\]]+\]\(([^)#]+)\.md\)", text, re.MULTILINE)
        pages = [(INDEX.parent / link).resolve().relative_to(ROOT).as_posix() for link in links]
        if pages:
            found[heading] = pages
    return found


def navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Append the navigation to the front page; the pages that docs/README.md does not name come last."""
    if page != root_doc:
        return
    parts = sections(INDEX.read_text(encoding="utf-8"))
    named = {page for pages in parts.values() for page in pages}
    rest = sorted(app.env.found_docs - named - {root_doc})
    for caption, pages in {**parts, "More": rest}.items():
        lines = "\n".join(f"/{page}" for page in pages)
        source[0] += (
            f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n:titlesonly:\n\n{lines}\n```\n"
        )


def setup(app: Sphinx) -> None:
    """Connect the navigation."""
    app.connect("source-read", navigation)
