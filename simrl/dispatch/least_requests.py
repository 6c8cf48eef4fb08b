"""Each sample to the worker with the fewest unfinished ones: verl's agent-loop server manager (since 0.5)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simrl.history import LengthHistory
from simrl.trace import Sample


def least_requests(
    samples: Sequence[Sample], unfinished: NDArray[np.int64], placed: int, history: LengthHistory
) -> list[int]:
    """Ties go to the worker with the lowest index."""
    load = unfinished.copy()
    workers = []
    for _ in samples:
        worker = int(load.argmin())
        load[worker] += 1
        workers.append(worker)
    return workers
