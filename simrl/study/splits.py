"""The split of a system's GPUs into rollout and training: a cheap look at another, and the search
of the best.

Invariant: a split is a whole number of rollout workers that can be executed (GPUs that divide,
memory of the trainer), and its worth is simulated. The split of a look follows from the run's own
idle shares alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from simrl.dispatch.elastic import BUSY_ENOUGH, TARGET
from simrl.errors import InputError
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.systems.recipes import make_system, parameters_of

WORTH = 0.10  # a gain below this is no reason to warn, and a split that cannot gain it is not tried
SLACK = 0.5  # occupancy below which rollout can give up GPUs at little cost
FIRST = (
    0.25,
    0.5,
    0.75,
    0.875,
)  # shares of rollout that a search tries first, beside the scenario's own
FINER = 0.01  # gain below which parts of nodes are no better than whole ones
FINEST = 32  # parts of all workers in which a search ends
Row = Mapping[str, Any]


def divides(scenario: Scenario) -> bool:
    """Return whether the scenario's system divides the cluster's GPUs by a share that stays
    fixed."""
    try:
        system = make_system(scenario.system.name, scenario.system.parameters)
    except InputError:  # the error is raised where the scenario is prepared
        return False
    known = (
        "rollout_share" in parameters_of(scenario.system.name) and scenario.cluster.train is None
    )
    return known and system.rollout_share is not None and not system.adapt_split_every


def units(scenario: Scenario) -> tuple[int, int]:
    """Return the scenario's rollout workers, and how many workers all GPUs make."""
    unit, gpus = scenario.cluster.worker_gpus, scenario.cluster.gpus
    share = scenario.system.parameters.get(
        "rollout_share", parameters_of(scenario.system.name)["rollout_share"]
    )
    return int(gpus * share + 1e-9) // unit, gpus // unit


def with_workers(scenario: Scenario, workers: int) -> Scenario:
    """Return the scenario with this number of rollout workers; the share has no more digits than it
    needs."""
    unit, gpus = scenario.cluster.worker_gpus, scenario.cluster.gpus
    exact = workers * unit / gpus
    shown = math.ceil(exact * 1e4) / 1e4
    share = shown if int(gpus * shown + 1e-9) // unit == workers else exact
    return scenario.with_fields("system", rollout_share=share)


def weight(scenario: Scenario) -> float:
    """Return the factor of a split's worth in a ranking: less than 1 if, on several nodes, rollout
    and training share one."""
    gpus, node = scenario.cluster.gpus, scenario.cluster.rollout_kind.gpus_per_node
    shares_node = (
        gpus > node
        and divides(scenario)
        and units(scenario)[0] * scenario.cluster.worker_gpus % node
    )
    return 1 - FINER if shares_node else 1.0


def possible(scenario: Scenario, inputs: InputCache) -> bool:
    """Return whether the scenario can be executed."""
    with suppress(InputError):
        prepare(scenario, inputs)
        return True
    return False


def looks(scenario: Scenario, row: Row, inputs: InputCache) -> Scenario | None:
    """Return the split that the run's idle shares suggest, if it may gain `WORTH`.

    A trainer that idles more than rollout does needs fewer GPUs: as many as keep it busy for
    `TARGET` of the time. Another trainer needs more, if rollout has some to spare: it idles, or its
    batches are not full.
    """
    if not divides(scenario):
        return None
    workers, of_all = units(scenario)
    trains, busy = of_all - workers, 1 - row["train_idle"]
    occupancy = row.get("occupancy")
    if busy < BUSY_ENOUGH[0] and row["train_idle"] > row["rollout_bubble"]:
        wanted = of_all - max(math.ceil(trains * busy / TARGET), 1)
        if wanted < (1 + WORTH) * workers:
            return None
    elif row["rollout_bubble"] > WORTH or (occupancy is not None and occupancy < SLACK):
        wanted = max(of_all - math.ceil(1.5 * trains), 1)
    else:
        return None
    return None if wanted == workers else nearest_split(scenario, wanted, inputs)


def nearest_split(
    scenario: Scenario, workers: int, inputs: InputCache, most: int | None = None
) -> Scenario | None:
    """Return the other split that can be executed with the number of rollout workers closest to
    this, among the `most` closest (None: an eighth of all)."""
    present, of_all = units(scenario)
    closest = sorted(range(1, of_all), key=lambda n: abs(n - workers))[
        : most or max(of_all // 8, 2)
    ]
    splits = (with_workers(scenario, n) for n in closest if n != present)
    return next((split for split in splits if possible(split, inputs)), None)


def best_splits(
    scenarios: Sequence[Scenario],
    rows_of: Callable[[Sequence[Scenario]], Sequence[Row]],
    inputs: InputCache,
) -> list[Scenario]:
    """Return each scenario, once, at the split with the most samples a second (`SplitSearch`);
    `rows_of` simulates."""
    searches = [SplitSearch(scenario, inputs) for scenario in scenarios]
    while tries := [(search, n) for search in searches for n in search.next()]:
        rows = rows_of([with_workers(search.scenario, n) for search, n in tries])
        for (search, n), row in zip(tries, rows, strict=True):
            search.rates[n] = row["samples_per_s"]
    best = [search.best for search in searches]
    # Scenarios that differed in their splits alone are one now.
    return [scenario for i, scenario in enumerate(best) if scenario not in best[:i]]


class SplitSearch:
    """The search of one scenario's split: a few splits, and then the middles on both sides of the
    best so far, until they are one worker or 1/`FINEST` of all apart. `rates` are the samples a
    second of what was simulated, by the number of workers."""

    def __init__(self, scenario: Scenario, inputs: InputCache) -> None:
        self.scenario, self._inputs = scenario, inputs
        self._own, self._of_all = units(scenario) if divides(scenario) else (0, 0)
        self._impossible: set[int] = set()
        self.rates: dict[int, float] = {}

    def next(self) -> list[int]:
        """Return the numbers of workers to simulate next; none at the end."""
        if not self.rates:
            return self._new([self._own, *(round(share * self._of_all) for share in FIRST)])
        best = max(self.rates, key=lambda n: self.rates[n])
        while True:
            known = {0, self._of_all, *self.rates, *self._impossible}
            below, above = max(n for n in known if n < best), min(n for n in known if n > best)
            finest = max(self._of_all // FINEST, 1)
            middles = [
                (best + other) // 2 for other in (below, above) if abs(other - best) > finest
            ]
            new = self._new(middles)
            if new or not middles:
                return new

    def _new(self, wanted: Iterable[int]) -> list[int]:
        """Return those that can be executed, and take note of the others."""
        new = [n for n in dict.fromkeys(wanted) if 0 < n < self._of_all and n not in self.rates]
        can = [n for n in new if possible(with_workers(self.scenario, n), self._inputs)]
        self._impossible.update({*new} - {*can})
        return can

    @property
    def best(self) -> Scenario:
        """The best split so far, whole nodes before parts of them that are hardly better."""
        splits = {n: with_workers(self.scenario, n) for n in self.rates}
        best = max(
            self.rates,
            key=lambda n: (self.rates[n] * weight(splits[n]), n == self._own),
            default=self._own,
        )
        return self.scenario if best == self._own else splits[best]
