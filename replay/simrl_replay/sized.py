"""Scenarios as a replay needs them: with the loads that were measured, and with fewer workers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from simrl.errors import InputError
from simrl.profile.profile import ProfileMetadata, read_profile
from simrl.scenario.model import Scenario
from simrl.simulate.prepare import split_gpus
from simrl.systems.recipes import make_system


def with_measured_loads(scenario: Scenario, profile: ProfileMetadata | str | Path) -> Scenario:
    """Return the scenario with `training.load_s` from a profile, or from the file of one: seconds
    in which an engine loads weights from a folder, as in a replay. A scenario that sets `load_s` is
    returned unchanged."""
    if scenario.training.load_s is not None:
        return scenario
    metadata = profile if isinstance(profile, ProfileMetadata) else read_profile(profile).metadata
    return scenario.with_fields("training", load_s=metadata.load_weights_s)


def gpus_for(scenario: Scenario, workers: int) -> int:
    """Return the fewest GPUs that give a scenario's system `workers` rollout workers. Raise
    `InputError` if no number does."""
    system, cluster = (
        make_system(scenario.system.name, scenario.system.parameters),
        scenario.cluster,
    )
    unit = cluster.worker_gpus
    for gpus in range(unit, 128 * workers * unit, unit):
        with suppress(InputError):
            if split_gpus(cluster.model_copy(update={"gpus": gpus}), unit, system)[0] == workers:
                return gpus
    raise InputError(
        f"system {system.name}: no number of GPUs gives {workers} rollout workers of {unit} GPUs; ask for others"
    )
