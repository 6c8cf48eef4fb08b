"""The pictures of an explanation and of a difference: GPU-seconds a trained sample, a bar for each
part.

Invariant: the bars are the parts of the table, except those under a hundredth of the whole; nothing
else is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from simrl.analysis.explanation import Difference, Explanation
from simrl.analysis.gpu_hours import PARTS
from simrl.show.style import FAINT, INK, LOOKS, Picture, plain
from simrl.show.text import number, signed

SMALLEST = 0.01  # share of the whole that has a bar
WIDTH, BAR = 9.0, 0.3  # inches


def explanation_figure(e: Explanation) -> Picture:
    """Draw the GPU-seconds of a trained sample: first the ideal run's, then the losses, largest
    first."""
    per_sample = e.steady.per_sample
    total = sum(per_sample.values())
    keys = [key for key, value in per_sample.items() if value >= SMALLEST * total]
    keys.sort(key=lambda key: (not PARTS[key].ideal, 0 if PARTS[key].ideal else -per_sample[key]))
    title = f"{e.label}: what the GPUs did (bold: an ideal run does it too)"
    bars = [
        (key, per_sample[key], f"{number(per_sample[key])} ({per_sample[key] / total:.0%})")
        for key in keys
    ]
    figure, axes = _bars(title, bars)
    for key, label in zip(keys, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if PARTS[key].ideal else "normal")
    return figure


def difference_figure(d: Difference) -> Picture:
    """Draw the GPU-seconds that B saves (to the right) or adds (to the left) a trained sample, the
    largest change first."""
    least = SMALLEST * max(d.a_gpu_s, d.b_gpu_s)
    bars = [
        (change.part, change.saved_gpu_s, signed(change.saved_gpu_s))
        for change in d.changes
        if abs(change.saved_gpu_s) >= least
    ]
    figure, axes = _bars(f"What {d.b} saves against {d.a}", bars)
    axes.axvline(0, color=FAINT, linewidth=0.8)
    axes.set_xlabel("adds  ←  GPU-seconds a trained sample  →  saves")
    return figure


def _bars(title: str, bars: Sequence[tuple[str, float, str]]) -> tuple[Picture, Axes]:
    """Draw (part, value, text) as bars from above, with the part's name on the left and the text at
    the end."""
    figure = Picture(WIDTH, 1.15 + BAR * max(len(bars), 1), layout="constrained")
    axes = figure.subplots()
    look: dict[str, Any] = {
        "textcoords": "offset points",
        "va": "center",
        "fontsize": "small",
        "color": INK,
    }
    for place, (part, value, text) in enumerate(bars):
        axes.barh(place, value, height=0.75, **LOOKS[part].patch)
        side, apart = ("left", 4) if value >= 0 else ("right", -4)
        axes.annotate(text, (value, place), (apart, 0), ha=side, **look)
    axes.set_yticks(range(len(bars)), [plain(PARTS[part].words) for part, *_ in bars])
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel("GPU-seconds a trained sample", color=INK)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize="large", color=INK)
    return figure, axes
