"""Tail drafting: the drafters that freed workers may get (best-of-N), planned before anything runs.

Invariant: such a drafter works coupled, on the worker's own tp GPUs, and verifies by exact match. It is resident: the weights
of all of them are on every worker's GPUs from the start on, and the KV cache is laid out for the one that takes most a token,
so a worker changes its drafter at once; what that costs is room for requests, on all workers, all the time.

The draft ladder says how long each one's drafts are, and in which order the later form of the assignment asks for them: by the
speed-up at a batch of `most_load` and at the acceptance rate that is known of the drafter before the run. That is the
scenario's: of a model its acceptance; of the n-gram the share of positions whose next token it would draft right in responses
of typical length, by its run model. The tokens of the trace are the run's own future, so they are not looked at.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from simrl.drafting import PREDICTED_RESPONSES, Drafting, DraftPlan, plan_drafting, typical_context
from simrl.errors import InputError
from simrl.hardware import Gpu, ModelShape
from simrl.profile import TableProfile
from simrl.speculation.acceptance import ModelAcceptance
from simrl.speculation.best_of_n import BestOfN, draft_ladder, ladder_order
from simrl.speculation.draws import mixed
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.methods import Speculation, draft_model, ngram
from simrl.speculation.run_model import RunModel, draw_runs
from simrl.speculation.specactor import fit_verify
from simrl.speculation.windows import Fixed
from simrl.trace import Trace

NGRAM: Literal["ngram"] = "ngram"
MOST_WINDOW = 15  # as far as the planner of decoupled drafting looks: verifications of 16 tokens


@dataclass(frozen=True)
class TailPlan:
    """`rule` complete, the plan of each of its drafters, and what they take of every worker's GPUs, in bytes on each: beside
    the drafter that all begin with, where that is on the same GPUs."""

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
    rates = {name: _rate(plan) for name, plan in plans.items()}
    batches = sorted({1, 2, max(most // 2, 1), most})
    # As functions: to a type checker, a NamedTuple is a tuple.
    verify = [v.__call__ for v in fit_verify(profile, MOST_WINDOW + 1, batches, typical_context(trace))]
    ladder = draft_ladder({name: plan.times.draft_s for name, plan in plans.items()}, verify, most)
    windows = {}
    for i, name in enumerate(ladder.drafters):
        step = round(rates[name] * (len(ladder.acceptances) - 1))
        windows[name] = int(ladder.windows[i, step])
        plans[name] = replace(plans[name], speculation=_speculation(name, windows[name]))
    first = "none" if own is None else own.speculation.model or own.speculation.name
    order = ladder_order(ladder, rates)
    resident = own.speculation.model if own is not None and not own.draft_gpus else ""
    weight_bytes = sum(plan.weight_bytes for name, plan in plans.items() if name != resident)
    return TailPlan(
        rule=replace(rule, own=first, order=order),
        plans=plans,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=max(plan.kv_bytes_per_token for plan in plans.values()),
        facts={
            "ladder": {
                name: {
                    "acceptance": rates[name],
                    "source": _known(plans[name]).source,
                    "window": windows[name],
                    "speedup": ladder.speedup(name, rates[name]),
                }
                for name in order
            },
            "drafters": {name: plan.facts for name, plan in plans.items()},
            "weight_bytes": weight_bytes,
        },
    )


def _speculation(name: str, window: int) -> Speculation:
    if name == NGRAM:
        return ngram(Fixed(tokens=window))
    return replace(draft_model(name, Fixed(tokens=window)), exact_match=True)


def _known(plan: DraftPlan) -> ModelAcceptance | RunModel:
    """What a scenario says of a drafter."""
    return plan.acceptance or plan.inputs.runs_of(NGRAM)


def _rate(plan: DraftPlan) -> float:
    """The probability that the next token is drafted right."""
    known = _known(plan)
    if isinstance(known, ModelAcceptance):
        return known.by_position[0]
    lengths = np.full(PREDICTED_RESPONSES, max(round(known.typical_tokens), 2))
    return float((draw_runs(known, lengths, np.arange(PREDICTED_RESPONSES)).accepted > 0).mean())
