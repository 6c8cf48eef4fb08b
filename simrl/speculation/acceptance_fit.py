"""A `ModelAcceptance` from passes that were recorded: how much was drafted and how much of it accepted, pass by pass.

Invariant: only what a pass tells counts. The token after the first wrong one was never judged, and a draft that was cut short
tells nothing of the positions beyond it.

With acc and rej the number of drafts whose j-th token was accepted or rejected, and c_j = -ln p_j, a response of hardness h has
the log likelihood Σ_j (rej_j · ln(1 - exp(-c_j h)) - acc_j · c_j h). Its maximum in h is found for every response, that in c_j
for all of them, in turn. The spread is what the maxima differ by beyond the error that so many drafts leave.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError
from simrl.speculation.acceptance import ModelAcceptance, Verification
from simrl.speculation.matching import Ints

Floats = NDArray[np.float64]

ROUNDS = 12
FEWEST_DRAFTS = 50  # that reach a position for which a probability is given
LEAST_INFORMATION = 8.0  # about as many rejections, of a response whose own hardness counts for the spread
_LEAST, _MOST = 1e-4, 1 - 1e-4


def fit_acceptance(
    row: Ints,
    drafted: Ints,
    accepted: Ints,
    response_tokens: Ints,
    *,
    verification: Verification = "rejection_sampling",
    source: str = "fitted to recorded passes",
) -> ModelAcceptance:
    """The model of recorded passes.

    `row`, `drafted` and `accepted` (passes,) are the response that a pass belongs to and its tokens drafted and accepted, and
    `response_tokens` (rows,) how long the responses are. Passes without a draft count for nothing. Drift is left at zero:
    passes of one policy do not show it. Raises `InputError` for fewer than 50 drafts, and for more accepted than drafted.
    """
    if (accepted > drafted).any() or (accepted < 0).any():
        at = int(np.flatnonzero((accepted > drafted) | (accepted < 0))[0])
        raise InputError(
            f"pass {at}: {accepted[at]} of {drafted[at]} drafted tokens accepted; it must be from 0 to that"
        )
    if int((drafted > 0).sum()) < FEWEST_DRAFTS:
        raise InputError(f"{int((drafted > 0).sum())} passes have a draft; a fit needs {FEWEST_DRAFTS}")
    acc, rej = _counts(row, drafted, accepted, len(response_tokens))
    deep = int(np.flatnonzero((acc + rej).sum(axis=0) >= FEWEST_DRAFTS)[-1]) + 1
    acc, rej = acc[:, :deep], rej[:, :deep]
    used = np.flatnonzero(acc.sum(axis=1) + rej.sum(axis=1))
    acc, rej = acc[used], rej[used]
    tokens = response_tokens[used].astype(np.float64)
    typical = float(np.exp(np.log(tokens).mean()))
    ln_length = np.log(tokens / typical)

    ln_h, exponent, spread = np.zeros(len(used)), 0.0, 0.0
    cost = np.ones(deep)
    for _ in range(ROUNDS):
        cost = _solved(rej, acc, np.exp(ln_h), axis=0)
        own = np.log(_solved(rej, acc, cost, axis=1))
        x = np.clip(cost[None, :] * np.exp(ln_h)[:, None], 1e-9, 500.0)
        information = ((acc + rej) * x**2 / np.expm1(x)).sum(axis=1)  # Fisher's, on ln hardness
        error = 1 / np.maximum(information, 1e-3)
        sure = information >= LEAST_INFORMATION
        if sure.sum() < 3:
            break
        middle, exponent, spread = _between(own[sure], error[sure], ln_length[sure])
        line = middle + exponent * ln_length
        kept = spread**2 / (spread**2 + error)  # the rest of the difference is chance
        ln_h = line + kept * (own - line) - middle
    return ModelAcceptance(
        by_position=tuple(round(float(p), 4) for p in np.clip(np.exp(-cost), _LEAST, _MOST)),
        spread=round(min(spread, 10.0), 4),
        length_exponent=round(float(np.clip(exponent, -10, 10)), 4),
        typical_tokens=round(typical, 1),
        verification=verification,
        kind="measured",
        source=source,
    )


def _counts(row: Ints, drafted: Ints, accepted: Ints, rows: int) -> tuple[Floats, Floats]:
    """Of each response, how often the 1st, 2nd … token of a draft was accepted, and rejected; both (rows, longest draft)."""
    longest = int(drafted.max())
    last = np.zeros((rows, longest + 1))
    np.add.at(last, (row, accepted), 1.0)
    acc = last[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]  # drafts with at least j accepted
    wrong = accepted < drafted
    rej = np.zeros((rows, longest + 1))
    np.add.at(rej, (row[wrong], accepted[wrong]), 1.0)
    return acc, rej[:, :longest]


def _solved(rej: Floats, acc: Floats, scale: Floats, axis: int) -> Floats:
    """The factor x of each row (axis 1: sums over the positions) or position (axis 0: over the rows) where the likelihood is
    largest: Σ rej · s / (exp(s x) - 1) = Σ acc · s. By bisection of ln x; the left side falls as x grows."""
    s: Any = scale[None, :] if axis == 1 else scale[:, None]
    right = (acc * s).sum(axis=axis)
    low = np.full(right.shape, np.log(1e-5))
    high = np.full(right.shape, np.log(1e3))
    for _ in range(40):
        middle = 0.5 * (low + high)
        x: Any = np.exp(middle)[:, None] if axis == 1 else np.exp(middle)[None, :]
        with np.errstate(over="ignore"):
            too_small = (rej * s / np.expm1(s * x)).sum(axis=axis) > right
        low, high = np.where(too_small, middle, low), np.where(too_small, high, middle)
    solved: Floats = np.exp(0.5 * (low + high))
    return solved


def _between(ln_h: Floats, error: Floats, ln_length: Floats) -> tuple[float, float, float]:
    """The line through ln hardness over ln length, and the standard deviation around it beyond the errors (variances)."""
    spread2 = 0.0
    middle, slope = 0.0, 0.0
    for _ in range(20):
        weight = 1 / (spread2 + error)
        x0, y0 = np.average(ln_length, weights=weight), np.average(ln_h, weights=weight)
        xx = float((weight * (ln_length - x0) ** 2).sum())
        slope = float((weight * (ln_length - x0) * (ln_h - y0)).sum() / xx) if xx > 1e-9 else 0.0
        middle = float(y0 - slope * x0)
        rest = (ln_h - middle - slope * ln_length) ** 2
        spread2 = max(float(np.average(rest - error, weights=weight)), 0.0)
    return middle, slope, float(np.sqrt(spread2))
