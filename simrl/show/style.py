"""Shared parts of all pictures: colours, the figure that a notebook shows, quiet axes, and the way to a file.

Invariant: equal figures give equal bytes, as PNG, PDF or SVG; no figure has a window or global state.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simrl.errors import InputError
from simrl.files import write_whole_file

# Okabe and Ito's palette, which people tell apart with any colour vision (jfly.uni-koeln.de/color).
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"

# Not in that palette: text, axes, background, and kinds of work that are seldom seen.
INK, FAINT, PAPER, SAND, TEAL = "#333333", "#999999", "#FFFFFF", "#C2B280", "#2F5F5F"

BAR_COLORS = (SKY, ORANGE, GREEN, PURPLE, BLUE, VERMILLION, YELLOW)

# Kinds of spans in the order of the legend and of the stack. Any other kind is drawn in FAINT, under its name.
KIND_COLORS = {
    "rollout": SKY,
    "train_drafter": TEAL,
    "load_weights": YELLOW,
    "evaluate": SAND,
    "lost": BLACK,
    "transfer": FAINT,
    "switch": PURPLE,
    "log_prob": GREEN,
    "train": BLUE,
    "publish": ORANGE,
    "checkpoint": INK,
    "idle": PAPER,
}
BUBBLE = {"hatch": "//////", "edgecolor": VERMILLION}  # the look of idle GPUs, on PAPER

DPI = 120
DATES: Mapping[str, Mapping[str, None]] = {  # metadata that would differ from day to day
    "png": {"Software": None},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}
THOUSANDS, PERCENT = "{x:,.0f}", "{x:.0%}"  # formats of an axis


class Picture(Figure):
    """A matplotlib `Figure` without a window: save it, or let a notebook show it whatever backend is loaded there."""

    def __init__(self, width_in: float, height_in: float, **options: Any) -> None:
        super().__init__(figsize=(width_in, height_in), **{"dpi": DPI, "facecolor": PAPER, **options})

    def _repr_png_(self) -> bytes:
        return rendered(self, "png")


def rendered(figure: Figure, kind: str) -> bytes:
    """Return the figure as a file of this kind (png, svg, pdf …)."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "simrl"}):
        figure.savefig(buffer, format=kind, metadata=DATES.get(kind))
    return buffer.getvalue()


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure in the format of the path's suffix; raise `InputError` for an unknown one or a failed write."""
    path = Path(path)
    kind = path.suffix.lstrip(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise InputError(f"{path}: a picture cannot be written as {path.suffix!r}; use .png, .pdf or .svg")
    with write_whole_file(path) as temporary:
        temporary.write_bytes(rendered(figure, kind))


def panels(title: str, rows: int = 1, height_in: float = 4.4, **options: Any) -> tuple[Picture, Sequence[Axes]]:
    """Return a figure with a title, and its axes: rows of two."""
    figure = Picture(11, height_in, layout="constrained", dpi=150)
    figure.suptitle(plain(title), fontsize="large", color=INK)
    return figure, figure.subplots(rows, 2, **options).ravel()


def quiet(axes: Axes, grid: Literal["both", "x", "y"] = "y", **ticks: Any) -> None:
    """Leave the left and the lower spine, and a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, which="both", **ticks)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(INK)
    axes.grid(axis=grid, color=FAINT, alpha=0.25)
    axes.set_axisbelow(True)


def legend_above(axes: Axes, columns: int = 2) -> None:
    """Put the legend above the axes, where it hides nothing, and make the axes quiet."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    axes.legend(ncols=columns, columnspacing=1.4, handlelength=1.8, fontsize="small", frameon=False, **place)
    quiet(axes, labelsize="small")


def plain(text: str) -> str:
    """Return text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")
