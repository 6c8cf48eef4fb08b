"""The answer of a search: which system, split, tensor parallelism, drafter and η to run, why, and
how sure that is.

Invariant: everything here is a pure function of the space, the goal, the number of trials and the
seed; figures come from simulations, never from formulas fitted to them. Simulated points are kept
in a folder (`Outcomes`), so that a repeated question is answered without simulating, also after a
kill.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from simrl.analysis.explanation import explain_result
from simrl.analysis.gpu_hours import PARTS
from simrl.scenario.calibration import open_lines
from simrl.scenario.presets import known_fields
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate_prepared
from simrl.simulate.without_effect import without_effect
from simrl.study.compare import SEEDS, further_seeds
from simrl.study.executors import inputs_of_this_process
from simrl.study.goal import Goal
from simrl.study.launch import Launch, launch
from simrl.study.model_error import RATIO_ERROR, SOURCE
from simrl.study.point import Point
from simrl.study.polish import polish
from simrl.study.robustness import ENDS, WORDS, End, most_points, robustness
from simrl.study.search import Option, Searched, best_of_each, front, judged, require_choice, search
from simrl.study.search_space import Space
from simrl.study.staleness_quality import BENCHMARKS, SOURCE as QUALITY_SOURCE, Quality, near
from simrl.study.store import Outcomes, write_json
from simrl.training.config import assumed_s, assumption, trained_by

CLOSE = 2.0  # times the model's error: closer options are simulated with further seeds
NEXT_BEST = 3  # further options that robustness looks at, with the best of each system
MOST_PARTS = 3


@dataclass(frozen=True)
class Reasons:
    """Why an option takes its time: GPUs by use; parts of its GPU time (part, words, share) that an
    ideal run lacks, the largest first; waits of its updates (kind, share of the critical paths);
    and known signs of trouble. `drafts` says what its acceptance rests on."""

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
    """One of the best few: its rank among all that were tried; its reasons; the lead of the first
    one over it (0 of the first itself) under each simulated seed, and whether a lead is below the
    model's own error; the next variant of its system, and the loss of merit there."""

    rank: int
    option: Option
    reasons: Reasons
    leads: tuple[float, ...]
    tied: bool
    variant: Option | None
    variant_loss: float

    def as_json(self, goal: Goal) -> dict[str, Any]:
        """Return the data of `--json`."""
        return {
            "rank": self.rank,
            **option_json(self.option),
            "seconds": goal.seconds(self.option.row),
            "cost": goal.cost(self.option.row),
            "leads": self.leads,
            "tied": self.tied,
            "reasons": asdict(self.reasons),
            "variant": option_json(self.variant) if self.variant else None,
            "variant_loss": self.variant_loss,
        }


@dataclass(frozen=True)
class Launching:
    """The settings of the choice, or why no framework has it, and then the best option that one
    has, with its rank."""

    settings: Launch | None
    refused: str
    rank: int
    option: Option


class Polished(NamedTuple):
    """The points tried around the best of each system, and whether no neighbour of these is
    better."""

    points: int
    ended: bool


@dataclass(frozen=True)
class Answer:
    """The best few, the first of which is the choice. `searched` has every option; `front` the
    options that none beats in throughput, staleness and cost at once."""

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

    @property
    def tied(self) -> list[str]:
        """The systems whose best option is as good as the choice, as far as simrl can tell."""
        return [choice.option.row["system"] for choice in self.best if choice.tied]

    def as_json(self) -> dict[str, Any]:
        """Return the data of `--json`; the keys are stable."""
        launching, settings = self.launching, self.launching.settings
        return {
            "name": self.name,
            "goal": {**asdict(self.goal), "words": self.goal.words},
            "space": self.space.words,
            "notes": self.space.notes,
            "points": self.searched.points,
            "polished": self.polished._asdict() if self.polished else None,
            "possible": len(self.searched.options),
            "within_limits": len(self.searched.allowed),
            "simulated_of_systems": self.searched.simulated(self.space),
            "whole_space": self.searched.whole,
            "combinations": self.searched.combinations,
            "left_out": [
                {"reason": reason, "points": count} for reason, count in self.searched.reasons()
            ],
            "best": [choice.as_json(self.goal) for choice in self.best],
            "front": [option_json(option) for option in self.front],
            "model_error": {
                "ratio": RATIO_ERROR,
                "source": SOURCE,
                "options_within": self.within_error,
            },
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
                "settings": asdict(settings) if settings else None,
            },
            "rests_on": self.rests_on,
        }


