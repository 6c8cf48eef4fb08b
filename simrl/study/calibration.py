"""A real run's metrics log as a scenario: calibrated on some of its steps, and other systems to
compare it with.

Invariants: the fit sees the rows of its window alone, so the error on the other rows is a
prediction error. The folder of a calibration has every file that its scenario names, and appears
whole or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import yaml

from simrl.errors import InputError
from simrl.files import temporary_folder, write_whole_folder
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.shipped import PROFILES, SHIPPED, shipped_profile
from simrl.result.result import Result
from simrl.scenario.calibration import CalibrationConfig
from simrl.scenario.dotted import get, put
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import RooflineConfig, Scenario
from simrl.scenario.presets import Constant, Preset, named
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate, simulate_prepared
from simrl.study.corrections import (
    FEW_NOISE,
    FEWEST_STEPS,
    GENERATION,
    LOG_PROB,
    REFERENCE,
    STEP,
    UPDATE,
    Correction,
    Floats,
    fit,
    in_turns,
    is_timed,
    rollout_s,
    seconds,
)
from simrl.study.logged_lengths import (
    BATCH_TOKENS,
    RUN,
    TOKENS,
    batch_size,
    lengths_of,
    source_of,
    step_tokens,
    usable_steps,
)
from simrl.study.progress import progress_bar
from simrl.study.store import write_json
from simrl.systems.recipes import make_system, parameters_of
from simrl.systems.system import System
from simrl.trace.importers.logs import read_metrics
from simrl.trace.trace import Trace, read_trace, write_trace

T = TypeVar("T")
DEFAULT_STEPS = 20  # of a window, if none is named
PHASES = ("generation", "log_prob", "update", "step")
MANIFEST = "files.txt"
CALIBRATED = "calibrated.yaml"
FITTED_AT = ("model", "cluster.gpu", "cluster.tp")  # what efficiencies depend on
NEEDS = "model=qwen2.5-3b cluster.gpu=a100 cluster.gpus=4 cluster.tp=1"


@dataclass(frozen=True)
class PhaseError:
    """Relative errors of simulated seconds against logged ones, step by step. None where there are
    no such steps."""

    phase: str
    steps_in: int
    mape_in: float | None
    bias_in: float | None
    steps_out: int
    mape_out: float | None
    bias_out: float | None
    predicted_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class Calibration:
    """The scenario of the run with its corrections, and its prediction of every step of the log.
    `steps` has a row a step: `step`, `in_window`, and of each phase `_measured_s`, `_simulated_s`,
    `_low_s` and `_high_s`: the range of `fits`, scenarios whose corrections do as well on the
    window."""

    scenario: Scenario
    window: tuple[int, int]
    corrections: tuple[Correction, ...]
    errors: tuple[PhaseError, ...]
    steps: pd.DataFrame
    assumed: tuple[str, ...]
    fits: tuple[Scenario, ...] = ()
    unclear: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()  # phases that the log does not time
    notes: tuple[str, ...] = ()  # on what was read

    @property
    def warnings(self) -> list[str]:
        """Return what is doubtful about the corrections."""
        return [text for _, text in self.doubts]

    @property
    def keys(self) -> dict[str, str]:
        """Return the key of each correction in a scenario, by its name."""
        return {c.name: c.key.partition(" ")[0] for c in self.corrections}

    @property
    def doubts(self) -> list[tuple[str, str]]:
        """Return what is doubtful, each with the keys of the corrections that it names."""
        doubts = [text for text in (*self.unclear, *(c.warning for c in self.corrections)) if text]
        return [
            (
                ", ".join(k for name, k in self.keys.items() if re.search(rf"\b{name}\b", text))
                or "log",
                text,
            )
            for text in doubts
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the data of `--json`; the keys are stable."""
        return {
            "window": list(self.window),
            "corrections": [asdict(c) for c in self.corrections],
            "errors": [asdict(e) for e in self.errors],
            "warnings": list(self.warnings),
            "lacks": list(self.lacks),
            "assumed": list(self.assumed),
            "notes": list(self.notes),
            "steps": self.steps.to_dict("list"),
        }


