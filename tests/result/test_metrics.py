"""Metrics of a result made by hand: two rollout workers of two GPUs, a trainer of four."""

import pytest

from simrl.result.metrics import gpu_seconds, occupancy, speedups, summary, window
from simrl.result.result import Lane, Result, Step, Work
from simrl.runtime.recorder import Recorder
from simrl.simulate.run import simulate
from tests.helpers import rollout, scenario


def a_result() -> Result:
    """Updates end at 10, 20 and 40 s. Worker 0 rolls out all the time but for loads, worker 1 half of it."""
    record = Recorder([Lane("rollout-000", 2), Lane("rollout-001", 2), Lane("train", 4)])
    for start_s in (0.0, 10.0, 20.0, 30.0):
        record.span(0, "load_weights", start_s, start_s + 1, 0)
        record.span(0, "rollout", start_s + 1, start_s + 10, 0, 100)
        record.span(1, "rollout", start_s, start_s + 5, 0, 50)
    for i, (end_s, samples, tokens, age) in enumerate(
        [(10.0, 3, 30, 0.0), (20.0, 4, 40, 1.0), (40.0, 6, 120, 2.0)]
    ):
        record.span(2, "train", end_s - 4, end_s - 1, i)
        record.span(2, "publish", end_s - 1, end_s, i)
        record.steps.append(Step(i, i, end_s - 4, end_s, samples, 10 * samples, tokens, age, i * 2))
    return record.result(40.0, {"label": "by hand", "variant": "x=1", "gpus": 8})


def test_the_window_begins_with_the_end_of_the_last_warm_up_update():
    result = a_result()
    assert window(result, 0) == (0.0, 40.0)
    assert window(result, 1) == (10.0, 40.0)
    assert window(result, 2) == (20.0, 40.0)


def test_gpu_seconds_cut_spans_at_the_window_and_count_the_gpus_of_a_lane():
    seconds = gpu_seconds(a_result(), 12.0, 38.0)
    assert seconds[True, "rollout"] == pytest.approx(2 * (8 + 9 + 7) + 2 * (3 + 5 + 5))
    assert seconds[True, "load_weights"] == pytest.approx(2 * 2)
    assert seconds[True, "idle"] == pytest.approx(2 * (5 + 5 + 3))
    assert seconds[False, "train"] == pytest.approx(4 * (3 + 2))
    assert seconds[False, "publish"] == pytest.approx(4 * 1)
    assert seconds[False, "rollout"] == 0
    assert sum(seconds.values()) == pytest.approx(8 * 26.0)


def test_a_summary_averages_over_the_window_after_the_warm_up():
    row = summary(a_result(), warmup_steps=1, cost_per_gpu_hour=3.0)
    assert (row["system"], row["variant"], row["gpus"]) == ("by hand", "x=1", 8)
    assert row["samples_per_s"] == pytest.approx(10 / 30)
    assert row["tokens_per_s"] == pytest.approx((100 + 160) / 30)
    assert row["step_s"] == pytest.approx(15)
    assert row["rollout_bubble"] == pytest.approx(2 * 15 / (4 * 30))
    assert row["train_idle"] == pytest.approx((30 - 8) / 30)
    assert row["off_policyness_mean"] == pytest.approx(
        (1 * 40 + 2 * 120) / 160
    )  # over tokens, not over updates
    assert row["off_policyness_max"] == 4
    assert row["gpu_hours_per_1k_samples"] == pytest.approx(8 * 30 / 3600 / 10 * 1000)
    assert row["cost_per_1k_samples"] == pytest.approx(3.0 * row["gpu_hours_per_1k_samples"])


def test_without_a_price_there_is_no_cost():
    assert summary(a_result(), 0)["cost_per_1k_samples"] is None


def test_where_training_has_no_gpus_of_its_own_it_is_neither_bubble_nor_idle():
    record = Recorder([Lane("rollout-000", 2), Lane("rollout-001", 2)])
    for lane, rolls_until_s in ((0, 6.0), (1, 4.0)):
        record.span(lane, "rollout", 0.0, rolls_until_s, 0, 10)
        record.span(lane, "switch", 6.0, 7.0, 0)
        record.span(lane, "train", 7.0, 10.0, 0)
    record.steps.append(Step(0, 0, 6.0, 10.0, 2, 8, 20, 0.0, 0))
    row = summary(record.result(10.0, {"label": "", "variant": "", "gpus": 4}), 0)
    assert row["rollout_bubble"] == pytest.approx(
        2 / 12
    )  # 2 of the 6 + 6 s that are neither switching nor training
    assert row["train_idle"] == 0


