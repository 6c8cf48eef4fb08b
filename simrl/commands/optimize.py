"""`simrl optimize`: which system, split, tp, drafter and η to run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from simrl.commands import options as o
from simrl.commands.command import command
from simrl.commands.view import DataView, frame, place

if TYPE_CHECKING:
    import pandas as pd

    from simrl.show.style import Picture
    from simrl.study.optimize import Optimization
    from simrl.study.store import Outcomes

log = logging.getLogger(__name__)
NESTED = ("leads", "reasons", "variant", "variant_loss")  # of a choice: no columns, they are in its data


class OptimizationView(DataView):
    """The system, split, tp, drafter and η to run. `data` has every option that was tried, the best few with their reasons, the
    robustness of the choice, and its launch settings. `table` has a row per option of the best few, the choice first: rank, tp,
    merit, the columns of a comparison, and whether it is closer to the choice than simrl's own error (`tied`)."""

    data: Optimization

    @property
    def front(self) -> pd.DataFrame:
        """The Pareto front of throughput, staleness and cost, a row per option, the lowest staleness first."""
        return frame(self.data.as_json()["front"])

    def figure(self) -> Picture:
        """Draw throughput against staleness of every option within the limits, and the front."""
        from simrl.show.figures.sweep import optimization_figure

        return optimization_figure(self.data)


SearchSpace = Annotated[
    o.ByKey | None,
    typer.Argument(
        metavar="[KEY=A,B,C]...",
        help="search space: KEY=A,B,C replaces or extends the default choices (systems=…, system.rollout_share=0.5..0.9, "
        "system.eta=…, cluster.tp=…, cluster.gpus=…, system.speculation=…, or any other); a single value is fixed for all "
        "points",
    ),
]
Deadline = Annotated[
    str | None, typer.Option(help="time for these updates, such as 36h: choose the cheapest run that meets it")
]
Budget = Annotated[float | None, typer.Option(min=0, help="cost of these updates: choose the fastest run within it")]
Trials = Annotated[int, typer.Option(min=1, help="most points to simulate; a smaller space is simulated completely")]
Polish = Annotated[
    int,
    typer.Option(
        min=0,
        help="most further points around the best of each system: every split, η, stale groups, concurrency, dispatch",
    ),
]
Robust = Annotated[
    bool,
    typer.Option(
        "--robust/--no-robust",
        help="simulate the best again with decode, train and acceptance 20 % lower and higher",
    ),
]


@command
def optimize(
    workload: o.Workload,
    values: SearchSpace = None,
    systems: o.Systems = None,
    *,
    overrides: Any = None,
    max_off_policyness: Annotated[
        float | None, typer.Option(min=0, help="limit for every trained token, in policy updates")
    ] = None,
    max_cost: Annotated[float | None, typer.Option(min=0, help="limit per 1,000 trained samples")] = None,
    updates: o.Updates = None,
    deadline: Deadline = None,
    budget: Budget = None,
    trials: Trials = 200,
    polish: Polish = 100,
    best: Annotated[int, typer.Option(min=1, help="systems to report")] = 5,
    robust: Robust = True,
    seed: Annotated[int, typer.Option(min=0, help="seed of the search (seed=… is the scenarios')")] = 0,
    jobs: o.Jobs = o.JOBS,
    folder: o.Folder = None,
    **setup: Unpack[o.Setup],
) -> OptimizationView:
    """Search for the system, split, tp, drafter and η to run on these GPUs, or for a deadline or a budget.

    Says why the best few are what they are, which of them are closer than simrl's own error, how robust the choice is, and how
    to launch it. Points that are in the folder already are not simulated again: a search that was stopped continues.
    \f
    `values` may be a dictionary, as for `sweep`. What is not named has a default, systems too: one of each family, and a
    scenario's own. All other arguments are those of `compare`; `tp` and the others that are given are not searched. Raises
    `InputError` also if no point keeps the limits, with the reasons.

    >>> import simrl
    >>> found = simrl.optimize(
    ...     "experiments/quickstart.yaml", {"system.eta": [1, 4], "system.rollout_share": 0.5, "system.speculation": "none"},
    ...     ["areal"], gpus=16, tp=1, steps=4, warmup_steps=1, max_off_policyness=2, robust=False,
    ... )
    >>> found
    <Optimization of quickstart: areal(...)>
    >>> found.table.shape[0]
    1
    """
    from simrl.commands.workload import dimensions, fixed, folder_or_temporary, is_scenario, open_workload
    from simrl.commands.workload import report_overruled as report
    from simrl.result.metrics import prices
    from simrl.show.tables.optimize import print_optimization
    from simrl.study.goal import Goal, seconds_of
    from simrl.study.optimize import optimization, require_trials
    from simrl.study.robustness import ENDS
    from simrl.study.search_space import FAMILIES, make_space
    from simrl.study.store import write_json

    require_trials(trials, best)
    deadline_s = None if deadline is None else seconds_of(str(deadline), "--deadline")
    chosen = FAMILIES if systems is None and not is_scenario(workload) else systems
    opened = open_workload("optimize", workload, chosen, overrides, setup)
    varied = dimensions(values)
    with opened._replace(settings=()).on_disk() as on_disk:
        space = make_space(on_disk.file, fixed(opened.settings) | varied)
        price = max(each or 0.0 for each in prices(space.first.cluster.model_dump()))
        goal = Goal(space.batch_samples, price, max_off_policyness, max_cost, updates, deadline_s, budget)
        output = place(folder, Path("results") / f"{space.first.name}-optimize")
        with folder_or_temporary(output) as written:
            report(space.varied.file, varied)
            started = time.monotonic()
            with searching(written, jobs) as (outcomes, begin):
                found = optimization(
                    space, goal, outcomes, trials, seed, best, ENDS if robust else (), polish, on_phase=begin
                )
            write_json(written / "optimize.json", found.as_json())
    name = f"Optimization of {found.name}: {found.choice.option.row['system']}"
    rows = [{key: value for key, value in row.items() if key not in NESTED} for row in found.as_json()["best"]]
    view = OptimizationView(found, print_optimization, name, rows, lost=outcomes.lost, ascii=False, width=100)
    if output is None:
        return view
    took = f"{outcomes.simulated} points simulated now in {time.monotonic() - started:.0f} s"
    counts = {"simulated": outcomes.simulated, "found": outcomes.found, "folder": str(output)}
    return replace(view, more=counts, notes=[f"{took}, {outcomes.found} were in {output}."])


@contextmanager
def searching(folder: Path, jobs: int, said: bool = False) -> Iterator[tuple[Outcomes, Callable[[str, int], None]]]:
    """Yield outcomes that are kept in the folder, also at Ctrl-C, and a function that begins a phase with its name and its most
    points. A phase has a progress bar; without a terminal it has a line, if `said`."""
    from simrl.study.executors import Here, Processes
    from simrl.study.progress import compile_kernels, progress_bar
    from simrl.study.store import Outcomes

    compile_kernels()
    with Processes(jobs, stay=True) if jobs > 1 else nullcontext(Here()) as executor, progress_bar() as bar:

        def begin(phase: str, most: int) -> None:
            for task in bar.task_ids:
                bar.remove_task(task)
            bar.add_task(phase, total=most)
            if said and bar.disable and most:
                log.info(f"{phase}, at most {most:,}")

        outcomes = Outcomes(folder, executor, lambda: bar.advance(bar.task_ids[-1]))
        try:
            yield outcomes, begin
        except KeyboardInterrupt as error:
            raise outcomes.interrupted() from error
