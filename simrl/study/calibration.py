"""A real run's metrics log as a scenario: calibrated on some of its steps, and other systems to compare it with.

Invariants: the fit sees the rows of its window alone, so the error on the other rows is a prediction error. The folder of a
calibration has every file that its scenario names, and appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from simrl.errors import InputError
from simrl.files import write_whole_folder
from simrl.profile.hardware import model_shape
from simrl.profile.shipped import shipped_profile
from simrl.result.result import Result
from simrl.scenario.load import load_scenarios
from simrl.scenario.model import RooflineConfig, Scenario
from simrl.simulate.prepare import Prepared, prepare
from simrl.simulate.run import simulate
from simrl.study.corrections import (
    FEWEST_STEPS,
    GENERATION,
    LOG_PROB,
    REFERENCE,
    UPDATE,
    Correction,
    Floats,
    fit,
    rollout_s,
    seconds,
)
from simrl.study.store import write_json
from simrl.systems.recipes import make_system, parameters_of
from simrl.trace.importers.logs import read_metrics
from simrl.trace.importers.verl import NEEDED, trace_from_verl_metrics
from simrl.trace.trace import Trace, read_trace, write_trace

T = TypeVar("T")
STEP = "timing_s/step"
PHASES = ("generation", "log_prob", "update", "step")
MANIFEST = "files.txt"
CALIBRATED = "calibrated.yaml"
SAME_LENGTHS = (
    0.05  # relative distance of a step's mean length in a trace from the logged one, up to which they are one run
)
NEEDS = "model=qwen2.5-3b cluster.gpu=a100 cluster.gpus=4 cluster.tp=1"


@dataclass(frozen=True)
class PhaseError:
    """Relative errors of simulated seconds against logged ones, step by step. None where there are no such steps."""

    phase: str
    steps_in: int
    mape_in: float | None
    bias_in: float | None
    steps_out: int
    mape_out: float | None
    bias_out: float | None


@dataclass(frozen=True)
class Calibration:
    """The scenario of the run with its corrections, and its prediction of every step of the log. `steps` has a row a step:
    `step`, `in_window`, and of each phase `_measured_s` and `_simulated_s`."""

    scenario: Scenario
    window: tuple[int, int]
    corrections: tuple[Correction, ...]
    errors: tuple[PhaseError, ...]
    steps: pd.DataFrame
    assumed: tuple[str, ...]

    @property
    def warnings(self) -> list[str]:
        """Return what is doubtful about the corrections."""
        return [c.warning for c in self.corrections if c.warning]

    def as_json(self) -> dict[str, Any]:
        """Return the data of `--json`; the keys are stable."""
        return {
            "window": list(self.window),
            "corrections": [asdict(c) for c in self.corrections],
            "errors": [asdict(e) for e in self.errors],
            "warnings": list(self.warnings),
            "assumed": list(self.assumed),
            "steps": self.steps.to_dict("list"),
        }


def calibrated(
    run_log: Path,
    settings: Sequence[str],
    launch: Path | None,
    window: tuple[int, int],
    group: int,
    samples: int | None,
    prompt_tokens: float | None,
    cap_tokens: int | None,
    log_format: str | None,
    trace: Path | None,
    folder: Path,
) -> Calibration:
    """Return the calibration of a log on the steps of `window`, with its files in `folder`: scenario, lengths, errors.

    `settings` and `launch`, a scenario file, say how the run was started. Raise `InputError` as `calibrate` and
    `simrl.trace.importers.logs.read_metrics` do.
    """
    recorded = read_trace(trace) if trace is not None else None
    metrics = read_metrics(run_log, log_format, samples, prompt_tokens, lengths=recorded is None)
    start = partial(launched, run_log, launch, settings)
    with write_whole_folder(folder, MANIFEST) as temporary:
        found = calibrate(metrics, start, window, group, temporary, cap_tokens, recorded)
        (temporary / CALIBRATED).write_text(scenario_yaml(found, run_log.name), encoding="utf-8")
        write_json(temporary / "calibration.json", found.as_json())
    return found


def calibrate(
    metrics: pd.DataFrame,
    launch: Callable[[Path, int], Scenario],
    window: tuple[int, int],
    group: int,
    folder: Path,
    cap_tokens: int | None = None,
    recorded: Trace | None = None,
) -> Calibration:
    """Fit the steps from `window[0]` to `window[1]` (both included), simulate all steps, and write their trace to `folder /
    "run.parquet"`.

    `metrics` comes from `read_metrics`. `launch` makes the scenario of the run as it was started, from the path of a trace
    and a number of steps. Lengths are `recorded`'s if given (steps that it lacks are left out), else made from each step's
    mean, min, max and share at the cap by `trace_from_verl_metrics`, in groups of `group`.

    Raise `InputError` for a log without the fitted metrics, a window of fewer than 5 usable steps, and systems that do not
    generate and train in turns.
    """
    usable = _usable(metrics, recorded)
    first, last = window
    fitted = usable[usable["step"].between(first, last)]
    if len(fitted) < FEWEST_STEPS:
        logged = f"{usable['step'].min()}-{usable['step'].max()}"
        raise InputError(
            f"{_source(metrics)}: {len(fitted)} usable steps in the window {first}-{last} (it logs {logged}), "
            f"{FEWEST_STEPS} are needed; choose another --window"
        )
    with tempfile.TemporaryDirectory(prefix="simrl-calibrate-") as temporary:
        path = Path(temporary) / "window.parquet"
        window_trace = _trace(fitted, group, cap_tokens, recorded)
        write_trace(window_trace, path)
        scenario, corrections = fit(fitted, window_trace, _started(launch(path, len(fitted))))
    trace = _trace(usable, group, cap_tokens, recorded)
    write_trace(trace, folder / "run.parquet")
    whole = launch(folder / "run.parquet", len(usable))
    whole = whole.model_copy(update={"profile": scenario.profile, "training": scenario.training})
    steps = _beside(usable, window, _of_run(simulate, whole), whole)
    errors = tuple(_error(phase, steps) for phase in PHASES if f"{phase}_measured_s" in steps)
    assumed = tuple(_assumed(usable, whole, trace, recorded))
    return Calibration(whole, window, corrections, errors, steps, assumed)


def _usable(metrics: pd.DataFrame, recorded: Trace | None) -> pd.DataFrame:
    """Return the steps that have lengths and a generation time."""
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
        _require_own_lengths(usable, recorded, _source(metrics))
    if usable.empty:
        raise InputError(
            f"{_source(metrics)}: none of its {len(metrics)} steps has {GENERATION} and lengths; is the log cut off?"
        )
    return usable.sort_values("step").reset_index(drop=True)


def _require_own_lengths(usable: pd.DataFrame, recorded: Trace, source: str) -> None:
    """Raise `InputError` for the trace of another run. The mean length of each step is compared with the log, with and
    without the tokens of tools; if the lengths differ, also one step earlier and later."""
    logged = (
        usable.set_index("step")["response_length/mean"].dropna() if "response_length/mean" in usable else pd.Series()
    )
    written = recorded.column("response_tokens").astype(np.float64)
    with_tools = written + recorded.observation_tokens()
    steps = recorded.column("step")

    def apart(later: int) -> float:
        """Return the median distance from the logged means if step k of the trace is step k + `later` of the log."""
        found = []
        for tokens in (written, with_tools):
            means = pd.Series(tokens).groupby(steps + later).mean()
            both = means.index.intersection(logged.index)
            found.append(
                float((means[both] / logged[both] - 1).abs().median()) if len(both) >= FEWEST_STEPS else np.inf
            )
        return min(found)

    here = apart(0)
    if not np.isfinite(here) or here <= SAME_LENGTHS:
        return
    shifted = min((1, -1), key=apart)
    remedy = "give the trace of this run, or leave it out"
    if apart(shifted) <= SAME_LENGTHS:
        remedy = f"its step k is the log's step k{shifted:+d}: number its steps as the log does"
    raise InputError(
        f"{source}: the responses of trace {recorded.metadata.name} are {here:.0%} longer or shorter than the logged ones, at "
        f"the median step; {remedy}"
    )


def _source(metrics: pd.DataFrame) -> str:
    return str(metrics.attrs.get("source", "the log"))


def _trace(rows: pd.DataFrame, group: int, cap_tokens: int | None, recorded: Trace | None) -> Trace:
    """Return the lengths of these steps, made only from these rows."""
    if recorded is not None:
        kept = pc.is_in(recorded.table["step"], pa.array(rows["step"].to_numpy(), pa.int32()))
        return Trace(recorded.table.filter(kept), recorded.metadata)
    cap = int(rows["response_length/max"].max()) if cap_tokens is None else cap_tokens
    return trace_from_verl_metrics(rows, group, 0, cap_tokens=cap, name="run")


def _started(scenario: Scenario) -> Prepared:
    """Return the run as it was started. Raises `InputError` for a system that does not generate and train in turns."""
    prepared = _of_run(prepare, scenario.model_copy(update={"warmup_steps": 0}))
    if prepared.system.off_policyness != 0 or not prepared.colocated:
        raise InputError(
            f"system {prepared.system.name}: a run is calibrated if it generates and trains in turns; name such a one, as "
            "systems=[verl_colocated]"
        )
    return prepared


def _of_run(call: Callable[[Scenario], T], scenario: Scenario) -> T:
    """Call it; an `InputError` names the run."""
    try:
        return call(scenario)
    except InputError as error:
        raise InputError(f"{scenario.file}: {error}") from error


def phase_s(result: Result, kind: str) -> Floats:
    """Return the seconds of a kind of span in each update, on the trainer's first lane."""
    spans = result.spans.select(["lane", "kind", "started_s", "ended_s", "policy_version"]).to_pandas()
    spans = spans[spans["kind"] == kind]
    spans = spans[spans["lane"] == spans["lane"].iloc[0]] if len(spans) else spans
    seconds = (spans["ended_s"] - spans["started_s"]).groupby(spans["policy_version"]).sum()
    return np.asarray(seconds.reindex(range(result.steps.num_rows), fill_value=0.0), dtype=np.float64)


