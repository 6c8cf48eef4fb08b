"""Trace: what was, or is to be, generated, one row a sample.

Invariant: a `Trace` that exists is valid. Every way to one (`read_trace`, `Trace.from_columns`, the importers) goes
through `_validate`, rows are sorted by (step, prompt_id, sample), and that triple is unique. Lengths are in tokens; the
response ends at `response_tokens`, whatever its `finish_reason`. Error messages count rows from 0, in the order given.

Turns of an environment (tools, users): `turn_tokens` are what the model generated in each turn, and sum to
`response_tokens`; `turn_environment_s` and `turn_observation_tokens` have one value less: after each turn but the last, how
long the environment took and how many tokens it added to the context (absent or empty: none). Those tokens are no part of
`response_tokens`. Where only the total `environment_s` of a response is known, it is split equally among its pauses; without
`turn_tokens`, it is one pause after the first half of the response (rounded down). One token, or one turn, has no pause.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simrl.errors import InputError, first_line, meant
from simrl.files import write_whole_file
from simrl.parquet import decoded, read_parquet

SCHEMA_VERSION = 1
METADATA_KEY = b"simrl.trace"

REQUIRED = {
    "step": pa.int32(),
    "epoch": pa.int32(),
    "prompt_id": pa.int64(),
    "sample": pa.int32(),
    "prompt_tokens": pa.int32(),
    "response_tokens": pa.int32(),
}
OPTIONAL = {
    "reward": pa.float32(),
    "finish_reason": pa.dictionary(pa.int8(), pa.string()),
    "policy_version": pa.int32(),
    "environment_s": pa.float32(),
    "response_ids": pa.list_(pa.field("element", pa.int32())),  # as Parquet names it
    "turn_tokens": pa.list_(pa.field("element", pa.int32())),
    "turn_environment_s": pa.list_(pa.field("element", pa.float32())),
    "turn_observation_tokens": pa.list_(pa.field("element", pa.int32())),
}
FINISH_REASONS = ("stop", "length", "abort")


class TraceMetadata(BaseModel):
    """Where a trace comes from. It travels inside the Parquet file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: str = Field(description="recorded, imported or synthetic")
    source: str = Field(description="the run, file or generator it was made from, with its parameters")
    licence: str = "unknown"
    tokenizer: str = Field(description="the tokenizer that counted the lengths, or how they were estimated")
    cap_tokens: int = Field(gt=0, le=2**31 - 1, description="largest response the run allowed, in tokens")
    notes: str = ""
    schema_version: int = SCHEMA_VERSION


class Sample(NamedTuple):
    """One response to generate, as schedules see it: nothing here tells how long it will be, or how good.

    `uid` is unique in a simulation, also when a trace is passed over twice; `epoch` counts on over the passes.
    """

    uid: int
    step: int
    epoch: int
    prompt_id: int
    sample: int
    prompt_tokens: int


class Turn(NamedTuple):
    """A turn of the model that the environment answers: the response has `end_tokens` then; the answer takes
    `environment_s` and adds `observation_tokens` to the context."""

    end_tokens: int
    environment_s: float
    observation_tokens: int


class Response(NamedTuple):
    """What a sample will turn out to be. Workers and rewarders know it, schedules do not. `turns` are all but the last; `row`
    is that of the trace, where its tokens are."""

    tokens: int
    reward: float
    turns: tuple[Turn, ...] = ()
    row: int = -1


