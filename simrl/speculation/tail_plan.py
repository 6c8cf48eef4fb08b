"""The drafters of best-of-N speculation, planned before a run: SpecActor's draft ladder (arXiv
2511.16193, §4.2).

The drafters that freed workers may get are planned before anything runs. Such a drafter works
coupled, on the worker's own tp GPUs, or decoupled on its drafter GPUs, and verifies by exact match.
It is resident: the weights of all drafters are there from the start, and the KV cache is laid out
for the one that takes most a token, so a worker changes its drafter at once; the price is room for
requests.

The draft ladder (`rungs_of`) gives each drafter's window where it is coupled, and their order by the
speed-up at a batch of `most_load` and at the acceptance rate known before the run, which is the
scenario's: of a model its acceptance; of the n-gram the share of positions whose next token it
would draft right in responses of mean length, by its run model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from simrl.errors import InputError
from simrl.speculation.best_of_n import BestOfN
from simrl.speculation.deployment import Deployment
from simrl.speculation.inputs import SpeculationInputs
from simrl.speculation.methods import NGRAM, Speculation, draft_model, ngram
from simrl.speculation.plan import DraftPlan, plan_drafting, rungs_of
from simrl.speculation.specactor import MOST_WINDOW
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
    if apart is not None and initial is not None and not apart.in_turns:
        beside = replace(apart, draft_gpus=initial.draft_gpus, window=None, requests=most)
        for name in (name for name in rule.drafters if name != NGRAM):
            ahead = replace(initial.speculation, model=name, candidates=(), decoupled=beside)
            plans[name] = plan_drafting(ahead, inputs, deployment, gpus)
    rungs = rungs_of(plans, deployment, most, range(1, MOST_WINDOW + 1))
    for name, rung in rungs.items():
        if plans[name].decoupled is None:
            plans[name] = replace(plans[name], speculation=_speculation(name, rung.window))
    first = "none" if initial is None else initial.speculation.model or initial.speculation.name
    if initial is not None and initial.speculation.drafter == "ngram":
        first = NGRAM
    resident = initial.speculation.model if initial is not None and not initial.draft_gpus else ""
    weight_bytes = sum(plan.weight_bytes for name, plan in plans.items() if name != resident)
    return TailPlan(
        rule=replace(rule, own=first, order=tuple(rungs)),
        plans=plans,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=max(plan.kv_bytes_per_token for plan in plans.values()),
        facts={
            "ladder": {
                name: {
                    "acceptance": rung.acceptance,
                    "source": (plans[name].acceptance or inputs.runs_of(NGRAM)).source,
                    "window": rung.window,
                    "speedup": rung.speedup,
                }
                for name, rung in rungs.items()
            },
            "drafters": {name: plan.facts for name, plan in plans.items()},
            "weight_bytes": weight_bytes,
        },
    )


def _speculation(name: str, window: int) -> Speculation:
    if name == NGRAM:
        return ngram(Fixed(tokens=window))
    return replace(draft_model(name, Fixed(tokens=window)), exact_match=True)
