"""The systems that a calibrated run is compared with, each with as many samples, the best of a few splits, and its range.

Invariant: every row trains as many samples as the run did, from its first step on, so rows differ in their system and not in
the steps that they got to: where responses grow, equal numbers of updates of other sizes are not the same work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from simrl.errors import InputError
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.study.compare import row_of, simulate_each
from simrl.study.search_space import whole_workers
from simrl.systems.recipes import make_system, parameters_of

Ranges = dict[str, tuple[float, float]]
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)  # of rollout GPUs, tried where none is given
TRIAL_UPDATES = 4  # to see how many samples an update trains


def alternatives(
    file: Path, systems: Sequence[Any], fits: Sequence[Scenario], jobs: int, alike: Path | None = None
) -> tuple[list[Scenario], list[str], list[Ranges]]:
    """Return the run's own scenario and one of each system (a name, or a dictionary that has one); remarks on them; and the
    ends of each one's speed-up over the first, by what is not known.

    Where a system cannot share the GPUs as the run did, it gets smaller parts, and the run's own system is added in these
    parts too, which separates the effect of the parts from the effect of the system. `fits` are calibrations that do as well,
    `alike` a trace whose responses of a prompt are alike.
    """
    own = load_scenarios(file)[0]
    cache = InputCache()
    batch = _samples_of_an_update(own, cache)
    found, said = [own], []
    for system in systems:
        other = load_scenarios(file, [f"systems={json.dumps([system])}"])[0]
        tried, refused = _in_parts(other, cache)
        if tried[0].variant:
            same = tried[0].model_copy(update={"system": own.system})
            found += [same] if same not in found else []
            said.append(
                f"{other.system.name} cannot share {own.cluster.gpus} GPUs as the run had them (tp {own.cluster.tp}, "
                f"{own.training.sequence_parallel} a sequence in training): simulated with {tried[0].variant}, as is the "
                "run's own system beside it. The corrections are of the run as it was: read it as an extrapolation."
            )
        share = batch / _samples_of_an_update(tried[0], cache)
        if abs(share - 1) > 0.02:
            tried = [each.model_copy(update={"steps": max(round(own.steps * share), 1)}) for each in tried]
            said.append(f"{other.system.name}: {tried[0].steps} updates train the samples of the run's {own.steps}.")
        best = int(np.argmax(_samples_per_s(tried, jobs, cache))) if len(tried) > 1 else 0
        if tried[0].system != other.system:
            shares = ", ".join(f"{each.system.parameters['rollout_share']:g}" for each in tried)
            why = (
                "".join(f"; {share:g} cannot be: {reason}" for share, reason in refused.items())
                or "; no other was tried"
            )
            said.append(f"{other.system.name}: the best of rollout_share {shares}{why}.")
        found.append(tried[best])
    return found, said, _ranges(found, fits, alike, jobs, cache)


def _ranges(
    scenarios: Sequence[Scenario], fits: Sequence[Scenario], alike: Path | None, jobs: int, cache: InputCache
) -> list[Ranges]:

    def fitted(scenario: Scenario, fit: Scenario) -> Scenario:
        kept = scenario.training.model_dump(include={"sequence_parallel", "tokens_per_microbatch"})
        return scenario.model_copy(update={"profile": fit.profile, "training": fit.training.model_copy(update=kept)})

    sets = {"fits": [[fitted(each, fit) for each in scenarios] for fit in fits]}
    if alike is not None:
        sets["likeness"] = [list(scenarios), [each.with_fields("workload", trace=str(alike)) for each in scenarios]]
    rates = iter(_samples_per_s([each for runs in sets.values() for run in runs for each in run], jobs, cache))
    ranges: list[Ranges] = [{} for _ in scenarios]
    for cause, runs in sets.items():
        speedups = np.array([[rate / of[0] for rate in of] for of in ([next(rates) for _ in run] for run in runs)])
        for i, column in enumerate(speedups.T):
            ranges[i][cause] = float(column.min()), float(column.max())
    return ranges


def _samples_per_s(scenarios: Sequence[Scenario], jobs: int, cache: InputCache) -> list[float]:
    return [row["samples_per_s"] for row in simulate_each(scenarios, jobs, cache, row_of)]


def _samples_of_an_update(scenario: Scenario, cache: InputCache) -> float:
    few = scenario.model_copy(update={"steps": min(scenario.steps, TRIAL_UPDATES)})
    return float(simulate_prepared(prepare(few, cache)).steps.column("samples").to_numpy().mean())


def check_system(system: Any) -> None:
    """Raise `InputError` for an entry that is no system, before minutes go into a calibration."""
    if isinstance(system, str):
        make_system(system, {})
    elif isinstance(system, dict) and isinstance(system.get("name"), str):
        make_system(system["name"], {str(key): value for key, value in system.items() if key != "name"})
    else:
        raise InputError(f"system {system}: give a name, or {{name: areal, eta: 4}}")


def _in_parts(scenario: Scenario, cache: InputCache) -> tuple[list[Scenario], dict[float, str]]:
    """Return the possible splits of the scenario in the first parts that have one, when tp, and if need be the number of GPUs
    that share a sequence in training, are halved repeatedly, and why other shares are not possible, a reason once; a GPU
    trains as many tokens at a time as before."""
    training, own_tp, own_shared = scenario.training, scenario.cluster.tp, scenario.training.sequence_parallel
    refused: InputError | None = None
    for tp, shared in product(_halved(own_tp), _halved(own_shared)):
        tokens = training.tokens_per_microbatch * shared // own_shared
        changed = [f"cluster.tp={tp}"] if tp != own_tp else []
        changed += [f"training.sequence_parallel={shared}"] if shared != own_shared else []
        smaller = scenario.model_copy(update={"variant": ", ".join(changed)}).with_fields("cluster", tp=tp)
        smaller = smaller.with_fields("training", sequence_parallel=shared, tokens_per_microbatch=tokens)
        possible, reasons = [], dict[str, float]()
        for split in _splits(smaller):
            try:
                prepare(split, cache)
                possible.append(split)
            except InputError as error:
                refused = refused or error
                reasons.setdefault(f"{error}", split.system.parameters.get("rollout_share", 0.0))
        if possible:
            return possible, {share: reason for reason, share in reasons.items()}
    assert refused is not None
    raise refused


def _splits(scenario: Scenario) -> list[Scenario]:
    """Return the scenario with each share of rollout GPUs, unless it has none or it is given."""
    system = scenario.system
    if (
        scenario.cluster.train
        or "rollout_share" in system.parameters
        or "rollout_share" not in parameters_of(system.name)
    ):
        return [scenario]
    splits = [whole_workers(scenario.with_fields("system", rollout_share=share)) for share in SHARES]
    return list({each.system.model_dump_json(): each for each in splits}.values())


def _halved(number: int) -> Iterator[int]:
    """Yield a number, its half, the half of that … while they are whole."""
    yield number
    if number % 2 == 0:
        yield from _halved(number // 2)
