"""CSV and JSON Lines with columns of any name: whatever has lengths, or text to count, for each response.

The user maps our names to theirs; a column that has our name already needs no mapping. Nothing is assumed that was not
said: without a column for the step or the prompt, an argument has to tell what stands for it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from simrl.errors import InputError, first_line, meant
from simrl.importers.rows import (
    BATCH,
    INT32_MAX,
    TURNS,
    Row,
    batches,
    existing,
    field,
    integer,
    listed,
    number,
    read_jsonl,
    shown,
    text,
    trace_from_rows,
)
from simrl.importers.tokens import Counted, TokenCounter
from simrl.trace import FINISH_REASONS, OPTIONAL, REQUIRED, Trace

TEXTS = ("prompt", "response")
NAMES = (*REQUIRED, *OPTIONAL, *TEXTS)
BLOCK_BYTES = 1 << 26  # a CSV row must fit in one: a long response with line breaks is a single row
SERVING = (
    "No step column was given, as for serving traces (Azure, Mooncake, BurstGPT): "
    "the lengths of such requests are far shorter than those of reasoning rollouts."
)

PlacedRow = tuple[str, Mapping[str, Any]]


class Plan(NamedTuple):
    """What is read from where: our names to the file's columns, and what stands for columns that are not there."""

    columns: Mapping[str, str]
    counter: TokenCounter | None
    step: int | None
    epoch: int | None
    ungrouped: bool


def import_csv(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    counter: TokenCounter | None = None,
    *,
    step: int | None = None,
    epoch: int | None = None,
    ungrouped: bool = False,
    cap_tokens: int | None = None,
    tokenizer: str | None = None,
    name: str | None = None,
    licence: str = "unknown",
) -> Trace:
    """A trace from a CSV file with a header. `columns` maps our names to the file's: {"response_tokens": "out_len"}.

    Our names are a trace's columns, and `prompt` and `response` for text, which `counter` counts where no column has
    the lengths. Needed are the step (or `step`, one for all rows), the prompt (`prompt_id`, which may be text, or
    `prompt`; or `ungrouped`: each row is a prompt of its own), and both lengths or texts. Without a column `sample`,
    the samples of a prompt and step are numbered in order; without `epoch` (column or argument) it is the number of
    earlier steps with the prompt. `tokenizer` says what counted the lengths that the file holds. The turns' columns hold lists
    as JSON writes them: [120, 40].

    Raises `InputError` for columns that are missing and values that are mistyped, by column and row (the header is
    row 1).
    """
    path = existing(path)
    header = _csv_header(path)
    plan = _plan(path, header, columns or {}, Plan({}, counter, step, epoch, ungrouped))
    return _trace(path, _csv_rows(path, header, plan), plan, cap_tokens, tokenizer, name, licence)


def import_jsonl(
    path: str | Path,
    columns: Mapping[str, str] | None = None,
    counter: TokenCounter | None = None,
    *,
    step: int | None = None,
    epoch: int | None = None,
    ungrouped: bool = False,
    cap_tokens: int | None = None,
    tokenizer: str | None = None,
    name: str | None = None,
    licence: str = "unknown",
) -> Trace:
    """A trace from JSON Lines, one object a sample; everything else as for `import_csv`.

    The first line tells which fields there are; all lines must have those that are used. `response_ids` may be a list
    of token ids, whose number is the response's length. Errors count lines from 1.
    """
    path = existing(path)
    _, first = next(read_jsonl(path))
    plan = _plan(path, list(first), columns or {}, Plan({}, counter, step, epoch, ungrouped))
    return _trace(path, read_jsonl(path), plan, cap_tokens, tokenizer, name, licence)


def import_frame(
    frame: pd.DataFrame,
    columns: Mapping[str, str] | None = None,
    counter: TokenCounter | None = None,
    *,
    step: int | None = None,
    epoch: int | None = None,
    ungrouped: bool = False,
    cap_tokens: int | None = None,
    tokenizer: str | None = None,
    name: str | None = None,
    licence: str = "unknown",
) -> Trace:
    """A trace from a pandas DataFrame, a row a sample; everything else as for `import_csv`. Errors count rows from 0."""
    origin = Path("DataFrame")
    plan = _plan(
        origin, [str(column) for column in frame.columns], columns or {}, Plan({}, counter, step, epoch, ungrouped)
    )
    return _trace(origin, _frame_rows(frame), plan, cap_tokens, tokenizer, name, licence)


def _frame_rows(frame: pd.DataFrame) -> Iterator[PlacedRow]:
    plain = frame.astype(object).where(frame.notna(), None)
    for i, row in enumerate(plain.to_dict("records")):
        yield f"DataFrame, row {i}", {str(key): value for key, value in row.items()}


