"""The page on the landscape of systems: made small, and as it is committed."""

import csv
import re
import runpy
import shutil
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "published"
PAGE, SCRIPT = FOLDER / "landscape.md", FOLDER / "landscape.py"


def parts(page: Path) -> dict[str, str]:
    found = re.findall(
        r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", page.read_text(encoding="utf-8"), re.DOTALL
    )
    return dict(found)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page as the script makes it at its smallest size."""
    folder = tmp_path_factory.mktemp("landscape")
    page = Path(shutil.copy(PAGE, folder))
    page.write_text(
        re.sub(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", r"\1\3", page.read_text(), flags=re.DOTALL)
    )
    runpy.run_path(str(SCRIPT))["main"](
        data=None, page=page, folder=folder / "points", jobs=1, tiny=True
    )
    return page


@pytest.mark.slow
def test_every_part_of_the_page_is_written_and_its_pictures_too(made: Path):
    assert [name for name, text in parts(made).items() if not text.strip()] == ["verl_run"]
    for picture in re.findall(r"\]\((\w+\.png)\)", made.read_text()):
        assert (made.parent / picture).stat().st_size > 1000


@pytest.mark.slow
def test_a_system_that_cannot_be_is_a_no_with_its_reason(made: Path):
    line = next(line for line in parts(made)["scales"].splitlines() if line.startswith("| dapo"))
    assert "no" in [cell.strip() for cell in line.split("|")]
    assert re.search(r"^No: dapo \(8\): .*reward", parts(made)["scales"], re.MULTILINE)


@pytest.mark.slow
def test_a_page_without_a_place_for_a_table_is_refused(made: Path, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# words\n")
    with pytest.raises(Exception, match="no place for scales"):
        runpy.run_path(str(SCRIPT))["write_parts"](page, {"scales": ["|"]})
    assert page.read_text() == "# words\n"


def test_the_committed_page_says_what_its_table_has():
    rates = {
        (row["name"], row["varied"]): row
        for row in table(PAGE.with_suffix(".csv"))
        if row["part"] == "scale"
    }
    lines = [
        line.split("|") for line in parts(PAGE)["scales"].splitlines() if line.startswith("| ")
    ]
    heads, rows = [cell.strip() for cell in lines[0]], lines[2:]
    gpus = {
        i: head.removesuffix(" GPUs").replace(",", "")
        for i, head in enumerate(heads)
        if head.endswith(" GPUs")
    }
    said = {
        (row[1].strip(), gpus[i]): row[i].strip()
        for row in rows
        for i in gpus
        if row[i].strip() not in ("–", "no")
    }
    assert said
    for key, cell in said.items():
        assert cell.strip("*").split(" ")[0] == f"{float(rates[key]['tokens_per_s_per_gpu']):,.0f}"


def test_the_committed_table_is_small():
    assert PAGE.with_suffix(".csv").stat().st_size < 200_000
