"""Dynamic sampling (DAPO, arXiv 2503.14476 §3.2): a batch has only groups that teach something, whose rewards differ.

Invariant: a batch has exactly as many groups as an update is to train, all with unequal rewards; what was generated besides is
dropped. It wraps any collector that hands over as many groups as the batch asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import simpy

from simrl.errors import InputError
from simrl.pipelines import Stage
from simrl.pipelines.batchwise import Batch, Collector
from simrl.pipelines.rounds import times
from simrl.rollout import Rollout


def rewards_differ(group: list[Rollout]) -> bool:
    """Whether the group's advantages are not all zero. A single response has nothing to be compared with, and stays, as in
    verl's recipe."""
    rewards = [rollout.reward for rollout in group]
    return len(rewards) == 1 or min(rewards) < max(rewards)


def dynamic_sampling(
    collector: Callable[[Stage], Collector], over_sampling: float, max_rounds: int | None
) -> Callable[[Stage], Collector]:
    """Rounds of `over_sampling` times a batch's groups, one after the other, until enough of them have unequal rewards. Those
    drawn first make the batch, surplus ones are dropped: what verl's recipe does with `data.gen_batch_size`. Raises
    `InputError` when `max_rounds` did not suffice."""

    def sampling(stage: Stage) -> Collector:
        collect_round = collector(stage)

        def collect(batch: Batch) -> simpy.events.ProcessGenerator:
            size = batch.size
            batch.accepts = rewards_differ
            batch.target = times(over_sampling, size)
            for rounds in count():
                if rounds == max_rounds:
                    raise InputError(
                        f"dynamic sampling: {len(batch.groups)} of {rounds * batch.target} groups have unequal rewards after "
                        f"{rounds} rounds, an update needs {size}; use more over_sampling, more max_rounds, or another trace"
                    )
                yield from collect_round(batch)
                yield batch.settled()
                if len(batch.groups) >= size:
                    break
            batch.keep_first(size)

        return collect

    return sampling
