"""A few named corrections of a scenario, fitted to steps of a real run's metrics log.

    generation   gen_s  = step_overhead_s + simulated rollout of the step's lengths, every pass of the profile
                          / decode_efficiency + pass_overhead_s + interference_s × decoding sequences
    update       update_s   = arithmetic at train_mfu  + update_overhead_s
    log-probs    log_prob_s = arithmetic at log_prob_mfu + log_prob_overhead_s × passes

Invariant: every correction is a field of a scenario (`Correction.key`), so that `simulate` executes what the fit found.

The logarithm of simulated over measured seconds is fitted by least squares, under a soft L1 loss beyond 10 %: a step that
waited for a tool, or the first one, which warms up, does not pull the rest. Responses' own mean seconds are fitted with it
where a log has them (verl's agent loop): they separate the cost of a full batch from the cost of a lonely straggler.

Steps of like lengths fit an efficiency with or without an overhead. So an overhead is expected before it is fitted: computed
from the states that move and the optimizer's steps, or as engines have it. Where the window does not tell it, it stays there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import t as student_t

from simrl.errors import InputError
from simrl.result.result import Result
from simrl.scenario.model import Scenario
from simrl.simulate.prepare import Prepared
from simrl.training.config import TrainingConfig
from simrl.training.costs import WEIGHT_BYTES, Ints, TrainingCosts

log = logging.getLogger(__name__)
Floats = NDArray[np.float64]
# A function of the corrections of the engine: each step's seconds, and its mean response's seconds.
Times = Callable[..., tuple[Floats, Floats]]

GENERATION, UPDATE, LOG_PROB, REFERENCE, STEP = (
    f"timing_s/{key}" for key in ("gen", "update_actor", "old_log_prob", "ref", "step")
)
RESPONSE_MEAN = "timing_s/agent_loop/generate_sequences/mean"
FEWEST_STEPS = (
    5  # of a window that tells its own noise: one more than the corrections of generation
)
FEW_NOISE = 0.05  # of a step's seconds, in a window of fewer: real runs have 1 to 7 % (assumed)
TOLD = 0.7  # of an overhead's spread: from this standard error on, the window tells little of it (assumed)
FAR = 2  # spreads above what was expected, from which an overhead is worth a warning
UNKNOWN_SHARE = 0.5  # of a correction, from which its standard error is worth a warning
PLAUSIBLE = 0.5, 1.5  # of a factor on measured kernels, beyond which its input is doubted (assumed)
# Of an engine's pass and of each sequence in it, where the launch names no engine: about the middle
# of the measured presets of `engines.toml`, 0.6 to 1.4 ms and 18 to 50 µs.
PASS_S, SEQUENCE_S = 1e-3, 3e-5
# A phase's or a weight sync's overhead may be this much where less was computed (assumed).
PHASE_S, LOAD_S = 1.0, 3.0
CHANCE = 3.84  # 95 % quantile of chi-square with one degree of freedom
MAD = (
    1.4826  # from the median of absolute residuals to a standard deviation: outliers make no noise
)
# Of a step's seconds (assumed): the least noise of real runs, and what lengths that are drawn from
# their statistics add to the simulated seconds.
LEAST_NOISE, DRAWN_NOISE = 0.002, 0.02
TINY, COARSE = (  # of SciPy's solver
    {"diff_step": step, "xtol": step / 100, "ftol": step / 1000, "max_nfev": most}
    for step, most in ((1e-3, 40), (0.05, 5))
)
# Corrections of a pass, one changed at a time.
CORNERS = ((1.0, 0.0, 0.0), (2.0, 0.0, 0.0), (1.0, 0.01, 0.0), (1.0, 0.0, 1e-4))
EXACT = 1e-6  # relative error from which seconds are not linear in the corrections
SOFT = 0.1  # of a logarithm: beyond, the loss is no longer quadratic


@dataclass(frozen=True)
class Correction:
    """One fitted number. `error` is its standard error (Gauss-Newton; None if it is at a bound of
    its range). `expected` is what an overhead was expected to be, within about `spread`; None for
    an efficiency, of which nothing is."""

    name: str
    value: float
    error: float | None
    low: float
    high: float
    unit: str
    meaning: str
    key: str  # of a scenario
    expected: float | None = None
    spread: float | None = None

    @property
    def is_expected(self) -> bool:
        """Return whether the window tells little more about it than was expected."""
        if self.spread is None or self.expected is None:
            return False
        near = abs(self.value - self.expected) <= FAR * self.spread
        return near and (self.error or 0.0) >= TOLD * self.spread

    @property
    def warning(self) -> str | None:
        """Return what is doubtful about it: a bound that is no absent overhead, an overhead far
        above what was expected, an error of half its value or more, or a factor far from 1."""
        if self.error is None and self.value > 0.0:
            asks = "more than it can give" if self.value >= self.high else "less than it ever gives"
            return f"{self.name} ended at its bound, {self.value:.2g}: the log asks for {asks}; check the model and the GPU"
        if self.expected is not None and self.spread is not None:
            if self.value <= self.expected + FAR * self.spread:
                return None
            more = f"{self.name} is {self.value:.3g} s, and {self.expected:.2g} s was expected"
            return f"{more}: the rest is of something that is not simulated"
        if self.error is not None and self.error >= UNKNOWN_SHARE * self.value:
            known = f"{self.name} is not known from this window (± {self.error / self.value:.0%})"
            return f"{known}: choose one whose lengths differ more"
        is_factor = self.key.startswith("profile.forward_correction") and self.error is not None
        if is_factor and not PLAUSIBLE[0] <= self.value <= PLAUSIBLE[1]:
            return (
                f"{self.name} is {self.value:.2g}, outside {PLAUSIBLE[0]} to {PLAUSIBLE[1]}: check model, cluster.gpu, "
                "cluster.tp, precision and engine.enforce_eager"
            )
        return None


class _Parameter(NamedTuple):
    """A correction before the fit. The fit's variable is the correction, or 1 over it (a share,
    which has no unit). An overhead starts at what is expected of it, and `spread` is how far it may
    be from that."""

    name: str
    start: float
    low: float
    high: float
    key: str
    meaning: str
    spread: float = np.inf
    inverse: bool = False

    @property
    def scale(self) -> float:
        return self.spread if np.isfinite(self.spread) else 1.0

    def fitted(self, x: float, error: float | None) -> Correction:
        """Return the correction of the fit's variable and its standard error."""
        value, low, high, unit = x, self.low, self.high, "s"
        if self.inverse:
            value, low, high, unit = 1 / x, 1 / self.high, 1 / self.low, ""
            error = None if error is None else error * value**2
        expected = (None, None) if self.inverse else (self.start, self.spread)
        return Correction(
            self.name, value, error, low, high, unit, self.meaning, self.key, *expected
        )


