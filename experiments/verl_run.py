"""The recorded verl run: its own times beside simulated ones. Results are in verl_run.md.

    python experiments/verl_run.py ../shared/data [--json]
    python experiments/verl_run.py ../shared/data --later    # calibrated on steps 1-20: the others, and two later runs

Reads the console log of verl_run/do7bl4gg, makes the trace that verl_run.yaml names, computes the two training efficiencies
from the first 20 logged steps, and simulates verl colocated on two GPUs that could have been it. Generation is first
predicted from data sheets alone; then one correction of the forward pass is calibrated on the first 20 steps, too. Errors
after calibration are of the later steps, which nothing is fitted to (lengths grow fivefold in them).
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from experiments.shared import AsJson, errors_in_a_line, verl_trace
from simrl.result.result import Result
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import Scenario
from simrl.show.style import BLACK, INDIGO, PALE, ROSE
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.study.calibration import calibrate, predicted
from simrl.study.logged_lengths import lengths_of, usable_steps
from simrl.trace.importers.logs import read_metrics
from simrl.trace.trace import Trace, write_trace
from simrl.training.costs import TrainingCosts

HERE = Path(__file__).parent
TRACE = HERE.parent / "results" / "verl_run.parquet"
SCENARIO = HERE / "verl_run.yaml"
LAUNCH = HERE / "verl_run_launch.yaml"
CALIBRATION_STEPS = 20
GROUP = 16
LATER_RUNS = {"yeu8r64c": 2, "f6sves9c": 4}  # mini-batches: of 16 and of 8 of the 32 prompts
GPUS = ("a100", "h100")


def logged_steps(log: Path) -> pd.DataFrame:
    """Return the steps of the log that have all compared values, in order."""
    metrics = read_metrics(log, "verl")
    needed = [
        "response_length/mean",
        "timing_s/gen",
        "timing_s/old_log_prob",
        "timing_s/ref",
        "timing_s/update_actor",
    ]
    return metrics.dropna(subset=needed).reset_index(drop=True)


def training_s(trace: Trace, log_probs: int, costs: TrainingCosts) -> NDArray[np.float64]:
    """Return simulated (log-prob, update) seconds of each step, shape (steps, 2)."""
    lengths = trace.column("prompt_tokens").astype(np.int64) + trace.column("response_tokens")
    rows = []
    for _, first, end in trace.step_slices:
        step = lengths[first:end]
        log_prob_s = log_probs * costs.sweep_s(step, 1)
        rows.append((log_prob_s, costs.sweep_s(step, 3)))
    return np.array(rows)


def generation_s(result: Result) -> NDArray[np.float64]:
    """Return seconds of each step's rollout: from its first request's start to its last one's end."""
    spans = result.spans.to_pandas()
    rollout = spans[spans["kind"] == "rollout"].groupby("policy_version")
    return (rollout["ended_s"].max() - rollout["started_s"].min()).to_numpy()


def main(
    data: Annotated[Path, typer.Argument(help="the folder with verl_run/")],
    picture: Annotated[
        Path, typer.Option(help="where to draw measured beside simulated times")
    ] = HERE / "verl_run_times.png",
    later: Annotated[
        bool, typer.Option("--later", help="calibrate, and predict two later runs of the job")
    ] = False,
    as_json: AsJson = False,
) -> None:
    with errors_in_a_line("verl_run"):
        if later:
            print_later_runs(data)
            return
        steps = logged_steps(data / "verl_run" / "do7bl4gg" / "output.log")
        rows, lines = compare_times(verl_trace(data, TRACE), steps)
    draw(steps, lines, picture)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    parts = ("generation", "training", "step")
    table = Table(
        "GPU",
        "data sheet alone:\ngeneration",
        "forward\ncorrection",
        "mfu",
        "log-prob\nmfu",
        *parts,
    )
    for row in rows:
        fitted = (
            f"{row['forward_correction']:.2f}",
            f"{row['mfu']:.3f}",
            f"{row['log_prob_mfu']:.3f}",
        )
        errors = (f"{row[f'{part}_mean_err']:+.1%} ({row[f'{part}_mape']:.1%})" for part in parts)
        table.add_row(
            row["gpu"], f"{row['uncorrected_generation_mean_err']:+.1%}", *fitted, *errors
        )
    Console().print(table)
    print(
        f"The corrections are those of steps 1-{CALIBRATION_STEPS}; the last three columns are of the steps after them:"
    )
    print(f"error of the mean (mean absolute error a step). Drawn in {picture}")


def print_later_runs(data: Path) -> None:
    """Print the errors on the steps after the window, and on runs whose times no fit has seen. A run's own lengths, and the
    mini-batches in its configuration, are inputs."""

    def launch(path: Path, steps: int, minibatches: int = 2) -> Scenario:
        (scenario,) = load_scenarios(LAUNCH, [f"steps={steps}", f"workload.trace={path}"])
        return scenario.with_fields("system", minibatches=minibatches)

    table = Table(
        "run",
        "phase",
        "steps",
        "mean absolute error a step",
        "error of the sum",
        "predicted a step [s]",
    )
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        log = read_metrics(data / "verl_run" / "do7bl4gg" / "output.log", "verl")
        found = calibrate(log, launch, (1, CALIBRATION_STEPS), GROUP, folder)
        errors = {"do7bl4gg, later steps": found.errors}
        for run, minibatches in LATER_RUNS.items():
            steps = usable_steps(
                read_metrics(data / "real_runs" / "agent_opd" / run / "output.log", "verl"),
                None,
                True,
                GROUP,
            )
            write_trace(lengths_of(steps, GROUP, None, None), folder / f"{run}.parquet")
            started = launch(folder / f"{run}.parquet", len(steps), minibatches).model_copy(
                update={"warmup_steps": 0}
            )
            errors[run] = predicted(steps, started, [found.scenario, *found.fits])
    for run, phases in errors.items():
        for e in phases:
            assert e.mape_out is not None and e.bias_out is not None
            seconds = f"{e.predicted_s:.1f} ({e.low_s:.1f} to {e.high_s:.1f})"
            table.add_row(
                run, e.phase, str(e.steps_out), f"{e.mape_out:.1%}", f"{e.bias_out:+.1%}", seconds
            )
    Console().print(table)


