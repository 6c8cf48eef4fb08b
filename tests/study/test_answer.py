"""The answer of a search: the best choice is found, the limits hold, and what is said of it is true."""

import io
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from simrl.errors import InputError, StoppedError
from simrl.scenario.load import ScenarioFile, load_scenarios
from simrl.show.tables.advise import print_search, robust_lines
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.study.answer import Answer, answer
from simrl.study.executors import Here, LostTask, Processes
from simrl.study.goal import Goal, duration, seconds_of
from simrl.study.grid import by_key, vary
from simrl.study.launch import Launch, launch
from simrl.study.model_error import RATIO_ERROR, RATIOS
from simrl.study.point import Point, simulate_point
from simrl.study.robustness import ENDS, HALVINGS, perturbed
from simrl.study.search import Option, Searched, front, judged, search
from simrl.study.search_space import FAMILIES, make_space
from simrl.study.staleness_quality import TABLE, near
from simrl.study.store import Outcomes
from simrl.study.sweep import plan
from tests.command_line import CommandLine, contents

SCENARIO = """\
name: small
seed: 3
steps: 6
warmup_steps: 2
model: qwen3-0.6b
cluster: {gpu: h100, gpus: 8, tp: 1, cost_per_gpu_hour: 2.0}
workload:
  synthetic: {steps: 4, prompts_per_step: 8, group: 2, cap_tokens: 1000, mean_tokens: 300, sigma: 0.8, prompt_tokens: 20}
profile: {roofline: {}}
training: {mfu: 0.01, log_prob_mfu: 0.01}
systems: [verl_colocated, one_step_off, areal]
"""
FEW = (
    "systems=verl_colocated,one_step_off,areal",
    "system.rollout_share=0.25,0.5,0.75",
    "system.eta=1,4",
    "cluster.tp=1",
)
PATIENCE_S = 120


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SCENARIO)
    return tmp_path / "small.yaml"


def space_of(file, *texts):
    return make_space(lambda settings: ScenarioFile(file, settings), by_key(texts))


def searched(file, *texts, trials=100, seed=0, executor=None, folder="out", **goal):
    space = space_of(file, *texts)
    outcomes = Outcomes(Path(folder), executor or Here())
    price = space.first.cluster.cost_per_gpu_hour
    return search(space, Goal(space.batch_samples, price, **goal), outcomes, trials, seed), outcomes


def answered(file, *texts, folder="out", trials=100, **goal) -> Answer:
    space = space_of(file, *texts)
    price = space.first.cluster.cost_per_gpu_hour
    return answer(
        space,
        Goal(space.batch_samples, price, **goal),
        Outcomes(Path(folder), Here()),
        trials=trials,
    )


def simulated(scenario):
    """The row of a scenario, by no way of the search's."""
    return simulate_point(Point(scenario), InputCache())["row"]


# The space.


def test_without_anything_said_a_system_of_each_family_is_searched_with_splits_staleness_and_tp(
    file,
):
    space = space_of(file)
    asked = dict(text.split("=", 1) for text in space.words)
    assert set(asked) == {
        "systems", "system.rollout_share", "system.eta", "system.staleness", "cluster.tp", "system.speculation",
    }  # fmt: skip
    assert set(asked["systems"].split(",")) == set(FAMILIES)
    assert asked["cluster.tp"] == "1,2,4,8"


def test_what_the_user_names_takes_the_place_of_the_default(file):
    asked = space_of(file, "systems=areal", "system.eta=3", "cluster.tp=2").words
    assert asked[:3] == ('systems=["areal"]', "system.eta=3", "cluster.tp=2")
    assert [text.split("=")[0] for text in asked[3:]] == ["system.rollout_share"]


@pytest.mark.parametrize(
    "varied, texts", [("cluster: {gpus: 8, tp: 2}", ()), ("seed: 4", ("cluster={tp: 2}",))]
)
def test_a_tp_in_a_section_that_is_given_is_not_searched(file, varied, texts):
    file.write_text(f"{SCENARIO}vary: [{{{varied}}}]\n")
    space = space_of(file, "systems=verl_colocated", *texts)
    assert {space.point(chosen).scenario.cluster.tp for chosen in space.combinations(100)} == {2}


def test_what_an_entry_of_the_command_line_says_stands_against_a_default(file):
    space = space_of(
        file, "systems={name: areal, eta: 3}", "system.rollout_share=0.5", "cluster.tp=1"
    )
    points = {space.point(chosen).hash: space.point(chosen) for chosen in space.combinations(100)}
    assert [point.scenario.system.parameters["eta"] for point in points.values()] == [3]


def test_choices_that_come_to_the_same_simulation_are_one_point(file):
    space = space_of(file, "systems=one_step_off,rhymerl", "system.rollout_share=0.5,0.51,0.6,0.62", "cluster.tp=1",
                     "system.speculation=none,histospec,null")  # fmt: skip
    points = {
        space.point(chosen).hash: space.point(chosen).scenario for chosen in space.combinations(100)
    }
    shares = {scenario.system.parameters["rollout_share"] for scenario in points.values()}
    assert shares == {0.5}  # of 8 GPUs: 4 workers
    drafters = [(s.system.name, s.system.parameters.get("speculation")) for s in points.values()]
    expected = {
        ("one_step_off", None),
        ("one_step_off", "histospec"),
        ("rhymerl", "none"),
        ("rhymerl", None),
    }
    assert set(drafters) == expected and len(drafters) == 4


def test_a_tp_without_step_times_is_left_out_and_said_so(shipped_profiles):
    space = space_of(shipped_profiles)
    assert "cluster.tp=1,2,4" in space.words
    assert any(note.startswith("cluster.tp 8: left out") for note in space.notes)
    choice = next(
        chosen
        for chosen in space.combinations(10_000)
        if space.point(chosen).scenario.cluster.tp == 4
    )
    assert space.point(choice).scenario.profile.path.endswith("qwen3-8b_h100_tp4.parquet")


def test_layouts_of_a_worker_of_experts_are_tried_as_a_whole_each_with_its_step_times(file):
    path = Path(__file__).parents[2] / "profiles" / "qwen3-30b-a3b_h100_tp2_ep2.parquet"
    file.write_text(
        SCENARIO.replace("qwen3-0.6b", "qwen3-30b-a3b").replace(
            "{roofline: {}}", f"{{path: {path}}}"
        )
        + "vary: [{cluster: {gpus: 64, tp: 2, ep: 2}}]\n"
    )
    assert not any("cluster.tp" in text for text in space_of(file).words)  # the file says it
    file.write_text(file.read_text().replace("vary: [{cluster: {gpus: 64, tp: 2, ep: 2}}]\n", ""))
    space = space_of(file, "cluster.gpus=64", "systems=verl_colocated")
    layouts = "cluster.tp=1,1,2,2,4 cluster.dp=1,8,1,1,1 cluster.ep=1,8,1,2,4 --zip cluster.tp,cluster.dp,cluster.ep"
    assert layouts in space.words
    paths = [space.point(chosen).scenario.profile.path for chosen in space.combinations(100)]
    assert len({*paths}) == 5 and any(
        path.endswith("qwen3-30b-a3b_h100_tp1_dp8_ep8.parquet") for path in paths
    )


