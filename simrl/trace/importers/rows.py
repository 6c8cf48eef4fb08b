"""Shared parts of the importers: rows that know their place, their way to a trace, and readers of
files and fields.

Invariant: every row has its place (file and line), which every message about it names.
`trace_from_rows` numbers prompts, samples and epochs by one rule for every source:

- prompts in order of first appearance, unless the source numbers them itself;
- samples of a prompt within a step in order of appearance: rows of one prompt and step are one
  group;
- epoch = the number of earlier steps in which the prompt occurred, unless the source has an epoch;
- empty responses (0 tokens) cannot be generated again: they are left out, and the notes count them.
"""

from __future__ import annotations

import csv
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from simrl.errors import InputError, first_line, refuse
from simrl.files import read_parquet, require_no_device
from simrl.trace.importers.tokens import ASSUMED, HOW_TO_COUNT
from simrl.trace.trace import Trace, TraceMetadata
from simrl.trace.validate import shown as shortened

INT32_MAX = 2**31 - 1
VERSION = re.compile(r"[0-9]{1,9}")  # of weights; SGLang's default one is a word
MOST_VALUES = 10_000_000  # of a JSON object, by its brackets and commas: each takes some 70 bytes
FLOAT32_MAX = 3.4028234e38
DROPPED = "records were left out"
MOST_DROPPED = 10_000  # of all files: with more, the reader is the wrong one
TURNS = (
    "turn_tokens",
    "turn_environment_s",
    "turn_observation_tokens",
    "turn_tool",
    "turn_failures",
)
DECIMAL = re.compile(r"\s*([-+]?\d+),(\d+(?:e[-+]?\d+)?)\s*\Z", re.IGNORECASE)
csv.field_size_limit(1 << 26)  # a long response with line breaks is a single cell
BATCH = 1024  # texts tokenised at once: enough to keep the tokenizer's threads busy, little enough to hold in memory


class Labels(TypedDict, total=False):
    """A trace's name (None: the source's), licence, and the largest response that the run allowed
    (None: the largest found)."""

    name: str | None
    licence: str
    cap_tokens: int | None


class Row(NamedTuple):
    """One sample of a source. `prompt` is anything that identifies the prompt: its text, its ids or
    a number. An optional field is None in all rows of a source that does not have it."""

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
    turn_tool: Sequence[str] | None = None
    turn_failures: Sequence[int] | None = None


def trace_from_rows(
    rows: Iterable[Row],
    *,
    source: str,
    tokenizer: str,
    notes: Sequence[str] = (),
    default_name: str = "trace",
    **labels: Unpack[Labels],
) -> Trace:
    """Return the trace of the rows. Without `cap_tokens` the largest response is the cap, and the
    notes say so.

    Raises `InputError` for no rows, only empty responses, an empty prompt, and a response over the
    cap.
    """
    cap = labels.get("cap_tokens")
    least = f"cap_tokens is {cap}; the largest response a run allows is at least 1 token"
    refuse((cap is not None and cap < 1, least))
    notes, every = list(notes), list(rows)
    kept = [row for row in every if row.response_tokens > 0]
    if not kept:
        reason = f"all {len(every)} responses are empty" if every else "no rows"
        reason += next((f": {note.rstrip('.')}" for note in notes if DROPPED in note), "")
        raise InputError(
            f"{source}: {reason}; a trace needs at least one response of a token or more"
        )
    if len(kept) < len(every):
        first = next(row for row in every if row.response_tokens == 0)
        notes.append(
            f"{len(every) - len(kept)} empty responses were left out (the first: {Path(first.place).name})."
        )
    for row in kept:
        refuse(
            (
                row.prompt_tokens < 1,
                f"{row.place}: the prompt has {row.prompt_tokens} tokens; it must have at least 1",
            ),
            (
                cap is not None and row.response_tokens > cap,
                f"{row.place}: the response has {row.response_tokens} tokens, over the cap of {cap}; "
                "give the run's real cap, or none to take the largest response for it",
            ),
        )
    if cap is None:
        cap = max(row.response_tokens for row in kept)
        notes.append(
            f"The source does not state the run's cap: the largest response, {cap} tokens, stands for it."
        )
    if any(ASSUMED in text for text in (tokenizer, *notes)):
        notes.append(HOW_TO_COUNT)
    metadata = TraceMetadata(
        name=labels.get("name") or default_name,
        kind="imported",
        source=source,
        licence=labels.get("licence", "unknown"),
        tokenizer=tokenizer,
        cap_tokens=cap,
        notes=" ".join(notes),
    )
    return Trace.from_columns(_columns(kept), metadata, origin=source)


