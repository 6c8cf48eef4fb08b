"""Pipelines and recipes, run whole: what is kept whatever the lengths, what each promises, and times counted by hand."""

from collections import Counter, defaultdict
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, strategies as st

from simrl.dispatch.dispatcher import Dispatcher
from simrl.errors import InputError, StoppedError
from simrl.pipelines.areal import capacity
from simrl.pipelines.context import RunContext
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import ProfileMetadata, TableProfile
from simrl.profile.rollout_times import RolloutTimes
from simrl.result.metrics import summary
from simrl.runtime.events import on_fire
from simrl.runtime.simulated_trainer import SimulatedRewarder, SimulatedTrainer
from simrl.runtime.worker import EngineLoad, WorkerCosts
from simrl.simulate.prepare import prepare
from simrl.simulate.run import Schedule, simulate_prepared, simulated_workers
from simrl.systems.recipes import RECIPES, make_system
from simrl.trace.workload import Workload
from simrl.training.costs import TrainingCosts
from simrl.training.weight_sync import PINNED_SHARE
from tests.conservation import may_generate_twice
from tests.helpers import (
    LINEAR,
    ROOMY,
    examples,
    lanes,
    limits_of,
    on_gpus,
    one_second_a_pass,
    prepared,
    recorder,
    rollout,
    rows,
    trace,
    update_phases,
    watch,
)

EVERY_RECIPE: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in RECIPES.own]
ABLATIONS = [
    ("verl_colocated", {"dispatch": "even_split", "minibatches": 2, "log_probs": 0}),
    ("split", {"dispatch": "round_robin"}),
    ("partial_rollout", {"budget_tokens": 7}),
    ("april", {"over_sampling": 1.5}),
    ("rollpacker", {"long_rounds": False}),
    ("streamrl", {"ranker": "oracle", "ranker_accuracy": 0.5}),
    ("rhymerl", {"weight_buffer": False}),
    ("rollpacker", {"eta_prompts": 2.0, "eta_responses": 1.0}),
    ("sortedrl", {"batches": 3, "unit": "group"}),
    ("sortedrl", {"batches": 2, "unfinished": "restart"}),
    ("dapo", {"over_sampling": 1.5}),
    ("slime_fully_async", {"aborted": "start_over"}),
    ("roll_async", {"async_generation_ratio": 2.0}),
    ("nemo_rl_async", {"version": "main"}),
    ("nemo_rl_single_controller", {"sampler": "windowed", "min_groups_for_streaming_train": 1}),
    ("verl_v1_separate_async", {"on_stale": "wait"}),
    ("areal", {"eta": 0}),
    ("areal", {"eta": 1, "max_concurrent": 3}),
    ("areal", {"eta": 2, "interruptible": False}),
    ("areal", {"eta": 1, "on_stale": "drop", "max_concurrent": 5}),
    ("rlhfuse", {"threshold": 0.7, "destinations": 2}),
    ("rlhfuse", {"threshold": 0.5, "dispatch": "seer"}),
    ("streamrl", {"eta": 0}),
    ("streamrl", {"dedicated_share": 0.4, "long_share": 0.5, "doubling_batch": 2, "stream": False}),
    ("seer", {"chunk_tokens": 5, "per_worker": 2}),
    ("seer", {"chunk_tokens": 7, "per_worker": None, "kv_pool": False, "context_aware": False}),
    ("areal", {"eta": 1, "dispatch": "seer"}),
    ("rlhfuse", {"threshold": 0.6, "migration": False}),
    ("rlhfuse", {"threshold": 0.6, "fusion": False}),
    ("areal", {"eta": 1, "on_stale": "wait"}),
    ("areal", {"eta": 3, "recompute_kv": False, "pause": False}),
    ("areal", {"eta": 2, "on_stale": "wait", "max_concurrent": 100, "interruptible": False}),
    ("verl_fully_async", {"staleness": 0.0, "sync_step": 2}),
    ("verl_fully_async", {"staleness": 1.0, "sync_step": 2, "partial_rollout": False}),
    (
        "verl_fully_async",
        {"staleness": 2.5, "sync_step": 1, "mini_batch": 2, "require_batches": 2, "per_replica": 2},
    ),
    (
        "verl_fully_async",
        {"staleness": 0.5, "sync_step": 1, "partial_rollout": False, "dispatch": "round_robin"},
    ),
    ("laminar", {"repack": False}),
    ("laminar", {"sub_batch": 3, "ramp_down": 0.9}),
]
IN_PARTS = [  # whose phases of training are not those of one batch and one model
    ("rollpacker", {"stream_trainer": 0.4, "eta_prompts": 2.0}),
    ("split", {"generations": 2}),
    ("rlhfuse", {"critic": True}),
]
AREAL = [system for system in EVERY_RECIPE + ABLATIONS if system[0] == "areal"]


def by_name(system):
    return "-".join([system[0], *(f"{k}={v}" for k, v in system[1].items())])


def systems(which):
    return pytest.mark.parametrize("system", which, ids=by_name)


