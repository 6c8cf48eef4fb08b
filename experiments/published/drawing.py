"""Helpers of the board's figures: runs at the middle inputs, published marks, and a common style.

Invariant: a bar or a line is simulated, a black diamond is published. Published values come from
`experiments.reproduce.score`, so a figure has marks only where `published.csv` has the row.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from PIL import Image

from experiments.reproduce.lab import Lab, Measures
from experiments.reproduce.ledger import Inputs, read_ledger
from experiments.reproduce.predict import PAPERS, paper_of
from experiments.reproduce.score import Bound, published_rows
from simrl.result.result import Result
from simrl.result.timeline import Floats, Spans, running_requests, spans
from simrl.scenario.model import Scenario
from simrl.show.style import (
    BLACK,
    FAINT,
    INK,
    KINDS,
    LOOKS,
    PAPER,
    SERIES,
    SKY,
    UNKNOWN,
    Picture,
)
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared

WIDTH_IN, DPI = 9.0, 100
INTERVAL = FAINT
COLOURS = SERIES
MARK: dict[str, Any] = {
    "marker": "D",
    "color": BLACK,
    "markeredgecolor": PAPER,
    "markersize": 6,
    "linestyle": "none",
}
PALETTE = 255  # colours of a PNG
SHADES = LinearSegmentedColormap.from_list("requests", [(0, PAPER), (1, SKY)])


class Drawn(NamedTuple):
    """A picture, the paper's figure it resembles, and two sentences on its content."""

    figure: Picture
    title: str
    says: str


class Bench:
    """A lab, the middle of each paper's inputs, and a board (the rows of `experiments.reproduce --json`) if there is one."""

    def __init__(self, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self.lab = Lab()
        self._board = {entry["id"]: entry for entry in entries}

    def inputs(self, paper: str) -> Inputs:
        return read_ledger(paper).middle

    def bound(self, row: str) -> Bound:
        """Return the first published element of a row, as a ratio where it is a gain."""
        return published_rows()[row].elements[0]

    def value(self, row: str) -> float:
        return self.bound(row).value

    def values(self, row: str) -> list[float]:
        return [bound.value for bound in published_rows()[row].elements]

    def predicted(self, row: str) -> list[float]:
        """Return the elements of a row at the middle of its paper's inputs, as ratios where it is a gain."""
        paper = paper_of(row)
        assert paper is not None
        return [
            published_rows()[row].comparable(x)
            for x in PAPERS[paper].ROWS[row](self.lab, self.inputs(paper))
        ]

    def both(self, *rows: str) -> tuple[list[float], list[float]]:
        """Return the first element of each row, predicted and published."""
        return [self.predicted(row)[0] for row in rows], [self.value(row) for row in rows]

    def intervals(self, row: str) -> list[Interval]:
        """Return the board's intervals of a row's elements; None each without a board, or without a prediction."""
        entry = self._board.get(row)
        if entry is None or entry["predicted"] is None:
            return [None] * len(self.values(row))
        return list(zip(entry["low"], entry["high"], strict=True))

    def result(self, scenario: Scenario) -> Result:
        """Return the full result of a scenario, where its measures are not enough."""
        return simulate_prepared(prepare(scenario))


class Scenarios(Lab):
    """A lab that simulates nothing and records the requested scenarios."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Scenario] = []

    def run(self, scenario: Scenario) -> Measures:
        self.asked.append(scenario)
        return {}

    @classmethod
    def of(cls, row: Callable[[Lab], Any]) -> Scenario:
        """Return the scenario that a function of a paper's module runs."""
        lab = cls()
        row(lab)
        return lab.asked[-1]


Draw = Callable[[Bench], Drawn]
Mark = float | Bound | None  # what was published
Interval = tuple[float, float] | None  # what is predicted of all the ranges of inputs
T = TypeVar("T")


def picture(
    rows: int = 1, columns: int = 1, height_in: float = 3.6, **options: Any
) -> tuple[Picture, Any]:
    """Return a figure of the page's width and its axes (always an array of two dimensions)."""
    figure = Picture(WIDTH_IN, height_in, dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_color(FAINT)
        axes.tick_params(colors=INK)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=FAINT, alpha=0.25)
    return figure, panels


def panel(height_in: float) -> tuple[Picture, Axes]:
    """Return a figure of a single panel."""
    figure, panels = picture(1, 1, height_in)
    return figure, panels[0, 0]


def bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    published: Mapping[str, Sequence[Mark]] | None = None,
    intervals: Mapping[str, Sequence[Interval]] | None = None,
    form: str = "{:.3g}",
    values: bool = True,
) -> None:
    """Draw bars by group and series, each with its value at its foot (unless `values` is false), the predicted interval where
    the board has one, and the published value as a mark (a range as a line). A bar of nan is left out."""
    width = 0.8 / len(series)
    for i, (name, heights) in enumerate(series.items()):
        x = np.arange(len(groups)) + (i - (len(series) - 1) / 2) * width
        axes.bar(
            x, np.nan_to_num(heights), width * 0.92, color=COLOURS[i % len(COLOURS)], label=name
        )
        marks = (published or {}).get(name, [None] * len(groups))
        spread = (intervals or {}).get(name, [None] * len(groups))
        for place, value, mark, interval in zip(x, heights, marks, spread, strict=True):
            if values and np.isfinite(value):
                at_foot(axes, place, form.format(value))
            if interval is not None:
                axes.plot(
                    [place, place],
                    interval,
                    color=INTERVAL,
                    linewidth=5,
                    alpha=0.35,
                    solid_capstyle="butt",
                    zorder=3,
                )
            put_mark(axes, place, mark)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.08)
    axes.set_ylim(bottom=0)


