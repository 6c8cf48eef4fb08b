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


def update_groups(batch: int, mini_batch: int | None, require_batches: int, sync_step: int) -> int:
    """Return the groups of an update. Without `mini_batch`, `sync_step` updates train a batch."""
    return require_batches * (mini_batch or max(1, batch // (require_batches * sync_step)))


def budget(stream: GroupStream, *, staleness: float, sync_step: int, per_replica: int) -> int:
    """Return the room of `room`: groups taken before the last synchronisation do not count."""
    required = max_required(stream.batch, 1, staleness, sync_step)
    replicas = max(len(stream.run.dispatcher.active), 1)
    counted = stream.kept - stream.taken_before_sync
    concurrent = max_concurrent(replicas, per_replica, required)
    return room(counted, required, len(stream.running), concurrent)
