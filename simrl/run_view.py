"""A run as it is compared: the tables of a `Result` by sample and by worker, and its rollout clock.

Invariant: what the tables say, looked up and nothing derived but the *rollout clock*: the seconds before an instant in which a
worker rolled out.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from simrl.result import Result
from simrl.timeline import rolls_out, spans

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Clock(NamedTuple):
    """Seconds of rollout before an instant: linear between `times`, constant outside."""

    times: Floats
    seconds: Floats

    def __call__(self, at_s: Any) -> Any:
        return np.interp(at_s, self.times, self.seconds)


def rollout_clock(result: Result, worker: int | None = None) -> Clock:
    """Seconds in which some worker rolled out; or one of them."""
    found = spans(result)
    rolls = np.array([kind == "rollout" for kind in found.kinds], bool)[found.kind]
    if worker is not None:
        rolls &= np.array([lane.name for lane in found.lanes])[found.lane] == _lane(worker)
    return busy_clock(found.started_s[rolls], found.ended_s[rolls])


def busy_clock(started_s: Floats, ended_s: Floats) -> Clock:
    """Seconds that lie in some of these intervals, which may overlap."""
    order = np.argsort(started_s, kind="stable")
    started_s, ended_s = started_s[order], ended_s[order]
    if not len(started_s):
        return Clock(np.zeros(1), np.zeros(1))
    reach_s = np.maximum.accumulate(ended_s)
    first = np.r_[True, started_s[1:] > reach_s[:-1]]
    begins, ends = started_s[first], reach_s[np.r_[first[1:], True]]
    durations = np.stack([np.zeros(len(begins)), ends - begins], axis=1).ravel()
    return Clock(np.stack([begins, ends], axis=1).ravel(), np.cumsum(durations))


class Load(NamedTuple):
    """A version that comes to a worker."""

    value: int
    started_s: float
    ended_s: float


class RunView(NamedTuple):
    """The tables of a run; what is by uid lacks the samples that did not come so far."""

    result: Result
    workers: int
    clock: Clock  # of all workers, and
    clocks: tuple[Clock, ...]  # of each
    updated_s: Floats
    names: Mapping[int, tuple[int, int, int]]  # by uid: prompt, sample, epoch
    samples: Mapping[str, Ints]
    segments: Mapping[str, NDArray[Any]]  # also trained_step
    started_s: Mapping[int, float]  # by uid
    finished_s: Mapping[int, float]
    loads: tuple[tuple[Load, ...], ...]  # by worker, in time

    def name(self, uid: int) -> str:
        """A sample as users know it: prompt/sample/epoch."""
        return "/".join(map(str, self.names[uid]))


def short_name(metadata: Mapping[str, Any]) -> str:
    """System and model in a few words: of a nested parameter the name alone, of a model's path its folder."""
    scenario = metadata.get("scenario", {})
    system = scenario.get("system", {"name": metadata.get("label", "")})
    named = {
        key: value["name"] if isinstance(value, Mapping) and "name" in value else value for key, value in system.items()
    }
    parameters = ", ".join(f"{key}={value}" for key, value in named.items() if key != "name")
    label = f"{named['name']}({parameters})" if parameters else named["name"]
    model = Path(scenario.get("model", ""))
    return " on ".join(
        part for part in (label, model.parent.name if model.name == "config.json" else model.name) if part
    )


def view_run(result: Result) -> RunView:
    """Looks up the tables."""
    numbers = [lane.name.rpartition("-")[2] for lane in spans(result).lanes if rolls_out(lane)]
    workers = sum(number.isdecimal() for number in numbers)  # the other is "rollout-rest", GPUs that make no worker
    if not numbers:  # stopped before anything took time
        workers = result.metadata.get("rollout_workers", 0)
    samples = {
        name: pc.fill_null(result.samples.column(name), -1).to_numpy()
        for name in result.samples.column_names
        if name not in ("status", "started_s", "finished_s")
    }
    segments = {name: result.segments.column(name).to_numpy() for name in result.segments.column_names}
    trained_in = dict(zip(samples["uid"].tolist(), samples["trained_step"].tolist(), strict=True))
    segments["trained_step"] = np.array([trained_in[uid] for uid in segments["uid"].tolist()], np.int64)
    uids = samples["uid"].tolist()
    started_s, finished_s = (
        {uid: at_s for uid, at_s in zip(uids, result.samples.column(name).to_pylist(), strict=True) if at_s is not None}
        for name in ("started_s", "finished_s")
    )
    return RunView(
        result=result,
        workers=workers,
        clock=rollout_clock(result),
        clocks=tuple(rollout_clock(result, worker) for worker in range(workers)),
        updated_s=result.steps.column("finished_s").to_numpy(),
        names=dict(
            zip(uids, zip(*(samples[n].tolist() for n in ("prompt_id", "sample", "epoch")), strict=True), strict=True)
        ),
        samples=samples,
        segments=segments,
        started_s=started_s,
        finished_s=finished_s,
        loads=_loads(result, workers),
    )


def _lane(worker: int) -> str:
    return f"rollout-{worker:03d}"


def _loads(result: Result, workers: int) -> tuple[tuple[Load, ...], ...]:
    found = spans(result)
    loads = found.where(np.array([kind == "load_weights" for kind in found.kinds], bool)[found.kind])
    by_lane: dict[str, list[Load]] = {}
    for lane, *load in zip(loads.lane, loads.policy_version.tolist(), loads.started_s, loads.ended_s, strict=True):
        by_lane.setdefault(found.lanes[lane].name, []).append(Load(*load))
    return tuple(tuple(sorted(by_lane.get(_lane(w), ()), key=itemgetter(1))) for w in range(workers))
