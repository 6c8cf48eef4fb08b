"""Systems: recipes that name a pipeline, a dispatch rule and the training phases a published system uses.

A recipe is a function from the system's own parameters to a `System`. Its ablations are its arguments; defaults are the
paper's or the public code's. Its docstring is what `simrl systems show` prints: a line for the list, the rule, and what is
not modelled. The third choice of a system, speculation, is a method of `simrl.speculation.methods`: a recipe's own, or another
one by the parameter `speculation`, which every recipe takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, validate_call

from simrl.dispatch import DISPATCHES, Dispatch, Fifo
from simrl.dispatch.least_requests import least_requests
from simrl.dispatch.seer import ContextAware
from simrl.dispatch.streamrl import LongestFirst, SkewnessAware
from simrl.errors import InputError, meant
from simrl.extensions import Extended
from simrl.pipelines import Pipeline
from simrl.pipelines.april import first_complete
from simrl.pipelines.areal import Areal
from simrl.pipelines.batchwise import Batchwise
from simrl.pipelines.best_of_n import best_of_n as best_of_n_batch
from simrl.pipelines.dynamic_sampling import dynamic_sampling as sample_dynamically
from simrl.pipelines.full_batch import full_batch
from simrl.pipelines.histopipe import HistoPipe
from simrl.pipelines.laminar import Laminar
from simrl.pipelines.partial_rollout import token_budget
from simrl.pipelines.rlhfuse import RLHFuse
from simrl.pipelines.rollpacker import tail_batching
from simrl.pipelines.sortedrl import shortest_first
from simrl.pipelines.verl_fully_async import VerlFullyAsync, oldest_off_policyness
from simrl.speculation.best_of_n import BestOfN
from simrl.speculation.gates import Elastic
from simrl.speculation.methods import (
    Speculation,
    draft_model,
    histospec,
    make_speculation,
    ngram,
    siblings,
)
from simrl.speculation.methods import specactor as specactor_drafting
from simrl.speculation.methods import tlt as tlt_drafting
from simrl.speculation.windows import Fixed
from simrl.validation import call_error

Plain = Literal["even_split", "least_requests", "round_robin", "streamrl", "seer"]
Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=100_000)]
NotNegative = Annotated[int, Field(ge=0, le=1_000_000)]

MOST_ROUNDS = 10  # of dynamic sampling for one batch, as in verl's recipe

assert set(Plain.__args__) == set(DISPATCHES)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class System:
    """What a recipe yields. `rollout_share` is the share of GPUs that only roll out; None means colocated, and then
    `extra_rollout_gpus` as many GPUs again, times this, roll out besides. `schedule` names the pipeline in words;
    `controller` says that batches go through one process, `host_buffer` that workers load weights from their own host,
    `needs_rewards` that the rule looks at rewards, `filter_groups` that groups with equal ones do not train;
    `off_policyness` is the most that a trained token may have (None: the rule does not bound it)."""

    name: str
    pipeline: Pipeline
    schedule: str
    dispatch: Dispatch
    rollout_share: float | None
    minibatches: int
    log_probs: int
    paper: str
    off_policyness: int | None
    controller: bool = False
    host_buffer: bool = False
    extra_rollout_gpus: float = 0.0
    speculation: Speculation | None = None
    best_of_n: BestOfN | None = None
    needs_rewards: bool = False
    filter_groups: bool = False
    adapt_split_every: int = 0
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name with the parameters that were given."""
        given = ", ".join(f"{key}={value}" for key, value in self.parameters.items())
        return f"{self.name}({given})" if given else self.name


@validate_call
def verl_colocated(dispatch: Plain = "least_requests", minibatches: Count = 1, log_probs: NotNegative = 1) -> System:
    """Every GPU rolls out the whole batch, then the same GPUs train; on-policy.

    When the last response has ended, the batch goes through the controller, the GPUs switch from rollout to training, compute
    log-probs, update, and switch back; then every worker loads the new weights and the next step begins.
    Not modelled: the overlap of reward computation with rollout (rewards come `reward_s` after each group).
    """
    return System(
        name="verl_colocated",
        pipeline=Batchwise(0, full_batch),
        schedule="synchronous",
        dispatch=DISPATCHES[dispatch],
        rollout_share=None,
        minibatches=minibatches,
        log_probs=log_probs,
        controller=True,
        paper="HybridFlow, arXiv 2409.19256",
        off_policyness=0,
    )


