"""Decisions that two runs of one schedule took differently, and whether a near-tie explains it.

Invariant: from the tables alone, and about samples that finished in both runs: which workers they went to, in which order they
started at one, which weights made them; and which weights each worker loaded. A difference is a near-tie only if two events at
hand, hardly apart in one run, came in another order in the other.
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

# Of what comes at one instant, a sample that ends there is first, and one that starts meets the weights that are loaded there.
FINISH, CHANGE, START = 0, 1, 2


@dataclass(frozen=True)
class Discrepancy:
    """A decision that differs between the runs, in a sentence.

    kind         "worker" (which worker a sample went to), "migration" (to which others then), "order" (which of two samples
                 started first at a worker), "loads" (which weights a worker loaded), "versions" (which weights made a sample)
    at_s         when, in the predicted run; in the measured one, of what only that one has
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
    """A value from an instant on: a sample's worker, or its tokens' version."""

    value: int
    started_s: float


_Begun = Sequence[_Begin] | Sequence[LoadedVersion]


def differences(p: RunView, m: RunView, uids: Sequence[int], tie_s: float) -> Iterator[Discrepancy]:
    """Yield what the predicted and the measured run decided differently about the samples `uids`. Events within `tie_s` may
    change places."""
    stays = (_by_sample(p, "worker"), _by_sample(m, "worker"))
    versions = (_by_sample(p, "policy_version"), _by_sample(m, "policy_version"))
    places = {uid: sorted({s.value for run in stays for s in run.get(uid, ())}) for uid in uids}
    of_sample = {uid: _sample_events(p, m, uid) for uid in uids}
    loads = [_load_events(worker, p.loads[worker], m.loads[worker]) for worker in range(p.workers)]
    at_worker = [
        _Events.joined([loads[worker], *(of_sample[uid] for uid in uids if worker in places[uid])])
        for worker in range(p.workers)
    ]
    of_run = _run_events(p, m)
    for uid in uids:
        ended_s = p.finished_s[uid], m.finished_s[uid]
        here, there = stays[0].get(uid, []), stays[1].get(uid, [])
        if parted := _parting(here, there):
            moved = here[:1] and there[:1] and here[0].value == there[0].value
            text = f"sample {p.names[uid]}: worker {_values(here)} (predicted), {_values(there)} (measured)"
            rivals = [of_run, *(at_worker[worker] for worker in places[uid])]
            about_s: list[Moment] = [
                [at_s if math.isfinite(at_s) else end_s for at_s, end_s in zip(parted[1], ended_s, strict=True)]
            ]
            yield _difference("migration" if moved else "worker", uid, text, parted[1], about_s, rivals, tie_s)
        here, there = versions[0].get(uid, []), versions[1].get(uid, [])
        if parted := _parting(here, there):
            text = f"sample {p.names[uid]}: made by weights {_values(here)} (predicted), {_values(there)} (measured)"
            rivals = [of_sample[uid], *(loads[worker] for worker in places[uid])]
            about_s = [parted[1], (p.started_s[uid], m.started_s[uid]), ended_s]
            yield _difference("versions", uid, text, parted[1], about_s, rivals, tie_s)
    for worker in range(p.workers):
        yield from _other_loads(p, m, worker, [of_run, at_worker[worker]], tie_s)
        yield from _other_orders(p, uids, worker, stays, tie_s)


def _by_sample(view: RunView, column: str) -> dict[int, list[_Begin]]:
    """Return by uid the values of a column of the segments where they change."""
    found: dict[int, list[_Begin]] = {}
    table = view.segments
    for uid, value, at_s in zip(*(table[n].tolist() for n in ("uid", column, "started_s")), strict=True):
        mine = found.setdefault(uid, [])
        if not mine or mine[-1].value != value:
            mine.append(_Begin(value, at_s))
    return found


def _parting(predicted: _Begun, measured: _Begun) -> tuple[int, Moment] | None:
    """Return the place of the first value that the other run does not have there, and when it begins in either run: infinite if
    there is none. Return None if all values are equal."""
    pairs: Iterator[tuple[Any, Any]] = zip_longest(predicted, measured)
    for place, both in enumerate(pairs):
        if None in both or both[0].value != both[1].value:
            return place, [each.started_s if each else math.inf for each in both]
    return None