length = st.one_of(st.just(1), st.integers(1, 12), st.integers(1, 60))
group = st.lists(st.tuples(length, length), min_size=1, max_size=3)
traces = st.lists(st.lists(group, min_size=1, max_size=4), min_size=1, max_size=3).map(trace)
tight = st.builds(
    limits_of,
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([7, 32, 512]),
    block_size=st.just(4),
    kv_blocks=st.integers(30, 60),  # a sample has 120 tokens at most
    async_scheduling=st.booleans(),
    prefix_caching=st.booleans(),
    hold_paused=st.sampled_from([None, False, True]),
)
workers = st.integers(1, 3)
updates = st.integers(1, 5)


def run(system, trace, workers=2, steps=4, limits=ROOMY, **more):
    name, parameters = system
    return watch(
        prepared(on_gpus(name, parameters, workers, steps=steps), trace, limits=limits, **more)
    )


def publishes(system, step):
    """Whether an update goes to the rollout workers."""
    name, parameters = system
    syncs = {"verl_fully_async": 4, "verl_v1_separate_async": 4}
    return name not in syncs or (step + 1) % parameters.get("sync_step", syncs[name]) == 0


# What holds for every system.


@systems(EVERY_RECIPE + ABLATIONS + IN_PARTS)
@examples(40)
@given(traces, workers, updates, st.one_of(st.just(ROOMY), tight))
def test_nothing_is_lost_and_nothing_happens_twice(system, trace, workers, steps, limits):
    """I8, I9, I10, I36: samples, tokens and GPU-seconds are conserved by every system."""
    watched = run(system, trace, workers, steps, limits)
    result, samples = watched.result, rows(watched.result.samples)
    end_s = result.metadata["end_s"]

    # Every sample that was submitted, once or again with what it had, is in the tables once, with what became of it.
    submitted = {sample.uid for submission in watched.submissions for sample in submission.samples}
    assert [row["uid"] for row in samples] == sorted(submitted)
    for row in samples:
        length = watched.responses[row["uid"]].tokens
        assert row["generated_tokens"] <= length
        assert (row["generated_tokens"] == length) == (row["finished_s"] is not None)
        assert row["finished_s"] is not None or row["status"] in ("dropped", "in_flight")
        assert row["finished_s"] is None or row["status"] in ("trained", "dropped", "buffered")
        assert (row["status"] == "trained") == (row["trained_step"] is not None)

    # Every token that an engine generated is in one segment; a sample's segments follow each other.
    segments = defaultdict(list)
    for segment in rows(result.segments):
        segments[segment["uid"]].append(segment)
    generated = sum(worker.generated_total for worker in watched.workers)
    assert generated == sum(row["generated_tokens"] + row["duplicate_tokens"] for row in samples)
    assert may_generate_twice(watched) or not any(row["duplicate_tokens"] for row in samples)
    assert generated == sum(span.tokens for span in watched.workers[0]._recorder.spans)
    for row in samples:
        parts = segments[row["uid"]]
        assert sum(part["tokens"] for part in parts) == row["generated_tokens"]
        assert all(part["tokens"] > 0 and part["started_s"] < part["ended_s"] for part in parts)
        assert all(a["ended_s"] <= b["started_s"] for a, b in pairwise(parts))
        assert all(a["policy_version"] <= b["policy_version"] for a, b in pairwise(parts))

    # Every GPU-second is in exactly one span.
    ready = watched.prepared  # units that change sides are the trainer's lanes, too
    trainers = not ready.colocated and not ready.is_elastic
    assert len(lanes(result)) == len(watched.workers) + trainers
    for spans in lanes(result).values():
        assert (spans[0]["started_s"], spans[-1]["ended_s"]) == (0.0, end_s)
        assert all(a["ended_s"] == b["started_s"] for a, b in pairwise(spans))
        assert all(span["started_s"] < span["ended_s"] for span in spans)

    # What was trained is what the updates say; a token's age is the update's version less the one that generated it.
    trained = defaultdict(list)
    for row in samples:
        if row["status"] == "trained":
            trained[row["trained_step"]].append(row)
    updates = rows(result.steps)
    assert (
        [u["step"] for u in updates] == [u["policy_version"] for u in updates] == list(range(steps))
    )
    assert sorted(trained) == list(range(steps))
    last_s = max((part["ended_s"] for parts in segments.values() for part in parts), default=0.0)
    assert end_s >= max(
        updates[-1]["finished_s"], last_s
    )  # later than both where a pass gave no token
    for update in updates:
        batch = trained[update["step"]]
        ages = [
            (update["policy_version"] - part["policy_version"], part["tokens"])
            for row in batch
            for part in segments[row["uid"]]
        ]
        tokens = sum(n for _, n in ages)
        assert update["samples"] == len(batch)
        assert update["prompt_tokens"] == sum(row["prompt_tokens"] for row in batch)
        assert update["response_tokens"] == tokens == sum(row["generated_tokens"] for row in batch)
        assert update["off_policyness_mean"] == pytest.approx(
            sum(age * n for age, n in ages) / tokens
        )
        assert update["off_policyness_max"] == max(age for age, _ in ages)
        assert min(age for age, _ in ages) >= 0
        # Trains its first mini-batch while others are generated.
        streams = any(
            word in watched.prepared.system.schedule for word in ("streamed", "accumulation")
        )
        assert all(
            row["finished_s"] <= update["finished_s" if streams else "started_s"] for row in batch
        )


