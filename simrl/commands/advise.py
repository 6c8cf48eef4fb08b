"""`simrl advise`: one command to a decision, what to run on which cluster, for how long, and how
sure that is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from simrl.commands import options as o
from simrl.commands.command import command
from simrl.commands.view import DataView, frame, place
from simrl.errors import InputError, meant, refuse

if TYPE_CHECKING:
    import pandas as pd

    from simrl.commands.workload import Opened
    from simrl.scenario.model import Scenario
    from simrl.show.style import Picture
    from simrl.study.advice import Advice
    from simrl.study.search_space import Space
    from simrl.study.store import Outcomes

log = logging.getLogger(__name__)
FRAMEWORKS = ("verl", "AReaL", "slime")
STEPS = {
    "steps": 24,
    "warmup_steps": 8,
}  # of a trace, by default: enough for asynchronous systems to settle
CLUSTER = "cluster.gpus"
NESTED = (
    "leads",
    "reasons",
    "variant",
    "variant_loss",
)  # of a choice: no columns, they are in its data


class AdviceView(DataView):
    """The system to run on each cluster, and why. `table` has a row per cluster, `best` a row per
    option of the best few, the choice of each cluster first: rank, tp, merit, the columns of a
    comparison, and whether it is closer to the choice than simrl's own error (`tied`). `data` has
    every option that was tried, with the reasons of the best few, the robustness of the choice, and
    its launch settings."""

    data: Advice

    @property
    def best(self) -> pd.DataFrame:
        """The best option of the best systems on each cluster."""
        choices = [
            choice
            for plan in self.data.as_json()["clusters"]
            for choice in plan["optimization"]["best"]
        ]
        return frame(
            [{key: value for key, value in row.items() if key not in NESTED} for row in choices]
        )

    @property
    def front(self) -> pd.DataFrame:
        """The Pareto front of throughput, staleness and cost on each cluster, the lowest staleness
        first."""
        return frame(
            [
                row
                for plan in self.data.as_json()["clusters"]
                for row in plan["optimization"]["front"]
            ]
        )

    def figure(self, cluster: int = 0) -> Picture:
        """Draw throughput against staleness of every option within the limits on a cluster (its
        place), and the front."""
        from simrl.show.figures.sweep import search_figure

        return search_figure(self.data.plans[cluster].answer)


SearchSpace = Annotated[
    o.ByKey | None,
    typer.Argument(
        metavar="[KEY=A,B,C]...",
        help="search space: KEY=A,B,C replaces or extends the default choices (systems=…, system.rollout_share=0.5..0.9, "
        "system.eta=…, cluster.tp=…, cluster.gpus=…, system.speculation=…, or any other); a single value is fixed for all "
        "points",
    ),
]
Clusters = Annotated[
    o.GpuNumbers | None,
    typer.Option(
        help="numbers of GPUs to choose from, such as 32,64,128 (default: the scenario's)"
    ),
]
Growth = Annotated[
    float,
    typer.Option(
        min=0.1, help="response length at the end of the planned run / length at its beginning"
    ),
]
Deadline = Annotated[
    str | None,
    typer.Option(help="time for the updates, such as 36h: choose the cheapest run that meets it"),
]
Budget = Annotated[
    float | None, typer.Option(min=0, help="cost of the updates: choose the fastest run within it")
]
Trials = Annotated[
    int,
    typer.Option(min=1, help="maximum number of points; a smaller space is simulated completely"),
]
Polish = Annotated[
    int,
    typer.Option(
        min=0,
        help="maximum number of further points around the best of each system: split, η, stale groups, concurrency, dispatch",
    ),
]
Robust = Annotated[
    bool | None,
    typer.Option(
        "--robust/--no-robust",
        help="simulate the best again with decode, train and acceptance 20 % lower and higher, too (default: with assumed "
        "seconds × 0.5 and × 2 alone)",
    ),
]


@command
def advise(
    workload: o.Workload,
    values: SearchSpace = None,
    systems: o.Systems = None,
    *,
    overrides: Any = None,
    clusters: Clusters = None,
    updates: Annotated[
        int, typer.Option(min=1, help="policy updates of the planned run, each of a whole batch")
    ] = 500,
    growth: Growth = 1.0,
    price: o.Price = None,
    max_off_policyness: Annotated[
        float | None,
        typer.Option(min=0, help="maximum off-policyness of any trained token, in policy updates"),
    ] = None,
    max_cost: Annotated[
        float | None, typer.Option(min=0, help="maximum cost of 1,000 trained samples")
    ] = None,
    deadline: Deadline = None,
    budget: Budget = None,
    framework: Annotated[
        str | None,
        typer.Option(
            help="framework to launch with: verl, AReaL or slime (default: the one with the best choice)"
        ),
    ] = None,
    trials: Trials = 40,
    polish: Polish = 56,
    best: Annotated[int, typer.Option(min=1, help="number of systems to report")] = 5,
    robust: Robust = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="print each search, too: the best few, why, the Pareto front, the space",
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="seed of the search (seed=… sets the seed of the scenarios)")
    ] = 0,
    jobs: o.Jobs = o.JOBS,
    folder: o.Folder = None,
    **setup: Unpack[o.Setup],
) -> AdviceView:
    """Decide what to run: system, split, tp, drafter, η, concurrency and dispatch, with hours and cost on each cluster.

    Takes a scenario, the folder of a run, a trace, or a CSV of lengths with --model and --gpu. Searches on each cluster, or,
    for a deadline or a budget, on all of them at once; says which systems are level, what an update waits for, how much memory
    the KV cache needs, what the figures rest on, and how to launch it. A search that was stopped continues.
    \f
    `values` may be a dictionary, as for `sweep`. Keys without a value have defaults, systems too: one of each family, and a
    scenario's own. Other arguments are `compare`'s; keywords that are given, such as `tp`, are not searched. `table` has a row
    per cluster. Raises `InputError` also if no point keeps the limits, with the reasons.

    >>> import simrl
    >>> found = simrl.advise(
    ...     "experiments/quickstart.yaml",
    ...     {"system.eta": [1, 2], "system.rollout_share": 0.5, "system.speculation": "none"},
    ...     ["areal"], clusters=[8, 16], tp=1, steps=8, warmup_steps=4, trials=8, polish=0,
    ...     updates=100,
    ... )
    >>> found.table.shape[0]
    2
    """
    from simrl.commands.workload import dimensions, fixed, folder_or_temporary, report_overruled
    from simrl.show.tables.advise import print_advice
    from simrl.study.advice import advise as advised, goal_on
    from simrl.study.goal import seconds_of
    from simrl.study.grid import listed
    from simrl.study.robustness import ENDS
    from simrl.study.search_space import make_space
    from simrl.study.store import write_json

    refuse((trials < best, f"--trials {trials}: fewer than the {best} systems to report (--best)"))
    limits = {
        "max_off_policyness": max_off_policyness,
        "max_cost": max_cost,
        "deadline_s": None if deadline is None else seconds_of(str(deadline), "--deadline"),
        "budget": budget,
    }
    named = _framework(framework)
    sizes = _sizes(clusters)
    opened = _open(workload, systems, overrides, setup, sizes)
    varied = dimensions(values)
    if price is not None:
        varied["cluster.cost_per_gpu_hour"] = listed("cluster.cost_per_gpu_hour", price)
    settings = {
        key: value
        for key, value in fixed(opened.settings).items()
        if not (sizes and key == CLUSTER)
    }
    with opened._replace(settings=()).on_disk() as on_disk:

        def space_of(gpus: Sequence[int]) -> Space:
            return make_space(
                on_disk.file, settings | varied | ({CLUSTER: listed(CLUSTER, gpus)} if gpus else {})
            )

        space = space_of(sizes[:1])
        output = place(folder, Path("results") / f"{space.first.name}-advise")
        with folder_or_temporary(output) as written:
            lengths, traces = _growing(space.first, growth, written) if growth != 1 else ({}, [])
            settings |= {key: listed(key, value) for key, value in lengths.items()}
            gpus = sizes or _of_the_file(space)
            # The cheapest in time, and the fastest within a budget, may be on any of the clusters.
            together = deadline is not None or budget is not None
            searches = [gpus] if together else [[n] for n in gpus]
            spaces = {"/".join(map(str, search)): space_of(search) for search in searches}
            goals = {
                name: (space, goal_on(space, updates, **limits)) for name, space in spaces.items()
            }
            report_overruled(space.varied.file, varied)
            many = "1 cluster" if len(spaces) == 1 else f"{len(spaces)} clusters"
            log.info(
                f"{many}: at most {trials + polish:,} points a cluster, then closer looks at the best"
            )
            sources = () if robust is False else tuple(ENDS) if robust else ("assumed",)
            with _searching(written, jobs) as outcomes:
                advice = advised(
                    goals, outcomes, traces,
                    trials=trials, seed=seed, best=best, robust=sources, polished=polish, framework=named,
                )  # fmt: skip
            write_json(written / "advise.json", advice.as_json())
    name = f"Advice of {advice.name}: {advice.plans[0].option.row['system']}"
    notes = [] if output is None else [f"Written to {output}/advise.json"]
    show, width = partial(print_advice, details=details), 100 if details else 80
    return AdviceView(
        advice, show, name, advice.rows, lost=outcomes.lost, ascii=False, width=width, notes=notes
    )


@contextmanager
def _searching(folder: Path, jobs: int) -> Iterator[Outcomes]:
    """Yield outcomes that are kept in the folder, also at Ctrl-C. A phase has a progress bar;
    without a terminal it has a line."""
    from simrl.study.progress import compile_kernels, progress_bar
    from simrl.study.store import simulating

    compile_kernels()
    with simulating(jobs, folder) as outcomes, progress_bar() as bar:

        def begin(phase: str, most: int) -> None:
            for task in bar.task_ids:
                bar.remove_task(task)
            bar.add_task(phase, total=most)
            if bar.disable and most:
                log.info(f"{phase}, at most {most:,}")

        outcomes.on_phase, outcomes.on_point = begin, lambda: bar.advance(bar.task_ids[-1])
        try:
            yield outcomes
        except KeyboardInterrupt as error:
            raise outcomes.interrupted() from error


def _open(
    workload: Any, systems: Any, overrides: Any, setup: Mapping[str, Any], sizes: Sequence[int]
) -> Opened:
    """Open a workload; a trace gets the steps, systems and GPUs that were not given."""
    from simrl.commands.workload import is_scenario, open_workload
    from simrl.study.search_space import FAMILIES

    keywords = {key: value for key, value in setup.items() if value is not None}
    if not is_scenario(workload):
        systems = FAMILIES if systems is None else systems
        keywords = {**STEPS, **({"gpus": sizes[0]} if sizes else {}), **keywords}
    return open_workload("advise", workload, systems, overrides, keywords)


def _framework(name: str | None) -> str | None:
    if name is None:
        return None
    if (
        known := {framework.lower(): framework for framework in FRAMEWORKS}.get(name.lower())
    ) is None:
        raise InputError(
            f"--framework {name}: unknown{meant(name, FRAMEWORKS)}; choose one of {', '.join(FRAMEWORKS)}"
        )
    return known


def _sizes(clusters: str | Sequence[int] | None) -> list[int]:
    """Return the numbers of GPUs of a text or, in Python, a list."""
    if not isinstance(clusters, str | None):
        numbers = list(clusters) if isinstance(clusters, Iterable) else [clusters]
        whole = [
            n for n in numbers if isinstance(n, Integral) and not isinstance(n, bool) and n > 0
        ]
        if not numbers or whole != numbers:
            raise InputError(
                f"clusters={clusters!r}: give numbers of GPUs, such as clusters=[32, 64, 128]"
            )
        return list(dict.fromkeys(map(int, whole)))
    parts = [] if clusters is None else [part.strip() for part in clusters.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        gap = "nothing after a comma; " if "" in parts else ""
        raise InputError(
            f"--clusters {clusters!r}: {gap}give numbers of GPUs with commas between, such as --clusters 32,64,128"
        )
    return list(dict.fromkeys(map(int, parts)))


def _of_the_file(space: Space) -> list[int]:
    """Return the numbers of GPUs that the scenario has or varies."""
    varied = [
        setting.value
        for setting in space.varied.settings(CLUSTER)
        if isinstance(setting.value, int)
    ]
    return list(dict.fromkeys(varied)) or [space.first.cluster.gpus]


def _growing(scenario: Scenario, growth: float, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of lengths to search with and, for a trace, whose settings name its
    middle, the written traces of the beginning, the middle and the end of the growth."""
    from simrl.simulate.cache import InputCache
    from simrl.study.advice import grown
    from simrl.trace.trace import write_trace

    synthetic = scenario.workload.synthetic
    if synthetic is not None:
        if not isinstance(mean := synthetic.mean_tokens, float):
            kind = "turns" if mean is None else "growth of its own"
            raise InputError(
                f"--growth {growth:g}: workload.synthetic has {kind}; it goes with mean_tokens that is one number"
            )
        return {"workload.synthetic.mean_tokens": [[mean, mean * growth]]}, []
    trace = InputCache().trace(scenario)
    factors = (1.0, (1 + growth) / 2, growth)
    paths = [folder / "lengths" / f"x{factor:g}.parquet" for factor in factors]
    for path, factor in zip(paths, factors, strict=True):
        write_trace(grown(trace, factor), path)
    return {"workload.trace": str(paths[1])}, [str(path) for path in paths]
