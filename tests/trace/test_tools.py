"""Tools of agents: their calls are as asked for, and no draw depends on how much else is drawn."""

import io
import json
import math

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console

from simrl.analysis.trace_description import describe
from simrl.errors import InputError
from simrl.show.tables.trace import print_description
from simrl.trace.synthesis import PRESETS, LengthModel, synthesise
from simrl.trace.tools import Tool, ToolFile, draw_calls, with_tools
from simrl.trace.trace import Trace, TraceMetadata, read_trace, write_trace

PLACES = tuple(np.arange(40_000) // n % m for n, m in ((20_000, 2), (400, 50), (40, 10), (1, 40)))
METADATA = TraceMetadata(
    name="run", kind="imported", source="a test", tokenizer="none", cap_tokens=1000, notes="Old."
)


def tool(**changes):
    return Tool(**{"share": 1, "median_s": 4, **changes})


def calls(*, seed=0, places=PLACES, **tools):
    return draw_calls(tools, seed, *places)


def an_agent(**changes):
    small = {"steps": 4, "prompts_per_step": 16, "prompts": 32, "group": 4}
    return LengthModel(**{**PRESETS["coding-agent"], **small, **changes})


def turns_of(trace):
    """The turns of each sample: (tokens, seconds, observations, tools) by (epoch, prompt, sample)."""
    names = (
        "turn_tokens",
        "turn_environment_s",
        "turn_observation_tokens",
        "turn_tool",
        "turn_failures",
    )
    return {
        (row["epoch"], row["prompt_id"], row["sample"]): tuple(row[name] for name in names)
        for row in trace.table.to_pylist()
    }


# One tool.


def test_a_lognormal_tool_has_its_median_and_sigma():
    seconds = np.log(calls(a=tool(sigma=0.7)).seconds)
    assert np.median(seconds) == pytest.approx(math.log(4), abs=0.02)
    assert seconds.std() == pytest.approx(0.7, rel=0.02)
    assert set(calls(a=tool()).seconds.tolist()) == {4.0}


def test_seconds_stay_between_the_least_and_the_most():
    seconds = calls(a=tool(sigma=2, least_s=2, most_s=60)).seconds
    assert (seconds.min(), seconds.max()) == (2, 60)


def test_a_tool_of_quantiles_has_them():
    quantiles = {0: 2, 0.5: 8, 0.9: 40, 1: 60}
    seconds = calls(a=tool(median_s=None, quantiles_s=quantiles)).seconds
    assert np.quantile(seconds, [0.25, 0.5, 0.9]) == pytest.approx([5, 8, 40], rel=0.05)
    assert 2 <= seconds.min() < 2.1 and 59 < seconds.max() <= 60


def test_a_straggler_takes_so_many_times_as_long():
    seconds, counts = np.unique(
        calls(a=tool(straggler_share=0.05, straggler_factor=10)).seconds, return_counts=True
    )
    assert seconds.tolist() == [4, 40]
    assert counts[1] / counts.sum() == pytest.approx(0.05, abs=0.005)


def test_a_failed_try_costs_its_time_and_is_tried_again_as_often_as_allowed():
    found = calls(a=tool(failure_share=0.25, retries=2))
    assert found.seconds.tolist() == (4.0 * np.minimum(found.failures + 1, 3)).tolist()
    shares = np.bincount(found.failures) / len(found.failures)
    assert shares == pytest.approx([0.75, 0.1875, 0.046875, 0.015625], abs=0.01)
    assert set(calls(a=tool(failure_share=0.25)).seconds.tolist()) == {4.0}


def test_a_try_that_lasts_too_long_is_ended_and_has_failed():
    once = tool(straggler_share=0.1, straggler_factor=10, timeout_s=12)
    found = calls(a=once)
    assert set(zip(found.seconds.tolist(), found.failures.tolist(), strict=True)) == {
        (4.0, 0),
        (12.0, 1),
    }
    again = calls(a=once.model_copy(update={"retries": 1}))
    assert set(zip(again.seconds.tolist(), again.failures.tolist(), strict=True)) == {
        (4, 0),
        (16, 1),
        (24, 2),
    }


def test_observations_have_the_mean_asked_for_below_their_cap():
    tokens = calls(
        a=tool(observation_tokens=400, observation_sigma=1.0, observation_cap_tokens=2000)
    ).observation_tokens
    assert tokens.mean() == pytest.approx(400, rel=0.03)
    assert tokens.max() == 2000
    assert set(calls(a=tool(observation_tokens=30)).observation_tokens.tolist()) == {30}
    assert set(calls(a=tool()).observation_tokens.tolist()) == {0}


def test_tools_have_their_shares_of_the_calls():
    found = calls(a=tool(share=0.2), b=tool(share=0.5, median_s=1), c=tool(share=0.3, median_s=9))
    assert np.bincount(found.tool) / len(found.tool) == pytest.approx([0.2, 0.5, 0.3], abs=0.01)
    assert found.seconds.tolist() == np.array([4.0, 1.0, 9.0])[found.tool].tolist()


# Draws.


def test_a_call_is_drawn_from_its_place_alone():
    varied = {
        "a": tool(share=0.4, sigma=1),
        "b": tool(share=0.6, sigma=1, failure_share=0.3, retries=3, observation_tokens=9),
    }
    whole = calls(**varied)
    some = np.arange(7, 40_000, 11)
    assert all(
        np.array_equal(part, full[some])
        for part, full in zip(
            calls(places=tuple(p[some] for p in PLACES), **varied), whole, strict=True
        )
    )
    other = calls(seed=1, **varied)
    assert not np.array_equal(other.seconds, whole.seconds)


def test_another_tool_behind_changes_only_the_calls_that_it_takes_over():
    two = calls(a=tool(share=0.5, sigma=1), b=tool(share=0.5, sigma=1, median_s=20))
    three = calls(
        a=tool(share=0.5, sigma=1), b=tool(share=0.3, sigma=1, median_s=20), c=tool(share=0.2)
    )
    kept = three.tool < 2
    assert kept.mean() == pytest.approx(0.8, abs=0.01)
    assert np.array_equal(two.seconds[kept], three.seconds[kept])


def test_the_draws_of_calls_stay_the_same_from_release_to_release():
    places = tuple(np.array(keys) for keys in ([0, 0, 1], [0, 1, 0], [2, 0, 0], [0, 5, 1]))
    found = calls(a=tool(sigma=1, observation_tokens=100, observation_sigma=1), places=places)
    assert found.seconds.tolist() == pytest.approx([9.93357581, 6.17762933, 1.08795546])
    assert found.observation_tokens.tolist() == [306, 17, 62]


# Trajectories.


def test_turns_are_in_proportion_to_the_response_and_of_different_lengths():
    trace = synthesise(an_agent(steps=20, prompts=None, context_cap_tokens=None, cap_turns=1000), 0)
    turns = [row[0] for row in turns_of(trace).values()]
    numbers = np.array([len(each) for each in turns])
    assert (
        numbers.tolist()
        == np.rint(np.array([sum(each) for each in turns]) / 250).astype(int).tolist()
    )
    assert numbers.mean() == pytest.approx(30, rel=0.05)
    assert np.log(numbers).std() == pytest.approx(0.5, rel=0.1)
    tokens = np.concatenate(turns)
    assert tokens.mean() == pytest.approx(250, rel=0.01)
    assert np.percentile(tokens, 95) > 3 * np.median(tokens)


def test_no_response_has_more_turns_than_the_most_allowed_and_ends_by_length_there():
    trace = synthesise(an_agent(cap_turns=31, context_cap_tokens=None), 0)
    numbers = np.array([len(row[0]) for row in turns_of(trace).values()])
    assert numbers.max() == 31
    assert (trace.column("finish_reason") == "length").mean() == pytest.approx(
        (numbers == 31).mean(), abs=0.05
    )


def test_a_response_ends_where_the_context_meets_its_cap():
    free, capped = (synthesise(an_agent(context_cap_tokens=cap), 3) for cap in (None, 12_000))
    context = (
        capped.column("prompt_tokens")
        + capped.column("response_tokens")
        + capped.observation_tokens()
    )
    assert context.max() == 12_000
    whole, cut = turns_of(free), turns_of(capped)
    ends = capped.column("finish_reason") == "length"
    assert 0.2 < ends.mean() < 0.9
    for key, (tokens, seconds, observed, tools, failures) in cut.items():
        last = len(tokens) - 1
        assert (tokens[:last], seconds, observed, tools, failures) == tuple(
            each[:last] for each in whole[key]
        )
        assert 1 <= tokens[last] <= whole[key][0][last]
    unharmed = [
        key
        for (key, row), ended in zip(cut.items(), ends, strict=True)
        if not ended and row != whole[key]
    ]
    assert unharmed == []


def test_more_samples_prompts_and_turns_leave_the_calls_that_were_there_as_they_were():
    small = turns_of(synthesise(an_agent(), 3))
    for more in ({"group": 6}, {"prompts": 48, "steps": 6}, {"steps": 8}):
        large = turns_of(synthesise(an_agent(**more), 3))
        assert {key: large[key] for key in small} == small


def test_all_prompts_begin_with_the_system_prompt():
    plain, agent = (synthesise(an_agent(system_prompt_tokens=n), 0) for n in (0, 1500))
    assert (agent.column("prompt_tokens") - plain.column("prompt_tokens")).tolist() == [1500] * len(
        plain
    )
    assert (plain.metadata.shared_prefix_tokens, agent.metadata.shared_prefix_tokens) == (0, 1500)


@pytest.mark.parametrize(
    "preset", [PRESETS["coding-agent"], PRESETS["search-agent"]], ids=["coding", "search"]
)
def test_a_preset_of_an_agent_says_how_to_draw_it_again(preset):
    trace = synthesise(LengthModel(**preset), 5, "agent")
    source = json.loads(trace.metadata.source)
    assert synthesise(LengthModel(**source["model"]), source["seed"], "agent").table == trace.table
    context = (
        trace.column("prompt_tokens") + trace.column("response_tokens") + trace.observation_tokens()
    )
    assert (trace.metadata.context_cap_tokens, context.max()) == (32_768, 32_768)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": 0}, "turns"),
        ({"cap_turns": 0}, "cap_turns"),
        ({"turn_tokens": 0}, "turn_tokens"),
        ({"turns": 120}, "turns 120 cannot be reached under cap_turns 100"),
        ({"mean_tokens": 4000}, "turns 30 beside mean_tokens and turn_tokens, whose ratio it is"),
        ({"turn_tokens": None}, "key mean_tokens is missing; or give turns and turn_tokens"),
        (
            {"context_cap_tokens": 5596},
            "context_cap_tokens 5596 leaves no room behind the largest prompt of 5596 tokens",
        ),
        (
            {"environment_s": 1},
            "tools beside environment_s, environment_sigma or observation_tokens",
        ),
        (
            {"turn_tokens": None, "turns": 1, "mean_tokens": 90},
            "tools: comes between turns, and there is one turn",
        ),
        (
            {"turn_tokens": None, "turns": 1, "mean_tokens": 90, "tools": {}, "environment_s": 1},
            "environment_s: comes",
        ),
        (
            {"cap_turns": 1, "tools": {}, "observation_tokens": 5},
            "observation_tokens: comes between turns",
        ),
        (
            {"cap_turns": 1, "tools": {}, "environment_sigma": 1},
            "environment_sigma: comes between turns",
        ),
        (
            {"tools": {"a": {"share": 0.9, "median_s": 1}}},
            "the shares of a sum to 0.9; they must sum to 1",
        ),
    ],
)
def test_statistics_of_an_agent_that_cannot_be_are_refused_by_name(changes, message):
    with pytest.raises(ValidationError, match=message):
        an_agent(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"median_s": -1}, "median_s"),
        ({"median_s": None}, "give either median_s .with sigma. or quantiles_s"),
        ({"quantiles_s": {0: 1, 1: 2}}, "give either median_s .with sigma. or quantiles_s"),
        ({"median_s": None, "quantiles_s": {0: 5, 1: 2}}, "quantiles_s fall from 5"),
        ({"median_s": None, "quantiles_s": {0: -5, 1: 2}}, "quantiles_s"),
        ({"median_s": None, "quantiles_s": {0: 5}}, "quantiles_s"),
        ({"least_s": 3, "most_s": 2}, "most_s 2 is below least_s 3"),
        ({"failure_share": 1}, "failure_share"),
        ({"timeout_s": 0}, "timeout_s"),
        (
            {"observation_tokens": 90, "observation_cap_tokens": 80},
            "observation_tokens 90 is not below",
        ),
    ],
)
def test_a_tool_that_cannot_be_is_refused_by_name(changes, message):
    with pytest.raises(ValidationError, match=message):
        tool(**changes)


