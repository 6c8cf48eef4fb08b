"""RhymeRL's two-tier allocation of one step of a trace, as data, as text and as a picture.

Invariant: every time here is predicted by `RolloutTimes` from the profile and the history's mean lengths; nothing is
simulated, and each form says which epoch the history is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from simrl.dispatch.allocation import (
    PRECISION_S,
    ascending_fill,
    best_max_workers,
    equal_workers,
    exact,
    growth_factor,
    median_tokens,
    predicted_s,
    ranking_groups,
    shortest_two_steps,
    step_s,
    two_step_sums,
    two_tier,
)
from simrl.errors import InputError
from simrl.files import write_whole_file
from simrl.palette import BLUE, FAINT, INK, ORANGE, PAPER, SKY, VERMILLION
from simrl.profile import RolloutTimes, TableProfile
from simrl.trace import Trace

PLAN_NAMES = {"equal": "equal", "two_tier": "two-tier", "exact": "exact gradient", "optimum": "optimum"}


def allocate_step(
    trace: Trace,
    profile: TableProfile,
    workers: int,
    groups: int,
    epoch: int | None = None,
    step: int | None = None,
    train_s: float = 0.0,
    min_workers: int = 1,
    max_workers: int | None = None,
    accept_length: float = 1.0,
    max_num_seqs: int = 256,
    pairing: bool = False,
    precision_s: float = PRECISION_S,
    optimum: bool = False,
) -> dict[str, Any]:
    """The allocation of one step's prompts to `workers`, ready for JSON.

    `epoch` is the history, `step` what is allocated; left out, they are the last epoch but one and the first step after it.
    Where no epoch comes before the step, its own lengths stand for the history, which `notes` then say. `max_workers` left
    out is `best_max_workers`. `optimum` adds `shortest_two_steps` to the plans compared. Raises `InputError` for what the
    trace does not have and for an allocation that cannot be.
    """
    if not 1 <= groups <= workers:
        raise InputError(f"allocate: {groups} groups on {workers} workers; each group needs a worker of its own")
    epoch, step = _history_and_step(trace, epoch, step)
    epochs, steps, prompts, tokens = (trace.column(c) for c in ("epoch", "step", "prompt_id", "response_tokens"))
    in_step, in_history = steps == step, epochs == epoch
    known = in_step & np.isin(prompts, prompts[in_history])
    past = in_history & np.isin(prompts, prompts[in_step])
    if not known.any():
        raise InputError(f"allocate: no prompt of step {step} is in epoch {epoch}; choose another --epoch or --step")

    ranked = ranking_groups(prompts[past], tokens[past], groups)
    samples = [int(np.isin(prompts[known], group.prompts).sum()) for group in ranked]
    most = max(min(max_workers or workers, workers - (groups - 1) * min_workers), 1)
    lengths = [group.representative_tokens for group in ranked]
    prompt_tokens = round(float(trace.column("prompt_tokens")[known].mean()))
    batch, longest = min(max(samples), max_num_seqs), round(max(lengths))
    profile.require_covers(batch, batch, prompt_tokens + longest)
    times = RolloutTimes(profile, longest, max_num_seqs, prompt_tokens, accept_length)
    seconds = times.table(lengths, samples, most)
    if max_workers is None:
        most = best_max_workers(seconds, workers, train_s, min_workers, precision_s)
    table = seconds[:, :most]
    plan = two_tier(table, workers, train_s, min_workers, precision_s)
    smallest = exact(table, workers, train_s, min_workers)

    equal = equal_workers(groups, workers)
    plans = {"equal": equal, "two_tier": plan.workers, "exact": smallest.workers}
    if optimum:
        plans["optimum"] = shortest_two_steps(seconds, workers, min_workers)
    result: dict[str, Any] = {
        "history_epoch": epoch,
        "step": step,
        "history_is_own": bool((in_step & in_history).any()),
        "prompts_without_history": len(np.unique(prompts[in_step & ~known])),
        "samples": sum(samples),
        "workers": workers,
        "min_workers": min_workers,
        "max_workers": most,
        "max_workers_chosen": max_workers is None,
        "train_s": train_s,
        "accept_length": accept_length,
        "max_num_seqs": max_num_seqs,
        "precision_s": precision_s,
        "groups": [
            {
                "group": i,
                "prompts": len(group.prompts),
                "samples": samples[i],
                "representative_tokens": group.representative_tokens,
                "workers": plan.workers[i],
                "equal_workers": equal[i],
                "predicted_s": plan.predicted_s[i],
                "equal_predicted_s": predicted_s(seconds, equal)[i],
                "target_s": plan.target_s[i],
            }
            for i, group in enumerate(ranked)
        ],
        "t0_s": plan.t0_s,
        "gradient_s": plan.gradient_s,
        "exact_gradient_s": smallest.gradient_s,
        "needed_workers": list(plan.needed_workers),
        "leftover_workers": plan.leftover_workers,
        "alternation": "pairing" if pairing else "reversed",
        "two_step_sums": two_step_sums(plan.predicted_s, plan.workers, pairing).tolist(),
        "plans": [_compared(name, seconds, counts, train_s) for name, counts in plans.items()],
        "growth_factor": _growth(epochs, prompts, tokens, epoch),
        "profile": f"{profile.metadata.model} on {profile.metadata.gpu}, tp {profile.metadata.tp}",
    }
    return {**result, "notes": _notes(result)}


def _history_and_step(trace: Trace, epoch: int | None, step: int | None) -> tuple[int, int]:
    """The epoch whose lengths are the history, and the step to allocate, from either, both or neither."""
    epochs, steps = trace.column("epoch"), trace.column("step")
    every = np.unique(epochs).tolist()
    if epoch is not None and epoch not in every:
        raise InputError(f"--epoch {epoch}: the trace has the epochs {every[0]} to {every[-1]}; choose one of them")
    if step is not None:
        if step not in steps:
            raise InputError(
                f"--step {step}: the trace has the steps {steps.min()} to {steps.max()}; choose one of them"
            )
        of_step = int(epochs[steps == step].max())
        if epoch is None:
            return max((e for e in every if e < of_step), default=of_step), step
        if epoch > of_step:
            raise InputError(
                f"--epoch {epoch}: step {step} is of epoch {of_step}, before it; choose an earlier history"
            )
        return epoch, step
    epoch = every[max(len(every) - 2, 0)] if epoch is None else epoch
    later = steps[epochs > epoch]
    return epoch, int(later.min() if later.size else steps[epochs == epoch].max())


def _compared(name: str, seconds: NDArray[np.float64], counts: Sequence[int], train_s: float) -> dict[str, Any]:
    times = predicted_s(seconds, counts)
    return {
        "plan": name,
        "workers": list(counts),
        "longest_group_s": max(times),
        "longest_two_steps_s": float(two_step_sums(times, counts).max()),
        "step_s": {
            "reversed": step_s(times, counts, train_s),
            "pairing": step_s(times, counts, train_s, pairing=True),
        },
    }


def _growth(epochs: NDArray[Any], prompts: NDArray[Any], tokens: NDArray[Any], epoch: int) -> float | None:
    """β from the epoch before the history to the history; None where they share no prompt."""
    before, now = epochs == max(epochs[epochs < epoch], default=epoch), epochs == epoch
    if epochs.min() == epoch or not np.isin(prompts[now], prompts[before]).any():
        return None
    return growth_factor(median_tokens(prompts[before], tokens[before]), median_tokens(prompts[now], tokens[now]))


def _notes(d: dict[str, Any]) -> list[str]:
    """What was decided where the paper, or the trace, leaves it open."""
    notes = []
    if d["history_is_own"]:
        notes.append(
            f"No epoch before step {d['step']} is the history: its own lengths (epoch {d['history_epoch']}) stand for it, "
            "a forecast that is never wrong."
        )
    if d["prompts_without_history"]:
        notes.append(f"Left out for want of a history: {d['prompts_without_history']} of the step's prompts.")
    if d["max_workers_chosen"]:
        notes.append(
            f"At most {d['max_workers']} workers a group: the bound with which a step is shortest in the long run; "
            "the paper leaves it to its user."
        )
    first = d["groups"][0]
    if first["workers"] == d["max_workers"] and len(d["groups"]) > 1 and d["t0_s"] > d["train_s"]:
        notes.append(
            f"Training ({d['train_s']:g} s) is shorter than the shortest group on {d['max_workers']} workers "
            f"({d['t0_s']:.1f} s), so t0 is that, and the group gets as many."
        )
    if d["leftover_workers"]:
        notes.append(
            f"{d['leftover_workers']} workers were not needed for the target: they went to the slowest groups that "
            "they make faster (the paper does not say where they go)."
        )
    if d["gradient_s"] == 0 and len(d["groups"]) > 1:
        notes.append("The longest group ends by t0 with the fewest workers: no gradient is needed.")
    return notes


def print_allocation(d: dict[str, Any], console: Console) -> None:
    """Prints what `allocate_step` returned, for people."""
    console.print(
        f"[bold]Step {d['step']}[/bold], history epoch {d['history_epoch']}: {d['samples']:,} samples in "
        f"{len(d['groups'])} groups on {d['workers']} workers; predicted for {escape(d['profile'])}"
    )
    headings = ("prompts", "mean tokens", "equal", "s", "two-tier", "s", "target s")
    table = Table("group", *map(_right, headings), title="Workers of each group", title_justify="left")
    for g in d["groups"]:
        table.add_row(
            str(g["group"]),
            f"{g['prompts']:,}",
            f"{g['representative_tokens']:,.0f}",
            str(g["equal_workers"]),
            f"{g['equal_predicted_s']:,.1f}",
            str(g["workers"]),
            f"{g['predicted_s']:,.1f}",
            f"{g['target_s']:,.1f}",
        )
    console.print(table)
    console.print(
        f"Target: t0 {d['t0_s']:.2f} s, gradient {d['gradient_s']:.2f} s a group (searched to {d['precision_s']:g} s; "
        f"the smallest possible is {d['exact_gradient_s']:.2f} s)"
    )
    columns = ("longest group", "longest two steps", "a step", "a step, paired")
    compared = Table("plan", *map(_right, columns), title="Predicted seconds", title_justify="left")
    for p in d["plans"]:
        figures = (p["longest_group_s"], p["longest_two_steps_s"], p["step_s"]["reversed"], p["step_s"]["pairing"])
        compared.add_row(PLAN_NAMES[p["plan"]], *(f"{figure:,.1f}" for figure in figures))
    console.print(compared)
    if d["growth_factor"] is not None:
        console.print(f"Migration threshold β from the epoch before to the history: {d['growth_factor']:.2f}")
    for note in d["notes"]:
        console.print(f"- {note}", markup=False)


def _right(heading: str) -> Column:
    return Column(heading, justify="right")


def plot_allocation(d: dict[str, Any], path: str | Path) -> None:
    """A picture of what `allocate_step` returned: the groups' times against the target, and two steps on each worker.

    The format follows the suffix (png, pdf, svg). Raises `InputError` for another one and where nothing can be written.
    """
    path = Path(path)
    figure = allocation_figure(d)
    formats = figure.canvas.get_supported_filetypes()
    kind = path.suffix.lstrip(".").lower()
    if kind not in formats:
        raise InputError(f"{path}: a picture cannot be written as {path.suffix!r}; use .png, .pdf or .svg")
    with write_whole_file(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)


def allocation_figure(d: dict[str, Any]) -> Figure:
    """The picture of `plot_allocation`."""
    figure = Figure(figsize=(11, 4.4), layout="constrained", facecolor=PAPER)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_groups(left, d)
    _draw_workers(right, d)
    title = f"Step {d['step']}, history epoch {d['history_epoch']}: {d['workers']} workers, {d['profile']}"
    figure.suptitle(title.replace("$", r"\$"), fontsize="large", color=INK)
    return figure


def _draw_groups(axes: Axes, d: dict[str, Any]) -> None:
    """Bars of each group's time, equal beside two-tier, the number of its workers on top; the target as a line."""
    index = np.arange(len(d["groups"]))
    for shift, key, count, color, label in (
        (-0.21, "equal_predicted_s", "equal_workers", SKY, "equal"),
        (0.21, "predicted_s", "workers", ORANGE, "two-tier"),
    ):
        bars = axes.bar(index + shift, [g[key] for g in d["groups"]], 0.4, color=color, label=label)
        names = [str(g[count]) for g in d["groups"]]
        halo = [withStroke(linewidth=2, foreground=PAPER)]  # the line of the target may pass behind
        axes.bar_label(bars, names, fontsize="x-small", color=INK, padding=1, zorder=4, path_effects=halo)
    target = f"target: {d['t0_s']:.1f} s + {d['gradient_s']:.1f} s a group"
    axes.plot(index, [g["target_s"] for g in d["groups"]], color=BLUE, marker="o", markersize=4, label=target)
    if d["train_s"] > 0:
        axes.axhline(d["train_s"], color=VERMILLION, linestyle="--", linewidth=1.2, label="training")
    axes.set_xticks(index)
    axes.set(xlabel="ranking group (on the bars: workers)", ylabel="predicted time [s]")
    _finish(axes)


