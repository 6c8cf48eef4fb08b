"""Choices of SpecActor (arXiv 2511.16193) before a run: the GPUs of a verifier (Algorithm 1), and
what scaling takes (§4.3): the load of a model, and the part of a KV cache that a duplicate
fetches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from simrl.engine.state import Limits
from simrl.errors import InputError, refuse
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import TableProfile
from simrl.profile.shipped import SHIPPED
from simrl.runtime.worker import WorkerCosts
from simrl.scenario.model import Scenario
from simrl.simulate.memory import engine_limits
from simrl.simulate.training_checks import require_divisor
from simrl.speculation.deployment import Deployment
from simrl.speculation.methods import Speculation
from simrl.speculation.plan import DraftPlan, plan_drafting
from simrl.speculation.tail_plan import TailPlan
from simrl.training.weight_sync import PINNED_SHARE


def with_best_verifier(
    scenario: Scenario,
    speculation: Speculation,
    gpus: int,
    deployment_of: Callable[[Scenario], Deployment],
) -> Scenario:
    """Return the scenario with the tensor-parallel size of a worker whose plan is the fastest on
    `gpus` rollout GPUs. Raise `InputError` where no verifier fits its GPUs."""
    heads, rates = model_shape(scenario.model).heads, {}
    for tp in speculation.verifiers:
        sized = scenario.with_fields("cluster", tp=tp)
        if scenario.profile.path is not None and tp != scenario.cluster.tp:
            sized = sized.with_fields("profile", path=SHIPPED).with_profile()
        with suppress(InputError):
            require_divisor(
                "cluster.tp", tp, heads, f"attention heads of {scenario.model}", sized.cluster.gpus
            )
            deployment = deployment_of(sized)
            plan = plan_drafting(speculation, sized.speculation, deployment, gpus)
            engine_limits(
                sized.cluster,
                sized.engine,
                sized.precision,
                deployment,
                [plan],
                prefix_caching=False,
            )
            decoupled = plan.speculation.decoupled
            by_tgs = (
                plan.decoupled is not None
                and decoupled is not None
                and decoupled.objective == "tgs"
            )
            rates[tp] = (plan.decoupled.tgs if by_tgs and plan.decoupled else plan.rate), sized
    refuse(
        (
            not rates,
            f"speculation {speculation.name}: no verifier of {speculation.verifiers} GPUs holds "
            f"{model_shape(scenario.model).name}; give larger ones",
        )
    )
    return max(rates.values(), key=lambda rated: rated[0])[1]


def fetched_share(kv: str, costs: WorkerCosts, profile: TableProfile, limits: Limits) -> float:
    """Return the share of a duplicate's KV cache that is fetched. "mixed": its tail is, while its
    head is recomputed, and both take equally long."""
    tokens = limits.max_num_batched_tokens
    recompute_s = profile.prefill_s(tokens) / tokens
    shares = {
        "recompute": 0.0,
        "transfer": 1.0,
        "mixed": recompute_s / (recompute_s + costs.fetch_s_per_token),
    }
    return shares[kv]


def with_scale(
    tail: TailPlan,
    first: DraftPlan | None,
    limits_with: Callable[[Sequence[DraftPlan]], Limits],
    host_bytes_per_s: float,
    fetched: float,
) -> TailPlan:
    """Return the plan of the tail with what scaling a freed worker takes (§4.3): the load of its
    drafter, the KV cache that this leaves, and the share of a duplicate's cache that is `fetched`.

    Every host caches all drafters, pinned, and runtimes and CUDA graphs are there in advance. So a
    load is bytes over PCIe, at what pinned copies reach: each GPU gets its part, or a whole copy;
    NVLink hands copies on as fast or faster. The target's weights are on all GPUs, and the `first`
    drafter stays where it is, for the next step. Requests begin when the load is over; the paper
    does not say whether their KV cache comes meanwhile.
    """
    plans, fixed = dict(tail.plans), [first] if first is not None else []
    for name, plan in plans.items():
        is_there = (name, plan.draft_gpus) == (tail.rule.own, first.draft_gpus if first else 0)
        loaded = 0.0 if is_there else plan.times.weight_bytes_per_gpu
        load_s = loaded / (PINNED_SHARE * host_bytes_per_s)
        limits = limits_with([*fixed, *([] if is_there else [plan])])
        scale = {"bytes_per_gpu": loaded, "load_s": load_s, "kv_cache_tokens": limits.kv_tokens}
        facts = plan.facts | {"scale": scale}
        plans[name] = replace(plan, load_s=load_s, kv_blocks=limits.kv_blocks, facts=facts)
    facts = tail.facts | {"drafters": {name: plan.facts for name, plan in plans.items()}}
    return replace(tail, rule=replace(tail.rule, fetched_share=fetched), plans=plans, facts=facts)