def _plan(path: Path, header: Sequence[str], columns: Mapping[str, str], plan: Plan) -> Plan:
    """The plan with its columns: those that were mapped and those that have our names, as far as they are of use."""
    has = f"it has {listed(header)}"
    for ours, theirs in columns.items():
        if ours not in NAMES:
            raise InputError(
                f"{path}: {ours!r} is not a column of a trace{meant(ours, NAMES)}; map one of {', '.join(NAMES)}"
            )
        if theirs not in header:
            raise InputError(
                f"{path}: no column {theirs!r} for {ours}{meant(theirs, header)}: {has}; name one of these"
            )
    lengths = {"response_tokens", "response_ids"} & set(columns)
    if "response" in columns and lengths:
        raise InputError(f"{path}: response and {lengths.pop()} are both mapped; choose text to count or lengths")
    for ours in ("step", "epoch"):
        given = getattr(plan, ours)
        if given is not None and (ours in columns or ours in header):
            raise InputError(
                f"{path}: has the column {columns.get(ours, ours)!r}, and {ours} {given} is given for all rows; choose one"
            )
    if "prompt_id" in columns and plan.ungrouped:
        raise InputError(f"{path}: prompt_id is mapped, yet ungrouped makes each row its own prompt; choose one")
    implied = [name for name in NAMES if name in header and name not in columns and getattr(plan, name, None) is None]
    mapped = {**columns, **{name: name for name in implied}}
    if "response" in implied and {"response_tokens", "response_ids"} & set(mapped):
        del mapped["response"]
    if "prompt" in implied and {"prompt_id", "prompt_tokens"} <= set(mapped):
        del mapped["prompt"]
    if "response" in columns:
        mapped = {name: theirs for name, theirs in mapped.items() if name not in ("response_tokens", "response_ids")}

    if "step" not in mapped and plan.step is None:
        raise InputError(
            f"{path}: no column for step ({has}); map one, or give step (--step 0) if all rows are one step's"
        )
    if not {"prompt_id", "prompt"} & set(mapped) and not plan.ungrouped:
        raise InputError(
            f"{path}: no column for prompt_id or prompt ({has}); "
            f"map one (--column prompt_id=THEIRS), or say --ungrouped if each row is its own"
        )
    if not {"prompt_tokens", "prompt"} & set(mapped):
        raise InputError(
            f"{path}: no column for prompt_tokens or prompt ({has}); map the one with the prompts' lengths"
        )
    if not {"response_tokens", "response_ids", "response"} & set(mapped):
        raise InputError(
            f"{path}: no column for response_tokens or response ({has}); map the one with the responses' lengths"
        )
    if plan.counter is None and ("response" in mapped or "prompt_tokens" not in mapped):
        column = mapped["response"] if "response" in mapped else mapped["prompt"]
        raise InputError(
            f"{path}: column {column!r} is text to count; name a tokenizer, or state the characters a token"
        )
    return plan._replace(columns=mapped)


def _trace(
    path: Path,
    rows: Iterator[PlacedRow],
    plan: Plan,
    cap_tokens: int | None,
    tokenizer: str | None,
    name: str | None,
    licence: str,
) -> Trace:
    notes = [] if "step" in plan.columns else [SERVING]
    if plan.ungrouped:
        notes.append("Each row is taken for a prompt of its own, in a group of one.")
    if "response" in plan.columns and plan.counter is not None:
        tokenizer = plan.counter.tokenizer
    elif tokenizer is None:
        column = plan.columns.get("response_tokens") or plan.columns["response_ids"]
        tokenizer = f"the source's own (lengths are from column {column!r})"
    if "prompt_tokens" not in plan.columns and "response" not in plan.columns and plan.counter is not None:
        notes.append(f"Prompt lengths were counted: {plan.counter.tokenizer}.")
    return trace_from_rows(
        _rows(rows, plan),
        name=name or path.stem,
        source=path.name,
        licence=licence,
        tokenizer=tokenizer,
        cap_tokens=cap_tokens,
        notes=notes,
    )


def _rows(placed: Iterator[PlacedRow], plan: Plan) -> Iterator[Row]:
    columns = plan.columns
    index = 0
    for batch in batches(placed):
        prompts = _counted(batch, columns.get("prompt") if "prompt_tokens" not in columns else None, plan.counter)
        responses = _counted(batch, columns.get("response"), plan.counter)
        for (place, row), prompt, response in zip(batch, prompts, responses, strict=True):
            ids = _token_ids(row, columns["response_ids"], place) if "response_ids" in columns else None
            if ids is None and response is not None:
                ids = response.ids
            if response is not None:
                response_tokens = response.tokens
            elif "response_tokens" in columns:
                response_tokens = integer(row, columns["response_tokens"], place)
            else:
                response_tokens = len(ids if ids is not None else ())
            if ids is not None and len(ids) != response_tokens:
                raise InputError(
                    f"{place}: {len(ids)} response_ids for {response_tokens} response_tokens; they must agree"
                )
            yield Row(
                place,
                plan.step if plan.step is not None else integer(row, columns["step"], place),
                index if plan.ungrouped else _prompt(row, columns, place),
                prompt.tokens if prompt is not None else integer(row, columns["prompt_tokens"], place, low=1),
                response_tokens,
                sample=integer(row, columns["sample"], place) if "sample" in columns else None,
                epoch=integer(row, columns["epoch"], place) if "epoch" in columns else plan.epoch,
                reward=number(row, columns["reward"], place) if "reward" in columns else None,
                finish_reason=_finish_reason(row, columns.get("finish_reason"), place),
                policy_version=integer(row, columns["policy_version"], place) if "policy_version" in columns else None,
                environment_s=_seconds(row, columns.get("environment_s"), place),
                response_ids=ids,
                **{name: _turn_values(row, columns[name], place) for name in TURNS if name in columns},
            )
            index += 1