def _draw_workers(axes: Axes, d: dict[str, Any]) -> None:
    """Two steps of the two-tier plan stacked on each worker, and what equal allocation would make of them."""
    times, counts = [g["predicted_s"] for g in d["groups"]], [g["workers"] for g in d["groups"]]
    sums = np.array(d["two_step_sums"])
    first = np.array(times)[ascending_fill(counts)]
    worker = np.arange(len(sums))
    look: dict[str, Any] = {"width": 1.0, "linewidth": 0.3, "edgecolor": PAPER}
    axes.bar(worker, first, color=ORANGE, label="first step, ascending", **look)
    second = "paired" if d["alternation"] == "pairing" else "reversed"
    axes.bar(worker, sums - first, bottom=first, color=BLUE, label=f"second step, {second}", **look)
    equal = two_step_sums(
        [g["equal_predicted_s"] for g in d["groups"]],
        [g["equal_workers"] for g in d["groups"]],
        pairing=d["alternation"] == "pairing",
    )
    label = f"equal allocation (bubble {_bubble(equal):.0%})"
    axes.stairs(equal, np.arange(len(equal) + 1) - 0.5, color=INK, linewidth=1.2, label=label)
    axes.axhline(
        sums.mean(), color=FAINT, linestyle="--", linewidth=1.2, label=f"two-tier, mean (bubble {_bubble(sums):.0%})"
    )
    axes.set(xlabel="worker", ylabel="two steps, predicted [s]", xlim=(-0.5, len(sums) - 0.5))
    _finish(axes)


def _bubble(sums: NDArray[np.float64]) -> float:
    """The share of the longest sum that workers are idle, on average."""
    return float(1 - sums.mean() / sums.max())


def _finish(axes: Axes) -> None:
    axes.legend(
        ncols=2,
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
