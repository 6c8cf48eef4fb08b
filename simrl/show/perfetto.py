"""Perfetto: a run as Chrome trace events, to be opened at https://ui.perfetto.dev or in
chrome://tracing and zoomed.

Invariant: the file is one JSON object in Google's Trace Event Format; its slices are the spans of
the result except the idle ones, so a gap in a lane is a bubble. Times are microseconds since the
start of the run. Both ends of a span are rounded alike, so that slices of one track do not overlap,
which Perfetto's importer requires.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simrl.files import write_whole_file
from simrl.result.result import Lane, Result
from simrl.result.timeline import Floats, Ints, Spans, rolls_out, running_requests, spans

ROLLOUT, TRAINER = 1, 2  # process ids
FIRST_LANE = 101  # thread ids; none equals a process id, Perfetto would take it for the main thread
COUNTED_WORKERS = 32
COUNTER_POINTS = 40_000


def write_perfetto(result: Result, path: str | Path) -> None:
    """Write the run as a JSON trace with a track for each lane.

    Rollout workers are one process and trainers another; a slice is named by the kind of its span
    and carries its policy_version, tokens and gpus. Policy updates are instants ("end of step 7")
    with the numbers of the table `steps`. Counters are the requests at all workers
    (`timeline.running_requests`) and, up to 32 workers, at each. Each counter is divided into
    40,000 / counters equal intervals, at most 5,000, with a point at the last change in each: every
    point is exact, changes in between are left out. Raises `InputError` if the file cannot be
    written.
    """
    with write_whole_file(Path(path)) as temporary, temporary.open("w", encoding="utf-8") as file:
        head = {"displayTimeUnit": "ms", "otherData": _about(result)}
        file.write(json.dumps(head, ensure_ascii=False)[:-1] + ', "traceEvents": [\n')
        file.write(",\n".join(_events(result)))
        file.write("\n]}\n")


def _about(result: Result) -> dict[str, Any]:
    """Return the facts about the run that its metadata has."""
    metadata = result.metadata
    plain = ("label", "variant", "gpus", "paper", "simrl_version")
    return {key: metadata[key] for key in plain if key in metadata} | {
        f"{key}_source": metadata[key]["source"] for key in ("trace", "profile") if key in metadata
    }


def _events(result: Result) -> Iterator[str]:
    """Yield every event as JSON text. Format strings write the frequent ones, about five times as
    fast as `json.dumps`."""
    all_spans = spans(result)
    yield from map(json.dumps, _names(all_spans.lanes))
    yield from _slices(all_spans.where(~all_spans.of_kind("idle")))
    yield from map(json.dumps, _updates(result))
    rollout = [lane.name for lane in all_spans.lanes if rolls_out(lane)]
    counted = rollout if 1 < len(rollout) <= COUNTED_WORKERS else []
    resolution_s = result.metadata["end_s"] / min(COUNTER_POINTS // (1 + len(counted)), 5000)
    yield from _counter("requests", running_requests(result), resolution_s)
    for worker, name in enumerate(counted):
        yield from _counter(f"requests of {name}", running_requests(result, worker), resolution_s)


def _names(lanes: tuple[Lane, ...]) -> Iterator[dict[str, Any]]:
    for order, (process, name) in enumerate(((ROLLOUT, "rollout workers"), (TRAINER, "trainer"))):
        if any(_process(lane) == process for lane in lanes):
            yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
            yield {
                "ph": "M",
                "pid": process,
                "name": "process_sort_index",
                "args": {"sort_index": order},
            }
    for number, lane in enumerate(lanes):
        place = {"ph": "M", "pid": _process(lane), "tid": FIRST_LANE + number}
        yield {**place, "name": "thread_name", "args": {"name": lane.name}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": number}}


def _slices(busy: Spans) -> Iterator[str]:
    heads = [
        f'{{"ph":"X","pid":{_process(lane)},"tid":{FIRST_LANE + i}'
        for i, lane in enumerate(busy.lanes)
    ]
    names = [json.dumps(kind) for kind in busy.kinds]
    started, ended = _microseconds(busy.started_s), _microseconds(busy.ended_s)
    columns = (
        busy.lane,
        busy.kind,
        started,
        ended - started,
        busy.policy_version,
        busy.tokens,
        busy.gpus,
    )
    for lane, kind, start, duration, version, tokens, gpus in zip(
        *(c.tolist() for c in columns), strict=True
    ):
        yield (
            f'{heads[lane]},"name":{names[kind]},"ts":{start},"dur":{duration},'
            f'"args":{{"policy_version":{version},"tokens":{tokens},"gpus":{gpus}}}}}'
        )


def _updates(result: Result) -> Iterator[dict[str, Any]]:
    for step in result.steps.to_pylist():
        yield {
            "ph": "i",
            "s": "g",
            "pid": ROLLOUT,
            "tid": FIRST_LANE,
            "name": f"end of step {step['step']}",
            "ts": round(step["finished_s"] * 1e6),
            "args": step,
        }


def _counter(name: str, requests: tuple[Floats, Ints], resolution_s: float) -> Iterator[str]:
    """Yield the last change in each interval of `resolution_s`."""
    times_s, counts = requests
    interval = np.floor(times_s / resolution_s)
    last = np.append(interval[1:] != interval[:-1], True)[: len(times_s)]
    head = f'{{"ph":"C","pid":{ROLLOUT},"name":{json.dumps(name)},"ts":'
    for at, count in zip(_microseconds(times_s[last]).tolist(), counts[last].tolist(), strict=True):
        yield f'{head}{at},"args":{{"running":{count}}}}}'


def _process(lane: Lane) -> int:
    return ROLLOUT if rolls_out(lane) else TRAINER


def _microseconds(seconds: Floats) -> NDArray[np.int64]:
    return np.rint(seconds * 1e6).astype(np.int64)
