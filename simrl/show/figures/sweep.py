"""Pictures of many points: a measure over one or two keys of a sweep, and the throughput against
staleness of a search.

Invariant: every point that has the measure is drawn where its keys say, none twice; a point that
failed is an empty field. The Pareto front of a search is in throughput, staleness and cost, so it
need not be the outline of the points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from simrl.errors import InputError, meant, refuse
from simrl.show.style import BLACK, INK, PAPER, SERIES, Picture, plain, quiet
from simrl.show.text import grouped, shown_value
from simrl.study.model_error import STEP_ERROR

if TYPE_CHECKING:
    from simrl.study.answer import Answer

Row = Mapping[str, Any]
MARKERS = "os^D"  # of the systems of a search, when the colours have all been used
MOST_PANELS = 12
LEAST_WIDTH, LEAST_HEIGHT, BAR_WIDTH = (
    5.5,
    2.6,
    0.9,
)  # inches: for the title, the colour bar's label, the bar
LIGHT = 0.6  # from this share of the range on, a field is light, and its number dark
UNITS = {
    "samples_per_s": "trained samples a second",
    "tokens_per_s": "trained tokens a second",
    "step_s": "seconds a policy update",
    "rollout_bubble": "idle share of rollout GPUs",
    "occupancy": "filled share of the rollout workers' slots",
    "train_idle": "idle share of train GPUs",
    "off_policyness_mean": "off-policyness, mean over tokens",
    "off_policyness_max": "off-policyness, largest",
    "gpu_hours_per_1k_samples": "GPU-hours for 1,000 trained samples",
    "cost_per_1k_samples": "cost of 1,000 trained samples",
    "speedup": "speed-up over the first point",
}
AXES = {  # what varies, in words; other keys stand for themselves
    "cluster.gpus": "GPUs",
    "cluster.tp": "GPUs of a rollout worker (tensor parallelism)",
    "cluster.dp": "attention ranks of a rollout worker",
    "cluster.train.gpus": "GPUs that only train",
    "system.name": "system",
    "system.rollout_share": "share of GPUs that roll out",
    "system.eta": "bound η on staleness, in updates",
    "engine.max_num_seqs": "most running requests of a worker",
    "training.mfu": "model FLOPs utilisation of training",
    "workload.synthetic.mean_tokens": "mean response length in tokens",
    "workload.synthetic.group": "responses of a prompt",
    "seed": "seeds",
    "speculation.acceptance_factor": "factor on the acceptance of drafts",
}
SMALLER_IS_BETTER = UNITS.keys() - {"samples_per_s", "tokens_per_s", "occupancy", "speedup"}


def sweep_figure(
    rows: Sequence[Row],
    keys: Sequence[str],
    value: str,
    x: str | None = None,
    y: str | None = None,
    band: str | None = None,
) -> Picture:
    """Draw `value` over the keys `x` and, if given, `y`; by default over the keys with the most
    values. Lines are the means over the key `band`, between its least and its largest value.

    Raises `InputError` for a key that does not vary, a column that holds no numbers, and more than
    `MOST_PANELS` panels.
    """
    values = {key: _values(rows, key) for key in keys}
    varied = [key for key in keys if len(values[key]) > 1 and key != band]
    varied.sort(key=lambda key: (key == "system.name", -len(values[key])))
    for name, key in (("x", x), ("y", y)):
        if key is not None and key not in varied:
            does = ", ".join(varied) or "nothing"
            raise InputError(
                f"{name}={key!r}: does not vary in this sweep{meant(key, varied)}; {does} does"
            )
    refuse(
        (not varied, "nothing varies in this sweep; give a key more than one value to draw it"),
        (
            band is not None and (y is not None or len(values.get(band, ())) < 2),
            f"band={band!r}: lines have a band, over a key with several values; leave y out",
        ),
        (
            not any(isinstance(row.get(value), int | float) for row in rows),
            f"value={value!r}: no column of numbers{meant(value, UNITS)}; draw one of {', '.join(UNITS)}",
        ),
    )
    x = x or next(key for key in varied if key != y)
    if y is None and band is None and len(varied) > 2:
        y = next((key for key in varied if key not in (x, "system.name")), None)
    rest = [key for key in varied if key not in (x, y)]
    groups = grouped(
        (
            ", ".join(
                ("" if key == "system.name" else f"{key}=") + shown_value(row[key])
                for key in rest
                if row[key] is not None
            ),
            row,
        )
        for row in rows
    )
    if y is None:
        return _lines(groups, x, values[x], value, band)
    if len(groups) > MOST_PANELS:
        raise InputError(
            f"{len(groups)} panels, one each of {', '.join(rest)}: more than {MOST_PANELS}; choose x and y, or rows"
        )
    return _maps(groups, x, y, values, value)


def _labels(values: Sequence[Any]) -> list[str]:
    """Return the values of a key as labels along an axis."""
    return [f"{v:g}" if isinstance(v, float) else plain(shown_value(v)) for v in values]


def _lines(
    groups: Mapping[str, Sequence[Row]], x: str, at: Sequence[Any], value: str, band: str | None
) -> Picture:
    figure = Picture(9.0, max(3.8, 0.4 + 0.21 * len(groups)), layout="constrained")
    axes = figure.subplots()
    error = STEP_ERROR if value in ("samples_per_s", "tokens_per_s", "step_s") else 0.0
    for i, (name, group) in enumerate(groups.items()):
        known = grouped((at.index(row[x]), row[value]) for row in group if row[value] is not None)
        places, color = sorted(known), SERIES[i % len(SERIES)]
        ends = [(min(known[p]), np.mean(known[p]), max(known[p])) for p in places]
        least, mean, most = np.reshape(ends, (-1, 3)).T
        axes.plot(places, mean, "o-", color=color, label=plain(name) or None)
        if band is not None:
            axes.fill_between(places, least, most, color=color, alpha=0.25, linewidth=0)
            bars = mean - least * (1 - error), most * (1 + error) - mean
            axes.errorbar(places, mean, bars, fmt="none", ecolor=color, elinewidth=0.8, capsize=3)
    axes.set_xticks(range(len(at)), _labels(at))
    axes.set(xlabel=plain(AXES.get(x, x)), ylabel=UNITS.get(value, value), ylim=(0, None))
    if band is not None:
        axes.set_title(
            plain(f"points: mean; bands: {AXES.get(band, band)}")
            + f"; bars: these ± {error:.0%}, the median error of a step" * (error > 0),
            fontsize="small",
            color=INK,
            loc="left",
        )
    if any(groups):
        figure.legend(loc="outside right upper", frameon=False, fontsize="small", labelcolor=INK)
    quiet(axes, y="{x:,g}")
    return figure


def _maps(
    groups: Mapping[str, Sequence[Row]],
    x: str,
    y: str,
    values: Mapping[str, Sequence[Any]],
    value: str,
) -> Picture:
    across, down = values[x], values[y]
    width, height = 1.3 + 0.75 * len(across), max(1.2 + 0.42 * len(down), LEAST_HEIGHT)
    figure = Picture(
        max(width * len(groups), LEAST_WIDTH) + BAR_WIDTH, height, layout="constrained"
    )
    panels: Sequence[Axes] = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    measured = [row[value] for group in groups.values() for row in group if row[value] is not None]
    least, most = min(measured), max(measured)
    for axes, (name, group) in zip(panels, groups.items(), strict=True):
        field = np.full((len(down), len(across)), np.nan)
        for row in group:
            if row[value] is not None:
                field[down.index(row[y]), across.index(row[x])] = row[value]
        image = axes.imshow(
            field, cmap="cividis", vmin=least, vmax=most, aspect="auto", origin="lower"
        )
        _write_fields(axes, field, least + LIGHT * (most - least), value in SMALLER_IS_BETTER)
        axes.set_xticks(range(len(across)), _labels(across))
        axes.set_yticks(range(len(down)), _labels(down))
        axes.set_xlabel(plain(AXES.get(x, x)), color=INK)
        axes.set_title(plain(name), fontsize="medium", color=INK)
        axes.tick_params(length=0, colors=INK)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel(plain(AXES.get(y, y)), color=INK)
    bar = figure.colorbar(image, ax=panels)
    bar.set_label(UNITS.get(value, value), color=INK)
    bar.outline.set_visible(False)
    figure.suptitle(
        f"{UNITS.get(value, value)} (framed: the best of a panel)", fontsize="medium", color=INK
    )
    return figure


def _write_fields(
    axes: Axes, field: np.ndarray[Any, np.dtype[np.float64]], light: float, least: bool
) -> None:
    """Write the number in each field, and frame the best."""
    for (row, column), measure in np.ndenumerate(field):
        if not np.isnan(measure):
            axes.text(
                column,
                row,
                f"{measure:.3g}",
                ha="center",
                va="center",
                fontsize="small",
                color=PAPER if measure < light else INK,
            )
    if not np.isnan(field).all():
        best = np.nanargmin(field) if least else np.nanargmax(field)
        row, column = np.unravel_index(int(best), field.shape)
        axes.add_patch(
            Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=BLACK, linewidth=2.5)
        )


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    """Return the distinct values of a key: numbers sorted, others in order of appearance."""
    values = list(dict.fromkeys(row[key] for row in rows))
    return sorted(values) if all(isinstance(value, int | float) for value in values) else values


def search_figure(answer: Answer) -> Picture:
    """Draw a point an option, coloured by its system, best system first; the front in full colour,
    the choice in a ring."""
    figure = Picture(8.0, 4.2, layout="constrained")
    axes: Axes = figure.subplots()
    on_front = {option.point.hash for option in answer.front}
    looks: tuple[dict[str, Any], ...] = (
        {"s": 22, "alpha": 0.4, "edgecolors": "none", "zorder": 2},
        {"s": 55, "alpha": 1.0, "edgecolors": INK, "zorder": 3},
    )
    for i, system in enumerate(dict.fromkeys(option.system for option in answer.searched.allowed)):
        color, marker = SERIES[i % len(SERIES)], MARKERS[i // len(SERIES) % len(MARKERS)]
        options = [option for option in answer.searched.allowed if option.system == system]
        for full, look in enumerate(looks):
            drawn = [option for option in options if (option.point.hash in on_front) == full]
            x, y = (
                [option.staleness for option in drawn],
                [option.row["samples_per_s"] for option in drawn],
            )
            axes.scatter(x, y, linewidths=1.0, color=color, marker=marker, **look)
        axes.scatter([], [], label=plain(system), color=color, marker=marker)
    choice = answer.choice.option
    ring: dict[str, Any] = {"label": "the choice", "facecolors": "none", "edgecolors": BLACK}
    axes.scatter(
        choice.staleness, choice.row["samples_per_s"], 220, linewidths=1.5, zorder=4, **ring
    )
    axes.margins(x=0.08, y=0.15)  # room for the ring
    axes.set(xlabel=UNITS["off_policyness_mean"], ylabel=UNITS["samples_per_s"], ylim=(0, None))
    axes.set_title(
        "edged: none beats it in throughput, staleness and cost",
        fontsize="medium",
        color=INK,
        loc="left",
    )
    quiet(axes, grid="both")
    figure.legend(loc="outside right upper", frameon=False, fontsize="small", labelcolor=INK)
    return figure
