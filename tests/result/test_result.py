"""The recorder and the tables that it makes."""

import json
import shutil

import pytest

from simrl.errors import InputError
from simrl.result.result import TABLES, Lane, Step, Work, read_result
from simrl.runtime.recorder import Recorder
from tests.helpers import recorder, rollout, rows


def a_step(number: int, finished_s: float = 1.0) -> Step:
    return Step(number, number, 0.0, finished_s, 1, 4, 8, 0.0, 0)


def spans_of(record: Recorder, end_s: float):
    spans = rows(record.result(end_s, {}).spans)
    return [(s["lane"], s["kind"], s["started_s"], s["ended_s"]) for s in spans]


def test_time_in_which_nothing_was_recorded_is_idle_before_between_and_after():
    record = recorder("rollout-000", "train")
    record.span(0, "rollout", 2.0, 5.0, 0, 30)
    record.span(0, "load_weights", 6.0, 7.0, 1)
    assert spans_of(record, 10.0) == [
        ("rollout-000", "idle", 0.0, 2.0),
        ("rollout-000", "rollout", 2.0, 5.0),
        ("rollout-000", "idle", 5.0, 6.0),
        ("rollout-000", "load_weights", 6.0, 7.0),
        ("rollout-000", "idle", 7.0, 10.0),
        ("train", "idle", 0.0, 10.0),
    ]


def test_spans_are_ordered_cut_at_the_end_and_left_out_beyond_it():
    record = recorder()
    record.span(0, "load_weights", 4.0, 8.0, 1)
    record.span(0, "rollout", 0.0, 4.0, 0, 30)
    record.span(0, "rollout", 8.0, 9.0, 1, 30)
    assert spans_of(record, 6.0) == [
        ("rollout-000", "rollout", 0.0, 4.0),
        ("rollout-000", "load_weights", 4.0, 6.0),
    ]


def test_a_worker_on_two_lanes_has_its_time_on_both_and_its_counts_on_the_first():
    record = recorder("rollout-000", "rollout-001")
    record.span(0, "rollout", 0.0, 4.0, 0, 30, Work(decode_s=4.0, decodes=30, slot_s=8.0), 2)
    spans = rows(record.result(4.0, {}).spans)
    counted = [
        (s["lane"], s["ended_s"], s["tokens"], s["decode_s"], s["decodes"], s["slot_s"])
        for s in spans
    ]
    assert counted == [("rollout-000", 4.0, 30, 4.0, 30, 8.0), ("rollout-001", 4.0, 0, 4.0, 0, 0.0)]


def test_a_span_without_duration_is_none():
    record = recorder()
    record.span(0, "rollout", 3.0, 3.0, 0)
    assert spans_of(record, 5.0) == [("rollout-000", "idle", 0.0, 5.0)]


def test_a_lane_that_does_two_things_at_once_is_a_bug_and_says_so():
    """I10: a lane does one thing at a time."""
    record = recorder()
    record.span(0, "rollout", 0.0, 4.0, 0)
    record.span(0, "train", 3.0, 5.0, 0)
    with pytest.raises(RuntimeError, match=r"lane rollout-000: two things at 3.0 s \(train\)"):
        record.result(6.0, {})


def test_spans_carry_the_gpus_of_their_lane():
    record = Recorder([Lane("rollout-000", 2), Lane("train", 8)])
    assert [s["gpus"] for s in rows(record.result(1.0, {}).spans)] == [2, 8]


def test_every_sample_has_the_status_of_what_became_of_it():
    record = recorder()
    for uid, done in enumerate((True, True, True, False)):
        record.request_ended(rollout(uid, {0: 5}, done))
    record.trained(a_step(0), [rollout(0, {0: 5})])
    record.dropped([rollout(1, {0: 5})])
    table = rows(record.result(10.0, {}).samples)
    assert [r["status"] for r in table] == ["trained", "dropped", "buffered", "in_flight"]
    assert [r["trained_step"] for r in table] == [0, None, None, None]
    assert [r["finished_s"] for r in table] == [5.0, 5.0, 5.0, None]


def test_a_later_stay_of_a_sample_takes_the_place_of_the_one_before():
    record = recorder()
    record.request_ended(rollout(0, {0: 5}, done=False))
    record.request_ended(rollout(0, {0: 5, 1: 3}))
    result = record.result(10.0, {})
    assert [(r["generated_tokens"], r["status"]) for r in rows(result.samples)] == [(8, "buffered")]
    assert [(s["policy_version"], s["tokens"]) for s in rows(result.segments)] == [(0, 5), (1, 3)]


def test_a_sample_that_never_had_a_token_has_a_row_without_times():
    record = recorder()
    record.request_ended(rollout(0, {}, done=False))
    [row] = rows(record.result(10.0, {}).samples)
    assert (row["generated_tokens"], row["started_s"], row["finished_s"], row["worker"]) == (
        0,
        None,
        None,
        None,
    )


def test_every_update_is_told_as_it_happens():
    told = []
    record = Recorder([Lane("rollout-000", 1)], told.append)
    for step in (0, 1):
        record.trained(a_step(step), [])
    assert told == [0, 1]


def test_a_result_reads_as_it_was_written_also_without_samples(tmp_path):
    for name, record in (("empty", recorder()), ("full", recorder())):
        if name == "full":
            record.span(0, "rollout", 1.0, 2.0, 0, 3)
            record.request_ended(rollout(0, {0: 5, 1: 3}))
            record.trained(a_step(0), [rollout(0, {0: 5, 1: 3})])
        result = record.result(10.0, {"label": "η", "gpus": 1})
        folder = tmp_path / name
        folder.mkdir()
        result.write(folder)
        again = read_result(folder)
        assert again.metadata == result.metadata == {"label": "η", "gpus": 1, "end_s": 10.0}
        for table in TABLES:
            assert getattr(again, table).equals(getattr(result, table)), table


def test_parts_of_two_runs_are_no_result(tmp_path):
    """Each file has its own seal, and all are whole."""
    for name, ended_s in (("one", 2.0), ("other", 3.0)):
        record = recorder()
        record.span(0, "rollout", 1.0, ended_s, 0, 3)
        (tmp_path / name).mkdir()
        record.result(10.0, {}).write(tmp_path / name)
    for part in ("spans.parquet", "result.json"):
        mixed = tmp_path / f"mixed {part}"
        shutil.copytree(tmp_path / "one", mixed)
        shutil.copy(tmp_path / "other" / part, mixed / part)
        with pytest.raises(InputError, match=r"spans.parquet: belongs to another run"):
            read_result(mixed)


def test_a_folder_that_holds_no_result_is_refused_in_one_line(tmp_path):
    with pytest.raises(
        InputError,
        match=r"not a result folder, it has no result.json; name one that `simrl run` wrote",
    ):
        read_result(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps({}))
    (tmp_path / "spans.parquet").write_text("not Parquet")
    with pytest.raises(InputError) as refused:
        read_result(tmp_path)
    assert "\n" not in str(refused.value)