@systems(EVERY_RECIPE + ABLATIONS)
@examples(20)
@given(traces, workers)
def test_time_is_what_engines_loads_and_updates_take_and_no_less(system, trace, workers):
    """I19, I36: no system is faster than its parts."""
    linear = on_gpus(*system, workers, steps=4).with_fields("training", **LINEAR)
    watched = watch(prepared(linear, trace, limits=ROOMY))
    ready, result = watched.prepared, watched.result
    end_s = result.metadata["end_s"]
    costs = ready.training_costs(ready.train_gpus)
    batch = defaultdict(list)
    for row in rows(result.samples):
        if row["trained_step"] is not None:
            batch[row["trained_step"]].append((row["prompt_tokens"], row["generated_tokens"]))
    for name, spans in lanes(result).items():
        took = Counter()
        for span in spans:
            took[span["kind"]] += span["ended_s"] - span["started_s"]
        if name == "train" or (
            ready.colocated and int(name.removeprefix("rollout-")) < ready.train_gpus
        ):
            expected = Counter()
            for step, sequences in batch.items():
                tokens = np.array([sum(sequence) for sequence in sequences])
                published = publishes(system, step) and not (
                    ready.system.pauses and step == 3
                )  # after the end
                for kind, seconds in update_phases(costs, tokens, publish=published):
                    expected[kind] += seconds
            if "fused" in ready.system.schedule:  # some log-probs on some GPUs
                del expected["log_prob"]
            for kind, seconds in expected.items():
                assert took[kind] == pytest.approx(seconds), kind
        if name != "train":
            version = 0
            for span in spans:
                if span["kind"] == "load_weights":
                    version = span["policy_version"]
                    seconds = span["ended_s"] - span["started_s"]
                    load_s = ready.costs.load_s + ready.costs.pause_s
                    assert seconds == pytest.approx(load_s) or span["ended_s"] == end_s
                elif span["kind"] == "rollout":
                    assert (
                        span["policy_version"] == version
                    )  # new weights are had only by loading them
    # One pass gives each running sequence a token, and takes longer the more there are and the longer they are.
    rate = max(n / ready.profile.decode_s(n, 1) for n in (1, ROOMY.max_num_seqs))
    trained_tokens = sum(response for sequences in batch.values() for _, response in sequences)
    accept_length = summary(result, 0)["accept_length"] or 1.0
    assert trained_tokens <= accept_length * rate * workers * end_s
    token_s = min(ready.profile.decode_s(1, 1), ready.profile.prefill_s(1))
    for row in rows(result.samples):
        if row["finished_s"] is not None:
            alone_s = (row["generated_tokens"] - row["accepted_tokens"]) * token_s
            assert row["finished_s"] - row["started_s"] >= alone_s * (1 - 1e-9)


# What nobody knows.

LENGTHS = [5, 7, 10, 11, 15, 15, 19, 20, 23, 25, 27, 30, 31, 35, 35, 40]


def begun(system, lengths):
    """When the first response of a run ends, and when and where each segment of its responses begins."""
    groups = [[(4, n) for n in lengths[i : i + 4]] for i in range(0, len(lengths), 4)]
    result = run(system, trace([groups]), steps=1).result
    first_end_s = min(
        row["finished_s"] for row in rows(result.samples) if row["finished_s"] is not None
    )
    return first_end_s, {
        (part["started_s"], part["uid"], part["worker"]) for part in rows(result.segments)
    }


def begun_alike(system, lengths):
    """Whether two orders of equal lengths, so that plans made from their mean are equal, begin alike until a response ends."""
    one, other = begun(system, LENGTHS), begun(system, lengths)
    until_s = min(one[0], other[0])
    starts, others = (
        {start for start in starts if start[0] < until_s} for _, starts in (one, other)
    )
    assert starts
    return starts == others


@systems(EVERY_RECIPE)
@examples(4)
@given(st.permutations(LENGTHS))
def test_until_a_response_ends_nothing_depends_on_how_long_each_one_is(system, lengths):
    """I35: no system looks ahead."""
    assert begun_alike(system, lengths)


def test_a_ranker_that_knows_the_lengths_to_come_is_seen():
    assert not begun_alike(
        ("streamrl", {"ranker": "oracle", "ranker_accuracy": 1.0}), LENGTHS[::-1]
    )


# Off-policyness.


@systems(EVERY_RECIPE + ABLATIONS)
@examples(25)
@given(traces, workers, updates, st.one_of(st.just(ROOMY), tight))
def test_no_token_is_trained_older_than_the_system_allows(system, trace, workers, steps, limits):
    """I33: bounds of off-policyness hold."""
    watched = run(system, trace, workers, steps, limits)
    allowed = watched.prepared.system.off_policyness
    assert (
        allowed is None
        or max(u["off_policyness_max"] for u in rows(watched.result.steps)) <= allowed
    )


