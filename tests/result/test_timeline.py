from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from simrl.errors import InputError
from simrl.result.metrics import gpu_seconds, window
from simrl.result.result import Lane, Result, SampleRow, SegmentRow, Step
from simrl.result.timeline import (
    idle_shares,
    running_requests,
    shares,
    spans,
    steady_window,
    time_shares,
)
from simrl.runtime.recorder import Recorder

Run = Callable[..., Result]
SYSTEMS = ("verl_colocated", "one_step_off", "areal")


def drawn_by_hand() -> Result:
    """Two workers of 2 GPUs and a trainer of 4, ten seconds, one update."""
    recorder = Recorder([Lane("rollout-000", 2), Lane("rollout-001", 2), Lane("train", 4)])
    recorder.span(0, "rollout", 0.0, 4.0, 0)
    recorder.span(1, "rollout", 0.0, 2.0, 0)
    recorder.span(2, "train", 4.0, 10.0, 0)
    recorder.steps.append(Step(0, 0, 4.0, 10.0, 1, 1, 1, 0.0, 0))
    return recorder.result(10.0, {"gpus": 8, "scenario": {"warmup_steps": 0}})


def with_requests(
    samples: list[tuple[int, str]], segments: list[tuple[int, int, float, float]]
) -> Result:
    """A result that holds only samples (uid, status) and segments (uid, worker, started_s, ended_s)."""
    rows = [SampleRow(uid, 0, 0, 0, 1, 1, 1, 0.0, None, 0, status, None) for uid, status in samples]
    parts = [SegmentRow(uid, worker, 0, 1, start, end) for uid, worker, start, end in segments]
    nothing = pa.table({})
    return Result(
        nothing,
        nothing,
        pa.Table.from_pylist([row._asdict() for row in rows]),
        pa.Table.from_pylist([part._asdict() for part in parts]),
        {},
    )


def test_the_window_lies_in_the_middle_of_what_follows_the_warm_up(small_run: Run) -> None:
    result = small_run("areal")
    finished_s = result.steps.column("finished_s").to_pylist()
    assert steady_window(result, 2) == (3, 5, finished_s[2], finished_s[4])


def test_a_window_longer_than_the_steady_state_takes_in_the_warm_up_and_one_longer_than_the_run_is_the_run(
    small_run: Run,
) -> None:
    result = small_run("areal")
    assert steady_window(result, 5)[:2] == (1, 6)
    assert steady_window(result, 50)[:3] == (0, 6, 0.0)


def test_a_window_that_is_asked_for_begins_there_and_stops_at_the_last_step(small_run: Run) -> None:
    assert steady_window(small_run("areal"), 3, first_step=0)[:3] == (0, 3, 0.0)
    assert steady_window(small_run("areal"), 3, first_step=5)[:2] == (5, 6)


@pytest.mark.parametrize(("steps", "first"), [(3, 6), (3, -1), (0, 2)])
def test_a_window_without_a_step_is_refused(small_run: Run, steps: int, first: int) -> None:
    with pytest.raises(InputError, match="the run has steps 0 to 5"):
        steady_window(small_run("areal"), steps, first)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_lane_is_covered_from_end_to_end_of_a_window(small_run: Run, system: str) -> None:
    result = small_run(system)
    start_s, end_s = window(result, 2)
    part = spans(result).within(start_s, end_s)
    seconds = np.bincount(part.lane, part.ended_s - part.started_s)
    assert len(seconds) == len(part.lanes)
    assert seconds == pytest.approx(end_s - start_s)


@pytest.mark.parametrize("system", SYSTEMS)
def test_shares_sum_to_one_at_every_instant_and_over_time_to_the_metrics(
    small_run: Run, system: str
) -> None:
    result = small_run(system)
    start_s, end_s = window(result, 2)
    part = spans(result).within(start_s, end_s)
    rollout = part.where(part.rolls_out())
    times, by_kind = shares(rollout)
    assert (times[0], times[-1]) == (start_s, end_s)
    assert np.sum(list(by_kind.values()), axis=0) == pytest.approx(1.0)
    gpu_s = {kind: s for (rolls, kind), s in gpu_seconds(result, start_s, end_s).items() if rolls}
    total = sum(gpu_s.values())
    for kind, share in by_kind.items():
        assert share @ np.diff(times) / (end_s - start_s) == pytest.approx(gpu_s[kind] / total)
        assert time_shares(rollout)[kind] == pytest.approx(gpu_s[kind] / total)


def test_idle_time_is_told_apart_by_whether_another_worker_rolls_out() -> None:
    part = spans(drawn_by_hand())
    others, nobody = idle_shares(part.where(part.rolls_out()))
    assert others == pytest.approx(2 * 2 / (4 * 10))  # worker 1 idles from 2 to 4 s
    assert nobody == pytest.approx(4 * 6 / (4 * 10))  # both from 4 to 10 s


def test_a_request_counts_from_its_first_segment_to_the_end_of_its_last() -> None:
    result = with_requests([(0, "trained"), (1, "buffered")], [(0, 0, 1.0, 3.0), (1, 0, 2.0, 5.0)])
    times, counts = running_requests(result)
    assert list(zip(times, counts, strict=True)) == [(1.0, 1), (2.0, 2), (3.0, 1), (5.0, 0)]


def test_new_weights_in_flight_do_not_interrupt_the_count() -> None:
    result = with_requests([(0, "trained")], [(0, 0, 1.0, 3.0), (0, 0, 3.0, 4.0)])
    times, counts = running_requests(result)
    assert list(zip(times, counts, strict=True)) == [(1.0, 1), (4.0, 0)]


def test_a_request_that_moves_counts_where_it_is() -> None:
    result = with_requests([(0, "trained")], [(0, 0, 1.0, 3.0), (0, 1, 3.0, 4.0)])
    assert [a.tolist() for a in running_requests(result, worker=0)] == [[1.0, 3.0], [1, 0]]
    assert [a.tolist() for a in running_requests(result, worker=1)] == [[3.0, 4.0], [1, 0]]


@pytest.mark.parametrize(("system", "parameters"), [("verl_colocated", {}), ("areal", {"eta": 4})])
def test_the_count_ends_at_the_number_in_flight_that_had_a_token(
    small_run: Run, system: str, parameters: dict[str, int]
) -> None:
    result = small_run(system, **parameters)
    rows = result.samples.to_pylist()
    started = sum(row["status"] == "in_flight" and row["started_s"] is not None for row in rows)
    assert (started > 0) == (system == "areal")
    times, counts = running_requests(result)
    assert counts[-1] == started
    assert counts.min() >= 0
    assert (np.diff(times) > 0).all()
    workers = result.metadata["rollout_workers"]
    assert sum(running_requests(result, worker)[1][-1] for worker in range(workers)) == started
