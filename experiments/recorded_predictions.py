"""Predictions of the recorded runs: measured profiles and training costs, schedules simulated with them, and their errors.

Nothing is fitted to a run: profiles of its engine and the efficiency of training are measured apart from it.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.shared import markdown, measure_engine, percent
from experiments.training_costs import generating, measure_training
from simrl.errors import InputError
from simrl.profile.profile import read_profile
from simrl.result.metrics import gpu_seconds, rollout_bubble
from simrl.result.result import Result, read_result
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.show.style import INK, ROSE
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate_prepared
from simrl.trace.trace import Trace, read_trace
from simrl_replay.grpo.config import RunConfig, read_config
from simrl_replay.grpo.records import RunFolder
from simrl_replay.grpo.run import scenario_of

SCHEDULES = {"split": "synchronous", "one_step_off": "one-step-off", "areal": "AReaL, η = 2"}


@dataclass(frozen=True)
class Run:
    """A finished run."""

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

    @property
    def schedule(self) -> str:
        return self.config.system.name

    @property
    def waits(self) -> bool:
        """Return whether nothing is generated during an update."""
        return self.schedule == "split"

    @cached_property
    def measured(self) -> Result:
        """Return the run's times. Raise `InputError` for a run that was interrupted: its clock started again."""
        if not self.folder.whole():
            raise InputError(
                f"{self.folder.path}: was stopped and went on, so it has no times of its own; run it whole"
            )
        return read_result(self.folder.path / "parts" / "000")


def runs_in(folder: Path) -> list[Run]:
    """Return all finished runs, by schedule, then name. Raise `InputError` if there is none."""
    runs = [Run(RunFolder(path.parent)) for path in sorted(folder.glob("*/trace.parquet"))]
    if not runs:
        raise InputError(
            f"{folder}: no finished run in it; python -m simrl_replay.grpo experiments/grpo/*.yaml makes some"
        )
    return sorted(runs, key=lambda run: list(SCHEDULES).index(run.schedule))


def measured_profile(run: Run, costs: Path) -> Path:
    """Return the profile of the run's engine with its initial policy, measured here if it is missing: alone, or beside another
    engine where the learner works on the other core."""
    config = run.config
    beside = config.workers - 1 if run.waits else config.workers
    path = costs / f"engine-{_digest(config.warm_up_digest, config.engine)}-{beside}-beside.parquet"
    more = {"neighbours": beside, "max_model_len": config.most_tokens, "repeats": 9, "budget": 150}
    return measure_engine(run.folder.model(0), path, config.engine.model_dump(), **more)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def training_file(run: Run, costs: Path) -> Path:
    """Return the file of measured efficiencies of such updates: a line per measurement, as this machine's speed drifts."""
    parts = (
        run.config.warm_up_digest,
        run.config.update,
        run.config.prompts_per_step,
        run.config.group,
    )
    return costs / f"training-{_digest(*parts)}-{'alone' if run.waits else 'beside'}.csv"


def measure_training_costs(run: Run, costs: Path) -> None:
    """Measure updates on random tokens, alone or beside an engine, and add the efficiencies to the file."""
    with tempfile.TemporaryDirectory() as logs:
        beside = (
            nullcontext() if run.waits else generating(run.config, run.folder.model(0), Path(logs))
        )
        with beside:
            found = measure_training(run.config, repeats=10)
    file = training_file(run, costs)
    pd.DataFrame([found._asdict()]).to_csv(file, mode="a", header=not file.exists(), index=False)


def training_costs(run: Run, costs: Path) -> dict[str, float]:
    """Return the section `training` of a scenario: the median of all measurements."""
    file = training_file(run, costs)
    if not file.exists():
        measure_training_costs(run, costs)
    measured = pd.read_csv(file)[["mfu", "log_prob_mfu", "publish_s"]].median().to_dict()
    update = run.config.update
    sizes = {"tokens_per_microbatch": update.micro_batch_tokens, "ppo_epochs": update.ppo_epochs}
    return {**measured, "reward_s": 0.0, **sizes}


def scenarios(written: dict[str, Any]) -> list[Scenario]:
    """Return the scenarios of a written one that is in no file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
        return load_scenarios(file)


def predicted_scenario(run: Run, lengths: Run, costs: Path) -> dict[str, Any]:
    """Return the schedule of `run` on the lengths of `lengths`, which may be another run."""
    profile = measured_profile(run, costs)
    scenario = scenario_of(run.config, run.folder, lengths.folder.path / "trace.parquet")
    scenario |= {"profile": {"path": str(profile.resolve()), "roofline": None}}
    load_s = read_profile(profile).metadata.load_weights_s
    return scenario | {"training": {**training_costs(run, costs), "load_s": load_s}}


def predict(run: Run, lengths: Run, costs: Path) -> Result:
    """Simulate `predicted_scenario`."""
    (found,) = scenarios(predicted_scenario(run, lengths, costs))
    return simulate_prepared(prepare(found))


SHIPPED = ("trace.parquet", "curve.csv", "config.yaml", "versions/0000/model/config.json")


def ship(run: Run, to: Path, costs: Path) -> None:
    """Copy the tokens, curve, times and model shape of a finished run, and write the scenario of its prediction with relative
    paths."""
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
    facts = measured.metadata.get("replay", measured.metadata)
    (to / "parts" / "000").mkdir(parents=True, exist_ok=True)
    metadata = {**prepare(found).inputs(), "end_s": facts["end_s"], "faults": [], "replay": facts}
    replace(measured, metadata=metadata).write(to / "parts" / "000")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each update: from the first start to the last end of its samples, of log-probs and training, and its end."""

    rollout: np.ndarray[Any, np.dtype[np.float64]]
    train: np.ndarray[Any, np.dtype[np.float64]]
    end: np.ndarray[Any, np.dtype[np.float64]]