@systems([(name, {}) for name in ("verl_colocated", "split")])
@examples(25)
@given(traces, workers)
def test_synchronous_systems_are_on_policy_and_overlap_nothing(system, trace, workers):
    result = run(system, trace, workers).result
    assert [u["off_policyness_max"] for u in rows(result.steps)] == [0] * 4
    working = [
        s for s in rows(result.spans) if s["kind"] in ("log_prob", "train", "publish", "switch")
    ]
    for span in (s for s in rows(result.spans) if s["kind"] == "rollout"):
        for work in working:
            assert span["ended_s"] <= work["started_s"] or work["ended_s"] <= span["started_s"]


@examples(25)
@given(traces, workers, updates)
def test_one_step_off_trains_every_token_one_version_late_from_the_second_update_on(
    trace, workers, steps
):
    result = run(("one_step_off", {}), trace, workers, steps).result
    expected = [0] + [1] * (steps - 1)
    assert [u["off_policyness_max"] for u in rows(result.steps)] == expected
    assert [u["off_policyness_mean"] for u in rows(result.steps)] == expected


@examples(25)
@given(traces, workers, st.booleans())
def test_areal_without_staleness_is_on_policy(trace, workers, interruptible):
    result = run(("areal", {"eta": 0, "interruptible": interruptible}), trace, workers).result
    assert [u["off_policyness_max"] for u in rows(result.steps)] == [0] * 4


def test_capacity_counted_by_hand():
    """AReaL §5.1 with B = 4: at version i, at most (η + i + 1) · 4 groups may have been admitted."""
    #               η  i  B  concurrent running accepted
    assert min(capacity(0, 0, 4, 100, 0, 0)) == 4
    assert min(capacity(0, 0, 4, 100, 3, 0)) == 1
    assert min(capacity(0, 0, 4, 100, 0, 4)) == 0
    assert min(capacity(0, 1, 4, 100, 0, 4)) == 4
    assert min(capacity(2, 0, 4, 100, 0, 0)) == 12
    assert min(capacity(2, 3, 4, 100, 5, 15)) == 4
    assert min(capacity(2, 3, 4, 7, 5, 15)) == 2  # seven at once at most
    assert min(capacity(2, 3, 4, 5, 5, 15)) == 0
    assert min(capacity(8, 0, 4, 0, 0, 0)) == 1  # one runs, whatever is asked
    assert (
        min(capacity(0, 0, 4, 100, 2, 4)) == -2
    )  # accepted ones that a lower η would not have admitted


