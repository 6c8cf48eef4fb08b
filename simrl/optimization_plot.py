"""The picture of what `simrl optimize` tried: throughput against staleness, and what none beats.

Invariant: every option that keeps the limits is drawn where its row says. The front is that of throughput, staleness and cost,
so where numbers of GPUs were compared it need not be the outline of the points.
"""

from __future__ import annotations

from matplotlib.axes import Axes

from simrl.optimization import Optimization
from simrl.palette import BLACK, FAINT, INK, PAPER
from simrl.picture import Picture
from simrl.plots import BAR_COLORS, DPI, plain
from simrl.sweep_plot import UNITS

MARKERS = "os^D"  # of the systems, when the colours have all been used


def optimization_figure(found: Optimization) -> Picture:
    """A point an option, coloured by its system, the best system first; those on the front in full, the choice in a ring."""
    figure = Picture(figsize=(8.0, 4.2), dpi=DPI, facecolor=PAPER, layout="constrained")
    axes: Axes = figure.subplots()
    options = found.searched.allowed
    on_front = {option.point.hash for option in found.front}
    for i, system in enumerate(dict.fromkeys(option.system for option in options)):
        color, marker = BAR_COLORS[i % len(BAR_COLORS)], MARKERS[i // len(BAR_COLORS) % len(MARKERS)]
        own = [option for option in options if option.system == system]
        for full in (False, True):
            drawn = [option for option in own if (option.point.hash in on_front) == full]
            axes.scatter(
                [option.staleness for option in drawn],
                [option.row["samples_per_s"] for option in drawn],
                s=55 if full else 22,
                alpha=1.0 if full else 0.4,
                edgecolors=INK if full else "none",
                linewidths=1.0,
                zorder=3 if full else 2,
                color=color,
                marker=marker,
            )
        axes.scatter([], [], label=plain(system), color=color, marker=marker)
    choice = found.choice.option
    axes.scatter(
        [choice.staleness], [choice.row["samples_per_s"]],
        s=220, facecolors="none", edgecolors=BLACK, linewidths=1.5, zorder=4, label="the choice",
    )  # fmt: skip
    axes.set(xlabel=UNITS["off_policyness_mean"], ylabel=UNITS["samples_per_s"])
    axes.set_title("edged: none beats it in throughput, staleness and cost", fontsize="medium", color=INK, loc="left")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08)
    axes.grid(color=FAINT, alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small", labelcolor=INK)
    return figure
