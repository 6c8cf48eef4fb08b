"""Which system, split, tensor parallelism, drafter and η to run: the best choices, why, and how sure that is.

Invariant: everything here is a pure function of the space, the goal, the number of trials and the seed; the figures are those
of simulations, never of formulas fitted to them. What was simulated is kept in a folder (`Outcomes`), so that the same question
is answered again without simulating, also after a kill.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simrl.errors import InputError
from simrl.explanation import Explanation, explain_result
from simrl.files import write_whole_file
from simrl.goal import Goal
from simrl.gpu_hours import PARTS
from simrl.launch import Launch, launch
from simrl.model_error import RATIO_ERROR, SOURCE
from simrl.outcomes import Outcomes
from simrl.points import Digests, SharedInputs, make_point
from simrl.robustness import WORDS, End, robustness
from simrl.search import Option, Searched, best_of_each, front, judged, require_choice, search
from simrl.search_space import Space
from simrl.simulate import Inputs, Prepared, prepare, simulate_prepared
from simrl.staleness_quality import BENCHMARKS, Quality, near
from simrl.staleness_quality import SOURCE as QUALITY_SOURCE
from simrl.table import assumption
from simrl.training import assumed_s

TRIALS, BEST = 200, 5
FURTHER_SEEDS = 2  # of options that are close
CLOSE = 2.0  # times the model's error: what is closer is simulated with further seeds
NEXT_BEST = 3  # options besides the best of each system that robustness looks at
MOST_PARTS = 3
Stage = Callable[[str], None]  # hears what is done now


@dataclass(frozen=True)
class Reasons:
    """Why an option takes what it takes: GPUs by use, parts of its GPU time (part, words, share) beyond what an ideal run has,
    the largest first, what its updates waited for (kind, share of the critical paths), and what is known to go wrong. `drafts`
    says what its acceptance rests on."""

    rollout_workers: int
    rollout_gpus: int
    train_gpus: int
    colocated: bool
    drafter: str
    drafts: str
    ideal_share: float
    parts: tuple[tuple[str, str, float], ...]
    waits: tuple[tuple[str, float], ...]
    findings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Choice:
    """One of the best few: its rank among all that were tried, its reasons, by how much the choice leads it (0 of the choice
    itself), over each seed that was simulated, whether that is less than the model's own error, and the best variant of the
    same system with how much less merit that has."""

    rank: int
    option: Option
    reasons: Reasons
    leads: tuple[float, ...]
    tied: bool
    variant: Option | None
    variant_loss: float


@dataclass(frozen=True)
class Launching:
    """The settings of the choice, or why no framework has it, and then the best option that one has, by its rank."""

    settings: Launch | None
    refused: str
    rank: int
    option: Option


@dataclass(frozen=True)
class Optimization:
    """The answer. `searched` has every option; `front` those that none beats in throughput, staleness and cost at a time."""

    name: str
    goal: Goal
    space: Space
    searched: Searched
    best: tuple[Choice, ...]
    front: tuple[Option, ...]
    within_error: int
    robustness: tuple[End, ...]
    quality: tuple[Quality, ...]
    launching: Launching
    rests_on: tuple[str, ...]

    @property
    def choice(self) -> Choice:
        return self.best[0]

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`; the keys are stable."""
        return {
            "name": self.name,
            "goal": {**asdict(self.goal), "words": self.goal.words},
            "space": list(self.space.asked),
            "notes": list(self.space.notes),
            "points": self.searched.points,
            "possible": len(self.searched.options),
            "within_limits": len(self.searched.allowed),
            "whole_space": self.searched.whole,
            "combinations": self.searched.combinations,
            "left_out": [{"reason": reason, "points": count} for reason, count in self.searched.reasons()],
            "best": [self._choice_json(choice) for choice in self.best],
            "front": [_option_json(option) for option in self.front],
            "model_error": {"ratio": RATIO_ERROR, "source": SOURCE, "options_within": self.within_error},
            "robustness": [_end_json(end) for end in self.robustness],
            "staleness_quality": {
                "source": QUALITY_SOURCE,
                "benchmarks": list(BENCHMARKS),
                "rows": [{**row._asdict(), "eta": None if math.isinf(row.eta) else row.eta} for row in self.quality],
            },
            "launch": self._launch_json(),
            "rests_on": list(self.rests_on),
        }

    def _choice_json(self, choice: Choice) -> dict[str, Any]:
        return {
            "rank": choice.rank,
            **_option_json(choice.option),
            "seconds": self.goal.seconds(choice.option.row) or None,
            "cost": self.goal.cost(choice.option.row) or None,
            "leads": list(choice.leads),
            "tied": choice.tied,
            "reasons": asdict(choice.reasons),
            "variant": _option_json(choice.variant) if choice.variant else None,
            "variant_loss": choice.variant_loss,
        }

    def _launch_json(self) -> dict[str, Any]:
        settings = asdict(self.launching.settings) if self.launching.settings else None
        return {
            "rank": self.launching.rank,
            "system": self.launching.option.row["system"],
            "hash": self.launching.option.point.hash,
            "refused": self.launching.refused or None,
            "settings": settings,
        }


