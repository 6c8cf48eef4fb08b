"""`simrl advise`: one command to a decision, what to run on which cluster, for how long, and how sure that is."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from simrl.commands import options as o
from simrl.commands.command import command
from simrl.commands.optimize import Polish, SearchSpace, Trials, searching
from simrl.commands.view import DataView, place
from simrl.errors import InputError, meant

if TYPE_CHECKING:
    from simrl.commands.workload import Opened
    from simrl.scenario.model import Scenario
    from simrl.study.search_space import Space

log = logging.getLogger(__name__)
FRAMEWORKS = ("verl", "AReaL", "slime")
STEPS = {"steps": 24, "warmup_steps": 8}  # of a trace, if none are given: enough for asynchronous systems to settle
CLUSTER = "cluster.gpus"
Clusters = Annotated[
    str | None, typer.Option(help="numbers of GPUs to choose from, such as 32,64,128 (default: the scenario's)")
]

Growth = Annotated[
    float, typer.Option(min=0.1, help="length of responses at the end of the planned run over that at its beginning")
]


@command
def advise(
    workload: o.Workload,
    values: SearchSpace = None,
    systems: o.Systems = None,
    *,
    overrides: Any = None,
    clusters: Clusters = None,
    updates: Annotated[int, typer.Option(min=1, help="policy updates of the planned run, of a whole batch")] = 500,
    growth: Growth = 1.0,
    price: o.Price = None,
    max_off_policyness: Annotated[
        float | None, typer.Option(min=0, help="limit for every trained token, in policy updates")
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help="framework to launch with: verl, AReaL or slime (default: the best choice's)")
    ] = None,
    trials: Trials = 40,
    polish: Polish = 56,
    best: Annotated[int, typer.Option(min=1, help="systems to report")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="seed of the search (seed=… is the scenarios')")] = 0,
    jobs: o.Jobs = o.JOBS,
    folder: o.Folder = None,
    **setup: Unpack[o.Setup],
) -> DataView:
    """Decide what to run: system, split, tp, drafter, η, concurrency and dispatch, with hours and cost on each cluster.

    Takes a scenario, the folder of a run, a trace, or a CSV of lengths with --model and --gpu. Searches as `optimize` does, for
    each cluster; says which systems are level, what an update waits for, how much memory the KV cache needs, what the figures
    rest on, and how to launch it. A search that was stopped continues.
    \f
    Arguments are those of `optimize`. `table` has a row per cluster.

    >>> import simrl
    >>> found = simrl.advise(
    ...     "experiments/quickstart.yaml", {"system.eta": [1, 2], "system.rollout_share": 0.5, "system.speculation": "none"},
    ...     ["areal"], clusters="8,16", tp=1, steps=4, warmup_steps=1, trials=8, polish=0, updates=100,
    ... )
    >>> found.table.shape[0]
    2
    """
    from simrl.commands.workload import dimensions, fixed, folder_or_temporary
    from simrl.show.tables.advise import print_advice
    from simrl.study.advice import advise as advised
    from simrl.study.grid import listed
    from simrl.study.optimize import require_trials
    from simrl.study.search_space import make_space
    from simrl.study.store import write_json

    require_trials(trials, best)
    named = _framework(framework)
    sizes = _sizes(clusters)
    opened = _open(workload, systems, overrides, setup, sizes)
    varied = dimensions(values)
    if price is not None:
        varied["cluster.cost_per_gpu_hour"] = listed("cluster.cost_per_gpu_hour", price)
    own = {key: value for key, value in fixed(opened.settings).items() if not (sizes and key == CLUSTER)}
    with opened._replace(settings=()).on_disk() as on_disk:

        def space_of(gpus: int | None) -> Space:
            return make_space(on_disk.file, own | varied | ({CLUSTER: listed(CLUSTER, gpus)} if gpus else {}))

        space = space_of(next(iter(sizes), None))
        output = place(folder, Path("results") / f"{space.first.name}-advise")
        with folder_or_temporary(output) as written:
            lengths, traces = _growing(space.first, growth, written) if growth != 1 else ({}, [])
            own |= {key: listed(key, value) for key, value in lengths.items()}
            spaces = {gpus: space_of(gpus) for gpus in sizes or _of_the_file(space)}
            settings = {"trials": trials, "seed": seed, "best": best, "polished": polish, "framework": named}
            many = "1 cluster" if len(spaces) == 1 else f"{len(spaces)} clusters"
            log.info(f"{many}: at most {trials + polish:,} points a cluster, then closer looks at the best")
            with searching(written, jobs, said=True) as (outcomes, begin):
                found = advised(
                    spaces, outcomes, updates, max_off_policyness, begin, traces, robust=("assumed",), **settings
                )
            write_json(written / "advise.json", found.as_json())
    name = f"Advice of {found.name}: {found.plans[0].choice.option.row['system']}"
    notes = [] if output is None else [f"Written to {output}/advise.json"]
    return DataView(found, print_advice, name, found.rows, lost=outcomes.lost, ascii=False, width=80, notes=notes)


def _open(workload: Any, systems: Any, overrides: Any, setup: Mapping[str, Any], sizes: Sequence[int]) -> Opened:
    """Open a workload; a trace gets the steps, systems and GPUs that were not given."""
    from simrl.commands.workload import is_scenario, open_workload
    from simrl.study.search_space import FAMILIES

    given = {key: value for key, value in setup.items() if value is not None}
    if not is_scenario(workload):
        systems = FAMILIES if systems is None else systems
        given = {**STEPS, **({"gpus": sizes[0]} if sizes else {}), **given}
    return open_workload("advise", workload, systems, overrides, given)


def _framework(name: str | None) -> str | None:
    found = next((each for each in FRAMEWORKS if name is not None and each.lower() == name.lower()), None)
    if name is not None and found is None:
        raise InputError(f"--framework {name}: unknown{meant(name, FRAMEWORKS)}; choose one of {', '.join(FRAMEWORKS)}")
    return found


def _sizes(text: str | None) -> list[int]:
    parts = [] if text is None else [part.strip() for part in str(text).split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        gap = "nothing after a comma; " if "" in parts else ""
        raise InputError(
            f"--clusters {text!r}: {gap}give numbers of GPUs with commas between, such as --clusters 32,64,128"
        )
    return list(dict.fromkeys(map(int, parts)))


def _of_the_file(space: Space) -> list[int]:
    """Return the numbers of GPUs that the scenario has or varies."""
    varied = [setting.value for setting in space.varied.settings(CLUSTER) if isinstance(setting.value, int)]
    return list(dict.fromkeys(varied)) or [space.first.cluster.gpus]


def _growing(scenario: Scenario, growth: float, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of lengths to search with and, for a trace, whose settings name its middle, the written traces of the
    beginning, the middle and the end of the growth."""
    from simrl.simulate.cache import InputCache
    from simrl.study.advice import grown
    from simrl.trace.trace import write_trace

    synthetic = scenario.workload.synthetic
    if synthetic is not None:
        if not isinstance(mean := synthetic.mean_tokens, float):
            raise InputError(
                f"--growth {growth:g}: workload.synthetic has {'turns' if mean is None else 'growth of its own'}; it goes with "
                "mean_tokens that is one number"
            )
        return {"workload.synthetic.mean_tokens": [[mean, mean * growth]]}, []
    trace = InputCache().trace(scenario)
    factors = (1.0, (1 + growth) / 2, growth)
    paths = [folder / "lengths" / f"x{factor:g}.parquet" for factor in factors]
    for path, factor in zip(paths, factors, strict=True):
        write_trace(grown(trace, factor), path)
    return {"workload.trace": str(paths[1])}, [str(path) for path in paths]
