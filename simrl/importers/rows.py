"""What the importers share: reading rows that know their place, and the way from such rows to a trace.

Invariant: every row carries the place it came from (file and line), so whatever is wrong with it can be said in one
line. `trace_from_rows` numbers prompts, samples and epochs the same way for every source:

- prompts in order of first appearance, unless the source numbers them itself;
- samples of a prompt within a step in order of appearance: rows of one prompt and step are one group;
- epoch = the number of earlier steps in which the prompt occurred, unless the source has an epoch;
- empty responses (0 tokens) cannot be generated again: they are left out, and the notes say how many.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from simrl.errors import InputError, first_line
from simrl.importers.tokens import TokenCounter
from simrl.trace import Trace, TraceMetadata

T = TypeVar("T")

INT32_MAX = 2**31 - 1
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # perhaps of a pair that is whole
FLOAT32_MAX = 3.4028234e38
TURNS = ("turn_tokens", "turn_environment_s", "turn_observation_tokens")
BATCH = 1024  # texts tokenised at once: enough to keep the tokenizer's threads busy, little enough to hold in memory


class Row(NamedTuple):
    """One sample as a source tells it. `prompt` is whatever identifies the prompt: its text, its ids or a number."""

    place: str
    step: int
    prompt: Hashable
    prompt_tokens: int
    response_tokens: int
    sample: int | None = None
    epoch: int | None = None
    reward: float | None = None
    finish_reason: str | None = None
    policy_version: int | None = None
    environment_s: float | None = None
    response_ids: NDArray[np.int32] | None = None
    turn_tokens: Sequence[int] | None = None
    turn_environment_s: Sequence[float] | None = None
    turn_observation_tokens: Sequence[int] | None = None


class TextRow(NamedTuple):
    """One sample of a source that keeps text but no lengths."""

    place: str
    step: int
    prompt: str
    response: str
    reward: float | None


def count_rows(texts: Iterable[TextRow], counter: TokenCounter) -> Iterator[Row]:
    """Rows with the lengths (and, from a tokenizer, the token ids) of their texts. A prompt is counted once."""
    prompt_tokens: dict[str, int] = {}
    for batch in batches(texts):
        new = [p for p in dict.fromkeys(row.prompt for row in batch) if p not in prompt_tokens]
        prompt_tokens.update(zip(new, (c.tokens for c in counter.count(new)), strict=True))
        for row, counted in zip(batch, counter.count([row.response for row in batch]), strict=True):
            yield Row(
                row.place,
                row.step,
                row.prompt,
                prompt_tokens[row.prompt],
                counted.tokens,
                reward=row.reward,
                response_ids=counted.ids,
            )


def trace_from_rows(
    rows: Iterable[Row],
    *,
    name: str,
    source: str,
    licence: str,
    tokenizer: str,
    cap_tokens: int | None,
    notes: Sequence[str] = (),
) -> Trace:
    """A trace of the rows; `cap_tokens` None takes the largest response for the cap, and the notes say so.

    Raises `InputError` for no rows, only empty responses, an empty prompt, and a response over the cap.
    """
    if cap_tokens is not None and cap_tokens < 1:
        raise InputError(f"cap_tokens is {cap_tokens}; the largest response a run allows is at least 1 token")
    notes = list(notes)
    every = list(rows)
    kept = [row for row in every if row.response_tokens > 0]
    if not kept:
        found = f"all {len(every)} responses are empty" if every else "no rows"
        raise InputError(f"{source}: {found}; a trace needs at least one response of a token or more")
    if len(kept) < len(every):
        first = next(row for row in every if row.response_tokens == 0)
        notes.append(f"{len(every) - len(kept)} empty responses were left out (the first: {Path(first.place).name}).")
    for row in kept:
        if row.prompt_tokens < 1:
            raise InputError(f"{row.place}: the prompt has {row.prompt_tokens} tokens; it must have at least 1")
        if cap_tokens is not None and row.response_tokens > cap_tokens:
            raise InputError(
                f"{row.place}: the response has {row.response_tokens} tokens, over the cap of {cap_tokens}; "
                "give the run's real cap, or none to take the largest response for it"
            )
    if cap_tokens is None:
        cap_tokens = max(row.response_tokens for row in kept)
        notes.append(
            f"The source does not state the run's cap: the largest response, {cap_tokens} tokens, stands for it."
        )
    columns = _columns(kept)
    metadata = TraceMetadata(
        name=name,
        kind="imported",
        source=source,
        licence=licence,
        tokenizer=tokenizer,
        cap_tokens=cap_tokens,
        notes=" ".join(notes),
    )
    return Trace.from_columns(columns, metadata, origin=source)


def _columns(rows: Sequence[Row]) -> dict[str, Any]:
    step = np.array([row.step for row in rows], dtype=np.int64)
    prompt_id = _prompt_ids([row.prompt for row in rows])
    columns: dict[str, Any] = {
        "step": step,
        "prompt_id": prompt_id,
        "prompt_tokens": [row.prompt_tokens for row in rows],
        "response_tokens": [row.response_tokens for row in rows],
    }
    group = pd.DataFrame({"step": step, "prompt_id": prompt_id})
    told = rows[0]  # sample and epoch are columns of a source or they are not: all rows tell them, or none
    columns["sample"] = (
        group.groupby(["step", "prompt_id"]).cumcount().to_numpy()
        if told.sample is None
        else [row.sample for row in rows]
    )
    columns["epoch"] = earlier_steps(group) if told.epoch is None else [row.epoch for row in rows]
    for name in ("reward", "finish_reason", "policy_version", "environment_s", *TURNS):
        values = [getattr(row, name) for row in rows]
        if any(value is not None for value in values):
            columns[name] = values
    if told.response_ids is not None:
        tokens = sum(row.response_tokens for row in rows)
        if tokens > INT32_MAX:
            raise InputError(
                f"{tokens} token ids, and one column holds {INT32_MAX}; import fewer steps, or lengths alone"
            )
        columns["response_ids"] = pa.array([row.response_ids for row in rows], pa.list_(pa.int32()))
    return columns


def _prompt_ids(prompts: Sequence[Hashable]) -> NDArray[np.int64]:
    """The source's own numbers where all prompts have one, else the order of first appearance."""
    if all(isinstance(prompt, int) and 0 <= prompt < 2**63 for prompt in prompts):
        return np.array(prompts, dtype=np.int64)
    number: dict[Hashable, int] = {}
    return np.array([number.setdefault(prompt, len(number)) for prompt in prompts], dtype=np.int64)