def _values(stays: Sequence[_Begin]) -> str:
    return ", then ".join(str(each.value) for each in stays) or "none"


def _other_loads(p: RunView, m: RunView, worker: int, rivals: Sequence[_Events], tie_s: float) -> Iterator[Discrepancy]:
    """Yield a difference in the weights that a worker loaded; of an interrupted run, only its own loads are compared."""
    here, there = p.loads[worker], m.loads[worker]
    if len(p.updated_s) > len(m.updated_s):
        here = here[: len(there)]
    elif len(m.updated_s) > len(p.updated_s):
        there = there[: len(here)]
    if parted := _parting(here, there):
        i, decided_s = parted
        loaded = [f"version {run[i].value}" if i < len(run) else "none" for run in (here, there)]
        text = f"worker {worker}: its load {i + 1} of weights is {loaded[0]} (predicted), {loaded[1]} (measured)"
        yield _difference("loads", worker, text, decided_s, [decided_s], rivals, tie_s)


def _other_orders(
    p: RunView,
    uids: Sequence[int],
    worker: int,
    stays: tuple[dict[int, list[_Begin]], dict[int, list[_Begin]]],
    tie_s: float,
) -> Iterator[Discrepancy]:
    """Yield samples that started at the worker in both runs in another order. Starts within `tie_s` in both have no order.

    Each sample is compared with the one that, of those before it in the prediction, starts last in the measurement; all that
    overtook one sample are one difference.
    """
    first = [
        {uid: next((s.started_s for s in found.get(uid, ()) if s.value == worker), None) for uid in uids}
        for found in stays
    ]
    common = [uid for uid in uids if first[0][uid] is not None and first[1][uid] is not None]
    common.sort(key=lambda uid: (first[0][uid], first[1][uid]))
    p_s, m_s = (np.array([run[uid] for uid in common], np.float64) for run in first)
    if len(common) < 2:
        return
    last = _last_so_far(m_s)
    found: list[tuple[int, int, bool]] = []  # overtaken, overtaking, really so
    for i in range(1, len(common)):
        before = int(np.searchsorted(p_s[:i], p_s[i] - tie_s, "left"))  # these start well before it in the prediction
        clear, near = (last[before - 1] if before else -1), last[int(np.searchsorted(p_s[:i], p_s[i], "left")) - 1]
        if clear >= 0 and m_s[clear] > m_s[i] + tie_s:
            found.append((int(clear), i, True))
        elif clear >= 0 and m_s[clear] > m_s[i]:
            found.append((int(clear), i, False))
        elif p_s[i] > p_s[0] and m_s[near] > m_s[i] + tie_s:
            found.append((int(near), i, False))
    for (slow, real), same in groupby(sorted(found, key=lambda f: (f[0], f[2], f[1])), key=lambda f: (f[0], f[2])):
        fast = [i for _, i, _ in same]
        gaps = [min(p_s[i] - p_s[slow], m_s[slow] - m_s[i]) for i in fast]
        others = f" and {len(fast) - 1} others" if len(fast) > 1 else ""
        text = (
            f"worker {worker}: sample {p.names[common[slow]]} starts before {p.names[common[fast[0]]]}{others} (predicted), "
            "after (measured)"
        )
        tie_ms = None if real else 1000 * float(max(gaps))
        yield Discrepancy("order", worker, common[slow], _tied(text, tie_ms, "they start"), float(p_s[slow]), tie_ms)


def _last_so_far(values: Floats) -> Ints:
    """Return for each place the index of the largest value up to it."""
    largest = np.maximum.accumulate(values)
    new = np.r_[True, values[1:] > largest[:-1]]
    return np.maximum.accumulate(np.where(new, np.arange(len(values)), 0))


