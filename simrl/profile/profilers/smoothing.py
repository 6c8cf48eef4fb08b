"""Removes noise from measured grids. Invariant: the result of `settled` falls along no axis, holes
(NaN) apart."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def settled(values: Floats) -> Floats:
    """Return a grid near `values`, above and below alike, in which no time falls along any axis.

    Along each axis in turn: the mean of the least non-falling line above the values (running
    maximum from the left) and the greatest one below them (running minimum from the right). Where
    nothing falls, nothing moves; on one axis no other non-falling line has a smaller largest error.
    Each axis needs one turn: running maxima and minima along one keep the order along the others. A
    grid with holes (NaN) is returned unchanged: `TableProfile` names its holes.
    """
    if np.isnan(values).any():
        return values
    for axis in range(values.ndim):
        above = np.maximum.accumulate(values, axis=axis)
        below = np.flip(np.minimum.accumulate(np.flip(values, axis), axis=axis), axis)
        values = (above + below) / 2
    return values


def rising(values: Floats) -> Floats:
    """Return a grid in which no time falls along any axis: each is at least the times of less
    work."""
    for axis in range(values.ndim):
        values = np.maximum.accumulate(values, axis=axis)
    return values


def moved(before: Floats, after: Floats) -> str:
    """Describe how far `settled` moved the values that are not zero, for a profile's notes."""
    change = np.abs(after[before > 0] / before[before > 0] - 1)
    return (
        f"median {np.median(change):.2%}, 95 % of the points within {np.quantile(change, 0.95):.1%}, "
        f"at most {change.max():.1%}"
    )
