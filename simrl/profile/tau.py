"""RhymeRL's τ as a measured table (arXiv 2508.18588 §6.4: "looking up the table obtained from
pre-profiling"): the seconds of a ranking group by its representative length and its workers.

    model,gpu,tp,source,length_tokens,workers,responses,accept_length,seconds
    qwen3-8b,h100,2,simrl measure --tau: vLLM 0.32,512,1,64,1,9.1

`workers` generate `responses` of `length_tokens` tokens, and the last response ends after
`seconds`; a pass yields `accept_length` tokens of a response, which is how τ "considers HistoSpec's
current speculation information". Columns that may be missing: the last two of these, where rows
hold for any group, and those before `length_tokens`.

Invariant: at the place of a row, τ is its seconds. The rows are a full grid; between them, τ is
linear in tokens, responses and accept length, and in 1 / workers, as a worker's share of the
responses is. Beyond them it goes on along the last two rows, never below 0, and
`MeasuredTau.source` says so; a column with one value counts for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from simrl.errors import refuse
from simrl.profile.drafted import Drafted
from simrl.profile.interpolation import Floats

OPTIONAL, REQUIRED = ("accept_length", "responses"), ("length_tokens", "workers")
AXES, WHOLE = (*OPTIONAL, *REQUIRED), ("responses", "workers")
FACTS = ("model", "gpu", "tp", "source")


@dataclass(frozen=True)
class MeasuredTau:
    """A table of τ: its file, the facts beside its rows, the values of each of `AXES` (NaN of one
    that it lacks), and the seconds at all of them. `asked` are the least and the largest value of
    each axis so far."""

    path: str
    facts: dict[str, str]
    grids: tuple[Floats, ...]
    seconds: Floats
    asked: dict[str, tuple[float, float]] = field(default_factory=dict)

    def table(
        self,
        lengths_tokens: Sequence[ArrayLike],
        samples: Sequence[int],
        max_workers: int,
        drafted: Sequence[Drafted] | None = None,
    ) -> Floats:
        """Return the seconds of each group with 1 … `max_workers` workers, by the mean of its
        lengths, as `RolloutTimes.table`."""
        yields = [drafts.tokens for drafts in drafted or [Drafted()] * len(samples)]
        means = [float(np.asarray(lengths, dtype=np.float64).mean()) for lengths in lengths_tokens]
        rows = np.zeros((len(samples), max_workers))
        for i, place in enumerate(zip(yields, samples, means, strict=True)):
            seconds = self.seconds
            for grid, value in zip(self.grids, place, strict=False):
                seconds = _along(grid, seconds, value)
            rows[i] = _along(-1 / self.grids[-1], seconds, -1 / np.arange(1.0, max_workers + 1))
        for axis, values in zip(
            AXES, [yields, [*map(float, samples)], means, [1.0, max_workers]], strict=True
        ):
            least, most = self.asked.get(axis, (np.inf, -np.inf))
            self.asked[axis] = min(least, *values), max(most, *values)
        return np.maximum(rows, 0.0)

    @property
    def source(self) -> str:
        """The file, its source, and what was extrapolated so far."""
        asked = (
            (axis, grid, *self.asked.get(axis, (grid[0],) * 2))
            for axis, grid in zip(AXES, self.grids, strict=True)
        )
        beyond = [
            f"extrapolated: {axis} {least:,.5g} to {most:,.5g}, measured {grid[0]:,.5g} to {grid[-1]:,.5g}"
            for axis, grid, least, most in asked
            if least < grid[0] or most > grid[-1]
        ]
        return "; ".join(filter(None, [Path(self.path).name, self.facts.get("source"), *beyond]))


def _along(grid: Floats, values: Floats, at: Any) -> Floats:
    """Return `values`, of which the first axis is at `grid`, linearly at a place, also beyond the
    grid. A grid of one value holds everywhere."""
    if grid.size < 2:
        return values[0]
    i = np.clip(np.searchsorted(grid, at) - 1, 0, grid.size - 2)
    return values[i] + (at - grid[i]) / (grid[i + 1] - grid[i]) * (values[i + 1] - values[i])


def read_tau(path: str | Path, **expected: object) -> MeasuredTau:
    """Read a table of τ. Raise `InputError` for a file that is none, a row with a value that cannot
    be, two rows of one place, places without a row, and a table of another engine than
    `expected`, by the names in `FACTS`."""
    from simrl.profile.profilers.kernel_tables import read_csv  # pandas takes 0.3 s to import

    table = read_csv(Path(path), REQUIRED, ("seconds",), OPTIONAL)
    axes = [axis for axis in AXES if axis in table]
    columns = table[[*axes, "seconds"]].to_numpy(float)
    part = [0.0 if axis in WHOLE else 1.0 for axis in (*axes, "seconds")]
    wrong = (columns < [*[1.0] * len(axes), 1e-9]) | (columns % 1 > part)
    grids = [np.unique(columns[:, i]) for i in range(len(axes))]
    seconds = {tuple(place): value for *place, value in columns.tolist()}
    holes = [place for place in product(*grids) if place not in seconds]
    facts = {
        fact: str(table[fact][0]) for fact in FACTS if fact in table and table[fact].notna().all()
    }
    refuse(
        *(
            (
                True,
                f"{path}: row {row + 2}: {[*axes, 'seconds'][i]} is {columns[row, i]:g}; give seconds above 0, and all else "
                "from 1, workers and responses whole",
            )
            for row, i in np.argwhere(wrong)[:1]
        ),
        *(
            (
                True,
                f"{path}: no row with {', '.join(f'{axis} {value:g}' for axis, value in zip(axes, hole, strict=True))}; rows "
                "are a full grid: measure it, or leave out the others of its kind",
            )
            for hole in holes[:1]
        ),
        *(
            (
                grid.size < 2,
                f"{path}: {axis} is {grid[0]:g} in all rows; τ needs two values of it or more: measure another",
            )
            for axis, grid in zip(axes, grids, strict=True)
            if axis in REQUIRED
        ),
        *(
            (
                len(set(map(str, table[fact]))) > 1,
                f"{path}: {fact} differs between rows; a table is of one engine: divide it",
            )
            for fact in facts
        ),
        *(
            (
                facts.get(fact, str(value)).lower() != str(value).lower(),
                f"{path}: τ of {fact} {facts.get(fact)}, not of {value}; name the table that was measured there, or measure it",
            )
            for fact, value in expected.items()
        ),
    )
    every = tuple(grids[axes.index(axis)] if axis in axes else np.full(1, np.nan) for axis in AXES)
    at_places = np.reshape([seconds[p] for p in product(*grids)], [grid.size for grid in every])
    return MeasuredTau(str(path), facts, every, at_places)
