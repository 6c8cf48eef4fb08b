"""Batchwise: the workload goes through in batches, and batch k is rolled out with weights at most η updates old.

Invariant: the rollout of batch k begins when that of batch k - 1 is over and version k - η is published; all its tokens are
generated with the newest weights published then, so its off-policyness is at most η. η = 0 is synchronous training, η = 1 one
step off (the overlap of rollout and training); it is AReaL's admission rule for whole batches. What belongs to a batch is
decided by a collector (`simrl.pipelines.full_batch` and its like), which hands over groups as they are finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import simpy

from simrl.errors import InputError
from simrl.events import gather, on_fire
from simrl.pipelines import Stage
from simrl.rollout import Rollout
from simrl.workload import Group


class Batch:
    """What one update trains, while it comes in: finished groups are scored, and put into parts of `part_groups` groups.

    `target` is how many groups its collector is to hand over, where somebody asks for a number; else the collector's rule says.
    A scored group that `accepts` does not want is dropped.
    """

    def __init__(self, stage: Stage, part_groups: int | None = None) -> None:
        self.groups: list[list[Rollout]] = []
        self.target: int | None = None
        self.accepts = stage.accepts
        self.complete = stage.env.event()
        self.parts: simpy.Store = simpy.Store(stage.env)
        self._stage = stage
        self._part_groups = part_groups
        self._part: list[list[Rollout]] = []
        self._being_scored = 0
        self._closed = False
        self._settled: list[simpy.Event] = []

    @property
    def rollouts(self) -> list[Rollout]:
        if not self.groups:
            raise InputError(
                "an update has no group to train: all rewards of each are equal, and such groups are dropped; use more prompts "
                "a step, or another trace"
            )
        return [rollout for group in self.groups for rollout in group]

    @property
    def size(self) -> int:
        """The groups of an update: the target, or as many as the first step of the trace has."""
        return self._stage.workload.batch_groups if self.target is None else self.target

    def add(self, group: list[Rollout]) -> None:
        """A group whose responses are all finished: it is scored, and then belongs to the batch."""
        self._being_scored += 1
        on_fire(self._stage.rewarder.score(group), self._scored)

    def keep_first(self, count: int) -> None:
        """Of the scored groups, the first to have been drawn stay; the others are dropped. (For batches without parts.)"""
        self.groups.sort(key=lambda group: min(rollout.sample.uid for rollout in group))
        for group in self.groups[count:]:
            self._stage.recorder.dropped(group)
        del self.groups[count:]

    def close(self) -> None:
        """Nothing more will be added."""
        self._closed = True
        self._look_whether_settled()

    def settled(self) -> simpy.Event:
        """Fires when everything that was added is scored."""
        event = self._stage.env.event()
        self._settled.append(event)
        self._look_whether_settled()
        return event

    def _scored(self, scored: Any) -> None:
        self._being_scored -= 1
        if self.accepts(scored.value):
            self.groups.append(scored.value)
            if self._part_groups is not None:
                self._part.append(scored.value)
                if len(self._part) == self._part_groups:
                    self._put_part()
        else:
            self._stage.recorder.dropped(scored.value)
        self._look_whether_settled()

    def _look_whether_settled(self) -> None:
        if self._being_scored:
            return
        for event in self._settled:
            event.succeed()
        self._settled.clear()
        if self._closed and not self.complete.triggered:
            if self._part:
                self._put_part()
            self.parts.put(None)
            self.complete.succeed()

    def _put_part(self) -> None:
        self.parts.put([rollout for group in self._part for rollout in group])
        self._part = []


# Rolls out one batch: adds its groups as they are finished, ends when the workers may go on to the next.
Collector = Callable[[Batch], simpy.events.ProcessGenerator]


@dataclass(frozen=True)
class Batchwise:
    """The pipeline. `collector` is made once a run. With `stream`, a batch trains in so many mini-batches, each as soon as its
    groups are finished; else all of it when it is complete."""

    eta: int
    collector: Callable[[Stage], Collector]
    stream: int | None = None

    def __call__(self, stage: Stage) -> simpy.events.ProcessGenerator:
        batches: simpy.Store = simpy.Store(stage.env)
        stage.env.process(self._roll_out(stage, batches))
        return train_in_order(stage, batches, stream=self.stream is not None)

    def _roll_out(self, stage: Stage, batches: simpy.Store) -> simpy.events.ProcessGenerator:
        collect = self.collector(stage)
        part_groups = None if self.stream is None else -(-stage.workload.batch_groups // self.stream)
        loaded = 0
        for k in count():
            yield stage.trainer.published(k - self.eta)
            if stage.trainer.version > loaded:
                loaded = stage.trainer.version
                yield gather(stage.env, [worker.load_weights(loaded) for worker in stage.workers])
            batch = Batch(stage, part_groups)
            batches.put(batch)
            yield from collect(batch)
            batch.close()


def train_in_order(stage: Stage, batches: simpy.Store, stream: bool) -> simpy.events.ProcessGenerator:
    """The trainer's side of a pipeline: one batch after the other."""
    for _ in range(stage.steps):
        batch = yield batches.get()
        if stream:
            yield stage.trainer.train_parts(batch.parts)
        else:
            yield batch.complete
            yield stage.trainer.train(batch.rollouts)


def submit_groups(stage: Stage, groups: list[Group]) -> list[simpy.Event]:
    """Hands the samples of some groups to the dispatcher together. An event a group; it fires with its rollouts."""
    ends = iter(stage.dispatcher.submit([sample for group in groups for sample in group]))
    return [gather(stage.env, [next(ends) for _ in group]) for group in groups]
