"""Pictures of several runs side by side: speed, parts of the GPU-seconds, idle workers, the age of
trained tokens.

Invariant: in every picture, runs are in the order of their rows, from above, under the names of
their variants.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import blended_transform_factory
from numpy.typing import NDArray

from simrl.analysis.gpu_hours import PARTS, Waterfall
from simrl.errors import refuse
from simrl.result.metrics import window
from simrl.result.off_policyness import OLDEST, age_shares, ages
from simrl.result.result import Result
from simrl.result.timeline import rolls_out, spans
from simrl.show.style import (
    AGES,
    INK,
    LOOKS,
    PALE,
    PAPER,
    PERCENT,
    SERIES,
    Look,
    Picture,
    fitting_legend,
    plain,
    quiet,
)

Row = Mapping[str, Any]

LEGEND_COLUMNS = 3  # where they fit
WIDTH, LINE, FRAME = 9.0, 0.34, 0.6  # inches: of a picture, of a run, of the axis
SMALL = 0.004  # share of the longest bar below which parts are drawn as one
MOST_POINTS = 128  # workers of a run that have a point beside their box

# Columns beside the bars: heading, inches from the column's end to the right edge, text of a row.
COLUMNS = (
    ("samples/s", 4.65, "{samples_per_s:.3g}"),
    ("s a step", 3.8, "{step_s:,.1f}"),
    ("rollout\nbubble", 3.0, "{rollout_bubble:.1%}"),
    ("occupancy", 2.1, "{occupancy}"),
    ("trainer\nidle", 1.35, "{train_idle:.1%}"),
    ("off-policyness\nmean (max)", 0.2, "{off_policyness_mean:.2f} ({off_policyness_max})"),
)


def comparison_figure(rows: Sequence[Row]) -> Picture:
    """Draw rows of `metrics.summary`: samples/s as bars, beside them bubbles and off-policyness; a
    variant's fastest is bold.

    Raise `InputError` without rows.
    """
    refuse((not rows, "a comparison needs at least one row; simulate a scenario first"))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    heads = {
        variant: 1.3 if variant else 0.3 for variant in variants
    }  # in lines, as all that lies along y
    lines = len(rows) + sum(heads.values())
    above, line_in, below, bars, columns = 0.5, 0.3, 0.55, 5.0, 5.5  # inches
    names = 0.25 + 0.083 * max(map(len, systems))  # 0.083 inches a character
    height, width = above + line_in * lines + below, names + bars + columns
    figure = Picture(width, height)
    axes = figure.add_axes((names / width, below / height, bars / width, line_in * lines / height))
    beside = blended_transform_factory(figure.transFigure, axes.transData)
    text: dict[str, Any] = {"transform": beside, "va": "center", "color": INK}
    ends = [(1 - to_edge / width, heading, cell) for heading, to_edge, cell in COLUMNS]
    for x, heading, _ in ends:
        axes.text(x, -0.1, heading, ha="right", **{**text, "va": "bottom"})
    line = 0.0
    for variant in variants:
        group = [row for row in rows if row["variant"] == variant]
        best = max(row["samples_per_s"] for row in group)
        if variant:
            axes.text(
                0.15 / width,
                line + 0.75,
                plain(variant),
                fontweight="bold",
                backgroundcolor=PAPER,
                **text,
            )
        line += heads[variant]
        for row in group:
            color = SERIES[systems.index(row["system"]) % len(SERIES)]
            axes.barh(line + 0.5, row["samples_per_s"], height=0.78, color=color)
            filled = "–" if row["occupancy"] is None else f"{row['occupancy']:.1%}"
            look = {
                **text,
                "ha": "right",
                "fontweight": "bold" if row["samples_per_s"] == best else "normal",
            }
            axes.text((names - 0.1) / width, line + 0.5, plain(row["system"]), **look)
            for x, _, cell in ends:
                axes.text(x, line + 0.5, cell.format(**{**row, "occupancy": filled}), **look)
            line += 1
    axes.set(ylim=(lines, 0), yticks=[], xlabel="trained samples a second")
    quiet(axes, grid="x")
    axes.spines["left"].set_visible(False)
    return figure


def gpu_seconds_figure(rows: Sequence[Row], falls: Sequence[Waterfall]) -> Picture:
    """Draw the GPU-seconds of a trained sample by part: a stacked bar for each run."""
    longest = max(fall.total_gpu_s / fall.samples for fall in falls)
    shown = [
        k
        for k in PARTS
        if k == "decode" or any(fall.per_sample[k] >= SMALL * longest for fall in falls)
    ]
    stacks = [(PARTS[k].words, [fall.per_sample[k] for fall in falls], LOOKS[k]) for k in shown]
    rest = [sum(fall.per_sample[k] for k in PARTS if k not in shown) for fall in falls]
    if max(rest) >= SMALL * longest / 2:
        stacks.append(("all that is smaller", rest, Look(PALE, "...")))
    figure, axes = _stacked(rows, stacks)
    axes.set_xlabel("GPU-s a trained sample")
    return figure


def staleness_figure(
    rows: Sequence[Row], results: Sequence[Result], warmups: Sequence[int]
) -> Picture:
    """Draw the trained tokens by their age in updates: a stacked bar for each run."""
    by_run = [
        age_shares(*ages(result, warmup)[:2])
        for result, warmup in zip(results, warmups, strict=True)
    ]
    oldest = max((int(np.flatnonzero(share)[-1]) for share in by_run if share.any()), default=0)
    stacks = [
        (_age(age), [share[age] for share in by_run], Look(AGES[age])) for age in range(oldest + 1)
    ]
    figure, axes = _stacked(rows, stacks)
    axes.set(xlim=(0, 1), xlabel="share of the trained tokens")
    axes.xaxis.set_major_formatter(PERCENT)
    return figure


def bubble_figure(
    rows: Sequence[Row], results: Sequence[Result], warmups: Sequence[int]
) -> Picture:
    """Draw the idle share of each rollout worker after the warm-up: a box for each run, and up to
    128 points for workers."""
    figure, axes, places = _lines(rows)
    shares = [
        worker_idle_shares(result, warmup) for result, warmup in zip(results, warmups, strict=True)
    ]
    line: dict[str, Any] = {"color": INK, "linewidth": 1}
    looks: dict[str, Any] = {
        "boxprops": {**LOOKS["idle"].patch, "linewidth": 1},
        **{f"{part}props": line for part in ("median", "whisker", "cap")},
    }
    along: dict[str, Any] = {
        "positions": places,
        "orientation": "horizontal",
        "widths": 0.6,
        "manage_ticks": False,
    }
    axes.boxplot(shares, patch_artist=True, showfliers=False, **along, **looks)
    for place, share in zip(places, shares, strict=True):
        if len(share) <= MOST_POINTS:
            y = place + np.linspace(-0.2, 0.2, len(share)) if len(share) > 1 else [place]
            axes.plot(share, y, ".", color=INK, alpha=0.6, markersize=6)
    axes.set(xlim=(-0.01, 1.01), xlabel="idle share of a worker's time")
    axes.xaxis.set_major_formatter(PERCENT)
    return figure


def worker_idle_shares(result: Result, warmup_steps: int) -> NDArray[np.float64]:
    """Return the idle share of each rollout worker after the warm-up, counted as in
    `metrics.rollout_bubble`.

    Training and switching of colocated GPUs do not count; workers with nothing else are left out.
    """
    part = spans(result).within(*window(result, warmup_steps))
    seconds = part.ended_s - part.started_s
    kinds = np.array(part.kinds)[part.kind]
    counts = np.isin(kinds, ("rollout", "load_weights", "load_drafter", "train_drafter", "idle"))
    whole = np.bincount(part.lane, seconds * counts, len(part.lanes))
    idle = np.bincount(part.lane, seconds * (kinds == "idle"), len(part.lanes))
    chosen = [i for i, lane in enumerate(part.lanes) if rolls_out(lane) and whole[i] > 0]
    return np.asarray(idle[chosen] / whole[chosen], np.float64)


def _lines(rows: Sequence[Row], legend_rows: int = 0) -> tuple[Picture, Axes, list[float]]:
    """Return a figure with a line for each run, named on the left, and the runs' places along y."""
    several = len({row["variant"] for row in rows}) > 1
    places, labels, line, variant = [], {}, 0.0, None
    for row in rows:
        if several and row["variant"] != variant:
            variant = row["variant"]
            labels[line] = textwrap.fill(plain(variant), 40)
            line += 1
        name = textwrap.fill(plain(row["system"]), 34, subsequent_indent="  ")
        lines = max(1.0, 0.2 + 0.55 * (name.count("\n") + 1))
        places.append(line + (lines - 1) / 2)
        labels[places[-1]] = name
        line += lines
    figure = Picture(WIDTH, FRAME + LINE * line + 0.24 * legend_rows, layout="constrained")
    axes = figure.subplots()
    axes.set_ylim(line - 0.5, -0.5)
    axes.set_yticks(list(labels), labels.values())
    for tick, label in zip(labels, axes.get_yticklabels(), strict=True):
        label.set_fontweight("normal" if tick in places else "bold")
    quiet(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure, axes, places


def _stacked(
    rows: Sequence[Row], stacks: Sequence[tuple[str, Sequence[float], Look]]
) -> tuple[Picture, Axes]:
    """Draw (words, values, look) as stacked bars on the lines of runs, and their legend above."""
    figure, axes, places = _lines(rows, legend_rows=-(-len(stacks) // LEGEND_COLUMNS))
    left = np.zeros(len(places))
    for words, values, look in stacks:
        axes.barh(places, values, left=left, height=0.78, label=words, **look.patch)
        left += values
    fitting_legend(
        figure, axes.get_legend_handles_labels()[0], LEGEND_COLUMNS, {"loc": "outside upper left"}
    )
    return figure, axes


def _age(age: int) -> str:
    if age == 0:
        return "on-policy"
    return f"{age} update{'s' * (age > 1)} old" + " or more" * (age == OLDEST)
