"""The drafters of best-of-N speculation, planned before a run: SpecActor's draft ladder (arXiv
2511.16193, §4.2).

The drafters that freed workers may get are planned before anything runs. Such a drafter works
coupled, on the worker's own tp GPUs, or decoupled on its drafter GPUs, and verifies by exact match.
It is resident: the weights of all drafters are there from the start, and the KV cache is laid out
for the one that takes most a token, so a worker changes its drafter at once; the price is room for
requests.

The draft ladder gives each drafter's window where it is coupled, and their order by the speed-up at
a batch of `most_load` and at the acceptance rate known before the run, which is the scenario's: of
a model its acceptance; of the n-gram the share of positions whose next token it would draft right
in responses of mean length, by its run model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from simrl.errors import InputError
from simrl.speculation.best_of_n import BestOfN
from simrl.speculation.deployment import Deployment, typical_context_tokens
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.methods import NGRAM, Speculation, draft_model, ngram
from simrl.speculation.plan import DraftPlan, plan_drafting, token_rate
from simrl.speculation.specactor import MOST_WINDOW, draft_ladder, fit_verify, ladder_order
from simrl.speculation.windows import Fixed


@dataclass(frozen=True)
class TailPlan:
    """The complete `rule`, the plan of each of its drafters, and the bytes that they take of each
    GPU of a worker, without the drafter that all begin with."""

    rule: BestOfN
    plans: dict[str, DraftPlan]
    weight_bytes: float
    kv_bytes_per_token: float
    facts: dict[str, Any]

    def fetching(self, share: float) -> TailPlan:
        """Return the plan of duplicates that fetch this share of their KV cache."""
        return replace(self, rule=replace(self.rule, fetched_share=share))


def plan_tail(
    rule: BestOfN,
    initial: DraftPlan | None,
    inputs: SpeculationInputs,
    deployment: Deployment,
    gpus: int,
) -> TailPlan:
    """Plan the drafters of freed workers; `initial` is the drafter that all workers begin with.
    Raise `InputError` if it does not verify by exact match, for a drafter that is named twice or
    unknown, and as `plan_drafting` does."""
    if (
        initial is not None
        and initial.speculation.drafter == "model"
        and not initial.speculation.exact_match
    ):
        raise InputError(
            f"speculation {initial.speculation.name}: with best_of_n, requests run with several drafters, which must verify by "
            "exact match, and this method does not; set best_of_n to false, or use specactor's"
        )
    for i, name in enumerate(rule.drafters):
        if name in rule.drafters[:i]:
            raise InputError(f"best_of_n: drafter {name!r} is named twice; name each once")
    profile = deployment.profile
    most = int(min(rule.most_load, profile.tables.decode_sequences[-1]))
    apart = (
        initial.speculation.decoupled
        if initial is not None and rule.copies == "decoupled"
        else None
    )
    plans = {
        name: plan_drafting(_speculation(name, 1), inputs, deployment, gpus)
        for name in rule.drafters
    }
    rates = {name: token_rate(plan, deployment.trace) for name, plan in plans.items()}
    batches = sorted({1, 2, max(most // 2, 1), most})
    # As functions: to a type checker, a NamedTuple is a tuple.
    kv_tokens = typical_context_tokens(deployment.trace)
    verify = [v.__call__ for v in fit_verify(profile, MOST_WINDOW + 1, batches, kv_tokens)]
    ladder = draft_ladder({name: plan.times.draft_s for name, plan in plans.items()}, verify, most)
    windows = {}
    for i, name in enumerate(ladder.drafters):
        step = round(rates[name] * (len(ladder.acceptances) - 1))
        windows[name] = int(ladder.windows[i, step])
        plans[name] = replace(plans[name], speculation=_speculation(name, windows[name]))
        if apart is not None and initial is not None and not apart.in_turns and name != NGRAM:
            beside = replace(apart, draft_gpus=initial.draft_gpus, window=None, requests=most)
            ahead = replace(initial.speculation, model=name, candidates=(), decoupled=beside)
            plans[name] = plan_drafting(ahead, inputs, deployment, gpus)
    first = "none" if initial is None else initial.speculation.model or initial.speculation.name
    if initial is not None and initial.speculation.drafter == "ngram":
        first = NGRAM
    order = ladder_order(ladder, rates)
    resident = initial.speculation.model if initial is not None and not initial.draft_gpus else ""
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
                    "source": (plans[name].acceptance or inputs.runs_of(NGRAM)).source,
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
