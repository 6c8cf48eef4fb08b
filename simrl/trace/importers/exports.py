"""Tables of metrics, as rows of numbers by tag: JSON Lines, CSV of W&B and TensorBoard, and JSON by tag.

JSON Lines   a row a step: a W&B history, TRL's log, verl's file logger (`{"step": …, "data": {…}}`).
CSV          a column a tag, as of a history or of a W&B chart (`RUN - TAG`, with `RUN - TAG__MIN` beside it); or a
             TensorBoard download, `Wall time,Step,Value`, whose tag is in the file's name. A folder of CSV is one table.
JSON         `log_history` of TRL's `trainer_state.json`, or `{tag: {step: value}}`, as NeMo-RL's tools dump TensorBoard.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from simrl.errors import InputError, broken, first_line
from simrl.trace.importers import rows

Logged = tuple[str, dict[str, float]]  # the place of a row, and its numbers by tag
RUN_STEPS = (
    *("global_step", "train/global_step", "training/global_step", "trainer/global_step"),
    *("rollout/step", "step"),
)
WANDB_STEPS = ("Step", "_step")  # counted by the logger, which may log a step in several rows
STEPS = (*RUN_STEPS, *WANDB_STEPS)
ONE_TAG = {"Wall time", "Step", "Value"}
ENVELOPE = ("__MIN", "__MAX")  # of a W&B chart, beside each tag


def step_of(row: dict[str, float], place: str, names: Sequence[str] = RUN_STEPS) -> int | None:
    """Return the step of a row; None if it has none. Raises `InputError` for one that no run
    has."""
    step = next((row[name] for name in names if name in row), None)
    if step is None or step != step:
        return None
    if not 0 <= step <= rows.INT32_MAX or step != int(step):
        raise InputError(
            f"{place}: step {step:.12g} is no whole number from 0; repair or remove the row"
        )
    return int(step)


def tables(path: Path) -> list[Path]:
    """Return the CSV files of a folder. Raises `InputError` if there is none."""
    files = sorted(file for file in path.glob("*.csv") if file.is_file())
    if not files:
        raise InputError(
            f"{path}: is a folder without .csv; name the run's metrics log, or a folder of exported CSV"
        )
    return files


def read_rows(path: Path, tags: Collection[str]) -> Iterator[Logged] | None:
    """Return the rows of a table; None for a file that is none, such as a console log. `tags` are
    those that a TensorBoard download may have."""
    if path.is_dir():
        return _merged(path, tags)
    if path.suffix == ".csv":
        return _csv_rows(path, tags)
    if path.suffix == ".json":
        return _json_rows(path)
    first = next((line for _, line in rows.numbered_lines(path, mode="rb") if line.strip()), b"")
    return _jsonl_rows(path) if path.suffix == ".jsonl" or first.startswith(b'{"') else None


def numbers(values: dict[Any, Any]) -> dict[str, float]:
    """Return the numbers of a row; true and false, texts and lists are left out. Half a character
    of a name becomes ?."""
    by_name = {
        str(key): rows.as_float(value) for key, value in values.items() if rows.is_number(value)
    }
    return {key.encode(errors="replace").decode(): value for key, value in by_name.items()}


def tag_of(path: Path, tags: Collection[str]) -> str | None:
    """Return the longest of these tags that the name of a file ends with; browsers write _ for the
    slashes of a tag."""
    name, written = f"_{_written(path.stem)}", {tag: f"_{_written(tag)}" for tag in tags}
    return max((tag for tag in tags if name.endswith(written[tag])), key=len, default=None)


def _written(tag: str) -> str:
    return re.sub(r"\W", "_", tag)


def _jsonl_rows(path: Path) -> Iterator[Logged]:
    for place, row in rows.read_jsonl(path):
        if not {"step", "data"} <= set(row):
            yield place, numbers(row)
            continue
        step, data = rows.integer(row, "step", place), row["data"]
        if not isinstance(data, dict):
            raise InputError(
                f"{place}: field 'data' is {rows.shown(data)}; verl's file logger writes an object of metrics"
            )
        yield place, {**numbers(data), STEPS[0]: step}


def _json_rows(path: Path) -> Iterator[Logged]:
    content = rows.read_json(path)
    if isinstance(content.get("log_history"), list):
        yield from (
            (str(path), numbers(row)) for row in content["log_history"] if isinstance(row, dict)
        )
        return
    by_tag = {tag: values for tag, values in content.items() if isinstance(values, dict)}
    if not by_tag:
        raise InputError(
            f"{path}: neither a list 'log_history', as in trainer_state.json, nor {{tag: {{step: value}}}}"
        )
    by_step: dict[str, dict[str, float]] = {}
    for tag, values in by_tag.items():
        for step, value in numbers(values).items():
            by_step.setdefault(step, {})[tag] = value
    for step, row in by_step.items():
        place = f"{path}: step {rows.shown(step)}"
        if not re.fullmatch(r"[0-9]{1,10}", step):
            raise InputError(f"{place} is no whole number from 0; repair or remove it")
        yield place, {**row, STEPS[0]: float(step)}


def _csv_rows(path: Path, tags: Collection[str]) -> Iterator[Logged]:
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as lines:
            table = csv.reader(lines)
            header = next(table, [])
            columns = _columns(path, header, tags)
            for cells in table:
                place = f"{path}: row {table.line_num}"
                if cells and len(cells) != len(header):
                    raise InputError(
                        f"{place}: {len(cells)} cells, and the header has {len(header)}; repair the row"
                    )
                row = {
                    columns[i]: value
                    for i, value in enumerate(map(_cell, cells))
                    if columns[i] and value is not None
                }
                if row:
                    yield place, row
    except (OSError, csv.Error) as error:
        raise InputError(
            f"{path}: cannot be read as CSV ({first_line(error)}); export it again"
        ) from error


def _columns(path: Path, header: Sequence[str], tags: Collection[str]) -> list[str]:
    """Return the tag of each column; empty for one that is left out."""
    if set(header) == ONE_TAG:
        return [
            {"Step": "Step", "Value": tag_of(path, tags) or ""}.get(name, "") for name in header
        ]
    names = ["" if name.endswith(ENVELOPE) else name.rpartition(" - ")[2] for name in header]
    twice = next((name for name, times in Counter(names).items() if name and times > 1), None)
    if wrong := broken(
        (
            twice is not None,
            f"two columns are {rows.shown(twice)}, as of two runs; export one run alone",
        ),
        (
            not set(STEPS) & set(names),
            f"no column for the step, such as Step or _step (it has {rows.listed(header)})",
        ),
    ):
        raise InputError(f"{path}: {wrong}")
    return names


def _cell(raw: str) -> float | None:
    with suppress(ValueError):
        return float(raw) if "_" not in raw else None
    return None


def _merged(path: Path, tags: Collection[str]) -> Iterator[Logged]:
    """Yield a row a step of all CSV files in a folder. Raises `InputError` for a tag of two files,
    as of two runs."""
    by_step: dict[int, dict[str, float]] = {}
    file_of: dict[str, Path] = {}
    for file in tables(path):
        for place, row in _csv_rows(file, tags):
            for tag in set(tags) & set(row):
                if file_of.setdefault(tag, file) != file:
                    raise InputError(
                        f"{file}: {tag} is also in {file_of[tag].name}; keep the files of one run"
                    )
            if (step := step_of(row, place, STEPS)) is not None:
                by_step.setdefault(step, {STEPS[0]: step}).update(row)
    yield from ((str(path), row) for _, row in sorted(by_step.items()))
