"""What is said of a result: the critical path is made of what was recorded, findings name figures and remedies that exist."""

import json
import shlex
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from rich.console import Console

from simrl.analysis.critical_path import Paths
from simrl.analysis.explanation import diff_results, explain_result
from simrl.analysis.gpu_hours import PARTS
from simrl.errors import InputError
from simrl.result.metrics import summary
from simrl.result.result import Result, Work
from simrl.scenario.load import load_scenarios
from simrl.show.inputs import provenance, rests_on
from simrl.show.tables.explain import print_difference, print_explanation
from simrl.show.text import number, signed
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from tests.helpers import counted, rows, scenario, trace

EPOCHS = {
    "steps": 3,
    "prompts_per_step": 4,
    "group": 2,
    "cap_tokens": 200,
    "mean_tokens": 60,
    "sigma": 0.8,
}
EPOCHS |= {"prompt_tokens": 20, "prompts": 4}
SYSTEMS = (
    "verl_colocated",
    "one_step_off",
    "streamrl",
    "areal",
    "rhymerl",
    "tlt",
    "specactor",
    "seer",
    "laminar",
)


@cache
def run(name: str, **changes: float) -> Result:
    return simulate(
        scenario({"name": name, **changes}, workload={"synthetic": EPOCHS}, warmup_steps=1)
    )


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_critical_path_of_an_update_reaches_from_the_update_before_to_its_end_without_a_gap(
    name,
):
    result = run(name)
    paths = Paths(result)
    finished_s = [0.0, *result.steps.column("finished_s").to_pylist()]
    for step, (begin_s, end_s) in enumerate(pairwise(finished_s)):
        path = paths.of(step)
        assert (path.links[0].started_s, path.links[-1].ended_s) == (begin_s, end_s)
        assert all(
            b.started_s == pytest.approx(a.ended_s, abs=1e-8) for a, b in pairwise(path.links)
        )
        assert sum(path.seconds().values()) == pytest.approx(end_s - begin_s)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_link_of_a_path_is_in_the_tables(name):
    result = run(name)
    spans = {(s["lane"], s["kind"], s["ended_s"]) for s in rows(result.spans)}
    segments = {(f"rollout-{s['worker']:03d}", s["ended_s"]) for s in rows(result.segments)}
    paths = Paths(result)
    for step in range(result.steps.num_rows):
        for link in paths.of(step).links:
            if link.sample:
                assert (link.where, link.ended_s) in segments
            elif link.kind not in ("reward", "boundary", "environment", "unknown"):
                assert (link.where, link.kind, link.ended_s) in spans


def test_a_synchronous_step_waits_for_its_longest_response():
    watched = counted(
        "verl_colocated",
        {},
        trace([[[(4, 10), (4, 30)], [(4, 20), (4, 5)]]] * 2),
        2,
        load_s=10.0,
        reward_s=3.0,
    )
    path = Paths(watched.result).of(1)
    assert [link.kind for link in path.links[:3]] == ["load_weights", "generate", "reward"]
    longest = path.links[1]
    assert (longest.sample, longest.tokens) == ("0/1/0", 30)
    assert longest.ended_s - longest.started_s == pytest.approx(30, abs=1.1)
    assert path.seconds()["reward"] == pytest.approx(3.0)
    held_up, held_up_s = Paths(watched.result).held_up(1)
    assert [(s.sample, s.response_tokens) for s in held_up] == [
        ("0/1/0", 30),
        ("1/0/0", 20),
        ("0/0/0", 10),
        ("1/1/0", 5),
    ]
    assert [s.held_s for s in held_up[:3]] == pytest.approx([10.0, 10.0, 5.0])
    assert held_up_s == pytest.approx(sum(s.held_s for s in held_up))


def test_where_the_trainer_is_never_free_no_sample_holds_an_update_up():
    slow = {"mfu": 0.001, "log_prob_mfu": 0.001, "reward_s": 0.01}
    result = simulate(
        scenario("areal", training=slow, steps=4, warmup_steps=2, workload={"synthetic": EPOCHS})
    )
    explanation = explain_result(result)
    assert explanation.held_up_s == 0
    assert {link.kind for link in explanation.path.links} <= {
        "load_weights",
        "log_prob",
        "train",
        "publish",
    }


