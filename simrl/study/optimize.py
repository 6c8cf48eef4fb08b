"""Which system, split, tensor parallelism, drafter and η to run: the best choices, why, and how sure that is.

Invariant: everything here is a pure function of the space, the goal, the number of trials and the seed; figures come from
simulations, never from formulas fitted to them. Simulated points are kept in a folder (`Outcomes`), so that a repeated
question is answered without simulating, also after a kill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from simrl.analysis.explanation import explain_result
from simrl.analysis.gpu_hours import PARTS
from simrl.errors import InputError
from simrl.scenario.presets import known_fields
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate_prepared
from simrl.study.executors import inputs_of_this_process
from simrl.study.goal import Goal
from simrl.study.launch import Launch, launch
from simrl.study.model_error import RATIO_ERROR, SOURCE
from simrl.study.point import Digests, make_point
from simrl.study.polish import polish
from simrl.study.robustness import ENDS, WORDS, End, most_points, robustness
from simrl.study.search import Option, Searched, best_of_each, front, judged, require_choice, search
from simrl.study.search_space import Space
from simrl.study.staleness_quality import BENCHMARKS, Quality, near
from simrl.study.staleness_quality import SOURCE as QUALITY_SOURCE
from simrl.study.store import Outcomes, write_json
from simrl.training.config import assumed_s, assumption, trained_by

FURTHER_SEEDS = 2  # of options that are close
CLOSE = 2.0  # times the model's error: options closer than this are simulated with further seeds
NEXT_BEST = 3  # further options that robustness looks at, with the best of each system
MOST_PARTS = 3
OnPhase = Callable[[str, int], None]


@dataclass(frozen=True)
class Reasons:
    """Why an option takes its time: GPUs by use, parts of its GPU time (part, words, share) beyond those of an ideal run, the
    largest first, waits of its updates (kind, share of the critical paths), and known signs of trouble. `drafts` says what
    its acceptance rests on."""

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
    """One of the best few: its rank among all that were tried, its reasons, the lead of the choice over it (0 of the choice
    itself) under each seed that was simulated, whether that is below the model's own error, and the best variant of its
    system with the loss of merit there."""

    rank: int
    option: Option
    reasons: Reasons
    leads: tuple[float, ...]
    tied: bool
    variant: Option | None
    variant_loss: float


@dataclass(frozen=True)
class Launching:
    """The settings of the choice, or why no framework has it, and then the best option that one has, with its rank."""

    settings: Launch | None
    refused: str
    rank: int
    option: Option


class Polished(NamedTuple):
    """The points tried around the best of each system, and whether no neighbour of these is better."""

    points: int
    ended: bool


@dataclass(frozen=True)
class Optimization:
    """The answer. `searched` has every option; `front` those that none beats in throughput, staleness and cost at once."""

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
    polished: Polished | None = None

    @property
    def choice(self) -> Choice:
        return self.best[0]

    def as_json(self) -> dict[str, Any]:
        """Return the data of `--json`; the keys are stable."""
        launching = self.launching
        return {
            "name": self.name,
            "goal": {**asdict(self.goal), "words": self.goal.words},
            "space": self.space.asked,
            "notes": self.space.notes,
            "points": self.searched.points,
            "polished": self.polished._asdict() if self.polished else None,
            "possible": len(self.searched.options),
            "within_limits": len(self.searched.allowed),
            "simulated_of_systems": self.searched.simulated(self.space),
            "whole_space": self.searched.whole,
            "combinations": self.searched.combinations,
            "left_out": [{"reason": reason, "points": count} for reason, count in self.searched.reasons()],
            "best": [self._choice_json(choice) for choice in self.best],
            "front": [_option_json(option) for option in self.front],
            "model_error": {"ratio": RATIO_ERROR, "source": SOURCE, "options_within": self.within_error},
            "robustness": [_end_json(end) for end in self.robustness],
            "staleness_quality": {
                "source": QUALITY_SOURCE,
                "benchmarks": BENCHMARKS,
                "rows": [{**row._asdict(), "eta": _finite(row.eta)} for row in self.quality],
            },
            "launch": {
                "rank": launching.rank,
                "system": launching.option.row["system"],
                "hash": launching.option.point.hash,
                "refused": launching.refused or None,
                "settings": asdict(launching.settings) if launching.settings else None,
            },
            "rests_on": self.rests_on,
        }

    def _choice_json(self, choice: Choice) -> dict[str, Any]:
        return {
            "rank": choice.rank,
            **_option_json(choice.option),
            "seconds": self.goal.seconds(choice.option.row) or None,
            "cost": self.goal.cost(choice.option.row) or None,
            "leads": choice.leads,
            "tied": choice.tied,
            "reasons": asdict(choice.reasons),
            "variant": _option_json(choice.variant) if choice.variant else None,
            "variant_loss": choice.variant_loss,
        }


def _option_json(option: Option) -> dict[str, Any]:
    cluster = option.point.scenario.cluster
    own = {"hash": option.point.hash, "tp": cluster.tp, "cluster_gpus": cluster.gpus, "merit": option.merit}
    return {**own, **option.row}


def _end_json(end: End) -> dict[str, Any]:
    flip = end.flip
    return {
        "source": end.source,
        "what": WORDS[end.source],
        "factor": end.factor,
        "winner": end.winner.point.hash if end.winner else None,
        "winner_system": end.winner.row["system"] if end.winner else None,
        "lead": _finite(end.lead),
        "flip": {"holds": flip.holds, "flips": flip.flips, "winner": flip.winner.point.hash} if flip else None,
        "rival": end.rival.point.hash if end.rival else None,
        "rival_system": end.rival.row["system"] if end.rival else None,
        "untried": end.untried,
        "keeps_limits": end.kept,
    }


def _finite(number: float) -> float | None:
    return None if math.isinf(number) else number


def optimization(
    space: Space,
    goal: Goal,
    outcomes: Outcomes,
    trials: int,
    seed: int = 0,
    best: int = 5,
    robust: Collection[str] = tuple(ENDS),
    polished: int = 0,
    framework: str | None = None,
    on_phase: OnPhase = lambda *_: None,
) -> Optimization:
    """Search, polish with at most `polished` further points, and analyse the best few. Raise `InputError`, with the reasons,
    where nothing keeps the limits. `robust` are the sources of error to vary; `framework` is the one that launch
    settings are for (None: the best choice's); `on_phase` is
    called with the name of each phase and the most points that it simulates, when it begins."""
    inputs = InputCache()
    on_phase("points simulated", trials)
    searched = search(space, goal, outcomes, trials, seed)
    tried = searched.points
    if polished:
        on_phase("points polished", polished)
        ended = polish(space, goal, outcomes, searched, polished)
    require_choice(searched)
    allowed = searched.allowed
    few = best_of_each(allowed, best)
    on_phase("reasons of the best", len(few))
    reasons = outcomes.each(partial(reasons_of, outcomes.folder), few)
    close = [o for o in few[1:] if few[0].merit / o.merit - 1 < CLOSE * RATIO_ERROR]
    on_phase("further seeds of what is close", FURTHER_SEEDS * (1 + len(close)) if close else 0)
    leads = _leads(few, close, goal, outcomes)
    tested = list({o.point.hash: o for o in [*few, *allowed[:NEXT_BEST]]}.values())
    on_phase("other step times, training and acceptance", most_points(robust, len(tested)))
    ends = robustness(tested, goal, outcomes, robust)
    winner = few[0]
    choices = []
    for option, why, lead in zip(few, reasons, leads, strict=True):
        variant = next((o for o in allowed if o.system == option.system and o is not option), None)
        loss = option.merit / variant.merit - 1 if variant else 0.0
        tied = option is not winner and min(lead) < RATIO_ERROR
        choices.append(Choice(1 + allowed.index(option), option, why, lead, tied, variant, loss))
    return Optimization(
        name=winner.point.scenario.name,
        goal=goal,
        space=space,
        searched=searched,
        best=tuple(choices),
        front=tuple(front(allowed)),
        within_error=sum(winner.merit / option.merit - 1 < RATIO_ERROR for option in allowed[1:]),
        robustness=tuple(ends),
        quality=tuple(near([staleness_bound(option) for option in few])),
        launching=_launching(allowed, inputs, framework),
        polished=Polished(searched.points - tried, ended) if polished else None,
        rests_on=tuple(_rests_on(prepare(winner.point.scenario, inputs))),
    )


def staleness_bound(option: Option) -> float:
    """Return the bound that stands for a choice in AReaL's table: its η, or the age of the oldest token that it trained."""
    system = option.point.scenario.system
    eta = system.parameters.get("eta") if system.name == "areal" else None
    return float(eta if eta is not None else option.row["off_policyness_max"])


def _leads(few: Sequence[Option], close: Sequence[Option], goal: Goal, outcomes: Outcomes) -> list[tuple[float, ...]]:
    """Return the lead of the first option over each, and with further seeds over those that are close."""
    first = few[0]
    digests = Digests()
    merits: dict[str, dict[int, float]] = {option.point.hash: {0: option.merit} for option in few}
    for i in range(1, FURTHER_SEEDS + 1) if close else ():
        scenarios = [o.point.scenario for o in (first, *close)]
        points = [make_point(s.model_copy(update={"seed": s.seed + i}), digests) for s in scenarios]
        for option, point, outcome in zip((first, *close), points, outcomes.of(points), strict=True):
            if "row" in outcome:
                merits[option.point.hash][i] = judged(point, outcome, goal).merit
    own = merits[first.point.hash]
    return [tuple(own[i] / merit - 1 for i, merit in merits[o.point.hash].items() if i in own) for o in few]


def reasons_of(folder: Path, option: Option) -> Reasons:
    """Simulate an option once more, with all its tables, and keep its reasons in the folder."""
    path = folder / "reasons" / f"{option.point.hash}.json"
    with suppress(OSError, ValueError):
        return TypeAdapter(Reasons).validate_json(path.read_bytes())
    prepared = prepare(option.point.scenario, inputs_of_this_process())
    explained = explain_result(simulate_prepared(prepared))
    gpu_s, total = explained.steady.gpu_s, explained.steady.total_gpu_s
    losses = [(key, s / total) for key, s in gpu_s.items() if not PARTS[key].ideal and s > 0.005 * total]
    largest = sorted(losses, key=lambda loss: -loss[1])[:MOST_PARTS]
    waited = sum(explained.paths_s.values())
    drafts = prepared.drafts
    acceptance = drafts.facts["acceptance"] if drafts else {"kind": ""}
    found = Reasons(
        rollout_workers=prepared.workers,
        rollout_gpus=prepared.rollout_gpus,
        train_gpus=prepared.train_gpus,
        colocated=prepared.colocated,
        drafter=drafts.speculation.name if drafts else "none",
        drafts="counted on tokens" if isinstance(acceptance, str) else str(acceptance["kind"]),
        ideal_share=sum(s for key, s in gpu_s.items() if PARTS[key].ideal) / total,
        parts=tuple((key, PARTS[key].clause, share) for key, share in largest),
        waits=tuple((kind, s / waited) for kind, s in list(explained.paths_s.items())[:MOST_PARTS] if waited),
        findings=tuple((finding.name, finding.says) for finding in explained.findings),
    )
    write_json(path, asdict(found))
    return found


def _launching(allowed: Sequence[Option], inputs: InputCache, framework: str | None) -> Launching:
    """Return the settings of the choice, or of the best option that a framework, or this one, has."""
    refused: dict[tuple[str, Any], str] = {}
    for rank, option in enumerate(allowed, start=1):
        kind = option.system, str(option.point.scenario.system.parameters.get("speculation"))
        if kind in refused:
            continue
        found = launch(prepare(option.point.scenario, inputs))
        if isinstance(found, Launch) and framework not in (None, found.framework):
            found = f"it is {found.framework}'s, not {framework}'s"
        if isinstance(found, Launch):
            return Launching(found, next(iter(refused.values()), ""), rank, option)
        refused[kind] = found
    return Launching(None, next(iter(refused.values())), 1, allowed[0])


def _rests_on(prepared: Prepared) -> list[str]:
    """Return where the inputs come from."""
    trace, profile = prepared.trace.metadata, prepared.profile.metadata
    training = prepared.scenario.training
    assumed = assumed_s(training.model_dump(), prepared.colocated, known_fields(prepared.scenario.framework))
    assumed |= prepared.extrapolated
    return [
        f"rollouts: {trace.name}" + (f", {trace.kind}" if trace.kind != trace.name else ""),
        f"step times: {profile.model} on {profile.gpu}, {profile.kind} ({profile.source})",
        f"training: {trained_by(prepared.scenario.model_dump())}",
        *([f"weight sync: {prepared.weight_sync}"] if prepared.weight_sync else []),
        *([assumption(assumed.items())] if assumed else []),
    ]


def require_trials(trials: int, best: int) -> None:
    """Raise `InputError` for numbers with which nothing can be chosen."""
    if trials < best:
        raise InputError(f"--trials {trials}: fewer than the {best} systems to report (--best)")
