"""Rounds: groups are at the workers together, until enough of them are complete; what is left of the others is taken back.

Invariant: when a round is over, none of its samples is at a worker or waits for one. What a group has come to is in its
`Progress`, and whoever began the round decides what becomes of it: it trains, goes on in a later round from where it is,
begins anew, or is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import simpy

from simrl.events import call_last, on_fire
from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch
from simrl.rollout import Rollout
from simrl.trace import Sample
from simrl.workload import Group


def times(factor: float, number: int) -> int:
    """So many times a number, rounded up; 1.1 · 10 is 11, though not to a float."""
    return math.ceil(round(factor * number, 9))


class Progress:
    """A group on its way. With `needed` finished responses (None: all) it is complete; `others` are the rest, as they are."""

    def __init__(self, samples: Group, needed: int | None = None) -> None:
        self.samples = samples
        self.needed = len(samples) if needed is None else needed
        self.finished: list[Rollout] = []
        self._others = {sample.uid: Rollout(sample, (), False) for sample in samples}

    @property
    def complete(self) -> bool:
        return len(self.finished) >= self.needed

    @property
    def trainable(self) -> list[Rollout]:
        """The first responses to finish, as many as are needed."""
        return self.finished[: self.needed]

    @property
    def others(self) -> list[Rollout]:
        """What has not finished, and what has beyond need."""
        return self.finished[self.needed :] + self.unfinished

    @property
    def unfinished(self) -> list[Rollout]:
        return list(self._others.values())

    def come(self, rollout: Rollout) -> None:
        """A sample came back from the workers."""
        if rollout.done:
            del self._others[rollout.sample.uid]
            self.finished.append(rollout)
        else:
            self._others[rollout.sample.uid] = rollout


class Round:
    """Groups that are at the workers together. `over` fires when nothing of them is there any more.

    A group that is complete is told to `on_complete`, and has what is unfinished of it taken back. When `enough` groups are
    complete, so has every other; those that become complete at that very instant, or before their worker hears of it, are
    in `complete` after the first `enough` (all of them in the order in which they became so). With `budget_tokens`, each
    response is cut when it has so many tokens more than it came with.
    """

    def __init__(
        self,
        stage: Stage,
        groups: Sequence[Progress],
        enough: int | None = None,
        budget_tokens: int | None = None,
        on_complete: Callable[[Progress], None] = lambda group: None,
    ) -> None:
        self.complete: list[Progress] = []
        self.over = stage.env.event()
        self._stage = stage
        self._enough = len(groups) if enough is None else enough
        self._on_complete = on_complete
        self._groups = list(groups)
        self._withdrawn: set[int] = set()
        going = [(group, rollout) for group in groups for rollout in group.unfinished]
        self._out: dict[int, Sample] = {rollout.sample.uid: rollout.sample for _, rollout in going}
        # The dispatcher cuts what it gets together at the same token, so those with equally many tokens go together.
        ends_at = [None if budget_tokens is None else rollout.tokens + budget_tokens for _, rollout in going]
        for max_tokens in dict.fromkeys(ends_at):
            self._submit([one for one, end in zip(going, ends_at, strict=True) if end == max_tokens], max_tokens)
        if not self._out:
            self.over.succeed()

    @property
    def first(self) -> list[Progress]:
        """The groups that were complete first, as many as were enough."""
        return self.complete[: self._enough]

    @property
    def rest(self) -> list[Progress]:
        """The other groups, in the order in which they came."""
        first = set(map(id, self.first))
        return [group for group in self._groups if id(group) not in first]

    def _submit(self, going: list[tuple[Progress, Rollout]], max_tokens: int | None) -> None:
        ends = self._stage.dispatcher.submit(
            [rollout.sample for _, rollout in going],
            [rollout if rollout.segments else None for _, rollout in going],
            max_tokens,
        )
        for (group, _), end in zip(going, ends, strict=True):
            on_fire(end, partial(self._ended, group))

    def _ended(self, group: Progress, end: Any) -> None:
        if not end.ok:
            raise end.value  # a worker that died, or its engine's error
        was_complete = group.complete
        group.come(end.value)
        del self._out[end.value.sample.uid]
        if group.complete and not was_complete:
            self.complete.append(group)
            if len(self.complete) <= self._enough:
                self._on_complete(group)
            if len(self.complete) == self._enough:
                call_last(self._stage.env, lambda: self._take_back(self._groups))
            elif group.unfinished:
                call_last(self._stage.env, lambda: self._take_back([group]))
        if not self._out:
            self.over.succeed()

    def _take_back(self, groups: Sequence[Progress]) -> None:
        """At the end of an instant, when all that ended in it is known."""
        uids = [rollout.sample.uid for group in groups for rollout in group.unfinished]
        mine = [uid for uid in uids if uid in self._out and uid not in self._withdrawn]
        self._withdrawn.update(mine)
        self._stage.dispatcher.withdraw([self._out[uid] for uid in mine])


def hand_over(
    stage: Stage, batch: Batch, groups: Sequence[Progress], enough: int
) -> Generator[simpy.Event, Any, list[Progress]]:
    """Adds `enough` groups to the batch: those that are complete already, then the first to be so in a round of the others.
    Returns what is left, in its order."""
    complete = [group for group in groups if group.complete][:enough]
    for group in complete:
        batch.add(group.trainable)
    chosen = set(map(id, complete))
    left = [group for group in groups if id(group) not in chosen]
    if len(complete) == enough:
        return left
    a_round = Round(stage, left, enough - len(complete), on_complete=lambda group: batch.add(group.trainable))
    yield a_round.over
    return a_round.rest
