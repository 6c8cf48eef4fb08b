"""Laminar (arXiv 2510.12633 §3-§6): workers on their own, one version a response, tails of the same version packed together."""

from collections import defaultdict

import pytest
from hypothesis import given, strategies as st

from simrl.engine.state import Limits
from simrl.pipelines.laminar import consolidate
from tests.helpers import ROOMY, counted, examples, lanes, on_gpus, prepared, rows, trace, watch

length = st.one_of(st.integers(1, 12), st.integers(1, 80))
traces = st.lists(
    st.lists(st.lists(st.tuples(length, length), min_size=1, max_size=3), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
).map(trace)


def singles(*lengths):
    """A trace of one step of groups of one response each."""
    return trace([[[(4, n)] for n in lengths]])


def finished_at(watched):
    return [round(u["finished_s"], 1) for u in rows(watched.result.steps)]


def stays(watched, uid):
    return [
        (s["worker"], s["policy_version"], s["tokens"], s["started_s"], s["ended_s"])
        for s in rows(watched.result.segments)
        if s["uid"] == uid
    ]


@pytest.mark.parametrize(
    "left, most, plan",
    [
        ({}, {}, []),
        ({0: 3}, {0: 8}, []),  # nobody to give it to
        ({0: 1, 1: 2}, {0: 4, 1: 4}, [(0, 1)]),  # the emptier to the fuller
        ({0: 2, 1: 2}, {0: 4, 1: 4}, [(0, 1)]),  # as full: the lower index goes
        ({0: 2, 1: 3}, {0: 4, 1: 4}, []),  # no room
        ({0: 1, 1: 2, 2: 3}, {0: 4, 1: 4, 2: 4}, [(0, 2)]),  # best fit: 1 + 3; then 2 fits nowhere
        ({0: 1, 1: 2, 2: 3}, {0: 8, 1: 8, 2: 8}, [(0, 2), (1, 2)]),  # 1 + 3, then 2 + 4
        (
            {0: 1, 1: 1, 2: 1, 3: 1},
            {0: 2, 1: 2, 2: 2, 3: 2},
            [(0, 1), (2, 3)],
        ),  # who was given something keeps it
        ({0: 1, 1: 5}, {0: 8, 1: 4}, [(1, 0)]),  # the fuller to the emptier, if only that has room
    ],
)
def test_tails_are_packed_by_best_fit(left, most, plan):
    assert consolidate(left, most) == plan


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), max_size=8))
def test_whoever_gives_away_gives_all_once_and_nobody_gets_more_than_it_may_hold(workers):
    left = {worker: held for worker, (held, _) in enumerate(workers)}
    most = {worker: room for worker, (_, room) in enumerate(workers)}
    plan = consolidate(left, most)
    sources = [source for source, _ in plan]
    assert len(set(sources)) == len(sources)
    assert not set(sources) & {destination for _, destination in plan}
    for destination in {destination for _, destination in plan}:
        assert (
            left[destination] + sum(left[s] for s, d in plan if d == destination)
            <= most[destination]
        )


def test_workers_load_on_their_own_and_the_trainer_waits_for_none_of_them():
    """Two workers, sub-batches of two. The first ends two every ten seconds. The second is done at 40.

    20   four are there (those of 10, and the first of 20): update 0, published at 35
    35   update 1 lacks one of four: it begins at 40, when three more are there, and is published at 55
    40   both workers are done and load until 50
    """
    run = counted(
        "laminar",
        {"repack": False, "log_probs": 0},
        trace([[[(4, 10)], [(4, 10)], [(4, 10)], [(4, 40)]], *[[[(4, 10)]] * 4] * 9]),
        2,
        workers=2,
        publish_s=15.0,
    )
    assert finished_at(run) == [35, 55]
    for lane in ("rollout-000", "rollout-001"):
        spans = [s for s in lanes(run.result)[lane] if s["ended_s"] <= 50.0]
        assert {s["kind"] for s in spans if s["started_s"] < 40.0} == {"rollout"}
        assert [(s["kind"], s["started_s"], s["ended_s"]) for s in spans][-1] == (
            "load_weights",
            40.0,
            50.0,
        )