def calibrated(
    run_log: Path,
    settings: Sequence[str],
    launch: Path | None,
    window: tuple[int, int] | None,
    group: int,
    samples: int | None,
    prompt_tokens: float | None,
    cap_tokens: int | None,
    log_format: str | None,
    trace: Path | None,
    folder: Path,
    columns: Mapping[str, str] | None = None,
) -> Calibration:
    """Return the calibration of a log on the steps of `window`, with its files in `folder`:
    scenario, lengths, errors.

    `settings` and `launch`, a scenario file, say how the run was started. Raise `InputError` as
    `calibrate` and `simrl.trace.importers.logs.read_metrics` do.
    """
    recorded = read_trace(trace) if trace is not None else None
    start = partial(launched, run_log, launch, settings)
    options = log_format, samples, prompt_tokens, recorded is None, columns, cap_tokens
    read = partial(read_metrics, run_log, *options)
    try:  # before a log is judged by what it lacks
        _of_run(lambda run: (model_shape(run.model), gpu(run.cluster.gpu)), start(run_log, 1))
    except InputError:
        read()  # that a file is no log at all is said first
        raise
    metrics = read()
    with write_whole_folder(folder, MANIFEST) as temporary:
        calibration = calibrate(
            metrics, start, window, group, temporary, cap_tokens, recorded, samples
        )
        (temporary / CALIBRATED).write_text(
            scenario_yaml(calibration, run_log.name), encoding="utf-8"
        )
        write_json(temporary / "calibration.json", calibration.as_json())
    return calibration


