"""The picture of an acceptance report: hit lengths, epochs, responses and, with a profile, the
speed-up by batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from simrl.analysis.acceptance import history_words
from simrl.show.style import INK, LOOKS, P50, PAPER, PERCENT, SERIES, Picture, legend_above, panels
from simrl.show.tables.acceptance import token_range


def report_figure(d: dict[str, Any]) -> Picture:
    """Draw the data of `simrl.analysis.acceptance.report` in four panels."""
    drafter = f"{d['drafter']} from {history_words(d['history'])}"
    figure, (hits, epochs, responses, last) = panels(
        f"{d['trace']['name']}: {drafter}, {d['accept_length']:.2f} tokens a pass", 2, 7.6
    )
    _draw_hits(d["hit_lengths"], hits)
    _draw_epochs(d, epochs)
    _draw_responses(d["by_response"], responses)
    if d["pays"] is not None:
        _draw_batches(d["pays"], last)
    else:
        last.axis("off")
        last.text(
            0.5, 0.5, "no step times: give --profile, or --model and --gpu", ha="center", color=INK
        )
    return figure


def _draw_hits(rows: list[dict[str, Any]], axes: Axes) -> None:
    x = np.arange(len(rows))
    axes.bar(
        x - 0.2, [row["share_of_hits"] for row in rows], 0.4, color=SERIES[0], label="of the hits"
    )
    axes.bar(
        x + 0.2,
        [row["share_of_tokens"] for row in rows],
        0.4,
        color=SERIES[1],
        label="of their tokens",
    )
    axes.set_xticks(x, [token_range(row) for row in rows], rotation=45, ha="right")
    axes.set(xlabel="hit length [tokens]", ylabel="share")
    legend_above(axes, y=PERCENT)


def _draw_epochs(d: dict[str, Any], axes: Axes) -> None:
    rows = [row for row in d["by_epoch"] if row["responses_with_drafts"]]
    for key, color in (("acceptance_rate", SERIES[0]), ("speculation_rate", SERIES[1])):
        _plot(
            axes,
            rows,
            "epoch",
            key,
            color=color,
            marker="o",
            markersize=4,
            label=key.replace("_", " "),
        )
    axes.set(xlabel="epoch", ylabel="share of tokens", ylim=(0, 1))
    legend_above(axes, columns=3, y=PERCENT, whole_x=True)


def _draw_responses(by_response: dict[str, Any], axes: Axes) -> None:
    rows = by_response["speculation_rate_histogram"]
    edges = [rows[0]["from"], *(row["to"] for row in rows)]
    counts = np.array([row["responses"] for row in rows])
    shares = counts / counts.sum()
    look: dict[str, Any] = {
        "color": LOOKS["drafts_stood"].color,
        "edgecolor": PAPER,
        "linewidth": 0.4,
    }
    axes.bar(edges[:-1], shares, np.diff(edges), align="edge", **look)
    for name, value in by_response["speculation_rate"].items():
        axes.axvline(
            value, color=P50, linestyle="-" if name == "p50" else ":", label=f"{name}: {value:.0%}"
        )
    axes.set(
        xlabel="accepted share of a response's tokens", ylabel="share of responses", xlim=(0, 1)
    )
    legend_above(axes, columns=3, x=PERCENT, y=PercentFormatter(1, decimals=None))


def _draw_batches(pays: dict[str, Any], axes: Axes) -> None:
    for key, color, label in (
        ("speed_up", SERIES[0], "this window"),
        ("best_fixed_speed_up", SERIES[2], "best fixed window"),
    ):
        _plot(axes, pays["by_batch"], "batch", key, color=color, marker="o", label=label)
    axes.axhline(1.0, color=INK, linestyle="--", linewidth=1.2, label="plain decoding")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel=f"batch [sequences] ({pays['profile']})",
        ylabel="speed-up of decoding [×]",
        ylim=(0, 1.05 * axes.get_ylim()[1]),
    )
    legend_above(axes, columns=3, x="{x:g}")


def _plot(axes: Axes, rows: Iterable[dict[str, Any]], x: str, y: str, **look: Any) -> None:
    points = [(row[x], math.nan if row[y] is None else row[y]) for row in rows]
    axes.plot(*zip(*points, strict=True), **look)
