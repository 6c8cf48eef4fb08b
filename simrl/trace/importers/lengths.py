"""Makes lengths from their statistics: integers with a given count, sum, smallest, largest and
share at the top.

The statistics hold exactly; the shape between is a lognormal, truncated to the range. Many
lognormals have the wanted mean there; the chosen one has a tail beyond the largest value as heavy
as the share at that value. It is read at evenly spaced quantiles, so that it adds no noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid
from scipy.special import log_ndtr

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

SIGMAS = np.geomspace(
    0.05, 4.0, 28
)  # spreads tried, of log length: from nearly equal lengths to four orders of ten
POINTS = 257  # of the numerical integral over log length
FAR = 40.0  # beyond the range, in log length, that mu may be
STEPS = 100


def lengths_with(total: int, count: int, low: int, high: int, at_high: int | None) -> Integers:
    """Return `count` integers in ascending order that add up to `total`, at least one of them `low`
    and one `high`.

    Exactly `at_high` of them equal `high`; with None the rest may reach it as well. Raises
    `ValueError` if no such integers exist.
    """
    ends = [high] * (1 if at_high is None else at_high)
    if low < high:
        ends.append(low)
    ceiling = high if at_high is None or low == high else high - 1
    free = count - len(ends)
    left = total - sum(ends)
    if not 1 <= low <= high or free < 0 or not free * low <= left <= free * ceiling:
        raise ValueError(
            f"no {count} integers from {low} to {high}, {len(ends)} fixed, add up to {total}"
        )
    body = (
        _body(left, free, low, ceiling, tail=(at_high or 1) / (count + 1))
        if free
        else np.empty(0, np.int64)
    )
    return np.sort(np.concatenate([np.array(ends, np.int64), body]))


def _body(total: int, count: int, low: int, high: int, tail: float) -> Integers:
    if total in (count * low, count * high):
        return np.full(count, total // count, dtype=np.int64)
    log_x = np.linspace(np.log(low), np.log(high), POINTS)
    weight = _weights(log_x, total / count, tail)
    cumulative = np.concatenate([[0.0], np.cumsum((weight[1:] + weight[:-1]) / 2)])
    quantiles = (np.arange(count) + 0.5) / count * cumulative[-1]
    body: Integers = np.clip(
        np.rint(np.exp(np.interp(quantiles, cumulative, log_x))), low, high
    ).astype(np.int64)
    while missing := total - int(
        body.sum()
    ):  # ones are added or taken, evenly over the values that have room
        room = np.flatnonzero(body < high if missing > 0 else body > low)
        moved = min(abs(missing), len(room))
        body[room[np.arange(moved) * len(room) // moved]] += 1 if missing > 0 else -1
    return body


def _weights(log_x: Floats, mean: float, tail: float) -> Floats:
    """Return the density over `log_x` of the normal with this mean of exp(log_x) there, and about
    this tail beyond."""
    mu = means_to_mu(log_x, mean, SIGMAS)
    weight: Floats = _densities(log_x, mu, SIGMAS)
    means = trapezoid(weight * np.exp(log_x)) / trapezoid(weight)
    misfit = np.abs(log_ndtr((mu - log_x[-1]) / SIGMAS) - np.log(tail)) + 10 * np.abs(
        np.log(means / mean)
    )
    return np.asarray(weight[np.argmin(misfit)])


def _densities(log_x: Floats, mu: Floats, sigmas: Floats) -> Floats:
    exponent = -0.5 * ((log_x[None, :] - mu[:, None]) / sigmas[:, None]) ** 2
    return np.asarray(
        np.exp(exponent - exponent.max(axis=1, keepdims=True))
    )  # scaled, or far tails would underflow


def means_to_mu(log_x: Floats, mean: float, sigmas: Floats) -> Floats:
    """Return, for each sigma, the mu with which the mean of exp(log_x) is `mean`; as far as mu can
    go if none has it.

    The mean grows with mu: Newton's steps on its logarithm, halving where one leaves the bracket.
    """
    x, mu, left = np.exp(log_x), np.full(sigmas.size, np.log(mean)), np.arange(sigmas.size)
    bounds = np.tile([[log_x[0] - FAR], [log_x[-1] + FAR]], sigmas.size)
    ends = np.array([0.5, *np.ones(log_x.size - 2), 0.5])  # of the trapezoidal rule
    for _ in range(STEPS):
        weight = _densities(log_x, mu[left], sigmas[left]) * ends
        total, total_x, total_z, total_xz = (
            weight @ np.stack([np.ones_like(x), x, log_x, x * log_x], axis=1)
        ).T
        slope = (total_xz / total_x - total_z / total) / sigmas[left] ** 2
        bounds[np.where(total_x < mean * total, 0, 1), left] = mu[left]
        with np.errstate(divide="ignore", invalid="ignore"):
            newton = mu[left] + np.log(mean * total / total_x) / slope
        low, high = bounds[:, left]
        following = np.where((low < newton) & (newton < high), newton, (low + high) / 2)
        moved, mu[left] = np.abs(following - mu[left]), following
        left = left[moved > 1e-12 * np.maximum(np.abs(following), 1.0)]
        if not left.size:
            break
    return mu
