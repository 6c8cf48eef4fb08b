"""Trace: samples that were, or are to be, generated, one row each.

Invariant: a `Trace` is valid. Every trace (of `read_trace`, `Trace.from_columns`, the importers)
keeps the rules of `simrl.trace.validate`; its rows are sorted by (step, prompt_id, sample), and
that triple is unique. Lengths are in tokens; a response ends at `response_tokens`, whatever its
`finish_reason`. Error messages count rows from 0, in the order given.

Turns with an environment (tools, users): `turn_tokens` are the tokens that the model generated in
each turn, and sum to `response_tokens`; `turn_environment_s` and `turn_observation_tokens` have one
value less: after each turn but the last, the seconds that the environment took and the tokens that
it added to the context (absent or empty: none). Those tokens are no part of `response_tokens`.
`turn_tool` and `turn_failures` are the tool and its failed tries, for descriptions alone. If only
the total `environment_s` of a response is known, it is split equally among its pauses; without
`turn_tokens`, it is one pause after the first half of the response (rounded down). One token, or
one turn, has no pause.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from simrl.errors import InputError, first_line, meant
from simrl.files import is_count_like, parquet_metadata, read_parquet, write_parquet
from simrl.trace.sample import Response as Response, Sample as Sample, Turn as Turn
from simrl.trace.validate import list_sums, refuse, shown, validate
from simrl.validation import Model

SCHEMA_VERSION = 1
METADATA_KEY = b"simrl.trace"
UNSEPARATED = "Output of tools may count as generated"  # opens a sentence of a trace's notes, which comparisons repeat

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
    "turn_tool": pa.list_(pa.field("element", pa.string())),
    "turn_failures": pa.list_(pa.field("element", pa.int32())),
}


class TraceMetadata(Model):
    """The source of a trace; stored inside the Parquet file."""

    name: str
    kind: str = Field(description="recorded, imported or synthetic")
    source: str = Field(
        description="the run, file or generator it was made from, with its parameters"
    )
    licence: str = "unknown"
    tokenizer: str = Field(
        description="the tokenizer that counted the lengths, or how they were estimated"
    )
    cap_tokens: int = Field(
        gt=0, le=2**31 - 1, description="largest response the run allowed, in tokens"
    )
    context_cap_tokens: int | None = Field(
        default=None, gt=0, description="largest context of the run, if it had a limit"
    )
    shared_prefix_tokens: int = Field(
        default=0, ge=0, description="first tokens of all prompts that are one text"
    )
    notes: str = ""
    schema_version: int = SCHEMA_VERSION


NO_CAP = 2**62  # more than any prompt
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
MOST_MADE = 8  # things that a trace keeps of itself (`Trace.once`)


def latest(kept: dict[K, T], most: int, key: K, make: Callable[[], T]) -> T:
    """Return the entry of a key, or make and keep it; the least recently used entry is removed."""
    kept[key] = entry = kept.pop(key) if key in kept else make()
    if len(kept) > most:
        del kept[next(iter(kept))]
    return entry


@dataclass(frozen=True)
class Trace:
    """A validated table of samples (see `REQUIRED` and `OPTIONAL` for its columns) with its
    metadata."""

    table: pa.Table
    metadata: TraceMetadata

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Any], metadata: TraceMetadata, origin: str = "trace"
    ) -> Trace:
        """Return the trace of arrays or lists by column name; messages call it `origin`.

        Raises `InputError` for missing, unknown or mistyped columns and for the first row that
        breaks a rule.
        """
        kinds = {**REQUIRED, **OPTIONAL}
        if unknown := sorted(set(columns) - set(kinds)):
            raise InputError(
                f"{origin}: unknown column {unknown[0]!r}{meant(unknown[0], kinds)}; a trace has the columns "
                f"{', '.join(kinds)}"
            )
        for name in REQUIRED:
            if name not in columns:
                names = ", ".join(map(str, columns))
                raise InputError(
                    f"{origin}: no column {name!r} (it has {names}); rename the one that holds it"
                )
        arrays = {
            name: _cast(columns[name], kind, name, origin)
            for name, kind in kinds.items()
            if name in columns
        }
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise InputError(
                f"{origin}: columns of different lengths {lengths}; give one value a row in each"
            )
        table = pa.table(arrays)
        validate(table, tuple(REQUIRED), metadata.cap_tokens, origin)
        prompt, most = table["prompt_tokens"].combine_chunks(), metadata.context_cap_tokens
        for key, wrong in (
            ("shared_prefix_tokens", pc.less(prompt, metadata.shared_prefix_tokens)),
            ("context_cap_tokens", pc.greater_equal(prompt, NO_CAP if most is None else most)),
        ):
            refuse(
                wrong,
                prompt,
                "prompt_tokens",
                origin,
                f"the metadata's {key} is {getattr(metadata, key)}",
            )
        return cls(_sorted(table, origin), metadata)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column as a numpy array (without a copy where Arrow allows it). In an optional
        column with empty values, numbers are floats with NaN and texts are objects with None."""
        return np.asarray(self.table.column(name).combine_chunks().to_numpy(zero_copy_only=False))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make`. The latest few results are kept by their keys, for other
        runs on this trace."""
        made: dict[Hashable, T] = self.__dict__.setdefault("_made", {})
        return latest(made, MOST_MADE, key, make)

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table, "metadata": self.metadata}

    @cached_property
    def step_slices(self) -> list[tuple[int, int, int]]:
        """Return (step, first row, row after the last) for each step, in order."""
        step = self.column("step")
        starts = np.flatnonzero(np.r_[True, step[1:] != step[:-1]])
        ends = np.r_[starts[1:], len(step)]
        return [(int(step[a]), int(a), int(b)) for a, b in zip(starts, ends, strict=True)]

    @cached_property
    def group_starts(self) -> NDArray[np.int64]:
        """The first row of each group, a prompt's samples in one step."""
        step, prompt = self.column("step"), self.column("prompt_id")
        return np.flatnonzero(
            np.r_[True, (step[1:] != step[:-1]) | (prompt[1:] != prompt[:-1])]
        ).astype(np.int64)

    def samples(
        self, first: int, end: int, first_uid: int = 0, first_epoch: int = 0
    ) -> list[Sample]:
        """Return rows `first` to `end` (excluded) as `Sample`s, numbered from `first_uid`, with
        epochs from `first_epoch`."""
        rows = self.table.slice(first, end - first)
        names = ("step", "epoch", "prompt_id", "sample", "prompt_tokens")
        step, epoch, *others = (rows.column(name).to_pylist() for name in names)
        return list(
            map(Sample, count(first_uid), step, (first_epoch + number for number in epoch), *others)
        )

    def responses(self, first: int, end: int) -> list[Response]:
        """Return the responses of rows `first` to `end` (excluded). The reward is NaN where the
        trace has none."""
        rows = self.table.slice(first, end - first)
        tokens = rows.column("response_tokens").to_pylist()
        rewards = (
            rows.column("reward").fill_null(math.nan).to_pylist()
            if "reward" in rows.column_names
            else [math.nan] * len(tokens)
        )
        turns: Iterable[tuple[Turn, ...]] = repeat(())
        if {"turn_tokens", "environment_s"} & set(rows.column_names):
            columns = [
                rows.column(name).to_pylist() if name in rows.column_names else repeat(None)
                for name in (
                    "environment_s",
                    "turn_tokens",
                    "turn_environment_s",
                    "turn_observation_tokens",
                )
            ]
            turns = map(_answered_turns, tokens, *columns)
        return list(map(Response, tokens, rewards, turns, range(first, end)))

    def observation_tokens(self) -> NDArray[np.int64]:
        """Return the tokens that the environment adds to each row's context, over all its turns;
        shape (rows,)."""
        if "turn_observation_tokens" not in self.table.column_names:
            return np.zeros(len(self), dtype=np.int64)
        return list_sums(self.table.column("turn_observation_tokens").combine_chunks()).astype(
            np.int64
        )


def _answered_turns(
    response_tokens: int,
    environment_s: float | None,
    turn_tokens: list[int] | None,
    turn_environment_s: list[float] | None,
    observations: list[int] | None,
) -> tuple[Turn, ...]:
    """Return the turns of a response, by the rule at the top of the module."""
    total_s = environment_s or 0.0
    if turn_tokens is None:
        return (
            (Turn(response_tokens // 2, total_s, 0),) if total_s > 0 and response_tokens > 1 else ()
        )
    pauses = len(turn_tokens) - 1
    seconds = (
        [total_s / max(pauses, 1)] * pauses if turn_environment_s is None else turn_environment_s
    )
    return tuple(map(Turn, accumulate(turn_tokens[:-1]), seconds, observations or [0] * pauses))


def read_trace(path: str | Path) -> Trace:
    """Read a trace of `write_trace`. Raises `InputError` for a file that is not one."""
    path = Path(path)
    if not os.path.isfile(path):  # noqa: PTH113 (pathlib's raises for a name that is too long)
        raise InputError(
            f"{path}: no such file; make one with `simrl trace import` or `simrl trace synth`"
        )
    table = read_parquet(path)
    metadata = parquet_metadata(table, path, METADATA_KEY, TraceMetadata, "write the trace again")
    if metadata is None:
        if b"simrl.profile" in (table.schema.metadata or {}):
            raise InputError(
                f"{path}: a profile, not a trace; look at it with `simrl profile show {path}`"
            )
        raise InputError(
            f"{path}: Parquet without simrl's trace metadata; import it with `simrl trace import csv|jsonl …`"
        )
    if metadata.schema_version != SCHEMA_VERSION:
        raise InputError(
            f"{path}: trace schema {metadata.schema_version}, this simrl reads {SCHEMA_VERSION}; import it again"
        )
    return Trace.from_columns(
        {name: table.column(name) for name in table.column_names}, metadata, origin=str(path)
    )


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write Parquet (zstd) with the metadata inside; the file appears only when it is whole."""
    write_parquet(trace.table, Path(path), METADATA_KEY, trace.metadata)


def _cast(values: Any, kind: pa.DataType, name: str, origin: str) -> pa.Array:
    try:
        array = _array(values)
        judged = pa.types.is_boolean(array.type) and name == "reward"  # right or wrong
        if not is_count_like(array.type) and not judged:
            raise InputError(f"{origin}: column {name!r} is {array.type}, not {kind}; convert it")
        if pa.types.is_floating(array.type) and pa.types.is_integer(kind):
            # Arrow would cast NaN to a whole number; an empty value stays empty.
            refuse(
                pc.not_equal(pc.floor(array), array),
                array,
                name,
                origin,
                "it must be a whole number",
            )
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
        return (
            array.cast(kind) if pa.types.is_list(kind) else array
        )  # its elements may have another name
    if pa.types.is_dictionary(kind):
        encoded = array.cast(kind.value_type).dictionary_encode()
        return pa.DictionaryArray.from_arrays(
            encoded.indices.cast(kind.index_type), encoded.dictionary
        )
    return array.cast(kind)


def _first_failure(values: Any, kind: pa.DataType, name: str) -> str:
    """Return the row and the value that cannot be converted, found by bisection over the rows
    before it."""

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
    return f"row {row}, column {name!r}: {shown(repr(value))}"


def _sorted(table: pa.Table, origin: str) -> pa.Table:
    """Return the rows in order of (step, prompt_id, sample). Raises `InputError` for a triple that
    comes twice."""
    keys = [table.column(name).to_numpy() for name in ("step", "prompt_id", "sample")]
    by_step, by_prompt, by_sample = map(np.diff, keys)
    if (np.where(by_step, by_step, np.where(by_prompt, by_prompt, by_sample)) > 0).all():
        return table
    order = np.lexsort(keys[::-1])
    ordered = [key[order] for key in keys]
    repeats = np.logical_and.reduce([key[1:] == key[:-1] for key in ordered])
    if repeats.any():
        row = int(order[int(np.flatnonzero(repeats)[0]) + 1])
        step, prompt, sample = (int(key[row]) for key in keys)
        raise InputError(
            f"{origin}: row {row} repeats (step, prompt_id, sample) = ({step}, {prompt}, {sample}); "
            "number a group's samples"
        )
    return table.take(pa.array(order))
