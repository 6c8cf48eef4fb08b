"""Workload: a trace as an endless run of groups to generate.

Invariant: schedules draw `Sample`s, which say nothing of their outcome; `responses` has it, by uid,
for workers and rewarders alone. A sample is drawn once; a sample to generate again, or a further
one of its group, is requested here and gets another uid. The response of a sample follows from the
trace, never from the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from simrl.trace.sample import Group, Response, Sample
from simrl.trace.trace import Trace


class Workload:
    """The groups of a trace in their order, repeated without end. `batch_groups` and
    `batch_responses` are the numbers of groups and responses in its first step. With `once` it has
    `ended` when all of them are drawn; further draws repeat them: buffered pipelines stop there,
    all others draw on."""

    def __init__(self, trace: Trace, once: bool = False, first_uid: int = 0) -> None:
        self.responses: dict[int, Response] = {}
        self._trace = trace
        self._numbered = first_uid
        self._siblings: dict[int, list[Response]] = {}
        self._rest: deque[Group] = deque()
        self._next_slice = 0
        self._passes = 0
        self.once = once
        self._epochs = 1 + int(trace.column("epoch").max())
        _, first, end = trace.step_slices[0]
        self.batch_responses = end - first
        self.batch_groups = int((trace.group_starts < end).sum())

    @property
    def ended(self) -> bool:
        """Return whether all groups of a trace that is used once are drawn."""
        return self.once and self._passes > 0 and not self._rest

    def profiled_tokens(self) -> list[NDArray[np.int64]]:
        """Return the response lengths of each group of the first step, which a profiling run before
        the training would measure."""
        _, first, end = self._trace.step_slices[0]
        tokens = self._trace.column("response_tokens")[first:end].astype(np.int64)
        return np.split(tokens, self._trace.group_starts[1 : self.batch_groups])

    def next_batch(self) -> list[Group]:
        """Return the groups of the next step of the trace, or the rest of a step of which single
        groups were drawn."""
        if not self._rest:
            self._draw_step()
        batch = list(self._rest)
        self._rest.clear()
        return batch

    def next_groups(self, count: int) -> list[Group]:
        """Return the next `count` groups, across the steps of the trace."""
        while len(self._rest) < count:
            self._draw_step()
        return [self._rest.popleft() for _ in range(count)]

    def again(self, sample: Sample) -> Sample:
        """Return the sample under another uid, to be generated again from its prompt with an equal
        response."""
        return self._number(sample, self.responses[sample.uid])

    def more_of(self, group: Group, count: int) -> Group:
        """Return `count` further samples of a group, beyond those of the trace: their responses are
        the siblings', in turn."""
        siblings = self._siblings[group[0].uid]
        size = len(group)
        return [
            self._number(group[0]._replace(sample=size + i), siblings[(size + i) % len(siblings)])
            for i in range(count)
        ]

    def _number(self, sample: Sample, response: Response) -> Sample:
        numbered = sample._replace(uid=self._numbered)
        self._numbered += 1
        self.responses[numbered.uid] = response
        return numbered

    def forget(self, uids: Sequence[int]) -> None:
        """Forget samples that no caller needs again."""
        for uid in uids:
            del self.responses[uid]
            self._siblings.pop(uid, None)

    def _draw_step(self) -> None:
        slices = self._trace.step_slices
        _, first, end = slices[self._next_slice]
        samples = self._trace.samples(first, end, self._numbered, self._passes * self._epochs)
        self._numbered += len(samples)
        self.responses.update(
            zip((s.uid for s in samples), self._trace.responses(first, end), strict=True)
        )
        groups = [list(group) for _, group in groupby(samples, key=lambda s: s.prompt_id)]
        self._siblings |= {group[0].uid: [self.responses[s.uid] for s in group] for group in groups}
        self._rest.extend(groups)
        self._next_slice = (self._next_slice + 1) % len(slices)
        self._passes += self._next_slice == 0
