"""A sweep: many points, each simulated at most once, and one table of them.

Invariants: a sweep that was killed, or that shares points with an earlier one in the same folder, simulates only what is
missing (`Outcomes`). The table is a pure function of the points and their outcomes: rows in the order of the points, no time
of the clock, the same bytes from any executor.

    points/                                 the outcomes
    table/system.name=areal/part-0.parquet  a Parquet dataset, partitioned by system
    sweep.json                              the arguments of the sweep
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

import simrl
from simrl import files
from simrl.errors import InputError
from simrl.files import write_whole_folder
from simrl.profile.model_shape import model_shape
from simrl.result.metrics import speedups
from simrl.scenario.load import PARAMETER
from simrl.scenario.model import Scenario
from simrl.study.executors import Executor
from simrl.study.grid import SYSTEMS, Between, Varied, resolved, value_of
from simrl.study.point import Digests, Outcome, Point, Row
from simrl.study.store import Outcomes, read_outcome, with_ranges, write_json
from simrl.systems.recipes import make_system

SYSTEM = "system.name"
PATH_KEYS = (
    *("workload.trace", "evaluation.lengths.trace", "profile.path", "judge.profile.path"),
    *("profile.tau", "speculation.draft_profile"),
)
TABLE_FILES = re.compile(r"system\.name=\w+/part-0\.parquet")


@dataclass(frozen=True)
class SweepPlan:
    """The points, each once, and the keys that they differ in."""

    points: Sequence[Point]
    keys: Sequence[str]
    combinations: int  # of which several may lead to one point


class Swept(NamedTuple):
    """The rows of a sweep, and the fastest one with its range over fits that do as well
    (`with_ranges`)."""

    rows: list[Row]
    simulated: int  # of them now; the others were there
    lost: int = 0  # that this machine could not simulate
    fastest: Sequence[Row] = ()


def plan(
    varied: Varied, sample: int | None, seed: int, on_point: Callable[[], None] = lambda: None
) -> SweepPlan:
    """Return the points of a variation. Raise `InputError` for values that no scenario can have: an
    unknown key, a value out of its range, an unknown name. Values that only one combination cannot
    have fail when it is simulated, and the error stands in its row."""
    varied.require_parameters()
    digests, checked = Digests(), set[tuple[str, str, str]]()
    points: dict[str, Point] = {}
    combinations = 0
    for settings in varied.combinations(sample, seed):
        scenario = resolved(varied.file, settings)
        require_names(scenario, checked)
        point = Point(scenario, digests)
        points.setdefault(point.hash, point)
        combinations += 1
        on_point()
    return SweepPlan(list(points.values()), _keys(varied), combinations)


def require_names(scenario: Scenario, checked: set[tuple[str, str, str]]) -> None:
    """Raise `InputError` for an unknown system, parameter, model or GPU; `checked` are the
    combinations that exist."""
    system = scenario.system
    names = (
        system.model_dump_json(),
        scenario.model,
        f"{scenario.cluster.gpu} {scenario.cluster.train}",
    )
    if names in checked:
        return
    try:
        make_system(system.name, system.parameters)
        model_shape(scenario.model)
        _ = scenario.cluster.rollout_kind, scenario.cluster.train_kind
    except InputError as error:
        raise InputError(f"{scenario.file}: {error}") from error
    checked.add(names)


def _keys(varied: Varied) -> list[str]:
    """Return the keys that the points differ in, always with the system."""
    several = [
        d.keys for d in varied.dimensions if isinstance(d, Between) or len(d.alternatives) > 1
    ]
    keys = [SYSTEM, *(key for keys_of_one in several for key in keys_of_one if key != SYSTEMS)]
    systems = [setting.value for setting in varied.settings(SYSTEMS)]
    if len(systems) > 1:
        keys += [
            f"{PARAMETER}{key}" for entry in systems if isinstance(entry, dict) for key in entry
        ]
    return list(dict.fromkeys(keys))


def kept(plan: SweepPlan, folder: Path) -> dict[str, Outcome]:
    """Return the outcomes in the folder, by hash, without those that cannot be read."""
    return {
        point.hash: outcome
        for point in plan.points
        if (outcome := read_outcome(folder, point)) is not None
    }


def run(
    plan: SweepPlan,
    outcomes: Mapping[str, Outcome],
    folder: Path,
    executor: Executor,
    arguments: Mapping[str, Any],
    on_point: Callable[[], None] = lambda: None,
) -> Swept:
    """Simulate the points without an outcome, keep each in the folder, and write the table.
    `on_point` is called for each. Raise `StoppedError` at Ctrl-C, when only the points under way
    are lost, and `InputError` for a folder with other content.
    """
    store = Outcomes(folder, executor, on_point, outcomes, f" of {len(plan.points)}")
    write_json(folder / "sweep.json", {**arguments, "simrl_version": simrl.__version__})
    with write_whole_folder(folder / "table", TABLE_FILES) as temporary:
        store.of(plan.points)
        rows = table_rows(plan, store.known)
        write_table(rows, temporary)
    counts = store.simulated, store.lost
    done = [row for row in rows if row["error"] is None]
    fastest = sorted(done, key=lambda row: -row["samples_per_s"])[:1]
    scenarios = [plan.points[row["point"]].scenario for row in fastest]
    return Swept(rows, *counts, with_ranges(scenarios, fastest, store.rows))


def table_rows(plan: SweepPlan, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Return a row of each point, in their order: its place, the varied keys, its metrics (None
    where it failed), its error.

    `speedup` is samples/s over the first point that did not fail; `speedup_in_variant` over the
    first such point of its variant, which is all varied keys but the system and its parameters.
    """
    metrics = list(
        dict.fromkeys(key for outcome in outcomes.values() for key in outcome.get("row", {}))
    )
    rows = []
    for number, point in enumerate(plan.points):
        metrics_of = outcomes[point.hash].get("row", {})
        row: Row = {"point": number, "hash": point.hash}
        row |= {key: _plain(key, value_of(point.scenario, key)) for key in plan.keys}
        row["variant"] = ", ".join(
            f"{key}={row[key]}"
            for key in plan.keys
            if key != SYSTEM and not key.startswith(PARAMETER)
        )
        row |= {key: metrics_of.get(key) for key in metrics}
        rows.append(row)
    errors = [outcomes[point.hash].get("error") for point in plan.points]
    return [
        {**row, **over_first, "error": error}
        for row, over_first, error in zip(rows, speedups(rows), errors, strict=True)
    ]


