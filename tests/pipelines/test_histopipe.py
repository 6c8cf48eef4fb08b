"""HistoPipe (RhymeRL §6): who gets which prompts, whose weights a token comes from, and where outliers go."""

from collections import defaultdict
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.pipelines import histopipe
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import ProfileMetadata, TableProfile
from simrl.profile.rollout_times import RolloutTimes
from simrl.runtime.worker import WorkerCosts
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.trace.trace import Trace, TraceMetadata
from tests.helpers import (
    ROOMY,
    examples,
    on_gpus,
    one_second_a_pass,
    prepared,
    rows,
    scenario,
    watch,
)
from tests.token_traces import trace_of

ABLATIONS = [
    {},
    {"histopipe": False},
    {"two_tier": False},
    {"two_tier": False, "ranking_groups": None},
    {"migration": False},
    {"alternation": "pairing"},
    {"alternation": "none", "representative": "medians"},
    {"weight_buffer": False},
    {"ranking_groups": 2, "alpha": 0.5, "least_beta": 1.0},
]
PROFILE = TableProfile(
    one_second_a_pass(),
    ProfileMetadata(model="qwen3-0.6b", gpu="h100", tp=1, kind="assumed", source="a test"),
)


def epochs(*lengths: list[list[list[int | list[int]]]]) -> Trace:
    """A trace from response lengths, nested as epochs, steps, prompts; a prompt has the same place in every epoch and one
    response, or those of a list. Prompts have 4 tokens."""
    found = []
    step = 0
    for epoch, steps in enumerate(lengths):
        prompt = 0
        for prompts in steps:
            for tokens in prompts:
                group = tokens if isinstance(tokens, list) else [tokens]
                found += [
                    (step, epoch, prompt, sample, 4, each) for sample, each in enumerate(group)
                ]
                prompt += 1
            step += 1
    names = ("step", "epoch", "prompt_id", "sample", "prompt_tokens", "response_tokens")
    metadata = TraceMetadata(
        name="test", kind="synthetic", source="a test", tokenizer="none", cap_tokens=4096
    )
    return Trace.from_columns(
        dict(zip(names, map(list, zip(*found, strict=True)), strict=True)), metadata
    )


def timed(trace: Trace, steps: int, workers: int = 2, **parameters):
    """A pass takes a second and gives a token, a load ten, an update a hundred, a reward nothing; else hardly anything does."""
    config = on_gpus(
        "rhymerl",
        {"two_tier": False, "log_probs": 0, "speculation": "none", **parameters},
        workers,
        steps=steps,
        training={"mfu": 1.0, "publish_s": 100.0, "reward_s": 0.0, "load_overhead_s": 10.0},
    )
    return watch(prepared(config, trace, limits=ROOMY, costs=WorkerCosts(10.0), profile=PROFILE))


def stays(watched) -> dict[int, list[tuple]]:
    """(worker, policy_version, tokens, start, end) of each sample's segments."""
    found = defaultdict(list)
    for s in rows(watched.result.segments):
        found[s["uid"]].append(
            (s["worker"], s["policy_version"], s["tokens"], s["started_s"], s["ended_s"])
        )
    return dict(found)


def worker_of(watched) -> dict[tuple[int, int], int]:
    """(trace step, prompt) → the worker it began at."""
    place, found = stays(watched), {}
    for r in rows(watched.result.samples):
        if r["uid"] in place:
            found.setdefault((r["trace_step"], r["prompt_id"]), place[r["uid"]][0][0])
    return found


TWO_STEPS = [[40, 10, 30, 20], [10, 40, 20, 30]]


def test_without_history_the_first_epoch_is_cut_into_contiguous_parts():
    places = worker_of(timed(epochs(TWO_STEPS, TWO_STEPS), 4))
    assert [places[0, prompt] for prompt in range(4)] == [0, 0, 1, 1]
    assert [places[1, prompt] for prompt in range(4, 8)] == [0, 0, 1, 1]


