"""Shared parts of all pictures: colours and hatches by meaning, figures for notebooks, quiet axes,
legends, files.

Invariant: colours are defined here alone, and have one meaning in PNG, page and notebook. Equal
figures give equal bytes, as PNG, PDF or SVG; no figure has a window or global state.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import Formatter, MaxNLocator

from simrl.errors import InputError
from simrl.files import write_whole_file

# Of kinds of work: Okabe and Ito's palette, which people tell apart with any colour vision
# (jfly.uni-koeln.de/color).
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"

# Not in that palette: text, axes, background, and rare kinds of work.
INK, FAINT, PAPER, SAND, TEAL = "#333333", "#999999", "#FFFFFF", "#C2B280", "#2F5F5F"
PALE_SKY, LIGHT_SKY, PALE_TEAL, PALE, RUST = "#CFE6F5", "#A9D6F5", "#5F9F9F", "#DDDDDD", "#A0522D"
PALE_YELLOW = "#F8F2A6"
LILACS = ("#6B4C96", "#8A6FB0", "#B39BCB", "#D3C4E3")

# Of systems, drafters and other compared things: Paul Tol's muted palette, for any colour vision
# (personal.sron.nl/~pault).
INDIGO, ROSE, STRAW, MINT = "#332288", "#CC6677", "#DDCC77", "#44AA99"
WINE, FOREST, VIOLET, OLIVE = "#882255", "#117733", "#AA4499", "#999933"
SERIES = (INDIGO, ROSE, STRAW, MINT, WINE, FOREST, VIOLET, OLIVE)


class Look(NamedTuple):
    """A colour; for idle time and lost work, a hatch of this colour on `PAPER`."""

    color: str
    hatch: str = ""

    @property
    def patch(self) -> dict[str, Any]:
        """Return the properties of a matplotlib patch."""
        if self.hatch:
            return {
                "facecolor": PAPER,
                "edgecolor": self.color,
                "hatch": self.hatch,
                "linewidth": 0,
            }
        return {"facecolor": self.color, "linewidth": 0}


# Looks in all pictures: first of the kinds of spans, in the order of legend and stack, then of the
# parts of the GPU-seconds. The colour shows the work of the GPUs; a hatch, that it yields nothing.
# Idle time is hatched in vermillion.
LOOKS: Mapping[str, Look] = {
    "rollout": Look(SKY),
    "judge": Look(RUST),
    "train_drafter": Look(TEAL),
    "load_drafter": Look(PALE_YELLOW),
    "load_weights": Look(YELLOW),
    "evaluate": Look(SAND),
    "lost": Look(BLACK),
    "transfer": Look(FAINT),
    "switch": Look(PURPLE),
    "log_prob": Look(GREEN),
    "train": Look(BLUE),
    "publish": Look(ORANGE),
    "checkpoint": Look(INK),
    "idle": Look(VERMILLION, "//////"),
    "decode": Look(SKY),
    "prefill": Look(LIGHT_SKY),
    "undivided": Look(PALE_SKY),
    "small_batches": Look(SKY, "///"),
    "tail_idle": Look(VERMILLION, "//////"),
    "trainer_wait": Look(VERMILLION, "\\\\\\"),
    "other_wait": Look(VERMILLION, "xxx"),
    "rest_idle": Look(VERMILLION, "..."),
    "train_idle": Look(VERMILLION, "|||"),
    "judge_idle": Look(VERMILLION, "ooo"),
    "recompute_moved": Look(LILACS[0]),
    "recompute_reloaded": Look(LILACS[1]),
    "recompute_preempted": Look(LILACS[2]),
    "recompute_redrafted": Look(LILACS[3]),
    "drafts_stood": Look(PALE_TEAL),
    "drafts_wasted": Look(PALE_TEAL, "///"),
    "dropped": Look(INK, "xxx"),
    "duplicates": Look(BLACK, "///"),
    "ahead": Look(SKY, "..."),
    "lock_step": Look(SAND, "..."),
    "slowed": Look(BLACK, "..."),
    "host": Look(PALE),
    "other": Look(FAINT, "..."),
}
KINDS = tuple(LOOKS)[: list(LOOKS).index("idle") + 1]  # of spans
UNKNOWN = Look(FAINT)  # of any other kind

# Of trained tokens, by their age in updates.
AGES = (
    "#F6E3EA",
    "#EBC4D2",
    "#DDA2B8",
    "#CC7F9D",
    "#B95C83",
    "#9E3A68",
    "#822150",
    "#64103B",
    "#450727",
    "#260314",
)

# Statistics of a distribution.
P50, P95, P99, LARGEST, CAP, MEAN = INDIGO, ROSE, WINE, VIOLET, OLIVE, INK

DPI = 120
MARGIN_IN = 0.1  # between a legend and the edges
DATES: Mapping[str, Mapping[str, None]] = {  # metadata that change from day to day
    "png": {"Software": None},
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
}
THOUSANDS, PERCENT = "{x:,.0f}", "{x:.0%}"  # formats of an axis


class Picture(Figure):
    """A matplotlib `Figure` without a window, to be saved or shown in a notebook with any
    backend."""

    def __init__(self, width_in: float, height_in: float, **options: Any) -> None:
        super().__init__(
            figsize=(width_in, height_in), **{"dpi": DPI, "facecolor": PAPER, **options}
        )

    def _repr_png_(self) -> bytes:
        return rendered(self, "png")


def rendered(figure: Figure, kind: str) -> bytes:
    """Return the figure as a file of this kind (png, svg, pdf …)."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "simrl"}):
        figure.savefig(buffer, format=kind, metadata=DATES.get(kind))
    return buffer.getvalue()


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure in the format of the path's suffix; raise `InputError` for an unknown one or
    a failed write."""
    path = Path(path)
    kind = path.suffix.lstrip(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise InputError(
            f"{path}: a picture cannot be written as {path.suffix!r}; use .png, .pdf or .svg"
        )
    with write_whole_file(path) as temporary:
        temporary.write_bytes(rendered(figure, kind))


def panels(
    title: str, rows: int = 1, height_in: float = 4.4, **options: Any
) -> tuple[Picture, Sequence[Axes]]:
    """Return a figure with a title, and its axes in rows of two."""
    figure = Picture(11, height_in, layout="constrained", dpi=150)
    figure.suptitle(plain(title), fontsize="large", color=INK)
    return figure, figure.subplots(rows, 2, **options).ravel()


def quiet(
    axes: Axes,
    grid: Literal["both", "x", "y"] = "y",
    *,
    x: str | Formatter = "",
    y: str | Formatter = "",
    whole_x: bool = False,
    **ticks: Any,
) -> None:
    """Keep only the left and the lower spine, and a faint grid behind the data. `x` and `y` are
    formats of the numbers along the axes; with `whole_x`, x has whole numbers only."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, which="both", **ticks)
    for axis, form in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.label.set_color(INK)
        if form:
            axis.set_major_formatter(form)
    if whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis=grid, color=FAINT, alpha=0.25)
    axes.set_axisbelow(True)


