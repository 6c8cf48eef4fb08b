"""The placement of prefills: a group's prompt, and the earlier turns of its samples, are in the
prefix cache of one worker.

Invariant: it depends on the number of the prompt alone, so that it needs no state. While a worker is
lost, the prompts are divided anew.
"""

from collections.abc import Sequence

from simrl.dispatch.placement import Ints, least_requests
from simrl.runtime.history import LengthHistory
from simrl.trace.sample import Sample

# sgl-router's cache_aware leaves prefixes if the fullest worker has so many requests more than the
# emptiest, and so many times as many (balance_abs_threshold, balance_rel_threshold)
MORE, TIMES = 64, 1.5


def by_prefix(
    samples: Sequence[Sample], unfinished: Ints, placed: int, history: LengthHistory
) -> list[int]:
    """Place each sample at the worker of its prompt, or, while loads are unequal, at the one with
    the fewest requests: sgl-router's cache_aware, with a prompt's first worker by its number."""
    fewest, most = unfinished.min(), unfinished.max()
    if most > fewest + MORE and most > TIMES * fewest:
        return least_requests(samples, unfinished, placed, history)
    return [sample.prompt_id % unfinished.size for sample in samples]
