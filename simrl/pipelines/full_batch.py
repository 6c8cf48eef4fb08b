"""The plain collector: the next step of the workload, all of it, to its last response (verl, and all that builds on it)."""

from __future__ import annotations

import simpy

from simrl.events import gather, on_fire
from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch, Collector, submit_groups


def full_batch(stage: Stage) -> Collector:
    """A batch is over when its longest response is."""

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        groups = stage.workload.next_batch() if batch.target is None else stage.workload.next_groups(batch.target)
        ends = submit_groups(stage, groups)
        for end in ends:
            on_fire(end, lambda end: batch.add(end.value) if end.ok else None)
        yield gather(stage.env, ends)

    return collect