def bar_picture(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    published: Mapping[str, Sequence[Mark]] | None = None,
    *,
    y: str,
    x: str = "",
    height_in: float = 3.4,
    form: str = "{:.2f}",
    level: bool = False,
    marks: bool = True,
    intervals: Mapping[str, Sequence[Interval]] | None = None,
) -> Picture:
    """Return a figure of `bars` alone, with its legend; `level` draws a line at 1."""
    figure, axes = panel(height_in)
    bars(axes, groups, series, published, intervals, form)
    if level:
        axes.axhline(1, color=INK, linewidth=0.8)
    axes.set(xlabel=x, ylabel=y)
    spread = [each for row in (intervals or {}).values() for each in row]
    legend(axes, marks, intervals=bool(spread) and None not in spread)
    return figure


def row_picture(
    bench: Bench, rows: Mapping[str, str], systems: Sequence[str], **look: Any
) -> tuple[Picture, list[list[float]], list[list[float]]]:
    """Draw rows as groups of bars (by their labels), one of each system; also return what is predicted and published."""
    found, marks = ([of(row) for row in rows.values()] for of in (bench.predicted, bench.values))
    intervals = by_system([bench.intervals(row) for row in rows.values()], systems)
    figure = bar_picture(
        list(rows),
        by_system(found, systems),
        by_system(marks, systems),
        intervals=intervals,
        **look,
    )
    return figure, found, marks


def by_system(rows: Sequence[Sequence[T]], systems: Sequence[str]) -> dict[str, list[T]]:
    return {
        name: list(values) for name, values in zip(systems, zip(*rows, strict=True), strict=True)
    }


def single(values: Iterable[T]) -> dict[str, list[T]]:
    """Return a series without another beside it."""
    return {"simulated": list(values)}


def at_foot(axes: Axes, x: float, text: str) -> None:
    """Write a bar's value where no mark hides it."""
    shown = axes.annotate(
        text,
        (x, 0),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize="small",
        color=INK,
    )
    shown.set_path_effects([withStroke(linewidth=2.5, foreground=PAPER)])


def put_mark(axes: Axes, x: float, mark: Mark) -> None:
    """Draw a published value, or a range with both ends."""
    if mark is None:
        return
    if isinstance(mark, Bound) and mark.low < mark.high:
        low, high = (end if np.isfinite(end) else mark.value for end in mark)
        axes.plot([x, x], [low, high], color=BLACK, linewidth=2.2, solid_capstyle="butt", zorder=4)
        axes.plot([x, x], [low, high], **{**MARK, "markersize": 4}, zorder=5)
        return
    axes.plot([x], [mark.value if isinstance(mark, Bound) else mark], **MARK, zorder=5)


