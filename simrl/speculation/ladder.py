"""SpecActor's draft ladder: the speed-up of each drafter at each acceptance rate, and its best window (arXiv 2511.16193, §4.2).

Invariant: a ladder is made of profiled seconds alone. A drafter's place on it follows from its acceptance rate, which is known
before the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simrl.speculation.matching import Floats, Ints
from simrl.speculation.specactor import RATES, coupled_tgs

MOST_WINDOW = 15  # as far as the planner of decoupled drafting looks: verifications of 16 tokens


class Ladder(NamedTuple):
    """The speed-up of each drafter over plain decoding at each acceptance rate, with its best window; shapes (drafters,
    acceptances)."""

    drafters: tuple[str, ...]
    acceptances: Floats
    speedups: Floats
    windows: Ints

    def speedup(self, drafter: str, acceptance: float) -> float:
        """Return a drafter's speed-up, linear between two rates of the ladder."""
        return float(np.interp(acceptance, self.acceptances, self.speedups[self.drafters.index(drafter)]))


def draft_ladder(
    drafters: Mapping[str, Callable[[int, int], float]],
    verify: Sequence[Callable[[int], float]],
    requests: int,
    windows: Sequence[int] | None = None,
) -> Ladder:
    """Return the ladder at a batch of `requests`, at the acceptance rates 0, 1, … 100 % (§4.2, Figure 10a).

    `drafters` give the seconds in which (b, n): n tokens are drafted for each of b requests; `verify` the seconds of
    verifications with 1, 2, … query tokens a request, the first of which is plain decoding. SpecActor runs drafter and target
    on random verdicts; here it is the long-run rate of such runs, `coupled_tgs`. Windows are as long as `verify` has them, or
    the given ones.
    """
    acceptances, windows = np.linspace(0.0, 1.0, RATES), windows or range(1, len(verify))
    verify_s = [v(requests) for v in verify]
    rates = []
    for draft in drafters.values():
        draft_s = {window: draft(requests, window) / window for window in windows}
        rates.append([[coupled_tgs(p, w, draft_s[w], verify_s[w]) for w in windows] for p in acceptances.tolist()])
    best = np.array(rates)
    return Ladder(tuple(drafters), acceptances, best.max(axis=2) * verify_s[0], np.array(windows)[best.argmax(axis=2)])


def ladder_order(ladder: Ladder, acceptances: Mapping[str, float]) -> tuple[str, ...]:
    """Return the drafters from the fastest to the slowest, each at its own acceptance rate; even the first may be slower than
    no drafter (`Ladder.speedup` below 1)."""
    return tuple(sorted(ladder.drafters, key=lambda drafter: -ladder.speedup(drafter, acceptances[drafter])))
