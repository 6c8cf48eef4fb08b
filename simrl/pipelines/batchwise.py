"""Batchwise: the workload goes through in batches, and batch k is rolled out with weights at most η
updates old.

Invariant: the rollout of batch k begins when the rollout of batch k - 1 is over and version k - η
is published; all its tokens are generated with the newest weights published then, so its
off-policyness is at most η. η = 0 is synchronous training, η = 1 one step off (the overlap of
rollout and training); it is AReaL's admission rule for whole batches.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import simpy

from simrl.errors import refuse
from simrl.pipelines.batch import Batch, MakeCollector, submit_groups
from simrl.pipelines.context import RunContext
from simrl.pipelines.dynamic_sampling import refilled
from simrl.runtime.events import Signal


def batchwise(
    run: RunContext, *, eta: int, collector: MakeCollector, parts: int | None = None
) -> simpy.events.ProcessGenerator:
    """Train one batch after the other, when it is complete or in `parts` mini-batches as their
    groups are finished."""
    batches: simpy.Store = simpy.Store(run.env)
    run.env.process(_roll_out(run, batches, eta, collector, parts))
    for _ in range(run.steps):
        batch = yield batches.get()
        if parts is not None:
            yield run.trainer.train_parts(batch.parts)
        else:
            yield batch.complete
            yield run.trainer.train(batch.rollouts)


class OneByOne(simpy.Store):
    """Parts of an update that are made when the trainer is ready for them: `needed` fires whenever
    it takes one."""

    def __init__(self, env: simpy.Environment) -> None:
        super().__init__(env)
        self.needed = Signal(env)

    def get(self) -> Any:
        self.needed.fire()
        return super().get()


def coupled(run: RunContext, *, generations: int) -> simpy.events.ProcessGenerator:
    """Train step after step: a step's groups in `generations` equal parts, each rolled out when the
    gradients of the part before are computed, all with one version."""
    refuse(
        (
            run.dynamic_sampling is not None,
            "system: generations and dynamic_sampling exclude each other; leave one of them out",
        )
    )
    for k in range(run.steps):
        if k:
            yield run.load_weights()
        groups, parts = run.workload.next_batch(), OneByOne(run.env)
        needed = parts.needed.next
        updated = run.trainer.train_parts(parts)
        for part in np.array_split(np.arange(len(groups)), min(generations, len(groups))):
            yield needed
            needed, batch = parts.needed.next, Batch(run)
            yield submit_groups(run, batch, [groups[i] for i in part])
            batch.close()
            yield batch.complete
            parts.put(batch.rollouts)
        yield needed
        parts.put(None)
        yield updated


def _roll_out(
    run: RunContext, batches: simpy.Store, eta: int, collector: MakeCollector, parts: int | None
) -> simpy.events.ProcessGenerator:
    collect = collector(run)
    if run.dynamic_sampling is not None:
        collect = refilled(collect, run.dynamic_sampling)
    part_groups = None if parts is None else -(-run.workload.batch_groups // parts)
    loaded = 0
    for k in count():
        yield run.trainer.published(k - eta)
        if run.trainer.version > loaded:
            loaded = run.trainer.version
            yield run.load_weights()
        batch = Batch(run, part_groups)
        batches.put(batch)
        yield from collect(batch)
        batch.close()