def test_from_the_second_epoch_on_short_and_long_prompts_alternate_between_the_ends_of_the_workers():
    places = worker_of(timed(epochs(TWO_STEPS, TWO_STEPS), 4))
    # Step 2, even: ascending. Prompts 1 and 3 are the short ones. Step 3, odd: descending; 4 and 6 are short.
    assert [places[2, prompt] for prompt in range(4)] == [1, 0, 1, 0]
    assert [places[3, prompt] for prompt in range(4, 8)] == [1, 0, 1, 0]


def test_without_alternation_the_short_prompts_stay_at_one_end_of_the_workers():
    places = worker_of(timed(epochs(TWO_STEPS, TWO_STEPS), 4, alternation="none"))
    assert [places[2, prompt] for prompt in range(4)] == [1, 0, 1, 0]
    assert [places[3, prompt] for prompt in range(4, 8)] == [0, 1, 0, 1]


def test_without_weight_buffers_all_workers_begin_a_step_together_and_load_over_the_link():
    trace = epochs([[5, 50], [50, 5], [5, 5]])
    place = stays(timed(trace, 3, weight_buffer=False))
    # Worker 0 has ended its part of step 0 at 5, and waits for worker 1, which ends at 50. Both end step 1 by 100; version 1 is
    # published at 150.
    assert [place[uid][0][3] for uid in range(4)] == [0.0, 0.0, 50.0, 50.0]
    assert [place[uid][0][3] for uid in (4, 5)] == [pytest.approx(160, abs=0.1)] * 2
    loads = [
        prepare(on_gpus("rhymerl", {"weight_buffer": on}, 2)).costs.load_s for on in (True, False)
    ]
    hardware = gpu("h100")
    held = model_shape("qwen3-0.6b").weight_bytes
    assert loads[0] - loads[1] == pytest.approx(
        held / hardware.host_bytes_per_s - held / hardware.link_bytes_per_s
    )


