"""A few named corrections, fitted to some steps of a real run's metrics log, and held against its other steps.

    generation   gen_s  = step_overhead_s + simulated rollout of the step's lengths, every pass of the profile
                          / decode_efficiency + pass_overhead_s + interference_s × decoding sequences
    update       update_s   = arithmetic at train_mfu  + minibatch_overhead_s × mini-batches
    log-probs    log_prob_s = arithmetic at log_prob_mfu + log_prob_overhead_s × passes

Invariant: the fit sees the rows of its window and nothing else, so that the error on the rest is one of prediction; and every
correction is a field of a scenario (`Correction.key`), so that whatever the fit says is what `simulate` does.

The logarithm of simulated over measured seconds is fitted by least squares, under a soft L1 loss beyond 10 %: a step that
waited for a tool, or the first one, which warms up, does not pull the rest. Responses' own mean seconds are fitted with it
where a log has them (verl's agent loop): they tell what a full batch costs from what a lonely straggler does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

from simrl.errors import InputError
from simrl.importers.verl import NEEDED, trace_from_verl_metrics
from simrl.result import Result
from simrl.scenario import Scenario
from simrl.simulate import Prepared, prepare, simulate
from simrl.trace import Trace, write_trace
from simrl.training import TrainingConfig, TrainingCosts

T = TypeVar("T")
Floats = NDArray[np.float64]

GENERATION, UPDATE, LOG_PROB, REFERENCE, STEP = (
    f"timing_s/{key}" for key in ("gen", "update_actor", "old_log_prob", "ref", "step")
)
RESPONSE_MEAN = "timing_s/agent_loop/generate_sequences/mean"
FEWEST_STEPS = 5  # of a window: one more than the corrections of generation
SOFT = 0.1  # of a logarithm: beyond, the loss is no longer quadratic


@dataclass(frozen=True)
class Correction:
    """One number that the fit found. `error` is its standard error (Gauss-Newton; None if it is at a bound of its range)."""

    name: str
    value: float
    error: float | None
    low: float
    high: float
    unit: str
    meaning: str
    key: str  # of a scenario

    @property
    def at_bound(self) -> bool:
        return self.error is None


@dataclass(frozen=True)
class PhaseError:
    """How far simulated seconds are from logged ones, step by step. None where there are no such steps."""

    phase: str
    steps_in: int
    mape_in: float | None
    bias_in: float | None
    steps_out: int
    mape_out: float | None
    bias_out: float | None


@dataclass(frozen=True)
class Calibration:
    """The scenario of the run with its corrections, and what it says about every step of the log. `steps` has a row a step:
    `step`, `in_window`, and of each phase `_measured_s` and `_simulated_s`."""

    scenario: Scenario
    window: tuple[int, int]
    corrections: tuple[Correction, ...]
    errors: tuple[PhaseError, ...]
    steps: pd.DataFrame
    assumed: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Its keys are stable."""
        return {
            "window": list(self.window),
            "corrections": [asdict(c) for c in self.corrections],
            "errors": [asdict(e) for e in self.errors],
            "assumed": list(self.assumed),
            "steps": self.steps.to_dict("list"),
        }


class _Parameter(NamedTuple):
    start: float
    low: float
    high: float
    scale: float


FORWARD = _Parameter(1.5, 0.5, 50.0, 1.0)  # 1 / decode_efficiency
PASS = _Parameter(1e-3, 0.0, 0.1, 3e-3)
SEQUENCE = _Parameter(1e-5, 0.0, 5e-3, 3e-5)
STEP_OVERHEAD = _Parameter(2.0, 0.0, 120.0, 3.0)
INVERSE_MFU = _Parameter(3.0, 1.0, 1000.0, 1.0)
OVERHEAD = _Parameter(0.5, 0.0, 300.0, 1.0)


