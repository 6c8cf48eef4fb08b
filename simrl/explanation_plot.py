"""The pictures of an explanation and of a difference: GPU-seconds a trained sample, a bar a part.

Invariant: the bars are the parts of the table, those under a hundredth of the whole left out; nothing else is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from simrl.explanation import Difference, Explanation
from simrl.explanation_table import number, signed
from simrl.gpu_hours import PARTS
from simrl.palette import FAINT, GREEN, INK, ORANGE, PAPER, SKY, VERMILLION
from simrl.picture import Picture
from simrl.plots import DPI, plain

SMALLEST = 0.01  # share of the whole that has a bar
WIDTH = 9.0  # these are inches
BAR_IN = 0.3


def explanation_figure(e: Explanation) -> Picture:
    """What a trained sample took: first what an ideal run has too, then what came on top, the largest first."""
    per_sample = e.steady.per_sample
    total = sum(per_sample.values())
    shown = [key for key, value in per_sample.items() if value >= SMALLEST * total]
    ideal = [key for key in shown if PARTS[key].ideal]
    lost = sorted((key for key in shown if not PARTS[key].ideal), key=lambda key: -per_sample[key])
    keys = [*ideal, *lost]
    values = [per_sample[key] for key in keys]
    figure, axes = _bars(
        [PARTS[key].words for key in keys],
        values,
        [SKY if PARTS[key].ideal else ORANGE for key in keys],
        [f"{number(value)} ({value / total:.0%})" for value in values],
    )
    axes.set_title(
        plain(f"{e.label}: GPU-seconds a trained sample (blue: an ideal run has them too)"), loc="left", color=INK
    )
    return figure


def difference_figure(d: Difference) -> Picture:
    """What B saves (green) and what it spends more (red), a trained sample, the largest change first."""
    least = SMALLEST * max(d.a_gpu_s, d.b_gpu_s)
    changes = [change for change in d.changes if abs(change.saved_gpu_s) >= least]
    values = [change.saved_gpu_s for change in changes]
    figure, axes = _bars(
        [PARTS[change.part].words for change in changes],
        values,
        [GREEN if value > 0 else VERMILLION for value in values],
        [signed(value) for value in values],
    )
    axes.axvline(0, color=FAINT, linewidth=0.8)
    axes.set_title(plain(f"GPU-seconds a trained sample that {d.b} saves against {d.a}"), loc="left", color=INK)
    return figure


def _bars(
    names: Sequence[str], values: Sequence[float], colors: Sequence[str], texts: Sequence[str]
) -> tuple[Picture, Axes]:
    """Horizontal bars from above, each with its name on the left and a text at its end."""
    figure = Picture(
        figsize=(WIDTH, 0.75 + BAR_IN * max(len(names), 1)), dpi=DPI, facecolor=PAPER, layout="constrained"
    )
    axes = figure.subplots()
    places = range(len(names))
    axes.barh(places, values, height=0.75, color=colors)
    for place, value, text in zip(places, values, texts, strict=True):
        axes.annotate(
            text,
            (value, place),
            xytext=(4 if value >= 0 else -4, 0),
            textcoords="offset points",
            ha="left" if value >= 0 else "right",
            va="center",
            fontsize="small",
            color=INK,
        )
    axes.set_yticks(places, [plain(name) for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xticks([])
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    return figure, axes
