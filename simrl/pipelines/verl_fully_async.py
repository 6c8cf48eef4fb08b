"""verl's fully asynchronous recipe: the trainer updates several times on what streams in, then
synchronises the workers once.

verl's sample is a group. An update takes `require_batches` mini-batches, in the order in which
their groups were finished; every `sync_step`th update is published, and all workers load it.
Between two synchronisations, no more than `max_required` groups are submitted, counting those that
were running or in the queue at the first one. Groups that run at a synchronisation are interrupted
and go on under the new weights (partial rollout), or the synchronisation waits for all of them.

Invariant: each update is one version, but workers see only every `sync_step`th. At most
`max_required` minus the groups trained since the previous synchronisation are left at the next, so
without partial rollout (or with staleness 0, when nothing is left) no token is older than
`oldest_off_policyness` when it is trained.
"""

from __future__ import annotations

import math

import simpy

from simrl.pipelines.context import RunContext
from simrl.pipelines.streaming import GroupStream


def max_required(mini_batch: int, require_batches: int, staleness: float, sync_step: int) -> int:
    """Return the groups that may be submitted between two synchronisations, rounded down as in
    verl's code."""
    return int(mini_batch * require_batches * (staleness + 1) * sync_step)


def max_concurrent(replicas: int, per_replica: int, required: int) -> int:
    """Return the groups that may run at once; `required` is what `max_required` returns."""
    return min(replicas * per_replica, required)


def room(counted: int, required: int, active: int, concurrent: int) -> int:
    """Return how many more groups may be submitted now; if not positive, generation pauses or waits
    for a group to end. `counted` groups were submitted since the last synchronisation or left over
    at it."""
    return min(required - counted, concurrent - active)


def oldest_off_policyness(staleness: float, sync_step: int, partial_rollout: bool) -> int | None:
    """Return the age of the oldest token that may be trained, in updates; None if interrupted
    groups keep tokens of any age."""
    return None if partial_rollout and staleness > 0 else (math.ceil(staleness) + 1) * sync_step - 1


def verl_fully_async(
    run: RunContext,
    *,
    mini_batch: int | None,
    require_batches: int,
    staleness: float,
    sync_step: int,
    per_replica: int,
    partial_rollout: bool,
) -> simpy.events.ProcessGenerator:
    """Update as soon as there are groups for an update; synchronise after every `sync_step`th."""
    mini_batch = mini_batch or max(1, run.workload.batch_groups // (require_batches * sync_step))
    update_groups = mini_batch * require_batches
    required = max_required(mini_batch, require_batches, staleness, sync_step)
    counted_from, paused = 0, False  # groups trained before the last synchronisation

    def groups_with_room() -> int:
        concurrent = max_concurrent(max(len(run.dispatcher.active), 1), per_replica, required)
        return (
            0
            if paused
            else room(stream.kept - counted_from, required, len(stream.running), concurrent)
        )

    stream = GroupStream(run, groups_with_room)
    stream.admit()
    for step in range(1, run.steps + 1):
        while len(stream.buffer) < update_groups:
            yield stream.news_for(update_groups)
        synchronises = step % sync_step == 0
        yield run.trainer.train(stream.take(stream.buffer[:update_groups]), publish=synchronises)
        if synchronises:
            paused = True
            while stream.running and not partial_rollout:
                yield stream.news()
            loaded = run.load_weights()
            counted_from = stream.kept - len(stream.running) - len(stream.buffer)
            paused = False
            stream.admit()
            yield loaded