def calibrate(
    metrics: pd.DataFrame,
    launch: Callable[[Path, int], Scenario],
    window: tuple[int, int],
    group: int,
    folder: Path,
    cap_tokens: int | None = None,
    recorded: Trace | None = None,
) -> Calibration:
    """Fits the steps from `window[0]` to `window[1]` (both in it), simulates all steps, and writes their trace to
    `folder / "run.parquet"`.

    `metrics` is what `simrl.importers.metrics.read_metrics` gives. `launch` makes the scenario of the run as it was started,
    from the path of a trace and a number of steps. Lengths are `recorded`'s where it is given (steps that it lacks are left
    out), else made from each step's mean, min, max and share at the cap by `trace_from_verl_metrics`, in groups of `group`.

    Raises `InputError` for a log without what is fitted, a window of fewer than 5 usable steps, and systems that do not
    generate and train in turns.
    """
    usable = _usable(metrics, recorded)
    first, last = window
    fitted = usable[usable["step"].between(first, last)]
    if len(fitted) < FEWEST_STEPS:
        raise InputError(
            f"{_source(metrics)}: {len(fitted)} usable steps in the window {first}-{last} (it logs {_range(usable)}), "
            f"{FEWEST_STEPS} are needed; choose another --window"
        )
    with tempfile.TemporaryDirectory(prefix="simrl-calibrate-") as temporary:
        scenario, corrections = _fit(fitted, launch, group, Path(temporary), cap_tokens, recorded)
    trace = _trace(usable, group, cap_tokens, recorded)
    write_trace(trace, folder / "run.parquet")
    whole = launch(folder / "run.parquet", len(usable))
    whole = whole.model_copy(update={"profile": scenario.profile, "training": scenario.training})
    steps = _beside(usable, window, _of_run(simulate, whole), whole)
    return Calibration(
        whole, window, corrections, tuple(_errors(steps)), steps, tuple(_assumed(usable, whole, trace, recorded))
    )


def _usable(metrics: pd.DataFrame, recorded: Trace | None) -> pd.DataFrame:
    """The steps that have lengths and a generation time."""
    needed = [GENERATION, *(NEEDED if recorded is None else ())]
    for key in needed:
        if key not in metrics:
            raise InputError(
                f"{_source(metrics)}: no {key} in it; log the metrics of training steps, not validation alone"
            )
    usable = metrics.dropna(subset=needed)
    usable = usable[usable[GENERATION] > 0]
    if recorded is not None:
        usable = usable[usable["step"].isin([step for step, _, _ in recorded.step_slices])]
    if usable.empty:
        raise InputError(
            f"{_source(metrics)}: none of its {len(metrics)} steps has {GENERATION} and lengths; is the log cut off?"
        )
    return usable.sort_values("step").reset_index(drop=True)


def _source(metrics: pd.DataFrame) -> str:
    return str(metrics.attrs.get("source", "the log"))


def _range(usable: pd.DataFrame) -> str:
    return f"{usable['step'].min()}-{usable['step'].max()}"


def _trace(rows: pd.DataFrame, group: int, cap_tokens: int | None, recorded: Trace | None) -> Trace:
    """The lengths of these steps, made from nothing but these rows."""
    if recorded is not None:
        kept = pc.is_in(recorded.table["step"], pa.array(rows["step"].to_numpy(), pa.int32()))
        return Trace(recorded.table.filter(kept), recorded.metadata)
    cap = int(rows["response_length/max"].max()) if cap_tokens is None else cap_tokens
    return trace_from_verl_metrics(rows, group, 0, cap_tokens=cap, name="run")


# The fit


def _fit(
    rows: pd.DataFrame,
    launch: Callable[[Path, int], Scenario],
    group: int,
    folder: Path,
    cap_tokens: int | None,
    recorded: Trace | None,
) -> tuple[Scenario, tuple[Correction, ...]]:
    trace = _trace(rows, group, cap_tokens, recorded)
    write_trace(trace, folder / "window.parquet")
    scenario = launch(folder / "window.parquet", len(rows))
    scenario = scenario.model_copy(update={"warmup_steps": 0})
    prepared = _of_run(prepare, scenario)
    if prepared.system.off_policyness != 0 or not prepared.colocated:
        raise InputError(
            f"system {prepared.system.name}: a run is calibrated if it generates and trains in turns; name such a one, as "
            "systems=[verl_colocated]"
        )
    scenario, corrections = _fit_generation(rows, scenario)
    lengths = _step_lengths(trace)
    config, found = _fit_training(rows, prepared, lengths)
    return scenario.model_copy(update={"training": config.model_copy(update={"load_s": scenario.training.load_s})}), (
        *corrections,
        *found,
    )


def _of_run(call: Callable[[Scenario], T], scenario: Scenario) -> T:
    """What it gives; an `InputError` says which run it is about."""
    try:
        return call(scenario)
    except InputError as error:
        raise InputError(f"{scenario.file}: {error}") from error