def test_an_answer_names_the_whole_layout_of_a_worker_and_the_layouts_that_tie(file):
    path = Path(__file__).parents[2] / "profiles" / "qwen3-30b-a3b_h100_tp2_ep2.parquet"
    file.write_text(
        SCENARIO.replace("qwen3-0.6b", "qwen3-30b-a3b").replace(
            "{roofline: {}}", f"{{path: {path}}}"
        )
    )
    found = answered(
        file, "cluster.gpus=64", "systems=verl_colocated", "cluster.tp=2", "cluster.ep=1,2"
    )
    close = replace(found, within_error=1)
    text = io.StringIO()
    print_search(close, Console(file=text))
    words = " ".join(text.getvalue().split())
    own, other = (option.point.scenario.cluster.ep for option in found.searched.allowed)
    layouts = {1: "tp 2", 2: "tp 2 ep 2"}
    assert (
        f"all 64 GPUs for both, {layouts[own]}:" in words
        and f"next variant, verl_colocated, {layouts[other]}." in words
    )
    assert f"not in the table: verl_colocated, {layouts[other]} (" in words


def test_what_is_left_out_for_want_of_step_times_names_the_precision_and_the_command(file):
    path = Path(__file__).parents[2] / "profiles" / "qwen3-30b-a3b_h100_tp2_ep2_fp8-block.parquet"
    file.write_text(
        SCENARIO.replace("qwen3-0.6b", "qwen3-30b-a3b").replace(
            "{roofline: {}}", f"{{path: {path}}}"
        )
    )
    (note,) = [
        note
        for note in space_of(file, "cluster.gpus=64", "precision.weights=fp8-block").notes
        if "left out, as profiles/" in note
    ]
    assert "of qwen3-30b-a3b on h100 in fp8-block for it" in note
    assert (
        "simrl profile derive qwen3-30b-a3b --gpu h100" in note and "--precision fp8-block" in note
    )


def test_splits_that_nobody_named_leave_train_gpus_that_the_experts_divide(file):
    path = Path(__file__).parents[2] / "profiles" / "qwen3-30b-a3b_h100_tp2_ep2.parquet"
    file.write_text(
        SCENARIO.replace("qwen3-0.6b", "qwen3-30b-a3b").replace(
            "{roofline: {}}", f"{{path: {path}}}"
        )
    )
    fixed = (
        "cluster.gpus=32",
        "cluster.tp=2",
        "cluster.ep=2",
        "training.expert_parallel=8",
        "systems=one_step_off",
    )
    space = space_of(file, *fixed)
    shares = {
        space.point(chosen).scenario.system.parameters["rollout_share"]
        for chosen in space.combinations(100)
    }
    assert shares == {0.25, 0.5, 0.75}
    named = space_of(file, *fixed, "system.rollout_share=0.625")  # what was asked for stays
    (chosen,) = named.combinations(100)
    assert named.point(chosen).scenario.system.parameters["rollout_share"] == 0.625


@pytest.fixture
def shipped_profiles(file):
    root = Path(__file__).parents[2]
    named = f"{{path: {root}/profiles/qwen3-8b_h100_tp1.parquet}}"
    file.write_text(SCENARIO.replace("qwen3-0.6b", "qwen3-8b").replace("{roofline: {}}", named))
    return file


def test_drafters_whose_acceptance_nobody_measured_are_left_out_unless_they_are_named(file):
    assert any("histospec" in note and "nobody measured" in note for note in space_of(file).notes)
    named = space_of(
        file, "system.speculation=none,ngram", "systems=verl_colocated", "cluster.tp=1"
    )
    assert len({named.point(chosen).hash for chosen in named.combinations(100)}) == 2


def test_a_drafter_that_only_its_own_system_has_is_told_apart_from_none(file):
    expected = "system.speculation=null is what a system drafts with by itself (rhymerl: histospec), none is no drafts at all"
    assert (
        expected in space_of(file).notes and "system.speculation=null,none" in space_of(file).words
    )
    assert not any(
        "system.speculation=null is" in note for note in space_of(file, "systems=areal").notes
    )


def test_drafts_are_counted_where_the_trace_has_tokens():
    path = Path(__file__).parents[2] / "experiments" / "quickstart.yaml"
    space = space_of(path, "cluster.gpus=16")
    assert "system.speculation=none,histospec,siblings,ngram" in space.words
    assert "drafts of histospec, siblings, ngram: counted on the trace's tokens" in space.notes


# The search.


def test_the_best_of_a_grid_is_found(file):
    found, outcomes = searched(file, *FEW)
    every = plan(vary(file, FEW), None, 0).points
    rows = [simulate_point(point, InputCache())["row"] for point in every]
    assert found.whole and outcomes.simulated == len(found.options) == len(every) == 10
    assert found.options[0].row == max(rows, key=lambda row: row["samples_per_s"])
    assert [o.merit for o in found.options] == sorted(
        (row["samples_per_s"] for row in rows), reverse=True
    )


def test_a_space_that_is_too_large_for_the_trials_is_searched_near_its_best(file):
    texts = (
        "systems=one_step_off,areal",
        "system.rollout_share=0.1..0.9",
        "system.eta=0..16",
        "cluster.tp=1",
    )
    found, _ = searched(file, *texts, trials=24)
    few = (
        "systems=one_step_off,areal",
        "system.rollout_share=0.25,0.5,0.75",
        "system.eta=1,8",
        "cluster.tp=1",
    )
    grid, _ = searched(file, *few, folder="grid")
    assert not found.whole and len(found.options) <= 24
    assert found.options[0].merit > 0.97 * grid.options[0].merit


class Counting(Here):
    """Simulates nothing, and knows what it was asked for."""

    def __init__(self):
        self.scenarios = []

    def outcomes(self, points):
        for i, point in enumerate(points):
            self.scenarios.append(point.scenario)
            yield i, {"error": "not simulated"}


def of(scenario):
    parameters = scenario.system.parameters
    return (
        scenario.system.name,
        scenario.cluster.tp,
        parameters.get("eta"),
        parameters.get("rollout_share"),
    )


