"""The batch cut into contiguous parts of equal size, one a worker: verl's SPMD rollout (`DataProto.chunk`, up to 0.4)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simrl.history import LengthHistory
from simrl.trace import Sample


def even_split(
    samples: Sequence[Sample], unfinished: NDArray[np.int64], placed: int, history: LengthHistory
) -> list[int]:
    """Sibling responses stay together; the first workers get one more where the parts cannot be equal."""
    parts = np.array_split(np.arange(len(samples)), unfinished.size)
    return [worker for worker, part in enumerate(parts) for _ in part]
