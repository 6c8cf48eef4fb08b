"""The ranking of a comparison with all assumed seconds × 0.5 and × 2.

Invariant: each changed run is simulated, by its fields; no outcome is multiplied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from simrl.scenario.model import Scenario
from simrl.scenario.presets import constants, known_fields
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import Prepared, prepare
from simrl.study.compare import row_of, simulate_each
from simrl.study.executors import Processes
from simrl.training.config import assumed_s

FACTORS = {"samples_per_s_assumed_half": 0.5, "samples_per_s_assumed_double": 2.0}  # by the key in a row
LONG_S = 600.0  # a comparison that took longer is repeated only if asked
HEADING = "Ranking with assumed seconds × 0.5 and × 2"
Row = dict[str, Any]
Rates = dict[str, float | None]  # samples/s by the keys of FACTORS; None where a run was not simulated again


def assumed_rates(
    scenarios: Sequence[Scenario], jobs: int, inputs: InputCache, pool: Processes, ranking: bool | None, took_s: float
) -> tuple[list[Rates], str]:
    """Simulate all scenarios with their assumed seconds at each of `FACTORS`; with `ranking` None only if they took at most
    `LONG_S` as they are. Return samples/s of these, and why there are none."""
    rates: list[Rates] = [dict.fromkeys(FACTORS) for _ in scenarios]
    compared = Counter(scenario.variant for scenario in scenarios)
    if ranking is False or max(compared.values()) == 1:
        return rates, ""
    again = [
        (i, key, changed)
        for i, scenario in enumerate(scenarios)
        if compared[scenario.variant] > 1
        if assumed_seconds(prepared := prepare(scenario, inputs))
        for key, changed in ((key, scaled(prepared, factor)) for key, factor in FACTORS.items())
    ]
    if not again:
        return rates, "Ranking: rests on no assumed seconds"
    if ranking is None and took_s > LONG_S:
        return rates, f"{HEADING}: --ranking simulates it (the comparison took {took_s:.0f} s)"
    found = simulate_each([changed for _, _, changed in again], jobs, inputs, row_of, pool)
    for (i, key, _), row in zip(again, found, strict=True):
        rates[i][key] = row["samples_per_s"]
    return rates, ""


def assumed_seconds(prepared: Prepared) -> dict[str, float]:
    """Return the seconds that nobody knows, by field: assumed defaults of `training`, constants of weight syncs that were
    measured on other models or nodes, and open constants of presets."""
    scenario = prepared.scenario
    used = constants(scenario.model_dump(), prepared.profile.metadata.kind)
    assumed = assumed_s(scenario.training.model_dump(), prepared.colocated, known_fields(scenario.framework))
    return (
        assumed
        | prepared.extrapolated
        | {
            key: constant.value
            for _, key, constant in used
            if constant.kind == "open" and key.endswith("_s") and type(constant.value) is float and constant.value > 0
        }
    )


def scaled(prepared: Prepared, factor: float) -> Scenario:
    """Return the scenario with its assumed seconds times a factor."""
    scenario = prepared.scenario
    for key, value in assumed_seconds(prepared).items():
        section, _, field = key.partition(".")
        if key == "engine.layer_launch_s":  # of all layers: the shortest pass
            section, field, value = "profile", "least_pass_s", prepared.model.layers * value
        scenario = scenario.with_fields(section, **{field: value * factor})
    return scenario
