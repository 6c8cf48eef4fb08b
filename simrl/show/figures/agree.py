"""The picture of an agreement: each worker, predicted above measured; below, the finishing times of
samples.

Invariant: it shows the tables of the two results and the figures of `agreement`, and computes
nothing else.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from simrl.analysis.agreement import Agreement, finished_on_clock
from simrl.analysis.run_view import short_name
from simrl.result.result import Result
from simrl.result.timeline import Spans, spans, steady_window
from simrl.show.figures.timeline import WIDTH, draw_spans, kind_words, write_head, write_on_spans
from simrl.show.style import (
    FAINT,
    INK,
    LIGHT_SKY,
    LOOKS,
    PALE_SKY,
    SERIES,
    SKY,
    UNKNOWN,
    Picture,
    legend_below,
)
from simrl.show.tables.agree import error_rows

VERSION_COLORS = (SKY, LIGHT_SKY, PALE_SKY)  # of rollouts, repeated over the policy versions
IDLE, OTHER = kind_words("idle"), "training and other"
NAMED = (
    "load_weights",
    "load_drafter",
    "train_drafter",
    "evaluate",
    "idle",
)  # all other kinds of spans have one entry of the legend
TRAINED = (*NAMED, "log_prob", "train", "publish")  # where training was real
THICK = 0.43  # of a run's lane; a worker has 1
TITLE = 84  # characters that fit
MOST_UPDATES = 6  # that can be told apart in one picture


def agreement_figure(predicted: Result, measured: Result, agreement: Agreement) -> Picture:
    """Draw both runs. The timeline of a long run shows `MOST_UPDATES` updates in its middle; the
    points below, all samples."""
    trained = "trained" in measured.metadata.get("replay", {})
    lanes = agreement.workers + (trained and "train" in dict(spans(measured).lanes))
    lanes_in = min(max(0.46 * lanes, 1.2), 7.5)  # lengths in inches
    errors = [f"{name}: {error}" for name, _, _, error, _ in error_rows(agreement)] or [
        "nothing to compare"
    ]
    lines = [" · ".join(errors[i : i + 4]) for i in range(0, len(errors), 4)]
    above, between, points_in, below = (
        0.85 + 0.22 * len(lines),
        1.25,
        3.0,
        0.55,
    )  # below the legend's first line
    height = above + lanes_in + between + points_in + below
    figure = Picture(WIDTH, height)

    def panel(left: float, bottom_in: float, width: float, height_in: float) -> Axes:
        axes = figure.add_axes((left, bottom_in / height, width, height_in / height))
        axes.tick_params(colors=INK)
        axes.spines[:].set_color(FAINT)
        return axes

    timeline = panel(0.085, below + points_in + between, 0.9, lanes_in)
    names = TRAINED if trained else NAMED
    legend = _draw_runs(timeline, (predicted, measured), agreement, lanes, names)
    place_legend, _ = legend_below(
        figure, legend, fontsize="x-small", columnspacing=1.4, handlelength=1.6
    )
    place_legend(below + points_in + 0.3)
    points, apart = (
        panel(0.085, below, points_in / WIDTH, points_in),
        panel(0.47, below, 0.515, points_in),
    )
    _draw_completions(points, apart, predicted, measured, agreement)
    _write_title(figure, predicted, agreement, lines)
    return figure


def _draw_runs(
    axes: Axes, runs: Sequence[Result], agreement: Agreement, lanes: int, named: Sequence[str]
) -> list[Patch | Line2D]:
    """Draw each worker as one unit of y, predicted in the upper half, measured in the lower, and
    below them the trainer, if there are more `lanes`. Return the legend's handles."""
    windows = [_window(run, agreement) for run in runs]
    start_s, end_s = min(start for start, _ in windows), max(end for _, end in windows)
    parts = [spans(run).within(start_s, end_s) for run in runs]
    parts = [part.where(part.lane < lanes) for part in parts]
    versions = np.unique(
        np.concatenate([part.policy_version[part.of_kind("rollout")] for part in parts])
    ).tolist()
    workers, drawn = np.arange(lanes), dict[str, Patch]()
    for top, run, part in zip((0.5 - THICK, 0.5), runs, parts, strict=True):
        for label, look, chosen in _looks(part, versions, named):
            draw_spans(axes, part.where(chosen), part.lane[chosen] + top, THICK, **look)
            drawn.setdefault(label, Patch(label=label, **look))
        if agreement.workers <= 8:
            rolls, room_s = part.where(part.of_kind("rollout")), 0.035 * (end_s - start_s)
            write_on_spans(
                axes,
                rolls,
                top + THICK / 2,
                "v",
                room_s,
                color=INK,
                fontsize="x-small",
                va="center",
            )
        updated_s = run.steps.column("finished_s").to_numpy()
        updated_s = updated_s[(updated_s >= start_s) & (updated_s <= end_s)]
        for worker in workers:
            axes.vlines(updated_s, worker + top, worker + top + THICK, color=INK, linewidth=1.2)
    axes.hlines(workers + 0.5, start_s, end_s, color=INK, linewidth=0.5)
    labelled = workers[:: max(-(-agreement.workers // 16), 1)]
    texts = ["train" if i == agreement.workers else str(i) for i in labelled]
    axes.set_yticks(labelled + 0.5, texts)
    axes.set_ylim(max(lanes, 1), 0)
    axes.set_ylabel("worker: predicted\nabove measured", color=INK)
    if end_s > start_s:
        axes.set_xlim(start_s, end_s)
    axes.xaxis.set_major_formatter("{x:,.4g}")
    axes.set_xlabel("seconds since the start of the run", color=INK, labelpad=2)
    mark: dict[str, Any] = {
        "marker": "|",
        "linestyle": "none",
        "markersize": 11,
        "markeredgewidth": 1.2,
    }
    updates = Line2D([], [], color=INK, label="end of an update", **mark)
    order = sorted(drawn, key=lambda label: (label == IDLE, not label.startswith("rollout"), label))
    return [*map(drawn.__getitem__, order), updates]


def _window(run: Result, agreement: Agreement) -> tuple[float, float]:
    """Return the time to show: all updates that both runs made and the rest of the run, or
    `MOST_UPDATES` in the middle."""
    updates = min(agreement.updates.predicted, agreement.updates.measured)
    if updates > MOST_UPDATES:
        shown = steady_window(run, MOST_UPDATES, (updates - MOST_UPDATES) // 2)
        return shown.start_s, shown.end_s
    if agreement.updates.predicted != agreement.updates.measured and run.steps.num_rows > updates:
        return 0.0, float(
            run.steps.column("finished_s")[updates].as_py()
        )  # the first that the other run did not end
    return 0.0, float(run.metadata["end_s"])


def _looks(
    part: Spans, versions: Sequence[int], named: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any], NDArray[np.bool_]]]:
    """Yield the legend's words, a look, and a mask of the spans drawn in it; `versions` are those
    of all spans."""
    rolls, colors = part.of_kind("rollout"), len(VERSION_COLORS)
    for turn, color in enumerate(VERSION_COLORS):
        chosen = rolls & (part.policy_version % colors == turn)
        if chosen.any():
            names = ", ".join(f"v{version}" for version in versions if version % colors == turn)
            yield f"rollout, weights {names}", {"facecolor": color, "linewidth": 0}, chosen
    for code, kind in enumerate(part.kinds):
        chosen = part.kind == code
        if kind != "rollout" and chosen.any():
            words, look = (kind_words(kind), LOOKS[kind]) if kind in named else (OTHER, UNKNOWN)
            yield words, look.patch, chosen


def _draw_completions(
    points: Axes, apart: Axes, predicted: Result, measured: Result, agreement: Agreement
) -> None:
    """Draw the finishing times of samples on the rollout clock: predicted over measured, and their
    differences."""
    uids, p_s, m_s = finished_on_clock(predicted, measured)
    other = np.isin(uids, [d.uid for d in agreement.real_differences if d.uid is not None])
    far = max([*p_s, *m_s, 1e-9]) * 1.03
    points.plot([0, far], [0, far], color=INK, linewidth=0.8)
    after = np.where(m_s > 0, p_s / np.where(m_s > 0, m_s, 1) - 1, 0)
    apart.axhline(0, color=INK, linewidth=0.8)
    look: dict[str, Any] = {"s": 16 if len(uids) <= 500 else 4, "alpha": 0.6, "linewidth": 0}
    for chosen, color, label in (
        (~other, SERIES[0], "same decisions"),
        (other, SERIES[1], "decided otherwise"),
    ):
        if chosen.any():
            points.scatter(m_s[chosen], p_s[chosen], color=color, label=label, **look)
            apart.scatter(m_s[chosen], after[chosen], color=color, **look)
    mape = agreement.errors.sample_mape
    if mape is not None:
        apart.axhspan(-mape, mape, color=FAINT, alpha=0.25, linewidth=0, label=f"± MAPE {mape:.2%}")
        apart.legend(frameon=False, fontsize="small", labelcolor=INK, loc="upper right")
        points.legend(frameon=False, fontsize="small", labelcolor=INK, loc="upper left")
    points.set(xlim=(0, far), ylim=(0, far), ylabel="predicted [s of rollout]")
    apart.set(xlim=(0, far), ylabel="predicted / measured - 1")
    apart.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in (points, apart):
        axes.set_xlabel("a sample finished, measured [s of rollout]", color=INK)
        axes.yaxis.label.set_color(INK)


def _write_title(
    figure: Figure, predicted: Result, agreement: Agreement, errors: Sequence[str]
) -> None:
    title = textwrap.shorten(
        f"Predicted against measured: {short_name(predicted.metadata)}", TITLE, placeholder=" …"
    )
    real, all_ = len(agreement.real_differences), len(agreement.differences)
    ties = f"{all_ - real} near-tie{'s' * (all_ - real != 1)}"
    decided = f"{real} decided otherwise, {ties}" if all_ else "the same decisions"
    workers = f"{agreement.workers} rollout worker{'s' * (agreement.workers != 1)}"
    write_head(
        figure,
        title,
        f"{workers}, {agreement.samples:,} samples finished in both: {decided}",
        *errors,
    )
