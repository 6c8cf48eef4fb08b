"""Streaming: groups go in one by one while a rule has room for more, and come out into a buffer
that the trainer takes from.

Invariant: submitted = running + buffered + taken + dropped, in groups, at every moment; a group
runs until its last response is scored, and is taken or dropped once. What is counted, and what
bounds it, is the pipeline's own rule (`simrl.pipelines.areal`, `simrl.pipelines.verl_fully_async`,
`simrl.pipelines.laminar`); a group that was submitted and dropped leaves its room as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import simpy

from simrl.errors import InputError, StoppedError, first_line
from simrl.pipelines.context import RunContext
from simrl.runtime.events import Signal, gather, on_fire
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Group, Sample
from simrl.validation import shortened

FURTHEST_AHEAD = 128  # batches that a rule may submit at once beyond those that the run trains


class Finished(NamedTuple):
    """A group whose responses are all finished and scored: the number of groups submitted before
    it, the trainer's version when it was submitted, and its responses."""

    number: int
    version: int
    rollouts: list[Rollout]

    @property
    def oldest_version(self) -> int:
        return min(
            segment.policy_version for rollout in self.rollouts for segment in rollout.segments
        )


class GroupStream:
    """The groups of one run. `room` returns how many more groups may be submitted now; it is called
    whenever that may have changed, so it changes nothing itself. None: the pipeline submits each
    group (`submit`). A scored group that the run does not accept is dropped."""

    def __init__(self, run: RunContext, room: Callable[[], int] | None) -> None:
        # By number: the trainer's version when the group was submitted.
        self.running: dict[int, int] = {}
        self.buffer: list[Finished] = []  # in the order in which they were finished
        self.submitted = 0
        self.dropped = 0
        run.recorder.facts["stream"] = self
        self._run = run
        self._room = room
        self._news = Signal(run.env)
        self._generating = 0  # groups with a response that is not finished
        self._drained = Signal(run.env)

    @property
    def kept(self) -> int:
        """Groups that were submitted and not dropped: what a rule of staleness counts."""
        return self.submitted - self.dropped

    def admit(self) -> None:
        """Submit groups while the rule has room for them and the workload has groups. Raise
        `InputError` if the rule counts dropped groups, or has no bound."""
        if self._room is None:
            return
        run, start = self._run, self.submitted
        most = (run.steps + FURTHEST_AHEAD) * run.workload.batch_groups
        first = room = self._checked_room(self._room)
        while room > 0 and not run.workload.ended:
            if self.submitted - start > most and (room >= first or room > most):
                raise InputError(
                    f"{self._words}: it goes on after {self.submitted - start} groups at once, and {run.steps} updates train "
                    f"{run.steps * run.workload.batch_groups}; let the room fall with each group, such as "
                    "(version + 1 + ahead) * batch - GroupStream.kept"
                )
            number, group = self._next()
            [at_workers] = run.dispatcher.submit_groups([group])
            on_fire(at_workers.over, partial(self._ended, number))
            room = self._checked_room(self._room)

    def _checked_room(self, rule: Callable[[], int]) -> int:
        """Return the room that the rule has. Raise `InputError` if it would have another without
        the groups that were submitted and dropped."""
        without_dropped = self._without_dropped(rule) if self.dropped else None
        room = self._called(rule)
        if without_dropped not in (None, room):
            raise InputError(
                f"{self._words}: it counts {self.dropped} dropped groups as if they ran, and the run would starve; count "
                "GroupStream.kept, the groups submitted and not dropped, in place of GroupStream.submitted"
            )
        return room

    def _called(self, rule: Callable[[], int]) -> int:
        """Return the room that the rule returns. Raise `InputError` if it raises, or returns no
        number."""
        meant = "; it returns how many more groups may be submitted now, a whole number"
        place = f"{self._pipeline}: its rule of room"
        try:
            room = rule()
        except (InputError, StoppedError):
            raise
        except Exception as error:  # a package may raise anything
            kind = type(error).__name__
            raise InputError(f"{place} raises {kind} ({first_line(error)}){meant}") from error
        if not isinstance(room, int | np.integer | np.bool_ | float) or room != room:
            raise InputError(f"{place} returns {shortened(room)}{meant}")
        return room

    def _without_dropped(self, rule: Callable[[], int]) -> int:
        """Return the room as it would be if the dropped groups had never been submitted."""
        counts = self.submitted, self.dropped
        self.submitted, self.dropped = self.kept, 0
        try:
            return self._called(rule)
        finally:
            self.submitted, self.dropped = counts

    def submit(self, to: int) -> list[tuple[Sample, simpy.Event]]:
        """Submit the next group to one worker. Return its samples with their dispatcher events."""
        number, group = self._next()
        ends = self._run.dispatcher.submit(group, to=[to] * len(group))
        on_fire(gather(self._run.env, ends), partial(self._ended, number))
        return list(zip(group, ends, strict=True))

    def _next(self) -> tuple[int, Group]:
        """Return the next group, which runs from now on, and its number."""
        number = self.submitted
        [group] = self._run.workload.next_groups(1)
        self.submitted += 1
        self._generating += 1
        self.running[number] = self._run.trainer.version
        return number, group

    def take(self, groups: list[Finished]) -> list[Rollout]:
        """Take groups out of the buffer. Return their responses."""
        gone = {group.number for group in groups}
        self.buffer = [group for group in self.buffer if group.number not in gone]
        return [rollout for group in groups for rollout in group.rollouts]

    def drop(self, groups: list[Finished]) -> None:
        """Drop groups of the buffer that are too stale to be trained, and submit others in their
        place."""
        if groups:
            facts = self._run.recorder.facts
            facts["stale_samples"] = facts.get("stale_samples", 0) + self._drop(groups)
        self.admit()

    def _drop(self, groups: list[Finished]) -> int:
        """Drop groups of the buffer. Return the number of their responses."""
        rollouts = self.take(groups)
        self.dropped += len(groups)
        self._run.recorder.dropped(rollouts)
        return len(rollouts)

    @property
    def _pipeline(self) -> str:
        return f"pipeline {getattr(self._room, '__module__', '')}"

    @property
    def _words(self) -> str:
        """The rule and what it holds, for messages."""
        taken = self.kept - len(self.running) - len(self.buffer)
        return (
            f"{self._pipeline}: its room for groups is {self._called(self._room) if self._room else 0} at "
            f"version {self._run.trainer.version}; of {self.submitted} submitted, {len(self.running)} run, {len(self.buffer)} "
            f"are finished, {taken} trained, {self.dropped} dropped"
        )

    def starved(self) -> str:
        """Return why a run that stands still has no group left to wait for; "" where that is not
        its rule's doing."""
        if self._room is None or self.running:
            return ""
        called = "call GroupStream.admit whenever what it counts has changed"
        counted = "let it count GroupStream.kept, the groups submitted and not dropped, and grow with the trainer's version"
        remedy = called if self._called(self._room) > 0 else counted
        return f"{self._words}. It waits for a group, and none is submitted; {remedy}"

    def news(self) -> simpy.Event:
        """Return an event that fires when the next group is finished."""
        return self._news.next

    def news_for(self, batch: int) -> simpy.Event:
        """Return `news` for an update of `batch` groups. Raises `StoppedError` if none will come:
        the trace has ended."""
        if self._run.workload.ended and not self.running:
            raise StoppedError(
                f"the trace ended after {self._run.trainer.version} of {self._run.steps} updates: the next has "
                f"{len(self.buffer)} of {batch} groups (dropped: {self.dropped}); give the trace more groups, or ask for fewer "
                "steps"
            )
        return self._news.next

    def drained(self) -> simpy.Event:
        """Return an event that fires when no response of any group is unfinished."""
        return self._drained.next if self._generating else self._run.env.timeout(0)

    def _ended(self, number: int, ended: Any) -> None:
        if not ended.ok:
            raise ended.value  # a worker that died, or its engine's error
        self._generating -= 1
        if not self._generating:
            self._drained.fire()
        on_fire(self._run.rewarder.score(ended.value), partial(self._scored, number))

    def _scored(self, number: int, scored: Any) -> None:
        group = Finished(number, self.running.pop(number), scored.value)
        self.buffer.append(group)
        if not self._run.accepts(group.rollouts):
            self._drop([group])
        self.admit()
        self._news.fire()