def test_a_workers_batch_of_96_takes_what_was_predicted_for_it():
    # Of a real profile; lengths as in the epoch before. Predicted from mean lengths it was half of what the engine takes.
    lengths = {
        "steps": 2,
        "prompts_per_step": 24,
        "group": 16,
        "cap_tokens": 2048,
        "mean_tokens": 800,
        "sigma": 0.9,
    }
    config = scenario(
        {"name": "rhymerl", "rollout_share": 0.5, "speculation": "none", "migration": False},
        steps=6,
        model="qwen3-14b",
        cluster={"gpu": "h100", "gpus": 16, "tp": 2},
        workload={"synthetic": {**lengths, "prompt_share": 0.6}},
        profile={"path": "profiles/qwen3-14b_h100_tp2.parquet"},
    )
    begun, begin = [], histopipe._Steps._begin

    def begins(steps, step, worker):
        begun.append(
            (
                worker,
                steps._run.env.now,
                step.plans[0].predicted_s[worker],
                len(step.plans[0].parts[worker]),
            )
        )
        begin(steps, step, worker)

    with patch.object(histopipe._Steps, "_begin", begins):
        segments = rows(simulate(config).segments)
    ranked = [one for one in begun if one[2]]
    for worker, at_s, predicted_s, samples in ranked[: len(ranked) // 2]:
        later = [other[1] for other in begun if other[0] == worker and other[1] > at_s]
        ends = [
            s["ended_s"]
            for s in segments
            if s["worker"] == worker and at_s <= s["started_s"] < min(later)
        ]
        assert samples == 96
        assert predicted_s == pytest.approx(max(ends) - at_s, rel=0.1)


def test_the_drafts_of_a_ranking_group_enter_its_predicted_time():
    # Only the short prompt has the same tokens in each epoch, so drafts help it alone.
    rng = np.random.default_rng(0)
    same, draws = list(range(40)), [rng.integers(100, 10_000, 60).tolist() for _ in range(4)]
    groups = {(epoch, 0): [same] for epoch in range(4)} | {
        (epoch, 1): [draws[epoch]] for epoch in range(4)
    }
    asked, table = [], RolloutTimes.table

    def tables(times, lengths, samples, most, drafted, together):
        asked.append(drafted)
        return table(times, lengths, samples, most, drafted, together)

    with patch.object(RolloutTimes, "table", tables):
        timed(trace_of(groups), 4, speculation={"name": "histospec", "gate": "open"})
    # Of step 3, when those of step 2 are known: group 0 is the short prompt.
    short, long = asked[-1]
    assert short.tokens > 3 and short.drafted > 2
    assert long.tokens == 1.0


def test_a_worker_begins_its_next_part_without_waiting_for_the_others():
    watched = timed(epochs([[5, 50], [50, 5], [5, 5]]), 3)
    place = stays(watched)
    # Version 0 may still roll out step 1: worker 0 goes on at 5, worker 1 at 50. Step 2 needs version 1, published at 150;
    # each loads it (160) and goes on.
    assert [place[uid][0][3] for uid in range(4)] == [0.0, 0.0, 5.0, 50.0]
    assert place[2] == [(0, 0, 50, 5.0, 55.0)]
    assert [place[uid][0][1] for uid in (4, 5)] == [1, 1]
    assert [place[uid][0][3] for uid in (4, 5)] == [pytest.approx(160, abs=0.1)] * 2
    assert [u["finished_s"] for u in rows(watched.result.steps)] == [
        pytest.approx(t, abs=0.1) for t in (150, 250, 350)
    ]


def test_a_worker_takes_the_newest_weights_when_it_begins_and_keeps_them_to_the_end_of_its_part():
    watched = timed(epochs([[5, 5], [5, 300], [5, 5], [5, 5]]), 4)
    place = stays(watched)
    # Step 0 ends at 5 and is published at 105; by then both are in step 1, worker 1 until 305, which is published at 405.
    assert [segment[:3] for segment in place[3]] == [(1, 0, 300)]
    # Worker 0 began step 2 at 115 under version 1 and waits for version 2 before step 3. Worker 1 begins step 2 at 305.
    assert [place[uid][0][1] for uid in (4, 5, 6, 7)] == [1, 1, 2, 2]


def test_an_outlier_moves_to_the_worker_of_a_longer_group_with_its_tokens():
    # In the second epoch prompt 1, the shortest so far, is an outlier: of 10 tokens in its history, β = 1.1, it has 60.
    watched = timed(epochs([[100, 10], [100, 100]], [[100, 60], [100, 100]]), 4, alpha=1.0)
    uid = next(
        r["uid"]
        for r in rows(watched.result.samples)
        if (r["trace_step"], r["prompt_id"]) == (2, 1)
    )
    first, second = stays(watched)[uid]
    # It is told at its 12th token, the first beyond 1.1 × 10, and the abort takes effect one pass later.
    assert (first[0], first[2]) == (0, 13)
    assert (second[0], second[2]) == (1, 47)
    assert second[3] == pytest.approx(first[4], abs=1.0)
    assert max(u["carried_tokens"] for u in rows(watched.result.steps)) == 0


def test_outliers_are_measured_by_the_median_of_each_prompts_history_as_prompts_are_ranked():
    # Of prompt 1, the shortest group, the history has a median of 10 tokens, and one response of 90.
    history, now = [[100, 100, 100], [8, 10, 90]], [[100, 100, 100], [9, 10, 60]]
    others = [[100, 100, 100], [100, 100, 100]]
    watched = timed(epochs([history, others], [now, others]), 4, alpha=1.0)
    samples = rows(watched.result.samples)
    [uid] = [
        r["uid"] for r in samples if (r["trace_step"], r["prompt_id"], r["uid"] % 3) == (2, 1, 2)
    ]
    assert [(worker, tokens) for worker, _, tokens, _, _ in stays(watched)[uid]] == [
        (0, 13),
        (1, 47),
    ]


def test_an_outlier_moves_to_a_longer_group_also_when_that_should_have_ended_long_ago():
    # In the third step, prompt 1 is thought to be longer than prompt 0, 100 against 10 tokens, and prompt 0 turns out to be an
    # outlier; in the second run only when prompt 1 should have ended already, but has not.
    watched = timed(
        epochs([[10, 100], [150, 150]], [[200, 105], [150, 150]]), 3, alpha=1.0, least_beta=5.0
    )
    segments = stays(watched)[4]
    assert (segments[0][0], segments[0][2]) == (0, 52)  # beyond 5 × 10 at its 51st token
    assert segments[1][0] == 1
    later = timed(
        epochs([[10, 100], [150, 150]], [[200, 900], [150, 150]]), 3, alpha=1.0, least_beta=15.0
    )
    segments = stays(later)[4]
    assert (segments[0][0], segments[0][2]) == (
        0,
        152,
    )  # at 151 tokens, 51 s after prompt 1 was thought to end
    assert segments[1][0] == 1


def test_an_outlier_of_the_longest_group_goes_on_in_the_next_step_and_its_tokens_are_counted_apart():
    watched = timed(epochs([[10, 100], [10, 100]], [[10, 300], [10, 100]]), 4, alpha=1.0)
    samples = {(r["trace_step"], r["prompt_id"]): r for r in rows(watched.result.samples)}
    outlier = samples[2, 1]
    assert (outlier["trained_step"], samples[2, 0]["trained_step"]) == (3, 2)
    first, second = stays(watched)[outlier["uid"]]
    assert first[2] == 112  # told at 111, the first beyond 1.1 × 100, aborted a pass later
    assert second[2] == 188
    updates = rows(watched.result.steps)
    assert [u["samples"] for u in updates] == [2, 2, 1, 3]
    assert [u["carried_tokens"] for u in updates] == [0, 0, 0, 112]
    assert updates[3]["carried_off_policyness_max"] == 3 - first[1]
    assert updates[3]["off_policyness_max"] <= 1
    oldest = max(max(u["off_policyness_max"], u["carried_off_policyness_max"]) for u in updates)
    assert oldest == watched.prepared.system.off_policyness == 2


def test_nothing_migrates_unless_it_is_among_the_last_of_its_group():
    # α = 10 % of one sample a group is none.
    watched = timed(epochs([[100, 10]], [[100, 60]]), 2, alpha=0.1)
    assert all(len(segments) == 1 for segments in stays(watched).values())
    assert all(
        len(s) == 1
        for s in stays(
            timed(epochs([[100, 10]], [[100, 60]]), 2, alpha=1.0, migration=False)
        ).values()
    )


lengths = st.lists(st.integers(1, 80), min_size=6, max_size=6)


@pytest.mark.parametrize("parameters", ABLATIONS, ids=str)
@examples(15)
@given(st.lists(st.tuples(lengths, lengths), min_size=2, max_size=3), st.integers(1, 4))
def test_every_token_is_at_most_one_version_old_or_was_carried(parameters, drawn, workers):
    watched = timed(
        epochs(*[[list(a), list(b)] for a, b in drawn]), 2 * len(drawn), workers, **parameters
    )
    updates = rows(watched.result.steps)
    assert max(u["off_policyness_max"] for u in updates) <= 1
    assert (
        max(u["carried_off_policyness_max"] for u in updates)
        <= watched.prepared.system.off_policyness
    )
    trained = [r for r in rows(watched.result.samples) if r["status"] == "trained"]
    # A step trains its own samples, but for those that were carried over from the one before.
    late = [r for r in trained if r["trained_step"] != r["trace_step"]]
    assert all(r["trained_step"] == r["trace_step"] + 1 for r in late)
    assert sum(u["carried_tokens"] for u in updates) >= len(late)
    assert bool(late) == any(u["carried_tokens"] for u in updates)


@examples(20)
@given(st.integers(1, 60), st.integers(1, 4))
def test_with_equal_lengths_ranking_changes_nothing(tokens, workers):
    equal = epochs(*[[[tokens] * workers] * 2] * 3)
    ends = [
        [u["finished_s"] for u in rows(timed(equal, 6, workers, **parameters).result.steps)]
        for parameters in ({}, {"histopipe": False}, {"migration": False})
    ]
    assert ends[0] == pytest.approx(ends[1])
    assert ends[0] == pytest.approx(ends[2])
