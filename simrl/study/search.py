"""The search: which points of a space are simulated, and the options that come of them.

Invariant: the points are a pure function of the space, the goal, the number of trials and the seed.
They are chosen in batches of a fixed size, so neither the number of processes nor their order of
finishing matters. A space of no more points than trials is simulated whole, however many
combinations lead to them; in a larger one, the file's own choices come first, and then proposals of
Optuna's tree-structured Parzen estimator, which is given the limits.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from simrl.errors import InputError
from simrl.study.goal import SETTLING, Broken, Goal
from simrl.study.grid import SYSTEMS, Alternative, Between
from simrl.study.point import Outcome, Point
from simrl.study.search_space import Chosen, Space, parts
from simrl.study.splits import weight
from simrl.study.store import Outcomes
from simrl.systems.recipes import parameters_of

if TYPE_CHECKING:
    from optuna import Trial

BATCH = 8  # proposals at a time
TRIED_FIRST = 2  # proposals of each system, after the file's own choices, before any is preferred
MOST_REPEATS = 4  # proposals a trial that may turn out to be known already


@dataclass(frozen=True)
class Option:
    """A point that can be executed, its row and its merit; `broken` are the limits that it
    exceeds."""

    point: Point
    row: Mapping[str, Any]
    merit: float
    broken: tuple[Broken, ...]

    @property
    def allowed(self) -> bool:
        return not self.broken

    @cached_property
    def weighed(self) -> float:
        """The merit to rank by (`simrl.study.splits.weight`)."""
        return self.merit * weight(self.point.scenario)

    @property
    def changes(self) -> int:
        """The number of its system's parameters that are not the recipe's own."""
        defaults = parameters_of(self.system)
        parameters = self.point.scenario.system.parameters
        return sum(value != defaults.get(key) for key, value in parameters.items())

    @property
    def system(self) -> str:
        return self.point.scenario.system.name

    @property
    def staleness(self) -> float:
        """Mean off-policyness of trained tokens."""
        return float(self.row["off_policyness_mean"])

    @property
    def spent(self) -> float:
        """The GPU-hours of 1,000 samples, or their cost where pools have prices of their own."""
        of_pools = self.row.get("train_cost_per_1k_samples") is not None
        return float(self.row["cost_per_1k_samples"]) if of_pools else self.gpu_hours

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of 1,000 trained samples."""
        return float(self.row["gpu_hours_per_1k_samples"])


@dataclass
class Searched:
    """Everything that was tried: the options, the best first; the errors of impossible points, by
    cause; whether this was the whole space, and its number of combinations (None: without end); the
    choices of each point, by its hash, and the hashes of all points."""

    options: list[Option] = field(default_factory=list)
    impossible: dict[str, list[str]] = field(default_factory=dict)
    whole: bool = False
    combinations: int | None = None
    chosen: dict[str, Chosen] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    @property
    def points(self) -> int:
        return len(self.options) + sum(map(len, self.impossible.values()))

    @property
    def allowed(self) -> list[Option]:
        return [option for option in self.options if option.allowed]

    def simulated(self, space: Space) -> dict[str, int]:
        """Return the number of options of each system of the space."""
        counts = Counter(option.system for option in self.options)
        return {
            name: counts[name]
            for name in dict.fromkeys(parts(system.value)[0] for system in space.systems)
        }

    def sort(self) -> None:
        """Put the best first, whole nodes before parts of them that are hardly better; of equals
        the one with the fewest changes of its recipe, then the first by its scenario, as processes
        may return them in another order."""
        self.options.sort(
            key=lambda o: (
                not o.allowed,
                -comparable(o.weighed),
                o.changes,
                json.dumps(o.point.document["scenario"], sort_keys=True),
            )
        )

    def reasons(self) -> list[tuple[str, int]]:
        """Return why points were no choice, the most frequent cause first: an example of its
        errors, and a count; for a limit, also the systems that exceeded it, and whether it was
        still growing."""
        tally = Counter({errors[0]: len(errors) for errors in self.impossible.values()})
        systems: dict[str, Counter[str]] = {}
        for option in self.options:
            for broken in option.broken[:1]:
                growing = " was still growing when the simulation ended, and no rule ends it: simulate more steps"
                reason = f"limit: {broken.limit}{growing if broken.unsettled else ''}"
                if broken.limit == SETTLING:
                    reason = "not settled when the simulation ended: simulate more steps"
                systems.setdefault(reason, Counter())[option.system] += 1
        for reason, several in systems.items():
            counts = ", ".join(f"{system} {count}" for system, count in several.most_common())
            tally[f"{reason} ({counts})"] = several.total()
        return tally.most_common()

    def add(self, point: Point, outcome: Outcome, goal: Goal) -> Option | None:
        """Add the outcome of a point; return the option, None for a point that cannot be
        executed."""
        self.seen.add(point.hash)
        if "error" in outcome:
            error = outcome["error"].removeprefix(f"system {point.scenario.system.name}: ")
            self.impossible.setdefault(outcome.get("cause", error), []).append(error)
            return None
        option = judged(point, outcome, goal)
        self.options.append(option)
        return option


def comparable(rate: float) -> float:
    """Return a rate without the digits in which sums of equal seconds may differ: rates that differ
    by less than 1e-9 of them are a tie."""
    return float(f"{rate:.9g}")


def judged(point: Point, outcome: Outcome, goal: Goal) -> Option:
    """Return an outcome that is a row as an option."""
    row = outcome["row"]
    return Option(point, row, goal.merit(row), tuple(goal.broken(point.scenario, row)))


