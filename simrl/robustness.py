"""How robust a choice is: what wins if the profile, the trainer or the drafts are other than thought, and where that flips.

Invariant: a perturbed option is simulated, by a field of its scenario (every pass longer, training less efficient, fewer
drafts accepted); no outcome is multiplied. A flip is bracketed by two simulated factors: at one the choice still wins, at the
other it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simrl.goal import Goal
from simrl.outcomes import Outcomes
from simrl.points import Digests, Point, make_point
from simrl.scenario import Scenario
from simrl.search import Option, judged
from simrl.speculation.methods import Speculation
from simrl.systems import make_system

HALVINGS = 4  # of the way to the end, to find where it flips
ENDS = {  # factors, by what they multiply
    "decode": (0.8, 1.2),
    "train": (0.8, 1.2),
    "acceptance": (0.8, 1.2),
}
WORDS = {
    "decode": "seconds of every forward pass (profile.forward_correction)",
    "train": "seconds of training and log-probs (1 / training.mfu, 1 / training.log_prob_mfu)",
    "acceptance": "probability that a drafted token is accepted (speculation.acceptance_factor)",
}


@dataclass(frozen=True)
class Flip:
    """The choice still wins at `holds`; at `flips`, `winner` does."""

    holds: float
    flips: float
    winner: Option


@dataclass(frozen=True)
class End:
    """What happens with a source of error at one of its ends: the best option there, by how much it leads the choice, or the
    choice the second, and where inside it flips; `kept` if the choice keeps the limits there. `untried` are the options that
    cannot be executed so, by their hash, with the reason: they are left out, as they would be compared as they were with others
    that are not. No winner: the choice is one of these, or no option keeps the limits."""

    source: str
    factor: float
    winner: Option | None
    lead: float
    flip: Flip | None
    untried: Mapping[str, str]
    kept: bool


def perturbed(scenario: Scenario, source: str, factor: float) -> Scenario | str:
    """The scenario with a source of error at a factor, or why it cannot be executed. One without drafts has no acceptance."""
    if source == "decode":
        profile = scenario.profile.model_copy(
            update={"forward_correction": scenario.profile.forward_correction * factor}
        )
        return scenario.model_copy(update={"profile": profile})
    if source == "train":
        efficiencies = {key: getattr(scenario.training, key) / factor for key in ("mfu", "log_prob_mfu")}
        if max(efficiencies.values()) > 1:
            return f"training.mfu would be {max(efficiencies.values()):.2f}"
        return scenario.model_copy(update={"training": scenario.training.model_copy(update=efficiencies)})
    method = make_system(scenario.system.name, scenario.system.parameters).speculation
    if method is None:
        return scenario
    inputs = scenario.speculation
    if method.drafter != "model" and inputs.acceptance_factor * factor > 1:
        return "drafts from texts cannot be accepted more often than they were counted"
    speculation = inputs.model_copy(update={"acceptance_factor": inputs.acceptance_factor * factor})
    return scenario.model_copy(update={"speculation": speculation})


def robustness(choices: Sequence[Option], goal: Goal, outcomes: Outcomes) -> list[End]:
    """The ends of every source that touches a choice; the first of the choices is the one that was made."""
    sources = [source for source in ENDS if source != "acceptance" or any(map(_drafts, choices))]
    trial = _Trial(choices, goal, outcomes)
    trial.prepare([(source, factor) for source in sources for factor in ENDS[source]])
    return [trial.end(source, factor) for source in sources for factor in ENDS[source]]


def _drafts(option: Option) -> bool:
    return _method(option) is not None


def _method(option: Option) -> Speculation | None:
    system = option.point.scenario.system
    return make_system(system.name, system.parameters).speculation


def _said(error: str) -> str:
    """Why a perturbed option could not be simulated."""
    return "drafts that are looked up in running siblings cannot be varied" if "acceptance_factor" in error else error


class _Trial:
    """Choices under factors."""

    def __init__(self, choices: Sequence[Option], goal: Goal, outcomes: Outcomes) -> None:
        self._choices, self._goal, self._outcomes = choices, goal, outcomes
        self._digests = Digests()

    def prepare(self, ends: Sequence[tuple[str, float]]) -> None:
        """Simulates all ends at once, as many at a time as there are processes."""
        self._outcomes.of([point for end in ends for point, _ in self._points(*end, self._choices)])

    def _points(self, source: str, factor: float, choices: Sequence[Option]) -> list[tuple[Point, str]]:
        """A choice's point under a factor, or its own with the reason why there is none."""
        found = []
        for option in choices:
            changed = perturbed(option.point.scenario, source, factor)
            if isinstance(changed, Scenario):
                found.append((make_point(changed, self._digests), ""))
            else:
                found.append((option.point, changed))
        return found

    def _judged(self, source: str, factor: float, choices: Sequence[Option]) -> tuple[dict[str, float], dict[str, str]]:
        """The merits of the choices that keep the limits there, by their own hashes; why others could not be tried."""
        points = self._points(source, factor, choices)
        merits, reasons = {}, {}
        for option, (point, reason), outcome in zip(
            choices, points, self._outcomes.of([point for point, _ in points]), strict=True
        ):
            if reason or "error" in outcome:
                reasons[option.point.hash] = reason or _said(outcome["error"])
                continue
            found = judged(point, outcome, self._goal)
            if found.allowed:
                merits[option.point.hash] = found.merit
        return merits, reasons

    def end(self, source: str, factor: float) -> End:
        choice = self._choices[0]
        merits, reasons = self._judged(source, factor, self._choices)
        kept = choice.point.hash in merits
        if choice.point.hash in reasons or not merits:
            return End(source, factor, None, 0.0, None, reasons, kept)
        winner = self._best(merits, self._choices)
        others = [merit for key, merit in merits.items() if key != winner.point.hash]
        against = merits.get(choice.point.hash) if winner is not choice else max(others, default=None)
        lead = merits[winner.point.hash] / against - 1 if against else float("inf")
        flip = self._flip(source, factor, winner, merits) if winner is not choice else None
        return End(source, factor, winner, lead, flip, reasons, kept)

    def _best(self, merits: Mapping[str, float], choices: Sequence[Option]) -> Option:
        """The choice that was made, unless another has more."""
        best = choices[0]
        for option in choices[1:]:
            if merits.get(option.point.hash, 0.0) > merits.get(best.point.hash, 0.0):
                best = option
        return best

    def _flip(self, source: str, factor: float, winner: Option, merits: Mapping[str, Any]) -> Flip:
        """Between 1, where the choice wins, and the end, where those with more merit than it do, by halving."""
        choice = self._choices[0]
        own = merits.get(choice.point.hash, 0.0)
        rivals = [choice, *(o for o in self._choices[1:] if merits.get(o.point.hash, 0.0) > own)]
        holds, flips = 1.0, factor
        for _ in range(HALVINGS):
            middle = (holds + flips) / 2
            best = self._best(self._judged(source, middle, rivals)[0], rivals)
            if best is choice:
                holds = middle
            else:
                flips, winner = middle, best
        return Flip(holds, flips, winner)
