"""The documentation's site: Sphinx makes it of the pages without a warning, and nothing on it comes from elsewhere."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import LAPTOP, PHONE, Browser

ROOT = Path(__file__).parents[2]
pytest.importorskip("furo", reason="pip install -e '.[docs]'")
pytest.importorskip("myst_parser", reason="pip install -e '.[docs]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "0.0.9").mkdir()
    (folder / "0.0.9" / "README.html").write_text("an earlier version")
    made = subprocess.run(
        [sys.executable, "docs/make_site.py", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def front(site: Path) -> Path:
    (page,) = [page for page in site.glob("*/README.html") if page.parent.name != "0.0.9"]
    return page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.quit()


def test_a_version_has_a_folder_of_its_own_and_the_list_names_all(site: Path, front: Path):
    assert re.findall(r'href="([^"]+)"', (site / "index.html").read_text()) == [
        f"{front.parent.name}/README.html", "0.0.9/README.html",
    ]  # fmt: skip
    assert "../index.html" in front.read_text() and (front.parent / "api" / "simrl.html").is_file()


def test_every_link_and_picture_of_every_page_is_there(front: Path):
    broken = []
    for page in front.parent.rglob("*.html"):
        if "api" in page.relative_to(front.parent).parts:
            continue  # pdoc's own
        for link in re.findall(
            r'(?:href|src)="([^"#]+)(?:#[^"]*)?"', page.read_text(encoding="utf-8")
        ):
            parts = urlsplit(link)
            if not parts.scheme and not (page.parent / unquote(parts.path)).exists():
                broken.append((page.name, link))
    assert broken == []


def test_the_navigation_is_the_index_of_the_pages_in_its_order(front: Path):
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    asked = re.findall(r"^\| \[[^\]]+\]\(([^)#]+)\.md\)", index, re.MULTILINE)
    sidebar = front.read_text(encoding="utf-8").partition("sidebar-tree")[2]
    shown = re.findall(r'toctree-l1"><a class="reference internal" href="([^"#]+)\.html', sidebar)
    assert [Path(page).name for page in shown[: len(asked)]] == [Path(page).name for page in asked]


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
@pytest.mark.parametrize(
    "page", ["index", "docs/architecture", "docs/glossary", "docs/beside_others", "docs/replay"]
)
def test_a_page_is_shown_without_a_complaint_or_a_request_to_elsewhere(
    browser: Browser, front: Path, page: str, size: tuple[int, int]
):
    browser.open(
        front.parent / f"{page}.html", size, drawn="document.querySelector('article h1') !== null"
    )
    browser.wait("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert browser.messages() == []
    assert {url for url in browser.requests() if not url.startswith("file:")} == set()
    assert browser.js("return document.documentElement.scrollWidth") <= size[0]


def test_the_search_finds_a_word_of_the_glossary(browser: Browser, front: Path):
    search = (front.parent / "search.html").as_uri() + "?q=occupancy"
    browser.driver.get(search)
    browser.wait(
        "[...document.querySelectorAll('#search-results a')].some(a => a.textContent === 'Glossary')"
    )
