"""Words of `simrl.pipelines.buffered` that several frameworks share: budgets, orders, staleness.

Budgets are in groups. A group is kept if it was submitted and not dropped; it then runs, waits in
the buffer, or was taken by an update.
"""

from __future__ import annotations

from collections.abc import Callable

from simrl.dispatch.elastic import EachUpdate
from simrl.errors import refuse
from simrl.pipelines.streaming import Finished, GroupStream

# Budgets: how many more groups may start now.


def batches_ahead(stream: GroupStream, *, ahead: int, at_once: Callable[[int], int]) -> int:
    """Return the room for the batches of the updates up to `ahead` after the version noted last (as
    AReaL's capacity), with at most `at_once` groups running, given the groups of a batch."""
    kept = (stream.noted_version + ahead + 1) * stream.batch - stream.kept
    return min(at_once(stream.batch) - len(stream.running), kept)


def responses_in_flight(stream: GroupStream, *, waiting: int) -> int:
    """Return how many responses may start now, once all of the groups before have started; 0 while
    `waiting` responses wait in the buffer."""
    free = stream.run.dispatcher.free  # first: it is 0 at nearly all calls
    return free if free and sum(len(group.rollouts) for group in stream.buffer) < waiting else 0


def within_lag(stream: GroupStream, *, lag: int | None) -> int:
    """Return the room for `lag` responses beyond the groups of an update for each version noted, and
    for the one to come (None: any number), while responses may start."""
    free = stream.run.dispatcher.free
    if lag is None:
        return free
    groups = -(-lag // stream.group_size) + (stream.noted_version + 1) * stream.batch
    return min(groups - stream.kept, free)


def pool_of_prompts(stream: GroupStream, *, batches: int) -> int:
    """Return the room in a pool of `batches` batches of groups that run or wait. While fewer than
    `batches` batches wait for the trainer, those collected for the next one have left the pool."""
    collects = stream.updates - stream.version <= batches
    waiting = len(stream.buffer) - (stream.batch if collects else 0)
    return batches * stream.batch - len(stream.running) - max(waiting, 0)


# Stamps.


def synced(stream: GroupStream) -> int:
    """Return the number of weight syncs so far."""
    return stream.syncs


def batches_taken(stream: GroupStream) -> int:
    """Return the number of batches taken so far: the version that the next one trains."""
    return stream.updates


# Orders: the groups of the next update, or None.


def submitted_first(stream: GroupStream) -> list[Finished] | None:
    """Return a batch of the finished groups that were submitted first, once there is one."""
    if len(stream.buffer) < stream.batch:
        return None
    return sorted(stream.buffer)[: stream.batch]


def finished_first(stream: GroupStream) -> list[Finished] | None:
    """Return a batch of the groups that finished first, once there is one."""
    return stream.buffer[: stream.batch] if len(stream.buffer) >= stream.batch else None


def next_in_order(stream: GroupStream) -> list[Finished] | None:
    """Return the batch of the groups submitted right after the last update's, once all are
    finished."""
    end = (stream.updates + 1) * stream.batch
    groups = [group for group in sorted(stream.buffer) if group.number < end]
    return groups if len(groups) >= stream.batch else None


# Staleness.


def oldest_token_older(stream: GroupStream, group: Finished, *, than: int) -> bool:
    """Return whether the oldest token of a group is more than `than` versions old."""
    return group.oldest_version < stream.version - than


def older(
    stream: GroupStream, stamp: int, *, than: int, now: Callable[[GroupStream], int] = synced
) -> bool:
    """Return whether a stamp is more than `than` behind what `now` counts."""
    return now(stream) - stamp > than


def stamp_older(
    stream: GroupStream,
    group: Finished,
    *,
    than: int,
    now: Callable[[GroupStream], int] = synced,
) -> bool:
    """Return whether a group's stamp is `older`."""
    return older(stream, group.version, than=than, now=now)


def overflows(stream: GroupStream, group: Finished, *, most: int) -> bool:
    """Return whether the buffer, of which a group is the oldest, holds more than a batch and
    `most` responses."""
    held = sum(len(each.rollouts) for each in stream.buffer)
    return held > most + stream.batch * stream.group_size


# What begins with a run.


def workers_allowed(stream: GroupStream, *, workers: int | None, ahead: int) -> None:
    """Raise `InputError` for a number of groups at once that SkyRL refuses: fewer than a batch, or
    more than may ever run."""
    least, most = stream.batch, stream.batch * (ahead + 1)
    refuse(
        (
            workers is not None and not least <= workers <= most,
            f"skyrl_async: num_parallel_generation_workers is {workers}; SkyRL takes {least} to {most}, a batch to "
            f"max_staleness_steps + 1 batches",
        )
    )


def limit_in_flight(stream: GroupStream, *, most: int | None, batches: int) -> None:
    """Let at most `most` responses be in flight (None: the responses of `batches` batches)."""
    stream.run.dispatcher.limit(most or batches * stream.batch * stream.group_size)


def lends_each_update(stream: GroupStream) -> None:
    """Lend the trainer's GPUs to rollout from each load of weights, and from the start, until the
    next batch is taken (ROLL's `partial_gpu_mode`)."""
    assert stream.run.pool is not None  # of a system with `elastic`
    stream.run.pool.follow(EachUpdate(), rolls_out=True)
