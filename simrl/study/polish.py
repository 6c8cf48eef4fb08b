"""Polishing: from the best point of each system, one coordinate after another, until no neighbour
is better.

Coordinates are the dimensions of the space, and what a search that lists everything has no room
for: every number of rollout workers, η by one, the fate of stale groups, concurrency, dispatch.
Keys that the user named keep to their values. Split, η and concurrency depend on each other (more
GPUs that train need more responses under way, which are older), so the leading systems also try
small steps of two and of all of them at once, splits far from their own, and a step of each with
another fate of stale groups. Invariant: every tried point is simulated, and a point is better only
within the limits, or nearer to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product
from typing import Any, get_args

from simrl.errors import InputError
from simrl.pipelines.areal import CONCURRENT_BATCHES
from simrl.scenario.load import PARAMETER, Setting
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.study.goal import Goal
from simrl.study.grid import SYSTEMS, Alternative, Between, Listed, value_of
from simrl.study.point import Point
from simrl.study.search import Option, Searched, best_of_each
from simrl.study.search_space import LAYOUT, SHARE, Chosen, Space, parts
from simrl.study.splits import divides, possible, units, with_workers
from simrl.study.store import Outcomes
from simrl.systems.recipes import recipe_parameters
from simrl.systems.system import Plain

LEAST_GAIN = 1e-3  # of a step: less is not worth the next one
FAR = 0.7  # of the best merit: a system that has less seeks its split alone
# of the best merit: a system that has more tries steps along several coordinates at once
CLOSE = 0.9
WORKERS = 8  # the first step of a split is this part of all workers
# Of the GPUs that now train without a wait: fewer are not simulated, though they may train a little
# better.
ENOUGH = 0.9
WIDE = ("wide",)  # the coordinate of splits far from the present one
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "on_stale": ("train", "wait", "drop"),
    "dispatch": get_args(Plain),
}
# The fate of stale groups matters only with more responses under way, and those gain only with it.
STALE = f"{PARAMETER}on_stale"
GPUS = ("cluster.gpus", "cluster.train.gpus")
COUNTS = ("eta", "staleness", "max_concurrent", "per_replica", "sub_batch")


def polish(space: Space, goal: Goal, outcomes: Outcomes, searched: Searched, most: int) -> bool:
    """Simulate at most `most` further points, those around the best of each system, and add them to
    what was searched. Return whether it came to its end: no neighbour of the best point of any
    system is better."""
    known = {option.point.hash: option for option in searched.options}
    before = len(known)

    def simulate(wanted: Iterable[tuple[Point, Chosen]]) -> None:
        room, new = most + before - len(known), dict[str, Point]()
        for point, chosen in wanted:
            if point.hash not in searched.seen and len(new) < room:
                new[point.hash] = point
                searched.chosen[point.hash] = chosen
        for point, outcome in zip(new.values(), outcomes.of(list(new.values())), strict=True):
            if (option := searched.add(point, outcome, goal)) is not None:
                known[point.hash] = option

    simulate(_first_possible(space, {option.system for option in searched.options}))
    searched.sort()
    starts = best_of_each(searched.options)  # also if they exceed a limit
    climbers = [_Climber(space, option, searched.chosen[option.point.hash]) for option in starts]
    while active := _active(climbers):
        beside = [(climber, climber.neighbours()) for climber in active]
        simulate(neighbour for _, neighbours in beside for neighbour in neighbours)
        for climber, neighbours in beside:
            climber.move(
                [(known[point.hash], chosen) for point, chosen in neighbours if point.hash in known]
            )
        if len(known) - before >= most:
            break
    searched.sort()
    return not active


def _active(climbers: Sequence[_Climber]) -> list[_Climber]:
    """Return those that are not at their end."""
    most = max((climber.worth for climber in climbers), default=(0.0, 0.0))
    return [climber for climber in climbers if not climber.ended(most)]


def _first_possible(space: Space, has: Collection[str]) -> Iterator[tuple[Point, Chosen]]:
    """Yield for each system that has no option yet a point that can be executed: the file's own,
    but with a layout of a worker and a split that memory and the layout of training allow."""
    inputs = InputCache()
    for as_written in space.as_in_the_file():
        (system,) = as_written[SYSTEMS]
        deciding = {
            name: dimension.alternatives
            for name, dimension in space.matters(system.value).items()
            if isinstance(dimension, Listed)
            and {SHARE, *LAYOUT, *GPUS}.intersection(dimension.keys)
        }
        for values in () if parts(system.value)[0] in has else product(*deciding.values()):
            chosen = {**as_written, **dict(zip(deciding, values, strict=True))}
            with suppress(InputError):  # a value that no scenario can have
                if possible((point := space.point(chosen)).scenario, inputs):
                    yield point, chosen
                    break


def _worth(option: Option) -> tuple[float, float]:
    """Return what makes an option better: its merit within the limits; else how little it exceeds
    them."""
    if option.allowed:
        return 1.0, option.weighed
    return 0.0, -sum(broken.excess for broken in option.broken)


class _Climber:
    """The way of one system to its best point: its option, the coordinates that are next (one name,
    or several that change at once), and the step of the split."""

    def __init__(self, space: Space, option: Option, chosen: Chosen) -> None:
        self._space, self._option, self._chosen = space, option, dict(chosen)
        (system,) = chosen[SYSTEMS]
        self._name, self._parameters = parts(system.value)
        self._dimensions = space.matters(system.value)
        self._step = max(self._of_all // WORKERS, 1)
        names = list(self._named())
        coupled = [
            name for name in names if name == SHARE or name.removeprefix(PARAMETER) in COUNTS
        ]
        self._single = len(names)
        self._coordinates: list[tuple[str, ...]] = [(name,) for name in names]
        self._coordinates += [
            several for n in range(2, len(coupled) + 1) for several in combinations(coupled, n)
        ]
        self._coordinates += [WIDE] * (SHARE in names)
        if STALE in names:  # at the end, so that a smaller budget is spent as without them
            self._coordinates += [(STALE, name) for name in coupled]
        self._next = self._without_gain = 0

    @property
    def _scenario(self) -> Scenario:
        return self._option.point.scenario

    @property
    def _of_all(self) -> int:
        """How many workers all GPUs make."""
        return self._scenario.cluster.gpus // self._scenario.cluster.worker_gpus

    @property
    def worth(self) -> tuple[float, float]:
        return _worth(self._option)

    def ended(self, best: tuple[float, float]) -> bool:
        """Return whether no neighbour is better, of those that are worth a look beside the best of
        all systems."""
        kept, merit = self.worth
        far = kept < best[0] or merit < FAR * best[1]
        close = kept == best[0] and merit >= CLOSE * best[1]
        looks = (
            len(self._coordinates) if close else 1 if far and self._option.allowed else self._single
        )
        self._next %= looks
        return self._without_gain >= looks

    def neighbours(self) -> list[tuple[Point, Chosen]]:
        """Return the points beside this one along the next coordinates that can be made."""
        neighbours: list[tuple[Point, Chosen]] = []
        names = self._coordinates[self._next]
        wide = names == WIDE
        beside = (
            [self._wide()] if wide else [self._beside(name, near=len(names) > 1) for name in names]
        )
        for alternatives in product(*beside):
            if len(names) > 1 and not self._one_way(names, alternatives):
                continue
            chosen = {
                **self._chosen,
                **dict(zip((SHARE,) if wide else names, alternatives, strict=True)),
            }
            with suppress(InputError):  # a value that no scenario can have
                point = self._space.point(chosen)
                starves = SHARE in chosen and self._starves(point.scenario)
                if point.hash != self._option.point.hash and not starves:
                    neighbours.append((point, chosen))
        return neighbours

    def _one_way(self, names: Sequence[str], alternatives: Sequence[Alternative]) -> bool:
        """Return whether steps help each other: fewer GPUs that roll out, and more responses under
        way; or the reverse."""
        values = (
            (name, setting.value)
            for name, (setting,) in zip(names, alternatives, strict=True)
            if setting.value and name != STALE
        )
        return (
            len({(value > self._present(name)) == (name == SHARE) for name, value in values}) <= 1
        )

    def _starves(self, scenario: Scenario) -> bool:
        """Return whether GPUs that train are too few to keep the present rate, even if they never
        waited."""
        if not (self._option.allowed and divides(self._scenario) and divides(scenario)):
            return False
        (rolls, of_all), (other, _) = units(self._scenario), units(scenario)
        busy = 1 - float(self._option.row["train_idle"])
        return of_all - other < ENOUGH * busy * (of_all - rolls)

    def move(self, neighbours: Sequence[tuple[Option, Chosen]]) -> None:
        """Go to the best neighbour, if it is better, and on to the next coordinates."""
        best, chosen = max(
            neighbours, key=lambda n: _worth(n[0]), default=(self._option, self._chosen)
        )
        (kept, merit), (there_kept, there) = self.worth, _worth(best)
        if there_kept > kept or (there_kept == kept and there > merit + LEAST_GAIN * abs(merit)):
            self._option, self._chosen, self._without_gain = best, dict(chosen), 0
            return
        if self._coordinates[self._next] == (SHARE,) and self._step > 1:
            self._step //= 2
            self._without_gain = 0
        else:
            self._without_gain += 1
        self._next = (self._next + 1) % len(self._coordinates)

    def _named(self) -> Iterator[str]:
        """Yield the names of the coordinates of this system; the split first, as most depends on
        it."""
        known = recipe_parameters(self._name)
        further = [
            key for key in (*CHOICES, *COUNTS) if key in known and key not in self._parameters
        ]
        names = dict.fromkeys([*self._dimensions, *(f"{PARAMETER}{key}" for key in further)])
        yield from sorted(names, key=lambda name: name != SHARE)

    def _beside(self, name: str, near: bool = False) -> Iterator[Alternative]:
        """Yield the alternatives beside the present one; `near`: only the next ones."""
        dimension, free = self._dimensions.get(name), name not in self._space.named
        key = name.removeprefix(PARAMETER)
        if name == SHARE and (free or isinstance(dimension, Between)):
            workers = round(value_of(self._scenario, SHARE) * self._of_all)
            yield from self._splits((workers - self._step, workers + self._step))
        elif isinstance(dimension, Between):
            value, step = value_of(self._scenario, name), (dimension.high - dimension.low) / 16
            inside = (
                v for v in (value - step, value + step) if dimension.low <= v <= dimension.high
            )
            yield from ((Setting(name, other, dimension.text),) for other in inside)
        elif free and key in (*CHOICES, *COUNTS):
            values = _steps(key, self._present(name), near)
            yield from ((Setting(name, value, f"{name}={value}"),) for value in values)
        elif dimension is not None:
            yield from _listed(list(dimension.alternatives), self._scenario)

    def _wide(self) -> Iterator[Alternative]:
        """Yield splits of the whole range: one may be better that no step leads to."""
        dimension = self._dimensions.get(SHARE)
        if isinstance(dimension, Listed) and SHARE in self._space.named:
            yield from dimension.alternatives[:: -(-len(dimension.alternatives) // 4)]
        else:
            yield from self._splits(self._of_all * n // 8 for n in (1, 3, 5, 7))

    def _splits(self, workers: Iterable[int]) -> Iterator[Alternative]:
        """Yield the splits with these numbers of rollout workers that the space has."""
        within = self._dimensions.get(SHARE)
        for n in workers:
            if 0 < n < self._of_all:
                share = with_workers(self._scenario, n).system.parameters["rollout_share"]
                if not isinstance(within, Between) or within.low <= share <= within.high:
                    yield (Setting(SHARE, share, f"{SHARE}={share}"),)

    def _present(self, name: str) -> Any:
        """Return the value of a coordinate; of a number that a system sets itself, the number by
        its rule."""
        value, key = value_of(self._scenario, name), name.removeprefix(PARAMETER)
        if value is not None or key not in COUNTS:
            return value
        batch = self._space.batch_groups
        if key == "max_concurrent":
            return CONCURRENT_BATCHES * batch
        cluster = self._scenario.cluster
        workers = int(round(value_of(self._scenario, SHARE) * cluster.gpus) // cluster.worker_gpus)
        return max(batch // max(workers, 1), 1)  # a worker's even share


def _steps(key: str, value: Any, near: bool) -> Iterable[Any]:
    """Return the values of a parameter of a system beside its present one; `near`: only the next
    ones."""
    if key in CHOICES:
        return [other for other in CHOICES[key] if other != value]
    if key == "staleness":
        return [round(other, 3) for other in (value / 2, value * 2) if 0.05 <= other <= 4]
    steps: tuple[int, ...] = (
        (value - 1, value + 1) if key == "eta" else (value * 3 // 4, value * 4 // 3)
    )
    steps = steps if near else (value // 2, *steps, value * 2)
    least = 0 if key == "eta" else 1
    return [other for other in dict.fromkeys(steps) if other >= least and other != value]


def _listed(alternatives: Sequence[Alternative], scenario: Scenario) -> Sequence[Alternative]:
    """Return the neighbours in a list of numbers, in another list all others."""
    has = [
        all(s.value == value_of(scenario, s.key) for s in alternative)
        for alternative in alternatives
    ]
    ordered = all(
        isinstance(s.value, int | float) for alternative in alternatives for s in alternative
    )
    if ordered and True in has and len(alternatives[0]) == 1:
        place = has.index(True)
        return [alternatives[i] for i in (place - 1, place + 1) if 0 <= i < len(alternatives)]
    return [
        alternative for alternative, present in zip(alternatives, has, strict=True) if not present
    ]
