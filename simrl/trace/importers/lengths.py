"""Makes lengths from their statistics: integers with a given count, sum, smallest, largest and share at the top.

The statistics hold exactly; the shape between is a lognormal, truncated to the range. Of the lognormals that have the
wanted mean there, the one is taken whose tail beyond the largest value is as heavy as the share at that value.
It is read at evenly spaced quantiles, so that it adds no noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid
from scipy.stats import norm

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

SIGMAS = np.geomspace(0.05, 4.0, 28)  # spreads tried, of log length: from nearly equal lengths to four orders of ten
POINTS = 257  # of the numerical integral over log length
HALVINGS = 60


def lengths_with(total: int, count: int, low: int, high: int, at_high: int | None) -> Integers:
    """Return `count` integers in ascending order that add up to `total`, at least one of them `low` and one `high`.

    Exactly `at_high` of them equal `high`; with None the rest may reach it as well. Raises `ValueError` if no such
    integers exist.
    """
    ends = [high] * (1 if at_high is None else at_high)
    if low < high:
        ends.append(low)
    ceiling = high if at_high is None or low == high else high - 1
    free = count - len(ends)
    left = total - sum(ends)
    if not 1 <= low <= high or free < 0 or not free * low <= left <= free * ceiling:
        raise ValueError(f"no {count} integers from {low} to {high}, {len(ends)} fixed, add up to {total}")
    body = _body(left, free, low, ceiling, tail=(at_high or 1) / (count + 1)) if free else np.empty(0, np.int64)
    return np.sort(np.concatenate([np.array(ends, np.int64), body]))


def _body(total: int, count: int, low: int, high: int, tail: float) -> Integers:
    if total in (count * low, count * high):
        return np.full(count, total // count, dtype=np.int64)
    log_x = np.linspace(np.log(low), np.log(high), POINTS)
    weight = _weights(log_x, total / count, tail)
    cumulative = np.concatenate([[0.0], np.cumsum((weight[1:] + weight[:-1]) / 2)])
    quantiles = (np.arange(count) + 0.5) / count * cumulative[-1]
    body: Integers = np.clip(np.rint(np.exp(np.interp(quantiles, cumulative, log_x))), low, high).astype(np.int64)
    while missing := total - int(body.sum()):  # ones are added or taken, evenly over the values that have room
        room = np.flatnonzero(body < high if missing > 0 else body > low)
        moved = min(abs(missing), len(room))
        body[room[np.arange(moved) * len(room) // moved]] += 1 if missing > 0 else -1
    return body


def _weights(log_x: Floats, mean: float, tail: float) -> Floats:
    """Return the density over `log_x` of the normal with this mean of exp(log_x) there, and about this tail beyond."""
    below, above = np.full(len(SIGMAS), log_x[0] - 40.0), np.full(len(SIGMAS), log_x[-1] + 40.0)
    for _ in range(HALVINGS):  # the mean grows with mu: bisection, for all sigmas at once
        mu = (below + above) / 2
        exponent = -0.5 * ((log_x[None, :] - mu[:, None]) / SIGMAS[:, None]) ** 2
        weight: Floats = np.exp(exponent - exponent.max(axis=1, keepdims=True))  # scaled, or far tails would underflow
        means = trapezoid(weight * np.exp(log_x)) / trapezoid(weight)
        below, above = np.where(means < mean, mu, below), np.where(means < mean, above, mu)
    misfit = np.abs(norm.logsf((log_x[-1] - mu) / SIGMAS) - np.log(tail)) + 10 * np.abs(np.log(means / mean))
    best: Floats = weight[int(np.argmin(misfit))]
    return best
