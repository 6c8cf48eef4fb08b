"""Random numbers keyed by their purpose, for arrays of keys; `simrl.speculation.draws` has them for
compiled code.

Invariant: a draw is a pure function of its seed and its keys, of which the order counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
S30, S27, S31, S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def mixed(seed: int, *keys: NDArray[Any] | int) -> NDArray[np.uint64]:
    """Return 64 bits for each row of the keys (splitmix64: Steele, Lea, Flood 2014)."""
    bits: Any = np.int64(seed).astype(np.uint64) if seed < 0 else np.uint64(seed)
    with np.errstate(over="ignore"):
        for key in keys:
            bits = bits + (np.asarray(key).astype(np.uint64) + np.uint64(1)) * GOLDEN
            bits = (bits ^ (bits >> S30)) * MIX_1
            bits = (bits ^ (bits >> S27)) * MIX_2
            bits = bits ^ (bits >> S31)
    return np.asarray(bits)


def uniforms(seed: int, *keys: NDArray[Any] | int) -> NDArray[np.float64]:
    """Return a number in the open interval (0, 1) for each row of the keys."""
    return np.asarray(((mixed(seed, *keys) >> S11) + 0.5) * 2.0**-53)


def normals(seed: int, *keys: NDArray[Any] | int) -> NDArray[np.float64]:
    """Return a standard normal for each row of the keys."""
    from scipy.special import (
        ndtri,
    )  # takes 0.2 s to import, which a trace without drawn tools need not pay

    return np.asarray(ndtri(uniforms(seed, *keys)))
