"""Streaming: groups go in one by one while a rule has room for more, and come out into a buffer that the trainer takes from.

Invariant: submitted = running + buffered + taken + dropped, in groups, at every moment; a group runs until its last response
is scored, and is taken or dropped once. What is counted, and what bounds it, is the pipeline's own rule
(`simrl.pipelines.areal`, `simrl.pipelines.verl_fully_async`, `simrl.pipelines.laminar`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import simpy

from simrl.errors import StoppedError
from simrl.events import gather, on_fire
from simrl.pipelines import Stage
from simrl.rollout import Rollout
from simrl.trace import Sample


class Finished(NamedTuple):
    """A group whose responses are all there and scored: how many were submitted before it, under which version it was, and
    what came out."""

    number: int
    version: int
    rollouts: list[Rollout]

    @property
    def oldest_version(self) -> int:
        return min(segment.policy_version for rollout in self.rollouts for segment in rollout.segments)


class GroupStream:
    """The groups of one run. `room` says how many more may be submitted now; it is asked whenever a group is finished. What
    `accepts` refuses, when it is scored, is dropped."""

    def __init__(
        self, stage: Stage, room: Callable[[], int], accepts: Callable[[list[Rollout]], bool] = lambda group: True
    ) -> None:
        self.running: dict[int, int] = {}  # by number: the trainer's version when the group was submitted
        self.buffer: list[Finished] = []  # in the order in which they were finished
        self.submitted = 0
        self.taken = 0
        self.dropped = 0
        self._stage = stage
        self._room = room
        self._accepts = accepts
        self._news = stage.env.event()

    def admit(self) -> None:
        """Submits groups while the rule has room for them, and there are any."""
        while self._room() > 0 and not self._stage.workload.ended:
            self.submit()

    def submit(self, to: int | None = None) -> list[tuple[Sample, simpy.Event]]:
        """Submits the next group, where dispatch places it or all to one worker: its samples and the ends of their stays."""
        stage, number = self._stage, self.submitted
        [group] = stage.workload.next_groups(1)
        self.submitted += 1
        self.running[number] = stage.trainer.version
        ends = stage.dispatcher.submit(group, to=None if to is None else [to] * len(group))
        on_fire(gather(stage.env, ends), partial(self._ended, number))
        return list(zip(group, ends, strict=True))

    def take(self, groups: list[Finished]) -> list[Rollout]:
        """Groups leave the buffer for training."""
        self.taken += len(groups)
        self._remove(groups)
        return [rollout for group in groups for rollout in group.rollouts]

    def drop(self, groups: list[Finished]) -> None:
        """Groups leave the buffer for good."""
        self.dropped += len(groups)
        self._remove(groups)
        for group in groups:
            self._stage.recorder.dropped(group.rollouts)

    def news(self) -> simpy.Event:
        """Fires when the next group is finished."""
        return self._news

    def news_for(self, batch: int) -> simpy.Event:
        """The same, for an update of so many groups. Raises `StoppedError` where none comes: the workload has ended."""
        stage = self._stage
        if stage.workload.ended and not self.running:
            raise StoppedError(
                f"the trace ended after {stage.trainer.version} of {stage.steps} updates: the next has {len(self.buffer)} of "
                f"{batch} groups (dropped: {self.dropped}); give the trace more groups, or ask for fewer steps"
            )
        return self._news

    def _remove(self, groups: list[Finished]) -> None:
        gone = {group.number for group in groups}
        self.buffer = [group for group in self.buffer if group.number not in gone]

    def _ended(self, number: int, ended: Any) -> None:
        if not ended.ok:
            raise ended.value  # a worker that died, or its engine's error
        on_fire(self._stage.rewarder.score(ended.value), partial(self._scored, number))

    def _scored(self, number: int, scored: Any) -> None:
        group = Finished(number, self.running.pop(number), scored.value)
        self.buffer.append(group)
        if not self._accepts(group.rollouts):
            self.drop([group])
        self.admit()
        news, self._news = self._news, self._stage.env.event()
        news.succeed()
