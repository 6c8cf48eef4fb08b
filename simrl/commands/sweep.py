"""`simrl sweep`: many scenarios, one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from simrl.commands import options as o
from simrl.commands.command import command
from simrl.commands.view import View, frame, place
from simrl.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from simrl.show.style import Picture
    from simrl.study.point import Outcome
    from simrl.study.sweep import SweepPlan, Swept

FASTEST = ("point", "left_open", "ranges", "step_s_range")  # of its row, in --json
SPEED_OVER_S = 600.0  # points of a grid take very different times


@dataclass(frozen=True, repr=False)
class Sweep(View):
    """Many scenarios, a row per point. A point that cannot be executed is a row with its `error`.
    `folder` has the table, if one was named."""

    plan: SweepPlan
    swept: Swept
    outcomes: Mapping[str, Outcome]
    asked: Mapping[str, Any]
    folder: Path | None = None

    def __repr__(self) -> str:
        return f"<Sweep of {len(self.swept.rows)} points over {', '.join(self.plan.keys)}>"

    def _show(self, console: Console) -> None:
        from simrl.show.tables.sweep import print_sweep

        print_sweep(self.plan, self.swept, console)

    def json(self) -> Any:
        """Return what `--json` prints."""
        errors = {str(row["point"]): row["error"] for row in self._failed}
        numbers = {
            "points": len(self.rows),
            "simulated": self.swept.simulated,
            "failed": len(errors),
            "errors": errors,
            "fastest": [{key: row[key] for key in FASTEST} for row in self.swept.fastest],
        }
        return {"table": str(self.folder / "table") if self.folder else None, **numbers}

    def check(self) -> None:
        """Raise `InputError` if all points failed."""
        if len(self._failed) == len(self.rows) and not self.lost:
            raise InputError(
                f"all {len(self.rows)} points failed; the first: {self.rows[0]['error']}"
            )

    @property
    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """The rows of the Parquet table of `simrl sweep`, a dictionary per point."""
        return tuple(self.swept.rows)

    @property
    def _failed(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["error"] is not None]

    @property
    def table(self) -> pd.DataFrame:
        """A row per point: what varies, under its own key, and the columns of a comparison."""
        return frame(self.swept.rows)

    def figure(
        self,
        value: str = "samples_per_s",
        x: str | None = None,
        y: str | None = None,
        band: str | None = None,
    ) -> Picture:
        """Draw a column over the keys that vary: lines over one (`x`), a map over two (`x` and
        `y`). With `band`, a key such as "seed", lines are means over its values, between the least
        and the largest; bars add simrl's error of a step. Raise `InputError` for a key that does
        not vary."""
        from simrl.show.figures.sweep import sweep_figure

        return sweep_figure(self.swept.rows, self.plan.keys, value, x, y, band)

    def save(self, folder: str | Path) -> Path:
        """Write the files of `simrl sweep` and return the folder; a repeated sweep in this folder
        simulates nothing again."""
        from simrl.study.executors import Here
        from simrl.study.store import write_outcome
        from simrl.study.sweep import run

        folder = Path(folder)
        for point in self.plan.points:
            if point.hash in self.outcomes:
                write_outcome(folder, point, self.outcomes[point.hash])
        run(self.plan, dict(self.outcomes), folder, Here(), self.asked)
        return folder

    def report(self, path: str | Path) -> Path:
        """Write the page that `simrl report` makes of a sweep, and return its path; errors as in
        `Comparison.report`."""
        from simrl.files import temporary_folder
        from simrl.show.report.page import write_report

        with temporary_folder() as folder:
            write_report(self.save(folder), Path(path))
        return Path(path)


Zips = Annotated[
    list[str] | None,
    typer.Option(
        "--zip",
        help="keys that vary together, as KEY,KEY; may be repeated. All other keys are combined",
    ),
]
SampleSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="number of combinations to draw, in place of all; the range 0.5..0.9 is then any number in it",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        help="a Ray cluster in place of local processes: 'auto' (the running one), HOST:PORT, or 'local' (starts one); all "
        "nodes need one version of simrl"
    ),
]


@command
def sweep(
    workload: o.Workload,
    values: o.Values = None,
    systems: o.Systems = None,
    *,
    overrides: Any = None,
    zips: Zips = None,
    sample: SampleSize = None,
    seed: Annotated[
        int, typer.Option(min=0, help="seed of the draw (seed=… sets the seed of the scenarios)")
    ] = 0,
    jobs: o.Jobs = o.JOBS,
    ray: Ray = None,
    folder: o.Folder = None,
    **setup: Unpack[o.Setup],
) -> Sweep:
    """Simulate every combination of values, with all systems of a scenario; write one Parquet table, a row per point.

    Every field of a scenario can vary; the values are combined with the systems of the scenario and with its own `vary`. A
    point that is already in the folder is not simulated again, so a sweep that was stopped continues, also with more values. A
    point that cannot be executed is a row with its error.
    \f
    `values` may be a dictionary of lists by dotted key, {"cluster.gpus": [64, 128], "system.eta": range(5)}; a text in it is
    read as on the command line, "64,128", "0..4". `compare` describes the other arguments. Raises `InputError` for a value
    that no scenario can have.

    >>> import simrl
    >>> swept = simrl.sweep("experiments/quickstart.yaml", {"system.eta": [1, 4]}, ["areal"], gpus=16, steps=4, warmup_steps=1)
    >>> swept.table["system.eta"].tolist()
    [1, 4]
    """
    from simrl.commands.workload import (
        dimensions,
        fixed,
        folder_or_temporary,
        open_workload,
        report_overruled,
        texts_of,
    )
    from simrl.scenario.load import PARAMETER
    from simrl.study.executors import Executor, Here, Processes, RayCluster
    from simrl.study.grid import cross
    from simrl.study.progress import compile_kernels
    from simrl.study.sweep import kept, plan, run

    opened = open_workload("sweep", workload, systems, overrides, setup, values)
    varied_values = dimensions(values)
    parameters = fixed(
        [setting for setting in opened.settings if setting.key.startswith(PARAMETER)]
    )
    with opened.on_disk() as on_disk:
        varied = cross(on_disk.file, parameters | varied_values, zips or ())
        with _progress("points") as on_point:
            planned = plan(varied, sample, seed, on_point)
        output = place(folder, Path("results") / f"{planned.points[0].scenario.name}-sweep")
        executor: Executor = (
            RayCluster(ray) if ray is not None else Here() if jobs == 1 else Processes(jobs)
        )
        with folder_or_temporary(output) as written:
            outcomes = kept(planned, written)
            if ray is None and len(outcomes) < len(planned.points):
                compile_kernels()
            report_overruled(varied.file, varied_values)
            asked = {
                "scenario": Path(opened.origin).name,
                "values": texts_of(values),
                "zip": list(zips or ()),
                "sample": sample,
                "seed": seed,
            }
            with _progress("points simulated", len(planned.points), len(outcomes)) as on_point:
                swept = run(planned, outcomes, written, executor, asked, on_point)
            outcomes = kept(planned, written)
    notes = []
    if output is not None:
        notes = [
            f"The table: pandas.read_parquet({str(output / 'table')!r}); Polars and DuckDB open it, too."
        ]
    return Sweep(planned, swept, outcomes, asked, output, notes=notes, lost=swept.lost, ascii=False)


@contextmanager
def _progress(
    what: str, total: int | None = None, completed: int = 0
) -> Iterator[Callable[[], None]]:
    """Show a bar with the remaining time while it is entered; return the function that moves it on
    by one."""
    from rich.progress import TimeRemainingColumn

    from simrl.study.progress import progress_bar

    with progress_bar(TimeRemainingColumn(), speed_over_s=SPEED_OVER_S) as bar:
        task = bar.add_task(what, total=total, completed=completed)
        yield lambda: bar.advance(task)