def _fit_generation(rows: pd.DataFrame, scenario: Scenario) -> tuple[Scenario, tuple[Correction, ...]]:
    measured = rows[GENERATION].to_numpy(dtype=np.float64)
    own = rows[RESPONSE_MEAN].to_numpy(dtype=np.float64) if RESPONSE_MEAN in rows else np.full(len(rows), np.nan)
    has_own = np.isfinite(own) & (own > 0)
    simulated: dict[tuple[float, float, float], tuple[Floats, Floats]] = {}

    def times(x: Floats) -> tuple[Floats, Floats]:
        forward, pass_s, sequence_s, _ = map(float, x)
        key = forward, pass_s, sequence_s
        if key not in simulated:
            simulated[key] = rollout_s(simulate(with_generation(scenario, forward, pass_s, sequence_s, 0.0)))
        return simulated[key]

    def residuals(x: Floats) -> Floats:
        whole_s, response_s = times(x)
        ratios: Floats = np.concatenate([(whole_s + x[3]) / measured, response_s[has_own] / own[has_own]])
        return np.log(ratios)

    parameters = (FORWARD, PASS, SEQUENCE, STEP_OVERHEAD)
    x, error = _least_squares(residuals, parameters)
    efficiency = 1 / x[0]
    corrections = (
        Correction(
            "decode_efficiency",
            efficiency,
            None if error[0] is None else error[0] * efficiency**2,
            1 / FORWARD.high,
            1 / FORWARD.low,
            "",
            "speed of the engine's passes, as a share of the profile's",
            "profile.forward_correction (1 over it)",
        ),
        Correction(
            "pass_overhead_s",
            x[1],
            error[1],
            PASS.low,
            PASS.high,
            "s",
            "between two passes, whatever their batch: the engine's host",
            "profile.between_passes_s",
        ),
        Correction(
            "interference_s",
            x[2],
            error[2],
            SEQUENCE.low,
            SEQUENCE.high,
            "s",
            "what each decoding sequence adds to a pass: agent loops, sampling and detokenisation that hold the engine up",
            "profile.sequence_overhead_s",
        ),
        Correction(
            "step_overhead_s",
            x[3],
            error[3],
            STEP_OVERHEAD.low,
            STEP_OVERHEAD.high,
            "s",
            "of each step's generation besides its passes: new weights, waking the engine, collecting the batch",
            "training.load_s",
        ),
    )
    return with_generation(scenario, *x), corrections


def with_generation(scenario: Scenario, forward: float, pass_s: float, sequence_s: float, step_s: float) -> Scenario:
    """The scenario with these corrections of its engine."""
    profile = scenario.profile.model_copy(
        update={
            "forward_correction": float(forward),
            "between_passes_s": float(pass_s),
            "sequence_overhead_s": float(sequence_s),
        }
    )
    training = scenario.training.model_copy(update={"load_s": float(step_s)})
    return scenario.model_copy(update={"profile": profile, "training": training})


def _fit_training(
    rows: pd.DataFrame, prepared: Prepared, lengths: Sequence[NDArray[np.int64]]
) -> tuple[TrainingConfig, tuple[Correction, ...]]:
    """What the log does not time stays as the launch has it."""
    config, system = prepared.scenario.training, prepared.system
    corrections: list[Correction] = []
    measured = _seconds(rows, UPDATE)
    if np.isfinite(measured).sum() >= FEWEST_STEPS:

        def update_s(mfu: float, overhead_s: float, config: TrainingConfig = config) -> Floats:
            costs = _costs(prepared, config.model_copy(update={"mfu": mfu, "minibatch_overhead_s": overhead_s}))
            return np.array([costs.update(step, system.minibatches)[0][1] for step in lengths])

        mfu, overhead = _fit_line(
            measured,
            update_s,
            "train_mfu",
            "training.mfu",
            "share of the data sheet's FLOP/s in which gradients are computed",
        )
        overhead = _named(
            overhead,
            "minibatch_overhead_s",
            "training.minibatch_overhead_s",
            "of each mini-batch besides its arithmetic",
        )
        config = config.model_copy(update={"mfu": mfu.value, "minibatch_overhead_s": overhead.value})
        corrections += [mfu, overhead]
    own, reference = _seconds(rows, LOG_PROB), _seconds(rows, REFERENCE)
    known = np.isfinite(own) & (own > 0)
    if known.sum() >= FEWEST_STEPS and system.log_probs:
        both = known & np.isfinite(reference)
        if both.sum() >= FEWEST_STEPS:
            passes = max(1, round(system.log_probs * float(reference[both].sum() / own[both].sum())))
            config = config.model_copy(update={"extra_log_probs": passes})
            own = own + reference

        def log_prob_s(mfu: float, overhead_s: float, config: TrainingConfig = config) -> Floats:
            costs = _costs(prepared, config.model_copy(update={"log_prob_mfu": mfu, "log_prob_overhead_s": overhead_s}))
            return np.array([costs.inference(step)[0][1] for step in lengths])

        mfu, overhead = _fit_line(
            own, log_prob_s, "log_prob_mfu", "training.log_prob_mfu", "the same of a forward pass over the batch"
        )
        overhead = _named(
            overhead, "log_prob_overhead_s", "training.log_prob_overhead_s", "of each such pass besides its arithmetic"
        )
        config = config.model_copy(update={"log_prob_mfu": mfu.value, "log_prob_overhead_s": overhead.value})
        corrections += [mfu, overhead]
    return config, tuple(corrections)


