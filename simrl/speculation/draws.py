"""Random numbers keyed by their purpose, not by the time of the draw, so that compared systems have equal luck.

Invariant: a draw is a pure function of its key and its place. Compiled, so that an engine draws one for each pass and request.
"""

from __future__ import annotations

import numpy as np

from simrl.profile.compiled import kernel

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@kernel
def mixed(key: int, place: int) -> int:
    """Return 64 bits for a key and a place (splitmix64: Steele, Lea, Flood 2014), as int64; a key for further draws."""
    z = np.uint64(key) + (np.uint64(place) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return int(np.int64(z ^ (z >> _S31)))


@kernel
def uniform(key: int, place: int) -> float:
    """Return a number in the open interval (0, 1) for a key and a place."""
    return (float(np.uint64(mixed(key, place)) >> _S11) + 0.5) * 2.0**-53
