"""Conversations: chat messages (OpenAI, ShareGPT, Anthropic, verifiers) and the trajectories of
agents (SWE-agent, mini-swe-agent, OpenHands).

Invariant: a conversation is one sample. The messages before the assistant's first are its prompt,
each of the assistant is generated, what stands between two of them is an observation, and what
follows the last is left out. A record that is no conversation is dropped, and the notes count it.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from simrl.errors import InputError, refuse
from simrl.trace.importers import rows, tabular

NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LATEST_S = 1e11  # stamps above count ms, us or ns: as seconds they lie after the year 5000
LONGEST_PAUSE_S = 86_400.0  # between two turns; a longer one is no tool's
NO_STEP = "conversations name no step and are taken for one; --step N gives its number."
DURATIONS = "pauses between turns are recorded durations of tools."
STAMPS = "pauses between turns are by time stamps, to the last message before the next turn."
PICTURES = "pictures are not counted: a prompt with them is longer than its tokens here."
PICTURE_PARTS = ("image", "image_url", "input_image")  # a part's type, or the key of its picture


class Message(NamedTuple):
    """A message: whether the model wrote it, its text, its time stamp, the seconds of the tool that
    it answers for, the tool's name, and its pictures."""

    generated: bool
    text: str
    at_s: float | None
    took_s: float | None
    tool: str | None
    pictures: list[Any]


def read(
    files: Sequence[Path], step: int | None, noted: Counter[str]
) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield the file, the place and the columns of each conversation. The step is a field of the
    record, or the number in the name of its file, or `step`, or 0."""
    placed = ((file, *record) for file in files for record in rows.read_records(file, noted))
    for origin, group in groupby(placed, key=lambda read: _origin(*read)):
        (file, place, record), *more = group
        if more or not isinstance(record, dict):
            record = {"messages": [record, *(item for *_, item in more)] if more else record}
        try:
            columns = conversation(record, noted, file)
        except (InputError, RecursionError) as error:
            rows.drop(noted, error, file)
            continue
        at = tabular.step_of(record, Path(origin if more else file))
        noted[NO_STEP] += at is step is None
        yield file, place, {**columns, "step": (step or 0) if at is None else at}


def _origin(file: Path, place: str, record: Any) -> str:
    """Return what the records of one conversation share: the file of single messages or events, or
    OpenHands' folder with an event a file; else the place of the record, which is a conversation."""
    match record:
        case {"role": _, "content": _} | {"source": _, "timestamp": _} if (
            _named(record, NAMES["lists"]) is None
        ):
            return str(file.parent if file.parent.name == "events" else file)
    return place


def conversation(
    record: Mapping[str, Any], noted: Counter[str], file: Path = Path()
) -> dict[str, Any]:
    """Return the columns of a conversation. Raises `InputError` if it has no answer."""
    leading, rest = _items(record)
    messages = [m for m in map(_message, rest) if m and (m.text or not m.generated)]
    before = [*takewhile(lambda message: not message.generated, messages)]
    runs = [list(run) for _, run in groupby(messages[len(before) :], lambda message: message[0])]
    before = [*filter(None, map(_message, leading)), *before]
    pictures = [picture for message in before for picture in message.pictures]
    prompt = "".join(message.text for message in before) or " " * bool(pictures)
    refuse(
        (
            not runs or not prompt,
            f"{'nothing before the first' if runs else 'no'} message of an assistant, in an object with "
            f"{rows.listed(record)}; its messages are the list {', '.join(NAMES['lists'])}, or a prompt and a completion",
        )
    )
    pauses = [*zip(runs[::2], runs[1::2], runs[2::2], strict=False)]
    timed = [_pause_s(calls[-1], output) for calls, output, _ in pauses]
    seconds = [pause_s for pause_s, _ in timed]
    is_timed = any(seconds) and None not in seconds
    noted.update(how for _, how in timed if is_timed)
    noted[PICTURES] += len(pictures) + sum(len(m.pictures) for run in runs for m in run)
    tools = [_first(m.tool for m in (*calls, *output) if m.tool) for calls, output, _ in pauses]
    task = file.stem if file.suffix == ".traj" else None  # SWE-agent names its files by the task
    return {
        "prompt_id": str(
            _first(
                [
                    _named(record, NAMES["tasks"]),
                    task,
                    prompt + json.dumps(pictures) * bool(pictures),
                ]
            )
        ),
        "prompt": prompt,
        "response": tuple((run[0].generated, "".join(m.text for m in run)) for run in runs),
        "reward": _first(v for v in map(record.get, ("reward", "score")) if rows.is_number(v)),
        "turn_environment_s": seconds if is_timed else None,
        "turn_tool": [tool or "user" for tool in tools] if any(tools) else None,
    }


