"""A conversation is a sample: its prompt, the turns of the assistant, and what others said between them."""

import json
from functools import partial
from pathlib import Path

import pytest

from simrl.errors import InputError
from simrl.trace.importers.dumps import import_dump
from simrl.trace.importers.tokens import token_counter

import_messages = partial(import_dump, "messages", counter=token_counter(chars_per_token=1))


def written(path: Path, *records: object, indent: int | None = None) -> Path:
    """A JSON array for .json with several records, the value itself for one, else JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".jsonl",):
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    else:
        value = records[0] if len(records) == 1 else list(records)
        path.write_text(json.dumps(value, indent=indent))
    return path


def turns(trace) -> list[tuple]:
    """Prompt, turns and observations of each sample."""
    table = trace.table
    columns = [
        table.column(name).to_pylist() if name in table.column_names else [None] * len(trace)
        for name in ("prompt_tokens", "turn_tokens", "turn_observation_tokens")
    ]
    return [*zip(*columns, strict=True)]


def said(role: str, content: object, **more: object) -> dict:
    return {"role": role, "content": content, **more}


CALL = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"c": 1}'}}
TALK = [
    said("system", "abc"),
    said("user", "de"),
    said("assistant", "look", tool_calls=[CALL]),
    said("tool", "files", tool_call_id="c"),
    said("assistant", "done"),
    said("user", "thanks"),
]


def test_what_stands_between_turns_is_observed_and_what_follows_the_last_is_left_out(tmp_path):
    trace = import_messages(written(tmp_path / "a.jsonl", {"messages": TALK}, {"messages": TALK}))
    assert turns(trace) == [(5, [4 + 4 + 8, 4], [5])] * 2
    assert trace.table.column("turn_tool").to_pylist() == [["bash"]] * 2
    assert trace.column("prompt_id").tolist() == [0, 0] and trace.column("sample").tolist() == [
        0,
        1,
    ]
    notes = trace.metadata.notes
    assert "2 of 2 responses have several turns, with 10 tokens of observations" in notes
    assert "What follows the last turn is left out; the environment's time is not recorded" in notes
    assert "2 conversations name no step and are taken for one; --step N gives its number" in notes


@pytest.mark.parametrize(
    ("record", "right"),
    [
        (
            {"conversations": [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "de"}]},
            (3, None, None),
        ),
        (
            {
                "system": "ab",
                "messages": [
                    said("user", [{"type": "text", "text": "c"}, {"type": "image_url", "image_url": {}}]),
                    said("assistant", [{"type": "thinking", "thinking": "th", "signature": "no"},
                                       {"type": "tool_use", "name": "f", "input": {"x": 1}}]),
                    said("user", [{"type": "tool_result", "content": [{"type": "text", "text": "out"}]}]),
                    said("assistant", "end", reasoning_content="why"),
                ],
            },
            (3, [2 + 1 + len('{"x": 1}'), 6], [3]),
        ),
        (  # verifiers: the assistant in a prompt is an example
            {
                "example_id": 3,
                "prompt": [said("user", "q"), said("assistant", "a"), said("user", "r")],
                "completion": [said("assistant", "x"), said("tool", "yy"), said("assistant", "z")],
            },
            (3, [1, 1], [2]),
        ),
        (TALK[:3], (5, None, None)),
        ({"messages": TALK[:2], "response": "answer"}, (5, None, None)),
        ({"messages": json.dumps(TALK)}, (5, [16, 4], [5])),  # text in the column of a table
        (  # a list of steps with the system's prompt apart
            {"trajectory": [{"role": "system", "system_prompt": "ab", "text": None},
                            {"role": "user", "text": "c"}, {"role": "ai", "text": "de"}]},
            (3, None, None),
        ),
        (  # items of OpenAI's Responses
            {"messages": [said("user", "q"), {"type": "reasoning", "summary": [{"text": "hm"}]},
                          {"type": "function_call", "name": "f", "arguments": "{}"},
                          {"type": "function_call_output", "output": "out"}, said("assistant", "a")]},
            (1, [2 + 2, 1], [3]),
        ),
        (  # an empty observation is a pause, an empty answer no turn
            {"messages": [said("user", "q"), said("assistant", "a"), said("tool", ""),
                          said("assistant", "b"), said("tool", "c"), said("assistant", "")]},
            (1, [1, 1], [0]),
        ),
    ],
    ids=["sharegpt", "anthropic", "verifiers", "list", "response", "text", "nebius", "responses", "empty"],
)  # fmt: skip
def test_a_conversation_has_a_form_of_many(tmp_path, record, right):
    assert turns(import_messages(written(tmp_path / "a.jsonl", record))) == [right]
    assert (
        turns(import_messages(written(tmp_path / "a.json", record, record, indent=1)))
        == [right] * 2
    )


def swe_agent(seconds: float) -> dict:
    history = [said("system", "abc"), said("assistant", "demo", is_demo=True), said("user", "de")]
    steps = [
        {"action": "ls", "response": "I ls", "observation": "out", "execution_time": seconds},
        {"action": "cat x", "thought": "hm", "observation": "text", "execution_time": 9.0},
        {"action": "submit", "response": "submit", "observation": "", "execution_time": 1.0},
    ]
    return {"trajectory": steps, "history": [*history, said("assistant", "I ls")], "info": {}}


def test_trajectories_of_swe_agent_have_times_and_the_instance_in_the_name_of_the_file(tmp_path):
    for run in (1, 2):
        written(tmp_path / f"run{run}" / "django-1" / "django-1.traj", swe_agent(0.5 * run))
    written(tmp_path / "run1" / "preds.json", {"django-1": {}})
    trace = import_messages(tmp_path)
    assert turns(trace) == [(9, [4, 7, 6], [3, 4])] * 2
    times = trace.table.column("turn_environment_s").to_pylist()
    assert times == [[0.5, 9.0], [1.0, 9.0]]
    assert trace.column("prompt_id").tolist() == [0, 0]
    notes = trace.metadata.notes
    assert "4 pauses between turns are recorded durations of tools" in notes
    assert "time is not recorded" not in notes


def event(second: float, **fields: object) -> dict:
    return {"timestamp": f"2026-05-01T12:00:{second:09.6f}", "source": "agent", **fields}


def test_events_of_openhands_have_times_by_their_stamps(tmp_path):
    calls = [CALL, {"id": "d"}]
    response = {"id": "r", "choices": [{"message": said("assistant", "go", tool_calls=calls)}]}
    run = {"action": "run", "args": {"command": "ls", "thought": "go"}}

    def made_of(call: str) -> dict:
        return {"tool_call_metadata": {"tool_call_id": call, "model_response": response}}

    events = [
        event(0, action="system", message="abc", args={"content": "abc"}),
        event(1, source="user", action="message", args={"content": "de"}),
        event(2, source="environment", observation="agent_state_changed", content="none sees this"),
        event(5, **run, **made_of("c")),
        event(7.5, observation="run", content="one"),
        event(8, **run, **made_of("d")),  # the second call of the response
        event(9, observation="run", content="two"),
        event(20, action="edit", args={"path": "x", "thought": "hm"}),
        event(21, observation="edit", content="ok"),
        event(30, action="finish", message="done", args={}),
    ]
    right = (5, [2 + 4 + 8, 2 + 4 + len('{"path": "x"}'), 4], [6, 2])
    for history in (events, [events[:2], events[2:]]):  # flat, or in pairs
        record = {"instance_id": "i", "history": history}
        trace = import_messages(written(tmp_path / "output.jsonl", record))
        assert turns(trace) == [right]
        assert trace.table.column("turn_environment_s").to_pylist() == [[4.0, 1.0]]
        assert "2 pauses between turns are by time stamps, to the last" in trace.metadata.notes
    assert turns(import_messages(written(tmp_path / "events.json", *events))) == [right]
    for number, one in enumerate(events):
        written(tmp_path / "session" / "events" / f"{number}.json", one)
    assert turns(import_messages(tmp_path / "session")) == [right]


def test_events_of_openhands_sdk_are_messages_calls_and_observations(tmp_path):
    text = [{"type": "text", "text": "hm"}]
    call = {"id": "c", "name": "bash", "arguments": '{"c": 1}'}
    events = [
        event(0, kind="SystemPromptEvent", system_prompt={"type": "text", "text": "abc"}, tools=[]),
        event(1, kind="MessageEvent", source="user", llm_message=said("user", "de")),
        event(2, kind="ActionEvent", thought=text, action={"kind": "x"}, tool_call=call),
        event(4, kind="ObservationEvent", observation={"content": "out", "kind": "y"}),
        event(5, kind="ConversationStateUpdateEvent", key="a", value="b"),
        event(6, kind="MessageEvent", llm_message=said("assistant", "end")),
    ]
    trace = import_messages(written(tmp_path / "events.jsonl", *events))
    assert turns(trace) == [(5 + len("[]"), [2 + 4 + 8, 3], [3])]
    assert trace.table.column("turn_environment_s").to_pylist() == [[2.0]]


def test_times_are_left_out_where_a_pause_has_none(tmp_path):
    talk = [said("user", "q"), said("assistant", "a"), said("tool", "b", duration_ms=1500)]
    trace = import_messages(
        written(tmp_path / "a.jsonl", {"messages": [*talk, said("assistant", "c")]})
    )
    assert trace.table.column("turn_environment_s").to_pylist() == [[1.5]]
    huge = [*talk[:2], said("tool", "b", duration_ms=10**400), said("assistant", "c")]
    trace = import_messages(written(tmp_path / "a.jsonl", {"messages": huge}))
    assert "turn_environment_s" not in trace.table.column_names
    longer = [*talk, said("assistant", "c"), said("tool", "d"), said("assistant", "e")]
    trace = import_messages(written(tmp_path / "a.jsonl", {"messages": longer}))
    assert "turn_environment_s" not in trace.table.column_names


def test_the_task_or_else_the_text_of_the_prompt_makes_a_group(tmp_path):
    def record(**fields: object) -> dict:
        return {
            "messages": [said("user", fields.pop("text", "q")), said("assistant", "a")],
            **fields,
        }

    by_task = [record(task_id=1, text=text) for text in ("q", "r")]
    own_ids = [record(id=name) for name in ("x", "y")]
    other = [record(text="other", reward=1.0, step=4), record(score=0.5)]
    trace = import_messages(written(tmp_path / "a.jsonl", *by_task, *own_ids, *other))
    frame = trace.table.to_pandas()
    assert frame.groupby(["step", "prompt_id"]).size().tolist() == [2, 3, 1]
    assert sorted(frame["reward"].dropna()) == [0.5, 1.0]


def test_the_step_is_a_field_or_in_the_name_of_the_file_or_stated(tmp_path):
    record = {"messages": TALK}
    for step in (9, 10):
        written(tmp_path / f"step_{step}.jsonl", record)
    assert import_messages(tmp_path).column("step").tolist() == [9, 10]
    file = written(tmp_path / "run.jsonl", record, {**record, "global_step": 3})
    trace = import_messages(file, step=7)
    assert sorted(trace.column("step").tolist()) == [3, 7]
    assert "name no step" not in trace.metadata.notes


def test_a_record_that_is_no_conversation_is_dropped_and_counted(tmp_path):
    alone = {"messages": [said("user", "q")]}
    file = written(tmp_path / "a.jsonl", alone, {"messages": TALK}, alone, {"messages": [5]})
    file.write_text(file.read_text() + '{"messages": [{"ro')
    notes = import_messages(file).metadata.notes
    first = "(the first: no message of an assistant, in an object with messages; its messages are"
    assert f"4 records were left out {first}" in notes and str(tmp_path) not in notes
    answered = {"messages": [said("assistant", "a")]}
    assert "1 records were left out (the first: nothing before the first message of an" in (
        import_messages(written(tmp_path / "b.jsonl", answered, {"messages": TALK})).metadata.notes
    )
    with pytest.raises(InputError, match=r"a.jsonl: no rows: 2 records were left out \(the first"):
        import_messages(written(file, alone, alone))
    with pytest.raises(InputError, match=r"10,000 records were left out .* Name the right file"):
        import_messages(written(tmp_path / "c.json", *([{}] * 20_000)))
    file.write_text('{"role": "user"\n' * 3)
    with pytest.raises(
        InputError, match=r"3 records were left out \(the first: a.jsonl: line 1: br"
    ):
        import_messages(file)
    deep = '{"messages": [{"role": "assistant", "content": ' + "[" * 900 + "]" * 900 + "}]}\n"
    file.write_text(deep)
    with pytest.raises(InputError, match="records were left out"):
        import_messages(file)


def test_a_file_of_another_reader_is_answered_with_the_right_command(simrl, tmp_path):
    talk = written(tmp_path / "talk.json", {"messages": TALK}, {"messages": TALK})
    dump = written(tmp_path / "1.jsonl", {"input": "p", "output": "x", "score": 1, "step": 1})
    nemo = written(tmp_path / "n.jsonl", {"token_loss_mask": [[1]], "input_lengths": [1]})
    for reader, file, right in (
        ("jsonl", talk, "messages"), ("verl", talk, "messages"), ("csv", talk, "messages"),
        ("messages", dump, "verl"), ("trl", dump, "verl"), ("areal", dump, "verl"),
        ("verl", nemo, "nemo_rl"), ("slime", talk, "messages"),
    ):  # fmt: skip
        done = simrl("trace", "import", reader, str(file), "-o", str(tmp_path / "t.parquet"))
        assert done.code == 2 and "\n" not in done.err.strip()
        assert f"run `simrl trace import {right} {file}`" in " ".join(done.err.split())


def test_a_file_that_nobody_knows_is_answered_with_the_nearest_format_and_what_it_lacks(
    simrl, tmp_path
):
    file = written(tmp_path / "a.jsonl", {"input": "p", "answer": "x", "step": 1})
    refused = simrl("trace", "import", "trl", str(file), "-o", str(tmp_path / "t.parquet"))
    assert (
        f"the nearest format is read by `simrl trace import verl {file}`, and has output, too"
        in (" ".join(refused.err.split()))
    )
    file = written(tmp_path / "b.jsonl", {"x": 1})
    refused = simrl("trace", "import", "messages", str(file), "-o", str(tmp_path / "t.parquet"))
    assert "no message of an assistant, in an object with x; its messages are the list" in (
        " ".join(refused.err.split())
    )
    assert "nearest" not in refused.err


@pytest.mark.parametrize("reader", ["messages", "verl", "jsonl", "csv", "slime"])
def test_a_device_without_an_end_is_refused_unread(simrl, tmp_path, reader):
    refused = simrl("trace", "import", reader, "/dev/zero", "-o", str(tmp_path / "t.parquet"))
    assert refused.code == 2 and "/dev/zero" in refused.err


def test_the_practice_conversations_are_read(shared_data):
    folder = shared_data / "practice" / "20-formats"
    if not folder.is_dir():
        pytest.skip("the practice files are not there")
    trace = import_messages(folder / "chat_messages.jsonl")
    assert turns(trace)[0] == (410, [28, 250], [1500])
    trace = import_messages(folder / "sharegpt.json")
    assert turns(trace) == [(240, [960, 360], [50])] * 8


@pytest.mark.parametrize(
    "stamps",
    [
        [1.7e9, 1.7e9 + 2],
        [1_700_000_000_000, 1_700_000_002_000],
        [1_700_000_000_000_000, 1_700_000_002_000_000],
        [1_700_000_000_000_000_000, 1_700_000_002_000_000_000],
        ["2026-03-29T02:30:00", "2026-03-29T02:30:02+00:00"],  # no zone is UTC
    ],
)
def test_time_stamps_count_seconds_ms_us_or_ns_and_dates_without_a_zone_are_of_utc(
    tmp_path, stamps
):
    talk = [
        said("user", "q"),
        said("assistant", "a", timestamp=stamps[0]),
        said("tool", "b", timestamp=stamps[1]),
        said("assistant", "c"),
    ]
    trace = import_messages(written(tmp_path / "a.jsonl", {"messages": talk}))
    assert trace.table.column("turn_environment_s").to_pylist() == [[2.0]]
    assert "1 pauses between turns are by time stamps" in trace.metadata.notes


def test_pauses_are_counted_only_where_they_are_used(tmp_path):
    talk = [
        said("user", "q"),
        *(said("assistant", "a", timestamp=1.0), said("tool", "b", timestamp=2.0)),
        *(said("assistant", "a"), said("tool", "b"), said("assistant", "c")),
    ]
    trace = import_messages(written(tmp_path / "a.jsonl", {"messages": talk}))
    assert "pauses between turns" not in trace.metadata.notes


def test_pictures_are_counted_and_a_prompt_of_pictures_alone_is_one(tmp_path):
    def seen(url: str) -> dict:
        picture = {"type": "image_url", "image_url": {"url": url}}
        return {"messages": [said("user", [picture]), said("assistant", "a cat")]}

    trace = import_messages(written(tmp_path / "a.jsonl", seen("a"), seen("b"), seen("a")))
    assert trace.column("response_tokens").tolist() == [5, 5, 5]
    assert sorted(trace.column("prompt_id").tolist()) == [0, 0, 1]
    assert "3 pictures are not counted" in trace.metadata.notes
