"""`simrl advise`: what is polished is the best of all, and a plan's hours are those of simulated runs."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from simrl.errors import InputError
from simrl.scenario.load import load_scenarios
from simrl.show.tables.advise import print_advice, unsettled_lines
from simrl.study import advice, answer
from simrl.study.advice import advise, goal_on, growth_stages, whole_periods
from simrl.study.executors import Here
from simrl.study.goal import SETTLING, Broken, Goal, duration
from simrl.study.grid import value_of
from simrl.study.model_error import RATIO_ERROR
from simrl.study.polish import CHOICES, COUNTS, polish
from simrl.study.search import Option, Searched, search
from simrl.study.splits import units, with_workers
from simrl.study.store import Outcomes
from simrl.trace.trace import read_trace
from tests.command_line import CommandLine
from tests.study.test_answer import SCENARIO, simulated, space_of

ALONE = ("cluster.tp=1", "system.speculation=none")
SPLITS = "system.rollout_share=0.125,0.25,0.375,0.5,0.625,0.75,0.875"
FINER = "system.rollout_share=" + ",".join(str(n / 16) for n in range(1, 16))
GPUS = "cluster.gpus=16"
DISPATCH = "system.dispatch=least_requests,round_robin,even_split"
LONG_TAIL = "workload={synthetic: {steps: 6, prompts_per_step: 8, group: 2, cap_tokens: 8000, mean_tokens: 900, sigma: 1.3}}"
TURNS = (
    "workload={synthetic: {steps: 6, prompts_per_step: 8, group: 2, cap_tokens: 4000, mean_tokens: null, turns: 4, "
    "turn_tokens: 150, sigma: 0.5, "
    "tools: {read: {share: 1, median_s: 2, sigma: 0.8, least_s: 1, most_s: 20, observation_tokens: 200}}}}"
)
# Small ones, that can be simulated whole: a dense long tail, a bound of staleness, layouts of a worker, a slow trainer on which
# three systems are close, agents with tools, four GPUs of which some layouts have no room for the trainer.
SPACES = {
    "a long tail": ((LONG_TAIL, "systems=areal", SPLITS, "system.eta=0,1,4", "system.max_concurrent=4,8,16,32"), {}),
    "a bound that stale groups decide": (
        ("systems=areal", SPLITS, "system.eta=1,2,3", "system.on_stale=train,wait,drop", "system.max_concurrent=8,16"),
        {"max_off_policyness": 2},
    ),
    "tp and dispatch": (("systems=one_step_off", GPUS, FINER, "cluster.tp=1,2,4", DISPATCH), {}),
    "a slow trainer": (
        ("systems=verl_colocated,one_step_off,areal", SPLITS, "system.eta=1,2,4,8", DISPATCH, "training.mfu=0.002"), {}
    ),
    "agents": (
        (TURNS, "systems=verl_fully_async", SPLITS, "system.staleness=0.1,0.25,0.5,1", "system.per_replica=1,2,4,16"), {}
    ),
    "four large GPUs": (
        ("model=qwen3-8b", "cluster.gpus=4", "systems=areal,one_step_off,verl_fully_async", "cluster.tp=1,2,4",
         "system.rollout_share=0.25,0.5,0.75", "system.eta=0,1,2,4,8", "system.staleness=0.1,0.5,1", DISPATCH), {}
    ),
}  # fmt: skip


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SCENARIO)
    return tmp_path / "small.yaml"


@pytest.mark.parametrize("name", SPACES)
def test_a_search_of_a_third_of_a_space_is_within_two_per_cent_of_its_best_point(file, name):
    texts, limits = SPACES[name]
    fixed = [
        text for text in ALONE if not any(each.startswith(text.split("=")[0]) for each in texts)
    ]
    names = {text.split("=")[0] for text in texts}
    still = [key for name in (*CHOICES, *COUNTS) if (key := f"system.{name}") not in names]
    space = space_of(file, *texts, *fixed)
    space = replace(space, named=space.named | {*still})
    goal = Goal(space.batch_samples, **limits)
    every = search(space, goal, Outcomes(Path("every"), Here()), 1000, 0)
    assert every.whole
    third = len(every.options) // 3
    outcomes = Outcomes(Path("out"), Here())
    found = search(space, goal, outcomes, third // 3, 0)
    polish(space, goal, outcomes, found, third - third // 3)
    assert len(found.options) <= third
    # 27 points and 9 tries: one_step_off is 2.2 % behind verl_fully_async, whose bound was not tried.
    bar = 0.975 if name == "four large GPUs" else 0.98
    assert found.allowed[0].merit > bar * every.allowed[0].merit


def test_no_split_or_bound_beside_the_polished_one_is_better(file):
    space = space_of(file, "systems=areal", *ALONE)
    goal, outcomes = Goal(space.batch_samples), Outcomes(Path("out"), Here())
    found = search(space, goal, outcomes, 4, 0)
    assert polish(space, goal, outcomes, found, 200)
    best = found.options[0]
    scenario = best.point.scenario
    workers, _ = units(scenario)
    eta = scenario.system.parameters["eta"]
    beside = [with_workers(scenario, n) for n in (workers - 1, workers + 1) if 0 < n < 8]
    beside += [scenario.with_fields("system", eta=n) for n in (eta - 1, eta + 1) if n >= 0]
    assert all(simulated(each)["samples_per_s"] <= best.merit * 1.0011 for each in beside)


def test_split_and_bound_move_together_where_neither_gains_alone(file):
    """On a ridge: a worker less gains only with an update more of η."""
    space = space_of(file, "systems=areal", *ALONE)
    goal, outcomes = Goal(space.batch_samples), Outcomes(Path("out"), Here())
    found = search(space, goal, outcomes, 1, 0)
    start = found.options[0]
    place = units(start.point.scenario)[0], value_of(start.point.scenario, "system.eta")

    class Ridge(Here):
        def outcomes(self, points):
            for i, point in enumerate(points):
                fewer, more = (
                    place[0] - units(point.scenario)[0],
                    value_of(point.scenario, "system.eta") - place[1],
                )
                rate = start.merit * (1 + 0.03 * more - 0.2 * abs(more - fewer))
                yield i, {"row": {**start.row, "samples_per_s": rate}}

    assert polish(space, goal, Outcomes(Path("ridge"), Ridge()), found, 500)
    best = found.options[0]
    workers, eta = units(best.point.scenario)[0], value_of(best.point.scenario, "system.eta")
    assert workers == 1 and eta == place[1] + place[0] - 1


def test_concurrency_and_the_fate_of_stale_groups_move_together_where_neither_gains_alone(file):
    space = space_of(file, "systems=areal", *ALONE, "system.rollout_share=0.5", "system.eta=2",
                     "system.max_concurrent=8,16", "system.on_stale=train,drop")  # fmt: skip
    space = replace(space, named=space.named | {"system.max_concurrent", "system.dispatch"})
    goal, outcomes = Goal(space.batch_samples), Outcomes(Path("out"), Here())
    found = search(space, goal, outcomes, 1, 0)
    start = found.options[0]
    keys = ("system.max_concurrent", "system.on_stale")
    place = [value_of(start.point.scenario, key) for key in keys]

    class Corner(Here):
        def outcomes(self, points):
            for i, point in enumerate(points):
                moved = [value_of(point.scenario, key) for key in keys]
                apart = sum(a != b for a, b in zip(moved, place, strict=True))
                rate = start.merit * (1, 0.95, 1.1)[apart]
                yield i, {"row": {**start.row, "samples_per_s": rate}}

    assert polish(space, goal, Outcomes(Path("corner"), Corner()), found, 50)
    assert found.options[0].merit == pytest.approx(1.1 * start.merit)


def test_a_point_that_has_not_settled_is_no_advice(file):
    scenario, row = (
        load_scenarios(file)[1],
        {"settled": False, "off_policyness_max": 1, "carried_off_policyness_max": 0},
    )
    (broken,) = Goal(16.0, settled=True).broken(scenario, row)
    assert broken.says == "had not settled after 6 updates" and broken.unsettled
    assert (
        Goal(16.0).broken(scenario, row)
        == Goal(16.0, settled=True).broken(scenario, {**row, "settled": True})
        == []
    )


def test_a_window_has_whole_periods_of_checkpoints_and_evaluations(file):
    training = "training={checkpoint_every: 3, checkpoint_s: 5, evaluate_every: 10, evaluate_s: 20}"
    scenario, left_out = whole_periods(load_scenarios(file, [training])[0])
    assert (scenario.steps - scenario.warmup_steps, left_out) == (30, [])
    rare = "training={checkpoint_every: 500, checkpoint_s: 5}"
    scenario, left_out = whole_periods(load_scenarios(file, [rare])[0])
    assert scenario.steps == 6 and left_out == [
        "checkpoint: 5 s every 500 updates, too rare to be simulated"
    ]


def test_growing_responses_are_simulated_at_the_beginning_the_middle_and_the_end(file):
    assert len(growth_stages(load_scenarios(file)[0])) == 1
    stages = growth_stages(
        load_scenarios(file, ["workload.synthetic.mean_tokens=[200,600]", "systems=[areal]"])[0]
    )
    assert [stage.workload.synthetic.mean_tokens for stage in stages] == [
        (200, 200),
        (400, 400),
        (600, 600),
    ]
    rates = [simulated(stage)["samples_per_s"] for stage in stages]
    assert rates[0] > rates[1] > rates[2]


class Doubled(Here):
    """An executor that yields points in reverse, and gives an error for those that `fails` names."""

    def __init__(self, fails=lambda scenario: False):
        self._fails = fails

    def outcomes(self, points):
        for i, outcome in reversed([*super().outcomes(points)]):
            yield i, {"error": "no room for it"} if self._fails(points[i].scenario) else outcome


GROWING = (
    "systems=areal",
    "system.rollout_share=0.5",
    "system.eta=2",
    "workload.synthetic.mean_tokens=[200,600]",
)


def test_each_stage_and_seed_of_a_plan_has_its_own_row_in_whatever_order_they_end(file):
    space = space_of(file, *GROWING, *ALONE)
    (plan,) = advise(
        {8: (space, goal_on(space, 900))}, Outcomes(Path("out"), Doubled()), trials=1, robust=()
    ).plans
    stages = growth_stages(plan.option.point.scenario)
    rates = [simulated(stage)["samples_per_s"] for stage in stages]
    assert plan.stages == pytest.approx([space.batch_samples / rate for rate in rates])
    assert plan.stages[0] < plan.stages[1] < plan.stages[2]
    seeds = [stages[1].model_copy(update={"seed": 3 + i}) for i in (1, 2)]
    assert plan.spread == pytest.approx(
        max(abs(simulated(s)["samples_per_s"] / rates[1] - 1) for s in seeds)
    )


@pytest.mark.parametrize(
    "fails",
    [lambda s: s.workload.synthetic.mean_tokens == (600, 600), lambda s: s.workload.synthetic.mean_tokens == (200, 200),
     lambda s: s.seed == 5],
    ids=["the last stage", "the first stage", "a seed"],
)  # fmt: skip
def test_a_stage_or_seed_that_cannot_be_simulated_ends_the_plan_and_gives_its_place_to_no_other(
    file, fails
):
    space = space_of(file, *GROWING, *ALONE)
    with pytest.raises(
        InputError, match="the whole run of the choice cannot be simulated: no room for it"
    ):
        advise(
            {8: (space, goal_on(space, 900))},
            Outcomes(Path("out"), Doubled(fails)),
            trials=1,
            robust=(),
        )


@pytest.fixture
def command(simrl: CommandLine):
    (simrl.folder / "small.yaml").write_text(SCENARIO)
    return simrl


FEW = (
    "systems=verl_colocated,areal",
    "system.rollout_share=0.5,0.75",
    "system.eta=2",
    "cluster.tp=1",
)


def test_the_command_plans_the_run_of_each_cluster(command):
    few = ("--trials", "5", "--polish", "0", "--jobs", "1", "-o", "out")
    said = command(
        "advise",
        "small.yaml",
        *FEW,
        "--clusters",
        "4,8",
        "--updates",
        "900",
        "--framework",
        "areal",
        *few,
    )
    assert said.code == 0, said.err
    kept = json.loads((command.folder / "out" / "advise.json").read_text())
    assert [each["gpus"] for each in kept["clusters"]] == [4, 8]
    for plan in kept["clusters"]:
        assert plan["hours"] == pytest.approx(900 * 16 / plan["samples_per_s"] / 3600)
        assert plan["gpu_hours"] == pytest.approx(plan["hours"] * plan["gpus"])
        assert plan["cost"] == pytest.approx(2 * plan["gpu_hours"])
        assert plan["hours_low"] < plan["hours"] / 1.14 < plan["hours"] * 1.14 < plan["hours_high"]
        assert 0 < plan["memory"]["used"] < 1 and plan["memory"]["peak_sequences"] > 0
    text = " ".join(said.out.split())
    assert (
        "± of samples/s: the farthest of 3 seeds" in text
        and "no validation (training.evaluate_every" in text
    )
    assert "In AReaL:" in text or "in AReaL:" in text
    assert (
        max(len(line) for line in said.out.splitlines() if not line.endswith("\\")) <= 80
    )  # but for a command's
    once = "Not modelled: what stale tokens do", "Quality: AIME24", "simrl's own error: "
    assert all(text.count(each) == 1 for each in once)
    assert (
        len(
            said.out.partition("What this rests on")[2].partition("Written")[0].strip().splitlines()
        )
        <= 10
    )


def test_a_deadline_is_searched_on_all_clusters_at_once_and_met_at_the_lowest_cost(command):
    few = (
        "--trials",
        "9",
        "--best",
        "1",
        "--polish",
        "0",
        "--no-robust",
        "--jobs",
        "1",
        "-o",
        "out",
    )
    words = (
        "advise",
        "small.yaml",
        "systems=areal",
        *FEW[1:],
        "--clusters",
        "4,8",
        "--updates",
        "900",
        *few,
    )
    assert command(*words).code == 0
    each = json.loads((command.folder / "out" / "advise.json").read_text())["clusters"]
    hours, costs = ([plan[key] for plan in each] for key in ("hours", "cost"))
    assert hours[0] > hours[1]  # of 4 and of 8 GPUs
    for deadline_h, place in (
        (1.01 * hours[0], costs.index(min(costs))),
        ((hours[0] + hours[1]) / 2, 1),
    ):
        said = command(*words, "--deadline", f"{3600 * deadline_h:.0f}s")
        assert said.code == 0, said.err
        (plan,) = json.loads((command.folder / "out" / "advise.json").read_text())["clusters"]
        assert (plan["gpus"], plan["cost"]) == (
            each[place]["gpus"],
            pytest.approx(each[place]["cost"]),
        )
        goal = f"the lowest cost of 900 updates within {duration(round(3600 * deadline_h))}."
        assert f"Asked for: {goal}" in " ".join(said.out.split())
        assert "4/8 GPUs: points simulated" in said.err
    late = command(*words, "--deadline", "1s")
    assert (
        late.code == 2
        and "points that were tried can be: 4 × limit: deadline (areal 4); the nearest" in late.err
    )


@pytest.fixture(scope="module")
def offered(tmp_path_factory):
    """An advice whose choice AReaL does not have, its text, and the folder."""
    folder = tmp_path_factory.mktemp("offered")
    (folder / "small.yaml").write_text(SCENARIO)
    space = space_of(folder / "small.yaml", "systems=areal,one_step_off,verl_colocated", *ALONE,
                     "system.eta=2", "system.rollout_share=0.5,0.75")  # fmt: skip
    outcomes = Outcomes(folder / "out", Here())
    found = advise(
        {8: (space, goal_on(space, 900))},
        outcomes,
        trials=4,
        best=3,
        robust=("assumed",),
        framework="AReaL",
    )
    text = io.StringIO()
    print_advice(found, Console(file=text, width=100))
    return found, text.getvalue(), outcomes


def test_the_best_that_the_named_framework_offers_is_planned_as_the_choice_is(offered):
    found, text, _ = offered
    (plan,) = found.plans
    other = plan.offered
    assert plan.option.system != "areal" and other.option.system == "areal"
    assert other.hours == pytest.approx(900 * 16 / other.option.row["samples_per_s"] / 3600)
    assert other.gpu_hours == pytest.approx(8 * other.hours) and other.cost == pytest.approx(
        2 * other.gpu_hours
    )
    (row,) = [line for line in text.splitlines() if line.lstrip().startswith("in AReaL: ")]
    assert f"{other.option.row['samples_per_s']:.3g}" in row and duration(other.hours * 3600) in row
    assert found.as_json()["clusters"][0]["offered"]["hours"] == other.hours
    assert max(map(len, text.splitlines())) <= 100


def test_the_text_says_how_much_was_tried_and_what_staleness_cost_elsewhere(offered):
    found, text, _ = offered
    (plan,) = found.plans
    said, searched = " ".join(text.split()), plan.answer.searched
    assert (
        f"Tried: {searched.points} points of {searched.combinations} combinations; {len(searched.options)} are"
        in said
    )
    few = [name for name, count in searched.simulated(plan.answer.space).items() if count < 3]
    assert few and all(f"{name} (" in said.partition("hardly searched: ")[2] for name in few)
    assert (
        "AIME24 42.0 → 41.8 / 42.1" in said
        and "with η = 1" in said
        and "Not modelled: what stale tokens do" in said
    )
    wins = [end for end in plan.answer.robustness if end.winner is plan.option]
    assert wins
    for end in wins:
        beside = (
            "is level with" if end.lead < RATIO_ERROR else f"still wins, by {end.lead:.1%} over"
        )
        assert f"the choice {beside} {end.rival.row['system']} (tp 1)" in said
    assert "× as fast as " in said and f"Memory of {plan.option.row['system']}: " in said


def test_points_left_out_are_told_by_their_reason(file):
    unsettled = Broken(SETTLING, "had not settled", 0.1, unsettled=True)
    searched = Searched(
        [Option(SimpleNamespace(scenario=load_scenarios(file)[1]), {}, 1.0, (unsettled,))]
    )
    ((reason, count),) = searched.reasons()
    assert (reason, count) == (
        "not settled when the simulation ended: simulate more steps (one_step_off 1)",
        1,
    )
    assert list(unsettled_lines([searched])) == [
        "Not settled, so not ranked: one_step_off; more steps may rank it."
    ]
    searched.options.append(
        Option(searched.options[0].point, {}, 1.0, ())
    )  # another point of it counts
    assert list(unsettled_lines([searched])) == []


def test_a_second_call_finds_the_closing_runs_of_a_plan_in_the_folder(offered, monkeypatch):
    found, _, before = offered
    (plan,) = found.plans

    class Never(Here):
        def outcomes(self, points):
            raise AssertionError("simulated again")

    for module in (advice, answer):
        monkeypatch.setattr(module, "simulate_prepared", lambda *_: pytest.fail("simulated again"))
    space = plan.answer.space
    again = advise(
        {8: (space, goal_on(space, 900))}, Outcomes(before.folder, Never()),
        trials=4, best=3, robust=("assumed",), framework="AReaL",
    )  # fmt: skip
    assert again.plans[0].memory == plan.memory and again.rows == found.rows


def test_an_edited_figure_of_the_memory_is_simulated_again(offered):
    found, _, outcomes = offered
    (plan,) = found.plans
    option = plan.option.point.scenario
    stage = advice.growth_stages(advice.whole_periods(option)[0])[0]
    assert advice._memory(stage, outcomes) == plan.memory
    for kept in (outcomes.folder / "memory").glob("*.json"):
        kept.write_text(json.dumps({**json.loads(kept.read_text()), "peak_sequences": 999_999}))
    assert advice._memory(stage, outcomes) == plan.memory


def test_without_a_terminal_each_phase_of_each_cluster_has_a_line_with_its_size(command):
    few = (
        "systems=areal",
        "system.rollout_share=0.5",
        "system.eta=2",
        "cluster.tp=1",
        "system.speculation=none",
    )
    said = command(
        "advise",
        "small.yaml",
        *few,
        "--clusters",
        "4,8",
        "--polish",
        "2",
        "--jobs",
        "1",
        "-o",
        "out",
    )
    assert said.code == 0, said.err
    assert "2 clusters: at most 42 points a cluster" in said.err
    for gpus in (4, 8):
        for phase in (
            "points simulated, at most 40",
            "points polished, at most 2",
            "reasons of the best, at most 1",
        ):
            assert f"{gpus} GPUs: {phase}\n" in said.err


def test_a_table_of_lengths_is_read_by_its_usual_columns(command):
    rows = [
        f"{step},{q},20,{100 + 7 * q + 13 * k}"
        for step in range(2)
        for q in range(4)
        for k in range(2)
    ]
    (command.folder / "own.csv").write_text("\n".join(["iteration,question,in_len,out_len", *rows]))
    said = command("compare", "own.csv", "--model", "qwen3-0.6b", "--gpu", "h100", "--gpus", "4", "--profile", "roofline",
                   "--system", "verl_colocated", "--steps", "3", "--warmup-steps", "1", "-o", "out")  # fmt: skip
    assert said.code == 0, said.err
    assert (
        "own.csv: read with step=iteration, prompt_id=question, prompt_tokens=in_len, response_tokens=out_len"
        in said.err
    )


def test_a_table_without_prompts_is_referred_to_the_command_that_has_these_options(command):
    (command.folder / "own.csv").write_text("iteration,in_len,out_len\n1,20,100\n1,20,130\n")
    said = command("advise", "own.csv", "--model", "qwen3-0.6b", "--gpu", "h100", "--gpus", "4")
    assert said.code == 2 and "give --ungrouped to simrl trace import" in said.err


def own_run(folder):
    """A table of lengths whose longest, 400 tokens, is the cap, and the options of a cluster for it."""
    rows = [
        f"{step},{q},20,{40 + 7 * q + 113 * k}"
        for step in range(3)
        for q in range(4)
        for k in range(3)
    ]
    (folder / "own.csv").write_text(
        "\n".join(["iteration,question,in_len,out_len", *rows, "2,4,20,400"])
    )
    return ("own.csv", "systems=areal", "system.rollout_share=0.5", "system.eta=2", "--model", "qwen3-0.6b", "--gpu", "h100",
            "--gpus", "4", "--tp", "1", "--profile", "roofline", "--steps", "5", "--warmup-steps", "2",
            "--jobs", "1")  # fmt: skip


def test_clusters_alone_say_on_how_many_gpus_a_trace_is_planned(command):
    words = own_run(command.folder)
    at = words.index("--gpus")
    said = command(
        "advise", *words[:at], *words[at + 2 :], "--clusters", "2,4", "--polish", "0", "-o", "out"
    )
    assert said.code == 0, said.err
    plans = json.loads((command.folder / "out" / "advise.json").read_text())["clusters"]
    assert [plan["gpus"] for plan in plans] == [2, 4]


def test_responses_of_a_trace_grow_to_its_cap_and_the_choice_is_searched_in_the_middle(command):
    said = command(
        "advise", *own_run(command.folder), "--growth", "2", "--polish", "0", "-o", "out"
    )
    assert said.code == 0, said.err
    first, middle, last = (
        read_trace(command.folder / f"out/lengths/x{x}.parquet") for x in ("1", "1.5", "2")
    )
    lengths = [trace.column("response_tokens") for trace in (first, middle, last)]
    assert lengths[0].max() == 400 and (lengths[2] == np.minimum(2 * lengths[0], 400)).all()
    assert (lengths[1] == np.minimum(np.rint(1.5 * lengths[0]), 400)).all()
    (plan,) = json.loads((command.folder / "out" / "advise.json").read_text())["clusters"]
    stages = plan["stages_s"]
    assert stages[0] < stages[1] < stages[2]
    assert plan["hours"] == pytest.approx(500 * (stages[0] + 4 * stages[1] + stages[2]) / 6 / 3600)
    assert stages[1] == pytest.approx(37 / 3 / plan["samples_per_s"])
    text = " ".join(said.out.split())
    assert "no growth" not in text and "responses × 1.5 up to 400 tokens" in text
    still = command("advise", *own_run(command.folder), "--polish", "0", "-o", "still")
    assert (
        "no growth of responses (--growth 1.5, if they are 1.5 times as long at the end)"
        in " ".join(still.out.split())
    )


def test_growth_of_a_length_model_is_that_of_its_mean(command):
    few = (
        "systems=areal",
        "system.rollout_share=0.5",
        "system.eta=2",
        "cluster.tp=1",
        "--polish",
        "0",
        "--jobs",
        "1",
    )
    assert command("advise", "small.yaml", *few, "--growth", "2", "-o", "one").code == 0
    asked = (*few, "workload.synthetic.mean_tokens=[300,600]")
    assert command("advise", "small.yaml", *asked, "-o", "two").code == 0
    one, two = (
        json.loads((command.folder / name / "advise.json").read_text())["clusters"][0]
        for name in ("one", "two")
    )
    assert one["stages_s"] == two["stages_s"] and one["stages_s"][0] < one["stages_s"][2]
    assert "has growth of its own" in command.refuses(
        "advise", "small.yaml", *asked, "--growth", "2"
    )


def test_text_that_was_recorded_does_not_grow(command):
    trace = Path(__file__).parents[2] / "traces" / "countdown" / "sync" / "trace.parquet"
    options = (
        "--model",
        "qwen3-0.6b",
        "--gpu",
        "h100",
        "--gpus",
        "4",
        "--profile",
        "roofline",
        "--growth",
        "1.5",
    )
    assert "has response_ids, and nobody knows" in command.refuses("advise", str(trace), *options)


def test_the_folder_of_a_run_is_a_scenario(command):
    assert command("run", "small.yaml", "--system", "areal", "eta=2", "-o", "out").code == 0
    again = command("run", "out/areal-eta-2", "-o", "again")
    assert again.code == 0, again.err
    assert (command.folder / "again" / "areal-eta-2" / "steps.parquet").exists()


@pytest.mark.parametrize(
    "arguments, what",
    [
        (("--framework", "trl"), "--framework trl: unknown"),
        (
            ("--clusters", "8,many"),
            "--clusters '8,many': give numbers of GPUs with commas between, such as --clusters 32,64,128",
        ),
        (
            ("--clusters", "64,"),
            "--clusters '64,': nothing after a comma; give numbers of GPUs with commas between, such as",
        ),
        (
            ("--price", "2.5 $"),
            "invalid value for '--price': a number is needed, without a unit; did you mean 2.5?",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(command, arguments, what):
    assert what in command.refuses("advise", "small.yaml", *arguments)