def step_times(result: Result) -> StepTimes:
    """Return the seconds by update."""
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
    """Compare each run with its prediction from its own lengths."""
    rows = []
    for run in runs:
        result = predicted[run.schedule]
        p, m = step_times(result), step_times(run.measured)
        both = (result, run.measured)
        bubbles = [
            rollout_bubble(gpu_seconds(each, 0.0, step_times(each).end[-1])) for each in both
        ]
        staleness = [each.steps.to_pandas()["off_policyness_mean"].mean() for each in both]
        rows.append(
            [
                SCHEDULES[run.schedule],
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
    )
    return markdown(
        (*heads, "from update to update, MAPE", "rollout bubble", "off-policyness"), rows
    )


def plot_steps(predicted: dict[str, Result], runs: Sequence[Run], path: Path) -> None:
    """Draw the seconds of each batch's rollout and of each update, measured and predicted."""
    figure = Figure(figsize=(11, 2.4 * len(runs)), layout="constrained")
    shown = {"rollout": "rollout of a batch, s", "train": "log-probs and training, s"}
    for run, row in zip(runs, figure.subplots(len(runs), 2, sharex=True), strict=True):
        p, m = step_times(predicted[run.schedule]), step_times(run.measured)
        for axis, (name, title) in zip(row, shown.items(), strict=True):
            axis.plot(getattr(m, name), color=INK, label="measured")
            axis.plot(getattr(p, name), color=ROSE, label="predicted")
            titled(axis, f"{SCHEDULES[run.schedule]}: {title}", fontsize=9)
    for axis in figure.axes[-2:]:
        axis.set_xlabel("update")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def seconds_an_update(result: Result, updates: int) -> float:
    """Return the mean seconds of the first `updates` updates."""
    return float(result.steps.to_pandas()["finished_s"].iloc[updates - 1]) / updates


def order_table(repeats: Sequence[Sequence[Run]], costs: Path) -> list[str]:
    """Compare the order of the schedules, measured in every repeat and predicted: from each run's own lengths, and from the
    lengths of the first repeat's synchronous run alone, the case of a user who has only this run."""
    updates = min(len(run.curve) for runs in repeats for run in runs)
    if len({tuple(run.schedule for run in runs) for runs in repeats}) > 1:
        raise InputError("the repeats differ in their schedules; finish their runs")
    measured, own = dict[str, list[float]](), dict[str, list[float]]()
    for runs in repeats:
        for run in runs:
            measured.setdefault(run.schedule, []).append(seconds_an_update(run.measured, updates))
            own.setdefault(run.schedule, []).append(
                seconds_an_update(predict(run, run, costs), updates)
            )
    log = next(run for run in repeats[0] if run.waits)
    ahead = {r.schedule: seconds_an_update(predict(r, log, costs), updates) for r in repeats[0]}
    rows = [
        [SCHEDULES[name], listed(measured[name]), f"{ahead[name]:.2f}", listed(own[name])]
        for name in measured
    ]
    heads = (
        "schedule",
        "seconds an update, measured",
        "from the synchronous run's lengths",
        "from its own lengths",
    )
    lines = [f"Over the first {updates} updates of each run.", "", *markdown(heads, rows), ""]
    rows = []
    for a, b in combinations(measured, 2):
        ratios = [x / y for x, y in zip(measured[a], measured[b], strict=True)]
        both = [ahead[a] / ahead[b], np.mean(own[a]) / np.mean(own[b])]
        mean, spread = float(np.mean(ratios)), max(ratios) - min(ratios)
        decided = abs(mean - 1.0) > spread
        right = ["right" if (value > 1) == (mean > 1) else "wrong" for value in both]
        rows.append(
            [
                f"{SCHEDULES[a]} against {SCHEDULES[b]}",
                f"{mean:.2f}× ({listed(ratios)})",
                f"{both[0]:.2f}×, {both[1]:.2f}×",
                "beyond" if decided else "within",
                ", ".join(dict.fromkeys(right)) if decided else "undecided",
            ]
        )
    heads = (
        "seconds an update",
        "measured",
        "predicted, both ways",
        "the spread of the repeats",
        "order",
    )
    return lines + markdown(heads, rows)


def listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def titled(axis: Axes, title: str, x: str = "", fontsize: int = 10) -> None:
    axis.set_title(title, fontsize=fontsize, color=INK)
    axis.set_xlabel(x)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
