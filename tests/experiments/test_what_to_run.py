"""The page on what to run: its tables are those of its JSON, and the JSON is what simrl simulates."""

import json
import re

import pytest

from experiments.what_to_run import BASE, HERE, SCENARIO, parts, scenario, system_of, within
from simrl.simulate.cache import InputCache
from simrl.study.point import Point, simulate_point

DATA = json.loads((HERE / "what_to_run.json").read_text(encoding="utf-8"))
BASE_ROWS = [
    r for r in DATA["rows"] if r["part"] == "regimes" and (r["axis"], r["value"]) == ("tail", 0.8)
]


def test_the_tables_of_the_page_are_those_of_its_json():
    page = (HERE / "what_to_run.md").read_text(encoding="utf-8")
    for name, lines in parts(DATA).items():
        (text,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page, re.DOTALL)
        assert text.strip() == "\n".join(lines).strip()


@pytest.mark.parametrize("name", [BASE, "rollpacker", "partial_rollout"])
def test_a_row_of_the_json_is_what_simrl_simulates(name: str):
    row = next(r for r in BASE_ROWS if r["name"] == name)
    simulated = simulate_point(Point(scenario({}, system_of(row))), InputCache())["row"]
    assert simulated["samples_per_s"] == pytest.approx(row["samples_per_s"], rel=1e-4)
    assert simulated["off_policyness_max"] == row["oldest"]


def test_a_system_over_the_bound_is_no_answer():
    fastest = within(BASE_ROWS, None)[0]
    assert fastest["oldest"] > 1
    assert all(row["oldest"] <= 1 for row in within(BASE_ROWS, 1))
    assert within(BASE_ROWS, 0)[0]["oldest"] == 0


def test_a_run_that_had_not_settled_is_no_answer_unless_its_rule_bounds_it():
    growing = {
        "name": "laminar",
        "parameters": {},
        "samples_per_s": 9.0,
        "oldest": 3,
        "mean": 2.0,
        "settled": False,
        "length": 1.0,
    }
    bounded = {**growing, "name": "one_step_off", "oldest": 1}
    assert within([growing, bounded], 4) == [bounded]
    assert SCENARIO.exists()


def test_a_system_that_trains_shorter_responses_than_the_data_has_is_no_answer():
    short = {
        "name": "prime_rl",
        "parameters": {},
        "samples_per_s": 9.0,
        "oldest": 1,
        "settled": True,
        "length": 0.6,
    }
    assert within([short], 1) == []
    assert within([{**short, "length": 1.0}], 1) != []