def test_what_the_file_says_itself_is_tried_first_and_then_the_other_families_as_the_file_has_them(
    file,
):
    """With its own tp, a default split and a given one, and an entry of one system twice."""
    systems = "[april, {name: areal, eta: 1}, {name: areal, eta: 4, rollout_share: 0.625}, {name: asyncflow, eta: 3}]"
    text = SCENARIO.replace("[verl_colocated, one_step_off, areal]", systems).replace(
        "tp: 1", "tp: 4"
    )
    file.write_text(text.replace("gpus: 8", "gpus: 32") + "vary: [{seed: 5}, {seed: 6}]\n")
    asked = Counting()
    searched(file, trials=20, executor=asked)
    own = [
        ("april", 4, None, None),
        ("areal", 4, 1, 0.75),
        ("areal", 4, 4, 0.625),
        ("asyncflow", 4, 3, 0.75),
    ]
    assert [of(scenario) for scenario in asked.scenarios[:8:2]] == own
    assert [scenario.seed for scenario in asked.scenarios[:8]] == [5, 6] * 4
    others = [name for name in FAMILIES if name not in ("april", "areal")]
    assert [of(scenario)[:2] for scenario in asked.scenarios[8:20:2]] == [
        (name, 4) for name in others
    ]
    assert all(of(scenario)[3] in (None, 0.75) for scenario in asked.scenarios[8:20])


def test_of_what_the_user_named_the_files_value_is_tried_first_or_else_the_first(file):
    asked = Counting()
    texts = (
        "systems=areal",
        "system.rollout_share=0.5..0.9",
        "cluster.tp=2,4",
        "cluster.gpus=16,8",
        "system.eta=1..16",
    )
    searched(file, *texts, trials=5, executor=asked)
    assert of(asked.scenarios[0]) == ("areal", 2, 8, 0.75) and asked.scenarios[0].cluster.gpus == 8


def test_a_space_is_searched_whole_where_its_points_are_no_more_than_the_trials_though_its_combinations_are(
    file,
):
    texts = (
        "systems=one_step_off",
        "system.rollout_share=0.5,0.51,0.52,0.53,0.54,0.75",
        "cluster.tp=1",
    )
    found = searched(file, *texts, trials=2)[0]
    assert found.whole and found.points == 2  # of 8 GPUs: 4 or 6 workers
    assert not searched(file, *texts, "seed=1,2", trials=3)[0].whole


@pytest.mark.slow
def test_the_same_seed_gives_the_same_points_for_one_and_two_processes(file):
    texts = (
        "systems=verl_colocated,one_step_off,areal",
        "system.rollout_share=0.1..0.9",
        "cluster.tp=1,2",
    )
    one, _ = searched(file, *texts, trials=12, folder="one")
    processes = Processes(2, stay=True)
    try:
        two, _ = searched(file, *texts, trials=12, executor=processes, folder="two")
    finally:
        processes.end()
    assert [o.point.hash for o in one.options] == [o.point.hash for o in two.options]
    assert one.impossible == two.impossible
    assert contents(Path("one")) == contents(Path("two"))
    other, _ = searched(file, *texts, trials=12, seed=1, folder="one")
    assert [o.point.hash for o in other.options] != [o.point.hash for o in one.options]


def test_what_cannot_be_is_counted_with_its_reason(file):
    found, _ = searched(
        file, "systems=one_step_off,areal", "system.rollout_share=0.5", "cluster.tp=1,3,8"
    )
    (first, divides), (second, empty) = found.reasons()
    assert (
        first
        == "cluster.tp is 3: it does not divide the 8 GPUs; choose a divisor, such as 1, 2, 4, 8"
    )
    assert second.startswith("rollout_share 0.5 of 8 GPUs, 8 a worker, leaves 0 rollout")
    assert (
        divides == empty == 2 * 4 - (4 - 1) * 2
        or divides + empty + len(found.options) == found.points
    )


def test_points_are_counted_by_the_cause_of_their_error_whatever_its_numbers(file):
    text = SCENARIO.replace("qwen3-0.6b", "qwen3-32b").replace(
        "mfu: 0.01, log_prob_mfu: 0.01", "mfu: 0.01"
    )
    file.write_text(text)
    found, _ = searched(file, "systems=verl_colocated", "cluster.gpus=2,4", "cluster.tp=1,2")
    errors = {error for errors in found.impossible.values() for error in errors}
    assert len(errors) > len(found.impossible)
    assert sum(count for _, count in found.reasons()) == found.points == 4


def test_what_a_machine_could_not_simulate_is_tried_again_by_the_next_search(file):
    class Losing(Here):
        def outcomes(self, points):
            for i, outcome in super().outcomes(points):
                yield i, LostTask("its node is gone") if i == 1 else outcome

    texts = ("systems=one_step_off", "system.rollout_share=0.25,0.5,0.75", "cluster.tp=1")
    first, _ = searched(file, *texts, executor=Losing())
    second, outcomes = searched(file, *texts)
    assert [len(first.options), len(second.options), outcomes.simulated] == [2, 3, 1]


def test_a_search_that_was_stopped_goes_on_and_ends_where_it_would_have(file):
    class Stopped(Here):
        def __init__(self, points):
            self.left = points

        def outcomes(self, points):
            for each in super().outcomes(points):
                if not self.left:
                    raise KeyboardInterrupt
                self.left -= 1
                yield each

    texts = ("systems=one_step_off,areal", "system.rollout_share=0.1..0.9", "cluster.tp=1")
    with pytest.raises(
        StoppedError,
        match="interrupted; 5 points are kept in out; the same command goes on from there",
    ):
        searched(file, *texts, trials=12, executor=Stopped(5))
    resumed, outcomes = searched(file, *texts, trials=12)
    whole, alone = searched(file, *texts, trials=12, folder="whole")
    assert (outcomes.found, outcomes.simulated) == (5, alone.simulated - 5)
    assert [o.point.hash for o in resumed.options] == [o.point.hash for o in whole.options]
    assert contents(Path("out")) == contents(Path("whole"))


# Goals and limits.


def test_limits_hold_for_every_choice(file):
    free, _ = searched(file, *FEW)
    assert max(o.row["off_policyness_max"] for o in free.options) > 1
    tight, _ = searched(file, *FEW, max_off_policyness=1)
    assert tight.allowed and all(o.row["off_policyness_max"] <= 1 for o in tight.allowed)
    assert {o.broken[0].limit for o in tight.options if not o.allowed} == {"off-policyness"}
    ((reason, count),) = tight.reasons()
    assert reason == f"limit: off-policyness (areal {count})"
    dear = sorted(o.row["cost_per_1k_samples"] for o in free.options)[3]
    cheap, _ = searched(file, *FEW, max_cost=dear)
    assert len(cheap.allowed) == 4 and all(
        o.row["cost_per_1k_samples"] <= dear for o in cheap.allowed
    )