def calibrate(
    metrics: pd.DataFrame,
    launch: Callable[[Path, int], Scenario],
    window: tuple[int, int] | None,
    group: int,
    folder: Path,
    cap_tokens: int | None = None,
    recorded: Trace | None = None,
    samples: int | None = None,
) -> Calibration:
    """Fit the steps from `window[0]` to `window[1]` (both included), simulate all steps, and write
    their trace to `folder / "run.parquet"`.

    `metrics` comes from `read_metrics`. `launch` makes the scenario of the run as it was started,
    from the path of a trace and a number of steps. Lengths are `recorded`'s if given (steps that it
    lacks are left out), else made from each step's mean, min, max and share at the cap by
    `trace_from_verl_metrics`, in groups of `group`. Where they are of kept groups, the batch is
    generated (`samples` responses, if given) and the kept ones are trained.

    A window of None is the first 20 usable steps. Raise `InputError` for a log without any fitted
    metrics, a window without a usable step, and a system whose updates are of another size than the log's.
    """
    path = folder / RUN
    system = _system(launch(path, 1))
    turns = system.rollout_share is None and system.off_policyness == 0
    usable = usable_steps(metrics, recorded, turns, group)
    turns = turns and is_timed(usable, GENERATION)
    batch = batch_size(usable, group, samples, recorded)
    if batch is not None or system.filter_groups:
        batch = batch or round(
            float(
                (
                    usable[TOKENS] / (usable["response_length/mean"] + usable["prompt_length/mean"])
                ).max()
            )
        )

    def started(rows: pd.DataFrame, path: Path) -> tuple[Scenario, Trace]:
        trace = lengths_of(rows, group, cap_tokens, recorded, batch)
        write_trace(trace, path)
        scenario = launch(path, len(rows)).model_copy(update={"warmup_steps": 0})
        if batch is not None and not _system(scenario).needs_rewards:
            # Tokens of the whole batch are counted where its log-probs are computed.
            scenario = scenario.with_fields(
                "system", filter_groups="after_log_probs" if BATCH_TOKENS in usable else True
            )
        return scenario, trace

    first, last = window or (usable["step"].iloc[0], usable["step"].iloc[:DEFAULT_STEPS].iloc[-1])
    window = int(first), int(last)
    fitted = usable[usable["step"].between(*window)]
    if fitted.empty:
        logged = f"{usable['step'].min()}-{usable['step'].max()}"
        raise InputError(
            f"{source_of(metrics)}: no usable step in the window {first}-{last} (it logs {logged}); choose another --window"
        )
    cache = InputCache()
    with temporary_folder() as temporary, progress_bar() as progress:
        runs = progress.add_task("calibrating: simulations", total=None)

        def simulated(scenario: Scenario) -> Result:
            result = simulate_prepared(prepare(scenario, cache))
            progress.advance(runs)
            return result

        scenario, trace = started(fitted, temporary / "window.parquet")
        prepared = _of_run(partial(prepare, inputs=cache), scenario)
        lengths = step_tokens(trace, prepared.system.needs_rewards)
        inferred = step_tokens(
            trace,
            prepared.system.needs_rewards and prepared.system.filter_groups != "after_log_probs",
        )
        fits, corrections = fit(fitted, lengths, inferred, prepared, simulated, recorded is None)
        whole, trace = started(usable, path)
        fits = [
            whole.model_copy(update={"profile": corrected.profile, "training": corrected.training})
            for corrected in fits
        ]
        unlike = {
            corrected.model_dump_json(): corrected for corrected in fits
        }  # the ends of the range may be one
        results = {key: _of_run(simulated, corrected) for key, corrected in unlike.items()}
        steps = _beside(
            usable,
            window,
            turns,
            [results[corrected.model_dump_json()] for corrected in fits],
            fits[0],
        )
    errors = _errors(steps)
    assumed = tuple(_assumed(usable, fits[0], trace, recorded, batch, group))
    phases = {UPDATE: "update", STEP: "the whole step"}
    phases |= {LOG_PROB: "log-probs"} if prepared.system.log_probs else {}
    lacks = [f"{name} ({key})" for key, name in phases.items() if not is_timed(fitted, key)]
    if in_turns(prepared) and not is_timed(metrics, GENERATION):
        lacks.insert(0, f"generation ({GENERATION})")
    return Calibration(
        *(fits[0], window, corrections, errors, steps, assumed, tuple(fits[1:])),
        unclear=tuple(_unclear(corrections, len(fitted))),
        lacks=tuple(lacks),
        notes=tuple(note.removesuffix(".") for note in usable.attrs["notes"]),
    )


def _unclear(corrections: Sequence[Correction], steps: int) -> list[str]:
    """Return what the steps of a window tell little about."""
    lines = []
    if steps < FEWEST_STEPS:
        lines.append(
            f"{steps} step{'s' * (steps > 1)} in the window, and {FEWEST_STEPS} tell their noise: averages, "
            f"with a noise of {FEW_NOISE:.0%} (assumed)"
        )
    if expected := [c for c in corrections if c.is_expected]:
        values = ", ".join(f"{c.name} {c.expected:.2g} s" for c in expected)
        lines.append(f"the window tells little of what was expected: {values}")
    return lines


def predicted(
    steps: pd.DataFrame, started: Scenario, fits: Sequence[Scenario]
) -> tuple[PhaseError, ...]:
    """Return the errors on all steps (`usable_steps`) of another run that generates and trains in
    turns, `started` on the trace of its lengths, with corrections of this run
    (`Calibration.scenario`, then its `fits`)."""
    runs = [
        started.model_copy(update={"profile": corrected.profile, "training": corrected.training})
        for corrected in fits
    ]
    return _errors(_beside(steps, (-1, -1), True, [simulate(run) for run in runs], runs[0]))


def _errors(steps: pd.DataFrame) -> tuple[PhaseError, ...]:
    return tuple(_error(phase, steps) for phase in PHASES if f"{phase}_measured_s" in steps)


