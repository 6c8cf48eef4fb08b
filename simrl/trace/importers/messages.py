"""Conversations: chat messages (OpenAI, ShareGPT, Anthropic, verifiers) and the trajectories of
agents (SWE-agent, mini-swe-agent, OpenHands).

Invariant: a conversation is one sample. The messages before the assistant's first are its prompt,
each of the assistant is generated, what stands between two of them is an observation, and what
follows the last is left out. A record that is no conversation is dropped, and the notes count it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from simrl.errors import InputError
from simrl.trace.importers import rows, tabular, turns
from simrl.trace.importers.tokens import TokenCounter
from simrl.trace.trace import Trace

# Fields of a record that hold its messages, the likeliest first; and an answer beside a prompt.
LISTS = ("messages", "conversations", "conversation", "history", "trajectory", "traj", "events")
ANSWERS = ("completion", "response")
ASSISTANT = ("assistant", "gpt", "model", "ai", "chatgpt", "bot", "function_call", "reasoning")
USER = ("user", "human", "system", "environment")  # these name no tool
TASKS = ("instance_id", "task_id", "example_id", "problem_id", "question_id", "prompt_id")
STAMPS = ("timestamp", "created_at", "created", "time", "ts")
SECONDS = {  # of a tool, on the message with its output: the unit in seconds
    **dict.fromkeys(("execution_time", "execution_time_s", "tool_time", "duration", "elapsed"), 1),
    **dict.fromkeys(("tool_time_s", "duration_s", "elapsed_s", "execution_seconds"), 1),
    **dict.fromkeys(("execution_time_ms", "tool_time_ms", "duration_ms", "elapsed_ms"), 1e-3),
}
CONTENT = ("content", "value", "parts", "output", "text", "arguments")  # the first that is there
REASONING = ("reasoning_content", "reasoning", "thinking")
DATA = ("input", "arguments", "args")  # of a call, as JSON writes them
PARTS = ("thinking", "text", "content", "output", "summary", "function", "name", *DATA)
CALLS = ("tool_calls", "function_call")
UNSEEN = {"agent_state_changed", "change_agent_state", "null", "recall", "condensation"}  # OpenHands
EVENT_FILE = re.compile(r"(event-)?[0-9]{1,9}(-.*)?\.json")  # where OpenHands keeps one event a file
MILLISECONDS = 1e11  # stamps above count these: as seconds they lie after the year 5000
LONGEST_PAUSE_S = 86_400.0  # between two turns; a longer one is no tool's
DURATIONS = "The environment's times are the recorded durations."
DIFFERENCES = (
    "The environment's times are by time stamps, from a turn to the last message before the next."
)
COLUMNS = ("prompt_id", "prompt", "response", "step", "reward", "turn_environment_s", "turn_tool")


class Message(NamedTuple):
    """A message: whether the model wrote it, its text, its time stamp, the seconds of the tool that
    it answers for, and the tool's name."""

    generated: bool
    text: str
    at_s: float | None
    took_s: float | None
    tool: str


def import_conversations(
    files: Sequence[Path],
    counter: TokenCounter,
    step: int | None,
    source: str,
    default_name: str,
    **labels: Unpack[rows.Labels],
) -> Trace:
    """Return the trace of the conversations in files. A step is a field of the record, the number
    in the name of its file, `step`, or 0; the notes say the last."""
    left_out: Counter[str] = Counter()
    noted: Counter[str] = Counter()
    records = _records(files, step, noted, left_out)
    samples = list(tabular.table_rows(records, {name: name for name in COLUMNS}, counter))
    if not samples and left_out:
        raise InputError(f"{files[0]}: {next(iter(left_out))}")
    timed = [note for note in (DURATIONS, DIFFERENCES) if noted.pop(note, 0)]
    observed = [row.turn_observation_tokens for row in samples]
    return rows.trace_from_rows(
        samples,
        source=source,
        default_name=default_name,
        tokenizer=counter.tokenizer,
        notes=[
            *turns.several(observed, "by the roles of messages", timed),
            *(note for note, n in noted.items() if n),
            *(f"{n} records were left out: {reason}." for reason, n in left_out.items()),
        ],
        **labels,
    )