def _overhead(
    name: str, computed_s: float, least_s: float, high_s: float, key: str, meaning: str
) -> _Parameter:
    """Return an overhead, which may be twice what was computed, or none of it, and so much that
    was not computed as `least_s`."""
    return _Parameter(
        name, min(computed_s, high_s), 0.0, high_s, key, meaning, spread=max(computed_s, least_s)
    )


def _of_engine(prepared: Prepared) -> tuple[_Parameter, ...]:
    """Return the corrections of generation. A pass has the overheads of the launch (its
    engine's preset), else what presets of engines have measured."""
    profile, config = prepared.scenario.profile, prepared.scenario.training
    pass_s, sequence_s = profile.between_passes_s, profile.sequence_overhead_s
    return (
        _Parameter(
            *("decode_efficiency", 1.5, 0.5, 50.0, "profile.forward_correction (1 over it)"),
            "speed of the engine's passes, as a share of the profile's",
            inverse=True,
        ),
        _overhead(
            *("pass_overhead_s", PASS_S if pass_s is None else pass_s, PASS_S, 0.1),
            "profile.between_passes_s",
            "between two passes, whatever their batch: the engine's host",
        ),
        _overhead(
            *("interference_s", sequence_s or SEQUENCE_S, SEQUENCE_S, 5e-3),
            "profile.sequence_overhead_s",
            "what each decoding sequence adds to a pass: agent loops, sampling and detokenisation that hold the engine up",
        ),
        _overhead(
            *("step_overhead_s", config.load_overhead_s, LOAD_S, 120.0, "training.load_s"),
            "of each step's generation in addition to its passes: new weights, waking the engine, collecting the batch",
        ),
    )


