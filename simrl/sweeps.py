"""A sweep: many points, each simulated at most once, and one table of them.

Invariants: an outcome lands whole in `points/`, under the hash of all that it depends on, or not at all; a sweep that was
killed, or that shares points with an earlier one in the same folder, simulates what is missing. The table is a pure function of
the points and their outcomes: rows in the order of the points, no time of the clock, the same bytes from any executor.

    points/3f/3fa2….json                    what is hashed, and the row or the error
    table/system.name=areal/part-0.parquet  a Parquet dataset, partitioned by system
    sweep.json                              what was asked for
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

import simrl
from simrl.dimensions import SYSTEMS, Listed, Varied
from simrl.errors import InputError, StoppedError
from simrl.executors import Executor, Lost
from simrl.files import write_whole_file, write_whole_folder
from simrl.hardware import gpu, model_shape
from simrl.points import Digests, Outcome, Point, make_point, resolved, value_of
from simrl.scenario import PARAMETER, Scenario, require_parameter
from simrl.systems import make_system, parameters_of

SYSTEM = "system.name"
PATH_KEYS = ("workload.trace", "profile.path", "speculation.draft_profile")
TABLE_FILES = re.compile(r"system\.name=\w+/part-0\.parquet")
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The points, each once, and the keys that they differ in."""

    points: Sequence[Point]
    keys: Sequence[str]
    combinations: int  # before those that come to the same point were taken together


class Swept(NamedTuple):
    """What a sweep came to."""

    rows: list[Row]
    simulated: int  # of them now; the others were there


def plan(varied: Varied, sample: int | None, seed: int, on_point: Callable[[], None] = lambda: None) -> Plan:
    """Raises `InputError` for what no scenario can have: an unknown key, a value out of its range, a name that simrl does not
    know. What only this combination cannot have is found when it is simulated, and stands in its row."""
    require_parameters(varied)
    digests, checked = Digests(), set[str]()
    points: dict[str, Point] = {}
    combinations = 0
    for settings in varied.combinations(sample, seed):
        scenario = resolved(varied.file, settings)
        require_names(scenario, checked)
        point = make_point(scenario, digests)
        points.setdefault(point.hash, point)
        combinations += 1
        on_point()
    return Plan(list(points.values()), _keys(varied), combinations)


def require_parameters(varied: Varied) -> None:
    """A parameter of the systems belongs to one of them at least."""
    systems = [setting.value for setting in _settings(varied, SYSTEMS)]
    names = dict.fromkeys(entry if isinstance(entry, str) else entry["name"] for entry in systems)
    for dimension in varied.dimensions:
        for key in dimension.keys:
            if key.startswith(PARAMETER):
                require_parameter(key, names, parameters_of)


def _settings(varied: Varied, key: str) -> Iterator[Any]:
    for dimension in varied.dimensions:
        if isinstance(dimension, Listed):
            yield from (s for alternative in dimension.alternatives for s in alternative if s.key == key)


def require_names(scenario: Scenario, checked: set[str]) -> None:
    """The system with its parameters, the model and the GPU are known; each is looked up once."""
    checks: dict[str, Callable[[], object]] = {
        f"system {scenario.system.model_dump_json()}": lambda: make_system(
            scenario.system.name, scenario.system.parameters
        ),
        f"model {scenario.model}": lambda: model_shape(scenario.model),
        f"gpu {scenario.cluster.gpu}": lambda: gpu(scenario.cluster.gpu),
    }
    for what, check in checks.items():
        if what not in checked:
            try:
                check()
            except InputError as error:
                raise InputError(f"{scenario.file}: {error}") from error
            checked.add(what)


def _keys(varied: Varied) -> list[str]:
    """What the points differ in, the system always."""
    keys: dict[str, None] = {SYSTEM: None}
    for dimension in varied.dimensions:
        if isinstance(dimension, Listed) and len(dimension.alternatives) == 1:
            continue
        keys.update(dict.fromkeys(key for key in dimension.keys if key != SYSTEMS))
    systems = [setting.value for setting in _settings(varied, SYSTEMS)]
    if len(systems) > 1:
        keys.update({f"{PARAMETER}{key}": None for entry in systems if isinstance(entry, dict) for key in entry})
    return list(keys)


def kept(plan: Plan, folder: Path) -> dict[str, Outcome]:
    """The outcomes that are in the folder, by hash. What cannot be read is not there."""
    return {point.hash: found for point in plan.points if (found := read_outcome(folder, point)) is not None}


