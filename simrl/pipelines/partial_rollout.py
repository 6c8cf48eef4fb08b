"""Partial rollout (Kimi k1.5, arXiv 2501.12599 §2.6.2): a response gets a budget of tokens per
update, and then goes on later.

Invariant: every update draws a batch of new groups, and trains every group that is complete; so an
update trains a batch on average, and no rollout takes longer than a budget of tokens does.
"""

from __future__ import annotations

import simpy

from simrl.pipelines.batch import Batch, Collector
from simrl.pipelines.context import RunContext
from simrl.pipelines.rounds import GroupProgress, Round


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
