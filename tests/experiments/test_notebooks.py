"""The notebooks as they are committed. CI executes them: experiments/notebooks/execute.py."""

import json
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "experiments" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST_BYTES = 500_000


def cells(path, kind):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def outputs(path):
    return [output for cell in cells(path, "code") for output in cell["outputs"]]


def shown(path):
    """What a reader sees of a notebook's outputs, tags taken out."""
    data = [output.get("data", output) for output in outputs(path)]
    texts = [
        "".join(each.get("text/html", each.get("text/plain", each.get("text", ""))))
        for each in data
    ]
    return re.sub(r"<[^>]*>", " ", " ".join(texts))


def test_there_are_five_and_the_readme_has_them():
    assert len(NOTEBOOKS) == 5
    assert re.findall(r"\((\w+\.ipynb)\)", (FOLDER / "README.md").read_text()) == [
        path.name for path in NOTEBOOKS
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestANotebook:
    def test_was_executed_from_its_first_cell_to_its_last(self, path):
        code = cells(path, "code")
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        assert all(cell["outputs"] for cell in code)
        assert not [
            output
            for output in outputs(path)
            if output["output_type"] == "error" or output.get("name") == "stderr"
        ]
        assert any("image/png" in output.get("data", {}) for output in outputs(path))

    def test_holds_nothing_of_the_machine_that_made_it(self, path):
        text = path.read_text()
        assert len(text) < LARGEST_BYTES
        assert not any(
            place in text for place in ("/work/", "/tmp/", "/home/", "/root/", 'execution": {')
        )

    def test_begins_with_the_lesson_and_ends_with_a_try(self, path):
        prose = ["".join(cell["source"]) for cell in cells(path, "markdown")]
        assert "**You learn**" in prose[0] and "## Try it" in prose[-1]
        kinds = [cell["cell_type"] for cell in json.loads(path.read_text())["cells"]]
        assert kinds[0] == kinds[-1] == "markdown"

    def test_names_the_kinds_of_its_figures(self, path):
        prose = "\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))
        assert {"measured", "derived", "assumed"} <= set(re.findall(r"\w+", prose))

    def test_imports_simrl_pandas_and_the_standard_library_alone(self, path):
        source = "\n".join("".join(cell["source"]) for cell in cells(path, "code"))
        rooms = {name.split(".")[0] for name in re.findall(r"^(?:import|from) (\S+)", source, re.M)}
        assert rooms <= {"simrl", "pandas", *sys.stdlib_module_names}

    def test_says_only_factors_and_shares_that_it_shows(self, path):
        """Factors (4.37×) and shares with a decimal place (12.3 %) of the prose stand in the outputs."""
        prose = "\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))
        said = re.findall(r"\b(\d+\.\d+)(?=×| %)", prose)
        missing = [number for number in said if number not in shown(path)]
        assert said and set(missing) <= {"87.5"}  # a split, not a result

    def test_links_to_files_that_are_there(self, path):
        for cell in cells(path, "markdown"):
            for link in re.findall(r"\]\(([^)#:]+)\)", "".join(cell["source"])):
                assert (FOLDER / link).exists(), link
