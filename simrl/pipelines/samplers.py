"""Words of NeMo-RL, slime, miles and ROLL for streams of groups: which groups start, which train,
which are dropped.

Invariant: a word is a function of counts, stamps and the clock. Each framework keeps these books in
its own way, with queues, permits and slots; tests run both on random sequences of events.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import takewhile
from typing import Literal

from simrl.errors import refuse
from simrl.pipelines.streaming import Finished, GroupStream
from simrl.pipelines.words import next_in_order

Sampler = Literal["in_order", "ready_first", "weight_fifo", "windowed"]

# NeMo-RL (NVIDIA-NeMo/RL@7ea279a): `grpo.async_grpo_train`, then `staleness_sampler`.


def two_then_in_order(stream: GroupStream) -> list[Finished] | None:
    """Return the batch of the next update. The first update waits for the second's batch, too."""
    first = stream.updates == 0 and stream.run.steps > 1
    if first and sum(group.number < 2 * stream.batch for group in stream.buffer) < 2 * stream.batch:
        return None
    return next_in_order(stream)


def permits(
    stream: GroupStream, *, sampler: Sampler, window: int, in_flight: int, buffered: int
) -> int:
    """Return the room of the single controller: prompts in flight, prompts in flight or ready, and,
    but for `windowed`, the batches up to `window` after the trainer's version."""
    held = len(stream.running) + len(stream.buffer)
    room = min(in_flight - len(stream.running), buffered - held)
    if sampler == "windowed":
        return room
    return min(room, (stream.version + window + 1) * stream.batch - stream.kept)


def selectable(stream: GroupStream, *, sampler: Sampler, window: int) -> list[Finished]:
    """Return the finished groups that a sampler may give to this update, in the order of their
    submission."""
    since = stream.version - window
    starts = [*stream.running.values(), *(group.version for group in stream.buffer)]
    oldest = min((start for start in starts if start >= since), default=since)
    offered: dict[Sampler, Callable[[Finished], bool]] = {
        "in_order": lambda group: group.number // stream.batch == stream.version,
        "ready_first": lambda group: True,
        "weight_fifo": lambda group: group.version == oldest,
        "windowed": lambda group: group.version >= since,
    }
    return sorted(filter(offered[sampler], stream.buffer))


def outside(stream: GroupStream, start: int, *, sampler: Sampler, window: int) -> bool:
    """Return whether a group is dropped: finished, as the trainer looks for a chunk, or running, as a
    weight sync begins. (weight_fifo's window never passes a group: it trains the oldest first.)"""
    return sampler == "windowed" and start < stream.version - window


# slime (THUDM/slime@624b824, `fully_async_rollout`).


def one_batch_ahead(stream: GroupStream) -> int:
    """Return the room for the batch after the one that the trainer took last (`train_async.py`)."""
    return (stream.updates + 1) * stream.batch - stream.kept


def engines(stream: GroupStream) -> int:
    """Return the number of workers that are there."""
    return max(stream.run.dispatcher.number_active, 1)


def semaphore(stream: GroupStream, *, per_engine: int) -> None:
    """Let at most `per_engine` responses an engine be in flight. A group of the pool is drawn from an
    endless workload when its first response may start, for the pool may hold many more."""
    stream.run.dispatcher.limit(per_engine * engines(stream))
    stream.begins_late = not stream.run.workload.once


def pool(stream: GroupStream, *, per_engine: int, poll_s: float) -> int:
    """Return the room in a pool of `per_engine` groups an engine that is looked at every `poll_s`
    seconds; none while as many finished groups wait beyond the next batch."""
    looks = math.ceil(round(stream.now_s / poll_s, 9))
    most = per_engine * engines(stream)
    due = looks * poll_s <= stream.now_s + 1e-9
    if due and len(stream.buffer) - stream.batch < most:
        return most - len(stream.running)
    stream.again((looks + due) * poll_s)
    return 0


# miles (radixark/miles@31f1ca9, `fully_async_rollout`, `submission_scheduler`, `fully_async_data_buffer`).


def in_flight(
    stream: GroupStream, *, most_samples: int | None, capacity_batches: float, by_sample: bool
) -> int:
    """Return the room for a batch of groups in flight, or for the groups that `most_samples` make,
    counted by unfinished samples or by groups; none while the buffer, beyond the next batch, is
    more than full."""
    full = stream.batch + int(capacity_batches * stream.batch)
    if len(stream.buffer) + stream.scoring > full:
        return 0
    groups = stream.batch if most_samples is None else max(most_samples // stream.group_size, 1)
    if by_sample:
        return (groups * stream.group_size - stream.unfinished) // stream.group_size
    return groups - len(stream.running)


def stale_when_taken(
    stream: GroupStream, group: Finished, *, staleness: int, interval: int
) -> bool:
    """Return whether a group is too stale while the next batch is taken out of the buffer, in
    the order of finishing. The workers' version counts, of when that batch was asked for: as the
    previous one went to the trainer, with a sync after every `interval`th update."""
    asked_under = max(stream.updates - 1, 0) // interval * interval

    def fresh(group: Finished) -> bool:
        """A response counts with the version under which it ended."""
        ended = min(rollout.segments[-1].policy_version for rollout in group.rollouts)
        return asked_under - ended <= staleness

    if fresh(group):
        return False
    before = takewhile(lambda other: other is not group, stream.buffer)
    return sum(map(fresh, before)) < stream.batch


# ROLL (alibaba/ROLL@8eb27cc, `generate_scheduler`). Stamps are steps.

NOT_WHOLE = (
    "roll_async: async_generation_ratio: with {}, {} prompts of {} responses leave finished prompts of an old step untrained, "
    "and ROLL fails on them; let ratio x prompts be whole"
)


def prompts_of_steps(stream: GroupStream, *, ratio: float) -> int:
    """Return the room: `ratio` batches at the first step, and one more at each."""
    budget = math.ceil(stream.batch * ratio) + stream.batch * (stream.noted_version + 1)
    return budget - stream.kept


def oldest_steps(stream: GroupStream, *, ratio: float) -> list[Finished] | None:
    """Return a batch of the groups of the oldest steps, in the order of finishing, or None if it
    waits for a running group of a step that it takes from. Of the oldest step, a ratio that is
    not whole takes its fractional part of a batch."""
    step, taken = stream.noted_version, list[Finished]()
    running = set(stream.running.values())
    for start in range(max(step - math.ceil(ratio), 0), step + 1):
        most = stream.batch - len(taken)
        ready = [group for group in stream.buffer if group.version == start]
        if start == step - math.ceil(ratio) and ratio % 1:
            size = stream.group_size
            most = math.ceil(int(stream.batch * size * (ratio % 1)) / size)
            begun = math.ceil(round(stream.batch * (ratio % 1), 9))
            refuse((most < begun, NOT_WHOLE.format(ratio, stream.batch, size)))
        if len(ready) < most and (start in running or start == step):
            return None
        taken += ready[:most]
    return taken
