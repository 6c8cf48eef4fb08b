"""The ranking of a comparison with all assumed seconds × 0.5 and × 2.

Invariant: each changed run is simulated, by its fields; no outcome is multiplied.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from simrl.scenario.model import Scenario
from simrl.scenario.presets import constants, known_fields
from simrl.scenario.training import assumed_s
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import Prepared, prepare
from simrl.study.compare import Keep, T, row_of, simulate_each, with_speedups
from simrl.study.executors import Processes

FACTORS = {"samples_per_s_assumed_half": 0.5, "samples_per_s_assumed_double": 2.0}  # by the key in a row
LONG_S = 600.0  # a comparison that took longer is repeated only if asked
HEADING = "Ranking with assumed seconds × 0.5 and × 2"
Row = dict[str, Any]
Rates = dict[str, float | None]  # samples/s by the keys of FACTORS; None where a run was not simulated again


def simulate_ranked(
    scenarios: Sequence[Scenario], jobs: int, inputs: InputCache, keep: Keep[T], ranking: bool | None
) -> tuple[list[T], list[Rates], str]:
    """Simulate all scenarios as `simulate_each` does, then again with their assumed seconds at each of `FACTORS`; with
    `ranking` None only if the first took at most `LONG_S`. Return also samples/s of these, and why there are none."""
    rates: list[Rates] = [dict.fromkeys(FACTORS) for _ in scenarios]
    compared = Counter(scenario.variant for scenario in scenarios)
    with Processes(jobs, stay=True) as pool:
        started = time.monotonic()
        kept = simulate_each(scenarios, jobs, inputs, keep, pool)
        took_s = time.monotonic() - started
        if ranking is False or max(compared.values()) == 1:
            return kept, rates, ""
        again = [
            (i, key, scaled)
            for i, scenario in enumerate(scenarios)
            if compared[scenario.variant] > 1
            for key, scaled in _scaled(prepare(scenario, inputs))
        ]
        if not again:
            return kept, rates, "Ranking: rests on no assumed seconds"
        if ranking is None and took_s > LONG_S:
            return kept, rates, f"{HEADING}: --ranking simulates it (the comparison took {took_s:.0f} s)"
        found = simulate_each([scaled for _, _, scaled in again], jobs, inputs, row_of, pool)
    for (i, key, _), row in zip(again, found, strict=True):
        rates[i][key] = row["samples_per_s"]
    return kept, rates, ""


def ranked_rows(scenarios: Sequence[Scenario], rows: Sequence[Row], rates: Sequence[Rates]) -> list[Row]:
    """Return the rows of a comparison with their speed-ups (`with_speedups`) and the ranking's rates."""
    return [{**row, **ranked} for row, ranked in zip(with_speedups(scenarios, rows), rates, strict=True)]


def assumed_seconds(prepared: Prepared) -> dict[str, float]:
    """Return the seconds that nobody knows, by field: assumed defaults of `training`, and open constants of presets."""
    scenario = prepared.scenario
    used = constants(scenario.model_dump(), prepared.profile.metadata.kind)
    return assumed_s(scenario.training.model_dump(), prepared.colocated, known_fields(scenario.framework)) | {
        key: constant.value
        for _, key, constant in used
        if constant.kind == "open" and key.endswith("_s") and type(constant.value) is float and constant.value > 0
    }


def _scaled(prepared: Prepared) -> Iterator[tuple[str, Scenario]]:
    """Yield the scenario with its assumed seconds at each of `FACTORS`, by key; nothing without assumed seconds."""
    seconds = assumed_seconds(prepared)
    for name, factor in FACTORS.items() if seconds else ():
        scenario = prepared.scenario
        for key, value in seconds.items():
            section, _, field = key.partition(".")
            if key == "engine.layer_launch_s":  # of all layers: the shortest pass
                section, field, value = "profile", "least_pass_s", prepared.model.layers * value
            scenario = scenario.with_fields(section, **{field: value * factor})
        yield name, scenario