def _beside(usable: pd.DataFrame, window: tuple[int, int], result: Result, scenario: Scenario) -> pd.DataFrame:
    """Return logged and simulated seconds of every step."""
    finished_s = result.steps.column("finished_s").to_numpy()
    steps = pd.DataFrame({"step": usable["step"], "in_window": usable["step"].between(*window)})
    log_probs = seconds(usable, LOG_PROB)
    if scenario.training.extra_log_probs and REFERENCE in usable:
        log_probs = log_probs + seconds(usable, REFERENCE)
    measured_s = seconds(usable, GENERATION), log_probs, seconds(usable, UPDATE), seconds(usable, STEP)
    simulated_s = (
        rollout_s(result)[0] + float(scenario.training.load_s or 0.0),
        phase_s(result, "log_prob"),
        phase_s(result, "train"),
        np.diff(finished_s, prepend=0.0),
    )
    for phase, measured, simulated in zip(PHASES, measured_s, simulated_s, strict=True):
        if np.isfinite(measured).any():
            steps[f"{phase}_measured_s"], steps[f"{phase}_simulated_s"] = measured, simulated
    return steps


def _error(phase: str, steps: pd.DataFrame) -> PhaseError:
    found: list[Any] = []
    for window in (steps["in_window"], ~steps["in_window"]):
        chosen = steps[window & (steps[f"{phase}_measured_s"] > 0)]
        measured, simulated = chosen[f"{phase}_measured_s"], chosen[f"{phase}_simulated_s"]
        apart, total = (simulated / measured - 1).abs().mean(), simulated.sum() / measured.sum() - 1
        found += [len(chosen), float(apart), total] if len(chosen) else [0, None, None]
    return PhaseError(phase, *found)


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
        logged = f" (the log counts {turns:.1f} messages a response): what they took is in the corrections"
        said.append(f"no tool calls and turns are simulated{logged if turns > 2 else ''}")
    if training.extra_log_probs:
        said.append(
            f"the reference's log-probs are {training.extra_log_probs} passes of the policy's cost (rounded from the window)"
        )
    said.append("corrections found under the run's own system hold under another one")
    return said


