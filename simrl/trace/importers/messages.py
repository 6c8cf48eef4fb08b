"""Conversations: chat messages (OpenAI, ShareGPT, Anthropic, verifiers) and the trajectories of
agents (SWE-agent, mini-swe-agent, OpenHands).

Invariant: a conversation is one sample. The messages before the assistant's first are its prompt,
each of the assistant is generated, what stands between two of them is an observation, and what
follows the last is left out. A record that is no conversation is dropped, and the notes count it.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from simrl.errors import InputError
from simrl.trace.importers import rows, tabular, turns
from simrl.trace.importers.tokens import TokenCounter
from simrl.trace.trace import Trace

NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
EVENT_FILE = re.compile(
    r"(event-)?[0-9]{1,9}(-.*)?\.json"
)  # where OpenHands keeps one event a file
MILLISECONDS = 1e11  # stamps above count these: as seconds they lie after the year 5000
LONGEST_PAUSE_S = 86_400.0  # between two turns; a longer one is no tool's
TIMED = (
    "The environment's times are the recorded durations.",
    "The environment's times are by time stamps, from a turn to the last message before the next.",
)
COLUMNS = ("prompt_id", "prompt", "response", "step", "reward", "turn_environment_s", "turn_tool")


class Message(NamedTuple):
    """A message: whether the model wrote it, its text, its time stamp, the seconds of the tool that
    it answers for, and the tool's name."""

    generated: bool
    text: str
    at_s: float | None
    took_s: float | None
    tool: str | None


def import_conversations(
    files: Sequence[Path],
    counter: TokenCounter,
    step: int | None,
    name: str,
    **labels: Unpack[rows.Labels],
) -> Trace:
    """Return the trace of the conversations in files. A step is a field of the record, the number
    in the name of its file, `step`, or 0; the notes say the last."""
    noted: Counter[str] = Counter()
    records = _records(files, step, noted)
    samples = list(tabular.table_rows(records, dict(zip(COLUMNS, COLUMNS)), counter))
    known = (*TIMED, tabular.NO_STEP)
    dropped = [f"{n} records were left out: {why}." for why, n in noted.items() if why not in known]
    if not samples and dropped:
        raise InputError(f"{files[0]}: {dropped[0]}")
    observed = [row.turn_observation_tokens for row in samples]
    several = turns.several(observed, "by the roles of messages", [*filter(noted.get, TIMED)])
    return rows.trace_from_rows(
        samples,
        source=f"conversations {name}",
        tokenizer=counter.tokenizer,
        notes=[*several, *filter(noted.get, known[2:]), *dropped],
        default_name=name,
        **labels,
    )


