"""SortedRL (arXiv 2603.23414): a rollout as large as several batches, of which each update trains the first to finish.

Invariant: new prompts are drawn only when everything that was drawn before is trained; so a prompt is trained exactly once
in so many updates, short responses early and long ones late, and no token is older than they are many, less one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import simpy

from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch, Collector
from simrl.pipelines.rounds import Progress, hand_over


def shortest_first(
    batches: int, unit: Literal["response", "group"], unfinished: Literal["continue", "restart"]
) -> Callable[[Stage], Collector]:
    """The rollout is `batches` batches large. Each update trains an equal part of it, of responses or of whole groups. What has
    not been trained then goes on under the new weights, or is thrown away and begins anew."""

    def collector(stage: Stage) -> Collector:
        left: list[Progress] = []
        updates = 0

        def collect(batch: Batch) -> simpy.events.ProcessGenerator:
            nonlocal left, updates
            if not left:
                groups = stage.workload.next_groups(batches * batch.size)
                units = groups if unit == "group" else [[sample] for group in groups for sample in group]
                left, updates = [Progress(samples) for samples in units], batches
            left = yield from hand_over(stage, batch, left, math.ceil(len(left) / updates))
            updates -= 1
            if unfinished == "restart":
                for progress in left:
                    stage.recorder.dropped(progress.finished + progress.unfinished)
                left = [Progress([stage.workload.again(sample) for sample in one.samples]) for one in left]

        return collect

    return collector