def run(
    plan: Plan,
    outcomes: dict[str, Outcome],
    folder: Path,
    executor: Executor,
    asked: Mapping[str, Any],
    on_point: Callable[[], None] = lambda: None,
) -> Swept:
    """Simulates the points that have no outcome yet, keeps each in the folder, and writes the table. `on_point` hears of each.
    Raises `StoppedError` at Ctrl-C, which loses no more than the points under way, and `InputError` for a folder that holds
    something else."""
    outcomes = dict(outcomes)
    missing = [point for point in plan.points if point.hash not in outcomes]
    lost = 0
    with write_whole_file(folder / "sweep.json") as temporary:
        temporary.write_text(_json({**asked, "simrl_version": simrl.__version__}), encoding="utf-8")
    with write_whole_folder(folder / "table", TABLE_FILES) as temporary:
        try:
            with closing(executor.outcomes(missing)) as coming:
                for i, outcome in coming:
                    if isinstance(outcome, Lost):  # in the table, but not kept: the next sweep tries it again
                        lost += 1
                        outcome = {"error": outcome.message}
                    else:
                        write_outcome(folder, missing[i], outcome)
                    outcomes[missing[i].hash] = outcome
                    on_point()
        except KeyboardInterrupt as error:
            raise StoppedError(
                f"interrupted; {len(outcomes) - lost} of {len(plan.points)} points are kept in {folder}; the same command goes "
                "on from there"
            ) from error
        rows = table_rows(plan, outcomes)
        write_table(rows, temporary)
    return Swept(rows, len(missing))


def _path(folder: Path, point: Point) -> Path:
    return folder / "points" / point.hash[:2] / f"{point.hash}.json"


def read_outcome(folder: Path, point: Point) -> Outcome | None:
    """The outcome that is kept; None where there is none that can be read, and another may take its place. Raises `InputError`
    for a file that was never one."""
    path = _path(folder, point)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["outcome"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if _in_the_way(path):
            raise InputError(
                f"{path}: damaged, no outcome of a point; delete it and run the same command again"
            ) from error
        return None
    return kept if _is_outcome(kept) else None


def _in_the_way(path: Path) -> bool:
    """Whether something lies there that is no half-written outcome, so that none may take its place (`write_whole_file`)."""
    try:
        with path.open("rb") as file:
            return file.read(1) not in (b"", b"{")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a folder, or what may not be read
        return True


def _is_outcome(kept: Any) -> bool:
    """A row of plain values, or an error."""
    if not isinstance(kept, dict) or not kept.keys() <= {"row", "error"}:
        return False
    row, error = kept.get("row"), kept.get("error")
    if row is None:
        return isinstance(error, str)
    plain = isinstance(row, dict) and all(v is None or isinstance(v, str | int | float) for v in row.values())
    rate = row.get("samples_per_s") if plain else None
    return isinstance(rate, float) and 0 < rate < math.inf


def write_outcome(folder: Path, point: Point, outcome: Outcome) -> None:
    """Whole, or not at all."""
    with write_whole_file(_path(folder, point)) as temporary:
        temporary.write_text(_json({"inputs": point.document, "outcome": outcome}), encoding="utf-8")


def table_rows(plan: Plan, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """A row a point, in their order: where it stands, what it differs in, its metrics (None where it failed), its error.

    `speedup` is samples/s over the first point's that did not fail; `speedup_in_variant` over the first such one with the same
    variant, which is all that was varied but the system and its parameters.
    """
    metrics = list(dict.fromkeys(key for outcome in outcomes.values() for key in outcome.get("row", {})))
    first: dict[str | None, float] = {}
    rows = []
    for number, point in enumerate(plan.points):
        outcome = outcomes[point.hash]
        found = outcome.get("row", {})
        row: Row = {"point": number, "hash": point.hash}
        row |= {key: _plain(key, value_of(point.scenario, key)) for key in plan.keys}
        row["variant"] = ", ".join(
            f"{key}={row[key]}" for key in plan.keys if key != SYSTEM and not key.startswith(PARAMETER)
        )
        row |= {key: found.get(key) for key in metrics}
        rate = found.get("samples_per_s")
        for name, group in (("speedup", None), ("speedup_in_variant", row["variant"])):
            row[name] = None if rate is None else rate / first.setdefault(group, rate)
        row["error"] = outcome.get("error")
        rows.append(row)
    return rows


def _plain(key: str, value: Any) -> Any:
    """A file by its path from the current folder; lists and dictionaries as JSON."""
    if key in PATH_KEYS and isinstance(value, str):
        return Path(os.path.relpath(value)).as_posix()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def write_table(rows: Sequence[Row], folder: Path) -> None:
    """A Parquet dataset in an empty folder: a folder a system, all files with the same columns, of the same types."""
    names = [key for key in (rows[0] if rows else {}) if key != SYSTEM]
    schema = pa.schema([(name, _column_type([row[name] for row in rows])) for name in names])
    texts = [name for name in names if schema.field(name).type == pa.string()]
    by_system: dict[str, list[Row]] = {}
    for row in rows:
        by_system.setdefault(row[SYSTEM], []).append({**row, **{name: _text(row[name]) for name in texts}})
    for system, own in by_system.items():
        place = folder / f"{SYSTEM}={system}"
        place.mkdir()
        pq.write_table(pa.Table.from_pylist(own, schema=schema), place / "part-0.parquet", compression="zstd")


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _column_type(values: Sequence[Any]) -> pa.DataType:
    """That of all values that are there; text for what has no type in common."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds or kinds <= {int, float}:
        return pa.int64() if kinds == {int} else pa.float64()
    return pa.bool_() if kinds == {bool} else pa.string()


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
