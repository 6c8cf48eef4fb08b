"""Recipes in which rollout and training take turns: colocated systems, and split ones without
overlap."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from simrl.dispatch.placement import least_requests
from simrl.dispatch.rules import DISPATCHES, Dispatch
from simrl.dispatch.seer import ContextAware
from simrl.dispatch.waiting import Fifo
from simrl.pipelines.batch import MakeCollector
from simrl.pipelines.batchwise import batchwise, coupled
from simrl.pipelines.context import DynamicSampling
from simrl.pipelines.full_batch import full_batch
from simrl.pipelines.rlhfuse import rlhfuse as rlhfuse_pipeline
from simrl.pipelines.rollpacker import in_layouts, tail_batching
from simrl.pipelines.unfinished import first_complete, shortest_first, token_budget
from simrl.systems.system import (
    GROUPS,
    MOST_ROUNDS,
    OF_VERSION,
    Count,
    Factor,
    Share,
    System,
    Version,
    recipe,
)


def in_turns(*, paper: str, collector: MakeCollector = full_batch, **more: Any) -> System:
    """Return a synchronous, colocated, on-policy system whose batches go through one process;
    `more` are fields that differ."""
    return System(
        **{
            "pipeline": partial(batchwise, eta=0, collector=collector),
            "schedule": "synchronous",
            "paper": paper,
            "controller": True,
            "off_policyness": 0,
            **more,
        }
    )


@recipe("dispatch", *GROUPS, dispatch=None)
def verl_colocated(version: Version = "0.7") -> System:
    """Every GPU rolls out the whole batch, then the same GPUs train; on-policy.

    `version` decides the dispatch. verl 0.4, which most papers compare with, cuts the batch into contiguous equal parts,
    one for each worker: all responses of a prompt are at one worker, and workers end far apart. Since 0.5 (here "0.7") the
    agent loop sends single responses to the least loaded server. `dispatch` replaces either. When the last response has
    ended, the batch passes through the controller. The GPUs switch from rollout to training, compute log-probs, update, and
    switch back; then every worker loads the new weights and the next step begins. The section `judge` adds a reward model.
    Not modelled: rewards by a rule before their group has ended (they arrive `reward_s` after it).
    """
    return in_turns(paper="HybridFlow, arXiv 2409.19256", dispatch=DISPATCHES[OF_VERSION[version]])


@recipe("dispatch", *GROUPS, dispatch="even_split")
def distflow() -> System:
    """verl colocated without a central controller: the batch does not pass through one process; on-policy.

    Dependencies are as in verl_colocated, but every worker passes its data on directly (multi-controller), so there is no phase
    `transfer`. Each worker loads its own contiguous part of the batch (the paper's distributed data loader).
    Not modelled: the time of the decentralised transfer, which overlaps; out-of-memory of a single controller.
    """
    return in_turns(paper="DistFlow, arXiv 2507.13833", controller=False)


@recipe("rollout_share", "dispatch", *GROUPS, dispatch="even_split")
def split(generations: Count = 1) -> System:
    """Rollout and training on disjoint sets of GPUs without overlap: one idles while the other works; on-policy.

    As verl_colocated, but rollout and training have their own GPUs, so no GPU switches, and the new weights are published over
    the network. The batch is cut into contiguous equal parts: Open-R1 generates with TRL's vLLM server, which does that
    with its prompts. Rollout and training batches are coupled (TLT §6.2): with `generations` above 1, a step's groups are
    generated in that many parts, each when the gradients of the part before are computed, as trainers do that generate for
    each accumulation step.
    Not modelled: as verl_colocated.
    """
    paper = "Open-R1 (Hugging Face), as described in RhymeRL, arXiv 2508.18588 §2"
    if generations == 1:
        return in_turns(paper=paper)
    return in_turns(
        paper=paper,
        pipeline=partial(coupled, generations=generations),
        schedule="synchronous, a rollout for each accumulation step",
    )


@recipe("dispatch", *GROUPS, dispatch="even_split")
def verl_2x(extra_rollout_gpus: Annotated[float, Field(gt=0, le=100)] = 1.0) -> System:
    """verl colocated with twice the rollout GPUs (RLBoost-like); on-policy.

    As verl_colocated 0.4 on the cluster's GPUs: SpecActor's workers have their prompts assigned to them (§1, §2.2).
    `extra_rollout_gpus` times as many GPUs are added; they only roll out, and idle during training. The column `gpus` counts
    all GPUs.
    Not modelled: preemption of RLBoost's extra GPUs (scenario faults can add it), and its partial migration.
    """
    return in_turns(
        extra_rollout_gpus=extra_rollout_gpus,
        paper="RLBoost-like 2x, as compared in SpecActor, arXiv 2511.16193 §5",
    )


@recipe("dispatch", "filter_groups", dispatch="even_split")
def rlhfuse(
    threshold: Share = 0.2,
    destinations: Count | None = None,
    slowdown: Annotated[float, Field(ge=0, le=100)] = 0.1,
    round_samples: Count = 8,
    migration: bool = True,
    fusion: bool = True,
    critic: bool = False,
    intra_stage: bool = True,
) -> System:
    """verl colocated; log-probs start on GPUs from which the tail of the rollout has been moved away; on-policy.

    When at most `threshold` of a step's samples are unfinished, they continue on `destinations` workers, those with the most
    unfinished samples; each sample moves to the destination with the fewest. Tokens are kept; KV caches are prefilled again.
    None: the fewest workers such that no worker has more samples than it had at the start of the step, and the longest response
    is at most `slowdown` slower by the profile. The other GPUs switch to training at once and compute the log-probs of finished
    samples, in rounds of at most `round_samples` per worker, while the tail runs; then all GPUs compute the remaining log-probs
    and the update. The paper finds the threshold by simulation, as `simrl sweep` can here; the defaults 20 %, 10 % slower and 8
    are assumed. `migration=False` leaves the tail in place, and only workers that become idle by themselves start early;
    `fusion=False` computes no log-probs early. With both off it is verl_colocated 0.4, from which it also has the
    dispatch: SpecActor's authors built theirs on verl. A `critic` as large as the policy has its
    values inferred and is trained, too: with `intra_stage` fusion, its micro-batches run through the pipeline stages in reverse
    and fill the policy's bubbles (training.pipeline_parallel above 1; GRPO has no critic, and nothing to fuse). The schedule is
    greedy, not the paper's annealed one.
    Not modelled: moving a KV cache instead of prefilling it, rewards by a model on the freed GPUs.
    """
    return in_turns(
        pipeline=partial(
            rlhfuse_pipeline,
            threshold=threshold,
            destinations=destinations,
            slowdown=slowdown,
            round_samples=round_samples,
            migration=migration,
            fusion=fusion,
        ),
        schedule="synchronous, log-probs fused with the tail" if fusion else "synchronous",
        critic=("fused" if intra_stage else "serial") if critic else None,
        paper="RLHFuse, arXiv 2409.13221",
    )


@recipe(*GROUPS)
def seer(
    chunk_tokens: Count | None = 8192,
    context_aware: bool = True,
    kv_pool: bool = True,
    kv_room: bool = True,
    per_worker: Count | None = None,
) -> System:
    """verl colocated with rollout in chunks: long groups first, any worker takes the next chunk; on-policy.

    After `chunk_tokens` tokens a response leaves its worker and queues again; the worker with the fewest samples takes it next,
    and fetches its KV cache from a shared pool, at the cost of the transfer. `kv_room`: a worker takes samples while its KV
    cache has room for their tokens and one more chunk each. A worker runs at most `per_worker` samples (None: no limit). Among
    waiting samples, one of each group goes first, fewest tokens first; then samples of the group whose longest finished
    response is longest, where an unknown length counts as longest. `context_aware=False` is first come, first served;
    `chunk_tokens=None` keeps responses on their worker; `kv_pool=False` prefills again at the start of each chunk. The length
    of a chunk is assumed.
    Not modelled: grouped speculative decoding; the capacity of the pool.
    """
    return in_turns(
        dispatch=Dispatch(
            "seer",
            least_requests,
            ContextAware if context_aware else Fifo,
            per_worker,
            chunk_tokens,
            kv_pool,
            kv_room,
        ),
        paper="Seer, arXiv 2511.14617",
    )


@recipe("dispatch", *GROUPS, dispatch="least_requests")
def rollpacker(
    eta_prompts: Factor = 1.25,
    eta_responses: Factor = 1.25,
    long_rounds: bool = True,
    async_rewards: bool = True,
    stream_trainer: Share | None = None,
    stream_samples: Count = 64,
    planner: tuple[Count, ...] = (),
) -> System:
    """Prompts with long responses are deferred and rolled out together, so most steps are short; on-policy.

    Tail batching on verl colocated. A short round starts `eta_prompts` times a batch's prompts, with `eta_responses` times the
    responses of each. It ends when a batch of prompts has as many finished responses per prompt as the trace has; these train.
    Surplus responses of a prompt stop as soon as the prompt has enough. The other prompts are deferred and lose all their
    responses, finished ones too. Once a batch of prompts is deferred, the next round is a long one: it rolls out these prompts
    from the start, without surplus, to the last response. `long_rounds=False` never trains deferred prompts, which long rounds
    exist to prevent. The reward scheduler scores a prompt while others are still rolled out; `async_rewards=False` scores all
    when the round is over. `stream_trainer` (the public script: 0.4): when that share of a long round's responses is finished,
    the rest moves to half of the workers, once; the others' GPUs compute log-probs and gradients of scored prompts, in rounds
    of at most `stream_samples` per worker, and the update trains what is left. None: tail batching alone. Single
    responses go to the least loaded worker, as in ROLL, on which it is built.

    `planner`: the larger tensor-parallel sizes, multiples of `cluster.tp`, in which a round may form the GPUs into workers
    instead. The public text says why (short rounds begin more responses, long rounds longer ones, and both pre-empt KV caches
    at a fixed size) and that each size is profiled offline; the public code has a second set of engines of a larger size on
    the GPUs, asleep but in long rounds, and loads new weights into the set that runs next. Built so: a step's load of weights
    is in the layout of its round, and costs what it does at that size (a given `training.load_s` holds for all; a given
    `engine.kv_cache_tokens` grows with the size). Chosen here: before each round, the size with the least predicted seconds,
    of the load and of the fullest worker by the size's profile and KV cache, for lengths as in the last round of its kind;
    before there is one, for what these rules make of the trace's first step.
    Not modelled: the memory of engines asleep, and their time to wake; speculation and faults with a planner; adaptive
    timeouts of sandboxes and judge models that share the GPUs (a trace has no times of rewards); the stream trainer of short
    rounds. So do not expect the paper's end-to-end ratios.
    """
    rule: dict[str, Any] = {
        "eta_prompts": eta_prompts,
        "eta_responses": eta_responses,
        "long_rounds": long_rounds,
        "async_rewards": async_rewards,
    }
    more: dict[str, Any] = {}
    if stream_trainer is not None or planner:
        more["pipeline"] = partial(
            in_layouts, stream_from=stream_trainer, stream_samples=stream_samples, **rule
        )
    return in_turns(
        collector=partial(tail_batching, **rule),
        schedule="synchronous, short and long rounds",
        paper="RollPacker, arXiv 2509.21009; its artifact's scripts",
        tp_sizes=planner,
        **more,
    )


@recipe("dispatch")
def sortedrl(
    batches: Count = 4,
    unfinished: Literal["continue", "restart"] = "continue",
    unit: Literal["response", "group"] = "response",
) -> System:
    """A rollout of several batches at once; each update trains the first to finish; off-policyness at most `batches` - 1.

    As verl_colocated, but `batches` batches of prompts are drawn together, and new ones only when all of these are trained. An
    update starts whenever an equal part of the responses is finished, so short responses train first. The other responses stop.
    They continue under the new weights with the tokens generated so far ("continue"), or start again ("restart"); restarting is
    strictly on-policy and discards their tokens, as well as surplus responses that finished at the moment of the update.
    `unit="group"` trains only whole groups, as group-relative advantages need. Four batches are assumed, and so is the
    dispatch.
    Not modelled: an update batch of a different size than a step of the trace.
    """
    return in_turns(
        collector=partial(shortest_first, batches=batches, unit=unit, unfinished=unfinished),
        schedule="synchronous, shortest first",
        paper="SortedRL, arXiv 2603.23414",
        off_policyness=batches - 1 if unfinished == "continue" else 0,
    )


@recipe("dispatch", *GROUPS, dispatch="round_robin_groups", minibatches=4)
def areal_sync() -> System:
    """AReaL with generation and training in turns on the same GPUs; on-policy.

    As verl_colocated without a controller, with AReaL's mini-batches, dispatch and engines (areal): the code on one pool of
    GPUs, and the synchronous systems of the paper's Fig. 1. The paper's own Sync.AReaL divides its GPUs: `areal(eta=0)`.
    Not modelled: as verl_colocated.
    """
    return in_turns(paper="AReaL, arXiv 2505.24298, Fig. 1", controller=False, prefix_caching=False)


@recipe("dispatch", dispatch="even_split", minibatches=16)
def dapo(
    dynamic_sampling: bool = True,
    over_sampling: Factor = 3.0,
    max_rounds: Count | None = MOST_ROUNDS,
) -> System:
    """verl colocated that drops groups with equal rewards and generates until the batch is full; on-policy.

    A round generates `over_sampling` times a batch's groups to the last response; groups whose rewards are all equal are
    dropped. Rounds are repeated until a batch remains (after `max_rounds` the run ends with an error; None: no limit). Of
    surplus groups, those drawn first train, and the others are dropped too. Factor, limit and sixteen mini-batches are from
    verl's recipe and the paper (§4.1), which has no reference model; the dispatch is that of the verl of its time (up to 0.4).
    `dynamic_sampling=False` is verl_colocated with these phases. The trace needs rewards.
    Not modelled: differences in reward from the soft punishment of overlong responses, unless the trace's rewards include them.
    """
    return in_turns(
        dynamic_sampling=DynamicSampling(over_sampling, max_rounds) if dynamic_sampling else None,
        schedule="synchronous, dynamic sampling" if dynamic_sampling else "synchronous",
        paper="DAPO, arXiv 2503.14476; verl recipe dapo",
    )


@recipe("dispatch", *GROUPS)
def partial_rollout(budget_tokens: Count = 8192) -> System:
    """A response has a token budget per update; a longer one continues in the next update, under newer weights.

    As verl_colocated, but a response is cut after `budget_tokens` new tokens. It keeps its tokens and is submitted again in the
    next rollout, before the new groups; its prompt and tokens are prefilled again. Every update draws a batch of new groups and
    trains all complete groups, so on average one batch per update is trained; if no group is complete, all responses get
    another budget. The report does not state how many groups to draw, nor the budget: 8,192 is assumed. Its workers take new
    responses as they become free (least_requests). A response of n budgets has tokens up to n - 1 versions old; n is not
    bounded.
    Not modelled: the detection of repetitions, which ends responses early; leaving tokens of earlier updates out of the loss.
    """
    return in_turns(
        collector=partial(token_budget, budget_tokens=budget_tokens),
        schedule="synchronous, responses in parts",
        paper="Kimi k1.5, arXiv 2501.12599",
        off_policyness=None,
    )


@recipe("dispatch", *GROUPS)
def april(over_sampling: Factor = 2.0) -> System:
    """More groups run than a batch needs; when a batch is complete, the others stop and continue in the next step.

    As verl_colocated, but a rollout begins with `over_sampling` times a batch's groups: first the unfinished groups of the
    previous rollout, with the tokens generated so far (prefilled again, under the new weights), then new ones. It ends when a
    batch of groups is complete. Additional complete groups train in the next step; nothing is discarded. The default
    over-sampling factor 2 is assumed. Single responses go to the least loaded worker: slime, on which it is built, has a router
    that balances requests. A long response may be stopped repeatedly: the age of its first tokens is not bounded.
    Not modelled: the wait for an engine to confirm that it has stopped, beyond the current forward pass.
    """
    return in_turns(
        collector=partial(first_complete, over_sampling=over_sampling),
        schedule="synchronous, over-sampled",
        paper="APRIL, arXiv 2509.18521",
        off_policyness=None,
    )
