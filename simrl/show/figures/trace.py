"""The picture of a trace: its response lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from simrl.show.style import (
    CAP,
    LOOKS,
    MEAN,
    P50,
    P95,
    PAPER,
    THOUSANDS,
    Picture,
    legend_above,
    panels,
)
from simrl.trace.trace import Trace


def lengths_figure(trace: Trace) -> Picture:
    """Draw the response lengths: their distribution, and their mean, median and 95th percentile by
    step."""
    title = f"{trace.metadata.name} ({trace.metadata.kind}): responses {len(trace):,}, steps {len(trace.step_slices):,}"
    figure, (left, right) = panels(title, width_ratios=(1.15, 1))
    _plot_distribution(trace, left)
    _plot_steps(trace, right)
    return figure


def _plot_distribution(trace: Trace, axes: Axes) -> None:
    tokens, cap = trace.column("response_tokens"), trace.metadata.cap_tokens
    below = tokens[tokens < cap]
    at_cap = 1 - len(below) / len(tokens)
    bins = int(np.clip(2 * len(tokens) ** (1 / 3), 12, 60))
    edges = np.geomspace(min(tokens.min(), 0.9 * cap), cap, bins + 1)
    whole = np.unique(np.rint(edges))
    edges = (
        whole if len(whole) > 1 else edges
    )  # no bin between two whole numbers, or it would look like a gap
    counts, _ = np.histogram(below, edges)
    look: dict[str, Any] = {"align": "edge", "edgecolor": PAPER, "linewidth": 0.4}
    axes.bar(edges[:-1], counts / len(tokens), np.diff(edges), color=LOOKS["rollout"].color, **look)
    axes.bar(cap, at_cap, cap * 0.1, color=CAP, label=f"at the cap ({cap:,}): {at_cap:.1%}", **look)
    for percentile, style in ((5, ":"), (50, "-"), (95, "--"), (99, "-.")):
        x = float(np.percentile(tokens, percentile))
        axes.axvline(x, color=P50, linestyle=style, linewidth=1.4, label=f"p{percentile}: {x:,.0f}")
    axes.axvline(tokens.mean(), color=MEAN, linewidth=1.8, label=f"mean: {tokens.mean():,.0f}")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="response length [tokens]", ylabel="share of responses")
    legend_above(axes, columns=3, x=THOUSANDS, y=PercentFormatter(1, decimals=None))


def _plot_steps(trace: Trace, axes: Axes) -> None:
    tokens, cap = trace.column("response_tokens"), trace.metadata.cap_tokens
    step = [s for s, _, _ in trace.step_slices]
    parts = [tokens[first:end] for _, first, end in trace.step_slices]
    look: dict[str, Any] = (
        {"marker": "o", "markersize": 4, "linewidth": 1.6}
        if len(step) <= 40
        else {"linewidth": 1.1}
    )
    for label, color, values in (
        ("p95", P95, [np.percentile(part, 95) for part in parts]),
        ("mean", MEAN, [part.mean() for part in parts]),
        ("p50", P50, [np.percentile(part, 50) for part in parts]),
    ):
        axes.plot(step, values, color=color, label=label, **look)
    axes.axhline(cap, color=CAP, linewidth=1.4, linestyle="--", label="cap")
    axes.set(xlabel="step", ylabel="response length [tokens]", ylim=(0, cap * 1.06))
    if len(step) == 1:
        axes.set_xlim(step[0] - 1, step[0] + 1)
    legend_above(axes, columns=4, y=THOUSANDS, whole_x=True)
