"""Timeline: a result as functions of time, for the pictures and the Perfetto export.

Invariant: arrays computed from the tables alone, exact: at every instant the shares of a set of
lanes sum to 1 ("idle" is a kind like the others), and their integral over a window is
`metrics.gpu_seconds`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.result.result import Lane, Result, codes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Window(NamedTuple):
    """A window of policy updates: steps `first_step` to `end_step` (not included), counted from 0
    as in the table `steps`, and the seconds from the end of the update before to the end of the
    last."""

    first_step: int
    end_step: int
    start_s: float
    end_s: float


def steady_window(result: Result, steps: int = 3, first_step: int | None = None) -> Window:
    """Return `steps` updates from `first_step` on; without it, the middle of the updates after the
    warm-up.

    There, the filling and the draining of the pipelines are furthest away. With fewer updates after
    the warm-up, the window includes updates of the warm-up. Raise `InputError` for a window without
    a step.
    """
    total = result.steps.num_rows
    steps = min(steps, total)
    first = (
        min((result.metadata["scenario"]["warmup_steps"] + total - steps) // 2, total - steps)
        if first_step is None
        else first_step
    )
    end = min(first + steps, total)
    if not 0 <= first < end:
        raise InputError(
            f"first_step {first}, steps {steps}: the run has steps 0 to {total - 1}; choose some of them"
        )
    finished_s = result.steps.column("finished_s").to_numpy()
    return Window(
        first, end, float(finished_s[first - 1]) if first else 0.0, float(finished_s[end - 1])
    )


class Spans(NamedTuple):
    """Spans as arrays, one element a span; `lane` and `kind` are positions in `lanes` and
    `kinds`."""

    lanes: tuple[Lane, ...]
    kinds: tuple[str, ...]
    lane: Ints
    kind: Ints
    started_s: Floats
    ended_s: Floats
    gpus: Ints
    policy_version: Ints
    tokens: Ints

    def where(self, chosen: NDArray[np.bool_]) -> Spans:
        return self._replace(**{name: getattr(self, name)[chosen] for name in self._fields[2:]})

    def within(self, start_s: float, end_s: float) -> Spans:
        """Return the spans in the window, cut at its ends."""
        cut = self._replace(
            started_s=np.clip(self.started_s, start_s, end_s),
            ended_s=np.clip(self.ended_s, start_s, end_s),
        )
        return cut.where(cut.ended_s > cut.started_s)

    def of_kind(self, *kinds: str) -> NDArray[np.bool_]:
        """Return which spans are of one of these kinds."""
        return np.isin(self.kinds, kinds)[self.kind]

    def rolls_out(self) -> NDArray[np.bool_]:
        """Return which spans are on a rollout worker's GPUs."""
        return np.array([rolls_out(lane) for lane in self.lanes], bool)[self.lane]


def rolls_out(lane: Lane) -> bool:
    """Return whether a lane is a rollout worker; the others are trainers and judges."""
    return lane.name.startswith("rollout")


def spans(result: Result) -> Spans:
    """Return the table `spans` as arrays; lanes in the order of the table."""
    columns = {name: result.spans.column(name).to_numpy() for name in Spans._fields[4:]}
    columns |= {
        name: columns[name].astype(np.int64) for name in ("gpus", "policy_version", "tokens")
    }
    (lane, names), (kind, kinds) = (codes(result.spans.column(name)) for name in ("lane", "kind"))
    gpus = columns["gpus"][np.unique(lane, return_index=True)[1]].tolist()
    return Spans(tuple(map(Lane, names, gpus)), tuple(kinds), lane, kind, **columns)


def shares(part: Spans) -> tuple[Floats, dict[str, Floats]]:
    """Return the shares of the GPUs by kind of span, for lanes whose spans begin and end together.

    These are the instants of changes (n + 1) and, by kind, the shares between them (n).
    """
    times = np.unique(np.concatenate([part.started_s, part.ended_s]))
    begins, ends = np.searchsorted(times, part.started_s), np.searchsorted(times, part.ended_s)
    total = sum(part.lanes[lane].gpus for lane in np.unique(part.lane))
    by_kind = {}
    for code, kind in enumerate(part.kinds):
        of_kind = part.kind == code
        change = np.bincount(begins[of_kind], part.gpus[of_kind], len(times))
        change -= np.bincount(ends[of_kind], part.gpus[of_kind], len(times))
        if of_kind.any():
            by_kind[kind] = np.cumsum(change)[:-1] / total
    return times, by_kind


def time_shares(part: Spans) -> dict[str, float]:
    """Return the share of the spans' GPU time by kind, without kinds that take none."""
    gpu_s = np.bincount(part.kind, (part.ended_s - part.started_s) * part.gpus, len(part.kinds))
    return {
        kind: float(s / gpu_s.sum()) for kind, s in zip(part.kinds, gpu_s, strict=True) if s > 0
    }


def idle_shares(part: Spans) -> tuple[float, float]:
    """Return two idle shares of the GPU time of some rollout workers: while others of them roll out
    (the long tail of a batch, or uneven work), and while all wait (for the trainer, the rewards or
    the staleness bound)."""
    times, by_kind = shares(part)
    idle = by_kind.get("idle", np.zeros(len(times) - 1)) * np.diff(times) / (times[-1] - times[0])
    others = by_kind.get("rollout", np.zeros(len(times) - 1)) > 0
    return float(idle[others].sum()), float(idle[~others].sum())


def running_requests(result: Result, worker: int | None = None) -> tuple[Floats, Ints]:
    """Return the instants at which requests at all workers, or one, begin or end, and the number of
    unfinished requests, also waiting ones, from each instant on. A request counts from its
    submission at the worker that gave its first token; the tables lack requests without a token."""
    table, samples = result.segments, result.samples
    uid, started_s, ended_s = (
        table.column(name).to_numpy() for name in ("uid", "started_s", "ended_s")
    )
    in_flight = (
        samples.filter(pc.equal(samples.column("status"), "in_flight")).column("uid").to_numpy()
    )
    last = np.r_[
        uid[1:] != uid[:-1], np.ones(min(len(uid), 1), bool)
    ]  # segments are in the order of uid and time
    ends = ~(last & np.isin(uid, in_flight))
    if worker is not None:
        at_worker = table.column("worker").to_numpy() == worker
        started_s, ended_s = started_s[at_worker], ended_s[at_worker & ends]
    else:
        ended_s = ended_s[ends]
    times, where = np.unique(np.concatenate([started_s, ended_s]), return_inverse=True)
    change = np.repeat([1, -1], [len(started_s), len(ended_s)])
    counts = np.cumsum(np.bincount(where, change, len(times)).astype(np.int64))
    keep = np.r_[True, counts[1:] != counts[:-1]][: len(times)]
    return times[keep], counts[keep]
