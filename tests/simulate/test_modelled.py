"""What a scenario has that is not modelled: every entry stands for something that is there, and every result says it."""

import json
from dataclasses import replace

import pytest

from simrl.analysis.explanation import explain_result
from simrl.show.inputs import left_out_lines, provenance, rests_on
from simrl.simulate.modelled import not_modelled, omitted
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.speculation.methods import METHODS
from simrl.systems.recipes import RECIPES
from simrl.trace.trace import UNSEPARATED, Trace
from tests.helpers import scenario, trace


def of(system="dapo", **changes):
    return not_modelled(prepare(scenario(system, **changes)))


def with_columns(**columns):
    plain = trace([[[(4, 8), (4, 8)]]])
    rows = plain.table.num_rows
    table = {name: plain.table.column(name).to_pylist() for name in plain.table.column_names}
    return Trace.from_columns(
        {**table, **{name: [value] * rows for name, value in columns.items()}}, plain.metadata
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": {"preset": "sglang-0.5", "scheduler": "vllm"}}, "SGLang's scheduler"),
        (
            {"engine": {"preset": "vllm-0.19", "async_scheduling": False}},
            "the host's work without asynchronous scheduling",
        ),
        (
            {"faults": [{"kind": "lost", "worker": 0, "at_s": 1.0, "back_s": 2.0}]},
            "lost with their worker",
        ),
        ({"system": {"name": "areal", "eta": 1}}, "what stale tokens do to learning"),
        (
            {"system": {"name": "areal", "eta": 1}},
            "the decoupled PPO objective's effect on learning (areal)",
        ),
        (
            {"system": "one_step_off", "cluster": {"gpu": "h100", "gpus": 16, "tp": 1}},
            "contention of weight syncs for the network",
        ),
        ({"system": {"name": "verl_colocated", "speculation": "ngram"}}, "matches in the prompt"),
        (
            {"system": "tlt_base", "cluster": {"gpu": "h100", "gpus": 8, "tp": 1}},
            "8 workers share 4 groups of a step, and the more they are, the less there is to draft",
        ),
    ],
)
def test_an_entry_is_there_if_the_scenario_has_its_cause(changes, words):
    assert any(words in entry for entry in of(**changes))
    assert not any(words in entry for entry in of())


@pytest.mark.parametrize(
    ("columns", "entries"),
    [
        ({"turn_tokens": [3, 5]}, ["the time between turns, which the trace does not have"]),
        (
            {"environment_s": 2.0},
            ["how a response's time in its environment is divided, of which the trace has the sum"],
        ),
        ({"turn_tokens": [3, 5], "turn_environment_s": [2.0]}, []),
    ],
)
def test_what_a_trace_does_not_tell_of_its_turns_is_an_entry(columns, entries):
    plain = prepare(scenario("one_step_off"))
    assert not_modelled(replace(plain, trace=with_columns(**columns))) == [
        *not_modelled(plain),
        *entries,
    ]


def test_tool_output_that_may_count_as_generated_is_an_entry():
    ready = prepare(scenario())
    notes = (
        f"Imported. {UNSEPARATED}: 4 responses call tools, and no mask or tag tells their output."
    )
    noted = replace(ready.trace, metadata=ready.trace.metadata.model_copy(update={"notes": notes}))
    entry = "output of tools may count as generated: 4 responses call tools, and no mask or tag tells their output"
    assert entry in not_modelled(replace(ready, trace=noted))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_system_prompt_that_all_prompts_share_is_an_entry_with_a_prefix_cache(prefix_caching):
    plain = trace([[[(4, 8), (4, 8)]]])
    shared = replace(
        plain, metadata=plain.metadata.model_copy(update={"shared_prefix_tokens": 1500})
    )
    ready = replace(
        prepare(scenario("dapo", engine={"prefix_caching": prefix_caching})), trace=shared
    )
    assert (
        any("1,500 tokens that all prompts share" in entry for entry in not_modelled(ready))
        == prefix_caching
    )


def test_a_recipe_that_names_another_leaves_out_what_that_one_does():
    assert omitted(RECIPES, "verl_ngram") == omitted(RECIPES, "verl_colocated") != ""
    assert omitted(RECIPES, "specactor").startswith(
        omitted(RECIPES, "verl_colocated") + "; correlated acceptance"
    )
    assert omitted(METHODS, "histospec_code") == omitted(METHODS, "histospec") != ""
    assert omitted(RECIPES, "one_step_off") == omitted(RECIPES, "a system of somebody else") == ""


def test_nothing_is_printed_where_nothing_applies():
    assert (
        left_out_lines(
            [{}, {"not_modelled": []}, {"not_modelled": ["of a simulation"], "replay": {}}]
        )
        == []
    )
    lines = left_out_lines([{"not_modelled": ["a", "b"]}, {"not_modelled": ["b", "c"]}])
    assert lines == ["Not modelled: a; b; c"]


def test_a_result_and_its_explanation_have_the_entries():
    result = simulate(scenario({"name": "areal", "eta": 1}))
    assert result.metadata["not_modelled"] == of({"name": "areal", "eta": 1})
    assert (
        json.loads(json.dumps(explain_result(result).as_json()))["not_modelled"]
        == result.metadata["not_modelled"]
    )


def test_the_inputs_name_a_scheduler_that_is_not_vllms():
    line = "Scheduler: sglang (engine.scheduler), lpm"
    policy = {"schedule_policy": "lpm"}
    for scheduler in ("vllm", "sglang"):
        facts = prepare(scenario(engine={"scheduler": scheduler, **policy})).inputs()
        for lines in (provenance([facts]), rests_on([facts])):
            assert (line in lines) == (scheduler == "sglang")
