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

The rollouter counts a group before it waits for the bound on running ones. A synchronisation counts
anew what runs and what is in the queue, and forgets a group that waits so: one more is submitted
than the bound says (verl@1dda039, `FullyAsyncRollouter._processor_worker`, `reset_staleness`).
"""

from __future__ import annotations

import math

from simrl.dispatch.elastic import DynamicSchedule
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
    groups keep tokens of any age. A group that was forgotten may train an update later."""
    if partial_rollout and staleness > 0:
        return None
    return (math.ceil(staleness) + 1) * sync_step - 1 + (staleness > 0)


def update_groups(batch: int, mini_batch: int | None, require_batches: int, sync_step: int) -> int:
    """Return the groups of an update. Without `mini_batch`, `sync_step` updates train a batch."""
    return require_batches * (mini_batch or max(1, batch // (require_batches * sync_step)))


def bounds(
    stream: GroupStream, staleness: float, sync_step: int, per_replica: int
) -> tuple[int, int, int, int]:
    """Return what `room` takes: groups taken before the last synchronisation do not count, and not
    the one that was forgotten then."""
    required = max_required(stream.batch, 1, staleness, sync_step)
    replicas = max(len(stream.run.dispatcher.active), 1)
    concurrent = max_concurrent(replicas, per_replica, required)
    counted = stream.kept - stream.taken_before_sync - stream.facts.get("forgotten", 0)
    return counted, required, len(stream.running), concurrent


def budget(stream: GroupStream, *, staleness: float, sync_step: int, per_replica: int) -> int:
    """Return the room of `room`, and of the group that was forgotten at the last synchronisation."""
    return room(*bounds(stream, staleness, sync_step, per_replica))


def forget(stream: GroupStream, *, staleness: float, sync_step: int, per_replica: int) -> None:
    """Note whether a synchronisation forgets a group: one that is counted, but waits for another to
    end, neither runs nor is in the queue, from which the count begins anew."""
    counted, required, active, concurrent = bounds(stream, staleness, sync_step, per_replica)
    stream.facts["forgotten"] = int(counted < required and active >= concurrent)


def scheduling(
    stream: GroupStream, *, sync_step: int, ratio: float, adaptive: bool, rebalance: bool
) -> None:
    """Lend the trainer's GPUs to rollout after synchronisations (`DynamicSchedule`)."""
    assert stream.run.pool is not None  # of a system with `elastic`
    rule = DynamicSchedule(stream.batch * sync_step, ratio, adaptive)
    stream.run.pool.follow(rule, rolls_out=False, spread=rebalance)
