"""Recipes under the names of today's frameworks, with their defaults."""

from __future__ import annotations

from functools import partial

from simrl.pipelines.batchwise import batchwise
from simrl.pipelines.verl_v1 import polled
from simrl.systems.system import Count, System, recipe

VERL_V1 = "verl V1, verl@1dda039 trainer/ppo/v1"


@recipe("dispatch", minibatches=4)
def verl_v1_sync(filter_groups: bool = False, max_inflight_batches: Count = 1) -> System:
    """verl's default trainer (trainer_mode: sync): every GPU rolls out the batch, then all train; on-policy.

    A step submits its batch of prompts, waits until all are finished, and looks at its buffer every two seconds
    (`poll_interval`). Batches do not pass through one process (TransferQueue). The GPUs switch from rollout to training,
    compute log-probs (`log_probs`; 0 with rollout_correction.bypass_mode), update, and switch back. `minibatches` is
    train_batch_size over ppo_mini_batch_size. With `filter_groups` (algorithm.filter_groups.enable), groups with equal rewards
    are evicted when the buffer is looked at, and each is credited with two fresh ones, of which no more begin than leave
    `max_inflight_batches` (max_inflight_gen_batches) batches under way. Once the good groups suffice, what is under way ends,
    and the surplus is discarded.
    Not modelled: groups that fail (sync_refill_failed_groups).
    """
    return System(
        pipeline=partial(
            batchwise,
            eta=0,
            collector=partial(polled, filters=filter_groups, most_batches=max_inflight_batches),
        ),
        schedule="synchronous, polled",
        filter_groups="polled" if filter_groups else False,
        paper=VERL_V1,
        off_policyness=0,
    )
