"""What the page on the recorded runs says, counted and simulated again from what is shipped."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.vllm  # what it needs comes with it

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(ROOT / "experiments" / "recorded_run.py"))


@pytest.fixture(scope="module")
def runs(script: dict) -> list:
    return script["runs_in"](ROOT / "traces" / "countdown")


def said(name: str) -> list[str]:
    page = (ROOT / "experiments" / "recorded_run.md").read_text(encoding="utf-8")
    return (
        page.partition(f"<!-- {name} -->\n")[2]
        .partition(f"<!-- /{name} -->\n")[0]
        .strip()
        .splitlines()
    )


def test_the_page_says_what_was_learned(script: dict, runs: list):
    assert said("learning") == script["learning_table"](runs)


def test_the_page_says_what_ranks_of_lengths_are_worth(script: dict, runs: list):
    assert said("ranks") == script["ranks_table"](runs)


def test_the_page_says_what_the_simulator_predicts_of_the_runs_from_costs_measured_apart(
    script: dict, runs: list
):
    costs = ROOT / "traces" / "countdown-costs"
    predicted = {run.config.system.name: script["predict"](run, run, costs) for run in runs}
    assert said("steps") == script["prediction_table"](predicted, runs)


def test_a_page_without_a_place_for_a_table_is_left_as_it_is(script: dict, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# words\n")
    with pytest.raises(
        Exception, match="no place for steps: write <!-- steps --> and <!-- /steps -->, a line each"
    ):
        script["write_parts"](page, {"steps": ["|"]})
    assert page.read_text() == "# words\n"
