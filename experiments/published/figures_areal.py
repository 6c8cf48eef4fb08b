"""AReaL's figures (arXiv 2505.24298), from its ledger's middle: who waits, how it scales, what staleness buys."""

from __future__ import annotations

import drawing
import numpy as np
from drawing import COLOURS, MARK, Bench, Draw, Drawn, beside, many, share, single
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, ScalarFormatter

from experiments.reproduce import areal
from experiments.reproduce.lab import measured
from experiments.reproduce.ledger import named
from simrl.result.result import Result
from simrl.result.timeline import time_shares
from simrl.show.style import FAINT, INK

SIZES = {"1.5B": areal.SMALL, "7B": areal.LARGE}
_, WARMUP_STEPS = areal.STEPS
RATIO = "{:.2f}".format


def timelines(bench: Bench) -> Drawn:
    """Draw Figs. 1 and 3: equal seconds of a synchronous, a one-step-overlapped and an asynchronous run."""
    inputs = bench.inputs("areal")
    overlapped = named(inputs, "minibatches", "log_probs", "rollout_share")
    systems = {
        "synchronous (Sync.AReaL)": areal.areal(inputs, 0),
        "one-step overlap": {"name": "one_step_off", **overlapped},
        f"AReaL, η {inputs['eta']}": areal.areal(inputs, inputs["eta"]),
    }
    cap = inputs["cap_tokens"]
    runs = {
        name: bench.result(
            areal.scenario(inputs, areal.SMALL, 128, system, cap, updates=areal.STEPS)
        )
        for name, system in systems.items()
    }
    synchronous = runs["synchronous (Sync.AReaL)"]
    longest_s = 2.5 * (measured_s(synchronous) / (synchronous.steps.num_rows - WARMUP_STEPS))
    length_s = min(longest_s, *map(measured_s, runs.values()))
    figure, panels = drawing.picture(3, 1, 5.6, sharex=True)
    idle, thin, seen = {}, {}, set[str]()
    for axes, (name, run) in zip(panels.flat, runs.items(), strict=True):
        finished_s = run.steps.column("finished_s").to_numpy()
        start_s = float(finished_s[WARMUP_STEPS - 1])
        end_s = start_s + length_s
        part = drawing.lanes(axes, run, start_s, end_s)
        for at_s in finished_s[(finished_s > start_s) & (finished_s <= end_s)]:
            axes.axvline(at_s - start_s, color=INK, linewidth=1.6)
        idle[name] = time_shares(part.where(part.rolls_out())).get("idle", 0.0)
        thin[name] = thin_share(run, start_s, end_s)
        seen |= drawing.kinds_of(part)
        title = f"{name}: rollout GPUs idle {share(idle[name])}, another {share(thin[name])} at less than a quarter of a batch"
        axes.set_title(title, loc="left", fontsize="medium", color=INK)
        axes.set_ylabel("GPUs")
    panels[-1, 0].set_xlabel(
        "seconds (red: policy updates; the paler a rollout, the fewer requests its worker has left)"
    )
    drawing.kinds_legend(figure, seen)
    (first, second, third), (one, two, three) = idle.values(), thin.values()
    return Drawn(
        figure,
        "Figs. 1 and 3: synchronous, overlapped, asynchronous (1.5B; 16 of the 128 GPUs)",
        "Generation waits for its longest response: rollout GPUs idle or work on less than a quarter of a batch "
        f"{share(first + one)} of the time when synchronous, {share(second + two)} with one step of overlap, "
        f"{share(third + three)} under AReaL, which has no batch to wait for. The paper draws this without numbers.",
    )


def thin_share(run: Result, start_s: float, end_s: float) -> float:
    """Return the share of the rollout GPUs' time with requests, but less than a quarter of the most that a worker has."""
    batch = drawing.batches(run, start_s, end_s)
    return float(((batch > 0) & (batch < 0.25)).mean())


def measured_s(run: Result) -> float:
    """Return the seconds from the end of the warm-up to the last update."""
    start_s, end_s = measured(run, WARMUP_STEPS)
    return end_s - start_s


def scaling(bench: Bench) -> Drawn:
    """Draw Fig. 4 at a context of 16K: throughput by GPUs, and AReaL over verl."""
    figure, panels = drawing.picture(2, 2, 5.8, height_ratios=(3, 2))
    said = []
    for column, (size, counts) in enumerate(
        {"1.5B": (32, 64, 128, 256), "7B": (64, 128, 256, 512)}.items()
    ):
        top, below = panels[:, column]
        simulated, read = {}, {}
        for name, colour in zip(("AReaL", "verl"), COLOURS, strict=False):
            row = f"areal-fig4-{row_name(size)}-16k-{name.lower()}"
            values, marks = bench.predicted(row), bench.values(row)
            simulated[name], read[name] = np.array(values), np.array(marks)
            top.plot(counts, values, color=colour, marker="o", label=name)
            top.plot(counts, marks, **{**MARK, "color": colour, "linestyle": ":"})
        linear = simulated["AReaL"][0] * np.array(counts) / counts[0]
        top.plot(counts, linear, color=FAINT, linestyle="--", linewidth=1, label="linear")
        top.set(xscale="log", yscale="log", title=f"R1-Distill-Qwen {size}")
        ratio, published = simulated["AReaL"] / simulated["verl"], read["AReaL"] / read["verl"]
        below.plot(counts, ratio, color=INK, marker="o", label="simulated")
        below.plot(counts, published, **{**MARK, "linestyle": ":"})
        below.axhline(1, color=INK, linewidth=0.8)
        below.set(xscale="log", xlabel="H800 GPUs", ylim=(0, None))
        for axes in (top, below):
            axes.xaxis.set_major_locator(FixedLocator(counts))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(ScalarFormatter())
        top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        top.yaxis.set_major_formatter(ScalarFormatter())
        top.yaxis.set_minor_locator(NullLocator())
        said.append(f"{size} {beside(ratio, published, many)}")
    panels[0, 0].set_ylabel("thousand tokens/s")
    panels[1, 0].set_ylabel("AReaL / verl")
    drawing.legend(panels[0, 0], loc="upper left")
    drawing.legend(panels[1, 0], loc="upper left")
    both = (
        bench.values("areal-eta")[3] / bench.values("areal-fig4-1p5b-16k-areal")[2]
    )  # η 4, 128 GPUs
    return Drawn(
        figure,
        "Fig. 4: strong scaling at a context of 16K",
        f"AReaL over verl by rising number of GPUs: {'; '.join(said)}. The published lines (dotted) have another level: at "
        f"128 GPUs and η 4 the paper's own Fig. 5c has {both:.1f} times the tokens a second of its Fig. 4, so only slopes and "
        "ratios compare.",
    )