def test_an_off_policyness_that_still_grows_keeps_no_limit_unless_the_systems_rule_does(file):
    (point, *_) = [o.point for o in searched(file, *FEW)[0].options if o.system == "areal"]
    (bounded, *_) = [o.point for o in searched(file, *FEW)[0].options if o.system == "one_step_off"]
    goal = Goal(16.0, max_off_policyness=4)
    row = {"off_policyness_max": 1, "carried_off_policyness_max": 0, "settled": False}
    assert [broken.limit for broken in goal.broken(point.scenario, row)] == ["off-policyness"]
    found = Searched([Option(point, row, 1.0, tuple(goal.broken(point.scenario, row)))])
    growing = "limit: off-policyness was still growing when the simulation ended, and no rule ends it: simulate more steps"
    assert found.reasons() == [(f"{growing} (areal 1)", 1)]
    assert goal.broken(point.scenario, {**row, "settled": True}) == []
    assert goal.broken(bounded.scenario, row) == []
    carried = {**row, "settled": True, "carried_off_policyness_max": 5}
    assert [broken.limit for broken in goal.broken(bounded.scenario, carried)] == ["off-policyness"]


def test_for_a_deadline_the_cheapest_that_makes_it_is_chosen_and_for_a_budget_the_fastest_within_it(
    file,
):
    texts = (*FEW, "cluster.gpus=4,8,16")
    free, _ = searched(file, *texts)
    goal = Goal(16.0, 2.0, updates=1000, deadline_s=1.0)
    times = sorted(goal.seconds(o.row) for o in free.options)
    costs = sorted(goal.cost(o.row) for o in free.options)
    late, _ = searched(file, *texts, updates=1000, deadline_s=times[10])
    in_time = [o for o in free.options if goal.seconds(o.row) <= times[10]]
    assert goal.cost(late.options[0].row) == min(goal.cost(o.row) for o in in_time)
    rich, _ = searched(file, *texts, updates=1000, budget=costs[10])
    affordable = [o for o in free.options if goal.cost(o.row) <= costs[10]]
    assert goal.seconds(rich.options[0].row) == min(goal.seconds(o.row) for o in affordable)
    assert late.options[0].row["gpus"] < free.options[0].row["gpus"]


def test_the_time_of_updates_is_that_of_their_samples(file):
    row = {"samples_per_s": 4.0, "gpus": 8}
    goal = Goal(16.0, 2.0, updates=900, deadline_s=7200.0)
    assert (goal.seconds(row), goal.cost(row)) == (3600.0, 16.0)
    assert Goal(16.0, 0.0, updates=900, deadline_s=7200.0).cost(row) == 8.0  # GPU-hours


@pytest.mark.parametrize(
    "text, seconds", [("36h", 129600.0), ("90m", 5400.0), ("1.5d", 129600.0), ("45s", 45.0)]
)
def test_deadlines_have_a_unit(text, seconds):
    assert seconds_of(text, "--deadline") == seconds
    for wrong in ("36", "h", "-3h", "0h", "3 weeks"):
        with pytest.raises(InputError, match=f"--deadline {wrong}: give a number and its unit"):
            seconds_of(wrong, "--deadline")


def test_times_are_told_in_the_unit_that_reads_best():
    assert [duration(s) for s in (30, 300, 7200, 200_000)] == ["30 s", "5 min", "2 h", "2.31 d"]


def test_nothing_on_the_front_is_beaten_in_everything_and_the_rest_is(file):
    options = searched(file, *FEW, "cluster.gpus=4,8")[0].options

    def goods(option: Option):
        return option.row["samples_per_s"], -round(option.staleness, 2), -option.gpu_hours

    kept = front(options)
    for option in options:
        beaten = [
            o for o in kept if all(a >= b for a, b in zip(goods(o), goods(option), strict=True))
        ]
        assert beaten, "the front covers everything"
        assert (goods(option) in [goods(o) for o in kept]) == all(
            goods(o) == goods(option) for o in beaten
        )
    assert 1 < len(kept) < len(options)


def test_what_is_shown_as_equally_fresh_is_not_kept_on_the_front_for_being_fresher(file):
    options = searched(file, *FEW)[0].options
    best = options[0]
    slower = replace(best, row={**best.row, "samples_per_s": 0.9 * best.row["samples_per_s"],
                                "off_policyness_mean": best.staleness - 0.001})  # fmt: skip
    assert round(best.staleness, 2) == round(slower.staleness, 2)
    assert front([best, slower]) == [best]


# The answer.


def test_the_best_few_are_of_different_systems_with_reasons_and_their_next_variants(file):
    found = answered(file, *FEW)
    assert [c.option.system for c in found.best] == list(
        dict.fromkeys(o.system for o in found.searched.allowed)
    )
    assert found.choice.option is found.searched.options[0] and found.choice.rank == 1
    for choice in found.best:
        why = choice.reasons
        assert why.rollout_workers and why.parts and 0 < why.ideal_share < 1
        assert why.ideal_share + sum(share for _, _, share in why.parts) <= 1 + 1e-9
        if choice.variant is not None:
            assert choice.variant.system == choice.option.system
            assert choice.variant_loss == pytest.approx(
                choice.option.merit / choice.variant.merit - 1
            )


def test_the_same_question_is_answered_from_the_folder_alone(file):
    first = answered(file, *FEW)
    before = contents(Path("out"))

    class Refusing(Here):
        def outcomes(self, points):
            raise AssertionError("nothing is left to simulate")

    space = space_of(file, *FEW)
    outcomes = Outcomes(Path("out"), Refusing())
    second = answer(space, Goal(space.batch_samples, 2.0), outcomes, trials=100)
    assert second.as_json() == first.as_json() and outcomes.simulated == 0
    assert contents(Path("out")) == before


def test_options_closer_than_the_models_error_are_ties_at_any_of_three_seeds(file):
    found = answered(file, *FEW)
    first = found.choice.option
    for choice in found.best[1:]:
        assert choice.leads[0] == pytest.approx(first.merit / choice.option.merit - 1)
        assert choice.tied == (min(choice.leads) < RATIO_ERROR)
        assert len(choice.leads) == (3 if choice.leads[0] < 2 * RATIO_ERROR else 1)
        for i, lead in enumerate(choice.leads):
            seeds = {"seed": first.point.scenario.seed + i}
            rates = [
                simulated(o.point.scenario.model_copy(update=seeds))["samples_per_s"]
                for o in (first, choice.option)
            ]
            assert lead == pytest.approx(rates[0] / rates[1] - 1)