def _of_training(costs: TrainingCosts) -> tuple[tuple[_Parameter, ...], ...]:
    """Return the corrections of an update, and of a log-prob pass. Computed are the states that
    come from the host and go back (those that phases fetch are executed, and not fitted), and the
    optimizer's steps. No efficiency is above what large matrix products reach."""
    config, computed = (
        costs.config,
        replace(costs, config=costs.config.model_copy(update={"mfu": None})),
    )
    states_s = weights_s = 0.0
    if costs.switch and config.offload == "switch":
        states_s = 2 * (costs.switch_s - config.switch_s)
        weights_s = (
            2 * WEIGHT_BYTES * costs.model.parameters / costs.gpus / costs.copied_bytes_per_s
        )
    steps = costs.minibatches * config.ppo_epochs
    return (
        _phase(
            *("train_mfu", "mfu", "in which gradients are computed", costs.gpu.matmul_share),
            *("update_overhead_s", "update"),
            config.update_overhead_s + states_s + steps * computed.optimizer_s,
        ),
        _phase(
            *(
                "log_prob_mfu",
                "log_prob_mfu",
                "of a forward pass over the batch",
                costs.gpu.matmul_share,
            ),
            *("log_prob_overhead_s", "such pass"),
            config.log_prob_overhead_s + weights_s,
        ),
    )


def _phase(
    mfu: str, mfu_key: str, share: str, most: float, overhead_s: str, each: str, computed_s: float
) -> tuple[_Parameter, _Parameter]:
    """Return the corrections of a phase of training: the efficiency of its arithmetic, and its
    overhead."""
    return (
        _Parameter(
            *(mfu, 3.0, 1 / most, 1000.0, f"training.{mfu_key}"),
            f"share of the data sheet's FLOP/s {share}",
            inverse=True,
        ),
        _overhead(
            *(overhead_s, computed_s, PHASE_S, 300.0, f"training.{overhead_s}"),
            f"of each {each} in addition to its arithmetic",
        ),
    )


def seconds(rows: pd.DataFrame, key: str) -> Floats:
    """Return a column of a log; NaN where it has none."""
    return rows[key].to_numpy(dtype=np.float64) if key in rows else np.full(len(rows), np.nan)


def is_timed(rows: pd.DataFrame, key: str) -> bool:
    """Return whether a log has seconds of a phase."""
    return bool((seconds(rows, key) > 0).any())


