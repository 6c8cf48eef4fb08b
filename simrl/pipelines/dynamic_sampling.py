"""Dynamic sampling (DAPO, arXiv 2503.14476 §3.2): a batch has only groups whose rewards differ,
which alone teach something.

Invariant: a batch has exactly the number of groups that an update trains, all with unequal rewards;
surplus groups are dropped. It refills the batches of any collector that hands over as many groups
as the batch asks for.
"""

from __future__ import annotations

from itertools import count

import simpy

from simrl.errors import InputError
from simrl.pipelines.batch import Batch, Collector
from simrl.pipelines.context import DynamicSampling
from simrl.pipelines.rounds import times
from simrl.runtime.rollout import Rollout


def rewards_differ(group: list[Rollout]) -> bool:
    """Return whether some advantage of the group is not zero. A single response has nothing to be
    compared with, and stays, as in verl's recipe."""
    rewards = [rollout.reward for rollout in group]
    return len(rewards) == 1 or min(rewards) < max(rewards)


def too_few(batch: Batch, rounds: int, round_groups: int, size: int) -> InputError:
    """Return the error for a batch that its rounds do not fill."""
    return InputError(
        f"dynamic sampling: {len(batch.groups)} of {rounds * round_groups} groups have unequal rewards after "
        f"{rounds} rounds, an update needs {size}; use more over_sampling, more max_rounds, or another trace"
    )


def refilled(collect_round: Collector, rule: DynamicSampling) -> Collector:
    """Return a collector that runs rounds of another one until enough groups have unequal rewards.

    The groups drawn first make the batch, surplus groups are dropped, as in verl's recipe with
    `data.gen_batch_size`. Raises `InputError` if `max_rounds` rounds do not suffice.
    """

    def collect(batch: Batch) -> simpy.events.ProcessGenerator:
        size = batch.size
        batch.accepts = rewards_differ
        batch.target = times(rule.over_sampling, size)
        for rounds in count():
            if rounds == rule.max_rounds:
                raise too_few(batch, rounds, batch.target, size)
            yield from collect_round(batch)
            yield batch.settled()
            if len(batch.groups) >= size:
                break
        batch.keep_first(size)

    return collect
