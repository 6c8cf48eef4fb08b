"""Random numbers keyed by their purpose, not by the time of the draw, so that compared systems see
equal draws.

Invariant: a draw is a pure function of its key and its place. Compiled, so that an engine draws one
for each pass and request.
"""

from __future__ import annotations

import numpy as np

from simrl.profile.compiled import kernel
from simrl.trace.draws import GOLDEN, MIX_1, MIX_2, S11, S27, S30, S31


@kernel
def mixed(key: int, place: int) -> int:
    """Return 64 bits for a key and a place (splitmix64: Steele, Lea, Flood 2014), as int64; a key
    for further draws."""
    z = np.uint64(key) + (np.uint64(place) + np.uint64(1)) * GOLDEN
    z = (z ^ (z >> S30)) * MIX_1
    z = (z ^ (z >> S27)) * MIX_2
    return int(np.int64(z ^ (z >> S31)))


@kernel
def uniform(key: int, place: int) -> float:
    """Return a number in the open interval (0, 1) for a key and a place."""
    return (float(np.uint64(mixed(key, place)) >> S11) + 0.5) * 2.0**-53
