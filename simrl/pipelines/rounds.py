"""Rounds: groups are at the workers together, until enough of them are complete; the rest is taken
back.

Invariant: when a round is over, none of its samples is at a worker or waits for one. The pipeline
that began the round decides what becomes of each group: it trains, goes on in a later round from
where it is, begins anew, or is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import simpy

from simrl.pipelines.batch import Batch
from simrl.pipelines.context import RunContext
from simrl.runtime.events import call_last, on_fire
from simrl.runtime.rollout import Rollout
from simrl.trace.sample import Group


def times(factor: float, number: int) -> int:
    """Return ceil(factor × number), safe against float error (1.1 × 10 is 11)."""
    return math.ceil(round(factor * number, 9))


class GroupProgress:
    """A group that is being generated. It is complete with `needed` finished responses (None:
    all)."""

    def __init__(self, samples: Group, needed: int | None = None) -> None:
        self.samples = samples
        self.needed = len(samples) if needed is None else needed
        self.finished: list[Rollout] = []
        self._unfinished = {sample.uid: Rollout(sample, (), False) for sample in samples}

    @property
    def complete(self) -> bool:
        return len(self.finished) >= self.needed

    @property
    def trainable(self) -> list[Rollout]:
        """First `needed` responses to finish."""
        return self.finished[: self.needed]

    @property
    def unfinished(self) -> list[Rollout]:
        return list(self._unfinished.values())

    def come(self, rollout: Rollout) -> None:
        """Note a sample that came back from the workers, if that is news."""
        uid = rollout.sample.uid
        if uid in self._unfinished and rollout.done:
            del self._unfinished[uid]
            self.finished.append(rollout)
        elif uid in self._unfinished:
            self._unfinished[uid] = rollout


class Round:
    """Groups that are at the workers together. `over` fires when none of their samples is there any
    more.

    `on_complete` is called with each of the first `enough` groups to be complete, and the
    unfinished responses of a complete group are taken back. When `enough` groups are complete, all
    other groups are taken back, too. A group that becomes complete at that instant, or before its
    worker hears of the withdrawal, is in `complete`, too, in the order of completion. With
    `budget_tokens`, each response is cut when it has `budget_tokens` more than at the beginning.
    """

    def __init__(
        self,
        run: RunContext,
        groups: Sequence[GroupProgress],
        enough: int | None = None,
        budget_tokens: int | None = None,
        on_complete: Callable[[GroupProgress], None] = lambda group: None,
    ) -> None:
        self.complete: list[GroupProgress] = []
        self.over = run.env.event()
        self._run = run
        self._enough = len(groups) if enough is None else enough
        self._on_complete = on_complete
        self._groups = list(groups)
        self._withdrawn: set[GroupProgress] = set()
        unfinished = [group.unfinished for group in groups]
        end_tokens = budget_tokens and [
            [rollout.tokens + budget_tokens for rollout in group] for group in unfinished
        ]
        at_workers = run.dispatcher.submit_groups(
            [[rollout.sample for rollout in group] for group in unfinished],
            [[rollout if rollout.segments else None for rollout in group] for group in unfinished],
            [group.needed - len(group.finished) for group in groups],
            end_tokens or None,
        )
        self._out = dict(zip(self._groups, at_workers, strict=True))
        for group, events in self._out.items():
            on_fire(events.complete, partial(self._is_complete, group))
            on_fire(events.over, partial(self._is_over, group))
        if not self._out:
            self.over.succeed()

    @property
    def first(self) -> list[GroupProgress]:
        """First `enough` groups to be complete."""
        return self.complete[: self._enough]

    @property
    def rest(self) -> list[GroupProgress]:
        """Other groups, in the order in which they came."""
        first = set(self.first)
        return [group for group in self._groups if group not in first]

    def _is_complete(self, group: GroupProgress, event: Any) -> None:
        for rollout in event.value:
            group.come(rollout)
        self.complete.append(group)
        if len(self.complete) <= self._enough:
            self._on_complete(group)
        if len(self.complete) == self._enough:
            call_last(self._run.env, lambda: self._take_back(self._groups))
        elif group.unfinished:
            call_last(self._run.env, lambda: self._take_back([group]))

    def _is_over(self, group: GroupProgress, event: Any) -> None:
        if not event.ok:
            raise event.value  # a worker that died, or its engine's error
        del self._out[group]
        for rollout in event.value:
            group.come(rollout)
        if not self._out:
            self.over.succeed()

    def _take_back(self, groups: Sequence[GroupProgress]) -> None:
        """Withdraw the unfinished responses of groups, at the end of an instant, when all that
        ended in it is known."""
        left = [group for group in groups if group in self._out and group not in self._withdrawn]
        self._withdrawn.update(left)
        self._run.dispatcher.withdraw_groups([self._out[group] for group in left])


def hand_over(
    run: RunContext, batch: Batch, groups: Sequence[GroupProgress], enough: int
) -> Generator[simpy.Event, Any, list[GroupProgress]]:
    """Add `enough` groups to the batch: those complete already, then the first to be complete in a
    round of the others. Return the groups that are left, in their order."""
    complete = dict.fromkeys([group for group in groups if group.complete][:enough])
    for group in complete:
        batch.add(group.trainable)
    left = [group for group in groups if group not in complete]
    if len(complete) == enough:
        return left
    a_round = Round(
        run, left, enough - len(complete), on_complete=lambda group: batch.add(group.trainable)
    )
    yield a_round.over
    return a_round.rest
