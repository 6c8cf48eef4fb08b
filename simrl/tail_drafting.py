"""Tail drafting: the drafters that freed workers may get (best-of-N), planned before anything runs.

Invariant: such a drafter works coupled, on the worker's own tp GPUs, and verifies by exact match. It is resident: the weights
of all of them are on every worker's GPUs from the start on, and the KV cache is laid out for the one that takes most a token,
so a worker changes its drafter at once; what that costs is room for requests, on all workers, all the time.

The draft ladder says how long each one's drafts are, and in which order the later form of the assignment asks for them: by the
speed-up at a batch of `most_load` and at the acceptance rate that is known of the drafter before the run. That is a model's
input, and of a text drafter the share of positions, in the first step of the trace, whose next token it would draft right.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from simrl.drafting import Drafting, DraftPlan, plan_drafting, text_runs, typical_context
from simrl.errors import InputError
from simrl.hardware import Gpu, ModelShape
from simrl.profile import TableProfile
from simrl.speculation.best_of_n import BestOfN, draft_ladder, ladder_order
from simrl.speculation.draws import mixed
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.methods import Speculation, draft_model, ngram
from simrl.speculation.specactor import fit_verify
from simrl.speculation.windows import Fixed
from simrl.trace import Trace

NGRAM = "ngram"
Seconds = Callable[[int], float]
MOST_WINDOW = 15  # as far as the planner of decoupled drafting looks: verifications of 16 tokens


@dataclass(frozen=True)
class TailPlan:
    """`rule` complete, the plan of each of its drafters, and what they take of every worker's GPUs, in bytes on each."""

    rule: BestOfN
    plans: dict[str, DraftPlan]
    weight_bytes: float
    kv_bytes_per_token: float
    facts: dict[str, Any]

    def drafters(self, trace: Trace, profile: TableProfile, max_num_seqs: int, seed: int) -> dict[str, Drafting]:
        """By name, for all workers of a simulation. A request's luck with one drafter says nothing of its luck with another;
        with the drafter that all began with, it is the same on whatever worker."""
        made = {}
        for name, plan in self.plans.items():
            own = seed if name == self.rule.own else int(mixed(seed, zlib.crc32(name.encode())))
            made[name] = Drafting(plan, trace, profile, max_num_seqs, own)
        return made


def plan_tail(
    rule: BestOfN,
    own: DraftPlan | None,
    inputs: SpeculationInputs,
    trace: Trace,
    profile: TableProfile,
    target: ModelShape,
    gpu: Gpu,
    tp: int,
    gpus: int,
) -> TailPlan:
    """`own` is the plan of the drafter that all workers begin with. Raises `InputError` where that does not verify by exact
    match, for a drafter that is there twice or unknown, and as `plan_drafting` does."""
    if own is not None and own.speculation.drafter == "model" and not own.speculation.exact_match:
        raise InputError(
            f"speculation {own.speculation.name}: with best_of_n, requests run with several drafters, which must verify by "
            "exact match, and this method does not; set best_of_n to false, or use specactor's"
        )
    for i, name in enumerate(rule.drafters):
        if name in rule.drafters[:i]:
            raise InputError(f"best_of_n: drafter {name!r} is there twice; name each once")
    most = int(min(rule.most_load, profile.tables.decode_sequences[-1]))
    plans = {
        name: plan_drafting(_speculation(name, 1), inputs, trace, profile, target, gpu, tp, gpus)
        for name in rule.drafters
    }
    rates = {name: _rate(plan, inputs, trace) for name, plan in plans.items()}
    batches = sorted({1, 2, max(most // 2, 1), most})
    # As functions: to a type checker, a NamedTuple is a tuple.
    verify = [v.__call__ for v in fit_verify(profile, MOST_WINDOW + 1, batches, typical_context(trace))]
    ladder = draft_ladder({name: _draft_s(plan) for name, plan in plans.items()}, verify, most)
    windows = {}
    for i, name in enumerate(ladder.drafters):
        step = round(rates[name] * (len(ladder.acceptances) - 1))
        windows[name] = int(ladder.windows[i, step])
        plans[name] = replace(plans[name], speculation=_speculation(name, windows[name]))
    first = "none" if own is None else own.speculation.model or own.speculation.name
    order = ladder_order(ladder, rates)
    resident = own.speculation.model if own is not None and not own.draft_gpus else ""
    return TailPlan(
        rule=replace(rule, own=first, order=order),
        plans=plans,
        weight_bytes=sum(plan.weight_bytes for name, plan in plans.items() if name != resident),
        kv_bytes_per_token=max(plan.kv_bytes_per_token for plan in plans.values()),
        facts={
            "ladder": {
                name: {
                    "acceptance": rates[name],
                    "window": windows[name],
                    "speedup": ladder.speedup(name, rates[name]),
                }
                for name in order
            },
            "drafters": {name: plan.facts for name, plan in plans.items()},
            "weight_bytes": sum(plan.weight_bytes for plan in plans.values()),
        },
    )


def _speculation(name: str, window: int) -> Speculation:
    if name == NGRAM:
        return ngram(Fixed(tokens=window))
    return replace(draft_model(name, Fixed(tokens=window)), exact_match=True)


def _draft_s(plan: DraftPlan) -> Seconds:
    return lambda sequences: plan.times.draft_s(sequences, 1)


def _rate(plan: DraftPlan, inputs: SpeculationInputs, trace: Trace) -> float:
    if plan.acceptance is not None:
        return plan.acceptance.by_position[0]
    _, first, end = trace.step_slices[0]
    step = Trace(trace.table.slice(first, end - first), trace.metadata)
    runs = text_runs(plan.speculation, inputs, step, 0)
    return float((runs.accepted > 0).mean()) if runs.accepted.size else 0.0