# Recorded traces without times.


def recorded(**columns):
    return Trace.from_columns(
        {
            "step": [0, 0, 1, 1],
            "epoch": [0] * 4,
            "prompt_id": [0, 1, 0, 1],
            "sample": [0] * 4,
            "prompt_tokens": [9] * 4,
            "response_tokens": [10, 20, 30, 40],
            "turn_tokens": [[2, 3, 5], [20], [10, 20], None],
            **columns,
        },
        METADATA,
    )


TOOLS = ToolFile(
    tools={
        "a": {"share": 0.5, "median_s": 3},
        "b": {"share": 0.5, "median_s": 7, "observation_tokens": 50},
    }
).tools


def test_missing_times_are_drawn_and_the_notes_say_so():
    trace = with_tools(
        recorded(turn_observation_tokens=[[4, 5], [], None, None]), TOOLS, 3, "tools.yaml"
    )
    seconds, tools = (
        trace.table.column(name).to_pylist() for name in ("turn_environment_s", "turn_tool")
    )
    assert [None if s is None else len(s) for s in seconds] == [2, None, 1, None]
    assert [[{"a": 3.0, "b": 7.0}[name] for name in names or []] for names in tools] == [
        s or [] for s in seconds
    ]
    assert trace.table.column("turn_observation_tokens").to_pylist()[:2] == [[4, 5], []]
    assert trace.metadata.notes == (
        "Old. The times of tools in 2 of 4 responses are drawn from tools.yaml (seed 3), not recorded."
    )


