"""`simrl speculation`: the list, what each method does here, and each of them under a system."""

import json

import pytest

from simrl.speculation.methods import METHODS
from tests.command_line import CommandLine


def test_every_method_has_a_line_and_a_page(simrl: CommandLine) -> None:
    listed = simrl("speculation").out
    for name in METHODS:
        page = simrl("speculation", "show", name).out
        assert f"{name} " in listed
        assert page.startswith(f"{name}: ")
        for part in ("Modelled: ", "Not modelled: ", "drafter ", "paper ", "In a scenario: "):
            assert f"\n{part}" in page


def test_the_list_and_the_page_as_json_have_the_same_stable_keys(simrl: CommandLine) -> None:
    listed = json.loads(simrl("speculation", "--json").out)
    assert [method["name"] for method in listed] == list(METHODS)
    for method in listed:
        assert method.keys() >= {"name", "drafter", "paper", "parameters"}
        assert method == json.loads(simrl("speculation", "show", method["name"], "--json").out)


@pytest.mark.parametrize("name", [name for name in METHODS.own if name not in ("spec_rl", "mtp")])
def test_every_method_goes_with_a_system_it_was_not_made_for(simrl: CommandLine, name: str) -> None:
    ended = simrl(
        *(
            "compare",
            "scenario.yaml",
            "--pipeline",
            "one_step_off",
            "--speculation",
            name,
            "--json",
        ),
        *(["model=qwen3.5-0.8b"] if name == "mtp" else []),
    )
    assert ended.code == 0
    (row,) = json.loads(ended.out)
    assert row["speculation"].startswith(name)


def test_a_page_has_the_keys_of_an_object_with_defaults_and_meanings(simrl: CommandLine) -> None:
    page = simrl("speculation", "show", "tlt").out
    assert "\nkeys of training, default:\n  adaptive " in page
    assert "  efficiency             0.4     MFU: share of the GPUs' bf16 rate" in page
    keys = json.loads(simrl("speculation", "show", "tlt", "--json").out)["parameters"]["training"]
    assert keys["keys"]["window_tokens"]["default"] is None


def test_what_needs_tokens_says_so_where_a_trace_has_none(simrl: CommandLine) -> None:
    ended = simrl("compare", "scenario.yaml", "--speculation", "spec_rl")
    assert ended.code == 2
    assert "the trace has no token ids; import it with its tokens" in ended.err


@pytest.mark.slow
def test_choices_that_are_several_make_every_combination(simrl: CommandLine) -> None:
    choices = [
        ("--pipeline", "split"),
        ("--pipeline", "one_step_off"),
        ("--speculation", "none"),
        ("--speculation", "ngram"),
    ]
    rows = json.loads(
        simrl(
            "compare", "scenario.yaml", *(part for choice in choices for part in choice), "--json"
        ).out
    )
    assert [row["system"] for row in rows] == [
        "split(speculation=none)",
        "split(speculation=ngram)",
        "one_step_off(speculation=none)",
        "one_step_off(speculation=ngram)",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("speculation", "show", "histo"),
            "'histo' (did you mean histospec or histospec_code?); simrl speculation lists",
        ),
        (
            ("compare", "scenario.yaml", "--speculation", "histo"),
            "speculation is 'histo' (did you mean histospec or histospec_code?); simrl speculation lists all 13",
        ),
        (
            (
                "compare",
                "scenario.yaml",
                "systems=[{name: split, speculation: {name: tlt, epsilon: 3}}]",
            ),
            "tlt: epsilon is 3",
        ),
        (
            ("compare", "scenario.yaml", "--speculation", "{gate: open}"),
            "has no name; give one, such as {name: histospec, gate: open}",
        ),
        (
            ("compare", "scenario.yaml", "--speculation", "{name: ngram, gat: open}"),
            "unknown parameter 'gat' (did you mean gate?); it has window",
        ),
        (
            (
                "compare",
                "scenario.yaml",
                "--speculation",
                "{name: ngram, window: {kind: fixed, tokens: 33}}",
            ),
            "ngram: a window of 33 tokens; texts are drafted up to 32",
        ),
        (
            (
                "compare",
                "scenario.yaml",
                "--speculation",
                "{name: tlt, training: {window_token: 512}}",
            ),
            "tlt: unknown key training.window_token (did you mean window_tokens?); training has adaptive, idle_workers, ",
        ),
        (
            (
                "compare",
                "scenario.yaml",
                "--speculation",
                "{name: ngram, window: {kind: aimd, token: 4}}",
            ),
            "ngram: unknown key window.aimd.token",
        ),
        (
            ("compare", "scenario.yaml", "--speculation", "{name: das, quantiles: [0.8, 0.5]}"),
            "must rise",
        ),
        (
            ("compare", "scenario.yaml", "speculation={acceptance: {egale: {by_position: [0.5]}}}"),
            "'egale' is no drafter; give the acceptance of eagle, mtp, int4, fp8, old_response or of a model (did you mean "
            "eagle?)",
        ),
        (
            ("compare", "scenario.yaml", "speculation={acceptance: {eagle: {p: [0.5]}}}"),
            "unknown key speculation.acceptance.eagle.p; ",
        ),
        (
            ("run", "scenario.yaml", "--system", "split", "--pipeline", "areal"),
            "are the same option; give one of them",
        ),
        (
            ("compare", "scenario.yaml", "--pipeline", "split", "--dispatch", "mine"),
            "dispatch is 'mine'",
        ),
        (
            ("compare", "scenario.yaml", "speculation.verification=guess"),
            "speculation.verification is 'guess'",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    simrl: CommandLine, arguments: tuple[str, ...], said: str
) -> None:
    ended = simrl(*arguments)
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1
