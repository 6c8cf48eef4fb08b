"""verl V1's replay buffer in few words (verl@1dda039, `trainer/ppo/v1/replay_buffer.py`; PyPI's 0.9.1), written from its rules.

A prompt is a name with a stamp, the step in which it was submitted. A look sees which prompts run and which are finished,
evicts, refills and may take a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Look(NamedTuple):
    """What one look decides: the evicted prompts, how many new ones begin, and the batch, if it is taken."""

    evicted: set[str]
    begins: int
    batch: list[str] | None


def asynchronous_look(
    step: int,
    batch: int,
    running: Mapping[str, int],
    finished: Mapping[str, int],
    equal: set[str],
    threshold: int | None,
    waits: bool,
) -> Look:
    """Decide a look of the asynchronous modes, given the stamps and the finished prompts with equal rewards. One that evicts is
    followed by another at once, so it takes no batch."""

    def span(stamp: int) -> int:
        return step - stamp + 1

    evicted = {name for name in finished if name in equal}
    if threshold is not None and not waits:
        evicted |= {name for name, stamp in finished.items() if span(stamp) > threshold}
    if evicted:
        return Look(evicted, len(evicted), None)
    held = waits and threshold is not None and any(span(s) >= threshold for s in running.values())
    if held or len(finished) < batch:
        return Look(set(), 0, None)
    return Look(set(), 0, sorted(finished, key=finished.__getitem__)[:batch])


class SynchronousLooks:
    """The looks of one step of the synchronous mode with filtered groups."""

    def __init__(self, batch: int, most_batches: int) -> None:
        self.batch, self.most = batch, batch * most_batches
        self.credit = 0
        self.drains = False

    def look(self, running: Sequence[str], good: Sequence[str], equal: set[str]) -> Look:
        """Decide a look, given the prompts that run and those finished since, with unequal and with equal rewards."""
        self.drains = self.drains or len(good) >= self.batch
        self.credit = 0 if self.drains else self.credit + 2 * len(equal)
        begins = max(0, min(self.credit, self.most - len(running)))
        self.credit -= begins
        takes = self.drains and not running
        return Look(equal, begins, list(good)[: self.batch] if takes else None)
