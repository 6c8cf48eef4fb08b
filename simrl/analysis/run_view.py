"""A view of a run for comparison: the tables of a `Result` by sample and by worker, and its rollout
clock.

Invariant: everything is looked up in the tables but the *rollout clock*, which is derived: the
seconds before an instant in which some worker rolled out.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from simrl.result.result import Result
from simrl.result.timeline import Floats, Ints, Spans, rolls_out, spans
from simrl.validation import with_parameters


class Clock(NamedTuple):
    """Seconds of rollout before an instant: linear between `times`, constant outside."""

    times: Floats
    seconds: Floats

    def __call__(self, at_s: Any) -> Any:
        return np.interp(at_s, self.times, self.seconds)


def rollout_clock(result: Result, worker: int | None = None) -> Clock:
    """Return the seconds in which some worker, or this one, rolled out."""
    timeline = spans(result)
    rolls = timeline.of_kind("rollout") & (worker is None or _at(timeline, worker))
    return busy_clock(timeline.started_s[rolls], timeline.ended_s[rolls])


def busy_clock(started_s: Floats, ended_s: Floats) -> Clock:
    """Return the seconds covered by these intervals, which may overlap."""
    order = np.argsort(started_s, kind="stable")
    started_s, ended_s = started_s[order], ended_s[order]
    if not len(started_s):
        return Clock(np.zeros(1), np.zeros(1))
    reach_s = np.maximum.accumulate(ended_s)
    first = np.r_[True, started_s[1:] > reach_s[:-1]]
    begins, ends = started_s[first], reach_s[np.r_[first[1:], True]]
    durations = np.stack([np.zeros(len(begins)), ends - begins], axis=1).ravel()
    return Clock(np.stack([begins, ends], axis=1).ravel(), np.cumsum(durations))


class LoadedVersion(NamedTuple):
    """A load of a version at a worker."""

    value: int
    started_s: float
    ended_s: float


class RunView(NamedTuple):
    """The tables of a run; mappings by uid lack the samples that did not start, or finish."""

    result: Result
    workers: int
    clock: Clock  # of all workers together
    clocks: tuple[Clock, ...]  # by worker
    updated_s: Floats
    names: Mapping[int, str]  # by uid: prompt/sample/epoch
    samples: Mapping[str, Ints]
    segments: Mapping[str, NDArray[Any]]  # also trained_step
    started_s: Mapping[int, float]  # by uid
    finished_s: Mapping[int, float]
    loads: tuple[tuple[LoadedVersion, ...], ...]  # by worker, in time


def short_name(metadata: Mapping[str, Any]) -> str:
    """Return system and model in a few words, with the name alone of a nested parameter, and the
    folder of a model's path."""
    scenario = metadata.get("scenario", {})
    words = {
        key: value.get("name", value) if isinstance(value, dict) else value
        for key, value in scenario.get("system", {"name": metadata.get("label", "")}).items()
    }
    label = with_parameters(words.pop("name"), words)
    model = Path(scenario.get("model", ""))
    return " on ".join(
        filter(None, (label, model.parent.name if model.name == "config.json" else model.name))
    )


def view_run(result: Result) -> RunView:
    """Return the tables of a result for comparison."""
    numbers = [lane.name.rpartition("-")[2] for lane in spans(result).lanes if rolls_out(lane)]
    workers = sum(
        number.isdecimal() for number in numbers
    )  # "rollout-rest", GPUs that make no worker, has no number
    if not numbers:  # stopped before anything took time
        workers = result.metadata.get("rollout_workers") or 0
    samples = {
        name: pc.fill_null(result.samples.column(name), -1).to_numpy()
        for name in result.samples.column_names
        if name not in ("status", "started_s", "finished_s")
    }
    segments = {
        name: result.segments.column(name).to_numpy() for name in result.segments.column_names
    }
    uids = samples["uid"].tolist()
    trained_in = dict(zip(uids, samples["trained_step"].tolist(), strict=True))
    segments["trained_step"] = np.array(
        [trained_in[uid] for uid in segments["uid"].tolist()], np.int64
    )
    names = zip(
        *(map(str, samples[key].tolist()) for key in ("prompt_id", "sample", "epoch")), strict=True
    )
    started_s, finished_s = (
        {
            uid: at_s
            for uid, at_s in zip(uids, result.samples.column(name).to_pylist(), strict=True)
            if at_s is not None
        }
        for name in ("started_s", "finished_s")
    )
    return RunView(
        result=result,
        workers=workers,
        clock=rollout_clock(result),
        clocks=tuple(rollout_clock(result, worker) for worker in range(workers)),
        updated_s=result.steps.column("finished_s").to_numpy(),
        names=dict(zip(uids, map("/".join, names), strict=True)),
        samples=samples,
        segments=segments,
        started_s=started_s,
        finished_s=finished_s,
        loads=tuple(_loads(result, worker) for worker in range(workers)),
    )


def _at(timeline: Spans, worker: int) -> NDArray[np.bool_]:
    """Return which spans are at this worker."""
    return np.array(
        [rolls_out(lane) and lane.name.endswith(f"-{worker:03d}") for lane in timeline.lanes], bool
    )[timeline.lane]


def _loads(result: Result, worker: int) -> tuple[LoadedVersion, ...]:
    timeline = spans(result)
    loads = timeline.where(timeline.of_kind("load_weights") & _at(timeline, worker))
    columns = zip(loads.policy_version.tolist(), loads.started_s, loads.ended_s, strict=True)
    return tuple(sorted(map(LoadedVersion._make, columns), key=itemgetter(1)))
