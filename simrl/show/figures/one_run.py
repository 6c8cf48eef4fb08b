"""Small pictures of one run: staleness, updates, response lengths, and acceptance if drafts were
made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.compute as pc
from matplotlib.axes import Axes
from numpy.typing import NDArray

from simrl.result.off_policyness import OLDEST, age_shares, ages
from simrl.result.result import Result
from simrl.show.style import (
    AGES,
    FAINT,
    INK,
    LARGEST,
    LOOKS,
    MEAN,
    P50,
    P95,
    P99,
    PERCENT,
    ROSE,
    THOUSANDS,
    Picture,
    legend_above,
    quiet,
)

Values = NDArray[Any]
LENGTH_BINS = 40
SUMS = ("verifications", "verified_tokens", "drafted_tokens", "accepted_tokens")
OF_DRAFTS = (*SUMS, "generated_tokens", "epoch")


def run_figures(result: Result, warmup_steps: int) -> dict[str, Picture]:
    """Return the pictures of a run by title, without those for which it has no data."""
    figures = {"Off-policyness": _ages(result, warmup_steps), "Updates": _updates(result)}
    finished = result.samples.filter(pc.is_valid(result.samples.column("finished_s")))
    tokens = finished.column("generated_tokens").to_numpy()
    trained_step = pc.fill_null(finished.column("trained_step"), -1).to_numpy()
    steps = [k for k in result.steps.column("step").to_pylist() if (trained_step == k).any()]
    if len(tokens):
        figures["Response lengths"] = _lengths(tokens)
    if steps:
        figures["Response lengths by update"] = _lengths_by_update(
            steps, [tokens[trained_step == k] for k in steps]
        )
    drafted = finished.filter(pc.greater(finished.column("drafted_tokens"), 0))
    if len(drafted):
        figures |= _acceptance({name: drafted.column(name).to_numpy() for name in OF_DRAFTS})
    return figures


def _panel(xlabel: str, ylabel: str) -> tuple[Picture, Axes]:
    figure = Picture(5.4, 3.2)
    axes = figure.add_axes((0.14, 0.17, 0.83, 0.7))
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _twin(axes: Axes, ylabel: str) -> Axes:
    """Return axes with another scale, on the right."""
    axes.set_position((0.14, 0.17, 0.73, 0.7))
    right = axes.twinx()
    right.set_ylabel(ylabel, color=INK)
    right.spines[:].set_visible(False)
    right.tick_params(colors=INK, labelsize="small")
    return right


def _ages(result: Result, warmup_steps: int) -> Picture:
    """Draw the ages of tokens, and of samples by their oldest token."""
    age, tokens, row = ages(result, warmup_steps)
    oldest = np.full(result.samples.num_rows, -1, np.int64)
    np.maximum.at(oldest, row, age)
    oldest = oldest[oldest >= 0]
    by_token, by_sample = age_shares(age, tokens), age_shares(oldest, np.ones(len(oldest)))
    shown = (
        max((int(np.flatnonzero(s)[-1]) for s in (by_token, by_sample) if s.any()), default=0) + 1
    )
    figure, axes = _panel("policy updates between generating and training", "share of the trained")
    x = np.arange(shown)
    axes.bar(x - 0.2, by_token[:shown], 0.4, color=AGES[2], label="tokens")
    axes.bar(x + 0.2, by_sample[:shown], 0.4, color=AGES[6], label="samples, by their oldest token")
    axes.set_xticks(x, [str(i) + " or more" * (i == OLDEST) for i in range(shown)])
    legend_above(axes, y=PERCENT)
    return figure


def _updates(result: Result) -> Picture:
    """Draw the off-policyness of each update, mean over tokens and largest, and its seconds."""
    steps = {name: result.steps.column(name).to_numpy() for name in result.steps.column_names}
    figure, axes = _panel("policy update", "off-policyness [updates]")
    seconds = _twin(axes, "s an update (dotted)")
    seconds.plot(
        steps["step"], np.diff(steps["finished_s"], prepend=0.0), ":", color=FAINT, linewidth=2
    )
    seconds.set_ylim(bottom=0)
    look: dict[str, Any] = {"where": "mid", "color": LARGEST, "linestyle": "--"}
    axes.step(steps["step"], steps["off_policyness_max"], label="largest", **look)
    axes.plot(
        steps["step"], steps["off_policyness_mean"], "o-", color=MEAN, markersize=3, label="mean"
    )
    axes.set_ylim(bottom=0)
    legend_above(axes, whole_x=True)
    return figure


def _lengths(tokens: Values) -> Picture:
    """Draw how long the finished responses are."""
    wide = -(-int(tokens.max() + 1) // LENGTH_BINS)
    edges = np.arange(0, tokens.max() + 1 + wide, wide, dtype=np.int64)
    counts, _ = np.histogram(tokens, edges)
    figure, axes = _panel("tokens of a response", "share of the responses")
    axes.bar(
        edges[:-1], counts / len(tokens), 0.94 * wide, align="edge", color=LOOKS["rollout"].color
    )
    for percentile, color in ((50, P50), (95, P95), (99, P99)):
        value = np.percentile(tokens, percentile)
        axes.axvline(value, color=color, linestyle=":", label=f"p{percentile}: {value:,.0f}")
    axes.axvline(tokens.mean(), color=MEAN, linestyle="--", label=f"mean: {tokens.mean():,.0f}")
    legend_above(axes, columns=4, x=THOUSANDS, y=PERCENT)
    return figure


def _lengths_by_update(steps: Sequence[int], tokens: Sequence[Values]) -> Picture:
    figure, axes = _panel("policy update", "tokens of a response")
    for name, percentile, color in (
        ("longest", 100, LARGEST),
        ("p95", 95, P95),
        ("median", 50, P50),
    ):
        values = [float(np.percentile(of_step, percentile)) for of_step in tokens]
        axes.plot(steps, values, "o-", color=color, markersize=3, label=name)
    axes.set_ylim(bottom=0)
    legend_above(axes, columns=3, y=THOUSANDS, whole_x=True)
    return figure


def _acceptance(samples: dict[str, Values]) -> dict[str, Picture]:
    """Draw the acceptance of samples with drafts, and tokens a draft by length and by epoch."""
    tokens, shares = (
        samples["generated_tokens"],
        samples["accepted_tokens"] / samples["drafted_tokens"],
    )
    counts, edges = np.histogram(shares, np.linspace(0, 1, 21))
    figure, axes = _panel("accepted share of a sample's drafted tokens", "share of the samples")
    axes.bar(
        edges[:-1], counts / len(shares), 0.0475, align="edge", color=LOOKS["drafts_stood"].color
    )
    quiet(axes, labelsize="small", x=PERCENT, y=PERCENT)
    bounds = np.unique(np.percentile(tokens, np.linspace(0, 100, 9)).astype(np.int64))
    bins = np.clip(np.searchsorted(bounds, tokens, side="right") - 1, 0, max(len(bounds) - 2, 0))
    lengths = [f"{a:,}–{b:,}" for a, b in pairwise(bounds.tolist())] or [f"{bounds[0]:,}"]
    by_length = _by_group(bins, lengths, "tokens of the response", samples)
    figures = {"Acceptance by sample": figure, "Acceptance by length": by_length}
    epochs, code = np.unique(samples["epoch"], return_inverse=True)
    if len(epochs) > 1:
        figures["Acceptance by epoch"] = _by_group(code, [str(e) for e in epochs], "epoch", samples)
    return figures


def _by_group(
    group: Values, names: Sequence[str], title: str, samples: dict[str, Values]
) -> Picture:
    """Draw the tokens that a pass with a draft yields, and the accepted share, by group of
    samples."""
    passes, yielded, drafted, accepted = (
        np.bincount(group, samples[name], len(names)) for name in SUMS
    )
    figure, axes = _panel(title, "tokens a pass with a draft (bars)")
    x = np.arange(len(names))
    shares = _twin(axes, "accepted share (line)")
    with np.errstate(invalid="ignore", divide="ignore"):
        axes.bar(x, yielded / passes, color=LOOKS["drafts_stood"].color)
        shares.plot(x, accepted / drafted, "o-", color=ROSE, markersize=4)
    axes.set_xticks(x, names)
    quiet(axes, labelsize="small")
    shares.set_ylim(0, 1.02)
    shares.yaxis.set_major_formatter(PERCENT)
    axes.tick_params(axis="x", labelsize="xx-small" if len(names) > 4 else "small")
    return figure
