"""What the Python API returns: frozen data that shows itself, on the screen (`print`) and in a notebook.

Invariant: a view computes nothing that the commands do not print or write; its `table` has the columns of `--json`. Figures are
matplotlib's, and no view keeps a window or a file open.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from simrl.acceptance_report import model_yaml, print_report, report_figure
from simrl.agreement import Agreement, agree
from simrl.agreement_plot import agreement_figure
from simrl.agreement_table import print_agreement
from simrl.calibration import Calibration
from simrl.calibration_table import print_calibration
from simrl.comparison import write_comparison
from simrl.errors import InputError, meant
from simrl.executors import Here
from simrl.explanation import Difference, Explanation, diff_results, explain_result
from simrl.explanation_plot import difference_figure, explanation_figure
from simrl.explanation_table import print_difference, print_explanation
from simrl.html_report import write_page, write_report
from simrl.html_report.sources import runs_of
from simrl.optimization import Optimization
from simrl.optimization_plot import optimization_figure
from simrl.optimization_table import print_optimization
from simrl.page import Page
from simrl.picture import Picture
from simrl.plots import comparison_figure, timeline_figure
from simrl.points import Outcome
from simrl.result import Result
from simrl.scenario import Scenario
from simrl.sweep_plot import sweep_figure
from simrl.sweep_table import print_sweep
from simrl.sweeps import Plan, Swept, run, write_outcome
from simrl.table import row_name, show_comparison
from simrl.timeline import steady_window

if TYPE_CHECKING:
    import pandas as pd

WIDE = 10_000  # characters of a line: as on a pipe, nothing has to be left out or broken

NESTED = ("leads", "reasons", "variant", "variant_loss")  # of a choice: no columns, they are in its data


class View:
    """Shows itself as the commands do: `print(view)` on the screen, the last line of a cell in a notebook."""

    _markup = False

    def _show(self, console: Console) -> None:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        page = Page(markup=self._markup)
        self._show(page)
        return page.html

    def __str__(self) -> str:
        text = io.StringIO()
        self._show(Console(file=text, width=WIDE, highlight=False, markup=self._markup))
        return text.getvalue().rstrip()


@dataclass(frozen=True, repr=False)
class Comparison(View):
    """Simulated runs side by side, in the order in which they were asked for.

    `rows` is what `--json` prints: a dictionary a run, seconds and tokens as their names say, shares from 0 to 1. `results` has
    the runs by name: the system as the table calls it, such as "areal(eta=4)", and where something is varied its values, as in
    "areal(eta=4) (cluster.gpus=64)". Where there is one run, no name is needed.
    """

    scenarios: tuple[Scenario, ...]
    results: Mapping[str, Result]
    rows: tuple[Mapping[str, Any], ...]

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.results)}>"

    def _show(self, console: Console) -> None:
        show_comparison(self.rows, self.scenarios, [each.metadata for each in self.results.values()], console)

    @property
    def table(self) -> pd.DataFrame:
        """A row a run, the columns of `--json`."""
        return _frame(self.rows)

    def figure(self) -> Picture:
        """Samples a second by system, and what they come with."""
        return comparison_figure(self.rows)

    def result(self, name: str | None = None) -> Result:
        """The tables of a run (spans, steps, samples, segments) and its metadata. Raises `InputError` for a name that no run
        has."""
        if name is None and len(self.results) == 1:
            return next(iter(self.results.values()))
        if name is None or name not in self.results:
            found = "no name" if name is None else f"{name!r}{meant(name, self.results)}"
            raise InputError(f"{found}: name one of the runs, {', '.join(map(repr, self.results))}")
        return self.results[name]

    def timeline(self, name: str | None = None, steps: int = 3, first_step: int | None = None) -> Picture:
        """What each GPU does in time, over some policy updates: from `first_step` on (counted from 0), or in the middle."""
        result = self.result(name)
        return timeline_figure(result, steady_window(result, steps, first_step))

    def explain(self, name: str | None = None, step: int | None = None) -> ExplanationView:
        """Where a run's GPU time went, what held its updates up, which known signs of trouble it shows."""
        return ExplanationView(explain_result(self.result(name), step))

    def diff(self, a: str, b: str) -> DifferenceView:
        """What makes run `b` faster or slower than run `a`."""
        return DifferenceView(diff_results(self.result(a), self.result(b)))

    def save(self, folder: str | Path) -> Path:
        """Writes what `simrl compare` writes: tables, timelines, traces for Perfetto, comparison.json. An earlier comparison
        there is replaced. Raises `InputError` where that cannot be written. Returns the folder."""
        rows = [dict(row) for row in self.rows]
        write_comparison(self.scenarios, list(self.results.values()), rows, Path(folder))
        return Path(folder)

    def report(self, path: str | Path) -> Path:
        """Writes the page that `simrl report` makes of these runs: one HTML file that needs no network. Raises `InputError` for
        a path that is no .html or cannot be written. Returns the path."""
        write_page(runs_of(dict(self.results)), Path(path))
        return Path(path)


