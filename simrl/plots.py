"""Plots: a run as a timeline, and systems side by side.

Invariant: a picture shows what the tables and `metrics` say and nothing else; the area that a kind of span covers on the
timeline is its GPU time in the window shown. The same result gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from matplotlib.transforms import blended_transform_factory

from simrl.errors import InputError
from simrl.files import write_whole_file
from simrl.metrics import summary
from simrl.palette import BLACK, BLUE, FAINT, GREEN, INK, ORANGE, PAPER, PURPLE, SAND, SKY, TEAL, VERMILLION, YELLOW
from simrl.picture import Picture
from simrl.result import Result
from simrl.timeline import (
    Spans,
    Window,
    idle_shares,
    rolls_out,
    running_requests,
    shares,
    spans,
    steady_window,
    time_shares,
)

DPI = 120
WIDTH = 11.0  # inches

# In the order of the legend and of the stack. A kind of span that is not here is drawn in FAINT, under its name.
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
BUBBLE = {"hatch": "//////", "edgecolor": VERMILLION}

# What stands beside a bar of a comparison: heading, inches from where it ends to the right edge, text of a row.
COLUMNS = (
    ("samples/s", 3.75, "{samples_per_s:.3g}"),
    ("s a step", 2.9, "{step_s:,.1f}"),
    ("rollout\nbubble", 2.1, "{rollout_bubble:.1%}"),
    ("trainer\nidle", 1.35, "{train_idle:.1%}"),
    ("off-policyness\nmean (max)", 0.2, "{off_policyness_mean:.2f} ({off_policyness_max})"),
)
BAR_COLORS = (SKY, ORANGE, GREEN, PURPLE, BLUE, VERMILLION, YELLOW)


def plot_timeline(result: Result, path: str | Path, steps: int = 3, first_step: int | None = None) -> None:
    """Writes a PNG of some policy updates: what each GPU does in time, so that one sees who waits, how long and for whom.

    From above: the rollout workers, a lane each; the trainer, where it has GPUs of its own; the share of rollout GPUs at
    each kind of work; the requests at the workers. Vertical lines are policy updates. Shown are `steps` of them from
    `first_step` on, or the middle of the steady state (`simrl.timeline.steady_window`). The averages above the picture are
    those of `metrics.summary`, over the whole run after its warm-up; the shares below are of the GPU time shown. Raises
    `InputError` for steps that the run does not have, and for a path that is no .png or cannot be written.
    """
    save_png(timeline_figure(result, steady_window(result, steps, first_step)), Path(path))


def plot_comparison(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Writes a PNG of a comparison, rows of `metrics.summary`: samples a second by system, a group of bars a variant.

    Beside each bar stands what the speed comes with: bubbles and off-policyness; the fastest of a variant in bold. Raises
    `InputError` without rows, and for a path that is no .png or cannot be written.
    """
    save_png(comparison_figure(rows), Path(path))


def timeline_figure(result: Result, window: Window) -> Picture:
    """The picture of `plot_timeline`."""
    shown = spans(result).within(window.start_s, window.end_s)
    rollout, trainer = shown.where(shown.rolls_out()), shown.where(~shown.rolls_out())
    workers = sum(map(rolls_out, shown.lanes))
    trainers = len(shown.lanes) - workers

    lanes_in = min(max(0.09 * workers, 1.2), 4.0)  # these are inches
    heights = [lanes_in, *[0.34 * trainers] * (trainers > 0), 1.0, 0.9]
    above, gap, below = 1.22, 0.12, 1.22 if "idle" in rollout.kinds else 1.0
    height = above + sum(heights) + gap * (len(heights) - 1) + below
    figure = Picture(figsize=(WIDTH, height), dpi=DPI, facecolor=PAPER)
    panels = figure.subplots(
        len(heights),
        sharex=True,
        gridspec_kw={
            "height_ratios": heights,
            "hspace": gap * len(heights) / sum(heights),
            "left": 0.085,
            "right": 0.985,
            "top": 1 - above / height,
            "bottom": below / height,
        },
    )
    _draw_workers(panels[0], rollout, workers)
    if trainers:
        _draw_trainers(panels[1], trainer, workers, trainers)
    _draw_shares(panels[-2], rollout)
    _draw_requests(panels[-1], result, window)
    _draw_updates(panels, result, window)
    for axes in panels:
        axes.tick_params(colors=INK, labelbottom=axes is panels[-1], bottom=axes is panels[-1])
        axes.spines[:].set_color(FAINT)
        axes.yaxis.label.set_color(INK)
    panels[-1].set_xlim(window.start_s, window.end_s)
    panels[-1].set_xlabel("seconds since the start of the run", color=INK)
    panels[-1].xaxis.set_major_formatter(FuncFormatter(_thousands))
    figure.align_ylabels(panels)
    _write_title(figure, result)
    _write_legend(figure, rollout, trainer)
    return figure