def _plain(key: str, value: Any) -> Any:
    """Return a file as its path from the current folder, lists and dictionaries as JSON."""
    if key in PATH_KEYS and isinstance(value, str):
        return Path(os.path.relpath(value)).as_posix()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def write_table(rows: Sequence[Row], folder: Path) -> None:
    """Write a Parquet dataset into an empty folder: a folder for each system, with the columns and
    types of all rows in every file."""
    names = [key for key in (rows[0] if rows else {}) if key != SYSTEM]
    schema = pa.schema([(name, _column_type([row[name] for row in rows])) for name in names])
    texts = [name for name in names if schema.field(name).type == pa.string()]
    by_system: dict[str, list[Row]] = {}
    for row in rows:
        by_system.setdefault(row[SYSTEM], []).append(
            {**row, **{name: _text(row[name]) for name in texts}}
        )
    for system, rows_of_system in by_system.items():
        place = folder / f"{SYSTEM}={system}"
        place.mkdir()
        files.write_table(
            pa.Table.from_pylist(rows_of_system, schema=schema), place / "part-0.parquet"
        )


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _column_type(values: Sequence[Any]) -> pa.DataType:
    """Return the type of all present values; text for values without a common type."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds or kinds <= {int, float}:
        return pa.int64() if kinds == {int} else pa.float64()
    return pa.bool_() if kinds == {bool} else pa.string()