def test_recorded_times_stay():
    trace = with_tools(
        recorded(turn_environment_s=[[1.5, 2.5], [], None, None]), TOOLS, 3, "tools.yaml"
    )
    assert trace.table.column("turn_environment_s").to_pylist()[0] == [1.5, 2.5]
    assert trace.table.column("turn_tool").to_pylist()[0] is None
    totals = with_tools(recorded(environment_s=[None, 0, 8, 1]), TOOLS, 3, "tools.yaml")
    assert [response.turns[0].environment_s for response in totals.responses(2, 3)] == [8]


def test_a_trace_without_turns_or_without_missing_times_is_refused():
    with pytest.raises(InputError, match="no turn lacks its time"):
        with_tools(recorded(turn_environment_s=[[1.5, 2.5], [], [1], None]), TOOLS, 3, "tools.yaml")
    columns = {name: [0] for name in ("step", "epoch", "prompt_id", "sample")} | {
        "prompt_tokens": [1],
        "response_tokens": [1],
    }
    with pytest.raises(InputError, match="tools need a trace of responses in turns"):
        with_tools(Trace.from_columns(columns, METADATA), TOOLS, 3, "tools.yaml")


def test_a_description_has_the_times_of_each_tool():
    trace = recorded(
        turn_environment_s=[[1, 9], [], [3], None],
        turn_tool=[["a", "b"], [], ["a"], None],
        turn_failures=[[0, 2], [], [1], None],
    )
    first, second = describe(trace)["tools"]
    assert first == {
        "tool": "a", "calls": 2, "mean_s": 2, "p50_s": 2, "p95_s": pytest.approx(2.9), "max_s": 3, "failed_tries": 1,
        "observation_tokens_mean": 0,
    }  # fmt: skip
    assert (second["tool"], second["calls"], second["p95_s"], second["failed_tries"]) == (
        "b",
        1,
        9,
        2,
    )
    assert describe(recorded())["tools"] == []
    console = Console(file=io.StringIO(), width=80, color_system=None)
    print_description(describe(trace), console)
    assert "failed tries" in console.file.getvalue()