def fit(
    rows: pd.DataFrame,
    lengths: Sequence[Ints],
    inferred: Sequence[Ints],
    prepared: Prepared,
    simulated: Callable[[Scenario], Result],
    drawn: bool = True,
) -> tuple[list[Scenario], tuple[Correction, ...]]:
    """Fit these rows of a log, whose updates train sequences of `lengths` after the log-probs of
    `inferred` ones, `drawn` from statistics or recorded. `prepared` is the run as it was started,
    and `simulated` simulates it with other corrections.

    Return the scenario with its corrections, followed by the ends of the range of fits that do as
    well; and the corrections. A phase that the log does not time stays as in the launch; if
    generation is one, its corrections are fitted to the seconds of the steps. Raise `InputError` if
    an update trains another number of samples than a step of the log.
    """
    solve = partial(equally_good, least_noise=DRAWN_NOISE if drawn else LEAST_NOISE)
    configs, corrections = _fit_training(rows, prepared, lengths, inferred, solve)
    turns = in_turns(prepared) and is_timed(rows, GENERATION)
    # The measured phases contain the changes between rollout and training.
    settled = {"switch_s": 0.0, "switch_transfer_s": 0.0} if turns or not in_turns(prepared) else {}
    scenarios = [
        prepared.scenario.model_copy(update={"training": c.model_copy(update=settled)})
        for c in configs
    ]
    if not is_timed(rows, GENERATION if turns else STEP):
        return scenarios, tuple(corrections)
    times = lru_cache(maxsize=None)(
        partial(_times, simulated, scenarios[0], turns)
    )  # in turns without load_s
    # Where phases overlap, the order of events changes with the corrections: a slope over a tiny
    # step is noise.
    solved = TINY if turns else COARSE
    first = simulated(with_generation(scenarios[0], *CORNERS[0], 0.0))
    _require_updates_of(lengths, first, prepared)
    linear = _linear(simulated, scenarios[0], first) if turns else None
    engine_parameters = _of_engine(prepared)
    values, engine = solve(_of_generation(rows, linear or times, turns), engine_parameters, solved)
    used = [(*map(float, x[:3]), 0.0) for x in values]
    if linear is not None and not all(
        np.allclose(linear(*x), times(*x), rtol=EXACT, atol=0.0) for x in used
    ):
        _note_simulated(
            scenarios[0], "generation is not linear in them, as with tools or a shortest pass"
        )
        values, engine = solve(_of_generation(rows, times, turns), engine_parameters, solved)
    fits = [
        with_generation(scenario, *map(float, x))
        for scenario, x in zip(scenarios, values, strict=True)
    ]
    return fits, (*engine, *corrections)


def _require_updates_of(lengths: Sequence[Ints], result: Result, prepared: Prepared) -> None:
    """Raise `InputError` if an update of the system trains another number of samples than a step of
    the log."""
    trained = result.steps.column("samples").to_numpy().mean()
    logged = float(np.mean([tokens.size for tokens in lengths]))
    if abs(trained / logged - 1) > 0.05:
        raise InputError(
            f"{prepared.scenario.file}: an update of {prepared.system.name} trains {trained:.0f} samples, a step of the log "
            f"{logged:.0f}; give the size of its updates, as systems=[{{name: verl_fully_async, mini_batch: 16}}] (groups)"
        )


def in_turns(prepared: Prepared) -> bool:
    """Return whether the run generates a batch, trains it, and goes on."""
    return prepared.colocated and prepared.system.off_policyness == 0


def _of_generation(rows: pd.DataFrame, times: Times, turns: bool) -> Callable[[Floats], Floats]:
    """Return the residuals of generation, a column a step. Where generation and training overlap,
    the time from update to update stands in for that of generation."""
    measured, response_means = (
        seconds(rows, GENERATION if turns else STEP),
        seconds(rows, RESPONSE_MEAN),
    )

    def residuals(x: Floats) -> Floats:
        forward, pass_s, sequence_s, step_s = map(float, x)
        whole_s, response_s = times(forward, pass_s, sequence_s, 0.0 if turns else step_s)
        known_means = np.where(response_means > 0, response_means, np.nan)
        return np.log([(whole_s + step_s * turns) / measured, response_s / known_means])

    return residuals


def _times(
    simulated: Callable[[Scenario], Result], scenario: Scenario, turns: bool, *engine: float
) -> tuple[Floats, Floats]:
    """Return the seconds of each step, and of its mean response, with these corrections of the
    engine."""
    result = simulated(with_generation(scenario, *engine))
    return rollout_s(result) if turns else updates_s(result)


def _linear(
    simulated: Callable[[Scenario], Result], scenario: Scenario, of_first: Result
) -> Times | None:
    """Return `_times` of a run in turns as a function that simulates nothing; None if the runs it
    is made of differ. `of_first` is the run at the first corner.

    The lengths alone decide which request is in which pass, and a pass is linear in the
    corrections. So the seconds of each response are linear in them, and follow from one more
    simulation than there are unknowns. The caller checks the result: a run that waits for tools, or
    has a shortest pass, need not be linear."""
    first = _response_ends(of_first)
    others = [
        _response_ends(simulated(with_generation(scenario, *corner, 0.0))) for corner in CORNERS[1:]
    ]
    if not all(ends.index.equals(first.index) for ends in others):
        _note_simulated(scenario, "they change which responses finish")
        return None
    steps = np.diagonal(np.subtract(CORNERS[1:], CORNERS[0]))[:, None]
    slopes = (np.array(others, dtype=np.float64) - first.to_numpy()) / steps
    constant, counts = first.to_numpy() - np.array(CORNERS[0]) @ slopes, _responses_of_steps(first)

    return lambda *engine: _of_steps(constant + np.array(engine[: len(slopes)]) @ slopes, counts)


