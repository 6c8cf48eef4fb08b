"""Recipes in which rollout overlaps training, on GPUs of their own: one step off, streamed, fully
asynchronous."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from simrl.dispatch.histopipe import HistoPipe, SubBatches
from simrl.dispatch.placement import least_requests
from simrl.dispatch.rules import DISPATCHES, Dispatch
from simrl.dispatch.streamrl import LongestFirst, SkewnessAware
from simrl.dispatch.waiting import Fifo
from simrl.pipelines import areal as areal_words, verl_fully_async as verl_words
from simrl.pipelines.batchwise import batchwise
from simrl.pipelines.buffered import Rules, buffered
from simrl.pipelines.context import DynamicSampling
from simrl.pipelines.full_batch import full_batch
from simrl.pipelines.histopipe import histopipe as histopipe_pipeline
from simrl.pipelines.laminar import laminar as laminar_pipeline
from simrl.pipelines.samplers import two_then_in_order
from simrl.pipelines.words import (
    batches_ahead,
    finished_first,
    next_in_order,
    oldest_token_older,
    submitted_first,
)
from simrl.runtime.worker import LoadMode, OnUpdate
from simrl.speculation.methods import histospec
from simrl.systems.system import (
    GROUPS,
    MOST_ROUNDS,
    OF_VERSION,
    OWN_GPUS,
    Count,
    Factor,
    NotNegative,
    Share,
    System,
    Version,
    recipe,
)

NemoVersion = Annotated[Literal["0.7", "main"], BeforeValidator(str)]  # YAML reads a number


@recipe(*OWN_GPUS, "dispatch", *GROUPS, dispatch=None)
def one_step_off(version: Version = "0.7") -> System:
    """Rollout of a batch overlaps training of the previous batch; off-policyness exactly 1.

    The rollout of batch k begins when the rollout of batch k - 1 has ended and the weights trained on batch k - 2 are
    published; first, all workers load these weights. `version` is verl's, as in verl_colocated: "0.7" sends single responses to
    the least loaded server; RhymeRL compares with 0.4.1, which cuts a batch into contiguous equal parts.
    Not modelled: nothing that the rule mentions is left out.
    """
    return System(
        pipeline=partial(batchwise, eta=1, collector=full_batch),
        dispatch=DISPATCHES[OF_VERSION[version]],
        schedule="one step off",
        controller=True,
        paper="verl one_step_off recipe; DeepScaleR pipeline",
        off_policyness=1,
    )


@recipe(*OWN_GPUS, "dispatch")
def asyncflow(eta: NotNegative = 1, stream: bool = True, minibatches: Count = 4) -> System:
    """One step off; each mini-batch trains as soon as its groups are finished; off-policyness at most 1.

    Groups stream through a distributed queue (TransferQueue) without a central controller: as soon as one of the `minibatches`
    equal parts of a step's groups is finished and scored, its log-probs and gradients are computed while the other groups are
    still being generated. The weights are published after the last mini-batch. `stream=False` keeps only the delayed parameter
    update. The bound on off-policyness is `eta`, by default 1. Its queue balances single responses among the workers.
    Not modelled: the planner that divides the GPUs (`rollout_share` is an input).
    """
    return System(
        pipeline=partial(
            batchwise, eta=eta, collector=full_batch, parts=minibatches if stream else None
        ),
        schedule="one step off, mini-batches streamed" if stream else "one step off",
        paper="AsyncFlow, arXiv 2507.01663",
        off_policyness=eta,
    )


@recipe(*OWN_GPUS)
def streamrl(
    eta: NotNegative = 1,
    stream: bool = True,
    skewness_aware: bool = True,
    longest_first: bool = True,
    ranker: Literal["history", "oracle"] = "history",
    ranker_accuracy: Annotated[float, Field(ge=0, le=1)] = 1.0,
    long_share: Share = 0.2,
    dedicated_share: Share | None = None,
    doubling_batch: Count = 64,
    minibatches: Count = 4,
) -> System:
    """Samples stream to the trainer; prompts with long expected responses get dedicated workers; off-policyness at most η.

    One step off with streaming, as asyncflow; `eta=0` is the synchronous form, in which training overlaps only the rollout of
    its own batch. The `long_share` of a batch's prompts with the longest responses in the last epoch go to dedicated workers,
    the others to the remaining workers; each prompt goes to the worker with the fewest expected tokens, and an engine starts
    the longest first (`longest_first`). Without `dedicated_share` (a share of the workers), the number of dedicated workers is
    the one with the shortest predicted makespan; the prediction assumes that a forward pass over `doubling_batch` + 1 sequences
    takes about twice as long as one over a single sequence (the paper uses a profile). `skewness_aware=False` distributes
    prompts by counts. The first epoch has no history and is also distributed by counts. With `ranker="oracle"`, lengths are
    of the epoch itself, for a share `ranker_accuracy` of the prompts, while the others are taken for one another: a trained
    ranker of this accuracy, in the first epoch too. (Of the paper, the abstract says that a ranker model finds the
    long-tail samples; no accuracy could be read there.)
    Not modelled: the ranker's own cost and training; adjusting the number of rollout workers.
    """
    place = (
        SkewnessAware(long_share, dedicated_share, doubling_batch)
        if skewness_aware
        else least_requests
    )
    return System(
        pipeline=partial(
            batchwise, eta=eta, collector=full_batch, parts=minibatches if stream else None
        ),
        schedule=f"{'synchronous' if eta == 0 else 'one step off'}{', mini-batches streamed' if stream else ''}",
        dispatch=Dispatch(
            "streamrl",
            place,
            LongestFirst if longest_first else Fifo,
            ranker_accuracy=ranker_accuracy if ranker == "oracle" else None,
        ),
        paper="StreamRL, arXiv 2504.15930",
        off_policyness=eta,
    )


@recipe(*OWN_GPUS, "filter_groups")
def rhymerl(
    histopipe: bool = True,
    two_tier: bool = True,
    migration: bool = True,
    ranking_groups: Count | None = 8,
    max_workers: Count | None = None,
    representative: Literal["responses", "medians"] = "responses",
    alternation: Literal["reversed", "pairing", "none"] = "reversed",
    weight_buffer: bool = True,
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.1,
    least_beta: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] = 1.1,
    sub_batches: SubBatches = "prompts",
    over_sampling: Factor = 1.0,
    dynamic_sampling: bool = False,
    stream: bool = False,
    minibatches: Count = 1,
) -> System:
    """Each worker advances through the steps on its own; prompts are ranked by past lengths; off-policyness 1, or 2 carried.

    Consists of HistoSpec (the method `histospec`; `speculation: none` leaves it out) and HistoPipe. When a worker has finished
    its part of a step, it loads the newest weights from its own host buffer; version k - 1 must be there before step k begins.
    Without `weight_buffer`, all workers wait for each other and load over the network together.
    From the second epoch on, prompts are ranked by the median length of their responses in the previous epoch and cut into
    `ranking_groups` (None: one per worker). `alternation` assigns the groups to workers: ascending in even and descending in
    odd steps ("reversed"), to the worker that is expected to be free first ("pairing"), or ascending in all steps ("none").
    `two_tier` gives long groups more workers, by the search of Fig. 12; one group gets at most `max_workers` (None: the
    number with the shortest steps). Where the search finds no plan, the exact solution is taken, or equal numbers if
    `max_workers` is None. A group's time τ is computed from the profile, what drafts recently did for the group, and the
    lengths of its last epoch, scaled to its representative length: the mean of its "responses", or of its prompts'
    "medians" (`representative`; §6.4 can be read either way). A measured table of τ (`profile.tau=FILE`;
    `simrl measure --tau` writes one) replaces it; a result names the τ of its plans. `migration`: within the last `alpha`
    of a ranking group, a response longer than β times the longest of its prompts moves to a worker that is busy with a
    longer group, or, if there is none, to the next step; a prompt is as long as the median of its responses was in its last
    epoch, and β is the 75th percentile of the length growth over the last epoch, at least `least_beta`.
    `sub_batches`: a worker gets whole "prompts", all responses of each (§4.2: "a sub-batch of prompts"), or single "responses",
    so that all workers of a ranking group have equal numbers. `over_sampling` draws this multiple of a batch's groups; an
    update begins once the buffer has a batch's responses (§4.2), in the groups that came first, and the rest is aborted and
    dropped, as off-policyness is limited to one step (§7.3). `dynamic_sampling` (DAPO, §7.1) drops groups with equal rewards;
    when all groups of a round are scored and do not fill the batch, another round is drawn, as in verl's recipe; after 10
    rounds the run ends with an error. A prompt with dropped responses is ranked by its finished ones, and drafts from them
    (§5.3: what was generated is indexed). A response carried into the next step trains there, and its siblings do not wait.
    `stream` trains each of the `minibatches` as soon as its groups are scored, as asyncflow (Fig. 4b; "streaming pipeline");
    off by default, as the sentence on the trainer says that it begins when the samples match the batch size (§4.2).
    `histopipe=False`, and the first epoch, keep the independent weight loads of the workers, with equal contiguous parts of the
    batch, as verl 0.4.1 cuts it, on which it is built: compare with one_step_off of this version. Tokens
    carried into the next step are up to 2 versions old, all others 1 (§6.3): the bound is 2 where outliers migrate.
    Not modelled: the transfer of weights to the host buffers, beyond the phase `publish`.
    """
    rule = HistoPipe(
        ranked=histopipe,
        two_tier=two_tier,
        ranking_groups=ranking_groups,
        max_workers=max_workers,
        representative=representative,
        alternation=alternation,
        weight_buffer=weight_buffer,
        migration=migration,
        alpha=alpha,
        least_beta=least_beta,
        sub_batches=sub_batches,
        over_sampling=over_sampling,
        parts=minibatches if stream else None,
    )
    ranks = "ranking groups on workers in two tiers" if two_tier else "ranking groups on workers"
    ranks = (ranks if histopipe else "contiguous parts") + (
        ", outliers migrate" if histopipe and migration else ""
    )
    return System(
        pipeline=partial(histopipe_pipeline, rule=rule),
        evaluates=None,
        schedule=("one step off, each worker on its own" if weight_buffer else "one step off")
        + (", over-sampled" if over_sampling > 1 else "")
        + (", dynamic sampling" if dynamic_sampling else "")
        + (", mini-batches streamed" if stream else ""),
        dynamic_sampling=DynamicSampling(over_sampling, MOST_ROUNDS) if dynamic_sampling else None,
        dispatch=Dispatch(ranks, least_requests),
        host_buffer=weight_buffer,
        paper="RhymeRL, arXiv 2508.18588",
        off_policyness=2 if histopipe and migration else 1,
        speculation=histospec(),
        reads_tau=histopipe,
    )


@recipe(*OWN_GPUS, "dispatch", dispatch="round_robin_groups", minibatches=4)
def areal(
    eta: NotNegative = 8,
    rollout_share: Share = 0.75,
    interruptible: bool = True,
    recompute_kv: bool = True,
    pause: bool = True,
    max_concurrent: Count | None = None,
    on_stale: Literal["train", "wait", "drop"] = "train",
    dynamic_sampling: bool = False,
    slow_start: bool = False,
) -> System:
    """Fully asynchronous; staleness is bounded by η at admission, and weights are updated in flight.

    A group is submitted while the groups submitted so far exceed the trained ones by at most η + 1 batches, and fewer than
    `max_concurrent` groups are running. None: four training batches, as the authors' launch files of June 2025 for 8B and 14B
    on code have; the code's own default is one batch, under which η has no effect beyond 1 or 2. `simrl explain` says which
    bound held groups back. All responses of a group go to one worker, by turns, as in AReaL 0.3, which the paper and RhymeRL
    measured. The trainer takes a batch as soon as a batch of groups is finished, in order of submission. Then generation
    pauses until the weights are published and loaded (`pause`; without, it goes on while they are published), and running
    responses continue after their KV cache is recomputed (`recompute_kv`; without, they keep it). `interruptible=False`
    updates once the responses of all workers are finished, and starts none meanwhile (the paper's ablation, §7.4). The bound
    is on counts: a group that finishes late may be trained with more staleness than η. `on_stale` decides what happens to
    such a group: it is trained, as in the code ("train"); it is dropped ("drop"); or updates wait so that no group becomes
    too stale ("wait"). Four PPO mini-batches and the proximal log-probs follow the paper (§5.2, Table 3). `dynamic_sampling`
    drops groups with equal rewards when they are scored; they no longer count as submitted. `slow_start`: prompts
    are supplied as in the code since 0.4, a batch a second while an update waits for its groups, and none while it trains.
    Its engines run without prefix caching, as its code of 2026 starts them (`engine.prefix_caching` replaces it; on in June
    2025). `eta=0` is synchronous on divided GPUs: the paper's Sync.AReaL, whose four scores in Table 4 are the scores of
    maximum staleness 0 in Table 2; the authors' configuration of it computes no log-probs (`log_probs: 0`).
    Not modelled: the decoupled PPO objective's effect on learning.
    """
    running: LoadMode = "recompute" if recompute_kv else "keep"
    waits, drops = on_stale == "wait", on_stale == "drop"
    rules = Rules(
        budget=partial(
            areal_words.supplied if slow_start else areal_words.budget,
            eta=eta,
            most=max_concurrent,
        ),
        ready=partial(areal_words.batch_in_time, eta=eta) if waits else submitted_first,
        stale=partial(oldest_token_older, than=eta) if drops else None,
        sync_after="nothing" if interruptible else "generated",
        admits=not slow_start,
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        on_update=OnUpdate(running),
        pauses=pause,
        schedule="fully asynchronous",
        rollout_share=rollout_share,
        filter_groups=dynamic_sampling,
        prefix_caching=False,
        paper="AReaL, arXiv 2505.24298",
        off_policyness=None if on_stale == "train" and eta > 0 else eta,
    )


@recipe(*OWN_GPUS, "dispatch", without="minibatches", log_probs=0)
def verl_fully_async(
    staleness: Annotated[float, Field(ge=0, le=100)] = 0.1,
    sync_step: Count = 4,
    require_batches: Count = 1,
    partial_rollout: bool = True,
    pause: bool = True,
    mini_batch: Count | None = None,
    per_replica: Count = 16,
    dynamic_schedule: Literal["default", "static_fully_async", "fixed_ratio"] | None = None,
    deactivate_ratio: Annotated[float, Field(gt=0, le=1)] = 0.3,
    rebalance: bool = True,
) -> System:
    """Several updates on groups as they stream in, then one weight sync, which interrupts running responses.

    An update trains the `require_batches` · `mini_batch` groups that finished first; every `sync_step`-th update is published,
    and all workers load it. `mini_batch` is in groups (verl: prompts); with None, `sync_step` updates train one batch of the
    trace, as verl's documentation asks for a fair comparison. Between two weight syncs, mini_batch · require_batches · (1 +
    `staleness`) · sync_step groups are submitted, rounded down; groups that were running, or finished but untrained, at the
    first sync count towards this number; one that waits for another to end is forgotten, so one more begins. Then generation
    pauses. A worker runs `per_replica` groups at once. Responses that run at a weight sync continue under the new weights after
    their KV cache is recomputed; without `partial_rollout` they finish first, and nothing is submitted meanwhile: so its
    documentation and its code up to 0.7 (`FullyAsyncRollouter.pause`). Later code aborts them at the sync and trains what they
    have; `simrl` does not. Generation pauses until the weights are gathered and loaded (`pause`). A step is an update, so it
    trains less than a step of the trace. Old log-probs come from the rollout (`log_probs=0`). With `dynamic_schedule`
    (use_dynamic_resource_scheduling, dynamic_schedule_policy), the trainer's GPUs roll out after a weight sync if groups are
    missing and would cost more seconds than the switches of the last three cycles did ("default"), whenever groups are
    missing ("fixed_ratio"), or never; then all responses are dealt anew (`rebalance`, dynamic_schedule_enable_rebalance).
    They come back, looked at every second, when `deactivate_ratio` of a cycle's groups wait for the trainer, a ratio that
    "default" adapts to what was waited for. A switch takes what it executes: requests leave, states go to the host or come
    back (`training.switch_s` and `offload`), workers load the weights.
    Not modelled: without `partial_rollout`, weights are gathered only once nothing runs; here, meanwhile.
    """
    bound: dict[str, Any] = {
        "staleness": staleness,
        "sync_step": sync_step,
        "per_replica": per_replica,
    }
    rules = Rules(
        budget=partial(verl_words.budget, **bound),
        at_sync=partial(verl_words.forget, **bound),
        ready=finished_first,
        groups=partial(
            verl_words.update_groups,
            mini_batch=mini_batch,
            require_batches=require_batches,
            sync_step=sync_step,
        ),
        sync_after="nothing" if partial_rollout else "scored",
        updates_per_sync=sync_step,
    )
    lends = dynamic_schedule not in (None, "static_fully_async")  # which lends nothing
    if lends:
        schedule = partial(
            verl_words.scheduling,
            sync_step=sync_step,
            ratio=deactivate_ratio,
            adaptive=dynamic_schedule == "default",
            rebalance=rebalance,
        )
        rules = replace(rules, begin=schedule)
    return System(
        elastic="updates" if lends else None,
        pauses=pause and partial_rollout,
        pipeline=partial(buffered, rules=rules),
        schedule="fully asynchronous, weights at every few updates",
        minibatches=require_batches,
        paper="verl recipe fully_async_policy (Meituan)",
        off_policyness=verl_words.oldest_off_policyness(staleness, sync_step, partial_rollout),
    )


@recipe(*OWN_GPUS, "dispatch", dispatch="round_robin")
def nemo_rl_async(
    max_age: Count = 1,
    in_flight: bool = True,
    recompute_kv: bool = False,
    version: NemoVersion = "0.7",
) -> System:
    """Each group is generated for one update, at most `max_age` versions ahead; the update waits for all of its groups.

    Under version v, groups are submitted for the updates up to v + `max_age` (`max_trajectory_age_steps`), in order, and no
    more than `max_age` batches of them run at once. The update of version v trains the batch of groups that was generated for
    it, once the last of them is scored. Then all workers load the new weights; no group begins meanwhile. Running responses
    continue with their KV cache (`in_flight`, as `in_flight_weight_updates`), after recomputing it (`recompute_kv`), or end
    before the load (`in_flight=False`). NeMo-RL's own default is false; its performance recipes set true, the default here.
    Since July 2026 (`version="main"`; NVIDIA-NeMo/RL@7ea279a), all batches that may be submitted run at once, and the first
    update waits until the second's batch is complete, too.
    Not modelled: the polls of trainer and collector, every 0.5 or 1 s.
    """
    at_once, ready = max_age, next_in_order
    if version == "main":
        at_once, ready = max_age + 1, two_then_in_order
    running: LoadMode = "drain" if not in_flight else "recompute" if recompute_kv else "keep"
    rules = Rules(
        budget=partial(batches_ahead, ahead=max_age, at_once=lambda batch: at_once * batch),
        ready=ready,
        admits=False,
    )
    return System(
        pipeline=partial(buffered, rules=rules),
        on_update=OnUpdate(running),
        schedule="asynchronous, a batch for each update",
        paper="NeMo-RL, asynchronous GRPO",
        off_policyness=max_age,
    )


@recipe(*OWN_GPUS)
def laminar(sub_batch: Count | None = None, repack: bool = True, ramp_down: Share = 0.5) -> System:
    """Each worker generates sub-batches at its own pace, each with the newest weights; long tails are repacked.

    A worker without work pulls the newest published weights from the relay on its host, and generates the next `sub_batch`
    groups (None: its even share of a batch) to their end with these weights. So no response has two versions, no worker waits
    for another, and the trainer, which takes the groups that finished first, waits for no particular worker. `repack`: among
    workers with equal weights, those with at most `ramp_down` of their sub-batch left give it away, those with the fewest
    responses first, each to the fullest such worker that has room (for as many responses as its sub-batch had). Prompts and
    tokens are prefilled again there, and the emptied worker starts its next sub-batch. The condition is checked whenever a
    response ends and after every update. Staleness is not bounded. The paper (Algorithm 1) detects a ramp-down by KV cache
    usage, which falls once no request waits, and checks every 5 s; here the number of remaining responses, which a dispatcher
    knows, detects it. The size of a sub-batch and the share are assumed.
    Not modelled: the broadcast between relays (0.6-1.6 s in the paper), beyond the phase `publish`; recovery from failures with
    partial responses, beyond the dispatch rule `on_loss`.
    """
    return System(
        pipeline=partial(
            laminar_pipeline, sub_batch=sub_batch, ramp_down=ramp_down if repack else None
        ),
        schedule="fully asynchronous, each worker on its own",
        evaluates=None,
        host_buffer=True,
        paper="Laminar, arXiv 2510.12633",
        off_policyness=None,
    )
