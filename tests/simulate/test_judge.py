"""Judges: reward models on GPUs of their own, or in turns with the rollout engines."""

from dataclasses import replace

import numpy as np
import pytest
import simpy
from hypothesis import given, strategies as st

from simrl.analysis.explanation import explain_result
from simrl.errors import InputError
from simrl.profile.profile import ProfileMetadata, TableProfile
from simrl.result.metrics import summary
from simrl.simulate.prepare import prepare
from simrl.simulate.run import Schedule, simulate, simulated_workers
from simrl.systems.recipes import RECIPES
from tests.conservation import assert_nothing_is_lost
from tests.helpers import ROOMY, examples, lanes, one_second_a_pass, prepared, rows, scenario, watch
from tests.references import judge as reference

JUDGE = {
    "model": "qwen3-0.6b",
    "gpus": 2,
    "prompt_tokens": 10,
    "response_tokens": 20,
    "response_sigma": 0.5,
    "response_cap_tokens": 100,
    "profile": {"roofline": {"between_passes_s": 0.01}},
}
TURNS = {key: value for key, value in JUDGE.items() if key != "gpus"}
IN_TURNS = [
    "verl_colocated",
    "split",
    "distflow",
    "dapo",
    "areal_sync",
    "seer",
    "verl_2x",
    "verl_ngram",
]


def judged(system="verl_colocated", judge=JUDGE, **changes):
    return scenario(system, judge=judge, **changes)


def assert_judged(watched, of_groups=False):
    """Every trained response was judged; the judge's tokens are in its spans alone."""
    result, judge = watched.result, watched.result.metadata["judge"]
    spans = [span for span in rows(result.spans) if span["kind"] == "judge"]
    trained = [row for row in rows(result.samples) if row["status"] == "trained"]
    assert judge["finished"] >= len(trained) // (2 if of_groups else 1)
    assert judge["finished"] <= judge["requests"] <= result.samples.num_rows
    assert judge["generated_tokens"] == sum(span["tokens"] for span in spans)
    assert judge["hit_tokens"] + judge["prefill_tokens"] >= 0
    policy = sum(
        span["tokens"] for span in rows(result.spans) if span["kind"] in ("rollout", "evaluate")
    )
    assert policy == sum(
        row["generated_tokens"] + row["duplicate_tokens"] for row in rows(result.samples)
    )


@pytest.mark.parametrize("system", list(RECIPES))
def test_every_system_works_with_a_judge_of_its_own_and_loses_nothing(system):
    watched = watch(prepared(judged(system)))
    assert_nothing_is_lost(watched)
    assert_judged(watched)
    gpus = {
        spans[0]["gpus"] for lane, spans in lanes(watched.result).items() if lane[:5] == "judge"
    }
    assert gpus == {1} and watched.result.metadata["gpus"] == sum(
        spans[0]["gpus"] for spans in lanes(watched.result).values()
    )


@pytest.mark.parametrize("per", ["response", "group"])
@pytest.mark.parametrize("system", IN_TURNS)
def test_systems_whose_batch_is_complete_take_turns_with_a_judge(system, per):
    watched = watch(prepared(judged(system, {**TURNS, "per": per})))
    assert_nothing_is_lost(watched)
    assert_judged(watched, per == "group")
    for lane, spans in lanes(watched.result).items():
        assert not lane.startswith("judge")
        kinds = [span["kind"] for span in spans]
        for i, kind in enumerate(kinds):
            if kind == "judge":
                assert "switch" in kinds[i - 2 : i] and "switch" in kinds[i + 1 : i + 3]


@pytest.mark.parametrize("judge", [JUDGE, TURNS], ids=["standalone", "colocated"])
def test_a_judged_run_repeats_byte_for_byte(judge):
    first, again = (simulate(judged(judge=judge)) for _ in range(2))
    assert first.metadata == again.metadata
    assert first.spans.equals(again.spans) and first.segments.equals(again.segments)


