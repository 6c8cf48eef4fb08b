"""The picture of a sweep: one measure over one key as lines, or over two as a map, a panel each of whatever else varies.

Invariant: every point that has the measure is drawn where its keys say, none twice; a point that failed is an empty field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from simrl.errors import InputError, meant
from simrl.palette import BLUE, FAINT, GREEN, INK, ORANGE, PAPER, PURPLE, SKY, VERMILLION
from simrl.picture import Picture
from simrl.plots import DPI, plain

Row = Mapping[str, Any]
LINE_COLORS = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY)
MOST_PANELS = 12
LEAST_WIDTH = 5.5  # inches, for the title
LIGHT = 0.6  # from this share of the range on, a field is light, and its number dark
UNITS = {
    "samples_per_s": "trained samples a second",
    "tokens_per_s": "trained tokens a second",
    "step_s": "seconds a policy update",
    "rollout_bubble": "idle share of rollout GPUs",
    "train_idle": "idle share of train GPUs",
    "off_policyness_mean": "off-policyness, mean over tokens",
    "off_policyness_max": "off-policyness, largest",
    "gpu_hours_per_1k_samples": "GPU-hours for 1,000 trained samples",
    "cost_per_1k_samples": "cost of 1,000 trained samples",
    "speedup": "speed-up over the first point",
}
SMALLER_IS_BETTER = (
    "off_policyness_mean",
    "off_policyness_max",
    "step_s",
    "rollout_bubble",
    "train_idle",
    "gpu_hours_per_1k_samples",
    "cost_per_1k_samples",
)


def sweep_figure(
    rows: Sequence[Row], keys: Sequence[str], value: str, x: str | None = None, y: str | None = None
) -> Picture:
    """`value` over the keys `x` and, if given, `y`; by default over the keys with the most values.

    Raises `InputError` for a key that does not vary, a column that holds no numbers, and more panels than anybody can read.
    """
    several = {key: _values(rows, key) for key in keys}
    varied = sorted(
        (key for key in keys if len(several[key]) > 1), key=lambda key: (key == "system.name", -len(several[key]))
    )
    for name, key in (("x", x), ("y", y)):
        if key is not None and key not in varied:
            does = ", ".join(varied) or "nothing"
            raise InputError(f"{name}={key!r}: does not vary in this sweep{meant(key, varied)}; {does} does")
    if not varied:
        raise InputError("nothing varies in this sweep; give a key more than one value to draw it")
    if not any(isinstance(row.get(value), int | float) for row in rows):
        raise InputError(f"value={value!r}: no column of numbers{meant(value, UNITS)}; draw one of {', '.join(UNITS)}")
    x = x or next(key for key in varied if key != y)
    if y is None and len(varied) > 2:
        y = next((key for key in varied if key not in (x, "system.name")), None)
    rest = [key for key in varied if key not in (x, y)]
    if y is None:
        return _lines(rows, x, rest, value)
    return _maps(rows, x, y, rest, value, several)


def _lines(rows: Sequence[Row], x: str, rest: Sequence[str], value: str) -> Picture:
    figure = Picture(figsize=(7.0, 3.8), dpi=DPI, facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    at = _values(rows, x)
    for i, (name, group) in enumerate(_groups(rows, rest).items()):
        known = sorted((at.index(row[x]), row[value]) for row in group if row[value] is not None)
        axes.plot(
            [place for place, _ in known],
            [measure for _, measure in known],
            marker="o",
            color=LINE_COLORS[i % len(LINE_COLORS)],
            label=plain(name) or None,
        )
    axes.set_xticks(range(len(at)), [plain(_said(each)) for each in at])
    axes.set(xlabel=plain(x), ylabel=UNITS.get(value, value))
    axes.set_ylim(bottom=0)
    if rest:
        axes.legend(frameon=False, fontsize="small", labelcolor=INK)
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    return figure


def _maps(
    rows: Sequence[Row], x: str, y: str, rest: Sequence[str], value: str, several: Mapping[str, Sequence[Any]]
) -> Picture:
    groups = _groups(rows, rest)
    if len(groups) > MOST_PANELS:
        raise InputError(
            f"{len(groups)} panels, one each of {', '.join(rest)}: more than {MOST_PANELS}; choose x and y, or rows"
        )
    across, down = several[x], several[y]
    width, height = 1.3 + 0.75 * len(across), 1.2 + 0.42 * len(down)
    figure = Picture(
        figsize=(max(width * len(groups), LEAST_WIDTH), height), dpi=DPI, facecolor=PAPER, layout="constrained"
    )
    panels: Sequence[Axes] = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    measured = [row[value] for row in rows if row[value] is not None]
    for axes, (name, group) in zip(panels, groups.items(), strict=True):
        field = np.full((len(down), len(across)), np.nan)
        for row in group:
            if row[value] is not None:
                field[down.index(row[y]), across.index(row[x])] = row[value]
        axes.imshow(field, cmap="cividis", vmin=min(measured), vmax=max(measured), aspect="auto", origin="lower")
        _write_fields(axes, field, min(measured) + LIGHT * (max(measured) - min(measured)), value in SMALLER_IS_BETTER)
        axes.set_xticks(range(len(across)), [plain(_said(each)) for each in across])
        axes.set_yticks(range(len(down)), [plain(_said(each)) for each in down])
        axes.set_xlabel(plain(x), color=INK)
        axes.set_title(plain(name), fontsize="medium", color=INK)
        axes.tick_params(length=0, colors=INK)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel(plain(y), color=INK)
    figure.suptitle(f"{UNITS.get(value, value)} (framed: the best of a panel)", fontsize="medium", color=INK)
    return figure


def _write_fields(axes: Axes, field: np.ndarray[Any, np.dtype[np.float64]], light: float, least: bool) -> None:
    """The number in each field, and a frame around the best."""
    for (row, column), measure in np.ndenumerate(field):
        if not np.isnan(measure):
            color = PAPER if measure < light else INK
            axes.text(column, row, f"{measure:.3g}", ha="center", va="center", fontsize="small", color=color)
    if not np.isnan(field).all():
        best = np.nanargmin(field) if least else np.nanargmax(field)
        row, column = np.unravel_index(int(best), field.shape)
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=VERMILLION, linewidth=2.5))


def _groups(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, list[Row]]:
    """The rows by what they have at some keys, in words."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        said = [_said(row[key]) if key == "system.name" else f"{key}={_said(row[key])}" for key in keys]
        groups.setdefault(", ".join(said), []).append(row)
    return groups


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    """What the rows have at a key, each once: numbers in their order, all else as it comes."""
    found = list(dict.fromkeys(row[key] for row in rows))
    return sorted(found) if all(isinstance(each, int | float) for each in found) else found


def _said(value: Any) -> str:
    return "–" if value is None else str(value)