def _note_simulated(scenario: Scenario, reason: str) -> None:
    log.warning(
        f"{scenario.file}: every guess of the corrections is simulated, which takes longer: {reason}"
    )


def with_generation(
    scenario: Scenario, forward: float, pass_s: float, sequence_s: float, step_s: float
) -> Scenario:
    """Return the scenario with these corrections of its engine."""
    engine = {
        "forward_correction": forward,
        "between_passes_s": pass_s,
        "sequence_overhead_s": sequence_s,
    }
    # What a preset hides is in what is fitted; launches without CUDA graphs are not.
    engine["least_sequence_s"] = scenario.profile.least_sequence_s or 0.0
    if not scenario.engine.enforce_eager:
        engine["least_pass_s"] = scenario.profile.least_pass_s or 0.0
    return scenario.with_fields("profile", **engine).with_fields("training", load_s=step_s)


def _fit_training(
    rows: pd.DataFrame,
    prepared: Prepared,
    lengths: Sequence[Ints],
    inferred: Sequence[Ints],
    solve: Callable[..., tuple[Floats, list[Correction]]],
) -> tuple[list[TrainingConfig], list[Correction]]:
    """Fit the update and the log-probs. Returns as `fit`."""
    config, system = prepared.scenario.training, prepared.system
    configs, corrections = [config] * 3, list[Correction]()

    def costs(config: TrainingConfig) -> TrainingCosts:
        return replace(
            prepared, scenario=prepared.scenario.model_copy(update={"training": config})
        ).training_costs(prepared.train_gpus)

    def fit_line(
        measured: Floats,
        parameters: Sequence[_Parameter],
        simulated_s: Callable[[TrainingConfig], list[float]],
    ) -> None:
        mfu, overhead_s = (parameter.key.removeprefix("training.") for parameter in parameters)

        def changed(x: Sequence[float] | Floats) -> dict[str, Any]:
            return {mfu: 1 / float(x[0]), overhead_s: float(x[1])}

        def residuals(x: Floats) -> Floats:
            simulated = simulated_s(configs[0].model_copy(update=changed(x)))
            return np.log(np.array([simulated]) / np.where(measured > 0, measured, np.nan))

        values, fitted = solve(residuals, parameters)
        configs[:] = [
            one.model_copy(update=changed(x)) for one, x in zip(configs, values, strict=True)
        ]
        corrections.extend(fitted)

    of_update, of_log_probs = _of_training(costs(config))
    measured = seconds(rows, UPDATE)
    if is_timed(rows, UPDATE):
        fit_line(
            measured,
            of_update,
            lambda c: [costs(c).update(n, system.minibatches)[0][1] for n in lengths],
        )
    logged, reference = seconds(rows, LOG_PROB), seconds(rows, REFERENCE)
    if is_timed(rows, LOG_PROB) and system.log_probs:
        both = (logged > 0) & np.isfinite(reference)
        if both.any():
            if config.reference_model is None:
                passes = max(
                    1, round(system.log_probs * float(reference[both].sum() / logged[both].sum()))
                )
                configs[:] = [one.model_copy(update={"extra_log_probs": passes}) for one in configs]
            logged = logged + reference
        fit_line(logged, of_log_probs, lambda c: [costs(c).inference(n)[0][1] for n in inferred])
    return configs, corrections


