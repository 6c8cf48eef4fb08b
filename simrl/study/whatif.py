"""The systems that a calibrated run is compared with: each with as many samples as the run, at its
best split.

Invariant: every row trains as many samples as the run did, from its first step on, so rows differ
in their system and not in the steps that they got to: where responses grow, equal numbers of
updates of other sizes are not the same work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from simrl.errors import InputError
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.study.splits import best_splits, divides, nearest_split, units, with_workers
from simrl.study.store import simulating
from simrl.systems.recipes import make_system

TRIAL_UPDATES = 4  # to see how many samples an update trains


def alternatives(file: Path, systems: Sequence[Any], jobs: int) -> tuple[list[Scenario], list[str]]:
    """Return the run's own scenario and one of each system (a name, or a dictionary that has one),
    and remarks on them.

    Where a system cannot share the GPUs as the run did, it gets smaller parts, and the run's own
    system is added in these parts too, which separates the effect of the parts from the effect of
    the system.
    """
    run = load_scenarios(file)[0]
    cache = InputCache()
    batch = _samples_of_an_update(run, cache)
    scenarios, remarks = [run], []
    with simulating(jobs, inputs=cache) as outcomes:
        for system in systems:
            (other,) = load_scenarios(file, [f"systems={json.dumps([system])}"])
            scenario = _in_parts(other, cache)
            name = scenario.system.name
            if scenario.variant:
                beside = scenario.model_copy(update={"system": run.system})
                scenarios += [beside] if beside not in scenarios else []
                remarks.append(
                    f"{name} cannot share {run.cluster.gpus} GPUs as the run had them (tp {run.cluster.tp}, "
                    f"{run.training.sequence_parallel} a sequence in training): simulated with "
                    f"{scenario.variant}, as is the run's own system beside it. The corrections are of "
                    "the run as it was: read it as an extrapolation."
                )
            share = batch / _samples_of_an_update(scenario, cache)
            if abs(share - 1) > 0.02:
                scenario = scenario.model_copy(update={"steps": max(round(run.steps * share), 1)})
                remarks.append(
                    f"{name}: {scenario.steps} updates train the samples of the run's {run.steps}."
                )
            if divides(scenario) and "rollout_share" not in other.system.parameters:
                (best,) = best_splits([scenario], outcomes.rows, cache)
                workers, of_all = units(best)
                scenario = with_workers(best, workers)  # its share is shown, also a default
                remarks.append(
                    f"{name}: {workers} of {of_all} workers roll out, the best split that was found."
                )
            scenarios.append(scenario)
        return scenarios, remarks


def _samples_of_an_update(scenario: Scenario, cache: InputCache) -> float:
    few = scenario.model_copy(update={"steps": min(scenario.steps, TRIAL_UPDATES)})
    return float(simulate_prepared(prepare(few, cache)).steps.column("samples").to_numpy().mean())


def check_system(system: Any) -> None:
    """Raise `InputError` for an entry that is no system, before minutes go into a calibration."""
    if isinstance(system, str):
        make_system(system, {})
    elif isinstance(system, dict) and isinstance(system.get("name"), str):
        make_system(
            system["name"], {str(key): value for key, value in system.items() if key != "name"}
        )
    else:
        raise InputError(f"system {system}: give a name, or {{name: areal, eta: 4}}")


def _in_parts(scenario: Scenario, cache: InputCache) -> Scenario:
    """Return the scenario at a possible split in the first parts that have one, when tp, and if
    need be the number of GPUs that share a sequence in training, are halved repeatedly; a GPU
    trains as many tokens at a time as before."""
    training, own_tp, own_shared = (
        scenario.training,
        scenario.cluster.tp,
        scenario.training.sequence_parallel,
    )
    refused: InputError | None = None
    for tp, shared in product(_halved(own_tp), _halved(own_shared)):
        tokens = training.tokens_per_microbatch * shared // own_shared
        changes = [f"cluster.tp={tp}"] if tp != own_tp else []
        changes += [f"training.sequence_parallel={shared}"] if shared != own_shared else []
        smaller = scenario.model_copy(update={"variant": ", ".join(changes)}).with_fields(
            "cluster", tp=tp
        )
        smaller = smaller.with_fields(
            "training", sequence_parallel=shared, tokens_per_microbatch=tokens
        )
        try:
            prepare(smaller, cache)
            return smaller
        except InputError as error:
            refused = refused or error
        if divides(smaller) and "rollout_share" not in scenario.system.parameters:
            workers, of_all = units(smaller)
            if split := nearest_split(smaller, workers, cache, most=of_all):
                return split
    assert refused is not None
    raise refused


def _halved(number: int) -> Iterator[int]:
    """Yield a number, then its halves as long as they are whole."""
    yield number
    if number % 2 == 0:
        yield from _halved(number // 2)
