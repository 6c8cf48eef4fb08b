"""SpecActor's best-of-N assignment: which drafter drafts for which request (arXiv 2511.16193,
§4.2).

Invariant: pure functions; ties go to the drafter named first, the smaller worker and the smaller
request. A request with several drafters is over when the first of them has finished it; the others'
copies are duplicates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class BestOfN:
    """The rule of freed workers: their drafters, the most requests that a worker drafts for
    (b_max), the routine that assigns them, how a duplicate gets its KV cache, and how its drafter
    works: coupled, or where workers have drafter GPUs, decoupled on those of the freed worker.
    `own` is the drafter that all workers begin with, `order` the draft ladder, the fastest first;
    both are known once a scenario is prepared."""

    drafters: tuple[str, ...]
    most_load: int
    assignment: Literal["by_drafter", "by_request"]
    kv: Literal["mixed", "recompute", "transfer"]
    copies: Literal["decoupled", "coupled"] = "coupled"
    own: str = "none"
    order: tuple[str, ...] = ()
    fetched_share: float = 0.0  # of a duplicate's KV cache that comes over the network


class Assignment(NamedTuple):
    """The `workers` of each drafter, the freed ones included; `added` is the worker of every new
    (request, drafter), in the order of assignment."""

    workers: dict[str, tuple[int, ...]]
    added: dict[tuple[int, str], int]


def assign(
    rule: BestOfN,
    acceptances: Mapping[int, float],
    workers: Mapping[str, Sequence[int]],
    freed: Sequence[int],
    load: Mapping[int, int],
    already: Collection[tuple[int, str]] = (),
) -> Assignment:
    """Assign each freed worker the drafter with the fewest workers, then requests of low acceptance
    to workers whose load is below `most_load` (b_max).

    "by_drafter" is Algorithm 3: drafter by drafter, its workers fill up one after another.
    "by_request" is SpecActor's later form ("Fastest-of-N"): request by request over the drafters in
    the `order` of the ladder, each on its least loaded worker; so the slowest request has all its
    drafters before the next one gets any, as §4.2 says in words.

    `acceptances` are by active request, `workers` by drafter (all drafters, in the order that
    decides ties), `load` is the number of requests by worker (0 if absent). The routine runs
    whenever workers are freed, so a pair (request, drafter) that is `already` assigned is not made
    again; the paper does not mention this.
    """
    by_drafter = {drafter: tuple(numbers) for drafter, numbers in workers.items()}
    for worker in freed:
        by_drafter[min(by_drafter, key=lambda drafter: len(by_drafter[drafter]))] += (worker,)
    slowest_first = sorted(acceptances, key=lambda request: (acceptances[request], request))
    fill_up = rule.assignment == "by_drafter"
    if fill_up:
        pairs = [(request, drafter) for drafter in by_drafter for request in slowest_first]
    else:
        pairs = [(request, drafter) for request in slowest_first for drafter in rule.order]
    loads, added = Counter(load), dict[tuple[int, str], int]()
    rooms = {
        name: [w for w in numbers if loads[w] < rule.most_load]
        for name, numbers in by_drafter.items()
    }
    for request, drafter in pairs:
        room = rooms[drafter]
        if room and (request, drafter) not in already:
            worker = room[0] if fill_up else min(room, key=lambda w: (loads[w], w))
            added[request, drafter] = worker
            loads[worker] += 1
            if loads[worker] == rule.most_load:
                room.remove(worker)
    return Assignment(by_drafter, added)


def counted_acceptance(drafted: int, accepted: int, verifications: int) -> float:
    """Return the estimate of p from a server's counts of a request, which lack the misses: the p
    that solves Σ_{1<=j<=w} pʲ = accepted / verifications for a window w of the mean drafted length;
    nan without verifications. It makes requests with windows of different lengths comparable,
    unlike accepted / drafted."""
    if not verifications or not drafted:
        return math.nan
    if accepted in (0, drafted):
        return float(accepted > 0)
    return _probability(drafted / verifications, accepted / verifications)


def _probability(window: float, tokens: float) -> float:
    """Return the p that solves Σ_{1<=j<=window} pʲ = tokens, by bisection to 2**-50."""
    p, step = 0.5, 0.25
    for _ in range(50):
        p += step if p * (1.0 - p**window) / (1.0 - p) < tokens else -step
        step *= 0.5
    return p
