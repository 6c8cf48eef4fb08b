"""Decisions that two runs of one schedule took differently, and near-ties that explain them.

Invariant: from the tables alone, and about samples that finished in both runs: which workers they
went to, in which order they started at one, which weights made them; and which weights each worker
loaded. A difference is a near-tie only if two events around it, hardly apart in one run, came in
the opposite order in the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

import numpy as np

from simrl.analysis.run_view import LoadedVersion, RunView
from simrl.result.timeline import Floats, Ints

Moment = Sequence[float]  # seconds since the start of the run: predicted, measured

# At one instant, ends of samples come first, then loads and updates, then starts, which meet the
# weights loaded there.
FINISH, CHANGE, START = 0, 1, 2


@dataclass(frozen=True)
class Discrepancy:
    """A decision that differs between the runs, in a sentence.

    kind         "worker" (which worker a sample went to), "migration" (to which others then), "order" (which of two samples
                 started first at a worker), "loads" (which weights a worker loaded), "versions" (which weights made a sample)
    at_s         its time in the predicted run; in the measured run for a decision of that run alone
    near_tie_ms  None for a real difference; else the gap between two events, hardly apart, that changed places where the runs
                 parted
    """

    kind: str
    worker: int | None
    uid: int | None
    text: str
    at_s: float
    near_tie_ms: float | None


class _Begin(NamedTuple):
    """A value from an instant on: the worker of a sample, or the version of its tokens."""

    value: int
    started_s: float


_Begun = Sequence[_Begin] | Sequence[LoadedVersion]


def differences(p: RunView, m: RunView, uids: Sequence[int], tie_s: float) -> Iterator[Discrepancy]:
    """Yield the different decisions of the predicted and the measured run on the samples `uids`.
    Events within `tie_s` may change places."""
    placements = (_by_sample(p, "worker"), _by_sample(m, "worker"))
    versions = (_by_sample(p, "policy_version"), _by_sample(m, "policy_version"))
    places = {
        uid: sorted({s.value for run in placements for s in run.get(uid, ())}) for uid in uids
    }
    of_sample = {uid: _sample_events(p, m, uid) for uid in uids}
    loads = [_load_events(worker, p.loads[worker], m.loads[worker]) for worker in range(p.workers)]
    at_worker = [
        _Events.joined([loads[worker], *(of_sample[uid] for uid in uids if worker in places[uid])])
        for worker in range(p.workers)
    ]
    of_run = _run_events(p, m)
    for uid in uids:
        ended_s = p.finished_s[uid], m.finished_s[uid]
        predicted, measured = placements[0].get(uid, []), placements[1].get(uid, [])
        if parted := _parting(predicted, measured):
            moved = predicted[:1] and measured[:1] and predicted[0].value == measured[0].value
            text = f"sample {p.names[uid]}: worker {_values(predicted)} (predicted), {_values(measured)} (measured)"
            rivals = [of_run, *(at_worker[worker] for worker in places[uid])]
            about_s: list[Moment] = [
                [
                    at_s if math.isfinite(at_s) else end_s
                    for at_s, end_s in zip(parted[1], ended_s, strict=True)
                ]
            ]
            yield _difference(
                "migration" if moved else "worker", uid, text, parted[1], about_s, rivals, tie_s
            )
        predicted, measured = versions[0].get(uid, []), versions[1].get(uid, [])
        if parted := _parting(predicted, measured):
            text = f"sample {p.names[uid]}: made by weights {_values(predicted)} (predicted), {_values(measured)} (measured)"
            rivals = [of_sample[uid], *(loads[worker] for worker in places[uid])]
            about_s = [parted[1], (p.started_s[uid], m.started_s[uid]), ended_s]
            yield _difference("versions", uid, text, parted[1], about_s, rivals, tie_s)
    for worker in range(p.workers):
        yield from _other_loads(p, m, worker, [of_run, at_worker[worker]], tie_s)
        yield from _other_orders(p, uids, worker, placements, tie_s)


def _by_sample(view: RunView, column: str) -> dict[int, list[_Begin]]:
    """Return by uid the values of a column of the segments where they change."""
    changes: dict[int, list[_Begin]] = {}
    table = view.segments
    for uid, value, at_s in zip(
        *(table[n].tolist() for n in ("uid", column, "started_s")), strict=True
    ):
        values = changes.setdefault(uid, [])
        if not values or values[-1].value != value:
            values.append(_Begin(value, at_s))
    return changes


def _parting(predicted: _Begun, measured: _Begun) -> tuple[int, Moment] | None:
    """Return the place of the first value that differs between the runs, and its beginning in
    either run, infinite where a run has no value there. Return None if all values are equal."""
    pairs: Iterator[tuple[Any, Any]] = zip_longest(predicted, measured)
    for place, both in enumerate(pairs):
        if None in both or both[0].value != both[1].value:
            return place, [begin.started_s if begin else math.inf for begin in both]
    return None


def _values(begins: Sequence[_Begin]) -> str:
    return ", then ".join(str(begin.value) for begin in begins) or "none"


def _other_loads(
    p: RunView, m: RunView, worker: int, rivals: Sequence[_Events], tie_s: float
) -> Iterator[Discrepancy]:
    """Yield a difference in the weights that a worker loaded; of an interrupted run, only its own
    loads are compared."""
    predicted, measured = p.loads[worker], m.loads[worker]
    if len(p.updated_s) > len(m.updated_s):
        predicted = predicted[: len(measured)]
    elif len(m.updated_s) > len(p.updated_s):
        measured = measured[: len(predicted)]
    if parted := _parting(predicted, measured):
        i, decided_s = parted
        loaded = [
            f"version {run[i].value}" if i < len(run) else "none" for run in (predicted, measured)
        ]
        text = f"worker {worker}: its load {i + 1} of weights is {loaded[0]} (predicted), {loaded[1]} (measured)"
        yield _difference("loads", worker, text, decided_s, [decided_s], rivals, tie_s)


def _other_orders(
    p: RunView,
    uids: Sequence[int],
    worker: int,
    placements: tuple[dict[int, list[_Begin]], dict[int, list[_Begin]]],
    tie_s: float,
) -> Iterator[Discrepancy]:
    """Yield samples that started at the worker in both runs in another order. Starts within `tie_s`
    in both have no order.

    A sample is compared with the one that starts last in the measurement among its predecessors in
    the prediction. All samples that overtook one sample are one difference.
    """
    first = [
        {
            uid: next((s.started_s for s in places.get(uid, ()) if s.value == worker), None)
            for uid in uids
        }
        for places in placements
    ]
    common = [uid for uid in uids if first[0][uid] is not None and first[1][uid] is not None]
    common.sort(key=lambda uid: (first[0][uid], first[1][uid]))
    p_s, m_s = (np.array([run[uid] for uid in common], np.float64) for run in first)
    if len(common) < 2:
        return
    last = _last_so_far(m_s)
    overtakings: list[tuple[int, int, bool]] = []  # overtaken, overtaking, beyond a near-tie
    for i in range(1, len(common)):
        before = int(
            np.searchsorted(p_s[:i], p_s[i] - tie_s, "left")
        )  # these start well before it in the prediction
        clear, near = (
            (last[before - 1] if before else -1),
            last[int(np.searchsorted(p_s[:i], p_s[i], "left")) - 1],
        )
        if clear >= 0 and m_s[clear] > m_s[i] + tie_s:
            overtakings.append((int(clear), i, True))
        elif clear >= 0 and m_s[clear] > m_s[i]:
            overtakings.append((int(clear), i, False))
        elif p_s[i] > p_s[0] and m_s[near] > m_s[i] + tie_s:
            overtakings.append((int(near), i, False))
    for (slow, real), same in groupby(
        sorted(overtakings, key=lambda f: (f[0], f[2], f[1])), key=lambda f: (f[0], f[2])
    ):
        fast = [i for _, i, _ in same]
        gaps = [min(p_s[i] - p_s[slow], m_s[slow] - m_s[i]) for i in fast]
        others = f" and {len(fast) - 1} others" if len(fast) > 1 else ""
        text = (
            f"worker {worker}: sample {p.names[common[slow]]} starts before {p.names[common[fast[0]]]}{others} (predicted), "
            "after (measured)"
        )
        tie_ms = None if real else 1000 * float(max(gaps))
        yield Discrepancy(
            "order",
            worker,
            common[slow],
            _tied(text, tie_ms, "they start"),
            float(p_s[slow]),
            tie_ms,
        )


def _last_so_far(values: Floats) -> Ints:
    """Return by place the index of the largest value up to it."""
    new = np.r_[True, values[1:] > np.maximum.accumulate(values)[:-1]]
    return np.maximum.accumulate(np.where(new, np.arange(len(values)), 0))


class _Events(NamedTuple):
    """Events that may have turned a decision, and their seconds in both runs (predicted, measured),
    infinite where a run lacks one."""

    names: list[str]
    at_s: Floats
    rank: Ints  # which of two at one instant is first: FINISH, CHANGE or START

    @classmethod
    def joined(cls, parts: Sequence[_Events]) -> _Events:
        return cls(
            [name for part in parts for name in part.names],
            np.concatenate([np.empty((0, 2)), *(part.at_s for part in parts)]),
            np.concatenate([np.empty(0, np.int64), *(part.rank for part in parts)]),
        )

    def around(self, about_s: Sequence[Moment], tie_s: float) -> _Events:
        """Return the events within `tie_s` of one of these moments, in either run."""
        with np.errstate(
            invalid="ignore"
        ):  # infinitely late events and moments: they are not close
            apart_s = np.abs(self.at_s[:, None, :] - np.array(about_s)[None, :, :])
        close = np.flatnonzero((apart_s <= tie_s).any(axis=(1, 2)))
        return _Events([self.names[i] for i in close], self.at_s[close], self.rank[close])


def _difference(
    kind: str,
    where: int,
    text: str,
    decided_s: Moment,
    about_s: Sequence[Moment],
    rivals: Sequence[_Events],
    tie_s: float,
) -> Discrepancy:
    """Return a decision on a sample (with kind "loads", on a worker) made at `decided_s` in the two
    runs. Rivals within `tie_s` of one of `about_s` may have turned it."""
    decision = _events(["this choice"], [decided_s], START)
    events = _Events.joined([*(part.around(about_s, tie_s) for part in rivals), decision])
    tie_ms, which = _near_tie(events, tie_s, reacts=kind != "versions")
    at_s = decided_s[0] if math.isfinite(decided_s[0]) else decided_s[1]
    worker, uid = (where, None) if kind == "loads" else (None, where)
    return Discrepancy(kind, worker, uid, _tied(text, tie_ms, which), at_s, tie_ms)


def _near_tie(events: _Events, tie_s: float, reacts: bool) -> tuple[float | None, str]:
    """Return the gap of the two closest events that changed places between the runs, and their
    names.

    At least one of the two is of a sample. Two samples that finish at one instant may be seen in
    either order. With `reacts`, a start soon after an end or a change follows from it, and only the
    lead of the start in the other run counts.
    """
    at_s, rank = events.at_s, events.rank
    with np.errstate(invalid="ignore"):  # events of neither run have no order
        apart_s = at_s[:, None, :] - at_s[None, :, :]
    ranked = np.sign(rank[:, None] - rank[None, :])[..., None]
    order = np.where(apart_s == 0, ranked, np.sign(apart_s))
    turned = order[..., 0] * order[..., 1]
    finish, change, start = (rank == kind for kind in (FINISH, CHANGE, START))
    one_instant = (turned == 0) & (order != 0).any(axis=-1) & np.logical_and.outer(finish, finish)
    swapped = (turned < 0) & ~np.logical_and.outer(change, change)
    gaps_s = np.abs(apart_s)
    if reacts:
        follows = np.logical_and.outer(start, ~start)[..., None] & (order > 0)
        gaps_s[follows | follows.transpose(1, 0, 2)] = math.inf
    closest_s = np.where(swapped | one_instant, gaps_s.min(axis=-1), math.inf)
    i, j = sorted(divmod(int(np.argmin(closest_s)), len(rank)))
    if not closest_s[i, j] <= tie_s:
        return None, ""
    return 1000 * float(closest_s[i, j]), f"{events.names[i]} and {events.names[j]} are"


def _events(names: Sequence[str], at_s: Sequence[Moment], rank: int | Sequence[int]) -> _Events:
    return _Events(
        list(names), np.array(at_s, np.float64).reshape(-1, 2), np.broadcast_to(rank, len(names))
    )


def _sample_events(p: RunView, m: RunView, uid: int) -> _Events:
    names = [f"the start of {p.names[uid]}", f"the end of {p.names[uid]}"]
    at_s = [(p.started_s[uid], m.started_s[uid]), (p.finished_s[uid], m.finished_s[uid])]
    return _events(names, at_s, (START, FINISH))


def _load_events(
    worker: int, predicted: Sequence[LoadedVersion], measured: Sequence[LoadedVersion]
) -> _Events:
    """Return the starts and ends of loads, as nothing is generated in between. The nth load of a
    version in one run matches its nth load in the other."""
    times: dict[tuple[int, int, int], list[float]] = {}
    for run, loads in enumerate((predicted, measured)):
        seen: Counter[int] = Counter()
        for version, *at_s in loads:
            for edge in (0, 1):
                times.setdefault((version, seen[version], edge), [math.inf, math.inf])[run] = at_s[
                    edge
                ]
            seen[version] += 1
    return _events(
        [f"worker {worker}'s load of version {version}" for version, *_ in times],
        list(times.values()),
        CHANGE,
    )


def _run_events(p: RunView, m: RunView) -> _Events:
    updates = list(zip_longest(p.updated_s.tolist(), m.updated_s.tolist(), fillvalue=math.inf))
    names = [*(f"the end of update {i}" for i in range(len(updates))), "the end of the run"]
    end_s = p.result.metadata["end_s"], m.result.metadata["end_s"]
    return _events(names, [*updates, end_s], CHANGE)


def _tied(text: str, tie_ms: float | None, which: str) -> str:
    return text if tie_ms is None else f"{text}; a near-tie: {which} {tie_ms:.2g} ms apart"
