"""APRIL (arXiv 2509.18521): more groups are at work than a batch needs; when it is complete, the others go on in the next one.

Invariant: nothing is thrown away. A group that is not among the first of its rollout keeps its tokens and goes first in the
next, under the weights that are there then; one that was complete too, but too late, trains first there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import simpy

from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch, Collector
from simrl.pipelines.rounds import Progress, Round


def first_complete(over_sampling: float) -> Callable[[Stage], Collector]:
    """`over_sampling` times as many groups as a batch has are at hand when a rollout begins: what the last one left, then new
    ones (the data buffer of its public code fills up in that order)."""

    def collector(stage: Stage) -> Collector:
        left: list[Progress] = []

        def collect(batch: Batch) -> simpy.events.ProcessGenerator:
            nonlocal left
            complete = [group for group in left if group.complete]
            going = [group for group in left if not group.complete]
            for group in complete[: batch.size]:
                batch.add(group.finished)
            left, missing = complete[batch.size :] + going, batch.size - len(complete)
            if missing <= 0:
                return
            new = max(math.ceil(over_sampling * batch.size) - len(complete) - len(going), 0)
            going += [Progress(group) for group in stage.workload.next_groups(new)]
            a_round = Round(stage, going, enough=missing, on_complete=lambda group: batch.add(group.finished))
            yield a_round.over
            left = a_round.rest

        return collect

    return collector
