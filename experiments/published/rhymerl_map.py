"""Assumptions under which RhymeRL's rules give its published gains: rhymerl_map.md.

    python experiments/published/rhymerl_map.py            # simulates (minutes), writes rhymerl_map.csv, then draws
    python experiments/published/rhymerl_map.py --redraw   # draws from rhymerl_map.csv

Qwen3-14B on 16 workers of two H800, 8 ranking groups, responses up to 16K, otherwise the middle of the paper's ledger. Training
is as fast as GPUs are, but where the map says otherwise. Invariant: nothing is fitted; published values are drawn, and read
only to be drawn.
"""

import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments.reproduce.lab import Lab, Measures
from experiments.reproduce.ledger import Inputs, read_ledger
from experiments.reproduce.rhymerl import NO_DRAFTS, likeness, one_step_off, rhymerl, run
from experiments.reproduce.score import published_rows
from simrl.show.style import BLACK, INDIGO, INK, MINT, PAPER, ROSE, WINE
from simrl.study.progress import compile_kernels

PIPE_ROWS = ("rhyme-abl-pipe-math", "rhyme-abl-pipe-code")
TIER_ROWS = ("rhyme-abl-2tier-math", "rhyme-abl-2tier-code", "rhyme-2tier-peak")
DRAFT_ROWS = ("rhyme-abl-spec-code", "rhyme-abl-spec-math", "rhyme-spec-peak")
HERE = Path(__file__).resolve().parent
TABLE = HERE / "rhymerl_map.csv"
WORKERS, TP, TRAIN_GPUS, RANKING_GROUPS, CAP = 16, 2, 16, 8, 16384
RESPONSES = (16, 32, 64, 170)  # a worker and step; the last is the middle of the ledger
SIGMAS = (0.5, 0.8, 1.1)
KV_TOKENS = (120_000, 240_000, 480_000)  # of a worker; the H800's own are 710,000
MEANS = (1900, 7600)  # beside the ledger's 3,800
TRAINING = (1.0, 0.35, 0.15, 0.08)  # MFU: a dial for the length of training
BALANCED = (16, 64, 170)
REUSED = (0.5, 0.65, 0.8, 0.9, 0.95)
DRAFT_S = (0.0005, 0.005, 0.01, 0.02)  # of a pass; the ledger has 0.1 to 1.5 ms
DRAFTING = (8, 32, 64, 128, 256, 512)
COLOURS = LinearSegmentedColormap.from_list("gain", [(0, WINE), (0.5, PAPER), (1, INDIGO)])
COLUMNS = (
    "part", "responses", "sigma", "mean_tokens", "kv_tokens", "mfu", "reused", "draft_s", "step_s", "training_over_rollout",
    "pipe", "two_tier", "drafts", "acceptance",
)  # fmt: skip

Row = dict[str, Any]


def settings(**given: Any) -> Inputs:
    """Return the middle of the ledger with one mini-batch, one pass of log-probs, CUDA graphs, all of the memory and dispatch
    of single responses, so that only the schedule differs."""
    middle = read_ledger("rhymerl").middle
    middle |= {"enforce_eager": False, "gpu_memory_utilization": 0.9, "dispatch": "least_requests"}
    fast = {
        "mfu": 1.0,
        "log_prob_mfu": 1.0,
        "reference": 0,
        "minibatches": 1,
        "sequence_parallel": 1,
    }
    return {**middle, **fast, **given}


