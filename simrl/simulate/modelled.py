"""Parts of a scenario that are not modelled, in words; `docs/modelled.md` has all of it, by part.

Invariant: every entry stands for something that the scenario has: its system, its trace, its
engine, its cluster, its faults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from simrl.engine.requests import is_plain
from simrl.extensions import documentation
from simrl.scenario.presets import ENGINES
from simrl.speculation.methods import METHODS
from simrl.systems.recipes import RECIPES
from simrl.trace.trace import UNSEPARATED

if TYPE_CHECKING:
    from simrl.simulate.prepare import Prepared


def not_modelled(prepared: Prepared) -> list[str]:
    """Return what a prepared scenario has that is not modelled, each in a few words."""
    return list(
        dict.fromkeys([*_of_system(prepared), *_of_rollouts(prepared), *_of_cluster(prepared)])
    )


def _of_system(prepared: Prepared) -> Iterator[str]:
    system, drafts = prepared.system, prepared.drafts
    described: list[tuple[Mapping[str, Any], str]] = [(RECIPES, system.name)]
    described += [(METHODS, drafts.speculation.name)] if drafts else []
    for functions, name in described:
        if words := omitted(functions, name):
            yield f"{words} ({name})"
    if system.off_policyness != 0:
        yield "what stale tokens do to learning"


def omitted(functions: Mapping[str, Any], name: str) -> str:
    """Return what the docstring of a recipe or a method says under "Not modelled", also by naming
    another one."""
    section = re.search(
        r"Not modelled: (.+?)\.?\s*(\n\n|$)",
        documentation(functions[name]) if name in functions else "",
        re.DOTALL,
    )
    text = " ".join(section[1].split()) if section else ""
    if other := re.match(r"as (?:in )?(\w+)(?:, and the method \w+)?(?:; )?", text):
        return "; ".join(filter(None, [omitted(functions, other[1]), text[other.end() :]]))
    return "" if text.startswith("nothing") else text


def _of_rollouts(prepared: Prepared) -> Iterator[str]:
    trace, engine = prepared.trace, prepared.scenario.engine
    names, notes = set(trace.table.column_names), str(trace.metadata.notes or "").split(". ")
    yield from (
        note[0].lower() + note[1:].removesuffix(".")
        for note in notes
        if note.startswith(UNSEPARATED)
    )
    timed, divided = "environment_s" in names, "turn_environment_s" in names
    prefix, limits = trace.metadata.shared_prefix_tokens, prepared.limits
    shared = limits.prefix_caching and prefix >= limits.block_size
    uncached = prepared.system.prefix_caching and (
        not is_plain(limits) or bool(prepared.model.linear_layers)
    )
    preset = engine.preset
    name = preset if isinstance(preset, str) else (preset or {}).get("name", "")
    yield from filter(None, prepared.model.without.split("; "))
    groups = len(trace.group_starts) / len(trace.step_slices)
    siblings = prepared.drafts is not None and prepared.drafts.speculation.drafter == "siblings"
    missing = {  # what is not modelled, and whether the rollouts have it
        f"text of siblings at other workers: {prepared.workers} workers share {groups:.3g} groups of a step, and the more "
        "they are, the less there is to draft from": siblings and prepared.workers > groups,
        "the time between turns, which the trace does not have": "turn_tokens" in names
        and not (timed or divided),
        "how a response's time in its environment is divided, of which the trace has the sum": timed
        and not divided,
        f"the {prefix:,} tokens that all prompts share are found within a group alone": shared,
        "a prefix cache of layers with windows or states: engines have one, here none is used": uncached,
        "programs that are taken back from their workers: they go on as new programs": prepared.system.dispatch.programs,
        "SGLang's scheduler and radix cache: passes and blocks are vLLM's": name.startswith(
            "sglang"
        )
        and not limits.sglang,
        f"the host's work without asynchronous scheduling: {name} has its times with it": name
        in ENGINES
        and "async_scheduling" in ENGINES[name].constants
        and bool(ENGINES[name].constants["async_scheduling"].value) > engine.async_scheduling,
        "SGLang's own pool for layers with windows: they share blocks as in vLLM": limits.sglang
        and limits.window_groups > 0,
        "SGLang's scheduler beside a decoupled drafter: passes are vLLM's": limits.sglang
        and prepared.drafts is not None
        and prepared.drafts.decoupled is not None,
    }
    yield from (words for words, has in missing.items() if has)


def _of_cluster(prepared: Prepared) -> Iterator[str]:
    scenario, training, domain = (
        prepared.scenario,
        prepared.scenario.training,
        prepared.gpu.nvlink_domain,
    )
    unit, source = scenario.cluster.worker_gpus, prepared.profile.metadata.kind
    links = "latency of links" if source == "assumed" else "rate of the cluster's links"
    uneven = (
        prepared.model.experts and training.expert_parallel > 1 and training.expert_imbalance == 1
    )
    synced, lost = (
        not prepared.colocated and training.load_s is None,
        any(f.kind == "lost" for f in scenario.faults),
    )
    missing = {  # what is not modelled, and whether the cluster has it
        "experts of unequal load in training": uneven,
        "the recurrence of layers with a fixed state in training, beside their projections": training.mfu
        is None
        and prepared.model.linear_layers > 0,
        f"{links} between nodes in a forward pass ({unit} GPUs a worker)": unit > domain
        and source != "measured",
        "the lag of the balancer's counts, and the last dummy passes, of ranks in lock step": scenario.cluster.dp
        > 1,
        "contention of weight syncs for the network": synced and prepared.gpus > domain,
        "tokens that are lost with their worker, and GPUs that the trainer loses (faults)": lost,
    }
    yield from (words for words, has in missing.items() if has)
