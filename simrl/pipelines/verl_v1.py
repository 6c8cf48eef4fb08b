"""verl V1's rules (verl@1dda039, `trainer/ppo/v1`; PyPI's 0.9.1): its replay buffer as words of
`simrl.pipelines.buffered`, and its synchronous mode as a collector.

A step submits a whole batch of prompts when it begins, and the first step as many more as the
warm-up says. A prompt's stamp is the step in which it was submitted, from 1; its span, the steps
from its stamp to the present one, both counted. The buffer is looked at every `POLL_S` seconds.

Invariant: asynchronous modes have as many groups under way, or in the buffer, as a step and the
warm-up submit: what is evicted is replaced at the same look.
"""

from __future__ import annotations

from math import floor
from typing import Any

import simpy

from simrl.dispatch.elastic import StepSwitch
from simrl.pipelines.batch import Batch, Collector, submit_groups
from simrl.pipelines.buffered import until_next
from simrl.pipelines.context import RunContext
from simrl.pipelines.dynamic_sampling import rewards_differ
from simrl.pipelines.streaming import Finished, GroupStream
from simrl.runtime.events import Signal
from simrl.runtime.rollout import Rollout

POLL_S = 2.0  # ReplayBuffer's poll_interval


def step(stream: GroupStream, *, updates: int) -> int:
    """Return the step, from 1: `updates` updates, and the weight sync after them."""
    return stream.noted_version // updates + 1


def batches_and_warmup(stream: GroupStream, *, updates: int, warmup: float) -> int:
    """Return how many groups may start: a batch a step, what the warm-up is ahead, and one for each
    that was dropped."""
    batch = stream.batch * updates
    return step(stream, updates=updates) * batch + floor(warmup * batch) - stream.kept


def evicted(
    stream: GroupStream, group: Finished, *, updates: int, longest: int | None, filters: bool
) -> bool:
    """Return whether a finished group's span is more than `longest` steps, or its rewards are
    equal where they may not be."""
    span = step(stream, updates=updates) - group.version + 1
    return (longest is not None and span > longest) or (
        filters and not rewards_differ(group.rollouts)
    )


def oldest_stamp_first(
    stream: GroupStream, *, updates: int, waits_at: int | None = None
) -> list[Finished] | None:
    """Return a batch of the finished groups with the oldest stamps, once there is one and no
    running group has a span of `waits_at` steps. Of equal stamps, those submitted first (verl: in
    the order of a set)."""
    oldest = step(stream, updates=updates) + 1 - min(stream.running.values(), default=10**9)
    if len(stream.buffer) < stream.batch or (waits_at is not None and oldest >= waits_at):
        return None
    return sorted(stream.buffer, key=lambda group: (group.version, group.number))[: stream.batch]


def switching(stream: GroupStream, *, minibatches: int, **keys: Any) -> None:
    """Lend the trainer's GPUs to rollout between steps, from the start on (`StepSwitch`)."""
    pool = stream.run.pool
    assert pool is not None  # of a system with `elastic`
    standalone = 1 - len(pool.units) / len(pool.workers)
    rule = StepSwitch(stream.batch * minibatches, minibatches, standalone, **keys)
    pool.follow(rule, rolls_out=True)


def refill(credit: int, evicted: int, enough: bool, in_flight: int, most: int) -> tuple[int, int]:
    """Return how many groups begin at a look of the synchronous mode, and the credit left: two for
    each evicted group until there are good ones `enough`, no more than `most` in flight."""
    credit = 0 if enough else credit + 2 * evicted
    more = max(min(credit, most - in_flight), 0)
    return more, credit - more


def polled(run: RunContext, *, filters: bool, most_batches: int) -> Collector:
    """Collect a batch at the first look at which it is complete. With `filters`, groups with equal
    rewards are replaced (`refill`) until the good ones suffice; what is in flight then ends first,
    and the surplus is dropped."""

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        groups, looked_s, news = run.workload.next_batch(), run.env.now, Signal(run.env)
        size = submitted = len(groups)
        refused = seen = credit = 0

        def accepts(group: list[Rollout]) -> bool:
            nonlocal refused
            news.fire()
            good = not filters or rewards_differ(group)
            refused += not good
            return good

        batch.accepts = accepts
        submit_groups(run, batch, groups)
        while True:
            yield news.next
            yield run.env.timeout(until_next(run.env.now - looked_s, POLL_S))
            enough = len(batch.groups) >= size
            in_flight = submitted - refused - len(batch.groups)
            if enough and not in_flight:
                return batch.keep_first(size)
            more, credit = refill(credit, refused - seen, enough, in_flight, most_batches * size)
            seen, submitted = refused, submitted + more
            if more:
                submit_groups(run, batch, run.workload.next_groups(more))

    return collect
