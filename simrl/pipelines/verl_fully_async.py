"""verl's fully asynchronous recipe: the trainer updates several times on what streams in, then synchronises the workers once.

A sample is what verl calls one: a prompt with all its responses (a group). An update takes `require_batches` mini-batches, in
the order in which their groups were finished; every `sync_step`th update is published, and all workers load it. Between two
synchronisations, no more than `max_required` groups are submitted, those counted that were running or waiting in the queue at
the first. Groups that run at a synchronisation are interrupted and go on under the new weights (partial rollout), or the
synchronisation waits for all of them and nothing is submitted meanwhile.

Invariant: each update is one version, but workers see only every `sync_step`th. What is left at a synchronisation is at most
`max_required` less what was trained since the one before, so without partial rollout (or without staleness, when nothing is
left) no token is older than `oldest_off_policyness` when it is trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import simpy

from simrl.events import gather
from simrl.pipelines import Stage
from simrl.pipelines.streaming import GroupStream


def max_required(mini_batch: int, require_batches: int, staleness: float, sync_step: int) -> int:
    """Groups that may be submitted from one synchronisation to the next, rounded down as in verl's code."""
    return int(mini_batch * require_batches * (staleness + 1) * sync_step)


def max_concurrent(replicas: int, per_replica: int, required: int) -> int:
    """Groups that may run at once; `required` is what `max_required` gives."""
    return min(replicas * per_replica, required)


def room(counted: int, required: int, active: int, concurrent: int) -> int:
    """How many more groups may be submitted now; not positive means that generation pauses, or waits for one to end.
    `counted` are those submitted since the last synchronisation and those left over at it."""
    return min(required - counted, concurrent - active)


def counted_at_sync(active: int, queued: int) -> int:
    """What the count begins with after a synchronisation: groups interrupted, and groups finished but not trained."""
    return active + queued


def oldest_off_policyness(staleness: float, sync_step: int, partial_rollout: bool) -> int | None:
    """The age of the oldest token that may be trained, in updates; None where interrupted groups keep tokens of any age."""
    return None if partial_rollout and staleness > 0 else (math.ceil(staleness) + 1) * sync_step - 1


@dataclass(frozen=True)
class VerlFullyAsync:
    """The pipeline with its parameters: see `simrl.systems.verl_fully_async`."""

    mini_batch: int | None
    require_batches: int
    staleness: float
    sync_step: int
    per_replica: int
    partial_rollout: bool

    def __call__(self, stage: Stage) -> simpy.events.ProcessGenerator:
        return _Run(self, stage).train()


class _Run:
    """One run: the trainer's loop, and the count that pauses generation."""

    def __init__(self, rule: VerlFullyAsync, stage: Stage) -> None:
        self.rule = rule
        self.stage = stage
        updates = rule.require_batches * rule.sync_step
        mini_batch = rule.mini_batch or max(1, stage.workload.batch_groups // updates)
        self.update_groups = mini_batch * rule.require_batches
        self.required = max_required(mini_batch, rule.require_batches, rule.staleness, rule.sync_step)
        self.left_over = 0
        self.submitted_at_sync = 0
        self.paused = False
        self.stream = GroupStream(stage, self.room)

    def train(self) -> simpy.events.ProcessGenerator:
        """Updates as soon as there are groups for one; synchronises after every `sync_step`th."""
        stage, stream = self.stage, self.stream
        stream.admit()
        for step in range(1, stage.steps + 1):
            while len(stream.buffer) < self.update_groups:
                yield stream.news_for(self.update_groups)
            sync = step % self.rule.sync_step == 0
            yield stage.trainer.train(stream.take(stream.buffer[: self.update_groups]), publish=sync)
            if sync:
                yield from self.synchronise()

    def synchronise(self) -> simpy.events.ProcessGenerator:
        """All workers load the newest weights; the count begins anew."""
        stage, stream = self.stage, self.stream
        self.paused = True
        while stream.running and not self.rule.partial_rollout:
            yield stream.news()
        loads = [worker.load_weights(stage.trainer.version) for worker in stage.workers]
        self.left_over = counted_at_sync(len(stream.running), len(stream.buffer))
        self.submitted_at_sync = stream.submitted
        self.paused = False
        stream.admit()
        yield gather(stage.env, loads)

    def room(self) -> int:
        if self.paused:
            return 0
        counted = self.left_over + self.stream.submitted - self.submitted_at_sync
        concurrent = max_concurrent(max(len(self.stage.dispatcher.active), 1), self.rule.per_replica, self.required)
        return room(counted, self.required, len(self.stream.running), concurrent)
