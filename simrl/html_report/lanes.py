"""Spans of a run as the page's timeline takes them: few bytes, and never more spans than it may have.

Invariant: every lane is covered from 0 to the end without a gap (as in the table `spans`), so durations are enough. Where a run
has more spans than may be kept, those shorter than some seconds are joined with their neighbours of the same stretch; the
joined span has the kind that took most of it, all its tokens, and how many it was; no second is lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.html_report.pictures import kind_colors
from simrl.result import Result
from simrl.timeline import Spans, rolls_out, running_requests, spans, steady_window, time_shares

TICKS = 1_000_000  # a run has so many units of time
INSTANTS = 1_000  # at which requests are counted


class Joined(NamedTuple):
    """Spans, lane by lane and in time; `of` is how many each was, `shortest_s` what was left as it is."""

    lane: NDArray[np.int64]
    kind: NDArray[np.int64]
    started_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]
    policy_version: NDArray[np.int64]
    tokens: NDArray[np.int64]
    of: NDArray[np.int64]
    shortest_s: float


def join(found: Spans, most: int) -> Joined:
    """At most so many spans, but never less than one for each lane."""
    order = np.lexsort((found.started_s, found.lane))
    found = found._replace(**{name: getattr(found, name)[order] for name in found._fields[2:]})
    whole_s = float(found.ended_s.max()) if len(order) else 0.0
    joined = _join(found, 0.0)
    shortest_s = whole_s / 65536
    while len(joined.lane) > max(most, len(found.lanes)) and shortest_s <= 2 * whole_s:
        joined = _join(found, shortest_s)
        shortest_s *= 2
    return joined


def _join(found: Spans, shortest_s: float) -> Joined:
    """Short spans that follow each other in a lane become one, up to the next multiple of `shortest_s`."""
    short = found.ended_s - found.started_s < shortest_s
    cell = np.floor(found.started_s / shortest_s) if shortest_s else found.started_s
    first = np.ones(len(short), bool)
    first[1:] = ~(short[1:] & short[:-1] & (found.lane[1:] == found.lane[:-1]) & (cell[1:] == cell[:-1]))
    starts = np.flatnonzero(first)
    group = np.cumsum(first) - 1
    kinds = len(found.kinds)
    seconds = np.bincount(group * kinds + found.kind, found.ended_s - found.started_s, len(starts) * kinds)
    ends = np.append(starts[1:], len(first))
    return Joined(
        lane=found.lane[starts],
        kind=seconds.reshape(-1, kinds).argmax(axis=1) if len(starts) else found.kind,
        started_s=found.started_s[starts],
        ended_s=found.ended_s[ends - 1],
        policy_version=found.policy_version[ends - 1],
        tokens=np.add.reduceat(found.tokens, starts) if len(starts) else found.tokens,
        of=ends - starts,
        shortest_s=shortest_s,
    )


def timeline(result: Result, most: int) -> dict[str, Any]:
    """The lanes of a run with at most so many spans, ready for JSON.

    Times are in units of `unit_s`; of each lane `ends` are durations (differences of ends), `kinds` a digit in base 36 a span,
    `versions` differences. `joined` is a list of [span, how many it was].
    """
    found = spans(result)
    end_s = float(result.metadata["end_s"])
    unit_s = end_s / TICKS if end_s > 0 else 1.0
    joined = join(found, most)
    lanes = []
    for code, lane in enumerate(found.lanes):
        mine = np.flatnonzero(joined.lane == code)
        ends = np.rint(joined.ended_s[mine] / unit_s).astype(np.int64)
        lanes.append(
            {
                "name": lane.name,
                "gpus": lane.gpus,
                "rollout": rolls_out(lane),
                "ends": np.diff(ends, prepend=0).tolist(),
                "kinds": "".join(np.base_repr(k, 36) for k in joined.kind[mine].tolist()),
                "versions": np.diff(joined.policy_version[mine], prepend=0).tolist(),
                "tokens": joined.tokens[mine].tolist(),
                "joined": [[i, n] for i, n in enumerate(joined.of[mine].tolist()) if n > 1],
            }
        )
    middle = steady_window(result)
    times, counts = _requests(result, end_s)
    return {
        "unit_s": unit_s,
        "end_s": end_s,
        "kinds": list(found.kinds),
        "colors": kind_colors(found.kinds),
        "shares": _shares(found),
        "lanes": lanes,
        "shortest_s": joined.shortest_s,
        "joined": int((joined.of[joined.of > 1]).sum()),
        "updates_s": [float(f"{s:.7g}") for s in result.steps.column("finished_s").to_pylist()],
        "steps": result.steps.column("step").to_pylist(),
        "window_s": [middle.start_s, middle.end_s],
        "requests": {"times": times, "counts": counts},
    }


def _shares(found: Spans) -> dict[str, dict[str, float]]:
    """By kind, its share of the GPU time of the rollout workers and of the trainer, where there are such."""
    parts = {"rollout GPUs": found.where(found.rolls_out()), "trainer": found.where(~found.rolls_out())}
    of_parts = {name: time_shares(part) for name, part in parts.items() if len(part.kind)}
    return {
        kind: {name: round(shares[kind], 5) for name, shares in of_parts.items() if kind in shares}
        for kind in found.kinds
    }


def _requests(result: Result, end_s: float) -> tuple[list[float], list[int]]:
    """Requests at the workers: at each change, or at so many instants where there are more."""
    times, counts = running_requests(result)
    if not len(times):
        return [0.0, end_s], [0, 0]
    if len(times) > INSTANTS:
        at = np.linspace(0.0, end_s, INSTANTS)
        before = np.searchsorted(times, at, side="right") - 1
        times, counts = at, np.where(before >= 0, counts[before], 0)
    return [float(f"{t:.6g}") for t in times.tolist()], counts.tolist()