def legend_above(axes: Axes, columns: int = 2, **look: Any) -> None:
    """Put the legend above the axes, where it hides no data, and make the axes quiet, with this
    look."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    axes.legend(
        ncols=columns, columnspacing=1.4, handlelength=1.8, fontsize="small", frameon=False, **place
    )
    quiet(axes, labelsize="small", **look)


def fitting_legend(
    figure: Figure, handles: Sequence[Any], most_columns: int, place: Mapping[str, Any], **look: Any
) -> tuple[Legend, float]:
    """Add a legend with all columns that fit into the figure's width; return it, and its height in
    inches."""
    renderer: Any = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    width_in = figure.get_figwidth() - 2 * MARGIN_IN
    look = {
        "fontsize": "small",
        "columnspacing": 2.0,
        "handlelength": 1.8,
        "frameon": False,
        **place,
        **look,
    }
    for columns in range(max(min(most_columns, len(handles)), 1), 0, -1):
        legend = figure.legend(handles=handles, ncols=columns, borderpad=0, labelcolor=INK, **look)
        box = legend.get_window_extent(renderer)
        if box.width / figure.dpi <= width_in or columns == 1:
            break
        legend.remove()
    return legend, float(box.height / figure.dpi)


def legend_below(
    figure: Figure, handles: Sequence[Any], **look: Any
) -> tuple[Callable[[float], None], float]:
    """Add a centred legend; return a function that sets its inches above the lower edge, and its
    height in inches."""
    legend, height_in = fitting_legend(
        figure, handles, len(handles), {"loc": "lower center", "borderaxespad": 0}, **look
    )
    return lambda above_in: legend.set_bbox_to_anchor(
        (0.5, above_in / figure.get_figheight())
    ), height_in


def plain(text: str) -> str:
    """Return a text that matplotlib does not read as a formula."""
    return text.replace("$", r"\$")