def _fit_line(
    measured: Floats, simulated: Callable[[float, float], Floats], name: str, key: str, meaning: str
) -> tuple[Correction, Correction]:
    """Two corrections of a phase: the efficiency of its arithmetic, and what it takes besides."""
    known = np.isfinite(measured) & (measured > 0)

    def residuals(x: Floats) -> Floats:
        return np.log(simulated(1 / float(x[0]), float(x[1]))[known] / measured[known])

    x, error = _least_squares(residuals, (INVERSE_MFU, OVERHEAD))
    mfu = 1 / x[0]
    return (
        Correction(
            name,
            mfu,
            None if error[0] is None else error[0] * mfu**2,
            1 / INVERSE_MFU.high,
            1 / INVERSE_MFU.low,
            "",
            meaning,
            key,
        ),
        Correction("", x[1], error[1], OVERHEAD.low, OVERHEAD.high, "s", "", ""),
    )


def _named(correction: Correction, name: str, key: str, meaning: str) -> Correction:
    return Correction(**{**asdict(correction), "name": name, "key": key, "meaning": meaning})


def _least_squares(
    residuals: Callable[[Floats], Floats], parameters: Sequence[_Parameter]
) -> tuple[list[float], list[float | None]]:
    """Values and standard errors; None for what ended at a bound, whose neighbours then have theirs given that bound."""
    start, low, high, scale = (np.array(column) for column in zip(*parameters, strict=True))
    found = least_squares(
        residuals,
        start,
        bounds=(low, high),
        x_scale=scale,
        loss="soft_l1",
        f_scale=SOFT,
        diff_step=np.full(len(start), 1e-3),
        xtol=1e-5,
        ftol=1e-6,
        max_nfev=40,
    )
    x = np.where(found.x - low < 1e-3 * scale, low, np.where(high - found.x < 1e-3 * scale, high, found.x))
    free = np.flatnonzero((x > low) & (x < high))
    errors: list[float | None] = [None] * len(x)
    if free.size:
        jacobian: Floats = np.asarray(found.jac, dtype=np.float64)[:, free]
        variance = 2 * found.cost / max(len(found.fun) - free.size, 1)
        covariance: Floats = variance * np.linalg.pinv(np.matmul(jacobian.T, jacobian))
        for i, place in enumerate(free):
            errors[int(place)] = float(np.sqrt(covariance[i, i]))
    return [float(value) for value in x], errors


# What a simulation says of a step


def rollout_s(result: Result) -> tuple[Floats, Floats]:
    """Of each step of a synchronous run: seconds from its first response's start to its last one's end, and the mean over its
    responses, from the same start."""
    samples = result.samples.select(["trace_step", "started_s", "finished_s"]).to_pandas().dropna()
    by_step = samples.groupby("trace_step")
    start_s = by_step["started_s"].min()
    return (
        (by_step["finished_s"].max() - start_s).to_numpy(dtype=np.float64),
        (by_step["finished_s"].mean() - start_s).to_numpy(dtype=np.float64),
    )


def phase_s(result: Result, kind: str) -> Floats:
    """Seconds of a kind of span in each update, on the trainer's first lane."""
    spans = result.spans.select(["lane", "kind", "started_s", "ended_s", "policy_version"]).to_pandas()
    spans = spans[spans["kind"] == kind]
    spans = spans[spans["lane"] == spans["lane"].iloc[0]] if len(spans) else spans
    seconds = (spans["ended_s"] - spans["started_s"]).groupby(spans["policy_version"]).sum()
    return np.asarray(seconds.reindex(range(result.steps.num_rows), fill_value=0.0), dtype=np.float64)


