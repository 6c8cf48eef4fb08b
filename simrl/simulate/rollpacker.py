"""The layouts of RollPacker's parallelism planner (`simrl.pipelines.rollpacker`): the cluster's
GPUs as workers of other tensor-parallel sizes, each prepared as a scenario of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from simrl.errors import InputError, refuse
from simrl.profile.shipped import PROFILES, file_name
from simrl.scenario.model import Scenario

if TYPE_CHECKING:
    from simrl.simulate.prepare import Prepared


def other_layouts(
    prepared: Prepared, prepare: Callable[[Scenario], Prepared]
) -> tuple[Prepared, ...]:
    """Return a run at the other sizes that its planner has. Raise `InputError` where one cannot be
    formed."""
    return tuple(
        _layout(prepared, tp, prepare) for tp in sorted({*prepared.system.tp_sizes} - {prepared.tp})
    )


def _layout(prepared: Prepared, tp: int, prepare: Callable[[Scenario], Prepared]) -> Prepared:
    scenario, cluster, system = prepared.scenario, prepared.scenario.cluster, prepared.system
    size = f"system {system.name}: planner has {tp}"
    method = system.speculation.name if system.speculation else ""
    refuse(
        (
            tp % cluster.tp,
            f"{size}, and its workers are formed of whole workers of cluster.tp {cluster.tp}; use multiples of it, or set "
            "cluster.tp to the smallest size",
        ),
        (
            method,
            f"{size}, and {method} has its drafts planned for one size of worker; leave planner or speculation out",
        ),
        (
            scenario.faults,
            f"{size}, and faults are of workers that stay; leave planner or faults out",
        ),
    )
    return at_size(prepared, tp, prepare, size)


def at_size(
    prepared: Prepared, tp: int, prepare: Callable[[Scenario], Prepared], words: str
) -> Prepared:
    """Return a run with all rollout workers at another tensor-parallel size: with their profile and
    KV cache, without pools and faults. Raise `InputError` that begins with `words` where they
    cannot be formed."""
    scenario, cluster = prepared.scenario, prepared.scenario.cluster
    ep, kv_tokens = tp * cluster.dp if cluster.ep > 1 else 1, scenario.engine.kv_cache_tokens
    formed = scenario.with_fields(
        "cluster", tp=tp, ep=ep, prefill=cluster.prefill.model_copy(update={"gpus": 0, "tp": None})
    )
    if scenario.profile.path is not None and tp != cluster.tp:
        name = file_name(prepared.profile.metadata.model_copy(update={"tp": tp, "ep": ep}))
        beside = Path(scenario.profile.path).with_name(name)
        formed = formed.with_fields(
            "profile", path=str(beside if beside.is_file() else PROFILES / name)
        )
    if (
        kv_tokens is not None
    ):  # tokens of the cluster's workers: more GPUs share out the heads of more
        shards = [min(gpus, prepared.model.kv_heads) for gpus in (tp, cluster.tp)]
        formed = formed.with_fields("engine", kv_cache_tokens=kv_tokens * shards[0] // shards[1])
    try:
        return prepare(formed.model_copy(update={"faults": ()}))
    except InputError as error:
        raise InputError(f"{words}: {error}", error.cause) from error
