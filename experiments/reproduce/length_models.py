"""Length models from what papers state: a mean under another cap, groups whose responses are all right or all wrong."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from simrl.trace.lognormal import location_of, mean_of_cut_lognormal


def mean_under(cap: float, mean: float, sigma: float, mean_cap: float) -> float:
    """Return the mean under `cap` of the lognormal lengths whose mean under `mean_cap` is `mean`."""
    return mean_of_cut_lognormal(location_of(mean, sigma, round(mean_cap), "mean"), sigma, cap)


def share_of_equal(equal: float, reward_mean: float, group: int) -> float:
    """Return the `reward_prompt_share` that makes the share `equal` of groups all right or all wrong, or the nearest to it."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(201)

    def excess(share: float) -> float:
        right = ndtr((ndtri(reward_mean) - math.sqrt(share) * nodes) / math.sqrt(1 - share))
        return float(weights @ (right**group + (1 - right) ** group) / weights.sum()) - equal

    least, most = 0.0, 1 - 1e-6
    if excess(least) >= 0:
        return least
    return float(brentq(excess, least, most, xtol=1e-6)) if excess(most) > 0 else most