@dataclass(frozen=True)
class Trace:
    """A validated table of samples (see `REQUIRED` and `OPTIONAL` for its columns) with its metadata."""

    table: pa.Table
    metadata: TraceMetadata

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], metadata: TraceMetadata, origin: str = "trace") -> Trace:
        """A trace from arrays or lists by column name; `origin` is what error messages call it.

        Raises `InputError` for missing, unknown or mistyped columns and for the first row that `_validate` refuses.
        """
        unknown = sorted(set(columns) - set(REQUIRED) - set(OPTIONAL))
        if unknown:
            known = [*REQUIRED, *OPTIONAL]
            near = meant(unknown[0], known)
            raise InputError(
                f"{origin}: unknown column {unknown[0]!r}{near}; a trace has the columns {', '.join(known)}"
            )
        arrays: dict[str, pa.Array] = {}
        for name, kind in {**REQUIRED, **OPTIONAL}.items():
            if name in columns:
                arrays[name] = _cast(columns[name], kind, name, origin)
            elif name in REQUIRED:
                found = ", ".join(map(str, columns))
                raise InputError(f"{origin}: no column {name!r} (it has {found}); rename the one that holds it")
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise InputError(f"{origin}: columns of different lengths {lengths}; give one value a row in each")
        table = pa.table(arrays)
        _validate(table, metadata, origin)
        return cls(_sorted(table, origin), metadata)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> NDArray[Any]:
        """A column as a numpy array (without a copy where Arrow allows it). Where an optional column is empty in places,
        numbers come as floats with NaN there and texts as objects with None."""
        array: NDArray[Any] = self.table.column(name).combine_chunks().to_numpy(zero_copy_only=False)
        return array

    @cached_property
    def step_slices(self) -> list[tuple[int, int, int]]:
        """(step, first row, row after the last) for each step, in order."""
        step = self.column("step")
        starts = np.flatnonzero(np.r_[True, step[1:] != step[:-1]])
        ends = np.r_[starts[1:], len(step)]
        return [(int(step[a]), int(a), int(b)) for a, b in zip(starts, ends, strict=True)]

    def samples(self, first: int, end: int, first_uid: int = 0, first_epoch: int = 0) -> list[Sample]:
        """Rows `first` to `end` (not included) as `Sample`s, numbered from `first_uid`, epochs counted from `first_epoch`."""
        rows = self.table.slice(first, end - first)
        names = ("step", "epoch", "prompt_id", "sample", "prompt_tokens")
        step, epoch, *others = (rows.column(name).to_pylist() for name in names)
        epochs = [first_epoch + number for number in epoch]
        return list(
            map(Sample._make, zip(range(first_uid, first_uid + end - first), step, epochs, *others, strict=True))
        )

    def responses(self, first: int, end: int) -> list[Response]:
        """What comes out of the same rows. The reward is NaN where the trace has none."""
        rows = self.table.slice(first, end - first)
        tokens = rows.column("response_tokens").to_pylist()
        has_rewards = "reward" in rows.column_names
        rewards = rows.column("reward").fill_null(math.nan).to_pylist() if has_rewards else [math.nan] * len(tokens)
        turns = _turns(rows) if {"turn_tokens", "environment_s"} & set(rows.column_names) else [()] * len(tokens)
        return list(map(Response, tokens, rewards, turns, range(first, end)))

    def observation_tokens(self) -> NDArray[np.int64]:
        """Tokens that the environment adds to each row's context, over all its turns; shape (rows,)."""
        if "turn_observation_tokens" not in self.table.column_names:
            return np.zeros(len(self), dtype=np.int64)
        return _list_sums(self.table.column("turn_observation_tokens").combine_chunks()).astype(np.int64)


