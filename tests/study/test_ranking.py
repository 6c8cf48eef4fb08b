"""The ranking of a comparison with assumed seconds × 0.5 and × 2: simulated, told in one line, and in the JSON."""

import json

import pytest

import simrl as api
from simrl.scenario.load import load_scenarios
from simrl.scenario.presets import ENGINES
from simrl.show.tables.ranking import ranking_lines
from simrl.simulate.prepare import prepare
from simrl.study import compare
from simrl.study.robustness import assumed_seconds, scaled
from tests.command_line import SCENARIO

HALF, DOUBLE = compare.FACTORS
KNOWN = {
    f"training.{key}": value
    for key, value in {
        "switch_s": 1,
        "load_overhead_s": 0.5,
        "publish_s": 0.3,
        "reward_s": 0.1,
    }.items()
}


@pytest.fixture
def scenario(tmp_path):
    """The file of a comparison of two systems on 4 GPUs."""
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO)
    return file


def row(system, rate, half, double, variant=""):
    return {"system": system, "variant": variant, "samples_per_s": rate, HALF: half, DOUBLE: double}


def line(*rows):
    """The only line on the ranking of these rows."""
    (found,) = ranking_lines(rows)
    return found.removeprefix("Ranking with assumed seconds × 0.5 and × 2: ")


# What is simulated.


def test_a_rate_is_that_of_the_scenario_with_all_assumed_seconds_times_the_factor(scenario):
    rows = api.compare(str(scenario), jobs=1).rows
    for key, factor in compare.FACTORS.items():
        defaults = {"switch_s": 2, "load_overhead_s": 1, "publish_s": 0.5, "reward_s": 0.2}
        changed = api.compare(
            str(scenario),
            overrides={f"training.{k}": v * factor for k, v in defaults.items()},
            ranking=False,
            jobs=1,
        )
        assert [r[key] for r in rows] == [r["samples_per_s"] for r in changed.rows]


def test_an_order_that_flips_when_switch_s_doubles_is_told(scenario):
    known = {
        **{key: value for key, value in KNOWN.items() if key != "training.switch_s"},
        "training.publish_s": 5,
    }
    compared = api.compare(str(scenario), ["verl_colocated", "split"], overrides=known, jobs=1)
    colocated, split = compared.rows
    assert colocated["samples_per_s"] > split["samples_per_s"]
    assert colocated[DOUBLE] < split["samples_per_s"]
    assert split[HALF] is None and split[DOUBLE] is None
    assert "× 0.5 and × 2: at × 2 faster than verl_colocated: split. verl_colocated is 0." in str(
        compared
    )


def test_a_comparison_that_rests_on_nothing_assumed_says_so_and_is_not_repeated(
    scenario, monkeypatch
):
    monkeypatch.setattr(
        "simrl.study.point.simulate_prepared", lambda *_: pytest.fail("simulated again")
    )
    compared = api.compare(str(scenario), overrides=KNOWN, best_split=False, jobs=1)
    assert "Ranking: rests on no assumed seconds" in str(compared)
    assert all(r[HALF] is None and r[DOUBLE] is None for r in compared.rows)


def test_a_long_comparison_is_repeated_only_if_asked(scenario, monkeypatch):
    monkeypatch.setattr(compare, "LONG_S", -1.0)
    assert "--ranking simulates it (the comparison took 0 s)" in str(
        api.compare(str(scenario), jobs=1)
    )
    assert api.compare(str(scenario), ranking=True, jobs=1).rows[0][HALF] is not None


def test_without_the_ranking_no_line_is_printed_and_one_system_has_none(scenario):
    assert "Ranking" not in str(api.compare(str(scenario), ranking=False, jobs=1))
    assert "Ranking" not in str(api.compare(str(scenario), systems=["areal"], jobs=1))
    assert "Ranking" not in str(api.run(str(scenario), "areal"))


