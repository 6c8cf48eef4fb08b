"""Outcomes of points: looked up in a folder, else simulated and kept there; and the ranges of their
rows over what their inputs leave open.

Invariant: an outcome lands whole in the folder, under the hash of all that it depends on, as soon
as it is known; the next search or sweep, also after a kill, gets it from there. A point that this
machine could not simulate (`LostTask`) is an error now and is tried again by the next run. Without a
folder, outcomes are kept in memory, and no hash is computed. The speed-ups of a range are of two
runs under one fit, so what all rows share cancels.

    points/3f/3fa2….json    the hashed data, and the row or the error
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from simrl.errors import InputError, StoppedError
from simrl.files import BROKEN_SEAL, is_broken, require_no_device, sealed, write_whole_file
from simrl.scenario.calibration import open_lines, other_fits
from simrl.scenario.model import Scenario
from simrl.simulate.cache import InputCache
from simrl.study.executors import Executor, Here, LostTask, Processes, each
from simrl.study.point import Digests, Outcome, Point, Row

A = TypeVar("A")
T = TypeVar("T")
log = logging.getLogger(__name__)


class Outcomes:
    """Outcomes on demand.

    `known` has them by the point's hash, without a folder by its text. `simulated` counts the
    simulated ones, `found` those from the folder, `lost` those that this machine could not
    simulate. `on_point` is called for each point that becomes known, `on_phase` with the name of
    each phase of a search and the most points that it simulates. `of_all` (" of 40") gives the
    number of all points, if it is known.
    """

    def __init__(
        self,
        folder: Path | None,
        executor: Executor,
        on_point: Callable[[], None] = lambda: None,
        known: Mapping[str, Outcome] | None = None,
        of_all: str = "",
        on_phase: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        self.folder, self.on_point, self.on_phase = folder, on_point, on_phase
        self.known: dict[str, Outcome] = dict(known or {})
        self.simulated = self.found = self.lost = 0
        self.digests, self.phases_of = Digests(), ""
        self._executor, self._of_all = executor, of_all

    def of(self, points: Sequence[Point]) -> list[Outcome]:
        """Return the outcomes in the order of the points. Raise `StoppedError` at Ctrl-C; the
        points under way are lost."""
        keys = [point.text if self.folder is None else point.hash for point in points]
        missing = {
            key: point for key, point in zip(keys, points, strict=True) if key not in self.known
        }
        for key, point in missing.items():
            if self.folder is not None and (kept := read_outcome(self.folder, point)) is not None:
                self._know(key, kept)
                self.found += 1
        try:
            self._simulate({key: point for key, point in missing.items() if key not in self.known})
        except KeyboardInterrupt as error:
            if self.folder is None:
                raise
            raise self.interrupted() from error
        return [self.known[key] for key in keys]

    def rows(self, scenarios: Sequence[Scenario]) -> list[Row]:
        """Return the row of each scenario. Raise `InputError` for one that cannot be simulated."""
        outcomes = self.of([Point(scenario, self.digests) for scenario in scenarios])
        for outcome in outcomes:
            if "error" in outcome:
                raise InputError(outcome["error"], outcome.get("cause", ""))
        return [outcome["row"] for outcome in outcomes]

    def _simulate(self, points: Mapping[str, Point]) -> None:
        if not points:
            return
        keys = list(points)
        with closing(self._executor.outcomes(list(points.values()))) as coming:
            for i, outcome in coming:
                if isinstance(outcome, LostTask):
                    self.lost += 1
                    outcome = {"error": outcome.message}
                elif self.folder is not None:
                    write_outcome(self.folder, points[keys[i]], outcome)
                self._know(keys[i], outcome)
                self.simulated += 1

    def each(self, work: Callable[[A], T], tasks: Sequence[A]) -> list[T]:
        """Return `work(task)` of each task, from the processes that simulate on this machine, or
        from this one."""
        pool = self._executor if isinstance(self._executor, Processes) else None
        results: dict[int, T] = {}
        for i, result in each(work, tasks, pool):
            results[i] = result
            self.on_point()
        return [results[i] for i in range(len(tasks))]

    def phase(self, name: str, most: int) -> None:
        """Report that a phase begins, and the most points that it simulates."""
        self.on_phase(f"{self.phases_of}{name}", most)

    def start(self, tasks: int) -> None:
        """Start the processes that this number of tasks can use, if there are processes."""
        if isinstance(self._executor, Processes):
            self._executor.start(tasks)

    def interrupted(self) -> StoppedError:
        """Return the message at Ctrl-C."""
        kept = f"{len(self.known) - self.lost}{self._of_all}"
        return StoppedError(
            f"interrupted; {kept} points are kept in {self.folder}; the same command goes on from there"
        )

    def _know(self, key: str, outcome: Outcome) -> None:
        self.known[key] = outcome
        self.on_point()


@contextmanager
def simulating(
    jobs: int, folder: Path | None = None, inputs: InputCache | None = None
) -> Iterator[Outcomes]:
    """Yield outcomes that up to `jobs` processes simulate, with one this process. `inputs` may have
    a trace that no file holds."""
    if jobs > 1:
        with Processes(jobs, stay=True, inputs=inputs) as processes:
            yield Outcomes(folder, processes)
        return
    here = Here()
    if inputs is not None:
        here.inputs = inputs
    yield Outcomes(folder, here)


def with_ranges(
    scenarios: Sequence[Scenario],
    rows: Sequence[Row],
    rows_of: Callable[[Sequence[Scenario]], Sequence[Row]],
    alike: Path | None = None,
) -> list[Row]:
    """Return the rows of scenarios with `left_open`, lines on the calibration; `ranges`, the ends of
    the speed-up over the first row by cause (other fits; a trace whose responses of a prompt are
    `alike`); and `step_s_range`, the ends of the seconds of a step over all of them. `rows_of`
    simulates."""
    others = {
        "fits": [other_fits(scenario) for scenario in scenarios],
        "likeness": [
            [scenario.with_fields("workload", trace=str(alike))] if alike else []
            for scenario in scenarios
        ],
    }
    further = iter(
        rows_of([s for of_rows in others.values() for of_row in of_rows for s in of_row])
    )
    runs = {
        cause: [
            [row, *(next(further) for _ in of_row)]
            for row, of_row in zip(rows, of_rows, strict=True)
        ]
        for cause, of_rows in others.items()
    }
    ranged = []
    for i, row in enumerate(rows):
        lines = open_lines(scenarios[i].model_dump())
        ranges = {
            cause: (min(speedups), max(speedups))
            for cause, of_rows in runs.items()
            if len(
                speedups := [
                    a["samples_per_s"] / b["samples_per_s"]
                    for a, b in zip(of_rows[i], of_rows[0], strict=False)
                ]
            )
            > 1
        }
        step_s = [run["step_s"] for of_rows in runs.values() for run in of_rows[i]]
        ends = (min(step_s), max(step_s)) if ranges else None
        ranged.append({**row, "left_open": lines, "ranges": ranges, "step_s_range": ends})
    return ranged


def read_outcome(folder: Path, point: Point) -> Outcome | None:
    """Return the outcome in the folder; None where there is none. One that is damaged or was
    changed is said so, and another takes its place."""
    path = _path(folder, point)
    require_no_device(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kept = None if is_broken(data) else data["outcome"]
    except (
        FileNotFoundError,
        NotADirectoryError,
    ):  # the latter is reported where the point is written
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        kept = None
    if _is_outcome(kept):
        return kept
    log.warning(f"{path}: {BROKEN_SEAL}; the point is simulated again")
    return None


def write_outcome(folder: Path, point: Point, outcome: Outcome) -> None:
    """Write the outcome whole, or not at all."""
    write_json(
        _path(folder, point), sealed({"inputs": point.document, "outcome": outcome}), own=True
    )


def write_json(path: Path, data: Any, own: bool = False) -> None:
    """Write data as a file of JSON, whole or not at all; any file is replaced if its name is
    simrl's `own`."""
    with write_whole_file(path, own) as temporary:
        temporary.write_text(
            json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _path(folder: Path, point: Point) -> Path:
    return folder / "points" / point.hash[:2] / f"{point.hash}.json"


def _is_outcome(kept: Any) -> bool:
    """Return whether this is a row of plain values, or an error."""
    match kept:
        case {"row": {"samples_per_s": float(rate), **others}, **rest}:
            plain = all(
                value is None or isinstance(value, str | int | float) for value in others.values()
            )
            return plain and 0 < rate < math.inf and rest.keys() <= {"error"}
        case {"error": str(), **rest}:
            return rest.keys() <= {"cause"} and isinstance(rest.get("cause", ""), str)
    return False