def test_commands_draw_an_agent_and_the_missing_times_of_a_recorded_one(simrl, tmp_path):
    code, out, err = simrl(
        "trace", "synth", "--agentic", "steps=1", "prompts_per_step=4", "-o", "agent.parquet"
    )
    assert (code, err) == (0, "") and "32 samples" in out
    agent = read_trace(tmp_path / "agent.parquet")
    small = {**PRESETS["coding-agent"], "steps": 1, "prompts_per_step": 4}
    assert agent.table.equals(synthesise(LengthModel(**small), 0).table)
    shown = json.loads(simrl("trace", "show", "agent.parquet", "--json").out)
    assert {facts["tool"] for facts in shown["tools"]} == {"read", "edit", "test"}
    write_trace(recorded(), tmp_path / "run.parquet")
    (tmp_path / "tools.yaml").write_text("tools: {a: {share: 1, quantiles_s: {0: 2, 1: 2}}}")
    code, out, err = simrl(
        "trace", "with-tools", "run.parquet", "--tools", "tools.yaml", "-o", "timed.parquet"
    )
    assert (code, err) == (0, "") and "drawn from tools.yaml (seed 0), not recorded" in " ".join(
        out.split()
    )
    assert read_trace(tmp_path / "timed.parquet").table.column("turn_environment_s").to_pylist()[
        0
    ] == [2, 2]
    for wrong, line in (
        (
            "tools: {a: {share: 0.5, median_s: 1}}",
            "tools.yaml: tools: the shares of a sum to 0.5; they must sum to 1",
        ),
        (
            "tools: {a: {share: 1, median_s: -1}}",
            "tools.yaml: tools.a.median_s is -1: give 0 or more",
        ),
    ):
        (tmp_path / "tools.yaml").write_text(wrong)
        code, out, err = simrl(
            "trace", "synth", "--agentic", "--tools", "tools.yaml", "-o", "x.parquet"
        )
        assert (code, out) == (2, "") and line in err and err.count("\n") == 1
