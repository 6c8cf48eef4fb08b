"""Which drafter drafts for whom: SpecActor's draft ladder and its best-of-N assignment (arXiv 2511.16193, §4.2).

Invariant: pure functions over plain data, equal inputs give equal outputs; ties go to the drafter named first, the smaller
worker and the smaller request. Whoever calls them moves the requests. A request that several drafters draft for is over when
the first of them has it whole; the others' copies are duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.speculation.specactor import coupled_tgs, renewal_rate

Floats = NDArray[np.float64]
Execution = Literal["coupled", "decoupled"]


@dataclass(frozen=True)
class BestOfN:
    """What freed workers do: the drafters there are, how many requests at most a worker drafts for (b_max), the routine that
    assigns them, and how a duplicate gets its KV cache. `own` is the drafter that all workers begin with, `order` that of the
    draft ladder, the fastest first; both are known once a scenario is prepared."""

    drafters: tuple[str, ...]
    most_load: int
    assignment: Literal["by_drafter", "by_request"]
    kv: Literal["recompute", "transfer"]
    own: str = "none"
    order: tuple[str, ...] = ()


class Ladder(NamedTuple):
    """How much faster than plain decoding each drafter is at each acceptance rate.

    `speedups` has the shape (drafters, acceptances), each with the window that suits it best, `windows` of the same shape.
    """

    drafters: tuple[str, ...]
    acceptances: Floats
    speedups: Floats
    windows: NDArray[np.int64]

    def speedup(self, drafter: str, acceptance: float) -> float:
        """Between two rates of the ladder, linear. Raises `InputError` for a drafter that is not on it."""
        if drafter not in self.drafters:
            raise InputError(f"draft ladder: no drafter {drafter!r}; it has {', '.join(self.drafters)}")
        if not 0 <= acceptance <= 1:
            raise InputError(f"draft ladder: acceptance of {drafter!r} is {acceptance}; it is a probability, 0 to 1")
        return float(np.interp(acceptance, self.acceptances, self.speedups[self.drafters.index(drafter)]))


def draft_ladder(
    drafters: Mapping[str, Callable[[int, int], float]],
    verify: Sequence[Callable[[int], float]],
    requests: int,
    execution: Execution = "coupled",
    steps: int = 101,
) -> Ladder:
    """The ladder at a batch of `requests`, at the acceptance rates 0 … 1 in `steps` steps (§4.2, Figure 10a).

    `drafters` give the seconds in which so many tokens are drafted for each of b requests, `verify` those of verifications with
    1, 2, … query tokens a request, the first of which is plain decoding. SpecActor runs drafter and target on random
    verdicts; here it is what such runs yield in the long run: `coupled_tgs`, or `renewal_rate` for drafters on GPUs of their
    own (which the speed-up does not count). Raises `InputError` for an empty ladder.
    """
    if not drafters or len(verify) < 2 or requests < 1 or steps < 2:
        raise InputError(
            f"draft ladder: {len(drafters)} drafters, {len(verify)} verification times, {requests} requests, {steps} steps; "
            "give at least 1, 2, 1 and 2"
        )
    acceptances = np.linspace(0.0, 1.0, steps)
    verify_s = [v(requests) for v in verify]
    rates = np.empty((len(drafters), steps, len(verify) - 1))
    for i, draft in enumerate(drafters.values()):
        draft_s = [draft(requests, window) / window for window in range(1, len(verify))]
        for j, p in enumerate(acceptances.tolist()):
            for window in range(1, len(verify)):
                if execution == "coupled":
                    rates[i, j, window - 1] = coupled_tgs(p, window, draft_s[window - 1], verify_s[window])
                else:
                    rates[i, j, window - 1] = renewal_rate(p, window, draft_s[window - 1], verify_s[window - 1])
    return Ladder(tuple(drafters), acceptances, rates.max(axis=2) * verify_s[0], rates.argmax(axis=2) + 1)


def ladder_order(ladder: Ladder, acceptances: Mapping[str, float]) -> tuple[str, ...]:
    """The drafters from the fastest on, each at its own acceptance rate; the first may be slower than none, as `ladder.speedup`
    says. Raises `InputError` where one has no rate."""
    missing = [drafter for drafter in ladder.drafters if drafter not in acceptances]
    if missing:
        raise InputError(
            f"draft ladder: no acceptance rate of {missing[0]!r}; give one for every drafter on the ladder"
        )
    return tuple(sorted(ladder.drafters, key=lambda drafter: -ladder.speedup(drafter, acceptances[drafter])))


class Assignment(NamedTuple):
    """`workers` of each drafter, the freed ones included; `added` gives the worker that drafts and verifies with a drafter
    for a request, for every (request, drafter) that is new, in the order in which they were assigned."""

    workers: dict[str, tuple[int, ...]]
    added: dict[tuple[int, str], int]


def assign_by_drafter(
    acceptances: Mapping[int, float],
    workers: Mapping[str, Sequence[int]],
    freed: Sequence[int],
    load: Mapping[int, int],
    most_load: int,
    already: Collection[tuple[int, str]] = (),
) -> Assignment:
    """Algorithm 3. Each freed worker gets the drafter with the fewest workers; then, drafter by drafter, its workers take the
    requests of least acceptance while their load is below `most_load` (b_max).

    `acceptances` are those of the active requests, `workers` those there are by drafter (all drafters, in the order that
    decides ties), `load` the requests of a worker (0 if it is not there). The routine runs whenever workers are freed, so a
    pair (request, drafter) that is `already` there is not made again; the paper does not say.
    Raises `InputError` for a worker that is there twice.
    """
    by_drafter = _with_freed(workers, freed)
    loads = dict(load)
    added: dict[tuple[int, str], int] = {}
    for drafter, own in by_drafter.items():
        waiting = [request for request in _slowest_first(acceptances) if (request, drafter) not in already]
        for worker in own:
            while waiting and loads.get(worker, 0) < most_load:
                added[waiting.pop(0), drafter] = worker
                loads[worker] = loads.get(worker, 0) + 1
    return Assignment(by_drafter, added)


def assign_by_request(
    acceptances: Mapping[int, float],
    workers: Mapping[str, Sequence[int]],
    freed: Sequence[int],
    load: Mapping[int, int],
    most_load: int,
    order: Sequence[str],
    already: Collection[tuple[int, str]] = (),
) -> Assignment:
    """SpecActor's later form ("Fastest-of-N"): request by request, that of least acceptance first, over the drafters in
    the `order` of the ladder; each is asked for on its least loaded worker, if that has room.

    So the slowest request has all its drafters before the next one gets any, which is what §4.2 says in words. Freed workers
    get their drafters as in Algorithm 3. Arguments and errors as of `assign_by_drafter`.
    """
    by_drafter = _with_freed(workers, freed)
    unknown = [drafter for drafter in order if drafter not in by_drafter]
    if unknown:
        raise InputError(f"best-of-N: no drafter {unknown[0]!r} in the order; there are {', '.join(by_drafter)}")
    loads = dict(load)
    added: dict[tuple[int, str], int] = {}
    for request in _slowest_first(acceptances):
        for drafter in order:
            if (request, drafter) in already or not by_drafter[drafter]:
                continue
            worker = min(by_drafter[drafter], key=lambda w: (loads.get(w, 0), w))
            if loads.get(worker, 0) < most_load:
                added[request, drafter] = worker
                loads[worker] = loads.get(worker, 0) + 1
    return Assignment(by_drafter, added)


def _with_freed(workers: Mapping[str, Sequence[int]], freed: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Lines 1 to 3 of Algorithm 3: each freed worker goes to the drafter that has the fewest."""
    if not workers:
        raise InputError("best-of-N: no drafters; give each with its workers, of which there may be none")
    everyone = [worker for own in workers.values() for worker in own] + list(freed)
    twice = [worker for i, worker in enumerate(everyone) if worker in everyone[:i]]
    if twice:
        raise InputError(f"best-of-N: worker {twice[0]} is there twice; it has one drafter, or is freed")
    by_drafter = {drafter: tuple(own) for drafter, own in workers.items()}
    for worker in freed:
        fewest = min(by_drafter, key=lambda drafter: len(by_drafter[drafter]))
        by_drafter[fewest] += (worker,)
    return by_drafter


def _slowest_first(acceptances: Mapping[int, float]) -> list[int]:
    return sorted(acceptances, key=lambda request: (acceptances[request], request))
