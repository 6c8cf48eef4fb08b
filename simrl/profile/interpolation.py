"""Linear interpolation on grids, compiled. Invariant: between grid points that do not fall, the
result does not fall.

Arguments outside the grid are held at its edge: `TableProfile.require_covers` checks the limits of
a simulation against the profile first, so that no number is extrapolated in silence.
"""

import numpy as np
from numpy.typing import NDArray

from simrl.profile.compiled import lean, lean_kernel

Floats = NDArray[np.float64]


@lean
def locate(grid: Floats, x: float) -> tuple[int, float]:
    """Return the cell i and the fraction f in [0, 1] with x = grid[i] + f * (grid[i + 1] -
    grid[i])."""
    last = grid.shape[0] - 1
    if last == 0 or x <= grid[0]:
        return 0, 0.0
    if x >= grid[last]:
        return last - 1, 1.0
    i, j = 0, last
    while j - i > 1:
        middle = (i + j) // 2
        if grid[middle] <= x:
            i = middle
        else:
            j = middle
    return i, (x - grid[i]) / (grid[i + 1] - grid[i])


@lean
def interpolate(grid: Floats, values: Floats, x: float) -> float:
    """Return the piecewise-linear `values` over `grid` at x."""
    i, f = locate(grid, x)
    if f == 0.0:
        return values[i]
    return values[i] + f * (values[i + 1] - values[i])


@lean_kernel
def interpolate4(
    g0: Floats,
    g1: Floats,
    g2: Floats,
    g3: Floats,
    values: Floats,
    x: tuple[float, float, float, float],
) -> float:
    """Return the multilinear interpolation of `values` (len(g0), len(g1), len(g2), len(g3)) at the
    point x."""
    i0, f0 = locate(g0, x[0])
    i1, f1 = locate(g1, x[1])
    i2, f2 = locate(g2, x[2])
    i3, f3 = locate(g3, x[3])
    total = 0.0
    for a in range(2):
        w0 = f0 if a else 1.0 - f0
        if w0 == 0.0:
            continue
        for b in range(2):
            w1 = w0 * (f1 if b else 1.0 - f1)
            if w1 == 0.0:
                continue
            for c in range(2):
                w2 = w1 * (f2 if c else 1.0 - f2)
                if w2 == 0.0:
                    continue
                for d in range(2):
                    w3 = w2 * (f3 if d else 1.0 - f3)
                    if w3 != 0.0:
                        total += w3 * values[i0 + a, i1 + b, i2 + c, i3 + d]
    return total