def scenario_yaml(calibration: Calibration, source: str) -> str:
    """Return the run as a scenario file for `simrl compare`. Its trace lies beside it."""
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
    lines += [f"# Warning: {text}." for text in calibration.warnings]
    lines += [f"# Assumed: {text}." for text in calibration.assumed]
    return "\n".join(lines) + "\n\n" + yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def launched(run_log: Path, launch: Path | None, settings: Sequence[str], trace: Path, steps: int) -> Scenario:
    """Return the run as it was started, on a trace of its lengths."""
    fixed = [
        f"name={run_name(run_log)}",
        f"steps={steps}",
        "warmup_steps=0",
        f"workload.trace={json.dumps(str(trace.resolve()))}",
        "workload.synthetic=null",
    ]
    with tempfile.TemporaryDirectory(prefix="simrl-launch-") as temporary:
        file = launch
        if file is None:
            file = Path(temporary) / "launch.yaml"
            file.write_text("name: run\nprofile: {roofline: {}}\nsystems: [verl_colocated]\n", encoding="utf-8")
        try:
            found = load_scenarios(file, [*settings, *fixed], parameters_of=parameters_of)
            if launch is None:
                found = [_with_shipped_profile(scenario) for scenario in found]
        except InputError as error:
            if launch is not None:
                raise
            raise InputError(
                f"{str(error).replace(str(file), str(run_log))}; say how the run was started: {NEEDS}, or --launch FILE"
            ) from error
    if len(found) > 1:
        raise InputError(
            f"{launch or run_log}: {len(found)} systems; name the one that the run used, as systems=[verl_colocated]"
        )
    return found[0] if launch is not None else found[0].model_copy(update={"file": str(run_log)})


