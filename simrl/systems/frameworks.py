"""Recipes under the names of today's asynchronous trainers, with their keys and defaults."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from simrl.pipelines import samplers
from simrl.pipelines.buffered import Rules, buffered
from simrl.pipelines.samplers import Sampler
from simrl.pipelines.single_controller import single_controller
from simrl.pipelines.words import finished_first
from simrl.runtime.worker import OnUpdate
from simrl.systems.system import OWN_GPUS, Count, NotNegative, System, recipe


@recipe(*OWN_GPUS, "dispatch", without="minibatches", dispatch="round_robin")
def nemo_rl_single_controller(
    sampler: Sampler = "in_order",
    window: NotNegative = 1,
    max_inflight_prompts: Count = 32,
    max_buffered_rollouts: Count | None = None,
    min_groups_for_streaming_train: Count = 32,
    recompute_kv: bool = False,
) -> System:
    """Prompts take permits to start; a sampler chooses which finished groups an update trains, in chunks as they come.

    As NVIDIA-NeMo/RL@7ea279a (`run_grpo_single_controller`). Prompts start one after the other while fewer than
    `max_inflight_prompts` run and fewer than `max_buffered_rollouts` run or wait (None: 64, or what the sampler needs where
    that is more). `window` is `max_lookahead_versions` of the sampler in_order and `max_staleness_versions` of the others:
    but for windowed, the prompts of batch n start once the trainer has version n - `window`. in_order trains batch n in
    update n; ready_first any finished groups, those first that started first; weight_fifo those of the oldest version that
    any group of the window began with; windowed any that began at most `window` versions ago, and drops older ones,
    finished or running. The trainer takes all that its sampler offers, up to a batch in total, as soon as it is free and
    `min_groups_for_streaming_train` are offered, or what the update still lacks. After the update weights are loaded while
    requests run on with their KV cache (`recompute_kv`, as `recompute_kv_cache_after_weight_updates`: after computing it
    again); no prompt starts meanwhile. weight_fifo can stand still, in NeMo-RL too, if a version has fewer groups than a
    chunk needs.
    Not modelled: prompts given up after errors (`on_dropped_prompt`), since none fail here; `sample_freshest_first`.
    """
    return System(
        pipeline=partial(
            single_controller,
            sampler=sampler,
            window=window,
            in_flight=max_inflight_prompts,
            buffered=max_buffered_rollouts,
            least=min_groups_for_streaming_train,
        ),
        on_update=OnUpdate("recompute" if recompute_kv else "keep"),
        schedule=f"asynchronous, sampler {sampler}",
        paper="NeMo-RL, single controller",
        off_policyness=None if sampler == "ready_first" else window,
    )


@recipe(*OWN_GPUS, "dispatch")
def slime_train_async(update_weights_interval: Count = 1) -> System:
    """A batch is generated while the one before trains; a weight sync waits until it is finished.

    As `train_async.py` of THUDM/slime@624b824, and of miles without `--fully-async`. The rollout of batch k + 1 begins when
    batch k is finished and the trainer free. After every `update_weights_interval`-th update the trainer waits for this
    rollout, and all workers load; so no response has two versions, and off-policyness is at most `update_weights_interval`.
    Not modelled: `--over-sampling-batch-size` and `--partial-rollout` (april has them).
    """
    rules = Rules(
        budget=samplers.one_batch_ahead,
        ready=finished_first,
        updates_per_sync=update_weights_interval,
        sync_after="ready",
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        schedule="one batch ahead, synced between rollouts",
        paper="slime, train_async",
        off_policyness=update_weights_interval,
    )


@recipe(*OWN_GPUS, "dispatch")
def slime_fully_async(
    sglang_server_concurrency: Count = 512, update_weights_interval: Count = 1
) -> System:
    """A pool of groups always runs; the first batch to finish trains; a weight sync aborts what runs, which goes on later.

    As `fully_async_rollout` of THUDM/slime@624b824. Every second, groups start until `sglang_server_concurrency` times the
    number of engines run; none while as many finished ones wait beyond the next batch. After every
    `update_weights_interval`-th update the trainer waits until the next batch is finished, then aborts all running
    requests, and the workers load. At the next full second the aborted groups start first: finished responses are kept, and
    aborted ones go on from their tokens, which are prefilled again. Staleness is not bounded.
    Not modelled: the limit of requests in flight at the client, which is the pool's number, but of single responses.
    """
    rules = Rules(
        budget=partial(samplers.pool, per_engine=sglang_server_concurrency, poll_s=1.0),
        ready=finished_first,
        updates_per_sync=update_weights_interval,
        sync_after="ready",
        takes_back=True,
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        schedule="fully asynchronous, a pool",
        paper="slime, fully_async_rollout",
        off_policyness=None,
    )


@recipe(*OWN_GPUS, "dispatch")
def miles_async(
    max_weight_staleness: NotNegative | None = None,
    unused_samples_handler: Literal["drop", "retry"] = "drop",
    pause_generation_mode: Literal["retract", "in_place"] = "retract",
    max_concurrent_samples: Count | None = None,
    data_buffer_capacity_factor: Annotated[float, Field(gt=0, le=1000)] = 2.0,
    submission_granularity: Literal["sample", "group"] = "sample",
    update_weights_interval: Count = 1,
) -> System:
    """A batch of groups runs all the time; the first batch to finish trains; stale groups are dropped or generated again.

    As `train_async.py --fully-async` of radixark/miles@31f1ca9. As many samples run as a batch has, or
    `max_concurrent_samples` (`--async-max-concurrent-samples`); a group starts as soon as as many samples as it has are
    finished, of whatever groups (`submission_granularity`: or when a group is). Finished groups wait in a buffer of
    `data_buffer_capacity_factor` batches; if it is full, no group starts. Batches are taken in the order of finishing. A
    group is too stale if one of its responses ended more than `max_weight_staleness` versions before that of the engines
    when the batch was asked for, as the one before began to train; its prompts are dropped, or start again before new ones
    (`unused_samples_handler`). After every `update_weights_interval`-th update the trainer waits for the next batch, and
    all workers load; running requests recompute their KV cache (retract) or keep it (in_place). miles refuses the mode
    abort here.
    Not modelled: a producer that a full buffer stopped looks once for free places before it stops again; here it does not.
    Of an agent's response, the version counts under which its last turn ended, not its first.
    """
    interval = update_weights_interval
    rules = Rules(
        budget=partial(
            samplers.in_flight,
            most_samples=max_concurrent_samples,
            capacity_batches=data_buffer_capacity_factor,
            by_sample=submission_granularity == "sample",
        ),
        ready=finished_first,
        stale=None
        if max_weight_staleness is None
        else partial(samplers.stale_when_taken, staleness=max_weight_staleness, interval=interval),
        retries=unused_samples_handler == "retry",
        by_sample=submission_granularity == "sample",
        updates_per_sync=interval,
        sync_after="ready",
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        schedule="fully asynchronous, a batch in flight",
        on_update=OnUpdate("keep" if pause_generation_mode == "in_place" else "recompute"),
        paper="miles, --fully-async",
        off_policyness=None,
    )


@recipe(*OWN_GPUS, "dispatch", dispatch="round_robin_groups")
def roll_async(
    async_generation_ratio: Annotated[float, Field(ge=0, le=100)] = 1.0, filter_groups: bool = False
) -> System:
    """Groups run up to a ratio of batches ahead; a batch takes those of the oldest step first, and too old ones are aborted.

    As ROLL's replay buffer (alibaba/ROLL@8eb27cc, `async_pipeline` of RLVR). Up to step k, `async_generation_ratio` + k + 1
    batches of groups may have started that were neither dropped nor aborted. A batch takes the finished groups of the
    oldest step, then the next, and waits at each for its running groups while the batch lacks some; of the oldest step a
    ratio that is not whole takes its fractional part of a batch only. Before the weights are synced, running groups that
    began `async_generation_ratio` (rounded up) or more steps ago are aborted and replaced. Other running requests stop, and
    go on after the load with their tokens, prefilled again. The ratio has no default in ROLL beyond 0, which is
    synchronous; its examples have 1. `filter_groups` drops groups with equal rewards when they are scored; others start in
    their place.
    Not modelled: a group goes to the least loaded worker, here by turns; `is_use_additional_prompts`; agents' expiry.
    """
    rules = Rules(
        budget=partial(samplers.prompts_of_steps, ratio=async_generation_ratio),
        ready=partial(samplers.oldest_steps, ratio=async_generation_ratio),
        stamp=lambda stream: stream.noted_version,
        evict=partial(samplers.began_before, ratio=async_generation_ratio),
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        schedule="asynchronous, a ratio of batches ahead",
        paper="ROLL, arXiv 2506.06122",
        off_policyness=math.ceil(async_generation_ratio),
        filter_groups=filter_groups,
    )
