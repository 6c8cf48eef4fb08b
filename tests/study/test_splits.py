"""The split of the GPUs: a comparison warns where another is better, and finds the best; three seeds say how sure a row is."""

import pytest

from simrl.commands.compare import compare
from simrl.scenario.load import load_scenarios
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.study.point import Point, simulate_point
from simrl.study.search import Option, Searched
from simrl.study.splits import best_splits, looks, units, with_workers

SCENARIO = """\
name: small
seed: 3
steps: 8
warmup_steps: 4
model: qwen3-0.6b
cluster: {gpu: h100, gpus: 16, tp: 1}
workload:
  synthetic: {steps: 8, prompts_per_step: 8, group: 4, cap_tokens: 1000, mean_tokens: 300, sigma: 0.8, prompt_tokens: 20}
profile: {roofline: {}}
training: {mfu: 0.002, log_prob_mfu: 0.002}
systems: [verl_colocated, {name: areal, eta: 2}]
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SCENARIO)
    return tmp_path / "small.yaml"


def row_of(scenario):
    return simulate_point(Point(scenario), InputCache())["row"]


def test_a_trainer_that_holds_up_rollout_is_warned_of_with_a_split_that_is_faster(file, capsys):
    compared = compare(file, overrides=["system.rollout_share=0.875"])
    colocated, areal = compared.rows
    assert colocated["better_split"] is None and areal["better_split"]["gain"] > 1.1
    share = areal["better_split"]["rollout_share"]
    again = compare(file, [{"name": "areal", "eta": 2, "rollout_share": share}]).rows[0]
    assert again["samples_per_s"] == pytest.approx(
        areal["samples_per_s"] * areal["better_split"]["gain"]
    )
    compared.print()
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "Faster with another split of the GPUs; --best-split searches the best: areal(eta=2)"
        in said
    )


def test_where_the_idle_shares_promise_no_tenth_nothing_more_is_simulated(file):
    scenario = load_scenarios(file, ["systems=[areal]"])[0]
    balanced = {"train_idle": 0.1, "rollout_bubble": 0.05, "occupancy": 0.9}
    assert looks(scenario, balanced, InputCache()) is None
    assert (
        looks(load_scenarios(file)[0], {**balanced, "train_idle": 0.0}, InputCache()) is None
    )  # colocated
    idle = looks(scenario, {**balanced, "train_idle": 0.8}, InputCache())
    assert units(idle) == (15, 16)
    late = looks(scenario, {**balanced, "train_idle": 0.0, "rollout_bubble": 0.4}, InputCache())
    assert units(late) == (10, 16)


@pytest.mark.parametrize("mfu", [0.001, 0.004, 0.02])
def test_the_split_that_is_found_is_the_best_of_all(file, mfu):
    scenario = load_scenarios(
        file,
        [
            *(f"training.mfu={mfu}", f"training.log_prob_mfu={mfu}", "systems=[areal]"),
            *("steps=12", "workload.synthetic.steps=12"),  # splits are level but for noise
        ],
    )[0]
    asked = []

    def rows(scenarios):
        asked.extend(scenarios)
        return [row_of(each) for each in scenarios]

    (found,) = best_splits([scenario], rows, InputCache())
    every = [row_of(with_workers(scenario, n))["samples_per_s"] for n in range(1, 16)]
    assert row_of(found)["samples_per_s"] > 0.98 * max(every) and len(asked) < 13


def test_a_split_in_which_the_trainer_lacks_memory_is_passed_by(file):
    text = SCENARIO.replace("qwen3-0.6b", "qwen3-8b").replace("gpus: 16", "gpus: 8")
    file.write_text(text)
    scenario = load_scenarios(file, ["systems=[areal]", "system.rollout_share=0.5"])[0]
    (found,) = best_splits(
        [scenario], lambda scenarios: [row_of(each) for each in scenarios], InputCache()
    )
    prepare(found)
    assert row_of(found)["samples_per_s"] >= row_of(scenario)["samples_per_s"]


def test_whole_nodes_are_preferred_to_parts_of_them_that_gain_less_than_a_hundredth(file):
    scenario = load_scenarios(file, ["systems=[areal]"])[0]
    for gain, workers in ((0.005, 8), (0.02, 9)):

        def rows(scenarios, gain=gain):
            rates = {8: 1.0, 9: 1 + gain}
            return [{"samples_per_s": rates.get(units(each)[0], 0.5)} for each in scenarios]

        (found,) = best_splits([with_workers(scenario, 9)], rows, InputCache())
        assert units(found) == (workers, 16)
        row = row_of(found)
        options = [
            Option(Point(with_workers(scenario, n)), row, merit, ())
            for n, merit in ((8, 1), (9, 1 + gain))
        ]
        (searched := Searched(options)).sort()
        assert units(searched.options[0].point.scenario)[0] == workers


def test_with_best_split_every_row_has_its_own_and_no_warning(file):
    before, after = (compare(file, best_split=best) for best in (False, True))
    assert after.rows[1]["samples_per_s"] > before.rows[1]["samples_per_s"]
    assert "rollout_share=" in after.names[1] and after.rows[1]["better_split"] is None
    assert after.rows[0]["samples_per_s"] == before.rows[0]["samples_per_s"]


def test_sure_puts_the_spread_of_three_seeds_into_the_row(file, capsys):
    compared = compare(file, sure=True, best_split=False)
    rates = [
        [row["samples_per_s"] for row in compare(file, seed=s, best_split=False).rows]
        for s in (3, 4, 5)
    ]
    for row, (own, *others) in zip(compared.rows, zip(*rates, strict=True), strict=True):
        assert row["samples_per_s"] == own
        assert row["samples_per_s_spread"] == max(abs(other - own) for other in others) > 0
    compared.print()
    assert " ± " in capsys.readouterr().out


def test_a_run_that_has_not_settled_says_so_in_its_row(file, capsys):
    short = compare(file, overrides=["steps=3", "warmup_steps=1", "system.eta=8"], best_split=False)
    assert [row["settled"] for row in short.rows] == [True, False]
    short.print()
    out = capsys.readouterr().out
    line = next(
        line for line in out.splitlines() if line.lstrip().startswith("areal")
    )  # the first is of the table
    assert "↑" in line and "Not settled (↑): areal(eta=8): off-policyness still grew" in out
