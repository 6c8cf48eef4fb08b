"""What a trace holds, as data, as text and as a picture.

Invariant: every number here is computed from the rows of the trace, and each form says where those come from.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from simrl.errors import InputError
from simrl.files import write_whole_file
from simrl.palette import BLUE, FAINT, INK, ORANGE, SKY, VERMILLION
from simrl.ranks import rank_history, rank_stability
from simrl.trace import Trace, trace_metadata_json

PERCENTILES = (5, 25, 50, 75, 95, 99)
RANKING_GROUPS = 8
HISTORY_GROUPS = (8, 16)  # as RhymeRL's Table 2 has
HISTORY_COLUMNS = {
    "accurate": "accurate",
    "near_boundary": "near boundary",
    "strong": "strong",
    "not_last": "not last 10 %",
    "within": "within β×",
    "migrated": "migrated",
}
HISTORY_COLORS = (
    ("accurate", SKY, "same group or lower"),
    ("near_boundary", ORANGE, "higher, near the boundary"),
    ("strong", VERMILLION, "higher, strongly"),
)


def describe(trace: Trace) -> dict[str, Any]:
    """The trace in numbers, ready for JSON; what cannot be computed from it is None.

    `within_group_variance_share` is the share of the variance of log response lengths, each step's mean taken away,
    that lies inside groups (a prompt's samples in one step); unbiased, so it may pass 1 a little. None without groups
    of two or where all lengths are equal. `rank_stability` (RhymeRL Fig. 9, 8 groups) is None unless two successive
    epochs share at least 8 prompts. `share_at_cap` counts responses as long as the cap, whatever their finish_reason.
    """
    tokens, prompt_tokens = trace.column("response_tokens"), trace.column("prompt_tokens")
    starts = _group_starts(trace)
    sizes = np.diff(starts, append=len(trace))
    return {
        "rows": len(trace),
        "steps": len(trace.step_slices),
        "epochs": len(np.unique(trace.column("epoch"))),
        "prompts": len(np.unique(trace.column("prompt_id"))),
        "group_min": int(sizes.min()),
        "group_max": int(sizes.max()),
        "group_mean": float(sizes.mean()),
        "prompt_tokens": _distribution(prompt_tokens),
        "response_tokens": _distribution(tokens),
        "prompt_tokens_total": int(prompt_tokens.sum(dtype=np.int64)),
        "response_tokens_total": int(tokens.sum(dtype=np.int64)),
        "cap_tokens": trace.metadata.cap_tokens,
        "share_at_cap": float(np.mean(tokens >= trace.metadata.cap_tokens)),
        "within_group_variance_share": _within_group_variance_share(trace, starts, sizes),
        "reward_mean": _reward_mean(trace),
        "has_token_ids": "response_ids" in trace.table.column_names,
        **_turns(trace),
        "rank_stability": _ranks(trace),
        "metadata": trace_metadata_json(trace),
    }


def _turns(trace: Trace) -> dict[str, float]:
    """Of an environment: pauses, seconds and tokens of observations a response, in the mean."""
    has_turns = {"turn_tokens", "environment_s"} & set(trace.table.column_names)
    turns = [turn for r in trace.responses(0, len(trace)) for turn in r.turns] if has_turns else []
    return {
        "pauses_mean": len(turns) / len(trace),
        "environment_s_mean": sum(turn.environment_s for turn in turns) / len(trace),
        "observation_tokens_mean": sum(turn.observation_tokens for turn in turns) / len(trace),
    }


def _group_starts(trace: Trace) -> NDArray[np.intp]:
    """The first row of each group, a prompt's samples in one step."""
    step, prompt = trace.column("step"), trace.column("prompt_id")
    return np.flatnonzero(np.r_[True, (step[1:] != step[:-1]) | (prompt[1:] != prompt[:-1])])


def _distribution(tokens: NDArray[Any]) -> dict[str, float]:
    values = np.percentile(tokens, PERCENTILES).tolist()
    named = {f"p{p}": value for p, value in zip(PERCENTILES, values, strict=True)}
    return {"mean": float(tokens.mean()), **named, "max": float(tokens.max())}


def _within_group_variance_share(trace: Trace, starts: NDArray[np.intp], sizes: NDArray[np.intp]) -> float | None:
    log_tokens = np.log(trace.column("response_tokens"))
    step_starts = np.array([first for _, first, _ in trace.step_slices])
    step_sizes = np.diff(step_starts, append=len(trace))

    def variance_around(first: NDArray[np.intp], size: NDArray[np.intp]) -> float:
        """Variance around the mean of each part; each part's mean takes one degree of freedom."""
        if len(trace) == len(first):
            return float("nan")
        rest = log_tokens - np.repeat(np.add.reduceat(log_tokens, first) / size, size)
        return float(rest @ rest) / (len(trace) - len(first))

    inside, total = variance_around(starts, sizes), variance_around(step_starts, step_sizes)
    return inside / total if inside >= 0 and total > 0 else None


def _reward_mean(trace: Trace) -> float | None:
    if "reward" not in trace.table.column_names:
        return None
    reward = trace.column("reward")
    known = reward[~np.isnan(reward)]
    return float(known.mean(dtype=np.float64)) if known.size else None


def _ranks(trace: Trace) -> dict[str, Any] | None:
    try:
        return asdict(rank_stability(trace, RANKING_GROUPS))
    except InputError:
        return None


def describe_history(trace: Trace) -> list[dict[str, Any]]:
    """`simrl.ranks.rank_history` for 8 and 16 groups, as far as the prompts suffice, ready for JSON.

    Raises `InputError` where no two successive epochs share 8 prompts.
    """
    found = [asdict(rank_history(trace, HISTORY_GROUPS[0]))]
    for groups in HISTORY_GROUPS[1:]:
        with suppress(InputError):
            found.append(asdict(rank_history(trace, groups)))
    return found


def print_history(history: list[dict[str, Any]], console: Console) -> None:
    """Prints what `describe_history` returned, for people."""
    overall = Table("groups", *HISTORY_COLUMNS.values(), title="Ranked by the epoch before (RhymeRL Table 2, Fig. 9)")
    overall.title_justify = "left"
    for found in history:
        overall.add_row(f"{found['groups']}", *_history_cells(found["overall"]))
    first = history[0]
    groups = Table(
        "group", *HISTORY_COLUMNS.values(), title=f"By predicted group of {first['groups']}, the shortest first"
    )
    groups.title_justify = "left"
    for number, shares in enumerate(first["by_group"], start=1):
        groups.add_row(f"{number}", *_history_cells(shares))
    epochs = Table("epoch", "β", *HISTORY_COLUMNS.values(), title=f"By epoch, {first['groups']} groups")
    epochs.title_justify = "left"
    for shares in first["by_epoch"]:
        epochs.add_row(f"{shares['epoch']}", f"{shares['growth']:.2f}", *_history_cells(shares))
    for table in (overall, groups, epochs):
        for column in table.columns:
            column.justify = "right"
        console.print(table)
    console.print(
        "accurate: a response is in its prompt's group or a lower one; else it moved higher, near the boundary or strongly. "
        "Of those that did, HistoPipe leaves alone what is not among its group's last 10 %, or within β × the group's "
        "longest response of the epoch before, and migrates the rest."
    )


def _history_cells(shares: dict[str, float]) -> list[str]:
    return [f"{shares[kind]:.1%}" for kind in HISTORY_COLUMNS]


def plot_history(history: list[dict[str, Any]], name: str, path: str | Path) -> None:
    """A picture of what `describe_history` returned: the responses of each predicted group, and those that move, by epoch.

    The format follows the suffix (png, pdf, svg). Raises `InputError` for another one and where nothing can be written.
    """
    path = Path(path)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    kind = _format(figure, path)
    left, right = figure.subplots(1, 2)
    found = history[0]
    x = np.arange(1, found["groups"] + 1)
    bottom = np.zeros(len(x))
    for key, color, label in HISTORY_COLORS:
        share = np.array([group[key] for group in found["by_group"]])
        left.bar(x, share, bottom=bottom, color=color, label=label, edgecolor="white", linewidth=0.4)
        bottom += share
    epoch = [row["epoch"] for row in found["by_epoch"]]
    for key, color, label in HISTORY_COLORS[1:]:
        right.plot(epoch, [row[key] for row in found["by_epoch"]], color=color, marker="o", markersize=4, label=label)
    for axes in (left, right):
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(axes, legend_columns=3)
    left.set(xlabel="predicted group, the shortest first", ylabel="share of its responses")
    right.set(xlabel="epoch", ylabel="share of all responses", ylim=(0, None))
    figure.suptitle(f"{name}: ranks of lengths from epoch to epoch".replace("$", r"\$"), fontsize="large", color=INK)
    with write_whole_file(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)


def _format(figure: Figure, path: Path) -> str:
    kind = path.suffix.lstrip(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise InputError(f"{path}: a picture cannot be written as {path.suffix!r}; use .png, .pdf or .svg")
    return kind


def print_description(description: dict[str, Any], console: Console) -> None:
    """Prints what `describe` returned, for people."""
    d, metadata = description, description["metadata"]
    console.print(f"[bold]{escape(metadata['name'])}[/bold], {_kind(metadata)}")
    console.print(f"Source: {escape(_source(metadata['source']))}")
    console.print(f"Lengths counted by: {escape(metadata['tokenizer'])}. Licence: {escape(metadata['licence'])}")
    if metadata["notes"]:
        console.print(f"Notes: {escape(metadata['notes'])}")

    size = Table.grid(padding=(0, 2))
    smallest, largest = d["group_min"], d["group_max"]
    groups = f"{smallest}" if smallest == largest else f"{smallest} to {largest}, mean {d['group_mean']:.1f}"
    for label, value in (
        ("samples", f"{d['rows']:,}"),
        ("steps, epochs", f"{d['steps']:,}, {d['epochs']:,}"),
        ("prompts", f"{d['prompts']:,}"),
        ("samples a group", groups),
        ("tokens", f"{d['prompt_tokens_total']:,} of prompts, {d['response_tokens_total']:,} of responses"),
        ("at the cap", f"{d['share_at_cap']:.1%} of responses, cap {d['cap_tokens']:,} tokens"),
        ("reward", "not recorded" if d["reward_mean"] is None else f"mean {d['reward_mean']:.3f}"),
        (
            "environment",
            f"{d['pauses_mean']:.1f} pauses a response, {d['environment_s_mean']:.1f} s and "
            f"{d['observation_tokens_mean']:,.0f} tokens of observations in all"
            if d["pauses_mean"]
            else "no turns",
        ),
        ("token ids", "recorded" if d["has_token_ids"] else "not recorded; acceptance of drafts must be assumed"),
    ):
        size.add_row(f"[bold]{label}[/bold]", value)
    console.print(size)

    lengths = Table("tokens")
    for name in d["response_tokens"]:
        lengths.add_column(name, justify="right")
    for label in ("prompt", "response"):
        lengths.add_row(label, *(f"{value:,.0f}" for value in d[f"{label}_tokens"].values()))
    console.print(lengths)

    share = d["within_group_variance_share"]
    if share is not None:
        console.print(f"Within groups lies {share:.0%} of a step's variance of log lengths, the rest between prompts.")
    ranks = d["rank_stability"]
    if ranks is not None:
        console.print(
            f"Ranked by the epoch before, {ranks['same_or_lower']:.1%} of responses stay in their group of "
            f"{ranks['groups']} or lower; {ranks['higher']:.1%} move higher, {ranks['near_boundary']:.1%} only near the "
            f"boundary, {ranks['strong']:.1%} strongly (over {ranks['epoch_pairs']} pairs of epochs)."
        )


def _kind(metadata: dict[str, Any]) -> str:
    drawn = metadata["kind"] == "synthetic"
    return "synthetic: no model generated these responses" if drawn else escape(str(metadata["kind"]))


def _source(source: str) -> str:
    """The generator's parameters in one line of words, where the source is a JSON object; else as it stands."""
    try:
        parsed = json.loads(source)
    except ValueError:
        return source
    if not isinstance(parsed, dict):
        return source
    flat = {**parsed, **parsed.pop("model")} if isinstance(parsed.get("model"), dict) else parsed
    flat.pop("model", None)
    return ", ".join(f"{key} {value}" for key, value in flat.items())


def plot_lengths(trace: Trace, path: str | Path) -> None:
    """A picture of the response lengths: their distribution, and their mean, median and 95th percentile by step.

    The format follows the suffix (png, pdf, svg). Raises `InputError` for another one and where nothing can be written.
    """
    path = Path(path)
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    kind = _format(figure, path)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _plot_distribution(trace, left)
    _plot_steps(trace, right)
    title = f"{trace.metadata.name} ({trace.metadata.kind}): responses {len(trace):,}, steps {len(trace.step_slices):,}"
    figure.suptitle(title.replace("$", r"\$"), fontsize="large", color=INK)  # else matplotlib would see a formula
    with write_whole_file(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)


def _plot_distribution(trace: Trace, axes: Axes) -> None:
    tokens, cap = trace.column("response_tokens"), trace.metadata.cap_tokens
    below = tokens[tokens < cap]
    at_cap = 1 - len(below) / len(tokens)
    bins = int(np.clip(2 * len(tokens) ** (1 / 3), 12, 60))
    edges = np.geomspace(min(tokens.min(), 0.9 * cap), cap, bins + 1)
    whole = np.unique(np.rint(edges))
    edges = whole if len(whole) > 1 else edges  # no bin between two whole numbers, or it would look like a gap
    counts, _ = np.histogram(below, edges)
    look: dict[str, Any] = {"align": "edge", "edgecolor": "white", "linewidth": 0.4}
    axes.bar(edges[:-1], counts / len(tokens), np.diff(edges), color=SKY, **look)
    label = f"at the cap ({cap:,}): {at_cap:.1%}"
    axes.bar(cap, at_cap, cap * 0.1, color=VERMILLION, label=label, **look)
    for percentile, style in ((5, ":"), (50, "-"), (95, "--"), (99, "-.")):
        x = float(np.percentile(tokens, percentile))
        axes.axvline(x, color=BLUE, linestyle=style, linewidth=1.4, label=f"p{percentile}: {x:,.0f}")
    axes.axvline(tokens.mean(), color=ORANGE, linewidth=1.8, label=f"mean: {tokens.mean():,.0f}")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.set(xlabel="response length [tokens]", ylabel="share of responses")
    _finish(axes, legend_columns=3)


def _plot_steps(trace: Trace, axes: Axes) -> None:
    tokens, cap = trace.column("response_tokens"), trace.metadata.cap_tokens
    step = [s for s, _, _ in trace.step_slices]
    parts = [tokens[first:end] for _, first, end in trace.step_slices]
    look: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.6} if len(step) <= 40 else {"linewidth": 1.1}
    for label, color, values in (
        ("p95", SKY, [np.percentile(part, 95) for part in parts]),
        ("mean", ORANGE, [part.mean() for part in parts]),
        ("p50", BLUE, [np.percentile(part, 50) for part in parts]),
    ):
        axes.plot(step, values, color=color, label=label, **look)
    axes.axhline(cap, color=VERMILLION, linewidth=1.4, linestyle="--", label="cap")
    axes.set(xlabel="step", ylabel="response length [tokens]", ylim=(0, cap * 1.06))
    if len(step) == 1:
        axes.set_xlim(step[0] - 1, step[0] + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
    _finish(axes, legend_columns=4)


def _thousands(value: float, _position: int | None = None) -> str:
    return f"{value:,.0f}"


def _finish(axes: Axes, legend_columns: int) -> None:
    """The legend above the picture, where it hides nothing, and quiet axes."""
    axes.legend(
        ncols=legend_columns,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        columnspacing=1.4,
        handlelength=1.8,
        fontsize="small",
        frameon=False,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, which="both", labelsize="small")
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    axes.set_axisbelow(True)
