"""Tables of metrics, as rows of numbers by tag: JSON Lines, CSV, JSON by tag, and folders of MLflow.

JSON Lines   a row a step: a W&B history, TRL's log, verl's file logger (`{"step": …, "data": {…}}`).
CSV          a column a tag, as of a history or of a W&B chart (`RUN - TAG`, with `RUN - TAG__MIN` beside it); or a
             TensorBoard download, `Wall time,Step,Value`, whose tag is in the file's name; or a chart of SwanLab (`step`,
             `RUN-TAG`, with `TAG_timestamp` beside it). A folder of CSV is one table.
MLflow       the folder of a run, `…/metrics/TAG`: a file a tag, whose lines are `timestamp value step`.
JSON         `log_history` of TRL's `trainer_state.json`, or `{tag: {step: value}}`, as NeMo-RL's tools dump TensorBoard.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from simrl.errors import InputError, refuse
from simrl.trace.importers import rows

Logged = tuple[str, dict[str, float]]  # the place of a row, and its numbers by tag
STEP = "step of the run"  # as the user or the text of a console names it
RUN_STEPS = (
    STEP,
    *(
        "training_step",
        "system/global_step",
        "global_step",
        "train/global_step",
        "training/global_step",
        "trainer/global_step",
    ),
    *("rollout/step", "step"),
)
WANDB_STEPS = ("Step", "_step")  # counted by the logger, which may log a step in several rows
STEPS = (*RUN_STEPS, *WANDB_STEPS)
CARRIED = re.compile(  # the text of a console's line in an object, as Docker and loggers write it
    r'\{[^{}]{0,400}?"(?:log|message|text)": ?("(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+")'
)
ONE_TAG = {"Wall time", "Step", "Value"}
BESIDE = ("__MIN", "__MAX", "_timestamp")  # of a chart of W&B or SwanLab, beside each tag
MLFLOW = ("metrics", "*/metrics", "*/*/metrics", "*/*/*/metrics")


def step_of(row: dict[str, float], place: str, names: Sequence[str] = RUN_STEPS) -> int | None:
    """Return the step of a row; None if it has none. Raises `InputError` for one that no run
    has."""
    step = next((row[name] for name in names if name in row), None)
    if step is None or step != step:
        return None
    refuse(
        (
            not 0 <= step <= rows.INT32_MAX or step != int(step),
            f"{place}: step {step:.12g} is no whole number from 0; repair or remove the row",
        )
    )
    return int(step)


def _files(
    path: Path, tags: Mapping[str, str], notes: list[str]
) -> Iterator[tuple[Path, Iterator[Logged]]]:
    """Yield the tables in a folder, and their rows. Raises `InputError` if there is none."""
    roots = [path] if path.name == "metrics" else [*chain.from_iterable(map(path.glob, MLFLOW))]
    csvs = sorted(file for file in path.glob("*.csv") if file.is_file())
    refuse(
        (
            not csvs and not roots,
            f"{path}: is a folder without .csv, and without metrics/ of MLflow; name the run's metrics log, or a "
            "folder of exported CSV",
        ),
        (
            len(roots) > 1,
            f"{path}: {len(roots)} runs of MLflow; name one, such as {roots[0].parent}"
            if roots
            else "",
        ),
    )
    yield from ((file, _csv_rows(file, tags, notes)) for file in csvs)
    for root in roots:
        files = (file for file in sorted(root.rglob("*")) if file.is_file())
        yield from ((file, _mlflow_rows(file, file.relative_to(root).as_posix())) for file in files)


def _mlflow_rows(path: Path, tag: str) -> Iterator[Logged]:
    for place, line in rows.numbered_lines(path, encoding="utf-8", errors="replace"):
        _, value, step, *_ = [*map(_cell, line.split()), None, None, None]
        if value is not None and step is not None:
            yield place, {tag: value, WANDB_STEPS[0]: step}


def read_rows(path: Path, tags: Mapping[str, str], notes: list[str]) -> Iterator[Logged] | None:
    """Return the rows of a table; None for a file that is none, such as a console log. `tags` are
    those that a TensorBoard download may have; `notes` get what is left out."""
    if path.is_dir():
        return _merged(path, tags, notes)
    if path.suffix in (".csv", ".tsv"):
        return _csv_rows(path, tags, notes)
    if path.suffix == ".json":
        return _json_rows(path)
    first = next((line for _, line in rows.numbered_lines(path, mode="rb") if line.strip()), b"")
    is_rows = first.startswith(b'{"') and not CARRIED.match(first[: 2**17].decode(errors="replace"))
    return _jsonl_rows(path, notes) if path.suffix == ".jsonl" or is_rows else None


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
    before, _, whole = path.stem.rpartition("-tag-")
    fits = (tag for tag in tags if name.endswith(written[tag]))
    return max(
        (t for t in fits if not before or _written(t) == _written(whole)), key=len, default=None
    )


def _written(tag: str) -> str:
    return re.sub(r"\W", "_", tag)


def _jsonl_rows(path: Path, notes: list[str]) -> Iterator[Logged]:
    for place, line in rows.numbered_lines(path, mode="rb"):
        try:
            row = rows.json_object(line, place) if line.strip() else {}
            if {"step", "data"} <= set(row):  # of verl's file logger
                data = rows.checked(
                    row,
                    "data",
                    place,
                    lambda value: isinstance(value, dict),
                    "an object of metrics",
                )
                row = {**data, STEP: rows.integer(row, "step", place)}
        except InputError as error:
            notes.append(f"{error} (left out)")
        else:
            yield place, numbers(row)


def _json_rows(path: Path) -> Iterator[Logged]:
    match rows.read_json(path):
        case [*history] | {"log_history": [*history]}:
            yield from ((str(path), numbers(row)) for row in history if isinstance(row, dict))
            return
        case content:
            content = rows.require_object(content, str(path))
    by_tag = {tag: values for tag, values in content.items() if isinstance(values, dict)}
    refuse(
        (
            not by_tag,
            f"{path}: neither a list 'log_history', as in trainer_state.json, nor {{tag: {{step: value}}}}",
        )
    )
    for tag, values in by_tag.items():
        for step, value in numbers(values).items():
            place = f"{path}: step {rows.shown(step)}"
            wrong = not re.fullmatch(r"[0-9]{1,10}", step)
            refuse((wrong, f"{place} is no whole number from 0; repair or remove it"))
            yield place, {tag: value, STEP: float(step)}


def _csv_rows(path: Path, tags: Mapping[str, str], notes: list[str]) -> Iterator[Logged]:
    table = rows.read_csv(path, errors="replace")
    header = next(table, ("", []))[1]
    columns = _columns(path, header, tags)
    for place, cells in table:
        if len(cells) != len(header):
            notes.append(f"{place}: {len(cells)} cells, the header has {len(header)} (left out)")
            continue
        numbered = zip(columns, map(_cell, cells), strict=True)
        row = {tag: value for tag, value in numbered if tag and value is not None}
        if row:
            yield place, row


def _columns(path: Path, header: Sequence[str], tags: Mapping[str, str]) -> list[str]:
    """Return the tag of each column; empty for one that is left out."""
    if set(header) == ONE_TAG:
        return [
            {"Step": "Step", "Value": tag_of(path, tags) or ""}.get(name, "") for name in header
        ]
    names = ["" if name.endswith(BESIDE) else name.rpartition(" - ")[2] for name in header]
    ends = {name: [tag for tag in tags if name.endswith(f"-{tag}")] for name in names}
    names = [max(ends[name], key=len, default=name) for name in names]
    twice = next((name for name, times in Counter(names).items() if name and times > 1), None)
    refuse(
        (
            twice is not None,
            f"{path}: two columns are {rows.shown(twice)}, as of two runs; export one run alone",
        ),
        (
            not set(STEPS) & {tags.get(name, name) for name in names},
            f"{path}: no column for the step, such as Step or _step; name it with --column step=TAG "
            f"(it has {rows.listed(header)})",
        ),
    )
    return names


def _cell(raw: str) -> float | None:
    with suppress(ValueError):
        return float(raw) if "_" not in raw else None
    return None


def _merged(path: Path, tags: Mapping[str, str], notes: list[str]) -> Iterator[Logged]:
    """Yield the rows of all tables in a folder, by the logger's step. Raises `InputError` for a tag
    of two files, as of two runs."""
    file_of: dict[str, Path] = {}
    for file, logged in _files(path, tags, notes):
        for place, row in logged:
            for tag in (tag for tag in row if tags.get(tag) == tag):
                if file_of.setdefault(tag, file) != file:
                    raise InputError(
                        f"{file}: {tag} is also in {file_of[tag].name}; keep the files of one run"
                    )
            if (
                step := step_of({tags.get(t, t): v for t, v in row.items()}, place, STEPS)
            ) is not None:
                values = {tag: value for tag, value in row.items() if tag not in STEPS}
                yield place, {**values, WANDB_STEPS[0]: step}