def _records(
    files: Sequence[Path], step: int | None, noted: Counter[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the columns of each conversation."""
    placed = ((file, *read) for file in files for read in rows.read_records(file, noted))
    for origin, group in groupby(placed, key=lambda read: _origin(*read)):
        (file, place, record), *more = group
        if more or not isinstance(record, dict):
            record = {"messages": [record, *(item for *_, item in more)] if more else record}
        try:
            columns = conversation(record, noted)
        except (InputError, RecursionError) as error:
            noted[str(error)] += 1
            continue
        at = tabular.step_of(record, Path(origin if more else file))
        noted[tabular.NO_STEP] += at is step is None
        if file.suffix == ".traj" and isinstance(columns["prompt_id"], bytes):
            columns["prompt_id"] = file.stem  # SWE-agent names the file by its task
        yield place, {**columns, "step": (step or 0) if at is None else at}


def _origin(file: Path, place: str, record: Any) -> str:
    """Return what the records of one conversation share: the file of single messages or events, the
    folder of an event a file; else the place of the record, which is a conversation."""
    match record:
        case {"role": _, "content": _} | {"source": _, "timestamp": _} if not any(
            name in record for name in (*NAMES["lists"], "prompt")
        ):
            return str(file.parent if EVENT_FILE.fullmatch(file.name) else file)
    return place


def conversation(record: Mapping[str, Any], noted: Counter[str]) -> dict[str, Any]:
    """Return the columns of a conversation. Raises `InputError` if it has no answer."""
    asked, rest = _items(record)
    messages = [message for message in _read(rest) if message.text or not message.generated]
    before = [*takewhile(lambda message: not message.generated, messages)]
    runs = [list(run) for _, run in groupby(messages[len(before) :], lambda message: message[0])]
    if not runs:
        raise InputError(
            f"no message of an assistant in an object with {rows.listed(record)}; its messages are the list "
            f"{', '.join(NAMES['lists'])}, or a prompt and a completion"
        )
    pauses = [*zip(runs[::2], runs[1::2], runs[2::2])]
    seconds = [_pause_s(calls[-1], output, noted) for calls, output, _ in pauses]
    tools = [_first(m.tool for m in (*calls, *output) if m.tool) for calls, output, _ in pauses]
    prompt = "".join(message.text for message in (*_read(asked), *before))
    digest = hashlib.sha256(prompt.encode(errors="replace")).digest()
    return {
        "prompt_id": str(_named(record, NAMES["tasks"]) or "") or digest,
        "prompt": prompt,
        "response": tuple((run[0].generated, "".join(m.text for m in run)) for run in runs),
        "reward": _first(v for v in map(record.get, ("reward", "score")) if rows.is_number(v)),
        "turn_environment_s": seconds if any(seconds) and None not in seconds else None,
        "turn_tool": [tool or "user" for tool in tools] if any(tools) else None,
    }


def _pause_s(call: Message, output: Sequence[Message], noted: Counter[str]) -> float | None:
    """Return the seconds between two turns; None if they are not recorded."""
    took = [message.took_s for message in output if message.took_s is not None]
    between_s = (output[-1].at_s or 0.0) - (call.at_s or 0.0)
    if not took and (None in (call.at_s, output[-1].at_s) or not 0 <= between_s <= LONGEST_PAUSE_S):
        return None
    noted[TIMED[not took]] += 1
    return sum(took) if took else between_s


def _items(record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages of a record: those that belong to the prompt in any case, and those that
    roles tell apart."""
    data = {key: _loaded(value) for key, value in record.items()}
    system = [json.dumps(data["tools"]) if data.get("tools") else "", data.get("system")]
    asked: list[Any] = [{"role": "system", "content": text} for text in system if text]
    answer = _named(data, NAMES["answers"])
    match data:
        case {"prompt": prompt} if isinstance(answer, str | list):
            return [*asked, *_listed(prompt, "user")], _listed(answer, "assistant")
        case {"trajectory": [{"action": _, "observation": _}, *_] as steps}:  # SWE-agent
            history = _listed(data.get("history") or steps[0].get("query"), "user")
            before = takewhile(lambda m: m.get("is_demo") or m.get("role") != "assistant", history)
            demonstrated = [{**message, "role": "user"} for message in before]
            return [*asked, *demonstrated], [*chain.from_iterable(map(_of_swe_agent, steps))]
    lists = (data[key] for key in NAMES["lists"] if isinstance(data.get(key), list) and data[key])
    pairs = (item if isinstance(item, list) else [item] for item in _first(lists) or [])
    return asked, [*chain.from_iterable(pairs)]  # OpenHands had pairs of events


def _of_swe_agent(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a step: the response, with the action where that is a call of a tool
    and not in its text, and the observation with the seconds of its execution."""
    response, action = (
        _text(_named(step, names)) for names in (("response", "thought"), ("action",))
    )
    text = response if action.strip() in response else response + action
    output = {**step, "role": "tool", "content": step.get("observation")}
    return [{"role": "assistant", "content": text}, output]


def _read(items: Iterable[Any]) -> Iterator[Message]:
    """Yield messages from items, those of events that the model sees."""
    response = None
    for item in items:
        if not isinstance(item, dict):
            raise InputError(f"a message is {rows.shown(item)}; it must be an object")
        match item:
            case {"action": str(), "tool_call_metadata": {"model_response": {"id": id}}}:
                if id == response:
                    continue  # one of several calls of a response, which the first has
                response = id
        if (message := _of_event(item)) is not None:
            yield _message(message)


def _of_event(event: dict[str, Any]) -> dict[str, Any] | None:
    """Return an event of OpenHands as a message, another item as it is; None for an event that the
    model does not see."""
    match event:
        case {"role": _} | {"from": _} | {"type": _}:
            return event
        case {"llm_message": dict(message)}:
            return {**event, **message}
        case {"system_prompt": prompt}:
            return {"role": "system", "content": [prompt, json.dumps(event.get("tools", ""))]}
        case {"tool_call": call}:
            text = event.get("thought")
            return {**event, "role": "assistant", "content": text, "tool_calls": [call]}
        case {"observation": name} | {"action": name} if name in NAMES["unseen"]:
            return None
        case {"observation": dict(output)}:
            return {**event, "role": "tool", "content": output, "name": event.get("tool_name")}
        case {"observation": name} | {"error": name}:
            text = event.get("content", name)
            return {**event, "role": "tool", "content": text, "name": name}
        case {
            "action": str(name),
            "source": "agent",
            "tool_call_metadata": {"model_response": {"choices": [{"message": dict(message)}, *_]}},
        }:
            return {**event, **message}
        case {"action": str(name), "args": dict(arguments)}:
            text = _named(arguments, ("content", "thought")) or event.get("message")
            call = {"name": name, "arguments": {k: v for k, v in arguments.items() if v != text}}
            is_call = event.get("source") == "agent" and name not in (*NAMES["spoken"], "system")
            role = (
                "system"
                if name == "system"
                else {"agent": "assistant"}.get(event.get("source", ""), "user")
            )
            return {**event, "role": role, "content": text, "tool_calls": [call] * is_call}
    return None


def _message(item: Mapping[str, Any]) -> Message:
    """Return a message of any form. Raises `InputError` if it does not name its role."""
    role = _named(item, NAMES["roles"])
    if not isinstance(role, str):
        raise InputError(f"a message has {rows.listed(item)}; it needs a role and its content")
    generated, content = role.lower() in NAMES["assistants"], _named(item, NAMES["content"])
    calls = [call for key in NAMES["calls"] for call in _listed(item.get(key), "")]
    parts = [part for part in (*calls, *_listed(content, ""), item) if isinstance(part, dict)]
    names = (_named(_dict(part.get("function")) or part, ("name",)) for part in parts)
    both = {**_dict(item.get("extra")), **item}
    took = (both[k] * unit for k, unit in NAMES["seconds"].items() if rows.is_number(both.get(k)))
    return Message(
        generated,
        _text([_named(item, NAMES["reasoning"]) if generated else None, content, calls]),
        _stamp_s(_named(both, NAMES["stamps"])),
        _first(value for value in took if 0 <= value <= LONGEST_PAUSE_S),
        _first(n for n in names if isinstance(n, str) and role.lower() not in NAMES["users"]),
    )


def _text(value: Any) -> str:
    """Return the text of a message's content: a text, or parts with one. Pictures have none."""
    match value:
        case str():
            return value
        case list():
            return "".join(map(_text, value))
        case dict():
            held = [(name, value[name]) for name in NAMES["parts"] if name in value]
            is_data = [name in NAMES["data"] and isinstance(part, dict) for name, part in held]
            return "".join(
                json.dumps(part) if data else _text(part)
                for (_, part), data in zip(held, is_data, strict=True)
            )
    return ""


def _stamp_s(stamp: Any) -> float | None:
    """Return a time stamp in seconds, a date of ISO 8601 or a number; None for anything else."""
    with suppress(ValueError, OverflowError):
        is_number = rows.is_number(stamp)
        at_s = rows.as_float(stamp) if is_number else datetime.fromisoformat(str(stamp)).timestamp()
        return at_s / 1e3 if at_s > MILLISECONDS else at_s
    return None


def _loaded(value: Any) -> Any:
    """Return a list of objects that a column holds as text; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _listed(value: Any, role: str) -> list[Any]:
    """Return a value as a list of messages; text is one of the role."""
    if isinstance(value, list):
        return value
    return [{"role": role, "content": value} if isinstance(value, str) else value] if value else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _first(values: Iterable[Any]) -> Any:
    return next(iter(values), None)


def _named(fields: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the first of these fields that is there and not null."""
    return _first(fields[name] for name in names if fields.get(name) is not None)