def _pause_s(call: Message, output: Sequence[Message]) -> tuple[float | None, str]:
    """Return the seconds between two turns, None if they are not recorded, and how they were."""
    took = [message.took_s for message in output if message.took_s is not None]
    stamps = [message.at_s for message in (call, output[-1]) if message.at_s is not None]
    between_s = stamps[-1] - stamps[0] if len(stamps) == 2 else math.inf
    seconds = sum(took) if took else between_s
    recorded = seconds if 0 <= seconds <= LONGEST_PAUSE_S else None
    return recorded, DURATIONS if took else STAMPS


def _items(record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages of a record: those that belong to the prompt in any case, and those that
    roles tell apart."""
    tools = json.dumps(record["tools"]) if record.get("tools") else None
    leading = [*_listed(tools, "system"), *_listed(record.get("system"), "system")]
    answer = _first(a for a in map(record.get, NAMES["answers"]) if isinstance(a, str | list))
    match record:
        case {"prompt": prompt} if answer is not None:
            return [*leading, *_listed(prompt, "user")], _listed(answer, "assistant")
        case {"trajectory": [{"action": _, "observation": _}, *_] as steps}:  # SWE-agent
            history = filter(_dict, _listed(record.get("history") or steps[0].get("query"), "user"))
            before = takewhile(lambda m: m.get("is_demo") or m.get("role") != "assistant", history)
            leading += [{**message, "role": "user"} for message in before]
            return leading, [*chain.from_iterable(map(_of_swe_agent, filter(_dict, steps)))]
    held = _first(value for value in map(record.get, NAMES["lists"]) if value)
    text = held.encode(errors="replace") if isinstance(held, str) else b""  # in a table's column
    listed = rows.json_value(text, "messages") if text else held
    pairs = (item if isinstance(item, list) else [item] for item in _listed(listed, "user"))
    items = [*chain.from_iterable(pairs)]  # OpenHands had pairs of events
    answered = items and _named(_dict(items[-1]), NAMES["roles"]) in NAMES["assistants"]
    return leading, [*items, *([] if answered else _listed(answer, "assistant"))]


def _of_swe_agent(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a step: the response, with the action where that is a call of a tool
    and not in its text, and the observation with the seconds of its execution."""
    response, action = _text(_named(step, ("response", "thought"))), _text(step.get("action"))
    text = response if action.strip() in response else response + action
    output = {**step, "role": "tool", "content": step.get("observation")}
    return [{"role": "assistant", "content": text}, output]


def _of_event(event: Any) -> Any:
    """Return an event of OpenHands as a message, another item as it is; None for an event that the
    model does not see, or whose text an earlier one has."""
    match event:
        case {"role": _} | {"from": _} | {"type": _}:
            return event
        case {"system_prompt": prompt}:
            return {"role": "system", "content": [prompt, json.dumps(event.get("tools") or "")]}
        case {"tool_call": call}:
            return {
                **event,
                "role": "assistant",
                "content": event.get("thought"),
                "tool_calls": [call],
            }
        case {"observation": name} | {"action": name} if name in NAMES["unseen"]:
            return None
        case {"observation": dict(output)}:
            return {**event, "role": "tool", "content": output, "name": event.get("tool_name")}
        case {"observation": name} | {"error": name}:
            return {**event, "role": "tool", "content": event.get("content", name), "name": name}
        case {
            "tool_call_metadata": {
                "tool_call_id": this,
                "model_response": {
                    "choices": [{"message": {"tool_calls": [{"id": first}, *_]}}, *_]
                },
            }
        } if this != first:
            return None  # a further call of a response
        case {"llm_message": dict(message)} | {
            "tool_call_metadata": {"model_response": {"choices": [{"message": dict(message)}, *_]}}
        }:
            return {**event, **message}
        case {"action": str(name), "args": dict(arguments)}:
            text = _named(arguments, ("content", "thought")) or event.get("message")
            call = {"name": name, "arguments": {k: v for k, v in arguments.items() if v != text}}
            is_models = event.get("source") == "agent" and name != "system"
            message = {**event, "role": "assistant" if is_models else "user", "content": text}
            return {**message, "tool_calls": [call] * (is_models and name not in NAMES["spoken"])}
        case {"source": _} | {"kind": _}:
            return None
    return event


def _message(item: Any) -> Message | None:
    """Return a message of any form, None for an event that the model does not see. Raises
    `InputError` if it names no role."""
    if (item := _of_event(item)) is None:
        return None
    role = _named(item, NAMES["roles"]) if isinstance(item, dict) else None
    if not isinstance(role, str):
        raise InputError(f"a message is {rows.shown(item)}; it needs a role and its content")
    generated, content = role.lower() in NAMES["assistants"], _named(item, NAMES["content"])
    calls = [call for key in NAMES["calls"] for call in _listed(item.get(key), "")]
    parts = [part for part in (*calls, *_listed(content, ""), item) if isinstance(part, dict)]
    names = (_named({**part, **_dict(part.get("function"))}, ("name",)) for part in parts)
    both = {**_dict(item.get("extra")), **item}
    timed = [name for name in NAMES["seconds"] if rows.is_number(both.get(name))]
    took = [rows.as_float(both[name]) * NAMES["seconds"][name] for name in timed]
    return Message(
        generated,
        _text([_named(item, NAMES["reasoning"]) if generated else None, content, calls]),
        _stamp_s(_named(both, NAMES["stamps"])),
        _first(value for value in took if 0 <= value <= LONGEST_PAUSE_S),
        _first(n for n in names if isinstance(n, str) and role.lower() not in NAMES["users"]),
        _pictures(content),
    )


def _pictures(content: Any) -> list[Any]:
    """Return the pictures in a message's content, also within the outputs of tools."""
    return [
        picture
        for part in (content if isinstance(content, list) else ())
        for picture in (
            [part]
            if _dict(part).keys() & {*PICTURE_PARTS} or _dict(part).get("type") in PICTURE_PARTS
            else _pictures(_dict(part).get("content"))
        )
    ]


def _text(value: Any) -> str:
    """Return the text of a message's content: a text, or parts with one. Pictures have none."""
    if isinstance(value, dict):
        held = {name: value[name] for name in NAMES["parts"] if name in value}
        data = {name: json.dumps(held[name]) for name in NAMES["data"] if _dict(held.get(name))}
        value = [*{**held, **data}.values()]
    return (
        "".join(map(_text, value))
        if isinstance(value, list)
        else value
        if isinstance(value, str)
        else ""
    )


def _stamp_s(stamp: Any) -> float | None:
    """Return a time stamp in seconds, a number or a date of ISO 8601 (of UTC, if it names no zone);
    None for anything else."""
    with suppress(ValueError, OverflowError):
        date = None if rows.is_number(stamp) else datetime.fromisoformat(str(stamp))
        at_s = date.replace(tzinfo=date.tzinfo or UTC).timestamp() if date else rows.as_float(stamp)
        scales = (at_s / scale for scale in (1, 1e3, 1e6, 1e9))
        return next((seconds for seconds in scales if seconds <= LATEST_S), None)
    return None


def _listed(value: Any, role: str) -> list[Any]:
    """Return a value as a list of messages; text is one of the role, null and empty text none."""
    items = value if isinstance(value, list) else [value] if value else []
    return [{"role": role, "content": item} if isinstance(item, str) else item for item in items]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _named(fields: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the first of these fields that is there and not null."""
    return _first(map(fields.get, names))