def equally_good(
    residuals: Callable[[Floats], Floats],
    parameters: Sequence[_Parameter],
    solved: Mapping[str, Any] = TINY,
    least_noise: float = LEAST_NOISE,
) -> tuple[Floats, list[Correction]]:
    """Fit, and find how far the first correction (an efficiency) can be moved without harm. Return
    a row of variables of the fit that is used, of the slowest and of the fastest one that do as
    well; and its corrections.

    The distance of an overhead from the expected one, in its `spread`, counts as a Cauchy error
    beside the noise of the steps: steps that tell an overhead find it, however far it is, and steps
    that do not leave it where it was expected. Two more fits have the efficiency 1.96 standard
    errors away, no further than to 1 (no engine is faster than its profile) or what such hardware
    does. Each is repeated on the first two thirds of the steps; one that predicts the last third
    worse than another by more than chance explains does not count.
    """
    solve = partial(_least_squares, parameters=parameters, solved=solved)
    alone = solve(residuals)  # what the window says, whatever is expected
    residual = residuals(alone.x)
    known = residual[np.isfinite(residual)]
    few = np.isfinite(residual).any(axis=0).sum() < FEWEST_STEPS
    scatter = (
        MAD * np.median(np.abs(known)) * np.sqrt(known.size / max(known.size - len(parameters), 1))
    )
    noise = max(scatter, FEW_NOISE if few else least_noise)
    chance = CHANCE * noise**2 / 2
    expected, spread = (
        np.array([getattr(p, key) for p in parameters]) for key in ("start", "spread")
    )

    def penalty(x: Floats, part: Any = slice(None)) -> Floats:
        """Return the residuals of a part of the steps, and of the overheads."""
        apart = np.sqrt(2 * np.log1p(((x - expected) / spread) ** 2))
        return np.concatenate([residuals(x)[:, part].ravel(), noise * apart])

    near = [alone.x[0], *expected[1:]]
    best = min((solve(penalty, start=start) for start in (near, alone.x)), key=lambda fit: fit.cost)
    errors = _errors(best, parameters, noise)
    fits = [best]
    for away in (-1, 1) if np.isfinite(errors[0]) else ():
        low = max(parameters[0].low, min(1.0, float(best.x[0])))
        end = float(
            np.clip(best.x[0] + away * np.sqrt(CHANCE) * errors[0], low, parameters[0].high)
        )
        fits.append(solve(penalty, start=[end, *best.x[1:]], free_from=1))
    if not few:
        early = np.arange(residual.shape[1]) < residual.shape[1] * 2 // 3
        fits = _held_out(
            fits,
            residuals,
            lambda fit: solve(partial(penalty, part=early), start=fit.x, free_from=1),
            ~early,
            chance,
        )
    used = min(fits, key=lambda fit: float(fit.cost))
    by_speed = sorted(fits, key=lambda fit: -float(fit.x[0]))
    corrections = [
        p.fitted(float(x), None if np.isnan(e) else float(e))
        for p, x, e in zip(parameters, used.x, errors, strict=True)
    ]
    return np.array([fit.x for fit in (used, by_speed[0], by_speed[-1])]), corrections


def _held_out(
    fits: Sequence[Any],
    residuals: Callable[[Floats], Floats],
    refitted: Callable[[Any], Any],
    rest: NDArray[np.bool_],
    chance: float,
) -> list[Any]:
    """Return the fits that, repeated on a part of the steps, predict the `rest` as well as any, to
    within what chance explains: `chance`, and a paired t test of the steps."""
    losses = np.array([_loss(residuals(refitted(fit).x)[:, rest]) for fit in fits])
    apart = losses - losses[losses.sum(axis=1).argmin()]
    steps = apart.shape[1]
    error = np.std(apart, axis=1, ddof=1) * np.sqrt(steps) * student_t.ppf(0.975, steps - 1)
    sums = apart.sum(axis=1)
    return [fit for fit, d, e in zip(fits, sums, error, strict=True) if d <= max(e, chance)]


def _loss(residual: Floats) -> Floats:
    """Return the soft L1 loss of each step."""
    loss: Floats = np.nansum(SOFT**2 * (np.sqrt(1 + (residual / SOFT) ** 2) - 1), axis=0)
    return loss