REPACKED = trace([[[(4, n)] for n in (10, 10, 10, 50, 12, 12, 12, 30)], *[[[(4, 10)]] * 8] * 9])


def test_a_tail_moves_to_a_worker_with_the_same_weights_and_its_own_worker_goes_on():
    """Sub-batches of four. At 12 either has one left, and the first worker gives away its own, of 50 tokens: it has 13 when the
    pass ends that runs, is at the other worker when the next one does, at 14, is prefilled in the pass that gives its 14th
    token, and ends at 51. The first worker begins another four at 13."""
    run = counted("laminar", {"log_probs": 0}, REPACKED, 2, workers=2, publish_s=15.0)
    assert stays(run, 3) == [(0, 0, 13, 0.0, 13.0), (1, 0, 37, 14.0, 51.0)]
    assert stays(run, 8) == [(0, 0, 10, 13.0, 23.0)]
    assert finished_at(run) == [
        38,
        58,
    ]  # six by 12, four at 23; one at 30, four at 33, one of four at 43
    loads = {
        name: [s["started_s"] for s in spans if s["kind"] == "load_weights"]
        for name, spans in lanes(run.result).items()
    }
    assert loads["rollout-000"] == [43.0]
    assert loads["rollout-001"] == [51.0]  # not before what it was given is done


def test_without_repacking_the_tail_keeps_its_worker():
    run = counted(
        "laminar", {"repack": False, "log_probs": 0}, REPACKED, 1, workers=2, publish_s=15.0
    )
    assert {s["worker"] for s in rows(run.result.segments) if s["uid"] == 3} == {0}
    assert finished_at(run) == [
        55
    ]  # the seventh is there at 30, the eighth at 40: six by 12, then four of the other's at 40


@examples(60)
@given(
    traces,
    st.integers(1, 4),
    st.sampled_from([0.3, 0.5, 0.9]),
    st.integers(1, 4),
    st.sampled_from([ROOMY, Limits(3, 32, 4, 60)]),
)
def test_a_response_has_one_version_wherever_it_goes(trace, workers, ramp_down, sub_batch, limits):
    parameters = {"ramp_down": ramp_down, "sub_batch": sub_batch}
    run = watch(prepared(on_gpus("laminar", parameters, workers, steps=5), trace, limits=limits))
    versions = defaultdict(set)
    for segment in rows(run.result.segments):
        versions[segment["uid"]].add(segment["policy_version"])
    assert all(len(of_sample) == 1 for of_sample in versions.values())


@examples(30)
@given(traces, st.integers(1, 4))
def test_without_repacking_no_worker_is_ever_idle(trace, workers):
    run = watch(
        prepared(on_gpus("laminar", {"repack": False}, workers, steps=5), trace, limits=ROOMY)
    )
    updated_s = rows(run.result.steps)[-1][
        "finished_s"
    ]  # after which each worker ends the pass that it is in
    for name, spans in lanes(run.result).items():
        idle_s = sum(
            s["ended_s"] - s["started_s"]
            for s in spans
            if s["kind"] == "idle" and s["started_s"] < updated_s
        )
        assert name == "train" or idle_s < 1e-9  # an end and its reaction may differ by a rounding


def test_the_trainer_takes_groups_in_the_order_in_which_they_were_finished():
    run = counted("laminar", {"log_probs": 0}, REPACKED, 3, workers=2, publish_s=15.0)
    ended = [
        (row["finished_s"], row["trained_step"])
        for row in rows(run.result.samples)
        if row["finished_s"]
    ]
    steps = [len(ended) if step is None else step for _, step in sorted(ended, key=lambda e: e[0])]
    by_time = defaultdict(list)
    for (seconds, _), step in zip(sorted(ended, key=lambda e: e[0]), steps, strict=True):
        by_time[seconds].append(step)
    latest = 0
    for _, together in sorted(by_time.items()):
        assert min(together) >= latest
        latest = max(latest, min(together))
