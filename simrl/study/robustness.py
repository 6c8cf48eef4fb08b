"""The robustness of a choice: the winner if profile, trainer or drafts differ from the inputs, and where that flips.

Invariant: a perturbed option is simulated, by a field of its scenario (every pass longer, training less efficient, fewer
drafts accepted); no outcome is multiplied. A flip is bracketed by two simulated factors: at one the choice still wins, at the
other it does not. Splits and η are not searched again; a perturbation that cannot be executed is left out and reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.speculation.methods import Speculation
from simrl.study.goal import Goal
from simrl.study.point import Digests, Point, make_point
from simrl.study.ranking import assumed_seconds, scaled
from simrl.study.search import Option, judged
from simrl.study.store import Outcomes
from simrl.systems.recipes import make_system

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
    """One end of a source of error: the best option there, its lead over the choice (or the choice's over the second), and
    where inside it flips; `kept` if the choice keeps the limits there. `untried` are the options that cannot be executed so,
    by their hash, with the reason: left out, as an unperturbed one would be compared with perturbed ones. No winner: the
    choice is one of these, or no option keeps the limits. `rival` is the option that the lead is over."""

    source: str
    factor: float
    winner: Option | None
    lead: float
    flip: Flip | None
    untried: Mapping[str, str]
    kept: bool
    rival: Option | None = None


def perturbed(scenario: Scenario, source: str, factor: float) -> Scenario | str:
    """Return the scenario with a source of error at a factor, or why it cannot be executed. Without drafts, there is no
    acceptance to perturb."""
    if source == "decode":
        correction = scenario.profile.forward_correction * factor
        return scenario.with_fields("profile", forward_correction=correction)
    if source == "train":
        return scenario.with_fields("training", correction=scenario.training.correction * factor)
    if source == "assumed":
        return scaled(prepare(scenario, InputCache()), factor)
    method, acceptance = _method(scenario), scenario.speculation.acceptance_factor * factor
    if method is None:
        return scenario
    if method.drafter != "model" and acceptance > 1:
        return "drafts from texts cannot be accepted more often than they were counted"
    return scenario.with_fields("speculation", acceptance_factor=acceptance)


def robustness(
    choices: Sequence[Option], goal: Goal, outcomes: Outcomes, sources: Collection[str] = tuple(ENDS)
) -> list[End]:
    """Return the ends of these sources that touch a choice; the first of the choices is the one that was made."""
    drafts = any(_method(option.point.scenario) is not None for option in choices)
    inputs = InputCache()
    assumed = any(assumed_seconds(prepare(option.point.scenario, inputs)) for option in choices)
    touched = {"decode": True, "train": True, "acceptance": drafts, "assumed": assumed}
    ends = [(source, factor) for source in sources if touched[source] for factor in ENDS[source]]
    trial = _Trial(choices, goal, outcomes)
    if not ends:
        return []
    outcomes.of(
        [point for end in ends for point, _ in trial.points(*end, _in_reach(*end, choices))]
    )  # as many as can be
    return [trial.end(*end) for end in ends]


def most_points(sources: Collection[str], options: int) -> int:
    """Return how many points the ends of these sources need at most."""
    return sum(len(ENDS[source]) for source in sources) * options * (1 + HALVINGS)


def _method(scenario: Scenario) -> Speculation | None:
    return make_system(scenario.system.name, scenario.system.parameters).speculation


class _Trial:
    """Choices under factors."""

    def __init__(self, choices: Sequence[Option], goal: Goal, outcomes: Outcomes) -> None:
        self._choices, self._goal, self._outcomes = choices, goal, outcomes
        self._digests = Digests()

    def points(self, source: str, factor: float, choices: Sequence[Option]) -> list[tuple[Point, str]]:
        """Return a choice's point under a factor, or its own with the reason why there is none."""
        changed = [(option.point, perturbed(option.point.scenario, source, factor)) for option in choices]
        return [(own, new) if isinstance(new, str) else (make_point(new, self._digests), "") for own, new in changed]

    def _judged(self, source: str, factor: float, choices: Sequence[Option]) -> tuple[dict[str, float], dict[str, str]]:
        """Return the merits of the choices that keep the limits there, by their own hashes, and why others could not be
        tried."""
        merits, untried = {}, {}
        points, reasons = zip(*self.points(source, factor, choices), strict=True)
        for option, point, reason, outcome in zip(choices, points, reasons, self._outcomes.of(points), strict=True):
            error = reason or outcome.get("error", "")
            if error:
                looked_up = "drafts that are looked up in running siblings cannot be varied"
                untried[option.point.hash] = looked_up if "acceptance_factor" in error else error
            elif (found := judged(point, outcome, self._goal)).allowed:
                merits[option.point.hash] = found.merit
        return merits, untried

    def _merits(self, source: str, factor: float, choices: Sequence[Option]) -> tuple[dict[str, float], dict[str, str]]:
        """Return what `_judged` does of those that can win; of all, if the first does not keep the limits."""
        near = self._judged(source, factor, _in_reach(source, factor, choices))
        return near if choices[0].point.hash in near[0] else self._judged(source, factor, choices)

    def end(self, source: str, factor: float) -> End:
        choice = self._choices[0]
        merits, untried = self._merits(source, factor, self._choices)
        kept = choice.point.hash in merits
        if choice.point.hash in untried or not merits:
            return End(source, factor, None, 0.0, None, untried, kept)
        winner = _best(merits, self._choices)
        others = [option for option in self._choices if option is not winner and option.point.hash in merits]
        rivals = [choice] if winner is not choice and kept else others if winner is choice else []
        rival = _best(merits, rivals) if rivals else None
        lead = merits[winner.point.hash] / merits[rival.point.hash] - 1 if rival else float("inf")
        flip = self._flip(source, factor, winner, merits) if winner is not choice else None
        return End(source, factor, winner, lead, flip, untried, kept, rival)

    def _flip(self, source: str, factor: float, winner: Option, merits: Mapping[str, float]) -> Flip:
        """Halve the way between 1, where the choice wins, and the end, where the rivals with more merit do."""
        choice = self._choices[0]
        own = merits.get(choice.point.hash, 0.0)
        rivals = [choice, *(o for o in self._choices[1:] if merits.get(o.point.hash, 0.0) > own)]
        holds, flips = 1.0, factor
        for _ in range(HALVINGS):
            middle = (holds + flips) / 2
            best = _best(self._merits(source, middle, rivals)[0], rivals)
            if best is choice:
                holds = middle
            else:
                flips, winner = middle, best
        return Flip(holds, flips, winner)


def _in_reach(source: str, factor: float, choices: Sequence[Option]) -> Sequence[Option]:
    """Return the first two, and those that would win if all time of theirs or of the first's changed by the factor: no others
    can. Of acceptance, no such bound is known."""
    if source == "acceptance":
        return choices
    reach = max(factor, 1 / factor)
    return [option for i, option in enumerate(choices) if i < 2 or option.merit * reach >= choices[0].merit]


def _best(merits: Mapping[str, float], choices: Sequence[Option]) -> Option:
    """Return the option with the most merit; of equals the first, so that the choice that was made stays."""
    return max(choices, key=lambda option: merits.get(option.point.hash, 0.0))