def legend(axes: Axes, marks: bool = True, intervals: bool = False, **options: Any) -> None:
    """Draw the legend of the axes, of a diamond and of a grey line: above the figure, unless `options` place it."""
    handles, labels = axes.get_legend_handles_labels()
    if intervals:
        handles = [*handles, Line2D([], [], color=INTERVAL, linewidth=5, alpha=0.35)]
        labels = [*labels, "predicted interval"]
    if marks:
        handles = [*handles, Line2D([], [], **MARK)]
        labels = [*labels, "published"]
    look: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": "small"}
    if options:
        axes.legend(handles, labels, **look, **options)
    else:
        axes.figure.legend(handles, labels, loc="outside upper left", ncols=len(handles), **look)


def lanes(axes: Axes, result: Result, start_s: float, end_s: float, copies: str = PAPER) -> Spans:
    """Draw the spans of each lane as a row, in seconds from `start_s`; rollout the paler, the fewer requests a worker has, and
    in the colour `copies` where it has only copies of others' requests. Return the spans shown."""
    part = spans(result).within(start_s, end_s)
    batch = batches(result, start_s, end_s)
    for lane in np.unique(part.lane[part.kind == part.kinds.index("rollout")]):
        extent = (0.0, end_s - start_s, lane + 0.94, lane + 0.06)
        row = np.ma.masked_equal(batch[lane : lane + 1], 0)
        axes.imshow(row, cmap=SHADES, vmin=0, vmax=1, aspect="auto", extent=extent)
    for lane, kind, began_s, ended_s in zip(
        part.lane, part.kind, part.started_s, part.ended_s, strict=True
    ):
        name = part.kinds[kind]
        shown = {"facecolor": copies, "zorder": -1} if name == "rollout" else look_of(name)
        axes.broken_barh(
            [(began_s - start_s, ended_s - began_s)],
            (lane + 0.06, 0.88),
            antialiased=False,
            **shown,
        )
    axes.set_xlim(0, end_s - start_s)
    axes.set_ylim(len(part.lanes), 0)
    axes.set_yticks([])
    axes.grid(False)
    return part


def batches(result: Result, start_s: float, end_s: float) -> Floats:
    """Return the requests at each worker in time, as a share of the most that any has. Shape: (rollout workers, 800)."""
    at_s = np.linspace(start_s, end_s, 800)
    requests = [
        requests_at(result, at_s, worker) for worker in range(result.metadata["rollout_workers"])
    ]
    return np.array(requests) / max(np.max(requests), 1)


def requests_at(result: Result, at_s: Floats, worker: int | None = None) -> Any:
    """Return the requests at all workers, or one, at these instants."""
    times, counts = running_requests(result, worker)
    return np.r_[0, counts][np.searchsorted(times, at_s, "right")]


def rollout_window(result: Result, warmup_steps: int) -> tuple[float, float]:
    """Return start and end of the first rollout after the warm-up."""
    spans = result.spans.to_pandas()
    rollout = spans[(spans["kind"] == "rollout") & (spans["policy_version"] == warmup_steps)]
    return float(rollout["started_s"].min()), float(rollout["ended_s"].max())


def kinds_of(part: Spans) -> set[str]:
    return {part.kinds[kind] for kind in np.unique(part.kind)}


def look_of(kind: str) -> dict[str, Any]:
    return LOOKS.get(kind, UNKNOWN).patch


def kinds_legend(
    figure: Picture, kinds: Iterable[str], others: Mapping[str, str] | None = None
) -> None:
    """Draw below the figure the colour of each kind of span, and of `others`."""
    patches = [
        Patch(label=kind.replace("_", " "), **look_of(kind)) for kind in KINDS if kind in set(kinds)
    ]
    patches += [
        Patch(label=label, facecolor=colour, linewidth=0)
        for label, colour in (others or {}).items()
    ]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=len(patches),
        frameon=False,
        fontsize="small",
        labelcolor=INK,
    )


def share(value: float, form: str = "{:.0%}") -> str:
    return form.format(value).replace("%", " %")


def many(values: Iterable[float], form: str = "{:.2f}") -> str:
    return " / ".join(form.format(value) for value in values)


def beside(predicted: T, published: T, text: Callable[[T], str] = share) -> str:
    return f"{text(predicted)} (published: {text(published)})"


def save(figure: Picture, path: Path) -> None:
    """Write a PNG of few colours; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    image = (
        Image.open(buffer)
        .convert("RGB")
        .quantize(PALETTE, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    image.save(path, optimize=True)
