"""Several scenarios simulated side by side: a row of each, and what further runs add to it.

Invariant: no run is kept before every scenario is found to be possible. The kept runs have the
scenarios' own seed; further runs (other splits, seeds, assumed seconds) only add to their rows.
Rows come in the order of the scenarios, whichever finished first.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from simrl.errors import InputError
from simrl.interrupts import ctrl_c_waits
from simrl.result.metrics import speedups
from simrl.result.result import Result
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate_prepared
from simrl.simulate.training_checks import TrainingMemoryError, TrainingNeed
from simrl.study.point import Row, row_of
from simrl.study.progress import compile_kernels, progress_bar
from simrl.study.robustness import assumed_seconds, scaled
from simrl.study.splits import WORTH, best_splits, looks
from simrl.study.store import Outcomes, simulating, with_ranges
from simrl.systems.recipes import make_system

T = TypeVar("T")
Keep = Callable[[Scenario, Result], T]  # called with each run in the process that simulated it
SEEDS = 3
FACTORS = {
    "samples_per_s_assumed_half": 0.5,
    "samples_per_s_assumed_double": 2.0,
}  # by the key in a row
LONG_S = 600.0  # a comparison that took longer is repeated only on request
HEADING = "Ranking with assumed seconds × 0.5 and × 2"
LONGEST_NAME = 100  # of a run's folder; file systems take 255 bytes


@dataclass(frozen=True)
class Beside:
    """The further runs. `ranking`: with other assumed seconds (None: if it is quick). `best_split`:
    search every system's split first (None: look at others, and warn). `sure`: with two further
    seeds. `updates`: whole batches of the planned run whose hours and cost are wanted. `alike`: a
    trace whose responses of a prompt are alike."""

    ranking: bool | None = None
    best_split: bool | None = None
    sure: bool = False
    updates: int | None = None
    alike: Path | None = None


ALONE = Beside(ranking=False, best_split=False)


@dataclass(frozen=True)
class Compared(Generic[T]):
    """The scenarios as they were simulated, what was kept of each, their rows, and why they have no
    ranking, if so."""

    scenarios: list[Scenario]
    kept: list[T]
    rows: list[Row]
    unranked: str


class _Further(NamedTuple):
    """A further run: the place of the row that it adds to, the key that it adds, its scenario."""

    place: int
    key: str
    scenario: Scenario


def simulate_compared(
    scenarios: Sequence[Scenario],
    jobs: int,
    inputs: InputCache,
    keep: Keep[T],
    beside: Beside = ALONE,
) -> Compared[T]:
    """Simulate all scenarios and the further runs `beside` them, in up to `jobs` processes. Raise
    `InputError` for a scenario that cannot be executed."""
    with simulating(jobs, inputs=inputs) as outcomes:
        if beside.best_split:
            scenarios = best_splits(scenarios, partial(_rows, outcomes), inputs)
        require_possible(scenarios, inputs)
        started = time.monotonic()
        runs = _simulate_each(scenarios, jobs, outcomes, partial(_simulate, inputs, keep))
        took_s = time.monotonic() - started
        runs_prepared = [prepare(scenario, inputs) for scenario in scenarios]
        rows = [
            {**row, **_split(prepared), **_whole_run(prepared, row, beside.updates)}
            for prepared, (row, _) in zip(runs_prepared, runs, strict=True)
        ]
        rows = [{**row, **dict.fromkeys(FACTORS)} for row in with_speedups(scenarios, rows)]
        again, unranked = _ranked_again(runs_prepared, beside.ranking, took_s)
        further = [
            _Further(place, "samples_per_s_spread", scenario)
            for place, simulated in enumerate(scenarios if beside.sure else ())
            for scenario in further_seeds(simulated)
        ]
        further += again
        if beside.best_split is None and took_s <= LONG_S:
            looked_at = [looks(s, row, inputs) for s, row in zip(scenarios, rows, strict=True)]
            further += [_Further(i, "better_split", s) for i, s in enumerate(looked_at) if s]
        for run, row in zip(
            further, _rows(outcomes, [run.scenario for run in further]), strict=True
        ):
            _add(rows[run.place], run, row, inputs)
        rows = with_ranges(scenarios, rows, partial(_rows, outcomes), beside.alike)
    return Compared(list(scenarios), [kept for _, kept in runs], rows, unranked)


def _rows(outcomes: Outcomes, scenarios: Sequence[Scenario]) -> list[Row]:
    with progress_bar() as progress:
        bar = progress.add_task("further runs simulated", total=len(scenarios))
        outcomes.on_point = lambda: progress.advance(bar)
        return outcomes.rows(scenarios)


def _simulate_each(
    scenarios: Sequence[Scenario],
    jobs: int,
    outcomes: Outcomes,
    simulate: Callable[..., tuple[Row, T]],
) -> list[tuple[Row, T]]:
    """Return the row of each scenario and what is kept of it; one process also shows its
    updates."""
    if min(jobs, len(scenarios)) > 1:
        outcomes.start(len(scenarios))
    # Once here, while the processes start, not in each of them.
    compile_kernels(s.cluster.dp for s in scenarios)
    made = []
    with progress_bar() as progress:
        if min(jobs, len(scenarios)) > 1:
            bar = progress.add_task("runs simulated", total=len(scenarios))
            outcomes.on_point = lambda: progress.advance(bar)
            # The most GPUs first: they take longest, and the last to start should end soon.
            order = sorted(range(len(scenarios)), key=lambda i: -scenarios[i].cluster.all_gpus)
            done = outcomes.each(simulate, [scenarios[i] for i in order])
            return [
                run for _, run in sorted(zip(order, done, strict=True), key=lambda pair: pair[0])
            ]
        for i, scenario in enumerate(scenarios):
            bar = progress.add_task(
                f"{i + 1}/{len(scenarios)} {folder_name(scenario)}: updates", total=scenario.steps
            )
            made.append(
                simulate(scenario, lambda step, bar=bar: progress.update(bar, completed=step + 1))
            )
            progress.remove_task(bar)
    return made


def _simulate(
    inputs: InputCache,
    keep: Keep[T],
    scenario: Scenario,
    on_step: Callable[[int], None] | None = None,
) -> tuple[Row, T]:
    result = simulate_prepared(prepare(scenario, inputs), on_step)
    return row_of(scenario, result), keep(scenario, result)


def _split(prepared: Prepared) -> Row:
    """Return the GPUs that roll out and that train, and what the further runs fill in."""
    return {
        "rollout_gpus": prepared.gpus if prepared.colocated else prepared.rollout_gpus,
        "train_gpus": prepared.train_gpus,
        "colocated": prepared.colocated,
        "samples_per_s_spread": None,
        "better_split": None,
    }


def _whole_run(prepared: Prepared, row: Row, updates: int | None) -> Row:
    """Return the share of the trace's batch that an update of the row trains, the hours of a run of
    `updates` whole batches at the row's rate, and their cost; None without `updates`."""
    batch = len(prepared.trace) / len(prepared.trace.step_slices)
    share, price = row["samples_per_s"] * row["step_s"] / batch, row["cost_per_1k_samples"]
    samples = batch * (updates or 0)
    hours = samples / row["samples_per_s"] / 3600 if updates else None
    cost = price * samples / 1000 if updates and price is not None else None
    return {"update_share": share, "run_hours": hours, "run_cost": cost}


