"""A comparison and what is simulated beside its runs: best splits, further seeds, other assumed seconds, other splits.

Invariant: the runs that are kept are simulated at the scenarios' own seed; everything else is simulated beside them and only
adds to their rows. One pool of processes does it all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.study.compare import Keep, T, require_possible, row_of, simulate_each, with_speedups
from simrl.study.executors import Processes
from simrl.study.ranking import LONG_S, assumed_rates
from simrl.study.splits import WORTH, best_splits, looks

SEEDS = 3
Row = dict[str, Any]


@dataclass(frozen=True)
class Beside:
    """Simulations beside the runs. `ranking`: with other assumed seconds (None: if it is quick). `best_split`: search
    every system's split first (None: look at others, and warn). `sure`: with two further seeds. `updates`: of the whole
    run whose hours and cost are wanted, of a whole batch each."""

    ranking: bool | None = None
    best_split: bool | None = None
    sure: bool = False
    updates: int | None = None


ALONE = Beside(ranking=False, best_split=False)


@dataclass(frozen=True)
class Compared(Generic[T]):
    """The scenarios as they were simulated, what was kept of each, their rows, and why they have no ranking, if so."""

    scenarios: list[Scenario]
    kept: list[T]
    rows: list[Row]
    unranked: str


def simulate_compared(
    scenarios: Sequence[Scenario],
    jobs: int,
    inputs: InputCache,
    keep: Keep[T],
    as_row: Callable[[Scenario, T], Row],
    beside: Beside,
) -> Compared[T]:
    """Simulate all scenarios, and what stands `beside` them. Raise `InputError` for one that cannot be executed."""
    with Processes(jobs, stay=True) as pool:
        rows_of = partial(simulate_each, jobs=jobs, inputs=inputs, keep=row_of, pool=pool)
        if beside.best_split:
            scenarios = best_splits(scenarios, rows_of, inputs)
        require_possible(scenarios, inputs)
        started = time.monotonic()
        kept = simulate_each(scenarios, jobs, inputs, keep, pool)
        took_s = time.monotonic() - started
        rows = [
            {**row, **_split(scenario, inputs), **_whole_run(scenario, row, inputs, beside.updates)}
            for scenario, row in zip(scenarios, map(as_row, scenarios, kept), strict=True)
        ]
        if beside.sure:
            rows = _with_seeds(scenarios, rows, rows_of)
        rates, unranked = assumed_rates(scenarios, jobs, inputs, pool, beside.ranking, took_s)
        if beside.best_split is None and took_s <= LONG_S:
            rows = _with_look(scenarios, rows, rows_of, inputs)
    rows = [{**row, **ranked} for row, ranked in zip(with_speedups(scenarios, rows), rates, strict=True)]
    return Compared(list(scenarios), kept, rows, unranked)


def _split(scenario: Scenario, inputs: InputCache) -> Row:
    """Return the GPUs that roll out and that train, and what the further simulations fill in."""
    prepared = prepare(scenario, inputs)
    return {
        "rollout_gpus": prepared.gpus if prepared.colocated else prepared.rollout_gpus,
        "train_gpus": prepared.train_gpus,
        "colocated": prepared.colocated,
        "samples_per_s_spread": None,
        "better_split": None,
    }


def _whole_run(scenario: Scenario, row: Row, inputs: InputCache, updates: int | None) -> Row:
    """Return the hours of a run of `updates` whole batches at the row's rate, and their cost; None of what is not asked for."""
    if updates is None:
        return {"run_hours": None, "run_cost": None}
    trace = prepare(scenario, inputs).trace
    samples, price = updates * len(trace) / len(trace.step_slices), row["cost_per_1k_samples"]
    hours = samples / row["samples_per_s"] / 3600
    return {"run_hours": hours, "run_cost": None if price is None else price * samples / 1000}


def _with_seeds(scenarios: Sequence[Scenario], rows: Sequence[Row], rows_of: Callable[..., list[Row]]) -> list[Row]:
    """Add the largest distance of samples/s to those of the next seeds; a run has settled if it has at each."""
    further = [s.model_copy(update={"seed": s.seed + i}) for i in range(1, SEEDS) for s in scenarios]
    found = rows_of(further)
    made = []
    for i, row in enumerate(rows):
        own = [row, *found[i :: len(rows)]]
        apart = max(abs(other["samples_per_s"] - row["samples_per_s"]) for other in own)
        made.append({**row, "samples_per_s_spread": apart, "settled": all(other["settled"] for other in own)})
    return made


def _with_look(
    scenarios: Sequence[Scenario], rows: Sequence[Row], rows_of: Callable[..., list[Row]], inputs: InputCache
) -> list[Row]:
    """Add to a row the better of the splits that its idle shares suggest, if that is more than `WORTH` faster."""
    tried = [(i, split) for i, s in enumerate(scenarios) for split in looks(s, rows[i], inputs)]
    made = list(rows)
    for (i, split), row in zip(tried, rows_of([split for _, split in tried]) if tried else [], strict=True):
        gain = row["samples_per_s"] / rows[i]["samples_per_s"]
        better = made[i]["better_split"]
        if gain > max(1 + WORTH, better["gain"] if better else 0.0):
            share = split.system.parameters["rollout_share"]
            gpus = {key: value for key, value in _split(split, inputs).items() if key.endswith("_gpus")}
            made[i] = {**made[i], "better_split": {"rollout_share": share, **gpus, "gain": gain}}
    return made