def test_a_run_is_settled_only_if_its_off_policyness_no_longer_grows():
    def row_of(ages: list[float]) -> dict[str, object]:
        record = Recorder([Lane("rollout-000", 2)])
        record.span(0, "rollout", 0.0, 10.0 * len(ages), 0, 10)
        for i, age in enumerate(ages):
            record.steps.append(Step(i, i, 10.0 * i, 10.0 * (i + 1), 1, 1, 10, age, int(age)))
        return summary(record.result(10.0 * len(ages), {"label": "", "variant": "", "gpus": 2}), 1)

    assert row_of([0.0, 1.0, 1.0, 1.0, 1.0])["settled"]
    assert not row_of([0.0, 1.0, 2.0, 3.0, 4.0])["settled"]


def test_what_was_dropped_and_who_moved_is_counted_over_all_that_was_generated():
    record = Recorder([Lane("rollout-000", 1), Lane("rollout-001", 1)])
    moved = rollout(0, {0: 6})
    moved = moved._replace(
        segments=(moved.segments[0], moved.segments[0]._replace(worker=1, tokens=4))
    )
    for one in (moved, rollout(1, {0: 20}), rollout(2, {0: 30}, done=False), rollout(3, {0: 40})):
        record.request_ended(one)
    record.trained(
        Step(0, 0, 0.0, 1.0, 2, 8, 50, 0.0, 0, carried_tokens=5, carried_off_policyness_max=2),
        [moved],
    )
    record.dropped([rollout(1, {0: 20}), rollout(2, {0: 30}, done=False)])
    row = summary(record.result(10.0, {"label": "", "variant": "", "gpus": 2}), 0)
    assert row["dropped_share"] == 50 / 100
    assert row["migrated_share"] == 1 / 4
    assert (row["carried_share"], row["carried_off_policyness_max"]) == (5 / 50, 2)


def test_occupancy_counts_every_second_of_rollout_alike_and_none_of_waiting():
    record = Recorder([Lane("rollout-000", 2), Lane("rollout-001", 2)])
    record.span(0, "rollout", 0.0, 4.0, 0, 10, Work(slot_s=4 * 8))  # before the window
    record.span(0, "rollout", 4.0, 8.0, 0, 10, Work(slot_s=4 * 4))
    record.span(1, "rollout", 4.0, 5.0, 0, 10, Work(slot_s=1 * 9))  # then it waits
    record.span(1, "rollout", 8.0, 10.0, 0, 10, Work(slot_s=2 * 1))
    for i in range(2):
        record.steps.append(Step(i, i, 0.0, 4.0 + 6 * i, 1, 1, 10, 0.0, 0))
    facts = {
        "label": "",
        "variant": "",
        "gpus": 4,
        "full_batch": {"sequences": 10, "context_tokens": 1.0, "pass_s": 1.0},
    }
    assert summary(record.result(10.0, facts), 1)["occupancy"] == pytest.approx(
        (16 + 9 + 2) / (10 * (4 + 1 + 2))
    )


def test_occupancy_is_unknown_where_an_engine_does_not_tell_and_at_most_one():
    full = {"full_batch": {"sequences": 3, "context_tokens": 1.0, "pass_s": 1.0}}
    record = Recorder([Lane("rollout-000", 2)])
    record.span(0, "rollout", 0.0, 4.0, 0, 10)
    assert occupancy(record.result(4.0, full), 0.0, 4.0) is None
    record.span(0, "rollout", 4.0, 8.0, 0, 10, Work(slot_s=4 * 4))  # contexts shorter than the mean
    assert occupancy(record.result(8.0, full), 0.0, 8.0) == 1.0
    assert occupancy(record.result(8.0, {}), 0.0, 8.0) is None


def test_occupancy_of_a_run_is_the_time_that_its_requests_were_in_the_batch():
    result = simulate(scenario({"name": "areal", "eta": 1}, steps=3))
    segments, spans = result.segments.to_pandas(), result.spans.to_pandas()
    rolls = spans[spans.kind == "rollout"]
    filled_s = (segments.ended_s - segments.started_s).sum()  # none waits: there is room for all
    slots_s = (rolls.ended_s - rolls.started_s).sum() * result.metadata["full_batch"]["sequences"]
    assert rolls.slot_s.sum() == pytest.approx(
        filled_s, rel=0.05
    )  # but for the pass in which each arrives
    assert occupancy(result, 0.0, result.metadata["end_s"]) == pytest.approx(
        rolls.slot_s.sum() / slots_s
    )


def test_speed_ups_are_over_the_first_row_with_a_rate_and_over_the_first_one_of_its_variant():
    rates = [
        (None, "tp=1"),
        (2.0, "tp=1"),
        (3.0, "tp=2"),
        (6.0, "tp=2"),
        (None, "tp=2"),
        (1.0, "tp=1"),
    ]
    both = speedups([{"samples_per_s": rate, "variant": variant} for rate, variant in rates])
    assert [row["speedup"] for row in both] == [None, 1.0, 1.5, 3.0, None, 0.5]
    assert [row["speedup_in_variant"] for row in both] == [None, 1.0, 1.0, 2.0, None, 0.5]
