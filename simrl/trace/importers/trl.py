"""TRL: the completions that `log_completions` writes, one Parquet file a logged step.

Columns are step, prompt, completion, one a reward function (under the function's name), the user's own, and advantage;
texts are decoded without special tokens. A group is the rows of one prompt and step. TRL keeps
the last generation batch until the next one, so a batch that several optimizer steps use is written several times:
it counts once, at the step that logged it first.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa

from simrl.errors import InputError
from simrl.files import read_parquet
from simrl.trace.importers import rows, turns
from simrl.trace.importers.tokens import DECODED, TokenCounter
from simrl.trace.trace import Trace

MOST_ROWS = 200_000  # of one file
TEXTS = ("step", "prompt", "completion")


def import_trl(
    path: str | Path,
    counter: TokenCounter,
    *,
    reward_columns: Sequence[str] | None = None,
    **labels: Unpack[rows.Labels],
) -> Trace:
    """Return the trace of a folder of `completions_{step}.parquet` files (or the run's output folder above it), or one file.

    The reward is the sum of `reward_columns` (NaN counts as 0, as in TRL's own sum). The files do not tell rewards from
    other numbers: None takes the only column of numbers, and refuses several. `()` leaves the reward out. `cap_tokens` is
    the run's `max_completion_length`.

    Raises `InputError` for an empty folder, a file that is not whole, and missing or mistyped columns.
    """
    path = rows.existing(path)
    repeated = agents = 0
    before: Counter[tuple[str, str]] = Counter()
    samples: list[rows.Row] = []
    for file in _files(path):
        texts = _texts(file, reward_columns)
        batch = Counter((row.prompt, row.response) for row in texts)
        repeated += batch == before
        if batch != before:
            samples.extend(rows.count_rows(texts, counter))
            agents += sum(turns.is_agents(row.response) for row in texts)
        before = batch
    notes = [DECODED, turns.note([row.turn_observation_tokens for row in samples], agents)]
    if repeated:
        notes.append(f"{repeated} files repeat the generation batch of the one before and were left out.")
    return rows.trace_from_rows(
        samples,
        source=f"TRL completions {path.name}",
        tokenizer=counter.tokenizer,
        notes=notes,
        default_name=path.name.removesuffix(".parquet"),
        **labels,
    )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    pattern = "completions_*.parquet"
    found = list(path.glob(pattern)) or list((path / "completions").glob(pattern))
    if not found:
        raise InputError(f"{path}: no {pattern} in it; name the output_dir of a run with log_completions=True")
    return rows.one_of_each_step(path, found, _step_of)


def _step_of(file: Path) -> int | None:
    """Return the step in the name of a file; None if it has another name."""
    found = re.fullmatch(r"completions_([0-9]{1,10})\.parquet", file.name)
    return int(found[1]) if found else None


def _texts(file: Path, reward_columns: Sequence[str] | None) -> list[rows.TextRow]:
    table = read_parquet(file)
    for column in TEXTS:
        if column not in table.column_names:
            found = rows.listed(table.column_names)
            raise InputError(f"{file}: no column {column!r} (it has {found}); TRL writes step, prompt and completion")
    if table.num_rows > MOST_ROWS:
        raise InputError(f"{file}: {table.num_rows:,} rows; a logged step has at most {MOST_ROWS:,}; keep its own")
    rewards = _reward_columns(file, table, reward_columns)
    texts: list[rows.TextRow] = []
    for index, row in enumerate(table.select([*TEXTS, *rewards]).to_pylist()):
        place = f"{file}: row {index}"
        step, named = rows.integer(row, "step", place), _step_of(file)
        if named not in (None, step):
            raise InputError(f"{place}: step is {step} in the completions of step {named}; was the file renamed?")
        prompt, response = rows.text(row, "prompt", place), rows.text(row, "completion", place)
        texts.append(rows.TextRow(place, step, prompt, response, _reward(row, rewards, place)))
    return texts


def _reward(row: Mapping[str, Any], columns: Sequence[str], place: str) -> float | None:
    """Return the sum of the rewards. TRL writes NaN where a reward function returned None."""
    given = [c for c in columns if row[c] is not None and not (isinstance(row[c], float) and math.isnan(row[c]))]
    return sum(rows.number(row, column, place) or 0.0 for column in given) if given else None


def _reward_columns(file: Path, table: pa.Table, asked: Sequence[str] | None) -> list[str]:
    numbers = [
        f.name
        for f in table.schema
        if f.name not in (*TEXTS, "advantage") and (pa.types.is_floating(f.type) or pa.types.is_integer(f.type))
    ]
    missing = [column for column in asked or () if column not in numbers]
    if missing:
        raise InputError(f"{file}: no column of numbers {missing[0]!r}; it has {rows.listed(numbers)}")
    if asked is None and len(numbers) > 1:
        raise InputError(
            f"{file}: columns {rows.listed(numbers)} may be rewards; name those to add up as reward_columns"
        )
    return numbers if asked is None else list(dict.fromkeys(asked))
