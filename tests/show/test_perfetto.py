import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from simrl.result.result import Result
from simrl.result.timeline import running_requests
from simrl.show.perfetto import write_perfetto

Run = Callable[..., Result]
Trace = dict[str, list[dict[str, Any]]]
SYSTEMS = ("verl_colocated", "one_step_off", "areal")


@pytest.fixture(params=SYSTEMS)
def run(request: pytest.FixtureRequest, small_run: Run) -> Result:
    return small_run(request.param)


def by_phase(result: Result, path: Path) -> Trace:
    """The events by their `ph`, as any JSON parser sees them."""
    write_perfetto(result, path)
    trace = json.loads(path.read_text())
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    events = defaultdict(list)
    for event in trace["traceEvents"]:
        events[event["ph"]].append(event)
    return events


def lane_names(events: Trace) -> dict[tuple[int, int], str]:
    return {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events["M"] if e["name"] == "thread_name"
    }


def test_every_event_has_the_fields_that_the_format_asks_of_its_phase(
    run: Result, tmp_path: Path
) -> None:
    asked = {
        "M": {"name": str, "pid": int, "args": dict},
        "X": {"name": str, "pid": int, "tid": int, "ts": int, "dur": int, "args": dict},
        "C": {"name": str, "pid": int, "ts": int, "args": dict},
        "i": {"name": str, "pid": int, "tid": int, "ts": int, "s": str, "args": dict},
    }
    events = by_phase(run, tmp_path / "trace.json")
    assert set(events) == set(asked)
    for phase, fields in asked.items():
        for event in events[phase]:
            assert {name: type(event.get(name)) for name in fields} == fields
            assert event.get("ts", 0) >= 0
            assert event.get("dur", 0) >= 0
    assert all(isinstance(v, int) for e in events["C"] for v in e["args"].values())
    assert {e["s"] for e in events["i"]} == {"g"}


def test_the_slices_of_a_lane_do_not_overlap_and_last_as_long_as_its_spans(
    run: Result, tmp_path: Path
) -> None:
    events = by_phase(run, tmp_path / "trace.json")
    names = lane_names(events)
    slices = defaultdict(list)
    for event in events["X"]:
        slices[names[event["pid"], event["tid"]], event["name"]].append(
            (event["ts"], event["ts"] + event["dur"])
        )
    busy = run.spans.filter(pc.not_equal(run.spans.column("kind"), "idle")).to_pylist()
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for span in busy:
        seconds[span["lane"], span["kind"]] += span["ended_s"] - span["started_s"]
    assert set(slices) == set(seconds)
    for key, parts in slices.items():
        rounding_s = 1e-6 * len(parts)
        assert sum(end - start for start, end in parts) / 1e6 == pytest.approx(
            seconds[key], abs=rounding_s
        )
    for lane in set(names.values()):
        parts = sorted(part for (on, _), found in slices.items() if on == lane for part in found)
        assert all(end <= start for (_, end), (start, _) in pairwise(parts))


def test_a_slice_says_its_policy_version_tokens_and_gpus(run: Result, tmp_path: Path) -> None:
    events = by_phase(run, tmp_path / "trace.json")
    args = [e["args"] for e in events["X"]]
    busy = run.spans.filter(pc.not_equal(run.spans.column("kind"), "idle"))
    assert args == busy.select(["policy_version", "tokens", "gpus"]).to_pylist()
    assert sum(a["tokens"] for a in args) == sum(run.spans.column("tokens").to_pylist()) > 0


def test_lanes_are_named_and_in_order_and_no_thread_passes_for_its_process(
    run: Result, tmp_path: Path
) -> None:
    events = by_phase(run, tmp_path / "trace.json")
    assert list(lane_names(events).values()) == run.spans.column("lane").unique().to_pylist()
    order = [e["args"]["sort_index"] for e in events["M"] if e["name"] == "thread_sort_index"]
    assert order == list(range(len(order)))
    processes = {e["pid"]: e["args"]["name"] for e in events["M"] if e["name"] == "process_name"}
    disjoint = run.metadata["system"] != "verl_colocated"
    assert list(processes.values()) == ["rollout workers", "trainer"][: 1 + disjoint]
    threads = [tid for _, tid in lane_names(events)]
    assert len(set(threads)) == len(threads)
    assert not set(threads) & set(processes)


def test_each_policy_update_is_an_instant_where_it_ends(run: Result, tmp_path: Path) -> None:
    instants = by_phase(run, tmp_path / "trace.json")["i"]
    assert [e["args"] for e in instants] == run.steps.to_pylist()
    assert [e["name"] for e in instants] == [f"end of step {i}" for i in range(6)]
    assert [e["ts"] / 1e6 for e in instants] == pytest.approx(
        run.steps.column("finished_s").to_pylist(), abs=1e-6
    )


def test_the_counter_rises_never_below_zero_and_ends_at_the_number_in_flight(
    small_run: Run, tmp_path: Path
) -> None:
    result = small_run("areal", eta=4)
    started = sum(
        row["status"] == "in_flight" and row["started_s"] is not None
        for row in result.samples.to_pylist()
    )
    assert started > 0
    counters = defaultdict(list)
    for event in by_phase(result, tmp_path / "trace.json")["C"]:
        counters[event["name"]].append((event["ts"], event["args"]["running"]))
    workers = [f"requests of rollout-{i:03d}" for i in range(result.metadata["rollout_workers"])]
    assert list(counters) == ["requests", *workers]
    for points in counters.values():
        assert [ts for ts, _ in points] == sorted(ts for ts, _ in points)
        assert min(count for _, count in points) >= 0
    assert counters["requests"][-1][1] == started
    assert sum(counters[name][-1][1] for name in workers) == started


def test_points_left_out_of_a_counter_change_none_that_stays(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "simrl.show.perfetto.COUNTER_POINTS", 7 * 40
    )  # 40 intervals for each of 6 workers and their sum
    result = small_run("areal")
    times, counts = running_requests(result)
    points = [e for e in by_phase(result, tmp_path / "trace.json")["C"] if e["name"] == "requests"]
    assert len(points) <= 41 < len(times)
    exact = dict(zip(np.rint(times * 1e6).astype(int).tolist(), counts.tolist(), strict=True))
    assert all(exact[e["ts"]] == e["args"]["running"] for e in points)
    assert points[-1]["args"]["running"] == counts[-1]


def test_many_workers_share_one_counter(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simrl.show.perfetto.COUNTED_WORKERS", 5)
    events = by_phase(small_run("areal"), tmp_path / "trace.json")
    assert {e["name"] for e in events["C"]} == {"requests"}


def test_the_file_says_what_the_run_was_and_is_the_same_each_time(
    run: Result, tmp_path: Path
) -> None:
    write_perfetto(run, tmp_path / "a.json")
    write_perfetto(run, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    about = json.loads((tmp_path / "a.json").read_text())["otherData"]
    assert about["label"] == run.metadata["label"]
    assert about["profile_source"] == run.metadata["profile"]["source"]