def test_two_names_of_one_schedule_are_told_as_a_tie(file):
    found = answered(file, "systems=verl_colocated,distflow", "cluster.tp=1")
    assert [choice.tied for choice in found.best] == [False, True]
    assert found.within_error == 1


def test_of_options_that_tie_exactly_the_recipes_own_is_chosen_and_the_others_are_level(file):
    """With one response a worker, every dispatch sends each response to a worker of its own."""
    alone = SCENARIO.replace("prompts_per_step: 8, group: 2", "prompts_per_step: 4, group: 1")
    file.write_text(alone)
    systems = "systems={name: one_step_off, dispatch: seer},one_step_off"
    found = answered(file, systems, "system.rollout_share=0.5", "cluster.tp=1")
    own, changed = found.searched.allowed
    assert own.merit == pytest.approx(changed.merit, rel=1e-9)
    assert "dispatch" not in own.point.scenario.system.parameters
    assert found.choice.option is own and own in found.front and changed not in found.front
    said = " ".join(robust_lines(found))
    assert f"the choice is level with {changed.row['system']} (tp 1);" in said
    assert "0.0%" not in said and "wins" not in said


def test_noise_in_the_last_digits_of_a_rate_makes_no_option_better(file):
    option = searched(file, "systems=one_step_off", "cluster.tp=1")[0].options[0]
    scenario = option.point.scenario.with_fields("system", dispatch="seer")

    def best(factor):
        changed = replace(option, point=Point(scenario), merit=option.merit * factor)
        several = Searched([changed, option])
        several.sort()
        return several.options[0]

    assert best(1 + 1e-12) is option
    assert best(1.001) is not option


def test_the_models_error_is_that_of_the_page():
    """The rows of the last table of experiments/recorded_run.md."""
    page = (Path(__file__).parents[2] / "experiments" / "recorded_run.md").read_text()
    for tested in RATIOS:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {tested.schedules} |")]
        first, second = tested.predicted
        assert f"| {tested.measured:.2f}× (" in row and f"| {first:.2f}×, {second:.2f}× |" in row
    assert pytest.approx(1.80 / 1.70 - 1) == RATIO_ERROR


def test_a_search_that_was_not_whole_says_so_first_and_is_not_surer_than_it_was(file):
    """Of a colocated system and areal on slow training, whose lead is beyond the model's error in either case."""
    said = []
    for trials in (2, 100):
        found = answered(
            file,
            "systems=verl_colocated,areal",
            "system.rollout_share=0.25",
            "cluster.tp=1",
            "system.eta=1,4",
            "system.speculation=none",
            trials=trials,
        )
        text = io.StringIO()
        print_search(found, Console(file=text, width=100))
        said.append(" ".join(text.getvalue().split()))
    part, whole = said
    assert (
        "samples a second. 2 points of 3 combinations were tried; more --trials may find better. Run "
        in part
    )
    assert (
        "times as fast as the next system of those tried, " in part
        and "beyond simrl's own error" not in part
    )
    assert "were tried;" not in whole and "beyond simrl's own error" in whole


def shown(found):
    text = io.StringIO()
    print_search(found, Console(file=text, width=100))
    return " ".join(text.getvalue().split())


def test_seeds_are_told_where_they_change_something_and_else_once_that_they_do_not(file):
    found = answered(file, *FEW)
    first, second = found.best[:2]
    varied = replace(found, best=(first, replace(second, leads=(0.011, 0.02, 0.013))))
    assert "The best is ahead of it by +1.1%, +2.0%, +1.3% with 3 seeds." in shown(varied)
    assert "Seeds change nothing here" not in shown(varied)
    same = replace(found, best=(first, replace(second, leads=(0.011,) * 3)))
    assert shown(same).count("Seeds change nothing here: 3 of them gave equal figures.") == 1
    assert "The best is ahead of it by" not in shown(same)


def test_a_best_few_that_trained_on_other_tokens_a_sample_say_so_as_a_comparison_does(file):
    found = answered(file, *FEW)
    first, second = found.best[:2]
    assert "tokens a sample" not in shown(replace(found, best=(first,)))
    rows = [{**choice.option.row, "samples_per_s": 2.0, "tokens_per_s": tokens}
            for choice, tokens in ((first, 2000.0), (second, 1000.0))]  # fmt: skip
    few = [
        replace(c, option=replace(c.option, row=row))
        for c, row in zip((first, second), rows, strict=True)
    ]
    note = f"{rows[0]['system']} trained on 1,000 tokens a sample, {rows[1]['system']} on 500: compare tokens/s"
    said = shown(replace(found, best=tuple(few), robustness=()))
    assert note in said and "Tokens/s in the order of the table: 2,000, 1,000." in said


def test_a_cost_is_told_with_its_price_and_else_as_gpu_hours(file):
    found = answered(file, *FEW)
    row = found.choice.option.row
    assert f"a cost of {row['cost_per_1k_samples']:.3g} for 1,000 samples at 2 a GPU-hour" in shown(
        found
    )
    free = replace(found.choice.option, row={**row, "cost_per_1k_samples": None})
    said = shown(replace(found, best=(replace(found.choice, option=free),), robustness=()))
    assert f", {row['gpu_hours_per_1k_samples']:.3g} GPU-hours for 1,000 samples." in said


# Robustness.


def test_a_perturbed_option_is_simulated_with_other_fields(file):
    (scenario,) = load_scenarios(file, ["systems=[one_step_off]"])
    slower = perturbed(scenario, "decode", 1.2)
    assert slower.profile.forward_correction == pytest.approx(1.2)
    assert simulated(slower)["samples_per_s"] < simulated(scenario)["samples_per_s"]
    trained = perturbed(scenario, "train", 1.2)
    assert trained.training.correction == pytest.approx(1.2)
    assert simulated(trained)["samples_per_s"] < simulated(scenario)["samples_per_s"]
    assert perturbed(scenario, "acceptance", 0.8) == scenario


def test_acceptance_can_be_less_than_counted_and_of_models_also_more(file):
    (drafted,) = load_scenarios(
        file, ["systems=[{name: verl_colocated, speculation: draft_model}]"]
    )
    (text,) = load_scenarios(file, ["systems=[{name: verl_colocated, speculation: ngram}]"])
    assert "cannot be accepted more often" in perturbed(text, "acceptance", 1.2)
    for scenario, factors in ((drafted, (0.6, 0.8, 1.0, 1.2)), (text, (0.4, 0.6, 0.8, 1.0))):
        rates = [
            simulated(perturbed(scenario, "acceptance", f))["acceptance_rate"] for f in factors
        ]
        assert rates == sorted(rates) and rates[0] < rates[-1]


