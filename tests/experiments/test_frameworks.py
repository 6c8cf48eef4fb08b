"""The table of open frameworks: its page is made from its csv, and its csv from simulations."""

import re
from pathlib import Path

import numpy as np
import pytest

from experiments.framework_runs import (
    BOUND,
    FRAMEWORKS,
    WORKLOADS,
    Task,
    Workload,
    percentile,
    rows_of,
    staleness,
)
from experiments.frameworks import PAGE, TABLE, parts_of, place, read_rows, require_equal
from simrl.errors import InputError
from simrl.result.off_policyness import ages
from simrl.simulate.run import simulate
from simrl.systems.recipes import RECIPES, recipe_parameters

SMALL = {
    "steps": 12,
    "warmup_steps": 6,
    "workload.synthetic.steps": 14,
    "workload.synthetic.prompts_per_step": 16,
    "workload.synthetic.group": 4,
    "workload.synthetic.mean_tokens": 500,
    "workload.synthetic.cap_tokens": 2000,
}


def parts(page: Path) -> dict[str, str]:
    texts = re.findall(
        r"<!-- ([\w-]+) -->\n(.*?)<!-- /\1 -->", page.read_text(encoding="utf-8"), re.DOTALL
    )
    return dict(texts)


def test_the_page_is_made_of_the_csv():
    made = parts_of(read_rows(TABLE))
    assert {name: text.strip() for name, text in parts(PAGE).items()} == {
        name: "\n".join(lines).strip() for name, lines in made.items()
    }


def test_the_csv_has_every_framework_on_every_workload():
    rows = {place(row) for row in read_rows(TABLE)}
    assert {(w, f, "default") for w in WORKLOADS for f in FRAMEWORKS} <= rows


def test_a_slice_simulated_again_equals_the_csv():
    rows = rows_of(Task(Workload("dense"), "colocated", search=False))
    assert len(rows) == 1
    require_equal(read_rows(TABLE), rows)
    with pytest.raises(InputError, match="samples_per_s"):
        require_equal(read_rows(TABLE), [{**rows[0], "samples_per_s": 1.0}])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_keys_of_a_framework_are_parameters_of_its_recipe(name: str):
    framework, batch = FRAMEWORKS[name], Workload("dense").batch
    keys = {**framework.keys(batch), **framework.entry(batch)}
    assert framework.system in RECIPES
    assert keys.keys() <= recipe_parameters(framework.system).keys()
    assert not framework.keys(batch) or set(framework.grid) <= framework.keys(batch).keys()


def test_the_best_settings_keep_the_bound_and_are_no_slower_than_settled_defaults():
    rows = rows_of(Task(Workload("dense", SMALL), "skyrl"))
    default, bounded, best = rows
    assert [row["kind"] for row in rows] == ["default", "bounded", "best"]
    if not bounded.get("error"):
        assert bounded["off_policyness_max"] <= BOUND
        assert best["samples_per_s"] >= bounded["samples_per_s"]
    assert not best.get("error")
    assert not default["settled"] or best["samples_per_s"] >= default["samples_per_s"]
    assert rows == rows_of(Task(Workload("dense", SMALL), "skyrl"))


def test_staleness_in_batches_is_off_policyness_where_an_update_trains_a_batch():
    framework = FRAMEWORKS["areal"]
    scenario = Workload("dense", SMALL).at_defaults(framework)
    result = simulate(scenario)
    age, tokens = staleness(result, scenario.warmup_steps, 1)
    expected, weights, _ = ages(result, scenario.warmup_steps)
    assert np.array_equal(age, expected) and np.array_equal(tokens, weights)
    quarter, _ = staleness(result, scenario.warmup_steps, 4)
    assert quarter.max() <= -(-age.max() // 4)


def test_a_percentile_is_the_smallest_value_with_that_share_of_the_weight():
    values, weights = np.array([0, 1, 5]), np.array([90, 9, 1])
    assert percentile(values, weights, 0.9) == 0
    assert percentile(values, weights, 0.99) == 1
    assert percentile(values, weights, 1.0) == 5
