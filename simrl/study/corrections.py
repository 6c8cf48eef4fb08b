"""A few named corrections of a scenario, fitted to steps of a real run's metrics log.

    generation   gen_s  = step_overhead_s + simulated rollout of the step's lengths, every pass of the profile
                          / decode_efficiency + pass_overhead_s + interference_s × decoding sequences
    update       update_s   = arithmetic at train_mfu  + minibatch_overhead_s × mini-batches
    log-probs    log_prob_s = arithmetic at log_prob_mfu + log_prob_overhead_s × passes

Invariant: every correction is a field of a scenario (`Correction.key`), so that `simulate` executes what the fit found.

The logarithm of simulated over measured seconds is fitted by least squares, under a soft L1 loss beyond 10 %: a step that
waited for a tool, or the first one, which warms up, does not pull the rest. Responses' own mean seconds are fitted with it
where a log has them (verl's agent loop): they separate the cost of a full batch from the cost of a lonely straggler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from simrl.result.result import Result
from simrl.runtime.training_costs import TrainingCosts
from simrl.scenario.model import Scenario
from simrl.scenario.training import TrainingConfig
from simrl.simulate.prepare import Prepared
from simrl.simulate.run import simulate
from simrl.trace.trace import Trace

Floats = NDArray[np.float64]

GENERATION, UPDATE, LOG_PROB, REFERENCE = (f"timing_s/{key}" for key in ("gen", "update_actor", "old_log_prob", "ref"))
RESPONSE_MEAN = "timing_s/agent_loop/generate_sequences/mean"
FEWEST_STEPS = 5  # of a window: one more than the corrections of generation
UNKNOWN_SHARE = 0.5  # of a correction, from which its standard error is worth a warning
SOFT = 0.1  # of a logarithm: beyond, the loss is no longer quadratic


@dataclass(frozen=True)
class Correction:
    """One fitted number. `error` is its standard error (Gauss-Newton; None if it is at a bound of its range)."""

    name: str
    value: float
    error: float | None
    low: float
    high: float
    unit: str
    meaning: str
    key: str  # of a scenario

    @property
    def warning(self) -> str | None:
        """Return what is doubtful about it: a bound that is no absent overhead, or an error of half its value or more."""
        if self.error is None and self.value > 0.0:
            asks = "the log asks for more than it can give; check the model and the GPU"
            return f"{self.name} ended at the bound of its range: {asks}"
        if self.error is not None and self.error >= UNKNOWN_SHARE * self.value:
            known = f"{self.name} is not known from this window (± {self.error / self.value:.0%})"
            return f"{known}: choose one whose lengths differ more"
        return None


class _Parameter(NamedTuple):
    """A correction before the fit. The fit's variable is the correction, or 1 over it (a share, which has no unit)."""

    name: str
    start: float
    low: float
    high: float
    scale: float
    key: str
    meaning: str
    inverse: bool = False

    def fitted(self, x: float, error: float | None) -> Correction:
        """Return the correction of the fit's variable and its standard error."""
        value, low, high, unit = x, self.low, self.high, "s"
        if self.inverse:
            value, low, high, unit = 1 / x, 1 / self.high, 1 / self.low, ""
            error = None if error is None else error * value**2
        return Correction(self.name, value, error, low, high, unit, self.meaning, self.key)


ENGINE = (
    _Parameter(
        *("decode_efficiency", 1.5, 0.5, 50.0, 1.0, "profile.forward_correction (1 over it)"),
        "speed of the engine's passes, as a share of the profile's",
        inverse=True,
    ),
    _Parameter(
        *("pass_overhead_s", 1e-3, 0.0, 0.1, 3e-3, "profile.between_passes_s"),
        "between two passes, whatever their batch: the engine's host",
    ),
    _Parameter(
        *("interference_s", 1e-5, 0.0, 5e-3, 3e-5, "profile.sequence_overhead_s"),
        "what each decoding sequence adds to a pass: agent loops, sampling and detokenisation that hold the engine up",
    ),
    _Parameter(
        *("step_overhead_s", 2.0, 0.0, 120.0, 3.0, "training.load_s"),
        "of each step's generation in addition to its passes: new weights, waking the engine, collecting the batch",
    ),
)