def _system(scenario: Scenario) -> System:
    return make_system(scenario.system.name, scenario.system.parameters)


def _of_run(call: Callable[[Scenario], T], scenario: Scenario) -> T:
    """Call it; an `InputError` names the run."""
    try:
        return call(scenario)
    except InputError as error:
        raise InputError(f"{scenario.file}: {error}") from error


def phase_s(result: Result, kind: str) -> Floats:
    """Return the seconds of a kind of span in each update, on the trainer's first lane."""
    spans = result.spans.select(
        ["lane", "kind", "started_s", "ended_s", "policy_version"]
    ).to_pandas()
    spans = spans[spans["kind"] == kind]
    spans = spans[spans["lane"] == spans["lane"].iloc[0]] if len(spans) else spans
    seconds = (spans["ended_s"] - spans["started_s"]).groupby(spans["policy_version"]).sum()
    return np.asarray(
        seconds.reindex(range(result.steps.num_rows), fill_value=0.0), dtype=np.float64
    )


def _beside(
    usable: pd.DataFrame,
    window: tuple[int, int],
    turns: bool,
    results: Sequence[Result],
    scenario: Scenario,
) -> pd.DataFrame:
    """Return logged and simulated seconds of every step; `results` are of the fit and of others
    that do as well."""
    steps = pd.DataFrame({"step": usable["step"], "in_window": usable["step"].between(*window)})
    log_probs = seconds(usable, LOG_PROB)
    if scenario.training.reference_passes and REFERENCE in usable:
        log_probs = log_probs + seconds(usable, REFERENCE)
    measured_s = (
        seconds(usable, GENERATION),
        log_probs,
        seconds(usable, UPDATE),
        seconds(usable, STEP),
    )
    simulated_s = np.array(
        [
            (
                rollout_s(result)[0] + float(scenario.training.load_s or 0.0)
                if turns
                else np.full(len(steps), np.nan),
                phase_s(result, "log_prob"),
                phase_s(result, "train"),
                np.diff(result.steps.column("finished_s").to_numpy(), prepend=0.0),
            )
            for result in results
        ]
    )
    for phase, measured, simulated in zip(
        PHASES, measured_s, simulated_s.swapaxes(0, 1), strict=True
    ):
        if (measured > 0).any() and np.isfinite(simulated[0]).all():
            steps[f"{phase}_measured_s"], steps[f"{phase}_simulated_s"] = measured, simulated[0]
            steps[f"{phase}_low_s"], steps[f"{phase}_high_s"] = (
                simulated.min(axis=0),
                simulated.max(axis=0),
            )
    return steps


def _error(phase: str, steps: pd.DataFrame) -> PhaseError:
    figures: list[Any] = []
    for window in (steps["in_window"], ~steps["in_window"]):
        chosen = steps[window & (steps[f"{phase}_measured_s"] > 0)]
        if not len(chosen):
            figures += [0, None, None]
            continue
        measured, simulated = chosen[f"{phase}_measured_s"], chosen[f"{phase}_simulated_s"]
        figures += [
            len(chosen),
            float((simulated / measured - 1).abs().mean()),
            float(simulated.sum() / measured.sum() - 1),
        ]
    later = ~steps["in_window"] if figures[3] else steps["in_window"]
    ends = (
        float(steps.loc[later, f"{phase}_{end}_s"].mean()) for end in ("simulated", "low", "high")
    )
    return PhaseError(phase, *figures, *ends)


