"""APRIL (arXiv 2509.18521): a rollout begins more groups than a batch needs, and ends when a batch
of them is complete.

Invariant: nothing is thrown away. A group that is not among the first of its rollout keeps its
tokens and goes first in the next rollout, under the weights of that rollout; a group that was
complete, but too late, trains first there.
"""

from __future__ import annotations

import simpy

from simrl.pipelines.batch import Batch, Collector
from simrl.pipelines.context import RunContext
from simrl.pipelines.rounds import GroupProgress, hand_over, times


def first_complete(run: RunContext, *, over_sampling: float) -> Collector:
    """Collect the groups that are complete first, of `over_sampling` times a batch's groups: those
    left by the last rollout, then new ones (the data buffer of the public code fills in that
    order)."""
    left: list[GroupProgress] = []

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        nonlocal left
        new = max(times(over_sampling, batch.size) - len(left), 0)
        left += [GroupProgress(group) for group in run.workload.next_groups(new)]
        left = yield from hand_over(run, batch, left, batch.size)

    return collect
