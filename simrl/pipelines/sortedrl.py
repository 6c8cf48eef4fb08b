"""SortedRL (arXiv 2603.23414): a rollout as large as several batches; each update trains the first
responses to finish.

Invariant: new prompts are drawn only when everything drawn before is trained; so a prompt is
trained exactly once in `batches` updates, short responses early and long ones late, and no token is
older than `batches` - 1 updates.
"""

from __future__ import annotations

import math
from typing import Literal

import simpy

from simrl.pipelines.batch import Batch, Collector
from simrl.pipelines.context import RunContext
from simrl.pipelines.rounds import GroupProgress, hand_over


def shortest_first(
    run: RunContext,
    *,
    batches: int,
    unit: Literal["response", "group"],
    unfinished: Literal["continue", "restart"],
) -> Collector:
    """Collect an equal part of a rollout of `batches` batches for each update, in responses or
    whole groups. What has not been trained then goes on under the new weights, or is dropped and
    begins anew."""
    left: list[GroupProgress] = []
    updates = 0

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        nonlocal left, updates
        if not left:
            groups = run.workload.next_groups(batches * batch.size)
            units = (
                groups if unit == "group" else [[sample] for group in groups for sample in group]
            )
            left, updates = [GroupProgress(samples) for samples in units], batches
        left = yield from hand_over(run, batch, left, math.ceil(len(left) / updates))
        updates -= 1
        if unfinished == "restart":
            for progress in left:
                run.recorder.dropped(progress.finished + progress.unfinished)
            left = [
                GroupProgress([run.workload.again(sample) for sample in group.samples])
                for group in left
            ]

    return collect
