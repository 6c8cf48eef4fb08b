"""`simrl systems`: the list, and what each system does here."""

import json

import pytest

from simrl.systems.recipes import RECIPES, parameters_of
from tests.command_line import CommandLine

KEYS = {"name", "pipeline", "dispatch", "speculation", "paper", "parameters"}


def test_every_system_has_a_line_and_a_page(simrl: CommandLine) -> None:
    listed = simrl("systems").out
    for name in RECIPES:
        page = simrl("systems", "show", name).out
        assert f"{name} " in listed
        assert page.startswith(f"{name}: ")
        for part in (
            "Modelled: ",
            "Not modelled: ",
            "pipeline ",
            "dispatch ",
            "paper ",
            "In a scenario: ",
        ):
            assert f"\n{part}" in page


def test_the_list_and_the_page_as_json_have_the_same_stable_keys(simrl: CommandLine) -> None:
    listed = json.loads(simrl("systems", "--json").out)
    assert [system["name"] for system in listed] == list(RECIPES)
    for system in listed:
        assert system.keys() >= KEYS
        page = json.loads(simrl("systems", "show", system["name"], "--json").out)
        assert page == {
            **system,
            "keys": page["keys"],
        }  # the page reads the frameworks' tables, too


def test_parameters_are_told_with_their_defaults_and_what_they_take(simrl: CommandLine) -> None:
    areal = json.loads(simrl("systems", "show", "areal", "--json").out)["parameters"]
    assert areal["eta"] == {"default": 8, "takes": "whole number ≥ 0, ≤ 1,000,000"}
    assert areal["rollout_share"]["takes"] == "number > 0, < 1"
    assert areal["max_concurrent"] == {
        "default": None,
        "takes": "whole number ≥ 1, ≤ 100,000 or null",
    }
    assert areal["on_stale"]["takes"].startswith("train | ")


def test_the_keys_of_a_framework_stand_beside_the_parameters_that_they_set(
    simrl: CommandLine,
) -> None:
    page = simrl("systems", "show", "verl_fully_async").out
    [line] = [line for line in page.splitlines() if "trigger_parameter_sync_step" in line]
    assert line.split() == ["async_training.trigger_parameter_sync_step", "4", "sync_step"]
    keys = json.loads(simrl("systems", "show", "verl_fully_async", "--json").out)["keys"]
    assert {key["parameter"] for key in keys} <= parameters_of("verl_fully_async").keys()
    assert "keys of" not in simrl("systems", "show", "laminar").out  # no framework offers it


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_page_shows_as_an_example_can_be_run(simrl: CommandLine, name: str) -> None:
    page = simrl("systems", "show", name).out
    example = page.split("In a scenario:  ")[1].strip().replace("systems: ", "systems=")
    assert simrl("compare", "scenario.yaml", example, "--json").code == 0


def test_an_unknown_system_is_refused_with_the_known_ones(simrl: CommandLine) -> None:
    ended = simrl("systems", "show", "nope")
    assert ended.code == 2
    assert "'nope' is unknown (closest are " in ended.err