def search(space: Space, goal: Goal, outcomes: Outcomes, trials: int, seed: int) -> Searched:
    """Simulate at most `trials` points. Raise `InputError` for a choice that no scenario can
    have."""
    searched = Searched(combinations=space.size)
    combinations = space.combinations(MOST_REPEATS * trials)
    made = [(space.point(chosen), chosen) for chosen in combinations or ()]
    points = list({point.hash: point for point, _ in made}.values())
    if combinations is not None and len(points) <= trials:
        searched.whole = True
        searched.chosen.update((point.hash, chosen) for point, chosen in made)
        for point, outcome in zip(points, outcomes.of(points), strict=True):
            searched.add(point, outcome, goal)
    else:
        _propose(space, goal, outcomes, trials, seed, searched)
    searched.sort()
    return searched


def _propose(
    space: Space, goal: Goal, outcomes: Outcomes, trials: int, seed: int, searched: Searched
) -> None:
    """Simulate the file's own choices and then Optuna's proposals, a batch at a time, until
    `trials` can be executed."""
    import optuna  # takes a second to import

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    first = [_proposed(chosen, space) for chosen in space.as_in_the_file()]
    first += [{SYSTEMS: place} for place in range(len(space.systems)) for _ in range(TRIED_FIRST)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arguments that Optuna calls experimental
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=len(first),
            multivariate=True,
            group=True,
            constant_liar=True,
            constraints_func=lambda trial: trial.user_attrs["excess"],
            seed=seed,
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for proposed in first:
            study.enqueue_trial(proposed)
        known: dict[str, Option | None] = {}
        for _ in range(0, MOST_REPEATS * trials, BATCH):
            room = trials - len(searched.options)  # what cannot be executed costs no simulation
            if room <= 0:
                break
            proposals = []
            for trial in (study.ask() for _ in range(BATCH)):
                point = space.point(chosen := _choose(trial, space))
                searched.chosen.setdefault(point.hash, chosen)
                proposals.append((trial, point))
            new = list(
                {point.hash: point for _, point in proposals if point.hash not in known}.values()
            )[:room]
            for point, outcome in zip(new, outcomes.of(new), strict=True):
                known[point.hash] = searched.add(point, outcome, goal)
            for trial, point in proposals:
                if point.hash not in known:  # there was no room for it
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                    continue
                option = known[point.hash]
                # By how much it is impossible, over 0 if it is.
                excess = (
                    1.0
                    if option is None
                    else sum(min(broken.excess, 1.0) for broken in option.broken)
                )
                trial.set_user_attr("excess", [excess])
                study.tell(trial, option.merit if option else 0.0)


def _choose(trial: Trial, space: Space) -> Chosen:
    """Return an alternative of each dimension that matters for the proposed system."""
    system = space.systems[trial.suggest_categorical(SYSTEMS, range(len(space.systems)))]
    chosen: dict[str, Alternative] = {SYSTEMS: (system,)}
    for name, dimension in space.matters(system.value).items():
        if isinstance(dimension, Between):
            chosen[name] = dimension.drawn(trial.suggest_float(name, 0.0, 1.0))
        else:
            count = len(dimension.alternatives)
            number = (
                trial.suggest_int(name, 0, count - 1)
                if all(isinstance(s.value, int | float) for a in dimension.alternatives for s in a)
                else trial.suggest_categorical(name, range(count))
            )
            chosen[name] = dimension.alternatives[number]
    return chosen


def _proposed(chosen: Chosen, space: Space) -> dict[str, float]:
    """Return the proposal of Optuna from which `_choose` makes this."""
    (system,) = chosen[SYSTEMS]
    proposed: dict[str, float] = {SYSTEMS: space.systems.index(system)}
    for name, dimension in space.matters(system.value).items():
        if isinstance(dimension, Between):
            width = dimension.high - dimension.low
            proposed[name] = (chosen[name][0].value - dimension.low) / width if width else 0.0
        else:
            proposed[name] = list(dimension.alternatives).index(chosen[name])
    return proposed


def front(options: Sequence[Option]) -> list[Option]:
    """Return the allowed options that no other beats in throughput, staleness and cost at once, the
    freshest first. Staleness counts as it is shown, in hundredths of an update: smaller differences
    come from the updates before the pipeline is full."""
    kept: dict[tuple[float, ...], Option] = {}
    for option in options:
        if option.allowed:
            kept.setdefault(
                (
                    comparable(option.row["samples_per_s"]),
                    -round(option.staleness, 2),
                    -comparable(option.spent),
                ),
                option,
            )

    best = [
        option
        for goods, option in kept.items()
        if not any(
            other != goods and all(a >= b for a, b in zip(other, goods, strict=True))
            for other in kept
        )
    ]
    return sorted(best, key=lambda option: (option.staleness, -option.merit))


def best_of_each(options: Sequence[Option], count: int | None = None) -> list[Option]:
    """Return the best option of each of the first `count` systems, of all without it; the options
    come in their order."""
    systems = list(dict.fromkeys(option.system for option in options))[:count]
    return [next(option for option in options if option.system == system) for system in systems]


def require_choice(searched: Searched) -> None:
    """Raise `InputError`, with the reasons, if nothing that was tried is a choice."""
    if searched.allowed:
        return
    reasons = [f"{count} × {reason}" for reason, count in searched.reasons()[:3]]
    if searched.options:
        nearest = min(
            searched.options, key=lambda option: sum(broken.excess for broken in option.broken)
        )
        why = ", ".join(broken.says for broken in nearest.broken)
        reasons.append(f"the nearest to the limits is {nearest.row['system']}: {why}")
    raise InputError(
        f"none of the {searched.points} points that were tried can be: {'; '.join(reasons)}"
    )
