"""The pool of prefill workers, prepared as a scenario of its own: workers of another size, beside
those that decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from simrl.errors import InputError, refuse
from simrl.profile.precision import KV_SHARE
from simrl.scenario.model import Scenario
from simrl.simulate.rollpacker import scenario_at

if TYPE_CHECKING:
    from simrl.simulate.prepare import Prepared


def with_prefill(prepared: Prepared, prepare: Callable[[Scenario], Prepared]) -> Prepared:
    """Return a run whose workers decode, with its prefill workers. Decode workers have no prefix
    cache, as SGLang's. Raise `InputError` for what two pools do not have."""
    scenario, system, cluster = prepared.scenario, prepared.system, prepared.scenario.cluster
    unit, gpus = cluster.prefill_unit, cluster.prefill_gpus
    pools, kv = f"cluster.prefill, system {system.name}", prepared.agents.kv
    apart = "its workers load weights one by one, and prefill workers serve them all"
    refuse(
        (
            gpus % unit,
            f"cluster.prefill.gpus is {gpus}: a prefill worker has {unit} GPUs; use a multiple",
        ),
        (system.loads_apart, f"{pools}: {apart}; leave prefill out"),
        (
            prepared.is_elastic or system.tp_sizes,
            f"{pools}: its GPUs change sides or size, and pools keep theirs; leave prefill out",
        ),
        (
            prepared.drafts or prepared.tail,
            f"{pools}: drafts on decode workers alone are not modelled; use system.speculation=none, or leave prefill out",
        ),
        (
            system.on_update.running == "start_over",
            f"{pools}: an update lets requests start over, which pools do not model; leave prefill out",
        ),
        (
            system.extra_rollout_gpus,
            f"{pools}: extra_rollout_gpus are of no pool; leave one of the two out",
        ),
        (
            kv in ("keep", "offload"),
            f"agents.kv_while_tool_runs is {kv}: a decode worker frees the cache when a turn ends, and the next one is "
            "prefilled elsewhere; leave it out, or cluster.prefill",
        ),
    )
    try:
        size = prepare(scenario_at(prepared, unit // cluster.dp))
    except InputError as error:
        raise InputError(f"cluster.prefill: {error}", error.cause) from error
    limits = prepared.limits._replace(prefix_caching=False, longest_prefix_first=False)
    size = replace(size, workers=gpus // unit)
    return replace(prepared, limits=limits, prefill=size)


def kv_s_per_token(prepared: Prepared, prefill: Prepared) -> float:
    """Return the seconds in which a token's KV crosses a link: each GPU sends or receives a part,
    and the side with fewer parts takes as long."""
    model, pool = prepared.model, prepared.scenario.cluster.prefill
    kv_bytes = model.kv_bytes_per_token * KV_SHARE[prepared.scenario.precision.kv_cache]
    rate = (pool and pool.link_bytes_per_s) or prepared.gpu.network_bytes_per_s
    return kv_bytes / min(prepared.tp, prefill.tp, model.kv_heads) / rate
