"""APRIL (arXiv 2509.18521): more groups are at work than a batch needs; when it is complete, the others go on in the next one.

Invariant: nothing is thrown away. A group that is not among the first of its rollout keeps its tokens and goes first in the
next, under the weights that are there then; one that was complete too, but too late, trains first there.
"""

from __future__ import annotations

from collections.abc import Callable

import simpy

from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch, Collector
from simrl.pipelines.rounds import Progress, hand_over, times


def first_complete(over_sampling: float) -> Callable[[Stage], Collector]:
    """`over_sampling` times as many groups as a batch has are at hand when a rollout begins: what the last one left, then new
    ones (the data buffer of its public code fills up in that order)."""

    def collector(stage: Stage) -> Collector:
        left: list[Progress] = []

        def collect(batch: Batch) -> simpy.events.ProcessGenerator:
            nonlocal left
            new = max(times(over_sampling, batch.size) - len(left), 0)
            left += [Progress(group) for group in stage.workload.next_groups(new)]
            left = yield from hand_over(stage, batch, left, batch.size)

        return collect

    return collector
