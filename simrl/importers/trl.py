"""TRL: the completions that `log_completions` writes, one Parquet file a logged step.

Columns are step, prompt, completion, one a reward function (under the function's name), whatever the user logged
besides, and advantage; texts are decoded without special tokens. A group is the rows of one prompt and step. TRL keeps
the last generation batch until the next one, so a batch that several optimizer steps use is written several times:
it counts once, at the step that logged it first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from simrl.errors import InputError
from simrl.importers.rows import Row, TextRow, count_rows, existing, integer, listed, number, text, trace_from_rows
from simrl.importers.tokens import TokenCounter
from simrl.parquet import decoded, read_parquet
from simrl.trace import Trace

MOST_ROWS = 200_000  # of one file
TEXTS = ("step", "prompt", "completion")


def import_trl(
    path: str | Path,
    counter: TokenCounter,
    *,
    reward_columns: Sequence[str] | None = None,
    cap_tokens: int | None = None,
    name: str | None = None,
    licence: str = "unknown",
) -> Trace:
    """A trace from a folder of `completions_{step}.parquet` files (or the run's output folder above it), or one file.

    The reward is the sum of `reward_columns` (a NaN among them counts as 0, as TRL adds them); the files do not tell
    rewards from other numbers that were logged, so None takes the one column of numbers there is, and refuses several.
    `()` leaves the reward out. `cap_tokens` is the run's `max_completion_length`; None takes the largest response.

    Raises `InputError` for an empty folder, a file that is not whole, and missing or mistyped columns.
    """
    path = existing(path)
    repeated = 0
    before: Counter[tuple[str, str]] = Counter()
    rows: list[Row] = []
    for file in _files(path):
        texts = _texts(file, reward_columns)
        batch = Counter((row.prompt, row.response) for row in texts)
        if batch == before:
            repeated += 1
        else:
            rows.extend(count_rows(texts, counter))
            before = batch
    notes = ["Lengths are of the decoded text, without special tokens: each misses its end token."]
    if repeated:
        notes.append(f"{repeated} files repeat the generation batch of the one before and were left out.")
    return trace_from_rows(
        rows,
        name=name or path.name.removesuffix(".parquet"),
        source=f"TRL completions {path.name}",
        licence=licence,
        tokenizer=counter.tokenizer,
        cap_tokens=cap_tokens,
        notes=notes,
    )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    pattern = "completions_*.parquet"
    found = list(path.glob(pattern)) or list((path / "completions").glob(pattern))
    files = sorted(found, key=lambda file: (len(file.name), file.name))  # steps are padded to five digits, no more
    if not files:
        raise InputError(f"{path}: no {pattern} in it; name the output_dir of a run with log_completions=True")
    return files


def _texts(file: Path, reward_columns: Sequence[str] | None) -> list[TextRow]:
    table = read_parquet(file)
    for column in TEXTS:
        if column not in table.column_names:
            found = listed(table.column_names)
            raise InputError(f"{file}: no column {column!r} (it has {found}); TRL writes step, prompt and completion")
    if table.num_rows > MOST_ROWS:
        raise InputError(f"{file}: {table.num_rows:,} rows; a logged step has at most {MOST_ROWS:,}; keep its own")
    rewards = _reward_columns(file, table, reward_columns)
    texts: list[TextRow] = []
    chosen = {name: decoded(table.column(name), f"{file}: column {name!r}") for name in (*TEXTS, *rewards)}
    for index, row in enumerate(pa.table(chosen).to_pylist()):
        place = f"{file}: row {index}"
        step, prompt, response = integer(row, "step", place), text(row, "prompt", place), text(row, "completion", place)
        texts.append(TextRow(place, step, prompt, response, _reward(row, rewards, place)))
    return texts


def _reward(row: Mapping[str, Any], columns: Sequence[str], place: str) -> float | None:
    """The sum of the rewards that were given. TRL writes NaN where a reward function had nothing to say."""
    given = {c: v for c, v in row.items() if c in columns and not (isinstance(v, float) and math.isnan(v))}
    values = [value for column in given if (value := number(given, column, place)) is not None]
    return sum(values) if values else None


def _reward_columns(file: Path, table: pa.Table, asked: Sequence[str] | None) -> list[str]:
    numbers = [
        f.name
        for f in table.schema
        if f.name not in (*TEXTS, "advantage") and (pa.types.is_floating(f.type) or pa.types.is_integer(f.type))
    ]
    if asked is not None:
        missing = [column for column in asked if column not in numbers]
        if missing:
            raise InputError(f"{file}: no column of numbers {missing[0]!r}; it has {listed(numbers)}")
        return list(dict.fromkeys(asked))
    if len(numbers) > 1:
        raise InputError(f"{file}: columns {listed(numbers)} may be rewards; name those to add up as reward_columns")
    return numbers