def staleness(bench: Bench) -> Drawn:
    values, marks = bench.predicted("areal-eta"), bench.values("areal-eta")
    figure = drawing.bar_picture(
        ["0", "1", "2", "4", "8", "16", "∞"],
        single(values),
        single(marks),
        x="η, the bound on staleness in updates",
        y="thousand tokens/s",
        form="{:.0f}",
        intervals=single(bench.intervals("areal-eta")),
    )
    return Drawn(
        figure,
        "Fig. 5c: throughput by η (1.5B, 128 GPUs)",
        f"The first update of staleness multiplies throughput by {beside(values[1] / values[0], marks[1] / marks[0], RATIO)}, "
        f"an unbounded one by {values[-1] / values[0]:.2f} ({marks[-1] / marks[0]:.2f}). "
        f"At η 8 it is {values[4]:.0f} thousand tokens/s (published: {marks[4]:.0f}).",
    )


def interruption(bench: Bench) -> Drawn:
    figure, runs, marks = drawing.row_picture(
        bench,
        {size: f"areal-interrupt-{row_name(size)}" for size in SIZES},
        ("interruptible", "not interruptible"),
        y="thousand tokens/s generated",
        height_in=3.2,
        form="{:.0f}",
    )
    said = "; ".join(
        f"{size} {beside(run[0] / run[1] - 1, mark[0] / mark[1] - 1)}"
        for size, run, mark in zip(SIZES, runs, marks, strict=True)
    )
    return Drawn(
        figure,
        "Fig. 6: interruptible generation (4 nodes)",
        f"What interruption adds to the tokens generated a second: {said}. Where generation cannot be interrupted, a worker "
        "takes new weights when its longest response is over.",
    )


def microbatches(bench: Bench) -> Drawn:
    """Draw Fig. 7: the gain of micro-batches by a token budget over equal counts."""
    inputs = bench.inputs("areal")
    nodes = {"1.5B": 16, "7B": 24}
    gains = [areal.dynamic_gain(inputs, SIZES[size], nodes[size]) for size in SIZES]
    published = bench.value("areal-dynbatch")
    figure, axes = drawing.panel(3.2)
    names = (
        f"{inputs['fixed_microbatches']} of equal counts",
        f"up to {inputs['tokens_per_microbatch']:,} tokens each",
    )
    drawing.bars(
        axes,
        list(SIZES),
        {names[0]: [1.0] * len(SIZES), names[1]: [1 + gain for gain in gains]},
        form="{:.2f}",
    )
    axes.axhline(published, **{**MARK, "linestyle": "--", "marker": ""})
    axes.set_ylabel("training throughput, normalised")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        [*handles, axes.lines[-1]],
        [*labels, "published, mean over models"],
        frameon=False,
        fontsize="small",
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
    )
    said = " and ".join(f"{share(gain)} ({size})" for gain, size in zip(gains, SIZES, strict=True))
    return Drawn(
        figure,
        "Fig. 7: dynamic micro-batches",
        f"Micro-batches by tokens train {said} more tokens a second than ones of equal counts (published: "
        f"{share(published - 1)} on average). What is simulated is how evenly a pipeline's stages are filled; that small "
        "micro-batches use a GPU less well is not in it.",
    )


def hours(bench: Bench) -> Drawn:
    figure, found, marks = drawing.row_picture(
        bench,
        {"1.5B, 16 nodes": "areal-hours-1p5b", "7B, 24 nodes": "areal-hours-7b"},
        ("AReaL", "verl", "Sync.AReaL"),
        y="hours of 250 updates",
        height_in=3.2,
        form="{:.1f}",
    )
    of_both = list(zip(SIZES, found, marks, strict=True))
    said = "; ".join(
        f"{size} {a[1] / a[0]:.2f} times (published: {b[1] / b[0]:.2f})" for size, a, b in of_both
    )
    factors = "; ".join(f"{size} {a[2] / a[0]:.2f} ({b[2] / b[0]:.2f})" for size, a, b in of_both)
    return Drawn(
        figure,
        "Table 1: hours of 250 updates",
        f"verl takes longer than AReaL: {said}. Over synchronous AReaL the factor is {factors}.",
    )


def row_name(size: str) -> str:
    """Return a model's size as the names of rows have it."""
    return size.lower().replace(".", "p")


FIGURES: dict[str, Draw] = {
    "areal-1": timelines,
    "areal-4": scaling,
    "areal-5c": staleness,
    "areal-6": interruption,
    "areal-7": microbatches,
    "areal-table-1": hours,
}
