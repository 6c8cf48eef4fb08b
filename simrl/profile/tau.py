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
responses is. Beyond them it goes on along the last two rows, never below 0; a column with one value
counts for all. `MeasuredTau.source` says so in both cases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from simrl.errors import refuse
from simrl.profile.drafted import Drafted
from simrl.profile.interpolation import Floats

if TYPE_CHECKING:
    import pandas as pd

OPTIONAL, REQUIRED = ("accept_length", "responses"), ("length_tokens", "workers")
AXES, WHOLE = (*OPTIONAL, *REQUIRED), ("responses", "workers")
FACTS = ("model", "gpu", "tp", "source")
FAR = 2.0  # times the only value of a column, from which on a warning is due
REMEDY = "simrl measure --tau writes such a table, docs/examples/tau.csv is one"


@dataclass(frozen=True)
class MeasuredTau:
    """A table of τ: its file, the facts beside its rows, the values of each of `AXES` (NaN of one
    that it lacks), and the seconds at all of them. `spans` are the least and the largest value of
    each axis that τ was read at so far."""

    path: str
    facts: dict[str, str]
    grids: tuple[Floats, ...]
    seconds: Floats
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)

    def table(
        self,
        lengths_tokens: Sequence[ArrayLike],
        samples: Sequence[int],
        max_workers: int,
        drafted: Sequence[Drafted] | None = None,
        together: int = 1,
    ) -> Floats:
        """Return the seconds of each group with 1 … `max_workers` workers, by the mean of its
        lengths, as `RolloutTimes.table`. Workers beyond the prompts of a group, of `together`
        responses each, have no part of it and make it no shorter."""
        yields = [drafts.tokens for drafts in drafted or [Drafted()] * len(samples)]
        means = [float(np.asarray(lengths, dtype=np.float64).mean()) for lengths in lengths_tokens]
        workers = np.minimum(
            np.arange(1.0, max_workers + 1),
            [[-(-of_group // together)] for of_group in samples],
        )
        rows = np.zeros(workers.shape)
        for i, place in enumerate(zip(yields, samples, means, strict=True)):
            seconds = self.seconds
            for grid, value in zip(self.grids, place, strict=False):
                seconds = _along(grid, seconds, value)
            rows[i] = _along(-1 / self.grids[-1], seconds, -1 / workers[i])
        for axis, values in zip(
            AXES, [yields, [*map(float, samples)], means, [1.0, workers.max()]], strict=True
        ):
            least, most = self.spans.get(axis, (np.inf, -np.inf))
            self.spans[axis] = min(least, *values), max(most, *values)
        return np.maximum(rows, 0.0)

    @property
    def source(self) -> str:
        """Name the file, its source, and the values beyond the rows at which τ was read so far."""
        beyond = [
            f"{axis} {least:,.5g} to {most:,.5g} taken as {grid[0]:,.5g}, the only value in the table"
            + ", more than 2 times off" * _far(grid, least, most)
            if grid.size < 2
            else f"extrapolated: {axis} {least:,.5g} to {most:,.5g}, measured {grid[0]:,.5g} to {grid[-1]:,.5g}"
            for axis, grid, least, most in self._spans()
            if least < grid[0] or most > grid[-1]
        ]
        return "; ".join(filter(None, [Path(self.path).name, self.facts.get("source"), *beyond]))

    def warnings(self) -> list[str]:
        """Return sentences on what makes the plans doubtful: τ that rises with workers, and groups
        far from the only value of a column."""
        rises = np.argwhere(np.diff(self.seconds) > 0)[:1].tolist()
        return [
            *(
                f"τ rises with workers in {Path(self.path).name}: {self.seconds[*place, k]:g} s on {self.grids[-1][k]:g}, "
                f"{self.seconds[*place, k + 1]:g} s on {self.grids[-1][k + 1]:g}"
                + "".join(
                    f", {axis} {grid[i]:g}"
                    for axis, grid, i in zip(AXES, self.grids, place, strict=False)
                    if grid.size > 1
                )
                + "; measure both again, or leave the larger number out."
                for *place, k in rises
            ),
            *(
                f"{Path(self.path).name} has {axis} {grid[0]:,.5g} in all rows, the groups have {least:,.5g} to {most:,.5g}, "
                f"and τ is as of {grid[0]:,.5g}: add rows of another number."
                for axis, grid, least, most in self._spans()
                if _far(grid, least, most)
            ),
        ]

    def _spans(self) -> Iterator[tuple[str, Floats, float, float]]:
        """Yield each axis, its values in the table, and the least and largest that were read."""
        for axis, grid in zip(AXES, self.grids, strict=True):
            yield axis, grid, *self.spans.get(axis, (grid[0], grid[0]))


def _far(grid: Floats, least: float, most: float) -> bool:
    """Return whether values are far from the only one of a column."""
    return bool(grid.size < 2 and (least * FAR < grid[0] or most > grid[0] * FAR))


def _along(grid: Floats, values: Floats, at: Any) -> Floats:
    """Return `values`, of which the first axis is at `grid`, linearly at a place, also beyond the
    grid. A grid of one value holds everywhere."""
    if grid.size < 2:
        return values[0]
    i = np.clip(np.searchsorted(grid, at) - 1, 0, grid.size - 2)
    return values[i] + (at - grid[i]) / (grid[i + 1] - grid[i]) * (values[i + 1] - values[i])


def read_tau(path: str | Path, **expected: object) -> MeasuredTau:
    """Read a table of τ. Raise `InputError` for a file that is none, a row with a value that cannot
    be, an unknown column, two rows of one place, places without a row, and a table of another
    engine than `expected`, by the names in `FACTS`."""
    from simrl.profile.profilers.kernel_tables import read_csv  # pandas takes 0.3 s to import

    table = read_csv(Path(path), REQUIRED, ("seconds",), OPTIONAL, REMEDY, FACTS)
    axes = [axis for axis in AXES if axis in table]
    columns = table[[*axes, "seconds"]].to_numpy(float)
    part = [0.0 if axis in WHOLE else 1.0 for axis in (*axes, "seconds")]
    wrong = (columns < [*[1.0] * len(axes), 1e-9]) | (columns % 1 > part)
    grids = [np.unique(columns[:, i]) for i in range(len(axes))]
    seconds = {tuple(place): value for *place, value in columns.tolist()}
    full = len(seconds) == prod(grid.size for grid in grids)
    hole = () if full else next(place for place in product(*grids) if place not in seconds)
    columns_of_facts = {
        fact: _texts(table[fact]) for fact in FACTS if fact in table and table[fact].notna().any()
    }
    facts = {fact: texts[0] for fact, texts in columns_of_facts.items()}
    refuse(
        *(
            (
                "" in texts,
                f"{path}: {fact} is blank in some rows, or is no number; a table is of one engine: fill it in, or leave "
                "the column out",
            )
            for fact, texts in columns_of_facts.items()
        ),
        *(
            (
                True,
                f"{path}: row {row + 2}: {[*axes, 'seconds'][i]} is {columns[row, i]:g}; give seconds above 0, and all else "
                "from 1, workers and responses whole",
            )
            for row, i in np.argwhere(wrong)[:1]
        ),
        (
            hole,
            f"{path}: no row with {', '.join(f'{axis} {value:g}' for axis, value in zip(axes, hole, strict=False))}; rows "
            "are a full grid: measure it, or leave out the others of its kind",
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
                len(set(texts)) > 1,
                f"{path}: {fact} differs between rows; a table is of one engine: divide it",
            )
            for fact, texts in columns_of_facts.items()
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


def _texts(column: pd.Series) -> list[str]:
    """Return the cells of a column of facts as texts, `tp` as a whole number if it is one (2.0 as 2),
    "" for a blank cell, or one that is no number."""
    if column.name == "tp":
        number = re.compile(r"(\d+)(\.0*)?")
        cells = [number.fullmatch(str(cell).strip()) for cell in column]
        return [cell[1] if cell else "" for cell in cells]
    return column.fillna("").map(str).str.strip().tolist()
