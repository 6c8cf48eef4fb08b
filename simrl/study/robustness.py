"""The robustness of a choice: the winner if profile, trainer, drafts or assumed seconds differ from
the inputs, and where the winner changes.

Invariant: a perturbed option is simulated, by a field of its scenario (every pass longer, training
less efficient, fewer drafts accepted); no outcome is multiplied. A flip is bracketed by two
simulated factors: at one the choice still wins, at the other it does not. Splits and η are not
searched again; a perturbation that cannot be executed is left out and reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from simrl.scenario.model import Scenario
from simrl.scenario.presets import EngineConstants, constants, host_times, known_fields
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import Prepared, prepare
from simrl.speculation.methods import Speculation
from simrl.study.goal import Goal
from simrl.study.point import Point
from simrl.study.search import Option, comparable, judged
from simrl.study.store import Outcomes
from simrl.systems.recipes import make_system
from simrl.training.config import assumed_s

HALVINGS = 4  # of the way to the end, to find where it flips
WORDS = {
    "decode": "seconds of every forward pass (profile.forward_correction)",
    "train": "seconds of training and log-probs (training.correction)",
    "acceptance": "probability that a drafted token is accepted (speculation.acceptance_factor)",
    "assumed": "all seconds that are assumed or extrapolated, as nobody gave them",
}
ENDS = dict.fromkeys(WORDS, (0.8, 1.2)) | {"assumed": (0.5, 2.0)}  # factors, by what they multiply


@dataclass(frozen=True)
class Flip:
    """The choice still wins at `holds`; at `flips`, `winner` does."""

    holds: float
    flips: float
    winner: Option


@dataclass(frozen=True)
class End:
    """One end of a source of error: the best option there, its lead over `rival` (the choice, or
    the second if the choice wins), and where between 1 and the end the winner changes; `kept` if
    the choice keeps the limits there. `untried` are the reasons of options that cannot be executed
    with the factor, by their hash: they are left out, as unperturbed ones would be compared with
    perturbed ones. No winner: the choice is one of these, or no option keeps the limits."""

    source: str
    factor: float
    winner: Option | None
    lead: float
    flip: Flip | None
    untried: Mapping[str, str]
    kept: bool
    rival: Option | None = None


def perturbed(
    scenario: Scenario, source: str, factor: float, inputs: InputCache | None = None
) -> Scenario | str:
    """Return the scenario with a source of error at a factor, or why it cannot be executed. Without
    drafts, there is no acceptance to perturb."""
    if source == "decode":
        return scenario.with_fields(
            "profile", forward_correction=scenario.profile.forward_correction * factor
        )
    if source == "train":
        return scenario.with_fields("training", correction=scenario.training.correction * factor)
    if source == "assumed":
        return scaled(prepare(scenario, inputs), factor)
    method, acceptance = _method(scenario), scenario.speculation.acceptance_factor * factor
    if method is None:
        return scenario
    if method.drafter != "model" and acceptance > 1:
        return "drafts from texts cannot be accepted more often than they were counted"
    return scenario.with_fields("speculation", acceptance_factor=acceptance)


def assumed_seconds(prepared: Prepared) -> dict[str, float]:
    """Return the unknown seconds, by field: assumed defaults of `training`, constants of
    weight syncs that were measured on other models or nodes, and open constants of presets."""
    scenario = prepared.scenario
    used = constants(scenario.model_dump(), prepared.profile.metadata)
    assumed = assumed_s(
        scenario.training.model_dump(), prepared.colocated, known_fields(scenario.framework)
    )
    preset = {
        key: constant.value
        for _, key, constant in used
        if constant.kind == "open"
        and key.endswith("_s")
        and type(constant.value) is float
        and constant.value > 0
    }
    return assumed | prepared.extrapolated | preset


def scaled(prepared: Prepared, factor: float) -> Scenario:
    """Return the scenario with its assumed seconds times a factor."""
    scenario = prepared.scenario
    for key, value in assumed_seconds(prepared).items():
        section, _, field = key.partition(".")
        if field not in EngineConstants.model_fields:
            scenario = scenario.with_fields(section, **{field: value * factor})
    data, profile = scenario.model_dump(), prepared.profile.metadata
    times, scaled_times = (
        host_times(data, profile, prepared.model.layers, x) for x in (1.0, factor)
    )
    changed = {key: value for key, value in scaled_times.items() if value != times[key]}
    return scenario.with_fields("profile", **changed)


def robustness(
    options: Sequence[Option],
    goal: Goal,
    outcomes: Outcomes,
    sources: Collection[str] = tuple(ENDS),
) -> list[End]:
    """Return the ends of these sources that touch an option; the first option is the choice."""
    trial = _Trial(options, goal, outcomes)
    drafts = any(_method(option.point.scenario) is not None for option in options)
    assumed = any(
        assumed_seconds(prepare(option.point.scenario, trial.inputs)) for option in options
    )
    touched = {"decode": True, "train": True, "acceptance": drafts, "assumed": assumed}
    ends = [(source, factor) for source in sources if touched[source] for factor in ENDS[source]]
    points = [point for end in ends for point, _ in trial.points(*end, _in_reach(*end, options))]
    outcomes.of(points)  # all at once, for as many processes as there are
    return [trial.end(*end) for end in ends]


def most_points(sources: Collection[str], options: int) -> int:
    """Return how many points the ends of these sources need at most."""
    return sum(len(ENDS[source]) for source in sources) * options * (1 + HALVINGS)


def _method(scenario: Scenario) -> Speculation | None:
    return make_system(scenario.system.name, scenario.system.parameters).speculation


class _Trial:
    """Options under factors; the first of `options` is the choice."""

    def __init__(self, options: Sequence[Option], goal: Goal, outcomes: Outcomes) -> None:
        self._options, self._goal, self._outcomes = options, goal, outcomes
        self.inputs = InputCache()

    def points(
        self, source: str, factor: float, options: Sequence[Option]
    ) -> list[tuple[Point, str]]:
        """Return an option's point under a factor, or its own with the reason why there is none."""
        points = []
        for option in options:
            there = perturbed(option.point.scenario, source, factor, self.inputs)
            if isinstance(there, str):
                points.append((option.point, there))
            else:
                points.append((Point(there, self._outcomes.digests), ""))
        return points

    def _judged(
        self, source: str, factor: float, options: Sequence[Option]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Return the merits of the options that keep the limits there, by their own hashes, and why
        others could not be tried."""
        merits, untried = {}, {}
        points, reasons = zip(*self.points(source, factor, options), strict=True)
        for option, point, reason, outcome in zip(
            options, points, reasons, self._outcomes.of(points), strict=True
        ):
            error = reason or outcome.get("error", "")
            if error:
                looked_up = "drafts that are looked up in running siblings cannot be varied"
                untried[option.point.hash] = looked_up if "acceptance_factor" in error else error
            elif (there := judged(point, outcome, self._goal)).allowed:
                merits[option.point.hash] = there.merit
        return merits, untried

    def _merits(
        self, source: str, factor: float, options: Sequence[Option]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Return what `_judged` does of those that can win; of all, if the first does not keep the
        limits."""
        near = self._judged(source, factor, _in_reach(source, factor, options))
        return near if options[0].point.hash in near[0] else self._judged(source, factor, options)

    def end(self, source: str, factor: float) -> End:
        choice = self._options[0]
        merits, untried = self._merits(source, factor, self._options)
        kept = choice.point.hash in merits
        if choice.point.hash in untried or not merits:
            return End(source, factor, None, 0.0, None, untried, kept)
        winner = _best(merits, self._options)
        others = [choice] if winner is not choice else self._options[1:]
        rivals = [option for option in others if option.point.hash in merits]
        rival = _best(merits, rivals) if rivals else None
        lead = merits[winner.point.hash] / merits[rival.point.hash] - 1 if rival else float("inf")
        flip = self._flip(source, factor, winner, merits) if winner is not choice else None
        return End(source, factor, winner, lead, flip, untried, kept, rival)

    def _flip(
        self, source: str, factor: float, winner: Option, merits: Mapping[str, float]
    ) -> Flip:
        """Halve the way between 1, where the choice wins, and the end, where options of more merit
        do."""
        choice, *others = self._options
        least = merits.get(choice.point.hash, 0.0)
        rivals = [choice, *(o for o in others if merits.get(o.point.hash, 0.0) > least)]
        holds, flips = 1.0, factor
        for _ in range(HALVINGS):
            middle = (holds + flips) / 2
            best = _best(self._merits(source, middle, rivals)[0], rivals)
            if best is choice:
                holds = middle
            else:
                flips, winner = middle, best
        return Flip(holds, flips, winner)


def _in_reach(source: str, factor: float, options: Sequence[Option]) -> Sequence[Option]:
    """Return the first two, and those that would win if all their time or all of the first's
    changed by the factor: no others can. No such bound is known for acceptance."""
    if source == "acceptance":
        return options
    reach = max(factor, 1 / factor)
    return [
        option
        for i, option in enumerate(options)
        if i < 2 or option.merit * reach >= options[0].merit
    ]


def _best(merits: Mapping[str, float], options: Sequence[Option]) -> Option:
    """Return the option with the most merit; of equals the first, so that the choice that was made
    stays."""
    return max(options, key=lambda option: comparable(merits.get(option.point.hash, 0.0)))