def test_the_policy_writes_what_it_writes_without_a_judge():
    plain, with_judge = (simulate(scenario("areal", judge=judge)) for judge in (None, JUDGE))
    lengths = [
        {row["uid"]: row["generated_tokens"] for row in rows(r.samples) if row["finished_s"]}
        for r in (plain, with_judge)
    ]
    both = lengths[0].keys() & lengths[1].keys()
    assert both and all(lengths[0][uid] == lengths[1][uid] for uid in both)
    assert "judge" not in plain.metadata


def test_a_judge_writes_of_a_sample_what_the_seed_and_the_sample_say():
    verdicts = [
        prepare(judged(system, seed=seed)).judge.trace.column("response_tokens").tolist()
        for system, seed in (("verl_colocated", 0), ("areal", 0), ("areal", 1))
    ]
    assert verdicts[0] == verdicts[1] != verdicts[2]
    assert len(set(verdicts[0])) > 1 and max(verdicts[0]) <= 100


def test_a_reward_model_only_prefills():
    ready = prepare(judged(judge={**JUDGE, "response_tokens": 0, "response_sigma": 0}))
    assert set(ready.judge.trace.column("response_tokens").tolist()) == {1}
    facts = simulate(ready.scenario).metadata["judge"]
    assert facts["generated_tokens"] == facts["requests"] == 24
    assert facts["lookup_tokens"] == int(ready.judge.trace.column("prompt_tokens").sum())


def test_a_request_of_a_group_has_all_its_responses():
    ready = prepare(judged(judge={**JUDGE, "per": "group"}))
    policy, judge = ready.trace, ready.judge.trace
    assert len(judge) == len(policy.group_starts) == 12
    read = np.add.reduceat(policy.column("response_tokens"), policy.group_starts)
    prompts = policy.column("prompt_tokens")[policy.group_starts]
    assert judge.column("prompt_tokens").tolist() == (10 + prompts + read).tolist()
    assert simulate(ready.scenario).metadata["judge"]["requests"] == 12


def scheduled(lengths, tokens, engines, pass_s, colocated):
    """Return a run of one update, the ends of its responses and of the requests to its judge, by uid, and the run as prepared.
    A pass of a rollout worker takes a second."""
    synthetic = {"steps": 1, "prompts_per_step": len(lengths), "group": 1, "cap_tokens": 200, "mean_tokens": 60,
                 "sigma": 0.8, "prompt_tokens": 20}  # fmt: skip
    config = scenario(
        steps=1,
        cluster={"gpu": "h100", "gpus": engines if colocated else 1, "tp": 1},
        workload={"synthetic": synthetic},
        judge=TURNS if colocated else {**JUDGE, "gpus": engines},
    )
    ready = prepare(config)
    about = ProfileMetadata(model="qwen3-0.6b", gpu="h100", tp=1, kind="assumed", source="a test")
    passes = [
        TableProfile(one_second_a_pass()._replace(dense_s=np.full(2, s)), about)
        for s in (1.0, pass_s)
    ]
    columns = [
        t.set_column(t.column_names.index("response_tokens"), "response_tokens", [np.int32(n)])
        for t, n in ((ready.trace.table, lengths), (ready.judge.trace.table, tokens))
    ]
    wide = ROOMY._replace(max_num_batched_tokens=10**6)
    judge = replace(
        ready.judge,
        profile=passes[1],
        limits=wide,
        trace=replace(ready.judge.trace, table=columns[1]),
    )
    trace = replace(ready.trace, table=columns[0])
    ready = replace(ready, profile=passes[0], limits=wide, trace=trace, judge=judge)
    schedule = Schedule(ready, simpy.Environment(), simulated_workers)
    schedule.run()
    policy = {r.sample.uid: r.finished_s for r in schedule.recorder.rollouts()}
    scores = {r.sample.uid: r.finished_s for r in schedule.rewarder._recorder.rollouts()}
    return schedule.result(), policy, scores, ready


distinct = st.lists(st.integers(1, 60), min_size=1, max_size=8, unique=True)