def found(name: str, **changes: object) -> dict[str, str]:
    """The signs that a small run shows, with the remedies."""
    config = {"workload": {"synthetic": EPOCHS}, "warmup_steps": 1, **changes}
    result = simulate(scenario(name, **config))
    return {finding.name: finding.remedy for finding in explain_result(result).findings}


def test_a_trainer_that_idles_starves_and_one_that_works_does_not():
    busy = {"mfu": 0.001, "log_prob_mfu": 0.001}
    assert "trainer starves" in found("areal")
    assert "trainer starves" not in found("areal", training=busy)


def test_a_bound_that_leaves_workers_idle_is_found_and_a_looser_one_is_the_remedy_unless_the_trainer_is_slow():
    slow = {"mfu": 0.001, "log_prob_mfu": 0.001}
    assert (
        "eta=1"
        in found({"name": "areal", "eta": 0}, training={"load_s": 0.01})["staleness bound binds"]
    )
    assert (
        "adapt_split_every=2"
        in found({"name": "areal", "eta": 1}, training=slow)["staleness bound binds"]
    )
    assert "staleness bound binds" not in found("verl_colocated", training=slow)
    assert "adapt_split_every=2" in found("one_step_off", training=slow)["staleness bound binds"]


def test_sync_is_found_where_it_is_on_the_path():
    assert "sync on the critical path" in found("verl_colocated", training={"load_s": 5.0})
    assert "sync on the critical path" not in found(
        "verl_colocated", training={"load_s": 0.0, "switch_s": 0.0}
    )


def test_a_weight_sync_that_loses_most_is_named_first_with_the_method_that_may_mend_it():
    slow = {"weight_sync": "broadcast", "weight_sync_tensor_s": 0.05}
    name, remedy = next(iter(found("areal", training=slow).items()))
    assert name == "sync on the critical path" and remedy.endswith(
        "--system areal training.weight_sync=reshard"
    )
    quick = found(
        "one_step_off", training={"weight_sync": "broadcast", "weight_sync_tensor_s": 0.0003}
    )
    assert list(quick)[-2:] == ["trainer starves", "sync on the critical path"], (
        "an idle trainer loses more"
    )
    best = found("areal", training={**slow, "weight_sync": "reshard"})["sync on the critical path"]
    assert "weight_sync" not in best, "the method is the fastest one already"


def test_preempted_caches_are_found_and_fewer_sequences_are_the_remedy():
    one = {"gpu": "h100", "gpus": 1, "tp": 1}
    remedy = found("verl_colocated", cluster=one, engine={"kv_cache_tokens": 240})[
        "KV cache preempted"
    ]
    assert "engine.max_num_seqs=" in remedy
    assert "KV cache preempted" not in found("verl_colocated", cluster=one)


def test_workers_that_are_done_early_are_found():
    one_long = trace([[[(4, 5)] * 3 + [(4, 400)]]] * 2)
    result = counted("verl_colocated", {}, one_long, steps=2, workers=4, load_s=0.0).result
    assert "early workers idle" in [finding.name for finding in explain_result(result).findings]
    even = counted(
        "verl_colocated", {}, trace([[[(4, 50)] * 4]] * 2), steps=2, workers=4, load_s=0.0
    ).result
    assert "early workers idle" not in [finding.name for finding in explain_result(even).findings]


def test_drafts_that_are_rejected_are_found_where_drafts_are_chains():
    assert "few drafts accepted" in found("verl_draft_model", speculation=acceptance(0.2))
    assert "few drafts accepted" not in found("verl_draft_model", speculation=acceptance(0.99))
    assert "few drafts accepted" not in found("tlt"), (
        "trees throw most of their tokens away by design"
    )


def acceptance(p: float) -> dict[str, object]:
    facts = {
        "by_position": [p],
        "spread": 0.0,
        "verification": "rejection_sampling",
        "kind": "assumed",
        "source": "a test",
    }
    return {"acceptance": {"qwen3-0.6b": facts, "qwen2.5-0.5b": facts, "eagle": facts}}


