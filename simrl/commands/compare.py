"""`simrl compare` and `simrl run`: systems side by side on one set of rollouts and GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from simrl.commands import options as o
from simrl.commands.command import command
from simrl.commands.results import (
    AgreementView,
    DifferenceView,
    ExplanationView,
    agreement,
    diff,
    explain,
    write_runs,
)
from simrl.commands.view import View, frame, place
from simrl.errors import InputError, meant

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from simrl.result.result import Result
    from simrl.scenario.model import Scenario
    from simrl.show.style import Picture
    from simrl.simulate.cache import InputCache
    from simrl.study.compare import Beside


@dataclass(frozen=True, repr=False)
class Comparison(View):
    """Simulated runs side by side, in the order of the scenarios.

    `rows` is what `--json` prints: a dictionary per run, seconds and tokens as their names say,
    shares from 0 to 1. `results` has the runs by name: the system as in the table, such as
    "areal(eta=4)", and what varies: "areal(eta=4) (cluster.gpus=64)". A comparison of one run needs
    no name. `source` has the results: in memory, or the folder in which they were written.
    """

    scenarios: tuple[Scenario, ...]
    rows: tuple[Mapping[str, Any], ...]
    source: Sequence[Result] | Path
    unranked: str = ""  # why the rows have no samples/s under other assumed seconds
    brief: bool = False  # what is printed: the table and one line
    columns: bool = False  # and what the columns mean
    inputs: bool = False  # and every input

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.names)}>"

    def _show(self, console: Console) -> None:
        from simrl.show.tables.compare import Shown, show_comparison

        shown = Shown(1 if self.brief else None, self.columns, self.inputs)
        show_comparison(self.rows, self.scenarios, self._metadata(), console, self.unranked, shown)

    def json(self) -> Any:
        """Return what `--json` prints."""
        return self.rows

    @property
    def table(self) -> pd.DataFrame:
        """A row per run, the columns of `--json`."""
        return frame(self.rows)

    @property
    def names(self) -> list[str]:
        """The names of the runs."""
        from simrl.show.tables.ranking import row_name

        return [row_name(row) for row in self.rows]

    @cached_property
    def results(self) -> Mapping[str, Result]:
        """The runs by name."""
        from simrl.result.result import read_result

        results = self.source
        if isinstance(results, Path):
            results = [read_result(results / row["folder"]) for row in self.rows]
        return dict(zip(self.names, results, strict=True))

    def figure(self) -> Picture:
        """Draw samples per second, bubbles and off-policyness by system."""
        from simrl.show.figures.compare import comparison_figure

        return comparison_figure(self.rows)

    def result(self, name: str | None = None) -> Result:
        """Return the tables of a run (spans, steps, samples, segments) and its metadata. Raise
        `InputError` for an unknown name."""
        if name is None and len(self.names) == 1:
            name = self.names[0]
        if name is None or name not in self.names:
            what = "no name" if name is None else f"{name!r}{meant(name, self.names)}"
            raise InputError(f"{what}: name one of the runs, {', '.join(map(repr, self.names))}")
        return self.results[name]

    def timeline(
        self, name: str | None = None, steps: int = 3, first_step: int | None = None
    ) -> Picture:
        """Draw the work of each GPU over some policy updates: from `first_step` (counted from 0),
        or in the middle."""
        from simrl.result.timeline import steady_window
        from simrl.show.figures.timeline import timeline_figure

        result = self.result(name)
        return timeline_figure(result, steady_window(result, steps, first_step))

    def explain(self, name: str | None = None, step: int | None = None) -> ExplanationView:
        """Say where a run's GPU time went, what delayed its updates, and which known problems it
        shows."""
        return explain(self.result(name), step)

    def diff(self, a: str, b: str) -> DifferenceView:
        """Say what makes run `b` faster or slower than run `a`."""
        return diff(self.result(a), self.result(b))

    def save(self, folder: str | Path) -> Path:
        """Write the files of `simrl compare` (tables, timelines, traces for Perfetto,
        comparison.json) and return the folder. An earlier comparison there is replaced. Raise
        `InputError` for a folder that cannot be written."""
        from simrl.show.comparison import write_comparison

        write_comparison(self.rows, self.scenarios, list(self.results.values()), Path(folder))
        return Path(folder)

    def report(self, path: str | Path) -> Path:
        """Write the page of `simrl report`, one HTML file that needs no network, and return its
        path. Raise `InputError` for a path that is no .html or cannot be written."""
        return write_runs(self.results, path)

    def _metadata(self) -> list[Mapping[str, Any]]:
        if isinstance(self.source, Path):
            files = [self.source / row["folder"] / "result.json" for row in self.rows]
            return [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return [result.metadata for result in self.source]


def simulate_all(
    scenarios: Sequence[Scenario],
    inputs: InputCache | None,
    jobs: int,
    folder: Path | None,
    beside: Beside | None = None,
) -> Comparison:
    """Simulate all scenarios and the runs that accompany them (`beside`), in memory or into a
    folder."""
    from simrl.show.comparison import compare_scenarios
    from simrl.simulate.cache import InputCache
    from simrl.study.compare import ALONE, simulate_compared, the_result

    inputs, beside = inputs or InputCache(), beside or ALONE
    if folder is None:
        made = simulate_compared(scenarios, jobs, inputs, the_result, beside)
        return Comparison(tuple(made.scenarios), tuple(made.rows), made.kept, made.unranked)
    notes = [
        f"Written to {folder}: comparison.png, a folder per row (perfetto.json opens in ui.perfetto.dev)"
        + ", in place of an earlier run's" * (folder / "comparison.json").exists()
    ]
    written = compare_scenarios(scenarios, folder, jobs, inputs, beside)
    return Comparison(
        tuple(written.scenarios), tuple(written.rows), folder, written.unranked, notes=notes
    )


@command
def compare(
    workload: o.Workload,
    systems: o.Systems = None,
    overrides: o.Overrides = None,
    *,
    seed: o.Seed = None,
    pipelines: Annotated[
        o.NameList | None,
        typer.Option(
            "--pipeline",
            help="a system whose pipeline to simulate (see simrl systems); may be repeated",
        ),
    ] = None,
    dispatches: Annotated[
        o.NameList | None,
        typer.Option(
            "--dispatch",
            help="dispatch rule for each pipeline: least_requests, seer …; may be repeated",
        ),
    ] = None,
    speculations: Annotated[
        o.SystemList | None,
        typer.Option(
            "--speculation",
            help="method for each pipeline: none, histospec, tlt …; may be repeated",
        ),
    ] = None,
    measured: Annotated[
        o.RunLike | None,
        typer.Option(
            help="folder of a replay, or NeMo-RL's rollout_trace.jsonl, to compare with SCENARIO: one system or a result folder"
        ),
    ] = None,
    ranking: Annotated[
        bool | None,
        typer.Option(
            help="repeat the runs with assumed seconds × 0.5 and × 2 (default: if that is quick)"
        ),
    ] = None,
    best_split: Annotated[
        bool | None,
        typer.Option(
            help="search the best split of each system (default: try one other split, and say if it is faster)"
        ),
    ] = None,
    sure: Annotated[
        bool,
        typer.Option(
            "--sure",
            help="simulate two further seeds, and print the spread of samples/s over the three",
        ),
    ] = False,
    updates: o.Updates = None,
    price: o.Price = None,
    brief: o.Brief = False,
    explain_columns: o.ExplainColumns = False,
    inputs: o.Inputs = False,
    folder: o.Folder = None,
    jobs: o.Jobs = o.JOBS,
    **setup: Unpack[o.Setup],
) -> Comparison | AgreementView:
    """Simulate every system of a scenario and print which is fastest; write tables, timelines and traces of all.
    \f
    `workload` may also be the content of a scenario file, a `Trace` or a DataFrame with a row per response (columns step,
    prompt_id, prompt_tokens, response_tokens; sample, epoch, reward … if known), whose max_response_length is `cap_tokens`
    (default: the longest response). `systems` are names, or names with parameters; `overrides` may be a dictionary by dotted
    keys, {"training.mfu": 0.3}. With `measured`, the result is an `AgreementView`. Raises `InputError` for a scenario that
    cannot be executed.

    >>> import simrl
    >>> compared = simrl.compare(
    ...     "traces/countdown/sync/trace.parquet",
    ...     systems=["verl_colocated", {"name": "areal", "eta": 4}],
    ...     model="qwen3-8b", gpu="h100", gpus=16, steps=4,
    ... )
    >>> compared
    <Comparison of verl_colocated, areal(eta=4)>
    >>> compared.table.shape[0]
    2
    """
    from simrl.commands.workload import LOG, open_workload, report_overruled
    from simrl.scenario.load import Choices
    from simrl.study.compare import Beside, without_colocated
    from simrl.systems.recipes import parameters_of

    if not isinstance(updates, int | None):
        raise InputError(f"--updates {updates}: a whole number of policy updates is needed")
    opening = "compare", workload, systems, overrides, {**setup, "seed": seed, "price": price}
    choices = Choices(pipelines or (), dispatches or (), speculations or ())
    if measured is not None:
        return agreement(measured, folder, choices, *opening)
    opened = open_workload(*opening, choices=choices)
    file = opened.file()
    scenarios = file.scenarios(choices, parameters_of)
    report_overruled(file, (setting.key for setting in opened.settings))
    scenarios, left_out = without_colocated(scenarios)
    for line in left_out:
        LOG.info(line)
    output = _of_results(folder, scenarios, scenarios[0].name)
    compared = simulate_all(
        scenarios, opened.inputs(), jobs, output, Beside(ranking, best_split, sure, updates)
    )
    for line in file.replaced():
        LOG.info(line)
    return replace(compared, brief=brief, columns=explain_columns, inputs=inputs)


@command
def run(
    workload: o.Workload,
    system: Annotated[
        o.OneSystem | None,
        typer.Option(help="the system to run (default: the scenario's, if it has only one)"),
    ] = None,
    overrides: o.Overrides = None,
    *,
    seed: o.Seed = None,
    pipeline: Annotated[str | None, typer.Option(help="another name for --system")] = None,
    dispatch: Annotated[
        str | None, typer.Option(help="dispatch, in place of the system's own")
    ] = None,
    speculation: Annotated[
        o.OneSystem | None, typer.Option(help="method of speculation, in place of the system's own")
    ] = None,
    brief: o.Brief = False,
    explain_columns: o.ExplainColumns = False,
    inputs: o.Inputs = False,
    folder: o.Folder = None,
    **setup: Unpack[o.Setup],
) -> Comparison:
    """Simulate one system of a scenario. With --system, overrides such as eta=8 set parameters of that system.
    \f
    Returns a `Comparison` of one run, whose methods need no name. `compare` describes the other arguments and the errors.

    >>> import simrl
    >>> one = simrl.run("experiments/quickstart.yaml", {"name": "areal", "eta": 2}, gpus=16, steps=4, warmup_steps=1)
    >>> one.result().steps.num_rows
    4
    """
    from simrl.commands.workload import LOG, open_workload
    from simrl.scenario.load import Choices
    from simrl.study.compare import run_names
    from simrl.systems.recipes import make_system

    if system and pipeline:
        raise InputError(
            f"--system {system} and --pipeline {pipeline} are the same option; give one of them"
        )
    chosen = system or pipeline
    choices = Choices((), [dispatch] if dispatch else (), [speculation] if speculation else ())
    opened = open_workload(
        "run", workload, chosen and [chosen], overrides, {**setup, "seed": seed}, choices=choices
    )
    scenarios = opened.scenarios(choices)
    if len(scenarios) > 1:
        for scenario in scenarios:  # a misspelt parameter is reported first
            make_system(scenario.system.name, scenario.system.parameters)
        varied = {
            part.partition("=")[0]: None
            for scenario in scenarios
            for part in scenario.variant.split(", ")
            if part
        }
        choose = [*([] if chosen else ["--system NAME"]), *(f"{key}=…" for key in varied)]
        raise InputError(
            f"{opened.origin}: {len(scenarios)} runs ({run_names(scenarios)}); choose one with {' and '.join(choose)}, or "
            "compare"
        )
    name = f"{scenarios[0].name}-{scenarios[0].system.name}"
    ran = simulate_all(scenarios, opened.inputs(), 1, _of_results(folder, scenarios, name))
    for line in opened.file().replaced():
        LOG.info(line)
    return replace(ran, brief=brief, columns=explain_columns, inputs=inputs)


def _of_results(folder: Any, scenarios: Sequence[Scenario], name: str) -> Path | None:
    """Return the folder of results, by default `results/NAME`; another one if the scenario lies
    there, such as a calibrated one. Raises `InputError` if the user names its folder."""
    output, file = place(folder, Path("results") / name), Path(scenarios[0].file)
    if output is None or not file.is_file() or output.resolve() != file.parent.resolve():
        return output
    if output != Path("results") / name:
        raise InputError(
            f"-o {output}: the scenario lies there, and would be replaced; name another folder"
        )
    return output.with_name(f"{name}-compare")