@given(distinct, st.data(), st.integers(1, 3))
@examples(30)
def test_a_standalone_judge_answers_when_the_reference_does(lengths, data, engines):
    tokens = [data.draw(st.integers(1, 60)) for _ in lengths]
    result, policy, scores, _ = scheduled(lengths, tokens, engines, 0.3701, colocated=False)
    ended = [(policy[uid], tokens[uid]) for uid in range(len(lengths))]
    expected = reference.standalone(ended, engines, 0.3701)
    assert scores == pytest.approx(expected, abs=1e-9)
    started_s = rows(result.steps)[0]["started_s"]
    assert started_s == pytest.approx(max(expected.values()) + 0.01, abs=1e-9)


@given(distinct, st.data(), st.integers(1, 3))
@examples(30)
def test_a_colocated_judge_takes_the_turn_of_the_reference(lengths, data, engines):
    tokens = [data.draw(st.integers(1, 60)) for _ in lengths]
    result, policy, _, ready = scheduled(lengths, tokens, engines, 0.3701, colocated=True)
    ended = [(policy[uid], tokens[uid]) for uid in range(len(lengths))]
    over_s = reference.colocated(ended, engines, 0.3701, ready.judge.costs.load_s)
    assert rows(result.steps)[0]["started_s"] == pytest.approx(over_s + 0.01, abs=1e-9)


def test_a_swap_moves_the_weights_of_both_sides_and_a_sleep_that_a_load_has_is_not_counted_twice():
    swaps = [
        prepare(judged(judge=TURNS, training={"rollout_offload": offload})).judge.costs.load_s
        for offload in (False, True)
    ]
    assert swaps[0] == pytest.approx(2 * swaps[1])
    assert swaps[1] > 0


