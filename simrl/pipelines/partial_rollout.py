"""Partial rollout (Kimi k1.5, arXiv 2501.12599 §2.6.2): a response gets so many tokens an update; a longer one goes on later.

Invariant: every update draws as many new groups as a batch has, and trains every group that is complete; so what is trained
is a batch an update on average, and no rollout takes longer than a budget of tokens does.
"""

from __future__ import annotations

from collections.abc import Callable

import simpy

from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch, Collector
from simrl.pipelines.rounds import Progress, Round


def token_budget(budget_tokens: int) -> Callable[[Stage], Collector]:
    """What is unfinished at the budget is cut, keeps its tokens, and goes first in the next rollout, under the weights that are
    there then (prompt and tokens are prefilled anew). Where no group is complete, all get another budget."""

    def collector(stage: Stage) -> Collector:
        going: list[Progress] = []

        def collect(batch: Batch) -> simpy.events.ProcessGenerator:
            nonlocal going
            going += [Progress(group) for group in stage.workload.next_groups(batch.size)]
            complete = 0
            while not complete:
                a_round = Round(
                    stage, going, budget_tokens=budget_tokens, on_complete=lambda group: batch.add(group.finished)
                )
                yield a_round.over
                complete, going = len(a_round.complete), a_round.rest

        return collect

    return collector