def _phase(mfu: str, mfu_key: str, share: str, overhead_s: str, each: str) -> tuple[_Parameter, _Parameter]:
    """Return the corrections of a phase of training: the efficiency of its arithmetic, and its overhead."""
    return (
        _Parameter(
            mfu, 3.0, 1.0, 1000.0, 1.0, f"training.{mfu_key}", f"share of the data sheet's FLOP/s {share}", True
        ),
        _Parameter(
            overhead_s, 0.5, 0.0, 300.0, 1.0, f"training.{overhead_s}", f"of each {each} in addition to its arithmetic"
        ),
    )


TRAINING = _phase("train_mfu", "mfu", "in which gradients are computed", "minibatch_overhead_s", "mini-batch")
LOG_PROBS = _phase(
    *("log_prob_mfu", "log_prob_mfu", "of a forward pass over the batch"), *("log_prob_overhead_s", "such pass")
)


def seconds(rows: pd.DataFrame, key: str) -> Floats:
    """Return a column of a log; NaN where it has none."""
    return rows[key].to_numpy(dtype=np.float64) if key in rows else np.full(len(rows), np.nan)


def fit(rows: pd.DataFrame, trace: Trace, prepared: Prepared) -> tuple[Scenario, tuple[Correction, ...]]:
    """Fit these rows of a log; `prepared` is the run as it was started, on the trace of their lengths."""
    scenario, corrections = _fit_generation(rows, prepared.scenario)
    tokens = (
        trace.column("prompt_tokens").astype(np.int64) + trace.column("response_tokens") + trace.observation_tokens()
    )
    config, more = _fit_training(rows, prepared, [tokens[first:end] for _, first, end in trace.step_slices])
    # The measured phases contain the changes between rollout and training.
    config = config.model_copy(update={"load_s": scenario.training.load_s, "switch_s": 0.0, "switch_transfer_s": 0.0})
    return scenario.model_copy(update={"training": config}), (*corrections, *more)


def _fit_generation(rows: pd.DataFrame, scenario: Scenario) -> tuple[Scenario, tuple[Correction, ...]]:
    measured, own = seconds(rows, GENERATION), seconds(rows, RESPONSE_MEAN)
    has_own = np.isfinite(own) & (own > 0)
    simulated: dict[tuple[float, ...], tuple[Floats, Floats]] = {}  # the last correction is no part of a simulation

    def residuals(x: Floats) -> Floats:
        forward, pass_s, sequence_s, step_s = map(float, x)
        key = forward, pass_s, sequence_s
        if key not in simulated:
            simulated[key] = rollout_s(simulate(with_generation(scenario, *key, 0.0)))
        whole_s, response_s = simulated[key]
        ratios: Floats = np.concatenate([(whole_s + step_s) / measured, response_s[has_own] / own[has_own]])
        return np.log(ratios)

    x, corrections = _least_squares(residuals, ENGINE)
    return with_generation(scenario, *x), corrections


def with_generation(scenario: Scenario, forward: float, pass_s: float, sequence_s: float, step_s: float) -> Scenario:
    """Return the scenario with these corrections of its engine."""
    engine = {"forward_correction": forward, "between_passes_s": pass_s, "sequence_overhead_s": sequence_s}
    return scenario.with_fields("profile", **engine).with_fields("training", load_s=step_s)


