"""Words of `simrl.pipelines.buffered` that several frameworks share: budgets, orders, staleness.

Budgets are in groups. A group is kept if it was submitted and not dropped; it then runs, waits in
the buffer, or was taken by an update.
"""

from __future__ import annotations

from simrl.pipelines.streaming import Finished, GroupStream

# Budgets: how many more groups may start now.


def batches_ahead(stream: GroupStream, *, ahead: int, at_once: int) -> int:
    """Return the room for the batches of the updates up to `ahead` after the version noted last,
    with at most `at_once` batches running."""
    kept = (stream.noted_version + ahead + 1) * stream.batch - stream.kept
    return min(at_once * stream.batch - len(stream.running), kept)


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
    """Return the batch of the groups submitted right after those of the last update, once all are
    finished."""
    end = (stream.updates + 1) * stream.batch
    groups = [group for group in sorted(stream.buffer) if group.number < end]
    return groups if len(groups) >= stream.batch else None


# Staleness.


def oldest_token_older(stream: GroupStream, group: Finished, *, than: int) -> bool:
    """Return whether the oldest token of a group is more than `than` versions old."""
    return group.oldest_version < stream.version - than