def earlier_steps(group: pd.DataFrame) -> NDArray[np.int64]:
    """For each row of (step, prompt_id): in how many distinct earlier steps its prompt occurred."""
    pairs = group.drop_duplicates().sort_values("step", kind="stable")
    pairs["epoch"] = pairs.groupby("prompt_id").cumcount()
    epoch: NDArray[np.int64] = group.merge(pairs, on=["step", "prompt_id"], how="left")["epoch"].to_numpy(np.int64)
    return epoch


# Reading files


def batches(items: Iterable[T]) -> Iterator[list[T]]:
    """The items in lists of `BATCH`, the last one shorter."""
    rest = iter(items)
    while batch := list(islice(rest, BATCH)):
        yield batch


def existing(path: str | Path) -> Path:
    """The path, if there is something at it; `.` under its own name, for the metadata."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; check the path")
    return path.resolve() if path.name in ("", "..") else path


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) for each line of a JSON Lines file; blank lines are passed over, an empty file is refused."""
    empty = True
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    empty = False
                    place = f"{path}: line {number}"
                    yield place, json_object(line, place)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a readable file") from error
    if empty:
        raise InputError(f"{path}: the file is empty; one JSON object a line is expected")


def read_whole(path: Path) -> bytes:
    """The bytes of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a readable file") from error


def opened(path: Path) -> TextIO:
    """The lines of a log; what is no UTF-8 in it stands as such."""
    try:
        return path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a readable file") from error


def step_number(digits: str, place: str) -> int:
    """The step that a line of a log begins with."""
    if len(digits) > 10 or int(digits) > INT32_MAX:
        raise InputError(f"{place}: step {digits[:20]} is larger than {INT32_MAX}; repair or remove the line")
    return int(digits)


def json_object(raw: bytes, place: str) -> dict[str, Any]:
    """The JSON object that `raw` holds, or an `InputError` that says where it breaks."""
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise InputError(f"{place}: byte 0x{bad:02x} is not UTF-8; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: broken JSON ({first_line(error)}); was the file cut off?") from error
    if not isinstance(value, dict):
        raise InputError(f"{place}: {shown(value)} is not a JSON object; rows are objects with named fields")
    if _HALF.search(raw) and (name := _halved_name(value)) is not None:
        raise InputError(f"{place}: the field {shown(name)} has half a surrogate pair in its name; mend it")
    return value


def _halved_name(value: dict[str, Any]) -> str | None:
    """The first name of a field, in it or in what it holds, that UTF-8 cannot write."""
    todo: list[Any] = [value]
    while todo:
        inner = todo.pop()
        if isinstance(inner, dict):
            for name in inner:
                if any("\ud800" <= character <= "\udfff" for character in name):
                    return str(name)
        todo += inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
    return None


# Fields of a row


def field(row: Mapping[str, Any], name: str, place: str) -> Any:
    """The value of a field that must be there."""
    if name not in row:
        raise InputError(f"{place}: no field {name!r} (it has {listed(row)}); name the right file, or rename the field")
    return row[name]


def text(row: Mapping[str, Any], name: str, place: str) -> str:
    """A field that holds text."""
    value = field(row, name, place)
    if not isinstance(value, str):
        raise InputError(f"{place}: field {name!r} is {shown(value)}; it must be text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{place}: field {name!r} has half a surrogate pair at {error.start}; mend the text"
            ) from error
    return value


def integer(row: Mapping[str, Any], name: str, place: str, low: int = 0) -> int:
    """A field that holds a whole number from `low` to the largest 32-bit one."""
    value = field(row, name, place)
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not whole or not low <= value <= INT32_MAX:
        raise InputError(f"{place}: field {name!r} is {shown(value)}; it must be a whole number of at least {low}")
    return int(value)


def number(row: Mapping[str, Any], name: str, place: str) -> float | None:
    """A field that holds a finite number of 32 bits, as a trace keeps it (true and false count as 1 and 0), or null."""
    value = field(row, name, place)
    if value is None:
        return None
    if not isinstance(value, int | float) or not abs(as_float(value)) <= FLOAT32_MAX:
        raise InputError(f"{place}: field {name!r} is {shown(value)}; it must be a finite number (of 32 bits), or null")
    return float(value)


def as_float(value: int | float) -> float:
    """The number as a float; an integer that is too large for one is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def listed(names: Iterable[str]) -> str:
    """Names of fields or columns as an error message lists them: on one line, the first dozen."""
    return ", ".join(" ".join(name.split()) for name in islice(names, 12)) or "none"


def shown(value: Any) -> str:
    """A value as an error message shows it: short, on one line."""
    printed = "empty" if value is None else repr(value)
    return printed if len(printed) <= 60 else f"{printed[:57]}..."
