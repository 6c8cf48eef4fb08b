"""Schedules against vLLM's own scheduler, driven without a model: equal passes, token by token, equal hits and preemptions."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.schedule_scenarios import (
    EnginePlayer,
    Pass,
    Player,
    ReferencePlayer,
    Scenario,
    different_passes,
    full_cache_scenarios,
    hybrid_scenario,
    play,
    random_scenario,
)
from tests.vllm_schedule import VllmPlayer, vllm_scheduler

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

SCENARIOS = 100  # of each mode
CACHING = [  # async scheduling, most draft tokens, share of the passes that have to agree
    pytest.param(False, 0, 1.0, id="sync"),
    pytest.param(False, 3, 1.0, id="sync, drafts"),
    pytest.param(True, 0, 0.999, id="async"),
    pytest.param(True, 3, 0.999, id="async, drafts"),
]


@pytest.fixture(params=[ReferencePlayer, EnginePlayer], ids=["reference", "engine"])
def player(request) -> Callable[[Scenario], Player]:
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from simrl_replay.random_model import make_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(folder, 2, 32, heads=2, kv_heads=1, vocab=300)
    return folder


@cache
def scenario_in_vllm(
    model: Path, seed: int, caching: bool, async_scheduling: bool, drafts: int
) -> tuple[Scenario, list[Pass]]:
    scenario = random_scenario(seed, caching, async_scheduling, drafts)
    return scenario, play(VllmPlayer(scenario, vllm_scheduler(model, scenario)), scenario)


def compare(player: Callable[[Scenario], Player], scenarios: list[tuple[Scenario, list[Pass]]], share: float) -> None:
    """Hold a player's passes against those of vLLM."""
    total = sum(len(theirs) for _, theirs in scenarios)
    differ = [different_passes(play(player(scenario), scenario), theirs) for scenario, theirs in scenarios]
    first = next((seed for seed, n in enumerate(differ) if n), None)
    assert sum(differ) <= (1 - share) * total, f"{sum(differ)} of {total} passes differ, first in scenario {first}"


@pytest.mark.parametrize(("async_scheduling", "drafts", "share"), CACHING)
def test_with_prefix_caching_passes_are_those_that_vllm_schedules(
    model, player, async_scheduling: bool, drafts: int, share: float
):
    """Groups, turns, shortage, aborts and resets, with room for everything, for some, and for hardly one request."""
    scenarios = [scenario_in_vllm(model, seed, True, async_scheduling, drafts) for seed in range(SCENARIOS)]
    passes = [done for _, theirs in scenarios for done in theirs]
    assert sum(done.preempted for done in passes) > SCENARIOS, "the scenarios are scarce in blocks"
    found, known = (sum(getattr(done, name) or 0 for done in passes) for name in ("hit_tokens", "known_tokens"))
    assert 0.4 < found / known < 0.8, "much is found and much is not"
    compare(player, scenarios, share)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_what_leaves_a_full_cache_finds_as_much_again_as_in_vllm(model, player, async_scheduling: bool):
    scenarios = [
        (each, play(VllmPlayer(each, vllm_scheduler(model, each)), each))
        for each in full_cache_scenarios(async_scheduling)
    ]
    compare(player, scenarios, 1.0)


@pytest.mark.parametrize(("async_scheduling", "drafts", "share"), CACHING)
def test_without_prefix_caching_passes_are_those_that_vllm_schedules(
    model, player, async_scheduling: bool, drafts: int, share: float
):
    scenarios = [scenario_in_vllm(model, seed, False, async_scheduling, drafts) for seed in range(SCENARIOS // 4)]
    compare(player, scenarios, share)


@pytest.mark.parametrize(("async_scheduling", "share"), [(False, 1.0), (True, 0.999)], ids=["sync", "async"])
def test_windows_and_states_share_the_blocks_as_in_vllm(model, player, async_scheduling: bool, share: float):
    """Groups of layers that keep every token, a window or a state, with room for all sequences or hardly one."""
    scenarios = []
    for seed in range(SCENARIOS):
        scenario = hybrid_scenario(seed, async_scheduling)
        scenarios.append((scenario, play(VllmPlayer(scenario, vllm_scheduler(model, scenario)), scenario)))
    preempted = sum(done.preempted for _, theirs in scenarios for done in theirs)
    assert preempted > SCENARIOS // 2, "the scenarios are scarce in blocks"
    compare(player, scenarios, share)