def _assumed(
    usable: pd.DataFrame,
    scenario: Scenario,
    trace: Trace,
    recorded: Trace | None,
    batch: int | None,
    group: int,
) -> list[str]:
    cluster, training = scenario.cluster, scenario.training
    turns = usable["num_turns/mean"].mean() if "num_turns/mean" in usable else 0
    logged = (
        f" (the log counts {turns:.1f} messages a response): what they took is in the corrections"
    )
    assumed = [  # whether it is assumed, what
        (
            True,
            f"{scenario.model} on {cluster.gpus} × {cluster.gpu}, tp {cluster.tp}, under {scenario.system.name}: stated at the "
            "start, no log says it",
        ),
        (
            recorded is None,
            "lengths are made from each step's mean, min, max and share at the cap (logged); the shape between is a truncated "
            "lognormal, and siblings are as unlike as strangers: without --trace, their likeness is unknown",
        ),
        (
            batch is not None,
            f"lengths are of kept groups: {batch} responses are generated a step, all others as long as the kept ones"
            + "; log-probs are of all, as the log counts their tokens" * (BATCH_TOKENS in usable),
        ),
        (
            recorded is None and group == 1,
            "each response has a prompt of its own: --group N gives the responses of a prompt",
        ),
        (
            not {"turn_tokens", "environment_s"} & set(trace.table.column_names),
            f"no tool calls and turns are simulated{logged if turns > 2 else ''}",
        ),
        (
            training.reference_model,
            f"the reference's log-probs are of {training.reference_model}, at the policy's efficiency",
        ),
        (
            training.extra_log_probs and not training.reference_model,
            f"the reference's log-probs cost {training.extra_log_probs} of the policy's passes (rounded from the window); "
            "name its model with training.reference_model",
        ),
        (True, "corrections found under the run's own system hold under another one"),
    ]
    return [what for is_assumed, what in assumed if is_assumed]


def scenario_yaml(calibration: Calibration, source: str) -> str:
    """Return the run as a scenario file for `simrl compare`. Its trace lies beside it."""
    data = calibration.scenario.model_dump(
        mode="json", exclude_defaults=True, exclude={"system", "variant", "file"}
    )
    data["workload"] = {"trace": "run.parquet"}
    path = data.get("profile", {}).get("path")
    if path and Path(path).parent == PROFILES.resolve():  # of other layouts and machines, too
        data["profile"]["path"] = SHIPPED
    system = calibration.scenario.system
    data["calibration"] = _left_open(calibration, source).model_dump(
        mode="json", exclude_defaults=True
    )
    for (
        key
    ) in calibration.keys.values():  # also one that is a default, which a preset would replace
        data = put(data, key, get(calibration.scenario.model_dump(), key))
    data["systems"] = [{"name": system.name, **system.parameters}]
    first, last = calibration.window
    lines = [f"# Calibrated on steps {first}-{last} of {source}."]
    for c in calibration.corrections:
        known = "at the bound of its range" if c.error is None else f"± {c.error:.2g}"
        lines.append(
            f"#   {c.name} = {c.value:.4g}{' ' + c.unit if c.unit else ''} ({known}): {c.meaning}; {c.key}"
        )
    lines += [
        f"# {e.phase}: {e.mape_out:.1%} mean absolute error over the {e.steps_out} other steps"
        for e in calibration.errors
        if e.mape_out is not None
    ]
    lines += [f"# Note: {text}." for text in calibration.notes]
    lines += [f"# Assumed: {text}." for text in calibration.assumed]
    return "\n".join(lines) + "\n\n" + yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _left_open(calibration: Calibration, source: str) -> CalibrationConfig:
    """Return what the log leaves open, for the commands that use the scenario."""
    used, *others = (fit.model_dump() for fit in (calibration.scenario, *calibration.fits))
    fits = [{key: get(fit, key) for key in calibration.keys.values()} for fit in (used, *others)]
    return CalibrationConfig.model_validate(
        {
            "log": source,
            "steps": "{}-{}".format(*calibration.window),
            "at": {key: get(used, key) for key in FITTED_AT},
            "lacks": calibration.lacks,
            "warnings": {
                keys: "; ".join(text for about, text in calibration.doubts if about == keys)
                for keys, _ in calibration.doubts
            },
            "fits": [fit for i, fit in enumerate(fits) if fit not in fits[:i]],
        }
    )


