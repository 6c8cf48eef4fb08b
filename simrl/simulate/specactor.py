"""Choices of SpecActor (arXiv 2511.16193) before a run: the GPUs of a verifier (Algorithm 1), and
the part of a KV cache that a duplicate fetches (§4.3)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

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
from simrl.speculation.plan import plan_drafting


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
