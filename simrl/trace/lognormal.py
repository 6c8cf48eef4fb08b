"""Lognormal lengths between 1 and a cap: their means, and the location that gives a mean."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from simrl.errors import InputError


def location_of(
    mean: float,
    sigma: float,
    cap: int,
    field: str,
    early_stop_share: float = 0.0,
    early_stop_factor: float = 1.0,
) -> float:
    """Return the lognormal's location (mean of the log) for which the lengths cut to [1, cap] have
    this mean."""
    if mean >= cap:
        raise InputError(
            f"length model: {field} {mean:g} cannot be reached under a cap of {cap} tokens; ask for less"
        )
    early = math.log(early_stop_factor)

    from scipy.optimize import brentq  # takes 0.3 s to import, which a recorded trace need not pay

    def excess(location: float) -> float:
        whole = mean_of_cut_lognormal(location, sigma, cap)
        stopped = mean_of_cut_lognormal(location + early, sigma, cap)
        return (1 - early_stop_share) * whole + early_stop_share * stopped - mean

    # Ten standard deviations outside the limits every response is at one of them.
    low, high = -10 * sigma - sigma**2 - 1, math.log(cap) + 10 * sigma - early + 1
    return float(brentq(excess, low, high, xtol=1e-12))


def mean_of_cut_lognormal(location: float, sigma: float, cap: float) -> float:
    """Return E[min(max(X, 1), cap)] of a lognormal X with this mean and standard deviation of its
    logarithm."""
    from scipy.special import ndtr

    top = math.log(cap)
    if sigma == 0:
        return math.exp(min(max(location, 0.0), top))
    below, above = ndtr(-location / sigma), ndtr((location - top) / sigma)
    between = ndtr((top - location - sigma**2) / sigma) - ndtr((-location - sigma**2) / sigma)
    return float(below + math.exp(location + sigma**2 / 2) * between + cap * above)


def cut_tokens(log_tokens: NDArray[np.float64], cap_tokens: int) -> NDArray[np.int32]:
    """Return the whole lengths of these logarithms, between 1 and the cap."""
    return np.rint(np.exp(np.clip(log_tokens, 0.0, math.log(cap_tokens)))).astype(np.int32)