@validate_call
def verl_2x(
    extra_rollout_gpus: Annotated[float, Field(gt=0, le=100)] = 1.0,
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """verl colocated with twice the rollout GPUs (RLBoost-like); on-policy.

    As verl_colocated on the cluster's GPUs, and `extra_rollout_gpus` times as many more that only roll out, and wait while
    the others train. The column `gpus` counts them all.
    Not modelled: that RLBoost's extra GPUs are preemptible, which scenario faults can add, and its partial migration.
    """
    return System(
        name="verl_2x",
        pipeline=Batchwise(0, full_batch),
        schedule="synchronous",
        dispatch=DISPATCHES[dispatch],
        rollout_share=None,
        extra_rollout_gpus=extra_rollout_gpus,
        minibatches=minibatches,
        log_probs=log_probs,
        controller=True,
        paper="RLBoost-like 2x, as compared in SpecActor, arXiv 2511.16193 §5",
        off_policyness=0,
    )


@validate_call
def split(
    rollout_share: Share = 0.75,
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """Two disjoint sets of GPUs without overlap: one idles while the other works; on-policy.

    As verl_colocated, but rollout and training have their own GPUs, so nothing switches, and the new weights are published
    over the network.
    Not modelled: rewards on GPUs of their own.
    """
    return System(
        name="split",
        pipeline=Batchwise(0, full_batch),
        schedule="synchronous",
        dispatch=DISPATCHES[dispatch],
        rollout_share=rollout_share,
        minibatches=minibatches,
        log_probs=log_probs,
        controller=True,
        paper="Open-R1 (Hugging Face), as described in RhymeRL, arXiv 2508.18588 §2",
        off_policyness=0,
    )


@validate_call
def one_step_off(
    rollout_share: Share = 0.75,
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """The rollout of a batch overlaps the training of the one before; off-policyness exactly 1.

    The rollout of batch k begins when that of batch k - 1 is over and batch k - 2 is trained and published; all workers load
    these weights first.
    Not modelled: nothing that its rule names.
    """
    return System(
        name="one_step_off",
        pipeline=Batchwise(1, full_batch),
        schedule="one step off",
        dispatch=DISPATCHES[dispatch],
        rollout_share=rollout_share,
        minibatches=minibatches,
        log_probs=log_probs,
        controller=True,
        paper="verl one_step_off recipe; DeepScaleR pipeline",
        off_policyness=1,
    )


@validate_call
def asyncflow(
    eta: NotNegative = 1,
    stream: bool = True,
    rollout_share: Share = 0.75,
    dispatch: Plain = "least_requests",
    minibatches: Count = 4,
    log_probs: NotNegative = 1,
) -> System:
    """One step off, and a mini-batch trains as soon as its groups are finished; off-policyness at most 1.

    Groups stream through a distributed queue (TransferQueue) without a central hop: when a `minibatches`th of a step's groups
    is finished and scored, their log-probs and gradients are computed, while the others are still generated; the weights are
    published after the last. `stream=False` leaves the delayed parameter update alone.
    Not modelled: the planner that divides the GPUs (`rollout_share` is an input).
    """
    return System(
        name="asyncflow",
        pipeline=Batchwise(eta, full_batch, stream=minibatches if stream else None),
        schedule="one step off, mini-batches streamed" if stream else "one step off",
        dispatch=DISPATCHES[dispatch],
        rollout_share=rollout_share,
        minibatches=minibatches,
        log_probs=log_probs,
        paper="AsyncFlow, arXiv 2507.01663",
        off_policyness=eta,
    )


@validate_call
def distflow(dispatch: Plain = "least_requests", minibatches: Count = 1, log_probs: NotNegative = 1) -> System:
    """verl colocated without a central controller: no hop of the batch through one process; on-policy.

    The same dependencies as verl_colocated; every worker hands its data on itself (multi-controller), which leaves out the
    phase `transfer`.
    Not modelled: the time of the decentral hand-over, which overlaps; out-of-memory of a single controller.
    """
    return System(
        name="distflow",
        pipeline=Batchwise(0, full_batch),
        schedule="synchronous",
        dispatch=DISPATCHES[dispatch],
        rollout_share=None,
        minibatches=minibatches,
        log_probs=log_probs,
        paper="DistFlow, arXiv 2507.13833",
        off_policyness=0,
    )


@validate_call
def areal(
    eta: NotNegative = 8,
    rollout_share: Share = 0.75,
    interruptible: bool = True,
    max_concurrent: Count | None = None,
    on_stale: Literal["train", "wait", "drop"] = "train",
    dynamic_sampling: bool = False,
    dispatch: Plain = "round_robin",
    minibatches: Count = 4,
    log_probs: NotNegative = 1,
) -> System:
    """Fully asynchronous, staleness bounded by η at admission, weights updated in flight.

    A group is submitted while the groups submitted so far make at most η + 1 batches more than were trained, and fewer than
    `max_concurrent` run (None: one training batch, as in the code). The trainer takes a batch as soon as one is finished, those
    submitted first before others; then all workers load the new weights and what runs goes on, its KV cache computed anew.
    `interruptible=False` lets running responses end before an update (the paper's ablation, §7.5).
    The bound is on counts: what the trainer has not waited for may be trained staler than η. `on_stale` says what becomes of
    it: it trains, as in the code; it is dropped; or no update is made that would let it become too old ("wait"). Four PPO
    mini-batches and the proximal log-probs are the paper's (§5.2, Table 3).
    `dynamic_sampling` drops groups whose rewards are all equal when they are scored; they leave the count.
    Not modelled: the decoupled PPO objective's effect on learning.
    """
    return System(
        name="areal",
        pipeline=Areal(eta, interruptible, max_concurrent, on_stale, dynamic_sampling),
        schedule="fully asynchronous",
        dispatch=DISPATCHES[dispatch],
        rollout_share=rollout_share,
        minibatches=minibatches,
        log_probs=log_probs,
        needs_rewards=dynamic_sampling,
        paper="AReaL, arXiv 2505.24298",
        off_policyness=None if on_stale == "train" and eta > 0 else eta,
    )


@validate_call
def rhymerl(
    histopipe: bool = True,
    two_tier: bool = True,
    migration: bool = True,
    ranking_groups: Count | None = 8,
    max_workers: Count | None = None,
    alternation: Literal["reversed", "pairing"] = "reversed",
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.1,
    least_beta: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] = 1.1,
    rollout_share: Share = 0.75,
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """Workers go from step to step on their own, prompts ranked by their last epoch's lengths; off-policyness at most 1.

    HistoSpec (the method `histospec`; `speculation: none` leaves it out) and HistoPipe. A worker loads the newest weights
    from its own host buffer when its part of the step before is over;
    version k - 1 has to be there before step k. From the second epoch on, prompts are ranked by the median length of
    their last responses, cut into `ranking_groups` (None: one a worker), and given out ascending in even and descending
    in odd steps (`alternation`; or as `pairing` to whoever is thought to be free first). `two_tier` gives long groups
    more workers by the search of Fig. 12 (by the exact solution where it finds no plan), `max_workers` for one group at
    most (None: the number with the shortest steps). `migration`: within the last `alpha` of a ranking group, a response
    longer than β times the group's longest history moves to a worker that is busy with a longer group, or, where there
    is none, into the next step; β is the 75th percentile of the growth over the last epoch, at least `least_beta`.
    `histopipe=False` leaves the workers' own weight loads, with equal contiguous parts.
    Tokens carried into the next step are up to 2 versions old, counted apart and not in the bound.
    Not modelled: the time in which weights travel to the host buffers beyond the phase `publish`.
    """
    ranks = "ranking groups on workers in two tiers" if two_tier else "ranking groups on workers"
    ranks = (ranks if histopipe else "contiguous parts") + (", outliers migrate" if histopipe and migration else "")
    return System(
        name="rhymerl",
        pipeline=HistoPipe(histopipe, two_tier, ranking_groups, max_workers, alternation, migration, alpha, least_beta),
        schedule="one step off, each worker on its own",
        dispatch=Dispatch(ranks, least_requests),
        rollout_share=rollout_share,
        minibatches=minibatches,
        log_probs=log_probs,
        host_buffer=True,
        paper="RhymeRL, arXiv 2508.18588",
        off_policyness=1,
        speculation=histospec(),
    )


@validate_call
def partial_rollout(
    budget_tokens: Count = 8192,
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """A response gets a budget of tokens an update; a longer one goes on in the next, under newer weights.

    As verl_colocated, but a response that has `budget_tokens` more than it came with is cut; it keeps them, and is submitted
    with the next rollout, before the new groups, its prompt and tokens prefilled anew. Every update draws a batch of new groups
    and trains all groups that are complete, so that a batch an update is trained on average; if none is complete, all get
    another budget. How many groups to draw is left open by the report, and so is the budget: 8,192 is assumed.
    A response of n budgets has tokens up to n - 1 versions old; nothing bounds n.
    Not modelled: the detection of repetitions, which ends responses early; that tokens of earlier updates may be left out of
    the loss.
    """
    return System(
        name="partial_rollout",
        pipeline=Batchwise(0, token_budget(budget_tokens)),
        schedule="synchronous, responses in parts",
        dispatch=DISPATCHES[dispatch],
        rollout_share=None,
        minibatches=minibatches,
        log_probs=log_probs,
        controller=True,
        paper="Kimi k1.5, arXiv 2501.12599",
        off_policyness=None,
    )


@validate_call
def april(
    over_sampling: Annotated[float, Field(ge=1, le=100)] = 2.0,
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """More groups are at work than a batch needs; when it is complete, the others stop, and go on in the next step.

    As verl_colocated, but a rollout begins with `over_sampling` times a batch's groups: first what the last one left, with the
    tokens it has (prefilled anew, under the new weights), then new ones. It ends when a batch of them is complete. Groups that
    are complete beyond that train in the next step; nothing is thrown away. That twice a batch is at work is assumed.
    A long response may be put off again and again: nothing bounds the age of its first tokens.
    Not modelled: the wait for an engine to confirm that it has stopped, beyond the pass that runs.
    """
    return System(
        name="april",
        pipeline=Batchwise(0, first_complete(over_sampling)),
        schedule="synchronous, over-sampled",
        dispatch=DISPATCHES[dispatch],
        rollout_share=None,
        minibatches=minibatches,
        log_probs=log_probs,
        controller=True,
        paper="APRIL, arXiv 2509.18521",
        off_policyness=None,
    )


@validate_call
def verl_fully_async(
    staleness: Annotated[float, Field(ge=0, le=100)] = 0.1,
    sync_step: Count = 4,
    require_batches: Count = 1,
    partial_rollout: bool = True,
    mini_batch: Count | None = None,
    per_replica: Count = 16,
    rollout_share: Share = 0.75,
    dispatch: Plain = "least_requests",
    log_probs: NotNegative = 0,
) -> System:
    """Several updates on groups as they stream in, then one synchronisation of weights, which interrupts what runs.

    An update takes the `require_batches` · `mini_batch` groups that were finished first; every `sync_step`th is published, and
    all workers load it. `mini_batch` is in groups (verl: prompts); None: so many that `sync_step` updates train a batch of the
    trace, as verl's documentation asks for a fair comparison. From one synchronisation to the next, mini_batch ·
    require_batches · (1 + `staleness`) · sync_step groups are submitted, rounded down, those counted that were running or
    finished but not trained at the first; then generation pauses. `per_replica` groups a worker run at once. What runs at a
    synchronisation goes on under the new weights, its KV cache computed anew; without `partial_rollout` it ends first, and
    nothing is submitted meanwhile. A step is an update, so it trains less than a step of the trace. Old log-probs are the
    rollout's own (`log_probs=0`).
    Not modelled: that rollout stands still already while the weights are gathered (the phase `publish`).
    """
    return System(
        name="verl_fully_async",
        pipeline=VerlFullyAsync(mini_batch, require_batches, staleness, sync_step, per_replica, partial_rollout),
        schedule="fully asynchronous, weights at every few updates",
        dispatch=DISPATCHES[dispatch],
        rollout_share=rollout_share,
        minibatches=require_batches,
        log_probs=log_probs,
        paper="verl recipe fully_async_policy (Meituan)",
        off_policyness=oldest_off_policyness(staleness, sync_step, partial_rollout),
    )


@validate_call
def laminar(
    sub_batch: Count | None = None,
    repack: bool = True,
    ramp_down: Share = 0.5,
    rollout_share: Share = 0.75,
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """Each worker goes from sub-batch to sub-batch at its own pace, with the newest weights each time; long tails are repacked.

    A worker that has nothing left pulls the newest published weights from the relay on its host, and generates the next
    `sub_batch` groups (None: its even share of a batch) to their end under them: no response has two versions, no worker waits
    for another, and the trainer, which takes the groups that were finished first, waits for none. `repack`: of the workers
    with the same weights, those that have at most `ramp_down` of their sub-batch left give it away, fewest first, each to the
    fullest of them that has room (for as many responses as its sub-batch had); prompts and tokens are prefilled anew there,
    and who is empty goes on. It is looked at whenever a response ends and after every update. Nothing bounds the staleness.
    The paper (Algorithm 1) tells a ramp-down by the KV cache, which falls once nothing waits, and looks every 5 s; here the
    responses left tell it, which a dispatcher knows. What size a sub-batch has, and the share, are assumed.
    Not modelled: the broadcast from relay to relay (0.6-1.6 s in the paper), beyond the phase `publish`; recovery from
    failures by partial responses, beyond what dispatch does.
    """
    return System(
        name="laminar",
        pipeline=Laminar(sub_batch, ramp_down if repack else None),
        schedule="fully asynchronous, each worker on its own",
        dispatch=DISPATCHES["least_requests"],
        rollout_share=rollout_share,
        minibatches=minibatches,
        log_probs=log_probs,
        host_buffer=True,
        paper="Laminar, arXiv 2510.12633",
        off_policyness=None,
    )


@validate_call
def rlhfuse(
    threshold: Share = 0.2,
    destinations: Count | None = None,
    slowdown: Annotated[float, Field(ge=0)] = 0.1,
    round_samples: Count = 8,
    migration: bool = True,
    fusion: bool = True,
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """verl colocated, but log-probs begin on GPUs that the tail of the rollout is moved away from; on-policy.

    When at most `threshold` of a step's samples are unfinished, they go on at `destinations` workers, those that hold most
    of them, each to the one with the fewest; tokens are kept, KV caches prefilled anew. None means as few workers as leave
    none with more samples than each had when the step began, and the longest response at most `slowdown` slower, by the
    profile. The other GPUs switch to training at once and compute the log-probs of what is finished, in rounds of
    `round_samples` a worker at most, while the tail runs; then all GPUs do the rest and the update. The paper finds the
    threshold by simulating, which `simrl sweep` does here; 20 %, 10 % slower and 8 are assumptions. `migration=False` leaves
    the tail where it is, and only workers that fall idle by themselves begin; `fusion=False` begins no log-probs early.
    Without both it is verl_colocated.
    Not modelled: intra-stage fusion (the actor's and the critic's micro-batches filling each other's pipeline bubbles), moving
    a KV cache instead of prefilling it, rewards by a model on the freed GPUs.
    """
    return System(
        name="rlhfuse",
        pipeline=RLHFuse(threshold, destinations, slowdown, round_samples, migration, fusion),
        schedule="synchronous, log-probs fused with the tail" if fusion else "synchronous",
        dispatch=DISPATCHES[dispatch],
        rollout_share=None,
        minibatches=minibatches,
        log_probs=log_probs,
        controller=True,
        paper="RLHFuse, arXiv 2409.13221",
        off_policyness=0,
    )


@validate_call
def streamrl(
    eta: NotNegative = 1,
    stream: bool = True,
    skewness_aware: bool = True,
    longest_first: bool = True,
    long_share: Share = 0.2,
    dedicated_share: Share | None = None,
    doubling_batch: Count = 64,
    rollout_share: Share = 0.75,
    minibatches: Count = 4,
    log_probs: NotNegative = 1,
) -> System:
    """Samples stream to the trainer; prompts expected to be long have rollout workers of their own; off-policyness at most η.

    One step off with streaming, as asyncflow; `eta=0` is its synchronous form, in which training overlaps the rollout of
    its own batch alone. The `long_share` of a batch's prompts with the longest responses in the last epoch go to dedicated
    workers, the others to the rest, each to the worker with the fewest expected tokens, and to the engines in the order
    of falling length (`longest_first`). The number of dedicated workers is the one with the shortest predicted makespan, if
    `dedicated_share` of the workers is not given; a forward pass over `doubling_batch` + 1 sequences is thought to take
    about twice as long as over one (an assumption; the paper profiles). `skewness_aware=False` shares out by counts. The first
    epoch has no history, and is shared out by counts too.
    Not modelled: the ranker model (the history stands for it), adjusting the number of rollout workers, other hardware for
    rollout than for training.
    """
    place = SkewnessAware(long_share, dedicated_share, doubling_batch) if skewness_aware else least_requests
    return System(
        name="streamrl",
        pipeline=Batchwise(eta, full_batch, stream=minibatches if stream else None),
        schedule=f"{'synchronous' if eta == 0 else 'one step off'}{', mini-batches streamed' if stream else ''}",
        dispatch=Dispatch("streamrl", place, LongestFirst if longest_first else Fifo),
        rollout_share=rollout_share,
        minibatches=minibatches,
        log_probs=log_probs,
        paper="StreamRL, arXiv 2504.15930",
        off_policyness=eta,
    )


@validate_call
def seer(
    chunk_tokens: Count | None = 8192,
    context_aware: bool = True,
    kv_pool: bool = True,
    kv_room: bool = True,
    per_worker: Count | None = None,
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """verl colocated with rollouts in chunks: groups that turn out long go first, and any worker takes the next; on-policy.

    After `chunk_tokens` a response leaves its worker and queues up anew; the worker with the fewest samples takes it
    next, and has its KV cache from a shared pool, at the price of the transfer. `kv_room`: a worker takes samples while
    its KV cache has room for what they have and a chunk each; and `per_worker` at most (None: any number). Of those
    that wait, one of each group goes first, fewest tokens first; then the group of which the longest finished response
    is longest, where unknown is longer than any. `context_aware=False` is first come first served, `chunk_tokens=None`
    leaves responses at their worker, `kv_pool=False` prefills each chunk's start anew. The length of a chunk is
    assumed.
    Not modelled: grouped speculative decoding; what the pool can hold.
    """
    return System(
        name="seer",
        pipeline=Batchwise(0, full_batch),
        schedule="synchronous",
        dispatch=Dispatch(
            "seer", least_requests, ContextAware if context_aware else Fifo, per_worker, chunk_tokens, kv_pool, kv_room
        ),
        rollout_share=None,
        minibatches=minibatches,
        log_probs=log_probs,
        controller=True,
        paper="Seer, arXiv 2511.14617",
        off_policyness=0,
    )


@validate_call
def rollpacker(
    eta_prompts: Annotated[float, Field(ge=1, le=100)] = 1.25,
    eta_responses: Annotated[float, Field(ge=1, le=100)] = 1.25,
    long_rounds: bool = True,
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """Prompts with long responses are put off and rolled out together, so that most steps are short; on-policy.

    Tail batching on verl colocated. A short round begins `eta_prompts` times a batch's prompts, `eta_responses` times the
    responses of each, and ends when a batch of prompts has as many finished responses as the trace has of them: those train,
    and the surplus of a prompt stops as soon as the prompt has enough. The other prompts wait, and lose all they have, finished
    responses too. Once a batch of them waits, the next round is a long one: those prompts anew, without surplus, to the end.
    `long_rounds=False` never trains them, which is what long rounds are there to prevent.
    Not modelled: the planner that adapts tensor parallelism, the scheduling of rewards, and the trainer that takes over GPUs as
    a rollout runs out; so the paper's end-to-end ratios are not to be expected of tail batching alone.
    """
    return System(
        name="rollpacker",
        pipeline=Batchwise(0, tail_batching(eta_prompts, eta_responses, long_rounds)),
        schedule="synchronous, short and long rounds",
        dispatch=DISPATCHES[dispatch],
        rollout_share=None,
        minibatches=minibatches,
        log_probs=log_probs,
        controller=True,
        paper="RollPacker, arXiv 2509.21009",
        off_policyness=0,
    )


@validate_call
def sortedrl(
    batches: Count = 4,
    unfinished: Literal["continue", "restart"] = "continue",
    unit: Literal["response", "group"] = "response",
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """A rollout of several batches at once; each update trains the first to finish; off-policyness at most `batches` - 1.

    As verl_colocated, but `batches` batches of prompts are drawn together, and new ones only when all of them are trained. An
    update takes place whenever an equal part of the responses is finished, so short ones train first. The others stop; they go
    on under the new weights with the tokens they have ("continue"), or begin anew ("restart"), which is strictly on-policy
    and throws away what they had, and what had finished at the same moment. `unit="group"` trains whole groups only, as
    group-relative advantages need them. Four batches are assumed.
    Not modelled: that the update batch may be of another size than a step of the trace.
    """
    return System(
        name="sortedrl",
        pipeline=Batchwise(0, shortest_first(batches, unit, unfinished)),
        schedule="synchronous, shortest first",
        dispatch=DISPATCHES[dispatch],
        rollout_share=None,
        minibatches=minibatches,
        log_probs=log_probs,
        controller=True,
        paper="SortedRL, arXiv 2603.23414",
        off_policyness=batches - 1 if unfinished == "continue" else 0,
    )


@validate_call
def dapo(
    dynamic_sampling: bool = True,
    over_sampling: Annotated[float, Field(ge=1, le=100)] = 3.0,
    max_rounds: Count | None = MOST_ROUNDS,
    dispatch: Plain = "least_requests",
    minibatches: Count = 16,
    log_probs: NotNegative = 1,
) -> System:
    """verl colocated that drops groups whose rewards are all equal, and generates until the batch is full; on-policy.

    A round generates `over_sampling` times a batch's groups to the last response; groups whose rewards are all equal are
    dropped. Rounds follow each other until a batch is left (after `max_rounds`, the run ends with an error; None: without
    limit); of surplus groups, those drawn first train, and the others are dropped too. Factor, limit and sixteen mini-batches
    are verl's recipe and the paper's (§4.1), which has no reference model. `dynamic_sampling=False` is verl_colocated with
    these phases. The trace needs rewards.
    Not modelled: that soft punishment of overlong responses makes rewards differ, unless the trace's rewards have it.
    """
    return System(
        name="dapo",
        pipeline=Batchwise(
            0, sample_dynamically(full_batch, over_sampling, max_rounds) if dynamic_sampling else full_batch
        ),
        schedule="synchronous, dynamic sampling" if dynamic_sampling else "synchronous",
        dispatch=DISPATCHES[dispatch],
        rollout_share=None,
        minibatches=minibatches,
        log_probs=log_probs,
        controller=True,
        paper="DAPO, arXiv 2503.14476; verl recipe dapo",
        off_policyness=0,
        needs_rewards=dynamic_sampling,
    )


@validate_call
def verl_draft_model(
    model: str = "qwen2.5-0.5b",
    draft_tokens: Annotated[int, Field(ge=1, le=64)] = 4,
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """verl colocated with a small draft model on every worker (vanilla speculative decoding); on-policy.

    As verl_colocated; a worker drafts `draft_tokens` tokens for each running response, then verifies them.
    Not modelled: as verl_colocated, and the method draft_model.
    """
    return replace(
        verl_colocated(dispatch, minibatches, log_probs),
        name="verl_draft_model",
        paper="verl with vanilla speculative decoding, as compared in SpecActor, arXiv 2511.16193 §5",
        speculation=draft_model(model, Fixed(tokens=draft_tokens)),
    )


@validate_call
def verl_ngram(
    draft_tokens: Annotated[int, Field(ge=1, le=64)] = 4,
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """verl colocated with n-gram drafts from each response's own text; on-policy.

    As verl_colocated; a worker drafts up to `draft_tokens` tokens where a response repeats itself.
    Not modelled: as verl_colocated, and the method ngram.
    """
    return replace(
        verl_colocated(dispatch, minibatches, log_probs),
        name="verl_ngram",
        paper="verl with n-gram speculation, as compared in SpecActor, arXiv 2511.16193 §5",
        speculation=ngram(Fixed(tokens=draft_tokens)),
    )


@validate_call
def specactor(
    model: str = "qwen2.5-0.5b",
    decoupled: bool = True,
    objective: Literal["tgs", "renewal"] = "tgs",
    reconfigure: bool = True,
    draft_gpus: Annotated[int, Field(ge=1, le=1024)] | None = None,
    window: Annotated[int, Field(ge=1, le=64)] | None = None,
    best_of_n: bool = True,
    b_max: Count = 8,
    drafters: tuple[str, ...] = ("ngram", "qwen2.5-0.5b", "qwen2.5-1.5b"),
    assignment: Literal["by_drafter", "by_request"] = "by_drafter",
    kv: Literal["recompute", "transfer"] = "recompute",
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """verl colocated, rollout with drafters on GPUs of their own that draft ahead while windows are verified; on-policy.

    As verl_colocated, with the method specactor: the verifier is the worker's tp, Algorithm 1 plans how many GPUs draft for it
    and how far (`decoupled`), Algorithm 2 gives responses of low acceptance their own window and mode (`reconfigure`).
    Workers that the tail frees each get one of the `drafters`, coupled, on their own tp GPUs, and generate requests of low
    acceptance besides, at most `b_max` each, from the tokens that these have (`best_of_n`): by Algorithm 3, or request by
    request in the order of the draft ladder ("fastest-of-N"). A request is done when its first copy is; what the others
    generated are duplicates. A copy recomputes its KV cache, or has it over the network (`kv`). b_max is assumed. All
    `drafters` are resident, so their weights shrink the KV cache of every worker.
    Not modelled: as verl_colocated, and the method specactor; the choice of the first drafter by the ladder (it is `model`);
    copies that draft decoupled; a KV cache of which the head is recomputed while the tail is on its way; acceptances of
    different drafters that go together.
    """
    rule = BestOfN(drafters, b_max, assignment, kv) if best_of_n and drafters else None
    return replace(
        verl_colocated(dispatch, minibatches, log_probs),
        name="specactor",
        pipeline=Batchwise(0, best_of_n_batch if rule else full_batch),
        best_of_n=rule,
        paper="SpecActor, arXiv 2511.16193",
        speculation=specactor_drafting(model, decoupled, draft_gpus, window, objective, reconfigure),
    )


@validate_call
def tlt(
    adaptive: bool = True,
    bandit: bool = True,
    bucketed_graphs: bool = True,
    threshold: Count = 32,
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """verl colocated with an EAGLE-type drafter once few responses are left, trained on idle workers; on-policy.

    As verl_colocated, with the method tlt: draft trees from `threshold` running responses a worker on, chosen by BEG-MAB
    (`bandit`), a drafter that idle workers train (`adaptive`).
    Not modelled: as verl_colocated, and the method tlt.
    """
    return replace(
        verl_colocated(dispatch, minibatches, log_probs),
        name="tlt",
        paper="Taming the Long Tail, arXiv 2511.16665",
        speculation=tlt_drafting(
            adaptive=adaptive, bandit=bandit, bucketed_graphs=bucketed_graphs, threshold=threshold
        ),
    )


@validate_call
def tlt_base(
    threshold: Count = 32,
    draft_tokens: Annotated[int, Field(ge=1, le=64)] = 8,
    dispatch: Plain = "least_requests",
    minibatches: Count = 1,
    log_probs: NotNegative = 1,
) -> System:
    """TLT without its learned drafter: drafts from the group's other responses once few are left; on-policy.

    As tlt, with the method siblings in place of the drafter (TLT-Base of the paper's evaluation).
    Not modelled: as verl_colocated, and the method siblings.
    """
    return replace(
        verl_colocated(dispatch, minibatches, log_probs),
        name="tlt_base",
        paper="Taming the Long Tail, arXiv 2511.16665 §6.1",
        speculation=siblings(Fixed(tokens=draft_tokens), Elastic(threshold=threshold)),
    )


_OWN: dict[str, Callable[..., System]] = {
    recipe.__name__: recipe
    for recipe in (
        verl_colocated,
        distflow,
        split,
        verl_2x,
        rlhfuse,
        seer,
        rollpacker,
        sortedrl,
        dapo,
        partial_rollout,
        april,
        one_step_off,
        asyncflow,
        streamrl,
        rhymerl,
        areal,
        verl_fully_async,
        laminar,
        verl_draft_model,
        verl_ngram,
        specactor,
        tlt,
        tlt_base,
    )
}
RECIPES: Extended[System] = Extended(_OWN, "simrl.systems", "system")


def make_system(name: str, parameters: dict[str, Any]) -> System:
    """The system of a recipe. Raises `InputError` for an unknown recipe, an unknown parameter or a value out of range."""
    known = list(parameters_of(name))
    recipe = RECIPES[name]
    common = common_parameters(recipe)
    for key in parameters:
        if key not in known:
            raise InputError(f"system {name}: unknown parameter {key!r}{meant(key, known)}; it has {', '.join(known)}")
        yes_or_no = {**signature(recipe, eval_str=True).parameters, **common}[key].annotation is bool
        if isinstance(parameters[key], bool) and not yes_or_no:
            raise InputError(f"system {name}: {key} is {str(parameters[key]).lower()}; it is no switch, give a value")
    try:
        system = made(name, recipe, **{key: value for key, value in parameters.items() if key not in common})
        system = with_common(system, **{key: value for key, value in parameters.items() if key in common})
    except ValidationError as error:
        raise InputError(f"system {name}: {call_error(error, known)}") from error
    return replace(system, name=name, parameters=dict(parameters))


def made(name: str, recipe: Callable[..., System], **parameters: Any) -> System:
    """What a recipe makes. Raises `InputError` where it is no system; what it raises itself goes through."""
    system = recipe(**parameters)
    if not isinstance(system, System):
        raise InputError(f"system {name}: its function gives {type(system).__name__}; let it give a System")
    return system


@validate_call(config=ConfigDict(arbitrary_types_allowed=True))
def with_common(
    system: System,
    on_loss: Literal["elsewhere", "wait"] = "elsewhere",
    adapt_split_every: NotNegative = 0,
    dynamic_sampling: Annotated[float, Field(ge=1, le=100)] | None = None,
    filter_groups: bool = False,
    speculation: str | dict[str, Any] | None = None,
) -> System:
    """What every recipe takes for which it makes sense (`common_parameters`).

    `on_loss`: samples whose worker is lost go on elsewhere, their tokens prefilled anew, or wait until it is back.
    `adapt_split_every`: after so many updates, move GPUs between rollout and training by what was idle (`simrl.split`);
    0 keeps the split. `dynamic_sampling`: drop groups whose rewards are all equal, and refill the batch in rounds of so
    many times its groups (`simrl.pipelines.dynamic_sampling`). `filter_groups`: drop them, and train what is left.
    `speculation`: a method by its name, or `{name: histospec, gate: open}`; `none` is plain decoding, and None the
    recipe's own.
    """
    if speculation is not None:
        system = replace(system, speculation=make_speculation(speculation))
    dispatch = replace(system.dispatch, on_loss=on_loss)
    system = replace(system, dispatch=dispatch, adapt_split_every=adapt_split_every)
    if filter_groups:
        system = replace(system, filter_groups=True, needs_rewards=True)
    if dynamic_sampling is not None:
        pipeline = system.pipeline
        assert isinstance(pipeline, Batchwise)
        collector = sample_dynamically(pipeline.collector, dynamic_sampling, MOST_ROUNDS)
        schedule = f"{system.schedule}, dynamic sampling"
        system = replace(system, pipeline=replace(pipeline, collector=collector), schedule=schedule, needs_rewards=True)
    return system


def parameters_of(name: str) -> dict[str, Any]:
    """The parameters that a recipe takes, with their defaults. Raises `InputError` for an unknown recipe."""
    if name not in RECIPES:
        raise unknown_system(name)
    recipe = RECIPES[name]
    taken = {**signature(recipe).parameters, **common_parameters(recipe)}
    return {key: parameter.default for key, parameter in taken.items()}


def unknown_system(name: str) -> InputError:
    """For a name that no recipe has. Tables call a system areal(eta=4); whoever writes that learns how it is given."""
    begins = name.partition("(")[0]
    if begins != name and begins in RECIPES:
        return InputError(f"system {name!r}: write parameters as {{'name': '{begins}', 'eta': 4}}, or as system.eta=4")
    return InputError(f"system {name!r} is unknown{meant(name, RECIPES)}; choose one of {', '.join(RECIPES)}")


def common_parameters(recipe: Callable[..., System]) -> dict[str, Parameter]:
    """Those of `with_common` that a recipe takes: the split where rollout and training have GPUs of their own and overlap;
    dynamic sampling where whole batches train."""
    system, found = (
        made(recipe.__name__, recipe),
        dict(list(signature(with_common, eval_str=True).parameters.items())[1:]),
    )
    pipeline = system.pipeline
    whole_batches = isinstance(pipeline, Batchwise) and pipeline.stream is None
    if system.rollout_share is None or (whole_batches and system.off_policyness == 0):
        del found["adapt_split_every"]
    taken = signature(recipe).parameters
    if (
        not whole_batches or "dynamic_sampling" in taken or "unit" in taken
    ):  # where single responses train, no group is compared
        del found["dynamic_sampling"]
        if not isinstance(pipeline, RLHFuse):
            del found["filter_groups"]
    return found
