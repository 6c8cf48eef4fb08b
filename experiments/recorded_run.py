"""What the recorded runs show: learning, drafting from history, ranks of lengths, and predicted against measured.

    python -m replay.grpo experiments/grpo/*.yaml                       # makes the runs, in results/grpo
    python experiments/recorded_run.py --page experiments/recorded_run.md

Everything about tokens is counted on the traces. Predictions are made from a profile of the engine (`simrl measure`) and the
efficiency of training (`replay.grpo.bench`), both measured apart from the runs, and from the lengths that were recorded.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from replay.grpo.bench import measure_training
from replay.grpo.config import RunConfig, read_config
from replay.grpo.records import RunFolder
from replay.grpo.run import scenario_of
from simrl.acceptance_report import measure, report
from simrl.agreement import Agreement, agree
from simrl.errors import InputError
from simrl.palette import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, SKY
from simrl.ranks import rank_history
from simrl.result import Result, read_result
from simrl.scenario import load_scenarios
from simrl.simulate import prepare, simulate_prepared, with_measured_loads
from simrl.trace import Trace, read_trace

SCHEDULES = {"split": "synchronous", "one_step_off": "one-step-off", "areal": "AReaL, η = 2"}
COLORS = {"split": BLUE, "one_step_off": ORANGE, "areal": GREEN}
RANK_GROUPS = 8


@dataclass(frozen=True)
class Run:
    """A run that is finished."""

    folder: RunFolder

    @cached_property
    def config(self) -> RunConfig:
        return read_config(self.folder.path / "config.yaml")

    @cached_property
    def trace(self) -> Trace:
        return read_trace(self.folder.path / "trace.parquet")

    @cached_property
    def curve(self) -> pd.DataFrame:
        return pd.read_csv(self.folder.path / "curve.csv")

    @cached_property
    def measured(self) -> Result:
        """Its times. Raises `InputError` for a run that was stopped in between: its clock began anew."""
        if self.folder.next_part() != 1:
            raise InputError(
                f"{self.folder.path}: was stopped and went on, so it has no times of its own; run it whole"
            )
        return read_result(self.folder.path / "parts" / "000")


def runs_in(folder: Path) -> list[Run]:
    """All that are finished, by name."""
    return [Run(RunFolder(path.parent)) for path in sorted(folder.glob("*/trace.parquet"))]


# Learning.


def plot_learning(runs: Sequence[Run], path: Path) -> None:
    """Reward, length and share at the cap by epoch, of every run."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for run in runs:
        curve = run.curve.assign(epoch=run.curve["epoch"].astype(int)).groupby("epoch").mean()
        name = run.config.system.name
        for axis, column in zip(axes, ("reward", "mean_tokens", "at_cap"), strict=True):
            axis.plot(curve.index, curve[column], color=COLORS[name], label=SCHEDULES[name])
    titles = ("Reward", "Tokens a response", "Responses at the cap")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10, color=INK)
        axis.set_xlabel("epoch")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[2].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def learning_table(runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        curve, last = run.curve, run.config.epochs - 1
        first, end = curve[curve["epoch"] < 1], curve[curve["epoch"] >= last]
        rows.append(
            [
                SCHEDULES[run.config.system.name],
                len(curve),
                f"{first['reward'].mean():.3f} → {end['reward'].mean():.3f}",
                f"{first['mean_tokens'].mean():.0f} → {end['mean_tokens'].mean():.0f}",
                f"{first['p99_tokens'].mean():.0f} → {end['p99_tokens'].mean():.0f}",
                f"{curve['off_policyness_mean'].mean():.2f} ({curve['off_policyness_max'].max()})",
                f"{curve['clip_fraction'].mean():.2%}",
            ]
        )
    heads = (
        "schedule",
        "updates",
        "reward, first and last epoch",
        "tokens, mean",
        "tokens, p99",
        "off-policyness, mean (most)",
        "clipped",
    )
    return table(heads, rows)


# Drafting.


DRAFTING = (
    ("previous epoch (RhymeRL's rule)", "history-paper", 1),
    ("previous epoch (its public code's)", "history-code", 1),
    ("all earlier epochs", "history-paper", 100),
    ("siblings", "siblings", 1),
    ("own text (n-grams)", "ngram", 1),
)


def drafting(run: Run) -> dict[str, dict[str, Any]]:
    """`simrl acceptance` for every history."""
    return {name: report(measure(run.trace, drafter, epochs_back=back)) for name, drafter, back in DRAFTING}  # type: ignore[arg-type]


def drafting_table(found: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        [name, percent(d["acceptance_rate"]), percent(d["speculation_rate"]), f"{d['accept_length']:.2f}"]
        for name, d in found.items()
    ]
    lines = table(("drafts from", "accepted of drafted", "tokens that were drafted", "tokens a pass"), rows)
    similar = [
        [s["history"], percent(s["accepted_share"]), percent(s["best_match"]), percent(s["another_prompt"])]
        for s in next(iter(found.values()))["similarity"]
    ]
    return [
        *lines,
        "",
        *table(("compared with (RhymeRL Fig. 6)", "share of tokens", "best match", "control: another prompt"), similar),
    ]


def plot_drafting(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Acceptance by epoch, and the tokens of the stretches that a history knows, by length."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    by_epoch, lengths = figure.subplots(1, 2)
    for (name, d), color in zip(found.items(), (BLUE, SKY, GREEN, ORANGE, PURPLE), strict=True):
        rows = [row for row in d["by_epoch"] if row["accept_length"] is not None]
        by_epoch.plot([row["epoch"] for row in rows], [row["accept_length"] for row in rows], color=color, label=name)
    by_epoch.set_title("Tokens a verification pass yields", fontsize=10, color=INK)
    by_epoch.set_xlabel("epoch")
    by_epoch.legend(frameon=False, fontsize=8)
    hits = next(iter(found.values()))["hit_lengths"]
    places = np.arange(len(hits))
    lengths.bar(places - 0.2, [hit["share_of_hits"] for hit in hits], 0.4, color=FAINT, label="of the hits")
    lengths.bar(places + 0.2, [hit["share_of_tokens"] for hit in hits], 0.4, color=BLUE, label="of their tokens")
    lengths.set_xticks(places, [f"≤ {hit['to_tokens']}" for hit in hits])
    lengths.set_xlabel("tokens that the previous epoch goes on to give")
    lengths.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    lengths.set_title("Lengths of hits", fontsize=10, color=INK)
    lengths.legend(frameon=False, fontsize=8)
    for axis in (by_epoch, lengths):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


# Ranks.


def ranks_table(runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        history = rank_history(run.trace, RANK_GROUPS)
        o = history.overall
        rows.append(
            [
                SCHEDULES[run.config.system.name],
                *(percent(o[name]) for name in ("accurate", "near_boundary", "strong", "migrated")),
            ]
        )
    return table(
        ("run", "same group or lower", "higher, near the boundary", "strongly higher", "HistoPipe would migrate"), rows
    )


# Predicted against measured.


def measured_profile(run: Run, folder: Path, quantile: float) -> Path:
    """Of the run's engine, where it stands: `simrl measure` on the policy that it began with."""
    path, config = folder / f"{run.config.warm_up_digest}-{run.config.workers}.parquet", run.config
    if not path.exists():
        e = config.engine
        options = {
            "--model": run.folder.model(0), "--device": "cpu", "--gpu": "cpu", "--neighbours": config.workers - 1,
            "--max-num-seqs": e.max_num_seqs, "--max-num-batched-tokens": e.max_num_batched_tokens,
            "--block-size": e.block_size, "--kv-cache-tokens": e.kv_cache_tokens, "--max-model-len": config.most_tokens,
            "--quantile": quantile, "--output": path,
        }  # fmt: skip
        words = [str(word) for pair in options.items() for word in pair]
        subprocess.run([sys.executable, "-m", "simrl.cli", "measure", *words], check=True, stdout=sys.stderr)
    return path


def training_costs(run: Run, folder: Path, quantile: float) -> dict[str, float]:
    """Of the run's updates, from updates on random tokens; the section `training` of a scenario."""
    path = folder / f"{run.config.name}-training.yaml"
    if not path.exists():
        found = measure_training(run.config, quantile=quantile)
        costs = {"mfu": found.mfu, "log_prob_mfu": found.log_prob_mfu, "publish_s": found.publish_s, "reward_s": 0.0}
        path.write_text(yaml.safe_dump({name: float(value) for name, value in costs.items()}))
    update = run.config.update
    told: dict[str, float] = yaml.safe_load(path.read_text())
    return {**told, "tokens_per_microbatch": update.micro_batch_tokens, "ppo_epochs": update.ppo_epochs}


def predict(run: Run, trace: Run, folder: Path, quantile: float) -> Result:
    """The schedule of `run` on the lengths of `trace`, which may be another run's."""
    profile = measured_profile(run, folder, quantile)
    scenario = scenario_of(run.config, run.folder, trace.folder.path / "trace.parquet")
    scenario |= {"profile": {"path": str(profile.resolve()), "roofline": None}}
    scenario |= {"training": training_costs(run, folder, quantile)}
    file = folder / f"{run.config.name}-on-{trace.config.name}.yaml"
    file.write_text(yaml.safe_dump(scenario, sort_keys=False), encoding="utf-8")
    (found,) = load_scenarios(file)
    return simulate_prepared(prepare(with_measured_loads(found, str(profile))))


@dataclass(frozen=True)
class StepTimes:
    """Of each update, seconds: from the first start to the last end of its samples, and of log-probs and training."""

    rollout: np.ndarray[Any, np.dtype[np.float64]]
    train: np.ndarray[Any, np.dtype[np.float64]]
    end: np.ndarray[Any, np.dtype[np.float64]]


def step_times(result: Result) -> StepTimes:
    """By update."""
    samples, spans = result.samples.to_pandas(), result.spans.to_pandas()
    trained = samples[samples["status"] == "trained"].groupby("trained_step")
    learner = spans[spans["kind"].isin(("log_prob", "train"))]
    seconds = (learner["ended_s"] - learner["started_s"]).groupby(learner["policy_version"]).sum()
    steps = result.steps.to_pandas()
    return StepTimes(
        (trained["finished_s"].max() - trained["started_s"].min()).to_numpy(),
        seconds.to_numpy()[: len(steps)],
        steps["finished_s"].to_numpy(),
    )


def mape(predicted: np.ndarray[Any, Any], measured: np.ndarray[Any, Any]) -> float:
    return float(np.mean(np.abs(predicted / measured - 1.0)))


def prediction_table(runs: Sequence[Run], folder: Path, quantile: float) -> list[str]:
    """Each run predicted from its own lengths."""
    rows = []
    for run in runs:
        predicted = predict(run, run, folder, quantile)
        p, m = step_times(predicted), step_times(run.measured)
        agreement: Agreement = agree(predicted, run.measured)
        bubble, step = agreement.figures.bubble, run.measured.steps.to_pandas()
        rows.append(
            [
                run.config.name,
                SCHEDULES[run.config.system.name],
                f"{p.end[-1]:.0f} / {m.end[-1]:.0f} s ({p.end[-1] / m.end[-1] - 1:+.1%})",
                percent(mape(p.rollout, m.rollout)),
                percent(mape(p.train, m.train)),
                f"{percent(bubble.predicted)} / {percent(bubble.measured)}",
                f"{predicted.steps.to_pandas()['off_policyness_mean'].mean():.2f} / {step['off_policyness_mean'].mean():.2f}",
            ]
        )
    heads = (
        "run",
        "schedule",
        "whole run, predicted / measured",
        "rollout span, MAPE",
        "training span, MAPE",
        "bubble",
        "off-policyness",
    )
    return table(heads, rows)


# Words.


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """In Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def main(
    folder: Annotated[Path, typer.Argument(metavar="RUNS", help="what `python -m replay.grpo` wrote")] = Path(
        "results/grpo"
    ),
    page: Annotated[Path | None, typer.Option(help="a page (.md) to write, with its pictures beside it")] = None,
    work: Annotated[Path, typer.Option(help="a folder for profiles and predictions")] = Path("results/recorded_run"),
    quantile: Annotated[float, typer.Option(min=0.0, max=1.0, help="of what is measured for predictions")] = 0.5,
) -> None:
    """Counts, simulates, and writes the page."""
    runs = runs_in(folder)
    if not runs:
        raise InputError(f"{folder}: no finished run in it; python -m replay.grpo experiments/grpo/*.yaml makes some")
    work.mkdir(parents=True, exist_ok=True)
    pictures = page.parent if page else work
    found = drafting(runs[0])
    plot_learning(runs, pictures / "recorded_run_learning.png")
    plot_drafting(found, pictures / "recorded_run_drafting.png")
    parts = {
        "Learning": ["![Learning](recorded_run_learning.png)", "", *learning_table(runs)],
        "Drafting": ["![Drafting](recorded_run_drafting.png)", "", *drafting_table(found)],
        "Ranks of lengths": ranks_table(runs),
        "Predicted against measured": prediction_table(runs, work, quantile),
    }
    text = "\n".join(line for name, lines in parts.items() for line in ("", f"## {name}", "", *lines))
    if page is None:
        print(text)
    else:
        page.write_text(f"# A real RL run, recorded\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
