"""Makes lengths from their statistics: integers with a given count, sum, smallest, largest and share at the top.

The statistics hold exactly; the shape between is a lognormal, truncated to the range. Of the lognormals that have the
wanted mean there, the one is taken whose tail beyond the largest value is as heavy as the share at that value.
It is read at evenly spaced quantiles, so that it adds no noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid
from scipy.special import log_ndtr

from simrl.profile.compiled import kernel

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

SIGMAS = np.geomspace(0.05, 4.0, 28)  # spreads tried, of log length: from nearly equal lengths to four orders of ten
POINTS = 257  # of the numerical integral over log length
FAR = 40.0  # beyond the range, in log length, that mu may be
STEPS = 100


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
    mu = means_to_mu(log_x, mean, SIGMAS)
    weight: Floats = _densities(log_x, mu, SIGMAS)
    means = trapezoid(weight * np.exp(log_x)) / trapezoid(weight)
    misfit = np.abs(log_ndtr((mu - log_x[-1]) / SIGMAS) - np.log(tail)) + 10 * np.abs(np.log(means / mean))
    best: Floats = weight[int(np.argmin(misfit))]
    return best


def _densities(log_x: Floats, mu: Floats, sigmas: Floats) -> Floats:
    exponent = -0.5 * ((log_x[None, :] - mu[:, None]) / sigmas[:, None]) ** 2
    densities: Floats = np.exp(exponent - exponent.max(axis=1, keepdims=True))  # scaled, or far tails would underflow
    return densities


@kernel
def means_to_mu(log_x: Floats, mean: float, sigmas: Floats) -> Floats:
    """Return, for each sigma, the mu with which the mean of exp(log_x) is `mean`; as far as mu can go if none has it."""
    x, found, mu = np.exp(log_x), np.empty(sigmas.size), np.log(mean)
    for k in range(sigmas.size):
        below, above = log_x[0] - FAR, log_x[-1] + FAR
        for _ in range(
            STEPS
        ):  # the mean grows with mu: Newton's steps on its log, halving where one leaves the bracket
            here, slope = _mean_and_slope(log_x, x, mu, sigmas[k])
            below, above = (mu, above) if here < mean else (below, mu)
            following = mu + (np.log(mean) - np.log(here)) / slope if slope > 0.0 else below
            if not below < following < above:
                following = (below + above) / 2
            done = abs(following - mu) <= 1e-12 * max(abs(mu), 1.0)
            mu = following
            if done:
                break
        found[k] = mu
    return found


@kernel
def _mean_and_slope(log_x: Floats, x: Floats, mu: float, sigma: float) -> tuple[float, float]:
    """Return the mean of x = exp(log_x), and the slope of its logarithm over mu."""
    last, step = x.size - 1, (log_x[-1] - log_x[0]) / (x.size - 1)
    top = int(
        min(max((mu - log_x[0]) / step, 0.0), last)
    )  # from about the largest weight outwards, where none overflows
    bend = np.exp(-((step / sigma) ** 2))
    total, total_x, total_z, total_xz = 0.0, 0.0, 0.0, 0.0
    for up in (True, False):
        direction = 1 if up else -1
        i, weight = (top, 1.0) if up else (top - 1, 0.0)
        ratio = np.exp(
            -(direction * (log_x[top] - mu) * step + step**2 / 2) / sigma**2
        )  # of a weight to the one before
        if not up:
            weight = ratio
            ratio *= bend
        while 0 <= i <= last and weight > 1e-60:
            z, share = (log_x[i] - mu) / sigma, 0.5 * weight if i == 0 or i == last else weight
            total += share
            total_x += share * x[i]
            total_z += share * z
            total_xz += share * x[i] * z
            weight *= ratio
            ratio *= bend
            i += direction
    return total_x / total, (total_xz / total_x - total_z / total) / sigma