def presets_of(calibration: Calibration, log: str) -> dict[str, Preset]:
    """Return the run's framework and engine as presets: the seconds that were fitted, in the range
    of fits that do as well, and the other constants of the presets with which it was started.
    Efficiencies are the model's and the GPU's, and stay out."""
    scenario, (first, last) = calibration.scenario, calibration.window
    presets = {"training": scenario.framework, "profile": scenario.engine.preset}
    keys = {"training": "framework", "profile": "engine.preset"}
    constants = {
        section: dict(named(of, keys[section]).constants) if of else {}
        for section, of in presets.items()
    }
    source = f"fitted to steps {first}-{last} of {log}: {scenario.model} on {scenario.cluster.gpus} {scenario.cluster.gpu}"
    constants["training"] |= dict.fromkeys(
        ("switch_s", "switch_transfer_s"),
        Constant(value=0.0, kind="measured", source=f"in the phases of {log}"),
    )
    for c in calibration.corrections:
        section, _, key = c.key.partition(".")
        if key.endswith("_s"):
            ends = [c.value - (c.error or 0.0), c.value + (c.error or 0.0)]
            ends += [getattr(getattr(corrected, section), key) for corrected in calibration.fits]
            low, high = max(min(ends), c.low), min(max(ends), c.high)
            constants[section][key] = Constant(
                value=c.value,
                low=low,
                high=high,
                kind="open" if c.is_expected else "measured",
                source=f"expected, and hardly moved by what was {source}"
                if c.is_expected
                else source,
            )
    name, engine = scenario.name, f"{scenario.name}-engine"
    return {
        name: Preset(
            name=name,
            about=f"the framework of {log}",
            engine=engine,
            constants=constants["training"],
        ),
        engine: Preset(name=engine, about=f"the engine of {log}", constants=constants["profile"]),
    }


def launched(
    run_log: Path, launch: Path | None, settings: Sequence[str], trace: Path, steps: int
) -> Scenario:
    """Return the run as it was started, on a trace of its lengths."""
    fixed = [
        f"name={run_name(run_log)}",
        f"steps={steps}",
        "warmup_steps=0",
        f"workload.trace={json.dumps(str(trace.resolve()))}",
        "workload.synthetic=null",
    ]
    with temporary_folder() as temporary:
        file = launch
        if file is None:
            file = temporary / "launch.yaml"
            file.write_text(
                "name: run\nprofile: {roofline: {}}\nsystems: [verl_colocated]\n", encoding="utf-8"
            )
        try:
            scenarios = load_scenarios(file, [*settings, *fixed], parameters_of=parameters_of)
            if launch is None:
                scenarios = [_with_shipped_profile(scenario) for scenario in scenarios]
        except InputError as error:
            if launch is not None:
                raise
            raise InputError(
                f"{str(error).replace(str(file), str(run_log))}; say how the run was started: {NEEDS}, or --launch FILE"
            ) from error
    if len(scenarios) > 1:
        raise InputError(
            f"{launch or run_log}: {len(scenarios)} systems; name the one that the run used, as systems=[verl_colocated]"
        )
    return (
        scenarios[0]
        if launch is not None
        else scenarios[0].model_copy(update={"file": str(run_log)})
    )


def _with_shipped_profile(scenario: Scenario) -> Scenario:
    """Return the scenario with the shipped step times of its model and GPU, if there are any and
    none were given."""
    if scenario.profile.roofline != RooflineConfig():
        return scenario
    with suppress(InputError):  # an unknown model is said where the run is prepared
        path = shipped_profile(
            model_shape(scenario.model).name, scenario.cluster.gpu, scenario.cluster.tp
        )
        if path is not None:
            return scenario.with_fields("profile", path=str(path.resolve()), roofline=None)
    return scenario


def run_name(run_log: Path) -> str:
    """Return a run's name by its log."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", run_log.stem).strip("-._") or "run"