def test_open_constants_of_presets_are_varied_and_known_ones_are_not(scenario):
    def seconds(*overrides):
        return assumed_seconds(
            prepare(load_scenarios(scenario, ["systems=[verl_colocated]", *overrides])[0])
        )

    assert seconds("framework=verl-fsdp-0.5") == {}
    tensor_parallel = ("cluster.tp=2", "profile={roofline: {}}")
    messages_s = ENGINES["vllm-0.8"].constants["messages_s"].value
    assert seconds("framework=verl-fsdp-0.5", *tensor_parallel) == {"engine.messages_s": messages_s}
    own_pause = (*tensor_parallel, "profile.between_passes_s=1e-3")
    assert seconds("framework=verl-fsdp-0.5", *own_pause) == {}
    eager = seconds(
        "framework=verl-fsdp-0.5-sglang",
        "engine.enforce_eager=true",
        "profile.roofline.between_passes_s=1e-3",
    )
    assert eager == {
        "training.load_overhead_s": 1.6,
        "training.reward_s": 0.1,
        "profile.sequence_overhead_s": 1.75e-5,
        "engine.log_probs_s": 2.2e-5,
        "engine.layer_launch_s": ENGINES["sglang-0.4"].constants["layer_launch_s"].value,
    }


def test_constants_that_were_measured_on_other_models_or_nodes_are_varied_where_they_are_used(
    scenario,
):
    split = ["systems=[split]", "training.weight_sync=reshard", "training.reward_s=0.1"]
    (one,) = load_scenarios(scenario, split)
    prepared = prepare(one)
    assert assumed_seconds(prepared) == {"training.weight_sync_tensor_s": 0.29e-3}
    assert scaled(prepared, 2.0).training.weight_sync_tensor_s == 0.58e-3
    (known,) = load_scenarios(scenario, [*split, "training.weight_sync_tensor_s=1e-4"])
    assert assumed_seconds(prepare(known)) == {}


def test_the_ranking_and_its_json_are_the_same_from_any_number_of_processes(simrl):
    rows = []
    for jobs in "12":
        code, out, _ = simrl("compare", "scenario.yaml", "-o", "out", "--json", "--jobs", jobs)
        assert code == 0
        rows.append(json.loads(out))
        assert rows[-1] == json.loads((simrl.folder / "out" / "comparison.json").read_text())
    assert rows[0] == rows[1]
    assert all(r[HALF] > r["samples_per_s"] > r[DOUBLE] > 0 for r in rows[0])


# What is told.


def test_an_unchanged_ranking_has_the_range_of_the_best_ones_lead():
    told = line(row("verl", 1.0, 1.1, 0.9), row("areal", 2.0, 2.1, 1.9))
    assert told == "unchanged. areal is 1.91× to 2.11× as fast as verl."


def test_the_lead_of_the_first_system_is_over_the_second_best():
    assert "verl is 1.05× to 1.60× as fast as areal." in line(
        row("verl", 2, 2, 2.4), row("split", 1, 1, 1), row("areal", 1.9, 1.9, 1.5)
    )


def test_systems_that_change_places_are_named_with_the_factor():
    told = line(row("verl", 2.0, 2.2, 1.0, "gpus=4"), row("areal", 1.5, 1.5, 1.5, "gpus=4"))
    assert told.startswith(
        "at × 2 faster than verl: areal (gpus=4). verl is 0.67× to 1.47× as fast as areal"
    )


def test_less_than_the_models_error_apart_is_level_and_no_change():
    assert line(row("verl", 1.01, 1.0, 0.99), row("areal", 1.0, 1.01, 1.02)).startswith("unchanged")
    assert line(row("verl", 1.2, 1.2, 1.0), row("areal", 1.0, 1.0, 1.0)).startswith(
        "at × 2 level with verl (within 6%): areal."
    )


def test_of_many_variants_the_lead_that_moves_most_is_told():
    rows = [
        row(s, r, r, r + i, f"gpus={i}") for i in range(4) for s, r in (("verl", 1), ("areal", 9))
    ]
    assert line(*rows).endswith(
        "areal is 3.00× to 9.00× as fast as verl (gpus=3), where it moves most."
    )


def test_a_run_without_assumed_seconds_keeps_its_rate():
    assert line(row("verl", 1.0, None, None), row("areal", 2.0, 2.5, 1.5)).endswith(
        "areal is 1.50× to 2.50× as fast as verl."
    )