class _Events(NamedTuple):
    """Events that may have decided something: seconds (predicted, measured) in both runs, infinite where it did not come."""

    said: list[str]
    at_s: Floats
    rank: Ints  # which of two at one instant is first: FINISH, CHANGE or START

    @classmethod
    def joined(cls, parts: Sequence[_Events]) -> _Events:
        return cls(
            [said for part in parts for said in part.said],
            np.concatenate([np.empty((0, 2)), *(part.at_s for part in parts)]),
            np.concatenate([np.empty(0, np.int64), *(part.rank for part in parts)]),
        )

    def around(self, about_s: Sequence[Moment], tie_s: float) -> _Events:
        """Return the events within `tie_s` of one of these moments, in either run."""
        with np.errstate(invalid="ignore"):  # infinitely late events and moments: they are not close
            apart_s = np.abs(self.at_s[:, None, :] - np.array(about_s)[None, :, :])
        close = np.flatnonzero((apart_s <= tie_s).any(axis=(1, 2)))
        return _Events([self.said[i] for i in close], self.at_s[close], self.rank[close])


def _difference(
    kind: str,
    where: int,
    text: str,
    decided_s: Moment,
    about_s: Sequence[Moment],
    rivals: Sequence[_Events],
    tie_s: float,
) -> Discrepancy:
    """Return a decision on a sample (with kind "loads", on a worker) made at these seconds of the two runs. Rivals within
    `tie_s` of one of `about_s` may have turned it."""
    decision = _events(["this choice"], [decided_s], START)
    events = _Events.joined([*(part.around(about_s, tie_s) for part in rivals), decision])
    tie_ms, which = _near_tie(events, tie_s, reacts=kind != "versions")
    at_s = decided_s[0] if math.isfinite(decided_s[0]) else decided_s[1]
    worker, uid = (where, None) if kind == "loads" else (None, where)
    return Discrepancy(kind, worker, uid, _tied(text, tie_ms, which), at_s, tie_ms)


def _near_tie(events: _Events, tie_s: float, reacts: bool) -> tuple[float | None, str]:
    """Return the gap of the two closest events that changed places between the runs, and what they are.

    One of the two is of a sample. Two samples that finish at one instant may be seen in either order. With `reacts`, a start
    soon after an end or a change follows from it: then what counts is by how much it came first in the other run.
    """
    at_s, rank = events.at_s, events.rank
    with np.errstate(invalid="ignore"):  # what comes in neither run has no order
        apart_s = at_s[:, None, :] - at_s[None, :, :]
    ranked = np.sign(rank[:, None] - rank[None, :])[..., None]
    order = np.where(apart_s == 0, ranked, np.sign(apart_s))
    turned = order[..., 0] * order[..., 1]
    finish, change, start = (rank == each for each in (FINISH, CHANGE, START))
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
    return 1000 * float(closest_s[i, j]), f"{events.said[i]} and {events.said[j]} are"


def _events(said: Sequence[str], at_s: Sequence[Moment], rank: int | Sequence[int]) -> _Events:
    return _Events(list(said), np.array(at_s, np.float64).reshape(-1, 2), np.broadcast_to(rank, len(said)))


def _sample_events(p: RunView, m: RunView, uid: int) -> _Events:
    said = [f"the start of {p.names[uid]}", f"the end of {p.names[uid]}"]
    at_s = [(p.started_s[uid], m.started_s[uid]), (p.finished_s[uid], m.finished_s[uid])]
    return _events(said, at_s, (START, FINISH))


def _load_events(worker: int, predicted: Sequence[LoadedVersion], measured: Sequence[LoadedVersion]) -> _Events:
    """Return start and end of each load, as nothing is generated in between. A version's nth load in one run matches its nth in
    the other."""
    times: dict[tuple[int, int, int], list[float]] = {}
    for run, loads in enumerate((predicted, measured)):
        seen: Counter[int] = Counter()
        for version, *at_s in loads:
            for edge in (0, 1):
                times.setdefault((version, seen[version], edge), [math.inf, math.inf])[run] = at_s[edge]
            seen[version] += 1
    return _events(
        [f"worker {worker}'s load of version {version}" for version, *_ in times], list(times.values()), CHANGE
    )


def _run_events(p: RunView, m: RunView) -> _Events:
    updates = list(zip_longest(p.updated_s.tolist(), m.updated_s.tolist(), fillvalue=math.inf))
    said = [*(f"the end of update {i}" for i in range(len(updates))), "the end of the run"]
    end_s = p.result.metadata["end_s"], m.result.metadata["end_s"]
    return _events(said, [*updates, end_s], CHANGE)


def _tied(text: str, tie_ms: float | None, which: str) -> str:
    return text if tie_ms is None else f"{text}; a near-tie: {which} {tie_ms:.2g} ms apart"