def _option_json(option: Option) -> dict[str, Any]:
    cluster = option.point.scenario.cluster
    return {
        "hash": option.point.hash,
        "tp": cluster.tp,
        "cluster_gpus": cluster.gpus,
        "merit": option.merit,
        **option.row,
    }


def _end_json(end: End) -> dict[str, Any]:
    flip = end.flip
    return {
        "source": end.source,
        "what": WORDS[end.source],
        "factor": end.factor,
        "winner": end.winner.point.hash if end.winner else None,
        "winner_system": end.winner.row["system"] if end.winner else None,
        "lead": None if math.isinf(end.lead) else end.lead,
        "flip": {"holds": flip.holds, "flips": flip.flips, "winner": flip.winner.point.hash} if flip else None,
        "untried": dict(end.untried),
        "keeps_limits": end.kept,
    }


def optimization(
    space: Space,
    goal: Goal,
    outcomes: Outcomes,
    *,
    trials: int = TRIALS,
    seed: int = 0,
    best: int = BEST,
    robust: bool = True,
    inputs: Inputs | None = None,
    on_stage: Stage = lambda _: None,
) -> Optimization:
    """Searches and looks at the best few. Raises `InputError`, with the reasons, where nothing keeps the limits."""
    inputs = inputs or SharedInputs()
    on_stage("points simulated")
    searched = search(space, goal, outcomes, trials, seed)
    require_choice(searched)
    allowed = searched.allowed
    few = best_of_each(allowed, best)
    on_stage("reasons of the best")
    reasons = [_reasons(option, outcomes.folder, inputs) for option in few]
    on_stage("further seeds of what is close")
    leads = _leads(few, goal, outcomes)
    on_stage("other step times, training and acceptance")
    tested = list({o.point.hash: o for o in [*few, *allowed[:NEXT_BEST]]}.values())
    ends = robustness(tested, goal, outcomes) if robust else []
    winner = few[0]
    choices = []
    for option, why, lead in zip(few, reasons, leads, strict=True):
        variant = next((o for o in allowed if o.system == option.system and o is not option), None)
        choices.append(
            Choice(
                rank=1 + next(i for i, other in enumerate(allowed) if other is option),
                option=option,
                reasons=why,
                leads=lead,
                tied=option is not winner and min(lead) < RATIO_ERROR,
                variant=variant,
                variant_loss=option.merit / variant.merit - 1 if variant else 0.0,
            )
        )
    prepared = prepare(winner.point.scenario, inputs)
    return Optimization(
        name=winner.point.scenario.name,
        goal=goal,
        space=space,
        searched=searched,
        best=tuple(choices),
        front=tuple(front(allowed)),
        within_error=sum(winner.merit / option.merit - 1 < RATIO_ERROR for option in allowed[1:]),
        robustness=tuple(ends),
        quality=tuple(near([_staleness(option) for option in few])),
        launching=_launching(allowed, inputs),
        rests_on=tuple(_rests_on(prepared)),
    )


def _staleness(option: Option) -> float:
    """The bound that stands for a choice in AReaL's table: its η, or the oldest token that it trained."""
    system = option.point.scenario.system
    eta = system.parameters.get("eta") if system.name == "areal" else None
    return float(eta if eta is not None else option.row["off_policyness_max"])


