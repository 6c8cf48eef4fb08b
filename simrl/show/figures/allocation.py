"""The picture of an allocation: the groups' times against the target, and two steps on each
worker."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from simrl.dispatch.allocation import fill, two_step_sums
from simrl.show.style import FAINT, INK, LOOKS, PAPER, SERIES, Picture, legend_above, panels


def allocation_figure(d: dict[str, Any]) -> Picture:
    """Draw the data of `simrl.analysis.allocation.allocate_step`."""
    title = f"Step {d['step']}, history epoch {d['history_epoch']}: {d['workers']} workers, τ {d['tau']['kind']}"
    figure, (left, right) = panels(title, width_ratios=(1.15, 1))
    _draw_groups(left, d)
    _draw_workers(right, d)
    return figure


def _draw_groups(axes: Axes, d: dict[str, Any]) -> None:
    """Draw each group's time, equal next to two-tier, with the number of its workers on top; the
    target as a line."""
    index = np.arange(len(d["groups"]))
    for shift, key, count, color, label in (
        (-0.21, "equal_predicted_s", "equal_workers", SERIES[0], "equal"),
        (0.21, "predicted_s", "workers", SERIES[1], "two-tier"),
    ):
        bars = axes.bar(index + shift, [g[key] for g in d["groups"]], 0.4, color=color, label=label)
        names = [str(g[count]) for g in d["groups"]]
        halo = [withStroke(linewidth=2, foreground=PAPER)]  # against the line of the target
        axes.bar_label(
            bars, names, fontsize="x-small", color=INK, padding=1, zorder=4, path_effects=halo
        )
    axes.plot(
        index,
        [g["target_s"] for g in d["groups"]],
        color=SERIES[4],
        marker="o",
        markersize=4,
        label=f"target: {d['t0_s']:.1f} s + {d['gradient_s']:.1f} s a group",
    )
    if d["train_s"] > 0:
        axes.axhline(
            d["train_s"],
            color=LOOKS["train"].color,
            linestyle="--",
            linewidth=1.2,
            label="training",
        )
    axes.set_xticks(index)
    axes.set(xlabel="ranking group (on the bars: workers)", ylabel="predicted time [s]")
    legend_above(axes)


def _draw_workers(axes: Axes, d: dict[str, Any]) -> None:
    """Draw two steps of the two-tier plan stacked on each worker, and equal allocation as an
    outline."""
    times, counts = [g["predicted_s"] for g in d["groups"]], [g["workers"] for g in d["groups"]]
    sums = np.array(d["two_step_sums"])
    first = np.array(times)[fill(0, counts)]
    worker = np.arange(len(sums))
    look: dict[str, Any] = {"width": 1.0, "linewidth": 0.3, "edgecolor": PAPER}
    axes.bar(worker, first, color=SERIES[1], label="first step, ascending", **look)
    second = {"pairing": "paired", "none": "ascending"}.get(d["alternation"], "reversed")
    axes.bar(
        worker, sums - first, bottom=first, color=SERIES[2], label=f"second step, {second}", **look
    )
    times, counts = ([g[f"equal_{key}"] for g in d["groups"]] for key in ("predicted_s", "workers"))
    equal = two_step_sums(times, counts, d["alternation"])
    label = f"equal allocation (bubble {_bubble(equal):.0%})"
    axes.stairs(equal, np.arange(len(equal) + 1) - 0.5, color=INK, linewidth=1.2, label=label)
    label = f"two-tier, mean (bubble {_bubble(sums):.0%})"
    axes.axhline(sums.mean(), color=FAINT, linestyle="--", linewidth=1.2, label=label)
    axes.set(xlabel="worker", ylabel="two steps, predicted [s]", xlim=(-0.5, len(sums) - 0.5))
    legend_above(axes)


def _bubble(sums: NDArray[np.float64]) -> float:
    """Return the mean idle share of the workers until the longest sum."""
    return float(1 - sums.mean() / sums.max())