def _turns(rows: pa.Table) -> list[tuple[Turn, ...]]:
    """The turns that the environment answers, for each row, by the rule at the top of the module."""
    n = rows.num_rows
    response = rows.column("response_tokens").to_numpy()
    total_s = np.zeros(n)
    if "environment_s" in rows.column_names:
        total_s = rows.column("environment_s").fill_null(0).to_numpy().astype(np.float64)
    split = np.zeros(n, dtype=bool)  # rows whose turns are known
    turns: list[tuple[Turn, ...]] = [()] * n
    if "turn_tokens" in rows.column_names:
        lists = rows.column("turn_tokens").combine_chunks()
        split = _valid(lists)
        number = pc.list_value_length(lists).fill_null(0).to_numpy().astype(np.int64)
        pauses = np.maximum(number - 1, 0)
        generated = np.r_[0, np.cumsum(lists.flatten().to_numpy(), dtype=np.int64)]
        first_turn = np.cumsum(number) - number
        ends = generated[1:] - np.repeat(generated[first_turn], number)
        is_last = np.zeros(len(ends), dtype=bool)
        is_last[(first_turn + number - 1)[number > 0]] = True
        seconds = np.repeat(total_s / np.maximum(pauses, 1), pauses)
        observations = np.zeros(len(seconds), dtype=np.int64)
        if "turn_environment_s" in rows.column_names:
            given = rows.column("turn_environment_s").combine_chunks()
            seconds[np.repeat(_valid(given), pauses)] = given.flatten().to_numpy()
        if "turn_observation_tokens" in rows.column_names:
            given = rows.column("turn_observation_tokens").combine_chunks()
            observations[np.repeat(_valid(given), pauses)] = given.flatten().to_numpy()
        every = list(map(Turn, ends[~is_last].tolist(), seconds.tolist(), observations.tolist()))
        edges = np.r_[0, np.cumsum(pauses)].tolist()
        turns = [tuple(every[a:b]) for a, b in pairwise(edges)]
    for row in np.flatnonzero(~split & (total_s > 0) & (response > 1)).tolist():
        turns[row] = (Turn(int(response[row]) // 2, float(total_s[row]), 0),)
    return turns


def _valid(array: pa.Array) -> NDArray[np.bool_]:
    """Where the array has a value."""
    valid: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _list_sums(lists: pa.ListArray) -> NDArray[np.float64]:
    """The sum of each row's list, exact for whole numbers; 0 for an empty row."""
    parents, flat = pc.list_parent_indices(lists).to_numpy(), lists.flatten().to_numpy()
    return np.bincount(parents, weights=flat, minlength=len(lists)).astype(np.float64)


def read_trace(path: str | Path) -> Trace:
    """Reads a trace written by `write_trace`, memory-mapped. Raises `InputError` for anything that is not one."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file; make one with `simrl trace import` or `simrl trace synth`")
    table = read_parquet(path)
    raw = (table.schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        raise InputError(
            f"{path}: Parquet without simrl's trace metadata; import it with `simrl trace import csv|jsonl …`"
        )
    try:
        metadata = TraceMetadata.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "(all)"
        raise InputError(f"{path}: metadata field {field}: {first['msg']}; write the trace again") from error
    if metadata.schema_version != SCHEMA_VERSION:
        raise InputError(
            f"{path}: trace schema {metadata.schema_version}, this simrl reads {SCHEMA_VERSION}; import it again"
        )
    columns = {name: decoded(table.column(name), f"{path}: column {name!r}") for name in table.column_names}
    return Trace.from_columns(columns, metadata, origin=str(path))


def write_trace(trace: Trace, path: str | Path) -> None:
    """Writes Parquet (zstd) with the metadata inside; the file appears only when it is whole."""
    table = trace.table.replace_schema_metadata({METADATA_KEY: trace.metadata.model_dump_json().encode()})
    with write_whole_file(Path(path)) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def trace_metadata_json(trace: Trace) -> dict[str, Any]:
    """The metadata as plain data, for printing and for result files."""
    return dict(json.loads(trace.metadata.model_dump_json()))


def _cast(values: Any, kind: pa.DataType, name: str, origin: str) -> pa.Array:
    try:
        array = _array(values)
        if pa.types.is_floating(array.type) and pa.types.is_integer(kind):
            # Unlike Arrow, counts no NaN among the whole numbers; an empty value stays empty.
            _refuse(pc.not_equal(pc.floor(array), array), array, name, origin, "a whole number")
        return _convert(array, kind)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(
            f"{origin}: {_first_failure(values, kind, name)} is not {kind} ({first_line(error)}); convert it"
        ) from error


def _array(values: Any) -> pa.Array:
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return array if isinstance(array, pa.Array) else pa.array(array)


def _convert(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(*_dictionary_parts(array.cast(kind.value_type)))
    return array.cast(kind)


def _first_failure(values: Any, kind: pa.DataType, name: str) -> str:
    """The row and value that cannot be converted, found by bisection over the rows before it."""

    def fails(rows: int) -> bool:
        try:
            _convert(_array(values[:rows]), kind)
        except (pa.ArrowException, TypeError, ValueError):
            return True
        return False

    try:
        row = bisect_left(range(len(values)), True, key=lambda row: fails(row + 1))
        value = _array(values[row : row + 1])[0].as_py()
    except (pa.ArrowException, TypeError, ValueError, IndexError):
        return f"column {name!r}"  # no sequence of rows at all
    text = repr(value)
    return f"row {row}, column {name!r}: {text if len(text) <= 60 else text[:57] + '...'}"


def _dictionary_parts(text: pa.Array) -> tuple[pa.Array, pa.Array]:
    encoded = text.dictionary_encode()
    return encoded.indices.cast(pa.int8()), encoded.dictionary


def _refuse(bad: pa.Array, array: pa.Array, name: str, origin: str, right: str) -> None:
    """Raises for the first row where `bad` holds."""
    rows = np.flatnonzero(bad.fill_null(False).to_numpy(zero_copy_only=False))
    if len(rows):
        more = f" (and {len(rows) - 1} more rows)" if len(rows) > 1 else ""
        raise InputError(
            f"{origin}: row {rows[0]}, column {name!r} is {array[int(rows[0])].as_py()}{more}; it must be {right}"
        )


def _validate(table: pa.Table, metadata: TraceMetadata, origin: str) -> None:
    if table.num_rows == 0:
        raise InputError(f"{origin}: no rows; a trace needs at least one sample")
    for name in REQUIRED:
        column = table.column(name).combine_chunks()
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise InputError(f"{origin}: row {row}, column {name!r} is empty; every sample needs one")
        low = 1 if name in ("prompt_tokens", "response_tokens") else 0
        _refuse(pc.less(column, low), column, name, origin, f"at least {low}")
    response = table.column("response_tokens").combine_chunks()
    cap = metadata.cap_tokens
    _refuse(pc.greater(response, cap), response, "response_tokens", origin, f"at most the cap of {cap} tokens")
    if "response_ids" in table.column_names:
        ids = table.column("response_ids").combine_chunks()
        differs = pc.not_equal(pc.list_value_length(ids), response)
        _refuse(differs, response, "response_tokens", origin, "the number of its response_ids")
        flat = ids.flatten()
        bad = pc.or_(pc.is_null(flat), pc.fill_null(pc.less(flat, 0), True))
        if pc.any(bad).as_py():
            row = pc.list_parent_indices(ids)[pc.index(bad, True).as_py()].as_py()
            raise InputError(
                f"{origin}: row {row}, column 'response_ids' holds an empty or negative token id; ids count from 0"
            )
    if "policy_version" in table.column_names:
        version = table.column("policy_version").combine_chunks()
        _refuse(pc.less(version, 0), version, "policy_version", origin, "at least 0, or empty")
    if "environment_s" in table.column_names:
        seconds = table.column("environment_s").combine_chunks()
        bad = pc.or_(pc.less(seconds, 0), pc.invert(pc.is_finite(seconds)))
        _refuse(bad, seconds, "environment_s", origin, "zero or more seconds")
    _validate_turns(table, origin)
    if "reward" in table.column_names:
        reward = table.column("reward").combine_chunks()
        _refuse(pc.invert(pc.is_finite(reward)), reward, "reward", origin, "a finite number, or empty")
    if "finish_reason" in table.column_names:
        reason = table.column("finish_reason").combine_chunks()
        text = reason.cast(pa.string())
        bad = pc.invert(pc.is_in(text, pa.array(FINISH_REASONS)))
        _refuse(
            pc.and_(bad, pc.is_valid(text)),
            text,
            "finish_reason",
            origin,
            f"one of {', '.join(FINISH_REASONS)}, or empty",
        )


def _validate_turns(table: pa.Table, origin: str) -> None:
    names = [name for name in table.column_names if name.startswith("turn_")]
    if not names:
        return
    if "turn_tokens" not in names:
        raise InputError(
            f"{origin}: column {names[0]!r} without 'turn_tokens'; give what was generated in each turn too"
        )
    turns = table.column("turn_tokens").combine_chunks()
    right = {
        "turn_tokens": (1, "hold at least one token a turn"),
        "turn_environment_s": (0, "hold zero or more seconds for each turn but the last"),
        "turn_observation_tokens": (0, "hold zero or more tokens for each turn but the last"),
    }
    for name in names:
        low, what = right[name]
        lists = table.column(name).combine_chunks()
        flat = lists.flatten()
        wrong = pc.or_kleene(pc.less(flat, low), pc.invert(pc.is_finite(flat))).fill_null(True)
        bad = np.zeros(table.num_rows, dtype=bool)
        bad[pc.list_parent_indices(lists).to_numpy()[wrong.to_numpy(zero_copy_only=False)]] = True
        _refuse_lists(bad, lists, name, origin, what)
        if name != "turn_tokens":
            misfit = pc.not_equal(pc.list_value_length(lists), pc.subtract(pc.list_value_length(turns), 1))
            bad = misfit.fill_null(False).to_numpy(zero_copy_only=False)
            _refuse_lists(bad, lists, name, origin, "have one value less than turn_tokens has")
            _refuse_lists(_valid(lists) & ~_valid(turns), lists, name, origin, "be empty where turn_tokens is")
    response = table.column("response_tokens").to_numpy()
    bad = _valid(turns) & (_list_sums(turns) != response)
    _refuse_lists(bad, turns, "turn_tokens", origin, "sum to the row's response_tokens")
    if {"environment_s", "turn_environment_s"} <= set(table.column_names):
        parts = table.column("turn_environment_s").combine_chunks()
        total_s = table.column("environment_s").combine_chunks()
        sums, total = _list_sums(parts), total_s.fill_null(0).to_numpy()
        bad = _valid(parts) & _valid(total_s) & ~np.isclose(sums, total, rtol=1e-3, atol=1e-3)
        _refuse_lists(bad, parts, "turn_environment_s", origin, "sum to the row's environment_s")


def _refuse_lists(bad: NDArray[np.bool_], lists: pa.ListArray, name: str, origin: str, right: str) -> None:
    """Raises for the first row where `bad` holds."""
    rows = np.flatnonzero(bad)
    if len(rows):
        text = str(lists[int(rows[0])].as_py())
        more = f" (and {len(rows) - 1} more rows)" if len(rows) > 1 else ""
        raise InputError(
            f"{origin}: row {rows[0]}, column {name!r} is {text if len(text) <= 60 else text[:57] + '...'}{more}; "
            f"it must {right}"
        )


def _sorted(table: pa.Table, origin: str) -> pa.Table:
    """The rows in order of (step, prompt_id, sample); refuses a triple that comes twice."""
    keys = [table.column(c).combine_chunks().to_numpy(zero_copy_only=False) for c in ("step", "prompt_id", "sample")]
    if _strictly_rising(keys):
        return table
    order = np.lexsort(keys[::-1])
    same = np.logical_and.reduce([k[order][1:] == k[order][:-1] for k in keys])
    if same.any():
        row = int(order[int(np.flatnonzero(same)[0]) + 1])
        step, prompt, sample = (int(k[row]) for k in keys)
        raise InputError(
            f"{origin}: row {row} repeats (step, prompt_id, sample) = ({step}, {prompt}, {sample}); "
            "number a group's samples"
        )
    return table.take(pa.array(order))


def _strictly_rising(keys: list[NDArray[Any]]) -> bool:
    step, prompt, sample = keys
    later = step[1:] > step[:-1]
    same = step[1:] == step[:-1]
    later |= same & (prompt[1:] > prompt[:-1])
    later |= same & (prompt[1:] == prompt[:-1]) & (sample[1:] > sample[:-1])
    return bool(later.all())
