"""The timeline of a run: the work of each GPU in a window of time.

Invariant: the picture shows the tables and `metrics` and nothing else; the area that a kind of span
covers is its GPU time in the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from simrl.result.metrics import summary
from simrl.result.result import Result
from simrl.result.timeline import (
    Spans,
    Window,
    idle_shares,
    rolls_out,
    running_requests,
    shares,
    spans,
    time_shares,
)
from simrl.show.style import (
    FAINT,
    INK,
    KINDS,
    LOOKS,
    PAPER,
    PERCENT,
    THOUSANDS,
    UNKNOWN,
    Picture,
    legend_below,
    plain,
)

WIDTH = 11.0  # inches
LABEL = 0.14  # of the width: a label of an update, which may be beside its line


def timeline_figure(result: Result, window: Window) -> Picture:
    """Draw the work of each GPU in time, to show which GPUs wait, how long and for which others.

    From above: the rollout workers, a lane each; the trainer, if it has separate GPUs; the share of
    rollout GPUs at each kind of work; the requests at the workers. Vertical lines are policy
    updates. The averages above the picture are those of `metrics.summary`, over the whole run after
    its warm-up; the shares below are of the GPU time shown.
    """
    shown = spans(result).within(window.start_s, window.end_s)
    rollout, trainer = shown.where(shown.rolls_out()), shown.where(~shown.rolls_out())
    workers = sum(map(rolls_out, shown.lanes))
    trainers = len(shown.lanes) - workers
    heights = [
        min(max(0.09 * workers, 1.2), 4.0),
        *[0.34 * trainers] * (trainers > 0),
        1.0,
        0.9,
    ]  # inches
    figure = Picture(WIDTH, WIDTH)  # until the height of the legend is known
    place_legend, legend_in, waits = _write_legend(figure, rollout, trainer)
    above, gap, below = 1.22, 0.12, 0.62 + legend_in + 0.24 * bool(waits)
    height = above + sum(heights) + gap * (len(heights) - 1) + below
    figure.set_size_inches(WIDTH, height)
    sides = {"left": 0.085, "right": 0.985, "top": 1 - above / height, "bottom": below / height}
    rows = {"height_ratios": heights, "hspace": gap * len(heights) / sum(heights)}
    panels = figure.subplots(len(heights), sharex=True, gridspec_kw={**rows, **sides})
    _draw_workers(panels[0], rollout, workers, result.metadata["rollout_workers"])
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
    panels[-1].xaxis.set_major_formatter(THOUSANDS)
    figure.align_ylabels(panels)
    _write_title(figure, result)
    place_legend(0.08 + 0.24 * bool(waits))
    figure.text(0.5, 0.1 / height, waits, ha="center", va="bottom", fontsize="small", color=INK)
    return figure


def _draw_workers(axes: Axes, part: Spans, workers: int, first: int) -> None:
    """Draw the lanes of all workers: the `first`, and those that roll out for a part of the run."""
    _draw_lanes(axes, part, 0, workers)
    every = -(-workers // 8)
    axes.set_yticks(np.arange(0, workers, every) + 0.5, [str(i) for i in range(0, workers, every)])
    counts = f"{first} + {workers - first}" if workers > first else f"{workers}"
    axes.set_ylabel(f"{counts} rollout worker{'s' * (workers > 1)}")


def _draw_trainers(axes: Axes, part: Spans, first_lane: int, lanes: int) -> None:
    """Draw the lanes, and on each training span that is long enough its step."""
    _draw_lanes(axes, part, first_lane, lanes)
    axes.set_yticks([])
    axes.text(
        -0.008,
        0.5,
        "trainer" if lanes == 1 else "trainer\nand judge",
        transform=axes.transAxes,
        ha="right",
        va="center",
        color=INK,
    )
    write_on_spans(
        axes,
        part.where(part.of_kind("train")),
        0.5 - first_lane,
        "step ",
        0.06 * (part.ended_s.max() - part.started_s.min()),
        color=PAPER,
        va="center_baseline",
        fontsize="small",
    )


def _draw_lanes(axes: Axes, part: Spans, first_lane: int, lanes: int) -> None:
    """Draw spans as rectangles; a lane has one unit of y, from 0 at the top. A patch for each kind
    has it as its label."""
    thick = 1.0 if lanes > 48 else 0.86  # no gaps between thin lanes
    for code, kind in enumerate(part.kinds):
        of_kind = part.where(part.kind == code)
        draw_spans(
            axes,
            of_kind,
            of_kind.lane - first_lane + (1 - thick) / 2,
            thick,
            label=kind,
            **_look(kind),
        )
    axes.set_ylim(lanes, 0)


def draw_spans(axes: Axes, part: Spans, top: NDArray[Any], thick: float, **look: Any) -> None:
    """Draw each span as a rectangle below its `top`; all rectangles are one path."""
    x = np.stack([part.started_s, part.ended_s, part.ended_s, part.started_s], axis=1)
    y = np.stack([top, top, top + thick, top + thick], axis=1)
    outline = Outline.make_compound_path_from_polys(np.stack([x, y], axis=2))
    axes.add_artist(PathPatch(outline, antialiased=False, **look))


def write_on_spans(
    axes: Axes, part: Spans, middle: float, prefix: str, room_s: float, **look: Any
) -> None:
    """Write the policy version on each span longer than `room_s`, `middle` below its lane."""
    for lane, version, start_s, end_s in zip(
        part.lane, part.policy_version, part.started_s, part.ended_s, strict=True
    ):
        if end_s - start_s > room_s:
            axes.text(
                (start_s + end_s) / 2, lane + middle, f"{prefix}{version}", ha="center", **look
            )


def _draw_shares(axes: Axes, part: Spans) -> None:
    """Draw the share of GPUs at each kind of work, stacked; the rest up to 100% is the bubble."""
    times, by_kind = shares(part)
    below = np.zeros(len(times))
    for kind in _in_order(by_kind):
        above = below + np.append(by_kind[kind], by_kind[kind][-1:])
        axes.fill_between(
            times, below, above, step="post", label=kind, antialiased=False, **_look(kind)
        )
        below = above
    axes.set(ylim=(0, 1), yticks=[0, 0.5, 1], ylabel="share of\nrollout GPUs")
    axes.yaxis.set_major_formatter(PERCENT)


def _draw_requests(axes: Axes, result: Result, window: Window) -> None:
    times, counts = running_requests(result)
    first, end = np.searchsorted(times, [window.start_s, window.end_s], "right")
    shown = slice(max(first - 1, 0), end)
    times, counts = (
        np.append(times[shown], window.end_s),
        np.append(counts[shown], counts[shown][-1:]),
    )
    axes.fill_between(times, counts, step="post", color=FAINT, alpha=0.35, linewidth=0)
    axes.step(times, counts, where="post", color=INK, linewidth=0.9)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(THOUSANDS)
    axes.set_ylabel("requests\nin flight")


def _draw_updates(panels: Sequence[Axes], result: Result, window: Window) -> None:
    """Draw a line through every panel at the end of each policy update, with its step above."""
    finished_s, step = (result.steps.column(name).to_numpy() for name in ("finished_s", "step"))
    edges = {window.first_step - 1: "left", window.end_step - 1: "right"}
    above: dict[str, Any] = {
        "xycoords": ("data", "axes fraction"),
        "xytext": (0, 3),
        "textcoords": "offset points",
    }
    for row in range(max(window.first_step - 1, 0), window.end_step):
        for axes in panels:
            axes.axvline(finished_s[row], color=INK, linewidth=1.1)
        look: dict[str, Any] = {
            "ha": edges.get(row, "center"),
            "va": "bottom",
            "fontsize": "small",
            "color": INK,
        }
        # the last one always; another only if it has room before the next
        room_s = finished_s[min(row + 1, window.end_step - 1)] - finished_s[row]
        if row == window.end_step - 1 or room_s > LABEL * (window.end_s - window.start_s):
            panels[0].annotate(f"end of step {step[row]}", (finished_s[row], 1), **above, **look)


def _write_title(figure: Figure, result: Result) -> None:
    """Write the system, its cluster, and its averages in the steady state."""
    metadata, scenario = result.metadata, result.metadata["scenario"]
    row, tp = summary(result, scenario["warmup_steps"]), scenario["cluster"]["tp"]
    workers, colocated = metadata["rollout_workers"], metadata["train_gpus"] == row["gpus"]
    steps = result.steps.num_rows - scenario["warmup_steps"]
    plan = (metadata.get("speculation") or {}).get("plan")
    setting = (
        f"{scenario['model']} on {row['gpus']} {scenario['cluster']['gpu']}: "
        f"{workers} rollout worker{'s' * (workers > 1)} of {tp} GPU{'s' * (tp > 1)}"
        + (f" and {plan['draft_gpus']} for its drafter, " if plan else ", ")
        + ("training on the same GPUs" if colocated else f"{metadata['train_gpus']} train GPUs")
    )
    averages = (
        f"Average of {steps} step{'s' * (steps > 1)} after the warm-up: {row['step_s']:,.1f} s a step, "
        f"{row['samples_per_s']:.3g} samples/s, rollout bubble {row['rollout_bubble']:.1%}"
        + (
            " (training not counted), "
            if colocated
            else f", trainer idle {row['train_idle']:.1%}, "
        )
        + f"off-policyness {row['off_policyness_mean']:.2f} (at most {row['off_policyness_max']})"
    )
    write_head(figure, ", ".join(filter(None, (row["system"], row["variant"]))), setting, averages)


def write_head(figure: Figure, title: str, *lines: str) -> None:
    """Write a title and lines below it in the upper left corner."""
    height, room = figure.get_figheight(), 72 * 0.98 * figure.get_figwidth()  # points
    # a letter is at most 0.64 of the size wide on average if bold, else 0.54: long lines are smaller
    heads = [(0.10, title, "bold", 14.4, 0.64)]
    heads += [(0.42 + 0.22 * i, line, "normal", 10.0, 0.54) for i, line in enumerate(lines)]
    for below, line, fontweight, largest, wide in heads:
        figure.text(
            0.012,
            1 - below / height,
            plain(line),
            va="top",
            color=INK,
            fontweight=fontweight,
            fontsize=min(largest, room / wide / max(len(line), 1)),
        )


def _write_legend(
    figure: Figure, rollout: Spans, trainer: Spans
) -> tuple[Callable[[float], None], float, str]:
    """Write every kind with its share of the GPU time shown, below the panels. Return a function
    that places the legend, its height in inches, and a line on the bubbles: the shares with and
    without another worker that rolls out."""
    shown = {"rollout GPUs": time_shares(rollout), "trainer": time_shares(trainer)}
    patches = []
    for kind in _in_order({kind for by_kind in shown.values() for kind in by_kind}):
        percent = ", ".join(
            f"{pool} {by_kind[kind]:.1%}" for pool, by_kind in shown.items() if kind in by_kind
        )
        patches.append(Patch(label=f"{kind_words(kind)}\n{percent}", **_look(kind)))
    place, legend_in = legend_below(figure, patches, handleheight=1.8)
    if "idle" not in shown["rollout GPUs"]:
        return place, legend_in, ""
    others, nobody = idle_shares(rollout)
    while_ = f"{others:.1%} while other workers still roll out, {nobody:.1%} while none does"
    return place, legend_in, f"Rollout GPUs idle in the time shown: {while_}"


def kind_words(kind: str) -> str:
    """Return the name of a kind of spans in words."""
    return "idle (bubble)" if kind == "idle" else kind.replace("_", " ")


def _look(kind: str) -> dict[str, Any]:
    return LOOKS.get(kind, UNKNOWN).patch


def _in_order(kinds: Iterable[str]) -> list[str]:
    """Return the kinds in the order of `KINDS`; unknown kinds come before "idle"."""
    order = [kind for kind in KINDS if kind != "idle"]
    return sorted(
        kinds,
        key=lambda kind: (kind == "idle", order.index(kind) if kind in order else len(order), kind),
    )
