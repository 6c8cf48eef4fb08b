"""The picture of an agreement: for each worker, predicted above measured; below, when each sample finished.

Invariant: it shows what the two results' tables say and what `agreement` computes, nothing else. The same results give the
same bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import FuncFormatter, PercentFormatter
from numpy.typing import NDArray

from simrl.agreement import Agreement, finished_on_clock
from simrl.agreement_table import error_rows
from simrl.palette import BLUE, FAINT, GREEN, INK, ORANGE, PAPER, PURPLE, SAND, SKY, TEAL, VERMILLION, YELLOW
from simrl.picture import Picture
from simrl.plots import BUBBLE, DPI, WIDTH, plain, save_png
from simrl.result import Result
from simrl.run_view import short_name
from simrl.timeline import Spans, spans, steady_window

VERSION_COLORS = (SKY, GREEN, ORANGE, PURPLE, BLUE)  # of the policy version, over and over
OTHER_KINDS = {"load_weights": YELLOW, "train_drafter": TEAL, "evaluate": SAND}  # any other, such as training, is FAINT
KIND_NAMES = {
    "load_weights": "loads weights",
    "train_drafter": "trains the drafter",
    "evaluate": "evaluates",
    "idle": "idle (bubble)",
}
TITLE = 84  # characters that fit
MOST_UPDATES = 6  # more in one picture nobody can tell apart


def plot_agreement(predicted: Result, measured: Result, agreement: Agreement, path: str | Path) -> None:
    """Writes a PNG. Of a long run the timeline shows `MOST_UPDATES` updates in its middle, the points below all samples.

    Raises `InputError` for a path that is no .png or cannot be written.
    """
    save_png(agreement_figure(predicted, measured, agreement), Path(path))


def agreement_figure(predicted: Result, measured: Result, agreement: Agreement) -> Picture:
    """The picture of `plot_agreement`."""
    lanes_in = min(max(0.46 * agreement.workers, 1.2), 7.5)  # these are inches
    errors = [f"{name}: {error}" for name, _, _, error, _ in error_rows(agreement)] or ["nothing to compare"]
    lines = [" · ".join(errors[i : i + 4]) for i in range(0, len(errors), 4)]
    above, between, points_in, below = 0.85 + 0.22 * len(lines), 1.25, 3.0, 0.55
    height = above + lanes_in + between + points_in + below
    figure = Picture(figsize=(WIDTH, height), dpi=DPI, facecolor=PAPER)

    def panel(left: float, bottom_in: float, width: float, height_in: float) -> Axes:
        axes = figure.add_axes((left, bottom_in / height, width, height_in / height))
        axes.tick_params(colors=INK)
        axes.spines[:].set_color(FAINT)
        return axes

    timeline = panel(0.085, below + points_in + between, 0.9, lanes_in)
    legend = _draw_runs(timeline, (predicted, measured), agreement)
    _write_legend(figure, legend, (below + points_in + 0.42) / height)
    points, apart = panel(0.085, below, points_in / WIDTH, points_in), panel(0.47, below, 0.515, points_in)
    _draw_completions(points, apart, predicted, measured, agreement)
    _write_title(figure, predicted, agreement, lines)
    return figure


def _draw_runs(axes: Axes, runs: Sequence[Result], agreement: Agreement) -> list[Patch | Line2D]:
    """A worker takes one unit of y: predicted in its upper half, measured in the lower. Returns what the legend explains."""
    windows = [_window(run, agreement) for run in runs]
    start_s, end_s = min(start for start, _ in windows), max(end for _, end in windows)
    shown = [spans(run).within(start_s, end_s) for run in runs]
    rolled = [part.where(part.rolls_out() & (part.lane < agreement.workers)) for part in shown]
    names = _version_names(np.concatenate([part.policy_version[_is_rollout(part)] for part in rolled]))
    thick = 0.43
    drawn: dict[str, Patch | Line2D] = {}
    for top, run, part in zip((0.5 - thick, 0.5), runs, rolled, strict=True):
        for label, color, chosen in _looks(part, names):
            drawn.setdefault(label, _draw_spans(axes, part.where(chosen), label, color, top, thick))
        if agreement.workers <= 8:
            _name_versions(axes, part, top + thick / 2, end_s - start_s)
        updated_s = run.steps.column("finished_s").to_numpy()
        updated_s = updated_s[(updated_s >= start_s) & (updated_s <= end_s)]
        for worker in range(agreement.workers):
            axes.vlines(updated_s, worker + top, worker + top + thick, color=INK, linewidth=1.2)
    axes.hlines(np.arange(agreement.workers) + 0.5, start_s, end_s, color=INK, linewidth=0.5)
    every = -(-agreement.workers // 16)
    numbers = range(0, agreement.workers, every)
    axes.set_yticks([number + 0.5 for number in numbers], [str(number) for number in numbers])
    axes.set_ylim(max(agreement.workers, 1), 0)
    axes.set_ylabel("worker: predicted\nabove measured", color=INK)
    if end_s > start_s:
        axes.set_xlim(start_s, end_s)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.set_xlabel("seconds since the start of the run", color=INK, labelpad=2)
    updates = Line2D(
        [], [], color=INK, marker="|", linestyle="none", markersize=11, markeredgewidth=1.2, label="end of an update"
    )
    return [*(drawn[label] for label in sorted(drawn, key=_legend_place)), updates]


def _window(run: Result, agreement: Agreement) -> tuple[float, float]:
    """The updates to show: all that both runs made and what came of one after it, or `MOST_UPDATES` in the middle."""
    updates = min(agreement.updates.predicted, agreement.updates.measured)
    if updates > MOST_UPDATES:
        shown = steady_window(run, MOST_UPDATES, (updates - MOST_UPDATES) // 2)
        return shown.start_s, shown.end_s
    if agreement.updates.predicted != agreement.updates.measured and run.steps.num_rows > updates:
        return 0.0, float(run.steps.column("finished_s")[updates].as_py())  # the one that the other did not end
    return 0.0, float(run.metadata["end_s"])


def _is_rollout(part: Spans) -> NDArray[np.bool_]:
    return np.array([kind == "rollout" for kind in part.kinds], bool)[part.kind]


def _version_names(versions: NDArray[np.int64]) -> dict[int, str]:
    """What the legend says of each colour that is there."""
    by_turn: dict[int, list[str]] = {}
    for version in np.unique(versions).tolist():
        by_turn.setdefault(version % len(VERSION_COLORS), []).append(f"v{version}")
    return {turn: f"rollout, weights {', '.join(names)}" for turn, names in by_turn.items()}


def _looks(part: Spans, version_names: Mapping[int, str]) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    """What the legend says, a colour, and the spans that look so."""
    rolls = _is_rollout(part)
    turn = part.policy_version % len(VERSION_COLORS)
    for place in np.unique(turn[rolls]).tolist():
        yield version_names[place], VERSION_COLORS[place], rolls & (turn == place)
    for code, kind in enumerate(part.kinds):
        mine = part.kind == code
        if kind != "rollout" and mine.any():
            yield (
                KIND_NAMES.get(kind, "training and other"),
                PAPER if kind == "idle" else OTHER_KINDS.get(kind, FAINT),
                mine,
            )


def _draw_spans(axes: Axes, part: Spans, label: str, color: str, top: float, thick: float) -> Patch:
    """One path for all; returns its sign for the legend."""
    upper = part.lane + top
    x = np.stack([part.started_s, part.ended_s, part.ended_s, part.started_s], axis=1)
    y = np.stack([upper, upper, upper + thick, upper + thick], axis=1)
    look: dict[str, Any] = {"facecolor": color, "linewidth": 0, **(BUBBLE if label == KIND_NAMES["idle"] else {})}
    axes.add_artist(
        PathPatch(Outline.make_compound_path_from_polys(np.stack([x, y], axis=2)), antialiased=False, **look)
    )
    return Patch(label=label, **look)


def _legend_place(label: str) -> tuple[int, str]:
    """Rollouts as their versions come, then other kinds, idle last."""
    rollout = label.startswith("rollout")
    return (0 if rollout else 2 if label == KIND_NAMES["idle"] else 1), label


def _name_versions(axes: Axes, part: Spans, middle: float, shown_s: float) -> None:
    """On each stretch of rollout with one version, where there is room, the version."""
    rolls = part.where(_is_rollout(part))
    for lane, version, start_s, end_s in zip(
        rolls.lane, rolls.policy_version, rolls.started_s, rolls.ended_s, strict=True
    ):
        if end_s - start_s > 0.035 * shown_s:
            axes.text(
                (start_s + end_s) / 2,
                lane + middle,
                f"v{version}",
                color=INK,
                fontsize="x-small",
                ha="center",
                va="center",
            )


def _write_legend(figure: Figure, signs: Sequence[Patch | Line2D], bottom: float) -> None:
    figure.legend(
        handles=signs,
        loc="lower center",
        bbox_to_anchor=(0.535, bottom),
        ncols=len(signs) if len(signs) <= 6 else -(-len(signs) // 2),
        frameon=False,
        fontsize="x-small",
        labelcolor=INK,
        borderaxespad=0,
        borderpad=0,
        columnspacing=1.4,
        handlelength=1.6,
    )


def _draw_completions(points: Axes, apart: Axes, predicted: Result, measured: Result, agreement: Agreement) -> None:
    """When each sample finished, on the rollout clock: predicted over measured, and how far apart."""
    uids, p_s, m_s = finished_on_clock(predicted, measured)
    other = np.isin(uids, [d.uid for d in agreement.real_differences if d.uid is not None])
    size = 16 if len(uids) <= 500 else 4
    far = max([*p_s, *m_s, 1e-9]) * 1.03
    points.plot([0, far], [0, far], color=INK, linewidth=0.8)
    after = np.where(m_s > 0, p_s / np.where(m_s > 0, m_s, 1) - 1, 0)
    apart.axhline(0, color=INK, linewidth=0.8)
    for chosen, color, label in ((~other, BLUE, "same decisions"), (other, VERMILLION, "decided otherwise")):
        if chosen.any():
            points.scatter(m_s[chosen], p_s[chosen], size, color=color, alpha=0.6, linewidth=0, label=label)
            apart.scatter(m_s[chosen], after[chosen], size, color=color, alpha=0.6, linewidth=0)
    mape = agreement.errors.sample_mape
    if mape is not None:
        apart.axhspan(-mape, mape, color=FAINT, alpha=0.25, linewidth=0, label=f"± MAPE {mape:.2%}")
        apart.legend(frameon=False, fontsize="small", labelcolor=INK, loc="upper right")
        points.legend(frameon=False, fontsize="small", labelcolor=INK, loc="upper left")
    points.set_xlim(0, far)
    points.set_ylim(0, far)
    points.set_xlabel("a sample finished, measured (s of rollout)", color=INK)
    points.set_ylabel("predicted (s of rollout)", color=INK)
    apart.set_xlabel("a sample finished, measured (s of rollout)", color=INK)
    apart.set_ylabel("predicted / measured - 1", color=INK)
    apart.yaxis.set_major_formatter(PercentFormatter(1))
    apart.set_xlim(0, far)


def _write_title(figure: Figure, predicted: Result, agreement: Agreement, errors: Sequence[str]) -> None:
    height = figure.get_figheight()
    title = textwrap.shorten(f"Predicted against measured: {short_name(predicted.metadata)}", TITLE, placeholder=" …")
    real, all_ = len(agreement.real_differences), len(agreement.differences)
    ties = f"{all_ - real} near-tie{'s' * (all_ - real != 1)}"
    decided = f"{real} decided otherwise, {ties}" if all_ else "the same decisions"
    place: dict[str, Any] = {"va": "top", "color": INK}
    figure.text(
        0.012,
        1 - 0.10 / height,
        plain(title),
        fontsize="x-large",
        fontweight="bold",
        **place,
    )
    workers = f"{agreement.workers} rollout worker{'s' * (agreement.workers != 1)}"
    figure.text(
        0.012, 1 - 0.43 / height, f"{workers}, {agreement.samples:,} samples finished in both: {decided}", **place
    )
    for line, text in enumerate(errors):
        figure.text(0.012, 1 - (0.65 + 0.22 * line) / height, text, **place)