def comparison(
    scenarios: Sequence[Scenario], results: Sequence[Result], rows: Sequence[Mapping[str, Any]]
) -> Comparison:
    """Of runs, their scenarios and the rows that go with them."""
    return Comparison(tuple(scenarios), dict(zip(map(row_name, rows), results, strict=True)), tuple(rows))


@dataclass(frozen=True, repr=False)
class ExplanationView(View):
    """Where the GPU time of a run went. `data` has it in full: the waterfall, the critical path of an update, the samples that
    held it up, and the findings."""

    data: Explanation

    def __repr__(self) -> str:
        return f"<Explanation of {self.data.label}>"

    def _show(self, console: Console) -> None:
        print_explanation(self.data, console)

    @property
    def table(self) -> pd.DataFrame:
        """A row a part of the GPU time: GPU-seconds of the run, and a trained sample after the warm-up."""
        return _frame(self.data.as_json()["parts"])

    def figure(self) -> Picture:
        """GPU-seconds a trained sample, a bar a part."""
        return explanation_figure(self.data)


@dataclass(frozen=True, repr=False)
class DifferenceView(View):
    """Run B against run A, in GPU-seconds a trained sample; `data` has the changes, the largest first."""

    data: Difference

    def __repr__(self) -> str:
        return f"<Difference of {self.data.a} and {self.data.b}>"

    def _show(self, console: Console) -> None:
        print_difference(self.data, console)

    @property
    def table(self) -> pd.DataFrame:
        """A row a part: GPU-seconds a trained sample of A and of B, and what B saves."""
        return _frame([vars(change) for change in self.data.changes])

    def figure(self) -> Picture:
        """What B saves and what it spends more, a bar a part."""
        return difference_figure(self.data)


@dataclass(frozen=True, repr=False)
class AgreementView(View):
    """Predicted against measured: how far apart in time, and what was decided otherwise; `data` has it in full."""

    predicted: Result
    measured: Result
    data: Agreement

    def __repr__(self) -> str:
        return f"<Agreement over {self.data.samples:,} samples>"

    def _show(self, console: Console) -> None:
        print_agreement(self.data, console)

    @property
    def table(self) -> pd.DataFrame:
        """A row a figure: predicted, measured, and the error under its name (`simrl.agreement.Errors` says what it is of)."""
        figures, errors = self.data.figures, vars(self.data.errors)
        names = {
            "rollout_s": "makespan_err",
            "wall_s": "wall_err",
            "bubble": "bubble_err",
            "acceptance": "acceptance_err",
            "accept_length": "accept_length_err",
        }
        rows = [{"figure": key, **vars(getattr(figures, key)), "error": errors[name]} for key, name in names.items()]
        rows += [{"figure": name, "error": errors[name]} for name in ("sample_mape", "latency_mape")]
        return _frame(rows)

    def figure(self) -> Picture:
        """For each worker predicted above measured, and when each sample finished."""
        return agreement_figure(self.predicted, self.measured, self.data)

    def report(self, path: str | Path) -> Path:
        """Writes both as the page that `simrl report` makes of a replay; otherwise as `Comparison.report`."""
        both = {"predicted": self.predicted, "measured": self.measured}
        write_page(runs_of(both, replayed=True), Path(path))
        return Path(path)


def agreed(predicted: Result, measured: Result) -> AgreementView:
    """The agreement of two runs of one schedule on one trace."""
    return AgreementView(predicted, measured, agree(predicted, measured))


@dataclass(frozen=True, repr=False)
class Sweep(View):
    """Many scenarios, a row a point. A point that cannot be is a row with its `error`."""

    plan: Plan
    swept: Swept
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Sweep of {len(self.swept.rows)} points over {', '.join(self.plan.keys)}>"

    def _show(self, console: Console) -> None:
        print_sweep(self.plan, self.swept, console)

    @property
    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """What the Parquet table of `simrl sweep` holds, a dictionary a point."""
        return tuple(self.swept.rows)

    @property
    def table(self) -> pd.DataFrame:
        """A row a point: what was varied under its own key, and the columns of a comparison."""
        return _frame(self.swept.rows)

    def figure(self, value: str = "samples_per_s", x: str | None = None, y: str | None = None) -> Picture:
        """A column over the keys that vary: lines over one (`x`), a map over two (`x` and `y`). Raises `InputError` for a key
        that does not vary."""
        return sweep_figure(self.swept.rows, self.plan.keys, value, x, y)

    def save(self, folder: str | Path) -> Path:
        """Writes what `simrl sweep` writes; the same sweep given this folder simulates nothing again. Returns the folder."""
        folder = Path(folder)
        for point in self.plan.points:
            if point.hash in self.outcomes:
                write_outcome(folder, point, self.outcomes[point.hash])
        run(self.plan, dict(self.outcomes), folder, Here(), self.asked)
        return folder

    def report(self, path: str | Path) -> Path:
        """Writes the page that `simrl report` makes of a sweep; otherwise as `Comparison.report`."""
        with tempfile.TemporaryDirectory(prefix="simrl-report-") as folder:
            write_report(self.save(folder), Path(path))
        return Path(path)


