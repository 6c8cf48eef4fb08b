"""The drafters of best-of-N speculation, planned before a run: SpecActor's draft ladder (arXiv
2511.16193, §4.2).

The drafters that freed workers may get are planned before anything runs. Such a drafter works
coupled, on the worker's own tp GPUs, or decoupled on its drafter GPUs, and verifies by exact match.
It waits in the host's memory, and is loaded when a worker gets it (`simrl.simulate.specactor`).

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
    """The complete `rule`, and the plan of each of its drafters."""

    rule: BestOfN
    plans: dict[str, DraftPlan]
    facts: dict[str, Any]


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
    return TailPlan(
        rule=replace(rule, own=first, order=tuple(rungs)),
        plans=plans,
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
        },
    )


def _speculation(name: str, window: int) -> Speculation:
    if name == NGRAM:
        return ngram(Fixed(tokens=window))
    return replace(draft_model(name, Fixed(tokens=window)), exact_match=True)
