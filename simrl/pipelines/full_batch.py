"""The plain collector: the whole next step of the workload, to its last response (verl, and all
systems built on it)."""

from __future__ import annotations

import simpy

from simrl.pipelines.batch import Batch, Collector, submit_groups
from simrl.pipelines.context import RunContext


def full_batch(run: RunContext) -> Collector:
    """Collect a batch until its longest response is finished."""

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        groups = (
            run.workload.next_batch()
            if batch.target is None
            else run.workload.next_groups(batch.target)
        )
        yield submit_groups(run, batch, groups)

    return collect