@dataclass(frozen=True, repr=False)
class OptimizationView(View):
    """Which system, split, tp, drafter and η to run. `data` has it in full: every option that was tried, the best few with
    their reasons, how robust the choice is, and how to launch it; `data.as_json()` is what `--json` prints of it."""

    data: Optimization

    def __repr__(self) -> str:
        return f"<Optimization of {self.data.name}: {self.data.choice.option.row['system']}>"

    def _show(self, console: Console) -> None:
        print_optimization(self.data, console)

    @property
    def table(self) -> pd.DataFrame:
        """A row each of the best few, the choice first: rank, tp, merit, the columns of a comparison, and whether it is closer
        to the choice than simrl's own error (`tied`)."""
        rows = self.data.as_json()["best"]
        return _frame([{key: value for key, value in row.items() if key not in NESTED} for row in rows])

    @property
    def front(self) -> pd.DataFrame:
        """A row an option that none beats in throughput, staleness and cost at a time, the freshest first."""
        return _frame(self.data.as_json()["front"])

    def figure(self) -> Picture:
        """Throughput against staleness of every option that keeps the limits, and which of them are on the front."""
        return optimization_figure(self.data)


@dataclass(frozen=True, repr=False)
class CalibrationView(View):
    """The few corrections that make simrl a real run, and how far off it is. `data` has it in full, the `scenario` too."""

    data: Calibration

    def __repr__(self) -> str:
        return f"<Calibration of {self.data.scenario.name} on steps {self.data.window[0]} to {self.data.window[1]}>"

    def _show(self, console: Console) -> None:
        print_calibration(self.data, console)

    @property
    def table(self) -> pd.DataFrame:
        """A row a correction: its value, standard error and range, and the key of a scenario that it is."""
        return _frame(self.data.as_json()["corrections"])

    @property
    def errors(self) -> pd.DataFrame:
        """A row a phase: how far simulated seconds are from logged ones, in the window and on the steps that nobody fitted."""
        return _frame(self.data.as_json()["errors"])

    @property
    def steps(self) -> pd.DataFrame:
        """A row a step of the log, measured and simulated seconds of its phases."""
        return self.data.steps


@dataclass(frozen=True, repr=False)
class WhatIf(View):
    """A real run and what other systems would have made of it: its `calibration`, the `comparison` of its own steps, and what
    is to be `said` of GPUs that a system cannot share as the run did."""

    calibration: CalibrationView
    comparison: Comparison
    said: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<What if: {', '.join(self.comparison.results)}>"

    def _show(self, console: Console) -> None:
        self.calibration._show(console)
        console.print()
        self.comparison._show(console)
        for line in self.said:
            console.print(line)

    @property
    def table(self) -> pd.DataFrame:
        """A row a run, the columns of a comparison; the first is the run's own system."""
        return self.comparison.table


@dataclass(frozen=True, repr=False)
class AcceptanceView(View):
    """What drafting from texts would give on a recorded run, counted on its tokens. `data` is what `--json` prints."""

    _markup = True

    data: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<Acceptance of {self.data['drafter']} on {self.data['trace']['name']}>"

    def _show(self, console: Console) -> None:
        print_report(dict(self.data), console)

    @property
    def table(self) -> pd.DataFrame:
        """A row an epoch: responses, those with drafts, and the rates over these."""
        return _frame(self.data["by_epoch"])

    @property
    def batches(self) -> pd.DataFrame:
        """A row a batch size: seconds a token without and with drafts, and the speed-up of decoding. Raises `InputError` where
        no step times were given."""
        if self.data["pays"] is None:
            raise InputError(
                "no step times: give acceptance profile=, or model= and gpu=, to know at which batches drafts pay"
            )
        return _frame(self.data["pays"]["by_batch"])

    @property
    def speculation(self) -> dict[str, Any]:
        """The model that was fitted to these drafts, as a scenario takes it for traces without tokens:
        `overrides={"speculation": found.speculation}`."""
        section: dict[str, Any] = yaml.safe_load(model_yaml(dict(self.data)))["speculation"]
        return section

    def figure(self) -> Picture:
        """Hit lengths, epochs, responses and, with step times, the speed-up by batch."""
        return report_figure(dict(self.data))


def _frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows))