def test_a_flip_is_true_on_either_side(file):
    """Simulated at both factors of the bracket, by no way of the search's."""
    texts = (
        "systems=verl_colocated,one_step_off",
        "system.rollout_share=0.25,0.5,0.75",
        "cluster.tp=1",
        "training.switch_s=0.05",
    )
    found = answered(file, *texts)
    flips = [(end, end.flip) for end in found.robustness if end.flip is not None]
    assert flips, "no flip in this scenario: choose another"
    choice = found.choice.option.point.scenario

    def rate(scenario, source, factor):
        return simulated(perturbed(scenario, source, factor))["samples_per_s"]

    for end, flip in flips:
        winner = flip.winner.point.scenario
        assert rate(choice, end.source, flip.holds) >= rate(winner, end.source, flip.holds)
        assert rate(winner, end.source, flip.flips) > rate(choice, end.source, flip.flips)
        assert abs(flip.flips - flip.holds) == pytest.approx(abs(end.factor - 1) / 2**HALVINGS)
    for end in found.robustness:
        merits = [rate(c.option.point.scenario, end.source, end.factor) for c in found.best]
        assert rate(end.winner.point.scenario, end.source, end.factor) >= max(merits)
    assert {(end.source, end.factor) for end in found.robustness} == {
        (source, factor) for source in ("decode", "train", "assumed") for factor in ENDS[source]
    }


def test_an_end_at_which_nothing_keeps_the_limits_has_no_winner_and_is_told_so(file):
    """A deadline that the fastest makes as it is, and that no option makes where every pass takes longer."""
    texts = ("systems=one_step_off", "system.rollout_share=0.25,0.5", "cluster.tp=1")
    options = searched(file, *texts)[0].options
    seconds = Goal(16.0, 2.0, updates=100, deadline_s=1.0).seconds(options[0].row)
    found = answered(file, *texts, updates=100, deadline_s=seconds * 1.001)
    (slow,) = [end for end in found.robustness if end.source == "decode" and end.factor > 1]
    assert slow.winner is None and not slow.kept and not slow.untried
    assert "+20 % time none of them keeps the limits" in " ".join(robust_lines(found))
    (fast,) = [end for end in found.robustness if end.source == "decode" and end.factor < 1]
    assert fast.winner is not None


def test_a_variant_tells_its_gpus_only_where_they_are_others(file):
    text = io.StringIO()
    found = answered(file, "systems=verl_colocated", "cluster.tp=1,2")
    assert {choice.variant.point.scenario.cluster.tp for choice in found.best} <= {1, 2}
    print_search(found, Console(file=text, width=100))
    assert "8 h100" not in text.getvalue()
    text = io.StringIO()
    print_search(
        answered(file, "systems=verl_colocated", "cluster.tp=1", "cluster.gpus=4,8"),
        Console(file=text),
    )
    assert "next variant, verl_colocated, tp 1, 4 h100" in " ".join(text.getvalue().split())


# Staleness and quality, launch settings.


def test_quality_is_told_for_the_stalenesses_near_the_choices():
    assert [row.eta for row in near([1])] == [0, 1]
    assert [row.eta for row in near([3])] == [0, 2, 4]
    assert [row.eta for row in near([0, 20])] == [0, 16, float("inf")]
    assert TABLE[3].without_decoupled[0] == 23.3 and TABLE[3].with_decoupled[0] == 42.2


