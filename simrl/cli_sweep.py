"""`simrl sweep`: many scenarios, one table."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from simrl.errors import InputError

SPEED_OVER_S = 600.0  # points of a grid take very different times
EXAMPLES = (
    "Examples:  simrl sweep experiments/quickstart.yaml cluster.gpus=64,128,256 seed=0..4   |   "
    "simrl sweep experiments/quickstart.yaml 'systems=one_step_off,{name: areal, eta: 2}' system.rollout_share=0.5,0.75   |   "
    "simrl sweep experiments/quickstart.yaml cluster.gpus=64,128 cluster.tp=2,4 --zip cluster.gpus,cluster.tp   |   "
    "simrl sweep experiments/quickstart.yaml systems=areal system.eta=0..8 system.rollout_share=0.5..0.95 --sample 200   |   "
    "simrl sweep experiments/quickstart.yaml seed=0..99 --ray auto"
)


def sweep(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="a scenario file (YAML)")],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=A,B,C]...",
            help="what to vary: values with commas between them, 0..9 for whole numbers; one value is set everywhere. Values "
            "may be objects and lists: 'training={mfu: 0.3},{mfu: 0.5}'. system.KEY is a parameter of the systems that have it",
        ),
    ] = None,
    zips: Annotated[
        list[str] | None,
        typer.Option("--zip", help="keys whose values go together, as KEY,KEY; may be repeated. All else is crossed"),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=1, help="draw so many combinations in place of all; 0.5..0.9 then is any number in between"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of what is drawn (seed=… is the scenarios')")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="processes on this machine")] = os.cpu_count() or 1,
    ray: Annotated[
        str | None,
        typer.Option(
            help="or a Ray cluster: 'auto' (the running one), HOST:PORT, or 'local' (starts one); it needs the same simrl"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where the results go (default: results/NAME-sweep)")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="print JSON on stdout instead of a table; its keys are stable: table, points, simulated, failed, errors",
        ),
    ] = False,
) -> None:
    """Simulate every combination of values, with all systems of a scenario; write one Parquet table, a row a point.

    Everything of a scenario can be varied; its systems, and what it varies itself, are crossed with the rest. A point that
    is in the folder already is not simulated again: a sweep that was stopped goes on, also with more values. A point that
    cannot be is a row with its error.
    """
    from rich.console import Console

    from simrl.comparison import compile_kernels
    from simrl.dimensions import vary
    from simrl.executors import Executor, Here, Processes, RayCluster
    from simrl.sweep_table import print_sweep
    from simrl.sweeps import kept, plan, run

    varied = vary(scenario, values or [], zips or [])
    with _progress("points") as on_point:
        planned = plan(varied, sample, seed, on_point)
    folder = output or Path("results") / f"{planned.points[0].scenario.name}-sweep"
    executor: Executor = Here() if jobs == 1 else Processes(jobs)
    if ray is not None:
        executor = RayCluster(ray)
    outcomes = kept(planned, folder)
    if ray is None and len(outcomes) < len(planned.points):
        compile_kernels()
    for line in varied.file.overruled(text.partition("=")[0] for text in values or []):
        print(f"simrl: {line}", file=sys.stderr)
    asked = {"scenario": scenario.name, "values": values or [], "zip": zips or [], "sample": sample, "seed": seed}
    with _progress("points simulated", len(planned.points), len(outcomes)) as on_point:
        swept = run(planned, outcomes, folder, executor, asked, on_point)
    failed = [row for row in swept.rows if row["error"] is not None]
    if as_json:
        errors = {str(row["point"]): row["error"] for row in failed}
        numbers = {"points": len(swept.rows), "simulated": swept.simulated, "failed": len(failed), "errors": errors}
        print(json.dumps({"table": str(folder / "table"), **numbers}, indent=1, ensure_ascii=False))
    else:
        console = Console(highlight=False, markup=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = 10_000  # a file or a pipe: nothing has to be broken
        print_sweep(planned, swept, console)
        console.print(f"The table: pandas.read_parquet({str(folder / 'table')!r}); Polars and DuckDB open it, too.")
    if len(failed) == len(swept.rows):
        raise InputError(f"all {len(failed)} points failed; the first: {failed[0]['error']}")


@contextmanager
def _progress(what: str, total: int | None = None, completed: int = 0) -> Iterator[Callable[[], None]]:
    """A bar with the time left, as soon as it can be told; gone when it is done. Gives what moves it on by one."""
    from rich.progress import TimeRemainingColumn

    from simrl.comparison import progress_bar

    with progress_bar(TimeRemainingColumn(), speed_over_s=SPEED_OVER_S) as bar:
        task = bar.add_task(what, total=total, completed=completed)
        yield lambda: bar.advance(task)