def _records(
    files: Sequence[Path], step: int | None, noted: Counter[str], left_out: Counter[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the columns of each conversation."""
    placed = ((file, *read) for file in files for read in rows.read_records(file, left_out))
    for origin, group in groupby(placed, key=lambda read: _origin(*read)):
        (file, place, record), *more = group
        record = {"messages": [record, *(last for *_, last in more)]} if more else record
        try:
            columns = _columns(record if isinstance(record, dict) else {"messages": record}, noted)
        except (InputError, RecursionError) as error:
            deep = "an object is nested too deeply"
            left_out[deep if isinstance(error, RecursionError) else str(error)] += 1
            continue
        named = [record[key] for key in tabular.ALIASES["step"] if key in record]
        at = next(iter(named), tabular.step_in(Path(origin if more else file)))
        noted[tabular.NO_STEP] += at is step is None
        if file.suffix == ".traj" and isinstance(columns["prompt_id"], bytes):
            columns["prompt_id"] = file.stem
        yield place, {**columns, "step": (step or 0) if at is None else at}


def _origin(file: Path, place: str, record: Any) -> str:
    """Return what the records of one conversation share: the file of single messages or events, the
    folder of an event a file; else the place of the record, which is a conversation."""
    if not isinstance(record, dict) or not {*LISTS, "prompt"}.isdisjoint(record):
        return place
    if not {"role", "content"} <= {*record} and not {"source", "timestamp"} <= {*record}:
        return place
    return str(file.parent if EVENT_FILE.fullmatch(file.name) else file)


def _columns(record: Mapping[str, Any], noted: Counter[str]) -> dict[str, Any]:
    """Return the columns of a conversation. Raises `InputError` if it has no answer."""
    asked, rest = _items(record)
    messages = [message for message in _read(rest) if message.text or not message.generated]
    before = [*takewhile(lambda message: not message.generated, messages)]
    runs = [list(run) for _, run in groupby(messages[len(before) :], lambda message: message[0])]
    if not runs:
        raise InputError(
            f"no message of an assistant in an object with {rows.listed(record)}; its messages are the list "
            f"{', '.join(LISTS)}, or a prompt and a completion"
        )
    pauses = [(calls, answers) for calls, answers, _ in zip(runs[::2], runs[1::2], runs[2::2])]
    seconds = [_pause_s(*pause, noted) for pause in pauses]
    tools = [next((m.tool for m in (*calls, *output) if m.tool), "") for calls, output in pauses]
    prompt = "".join(message.text for message in (*_read(asked), *before))
    names = [str(record[key]) for key in TASKS if record.get(key) is not None]
    rewards = [record[key] for key in ("reward", "score") if rows.is_number(record.get(key))]
    return {
        "prompt_id": next(iter(names), hashlib.sha256(prompt.encode(errors="replace")).digest()),
        "prompt": prompt,
        "response": [(run[0].generated, "".join(m.text for m in run)) for run in runs],
        "reward": next(iter(rewards), None),
        "turn_environment_s": seconds if any(seconds) and None not in seconds else None,
        "turn_tool": [tool or "user" for tool in tools] if any(tools) else None,
    }


def _pause_s(
    calls: Sequence[Message], output: Sequence[Message], noted: Counter[str]
) -> float | None:
    """Return the seconds between two turns; None if they are not recorded."""
    took = [message.took_s for message in output if message.took_s is not None]
    begin, end = calls[-1].at_s, output[-1].at_s
    if took or begin is None or end is None or not 0 <= end - begin <= LONGEST_PAUSE_S:
        noted[DURATIONS] += bool(took)
        return sum(took) if took else None
    noted[DIFFERENCES] += 1
    return end - begin


def _items(record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages of a record: those that belong to the prompt in any case, and those that
    roles tell apart."""
    data = {key: _loaded(value) for key, value in record.items()}
    tools = [json.dumps(data["tools"])] if data.get("tools") else []
    asked: list[Any] = [
        {"role": "system", "content": text} for text in (*tools, data.get("system")) if text
    ]
    answer = next((data[key] for key in ANSWERS if isinstance(data.get(key), str | list)), None)
    if "prompt" in data and answer is not None:
        return [*asked, *_of("user", data["prompt"])], _of("assistant", answer)
    lists = [data[key] for key in LISTS if isinstance(data.get(key), list) and data[key]]
    steps = [step for step in _listed(data.get("trajectory")) if isinstance(step, dict)]
    if steps and {"action", "observation"} <= {*steps[0]}:
        history = _listed(data.get("history")) or _listed(steps[0].get("query"))
        before = takewhile(lambda item: item.get("is_demo") or item["role"] != "assistant", history)
        return [*asked, *before], [item for step in steps for item in _of_swe_agent(step)]
    flat = (item if isinstance(item, list) else [item] for item in next(iter(lists), []))
    return asked, [item for items in flat for item in items]  # OpenHands had pairs of events


def _of_swe_agent(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a step: the response, with the action where that is a call of a tool
    and not in its text, and the observation with the seconds of its execution."""
    response, action = str(step.get("response") or step.get("thought") or ""), str(step["action"])
    text = response if action.strip() in response else response + action
    return [{"role": "assistant", "content": text}, {**step, "role": "tool", "content": step["observation"]}]


def _read(items: Iterable[Any]) -> Iterator[Message]:
    """Yield messages from items, those of events that the model sees."""
    before = None
    for item in items:
        if not isinstance(item, dict):
            raise InputError(f"a message is {rows.shown(item)}; it must be an object")
        response = _dict(_dict(item.get("tool_call_metadata")).get("model_response"))
        is_call = "action" in item and "observation" not in item and response
        if is_call and response.get("id") == before:
            continue  # one of several calls of a response, which the first has
        before = response.get("id") if is_call else before
        message = item if {"role", "from", "type"} & {*item} else _of_event(item, response)
        if message is not None:
            yield _message(message)


def _of_event(event: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an event of OpenHands as a message; None for one that the model does not see."""
    seen, action, arguments = event.get("observation"), event.get("action"), _dict(event.get("args"))
    if "llm_message" in event:
        return {**event, **_dict(event["llm_message"])}
    if "system_prompt" in event:
        tools = json.dumps(event.get("tools", ""))
        return {"role": "system", "content": [event["system_prompt"], tools]}
    if "tool_call" in event:
        call = {"role": "assistant", "content": event.get("thought"), "tool_calls": [event["tool_call"]]}
        return {**event, **call}
    if seen or "error" in event:
        text = seen if isinstance(seen, dict) else event.get("content") or event.get("error")
        name = event.get("tool_name") or seen
        return None if seen in UNSEEN else {**event, "role": "tool", "content": text, "name": name}
    if not isinstance(action, str) or action in UNSEEN:
        return None
    text = arguments.get("content") or arguments.get("thought") or event.get("message")
    if event.get("source") != "agent" or action == "system":
        return {**event, "role": "system" if action == "system" else "user", "content": text}
    choice = _dict(next(iter(_listed(response.get("choices"))), None)).get("message")
    call = {"name": action, "arguments": {k: v for k, v in arguments.items() if v != text}}
    spoken = {"content": text, "tool_calls": [] if action in ("message", "finish") else [call]}
    return {**event, **(_dict(choice) or spoken), "role": "assistant"}


def _message(item: Mapping[str, Any]) -> Message:
    """Return a message of any form. Raises `InputError` if it does not name its role."""
    role = next((str(item[key]) for key in ("role", "from", "type") if item.get(key)), None)
    if role is None:
        raise InputError(f"a message has {rows.listed(item)}; it needs a role and its content")
    generated = role.lower() in ASSISTANT
    content = next((item[key] for key in CONTENT if item.get(key) is not None), None)
    reasoning = next((item[key] for key in REASONING if item.get(key)), None) if generated else None
    calls = [call for key in CALLS for call in _listed(item.get(key))]
    named = [_dict(part) for part in (*calls, *_listed(content))]
    names = [_dict(part.get("function", part)).get("name") for part in named] + [item.get("name")]
    named_tools = [name for name in names if name and isinstance(name, str)]
    both = {**_dict(item.get("extra")), **item}
    times = [_stamp_s(both[key]) for key in STAMPS if both.get(key) is not None]
    seconds = [both[k] * unit for k, unit in SECONDS.items() if rows.is_number(both.get(k))]
    return Message(
        generated,
        _text([reasoning, content, calls]),
        next(iter(times), None),
        next((value for value in seconds if 0 <= value <= LONGEST_PAUSE_S), None),
        "" if role.lower() in USER else next(iter(named_tools), ""),
    )


def _text(value: Any) -> str:
    """Return the text of a message's content: a text, or parts with one. Pictures have none."""
    if isinstance(value, list):
        return "".join(map(_text, value))
    if not isinstance(value, dict):
        return value if isinstance(value, str) else ""
    parts = [(key, value[key]) for key in PARTS if key in value]
    return "".join(
        json.dumps(part) if key in DATA and isinstance(part, dict) else _text(part)
        for key, part in parts
    )


def _stamp_s(stamp: Any) -> float | None:
    """Return a time stamp in seconds, a date of ISO 8601 or a number; None for anything else."""
    with suppress(ValueError, OverflowError):
        if isinstance(stamp, str) and not stamp.isdecimal():
            date = datetime.fromisoformat(stamp)
            return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        at_s = float(stamp) if isinstance(stamp, str | int | float) else math.nan
        return None if math.isnan(at_s) else at_s / 1e3 if at_s > MILLISECONDS else at_s
    return None


def _of(role: str, value: Any) -> list[Any]:
    """Return a prompt's or an answer's messages; text is one of the role."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _loaded(value: Any) -> Any:
    """Return a list of objects that a column holds as text; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _listed(value: Any) -> list[Any]:
    """Return a value as a list; null is an empty one."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _dict(value: Any) -> dict[str, Any]:
    """Return an object of JSON, an empty one for any other value."""
    return value if isinstance(value, dict) else {}
