"""Analysis of the recorded runs: learning, drafting from history, ranks of lengths, and predicted against measured.

    python experiments/recorded_run.py traces/countdown --repeat traces/countdown-1 --repeat traces/countdown-2 \
      --varied traces/countdown-varied --page experiments/recorded_run.md

Everything about tokens is counted on the traces. Predictions are made from a profile of the engine (`simrl measure`) and the
efficiency of training (`experiments.training_costs`), both measured apart from the runs, and from the lengths that were
recorded. The measurements are kept in traces/countdown-costs; for runs of another machine name another --costs.
Only the parts of the page between `<!-- NAME -->` and `<!-- /NAME -->` are written anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from experiments.recorded_predictions import (
    SCHEDULES,
    Run,
    measure_training_costs,
    order_table,
    plot_steps,
    predict,
    predicted_scenario,
    prediction_table,
    runs_in,
    scenarios,
    ship,
    titled,
)
from experiments.reproduce.ranks import rank_history
from experiments.reproduce.similarity import similarities
from experiments.shared import markdown, markdown_of, percent, write_parts
from simrl.analysis.acceptance import measure, report
from simrl.errors import InputError
from simrl.result.metrics import summary
from simrl.show.style import FAINT, INDIGO, INK, MINT, ROSE, STRAW, VIOLET
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared

COLORS = {"split": INDIGO, "one_step_off": ROSE, "areal": MINT}
RANK_GROUPS = 8


# Learning.


def by_epoch(run: Run) -> pd.DataFrame:
    """Return means over the responses of each epoch, whichever updates trained on them."""
    trace, cap = run.trace, run.config.task.most_tokens
    columns = {name: trace.column(name) for name in ("epoch", "reward", "response_tokens")}
    responses = pd.DataFrame(columns).assign(at_cap=columns["response_tokens"] >= cap)
    return responses.groupby("epoch").mean()


def plot_learning(runs: Sequence[Run], path: Path) -> None:
    """Draw reward, length and share at the cap by epoch, of every run."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    shown = {
        "reward": "Reward",
        "response_tokens": "Tokens a response",
        "at_cap": "Responses at the cap",
    }
    for axis, (column, title) in zip(axes, shown.items(), strict=True):
        for run in runs:
            means = by_epoch(run)[column]
            axis.plot(means.index, means, color=COLORS[run.schedule], label=SCHEDULES[run.schedule])
        titled(axis, title, "epoch")
    axes[2].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def learning_table(runs: Sequence[Run]) -> list[str]:
    """Compare the first three epochs with the last three."""
    rows = []
    for run in runs:
        means, curve = by_epoch(run), run.curve
        first, last = means.iloc[:3].mean(), means.iloc[-3:].mean()
        rows.append(
            {
                "schedule": SCHEDULES[run.schedule],
                "updates": len(curve),
                "reward, first and last 3 epochs": f"{first['reward']:.3f} → {last['reward']:.3f}",
                "best epoch": f"{means['reward'].max():.3f} ({means['reward'].idxmax()})",
                "tokens a response": f"{first['response_tokens']:.0f} → {last['response_tokens']:.0f}",
                "at the cap": f"{percent(first['at_cap'])} → {percent(last['at_cap'])}",
                "off-policyness, mean (most)": (
                    f"{curve['off_policyness_mean'].mean():.2f} ({curve['off_policyness_max'].max()})"
                ),
                "KL of an update, first and last ten": (
                    f"{curve['kl'].iloc[:10].mean():.1e} → {curve['kl'].iloc[-10:].mean():.1e}"
                ),
            }
        )
    return markdown_of(rows)


# Drafting.


DRAFTING = (
    ("previous epoch (RhymeRL's rule)", "history-paper", 1),
    ("previous epoch (its public code's)", "history-code", 1),
    ("all earlier epochs", "history-paper", 100),
    ("siblings", "siblings", 1),
    ("own text (n-grams)", "ngram", 1),
)


def drafting(run: Run) -> dict[str, dict[str, Any]]:
    return {
        name: report(measure(run.trace, drafter, epochs_back=back))
        for name, drafter, back in DRAFTING
    }  # type: ignore[arg-type]


def drafting_table(found: dict[str, dict[str, Any]], similar: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            name,
            percent(d["acceptance_rate"]),
            percent(d["speculation_rate"]),
            f"{d['accept_length']:.2f}",
        ]
        for name, d in found.items()
    ]
    lines = markdown(
        ("drafts from", "accepted of drafted", "tokens that were drafted", "tokens a pass"), rows
    )
    table = [
        [
            s["history"],
            percent(s["accepted_share"]),
            percent(s["best_match"]),
            percent(s["another_prompt"]),
        ]
        for s in similar
    ]
    heads = (
        "compared with (RhymeRL Fig. 6)",
        "share of tokens",
        "best match",
        "control: another prompt",
    )
    return [*lines, "", *markdown(heads, table)]


