"""Outcomes of points on demand: looked up in a folder, else simulated and kept there.

Invariant: what was simulated is kept at once, under the hash of all that it depends on; who asks for it again, also after a
kill, gets it from the folder. What this machine could not simulate is an error now and is tried again by the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from simrl.errors import StoppedError
from simrl.executors import Executor, Lost
from simrl.points import Outcome, Point
from simrl.sweeps import read_outcome, write_outcome


class Outcomes:
    """Of points, in the order in which they are asked for. `simulated` counts those of this process, `found` those that were in
    the folder; `on_point` hears of each point that is there."""

    def __init__(self, folder: Path, executor: Executor, on_point: Callable[[], None] = lambda: None) -> None:
        self.folder, self.on_point = folder, on_point
        self.simulated = self.found = 0
        self._executor = executor
        self._known: dict[str, Outcome] = {}

    def of(self, points: Sequence[Point]) -> list[Outcome]:
        """Raises `StoppedError` at Ctrl-C, which loses no more than the points under way."""
        missing: dict[str, Point] = {}
        for point in points:
            if point.hash in self._known or point.hash in missing:
                continue
            kept = read_outcome(self.folder, point)
            if kept is None:
                missing[point.hash] = point
            else:
                self._know(point, kept)
                self.found += 1
        todo = list(missing.values())
        try:
            if todo:
                with closing(self._executor.outcomes(todo)) as coming:
                    for i, outcome in coming:
                        if isinstance(outcome, Lost):
                            outcome = {"error": outcome.message}
                        else:
                            write_outcome(self.folder, todo[i], outcome)
                        self._know(todo[i], outcome)
                        self.simulated += 1
        except KeyboardInterrupt as error:
            raise self.interrupted() from error
        return [self._known[point.hash] for point in points]

    def interrupted(self) -> StoppedError:
        """What is told at Ctrl-C."""
        return StoppedError(
            f"interrupted; {len(self._known)} points are kept in {self.folder}; the same command goes on from there"
        )

    def _know(self, point: Point, outcome: Outcome) -> None:
        self._known[point.hash] = outcome
        self.on_point()