def _fit_training(
    rows: pd.DataFrame, prepared: Prepared, lengths: Sequence[NDArray[np.int64]]
) -> tuple[TrainingConfig, tuple[Correction, ...]]:
    """Fit the update and the log-probs; phases that the log does not time stay as the launch has them."""
    config, system = prepared.scenario.training, prepared.system
    corrections: tuple[Correction, ...] = ()

    def costs(config: TrainingConfig) -> TrainingCosts:
        scenario = prepared.scenario.model_copy(update={"training": config})
        return replace(prepared, scenario=scenario).training_costs(prepared.train_gpus)

    def update_s(config: TrainingConfig) -> list[float]:
        return [costs(config).update(step, system.minibatches)[0][1] for step in lengths]

    def log_probs_s(config: TrainingConfig) -> list[float]:
        return [costs(config).inference(step)[0][1] for step in lengths]

    measured = seconds(rows, UPDATE)
    if np.isfinite(measured).sum() >= FEWEST_STEPS:
        config, corrections = _fit_line(measured, TRAINING, config, update_s)
    own, reference = seconds(rows, LOG_PROB), seconds(rows, REFERENCE)
    known = np.isfinite(own) & (own > 0)
    if known.sum() >= FEWEST_STEPS and system.log_probs:
        both = known & np.isfinite(reference)
        if both.sum() >= FEWEST_STEPS:
            passes = max(1, round(system.log_probs * float(reference[both].sum() / own[both].sum())))
            config = config.model_copy(update={"extra_log_probs": passes})
            own = own + reference
        config, more = _fit_line(own, LOG_PROBS, config, log_probs_s)
        corrections += more
    return config, corrections


def _fit_line(
    measured: Floats,
    parameters: Sequence[_Parameter],
    config: TrainingConfig,
    simulated_s: Callable[[TrainingConfig], list[float]],
) -> tuple[TrainingConfig, tuple[Correction, ...]]:
    """Fit two corrections of a phase: the efficiency of its arithmetic, and its overhead."""
    known = np.isfinite(measured) & (measured > 0)
    mfu, overhead_s = (parameter.key.removeprefix("training.") for parameter in parameters)

    def changed(x: Sequence[float] | Floats) -> TrainingConfig:
        return config.model_copy(update={mfu: 1 / float(x[0]), overhead_s: float(x[1])})

    def residuals(x: Floats) -> Floats:
        return np.log(np.array(simulated_s(changed(x)))[known] / measured[known])

    x, corrections = _least_squares(residuals, parameters)
    return changed(x), corrections


def _least_squares(
    residuals: Callable[[Floats], Floats], parameters: Sequence[_Parameter]
) -> tuple[list[float], tuple[Correction, ...]]:
    """Return the fit's variables and the corrections, with no standard error for one that ended at a bound, whose neighbours
    then have theirs given that bound."""
    start, low, high, scale = (np.array(column) for column in zip(*(p[1:5] for p in parameters), strict=True))
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
    ended = np.where(found.x - low < 1e-3 * scale, low, np.where(high - found.x < 1e-3 * scale, high, found.x))
    free = np.flatnonzero((ended > low) & (ended < high))
    errors: dict[int, float] = {}
    if free.size:
        jacobian: Floats = np.asarray(found.jac, dtype=np.float64)[:, free]
        variance = 2 * found.cost / max(len(found.fun) - free.size, 1)
        covariance: Floats = variance * np.linalg.pinv(np.matmul(jacobian.T, jacobian))
        errors = dict(zip(free.tolist(), np.sqrt(np.diag(covariance)).tolist(), strict=True))
    values = [float(value) for value in ended]
    return values, tuple(p.fitted(values[i], errors.get(i)) for i, p in enumerate(parameters))


def rollout_s(result: Result) -> tuple[Floats, Floats]:
    """Return for each step of a synchronous run the seconds from its first response's start to its last one's end, and the
    mean seconds of its responses, from that start."""
    samples = result.samples.select(["trace_step", "started_s", "finished_s"]).to_pandas().dropna()
    by_step = samples.groupby("trace_step")
    finished, start_s = by_step["finished_s"], by_step["started_s"].min()
    whole_s, mean_s = (end_s - start_s for end_s in (finished.max(), finished.mean()))
    return whole_s.to_numpy(dtype=np.float64), mean_s.to_numpy(dtype=np.float64)