def compare_times(
    trace: Trace, steps: pd.DataFrame
) -> tuple[list[dict[str, Any]], dict[str, NDArray[np.float64]]]:
    """Return a row of errors for each candidate GPU, and the simulated generation seconds by GPU."""
    measured_gen_s = steps["timing_s/gen"].to_numpy()
    measured_s = np.stack(
        [steps["timing_s/old_log_prob"] + steps["timing_s/ref"], steps["timing_s/update_actor"]],
        axis=1,
    )
    measured_train_s = measured_s.sum(axis=1)
    rows, lines = [], {}
    for gpu in GPUS:
        scenario = load_scenarios(SCENARIO, [f"cluster.gpu={gpu}"])[0]
        prepared = prepare(scenario)
        log_probs = prepared.system.log_probs + scenario.training.extra_log_probs
        full = scenario.training.model_copy(update={"mfu": 1.0, "log_prob_mfu": 1.0})
        at_peak_s = training_s(trace, log_probs, _costs(prepared, full))
        first = slice(0, CALIBRATION_STEPS)
        log_prob_mfu, mfu = at_peak_s[first].sum(axis=0) / measured_s[first].sum(axis=0)
        config = scenario.training.model_copy(
            update={"mfu": float(mfu), "log_prob_mfu": float(log_prob_mfu)}
        )
        train_s = training_s(trace, log_probs, _costs(prepared, config)).sum(axis=1)
        raw_s = generation_s(_corrected(scenario, 1.0))
        correction = calibrate_forward(scenario, measured_gen_s)
        gen_s = generation_s(_corrected(scenario, correction))
        row = {
            "gpu": gpu,
            "mfu": float(mfu),
            "log_prob_mfu": float(log_prob_mfu),
            "uncorrected_generation_mean_err": float(raw_s.mean() / measured_gen_s.mean() - 1),
            "forward_correction": correction,
        }
        compared = {
            "generation": (gen_s, measured_gen_s),
            "training": (train_s, measured_train_s),
            "step": (gen_s + train_s, measured_gen_s + measured_train_s),
        }
        for name, pair in compared.items():
            simulated, measured = (seconds[CALIBRATION_STEPS:] for seconds in pair)
            row[f"{name}_mean_err"] = float(simulated.mean() / measured.mean() - 1)
            row[f"{name}_mape"] = float(np.mean(np.abs(simulated / measured - 1)))
        rows.append(row)
        lines |= {gpu: raw_s, f"{gpu} corrected": gen_s, f"{gpu} training": train_s}
    return rows, lines | {"measured training": measured_train_s}


def calibrate_forward(scenario: Scenario, measured_gen_s: NDArray[np.float64]) -> float:
    """Return the factor on every forward pass at which the first steps' generation takes its measured time."""
    first = scenario.model_copy(update={"steps": CALIBRATION_STEPS, "warmup_steps": 0})
    correction = 1.0
    for _ in range(4):  # all but the pause between passes grows with it, so this settles at once
        simulated_s = generation_s(_corrected(first, correction))
        correction *= float(measured_gen_s[:CALIBRATION_STEPS].sum() / simulated_s.sum())
    return correction


def _corrected(scenario: Scenario, correction: float) -> Result:
    """Simulate the scenario with a corrected forward pass."""
    profile = scenario.profile.model_copy(update={"forward_correction": correction})
    return simulate(scenario.model_copy(update={"profile": profile}))


def _costs(prepared: Any, config: Any) -> TrainingCosts:
    return TrainingCosts(
        prepared.model,
        prepared.gpu,
        prepared.train_gpus,
        config,
        minibatches=1,
        log_probs=1,
        switch=True,
    )


def draw(steps: pd.DataFrame, lines: dict[str, NDArray[np.float64]], picture: Path) -> None:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    x = steps["step"].to_numpy()
    left.plot(
        x,
        steps["timing_s/gen"],
        ".",
        color=BLACK,
        markersize=4,
        label="measured (tool calls included)",
    )
    gpu = GPUS[0]
    left.plot(x, lines[gpu], color=ROSE, linewidth=1, label=f"simulated, {gpu} data sheet alone")
    left.plot(
        x,
        lines[f"{gpu} corrected"],
        color=INDIGO,
        linewidth=1,
        label="simulated, calibrated on the shaded steps",
    )
    left.set(title="Generation", xlabel="step", ylabel="s", ylim=(0, None))
    right.plot(x, lines["measured training"], ".", color=BLACK, markersize=4, label="measured")
    right.plot(
        x,
        lines[f"{gpu} training"],
        color=INDIGO,
        linewidth=1,
        label="simulated, calibrated on the shaded steps",
    )
    right.set(title="Log-probs (teacher's included) and update", xlabel="step", ylim=(0, None))
    for axes in (left, right):
        axes.axvspan(x[0], x[CALIBRATION_STEPS - 1], color=PALE)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(picture)


if __name__ == "__main__":
    typer.run(main)
