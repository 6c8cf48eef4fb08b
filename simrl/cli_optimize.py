"""`simrl optimize`: which system, split, tp, drafter and η to run."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from simrl.executors import Executor
    from simrl.outcomes import Outcomes

EXAMPLES = (
    "Examples:  simrl optimize experiments/quickstart.yaml cluster.gpus=16   |   "
    "simrl optimize experiments/quickstart.yaml cluster.gpus=16 systems=one_step_off,areal system.eta=1,2,4 "
    "--max-off-policyness 2   |   "
    "simrl optimize experiments/math_14b.yaml cluster.gpus=32,64,128 --updates 500 --deadline 36h   |   "
    "simrl optimize experiments/math_14b.yaml cluster.gpus=32,64,128 --updates 500 --budget 5000"
)


def optimize(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="a scenario file (YAML)")],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=A,B,C]...",
            help="what may be chosen, in place of the default or besides: systems=…, system.rollout_share=0.5..0.9, "
            "system.eta=…, cluster.tp=…, cluster.gpus=…, system.speculation=…, or any other; one value is set everywhere",
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(min=1, help="points to simulate at most; a smaller space is simulated whole")
    ] = 200,
    best: Annotated[int, typer.Option(min=1, help="systems to tell of")] = 5,
    max_off_policyness: Annotated[
        float | None, typer.Option(min=0, help="of any trained token, in policy updates")
    ] = None,
    max_cost: Annotated[float | None, typer.Option(min=0, help="of 1,000 trained samples")] = None,
    updates: Annotated[int | None, typer.Option(min=1, help="of a whole batch, that the run is to make")] = None,
    deadline: Annotated[str | None, typer.Option(help="for these updates, as 36h: the cheapest that makes it")] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="for these updates: the fastest within it")] = None,
    robust: Annotated[
        bool,
        typer.Option("--robust/--no-robust", help="simulate the best again, 20 % off in decode, train and acceptance"),
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="of the search (seed=… is the scenarios')")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="processes on this machine")] = os.cpu_count() or 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="where points are kept (default: results/NAME-optimize)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON on stdout instead (its keys are stable)")] = False,
) -> None:
    """Search for the system, split, tp, drafter and η to run on these GPUs, or for a deadline or a budget.

    Says why the best few are what they are, which of them are closer than simrl's own error, how robust the choice is, and how
    to launch it. Points that are in the folder already are not simulated again: a search that was stopped goes on.
    """
    from rich.console import Console

    from simrl.comparison import compile_kernels, progress_bar
    from simrl.dimensions import by_key
    from simrl.executors import Here, Processes
    from simrl.goal import Goal, seconds_of
    from simrl.optimization import optimization, require_trials, write_optimization
    from simrl.optimization_table import print_optimization
    from simrl.outcomes import Outcomes
    from simrl.scenario import ScenarioFile
    from simrl.search_space import make_space

    require_trials(trials, best)
    deadline_s = seconds_of(deadline, "--deadline") if deadline is not None else None
    space = make_space(lambda settings: ScenarioFile(scenario, settings), by_key(values or []))
    goal = Goal(
        batch_samples=space.batch_samples,
        price=space.first.cluster.cost_per_gpu_hour,
        max_off_policyness=max_off_policyness,
        max_cost=max_cost,
        updates=updates,
        deadline_s=deadline_s,
        budget=budget,
    )
    folder = output or Path("results") / f"{space.first.name}-optimize"
    for line in space.varied.file.overruled(text.partition("=")[0] for text in values or []):
        print(f"simrl: {line}", file=sys.stderr)
    compile_kernels()
    staying = Processes(jobs, stay=True) if jobs > 1 else None
    executor: Executor = staying or Here()
    outcomes = Outcomes(folder, executor)
    started = time.monotonic()
    try:
        with progress_bar() as bar:
            stages = _Stages(bar, trials, outcomes)
            found = optimization(
                space, goal, outcomes, trials=trials, seed=seed, best=best, robust=robust, on_stage=stages.begin
            )
    except KeyboardInterrupt as error:
        raise outcomes.interrupted() from error
    finally:
        if staying is not None:
            staying.end()
    write_optimization(found, folder)
    if as_json:
        data = {**found.as_json(), "simulated": outcomes.simulated, "found": outcomes.found, "folder": str(folder)}
        print(json.dumps(data, indent=1, ensure_ascii=False))
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 100
    print_optimization(found, console)
    console.print(
        f"{outcomes.simulated} points simulated now in {time.monotonic() - started:.0f} s, {outcomes.found} were in {folder}."
    )


class _Stages:
    """A bar for what is done now: the search has an end that is known, the rest counts on."""

    def __init__(self, bar: Progress, trials: int, outcomes: Outcomes) -> None:
        self._bar, self._trials = bar, trials
        self._task = bar.add_task("points simulated", total=trials)
        outcomes.on_point = lambda: bar.advance(self._task)

    def begin(self, what: str) -> None:
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=self._trials if what == "points simulated" else None)