def _with_shipped_profile(scenario: Scenario) -> Scenario:
    """Return the scenario with the shipped step times of its model and GPU, if there are any and none were given."""
    if scenario.profile.roofline != RooflineConfig():
        return scenario
    with suppress(InputError):  # an unknown model is said where the run is prepared
        path = shipped_profile(model_shape(scenario.model).name, scenario.cluster.gpu, scenario.cluster.tp)
        if path is not None:
            return scenario.with_fields("profile", path=str(path.resolve()), roofline=None)
    return scenario


def alternatives(file: Path, systems: Sequence[Any]) -> tuple[list[Scenario], list[str]]:
    """Return the run's own scenario and one of each system (a name, or a dictionary that has one), with remarks on them.

    Where a system cannot share the GPUs as the run did, it gets smaller parts, and the run's own system is added in these
    parts too, which separates the effect of the parts from the effect of the system.
    """
    own = load_scenarios(file)[0]
    found, said = [own], []
    for system in systems:
        other = load_scenarios(file, [f"systems={json.dumps([system])}"])[0]
        try:
            prepare(other)
        except InputError as error:
            other = _in_smaller_parts(other, error)
            same = other.model_copy(update={"system": own.system})
            found += [same] if same not in found else []
            said.append(
                f"{other.system.name} cannot share {own.cluster.gpus} GPUs as the run had them (tp {own.cluster.tp}, "
                f"{own.training.sequence_parallel} a sequence in training): simulated with {other.variant}, as is the "
                "run's own system beside it. The corrections are of the run as it was: read it as an extrapolation."
            )
        found.append(other)
    return found, said


def check_system(system: Any) -> None:
    """Raise `InputError` for an entry that is no system, before minutes go into a calibration."""
    if isinstance(system, str):
        make_system(system, {})
    elif isinstance(system, dict) and isinstance(system.get("name"), str):
        make_system(system["name"], {str(key): value for key, value in system.items() if key != "name"})
    else:
        raise InputError(f"system {system}: give a name, or {{name: areal, eta: 4}}")


def _in_smaller_parts(scenario: Scenario, error: InputError) -> Scenario:
    """Return the first possible scenario when tp, and if need be the number of GPUs that share a sequence in training, are
    halved repeatedly; a GPU trains as many tokens at a time as before."""
    training, own_tp, own_shared = scenario.training, scenario.cluster.tp, scenario.training.sequence_parallel
    for tp, shared in product(_halved(own_tp), _halved(own_shared)):
        tokens = training.tokens_per_microbatch * shared // own_shared
        changed = [f"cluster.tp={tp}"] if tp != own_tp else []
        changed += [f"training.sequence_parallel={shared}"] if shared != own_shared else []
        smaller = scenario.model_copy(update={"variant": ", ".join(changed)}).with_fields("cluster", tp=tp)
        smaller = smaller.with_fields("training", sequence_parallel=shared, tokens_per_microbatch=tokens)
        with suppress(InputError):
            prepare(smaller)
            return smaller
    raise error


def _halved(number: int) -> Iterator[int]:
    """Yield a number, its half, the half of that … while they are whole."""
    yield number
    if number % 2 == 0:
        yield from _halved(number // 2)


def run_name(run_log: Path) -> str:
    """Return a run's name by its log."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", run_log.stem).strip("-._") or "run"