def _leads(few: Sequence[Option], goal: Goal, outcomes: Outcomes) -> list[tuple[float, ...]]:
    """By how much the first leads each, and where that is close, with further seeds, too."""
    first = few[0]
    close = [o for o in few[1:] if first.merit / o.merit - 1 < CLOSE * RATIO_ERROR]
    digests = Digests()
    merits: dict[str, dict[int, float]] = {option.point.hash: {0: option.merit} for option in few}
    asked = [first, *close] if close else []
    for i in range(1, FURTHER_SEEDS + 1):
        scenarios = [o.point.scenario.model_copy(update={"seed": o.point.scenario.seed + i}) for o in asked]
        points = [make_point(scenario, digests) for scenario in scenarios]
        for option, point, outcome in zip(asked, points, outcomes.of(points), strict=True):
            if "row" in outcome:
                merits[option.point.hash][i] = judged(point, outcome, goal).merit
    own = merits[first.point.hash]
    return [tuple(own[i] / merit - 1 for i, merit in merits[o.point.hash].items() if i in own) for o in few]


def _reasons(option: Option, folder: Path, inputs: Inputs) -> Reasons:
    """Simulated once more, with all its tables; kept in the folder, too."""
    path = folder / "reasons" / f"{option.point.hash}.json"
    try:
        return _from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    prepared = prepare(option.point.scenario, inputs)
    found = _of_explanation(prepared, explain_result(simulate_prepared(prepared)))
    with write_whole_file(path) as temporary:
        temporary.write_text(json.dumps(asdict(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return found


def _from_json(data: dict[str, Any]) -> Reasons:
    listed = {key: tuple(map(tuple, data[key])) for key in ("parts", "waits", "findings")}
    return Reasons(**{**data, **listed})


def _of_explanation(prepared: Prepared, explained: Explanation) -> Reasons:
    fall = explained.steady
    total = fall.total_gpu_s
    losses = {key: value for key, value in fall.gpu_s.items() if not PARTS[key].ideal and value > 0.005 * total}
    largest = sorted(losses, key=lambda key: -losses[key])[:MOST_PARTS]
    waited = sum(explained.paths_s.values())
    drafts = prepared.drafts
    return Reasons(
        rollout_workers=prepared.workers,
        rollout_gpus=prepared.workers * prepared.gpus_per_worker,
        train_gpus=prepared.train_gpus,
        colocated=prepared.colocated,
        drafter=drafts.speculation.name if drafts else "none",
        drafts=_basis(prepared),
        ideal_share=sum(value for key, value in fall.gpu_s.items() if PARTS[key].ideal) / total,
        parts=tuple((key, PARTS[key].clause, losses[key] / total) for key in largest),
        waits=tuple((kind, s / waited) for kind, s in list(explained.paths_s.items())[:MOST_PARTS] if waited),
        findings=tuple((finding.name, finding.says) for finding in explained.findings),
    )


def _basis(prepared: Prepared) -> str:
    """What the acceptance of drafts rests on: counted, or the kind of what was given."""
    if prepared.drafts is None:
        return ""
    acceptance = prepared.drafts.facts["acceptance"]
    return "counted on tokens" if isinstance(acceptance, str) else str(acceptance["kind"])


def _launching(allowed: Sequence[Option], inputs: Inputs) -> Launching:
    """The choice's, or the best that a framework has."""
    refused: dict[tuple[str, Any], str] = {}
    for rank, option in enumerate(allowed, start=1):
        kind = option.system, str(option.point.scenario.system.parameters.get("speculation"))
        if kind in refused:
            continue
        found = launch(prepare(option.point.scenario, inputs))
        if isinstance(found, Launch):
            return Launching(found, next(iter(refused.values()), ""), rank, option)
        refused[kind] = found.reason
    return Launching(None, next(iter(refused.values())), 1, allowed[0])


def _rests_on(prepared: Prepared) -> list[str]:
    """Where the inputs come from."""
    trace, profile = prepared.trace.metadata, prepared.profile.metadata
    training = prepared.scenario.training
    assumed = assumed_s(training.model_dump(), prepared.colocated)
    return [
        f"rollouts: {trace.name}" + (f", {trace.kind}" if trace.kind != trace.name else ""),
        f"step times: {profile.model} on {profile.gpu}, {profile.kind} ({profile.source})",
        f"training at {training.mfu:.0%} of the GPU's peak: an input, assumed until you measure it (training.mfu)",
        *([assumption(assumed)] if assumed else []),
    ]


def write_optimization(found: Optimization, folder: Path) -> None:
    """The answer as optimize.json, beside the points that it was found in."""
    with write_whole_file(folder / "optimize.json") as temporary:
        temporary.write_text(json.dumps(found.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def require_trials(trials: int, best: int) -> None:
    """Raises `InputError` for numbers with which nothing can be chosen."""
    if trials < best:
        raise InputError(f"--trials {trials}: fewer than the {best} that are to be told (--best)")
