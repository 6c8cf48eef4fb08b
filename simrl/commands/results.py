"""`simrl explain`, `simrl diff`, `simrl.agree` and `simrl report`: commands that read the results
of runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from simrl.commands.command import command
from simrl.commands.options import File, Place, Run, RunLike
from simrl.commands.view import DataView, place
from simrl.errors import InputError, refuse

if TYPE_CHECKING:
    from simrl.analysis.agreement import Agreement
    from simrl.analysis.explanation import Difference, Explanation
    from simrl.commands.compare import Comparison
    from simrl.commands.sweep import Sweep
    from simrl.result.result import Result
    from simrl.scenario.load import Choices
    from simrl.scenario.model import Scenario
    from simrl.show.style import Picture

    Results: TypeAlias = "Comparison | Sweep | AgreementView | Result | str | os.PathLike[str]"
else:
    Results = Path

ERRORS = {
    "rollout_s": "makespan_err",
    "wall_s": "wall_err",
    "bubble": "bubble_err",
    "acceptance": "acceptance_err",
    "accept_length": "accept_length_err",
}


class ExplanationView(DataView):
    """The parts of a run's GPU time. `data` has the waterfall, the critical path of an update, the
    samples that delayed it, and the findings; `table` has a row per part: GPU-seconds of the run,
    and per trained sample after the warm-up."""

    data: Explanation

    def figure(self) -> Picture:
        """Draw the GPU-seconds per trained sample, a bar per part."""
        from simrl.show.figures.explain import explanation_figure

        return explanation_figure(self.data)


class DifferenceView(DataView):
    """Run B against run A. `data` has the changes, the largest first; `table` has a row per part:
    GPU-seconds per trained sample of A and of B, and what B saves."""

    data: Difference

    def figure(self) -> Picture:
        """Draw what B saves and what it adds, a bar per part."""
        from simrl.show.figures.explain import difference_figure

        return difference_figure(self.data)


@dataclass(frozen=True, repr=False, kw_only=True)
class AgreementView(DataView):
    """Predicted against measured: how far apart in time, and which decisions differ; `data` has all
    of it. `scenario` is the simulated one, if any. `table` has a row per figure: predicted,
    measured, and the error (see `agreement.Errors`)."""

    data: Agreement
    predicted: Result
    measured: Result
    scenario: Scenario | None = None

    def figure(self) -> Picture:
        """Draw predicted above measured for each worker, and when each sample finished."""
        from simrl.show.figures.agree import agreement_figure

        return agreement_figure(self.predicted, self.measured, self.data)

    def save(self, folder: str | Path) -> Path:
        """Write agreement.json, agreement.png and, if it was simulated, the predicted run; return
        the folder."""
        from simrl.files import write_whole_folder
        from simrl.show.comparison import MANIFEST, write_comparison
        from simrl.show.style import save
        from simrl.study.compare import with_speedups
        from simrl.study.point import row_of

        with write_whole_folder(Path(folder), MANIFEST) as temporary:
            if self.scenario is not None:
                rows = with_speedups([self.scenario], [row_of(self.scenario, self.predicted)])
                write_comparison(rows, [self.scenario], [self.predicted], temporary / "predicted")
            text = json.dumps(self.json(), indent=1)
            (temporary / "agreement.json").write_text(text + "\n", encoding="utf-8")
            save(self.figure(), temporary / "agreement.png")
        return Path(folder)

    def report(self, path: str | Path) -> Path:
        """Write both as the page that `simrl report` makes of a replay, and return its path; errors
        as in `Comparison.report`."""
        return write_runs(
            {"predicted": self.predicted, "measured": self.measured}, path, replayed=True
        )


@command
def explain(
    result: Run,
    step: Annotated[
        int | None,
        typer.Option(
            help="the update whose critical path is shown, counted from 0 (default: one of median length)"
        ),
    ] = None,
) -> ExplanationView:
    """Say where the GPU-hours of a run went, what delayed its updates, and which known problems it shows.
    \f
    `result` may also be a `Comparison` of one run. Raises `InputError` for a run without updates, and for an update that it has
    not made.

    >>> import simrl
    >>> simrl.explain("traces/countdown/sync/parts/000").data.updates
    40
    """
    from simrl.analysis.explanation import explain_result
    from simrl.show.tables.explain import print_explanation

    run = result_of(result)
    with _named(result):
        explanation = explain_result(run, step)
    return ExplanationView(
        explanation,
        print_explanation,
        f"Explanation of {explanation.label}",
        explanation.as_json()["parts"],
    )


@command
def diff(
    a: Annotated[RunLike, typer.Argument(metavar="A", help="the folder of a run or of a replay")],
    b: Annotated[RunLike, typer.Argument(metavar="B", help="another folder")],
) -> DifferenceView:
    """Say what made run B faster than run A: the differences of their GPU-hours by cause, the largest first.
    \f
    >>> import simrl
    >>> simrl.diff("traces/countdown/sync/parts/000", "traces/countdown/areal/parts/000")
    <Difference of split(...), measured and areal(...), measured>
    """
    from simrl.analysis.explanation import diff_results
    from simrl.show.tables.explain import print_difference

    runs = result_of(a), result_of(b)
    with _named(a, b):
        difference = diff_results(*runs)
    changes = [vars(change) for change in difference.changes]
    return DifferenceView(
        difference, print_difference, f"Difference of {difference.a} and {difference.b}", changes
    )


@command
def agree(predicted: RunLike, measured: RunLike, *, folder: Place | None = None) -> AgreementView:
    """Compare predicted with measured: how far apart two runs of one schedule on one trace are, and which decisions differ.
    \f
    Either is as for `explain`; `predicted` may also be a scenario file with one system, which is simulated. `folder` is written
    as by `simrl compare --measured`. Raises `InputError` for runs that have nothing in common.

    >>> import simrl
    >>> agreement = simrl.agree("traces/countdown/sync/scenario.yaml", "traces/countdown/sync/parts/000")
    >>> agreement.data.samples
    5120
    """
    from simrl.scenario.load import Choices

    return agreement(measured, folder, Choices(), "agree", predicted)


def agreement(
    measured: Any,
    folder: Any,
    choices: Choices,
    call: str,
    predicted: Any,
    systems: Any = None,
    overrides: Any = None,
    setup: Mapping[str, Any] | None = None,
) -> AgreementView:
    """Compare a result, or the scenario that the arguments from `call` on open (`open_workload`),
    with what was measured."""
    from simrl.analysis.agreement import agree
    from simrl.analysis.measured_events import measured_result
    from simrl.commands.workload import open_workload
    from simrl.result.result import Result
    from simrl.show.tables.agree import print_agreement
    from simrl.study.compare import folder_name, run_names, simulate_compared, the_result

    happened = _read(measured, "measured")  # before anything is simulated
    scenario = None
    if (
        Path(predicted).is_dir()
        if isinstance(predicted, str | os.PathLike)
        else not isinstance(predicted, dict)
    ):
        changes = [systems, overrides, *choices, *(v is not None for v in (setup or {}).values())]
        refuse(
            (
                any(changes),
                f"{predicted}: is the result of a run, which overrides cannot change; name a scenario instead",
            )
        )
        expected = _read(predicted, "predicted")
    else:
        opened = open_workload(call, predicted, systems, overrides, setup, choices=choices)
        scenario, *others = scenarios = opened.scenarios(choices)
        refuse(
            (
                others,
                f"{opened.origin}: {len(scenarios)} runs ({run_names(scenarios)}), but one was measured; choose it with "
                "systems=[NAME] and cluster.gpus=…, or name its result folder",
            )
        )
        (expected,) = simulate_compared(scenarios, 1, opened.inputs(), the_result).kept
    with _named(predicted, measured):
        if not isinstance(happened, Result):
            happened = measured_result(happened, expected)
        compared = agree(expected, happened)
    errors = vars(compared.errors)
    rows = [
        {"figure": k, **vars(getattr(compared.figures, k)), "error": errors[name]}
        for k, name in ERRORS.items()
    ]
    rows += [{"figure": name, "error": errors[name]} for name in ("sample_mape", "latency_mape")]
    view = AgreementView(
        data=compared,
        show=print_agreement,
        name=f"Agreement over {compared.samples:,} samples",
        rows=rows,
        predicted=expected,
        measured=happened,
        scenario=scenario,
    )
    name = "result"
    if scenario is not None:
        name = f"{scenario.name}-{folder_name(scenario)}"
    elif isinstance(
        predicted, str | os.PathLike
    ):  # folders in a replay are called predicted and measured, whatever it replayed
        path = Path(predicted).resolve()
        name = path.parent.name if path.name in ("predicted", "measured") else path.name
    output = place(folder, Path("results") / f"{name}-agreement")
    if output is None:
        return view
    replaced = (output / "agreement.json").exists()
    view.save(output)
    notes = [f"Written to {output}: agreement.json, agreement.png"]
    notes += [f"and what was predicted: {output / 'predicted'}"] if scenario is not None else []
    notes += (
        ["It replaced an earlier comparison there; --output names another folder."]
        if replaced
        else []
    )
    return replace(view, notes=notes)


@command
def report(
    results: Annotated[
        Results,
        typer.Argument(
            metavar="RESULTS",
            help="a folder of simrl compare, run, replay or sweep, of one run in it, or of a recorded run",
        ),
    ],
    path: Annotated[
        File | None,
        typer.Option("--output", "-o", help="the page (default: beside the folder, with its name)"),
    ] = None,
) -> Path:
    """Write results as one HTML page that needs no network: which system is fastest and why, timelines to zoom into, and the
    inputs.
    \f
    `results` may also be what compare, run, sweep and agree return. Returns the path. Raises `InputError` for a path that is no
    .html, cannot be written or lies among results.

    >>> import simrl, tempfile
    >>> page = simrl.report("traces/countdown/sync/parts/000", tempfile.mkdtemp() + "/sync.html")
    >>> page.name
    'sync.html'
    """
    from simrl.result.result import Result
    from simrl.show.report.page import beside, write_report

    if isinstance(results, str | os.PathLike):
        page = Path(path) if path is not None else beside(Path(results))
        write_report(Path(results), page)
        return page
    if path is None:
        raise InputError("simrl.report: no path; name the page, such as 'page.html'")
    if isinstance(results, Result):
        return write_runs({"run": results}, path)
    if not hasattr(results, "report"):
        raise InputError(
            f"simrl.report: {results!r} has no page; give what compare, run, sweep or agree return, or a folder of results"
        )
    return results.report(Path(path))


def write_runs(
    results: Mapping[str, Result], path: str | os.PathLike[str], replayed: bool = False
) -> Path:
    """Write runs as a page and return its path."""
    from simrl.show.report.page import write_page
    from simrl.show.report.sources import runs_of

    write_page(runs_of(dict(results), replayed=replayed), Path(path))
    return Path(path)


def result_of(run: Any) -> Result:
    """Return the result of a `Comparison` of one run, of a folder, or itself. Raise `InputError`
    for a folder without one."""
    from simrl.result.result import Result, find_result

    if isinstance(run, Result):
        return run
    return find_result(Path(run)) if isinstance(run, str | os.PathLike) else run.result()


def _read(run: Any, name: str) -> Any:
    """Return a result, or a file of events; the folder of a replay holds two results."""
    from simrl.result.result import METADATA_FILE
    from simrl.trace.importers.rollout_trace import read_events

    if isinstance(run, str | os.PathLike):
        folder = Path(run)
        if folder.suffix == ".jsonl" and folder.is_file():
            return read_events(folder)
        run = (
            folder / name
            if (folder / name).is_dir() and not (folder / METADATA_FILE).exists()
            else folder
        )
    return result_of(run)


@contextmanager
def _named(*runs: Any) -> Iterator[None]:
    """Name the folders of the runs in an error."""
    try:
        yield
    except InputError as error:
        folders = [str(Path(run)) for run in runs if isinstance(run, str | os.PathLike)]
        if not folders:
            raise
        raise InputError(f"{', '.join(folders)}: {error}") from error
