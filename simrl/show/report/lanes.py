"""Spans of a run for the page's timeline, in few bytes and with a bound on their number.

Invariant: every lane is covered from 0 to the end without a gap (as in the table `spans`), so durations are enough. Where a run
has more spans than may be kept, those shorter than some seconds are joined with their neighbours of that stretch; the
joined span has the kind that took most of it, all its tokens, and how many it was; no second is lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simrl.result.result import Result
from simrl.result.timeline import Ints, Spans, rolls_out, running_requests, spans, steady_window, time_shares
from simrl.show.figures.timeline import kind_words
from simrl.show.style import LOOKS, UNKNOWN

TICKS = 1_000_000  # units of time in a run
INSTANTS = 1_000  # at which requests are counted


class Joined(NamedTuple):
    """Spans, lane by lane and in time; `of` is how many each was, `shortest_s` what was left as it is."""

    spans: Spans
    of: Ints
    shortest_s: float


def join(found: Spans, most: int) -> Joined:
    """Return `most` spans at most, but never less than one for each lane."""
    order = np.lexsort((found.started_s, found.lane))
    found = found._replace(**{name: getattr(found, name)[order] for name in found._fields[2:]})
    joined = Joined(found, np.ones(len(order), np.int64), 0.0)
    if len(order) > max(most, len(found.lanes)):
        whole_s = float(found.ended_s.max())
        shortest_s = whole_s / 65536
        while len(joined.of) > max(most, len(found.lanes)) and shortest_s <= 2 * whole_s:
            joined = _join(found, shortest_s)
            shortest_s *= 2
    return joined


def _join(found: Spans, shortest_s: float) -> Joined:
    """Join short spans that follow each other in a lane, up to the next multiple of `shortest_s`."""
    seconds = found.ended_s - found.started_s
    short, cell = seconds < shortest_s, np.floor(found.started_s / shortest_s)
    first = np.ones(len(short), bool)
    first[1:] = ~(short[1:] & short[:-1] & (found.lane[1:] == found.lane[:-1]) & (cell[1:] == cell[:-1]))
    starts, kinds = np.flatnonzero(first), len(found.kinds)
    ends = np.append(starts[1:], len(first))
    by_kind = np.bincount((np.cumsum(first) - 1) * kinds + found.kind, seconds, len(starts) * kinds)
    joined = found.where(first)._replace(
        kind=by_kind.reshape(-1, kinds).argmax(axis=1),
        ended_s=found.ended_s[ends - 1],
        policy_version=found.policy_version[ends - 1],
        tokens=np.add.reduceat(found.tokens, starts),
    )
    return Joined(joined, ends - starts, shortest_s)


def timeline(result: Result, most: int) -> dict[str, Any]:
    """Return the lanes of a run with at most `most` spans, ready for JSON.

    Times are in units of `unit_s`; of each lane `ends` are durations (differences of ends), `kinds` a digit in base 36 a span,
    `versions` differences. `joined` is a list of [span, how many it was].
    """
    found = spans(result)
    end_s = float(result.metadata["end_s"])
    unit_s = end_s / TICKS if end_s > 0 else 1.0
    joined = join(found, most)
    lanes = []
    for code, lane in enumerate(found.lanes):
        chosen = joined.spans.lane == code
        mine, of = joined.spans.where(chosen), joined.of[chosen]
        lanes.append(
            {
                "name": lane.name,
                "gpus": lane.gpus,
                "rollout": rolls_out(lane),
                "ends": np.diff(np.rint(mine.ended_s / unit_s).astype(np.int64), prepend=0).tolist(),
                "kinds": "".join(np.base_repr(k, 36) for k in mine.kind.tolist()),
                "versions": np.diff(mine.policy_version, prepend=0).tolist(),
                "tokens": mine.tokens.tolist(),
                "joined": [[i, n] for i, n in enumerate(of.tolist()) if n > 1],
            }
        )
    middle, looks = steady_window(result), [LOOKS.get(kind, UNKNOWN) for kind in found.kinds]
    return {
        "unit_s": unit_s,
        "end_s": end_s,
        "kinds": list(found.kinds),
        "words": [kind_words(kind) for kind in found.kinds],
        "colors": [look.color for look in looks],
        "hatched": [bool(look.hatch) for look in looks],
        "shares": _shares(found),
        "lanes": lanes,
        "shortest_s": joined.shortest_s,
        "joined": int((joined.of[joined.of > 1]).sum()),
        "updates_s": [float(f"{s:.7g}") for s in result.steps.column("finished_s").to_pylist()],
        "steps": result.steps.column("step").to_pylist(),
        "window_s": [middle.start_s, middle.end_s],
        "requests": _requests(result, end_s),
    }


def _shares(found: Spans) -> dict[str, dict[str, float]]:
    """Return by kind its share of the GPU time of the rollout workers and of the trainer, if there are such."""
    parts = {"rollout GPUs": found.where(found.rolls_out()), "trainer": found.where(~found.rolls_out())}
    of_parts = {name: time_shares(part) for name, part in parts.items() if len(part.kind)}
    return {
        kind: {name: round(shares[kind], 5) for name, shares in of_parts.items() if kind in shares}
        for kind in found.kinds
    }


def _requests(result: Result, end_s: float) -> dict[str, Any]:
    """Return the requests at the workers: at each change, or at `INSTANTS` instants if there are more changes."""
    times, counts = running_requests(result)
    if not len(times):
        return {"times": [0.0, end_s], "counts": [0, 0]}
    if len(times) > INSTANTS:
        at = np.linspace(0.0, end_s, INSTANTS)
        before = np.searchsorted(times, at, side="right") - 1
        times, counts = at, np.where(before >= 0, counts[before], 0)
    return {"times": [float(f"{t:.6g}") for t in times.tolist()], "counts": counts.tolist()}