@pytest.mark.parametrize(
    ("system", "judge", "changes", "words"),
    [
        ("areal", TURNS, {}, "responses of areal run while others are judged; give it judge.gpus"),
        ("one_step_off", TURNS, {}, "responses of one_step_off run while others are judged"),
        ("verl_colocated", {**TURNS, "gpu": "h200"}, {}, "judge.gpu and cost_per_gpu_hour are of GPUs of its own"),
        ("verl_colocated", {**JUDGE, "model": "qwen9"}, {}, "judge.model qwen9: no known name"),
        ("verl_colocated", {**JUDGE, "tp": 4}, {}, "judge.tp is 4: it does not divide its 2 GPUs"),
        ("verl_colocated", TURNS, {"cluster": {"gpu": "h100", "gpus": 4, "tp": 2}}, "use a multiple, or give it judge.gpus"),
        ("verl_colocated", TURNS, {"faults": [{"kind": "slow", "worker": 0, "factor": 2.0}]}, "faults"),
        ("tlt", TURNS, {}, "drafters that train on idle GPUs"),
        ("verl_colocated", {**JUDGE, "model": "qwen2.5-72b"}, {}, "judge qwen2.5-72b at tp 1 needs"),
        ("verl_colocated", {**JUDGE, "response_tokens": 200}, {}, "judge.response_tokens 200 cannot be reached"),
        ("verl_colocated", {**JUDGE, "engine": {"kv_cache_tokens": 64}}, {}, "requests to the judge: its longest sample"),
        ("verl_colocated", {**JUDGE, "gpu": "h200"}, {"cluster": {"gpu": "h100", "gpus": 4, "tp": 1, "cost_per_gpu_hour": 2}},
         "judge.cost_per_gpu_hour is missing: a h200 has another price than a h100"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_refused_in_a_line(system, judge, changes, words):
    with pytest.raises(InputError) as refused:
        prepare(judged(system, judge, **changes))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_judge_has_its_price_its_idle_time_and_its_part_of_the_gpu_hours():
    cluster = {"gpu": "h100", "gpus": 4, "tp": 1, "cost_per_gpu_hour": 2.0}
    result = simulate(
        judged(judge={**JUDGE, "gpu": "h200", "cost_per_gpu_hour": 5.0}, cluster=cluster)
    )
    row = summary(result, 0, 2.0)
    hours = row["gpu_hours_per_1k_samples"]
    assert row["gpus"] == 6
    assert row["cost_per_1k_samples"] == pytest.approx(hours * (4 * 2.0 + 2 * 5.0) / 6)
    of_judge = [span for span in rows(result.spans) if span["role"] == "judge"]
    times = {
        kind: sum(s["ended_s"] - s["started_s"] for s in of_judge if s["kind"] == kind)
        for kind in ("judge", "idle")
    }
    window = result.metadata["end_s"] == pytest.approx(rows(result.steps)[-1]["finished_s"])
    assert window and row["judge_idle"] == pytest.approx(times["idle"] / sum(times.values()))
    parts = explain_result(result).whole.gpu_s
    assert parts["judge"] == pytest.approx(times["judge"])
    assert parts["judge_idle"] == pytest.approx(times["idle"])
    assert row["train_idle"] == 0


@pytest.mark.parametrize("judge", [{**JUDGE, "gpus": 1}, TURNS], ids=["standalone", "colocated"])
def test_an_explanation_says_that_the_reward_model_is_the_bottleneck(judge):
    slow = {**judge, "response_tokens": 900, "response_sigma": 0, "response_cap_tokens": 1000}
    explained = explain_result(simulate(judged(judge=slow)))
    names = [finding.name for finding in explained.findings]
    assert "the reward model is the bottleneck" in names
    assert "qwen3-0.6b" in explained.judge
    assert explained.paths_s["judge"] > 0.5 * sum(explained.paths_s.values())


@pytest.mark.parametrize("judge", [JUDGE, TURNS], ids=["standalone", "colocated"])
def test_evaluations_are_not_judged(judge):
    watched = watch(prepared(judged(judge=judge, evaluation={"every": 1, "prompts": 2})))
    assert_nothing_is_lost(watched)
    assert_judged(watched)
    samples = rows(watched.result.samples)
    evaluated = sum(row["status"] == "evaluation" for row in samples)
    assert 0 < watched.result.metadata["judge"]["requests"] <= len(samples) - evaluated


def test_a_response_that_ends_at_its_prefill_worker_is_judged_once():
    short = {"steps": 3, "prompts_per_step": 4, "group": 2, "cap_tokens": 8, "mean_tokens": 3,
             "sigma": 1.5, "prompt_tokens": 20}  # fmt: skip
    cluster = {"gpu": "h100", "gpus": 3, "tp": 1, "prefill": {"gpus": 1}}
    watched = watch(prepared(judged(cluster=cluster, workload={"synthetic": short})))
    assert_judged(watched)
    assert any(row["generated_tokens"] == 1 for row in rows(watched.result.samples))


def test_a_critical_path_with_a_judge_has_its_score_before_the_reward_that_reads_it():
    explained = explain_result(simulate(judged(judge={**JUDGE, "gpus": 1})))
    links = explained.path.links
    assert {k.where for k in links if k.kind == "generate"} <= {
        f"rollout-{i:03d}" for i in range(4)
    }
    (i,) = [i for i, link in enumerate(links) if link.kind == "judge"]
    assert [link.kind for link in links[i : i + 2]] == ["judge", "reward"]
    assert links[i + 1].ended_s - links[i + 1].started_s == pytest.approx(0.01)


def test_a_judge_beside_a_pool_for_training_keeps_its_price_and_has_its_row():
    pools = {"gpu": "h100", "gpus": 2, "tp": 1, "cost_per_gpu_hour": 2.0,
             "train": {"gpus": 2, "cost_per_gpu_hour": 3.0}}  # fmt: skip
    dear = {**JUDGE, "gpu": "h200", "cost_per_gpu_hour": 5.0}
    result = simulate(judged("one_step_off", dear, cluster=pools))
    row = summary(result, 0, 2.0, 3.0)
    hours = row["gpu_hours_per_1k_samples"]
    assert row["cost_per_1k_samples"] == pytest.approx(hours * (2 * 2.0 + 2 * 3.0 + 2 * 5.0) / 6)
    shown = [
        (p.use, p.gpus, p.gpu, round(p.cost / p.gpu_hours, 9)) for p in explain_result(result).pools
    ]
    assert shown == [
        ("rollout", 2, "h100", 2.0),
        ("training", 2, "h100", 3.0),
        ("judge", 2, "h200", 5.0),
    ]
