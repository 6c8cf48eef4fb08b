"""The known cost of staleness in quality: AReaL's Table 2 as published, a reference and no
prediction.

A 1.5B model (R1-Distilled-Qwen) after 250 training steps on math, by the largest permitted
staleness η in updates, without and with the decoupled PPO objective: pass@1 in per cent. At η = 0
both objectives are one. Other models, tasks and objectives may do better or worse; the other
hyperparameters of the runs were equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

SOURCE = "AReaL, arXiv 2505.24298, Table 2: a 1.5B model on math, 250 steps"
BENCHMARKS = ("AIME24", "AIME25", "AMC23", "MATH 500")
Scores = tuple[float, float, float, float]  # of the benchmarks


class Quality(NamedTuple):
    """Scores at a largest staleness, infinite for none."""

    eta: float
    without_decoupled: Scores
    with_decoupled: Scores


_ORACLE = (42.0, 32.9, 84.4, 89.2)
TABLE = (
    Quality(0, _ORACLE, _ORACLE),
    Quality(1, (41.8, 30.7, 83.3, 89.9), (42.1, 31.9, 85.2, 89.8)),
    Quality(2, (40.0, 32.1, 82.3, 89.6), (41.8, 32.5, 84.3, 89.6)),
    Quality(4, (23.3, 23.1, 58.5, 66.9), (42.2, 32.0, 85.1, 89.5)),
    Quality(8, (35.7, 27.8, 81.2, 87.8), (41.0, 31.1, 82.9, 89.2)),
    Quality(16, (35.8, 26.2, 78.4, 87.4), (38.7, 32.5, 83.2, 89.1)),
    Quality(math.inf, (34.0, 26.9, 79.4, 87.1), (36.9, 29.9, 81.0, 88.1)),
)


def near(stalenesses: Sequence[float]) -> list[Quality]:
    """Return the row without staleness, and for each given largest staleness its row, or the two
    rows around it."""
    kept = {0}
    for staleness in stalenesses:
        above = next(i for i, row in enumerate(TABLE) if row.eta >= staleness)
        kept |= {above} if TABLE[above].eta == staleness else {above - 1, above}
    return [TABLE[i] for i in sorted(kept)]
