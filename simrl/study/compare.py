"""Several scenarios simulated side by side, and a row of each.

Invariant: nothing is simulated before every scenario is found to be possible. Rows come in the order of the scenarios,
whichever finished first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from simrl.errors import InputError
from simrl.interrupts import ctrl_c_waits
from simrl.result.metrics import prices, summary
from simrl.result.result import Result
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.simulate.training_checks import TrainingMemoryError, TrainingNeed
from simrl.study.executors import Processes, each
from simrl.study.progress import compile_kernels, progress_bar
from simrl.systems.recipes import make_system

T = TypeVar("T")
Keep = Callable[[Scenario, Result], T]  # called with each run in the process that simulated it
LONGEST_NAME = 100  # of a run's folder; file systems take 255 bytes


def the_result(_: Scenario, result: Result) -> Result:
    """Return the result, to keep it whole."""
    return result


def require_possible(scenarios: Sequence[Scenario], inputs: InputCache) -> None:
    """Raise `InputError` for a scenario that cannot be executed, and for two whose results have one folder."""
    names = [folder_name(scenario) for scenario in scenarios]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InputError(f"{scenarios[i].file}: two runs are called {name}; leave one out")
    needs: list[TrainingNeed] = []
    short: dict[int, Scenario] = {}  # by their place in `needs`
    with progress_bar() as progress:
        for scenario in progress.track(scenarios, description="checking"):
            try:
                with ctrl_c_waits():  # the first one imports: Python ends by the signal if that is cut in two
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
    """Return the scenarios without those whose system trains on the GPUs that roll out although training has a pool of its own,
    and a line on these. Where no scenario would be left, all stay, and their check refuses them."""
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


def simulate_each(
    scenarios: Sequence[Scenario], jobs: int, inputs: InputCache, keep: Keep[T], pool: Processes | None = None
) -> list[T]:
    """Simulate all scenarios, in up to `jobs` processes (of `pool`, which stays), and return `keep` of each."""
    simulate = partial(_simulate, inputs, keep)
    if min(jobs, len(scenarios)) <= 1:
        return _simulate_here(scenarios, simulate)
    # The most GPUs first: they take longest, and the last to start should end soon.
    ordered = sorted(range(len(scenarios)), key=lambda i: -scenarios[i].cluster.all_gpus)
    kept: dict[int, T] = {}
    with nullcontext(pool) if pool else Processes(jobs, stay=True) as pool:
        pool.start(len(scenarios))
        compile_kernels(s.cluster.dp for s in scenarios)  # once here, while the processes start, not in each of them
        with progress_bar() as progress:
            bar = progress.add_task("runs simulated", total=len(scenarios))
            for i, made in each(simulate, [scenarios[i] for i in ordered], pool):
                kept[ordered[i]] = made
                progress.advance(bar)
    return [kept[i] for i in range(len(scenarios))]


def _simulate_here(scenarios: Sequence[Scenario], simulate: Callable[..., T]) -> list[T]:
    kept = []
    compile_kernels(s.cluster.dp for s in scenarios)
    with progress_bar() as progress:
        for i, scenario in enumerate(scenarios):
            bar = progress.add_task(f"{i + 1}/{len(scenarios)} {folder_name(scenario)}: updates", total=scenario.steps)
            kept.append(simulate(scenario, lambda step, bar=bar: progress.update(bar, completed=step + 1)))
            progress.remove_task(bar)
    return kept


def _simulate(inputs: InputCache, keep: Keep[T], scenario: Scenario, on_step: Callable[[int], None] | None = None) -> T:
    return keep(scenario, simulate_prepared(prepare(scenario, inputs), on_step))


def row_of(scenario: Scenario, result: Result) -> dict[str, Any]:
    """Return the metrics of a run over its window, `simrl.result.metrics.summary`."""
    return summary(result, scenario.warmup_steps, *prices(scenario.cluster.model_dump()))


def with_speedups(scenarios: Sequence[Scenario], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `speedup`, samples/s over the first row's, `speedup_in_variant`, over the first row with the same variant (cluster),
    and `folder`, the name of the run's folder."""
    first_in: dict[str, float] = {}
    for row in rows:
        first_in.setdefault(row["variant"], row["samples_per_s"])
    return [
        {
            **row,
            "speedup": row["samples_per_s"] / rows[0]["samples_per_s"],
            "speedup_in_variant": row["samples_per_s"] / first_in[row["variant"]],
            "folder": folder_name(scenario),
        }
        for scenario, row in zip(scenarios, rows, strict=True)
    ]


def folder_name(scenario: Scenario) -> str:
    """Return the name of a run's folder: its variant, system and parameters, in characters that every file system takes."""
    parameters = [f"{key}-{value}" for key, value in scenario.system.parameters.items()]
    text = "-".join([*scenario.variant.split(", "), scenario.system.name, *parameters])
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def run_names(scenarios: Sequence[Scenario]) -> str:
    """Return the runs as a message lists them: their systems, and for several runs of one system what they differ in."""
    systems = [scenario.system.name for scenario in scenarios]
    names = []
    for scenario in scenarios:
        same = [s for s in scenarios if s.system.name == scenario.system.name]
        differs = [
            f"{key}={value['name'] if isinstance(value, Mapping) and 'name' in value else value}"
            for key, value in scenario.system.parameters.items()
            if any(s.system.parameters.get(key) != value for s in same)
        ]
        details = ", ".join([*differs, *([scenario.variant] if scenario.variant and len(same) > 1 else [])])
        names.append(f"{scenario.system.name} with {details}" if details else scenario.system.name)
    return (", " if len(set(systems)) == len(systems) else "; ").join(names)