def option_json(option: Option) -> dict[str, Any]:
    """Return the data of an option."""
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
        "lead": _finite(end.lead),
        "flip": {"holds": flip.holds, "flips": flip.flips, "winner": flip.winner.point.hash}
        if flip
        else None,
        "rival": end.rival.point.hash if end.rival else None,
        "rival_system": end.rival.row["system"] if end.rival else None,
        "untried": end.untried,
        "keeps_limits": end.kept,
    }


def _finite(number: float) -> float | None:
    return None if math.isinf(number) else number


def answer(
    space: Space,
    goal: Goal,
    outcomes: Outcomes,
    trials: int,
    seed: int = 0,
    best: int = 5,
    robust: Collection[str] = tuple(ENDS),
    polished: int = 0,
    framework: str | None = None,
) -> Answer:
    """Search, polish with at most `polished` further points, and analyse the best few. `robust` are
    the sources of error to vary; `framework` is the one that launch settings are for (None: the
    best choice's). Raise `InputError`, with the reasons, where nothing keeps the limits."""
    outcomes.phase("points simulated", trials)
    searched = search(space, goal, outcomes, trials, seed)
    tried = searched.points
    if polished:
        outcomes.phase("points polished", polished)
        ended = polish(space, goal, outcomes, searched, polished)
    require_choice(searched)
    allowed = searched.allowed
    few = best_of_each(allowed, best)
    outcomes.phase("reasons of the best", len(few))
    assert outcomes.folder is not None
    reasons = outcomes.each(partial(reasons_of, outcomes.folder), few)
    close = [o for o in few[1:] if few[0].merit / o.merit - 1 < CLOSE * RATIO_ERROR]
    outcomes.phase("further seeds of what is close", (SEEDS - 1) * (1 + len(close)) if close else 0)
    leads = _leads(few, close, goal, outcomes)
    tested = list({o.point.hash: o for o in [*few, *allowed[:NEXT_BEST]]}.values())
    outcomes.phase("other step times, training and acceptance", most_points(robust, len(tested)))
    ends = robustness(tested, goal, outcomes, robust)
    winner, inputs = few[0], InputCache()
    choices = []
    for option, why, lead in zip(few, reasons, leads, strict=True):
        variant = next((o for o in allowed if o.system == option.system and o is not option), None)
        loss = option.merit / variant.merit - 1 if variant else 0.0
        tied = option is not winner and min(lead) < RATIO_ERROR
        choices.append(Choice(1 + allowed.index(option), option, why, lead, tied, variant, loss))
    return Answer(
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
    """Return the bound that stands for a choice in AReaL's table: its η, or the age of the oldest
    token that it trained."""
    system = option.point.scenario.system
    eta = system.parameters.get("eta") if system.name == "areal" else None
    return float(eta if eta is not None else option.row["off_policyness_max"])


def _leads(
    few: Sequence[Option], close: Sequence[Option], goal: Goal, outcomes: Outcomes
) -> list[tuple[float, ...]]:
    """Return the lead of the first option over each, and with further seeds over those that are
    close."""
    first = few[0]
    merits: dict[str, dict[int, float]] = {option.point.hash: {0: option.merit} for option in few}
    seeded = [
        (option, i, Point(scenario, outcomes.digests))
        for option in ((first, *close) if close else ())
        for i, scenario in enumerate(further_seeds(option.point.scenario), start=1)
    ]
    for (option, i, point), outcome in zip(
        seeded, outcomes.of([point for *_, point in seeded]), strict=True
    ):
        if "row" in outcome:
            merits[option.point.hash][i] = judged(point, outcome, goal).merit
    of_first = merits[first.point.hash]
    return [
        tuple(
            of_first[i] / merit - 1
            for i, merit in merits[option.point.hash].items()
            if i in of_first
        )
        for option in few
    ]


def reasons_of(folder: Path, option: Option) -> Reasons:
    """Simulate an option once more, with all its tables, and keep its reasons in the folder."""
    path = folder / "reasons" / f"{option.point.hash}.json"
    with suppress(OSError, ValueError):
        return TypeAdapter(Reasons).validate_json(path.read_bytes())
    prepared = prepare(option.point.scenario, inputs_of_this_process())
    explained = explain_result(simulate_prepared(prepared))
    gpu_s, total = explained.steady.gpu_s, explained.steady.total_gpu_s
    losses = [
        (key, s / total) for key, s in gpu_s.items() if not PARTS[key].ideal and s > 0.005 * total
    ]
    largest = sorted(losses, key=lambda loss: -loss[1])[:MOST_PARTS]
    waited = sum(explained.paths_s.values())
    drafts = prepared.drafts
    acceptance = drafts.facts["acceptance"] if drafts else {"kind": ""}
    reasons = Reasons(
        rollout_workers=prepared.workers,
        rollout_gpus=prepared.rollout_gpus,
        train_gpus=prepared.train_gpus,
        colocated=prepared.colocated,
        drafter=drafts.speculation.name if drafts else "none",
        drafts="counted on tokens" if isinstance(acceptance, str) else str(acceptance["kind"]),
        ideal_share=sum(s for key, s in gpu_s.items() if PARTS[key].ideal) / total,
        parts=tuple((key, PARTS[key].clause, share) for key, share in largest),
        waits=tuple(
            (kind, s / waited) for kind, s in list(explained.paths_s.items())[:MOST_PARTS] if waited
        ),
        findings=tuple((finding.name, finding.says) for finding in explained.findings),
    )
    write_json(path, asdict(reasons))
    return reasons


def _launching(allowed: Sequence[Option], inputs: InputCache, framework: str | None) -> Launching:
    """Return the settings of the choice, or of the best option that a framework, or this one,
    has."""
    refused: dict[tuple[str, Any], str] = {}
    for rank, option in enumerate(allowed, start=1):
        kind = option.system, str(option.point.scenario.system.parameters.get("speculation"))
        if kind in refused:
            continue
        settings = launch(prepare(option.point.scenario, inputs))
        if isinstance(settings, Launch) and framework not in (None, settings.framework):
            settings = f"it is {settings.framework}'s, not {framework}'s"
        if isinstance(settings, Launch):
            return Launching(settings, next(iter(refused.values()), ""), rank, option)
        refused[kind] = settings
    return Launching(None, next(iter(refused.values())), 1, allowed[0])


def _rests_on(prepared: Prepared) -> list[str]:
    """Return where the inputs come from."""
    trace, profile = prepared.trace.metadata, prepared.profile.metadata
    training = prepared.scenario.training
    known, unused = known_fields(prepared.scenario.framework), without_effect(prepared)
    assumed = assumed_s(training.model_dump(), prepared.colocated, known) | prepared.extrapolated
    return [
        *(line.removesuffix(".") for line in open_lines(prepared.scenario.model_dump())),
        f"rollouts: {trace.name}" + (f", {trace.kind}" if trace.kind != trace.name else ""),
        f"step times: {profile.model} on {profile.gpu}, {profile.kind} ({profile.source})",
        f"training: {trained_by(prepared.scenario.model_dump())}",
        *([f"weight sync: {prepared.weight_sync}"] if prepared.weight_sync else []),
        *([assumption(assumed.items())] if assumed else []),
        *([f"without effect here: {', '.join(unused)}"] if unused else []),
    ]
