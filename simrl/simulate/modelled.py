"""What a scenario has that is not modelled, in words; `docs/modelled.md` has all of it, by part.

Invariant: every entry stands for something that the scenario has: its system, its trace, its engine, its cluster, its faults.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from simrl.engine.requests import is_plain
from simrl.speculation.methods import METHODS
from simrl.systems.recipes import RECIPES
from simrl.trace.trace import UNSEPARATED

if TYPE_CHECKING:
    from simrl.simulate.prepare import Prepared


def not_modelled(prepared: Prepared) -> list[str]:
    """Return what a prepared scenario has that is not modelled, each in a few words."""
    return list(dict.fromkeys([*_of_system(prepared), *_of_rollouts(prepared), *_of_cluster(prepared)]))


def _of_system(prepared: Prepared) -> Iterator[str]:
    system, drafts = prepared.system, prepared.drafts
    known: list[tuple[Mapping[str, Any], str]] = [(RECIPES, system.name)]
    known += [(METHODS, drafts.speculation.name)] if drafts else []
    for functions, name in known:
        if found := omitted(functions, name):
            yield f"{found} ({name})"
    if system.off_policyness != 0:
        yield "what stale tokens do to learning"


def omitted(functions: Mapping[str, Any], name: str) -> str:
    """Return what the docstring of a recipe or a method says under "Not modelled", also by naming another one."""
    found = re.search(r"Not modelled: (.+?)\.?\s*(\n\n|$)", inspect.getdoc(functions.get(name)) or "", re.DOTALL)
    text = " ".join(found[1].split()) if found else ""
    if other := re.match(r"as (?:in )?(\w+)(?:, and the method \w+)?(?:; )?", text):
        return "; ".join(filter(None, [omitted(functions, other[1]), text[other.end() :]]))
    return "" if text.startswith("nothing") else text


def _of_rollouts(prepared: Prepared) -> Iterator[str]:
    trace, engine = prepared.trace, prepared.scenario.engine.preset
    names, notes = set(trace.table.column_names), str(trace.metadata.notes or "").split(". ")
    yield from (said[0].lower() + said[1:].removesuffix(".") for said in notes if said.startswith(UNSEPARATED))
    if "turn_tokens" in names and not names & {"environment_s", "turn_environment_s"}:
        yield "the time between turns, which the trace does not have"
    elif "environment_s" in names and "turn_environment_s" not in names:
        yield "how a response's time in its environment is divided, of which the trace has the sum"
    if trace.metadata.shared_prefix_tokens >= prepared.limits.block_size and prepared.limits.prefix_caching:
        yield f"the {trace.metadata.shared_prefix_tokens:,} tokens that all prompts share are found within a group alone"
    if not is_plain(prepared.limits) and prepared.system.prefix_caching:
        yield "a prefix cache of layers with windows or states: vLLM has one, here none is used"
    if (engine if isinstance(engine, str) else (engine or {}).get("name", "")).startswith("sglang"):
        yield "SGLang's scheduler and radix cache: passes and blocks are vLLM's"


def _of_cluster(prepared: Prepared) -> Iterator[str]:
    scenario, training = prepared.scenario, prepared.scenario.training
    if prepared.model.experts and training.expert_parallel > 1 and training.expert_imbalance == 1:
        yield "experts of unequal load in training"
    source = prepared.profile.metadata.kind
    if scenario.cluster.worker_gpus > prepared.gpu.nvlink_domain and source != "measured":
        what = "latency of links" if source == "assumed" else "rate of the cluster's links"
        yield f"{what} between nodes in a forward pass ({scenario.cluster.worker_gpus} GPUs a worker)"
    if scenario.cluster.dp > 1:
        yield "the lag of the balancer's counts, and the last dummy passes, of ranks in lock step"
    if not prepared.colocated and prepared.gpus > prepared.gpu.nvlink_domain and training.load_s is None:
        yield "contention of weight syncs for the network"
    if any(fault.kind == "lost" for fault in scenario.faults):
        yield "tokens that are lost with their worker, and GPUs that the trainer loses (faults)"