def epoch_steps(responses: int) -> int:
    """Return the steps of an epoch: more of them where a step has fewer prompts, so that the map is not of a few prompts."""
    return max(2, 2 * 64 // responses)


def train(
    lab: Lab, inputs: Inputs, system: Row, responses: int, mean: float, kv: int | None
) -> Measures:
    gpus = WORKERS * TP + TRAIN_GPUS
    prompts, epoch = responses * WORKERS // inputs["group"], epoch_steps(responses)
    return run(
        lab,
        inputs,
        {"rollout_share": WORKERS * TP / gpus, **system},
        "math",
        gpus=gpus,
        tp=TP,
        steps=3 * epoch,
        warmup_steps=2 * epoch,  # without ranks, and the first with them, in which pipelines settle
        engine={"kv_cache_tokens": kv} if kv else None,
        cap_tokens=CAP,
        mean_tokens=mean,
        prompts_per_step=prompts,
        prompts=epoch * prompts,
        **likeness(inputs, "math"),
    )


def schedules(
    lab: Lab, part: str, responses: int, mean: float = 3800.0, kv: int | None = None, **given: float
) -> Row:
    """Simulate one step off, and HistoPipe without and with two tiers, all without drafts."""
    inputs = settings(**given)
    piped = {**rhymerl(inputs, "math", speculation=NO_DRAFTS), "ranking_groups": RANKING_GROUPS}
    plain, pipe, tiers = (
        train(lab, inputs, system, responses, mean, kv)
        for system in (one_step_off(inputs), {**piped, "two_tier": False}, piped)
    )
    training_s = sum(plain["phase_s"].get(kind, 0.0) for kind in ("log_prob", "train"))
    return {
        "part": part,
        "responses": responses,
        "sigma": inputs["sigma"],
        "mean_tokens": mean,
        "kv_tokens": kv or 0,
        "mfu": inputs["mfu"],
        "step_s": plain["step_s"],
        "training_over_rollout": training_s / plain["rollout_s"],
        "pipe": plain["step_s"] / pipe["step_s"],
        "two_tier": pipe["step_s"] / tiers["step_s"],
    }


def drafts(
    lab: Lab, part: str, responses: int, reused: float = 0.85, draft_s: float = DRAFT_S[0]
) -> Row:
    """Simulate one worker's rollout of a batch, with HistoSpec and without."""
    inputs = settings(reusable_math=reused, draft_efficiency=1.0, draft_s=draft_s)
    gpus = TP + TRAIN_GPUS
    found = [
        run(
            lab, inputs, {"name": "split", "rollout_share": TP / gpus, "speculation": name}, "math", gpus=gpus, tp=TP,
            first_epoch=True, steps=1, warmup_steps=0, cap_tokens=CAP, mean_tokens=3800.0,
            prompts_per_step=responses, group=1, **likeness(inputs, "math"),
        )
        for name in (NO_DRAFTS, "histospec")
    ]  # fmt: skip
    return {
        "part": part,
        "responses": responses,
        "mean_tokens": 3800.0,
        "reused": reused,
        "draft_s": draft_s,
        "drafts": found[0]["rollout_s"] / found[1]["rollout_s"],
        "acceptance": found[1]["acceptance_rate"] or 0.0,
    }


def simulate() -> Iterator[Row]:
    """Yield the rows, the quickest first."""
    lab = Lab()
    yield from (
        drafts(lab, "drafts", responses, reused) for responses in DRAFTING for reused in REUSED
    )
    yield from (
        drafts(lab, "draft_s", responses, draft_s=draft_s)
        for responses in DRAFTING
        for draft_s in DRAFT_S
    )
    for responses in RESPONSES:
        yield from (schedules(lab, "sigma", responses, sigma=sigma) for sigma in SIGMAS)
        yield from (schedules(lab, "mean", responses, mean=mean) for mean in MEANS)
        yield from (schedules(lab, "kv", responses, kv=kv) for kv in KV_TOKENS)
        if responses in BALANCED:
            yield from (
                schedules(lab, "balance", responses, mfu=mfu, log_prob_mfu=mfu) for mfu in TRAINING
            )


def write() -> None:
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for row in simulate():
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
            file.flush()


def read() -> list[Row]:
    with TABLE.open(encoding="utf-8") as file:
        return [
            {k: v if k == "part" else float(v) if v else None for k, v in row.items()}
            for row in csv.DictReader(file)
        ]


def grid(
    rows: list[Row], parts: tuple[str, ...], y: str, value: str
) -> tuple[list[float], list[float], np.ndarray]:
    """Return the responses, the values of `y`, and the value of each pair."""
    chosen = [row for row in rows if row["part"] in parts]
    xs, ys = (sorted({row[key] for row in chosen}) for key in ("responses", y))
    found = {(row["responses"], row[y]): row[value] for row in chosen}
    return xs, ys, np.array([[found[x, each] for x in xs] for each in ys])


def heat(
    axes: Axes,
    xs: list[float],
    labels: list[str],
    values: np.ndarray,
    like: tuple[float, float],
    most: float,
) -> None:
    """Draw cells with their values; frame those within `like`, the published range."""
    norm = TwoSlopeNorm(1.0, vmin=2 - most, vmax=most)
    axes.imshow(values, cmap=COLOURS, norm=norm, aspect="auto", origin="lower")
    for i, j in np.ndindex(*values.shape):
        dark = abs(norm(values[i, j]) - 0.5) > 0.25
        axes.text(
            j,
            i,
            f"{values[i, j]:.2f}",
            ha="center",
            va="center",
            color=PAPER if dark else INK,
            fontsize=9,
        )
        if like[0] <= values[i, j] <= like[1]:
            axes.add_patch(
                Rectangle(
                    (j - 0.46, i - 0.44), 0.92, 0.88, fill=False, edgecolor=BLACK, linewidth=1.6
                )
            )
    axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("responses a worker and step")


def about(rows: tuple[str, ...]) -> tuple[float, float]:
    """Return the range from 5 % under the smallest to 5 % over the largest of published values."""
    values = [published_rows()[row].elements[0].value for row in rows]
    return 0.95 * min(values), 1.05 * max(values)


def draw_schedules(rows: list[Row], path: Path) -> None:
    pipe, tier = about(PIPE_ROWS), about(TIER_ROWS)
    figure = Figure(figsize=(13, 10), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 2)
    middle = [row for row in rows if row["part"] == "sigma" and row["sigma"] == 0.8]
    own_kv = [{**row, "part": "kv", "kv_tokens": 710_000.0} for row in middle]
    own_mean = [{**row, "part": "mean"} for row in middle]
    for column, (value, like, name) in enumerate(
        (
            ("pipe", pipe, "HistoPipe over one step off"),
            ("two_tier", tier, "two tiers over HistoPipe"),
        )
    ):
        xs, ys, found = grid(rows, ("sigma",), "sigma", value)
        heat(panels[0, column], xs, [f"{y:g}" for y in ys], found, like, 1.8)
        panels[0, column].set(title=f"{name}, by spread", ylabel="sigma of the log length")
        xs, ys, found = grid([*rows, *own_mean], ("mean",), "mean_tokens", value)
        heat(panels[1, column], xs, [f"{y:,.0f}" for y in ys], found, like, 1.8)
        panels[1, column].set(title=f"{name}, by mean under 16K", ylabel="mean tokens")
        xs, ys, found = grid([*rows, *own_kv], ("kv",), "kv_tokens", value)
        heat(panels[2, column], xs, [f"{y / 1000:,.0f}K" for y in ys], found, like, 1.8)
        panels[2, column].set(title=f"{name}, by KV cache", ylabel="tokens that a worker holds")
    figure.savefig(path, dpi=80)


def draw_balance(rows: list[Row], path: Path) -> None:
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for responses, colour in zip(BALANCED, (INDIGO, MINT, ROSE), strict=True):
        line = sorted(
            (row["training_over_rollout"], row["pipe"], row["pipe"] * row["two_tier"])
            for row in rows
            if row["part"] == "balance" and row["responses"] == responses
        )
        x, pipe, tiers = zip(*line, strict=True)
        axes.plot(x, pipe, ".-", color=colour, label=f"{responses} responses a worker")
        axes.plot(x, tiers, ".:", color=colour, label="with two tiers")
    level = published_rows()["rhyme-abl-pipe-math"].elements[0].value
    axes.axhline(level, color=BLACK, linewidth=1)
    axes.text(
        0.98,
        level,
        f"published {level:g}",
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="bottom",
        fontsize=8,
    )
    axes.axhline(1, color=INK, linewidth=0.6, linestyle=":")
    axes.set_title("HistoPipe over one step off, by the length of training")
    axes.set(
        xlabel="training / rollout of one step off",
        ylabel="throughput, × one step off",
        xscale="log",
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=80)


def draw_drafts(rows: list[Row], path: Path) -> None:
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    by_reuse, by_cost = figure.subplots(1, 2)
    published = about(DRAFT_ROWS)
    xs, ys, found = grid(rows, ("drafts",), "reused", "drafts")
    _, _, rates = grid(rows, ("drafts",), "reused", "acceptance")
    labels = [f"{y:.0%} ({rate.mean():.2f})" for y, rate in zip(ys, rates, strict=True)]
    heat(by_reuse, xs, labels, found, published, 5.0)
    by_reuse.set(
        title="HistoSpec: rollout, times faster",
        ylabel="tokens in reach of drafts (acceptance rate)",
    )
    xs, ys, found = grid(rows, ("draft_s",), "draft_s", "drafts")
    heat(by_cost, xs, [f"{1000 * y:g} ms" for y in ys], found, published, 5.0)
    by_cost.set(
        title="the same at 85 %, by what drafts add to a pass",
        ylabel="of a pass, besides verification",
    )
    figure.savefig(path, dpi=80)


def main(
    redraw: Annotated[bool, typer.Option(help="draw from the table, simulate nothing")] = False,
) -> None:
    if not redraw:
        compile_kernels()
        started_s = time.process_time()
        write()
        print(f"{time.process_time() - started_s:.0f} s of CPU", file=sys.stderr)
    rows = read()
    draw_schedules(rows, HERE / "rhymerl_map_schedules.png")
    draw_balance(rows, HERE / "rhymerl_map_balance.png")
    draw_drafts(rows, HERE / "rhymerl_map_drafts.png")


if __name__ == "__main__":
    typer.run(main)
