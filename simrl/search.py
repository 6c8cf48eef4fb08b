"""The search: which points of a space are simulated, and what comes of each.

Invariant: the points are a pure function of the space, the goal, the number of trials and the seed. They are asked for in
batches of a fixed size, so it matters neither how many processes simulate nor which is done first. A space of no more points
than trials is simulated as a whole, however many combinations come to them; of a larger one, what the file itself says comes
first, and then Optuna's tree-structured Parzen estimator proposes what to try, and knows of the limits.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simrl.dimensions import SYSTEMS, Between, Listed
from simrl.errors import InputError
from simrl.goal import Broken, Goal
from simrl.outcomes import Outcomes
from simrl.points import Outcome, Point
from simrl.search_space import Chosen, Space

if TYPE_CHECKING:
    from optuna import Trial

BATCH = 8  # proposals at a time
TRIED_FIRST = 2  # proposals of each system, besides what the file says, before any is preferred
MOST_REPEATS = 4  # proposals a trial that may turn out to be known already


@dataclass(frozen=True)
class Option:
    """A point that can be, its row and its merit; `broken` are the limits that it does not keep."""

    point: Point
    row: Mapping[str, Any]
    merit: float
    broken: tuple[Broken, ...]

    @property
    def allowed(self) -> bool:
        return not self.broken

    @property
    def system(self) -> str:
        return self.point.scenario.system.name

    @property
    def staleness(self) -> float:
        """Mean off-policyness of trained tokens."""
        return float(self.row["off_policyness_mean"])

    @property
    def gpu_hours(self) -> float:
        """Of 1,000 trained samples."""
        return float(self.row["gpu_hours_per_1k_samples"])


@dataclass
class Searched:
    """What was tried: the options, the best first; how many points cannot be, by reason, with an example of each; whether
    that was all of the space, and of how many combinations that is (None: without end)."""

    options: list[Option] = field(default_factory=list)
    impossible: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    whole: bool = False
    combinations: int | None = None

    @property
    def points(self) -> int:
        return len(self.options) + self.impossible.total()

    @property
    def allowed(self) -> list[Option]:
        return [option for option in self.options if option.allowed]

    def reasons(self) -> list[tuple[str, int]]:
        """Why points were no choice, the most frequent first: an example of each reason, and how many. Of a limit, also which
        systems did not keep it, and whether that had not settled."""
        found: Counter[str] = Counter({self.examples[key]: count for key, count in self.impossible.items()})
        systems: dict[str, Counter[str]] = {}
        for option in self.options:
            for broken in option.broken[:1]:
                growing = " was still growing when the simulation ended, and no rule ends it: simulate more steps"
                reason = f"limit: {broken.limit}{growing if broken.unsettled else ''}"
                systems.setdefault(reason, Counter())[option.system] += 1
        for reason, several in systems.items():
            said = ", ".join(f"{system} {count}" for system, count in several.most_common())
            found[f"{reason} ({said})"] = several.total()
        return found.most_common()

    def add(self, point: Point, outcome: Outcome, goal: Goal) -> Option | None:
        if "error" in outcome:
            said = outcome["error"].removeprefix(f"system {point.scenario.system.name}: ")
            reason = re.sub(r"\d[\d.,]*", "#", said)
            self.impossible[reason] += 1
            self.examples.setdefault(reason, said)
            return None
        option = judged(point, outcome, goal)
        self.options.append(option)
        return option


def judged(point: Point, outcome: Outcome, goal: Goal) -> Option:
    """An outcome that is a row, as an option."""
    row = outcome["row"]
    return Option(point, row, goal.merit(row), tuple(goal.broken(point.scenario, row)))


def search(space: Space, goal: Goal, outcomes: Outcomes, trials: int, seed: int) -> Searched:
    """Simulates at most `trials` points. Raises `InputError` for a choice that no scenario can have."""
    searched = Searched(combinations=space.size)
    combinations = space.combinations(MOST_REPEATS * trials)
    points = list({point.hash: point for point in map(space.point, combinations or ())}.values())
    if combinations is not None and len(points) <= trials:
        searched.whole = True
        for point, outcome in zip(points, outcomes.of(points), strict=True):
            searched.add(point, outcome, goal)
    else:
        _propose(space, goal, outcomes, trials, seed, searched)
    # Of equals the first by name: options may come in another order where processes differ.
    searched.options.sort(key=lambda option: (not option.allowed, -option.merit, option.point.hash))
    return searched


def _propose(space: Space, goal: Goal, outcomes: Outcomes, trials: int, seed: int, searched: Searched) -> None:
    import optuna  # takes a second to import

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    own = [_proposed(chosen, space) for chosen in space.as_in_the_file()]
    systems = range(len(_systems(space)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arguments that Optuna calls experimental
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=len(own) + TRIED_FIRST * len(systems),
            multivariate=True,
            group=True,
            constant_liar=True,
            constraints_func=lambda trial: trial.user_attrs["excess"],
            seed=seed,
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for proposed in [*own, *({SYSTEMS: place} for place in systems for _ in range(TRIED_FIRST))]:
            study.enqueue_trial(proposed)
        known: dict[str, Option | None] = {}
        for _ in range(0, MOST_REPEATS * trials, BATCH):
            room = trials - len(known)
            if room <= 0:
                break
            asked = [(trial, space.point(_choose(trial, space))) for trial in (study.ask() for _ in range(BATCH))]
            new = list({point.hash: point for _, point in asked if point.hash not in known}.values())[:room]
            for point, outcome in zip(new, outcomes.of(new), strict=True):
                known[point.hash] = searched.add(point, outcome, goal)
            for trial, point in asked:
                if point.hash not in known:  # there was no room for it
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                    continue
                option = known[point.hash]
                trial.set_user_attr("excess", _excess(option))
                study.tell(trial, option.merit if option else 0.0)


def _systems(space: Space) -> Sequence[Any]:
    dimension = space.dimensions[space.systems]
    assert isinstance(dimension, Listed)
    return dimension.alternatives


def _choose(trial: Trial, space: Space) -> Chosen:
    """An alternative of each dimension that matters for the system that is proposed."""
    place = trial.suggest_categorical(SYSTEMS, range(len(_systems(space))))
    chosen = {space.systems: _systems(space)[place]}
    (entry,) = [setting.value for setting in chosen[space.systems] if setting.key == SYSTEMS]
    for i in space.matters(entry):
        dimension, name = space.dimensions[i], "+".join(space.dimensions[i].keys)
        if i == space.systems:
            continue
        if isinstance(dimension, Between):
            chosen[i] = dimension.drawn(trial.suggest_float(name, 0.0, 1.0))
        else:
            count = len(dimension.alternatives)
            ordered = all(isinstance(s.value, int | float) for a in dimension.alternatives for s in a)
            number = trial.suggest_int(name, 0, count - 1) if ordered else trial.suggest_categorical(name, range(count))
            chosen[i] = dimension.alternatives[number]
    return chosen


def _proposed(chosen: Chosen, space: Space) -> dict[str, Any]:
    """What Optuna has to propose for `_choose` to choose this."""
    found: dict[str, Any] = {}
    for i, alternative in chosen.items():
        dimension = space.dimensions[i]
        name = SYSTEMS if i == space.systems else "+".join(dimension.keys)
        if isinstance(dimension, Between):
            width = dimension.high - dimension.low
            found[name] = (alternative[0].value - dimension.low) / width if width else 0.0
        else:
            found[name] = list(dimension.alternatives).index(alternative)
    return found


def _excess(option: Option | None) -> list[float]:
    """By how much a choice cannot be, for Optuna: nothing is over 0 where it can."""
    if option is None:
        return [1.0]
    return [sum(min(broken.excess, 1.0) for broken in option.broken)]


def front(options: Sequence[Option]) -> list[Option]:
    """Those of the allowed that no other beats in throughput, staleness and cost at a time, the freshest first. Staleness
    counts as it is shown, in hundredths of an update: a share of the updates before the pipeline is full is no choice."""
    allowed = [option for option in options if option.allowed]
    goods = [(option.row["samples_per_s"], -round(option.staleness, 2), -option.gpu_hours) for option in allowed]
    kept: dict[tuple[float, ...], Option] = {}
    for option, own in zip(allowed, goods, strict=True):
        beaten = any(all(a >= b for a, b in zip(other, own, strict=True)) and other != own for other in goods)
        if not beaten:
            kept.setdefault(own, option)
    return sorted(kept.values(), key=lambda option: (option.staleness, -option.merit))


def best_of_each(options: Sequence[Option], count: int) -> list[Option]:
    """The best of so many systems; the options are in their order."""
    found: dict[str, Option] = {}
    for option in options:
        found.setdefault(option.system, option)
    return list(found.values())[:count]


def require_choice(searched: Searched) -> None:
    """Raises `InputError`, with the reasons, where nothing that was tried is a choice."""
    if searched.allowed:
        return
    said = [f"{count} × {reason}" for reason, count in searched.reasons()[:3]]
    if searched.options:
        nearest = min(searched.options, key=lambda option: sum(broken.excess for broken in option.broken))
        why = ", ".join(broken.says for broken in nearest.broken)
        said.append(f"the nearest to the limits is {nearest.row['system']}: {why}")
    raise InputError(f"none of the {searched.points} points that were tried can be: {'; '.join(said)}")