def comparison_figure(rows: Sequence[Mapping[str, Any]]) -> Picture:
    """The picture of `plot_comparison`."""
    if not rows:
        raise InputError("a comparison needs at least one row; simulate a scenario first")
    systems = list(dict.fromkeys(row["system"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    heads = {variant: 1.3 if variant else 0.3 for variant in variants}  # in lines, as all that lies along y
    lines = len(rows) + sum(heads.values())
    above, each, below = (
        0.5,
        0.3,
        0.55,
    )  # these are inches, and so are names (a character takes 0.083), bars and columns
    names, bars, columns = 0.25 + 0.083 * max(map(len, systems)), 5.0, 4.6
    height, width = above + each * lines + below, names + bars + columns
    figure = Picture(figsize=(width, height), dpi=DPI, facecolor=PAPER)
    axes = figure.add_axes((names / width, below / height, bars / width, each * lines / height))
    beside = blended_transform_factory(figure.transFigure, axes.transData)
    text: dict[str, Any] = {"transform": beside, "va": "center", "color": INK}
    ends = [1 - to_edge / width for _, to_edge, _ in COLUMNS]
    for x, (heading, _, _) in zip(ends, COLUMNS, strict=True):
        axes.text(x, -0.1, heading, ha="right", **{**text, "va": "bottom"})
    line = 0.0
    for variant in variants:
        group = [row for row in rows if row["variant"] == variant]
        best = max(row["samples_per_s"] for row in group)
        if variant:
            axes.text(0.15 / width, line + 0.75, plain(variant), fontweight="bold", backgroundcolor=PAPER, **text)
        line += heads[variant]
        for row in group:
            color = BAR_COLORS[systems.index(row["system"]) % len(BAR_COLORS)]
            axes.barh(line + 0.5, row["samples_per_s"], height=0.78, color=color)
            weight = "bold" if row["samples_per_s"] == best else "normal"
            axes.text((names - 0.1) / width, line + 0.5, plain(row["system"]), ha="right", fontweight=weight, **text)
            for x, (_, _, cell) in zip(ends, COLUMNS, strict=True):
                axes.text(x, line + 0.5, cell.format(**row), ha="right", fontweight=weight, **text)
            line += 1
    axes.set_ylim(lines, 0)
    axes.set_yticks([])
    axes.set_xlabel("trained samples a second", color=INK)
    axes.tick_params(colors=INK)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.grid(axis="x", color=FAINT, alpha=0.25)
    axes.set_axisbelow(True)
    return figure


def _draw_workers(axes: Axes, part: Spans, workers: int) -> None:
    _draw_lanes(axes, part, 0, workers)
    every = -(-workers // 8)
    axes.set_yticks(np.arange(0, workers, every) + 0.5, [str(i) for i in range(0, workers, every)])
    axes.set_ylabel(f"{workers} rollout worker{'s' * (workers > 1)}")


def _draw_trainers(axes: Axes, part: Spans, first_lane: int, lanes: int) -> None:
    """The lanes; on each training span, where there is room, the step that it makes."""
    _draw_lanes(axes, part, first_lane, lanes)
    axes.set_yticks([])
    axes.text(-0.008, 0.5, "trainer", transform=axes.transAxes, ha="right", va="center", color=INK)
    room_s = 0.06 * (part.ended_s.max() - part.started_s.min())
    trains = part.where(np.array([kind == "train" for kind in part.kinds])[part.kind])
    for lane, start_s, end_s, step in zip(
        trains.lane, trains.started_s, trains.ended_s, trains.policy_version, strict=True
    ):
        if end_s - start_s > room_s:
            place = ((start_s + end_s) / 2, lane - first_lane + 0.5)
            axes.text(*place, f"step {step}", color=PAPER, ha="center", va="center_baseline", fontsize="small")


def _draw_lanes(axes: Axes, part: Spans, first_lane: int, lanes: int) -> None:
    """Spans as rectangles, a lane each unit of y from 0 at the top; one patch a kind, with the kind as its label."""
    thick = 1.0 if lanes > 48 else 0.86  # thin lanes would drown in the white between them
    for code, kind in enumerate(part.kinds):
        mine = part.where(part.kind == code)
        top = mine.lane - first_lane + (1 - thick) / 2
        x = np.stack([mine.started_s, mine.ended_s, mine.ended_s, mine.started_s], axis=1)
        y = np.stack([top, top, top + thick, top + thick], axis=1)
        rectangles = np.stack([x, y], axis=2)
        outline = Outline.make_compound_path_from_polys(rectangles)
        axes.add_artist(PathPatch(outline, label=kind, antialiased=False, **_look(kind)))
    axes.set_ylim(lanes, 0)


def _draw_shares(axes: Axes, part: Spans) -> None:
    """The share of GPUs at each kind of work, stacked; what is left to 100% is the bubble."""
    times, by_kind = shares(part)
    below = np.zeros(len(times))
    for kind in _in_order(by_kind):
        above = below + np.append(by_kind[kind], by_kind[kind][-1:])
        axes.fill_between(times, below, above, step="post", label=kind, antialiased=False, **_look(kind))
        below = above
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylabel("rollout GPUs")


def _draw_requests(axes: Axes, result: Result, window: Window) -> None:
    times, counts = running_requests(result)
    first, end = np.searchsorted(times, [window.start_s, window.end_s], "right")
    shown = slice(max(first - 1, 0), end)
    times, counts = np.append(times[shown], window.end_s), np.append(counts[shown], counts[shown][-1:])
    axes.fill_between(times, counts, step="post", color=FAINT, alpha=0.35, linewidth=0)
    axes.step(times, counts, where="post", color=INK, linewidth=0.9)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.set_ylabel("requests\nin flight")


def _draw_updates(panels: Sequence[Axes], result: Result, window: Window) -> None:
    """A line through every panel where a policy update ends, with its step above."""
    finished_s, step = (result.steps.column(name).to_numpy() for name in ("finished_s", "step"))
    edges = {window.first_step - 1: "left", window.end_step - 1: "right"}
    for row in range(max(window.first_step - 1, 0), window.end_step):
        for axes in panels:
            axes.axvline(finished_s[row], color=INK, linewidth=1.1)
        panels[0].annotate(
            f"end of step {step[row]}",
            xy=(finished_s[row], 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha=edges.get(row, "center"),
            va="bottom",
            fontsize="small",
            color=INK,
        )


def _drafters(metadata: Mapping[str, Any]) -> str:
    """The GPUs beside a worker's own that draft for it."""
    plan = (metadata.get("speculation") or {}).get("plan")
    return f" and {plan['draft_gpus']} for its drafter" if plan else ""


def _write_title(figure: Figure, result: Result) -> None:
    """The system; what it runs on; its averages in the steady state."""
    metadata, scenario = result.metadata, result.metadata["scenario"]
    row, tp = summary(result, scenario["warmup_steps"]), scenario["cluster"]["tp"]
    workers, colocated = metadata["rollout_workers"], metadata["train_gpus"] == row["gpus"]
    steps = result.steps.num_rows - scenario["warmup_steps"]
    name = ", ".join(part for part in (row["system"], row["variant"]) if part)
    setting = (
        f"{scenario['model']} on {row['gpus']} {scenario['cluster']['gpu']}: "
        f"{workers} rollout worker{'s' * (workers > 1)} of {tp} GPU{'s' * (tp > 1)}{_drafters(metadata)}, "
        + ("training on the same GPUs" if colocated else f"{metadata['train_gpus']} train GPUs")
    )
    averages = (
        f"Average of {steps} step{'s' * (steps > 1)} after the warm-up: {row['step_s']:,.1f} s a step, "
        f"{row['samples_per_s']:.3g} samples/s, rollout bubble {row['rollout_bubble']:.1%}"
        + (" (training not counted), " if colocated else f", trainer idle {row['train_idle']:.1%}, ")
        + f"off-policyness {row['off_policyness_mean']:.2f} (at most {row['off_policyness_max']})"
    )
    height = figure.get_figheight()
    place: dict[str, Any] = {"va": "top", "color": INK}
    figure.text(0.012, 1 - 0.10 / height, plain(name), fontsize="x-large", fontweight="bold", **place)
    figure.text(0.012, 1 - 0.41 / height, plain(setting), **place)
    figure.text(0.012, 1 - 0.63 / height, averages, **place)


def _write_legend(figure: Figure, rollout: Spans, trainer: Spans) -> None:
    """Every kind with its share of the GPU time shown; of the bubbles, how much is waiting for other workers."""
    parts = {"rollout GPUs": time_shares(rollout), "trainer": time_shares(trainer)}
    patches = []
    for kind in _in_order({kind for by_kind in parts.values() for kind in by_kind}):
        name = "idle (bubble)" if kind == "idle" else kind
        found = ", ".join(f"{gpus} {by_kind[kind]:.1%}" for gpus, by_kind in parts.items() if kind in by_kind)
        patches.append(Patch(label=f"{name}\n{found}", **_look(kind)))
    height = figure.get_figheight()
    waits = "idle" in parts["rollout GPUs"]
    many = len(patches) > 7  # more than a line has room for
    figure.legend(
        handles=patches,
        loc="lower center",
        bbox_to_anchor=(0.5, (0.3 if waits else 0.08) / height),
        ncols=len(patches),
        frameon=False,
        fontsize="xx-small" if many else "small",
        columnspacing=1.0 if many else 2.0,
        labelcolor=INK,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.2 if many else 1.8,
        handleheight=1.8,
    )
    if waits:
        others, nobody = idle_shares(rollout)
        figure.text(
            0.5,
            0.1 / height,
            f"Rollout GPUs idle in the time shown: {others:.1%} while other workers still roll out, "
            f"{nobody:.1%} while none does",
            ha="center",
            va="bottom",
            fontsize="small",
            color=INK,
        )


def _look(kind: str) -> dict[str, Any]:
    look: dict[str, Any] = {"facecolor": KIND_COLORS.get(kind, FAINT), "linewidth": 0}
    return {**look, **BUBBLE} if kind == "idle" else look


def _in_order(kinds: Iterable[str]) -> list[str]:
    """As in `KIND_COLORS`; kinds that are not there come before "idle", which is what remains."""
    order = [kind for kind in KIND_COLORS if kind != "idle"]
    return sorted(kinds, key=lambda kind: (kind == "idle", order.index(kind) if kind in order else len(order), kind))


def _thousands(value: float, _position: int | None = None) -> str:
    return f"{value:,.0f}"


def plain(text: str) -> str:
    """Text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")


def save_png(figure: Figure, path: Path) -> None:
    """The same figure gives the same bytes."""
    if path.suffix.lower() != ".png":
        raise InputError(f"{path}: this picture is written as PNG; name it .png")
    with write_whole_file(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
