"""Seer's order (arXiv 2511.14617): one sample of each group goes first, to show how long the group
is; then the longest groups.

Invariant: a group's estimate is the length of its longest finished sample, infinite before there is
one: an unknown group counts as long. A group's first sample is its probe. Probes go before all
others, the one with the fewest tokens so far first, so that short groups are known soon; then comes
the group with the largest estimate, its samples in the order in which they queue up.

The rest of divided rollout is in `Dispatch`: chunks of a response, a KV cache in a pool, a limit of
samples per worker.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from simrl.runtime.history import LengthHistory
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Sample

GroupKey = tuple[int, int, int]


class ContextAware:
    """The queue. A waiting group has an entry in a heap; when its estimate changes, it gets
    another, and the old one is void."""

    def __init__(self, history: LengthHistory) -> None:
        self._probes: dict[
            GroupKey, tuple[int, int]
        ] = {}  # number of each group, and uid of its first sample
        self._estimate: dict[GroupKey, float] = {}
        self._first: list[tuple[int, int, Sample]] = []
        self._waiting: dict[GroupKey, deque[Sample]] = {}
        self._longest: list[tuple[float, int, GroupKey]] = []
        self._pushed = 0
        self._size = 0

    def push(self, sample: Sample, partial: Rollout | None) -> None:
        group = _group(sample)
        self._size += 1
        self._pushed += 1
        _, probe = self._probes.setdefault(group, (len(self._probes), sample.uid))
        if probe == sample.uid and group not in self._estimate:
            heapq.heappush(self._first, (partial.tokens if partial else 0, self._pushed, sample))
        elif group in self._waiting:
            self._waiting[group].append(sample)
        else:
            self._waiting[group] = deque([sample])
            self._enter(group)

    def pop(self) -> Sample:
        self._size -= 1
        if self._first:
            return heapq.heappop(self._first)[-1]
        while True:
            negative, _, group = self._longest[0]
            samples = self._waiting.get(group)
            if samples and -negative == self._estimate.get(group, math.inf):
                sample = samples.popleft()
                if not samples:
                    del self._waiting[group]
                    heapq.heappop(self._longest)
                return sample
            heapq.heappop(self._longest)

    def observe(self, rollout: Rollout) -> None:
        group = _group(rollout.sample)
        before = self._estimate.get(group)
        if before is None or rollout.tokens > before:
            self._estimate[group] = rollout.tokens
            if group in self._waiting:
                self._enter(group)

    def _enter(self, group: GroupKey) -> None:
        number, _ = self._probes[group]
        heapq.heappush(self._longest, (-self._estimate.get(group, math.inf), number, group))

    def __len__(self) -> int:
        return self._size


def _group(sample: Sample) -> GroupKey:
    return sample.epoch, sample.step, sample.prompt_id
