"""Batch: the groups that one update trains, while they come in. A collector decides which belong to
it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import simpy

from simrl.errors import refuse
from simrl.pipelines.context import RunContext
from simrl.runtime.events import Signal, gather, on_fire
from simrl.runtime.rollout import NOTHING_TO_TRAIN, Rollout
from simrl.trace.sample import Group


class Batch:
    """The groups of one update. Finished groups are scored, then put into parts: of `part_groups`
    groups, or `parts` parts with equal numbers of the responses of a batch, as far as whole groups
    allow, of which the last has the rest (neither: no parts).

    `target` is the number of groups that its collector hands over; None leaves the number to the
    collector's rule. A scored group that `accepts` refuses is dropped. With `enough`, the batch is
    complete with the first groups that have as many responses; later ones are dropped. Of these,
    `awaited` responses are carried over from the batch before, and always belong to it.
    """

    def __init__(
        self, run: RunContext, part_groups: int | None = None, parts: int | None = None
    ) -> None:
        self.groups: list[list[Rollout]] = []
        self.target: int | None = None
        self.enough: int | None = None
        self.awaited = 0
        self.accepts = run.accepts
        self.complete = run.env.event()
        self.parts: simpy.Store = simpy.Store(run.env)
        self._run = run
        self._part_groups = math.inf if parts else part_groups
        # The responses with which each part but the last ends.
        self._cuts = [
            run.workload.batch_responses * part / (parts or 1) for part in range(1, parts or 1)
        ]
        self._part: list[list[Rollout]] = []
        self._being_scored = 0
        self._closed = False
        self._settled = Signal(run.env)

    @property
    def rollouts(self) -> list[Rollout]:
        """Responses to train. Raises `InputError` if there is none."""
        refuse((not self.groups, NOTHING_TO_TRAIN))
        return [rollout for group in self.groups for rollout in group]

    @property
    def size(self) -> int:
        """Number of groups of an update: the target, or the groups of the trace's first step."""
        return self._run.workload.batch_groups if self.target is None else self.target

    @property
    def full(self) -> bool:
        """True if there are `enough` responses, or places for the awaited ones alone."""
        held = self.awaited + sum(map(len, self.groups))
        return self.enough is not None and held >= self.enough

    def add(self, group: list[Rollout]) -> None:
        """Score a group whose responses are all finished; it then belongs to the batch."""
        self._being_scored += 1
        on_fire(self._run.rewarder.score(group), self._scored)

    def keep_first(self, number: int) -> None:
        """Keep the `number` scored groups that were drawn first, and drop the others. (For batches
        without parts.)"""
        self.groups.sort(key=lambda group: min(rollout.sample.uid for rollout in group))
        for group in self.groups[number:]:
            self._run.recorder.dropped(group)
        del self.groups[number:]

    def close(self) -> None:
        """Declare that nothing more will be added."""
        self._closed = True
        self._fire_if_settled()

    def settled(self) -> simpy.Event:
        """Return an event that fires when everything that was added is scored."""
        return self._settled.next if self._being_scored else self._run.env.timeout(0)

    def _scored(self, scored: Any) -> None:
        self._being_scored -= 1
        carried = self.awaited > 0 and scored.value[0].carried_tokens > 0
        if carried or (not self.full and self.accepts(scored.value)):
            self.groups.append(scored.value)
            self.awaited -= carried
            self._closed |= self.full and not self.awaited
            if self._part_groups is not None:
                self._part.append(scored.value)
            if len(self._part) == self._part_groups or (
                self._cuts and sum(map(len, self.groups)) >= self._cuts[0]
            ):
                self._cuts = self._cuts[1:]
                self._put_part()
        else:
            self._run.recorder.dropped(scored.value)
        self._fire_if_settled()

    def _fire_if_settled(self) -> None:
        if self._being_scored and not (self.full and self._closed):
            return
        self._settled.fire()
        if self._closed and not self.complete.triggered:
            if self._part:
                self._put_part()
            self.parts.put(None)
            self.complete.succeed()

    def _put_part(self) -> None:
        self.parts.put([rollout for group in self._part for rollout in group])
        self._part = []


Collector = Callable[[Batch], simpy.events.ProcessGenerator]
"""Rolls out one batch: adds its groups as they are finished, and ends when the workers may go on to
the next batch."""

MakeCollector = Callable[[RunContext], Collector]
"""Makes the collector of a run, once."""


def submit_groups(
    run: RunContext,
    batch: Batch,
    groups: list[Group],
    on_response: Callable[[Any], None] | None = None,
) -> simpy.Event:
    """Submit the samples of groups together, and add each finished group to the batch. Return an
    event that fires when all are finished. `on_response` is called with the dispatcher's event of
    each response."""
    if on_response is None:
        finished = [group.over for group in run.dispatcher.submit_groups(groups)]
    else:
        ends = run.dispatcher.submit([sample for group in groups for sample in group])
        for end in ends:
            on_fire(end, on_response)
        left = iter(ends)
        finished = [gather(run.env, list(islice(left, len(group)))) for group in groups]
    for group in finished:
        on_fire(group, lambda group: batch.add(group.value) if group.ok else None)
    return gather(run.env, finished)