def test_capacity_is_how_often_the_inequality_still_holds():
    for eta, i, b, running, accepted in product(
        range(3), range(3), range(1, 4), range(4), range(8)
    ):
        admitted = running + accepted
        allowed = sum((n_r - 1) // b <= i + eta for n_r in range(admitted + 1, 100))
        assert max(min(capacity(eta, i, b, 10**6, running, accepted)), 0) == allowed


@systems(AREAL)
@examples(40)
@given(traces, workers, st.one_of(st.just(ROOMY), tight))
def test_areal_admits_by_its_inequality_and_no_more_than_may_run_at_once(
    system, trace, workers, limits
):
    watched = run(system, trace, workers, limits=limits)
    eta = system[1].get("eta", 8)
    batch = Workload(trace).batch_groups
    concurrent = system[1].get("max_concurrent", 4 * batch)
    reward_s = watched.prepared.scenario.training.reward_s
    finished_s = {row["uid"]: row["finished_s"] or np.inf for row in rows(watched.result.samples)}
    scored_s = [
        max(finished_s[s.uid] for s in sub.samples) + reward_s for sub in watched.submissions
    ]
    for n, submission in enumerate(watched.submissions, start=1):
        group = {(s.step, s.prompt_id) for s in submission.samples}
        assert len(group) == 1
        dropped = sum(s.samples[0].uid in submission.dropped for s in watched.submissions)
        n_r = n - dropped
        assert (n_r - 1) // batch <= submission.version + eta
        running = sum(end_s > submission.time_s + 1e-9 for end_s in scored_s[:n])
        assert running <= concurrent


@systems(AREAL)
@examples(40)
@given(traces, workers)
def test_areal_trains_what_was_submitted_first_of_what_is_finished(system, trace, workers):
    watched = run(system, trace, workers, steps=6)
    row = {row["uid"]: row for row in rows(watched.result.samples)}
    reward_s = watched.prepared.scenario.training.reward_s
    started_s = {u["step"]: u["started_s"] for u in rows(watched.result.steps)}
    groups = [[row[s.uid] for s in submission.samples] for submission in watched.submissions]
    there_s = [max(r["finished_s"] or np.inf for r in group) + reward_s for group in groups]
    for n, group in enumerate(groups):
        step = group[0]["trained_step"]
        if step is not None:  # whoever came before was trained before, dropped, or not there yet
            for first, first_s in zip(groups[:n], there_s, strict=False):
                trained = first[0]["trained_step"]
                late = first_s > started_s[step] - 1e-9 or first[0]["status"] == "dropped"
                assert late or (trained is not None and trained <= step)


@examples(40)
@given(traces, workers, st.integers(0, 3))
def test_areal_without_interruption_gives_every_response_one_version(trace, workers, eta):
    result = run(("areal", {"eta": eta, "interruptible": False}), trace, workers).result
    assert max(Counter(segment["uid"] for segment in rows(result.segments)).values()) == 1


@examples(40)
@given(traces, workers, st.integers(0, 2))
def test_areal_that_drops_stale_groups_never_trains_a_token_older_than_eta(trace, workers, eta):
    result = run(
        ("areal", {"eta": eta, "on_stale": "drop", "max_concurrent": 4}), trace, workers, steps=6
    ).result
    assert max(u["off_policyness_max"] for u in rows(result.steps)) <= eta


# Times counted by hand: a pass takes a second, a load ten, an update a hundred; the arithmetic of training hardly any.


def timed(
    name,
    steps,
    trace,
    workers=1,
    limits=ROOMY,
    load_s=10.0,
    publish_s=100.0,
    reward_s=5.0,
    switch_s=20.0,
    **parameters,
):
    config = on_gpus(
        name,
        parameters,
        workers,
        steps=steps,
        training={"mfu": 1.0, "publish_s": publish_s, "reward_s": reward_s, "switch_s": switch_s},
    )
    return simulate_prepared(
        prepared(config, trace, limits=limits, costs=WorkerCosts(load_s), profile=one_second())
    )


def one_second():
    metadata = ProfileMetadata(
        model="qwen3-0.6b", gpu="h100", tp=1, kind="assumed", source="a test"
    )
    return TableProfile(one_second_a_pass(), metadata)


def updates_at(result):
    return [pytest.approx(u["finished_s"], abs=0.1) for u in rows(result.steps)]


EQUAL = trace([[[(4, 30)] * 2] * 2])  # two groups of two responses of 30 tokens


def test_verl_colocated_rolls_out_scores_switches_trains_switches_and_loads():
    result = timed("verl_colocated", 3, EQUAL)
    switch_s = 20 + 14 * model_shape("qwen3-0.6b").parameters / (
        PINNED_SHARE * 64e9
    )  # and moving the states of one GPU
    first_s, period_s = 30 + 5 + 2 * switch_s, 10 + 30 + 5 + 2 * switch_s
    assert updates_at(result) == [first_s, first_s + period_s, first_s + 2 * period_s]
    kinds = [s["kind"] for s in lanes(result)["rollout-000"]]
    step = ["rollout", "idle", "transfer", "switch", "log_prob", "train", "switch"]
    assert kinds == [*step, "load_weights", *step, "load_weights", *step]


def test_split_adds_up_rollout_and_training_and_one_step_off_takes_the_longer_of_them():
    rollout_s = 10 + 30 + 5
    assert updates_at(timed("split", 3, EQUAL)) == [
        135,
        135 + rollout_s + 100,
        135 + 2 * (rollout_s + 100),
    ]
    assert updates_at(timed("one_step_off", 3, EQUAL)) == [135, 235, 335]  # training is the longer
    short = timed(
        "one_step_off", 4, EQUAL, publish_s=20.0
    )  # rollout is; the second needs no new weights
    assert updates_at(short) == [30 + 25, 60 + 25, 60 + 40 + 25, 60 + 80 + 25]


def test_a_synchronous_step_waits_for_its_longest_response_on_its_slowest_worker():
    uneven = trace([[[(4, 10)], [(4, 70)], [(4, 20)]]])
    result = timed("split", 1, uneven, workers=2, dispatch="round_robin")
    assert updates_at(result) == [70 + 5 + 100]
    idle = {
        name: sum(s["ended_s"] - s["started_s"] for s in spans if s["kind"] == "idle")
        for name, spans in lanes(result).items()
    }
    assert idle["rollout-000"] == pytest.approx(50 + 5 + 100, abs=0.1)
    assert idle["rollout-001"] == pytest.approx(5 + 100, abs=0.1)
    assert idle["train"] == pytest.approx(75, abs=0.1)


def test_groups_of_unlike_lengths_leave_bubbles_under_the_dispatch_of_verl_0_4_alone():
    """Two groups of four, of 80 and 20 tokens, on two workers: whole groups leave one worker idle for 60 of 80 seconds."""
    uneven = trace([[[(4, 80)] * 4, [(4, 20)] * 4]])

    def idle_s(**parameters):
        spans = rows(
            timed("verl_colocated", 1, uneven, workers=2, switch_s=0.0, **parameters).spans
        )
        first_end = min(s["started_s"] for s in spans if s["kind"] == "transfer")
        return sum(
            min(s["ended_s"], first_end) - s["started_s"]
            for s in spans
            if s["kind"] == "idle" and s["started_s"] < first_end
        )

    assert idle_s(version="0.4") == pytest.approx(60 + 2 * 5, abs=0.1)  # and the rewards
    assert idle_s(version="0.7") == idle_s() == pytest.approx(2 * 5, abs=0.1)


STRAGGLER = trace(
    [[[(4, 5)]], [[(4, 30)]], [[(4, 5)]], [[(4, 5)]]]
)  # B = 1: one group of one response a step


def areal(steps, **parameters):
    """η = 1, two groups at once: the first and the straggler begin at 0. The first ends at 5, is scored at 10 and published at
    20; the third is admitted then. A pass takes ten tokens."""
    limits = ROOMY._replace(max_num_batched_tokens=10)
    return timed(
        "areal",
        steps,
        STRAGGLER,
        limits=limits,
        publish_s=10.0,
        eta=1,
        max_concurrent=2,
        pause=False,
        log_probs=0,
        **parameters,
    )


def test_areal_interrupts_what_runs_and_goes_on_under_the_new_weights():
    result = areal(3)
    segments = [
        (s["uid"], s["policy_version"], s["tokens"], s["ended_s"]) for s in rows(result.segments)
    ]
    # The load takes effect at the boundary after 20, from 21 to 31; the straggler has 21 tokens then. Its 4 + 21 take three
    # passes, of which the last, to 34, gives a token; what is left of that pass prefills the third.
    assert segments[:4] == [(0, 0, 5, 5.0), (1, 0, 21, 21.0), (1, 1, 9, 42.0), (2, 1, 5, 38.0)]
    # The third is scored at 43 and published at 53; the straggler waits for the next load, 53 to 63, and is published at 73.
    assert updates_at(result) == [20, 53, 73]
    assert [row["trained_step"] for row in rows(result.samples)][:3] == [0, 2, 1]


def test_a_straggler_is_trained_staler_than_eta_unless_stale_groups_are_dropped():
    trained, dropped = areal(3), areal(3, on_stale="drop")
    assert rows(trained.steps)[2]["off_policyness_max"] == 2  # of η = 1
    assert rows(trained.steps)[2]["off_policyness_mean"] == pytest.approx((21 * 2 + 9 * 1) / 30)
    assert [row["status"] for row in rows(dropped.samples)][:4] == [
        "trained",
        "dropped",
        "trained",
        "trained",
    ]
    # The fourth, admitted at 53, begins after the load at 63, ends at 68 and is scored at 73.
    assert updates_at(dropped) == [20, 53, 83]
    assert rows(dropped.steps)[2]["off_policyness_max"] == 0
    # A dropped group leaves the count: at 63 another is admitted in its place.
    assert (len(rows(trained.samples)), len(rows(dropped.samples))) == (4, 5)


def test_areal_without_interruption_lets_what_runs_end_before_it_loads():
    result = areal(2, interruptible=False)
    loads = [
        (s["started_s"], s["ended_s"]) for s in rows(result.spans) if s["kind"] == "load_weights"
    ]
    assert loads == [(30.0, 40.0)]
    segments = [
        (s["uid"], s["policy_version"], s["tokens"], s["ended_s"]) for s in rows(result.segments)
    ]
    assert segments == [(0, 0, 5, 5.0), (1, 0, 30, 30.0), (2, 1, 5, 45.0)]


def test_areal_without_interruption_waits_for_the_longest_response_of_all_workers():
    """The first, at one worker, is published at 20; that worker waits until the straggler of the other ends at 30."""
    result = areal(2, workers=2, interruptible=False)
    loads = [
        (s["started_s"], s["ended_s"]) for s in rows(result.spans) if s["kind"] == "load_weights"
    ]
    assert loads == [(30.0, 40.0)] * 2
    segments = [
        (s["uid"], s["worker"], s["policy_version"], s["ended_s"]) for s in rows(result.segments)
    ]
    assert segments[:3] == [(0, 0, 0, 5.0), (1, 1, 0, 30.0), (2, 0, 1, 45.0)]
    assert (
        result.metadata["admission"]["eta"] + result.metadata["admission"]["concurrency"]
        < result.metadata["end_s"] - 10
    )


@pytest.mark.parametrize("once", [False, True])
def test_areal_that_goes_through_its_trace_once_trains_the_slow_prompts_of_its_end_too(once):
    """The last prompt of the second step takes so long that others come again before it is finished."""
    whole = trace([[[(4, 10)], [(4, 10)]], [[(4, 10)], [(4, 400)]]])
    ready = prepared(on_gpus("areal", {"eta": 4, "max_concurrent": 8}, 1, steps=2), whole)
    schedule = Schedule(ready, simpy.Environment(), simulated_workers, once=once)
    schedule.run()
    drawn = {row["uid"]: row["trained_step"] for row in rows(schedule.result().samples)}
    if once:
        assert drawn == {0: 0, 1: 0, 2: 1, 3: 1}
    else:
        assert drawn[2] == drawn[4] == 1 and drawn[3] is None


@pytest.mark.parametrize(
    ("system", "parameters", "steps", "said"),
    [
        ("areal", {"eta": 4}, 5, "ended after 4 of 5 updates: the next has 0 of 1 groups"),
        (
            "areal",
            {"eta": 1, "max_concurrent": 2, "on_stale": "drop"},
            4,
            r"3 of 4 updates: the next has 0 of 1 groups \(dropped: 1\)",
        ),
        ("verl_fully_async", {}, 5, "ended after 4 of 5 updates: the next has 0 of 1 groups"),
    ],
)
def test_a_run_whose_trace_ends_before_its_updates_do_stops_with_a_line(
    system, parameters, steps, said
):
    ready = prepared(on_gpus(system, parameters, 1, steps=steps), STRAGGLER, profile=one_second())
    with pytest.raises(StoppedError, match=said):
        Schedule(ready, simpy.Environment(), simulated_workers, once=True).run()


def test_areal_generates_while_it_trains_and_workers_with_enough_to_do_are_never_idle():
    many = trace([[[(4, 40)]] * 4] * 3)
    result = timed("areal", 4, many, workers=2, reward_s=0.0, eta=1000, max_concurrent=50)
    for name, spans in lanes(result).items():
        assert name == "train" or {s["kind"] for s in spans} == {"rollout", "load_weights"}
    one_at_a_time = timed("areal", 4, many, workers=2, reward_s=0.0, eta=1000, max_concurrent=1)
    assert "idle" in {s["kind"] for s in lanes(one_at_a_time)["rollout-000"]}


def test_a_split_that_generates_for_each_accumulation_step_alternates_between_rollout_and_gradients():
    whole, parts = (timed("split", 2, EQUAL, generations=generations) for generations in (1, 2))
    begins = [
        [s["started_s"] for s in lanes(run)["rollout-000"] if s["kind"] == "rollout"]
        for run in (whole, parts)
    ]
    # 30 s, rewards 5 s, and the next part once its gradients are there, in hardly any time; the update is published in 100 s.
    assert begins[0] == [pytest.approx(t, abs=0.2) for t in (0, 30 + 5 + 100 + 10)]
    assert begins[1] == [pytest.approx(t, abs=0.4) for t in (0, 35, 70 + 110, 70 + 110 + 35)]
    assert [u["samples"] for u in rows(parts.steps)] == [4, 4]
    assert [u["off_policyness_max"] for u in rows(parts.steps)] == [0, 0]


# Failures.


class DyingWorker:
    """A worker on real hardware whose engine dies."""

    policy_version, groups = 0, None

    def __init__(self, env):
        self.env = env

    def submit(self, sample, partial=None, max_tokens=None, cached=False):
        return self.env.event().fail(ConnectionError("engine 3 died"))

    def load(self):
        return self.env.event().succeed(EngineLoad(0, 0.0, 0, 0, 0))


@systems([(name, {}) for name, _ in EVERY_RECIPE if make_system(name, {}).elastic is None])
def test_a_worker_that_dies_ends_the_run_with_its_cause(system):
    env, record = simpy.Environment(), recorder("rollout-000", "train")
    workers = [DyingWorker(env)]
    ready = prepared(on_gpus(*system, 1), EQUAL)
    costs = TrainingCosts(ready.model, ready.gpu, 1, ready.scenario.training, 1, 1, ready.colocated)
    workload = Workload(EQUAL)
    context = RunContext(
        env=env,
        workers=workers,
        dispatcher=Dispatcher(env, workers, ready.system.dispatch, record),
        trainer=SimulatedTrainer(env, costs, [1], record),
        rewarder=SimulatedRewarder(env, 0.1, workload.responses),
        recorder=record,
        workload=workload,
        times=RolloutTimes(ready.profile, 1, 1),
        steps=2,
        best_of_n=ready.tail.rule if ready.tail else None,
    )
    with pytest.raises(ConnectionError, match="engine 3 died"):
        env.run(until=env.process(ready.system.pipeline(context)))


# Phases that a scenario adds.


def test_an_evaluation_follows_the_load_of_its_versions_on_every_worker_and_rollout_waits_for_it():
    plain = timed("split", 4, EQUAL, workers=2)
    config = on_gpus(
        "split",
        {},
        2,
        steps=4,
        training={
            "mfu": 1.0,
            "publish_s": 100.0,
            "reward_s": 5.0,
            "evaluate_every": 2,
            "evaluate_s": 40.0,
        },
    )
    costs = prepare(config).costs._replace(load_s=10.0)
    evaluated = simulate_prepared(
        prepared(config, EQUAL, limits=ROOMY, costs=costs, profile=one_second())
    )
    for worker in ("rollout-000", "rollout-001"):
        spans = [s for s in lanes(evaluated)[worker] if s["kind"] in ("load_weights", "evaluate")]
        assert [(s["kind"], s["policy_version"]) for s in spans] == [
            ("load_weights", 1),
            ("load_weights", 2),
            ("evaluate", 2),
            ("load_weights", 3),
        ]
    later = [0, 0, 40, 40]
    assert updates_at(evaluated) == [
        u["finished_s"] + s for u, s in zip(rows(plain.steps), later, strict=True)
    ]


def test_checkpoints_and_ppo_epochs_take_the_trainer_longer():
    def run(**training):
        training = {"publish_s": 1.0, "controller_bytes_per_token": 0.0, **training}
        config = on_gpus("split", {}, 1, steps=4, training=training)
        return lanes(simulate_prepared(prepared(config, EQUAL)))["train"]

    def seconds(spans, kind):
        return [s["ended_s"] - s["started_s"] for s in spans if s["kind"] == kind]

    assert (
        seconds(run(checkpoint_every=2, checkpoint_s=30.0), "checkpoint")
        == [pytest.approx(30.0)] * 2
    )
    once, thrice = run(mfu=0.001), run(mfu=0.001, ppo_epochs=3)
    assert seconds(thrice, "train") == pytest.approx([3 * s for s in seconds(once, "train")])
    assert seconds(thrice, "log_prob") == pytest.approx(seconds(once, "log_prob"))


def test_a_batch_goes_through_the_controller_padded_to_the_cap_and_distflow_spares_that():
    uneven = trace([[[(10, 90), (10, 40)]]])

    def transfers(name):
        training = {"controller_bytes_per_token": 100.0, "controller_bytes_per_s": 1000.0}
        spans = lanes(
            simulate_prepared(prepared(on_gpus(name, {}, 1, steps=1, training=training), uneven))
        )
        return [
            s["ended_s"] - s["started_s"] for s in spans["rollout-000"] if s["kind"] == "transfer"
        ]

    padded_tokens = 10 + uneven.metadata.cap_tokens
    assert transfers("verl_colocated") == [pytest.approx(2 * padded_tokens * 100 / 1000)]
    assert transfers("distflow") == []


def test_an_evaluation_that_falls_on_a_version_nobody_loads_comes_with_the_next_that_is_loaded():
    training = {"mfu": 1.0, "publish_s": 1.0, "evaluate_every": 3, "evaluate_s": 10.0}
    config = on_gpus("verl_fully_async", {"sync_step": 2}, 1, steps=8, training=training)
    spans = lanes(simulate_prepared(prepared(config, EQUAL)))["rollout-000"]
    assert [s["policy_version"] for s in spans if s["kind"] == "evaluate"] == [
        4,
        6,
    ]  # 3 and 6 were due


def test_a_streaming_trainer_is_busy_only_while_it_works():
    env, record = simpy.Environment(), recorder("train")
    ready = prepared(on_gpus("asyncflow", {}, 1), EQUAL)
    costs = TrainingCosts(ready.model, ready.gpu, 1, ready.scenario.training, 1, 1, False)
    trainer, parts = SimulatedTrainer(env, costs, [0], record), simpy.Store(env)
    done = trainer.train_parts(parts)
    for at_s, part in (
        (0.0, [rollout(0, {0: 30})]),
        (1000.0, [rollout(1, {0: 30})]),
        (2000.0, None),
    ):
        on_fire(env.timeout(at_s), lambda _, part=part: parts.put(part))
    env.run(done)
    assert env.now >= 2000
    assert trainer.busy_s == pytest.approx(sum(s.ended_s - s.started_s for s in record.spans))
    assert trainer.busy_s < 100


def test_a_worker_that_was_lost_at_an_evaluation_does_not_make_up_for_it():
    training = {"mfu": 1.0, "publish_s": 10.0, "evaluate_every": 2, "evaluate_s": 10.0}
    faults = [{"kind": "lost", "worker": 1, "at_s": 15.0, "back_s": 30.0}]
    config = on_gpus("split", {}, 2, steps=5, training=training, faults=faults)
    spans = lanes(simulate_prepared(prepared(config, EQUAL)))
    kept, lost = (
        [s["policy_version"] for s in spans[name] if s["kind"] == "evaluate"]
        for name in ("rollout-000", "rollout-001")
    )
    assert (kept, lost) == ([2, 4], [4])


# Parameters that any system takes.


def test_who_waits_for_a_lost_worker_goes_on_there_when_it_is_back():
    faults = [{"kind": "lost", "worker": 0, "at_s": 0.05, "back_s": 3.0}]
    at = {}
    for on_loss in ("elsewhere", "wait"):
        config = on_gpus(
            "split", {"on_loss": on_loss, "dispatch": "even_split"}, 2, steps=1, faults=faults
        )
        segments = rows(simulate_prepared(prepared(config, EQUAL)).segments)
        at[on_loss] = {s["worker"] for s in segments if s["uid"] in (0, 1)}
    assert at == {"elsewhere": {0, 1}, "wait": {0}}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("rhymerl", {"least_beta": float("inf")}),
        ("seer", {"per_worker": 10**21}),
        ("verl_colocated", {"log_probs": 10**400}),
        ("laminar", {"sub_batch": 10**6}),
        ("sortedrl", {"dynamic_sampling": 2.0}),
        ("rollpacker", {"dynamic_sampling": True}),
        ("areal", {"eta": True}),
    ],
)
def test_absurd_parameters_are_refused_in_a_line(name, parameters):
    with pytest.raises(InputError) as refused:
        make_system(name, parameters)
    assert "\n" not in str(refused.value)
    assert name in str(refused.value)
    assert next(iter(parameters)) in str(refused.value)