def test_every_finding_is_beyond_its_threshold_and_says_its_figure():
    slow = {"mfu": 0.001, "log_prob_mfu": 0.001, "load_s": 5.0}
    seen = 0
    for name in SYSTEMS:
        result = simulate(
            scenario(
                name, workload={"synthetic": EPOCHS}, training=slow, engine={"kv_cache_tokens": 280}
            )
        )
        for finding in explain_result(result).findings:
            seen += 1
            beyond = (
                finding.figure < finding.threshold
                if "few" in finding.name
                else finding.figure > finding.threshold
            )
            assert beyond
            figures = (
                f"{finding.figure:.0%}",
                f"{finding.figure:.1%}",
                f"{finding.figure:.2g} a sample",
            )
            assert any(figure in finding.says for figure in figures)
            assert finding.source
    assert seen > len(SYSTEMS)


def test_the_remedies_are_commands_that_simrl_takes(tmp_path):
    file = tmp_path / "scenario.yaml"
    base = scenario("areal", workload={"synthetic": EPOCHS}).model_dump(
        exclude={"system", "variant", "file"}, mode="json"
    )
    file.write_text(json.dumps({**base, "systems": ["areal"]}))
    slow = {"mfu": 0.001, "log_prob_mfu": 0.001, "load_s": 5.0}
    commands = set()
    for name in SYSTEMS:
        for training in ({}, slow):
            commands |= set(
                found(name, training=training, engine={"kv_cache_tokens": 280}).values()
            )
    assert len(commands) > 5
    for command in commands:
        simrl, verb, where, *rest = shlex.split(command)
        assert (simrl, verb) in (("simrl", "run"), ("simrl", "compare"), ("simrl", "allocate"))
        if verb == "run":
            assert where == "SCENARIO"
            assert rest[0] == "--system"
            for made in load_scenarios(file, rest[2:], rest[1]):
                prepare(made)
        elif verb == "compare":
            names = [value for option, value in pairwise(rest) if option == "--pipeline"]
            for name in names:
                prepare(load_scenarios(file, [], name)[0])


def test_a_difference_is_that_of_the_throughputs_and_its_parts_sum_to_it():
    a, b = run("verl_colocated"), run("areal")
    d = diff_results(a, b)
    rates = [summary(each, 1)["samples_per_s"] for each in (a, b)]
    assert d.a_gpu_s == pytest.approx(d.a_gpus / rates[0])
    assert d.a_gpu_s / d.b_gpu_s == pytest.approx(rates[1] / rates[0] * d.a_gpus / d.b_gpus)
    assert sum(change.saved_gpu_s for change in d.changes) == pytest.approx(d.a_gpu_s - d.b_gpu_s)
    sizes = [abs(change.saved_gpu_s) for change in d.changes]
    assert sizes == sorted(sizes, reverse=True)
    back = diff_results(b, a)
    assert [c.saved_gpu_s for c in back.changes] == pytest.approx(
        [-c.saved_gpu_s for c in d.changes]
    )


def test_a_run_does_not_differ_from_itself_and_other_workloads_are_cautioned_about():
    same = diff_results(run("areal"), run("areal"))
    assert not any(change.saved_gpu_s for change in same.changes)
    assert same.cautions == ()
    other = simulate(
        scenario(
            "areal", seed=5, workload={"synthetic": {**EPOCHS, "mean_tokens": 20}}, warmup_steps=1
        )
    )
    cautions = diff_results(run("areal"), other).cautions
    assert any("workload" in caution for caution in cautions)
    assert any("seed: 0 and 5" in caution for caution in cautions)


def test_beside_a_real_run_a_simulated_one_is_divided_no_further_than_that():
    simulated = run("areal")
    real = without_work(simulated)
    d = diff_results(simulated, real)
    changes = {change.part: change for change in d.changes}
    assert "small_batches" not in changes
    assert abs(changes["undivided"].saved_gpu_s) < 0.05 * d.a_gpu_s
    assert d.a_gpu_s == pytest.approx(d.b_gpu_s)


def without_work(result: Result) -> Result:
    """As an engine records it that does not tell what its passes went to."""
    spans = result.spans.drop_columns([*Work._fields])
    return Result(spans, result.steps, result.samples, result.segments, result.metadata)


def test_both_fit_on_a_narrow_screen_and_sum_to_their_last_line():
    console = Console(width=80, highlight=False, markup=False)
    with console.capture() as capture:
        print_explanation(explain_result(run("areal")), console)
        print_difference(diff_results(run("verl_colocated"), run("areal")), console)
    lines = capture.get().splitlines()
    assert all(len(line.rstrip()) <= 80 or "Try:" in line for line in lines)
    text = "\n".join(lines)
    assert "an ideal run" in text
    assert "B takes" in text
    assert "100.0%" in text


