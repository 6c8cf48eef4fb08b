"""Collectors whose rollouts end before all of their responses do, as rounds: APRIL (arXiv
2509.18521), partial rollout (Kimi k1.5, arXiv 2501.12599 §2.6.2) and SortedRL (arXiv 2603.23414).

Invariant of APRIL: nothing is thrown away. A group that is not among the first of its rollout keeps
its tokens and goes first in the next rollout, under the weights of that rollout; a group that was
complete, but too late, trains first there.

Invariant of partial rollout: every update draws a batch of new groups, and trains every group that
is complete; so an update trains a batch on average, and no rollout takes longer than a budget of
tokens does.

Invariant of SortedRL: new prompts are drawn only when everything drawn before is trained; so a
prompt is trained exactly once in `batches` updates, short responses early and long ones late, and
no token is older than `batches` - 1 updates.
"""

from __future__ import annotations

import math
from typing import Literal

import simpy

from simrl.pipelines.batch import Batch, Collector
from simrl.pipelines.context import RunContext
from simrl.pipelines.rounds import GroupProgress, Round, hand_over, times


def first_complete(run: RunContext, *, over_sampling: float) -> Collector:
    """Collect the groups that are complete first, of `over_sampling` times a batch's groups: those
    left by the last rollout, then new ones (the data buffer of the public code fills in that
    order)."""
    left: list[GroupProgress] = []

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        nonlocal left
        new = max(times(over_sampling, batch.size) - len(left), 0)
        left += [GroupProgress(group) for group in run.workload.next_groups(new)]
        left = yield from hand_over(run, batch, left, batch.size)

    return collect


def token_budget(run: RunContext, *, budget_tokens: int) -> Collector:
    """Collect the groups that are complete when each response had `budget_tokens` more tokens; if
    none is, all get another budget. Unfinished responses keep their tokens and go first in the next
    rollout, under its weights."""
    going: list[GroupProgress] = []

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        nonlocal going
        going += [GroupProgress(group) for group in run.workload.next_groups(batch.size)]
        complete = 0
        while not complete:
            a_round = Round(
                run,
                going,
                budget_tokens=budget_tokens,
                on_complete=lambda group: batch.add(group.finished),
            )
            yield a_round.over
            complete, going = len(a_round.complete), a_round.rest

    return collect


def shortest_first(
    run: RunContext,
    *,
    batches: int,
    unit: Literal["response", "group"],
    unfinished: Literal["continue", "restart"],
) -> Collector:
    """Collect an equal part of a rollout of `batches` batches for each update, in responses or
    whole groups. What has not been trained then goes on under the new weights, or is dropped and
    begins anew."""
    left: list[GroupProgress] = []
    updates = 0

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        nonlocal left, updates
        if not left:
            groups = run.workload.next_groups(batches * batch.size)
            units = (
                groups if unit == "group" else [[sample] for group in groups for sample in group]
            )
            left, updates = [GroupProgress(samples) for samples in units], batches
        left = yield from hand_over(run, batch, left, math.ceil(len(left) / updates))
        updates -= 1
        if unfinished == "restart":
            for progress in left:
                run.recorder.dropped(progress.finished + progress.unfinished)
            left = [
                GroupProgress([run.workload.again(sample) for sample in group.samples])
                for group in left
            ]

    return collect