def _columns(rows: Sequence[Row]) -> dict[str, Any]:
    every = {name: [getattr(row, name) for row in rows] for name in Row._fields[1:]}
    columns: dict[str, Any] = {
        name: v for name, v in every.items() if any(value is not None for value in v)
    }
    prompts = columns.pop("prompt")
    if not all(isinstance(prompt, int) and 0 <= prompt < 2**63 for prompt in prompts):
        number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        prompts = [number[prompt] for prompt in prompts]
    columns["prompt_id"] = prompts
    group = pd.DataFrame(
        {name: np.array(columns[name], dtype=np.int64) for name in ("step", "prompt_id")}
    )
    columns.setdefault("sample", group.groupby(["step", "prompt_id"]).cumcount().to_numpy())
    columns.setdefault(
        "epoch", group.groupby("prompt_id")["step"].rank("dense").to_numpy(np.int64) - 1
    )
    if any(
        ids is None for ids in columns.get("response_ids", ())
    ):  # lengths by a mask, which text cannot be aligned with
        del columns["response_ids"]
    if "response_ids" in columns:
        tokens = sum(columns["response_tokens"])
        refuse(
            (
                tokens > INT32_MAX,
                f"{tokens} token ids, and one column holds {INT32_MAX}; import fewer steps, or lengths alone",
            )
        )
        columns["response_ids"] = pa.array(columns["response_ids"], pa.list_(pa.int32()))
    return columns


# Reading files


def existing(path: str | Path) -> Path:
    """Return the path, `.` under its own name. Raises `InputError` if nothing is there, or a
    device."""
    path = Path(path)
    require_no_device(path)
    refuse((not path.exists(), f"{path}: no such file or folder; check the path"))
    return path.resolve() if path.name in ("", "..") else path


def numbered_lines(path: Path, **mode: Any) -> Iterator[tuple[str, Any]]:
    """Yield the place and each line of a file, opened with the arguments of `open`."""
    try:
        with path.open(**mode) as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{path}: line {number}", line
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); name a readable file"
        ) from error


def encoding(path: Path) -> str:
    """Return the encoding of a text; PowerShell and Excel may write UTF-16."""
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def read_csv(path: Path, errors: str = "strict") -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the cells of each row of a CSV, the header first (row 1); `errors` is of
    `open`. Where the separator is ; or a tab, as Excel writes it, a decimal comma is a point."""
    try:
        with path.open(newline="", encoding=encoding(path), errors=errors) as lines:
            first = lines.readline(2**20)
            separator = max(",;\t", key=first.count)
            table = csv.reader(chain([first], lines), delimiter=separator)
            for number, cells in enumerate(filter(None, table), start=1):
                decimal = cells if separator == "," else [DECIMAL.sub(r"\1.\2", c) for c in cells]
                yield f"{path}: row {number}", decimal
    except (OSError, UnicodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(
            f"{path}: cannot be read as CSV in UTF-8 ({reason}); export it again"
        ) from error


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) for each record of a file, as `read_records` does. Raises `InputError`
    for one that is no object."""
    for place, value in read_records(path):
        yield place, require_object(value, place)


