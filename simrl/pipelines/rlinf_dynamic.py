"""RLinf's dynamic scheduling (DynaRL; RLinf/RLinf@a3816b5, scheduler/dynamic_scheduler): within a
step, rollout instances that are no longer needed become the trainer's.

A step rolls out one batch and trains it in mini-batches as their groups are finished. After each
but the last, instances leave (`leaving`) and the trainer takes the largest data-parallel size that
the free GPUs allow (`grown`); after the last, it has its first size again, and all instances load
the new weights. With `pre_process`, the trainer's GPUs roll out too, until no more than half of
the responses run (looked at every `POLL_S`). With `wait_before_last`, the last mini-batch waits
for the end of rollout, and then for all GPUs.

Invariant: all tokens of a batch have the version that it updates; a mini-batch trains on a size
that divides its groups.
"""

from __future__ import annotations

from itertools import count
from math import ceil

import simpy

from simrl.pipelines.batch import Batch, submit_groups
from simrl.pipelines.batchwise import OneByOne
from simrl.pipelines.context import RunContext
from simrl.runtime.events import on_fire

POLL_S = 1.0


def rlinf_dynamic(
    run: RunContext,
    *,
    minibatches: int,
    most_running: int,
    pre_process: bool,
    wait_before_last: bool,
) -> simpy.events.ProcessGenerator:
    """Roll out a batch and train it, step after step, on GPUs that change sides meanwhile."""
    assert run.pool is not None  # of a system with `elastic`
    pool, part_groups = run.pool, -(-run.workload.batch_groups // minibatches)
    sizes = pool.sizes(part_groups)
    if not pre_process:
        pool.begin()
    for _ in range(run.steps):
        groups, batch, parts = run.workload.next_batch(), Batch(run, part_groups), OneByOne(run.env)
        over = submit_groups(run, batch, groups)
        on_fire(over, lambda _, batch=batch: batch.close())  # type: ignore[misc]
        if pre_process:
            while pool.running > sum(map(len, groups)) // 2:
                yield run.env.timeout(POLL_S)
            yield from pool.move_out(len(pool.units))
            yield pool.trainer.switch()
        needed, updated = parts.needed.next, pool.trainer.train_parts(parts)
        for trained in count():
            yield needed
            needed, minibatches_left = parts.needed.next, ceil(len(groups) / part_groups) - trained
            if trained and minibatches_left > 0:
                if wait_before_last and minibatches_left == 1:
                    yield over
                yield from pool.rebalance(most_running, sizes)
                parts.put([])
                yield needed
                needed = parts.needed.next
            if (part := (yield batch.parts.get())) is None:
                break
            parts.put(part)
        pool.resize(len(pool.units))
        parts.put([])
        parts.put(None)
        yield updated
        if pre_process:
            yield pool.trainer.switch()
        loaded = run.load_weights()
        yield from pool.come_back(pre_process)
        yield loaded
