"""Memory of a rollout GPU: the KV blocks that its weights, drafters and reserve leave, and how
layers share them.

Invariant: sizes are per GPU. Models whose layers all keep every token have blocks of
`engine.block_size`; the layers of others are in groups over one pool of blocks, as vLLM 0.32
divides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simrl.engine.config import EngineConfig
from simrl.engine.requests import blocks_to_start, is_plain
from simrl.engine.state import Limits
from simrl.errors import InputError, refuse
from simrl.profile.hardware import GIB
from simrl.profile.model_shape import ModelShape
from simrl.profile.precision import KV_SHARE, weight_bytes_per_gpu
from simrl.scenario.model import ClusterConfig, PrecisionConfig
from simrl.speculation.deployment import Deployment, typical_context_tokens
from simrl.speculation.plan import DraftPlan
from simrl.speculation.tail_plan import TailPlan

# tokens of the largest CUDA graph that vLLM captures, unless twice max_num_seqs are fewer
LARGEST_GRAPH = 512
MLA_BLOCK = 128  # blocks of MLA beside states are multiples of it
# SGLang 0.5.23: SGLANG_INIT_NEW_TOKEN_RATIO, its factor with data-parallel attention
# (arg_groups/parallel_hook.py), and states that a sequence may have beside a radix cache: 3, and 2
# to track them while passes overlap (mem_cache/kv_cache_configurator.py)
NEW_TOKEN_RATIO, RANKS_CAUTION, STATES_OF_SEQUENCE = 0.7, 0.3, 5
UNEVEN = 1.5  # if one kind has this many times the layers of another, groups have the smaller number of layers


class LayerGroups(NamedTuple):
    """Groups of layers that share blocks: their number by kind, tokens of a block, and its bytes
    over a group's layers."""

    full: int
    window: int
    state: int
    block_size: int
    block_bytes: float