def _errors(solution: Any, parameters: Sequence[_Parameter], noise: float) -> Floats:
    """Return the standard errors of a fit to residuals of this noise (Gauss-Newton), NaN for a
    correction at a bound."""
    low, high, scale = (
        np.array(column)
        for column in zip(*((p.low, p.high, p.scale) for p in parameters), strict=True)
    )
    errors = np.full(len(parameters), np.nan)
    free = np.flatnonzero((solution.x - low > 1e-3 * scale) & (high - solution.x > 1e-3 * scale))
    if free.size:
        jacobian: Floats = np.asarray(solution.jac, dtype=np.float64)[:, free]
        errors[free] = noise * np.sqrt(np.diag(np.linalg.pinv(np.matmul(jacobian.T, jacobian))))
    return errors


def _least_squares(
    residuals: Callable[[Floats], Floats],
    parameters: Sequence[_Parameter],
    solved: Mapping[str, Any],
    start: Sequence[float] | None = None,
    free_from: int = 0,
) -> Any:
    """Return SciPy's result with all corrections in `x`; those before `free_from` stay at their
    start."""
    first, low, high, scale = (
        np.array(column)
        for column in zip(*((p.start, p.low, p.high, p.scale) for p in parameters), strict=True)
    )
    begin = first if start is None else np.clip(start, low + 1e-3 * scale, high - 1e-3 * scale)
    fixed = np.array(begin if start is None else start)[:free_from]

    def known(x: Floats) -> Floats:
        solution = residuals(np.concatenate([fixed, x])).ravel()
        return solution[np.isfinite(solution)]

    part = slice(free_from, None)
    low, high, scale = low[part], high[part], scale[part]
    solution = least_squares(
        known,
        begin[part],
        bounds=(low, high),
        x_scale=scale,
        loss="soft_l1",
        f_scale=SOFT,
        **solved,
    )
    ended = np.where(
        solution.x - low < 1e-3 * scale,
        low,
        np.where(high - solution.x < 1e-3 * scale, high, solution.x),
    )
    solution.x = np.concatenate([fixed, ended])
    return solution


def rollout_s(result: Result) -> tuple[Floats, Floats]:
    """Return for each step of a synchronous run the seconds from its first response's start to its
    last one's end, and the mean seconds of its responses, from that start."""
    ends = _response_ends(result)
    return _of_steps(ends.to_numpy(), _responses_of_steps(ends))


def _response_ends(result: Result) -> pd.Series:
    """Return when each finished response ended, in seconds from the first start of its step, by
    `trace_step` and `uid`."""
    samples = (
        result.samples.select(["trace_step", "uid", "started_s", "finished_s"]).to_pandas().dropna()
    )
    samples["ended_s"] = samples["finished_s"] - samples.groupby("trace_step")[
        "started_s"
    ].transform("min")
    ends: pd.Series = samples.set_index(["trace_step", "uid"])["ended_s"]
    return ends.sort_index()


def _responses_of_steps(ends: pd.Series) -> Ints:
    """Return the responses of each step."""
    return np.unique(
        ends.index.get_level_values("trace_step").to_numpy(np.int64), return_counts=True
    )[1]


def _of_steps(ends: Floats, counts: Ints) -> tuple[Floats, Floats]:
    """Return the last and the mean end of each step's responses."""
    first = np.cumsum(counts) - counts
    return np.maximum.reduceat(ends, first), np.add.reduceat(ends, first) / counts


def updates_s(result: Result) -> tuple[Floats, Floats]:
    """Return for each update the seconds since the one before, and the mean seconds of the
    responses that it trained."""
    samples = (
        result.samples.select(["trained_step", "started_s", "finished_s"]).to_pandas().dropna()
    )
    response_s = (
        (samples["finished_s"] - samples["started_s"]).groupby(samples["trained_step"]).mean()
    )
    finished_s = result.steps.column("finished_s").to_numpy()
    return np.diff(finished_s, prepend=0.0), response_s.to_numpy(dtype=np.float64)
