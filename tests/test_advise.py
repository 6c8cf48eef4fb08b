"""`simrl advise`: what is polished is the best of all, and a plan's hours are those of simulated runs."""

import json
from pathlib import Path

import pytest
from command_line import CommandLine

from simrl.scenario.load import ScenarioFile, load_scenarios
from simrl.simulate.cache import InputCache
from simrl.study.advice import growth_stages, whole_periods
from simrl.study.executors import Here
from simrl.study.goal import Goal
from simrl.study.grid import by_key
from simrl.study.point import Digests, make_point, simulate_point
from simrl.study.polish import polish
from simrl.study.search import search
from simrl.study.search_space import make_space
from simrl.study.splits import units, with_workers
from simrl.study.store import Outcomes

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
ALONE = ("cluster.tp=1", "system.speculation=none")
SPLITS = "system.rollout_share=0.125,0.25,0.375,0.5,0.625,0.75,0.875"
BOUND = {"max_off_policyness": 2}
SPACES = {  # small ones, that can be simulated whole
    "split and eta": (("systems=areal", SPLITS, "system.eta=1,2,4,8"), {}),
    "a bound that stale groups decide": (
        ("systems=areal", SPLITS, "system.eta=1,2,3", "system.on_stale=train,wait,drop"), BOUND
    ),
    "tp and dispatch": (
        ("systems=one_step_off", SPLITS, "cluster.tp=1,2,4", "system.dispatch=least_requests,round_robin,even_split"), {}
    ),
    "a slow trainer": (("systems=areal,one_step_off", SPLITS, "system.eta=1,4", "training.mfu=0.002"), {}),
    "concurrency": (("systems=areal", SPLITS, "system.eta=2,8", "system.max_concurrent=4,8,16,32"), {}),
    "staleness of weights": (
        ("systems=verl_fully_async", SPLITS, "system.staleness=0.1,0.5,1", "system.per_replica=1,4,16"), {}
    ),
}  # fmt: skip
SLOW = [pytest.param(name, marks=pytest.mark.slow if i > 1 else ()) for i, name in enumerate(SPACES)]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SCENARIO)
    return tmp_path / "small.yaml"


def space_of(file, *texts):
    return make_space(lambda settings: ScenarioFile(file, settings), by_key(texts))


def row_of(scenario):
    return simulate_point(make_point(scenario, Digests()), InputCache())["row"]


@pytest.mark.parametrize("name", SLOW)
def test_a_search_that_is_polished_is_within_two_per_cent_of_the_best_of_all(file, name):
    texts, limits = SPACES[name]
    fixed = [text for text in ALONE if not any(each.startswith(text.split("=")[0]) for each in texts)]
    names = {text.split("=")[0].removeprefix("system.") for text in texts}
    still = [f"system.{key}" for key in ("on_stale", "max_concurrent", "per_replica", "dispatch") if key not in names]
    space = space_of(file, *texts, *fixed)
    space = space.__class__(**{**space.__dict__, "named": space.named | {*still}})
    outcomes = Outcomes(Path("out"), Here())
    goal = Goal(space.batch_samples, **limits)
    found = search(space, goal, outcomes, 6, 0)
    assert not found.whole
    polish(space, goal, outcomes, found, 40)
    assert outcomes.simulated <= 46
    every = search(space, goal, outcomes, 1000, 0)
    assert every.whole and found.allowed[0].merit > 0.98 * every.allowed[0].merit


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
    assert all(row_of(each)["samples_per_s"] <= best.merit * 1.0011 for each in beside)


def test_a_point_that_has_not_settled_is_no_advice(file):
    scenario, row = (
        load_scenarios(file)[1],
        {"settled": False, "off_policyness_max": 1, "carried_off_policyness_max": 0},
    )
    (broken,) = Goal(16.0, settled=True).broken(scenario, row)
    assert broken.says == "had not settled after 6 updates" and broken.unsettled
    assert Goal(16.0).broken(scenario, row) == Goal(16.0, settled=True).broken(scenario, {**row, "settled": True}) == []


def test_a_window_has_whole_periods_of_checkpoints_and_evaluations(file):
    training = "training={checkpoint_every: 3, checkpoint_s: 5, evaluate_every: 10, evaluate_s: 20}"
    scenario, left_out = whole_periods(load_scenarios(file, [training])[0])
    assert (scenario.steps - scenario.warmup_steps, left_out) == (30, [])
    rare = "training={checkpoint_every: 500, checkpoint_s: 5}"
    scenario, left_out = whole_periods(load_scenarios(file, [rare])[0])
    assert scenario.steps == 6 and left_out == ["checkpoint: 5 s every 500 updates, too rare to be simulated"]


def test_growing_responses_are_simulated_at_the_beginning_the_middle_and_the_end(file):
    assert len(growth_stages(load_scenarios(file)[0])) == 1
    stages = growth_stages(load_scenarios(file, ["workload.synthetic.mean_tokens=[200,600]", "systems=[areal]"])[0])
    assert [stage.workload.synthetic.mean_tokens for stage in stages] == [(200, 200), (400, 400), (600, 600)]
    rates = [row_of(stage)["samples_per_s"] for stage in stages]
    assert rates[0] > rates[1] > rates[2]


@pytest.fixture
def command(simrl: CommandLine):
    (simrl.folder / "small.yaml").write_text(SCENARIO)
    return simrl


FEW = ("systems=verl_colocated,areal", "system.rollout_share=0.5,0.75", "system.eta=2", "cluster.tp=1")


def test_the_command_plans_the_run_of_each_cluster(command):
    few = ("--trials", "5", "--polish", "0", "--jobs", "1", "-o", "out")
    said = command("advise", "small.yaml", *FEW, "--clusters", "4,8", "--updates", "900", "--framework", "areal", *few)
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
    assert "± of samples/s: the farthest of three seeds" in text and "no validation (training.evaluate_every" in text
    assert "In AReaL:" in text or "in AReaL:" in text
    assert max(map(len, said.out.splitlines())) <= 110


def test_a_table_of_lengths_is_read_by_its_usual_columns(command):
    rows = [f"{step},{q},20,{100 + 7 * q + 13 * k}" for step in range(2) for q in range(4) for k in range(2)]
    (command.folder / "own.csv").write_text("\n".join(["iteration,question,in_len,out_len", *rows]))
    said = command("compare", "own.csv", "--model", "qwen3-0.6b", "--gpu", "h100", "--gpus", "4", "--profile", "roofline",
                   "--system", "verl_colocated", "--steps", "3", "--warmup-steps", "1", "-o", "out")  # fmt: skip
    assert said.code == 0, said.err
    assert (
        "own.csv: read with step=iteration, prompt_id=question, prompt_tokens=in_len, response_tokens=out_len"
        in said.err
    )


def test_the_folder_of_a_run_is_a_scenario(command):
    assert command("run", "small.yaml", "--system", "areal", "eta=2", "-o", "out").code == 0
    again = command("run", "out/areal-eta-2", "-o", "again")
    assert again.code == 0, again.err
    assert (command.folder / "again" / "areal-eta-2" / "steps.parquet").exists()


@pytest.mark.parametrize(
    "arguments, what",
    [
        (("--framework", "trl"), "--framework trl: unknown"),
        (("--clusters", "8,many"), "--clusters 8,many: give numbers of GPUs, such as 32,64,128"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(command, arguments, what):
    assert what in command.refuses("advise", "small.yaml", *arguments)
