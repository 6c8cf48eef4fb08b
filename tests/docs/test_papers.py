"""The page of the four papers counts its own rows, and names files that are there."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
STATUSES = ("executed", "approximated", "absent")
PAPERS = ("AReaL", "RhymeRL", "SpecActor", "TLT")


def rows() -> dict[str, list[list[str]]]:
    """The cells of each mechanism, by paper."""
    sections = (section.partition("\n") for section in re.split(r"^## ", PAGE, flags=re.M)[1:])
    return {
        heading: [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in text.splitlines()
            if re.match(r"\| \d+ \|", line)
        ]
        for heading, _, text in sections
    }


def test_every_mechanism_has_a_number_a_section_a_status_and_how_or_why_not():
    assert tuple(rows()) == PAPERS
    for paper, mechanisms in rows().items():
        assert [cells[0] for cells in mechanisms] == [
            str(i) for i in range(1, len(mechanisms) + 1)
        ], paper
        for cells in mechanisms:
            assert len(cells) == 6 and all(cells), cells
            assert cells[3] in STATUSES, cells


def test_the_counts_at_the_top_are_those_of_the_rows():
    lines = re.findall(r"^\| \[?(\w+)\S* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.M)
    printed = {name: [int(number) for number in numbers] for name, *numbers in lines}
    counted = {
        paper: [Counter(cells[3] for cells in mechanisms)[status] for status in STATUSES]
        for paper, mechanisms in rows().items()
    }
    counted["all"] = [sum(column) for column in zip(*counted.values(), strict=True)]
    assert printed == {name: [*numbers, sum(numbers)] for name, numbers in counted.items()}
    assert f"lists {printed['all'][-1]} of their mechanisms" in PAGE


def test_a_mechanism_that_is_not_absent_names_a_file_that_is_there():
    for mechanisms in rows().values():
        for cells in mechanisms:
            files = re.findall(r"`([^`]+)`", cells[5])
            assert bool(files) == (cells[3] != "absent"), cells
            assert all((ROOT / file).is_file() for file in files), cells