@pytest.mark.parametrize(
    "system, framework, settings",
    [
        (
            "{name: areal, eta: 4, rollout_share: 0.75}",
            "AReaL",
            {
                "rollout.max_head_offpolicyness": "4",
                "rollout.backend": "vllm:d3t2",
                "actor.backend": "fsdp:d2",
                "gconfig.n_samples": "2",
                "train_dataset.batch_size": "8",
            },
        ),
        (
            "{name: one_step_off, rollout_share: 0.5}",
            "verl",
            {
                "rollout.nnodes": "1",
                "rollout.n_gpus_per_node": "4",
                "trainer.n_gpus_per_node": "4",
                "actor_rollout_ref.rollout.tensor_model_parallel_size": "2",
                "actor_rollout_ref.hybrid_engine": "False",
                "data.train_batch_size": "8",
            },
        ),
        (
            "{name: verl_fully_async, staleness: 0.5, rollout_share: 0.5}",
            "verl",
            {
                "async_training.staleness_threshold": "0.5",
                "async_training.trigger_parameter_sync_step": "4",
                "actor_rollout_ref.actor.ppo_mini_batch_size": "2",
                "algorithm.rollout_correction.bypass_mode": "True",
            },
        ),
        (
            "april",
            "slime",
            {"--over-sampling-batch-size": "16", "--rollout-batch-size": "8", "--colocate": ""},
        ),
        (
            "{name: verl_colocated, speculation: ngram}",
            "verl",
            {"+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.method": "ngram"},
        ),
    ],
)
def test_settings_are_those_of_the_scenario_in_the_frameworks_words(
    file, system, framework, settings
):
    (scenario,) = load_scenarios(file, [f"systems=[{system}]", "cluster.tp=2"])
    found = launch(prepare(scenario))
    assert isinstance(found, Launch) and found.framework == framework and found.documents
    assert {key: found.settings[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("system", "budget", "shared"),
    [
        ("verl_colocated", "ppo_max_token_len_per_gpu", "ulysses_sequence_parallel_size"),
        ("april", "--max-tokens-per-gpu", "--context-parallel-size"),
    ],
)
def test_gpus_that_share_a_sequence_share_its_budget_of_tokens(file, system, budget, shared):
    overrides = [
        f"systems=[{system}]",
        "training.tokens_per_microbatch=4094",
        "training.sequence_parallel=4",
    ]
    (scenario,) = load_scenarios(file, overrides)
    settings = launch(prepare(scenario)).settings
    said = {key.removeprefix("actor_rollout_ref.actor."): value for key, value in settings.items()}
    assert (said[budget], said[shared]) == ("1024", "4")  # 4,096: no less than was asked for
    (scenario,) = load_scenarios(file, [f"systems=[{system}]", "training.tokens_per_microbatch=1"])
    prepared = prepare(scenario)
    longest = prepared.trace.column("prompt_tokens").max() + scenario.workload.synthetic.cap_tokens
    assert (
        int(launch(prepared).settings[next(key for key in settings if key.endswith(budget))])
        == longest
    )


@pytest.mark.parametrize(
    ("system", "key", "eager", "graphs"),
    [
        ("verl_colocated", "actor_rollout_ref.rollout.enforce_eager", "True", "False"),
        ("areal", "vllm.enforce_eager", "true", "false"),
        ("april", "--sglang-disable-cuda-graph", "", None),
        ("split", "--sglang-disable-cuda-graph", "", None),
    ],
)
def test_passes_that_the_host_launches_are_eager_ones(file, system, key, eager, graphs):
    for least_s, value in ((0.02, eager), (0.0, graphs)):
        (scenario,) = load_scenarios(
            file, [f"systems=[{system}]", f"profile.least_pass_s={least_s}"]
        )
        assert launch(prepare(scenario)).settings.get(key) == value


@pytest.mark.parametrize(
    ("system", "key", "on", "off"),
    [
        ("verl_colocated", "actor_rollout_ref.rollout.enable_prefix_caching", "True", "False"),
        ("areal", "vllm.no_enable_prefix_caching", "false", "true"),
        ("april", "--sglang-disable-radix-cache", None, ""),
    ],
)
def test_prefix_caching_is_the_scenarios(file, system, key, on, off):
    for cached, value in (("true", on), ("false", off)):
        (scenario,) = load_scenarios(
            file, [f"systems=[{system}]", f"engine.prefix_caching={cached}"]
        )
        assert launch(prepare(scenario)).settings.get(key) == value


def experts_of(file, system, *overrides):
    """The launch settings of a mixture of experts in fp8-block on 32 GPUs, nodes of 8."""
    path = Path(__file__).parents[2] / "profiles" / "qwen3-30b-a3b_h100_tp2_ep2_fp8-block.parquet"
    file.write_text(
        SCENARIO.replace("qwen3-0.6b", "qwen3-30b-a3b").replace(
            "{roofline: {}}", f"{{path: {path}}}"
        )
    )
    file.write_text(file.read_text().replace("training: {mfu: 0.01, log_prob_mfu: 0.01}\n", ""))
    parts = ["cluster.gpus=32", "cluster.tp=2", "cluster.ep=2", "precision.weights=fp8-block"]
    parts.append("training.tokens_per_microbatch=2048")
    (scenario,) = load_scenarios(file, [f"systems=[{system}]", *parts, *overrides])
    return launch(prepare(scenario))


@pytest.mark.parametrize(("system", "experts"), [("verl_colocated", None), ("split", "2")])
def test_precision_and_experts_are_set_where_the_framework_has_a_key_and_else_said(
    file, system, experts
):
    found = experts_of(
        file, system, "precision.training=fp8", "training.expert_parallel=2", "cluster.gpus=64"
    )
    key = "actor_rollout_ref.rollout.quantization"
    assert found.settings.get(key) == ("fp8" if found.framework == "verl" else None)
    assert any("FP8 RL" in page for page in found.documents) == (key in found.settings)
    notes = "; ".join(found.notes)
    assert (
        ("verl's block recipe" in notes)
        == (key in found.settings)
        != ("precision.weights=fp8-block" in notes)
    )
    assert (
        "precision.training=fp8: no setting here says so; set Megatron-Core's fp8 and fp8_recipe"
        in notes
    )
    assert found.settings.get("--expert-model-parallel-size") == experts
    assert ("training.expert_parallel=2: no setting of FSDP says so" in notes) == (experts is None)


MEGATRON = (
    "training.sharding=optimizer",
    "training.expert_parallel=8",
    "training.sequence_parallel=2",
)


@pytest.mark.parametrize(
    ("system", "config"),
    [
        ("verl_colocated", "ppo_megatron_trainer.yaml"),
        ("dapo", "dapo_megatron_trainer.yaml"),
        ("{name: one_step_off, rollout_share: 0.5}", "one_step_off_ppo_megatron_trainer.yaml"),
        ("{name: verl_fully_async, rollout_share: 0.5}", "fully_async_ppo_megatron_trainer.yaml"),
    ],
)
def test_training_sharded_as_megatrons_is_launched_with_megatrons_settings(file, system, config):
    found = experts_of(
        file, system, *MEGATRON, "training.tensor_parallel=2", "precision.training=fp8-block"
    )
    actor = "actor_rollout_ref.actor.megatron"
    sizes = {
        key: found.settings[f"{actor}.{key}_parallel_size"]
        for key in ("tensor_model", "context", "expert_model")
    }
    assert sizes == {"tensor_model": "2", "context": "2", "expert_model": "8"}
    assert (
        found.settings[f"{actor}.pipeline_model_parallel_size"]
        == found.settings[f"{actor}.expert_tensor_parallel_size"]
        == "1"
    )
    assert found.settings[f"+{actor}.override_transformer_config.fp8_recipe"] == "blockwise"
    assert found.settings[f"{actor}.override_transformer_config.recompute_granularity"] == "full"
    assert config in found.command[2 if "--config-path" in found.settings else 1]
    assert not any("ulysses" in key for key in found.settings) and not any(
        "no setting" in note for note in found.notes
    )


def test_areal_and_slime_have_megatrons_layout_in_their_own_words(file):
    areal = experts_of(file, "{name: areal, eta: 4, rollout_share: 0.5}", *MEGATRON).settings
    assert areal["actor.backend"] == "megatron:(attn:d8p1t1c2|ffn:d2p1t1e8)"
    sizes = [
        f"training.{key}_parallel={n}"
        for key, n in {"tensor": 2, "pipeline": 2, "sequence": 2, "expert": 4}.items()
    ]
    slime = experts_of(file, "split", MEGATRON[0], *sizes).settings
    keys = ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")
    assert [slime[f"--{key}-parallel-size"] for key in keys] == ["2", "2", "2", "4", "1"]


def test_parts_of_a_cluster_that_fill_whole_nodes_are_launched_on_whole_nodes_and_else_broken_groups_are_said(
    file,
):
    split = "{{name: one_step_off, rollout_share: {}}}"
    whole = experts_of(file, split.format(0.5), *MEGATRON)
    keys = [
        f"{part}.{key}" for part in ("rollout", "trainer") for key in ("nnodes", "n_gpus_per_node")
    ]
    assert [whole.settings[key] for key in keys] == ["2", "8", "2", "8"]
    assert not any("cross nodes" in note for note in whole.notes)
    small = (
        "training.sharding=optimizer",
        "training.expert_parallel=4",
        "training.sequence_parallel=2",
    )
    broken = experts_of(file, split.format(0.6875), *small, "cluster.gpus=64")
    assert [broken.settings[key] for key in keys] == ["11", "4", "4", "5"]
    (note,) = [note for note in broken.notes if "cross nodes" in note]
    assert note.startswith("training.expert_parallel=4 is more than the 5 train GPUs a node")


def test_a_split_cluster_is_told_as_parts_of_every_node(file):
    """verl: where both have as many nodes, and no more GPUs of each than a node has, they share the nodes."""
    system = "systems=[{name: one_step_off, rollout_share: 0.75}]"
    (scenario,) = load_scenarios(file, [system, "cluster.gpus=16"])
    settings = launch(prepare(scenario)).settings
    parts = [
        settings[f"{part}.{key}"]
        for part in ("rollout", "trainer")
        for key in ("nnodes", "n_gpus_per_node")
    ]
    assert parts == ["2", "6", "2", "2"]


def test_what_of_the_settings_may_be_wrong_elsewhere_is_said(file):
    """12 GPUs that roll out, 6 of each of two nodes, hold no whole workers of 4."""
    system = "systems=[{name: one_step_off, rollout_share: 0.75}]"
    (scenario,) = load_scenarios(file, [system, "cluster.gpus=16", "cluster.tp=4"])
    notes = launch(prepare(scenario)).notes
    assert "data.max_prompt_length=20 is the longest of the trace; yours may be longer" in notes
    assert any(
        note.startswith("rollout.n_gpus_per_node=6 GPUs a node are no multiple of tp 4")
        for note in notes
    )
    (scenario,) = load_scenarios(file, [system, "cluster.gpus=16", "cluster.tp=2"])
    assert not any("no multiple" in note for note in launch(prepare(scenario)).notes)


@pytest.mark.parametrize("system", ["rhymerl", "laminar", "{name: areal, speculation: siblings}"])
def test_what_no_framework_offers_says_so(file, system):
    (scenario,) = load_scenarios(file, [f"systems=[{system}]"])
    found = launch(prepare(scenario))
    assert isinstance(found, str) and "documentation" in found


def test_the_best_that_is_offered_is_named_with_its_rank(file):
    found = answered(
        file,
        "systems=laminar,one_step_off",
        "system.rollout_share=0.5",
        "cluster.tp=1",
        max_off_policyness=20,
    )
    if found.choice.option.system == "laminar":
        assert "Laminar" in found.launching.refused and found.launching.rank > 1
    assert (
        found.launching.option.system == "one_step_off"
        and found.launching.settings.framework == "verl"
    )


# The command.


@pytest.fixture
def command(simrl: CommandLine):
    (simrl.folder / "small.yaml").write_text(SCENARIO)
    return simrl


def test_the_command_prints_an_answer_that_fits_into_100_columns(command):
    code, out, err = command(
        "advise",
        "small.yaml",
        *FEW,
        "--polish",
        "0",
        "--jobs",
        "1",
        "-o",
        "out",
        "--details",
        "--robust",
    )
    assert code == 0, err
    assert max(len(line) for line in out.splitlines() if not line.endswith("\\")) <= 100
    heads = ["On 8 GPUs", "The search on", "The best few", "Why", "Pareto front", "What staleness", "What was searched",
             "To launch", "What this"]  # fmt: skip
    places = [out.index(f"\n{head}") for head in heads]
    assert places == sorted(places)
    assert "What can win was simulated again, 2 inputs 20 % off in turn" in out


def test_json_has_stable_keys_and_the_figures_of_the_search(command):
    code, out, _ = command(
        "advise", "small.yaml", *FEW, "--polish", "0", "--jobs", "1", "-o", "out", "--json"
    )
    (plan,) = json.loads(out)["clusters"]
    data = plan["optimization"]
    assert code == 0 and set(data) == {
        "name", "goal", "space", "notes", "points", "polished", "possible",
        "within_limits", "whole_space", "combinations", "left_out", "simulated_of_systems",
        "best", "front",
        "model_error", "robustness", "staleness_quality", "launch", "rests_on",
    }  # fmt: skip
    assert data["whole_space"] and data["points"] == 10
    assert any(
        line.startswith("Assumed seconds") and "training.load_overhead_s=1" in line
        for line in data["rests_on"]
    )
    best = data["best"][0]
    assert json.loads((command.folder / "out" / "advise.json").read_text()) == json.loads(out)
    assert best["rank"] == 1 and best["samples_per_s"] == max(
        choice["samples_per_s"] for choice in data["best"]
    )


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_simulated_and_the_same_command_goes_on(command):
    texts = (
        "systems=one_step_off,verl_colocated",
        "system.rollout_share=0.5",
        "cluster.tp=1",
        "steps=300,1000000",
    )
    process = command.start("advise", "small.yaml", *texts, "-o", "out", "--jobs", "2")
    started = time.monotonic()
    try:
        while len(list(command.folder.glob("out/points/*/*.json"))) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < started + PATIENCE_S
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (
        err == "simrl: interrupted; 2 points are kept in out; the same command goes on from there\n"
    )
    assert process.returncode == 1


@pytest.mark.parametrize(
    "arguments, what",
    [
        (["clutser.gpus=4"], "unknown key clutser"),
        (["systems=areall"], "system 'areall' is unknown"),
        (["system.etaa=1,2"], "system.etaa: no parameter of these systems"),
        (["cluster.gpus=4", "cluster.gpus=8"], "cluster.gpus is given twice"),
        (["--trials", "3"], "--trials 3: fewer than the 5 systems to report (--best)"),
        (["--updates", "10", "--deadline", "3"], "--deadline 3: give a number and its unit"),
        (
            ["--updates", "10", "--deadline", "3h", "--budget", "5"],
            "--deadline and --budget: give one of them",
        ),
        (
            ["cluster.cost_per_gpu_hour=0", "--max-cost", "1"],
            "--max-cost: cluster.cost_per_gpu_hour is 0",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(command, arguments, what):
    assert what in command.refuses("advise", "small.yaml", *arguments)


def test_a_space_without_a_choice_tells_why(command):
    code, out, err = command(
        "advise",
        "small.yaml",
        "systems=areal",
        "cluster.tp=3",
        "system.rollout_share=0.5",
        "--jobs",
        "1",
        "-o",
        "out",
    )
    assert (code, out) == (2, "")
    assert (
        "none of the 4 points that were tried can be: 4 × cluster.tp is 3: it does not divide the 8 GPUs"
        in err
    )
    few = (*FEW, "--polish", "0", "--max-cost", "0.0001")
    _, _, err = command("advise", "small.yaml", *few, "--jobs", "1", "-o", "out")
    reasons = err.partition("none of the 10 points that were tried can be: ")[2].split("; ")
    assert any(
        one.endswith("not settled when the simulation ended: simulate more steps (areal 5)")
        for one in reasons
    )
    assert any(" × limit: cost (" in one for one in reasons) and reasons[2].startswith(
        "the nearest"
    )
    assert " cost of 1,000 samples " in err


def test_judging_takes_the_row_as_it_is(file):
    (point, *_) = plan(vary(file, FEW), None, 0).points
    outcome = simulate_point(point, InputCache())
    assert judged(point, outcome, Goal(16.0)).merit == outcome["row"]["samples_per_s"]