def test_the_plan_of_specactor_is_in_the_explanation_and_beneath_results():
    """First drafter, drafting GPUs, verifier, window: what the ladder and Algorithm 1 have chosen."""
    models = ("qwen2.5-0.5b", "qwen2.5-1.5b")
    ahead, in_turns = run("specactor", drafters=models), run("specactor", decoupled=False)
    plan = ahead.metadata["speculation"]["plan"]
    first = ahead.metadata["speculation"]["first_drafter"]
    words = explain_result(ahead).drafting
    assert words == (
        f"first drafter {first} (of {', '.join(models)}), {plan['draft_gpus']} drafter GPU beside each "
        f"verifier of 1 GPU, windows of {plan['window']}"
    )
    assert explain_result(in_turns).drafting == (
        "first drafter ngram (of ngram, qwen2.5-0.5b, qwen2.5-1.5b), in turns with each verifier of 1 GPU, on its GPUs"
    )
    assert explain_result(run("tlt")).drafting is None
    for lines in (provenance([ahead.metadata]), rests_on([ahead.metadata])):
        assert f"SpecActor: {words}" in lines
    assert any(
        line.startswith(f"Drafts: specactor with {first}, ")
        for line in provenance([ahead.metadata])
    )


def test_a_part_of_a_run_that_would_be_0_gpu_hours_makes_all_of_them_gpu_seconds():
    explanation = explain_result(run("specactor"))
    longer = replace(explanation.whole, end_s=1e3 * explanation.whole.end_s)
    parts = dict.fromkeys(PARTS, 0.0) | {"decode": longer.total_gpu_s, "load_drafter": 0.1}
    steady = replace(explanation.steady, gpu_s=parts)
    shown = {}
    for load_s in (0.1, 3600.0):
        whole = replace(longer, gpu_s=parts | {"load_drafter": load_s})
        console = Console(width=80, highlight=False, markup=False)
        with console.capture() as capture:
            print_explanation(replace(explanation, whole=whole, steady=steady), console)
        shown[load_s] = capture.get()
    assert "GPU-s   share" in shown[0.1] and "GPU-hours   share" in shown[3600.0]


def test_numbers_have_three_digits_and_differences_their_sign():
    assert [number(x) for x in (0.0, 0.012345, 1.2345, 1234.5)] == ["0", "0.0123", "1.23", "1,234"]
    assert [signed(x) for x in (0.0, 2.0, -2.0)] == ["0", "+2.00", "-2.00"]


def test_a_run_without_an_update_and_an_update_that_is_not_there_are_refused():
    with pytest.raises(InputError, match=r"--step 9: the run has updates 0 to 2"):
        explain_result(run("areal"), 9)
    result = run("areal")
    empty = Result(
        result.spans, result.steps.slice(0, 0), result.samples, result.segments, result.metadata
    )
    with pytest.raises(InputError, match="made no policy update"):
        explain_result(empty)


def test_the_command_explains_a_run_and_says_in_a_line_what_it_cannot_read(simrl):
    assert simrl("compare", "scenario.yaml", "-o", "out").code == 0
    data = json.loads(simrl("explain", "out/verl-colocated", "--json").out)
    assert sum(part["gpu_s"] for part in data["parts"]) == pytest.approx(data["gpu_s"], rel=1e-9)
    assert {part["part"] for part in data["parts"]} <= set(PARTS)
    assert "Critical path of update" in simrl("explain", "out/areal-eta-2", "--step", "0").out
    assert "B takes" in simrl("diff", "out/verl-colocated", "out/areal-eta-2").out
    assert json.loads(simrl("diff", "out/verl-colocated", "out/areal-eta-2", "--json").out)[
        "changes"
    ]
    assert "out: has 2 results; name one of them, such as out/areal-eta-2" in simrl.refuses(
        "explain", "out"
    )
    assert "nowhere: not a result folder" in simrl.refuses("explain", "nowhere")
    assert "--step 7: the run has updates 0 to 1" in simrl.refuses(
        "explain", "out/areal-eta-2", "--step", "7"
    )
    simrl("run", "scenario.yaml", "--system", "areal", "-o", "one")
    assert simrl("explain", "one").code == 0, "a folder with one result stands for it"
