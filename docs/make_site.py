"""Builds the documentation's site: the pages of this version and its API in a folder of their own, and a list of all versions.

python docs/make_site.py site

Whatever Sphinx or pdoc warns of ends it. Folders of other versions in `site` stay; `site/index.html` lists all of them.
"""

import subprocess
import sys
from pathlib import Path

from conf import ROOT, release

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>simrl</title>
<style>:root {{ color-scheme: light dark }} body {{ font: 1.1rem sans-serif; margin: 3rem }}</style>
<h1>simrl</h1><p>Versions of the documentation:</p><ul>{versions}</ul></html>
"""


def build(site: Path) -> None:
    """Build this version into its folder of `site`, and the list of versions."""
    folder = site / release
    sphinx = [
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-c",
        str(ROOT / "docs"),
    ]
    subprocess.run(
        [sys.executable, *sphinx, "-d", str(site / ".doctrees"), str(ROOT), str(folder)], check=True
    )
    subprocess.run(
        [sys.executable, str(ROOT / "docs" / "api_reference.py"), str(folder / "api")], check=True
    )
    names = sorted(
        (place.parent.name for place in site.glob("*/README.html")), key=_numbers, reverse=True
    )
    versions = "".join(f'<li><a href="{name}/README.html">{name}</a></li>' for name in names)
    (site / "index.html").write_text(PAGE.format(versions=versions), encoding="utf-8")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


if __name__ == "__main__":
    build(Path(sys.argv[1]))
