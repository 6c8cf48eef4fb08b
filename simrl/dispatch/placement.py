"""Placements that need no state: which worker gets each of the samples that are placed together.

Invariant: samples do not tell their lengths; a placement knows the number of unfinished samples at
each worker, the number of samples placed before, and the lengths of finished responses.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from simrl.runtime.history import LengthHistory
from simrl.trace.sample import Sample

Ints = NDArray[np.int64]
Placement = Callable[[Sequence[Sample], Ints, int, LengthHistory], Sequence[int]]
"""(samples, unfinished samples per worker, samples placed before, lengths) -> a worker for each
sample"""


def even_split(
    samples: Sequence[Sample], unfinished: Ints, placed: int, history: LengthHistory
) -> list[int]:
    """Cut the batch into contiguous parts of equal size, the first parts one larger: verl's SPMD
    rollout (`DataProto.chunk`, up to 0.4). Sibling responses stay together."""
    parts = np.array_split(np.arange(len(samples)), unfinished.size)
    return [worker for worker, part in enumerate(parts) for _ in part]


def least_requests(
    samples: Sequence[Sample], unfinished: Ints, placed: int, history: LengthHistory
) -> list[int]:
    """Place each sample at the worker with the fewest unfinished ones, ties at the lowest index:
    verl's agent-loop servers (since 0.5)."""
    load = unfinished.copy()
    workers = []
    for _ in samples:
        worker = int(load.argmin())
        load[worker] += 1
        workers.append(worker)
    return workers


def round_robin(
    samples: Sequence[Sample], unfinished: Ints, placed: int, history: LengthHistory
) -> list[int]:
    """Place each sample at the next worker in turn, whatever it holds, as asynchronous NeMo-RL
    does."""
    return [(placed + i) % unfinished.size for i in range(len(samples))]


def round_robin_groups(
    samples: Sequence[Sample], unfinished: Ints, placed: int, history: LengthHistory
) -> list[int]:
    """Place each group of samples, of equal sizes, at the next worker in turn, whatever it holds:
    AReaL 0.3 asks for a server once a prompt and sends all its responses there."""
    groups = {
        prompt: i
        for i, prompt in enumerate(
            dict.fromkeys((sample.step, sample.prompt_id) for sample in samples)
        )
    }
    before = placed * len(groups) // max(len(samples), 1)
    return [
        (before + groups[sample.step, sample.prompt_id]) % unfinished.size for sample in samples
    ]


def by_prompt(
    samples: Sequence[Sample], unfinished: Ints, placed: int, history: LengthHistory
) -> list[int]:
    """Place each sample at the worker of its prompt, whose prefix cache has the group's prompt and
    the sample's earlier turns: its number modulo the workers, whatever they hold. As sgl-router's
    consistent hashing with the prompt as the key, but without its ring."""
    return [sample.prompt_id % unfinished.size for sample in samples]
