"""Laws over whole systems, by means over seeds: no seed decides; more GPUs are never slower, or a line says why."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import pytest

from simrl.result.metrics import summary
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.simulate.run import simulate
from simrl.systems.recipes import RECIPES
from tests.helpers import SMALL

QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart.yaml"
SIZES = (16, 32, 64)
LEVEL = 0.01  # of a rate: what which sample ends last moves within a window of few updates
APART = 4.0  # standard errors: one of some 16,000 pairs of means is further apart by chance
PARAMETERS: dict[str, dict[str, Any]] = {**SMALL, "rlinf_dynamic": {"minibatches": 1}}
GROUPS = {"rlinf_dynamic": 16}  # which its up to 16 data-parallel ranks have to divide; others: 4
LINES = {  # systems that are slower on more GPUs, and the words of the result that say why
    "tlt_base": "workers share",
}


class Rates(NamedTuple):
    """The samples per second of a system at some seeds, and the lines on what is not modelled."""

    of_seeds: list[float]
    lines: list[str]

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return stdev(self.of_seeds) / len(self.of_seeds) ** 0.5


def of_quickstarts_size(system: str, gpus: int, seed: int, steps: int) -> Scenario:
    """Draw lengths like the recorded ones of experiments/quickstart.yaml: 4 groups of 32 a step."""
    groups = GROUPS.get(system, 4)
    sizes = {"steps": steps, "prompts_per_step": groups, "group": 128 // groups, "prompts": 32}
    lengths = {"cap_tokens": 384, "mean_tokens": 168, "sigma": 0.9, "prompt_tokens": 9}
    return Scenario.model_validate(
        {
            "name": "laws",
            "seed": seed,
            "steps": steps,
            "warmup_steps": steps // 4,
            "model": "qwen3-8b",
            "cluster": {"gpu": "h100", "gpus": gpus, "tp": 1},
            "workload": {"synthetic": {**sizes, **lengths}},
            "profile": {"roofline": {}},
            "system": {"name": system, **PARAMETERS.get(system, {})},
        }
    )


def rate(scenario: Scenario) -> tuple[float, list[str]]:
    result = simulate(scenario)
    row = summary(result, scenario.warmup_steps)
    return row["samples_per_s"], result.metadata["not_modelled"]


@cache
def rates(system: str, gpus: int, seeds: range, steps: int) -> Rates:
    runs = [rate(of_quickstarts_size(system, gpus, seed, steps)) for seed in seeds]
    return Rates([samples_per_s for samples_per_s, _ in runs], runs[-1][1])


@pytest.mark.parametrize("system", ["verl_colocated", "seer", "areal", "rhymerl", "tlt"])
def test_the_mean_over_eight_seeds_is_the_mean_over_eight_others(system):
    """I43: the means lie within four of their standard errors."""
    some, others = (rates(system, 16, range(first, first + 8), 4) for first in (0, 100))
    apart = abs(mean(some.of_seeds) - mean(others.of_seeds))
    assert apart < APART * (some.error**2 + others.error**2) ** 0.5
    assert len({*some.of_seeds, *others.of_seeds}) == 16  # lengths are drawn


def assert_never_slower(system: str, seeds: range, steps: int) -> None:
    of_sizes = [rates(system, gpus, seeds, steps) for gpus in SIZES]
    for fewer, more in pairwise(of_sizes):
        slack = LEVEL * mean(fewer.of_seeds) + 2 * (fewer.error**2 + more.error**2) ** 0.5
        if mean(more.of_seeds) < mean(fewer.of_seeds) - slack:
            assert system in LINES and any(LINES[system] in line for line in more.lines)


@pytest.mark.parametrize("system", RECIPES.own)
def test_more_gpus_are_never_slower_but_where_a_line_says_why(system):
    """I44: 16, 32 and 64 GPUs, up to 1 % and two standard errors."""
    assert_never_slower(system, range(2), 4)


@pytest.mark.slow
@pytest.mark.parametrize("system", RECIPES.own)
def test_neither_over_more_seeds_and_updates(system):
    assert_never_slower(system, range(5), 12)


@pytest.mark.slow
@pytest.mark.parametrize("system", sorted(RECIPES.own.keys() - GROUPS.keys()))
def test_neither_on_the_recorded_run_of_the_quickstart(system):
    """A recorded run has the same lengths at each seed: one order of events stands for itself."""
    chosen = {"name": system, **PARAMETERS.get(system, {})}
    runs = [
        rate(scenario)
        for gpus in SIZES
        for scenario in load_scenarios(
            QUICKSTART, [f"systems=[{chosen}]", f"cluster.gpus={gpus}", "vary=[{}]"]
        )
    ]
    for (fewer, _), (more, lines) in pairwise(runs):
        if more < (1 - LEVEL) * fewer:
            assert system in LINES and any(LINES[system] in line for line in lines)