def further_seeds(scenario: Scenario) -> list[Scenario]:
    """Return the scenario with each of the next seeds; with its own they are `SEEDS`."""
    return [scenario.model_copy(update={"seed": scenario.seed + i}) for i in range(1, SEEDS)]


def _ranked_again(
    runs: Sequence[Prepared], ranking: bool | None, took_s: float
) -> tuple[list[_Further], str]:
    """Return the runs with their assumed seconds at each of `FACTORS`, for a `ranking` (None: if
    the comparison took at most `LONG_S`); or why there are none."""
    compared = Counter(prepared.scenario.variant for prepared in runs)
    if ranking is False or max(compared.values()) == 1:
        return [], ""
    again = [
        _Further(i, key, scaled(prepared, factor))
        for i, prepared in enumerate(runs)
        if compared[prepared.scenario.variant] > 1 and assumed_seconds(prepared)
        for key, factor in FACTORS.items()
    ]
    if not again:
        return [], "Ranking: rests on no assumed seconds"
    if ranking is None and took_s > LONG_S:
        return [], f"{HEADING}: --ranking simulates it (the comparison took {took_s:.0f} s)"
    return again, ""


def _add(row: Row, run: _Further, other: Row, inputs: InputCache) -> None:
    """Add what a further run says to the row that it belongs to."""
    rate, gain = other["samples_per_s"], other["samples_per_s"] / row["samples_per_s"]
    if run.key in FACTORS:
        row[run.key] = rate
    elif run.key == "samples_per_s_spread":  # the largest distance of the seeds; settled if all are
        row[run.key] = max(row[run.key] or 0.0, abs(rate - row["samples_per_s"]))
        row["settled"] = row["settled"] and other["settled"]
    elif gain > 1 + WORTH:
        split = _split(prepare(run.scenario, inputs))
        share = run.scenario.system.parameters["rollout_share"]
        gpus = {key: split[key] for key in ("rollout_gpus", "train_gpus")}
        row[run.key] = {"rollout_share": share, **gpus, "gain": gain}


