"""Spans of a run for the page's timeline, in few bytes and with a bound on their number.

Invariant: every lane is covered from 0 to the end without a gap (as in the table `spans`), so
durations are enough. If a run has too many spans, those shorter than some seconds are joined with
short neighbours. The joined span has the kind that took most of the time, all tokens, and the
number of spans; no second is lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simrl.result.result import Result
from simrl.result.timeline import (
    Ints,
    Spans,
    rolls_out,
    running_requests,
    spans,
    steady_window,
    time_shares,
)
from simrl.show.figures.timeline import kind_words
from simrl.show.style import LOOKS, UNKNOWN

TICKS = 1_000_000  # units of time in a run
INSTANTS = 1_000  # at which requests are counted


class Joined(NamedTuple):
    """Spans, lane by lane and in time; `of` is the number that each was, `shortest_s` the shortest
    that was never joined."""

    spans: Spans
    of: Ints
    shortest_s: float


def join(part: Spans, most: int) -> Joined:
    """Return at most `most` spans, but at least one for each lane."""
    order = np.lexsort((part.started_s, part.lane))
    part = part._replace(**{name: getattr(part, name)[order] for name in part._fields[2:]})
    joined, most = Joined(part, np.ones(len(order), np.int64), 0.0), max(most, len(part.lanes))
    shortest_s = longest_s = float(part.ended_s.max(initial=0.0))
    shortest_s /= 65536
    while len(joined.of) > most and shortest_s <= 2 * longest_s:
        joined = _join(part, shortest_s)
        shortest_s *= 2
    return joined


def _join(part: Spans, shortest_s: float) -> Joined:
    """Join short spans that follow each other in a lane, up to the next multiple of
    `shortest_s`."""
    seconds = part.ended_s - part.started_s
    short, cell = seconds < shortest_s, np.floor(part.started_s / shortest_s)
    first = np.ones(len(short), bool)
    first[1:] = ~(
        short[1:] & short[:-1] & (part.lane[1:] == part.lane[:-1]) & (cell[1:] == cell[:-1])
    )
    starts, kinds = np.flatnonzero(first), len(part.kinds)
    ends = np.append(starts[1:], len(first))
    by_kind = np.bincount((np.cumsum(first) - 1) * kinds + part.kind, seconds, len(starts) * kinds)
    joined = part.where(first)._replace(
        kind=by_kind.reshape(-1, kinds).argmax(axis=1),
        ended_s=part.ended_s[ends - 1],
        policy_version=part.policy_version[ends - 1],
        tokens=np.add.reduceat(part.tokens, starts),
    )
    return Joined(joined, ends - starts, shortest_s)


def timeline(result: Result, most: int) -> dict[str, Any]:
    """Return the lanes of a run with at most `most` spans, ready for JSON.

    Times are in units of `unit_s`. Of each lane, `ends` are durations (differences of ends),
    `kinds` has a digit in base 36 for each span, `versions` are differences, and `joined` is a list
    of [span, number of spans that it was].
    """
    of_run = spans(result)
    end_s = float(result.metadata["end_s"])
    unit_s = end_s / TICKS if end_s > 0 else 1.0
    joined = join(of_run, most)
    lanes = []
    for code, lane in enumerate(of_run.lanes):
        chosen = joined.spans.lane == code
        of_lane, counts = joined.spans.where(chosen), joined.of[chosen]
        lanes.append(
            {
                "name": lane.name,
                "gpus": lane.gpus,
                "rollout": rolls_out(lane),
                "ends": np.diff(
                    np.rint(of_lane.ended_s / unit_s).astype(np.int64), prepend=0
                ).tolist(),
                "kinds": "".join(np.base_repr(k, 36) for k in of_lane.kind.tolist()),
                "versions": np.diff(of_lane.policy_version, prepend=0).tolist(),
                "tokens": of_lane.tokens.tolist(),
                "joined": [[i, n] for i, n in enumerate(counts.tolist()) if n > 1],
            }
        )
    middle, looks = steady_window(result), [LOOKS.get(kind, UNKNOWN) for kind in of_run.kinds]
    return {
        "unit_s": unit_s,
        "end_s": end_s,
        "kinds": list(of_run.kinds),
        "words": [kind_words(kind) for kind in of_run.kinds],
        "colors": [look.color for look in looks],
        "hatched": [bool(look.hatch) for look in looks],
        "shares": _shares(of_run),
        "lanes": lanes,
        "shortest_s": joined.shortest_s,
        "joined": int((joined.of[joined.of > 1]).sum()),
        "updates_s": [float(f"{s:.7g}") for s in result.steps.column("finished_s").to_pylist()],
        "steps": result.steps.column("step").to_pylist(),
        "window_s": [middle.start_s, middle.end_s],
        "requests": _requests(result, end_s),
    }


def _shares(part: Spans) -> dict[str, dict[str, float]]:
    """Return the share of each kind in the GPU time of the rollout workers and of the trainer, if
    there are such."""
    pools = {
        words: time_shares(
            part.where(np.array([lane.name.startswith(use) for lane in part.lanes])[part.lane])
        )
        for words, use in (("rollout GPUs", "rollout"), ("trainer", "train"), ("judge", "judge"))
    }
    return {
        kind: {pool: round(by_kind[kind], 5) for pool, by_kind in pools.items() if kind in by_kind}
        for kind in part.kinds
    }


def _requests(result: Result, end_s: float) -> dict[str, Any]:
    """Return the number of requests at the workers: at each change, or at `INSTANTS` instants if
    changes are more."""
    times, counts = running_requests(result)
    if not len(times):
        return {"times": [0.0, end_s], "counts": [0, 0]}
    if len(times) > INSTANTS:
        at = np.linspace(0.0, end_s, INSTANTS)
        before = np.searchsorted(times, at, side="right") - 1
        times, counts = at, np.where(before >= 0, counts[before], 0)
    return {"times": [float(f"{t:.6g}") for t in times.tolist()], "counts": counts.tolist()}