def _beside(usable: pd.DataFrame, window: tuple[int, int], result: Result, scenario: Scenario) -> pd.DataFrame:
    """Logged and simulated seconds of every step."""
    finished_s = result.steps.column("finished_s").to_numpy()
    steps = pd.DataFrame({"step": usable["step"], "in_window": usable["step"].between(*window)})
    log_probs = _seconds(usable, LOG_PROB)
    if scenario.training.extra_log_probs and REFERENCE in usable:
        log_probs = log_probs + _seconds(usable, REFERENCE)
    for phase, measured, simulated in (
        ("generation", _seconds(usable, GENERATION), rollout_s(result)[0] + float(scenario.training.load_s or 0.0)),
        ("log_prob", log_probs, phase_s(result, "log_prob")),
        ("update", _seconds(usable, UPDATE), phase_s(result, "train")),
        ("step", _seconds(usable, STEP), np.diff(finished_s, prepend=0.0)),
    ):
        if np.isfinite(measured).any():
            steps[f"{phase}_measured_s"], steps[f"{phase}_simulated_s"] = measured, simulated
    return steps


def _errors(steps: pd.DataFrame) -> list[PhaseError]:
    errors = []
    for phase in ("generation", "log_prob", "update", "step"):
        if f"{phase}_measured_s" not in steps:
            continue
        measured, simulated = steps[f"{phase}_measured_s"], steps[f"{phase}_simulated_s"]
        known = measured.notna() & (measured > 0)
        found: list[Any] = []
        for chosen in (known & steps["in_window"], known & ~steps["in_window"]):
            apart = simulated[chosen] / measured[chosen] - 1
            total = simulated[chosen].sum() / measured[chosen].sum() - 1 if chosen.any() else None
            found += [int(chosen.sum()), float(apart.abs().mean()) if chosen.any() else None, total]
        errors.append(PhaseError(phase, *found))
    return errors


def _seconds(rows: pd.DataFrame, key: str) -> Floats:
    return rows[key].to_numpy(dtype=np.float64) if key in rows else np.full(len(rows), np.nan)


def _step_lengths(trace: Trace) -> list[NDArray[np.int64]]:
    tokens = (
        trace.column("prompt_tokens").astype(np.int64) + trace.column("response_tokens") + trace.observation_tokens()
    )
    return [tokens[first:end] for _, first, end in trace.step_slices]


def _costs(prepared: Prepared, config: TrainingConfig) -> TrainingCosts:
    return TrainingCosts(
        prepared.model,
        prepared.gpu,
        prepared.train_gpus,
        config,
        minibatches=prepared.system.minibatches,
        log_probs=prepared.system.log_probs + config.extra_log_probs,
        switch=True,
    )


def _assumed(usable: pd.DataFrame, scenario: Scenario, trace: Trace, recorded: Trace | None) -> list[str]:
    cluster, training = scenario.cluster, scenario.training
    said = [
        f"{scenario.model} on {cluster.gpus} × {cluster.gpu}, tp {cluster.tp}, under {scenario.system.name}: stated at the "
        "start, no log says it"
    ]
    if recorded is None:
        said.append(
            "lengths are made from each step's mean, min, max and share at the cap (logged); the shape between is a truncated "
            "lognormal, and siblings are as unlike as strangers"
        )
    if not {"turn_tokens", "environment_s"} & set(trace.table.column_names):
        turns = usable["num_turns/mean"].mean() if "num_turns/mean" in usable else 0
        said.append(
            "no tool calls and turns are simulated"
            + (
                f" (the log counts {turns:.1f} messages a response): what they took is in the corrections"
                if turns > 2
                else ""
            )
        )
    if training.extra_log_probs:
        said.append(
            f"the reference's log-probs are {training.extra_log_probs} passes of the policy's cost (rounded from the window)"
        )
    said.append("corrections found under the run's own system hold under another one")
    return said


# The calibrated scenario as a file


def scenario_yaml(calibration: Calibration, source: str) -> str:
    """The run as a scenario file: `simrl compare` reads it. Its trace lies beside it."""
    data = calibration.scenario.model_dump(mode="json", exclude_defaults=True, exclude={"system", "variant", "file"})
    data["workload"] = {"trace": "run.parquet"}
    system = calibration.scenario.system
    data["systems"] = [{"name": system.name, **system.parameters}]
    first, last = calibration.window
    lines = [f"# Calibrated on steps {first}-{last} of {source}."]
    for c in calibration.corrections:
        known = "at the bound of its range" if c.error is None else f"± {c.error:.2g}"
        lines.append(f"#   {c.name} = {c.value:.4g}{' ' + c.unit if c.unit else ''} ({known}): {c.meaning}; {c.key}")
    for e in calibration.errors:
        if e.mape_out is not None:
            lines.append(f"# {e.phase}: {e.mape_out:.1%} mean absolute error over the {e.steps_out} other steps")
    lines += [f"# Assumed: {text}." for text in calibration.assumed]
    return "\n".join(lines) + "\n\n" + yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
