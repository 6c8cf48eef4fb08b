"""RLHFuse: when the tail moves and where to, what the freed GPUs do meanwhile, and that nothing switches twice."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simrl.pipelines.rlhfuse import number_of_destinations
from simrl.profile.model_shape import model_shape
from simrl.simulate.run import simulate, simulate_prepared
from simrl.training.stages import pipelines_s
from simrl.training.weight_sync import PINNED_SHARE
from tests.helpers import examples, lanes, on_gpus, prepared, rows, trace
from tests.pipelines.test_pipelines import run, timed, traces, updates_at, workers

SWITCH_S = 20 + 14 * model_shape("qwen3-0.6b").parameters / 2 / (PINNED_SHARE * 64e9)  # on two GPUs
# Ten responses, five at each of two workers; one of each five is long.
TAILS = trace([[[(4, n)] for n in (70, 60, 30, 30, 30, 30, 30, 30, 30, 30)]])


def spans_of(result, lane):
    return [
        (s["kind"], s["started_s"], s["ended_s"])
        for s in lanes(result)[lane]
        if s["kind"] != "idle"
    ]


def segments_of(result, uid):
    return [
        (s["worker"], s["tokens"], s["started_s"], s["ended_s"])
        for s in rows(result.segments)
        if s["uid"] == uid
    ]


class Times:
    """A worker takes a second more for each response beyond so many."""

    def __init__(self, at_once):
        self.at_once = at_once

    def batch_s(self, length_tokens, batch):
        return 100 + max(batch - self.at_once, 0)


def number(unfinished, started, workers, at_once=1000, destinations=None):
    return number_of_destinations(Times(at_once), destinations, 0.1, unfinished, started, workers)


def test_the_tail_goes_to_so_few_workers_that_none_has_more_than_it_began_with():
    assert number(2, 10, 2) == 1
    assert number(20, 100, 10) == 2
    assert number(21, 100, 10) == 3
    assert number(2, 10, 20) == 2  # one each
    assert number(2, 10, 2, destinations=3) == 2


def test_the_tail_goes_to_so_many_workers_that_its_longest_is_not_much_slower():
    assert number(200, 1000, 10) == 2  # 100 each, as when the step began
    assert (
        number(200, 1000, 10, at_once=56) == 4
    )  # 66 each would take 110 s, and so would 50; 67 take 111
    assert number(200, 1000, 10, at_once=57) == 3
    assert (
        number(200, 1000, 10, at_once=0) == 7
    )  # 20 each take 120 s, 29 take 129, 34 would take 134


def test_a_fifth_of_the_samples_moves_to_one_worker_and_the_other_switches_and_infers():
    result = timed("rlhfuse", 1, TAILS, workers=2, dispatch="least_requests")
    assert segments_of(result, 0) == [(0, 70, 0, 70)]
    # Two are left at 30. The other hears of it at its next boundary, and leaves with 31 tokens; the destination takes it in at
    # its own next boundary and computes its 4 + 31 anew, in the pass that gives it a token.
    assert segments_of(result, 1) == [(1, 31, 0, 31), (0, 29, 32, 61)]
    assert spans_of(result, "rollout-001")[:2] == [
        ("rollout", 0, 31),
        ("switch", 31, pytest.approx(31 + SWITCH_S)),
    ]
    # The last ends at 70 and is scored at 75; only its worker has to switch then.
    assert updates_at(result) == [70 + 5 + 2 * SWITCH_S]
    kinds = [kind for kind, _, _ in spans_of(result, "rollout-000")]
    assert kinds == ["rollout", "transfer", "switch", "log_prob", "train", "switch"]
    kinds = [kind for kind, _, _ in spans_of(result, "rollout-001")]
    # Its second round, of the one that ended at 61, needs no switch any more; nor does the update.
    assert kinds == [
        "rollout",
        "switch",
        "log_prob",
        "log_prob",
        "transfer",
        "log_prob",
        "train",
        "switch",
    ]


def test_without_migration_a_worker_begins_when_it_has_nothing_left():
    result = timed("rlhfuse", 1, TAILS, workers=2, dispatch="least_requests", migration=False)
    assert segments_of(result, 1) == [(1, 60, 0, 60)]
    assert spans_of(result, "rollout-001")[:2] == [
        ("rollout", 0, 60),
        ("switch", 60, pytest.approx(60 + SWITCH_S)),
    ]
    # It still switches when the last is scored at 75, and the update waits for what it has begun.
    assert updates_at(result) == [60 + SWITCH_S + SWITCH_S + SWITCH_S]


def test_without_fusion_the_freed_gpus_wait():
    result = timed("rlhfuse", 1, TAILS, workers=2, dispatch="least_requests", fusion=False)
    assert segments_of(result, 1) == [(1, 31, 0, 31), (0, 29, 32, 61)]
    assert [kind for kind, _, _ in spans_of(result, "rollout-001")][:3] == [
        "rollout",
        "transfer",
        "switch",
    ]
    assert updates_at(result) == [70 + 5 + 2 * SWITCH_S]


def test_the_next_step_uses_every_worker_again():
    result = timed("rlhfuse", 2, TAILS, workers=2, dispatch="least_requests")
    assert {s["worker"] for s in rows(result.segments) if s["policy_version"] == 1} == {0, 1}
    first_s = 75 + 2 * SWITCH_S
    assert updates_at(result) == [first_s, 2 * first_s + 10]


def slow_log_probs(name, **parameters):
    """A second of log-probs takes a GPU hundreds of tokens."""
    training = {"log_prob_mfu": 0.001, "mfu": 1.0, "reward_s": 5.0, "switch_s": 0.0}
    ready = prepared(on_gpus(name, parameters, 2, steps=1, training=training), LONG)
    return simulate_prepared(ready), ready.training_costs(2)


LONG = trace([[[(40, n)] for n in (4000, 3000, 300, 300, 300, 300, 300, 300, 300, 300)]])


def test_log_probs_of_what_is_finished_are_hidden_behind_the_tail():
    fused, costs = slow_log_probs("rlhfuse")
    alone, _ = slow_log_probs("verl_colocated")
    took = [
        sum(
            s["ended_s"] - s["started_s"]
            for s in lanes(r)["rollout-000"]
            if s["kind"] == "log_prob"
        )
        for r in (alone, fused)
    ]
    [(_, everything_s)] = costs.inference(np.array([4040, 3040] + 8 * [340]))
    [(_, rest_s)] = costs.inference(np.array([4040, 3040]))
    assert took == [pytest.approx(everything_s), pytest.approx(rest_s)]
    early = next(s for s in lanes(fused)["rollout-001"] if s["kind"] == "log_prob")
    tail_s = max(s["ended_s"] for s in rows(fused.segments))
    assert early["ended_s"] < tail_s


def tables(result):
    return [rows(table) for table in (result.steps, result.samples, result.segments, result.spans)]


@examples(30)
@given(traces, workers)
def test_without_migration_and_fusion_it_is_verl_colocated(trace, workers):
    plain = run(("verl_colocated", {"version": "0.4"}), trace, workers).result
    fused = run(
        ("rlhfuse", {"migration": False, "fusion": False, "threshold": 0.6}), trace, workers
    ).result
    assert tables(fused) == tables(plain)


@examples(30)
@given(st.integers(1, 60), st.integers(1, 5), workers)
def test_where_all_responses_are_equally_long_there_is_no_tail(length, groups, workers):
    equal = trace([[[(4, length)] * 2] * groups] * 2)
    plain = run(("verl_colocated", {"version": "0.4"}), equal, workers).result
    at_once = (
        workers == 1 or 2 * groups % workers == 0
    )  # else the workers' passes differ, and so do their ends
    if at_once:
        assert tables(run(("rlhfuse", {}), equal, workers).result) == tables(plain)


@examples(30)
@given(traces, st.integers(2, 3), st.sampled_from([0.2, 0.5, 0.9]), st.sampled_from([None, 1, 2]))
def test_lanes_switch_twice_an_update_and_never_roll_out_in_between(
    trace, workers, threshold, destinations
):
    result = run(
        ("rlhfuse", {"threshold": threshold, "destinations": destinations}), trace, workers
    ).result
    for spans in lanes(result).values():
        kinds = [s["kind"] for s in spans if s["kind"] in ("rollout", "switch")]
        switches = [i for i, kind in enumerate(kinds) if kind == "switch"]
        assert len(switches) == 2 * 4
        assert all(
            back - there == 1 for there, back in zip(switches[::2], switches[1::2], strict=True)
        )


def test_one_pipeline_is_1f1b_and_a_second_in_reverse_fills_its_bubbles():
    # 4 micro-batches of 3 s on 4 stages: 12 s of work and 9 of bubbles. Two such pipelines have 24 s of work.
    four = np.full(4, 3.0)
    assert pipelines_s(four, 4, 1 / 3, 1) == pytest.approx(21.0)
    assert 24.0 < pipelines_s(four, 4, 1 / 3, 2) < 0.8 * 2 * 21.0
    assert pipelines_s(four, 1, 1 / 3, 2) == pytest.approx(
        24.0
    )  # without stages there is nothing to fill
    uneven = np.array([5.0, 1.0, 2.0, 8.0, 1.0])
    assert (
        max(2 * uneven.sum(), uneven.max())
        <= pipelines_s(uneven, 3, 0.25, 2)
        <= 2 * pipelines_s(uneven, 3, 0.25, 1)
    )


@pytest.mark.parametrize("stages", [1, 4])
def test_a_critic_takes_as_long_as_the_policy_and_less_where_intra_stage_fusion_fills_bubbles(
    stages,
):
    def train_s(**parameters):
        training = {
            "mfu": 0.4,
            "sharding": "optimizer",
            "pipeline_parallel": stages,
            "tokens_per_microbatch": 60,
            "controller_bytes_per_token": 0.0,
        }
        config = on_gpus("rlhfuse", {"fusion": False, **parameters}, 4, steps=1, training=training)
        spans = lanes(simulate(config))["rollout-000"]
        return sum(s["ended_s"] - s["started_s"] for s in spans if s["kind"] == "train")

    alone, serial, fused = train_s(), train_s(critic=True, intra_stage=False), train_s(critic=True)
    assert serial == pytest.approx(2 * alone)
    assert fused == pytest.approx(serial) if stages == 1 else fused < 0.95 * serial