def plot_drafting(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw acceptance by epoch, and the tokens of matched stretches by length."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    passes, lengths = figure.subplots(1, 2)
    for (name, d), color in zip(found.items(), (INDIGO, STRAW, MINT, ROSE, VIOLET), strict=True):
        rows = [row for row in d["by_epoch"] if row["accept_length"] is not None]
        passes.plot(
            [row["epoch"] for row in rows],
            [row["accept_length"] for row in rows],
            color=color,
            label=name,
        )
    titled(passes, "Tokens a verification pass yields", "epoch")
    passes.xaxis.set_major_locator(MaxNLocator(integer=True))
    passes.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    hits = next(iter(found.values()))["hit_lengths"]
    places = np.arange(len(hits))
    lengths.bar(
        places - 0.2, [hit["share_of_hits"] for hit in hits], 0.4, color=FAINT, label="of the hits"
    )
    lengths.bar(
        places + 0.2,
        [hit["share_of_tokens"] for hit in hits],
        0.4,
        color=INDIGO,
        label="of their tokens",
    )
    lengths.set_xticks(places, [f"≤ {hit['to_tokens']}" for hit in hits])
    titled(lengths, "Lengths of hits", "tokens that the previous epoch goes on to give")
    lengths.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    lengths.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


# Ranks.


def ranks_table(runs: Sequence[Run]) -> list[str]:
    names = ("accurate", "near_boundary", "strong", "migrated")
    ranks = {SCHEDULES[run.schedule]: rank_history(run.trace, RANK_GROUPS).overall for run in runs}
    rows = [
        [schedule, *(percent(overall[name]) for name in names)]
        for schedule, overall in ranks.items()
    ]
    heads = (
        "run",
        "same group or lower",
        "higher, near the boundary",
        "strongly higher",
        "HistoPipe would migrate",
    )
    return markdown(heads, rows)


def executed_migrations(run: Run, costs: Path) -> list[str]:
    """Simulate RhymeRL's HistoPipe without drafts on the run's lengths and its engine's profile, with and without migration,
    against one-step-off."""
    rows = []
    for workers in (2, 4, 8):
        scenario = predicted_scenario(run, run, costs)
        # as many learn as roll out: one learner would hold up all schedules alike
        scenario["cluster"]["gpus"] = 2 * workers
        (own,) = scenario["systems"]
        common = own | {"rollout_share": 0.5}
        histopipe = common | {"name": "rhymerl", "speculation": "none", "ranking_groups": workers}
        scenario["systems"] = [
            common | {"name": "one_step_off"},
            histopipe | {"migration": False},
            histopipe,
        ]
        simulated = (simulate_prepared(prepare(each)) for each in scenarios(scenario))
        plain, pinned, moved = (summary(result, 0) for result in simulated)
        cells = [
            f"{each['step_s']:.2f} s, {percent(each['rollout_bubble'])}"
            for each in (plain, pinned, moved)
        ]
        rows.append([workers, percent(moved["migrated_share"]), *cells])
    heads = ("rollout workers (and learners)", "responses migrated", "one-step-off: step, bubble")
    return markdown((*heads, "HistoPipe without migration", "HistoPipe"), rows)


# Effects of clipping and the learning rate.


def varied_rows(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row per run: its learning, and the worth of its history."""
    rows = []
    for run in runs:
        loss, curve, means = run.config.update.loss, run.curve, by_epoch(run)
        drafts = report(measure(run.trace, "history-paper", epochs_back=1))
        ranks = rank_history(run.trace, RANK_GROUPS).overall
        rows.append(
            {
                "clip": "none"
                if loss.clip_high is None
                else f"{loss.clip_low or 0:g} / {loss.clip_high:g}",
                "learning_rate": run.config.update.learning_rate,
                "first": means["reward"].iloc[:3].mean(),
                "reward": means["reward"].iloc[-3:].mean(),
                "clipped": curve["clip_fraction"].mean(),
                "entropy": curve["entropy"].iloc[-5:].mean(),
                "accepted": drafts["acceptance_rate"],
                "drafted": drafts["speculation_rate"],
                "accept_length": drafts["accept_length"],
                "match": similarities(run.trace)[0]["best_match"],
                "accurate": ranks["accurate"],
                "migrated": ranks["migrated"],
            }
        )
    return pd.DataFrame(rows).sort_values(["learning_rate", "clip"], ignore_index=True)


def varied_table(rows: pd.DataFrame) -> list[str]:
    return markdown_of(
        [
            {
                "learning rate": f"{r.learning_rate:g}",
                "clip (low / high)": r.clip,
                "reward, first and last 3 epochs": f"{r.first:.3f} → {r.reward:.3f}",
                "clipped": f"{r.clipped:.2%}",
                "entropy at the end, nat": f"{r.entropy:.3f}",
                "accepted of drafted": percent(r.accepted),
                "tokens that were drafted": percent(r.drafted),
                "tokens a pass": f"{r.accept_length:.2f}",
                "best match": percent(r.match),
                "same group or lower": percent(r.accurate),
                "HistoPipe would migrate": percent(r.migrated),
            }
            for r in rows.itertuples()
        ]
    )


def plot_varied(rows: pd.DataFrame, path: Path) -> None:
    """Draw four squares: clip across, learning rate down."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    shown = {
        "reward": ("Reward in the last 3 epochs", "{:.2f}"),
        "accept_length": ("Tokens a verification pass yields", "{:.2f}"),
        "match": ("Best match in the previous epoch", "{:.0%}"),
        "accurate": ("Same group of lengths or lower", "{:.0%}"),
    }
    for axis, (column, (title, form)) in zip(
        figure.subplots(1, len(shown)), shown.items(), strict=True
    ):
        square = rows.pivot(index="learning_rate", columns="clip", values=column)
        axis.imshow(square.to_numpy(), cmap="Blues", aspect="auto", alpha=0.6)
        for (row, place), value in np.ndenumerate(square.to_numpy()):
            axis.text(place, row, form.format(value), ha="center", va="center", color=INK)
        axis.set_xticks(range(len(square.columns)), square.columns)
        axis.set_yticks(range(len(square.index)), [f"{rate:g}" for rate in square.index])
        axis.set_title(title, fontsize=9, color=INK)
        axis.set_xlabel("clip, low / high")
    figure.axes[0].set_ylabel("learning rate")
    figure.savefig(path, dpi=120)


def main(
    folder: Annotated[
        Path, typer.Argument(metavar="RUNS", help="what `python -m simrl_replay.grpo` wrote")
    ],
    repeat: Annotated[
        list[Path] | None, typer.Option(help="these schedules with another seed; may be repeated")
    ] = None,
    varied: Annotated[
        Path | None, typer.Option(help="runs that differ in clip and learning rate")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="a page (.md) to renew, its pictures beside it")
    ] = None,
    costs: Annotated[
        Path,
        typer.Option(
            help="profiles of the engine and costs of training; measured here if they are not there"
        ),
    ] = Path("traces/countdown-costs"),
    measure_again: Annotated[
        bool,
        typer.Option(
            "--measure-again", help="only measure what updates take, once more: speeds drift"
        ),
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option("--ship", help="only copy what a reader needs of the runs to this folder"),
    ] = None,
) -> None:
    """Count, simulate, and renew the page; without a page, print the tables."""
    costs.mkdir(parents=True, exist_ok=True)
    try:
        if to:
            for run in runs_in(folder):
                ship(run, to / run.config.name, costs)
        if measure_again:
            for run in {run.waits: run for run in runs_in(folder)}.values():
                measure_training_costs(run, costs)
        if to or measure_again:
            return
        parts = _parts(folder, repeat or [], varied, costs, page.parent if page else costs)
        if page:
            write_parts(page, parts)
        else:
            print(
                "\n".join(
                    line for name, lines in parts.items() for line in ("", f"## {name}", "", *lines)
                )
            )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _parts(
    folder: Path, repeat: Sequence[Path], varied: Path | None, costs: Path, pictures: Path
) -> dict[str, list[str]]:
    runs = runs_in(folder)
    sync = next(run for run in runs if run.waits)
    found = drafting(sync)
    plot_learning(runs, pictures / "recorded_run_learning.png")
    plot_drafting(found, pictures / "recorded_run_drafting.png")
    predicted = {run.schedule: predict(run, run, costs) for run in runs}
    plot_steps(predicted, runs, pictures / "recorded_run_steps.png")
    parts = {
        "learning": learning_table(runs),
        "drafting": drafting_table(found, similarities(sync.trace)),
        "ranks": ranks_table(runs),
        "histopipe": executed_migrations(sync, costs),
        "steps": prediction_table(predicted, runs),
    }
    if repeat:
        parts["order"] = order_table([runs, *map(runs_in, repeat)], costs)
    if varied:
        rows = varied_rows(runs_in(varied))
        plot_varied(rows, pictures / "recorded_run_varied.png")
        parts["varied"] = varied_table(rows)
    return parts


if __name__ == "__main__":
    typer.run(main)
