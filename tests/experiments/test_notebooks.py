"""The notebooks as they are committed. CI executes them: experiments/notebooks/execute.py."""

import importlib
import json
import re
import sys
from pathlib import Path
from unittest.mock import Mock

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
        numbers, outputs = re.findall(r"\b(\d+\.\d+)(?=×| %)", prose), shown(path)
        # Whole numbers: the 1.0 of 11.07 is none.
        missing = {
            n for n in numbers if not re.search(rf"(?<![\d.,]){re.escape(n)}(?!\d)", outputs)
        }
        assert numbers and not missing

    def test_links_to_files_that_are_there(self, path):
        for cell in cells(path, "markdown"):
            for link in re.findall(r"\]\(([^)#:]+)\)", "".join(cell["source"])):
                assert (FOLDER / link).exists(), link


def test_one_that_takes_more_processor_time_than_the_readme_says_fails(monkeypatch, capsys):
    pytest.importorskip("nbclient")
    execute = importlib.import_module("experiments.notebooks.execute")
    used_s = iter([3.0, 124.0, 3.0, 122.0])
    monkeypatch.setattr(execute, "NotebookClient", lambda *_, **__: Mock())
    monkeypatch.setattr(execute, "kernels_cpu_s", lambda: next(used_s))
    assert not execute.execute(NOTEBOOKS[0], renew=False)
    assert "more than 120 s of a core" in capsys.readouterr().out
    assert execute.execute(NOTEBOOKS[0], renew=False)
    assert "more than 120 s of a core" in (FOLDER / "README.md").read_text()
