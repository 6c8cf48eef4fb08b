"""What the recorded runs show: learning, drafting from history, ranks of lengths, and predicted against measured.

    python experiments/recorded_run.py traces/countdown --repeat traces/countdown-1 --repeat traces/countdown-2 \
      --varied traces/countdown-varied --page experiments/recorded_run.md

Everything about tokens is counted on the traces. Predictions are made from a profile of the engine (`simrl measure`) and the
efficiency of training (`replay.grpo.bench`), both measured apart from the runs, and from the lengths that were recorded. What
was measured is kept in traces/countdown-costs; for runs of another machine name another --costs.
The page's words are its own: what is between `<!-- NAME -->` and `<!-- /NAME -->` is written anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from replay.grpo.bench import generating, measure_training
from replay.grpo.config import RunConfig, read_config
from replay.grpo.records import RunFolder
from replay.grpo.run import scenario_of
from simrl.acceptance_report import measure, report
from simrl.errors import InputError
from simrl.metrics import gpu_seconds, rollout_bubble, summary
from simrl.palette import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, SKY
from simrl.profile import read_profile
from simrl.ranks import rank_history
from simrl.result import Result, read_result
from simrl.scenario import Scenario, load_scenarios
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
        if not self.folder.whole():
            raise InputError(
                f"{self.folder.path}: was stopped and went on, so it has no times of its own; run it whole"
            )
        return read_result(self.folder.path / "parts" / "000")


def runs_in(folder: Path) -> list[Run]:
    """All that are finished: by schedule, then name. Raises `InputError` if there is none."""
    runs = [Run(RunFolder(path.parent)) for path in sorted(folder.glob("*/trace.parquet"))]
    if not runs:
        raise InputError(f"{folder}: no finished run in it; python -m replay.grpo experiments/grpo/*.yaml makes some")
    return sorted(runs, key=lambda run: list(SCHEDULES).index(run.config.system.name))


# Learning.


def by_epoch(run: Run) -> pd.DataFrame:
    """Means over the responses of each epoch, whichever updates trained on them."""
    trace, cap = run.trace, run.config.task.most_tokens
    columns = {name: trace.column(name) for name in ("epoch", "reward", "response_tokens")}
    responses = pd.DataFrame(columns).assign(at_cap=columns["response_tokens"] >= cap)
    return responses.groupby("epoch").mean()


def plot_learning(runs: Sequence[Run], path: Path) -> None:
    """Reward, length and share at the cap by epoch, of every run."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    shown = {"reward": "Reward", "response_tokens": "Tokens a response", "at_cap": "Responses at the cap"}
    for run in runs:
        means, name = by_epoch(run), run.config.system.name
        for axis, column in zip(axes, shown, strict=True):
            axis.plot(means.index, means[column], color=COLORS[name], label=SCHEDULES[name])
    for axis, title in zip(axes, shown.values(), strict=True):
        axis.set_title(title, fontsize=10, color=INK)
        axis.set_xlabel("epoch")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[2].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def learning_table(runs: Sequence[Run], epochs: int = 3) -> list[str]:
    """The first few epochs against the last few."""
    rows = []
    for run in runs:
        means, curve = by_epoch(run), run.curve
        first, last = means.iloc[:epochs].mean(), means.iloc[-epochs:].mean()
        rows.append(
            [
                SCHEDULES[run.config.system.name],
                len(curve),
                f"{first['reward']:.3f} → {last['reward']:.3f}",
                f"{means['reward'].max():.3f} ({means['reward'].idxmax()})",
                f"{first['response_tokens']:.0f} → {last['response_tokens']:.0f}",
                f"{percent(first['at_cap'])} → {percent(last['at_cap'])}",
                f"{curve['off_policyness_mean'].mean():.2f} ({curve['off_policyness_max'].max()})",
                f"{curve['kl'].iloc[:10].mean():.1e} → {curve['kl'].iloc[-10:].mean():.1e}",
            ]
        )
    heads = (
        "schedule",
        "updates",
        f"reward, first and last {epochs} epochs",
        "best epoch",
        "tokens a response",
        "at the cap",
        "off-policyness, mean (most)",
        "KL of an update, first and last ten",
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
    passes, lengths = figure.subplots(1, 2)
    for (name, d), color in zip(found.items(), (BLUE, SKY, GREEN, ORANGE, PURPLE), strict=True):
        rows = [row for row in d["by_epoch"] if row["accept_length"] is not None]
        passes.plot([row["epoch"] for row in rows], [row["accept_length"] for row in rows], color=color, label=name)
    passes.set_title("Tokens a verification pass yields", fontsize=10, color=INK)
    passes.set_xlabel("epoch")
    passes.set_ylim(bottom=0)
    passes.xaxis.set_major_locator(MaxNLocator(integer=True))
    passes.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    hits = next(iter(found.values()))["hit_lengths"]
    places = np.arange(len(hits))
    lengths.bar(places - 0.2, [hit["share_of_hits"] for hit in hits], 0.4, color=FAINT, label="of the hits")
    lengths.bar(places + 0.2, [hit["share_of_tokens"] for hit in hits], 0.4, color=BLUE, label="of their tokens")
    lengths.set_xticks(places, [f"≤ {hit['to_tokens']}" for hit in hits])
    lengths.set_xlabel("tokens that the previous epoch goes on to give")
    lengths.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    lengths.set_title("Lengths of hits", fontsize=10, color=INK)
    lengths.legend(frameon=False, fontsize=8)
    for axis in (passes, lengths):
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


def executed_migrations(run: Run, costs: Path) -> list[str]:
    """RhymeRL's HistoPipe without drafts, simulated on the run's own lengths and its engine's profile, with and without
    migration, against one-step-off."""
    profile = measured_profile(run, costs)
    rows = []
    for workers in (2, 4, 8):
        scenario = scenario_of(run.config, run.folder, run.folder.path / "trace.parquet")
        scenario |= {"profile": {"path": str(profile.resolve()), "roofline": None}}
        scenario |= {"training": training_costs(run, costs)}
        # as many learn as roll out: one learner would hold up all schedules alike
        scenario["cluster"]["gpus"] = 2 * workers
        (own,) = scenario["systems"]
        common = own | {"rollout_share": 0.5}
        histopipe = common | {"name": "rhymerl", "speculation": "none", "ranking_groups": workers}
        scenario["systems"] = [common | {"name": "one_step_off"}, histopipe | {"migration": False}, histopipe]
        simulated = [simulate_prepared(prepare(with_measured_loads(s, str(profile)))) for s in scenarios(scenario)]
        plain, pinned, moved = (summary(result, 0) for result in simulated)
        rows.append(
            [
                workers,
                percent(moved["migrated_share"]),
                *(f"{each['step_s']:.2f} s, {percent(each['rollout_bubble'])}" for each in (plain, pinned, moved)),
            ]
        )
    heads = (
        "rollout workers (and learners)",
        "responses migrated",
        "one-step-off: step, bubble",
        "HistoPipe without migration",
        "HistoPipe",
    )
    return table(heads, rows)


# What clipping and the learning rate move.


def varied_rows(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a run: what it learned, and what its history is worth."""
    rows = []
    for run in runs:
        loss, curve, means = run.config.update.loss, run.curve, by_epoch(run)
        drafts = report(measure(run.trace, "history-paper", epochs_back=1))
        ranks = rank_history(run.trace, RANK_GROUPS).overall
        rows.append(
            {
                "clip": "none" if loss.clip_high is None else f"{loss.clip_low or 0:g} / {loss.clip_high:g}",
                "learning_rate": run.config.update.learning_rate,
                "first": means["reward"].iloc[:3].mean(),
                "reward": means["reward"].iloc[-3:].mean(),
                "clipped": curve["clip_fraction"].mean(),
                "entropy": curve["entropy"].iloc[-5:].mean(),
                "accepted": drafts["acceptance_rate"],
                "drafted": drafts["speculation_rate"],
                "accept_length": drafts["accept_length"],
                "match": drafts["similarity"][0]["best_match"],
                "accurate": ranks["accurate"],
                "migrated": ranks["migrated"],
            }
        )
    return pd.DataFrame(rows).sort_values(["learning_rate", "clip"], ignore_index=True)


def varied_table(rows: pd.DataFrame) -> list[str]:
    cells = [
        [
            f"{r.learning_rate:g}",
            r.clip,
            f"{r.first:.3f} → {r.reward:.3f}",
            f"{r.clipped:.2%}",
            f"{r.entropy:.3f}",
            percent(r.accepted),
            percent(r.drafted),
            f"{r.accept_length:.2f}",
            percent(r.match),
            percent(r.accurate),
            percent(r.migrated),
        ]
        for r in rows.itertuples()
    ]
    heads = (
        "learning rate",
        "clip (low / high)",
        "reward, first and last 3 epochs",
        "clipped",
        "entropy at the end, nat",
        "accepted of drafted",
        "tokens that were drafted",
        "tokens a pass",
        "best match",
        "same group or lower",
        "HistoPipe would migrate",
    )
    return table(heads, cells)


def plot_varied(rows: pd.DataFrame, path: Path) -> None:
    """Four squares: clip across, learning rate down."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    shown = {
        "reward": ("Reward in the last 3 epochs", "{:.2f}"),
        "accept_length": ("Tokens a verification pass yields", "{:.2f}"),
        "match": ("Best match in the previous epoch", "{:.0%}"),
        "accurate": ("Same group of lengths or lower", "{:.0%}"),
    }
    for axis, (column, (title, form)) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
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


# Predicted against measured.


def waits(run: Run) -> bool:
    """Nothing is generated while an update is made."""
    return run.config.system.name == "split"


def measured_profile(run: Run, costs: Path) -> Path:
    """Of the run's engine, where it stands, on the policy that it began with (`simrl measure`): alone, or beside another one
    where the learner works on the other core."""
    config = run.config
    beside = config.workers - 1 if waits(run) else config.workers
    path = costs / f"engine-{_digest(config.warm_up_digest, config.engine)}-{beside}-beside.parquet"
    if not path.exists():
        e = config.engine
        options = {
            "--model": run.folder.model(0), "--device": "cpu", "--gpu": "cpu", "--neighbours": beside,
            "--max-num-seqs": e.max_num_seqs, "--max-num-batched-tokens": e.max_num_batched_tokens,
            "--block-size": e.block_size, "--kv-cache-tokens": e.kv_cache_tokens, "--max-model-len": config.most_tokens,
            "--repeats": 9, "--budget": 150, "--output": path,
        }  # fmt: skip
        words = [str(word) for pair in options.items() for word in pair]
        subprocess.run([sys.executable, "-m", "simrl.cli", "measure", *words], check=True, stdout=sys.stderr)
    return path


def _digest(*parts: Any) -> str:
    """Of what a measurement depends on."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def training_file(run: Run, costs: Path) -> Path:
    """Of what updates like the run's were measured to take: a line a time, as this machine's speed drifts."""
    parts = (run.config.warm_up_digest, run.config.update, run.config.prompts_per_step, run.config.group)
    return costs / f"training-{_digest(*parts)}-{'alone' if waits(run) else 'beside'}.csv"


def measure_training_costs(run: Run, costs: Path) -> None:
    """Updates on random tokens, alone or beside an engine, once more."""
    with (
        tempfile.TemporaryDirectory() as logs,
        nullcontext() if waits(run) else generating(run.config, run.folder.model(0), Path(logs)),
    ):
        found = measure_training(run.config, repeats=10)
    file = training_file(run, costs)
    pd.DataFrame([found._asdict()]).to_csv(file, mode="a", header=not file.exists(), index=False)


def training_costs(run: Run, costs: Path) -> dict[str, float]:
    """The section `training` of a scenario: the median of all measurements."""
    file = training_file(run, costs)
    if not file.exists():
        measure_training_costs(run, costs)
    told = pd.read_csv(file)[["mfu", "log_prob_mfu", "publish_s"]].median().to_dict()
    update = run.config.update
    return {
        **told,
        "reward_s": 0.0,
        "tokens_per_microbatch": update.micro_batch_tokens,
        "ppo_epochs": update.ppo_epochs,
    }


def scenarios(written: dict[str, Any]) -> list[Scenario]:
    """Those of a scenario that is in no file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
        return load_scenarios(file)


def predicted_scenario(run: Run, lengths: Run, costs: Path) -> dict[str, Any]:
    """The schedule of `run` on the lengths of `lengths`, which may be another run's."""
    profile = measured_profile(run, costs)
    scenario = scenario_of(run.config, run.folder, lengths.folder.path / "trace.parquet")
    scenario |= {"profile": {"path": str(profile.resolve()), "roofline": None}}
    load_s = read_profile(profile).metadata.load_weights_s
    return scenario | {"training": {**training_costs(run, costs), "load_s": load_s}}


def predict(run: Run, lengths: Run, costs: Path) -> Result:
    """What comes of it."""
    (found,) = scenarios(predicted_scenario(run, lengths, costs))
    return simulate_prepared(prepare(found))


SHIPPED = ("trace.parquet", "curve.csv", "config.yaml", "versions/0000/model/config.json")


def ship(run: Run, to: Path, costs: Path) -> None:
    """Copies what a reader needs of a finished run, its tokens, its curve, its times and its model's shape, and writes the
    scenario that it was predicted by, all paths relative."""
    for name in SHIPPED:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if run.folder.path != to:
            shutil.copyfile(run.folder.path / name, to / name)
    scenario = predicted_scenario(run, run, costs)
    scenario["model"], scenario["workload"]["trace"] = SHIPPED[3], SHIPPED[0]
    scenario["profile"]["path"] = os.path.relpath(scenario["profile"]["path"], to.resolve())
    (to / "scenario.yaml").write_text(yaml.safe_dump(scenario, sort_keys=False), encoding="utf-8")
    (found,) = load_scenarios(to / "scenario.yaml")
    measured = run.measured
    told = measured.metadata.get("replay", measured.metadata)
    (to / "parts" / "000").mkdir(parents=True, exist_ok=True)
    metadata = {**prepare(found).inputs(), "end_s": told["end_s"], "faults": [], "replay": told}
    replace(measured, metadata=metadata).write(to / "parts" / "000")


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


def prediction_table(predicted: dict[str, Result], runs: Sequence[Run]) -> list[str]:
    """Each run predicted from its own lengths."""
    rows = []
    for run in runs:
        result = predicted[run.config.system.name]
        p, m = step_times(result), step_times(run.measured)
        both = (result, run.measured)
        bubbles = [rollout_bubble(gpu_seconds(each, 0.0, step_times(each).end[-1])) for each in both]
        staleness = [each.steps.to_pandas()["off_policyness_mean"].mean() for each in both]
        rows.append(
            [
                SCHEDULES[run.config.system.name],
                f"{p.end[-1]:.0f} / {m.end[-1]:.0f} s ({p.end[-1] / m.end[-1] - 1:+.1%})",
                f"{p.rollout.mean():.2f} / {m.rollout.mean():.2f} s",
                percent(mape(p.rollout, m.rollout)),
                f"{p.train.mean():.2f} / {m.train.mean():.2f} s",
                percent(mape(p.train, m.train)),
                percent(mape(np.diff(p.end), np.diff(m.end))),
                f"{percent(bubbles[0])} / {percent(bubbles[1])}",
                f"{staleness[0]:.2f} / {staleness[1]:.2f}",
            ]
        )
    heads = (
        "schedule (predicted / measured)",
        "whole run",
        "rollout of a batch",
        "MAPE",
        "log-probs and training",
        "MAPE",
        "from update to update, MAPE",
        "rollout bubble",
        "off-policyness",
    )
    return table(heads, rows)


def plot_steps(predicted: dict[str, Result], runs: Sequence[Run], path: Path) -> None:
    """Seconds of each batch's rollout and of each update, both ways."""
    figure = Figure(figsize=(11, 2.4 * len(runs)), layout="constrained")
    for run, (rollout, train) in zip(runs, figure.subplots(len(runs), 2, sharex=True), strict=True):
        p, m = step_times(predicted[run.config.system.name]), step_times(run.measured)
        for axis, name in ((rollout, "rollout"), (train, "train")):
            axis.plot(getattr(m, name), color=INK, label="measured")
            axis.plot(getattr(p, name), color=ORANGE, label="predicted")
            axis.set_ylim(bottom=0)
            axis.spines[["top", "right"]].set_visible(False)
            title = {"rollout": "rollout of a batch, s", "train": "log-probs and training, s"}[name]
            axis.set_title(f"{SCHEDULES[run.config.system.name]}: {title}", fontsize=9, color=INK)
    for axis in figure.axes[-2:]:
        axis.set_xlabel("update")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def seconds_an_update(result: Result, updates: int) -> float:
    """Of the first so many updates."""
    return float(result.steps.to_pandas()["finished_s"].iloc[updates - 1]) / updates


def order_table(repeats: Sequence[Sequence[Run]], costs: Path) -> list[str]:
    """Which schedule is faster, measured in every repeat and predicted: from each run's own lengths, and from the lengths of
    the first repeat's synchronous run alone, as a user would who has only that one."""
    updates = min(len(run.curve) for runs in repeats for run in runs)
    if len({tuple(run.config.system.name for run in runs) for runs in repeats}) > 1:
        raise InputError("the repeats do not have the same schedules; finish their runs")
    measured, own = dict[str, list[float]](), dict[str, list[float]]()
    for runs in repeats:
        for run in runs:
            name = run.config.system.name
            measured.setdefault(name, []).append(seconds_an_update(run.measured, updates))
            own.setdefault(name, []).append(seconds_an_update(predict(run, run, costs), updates))
    log = next(run for run in repeats[0] if waits(run))
    ahead = {r.config.system.name: seconds_an_update(predict(r, log, costs), updates) for r in repeats[0]}
    rows = [
        [
            SCHEDULES[name],
            ", ".join(f"{value:.2f}" for value in measured[name]),
            f"{ahead[name]:.2f}",
            ", ".join(f"{value:.2f}" for value in own[name]),
        ]
        for name in measured
    ]
    heads = ("schedule", "seconds an update, measured", "from the synchronous run's lengths", "from its own lengths")
    lines = [f"Over the first {updates} updates of each run.", "", *table(heads, rows), ""]
    rows = []
    for a, b in combinations(measured, 2):
        ratios = [x / y for x, y in zip(measured[a], measured[b], strict=True)]
        told = [np.mean(own[a]) / np.mean(own[b]), ahead[a] / ahead[b]]
        mean, spread = float(np.mean(ratios)), max(ratios) - min(ratios)
        decided = abs(mean - 1.0) > spread
        right = ["right" if (value > 1) == (mean > 1) else "wrong" for value in told]
        rows.append(
            [
                f"{SCHEDULES[a]} against {SCHEDULES[b]}",
                f"{mean:.2f}× ({', '.join(f'{ratio:.2f}' for ratio in ratios)})",
                f"{told[1]:.2f}×, {told[0]:.2f}×",
                "beyond" if decided else "within",
                ", ".join(dict.fromkeys(reversed(right))) if decided else "undecided",
            ]
        )
    heads = ("seconds an update", "measured", "predicted, both ways", "the spread of the repeats", "order")
    return lines + table(heads, rows)


# Words.


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """In Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def write_parts(page: Path, parts: dict[str, list[str]]) -> None:
    """What is between `<!-- NAME -->` and `<!-- /NAME -->`. Raises `InputError` for a page that has no such place."""
    text = page.read_text(encoding="utf-8")
    for name, lines in parts.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->\n")
        if not begin or not end:
            raise InputError(f"{page}: no place for {name}: write <!-- {name} --> and <!-- /{name} -->, a line each")
        text = before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after
    page.write_text(text, encoding="utf-8")


def main(
    folder: Annotated[Path, typer.Argument(metavar="RUNS", help="what `python -m replay.grpo` wrote")],
    repeat: Annotated[
        list[Path] | None, typer.Option(help="the same schedules with another seed; may be given again")
    ] = None,
    varied: Annotated[Path | None, typer.Option(help="runs that differ in clip and learning rate")] = None,
    page: Annotated[Path | None, typer.Option(help="a page (.md) to renew, its pictures beside it")] = None,
    costs: Annotated[
        Path, typer.Option(help="profiles of the engine and costs of training; measured here if they are not there")
    ] = Path("traces/countdown-costs"),
    measure_again: Annotated[
        bool, typer.Option("--measure-again", help="only measure what updates take, once more: speeds drift")
    ] = False,
    to: Annotated[
        Path | None, typer.Option("--ship", help="only copy what a reader needs of the runs to this folder")
    ] = None,
) -> None:
    """Counts, simulates, and renews the page; without one, the tables are printed."""
    costs.mkdir(parents=True, exist_ok=True)
    try:
        if to:
            for run in runs_in(folder):
                ship(run, to / run.config.name, costs)
        if measure_again:
            for run in {waits(run): run for run in runs_in(folder)}.values():
                measure_training_costs(run, costs)
        if to or measure_again:
            return
        parts = _parts(folder, repeat or [], varied, costs, page.parent if page else costs)
        if page:
            write_parts(page, parts)
        else:
            print("\n".join(line for name, lines in parts.items() for line in ("", f"## {name}", "", *lines)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _parts(
    folder: Path, repeat: Sequence[Path], varied: Path | None, costs: Path, pictures: Path
) -> dict[str, list[str]]:
    """The tables, by name; pictures are drawn on the way."""
    runs = runs_in(folder)
    sync = next(run for run in runs if waits(run))
    found = drafting(sync)
    plot_learning(runs, pictures / "recorded_run_learning.png")
    plot_drafting(found, pictures / "recorded_run_drafting.png")
    predicted = {run.config.system.name: predict(run, run, costs) for run in runs}
    plot_steps(predicted, runs, pictures / "recorded_run_steps.png")
    parts = {
        "learning": learning_table(runs),
        "drafting": drafting_table(found),
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