def layer_groups(
    model: ModelShape, tp: int, block_size: int, kv_share: float, states_apart: bool = False
) -> LayerGroups:
    """Return the groups of a model's layers on `tp` GPUs. A block of `block_size` tokens grows
    until a layer's state fits it, unless states are apart, as SGLang keeps them."""
    token_bytes = model.layer_kv_bytes * kv_share / min(tp, model.kv_heads)
    kinds = model.full_layers, model.window_layers, 0 if states_apart else model.linear_layers
    least, most = min(n for n in kinds if n), max(kinds)
    layers = most if most < UNEVEN * least else least
    if kinds[2]:
        unit = max(block_size, MLA_BLOCK) if model.kv_lora_rank else block_size
        state_bytes = model.state_bytes / model.linear_layers / tp
        block_size = unit * max(-int(-state_bytes // (unit * token_bytes)), 1)
    full, window, state = (-(-n // layers) for n in kinds)
    return LayerGroups(full, window, state, block_size, layers * block_size * token_bytes)


def engine_limits(
    cluster: ClusterConfig,
    engine: EngineConfig,
    precision: PrecisionConfig,
    deployment: Deployment,
    drafters: Sequence[DraftPlan],
    prefix_caching: bool,
) -> Limits:
    """Return the limits of a worker's rank. These drafters are resident; one at a time drafts.
    Raise `InputError` if its KV cache holds no block, or less than the longest sample."""
    model, gpu, trace = deployment.model, deployment.gpu, deployment.trace
    sglang = engine.scheduler == "sglang"
    for name in ("prefill_schedule_interval", "watermark"):
        if sglang and getattr(engine, name) != EngineConfig.model_fields[name].default:
            raise InputError(
                f"engine.{name} is vLLM's, and engine.scheduler is sglang; leave one of them out"
            )
    groups = layer_groups(
        model, deployment.tp, engine.block_size, KV_SHARE[precision.kv_cache], sglang
    )
    share = groups.full + groups.window + groups.state
    weights = "weights" if precision.weights == "bf16" else f"weights in {precision.weights}"
    parts = {  # bytes of a rollout GPU that the KV cache does not get
        weights: weight_bytes_per_gpu(
            model, deployment.tp, cluster.dp, cluster.ep, precision.weights
        ),
        "weights of drafters": sum(plan.weight_bytes for plan in drafters),
        "CUDA graphs of draft strategies": sum(plan.graph_bytes for plan in drafters),
        "logits of the largest verification": sum(plan.verification_bytes for plan in drafters),
        "reserve_bytes (activations, CUDA graphs of plain decoding, buffers)": engine.reserve_bytes,
    }
    if sglang and model.linear_layers:
        left = gpu.memory_bytes * engine.gpu_memory_utilization - sum(parts.values())
        state_bytes = model.state_bytes / deployment.tp
        slots = _state_slots(engine, left, state_bytes)
        parts[f"{slots} states of sequences"] = (slots + 1) * state_bytes
        most = min(engine.max_num_seqs, slots // (STATES_OF_SEQUENCE if prefix_caching else 1))
        engine = engine.model_copy(update={"max_num_seqs": most})
    if engine.kv_cache_tokens:
        blocks = engine.kv_cache_tokens // groups.block_size * share
    else:
        # A drafter's cache has the precision of the engine's.
        token_bytes = (
            max((plan.kv_bytes_per_token for plan in drafters), default=0.0)
            * KV_SHARE[precision.kv_cache]
        )
        blocks = _kv_blocks(
            engine, KV_SHARE[precision.kv_cache], deployment, groups, token_bytes, parts
        )
    limits = limits_in(groups, blocks, model, engine)
    # vLLM counts as many tokens for a sequence as a pass may verify.
    drafted = max((plan.speculation.window.rule.most_tokens for plan in drafters), default=0)
    graphs = (
        0
        if engine.enforce_eager
        else min(
            2 * (1 + drafted) * engine.max_num_seqs, LARGEST_GRAPH, engine.max_num_batched_tokens
        )
    )
    cautious = engine.schedule_conservativeness * (RANKS_CAUTION if cluster.dp > 1 else 1)
    limits = limits._replace(
        prefix_caching=prefix_caching,
        dp=cluster.dp,
        graph_tokens=graphs,
        watermark_blocks=int(
            engine.watermark * (blocks + 1)
        ),  # vLLM counts the block that it never gives out
        prefill_interval=engine.prefill_schedule_interval,
        sglang=sglang,
        max_new_tokens=trace.metadata.cap_tokens,
        clip_max_new_tokens=engine.clip_max_new_tokens,
        start_ratio=min(NEW_TOKEN_RATIO * cautious, 1.0),
        longest_prefix_first=sglang and prefix_caching and engine.schedule_policy == "lpm",
    )
    if model.linear_layers or not is_plain(limits):
        limits, kind = (
            limits._replace(prefix_caching=False, longest_prefix_first=False),
            "states" if model.linear_layers else "windows",
        )
        refuse(
            (
                engine.prefix_caching,
                f"engine.prefix_caching is true: a prefix cache of layers with {kind} ({model.name}) is not modelled; leave "
                "it out",
            ),
            (
                model.linear_layers and drafters,
                f"{model.name} keeps states, and the states of drafted tokens are not modelled; use system.speculation=none",
            ),
        )
    known = trace.column("prompt_tokens").astype(int) + trace.observation_tokens()
    longest = int((known + trace.column("response_tokens")).max())
    if blocks_to_start(longest, limits) > blocks:
        state = f", {groups.state} of {blocks} blocks for its states" if groups.state else ""
        held = engine.kv_cache_tokens or limits.kv_tokens
        remedy = (
            "give more kv_cache_tokens"
            if engine.kv_cache_tokens
            else "use a larger tp, more memory for the cache"
        )
        beside = "" if engine.kv_cache_tokens else f" beside {_named(parts)}"
        raise InputError(
            f"{trace.metadata.name}: its longest sample has {longest} tokens{state}, the KV cache of a worker ({model.name}, "
            f"tp {deployment.tp}, {gpu.name}) holds {held}{beside}; {remedy}, or a lower cap",
            cause="KV cache of a worker",
        )
    return limits


def _state_slots(engine: EngineConfig, left: float, state_bytes: float) -> int:
    """Return the states for which SGLang has memory, of `left` bytes for them and KV. One more pads
    the pool."""
    share = engine.mamba_full_memory_ratio / (1 + engine.mamba_full_memory_ratio)
    slots = engine.max_mamba_cache_size or int(share * left / state_bytes) - 1
    refuse(
        (
            slots < STATES_OF_SEQUENCE,
            f"{left * share / GIB:.1f} GiB a GPU are left for states of {state_bytes / GIB:.2f} GiB, of which SGLang gives a "
            f"sequence {STATES_OF_SEQUENCE}; use a larger tp, or raise engine.mamba_full_memory_ratio",
        ),
        cause="memory of a worker",
    )
    return slots


def limits_in(groups: LayerGroups, blocks: int, model: ModelShape, engine: EngineConfig) -> Limits:
    """Return the limits of an engine whose cache has `blocks`, which groups of layers share."""
    return Limits(
        engine.max_num_seqs,
        engine.max_num_batched_tokens,
        groups.block_size,
        blocks,
        engine.async_scheduling,
        full_groups=groups.full,
        window_groups=groups.window,
        window_tokens=model.window_tokens,
        state_blocks=groups.state,
    )


def cache_capacity_tokens(limits: Limits, context_tokens: float) -> int:
    """Return the tokens of the sequences of `context_tokens` that a rank's cache holds at a time.
    States take blocks of the cache; windows leave blocks free."""
    if is_plain(limits):
        return limits.kv_tokens
    return int(
        limits.kv_blocks / blocks_to_start(max(round(context_tokens), 1), limits) * context_tokens
    )


def _named(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {taken / GIB:.1f} GiB" for name, taken in parts.items() if taken)


def _kv_blocks(
    engine: EngineConfig,
    kv_share: float,
    deployment: Deployment,
    groups: LayerGroups,
    drafted_bytes: float,
    parts: dict[str, float],
) -> int:
    """Return the blocks of a rank's KV cache that fit in addition to the other parts;
    `drafted_bytes` of a token are a drafter's."""
    model, gpu, tp = deployment.model, deployment.gpu, deployment.tp
    free = gpu.memory_bytes * engine.gpu_memory_utilization - sum(parts.values())
    if groups.window or groups.state:
        blocks = int(free // (groups.block_bytes + drafted_bytes * groups.block_size))
    else:
        kv_bytes = model.kv_bytes_per_token * kv_share / min(tp, model.kv_heads) + drafted_bytes
        blocks = int(free // kv_bytes) // groups.block_size
    state = groups.state * groups.block_bytes
    if blocks <= groups.state:
        nothing = (
            f"{max(free, 0) / GIB:.1f} GiB are left, and the states of one sequence take {state / GIB:.2f}"
            if groups.state
            else "nothing is left for the KV cache"
        )
        fewer = "a smaller engine.max_num_seqs or (with one turn a response) threshold, " * (
            parts["logits of the largest verification"] > 0
        )
        raise InputError(
            f"{model.name} at tp {tp} needs {sum(parts.values()) / GIB:.0f} GiB a GPU ({_named(parts)}); "
            f"{gpu.memory_words(engine.gpu_memory_utilization)}: {nothing}; use {fewer}a larger tp or another GPU",
            cause="memory of a worker",
        )
    return blocks


def require_drafter_fits(
    engine: EngineConfig,
    precision: PrecisionConfig,
    deployment: Deployment,
    drafts: DraftPlan,
    tail: TailPlan | None,
    limits: Limits,
) -> None:
    """Raise `InputError` if a decoupled drafter's own GPU is too small. It holds the weights of its
    drafter and of the largest one that it may load in the tail, a worker's share of the target's
    (every worker keeps these, SpecActor §4.3), and the KV cache of its part of the requests that a
    worker runs at a time, no more than the worker's own cache holds."""
    if drafts.decoupled is None:
        return
    model, gpu, times = deployment.model, deployment.gpu, drafts.times
    running = min(drafts.decoupled.requests, engine.max_num_seqs)
    context = typical_context_tokens(deployment.trace)
    tokens = min(running * context, cache_capacity_tokens(limits, context))
    kept = weight_bytes_per_gpu(model, deployment.tp, precision=precision.weights)
    kv_bytes = (
        tokens * KV_SHARE[precision.kv_cache] * times.kv_bytes_per_token_per_gpu / drafts.draft_gpus
    )
    usable = gpu.memory_bytes * engine.gpu_memory_utilization - engine.reserve_bytes
    plans = [plan for plan in (tail.plans.values() if tail else ()) if plan.draft_gpus]
    others = (plan for plan in plans if plan.speculation.model != drafts.speculation.model)
    weights = times.weight_bytes_per_gpu
    weights += max((plan.times.weight_bytes_per_gpu for plan in others), default=0.0)
    if weights + kept + kv_bytes > usable:
        smaller = weights + kept > usable
        raise InputError(
            f"speculation {drafts.speculation.name}: a GPU of the drafter {drafts.speculation.model} needs "
            f"{weights / GIB:.1f} GiB for the weights of drafters, {kept / GIB:.1f} for the weights of "
            f"{model.name}, which it keeps, and {kv_bytes / GIB:.1f} for the KV cache of {running} requests on "
            f"{drafts.draft_gpus}; {gpu.memory_words(engine.gpu_memory_utilization)}, of which activations take "
            f"{engine.reserve_bytes / GIB:.1f} (reserve_bytes); use a smaller drafter, a larger tp or "
            f"{'decoupled: false' if smaller else 'more draft_gpus'}",
            cause="memory of a drafter",
        )