def _counted(batch: list[PlacedRow], column: str | None, counter: TokenCounter | None) -> Sequence[Counted | None]:
    if column is None or counter is None:
        return [None] * len(batch)
    return counter.count([text(row, column, place) for place, row in batch])


def _prompt(row: Mapping[str, Any], columns: Mapping[str, str], place: str) -> Hashable:
    if "prompt_id" not in columns:
        return text(row, columns["prompt"], place)
    value = field(row, columns["prompt_id"], place)
    if not isinstance(value, int | str) or isinstance(value, bool) or value == "":
        raise InputError(
            f"{place}: field {columns['prompt_id']!r} is {shown(value)}; a prompt_id is a whole number or text"
        )
    return value


def _finish_reason(row: Mapping[str, Any], column: str | None, place: str) -> str | None:
    value = field(row, column, place) if column else None
    if value in (None, ""):
        return None
    if value not in FINISH_REASONS:
        raise InputError(f"{place}: field {column!r} is {shown(value)}; it must be one of {', '.join(FINISH_REASONS)}")
    return str(value)


def _seconds(row: Mapping[str, Any], column: str | None, place: str) -> float | None:
    value = number(row, column, place) if column else None
    if value is not None and value < 0:
        raise InputError(f"{place}: field {column!r} is {value:g}; it must be zero or more seconds")
    return value


def _turn_values(row: Mapping[str, Any], column: str, place: str) -> Any:
    value = field(row, column, place)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(v) in (int, float) and 0 <= v <= INT32_MAX for v in value):
        raise InputError(f"{place}: field {column!r} is {shown(value)}; it must be a list of numbers, one a turn")
    return value


def _token_ids(row: Mapping[str, Any], column: str, place: str) -> NDArray[np.int32]:
    value = field(row, column, place)
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= INT32_MAX for token in value):
        raise InputError(f"{place}: field {column!r} is {shown(value)}; it must be a list of token ids")
    return np.array(value, dtype=np.int32)


# CSV


def _csv_header(path: Path) -> list[str]:
    try:
        with path.open("rb") as lines:
            first = lines.readline()
        header = next(csv.reader([first.decode("utf-8-sig")]), [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: row 1: no header in UTF-8 ({first_line(error)}); is it a CSV file?") from error
    if not header:
        raise InputError(f"{path}: the file is empty; a header and rows are expected")
    twice = [column for column in header if header.count(column) > 1]
    if twice:
        raise InputError(f"{path}: column {twice[0]!r} occurs twice in the header; rename one of them")
    return header


def _csv_rows(path: Path, header: Sequence[str], plan: Plan) -> Iterator[PlacedRow]:
    """(place, values by the file's column) for each row; empty cells are None where a number is expected."""
    kinds = {theirs: ours for ours, theirs in plan.columns.items()}
    try:
        table = pa_csv.read_csv(
            path,
            # One thread, or errors do not name the row.
            read_options=pa_csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False),
            parse_options=pa_csv.ParseOptions(newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(header, pa.string()), include_columns=list(kinds), strings_can_be_null=False
            ),
        )
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: cannot be read as CSV ({first_line(error)}); repair that row") from error
    row_number = 1  # the header, as pyarrow's own errors count
    for batch in table.to_batches(max_chunksize=BATCH):
        for cells in batch.to_pylist():
            row_number += 1
            yield f"{path}: row {row_number}", {theirs: _cell(kinds[theirs], raw) for theirs, raw in cells.items()}


def _cell(ours: str, raw: str) -> Any:
    """The value of a cell; what is not the number it should be stays text, for the error that will name it."""
    if ours in (*TEXTS, "finish_reason"):
        return raw
    if ours == "prompt_id":
        return int(raw) if raw.isdecimal() and (raw == "0" or raw[0] != "0") else raw
    bare = raw.strip()
    if not bare:
        return None
    if ours in TURNS:
        with suppress(ValueError, RecursionError):
            return json.loads(bare)
        return raw
    for kind in (int, float):
        try:
            return kind(bare) if "_" not in bare else raw
        except ValueError:
            continue
    return raw