def the_result(_: Scenario, result: Result) -> Result:
    """Return the result, to keep it whole."""
    return result


def require_possible(scenarios: Sequence[Scenario], inputs: InputCache) -> None:
    """Raise `InputError` for a scenario that cannot be executed, and for two whose results have one
    folder."""
    names = [folder_name(scenario) for scenario in scenarios]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InputError(f"{scenarios[i].file}: two runs are called {name}; leave one out")
    needs: list[TrainingNeed] = []
    short: dict[int, Scenario] = {}  # by their place in `needs`
    with progress_bar() as progress:
        for scenario in progress.track(scenarios, description="checking"):
            try:
                with (
                    ctrl_c_waits()
                ):  # the first one imports: Python ends by the signal if that is cut in two
                    prepared = prepare(scenario, inputs)
                needs.append(prepared.training_need(prepared.train_gpus))
            except TrainingMemoryError as error:
                short[len(needs)] = scenario
                needs.append(error.need)
            except InputError as error:
                raise InputError(f"{_named(scenario)}: {error}") from error
    for i, scenario in short.items():
        raise InputError(f"{_named(scenario)}: {TrainingMemoryError(needs[i], needs)}")


def _named(scenario: Scenario) -> str:
    run = ", ".join(part for part in (scenario.system.name, scenario.variant) if part)
    return f"{scenario.file} ({run})"


def without_colocated(scenarios: Sequence[Scenario]) -> tuple[list[Scenario], list[str]]:
    """Return the scenarios whose system can train on a pool of its own, if training has one, and a
    line on the others. If no scenario would be left, all stay, and their check refuses them."""
    out = [
        s
        for s in scenarios
        if s.cluster.train and make_system(s.system.name, s.system.parameters).rollout_share is None
    ]
    kept = [scenario for scenario in scenarios if scenario not in out]
    if not out or not kept:
        return list(scenarios), []
    names = ", ".join(dict.fromkeys(scenario.system.name for scenario in out))
    return kept, [
        f"Left out, as cluster.train gives training GPUs of its own and they train where they roll out: {names}"
    ]


def with_speedups(
    scenarios: Sequence[Scenario], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Add the speed-ups (`simrl.result.metrics.speedups`), and `folder`, the name of the run's
    folder."""
    return [
        {**row, **over_first, "folder": folder_name(scenario)}
        for scenario, row, over_first in zip(scenarios, rows, speedups(rows), strict=True)
    ]


def folder_name(scenario: Scenario) -> str:
    """Return the name of a run's folder: its variant, system and parameters, in characters that
    every file system takes."""
    parameters = [f"{key}-{value}" for key, value in scenario.system.parameters.items()]
    text = "-".join([*scenario.variant.split(", "), scenario.system.name, *parameters])
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def run_names(scenarios: Sequence[Scenario]) -> str:
    """Return the runs as a message lists them: their systems, and for several runs of one system
    what they differ in."""
    systems = [scenario.system.name for scenario in scenarios]
    names = []
    for scenario in scenarios:
        same = [s for s in scenarios if s.system.name == scenario.system.name]
        differs = [
            f"{key}={value['name'] if isinstance(value, Mapping) and 'name' in value else value}"
            for key, value in scenario.system.parameters.items()
            if any(s.system.parameters.get(key) != value for s in same)
        ]
        details = ", ".join(
            [*differs, *([scenario.variant] if scenario.variant and len(same) > 1 else [])]
        )
        names.append(f"{scenario.system.name} with {details}" if details else scenario.system.name)
    return (", " if len(set(systems)) == len(systems) else "; ").join(names)
