"""Each sample to the next worker in turn: AReaL's default schedule over its inference servers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simrl.history import LengthHistory
from simrl.trace import Sample


def round_robin(
    samples: Sequence[Sample], unfinished: NDArray[np.int64], placed: int, history: LengthHistory
) -> list[int]:
    """Whatever the workers still hold."""
    return [(placed + i) % unfinished.size for i in range(len(samples))]