def read_records(path: Path, left_out: Counter[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) for each record of a file: a row of Parquet, a line of JSON Lines, an
    item of a JSON array, or the only value of a JSON file. Raises `InputError` for an empty file
    and for a broken record, which is counted in `left_out` instead, if that is given."""
    if path.suffix == ".parquet":
        batches = (batch.to_pylist() for batch in read_parquet(path).to_batches(BATCH))
        yield from ((f"{path}: row {i}", row) for i, row in enumerate(chain.from_iterable(batches)))
        return
    lines = (line for line in numbered_lines(path, mode="rb") if line[1].strip())
    if (first := next(lines, None)) is None:
        raise InputError(f"{path}: the file is empty; one JSON object a line is expected")
    whole = first[1].lstrip(b"\xef\xbb\xbf \t").startswith(b"[") or len(first[1].strip()) < 3
    for place, line in [(str(path), path.read_bytes())] if whole else chain([first], lines):
        try:
            value = json_value(line, place)
        except InputError as error:
            if left_out is None or whole:
                raise
            drop(left_out, error, path)
            continue
        is_array = whole and isinstance(value, list)
        items = ((f"{path}: item {i}", item) for i, item in enumerate(value if is_array else ()))
        yield from items if is_array else [(place, value)]


def drop(left_out: Counter[str], error: Exception, path: Path) -> None:
    """Count a record of a file that is left out, with the reason of the first. Raises `InputError`
    if there are too many."""
    reason = f"{DROPPED} (the first: {str(error).replace(str(path), path.name)})."
    first = next((known for known in left_out if known.startswith(DROPPED)), reason)
    left_out[first] += 1
    refuse(
        (
            left_out[first] > MOST_DROPPED,
            f"{path}: {MOST_DROPPED:,} {first} Name the right file, or its reader",
        )
    )


def read_json(path: Path) -> Any:
    """Return the JSON value that a file holds."""
    return json_value(b"".join(line for _, line in numbered_lines(path, mode="rb")), str(path))


def json_object(raw: bytes, place: str) -> dict[str, Any]:
    """Return the JSON object that `raw` holds, as `json_value` does."""
    return require_object(json_value(raw, place), place)


def require_object(value: Any, place: str) -> dict[str, Any]:
    """Return the value, an object of JSON. Raises `InputError` with the place of any other."""
    if not isinstance(value, dict):
        raise InputError(
            f"{place}: {shown(value)} is not a JSON object; rows are objects with named fields"
        )
    return value


def json_value(raw: bytes, place: str) -> Any:
    """Return the JSON value that `raw` holds. Raises `InputError` with the place where it breaks,
    and for one whose values would fill the memory."""
    if (values := sum(map(raw.count, (b"[", b"{", b",")))) > MOST_VALUES:
        raise InputError(
            f"{place}: {values:,} values or more in one object, {MOST_VALUES:,} are the most; is it a sample?"
        )
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=partial(_fields, place))
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise InputError(
            f"{place}: byte 0x{bad:02x} is not UTF-8; save the file as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{place}: broken JSON ({first_line(error)}); was the file cut off?"
        ) from error


def _fields(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of its (name, value) pairs. Raises `InputError` for a name that occurs
    twice."""
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise InputError(f"{place}: field {shown(name)} occurs twice in one object; keep one")
        made[name] = value
    return made


# Fields of a row


def field(row: Mapping[str, Any], name: str, place: str) -> Any:
    """Return the value of a field that must be there."""
    if name not in row:
        raise InputError(
            f"{place}: no field {name!r} (it has {listed(row)}); name the right file, or rename the field"
        )
    return row[name]


def checked(
    row: Mapping[str, Any], name: str, place: str, fits: Callable[[Any], bool], must_be: str
) -> Any:
    """Return a field whose value `fits`. Raises `InputError` that says what it must be."""
    value = field(row, name, place)
    if not fits(value):
        raise InputError(f"{place}: field {name!r} is {shown(value)}; it must be {must_be}")
    return value


def text(row: Mapping[str, Any], name: str, place: str) -> str:
    """Return a field that holds text."""
    return str(checked(row, name, place, lambda value: isinstance(value, str), "text"))


def integer(row: Mapping[str, Any], name: str, place: str, low: int = 0, hint: str = "") -> int:
    """Return a field that holds a whole number from `low` to the largest 32-bit one. `hint` ends
    the message about another."""
    return int(
        checked(
            row,
            name,
            place,
            lambda value: is_number(value) and value == value // 1 and low <= value <= INT32_MAX,
            f"a whole number of at least {low}{hint}",
        )
    )


def number(
    row: Mapping[str, Any], name: str, place: str, low: float = -FLOAT32_MAX
) -> float | None:
    """Return a field that holds a finite number of 32 bits, as a trace keeps it (true and false are
    1 and 0), from `low` on, or null."""
    least = "" if low < 0 else f" from {low:g}"
    value = checked(
        row,
        name,
        place,
        lambda v: v is None or (isinstance(v, int | float) and low <= as_float(v) <= FLOAT32_MAX),
        f"a finite number (of 32 bits){least}, or null",
    )
    return None if value is None else float(value)


def token_ids(row: Mapping[str, Any], name: str, place: str) -> NDArray[np.int32]:
    """Return a field that holds a list of token ids."""

    def fits(value: Any) -> bool:
        return isinstance(value, list) and all(
            type(token) is int and 0 <= token <= INT32_MAX for token in value
        )

    return np.array(checked(row, name, place, fits, "a list of token ids"), dtype=np.int32)


def mask(row: Mapping[str, Any], names: Sequence[str], place: str) -> list[int] | None:
    """Return the first of these fields that is there, a list of 0 and 1; None if none is."""
    name = next((name for name in names if row.get(name) is not None), None)
    return (
        None
        if name is None
        else items(row, name, place, lambda value: value in (0, 1), "a list of 0 and 1")
    )


def items(
    row: Mapping[str, Any], name: str, place: str, fits: Callable[[Any], bool], must_be: str
) -> list[Any]:
    """Return a field that holds a list of values that all fit; one that is absent or null is an
    empty list."""
    return list(
        checked(
            {name: [] if row.get(name) is None else row[name]},
            name,
            place,
            lambda value: isinstance(value, list) and all(map(fits, value)),
            must_be,
        )
    )


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_float(value: int | float) -> float:
    """Return the number as a float; an integer that is too large for one is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def listed(names: Iterable[str]) -> str:
    """Return names of fields or columns for a message: on one line, the first dozen."""
    return ", ".join(" ".join(name.split()) for name in islice(names, 12)) or "none"


def shown(value: Any) -> str:
    """Return a value for a message: short, on one line."""
    return (
        "empty"
        if value is None
        else shortened(
            reprlib.repr(value) if isinstance(value, list | dict | tuple) else repr(value)
        )
    )
