"""A few random scenarios over all systems, with every invariant on; tests/nightly/soak.py runs hundreds."""

from simrl.systems.recipes import RECIPES
from tests.soaking import a_scenario, soak

SCENARIOS = 3 * len(RECIPES)


def test_random_scenarios_of_all_systems_lose_nothing_keep_their_bounds_and_repeat():
    outcomes = [soak(0, number) for number in range(SCENARIOS)]
    assert [soaked.said for soaked in outcomes if soaked.outcome == "failed"] == []
    refused = [soaked.said for soaked in outcomes if soaked.outcome == "refused"]
    assert len(refused) < 0.3 * SCENARIOS
    assert all(said.isprintable() for said in refused)


def test_a_scenario_belongs_to_its_seed_and_number():
    assert a_scenario(1, 5) == a_scenario(1, 5) != a_scenario(2, 5)
    assert [a_scenario(1, n)["system"]["name"] for n in range(len(RECIPES))] == list(RECIPES)


def test_a_scenario_that_does_not_end_is_seen(monkeypatch):
    monkeypatch.setattr("tests.soaking._soak", lambda seed, number: [None for _ in iter(int, 1)])
    assert soak(0, 0, limit_s=0.2).outcome == "failed"
