"""The sources of a report: the runs, or the sweep, in a folder. A folder is read, never changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simrl.analysis.explanation import counted_warmup
from simrl.errors import InputError, first_line, printable, refuse
from simrl.files import read_parquet, require_no_device
from simrl.result.check import check_metadata
from simrl.result.metrics import prices, speedups, summary
from simrl.result.result import METADATA_FILE, Result, read_result

WRITERS = "`simrl compare`, `run`, `replay` and `sweep` write such folders"
SWEEP_FILE, TABLE_FOLDER, COMPARISON_FILE = "sweep.json", "table", "comparison.json"
SEARCH_FILE = "advise.json"


class Run(NamedTuple):
    """A result under the name of its folder, and its row of a comparison."""

    name: str
    result: Result
    warmup_steps: int
    row: dict[str, Any]


class Runs(NamedTuple):
    """Runs side by side. `replayed`: the first one is the prediction, the second one the
    measurement."""

    title: str
    runs: Sequence[Run]
    replayed: bool = False


class SweepRows(NamedTuple):
    """The rows of a sweep's table in the order of points, the varied keys, the arguments of the
    command, and its folder, which has the scenario of every point by hash."""

    title: str
    rows: Sequence[dict[str, Any]]
    keys: Sequence[str]
    arguments: dict[str, Any]
    folder: Path


def find(folder: Path) -> Runs | SweepRows:
    """Return the runs or the sweep in a folder. Raise `InputError` if it holds neither."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"{folder}: {what}; name a folder of results ({WRITERS})")
    if (folder / SWEEP_FILE).is_file():
        return _sweep(folder)
    if (folder / METADATA_FILE).is_file():
        return runs_of({folder.resolve().name: _read(folder)})
    inside = _result_folders(folder)
    if not inside:
        raise InputError(f"{folder}: holds no result{_instead(folder)}; {WRITERS}")
    results = {name: _read(place) for name, place in inside.items()}
    replayed = set(results) == {"predicted", "measured"}
    if replayed:
        results = {name: results[name] for name in ("predicted", "measured")}
    return runs_of(results, replayed)


def _read(folder: Path) -> Result:
    """Return the result in a folder. Raise `InputError` if its metadata does not describe the
    run."""
    result = read_result(folder)
    check_metadata(result.metadata, f"{folder / METADATA_FILE}", reported=True)
    return result


def _result_folders(folder: Path) -> dict[str, Path]:
    """Return the folders of results by name: a comparison's in its order, recorded runs' by their
    parts."""
    folders = {
        place.parent.name: place.parent for place in sorted(folder.glob(f"*/{METADATA_FILE}"))
    }
    if not folders:
        places = sorted(
            [*folder.glob(f"parts/*/{METADATA_FILE}"), *folder.glob(f"*/parts/*/{METADATA_FILE}")]
        )
        runs = [place.parents[2].name for place in places]
        folders = {
            run if runs.count(run) == 1 else f"{run}, part {place.parent.name}": place.parent
            for run, place in zip(runs, places, strict=True)
        }
    try:
        require_no_device(folder / COMPARISON_FILE)
        order = [
            row["folder"]
            for row in json.loads((folder / COMPARISON_FILE).read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return folders
    return dict(
        sorted(
            folders.items(),
            key=lambda item: order.index(item[0]) if item[0] in order else len(order),
        )
    )


def _instead(folder: Path) -> str:
    """Return the content of a folder without results, as far as that may help."""
    if (folder / SEARCH_FILE).is_file():
        return " but a search of `simrl advise`: compare the systems that it named, and report that"
    deeper = sorted({p.parent.parent.name for p in folder.glob(f"*/*/{METADATA_FILE}")})
    deeper += sorted(p.parent.name for p in folder.glob(f"*/{SWEEP_FILE}"))
    if deeper:
        return f", but folders that do ({', '.join(deeper[:4])}{' …' * (len(deeper) > 4)}): name one of them"
    names = sorted(path.name for path in folder.iterdir())[:4]
    return f" (in it: {', '.join(names)})" if names else " (it is empty)"


def runs_of(results: dict[str, Result], replayed: bool = False) -> Runs:
    """Return results by name as they are compared: speed-ups are over the first."""
    runs: list[Run] = []
    for name, result in results.items():
        scenario = result.metadata["scenario"]
        try:
            steady = counted_warmup(result)
        except InputError as error:
            raise InputError(
                f"{name}: the run made no policy update; there is nothing to report"
            ) from error
        planned = int(scenario["warmup_steps"])
        warmup = planned if result.steps.num_rows > planned else steady
        row = {**summary(result, warmup, *prices(scenario["cluster"])), **_split(result.metadata)}
        if replayed or "replay" in result.metadata:
            row["system"] = f"{row['system']}, {name if replayed else 'measured'}"
        runs.append(Run(name, result, warmup, row))
    for run, over_first in zip(runs, speedups([run.row for run in runs]), strict=True):
        run.row.update(over_first)
    titles = dict.fromkeys(str(run.result.metadata["scenario"]["name"]) for run in runs)
    return Runs(", ".join(titles), runs, replayed)


def _split(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GPUs that roll out and that train; if all train, they do both by turns."""
    gpus, train_gpus = metadata["gpus"], metadata["train_gpus"]
    shared = train_gpus >= gpus
    return {
        "rollout_gpus": gpus if shared else gpus - train_gpus,
        "train_gpus": train_gpus,
        "colocated": shared,
    }


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a table in folders `system.name=NAME`. Raise `InputError` for a damaged or
    changed file."""
    refuse((not folder.is_dir(), f"{folder} is no folder"))
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.rglob("*.parquet")):
        key, _, value = file.parent.name.partition("=")
        rows += [
            {**row, **({key: value} if value else {})} for row in read_parquet(file).to_pylist()
        ]
    return [{name: row.get(name) for name in rows[0]} for row in rows]


def _sweep(folder: Path) -> SweepRows:
    try:
        arguments = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))
        rows = _rows(folder / TABLE_FOLDER)
    except (OSError, ValueError, RecursionError, InputError) as error:
        raise InputError(
            f"{folder}: a sweep without a table that can be read ({first_line(error)}); run its command again, it goes on"
        ) from error
    names, numbers = list(rows[0]) if rows else [], [row.get("point") for row in rows]
    lacking = next(
        (
            name
            for name in ("point", "hash", "system.name", "variant", "error")
            if name not in names
        ),
        "",
    )
    wrong, again = (
        f"{folder}: no sweep that `simrl sweep` wrote",
        "run its command again, it goes on",
    )
    refuse(
        (not rows, f"{folder}: a sweep without points; run it with some"),
        (lacking, f"{wrong}: its table has no column {lacking}; {again}"),
        (
            not all(type(number) is int for number in numbers),
            f"{wrong}: its table has points without a number; {again}",
        ),
        (
            sorted(map(str, numbers)) != sorted(map(str, range(len(rows)))),
            f"{wrong}: its table lacks points, or has some twice; {again}",
        ),
        (not isinstance(arguments, dict), f"{wrong}: {SWEEP_FILE} is no object; {again}"),
    )
    rows.sort(key=lambda row: row["point"])
    keys = ["system.name", *names[names.index("hash") + 1 : names.index("variant")]]
    title = printable(Path(str(arguments.get("scenario", folder.name))).stem)
    return SweepRows(title, rows, keys, arguments, folder)
