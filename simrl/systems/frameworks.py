"""Recipes under the names of today's asynchronous trainers, with their keys and defaults."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from simrl.dispatch.rules import DISPATCHES
from simrl.errors import refuse
from simrl.pipelines import prime_rl as prime_rl_words, samplers
from simrl.pipelines.batchwise import batchwise
from simrl.pipelines.buffered import Rules, buffered
from simrl.pipelines.rlinf_dynamic import rlinf_dynamic as rlinf_dynamic_pipeline
from simrl.pipelines.samplers import Sampler
from simrl.pipelines.single_controller import single_controller
from simrl.pipelines.verl_v1 import (
    POLL_S,
    batches_and_warmup,
    evicted,
    oldest_stamp_first,
    polled,
    step,
    switching,
)
from simrl.pipelines.words import (
    batches_ahead,
    batches_taken,
    finished_first,
    lends_each_update,
    limit_in_flight,
    older,
    overflows,
    pool_of_prompts,
    responses_in_flight,
    stamp_older,
    synced,
    within_lag,
    workers_allowed,
)
from simrl.runtime.worker import LoadMode, OnUpdate
from simrl.systems.system import OWN_GPUS, Count, NotNegative, System, recipe


@recipe(*OWN_GPUS, "dispatch", "filter_groups", dispatch="round_robin_groups", log_probs=0)
def prime_rl(
    max_off_policy_steps: NotNegative = 8,
    min_inflight: Count = 1,
    max_inflight: Count = 1024,
    initial_inflight: Count | None = None,
    use_cache_salt: bool = True,
) -> System:
    """Groups start while the trainer is at most one batch behind; the responses in flight follow the engines; KV is kept.

    As PrimeIntellect-ai/prime-rl@559b447, whose names the parameters have (`orchestrator.concurrency` for the bounds). Batch s
    trains version s - 1 and ships once version s - 2 is published, so one batch may wait for the trainer. Groups start while at
    most one shipped batch is untrained. A batch takes the groups that finished first; `batch_size` counts responses, which are
    the responses of the trace's batch here. A group carries the version at its start. Groups that would train more than
    `max_off_policy_steps` versions later are dropped; running ones are cancelled before the engines pause for new weights.
    Requests then go on with their KV cache, while the next update may begin. Prefix caches are salted by the version at a
    group's start (`use_cache_salt`). The limit of responses in flight begins at `initial_inflight` (None: the tokens of the KV
    cache over the longest sequence), follows every 5 s what the engines report, and stays between `min_inflight` and
    `max_inflight`. In each 5 s the responses in flight grow by at most a tenth of the limit, or one group.
    Evaluations share this limit with training, and go first (`evaluation`).
    Not modelled: an evaluation begins when a batch is shipped (here: when its version is loaded); of a group cancelled under
    overload, finished responses train; the
    rest of a group that has begun waits while no group may start; a weight update is noticed within a second.
    """
    initial = min_inflight if initial_inflight is None else initial_inflight
    refuse(
        (
            not min_inflight <= initial <= max_inflight,
            f"prime_rl: initial_inflight {initial} is not between min_inflight {min_inflight} and max_inflight {max_inflight}; "
            "give a value between them",
        ),
    )
    rules = Rules(
        budget=prime_rl_words.budget,
        by_response=True,
        ready=finished_first,
        stale=partial(stamp_older, than=max_off_policy_steps, now=batches_taken),
        drop_at="both",
        evict=partial(older, than=max_off_policy_steps, now=batches_taken),
        ahead=prime_rl_words.TARGET_LAG,
        overlaps=True,
        begin=partial(
            prime_rl_words.Control,
            least=min_inflight,
            most=max_inflight,
            initial=initial_inflight,
        ),
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        schedule="fully asynchronous, one batch shipped ahead",
        on_update=OnUpdate("keep", salted=use_cache_salt),
        paper="prime-rl; INTELLECT-3, arXiv 2512.16144",
        evaluates="beside_training",
        off_policyness=max_off_policy_steps + 1,  # a group may begin before its version is loaded
    )


@recipe(*OWN_GPUS, "dispatch", "filter_groups", log_probs=0)
def skyrl_async(
    max_staleness_steps: NotNegative = 4,
    num_parallel_generation_workers: Count | None = None,
    clear_kv_cache_on_weight_sync: bool = False,
    use_cache_salt: bool = True,
) -> System:
    """AReaL's capacity bounds what starts; groups train in the order in which they finished; KV is kept at a weight sync.

    As the fully asynchronous trainer of NovaSky-AI/SkyRL@a956457. A group starts while the groups submitted and not dropped are
    fewer than (`max_staleness_steps` + version + 1) batches, and fewer than `num_parallel_generation_workers` run (None: its
    768, but at least one batch and at most `max_staleness_steps` + 1, outside which SkyRL refuses a value). A batch takes the
    groups that finished first; older ones than the bound are trained. Then the engines pause for the weights; requests go on
    with their KV cache, or compute it again (`clear_kv_cache_on_weight_sync`). Prefix caches are salted by the version at a
    group's start (`use_cache_salt`, true from SkyRL 0.3.0 on). `filter_groups` drops groups of equal rewards
    (`sample_full_batch`).
    Not modelled: each epoch ends with nothing running; such groups are dropped here when they are scored, there when taken.
    """
    bound, most = max_staleness_steps + 1, num_parallel_generation_workers
    rules = Rules(
        budget=partial(
            batches_ahead,
            ahead=max_staleness_steps,
            at_once=lambda batch: most or min(max(768, batch), batch * bound),
        ),
        ready=finished_first,
        begin=partial(
            workers_allowed, workers=num_parallel_generation_workers, ahead=max_staleness_steps
        ),
    )
    running: LoadMode = "recompute" if clear_kv_cache_on_weight_sync else "keep"
    return System(
        pipeline=partial(buffered, rules=rules),
        pauses=True,
        schedule="fully asynchronous",
        on_update=OnUpdate(running, salted=use_cache_salt),
        paper="SkyRL, fully asynchronous trainer",
        off_policyness=None,
    )


OrTrlsNone = Annotated[Count | None, BeforeValidator(lambda n: None if n == -1 else n)]


@recipe(*OWN_GPUS, "dispatch", without="minibatches", log_probs=0)
def trl_async(
    max_staleness: NotNegative = 4,
    max_inflight_tasks: OrTrlsNone = None,
    queue_maxsize: Count = 1024,
    weight_sync_steps: Count = 1,
) -> System:
    """A fixed number of responses runs; what is too stale when the trainer takes it is dropped; KV is kept at a weight sync.

    As the experimental AsyncGRPOTrainer of TRL 1.16 (1.10 has the same defaults). `max_inflight_tasks` responses are in flight
    (None, or TRL's -1: `max_staleness` batches); the next response starts when one ends, group after group. A group carries the
    number of weight syncs at its start. The trainer takes groups in the order in which they finished, and drops those more than
    `max_staleness` syncs old. While `queue_maxsize` responses wait, no group starts. After every `weight_sync_steps`-th update
    the engines pause and keep the KV cache, and the trainer waits for them.
    Not modelled: the 16 groups that may wait to be scored beside a full queue; micro-batches packed by a token budget.
    """
    rules = Rules(
        budget=partial(responses_in_flight, waiting=queue_maxsize),
        by_response=True,
        begin=partial(limit_in_flight, most=max_inflight_tasks, batches=max(max_staleness, 1)),
        ready=finished_first,
        stamp=synced,
        stale=partial(stamp_older, than=max_staleness),
        updates_per_sync=weight_sync_steps,
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        pauses=True,
        schedule="fully asynchronous, a fixed number in flight",
        on_update=OnUpdate("keep"),
        paper="TRL, AsyncGRPOTrainer",
        off_policyness=(max_staleness + 1) * weight_sync_steps - 1,
    )


@recipe(*OWN_GPUS, "dispatch", "filter_groups", without="minibatches", log_probs=0)
def open_instruct(async_steps: Count = 8, inflight_updates: bool = True) -> System:
    """A fixed pool of prompts; each result that a batch takes is replaced; batches are prepared up to `async_steps` ahead.

    As allenai/open-instruct@e6c3044 (`DataPreparationActor`). At first, `async_steps` batches of prompts start. Results go into
    the batch that is collected, in the order in which they finished, and each is replaced by one prompt. A batch is collected
    while fewer than `async_steps` whole ones wait; otherwise results stay where they are, and nothing starts. A result that is
    more than `async_steps` versions older than the batch that is collected is dropped and replaced; its version is the one of
    the engines when it started. After each update the engines load; requests go on with their KV cache (`inflight_updates`),
    or end before. `filter_groups` is `filter_zero_std_samples` with `active_sampling`.
    Not modelled: without `active_sampling`, groups of equal rewards count for their batch, which is smaller.
    """
    rules = Rules(
        budget=partial(pool_of_prompts, batches=async_steps),
        ready=finished_first,
        stamp=synced,
        stale=partial(stamp_older, than=async_steps, now=batches_taken),
        ahead=async_steps,
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        pauses=True,
        schedule="fully asynchronous, batches prepared ahead",
        on_update=OnUpdate("keep" if inflight_updates else "drain"),
        paper="Open-Instruct (Olmo 3)",
        off_policyness=None,
    )


@recipe(*OWN_GPUS, without="minibatches", log_probs=0)
def pipeline_rl(
    llm_max_rollouts: Count = 64, max_lag: NotNegative | None = None, ring_buffer_size: Count = 128
) -> System:
    """Engines are always full; weights after every update, with the KV cache kept; a full buffer drops its oldest groups.

    As ServiceNow/PipelineRL@58d3934. Each engine has up to `llm_max_rollouts` responses; the next goes to the engine with the
    fewest. A batch takes the groups that finished first. With `max_lag` (in responses), the groups of an update start at
    first, and the groups of `max_lag` responses (rounded up) more; with every version, the groups of one update. Without it,
    generation never waits. Of what is finished, a batch and `ring_buffer_size` responses wait for the trainer; the oldest
    beyond are dropped. After each update the engines pause, load, and keep their KV cache.
    Not modelled: the preprocessor's queues but for the last; `max_ready_samples_per_lead` (64 a trainer) is one batch here.
    """
    rules = Rules(
        budget=partial(within_lag, lag=max_lag),
        by_response=True,
        ready=finished_first,
        stale=partial(overflows, most=ring_buffer_size) if max_lag is None else None,
        drop_at="finish",
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        pauses=True,
        schedule="fully asynchronous, weights in flight",
        on_update=OnUpdate("keep"),
        dispatch=replace(DISPATCHES["least_requests"], per_worker=llm_max_rollouts),
        paper="PipelineRL, arXiv 2509.19128",
        off_policyness=None,
    )


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


Ratio = Annotated[float, Field(ge=0, le=1)]
Warmup = Annotated[float, Field(ge=0, le=100)]  # batches


def verl_v1(
    updates: int,
    warmup_batches: float,
    max_span: int | None,
    on_stale: Literal["drop", "wait"],
    filter_groups: bool,
    **rules: Any,
) -> dict[str, Any]:
    """Return the fields that verl V1's asynchronous modes share: a step makes `updates`."""
    waits = max_span if on_stale == "wait" else None
    words = Rules(
        budget=partial(batches_and_warmup, updates=updates, warmup=warmup_batches),
        ready=partial(oldest_stamp_first, updates=updates, waits_at=waits),
        groups=lambda batch: max(batch // updates, 1),
        stamp=partial(step, updates=updates),
        stale=partial(
            evicted,
            updates=updates,
            longest=None if waits else max_span,
            filters=filter_groups,
        ),
        updates_per_sync=updates,
        admits=False,
        poll_s=POLL_S,
        **rules,
    )
    late = math.ceil(warmup_batches) - 1 if waits and warmup_batches > 1 else 0
    return {
        "pipeline": partial(buffered, rules=words),
        "filter_groups": "polled" if filter_groups else False,
        "paper": VERL_V1,
        "off_policyness": None if max_span is None else (max_span + late) * updates - 1,
    }


@recipe("dispatch", minibatches=4)
def verl_v1_colocate_async(
    warmup_batches: Warmup = 1.0,
    max_span: Count | None = 8,
    on_stale: Literal["drop", "wait"] = "drop",
    filter_groups: bool = False,
) -> System:
    """verl's trainer_mode colocate_async: rollout of the next batch has begun; what is left when one is ready goes on later.

    A step begins with the submission of a whole batch of prompts, the first one with `warmup_batches` (num_warmup_batches;
    rounded down to whole groups) more. The buffer is looked at every two seconds (`poll_interval`). Once a batch of groups is
    finished, taken by the oldest steps first, generation ends: what runs is aborted with its tokens, the engines sleep, and the
    same GPUs train (`minibatches`: train_batch_size over ppo_mini_batch_size). Then the engines load the weights, and an
    aborted request goes on at the server that had it, where its tokens are prefilled again; the second that it waits first is
    over by then. A group's span is the number of steps from its submission to the present one, both counted. A finished group
    whose span exceeds `max_span` (sampler.max_off_policy_threshold; null: any) is evicted (`on_stale`, max_off_policy_strategy:
    drop), or no batch is taken while an unfinished group has that span (wait). `filter_groups` (algorithm.filter_groups.enable)
    evicts groups with equal rewards, too. Each evicted group is replaced by a fresh one, at the same look.
    Not modelled: groups that fail; the order of equally old groups, which is the order of a set (here, of submission).
    """
    shared = verl_v1(1, warmup_batches, max_span, on_stale, filter_groups, sleeps=True)
    return System(schedule="colocated, the next batch ahead", **shared)


@recipe(*OWN_GPUS, "dispatch", without="minibatches")
def verl_v1_separate_async(
    sync_step: Count = 4,
    warmup_batches: Warmup = 1.0,
    max_span: Count | None = 8,
    on_stale: Literal["drop", "wait"] = "drop",
    filter_groups: bool = False,
    enable_switch: bool = False,
    switch_threshold_ratio: Annotated[float, Field(gt=0, le=1)] = 0.4,
    adaptive_switch_threshold: bool = True,
    switch_threshold_step_up: Ratio = 0.05,
    switch_threshold_step_down: Ratio = 0.03,
    switch_threshold_release_steps: Count = 2,
    switch_cost_window_size: Count = 3,
) -> System:
    """verl's trainer_mode separate_async: mini-batches train as soon as their groups are ready, weights go out once a step.

    A step trains a batch in `sync_step` (parameter_sync_step) updates of a mini-batch each; an update is a step of the run.
    verl requires a whole number of groups in each; here it is rounded down, to one at the least. It
    begins as in verl_v1_colocate_async, looks at its buffer as often, and evicts, waits and refills by the same rules: span
    counts steps. An update trains as soon as a mini-batch of groups is ready, the oldest steps first. After the last
    one of a step, requests are aborted with their tokens, the weights are broadcast and loaded, and generation resumes: an
    aborted request goes on at its server, a second after it was aborted at the earliest, and prefills its tokens again.
    `log_probs` is 1 unless rollout_correction.bypass_mode takes the rollout's. With `enable_switch`
    (hybrid_rollout.enable_switch), the trainer's GPUs roll out too: from the start, and from the end of a step, if fewer groups
    are ready for the next than the threshold and those that are missing would cost more seconds than the last
    `switch_cost_window_size` switches each way did; all responses are then dealt anew. They come back when the threshold is
    ready: `switch_threshold_ratio` of a batch, at least a mini-batch; with `adaptive_switch_threshold` the ratio rises
    (`switch_threshold_step_up`) from the `switch_threshold_release_steps`-th step in a row on that waited longer than a look,
    and falls (`switch_threshold_step_down`) from as many that did not. A switch takes what it executes: requests leave, states
    go to the host or come back (`training.switch_s` and `offload`), workers load the weights.
    Not modelled: responses that go to lent workers at once, and wait there for the load; the second that responses wait that a
    switch moves; weights that go to the host and back where log-probs are of the step's first weights; as for
    verl_v1_colocate_async.
    """
    switch = partial(
        switching,
        minibatches=sync_step,
        ratio=switch_threshold_ratio,
        step_up=switch_threshold_step_up * adaptive_switch_threshold,
        step_down=switch_threshold_step_down * adaptive_switch_threshold,
        release_steps=switch_threshold_release_steps,
        cost_window=switch_cost_window_size,
    )
    begin = {"begin": switch} if enable_switch else {}
    shared = verl_v1(sync_step, warmup_batches, max_span, on_stale, filter_groups, **begin)
    return System(
        elastic="updates" if enable_switch else None,
        pauses=True,
        on_update=OnUpdate("recompute", retry_s=1.0),
        schedule="asynchronous, weights once a batch",
        **shared,
    )


@recipe("rollout_share")
def rlinf_dynamic(
    minibatches: Count = 4,
    max_running_requests: Count = 64,
    pre_process: bool = False,
    wait_before_last: bool = False,
    moves: Literal["tokens", "kv"] = "tokens",
) -> System:
    """Within a step, rollout workers that are no longer needed move to the trainer; on-policy.

    Mini-batches train as their groups are finished (`algorithm.n_minibatches`). After each but the last, workers leave: all if
    nothing runs; else, of those beyond running / `max_running_requests`, as many as lift the trainer to its next data-parallel
    size that divides a mini-batch's groups and fits in memory. Their responses are aborted and go on at the others, which are
    filled one after the other up to the mean; their tokens are prefilled there, or their KV cache comes over the network
    (`moves=kv`). The trainer reshards its states (`training.switch_s` and the network). After the last mini-batch it has its
    first size again, and all workers load the new weights. `pre_process` (`cluster.use_pre_process_policy`): the trainer's GPUs
    roll out, too, until no more than half of the responses run, looked at every second. `wait_before_last`
    (`cluster.use_wait_before_last_iter_policy`): the last mini-batch waits for the end of rollout, and for all GPUs. Defaults
    are from RLinf's example, with its workers for log-probs at rollout.
    Not modelled: workers for log-probs of their own, which the trainer computes here; a trainer that takes a part of a worker's
    GPUs; RLinf's waits of .1 s for instances that stop.
    """
    return System(
        pipeline=partial(
            rlinf_dynamic_pipeline,
            minibatches=minibatches,
            most_running=max_running_requests,
            pre_process=pre_process,
            wait_before_last=wait_before_last,
        ),
        schedule="synchronous, mini-batches streamed, GPUs change sides",
        dispatch=replace(DISPATCHES["even_split"], kv_pool=moves == "kv"),
        elastic="updates and minibatches" if pre_process else "minibatches",
        paper="RLinf's dynamic scheduling (DynaRL)",
        off_policyness=0,
    )


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
    update n; ready_first any finished groups, in the order of their starts; weight_fifo the groups of the oldest version that
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
        schedule=f"asynchronous, sampler {sampler}, streamed in chunks",
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
    sglang_server_concurrency: Count = 512,
    update_weights_interval: Count = 1,
    aborted: Literal["go_on", "start_over"] = "go_on",
) -> System:
    """A pool of groups always runs; the first batch to finish trains; a weight sync aborts what runs, which goes on later.

    As `fully_async_rollout` of THUDM/slime@624b824. Every second, groups start until `sglang_server_concurrency` times the
    number of engines run; none while as many finished ones wait beyond the next batch. No more responses than groups are in
    flight; the others wait, in the order of submission. After every `update_weights_interval`-th update the trainer waits until
    the next batch is finished, then aborts all requests in flight, and the workers load. From the next full second on, the
    aborted groups start first: finished responses are kept, and aborted ones go on from their tokens, which are prefilled again
    (so its code; its README, and a generate function of a user's own, may have them start over: `aborted`). Staleness is not
    bounded.
    Not modelled: the waiting responses of an aborted group end before it starts again; here they are aborted with it.
    """
    rules = Rules(
        budget=partial(samplers.pool, per_engine=sglang_server_concurrency, poll_s=1.0),
        by_response=True,
        begin=partial(samplers.semaphore, per_engine=sglang_server_concurrency),
        ready=finished_first,
        updates_per_sync=update_weights_interval,
        sync_after="ready",
        takes_back=aborted == "go_on",
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        on_update=OnUpdate("start_over" if aborted == "start_over" else "recompute"),
        pauses=True,
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
    group is too stale if one of its responses ended more than `max_weight_staleness` versions before the version of the engines
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
        by_response=submission_granularity == "sample",
        updates_per_sync=interval,
        sync_after="ready",
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        pauses=True,
        schedule="fully asynchronous, a batch in flight",
        on_update=OnUpdate("keep" if pause_generation_mode == "in_place" else "recompute"),
        paper="miles, --fully-async",
        off_policyness=None,
    )


@recipe(*OWN_GPUS, "dispatch", dispatch="round_robin_groups")
def roll_async(
    async_generation_ratio: Annotated[float, Field(ge=0, le=100)] = 1.0,
    partial_gpu_mode: bool = False,
    filter_groups: bool = False,
) -> System:
    """Groups run up to a ratio of batches ahead; a batch takes the oldest step's first, and waits for them.

    As ROLL's replay buffer (alibaba/ROLL@8eb27cc, `async_pipeline` of RLVR). Up to step k, `async_generation_ratio` + k + 1
    batches of groups may have started and not been dropped. A batch takes the finished groups of the oldest step, then of the
    next, and waits at each for its running groups while the batch lacks some; of the oldest step, a ratio that is not whole
    takes its fractional part of a batch only. At a weight sync, running requests stop, and go on after the load with their
    tokens, prefilled again. ROLL also aborts what began `async_generation_ratio` steps ago; within this budget, a batch has
    taken all of it before. The ratio's default in ROLL is 0, which is synchronous; its examples have 1.
    `filter_groups` drops groups with equal rewards when they are scored; others start in their place. With `partial_gpu_mode`,
    the trainer's GPUs roll out, too: from the start, and from each load of weights, until the next batch is taken.
    Not modelled: of the responses in flight, ROLL gives a share to GPUs that come back, here all are dealt anew; a group goes
    to the least loaded worker, here by turns; `is_use_additional_prompts`; queues of environments.
    """
    rules = Rules(
        budget=partial(samplers.prompts_of_steps, ratio=async_generation_ratio),
        ready=partial(samplers.oldest_steps, ratio=async_generation_ratio),
        stamp=synced,
        begin=lends_each_update if partial_gpu_mode else lambda stream: None,
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        elastic="updates" if partial_gpu_mode else None,
        pauses=True,
        schedule="asynchronous, a ratio of batches ahead",
        paper="ROLL, arXiv 2506.06122",
        off_policyness=math.ceil(async_generation_ratio),
        filter_groups=filter_groups,
    )
